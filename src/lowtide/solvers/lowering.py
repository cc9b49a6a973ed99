"""The least peak that recomputing can reach: a best-first search over sets of regions.

The other generators look for plans that are fast, and their smallest plan need not be the smallest there is. On small
models, where the inputs and random states that a region holds weigh as much as what it drops, a single checkpoint on
the right call often peaks lower than a checkpoint on each of them. This search begins with the smallest plans of the
other generators and with single regions, and always goes on from the set with the least peak that it has not gone on
from, to the sets that differ from it in one call. At the end it tries to retain outputs of single ops.

Cost: one simulation per set, `_MOST_VISITED_OPS` simulated ops in all (about a second). For larger graphs that is less
than one round of neighbours; they have layers enough that the chains' ends are close to the least peak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush, nsmallest

import numpy as np

from lowtide.eagerlives import EagerLives
from lowtide.graph import StepGraph
from lowtide.solvers.chain import Regions
from lowtide.solvers.found import Found
from lowtide.solvers.nesting import Nesting

_MOST_VISITED_OPS = 600_000  # ops of all simulated steps
_MOST_VISITS = 1_500
_PATIENCE = 16  # sets whose neighbours are visited although no lower peak is found
_NUM_SEEDS = 8  # plans that are known, to begin with
_NUM_SINGLES = 6  # sets of one region that are gone on from whatever their peak
_NUM_RETAINING = 6  # sets with small peaks for which retaining outputs is tried

_Key = tuple[int, ...]
_Score = tuple[int, bool, int, float]  # peak bytes, whether outputs are retained, events at that peak, seconds added


class Lowering:
    """Looks for the regions with the least peak. `may_keep` says whose op's outputs a region may retain."""

    def __init__(self, graph: StepGraph, nesting: Nesting, may_keep: np.ndarray) -> None:
        self._graph, self._nesting, self._may_keep = graph, nesting, may_keep
        self._num_left = min(_MOST_VISITS, _MOST_VISITED_OPS // max(len(graph.ops), 1))
        self._scores: dict[tuple[tuple[int, tuple[int, ...]], ...], _Score] = {}  # by regions
        self._least: _Score | None = None
        self._queue: list[tuple[_Score, _Key]] = []
        self._expanded: set[_Key] = set()

    def lowest(self, known: Iterable[Found], is_late: Callable[[], bool]) -> Regions:
        """The regions with the least peak among the smallest of the plans `known` and those found from them."""
        for seed in nsmallest(_NUM_SEEDS, known, key=lambda found: (found.peak_bytes, found.extra_s)):
            self._visit(seed.regions)
            self._visit(self._nesting.tidied(dict.fromkeys(seed.regions, ())))
        self._visit({})
        self._expand({})
        singles = sorted((score, calls) for score, calls in self._queue if len(calls) == 1)
        for _, calls in singles[:_NUM_SINGLES]:
            self._expand(calls)
        num_vain = 0
        while self._queue and num_vain < _PATIENCE and self._num_left > 0 and not is_late():
            before = self._least
            self._expand(heappop(self._queue)[1])
            num_vain = num_vain + 1 if self._least == before else 0
        for regions in self._best(_NUM_RETAINING):
            self._retain(regions, is_late)
        return self._best(1)[0]

    def _best(self, num: int) -> list[Regions]:
        return [dict(key) for key, _ in nsmallest(num, self._scores.items(), key=lambda item: item[1])]

    def _visit(self, regions: Regions) -> _Score:
        key = tuple(regions.items())
        if key not in self._scores:
            self._num_left -= 1
            played = EagerLives(self._graph, regions)
            peak, retains = played.peak_bytes, any(regions.values())
            num_events = int(np.count_nonzero(played.total_bytes == peak))
            score = self._scores[key] = peak, retains, num_events, played.extra_s
            self._least = score if self._least is None else min(self._least, score)
            heappush(self._queue, (score, tuple(regions)))
        return self._scores[key]

    def _expand(self, calls: Iterable[int]) -> None:
        """Visit the sets that differ from a set in one call, or in all calls that are alike."""
        key = tuple(calls)
        if key in self._expanded:
            return
        self._expanded.add(key)
        for others in self._nesting.neighbours(key, is_thorough=True):
            if self._num_left > 0:
                self._visit(self._nesting.tidied(dict.fromkeys(others, ())))

    def _retain(self, regions: Regions, is_late: Callable[[], bool]) -> None:
        """Retain single outputs, one after the other, as long as that lowers the peak: some are held elsewhere too."""
        score, is_lower = self._visit(regions), True
        while is_lower and not is_late():
            is_lower = False
            for call, op in self._retainable(regions):
                if self._num_left <= 0:
                    return
                more = {**regions, call: tuple(sorted({*regions[call], op}))}
                found = self._visit(more)
                if (found[0], found[2]) < (score[0], score[2]):
                    score, regions, is_lower = found, more, True

    def _retainable(self, regions: Regions) -> list[tuple[int, int]]:
        """Ops, each with its region, of regions without others around or inside; first what lives at the peak.

        The others count too: a replay that need not run its last ops stops earlier.
        """
        played = EagerLives(self._graph, regions)
        peak, outermost = int(played.total_bytes.argmax()), self._graph.outermost(regions)
        live = {self._graph.values[value].born for value in played.live_at(peak)} | {int(played.ops[peak])}
        found: list[tuple[int, int]] = []
        for op in sorted(np.flatnonzero(self._may_keep[: self._graph.num_forward]), key=lambda op: op not in live):
            call = outermost[self._graph.ops[op].call]
            if call < 0 or self._graph.arrays.has_inside(call, regions):
                continue
            number = int(op) - self._graph.calls[call].first
            more = {**regions, call: (*regions[call], number)}
            if number not in regions[call] and call not in self._graph.retainable.missing(more):
                found.append((call, number))
        return found
