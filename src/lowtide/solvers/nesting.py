"""Smaller regions, and regions inside regions, where the replay of a region needs more than a number of bytes.

While a region is replayed, all its saved tensors are live at once. If the step then exceeds the limit (`level`), the
region is split into the calls inside it (more inputs are held, nothing is replayed twice), or those calls become
regions inside it (their ops run once more for each depth of nesting). For a chain of equal layers, nesting is the
idea of revolve (Griewank and Walther 2000); here regions nest as modules do.

`EagerSearch` applies this to candidates of the first hull path until their simulated peak is below the limit.
`neighbours` gives the local searches all sets of regions that differ by one step. Cost: one simulation per split or
depth, at most twelve per candidate.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterable, Iterator

import numpy as np

from lowtide.graph.step_graph import StepGraph
from lowtide.simulator.eager_intervals import EagerIntervals
from lowtide.simulator.timeline import Timeline
from lowtide.solvers.candidate import Regions


class Nesting:
    """Splits and nests regions along the module tree. `replayable` says which calls can be regions."""

    def __init__(self, graph: StepGraph, replayable: list[bool]) -> None:
        self._graph = graph
        self._replayable = replayable

    def without_redundant(self, regions: Regions) -> Regions:
        """`regions` without calls that cannot be regions; nested regions retain no outputs."""
        result: Regions = {}
        has_inner = {self._outermost(self._graph.calls[call].parent, regions) for call in regions}
        for call in sorted(regions):
            outer = self._outermost(self._graph.calls[call].parent, result)
            if self._replayable[call]:
                # A region that retains outputs would hold what a region inside it drops.
                result[call] = () if outer >= 0 or call in has_inner else tuple(sorted(set(regions[call])))
        return result

    def further(
        self, regions: Regions, timeline: Timeline | EagerIntervals, level: float, may_part: bool
    ) -> tuple[Regions, bool]:
        """Split `regions` if `may_part` and possible, else nest deeper; and whether they were split."""
        if may_part and (parted := self.split(regions, timeline, level)) != regions:
            return parted, True
        return self.deeper(regions, timeline, level), False

    def deeper(self, regions: Regions, timeline: Timeline | EagerIntervals, level: float) -> Regions:
        """`regions` with one more level inside those running where the timeline exceeds `level`, or unchanged."""
        found = dict(regions)
        for region in {self._outermost(call, regions) for call in self._at_work(timeline, level)} - {-1}:
            found |= {inner: () for inner in self._next_level(region, regions)}
        return self.without_redundant(found)

    def split(self, regions: Regions, timeline: Timeline | EagerIntervals, level: float) -> Regions:
        """`regions` with those running above `level` replaced by the calls inside them, or unchanged.

        Faster than regions inside regions, as nothing is replayed twice, but more inputs are held.
        """
        found = dict(regions)
        for region in {self._outermost(call, regions) for call in self._at_work(timeline, level)} - {-1}:
            inside = [child for child in self._graph.children[region] if self._replayable[child]]
            if inside:
                del found[region]
                found |= {child: () for child in inside}
        return self.without_redundant(found)

    def neighbours(self, key: tuple[int, ...], *, is_thorough: bool = False) -> Iterator[Iterable[int]]:
        """Sets of regions one step away: a region added, removed, or exchanged for the calls inside it.

        Calls of equal structure that the set treats equally are one group: a step changes the group's first call, its
        last, or all of them. If `is_thorough`, a step may change any single call.
        """
        after, children = self._graph.arrays.after, self._graph.children
        alike: dict[tuple[object, ...], list[int]] = {}
        for call in (call for call, can in enumerate(self._replayable) if can):
            structure = self._graph.calls[call].structure
            inside = bisect_left(key, after[call]) - bisect_right(key, call)
            kind = (structure if structure >= 0 else ~call, call in key, self.num_around(call, key), inside)
            alike.setdefault(kind, []).append(call)
        for calls in alike.values():
            singles = calls if is_thorough else (calls[0], calls[-1])
            for some in dict.fromkeys((*((call,) for call in singles), tuple(calls))):
                without = [region for region in key if region not in some]
                spans = [(call, after[call]) for call in some]
                outside = [region for region in without if not any(call < region < end for call, end in spans)]
                if some[0] not in key:
                    yield [*outside, *some]
                    if is_thorough and outside != without:
                        yield [*without, *some]
                else:
                    yield without
                    yield [*outside, *(child for call in some for child in children[call])]

    def num_around(self, call: int, key: Container[int]) -> int:
        """Number of regions around a call."""
        return sum(around in key for around in self._graph.ancestors(self._graph.calls[call].parent))

    def _at_work(self, timeline: Timeline | EagerIntervals, level: float) -> list[int]:
        ops = {int(timeline.ops[event]) for event in np.flatnonzero(timeline.total_bytes > level)} - {-1}
        return sorted({self._graph.ops[op].call for op in ops} - {-1})

    def _outermost(self, call: int, regions: Regions) -> int:
        outermost = -1
        while call >= 0:  # a loop, and not `ancestors`: called for each region of each set that is visited
            outermost = call if call in regions else outermost
            call = self._graph.calls[call].parent
        return outermost

    def _next_level(self, region: int, regions: Regions) -> list[int]:
        """The outermost calls inside a region that are not regions yet; empty once all are."""
        level = [region]
        while level:
            inside = [child for call in level for child in self._graph.children[call]]
            allowed = [child for child in inside if self._replayable[child]]
            missing = [child for child in allowed if child not in regions]
            if missing:
                return missing
            level = inside
        return []
