"""Plans between two neighbours of a chain: a call's regions, with more outputs held in them than they need."""

from __future__ import annotations

from lowtide.graph import StepGraph
from lowtide.solvers.pricing import Pricing

Regions = dict[int, tuple[int, ...]]

_SHARES = (0.75, 0.5, 0.25)  # of the bytes that a call gives up, held on to
_MOST_OPS = 3_000  # beyond it there are layers enough to choose from


class Easing:
    """Holds on to outputs in regions: those first that take longest to make for their size."""

    def __init__(self, graph: StepGraph, pricing: Pricing) -> None:
        self._graph, self._pricing = graph, pricing
        self.num_between = len(_SHARES) if len(graph.ops) <= _MOST_OPS else 0

    def eased(self, regions: Regions, freed_bytes: float, number: int) -> Regions:
        """`regions` with the `number`-th share of `freed_bytes` in outputs held besides those that are."""
        room = freed_bytes * _SHARES[number]
        sizes: dict[tuple[int, int], int] = {}
        for call, kept in regions.items():
            first = self._graph.calls[call].first
            for op in self._pricing.keepable_in(call):
                size = sum(self._graph.values[value].bytes for value in self._graph.ops[op].outputs)
                if size and op - first not in kept:
                    sizes[call, op] = size
        eased = {call: set(kept) for call, kept in regions.items()}
        for call, op in sorted(sizes, key=lambda key: (-self._graph.ops[key[1]].seconds / sizes[key], key)):
            if sizes[call, op] <= room:
                room -= sizes[call, op]
                eased[call].add(op - self._graph.calls[call].first)
        return {call: tuple(sorted(kept)) for call, kept in eased.items()}
