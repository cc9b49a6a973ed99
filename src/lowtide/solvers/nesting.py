"""Where a replay itself holds too much: smaller regions, and regions inside regions.

A replayed region holds all it saves at once. Smaller regions in its place hold less, and more inputs; a region inside
it drops its saves again, at the price of another run. So wherever a simulated step holds too much, the region at work
there is taken apart or nested one level further, and where no region is, one is made of the module at work.
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
    """Takes regions apart, level by level of the module tree."""

    def __init__(self, graph: StepGraph, replayable: list[bool]) -> None:
        self._graph = graph
        self._replayable = replayable
        self.children: list[list[int]] = [[] for _ in graph.calls]
        for index, call in enumerate(graph.calls):
            if call.parent >= 0:
                self.children[call.parent].append(index)

    def without_redundant(self, regions: Regions) -> Regions:
        """`regions` less those that cannot be; those with others around or inside retain nothing."""
        found: Regions = {}
        has_inner = {self._outermost(self._graph.calls[call].parent, regions) for call in regions}
        for call in sorted(regions):
            outer = self._outermost(self._graph.calls[call].parent, found)
            if self._replayable[call]:
                # A region that retained outputs would keep what those inside it drop.
                found[call] = () if outer >= 0 or call in has_inner else tuple(sorted(set(regions[call])))
        return found

    def further(
        self, regions: Regions, timeline: Timeline | EagerIntervals, level: float, may_part: bool
    ) -> tuple[Regions, bool]:
        """`regions` taken apart if they may, else nested deeper, else widened, and whether the former helped."""
        if may_part and (parted := self.split(regions, timeline, level)) != regions:
            return parted, True
        nested = self.deeper(regions, timeline, level)
        return (nested if nested != regions else self.wider(regions, timeline, level)), False

    def deeper(self, regions: Regions, timeline: Timeline | EagerIntervals, level: float) -> Regions:
        """`regions` and more inside those at work where the timeline is above `level`; the same if none is left."""
        found = dict(regions)
        for region in {self._outermost(call, regions) for call in self._at_work(timeline, level)} - {-1}:
            found |= {inner: () for inner in self._next_level(region, regions)}
        return self.without_redundant(found)

    def split(self, regions: Regions, timeline: Timeline | EagerIntervals, level: float) -> Regions:
        """`regions`, those at work above `level` replaced by the calls inside them; the same if none is left.

        Cheaper in time than regions inside regions, for nothing is replayed twice; but more inputs are held.
        """
        found = dict(regions)
        for region in {self._outermost(call, regions) for call in self._at_work(timeline, level)} - {-1}:
            inside = [child for child in self.children[region] if self._replayable[child]]
            if inside:
                del found[region]
                found |= {child: () for child in inside}
        return self.without_redundant(found)

    def wider(self, regions: Regions, timeline: Timeline | EagerIntervals, level: float) -> Regions:
        """`regions` and more around them where the timeline is above `level` outside of all; the same if none is.

        With a whole trunk as one region the backward of what follows it runs before anything inside is held again.
        """
        found = dict(regions)
        for call in self._at_work(timeline, level):
            if self._outermost(call, regions) < 0:
                found |= {each: () for each in self._coarsest(call)}
        if found == regions:  # what is at work lies in no module: all that can be a region is held too much
            found |= {call: () for call in range(len(self._graph.calls)) if self._coarsest(call) == [call]}
        return self.without_redundant(found)

    def neighbours(self, key: tuple[int, ...], *, is_thorough: bool = False) -> Iterator[Iterable[int]]:
        """Sets that differ by a call, the first or last of those alike and treated alike so far, or by all of these.

        If `is_thorough`, by any call.
        """
        after, children = self._graph.arrays.after, self.children
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
        """How many regions a call lies in."""
        count = 0
        while (call := self._graph.calls[call].parent) >= 0:
            count += call in key
        return count

    def _at_work(self, timeline: Timeline | EagerIntervals, level: float) -> list[int]:
        ops = {int(timeline.ops[event]) for event in np.flatnonzero(timeline.total_bytes > level)} - {-1}
        return sorted({self._graph.ops[op].call for op in ops} - {-1})

    def _outermost(self, call: int, regions: Regions) -> int:
        outermost = -1
        while call >= 0:
            outermost = call if call in regions else outermost
            call = self._graph.calls[call].parent
        return outermost

    def _coarsest(self, call: int) -> list[int]:
        """The outermost module at work that can be a region."""
        best = -1
        while call >= 0:
            best = call if self._replayable[call] else best
            call = self._graph.calls[call].parent
        return [best] if best >= 0 else []

    def _next_level(self, region: int, regions: Regions) -> list[int]:
        """The outermost calls inside a region that are not regions yet; nothing, once all are."""
        level = [region]
        while level:
            inside = [child for call in level for child in self.children[call]]
            allowed = [child for child in inside if self._replayable[child]]
            missing = [child for child in allowed if child not in regions]
            if missing:
                return missing
            level = inside
        return []
