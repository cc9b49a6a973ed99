"""Where a replay itself holds too much: smaller regions, and regions inside regions.

A replayed region holds all it saves at once. Smaller regions in its place hold less, and more inputs; a region inside
it drops its saves again, at the price of another run. So wherever a simulated step is over the budget, the region at
work there is taken apart or nested one level further, and where no region is, one is made of the module at work.
"""

from __future__ import annotations

import numpy as np

from lowtide.graph import StepGraph
from lowtide.simulator import Timeline
from lowtide.solvers.chain import Regions


class Nesting:
    """Takes regions apart, level by level of the module tree."""

    def __init__(self, graph: StepGraph, replayable: list[bool]) -> None:
        self._graph = graph
        self._replayable = replayable
        self._children: list[list[int]] = [[] for _ in graph.calls]
        for index, call in enumerate(graph.calls):
            if call.parent >= 0:
                self._children[call.parent].append(index)

    def deeper(self, regions: Regions, timeline: Timeline, budget: int) -> Regions:
        """`regions` and more inside those at work where the timeline is over the budget; the same if none is left."""
        found = dict(regions)
        for call in self._at_work(timeline, budget):
            region = self._outermost(call, regions)
            if region >= 0:
                found[region] = ()  # a region that holds ops would keep what those inside it drop
                found |= {each: () for each in self._next_level(region, found)}
        return self._clean(found)

    def apart(self, regions: Regions, timeline: Timeline, budget: int) -> Regions:
        """`regions`, those at work over the budget replaced by the calls inside them; the same if none is left.

        Cheaper in time than regions inside regions, for nothing is replayed twice; but more inputs are held.
        """
        found = dict(regions)
        for call in self._at_work(timeline, budget):
            region = self._outermost(call, found)
            inside = [child for child in self._children[region] if self._replayable[child]] if region >= 0 else []
            if inside:
                del found[region]
                found |= {child: () for child in inside}
        return self._clean(found)

    def wider(self, regions: Regions, timeline: Timeline, budget: int) -> Regions:
        """`regions` and more around them where the timeline is over the budget outside of all; the same if none is.

        With a whole trunk as one region the backward of what follows it runs before anything inside is held again.
        """
        found = dict(regions)
        for call in self._at_work(timeline, budget):
            if self._outermost(call, regions) < 0:
                found |= {each: () for each in self._coarsest(call)}
        if found == regions:  # what is at work lies in no module: all that can be a region is held too much
            tops = [call for call in range(len(self._graph.calls)) if self._replayable[call]]
            found |= {call: () for call in tops if self._outermost(call, found) < 0}
        return self._clean(found)

    def _at_work(self, timeline: Timeline, budget: int) -> list[int]:
        over = np.flatnonzero(timeline.total_bytes > budget)
        ops = {int(timeline.ops[event]) for event in over} - {-1}
        return sorted({self._graph.ops[op].call for op in ops} - {-1})

    def _clean(self, regions: Regions) -> Regions:
        return {call: () if self._has_outer(call, regions) else ops for call, ops in regions.items()}

    def _has_outer(self, call: int, regions: Regions) -> bool:
        return self._outermost(call, regions) != call

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
            inside = [child for call in level for child in self._children[call]]
            missing = [child for child in inside if child not in regions and self._replayable[child]]
            if missing:
                return missing
            level = inside
        return []
