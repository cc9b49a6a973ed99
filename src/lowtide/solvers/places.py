"""Where a moved value is held: by its saves outside of recomputed calls, and by such calls as one of their inputs.

A value leaves the device only if whoever holds it lets go, so a plan names each of these places.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import replace

from lowtide.graph import StepGraph
from lowtide.plans import Move
from lowtide.solvers.chain import Regions


class Places:
    """The places in which the values of a graph are held."""

    def __init__(self, graph: StepGraph) -> None:
        self._graph = graph
        self._saves: dict[int, list[int]] = {}
        for index, save in enumerate(graph.saves):
            self._saves.setdefault(save.value, []).append(index)

    def can_move(self, value: int) -> bool:
        """Whether the engine can move a value wherever it is saved: an activation, and only in modules of the model.

        What is made of weights alone, casts of them say, the engine takes for weights and leaves where it is.
        """
        graph, facts = self._graph, self._graph.values[value]
        if facts.kind != "activation" or facts.born < 0:
            return False
        if any(graph.save_places[save][0] < 0 for save in self._saves.get(value, ())):
            return False
        kinds = {graph.values[given].kind for given in graph.ops[facts.born].inputs}
        return not kinds or not kinds <= {"parameter", "buffer"}

    def everywhere(self, moves: Iterable[Move], regions: Regions) -> tuple[Move, ...]:
        """Moves that each name a save of a value, as moves that name every place in which that value is held."""
        graph = self._graph
        owner = graph.innermost(regions)
        inputs: dict[int, list[tuple[int, int]]] = {}
        for call in sorted(regions):
            if owner[graph.calls[call].parent] < 0:
                for number, value in enumerate(graph.calls[call].inputs):
                    inputs.setdefault(value, []).append((call, number))
        found: list[Move] = []
        for move in moves:
            call = graph.calls_by_path[move.path][move.nth]
            value = graph.saves[graph.saves_by_place[call, move.save]].value
            saves = [graph.save_places[save] for save in self._saves[value] if owner[graph.saves[save].call] < 0]
            for place, number in [*saves, *inputs.get(value, ())]:
                found.append(replace(move, path=graph.calls[place].path, nth=graph.nths[place], save=number))
        return tuple(found)


def kept_values(graph: StepGraph, regions: Regions) -> Container[int]:
    """Outputs of single ops that regions hold: moved elsewhere, they would be on the device all the same."""
    return {
        value
        for call, ops in regions.items()
        for op in ops
        for value in graph.ops[graph.calls[call].first + op].outputs
    }
