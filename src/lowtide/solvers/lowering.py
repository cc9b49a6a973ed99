"""The least peak that recomputing can reach: a best-first search over sets of regions.

The other generators look for plans that are fast, and their smallest plan need not be the smallest there is. On small
models, where the inputs and random states that a region holds weigh as much as what it drops, a single checkpoint on
the right call often peaks lower than a checkpoint on each of them. This search begins with the smallest plans of the
other generators and always goes on from the set with the least peak found so far, to the sets that differ from it in
one call. At the end it tries to retain the outputs of single ops where that lowers the peak further.

Cost: one simulation per set, `_MOST_VISITED_OPS` simulated ops in all (about a second). For larger graphs that is less
than one round of neighbours; they have layers enough that the chains' ends are close to the least peak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush

import numpy as np

from lowtide.eagerlives import EagerLives
from lowtide.graph import StepGraph
from lowtide.solvers.chain import Regions
from lowtide.solvers.nesting import Nesting

_MOST_VISITED_OPS = 600_000  # ops of all simulated steps
_MOST_VISITS = 3_000
_PATIENCE = 12  # sets whose neighbours are visited although no lower peak is found

_Key = tuple[int, ...]
_Score = tuple[int, int, float]  # peak bytes, events at that peak, seconds added


class Lowering:
    """Looks for the regions with the least peak. `may_keep` says whose op's outputs a region may retain."""

    def __init__(self, graph: StepGraph, nesting: Nesting, may_keep: np.ndarray) -> None:
        self._graph, self._nesting, self._may_keep = graph, nesting, may_keep
        self._num_left = min(_MOST_VISITS, _MOST_VISITED_OPS // max(len(graph.ops), 1))
        self._scores: dict[tuple[object, ...], _Score] = {}

    def lowest(self, seeds: Iterable[Regions], is_late: Callable[[], bool]) -> Regions:
        """The regions with the least peak among `seeds`, which are not changed, and those found from them."""
        queue: list[tuple[_Score, _Key]] = []
        best: tuple[_Score, Regions] | None = None

        def visit(regions: Regions) -> None:
            nonlocal best
            if tuple(regions.items()) in self._scores:
                return
            score = self._score(regions)
            if best is None or score < best[0]:
                best = score, regions
            heappush(queue, (score, tuple(regions)))

        for seed in seeds:
            visit(seed)
            visit(self._nesting.tidied(dict.fromkeys(seed, ())))
        visit({})
        num_vain, expanded = 0, set[_Key]()
        while queue and num_vain < _PATIENCE and self._num_left > 0 and not is_late():
            _, key = heappop(queue)
            if key in expanded:
                continue
            expanded.add(key)
            before = best
            for calls in self._nesting.neighbours(key, is_thorough=True):
                if self._num_left > 0:
                    visit(self._nesting.tidied(dict.fromkeys(calls, ())))
            num_vain = num_vain + 1 if best is before else 0
        assert best is not None
        return self._retaining(*best, is_late)

    def _retaining(self, score: _Score, regions: Regions, is_late: Callable[[], bool]) -> Regions:
        """`regions` with the outputs retained that lower their peak: such as one that is held elsewhere anyway."""
        is_lower = True
        while is_lower and not is_late():
            is_lower = False
            for call, op in self._retainable(regions):
                if self._num_left <= 0:
                    break
                more = {**regions, call: tuple(sorted({*regions[call], op}))}
                found = self._score(more)
                if found[0] < score[0]:
                    score, regions, is_lower = found, more, True
        return regions

    def _retainable(self, regions: Regions) -> list[tuple[int, int]]:
        """Ops that make what lives at the peak, each with its region: those without others around or inside."""
        played = EagerLives(self._graph, regions)
        peak, outermost = int(played.total_bytes.argmax()), self._graph.outermost(regions)
        ops = {self._graph.values[value].born for value in played.live_at(peak)} | {int(played.ops[peak])}
        found: list[tuple[int, int]] = []
        for op in sorted(op for op in ops if 0 <= op < self._graph.num_forward and self._may_keep[op]):
            call = outermost[self._graph.ops[op].call]
            number = op - self._graph.calls[call].first
            if call >= 0 and number not in regions[call] and not self._graph.arrays.has_inside(call, regions):
                found.append((call, number))
        return found

    def _score(self, regions: Regions) -> _Score:
        key = tuple(regions.items())
        if key not in self._scores:
            self._num_left -= 1
            played = EagerLives(self._graph, regions)
            peak = played.peak_bytes
            self._scores[key] = peak, int(np.count_nonzero(played.total_bytes == peak)), played.extra_s
        return self._scores[key]
