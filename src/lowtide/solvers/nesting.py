"""Where a replay itself holds too much: smaller regions, and regions inside regions.

A replayed region holds all it saves at once. Smaller regions in its place hold less, and more inputs; a region inside
it drops its saves again, at the price of another run. So wherever a simulated step holds too much, the region at work
there is taken apart or nested one level further, and where no region is, one is made of the module at work.
"""

from __future__ import annotations

import numpy as np

from lowtide.eagerlives import EagerLives
from lowtide.graph import StepGraph
from lowtide.simulator import Timeline
from lowtide.solvers.chain import Regions


class Nesting:
    """Takes regions apart, level by level of the module tree.

    A region that is inside of none retains the outputs of its ops that `must_keep`; a region inside it cannot, so one
    with such ops, or with saves of what they make, is none.
    """

    def __init__(self, graph: StepGraph, replayable: list[bool], must_keep: np.ndarray) -> None:
        self._graph = graph
        self._replayable = replayable
        self._must_keep = must_keep
        sums = np.concatenate([[0], np.cumsum(must_keep)])
        self._is_bound = [bool(sums[call.end] > sums[call.first]) for call in graph.calls]
        for save in graph.saves if must_keep.any() else ():
            at, born = save.call, graph.values[save.value].born
            while at >= 0 and 0 <= born < graph.num_forward and must_keep[born] and not self._is_bound[at]:
                self._is_bound[at] = True
                at = graph.calls[at].parent
        self.children: list[list[int]] = [[] for _ in graph.calls]
        for index, call in enumerate(graph.calls):
            if call.parent >= 0:
                self.children[call.parent].append(index)

    def tidied(self, regions: Regions) -> Regions:
        """`regions` less those that cannot be, each holding what it must, and nothing else where others are inside."""
        found: Regions = {}
        has_inner = {self._outermost(self._graph.calls[call].parent, regions) for call in regions}
        for call in sorted(regions):
            outer = self._outermost(self._graph.calls[call].parent, found)
            if not self._replayable[call] or (outer >= 0 and self._is_bound[call]):
                continue
            # A region that holds more would keep what those inside it drop.
            more = () if outer >= 0 or call in has_inner else regions[call]
            found[call] = tuple(sorted({*more, *self._must_hold(call)})) if outer < 0 else ()
        return found

    def deeper(self, regions: Regions, timeline: Timeline | EagerLives, level: float) -> Regions:
        """`regions` and more inside those at work where the timeline is above `level`; the same if none is left."""
        found = dict(regions)
        for region in {self._outermost(call, regions) for call in self._at_work(timeline, level)} - {-1}:
            found |= {inner: () for inner in self._next_level(region, regions)}
        return self.tidied(found)

    def apart(self, regions: Regions, timeline: Timeline | EagerLives, level: float) -> Regions:
        """`regions`, those at work above `level` replaced by the calls inside them; the same if none is left.

        Cheaper in time than regions inside regions, for nothing is replayed twice; but more inputs are held.
        """
        found = dict(regions)
        for region in {self._outermost(call, regions) for call in self._at_work(timeline, level)} - {-1}:
            inside = [child for child in self.children[region] if self._replayable[child]]
            if inside:
                del found[region]
                found |= {child: () for child in inside}
        return self.tidied(found)

    def wider(self, regions: Regions, timeline: Timeline | EagerLives, level: float) -> Regions:
        """`regions` and more around them where the timeline is above `level` outside of all; the same if none is.

        With a whole trunk as one region the backward of what follows it runs before anything inside is held again.
        """
        found = dict(regions)
        for call in self._at_work(timeline, level):
            if self._outermost(call, regions) < 0:
                found |= {each: () for each in self._coarsest(call)}
        if found == regions:  # what is at work lies in no module: all that can be a region is held too much
            found |= {call: () for call in range(len(self._graph.calls)) if self._coarsest(call) == [call]}
        return self.tidied(found)

    def _must_hold(self, call: int) -> list[int]:
        first, end = self._graph.calls[call].first, self._graph.calls[call].end
        return [int(op) for op in np.flatnonzero(self._must_keep[first:end])] if self._is_bound[call] else []

    def _at_work(self, timeline: Timeline | EagerLives, level: float) -> list[int]:
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
            allowed = [child for child in inside if self._replayable[child] and not self._is_bound[child]]
            missing = [child for child in allowed if child not in regions]
            if missing:
                return missing
            level = inside
        return []
