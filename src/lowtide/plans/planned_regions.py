"""The regions of an eager plan on a graph: which saves each drops, where its replay ends, and when it is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from lowtide.graph import StepGraph
from lowtide.graph.lines import EngineFees
from lowtide.plans import Plan


class PlannedRegions:
    """By call, the regions of `plan` on `graph`, which has the plan's segments.

    `save_owner[i]` is the region that drops save `i`, -1 for none; `stops` the position at which each replay ends, for
    regions with saves; `ends` when autograd lets go of the last save of a region and `last_reads` when it reads one.
    """

    def __init__(self, graph: StepGraph, plan: Plan) -> None:
        self.graph, self.regions = graph, plan.calls(graph)
        self.owner, self.outermost = graph.innermost(self.regions), graph.outermost(self.regions)
        self.retained = self._find_retained()
        self.save_owner = [-1 if i in self.retained else self.owner[s.call] for i, s in enumerate(graph.saves)]
        self.stops = self._find_stops()
        self.kept_ops = {graph.calls[call].first + op for call in self.stops for op in self.regions[call].keep_ops}
        self.ends, self.last_reads = self._find_ends()

    def _find_retained(self) -> set[int]:
        """The saves that are not dropped, as they carry an output that their region retains."""
        graph, regions = self.graph, self.regions.items()
        kept = {(call, graph.calls[call].first + op) for call, region in regions for op in region.keep_ops}
        makers = [(self.owner[save.call], graph.values[save.value].born) for save in graph.saves]
        return {index for index, maker in enumerate(makers) if maker in kept}

    def _find_stops(self) -> dict[int, int]:
        """The position up to which each region with saves is replayed: its last dropped one, or last inner region."""
        calls = self.graph.calls
        stops = {r: calls[r].first for r in {self.owner[save.call] for save in self.graph.saves} if r >= 0}
        for save, region in zip(self.graph.saves, self.save_owner, strict=True):
            if region >= 0:
                stops[region] = max(stops[region], save.made)
        for call in sorted(self.regions, reverse=True):  # inner ones first
            outer = self.owner[self.graph.calls[call].parent]
            if outer >= 0 and call in stops:
                stops[outer] = max(stops.get(outer, calls[outer].first), calls[call].first)
        return stops

    def _find_ends(self) -> tuple[dict[int, int], dict[int, int]]:
        """When autograd lets go of the last save of each region, inner ones included, and when it last reads one."""
        ends: dict[int, int] = {}
        last_reads: dict[int, int] = {}
        for save in self.graph.saves:
            for region in self.around(save.call):
                ends[region] = max(ends.get(region, 0), save.released)
                last_reads[region] = max(last_reads.get(region, 0), save.read)
        return ends, last_reads

    def engine_fees(self) -> EngineFees:
        """What the engine does on the host for these regions."""
        kept = {call: region.keep_ops for call, region in self.regions.items()}
        num_saves = Counter(owner for save in self.graph.saves if (owner := self.owner[save.call]) >= 0)
        read = [save.call for save, by in zip(self.graph.saves, self.save_owner, strict=True) if by >= 0 <= save.read]
        replayed = {region for call in read for region in self.around(call)}
        return EngineFees(self.graph, kept, self.stops, num_saves, replayed)

    def around(self, call: int) -> Iterator[int]:
        """The regions that a call is or lies in, from the inside out."""
        while (region := self.owner[call]) >= 0:
            yield region
            call = self.graph.calls[region].parent
