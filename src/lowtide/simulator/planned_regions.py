"""What the regions of an eager plan imply: which saves each drops, when and up to where it is replayed, its host costs.

Shared by both simulations of an eager step, `eager_intervals` and `eager_events`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lowtide.graph.step_graph import StepGraph
from lowtide.graph.time_lines import EngineHostCosts

NEVER = 1 << 62


class PlannedRegions:
    """The `regions` of a plan, which are calls and for each the ops, counted from its first, whose outputs it retains.

    Regions are numbered by **rank**, in the order of their calls; -1 is no region. By rank: `calls`, `first` (the first
    op), `outer` (the region around it), `stop` (the position at which its replay ends: the last save that it drops and
    that the backward may read, or the last region inside it), `ends` and `last_read` (the positions at which autograd
    releases and last reads a save in it), `has_saves` (without any, it holds nothing for a replay).

    - `around[i]` is the innermost region around save `i`, and `owner[i]` that region if it drops the save. A save of a
      retained output is not dropped: it holds the output like a save outside of regions.
    - `keeper[o]` is the region that retains the outputs of op `o`.
    - `order` are the regions that are replayed, in that order, and `replayed_at` the positions of their replays.
    - `engine` are the host seconds of the engine.
    """

    def __init__(self, graph: StepGraph, regions: Mapping[int, Sequence[int]]) -> None:
        facts, calls = graph.arrays, sorted(regions)
        num = len(calls)
        self.retains = any(regions.values())
        self.calls = np.array(calls, dtype=np.int64)
        rank_of = np.full(len(graph.calls) + 1, -1)  # at the end, of no call
        for rank, call in enumerate(calls):
            rank_of[call : facts.after[call]] = rank
        self.outer = rank_of[facts.parent[self.calls]]
        self.around = around = rank_of[facts.save_call]
        inside = (around >= 0).nonzero()[0]
        regions_inside = around[inside]
        self.first = facts.first[self.calls]
        self.keeper = np.full(facts.num_ops + 1, -1)
        self.owner, dropped, owners = around, inside, regions_inside
        if self.retains:
            for rank, call in enumerate(calls):
                self.keeper[[self.first[rank] + op for op in regions[call]]] = rank
            is_retained = (around >= 0) & (facts.save_index >= 0)
            is_retained[is_retained] = self.keeper[facts.maker[facts.save_index[is_retained]]] == around[is_retained]
            self.owner = np.where(is_retained, -1, around)
            dropped = (self.owner >= 0).nonzero()[0]
            owners = self.owner[dropped]
        self.stop = self.first.copy()
        self.ends, self.last_read = np.zeros(num, dtype=np.int64), np.zeros(num, dtype=np.int64)
        trigger = np.full(num, NEVER)  # the first read, and which save of those that are read there
        self.has_saves = np.zeros(num, dtype=bool)
        np.maximum.at(self.ends, regions_inside, facts.save_released[inside])
        np.maximum.at(self.last_read, regions_inside, facts.save_read[inside])
        self.has_saves[regions_inside] = True
        np.maximum.at(self.stop, owners, np.where(facts.is_lost[dropped], 0, facts.save_made[dropped]))
        reads = facts.save_read[dropped]
        np.minimum.at(trigger, owners, np.where(reads >= 0, reads * len(facts.save_read) + dropped, NEVER))
        for rank in (self.outer >= 0).nonzero()[0][::-1].tolist():  # inner ones first
            if self.has_saves[rank]:
                outer = self.outer[rank]
                self.has_saves[outer] = True
                self.stop[outer] = max(self.stop[outer], self.first[rank])
                self.ends[outer] = max(self.ends[outer], self.ends[rank])
                self.last_read[outer] = max(self.last_read[outer], self.last_read[rank])
                trigger[outer] = min(trigger[outer], trigger[rank])
        replayed = (trigger < NEVER).nonzero()[0]
        self.order = replayed[trigger[replayed].argsort(kind="stable")]  # outer ones first
        self.replayed_at = trigger[self.order] // max(len(facts.save_read), 1)
        has_saves = self.has_saves.tolist()
        stops = {call: stop for call, stop, has in zip(calls, self.stop.tolist(), has_saves, strict=True) if has}
        counts = dict(zip(calls, np.bincount(regions_inside, minlength=num).tolist(), strict=True))
        self.engine = EngineHostCosts(graph, regions, stops, counts, {calls[rank] for rank in replayed.tolist()})
