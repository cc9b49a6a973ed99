"""Where a moved value is held: by its saves outside of recomputed calls, and by such calls as an input or output.

A value leaves the device only if whoever holds it lets go, so a plan names each of these places.
"""

from __future__ import annotations

from collections.abc import Mapping

from lowtide.graph import Save, StepGraph
from lowtide.plans import Move
from lowtide.solvers.chain import Regions

# Bytes: smaller copies cost more in launches than they free. In a step with large values even more so.
_SMALLEST, _SMALLEST_AMONG_LARGE, _LARGE = 1 << 16, 1 << 20, 1 << 28
# Ops that save a tensor before they fill it: what is copied out at the save is not what the backward reads.
_FILL_LATER = frozenset({"aten.rrelu_with_noise.default", "aten.rrelu_with_noise_.default"})


class Places:
    """The places in which the values of a graph are held."""

    def __init__(self, graph: StepGraph) -> None:
        self._graph = graph
        is_large = any(value.bytes >= _LARGE for value in graph.values if value.kind == "activation")
        self.smallest_moved = _SMALLEST_AMONG_LARGE if is_large else _SMALLEST
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
        saves = self._saves.get(value, ())
        if any(graph.save_places[save][0] < 0 or self._is_filled_later(graph.saves[save]) for save in saves):
            return False
        kinds = {graph.values[given].kind for given in graph.ops[facts.born].inputs}
        return not kinds or not kinds <= {"parameter", "buffer"}

    def _is_filled_later(self, save: Save) -> bool:
        return self._graph.ops[save.made].name in _FILL_LATER

    def everywhere(self, ways: Mapping[int, tuple[str, str]], regions: Regions) -> tuple[Move, ...]:
        """Moves of values, each by its way (where to, and the codec), that name every place in which one is held."""
        graph = self._graph
        owner = graph.innermost(regions)
        inputs: dict[int, list[tuple[str, int, int]]] = {}
        for call in sorted(regions):
            if owner[graph.calls[call].parent] < 0:
                for number, value in enumerate(graph.calls[call].inputs):
                    inputs.setdefault(value, []).append(graph.input_place(call, number))
        outputs = held_outputs(graph, regions)
        found: list[Move] = []
        for value, way in ways.items():
            saves = self._saves.get(value, ())
            places = [graph.save_places[save] for save in saves if owner[graph.saves[save].call] < 0]
            named = [(graph.calls[place].path, graph.nths[place], number) for place, number in places]
            for path, nth, number in [*named, *inputs.get(value, ())]:
                found.append(Move(path, nth, number, *way))
            if value in outputs:
                place, op, _ = outputs[value]
                found.append(Move(*graph.names_of(place)[0], 0, *way, op=op))
        return tuple(found)


def held_outputs(graph: StepGraph, regions: Regions) -> dict[int, tuple[int, int, bool]]:
    """Outputs of single ops that regions hold: the region, the op counted from its first, and whether it can move.

    Only the first output of an op can; the others are on the device whatever else becomes of them.
    """
    return {
        value: (call, op, number == 0)
        for call, ops in regions.items()
        for op in ops
        for number, value in enumerate(graph.ops[graph.calls[call].first + op].outputs)
    }
