"""Which outputs a region retains at a price per byte, and what that costs at the least.

A replay ends at the last save that is dropped. Up to the last save that no plan can retain (`least`), each op runs again
or its output is retained. Behind that an op may do neither, if all that is saved later is retained: such an op costs
something here only if its own output is saved, and so retained or made again.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lowtide.graph import StepGraph


class RegionHolds:
    """What each call costs as a region that retains outputs, at the least, whatever regions are inside it.

    `may_keep[depth]` and `must_keep` are the ops whose outputs regions at that depth may and must retain, and
    `held[depth]` the bytes that each takes then. `stops` are the positions at which replays end if nothing is retained.
    `fees_s` is what dispatch costs each call; inf for those that are not `allowed` to be regions.
    """

    def __init__(
        self,
        graph: StepGraph,
        stops: list[int],
        may_keep: Mapping[int, np.ndarray],
        must_keep: np.ndarray,
        held: Mapping[int, np.ndarray],
        allowed: np.ndarray,
    ) -> None:
        self._graph, self._may_keep, self._must_keep, self._held = graph, may_keep, must_keep, held
        self._seconds, self._substituted_s = graph.arrays.seconds[: graph.num_forward], graph.retainable.substituted_s
        is_saved, unread = np.zeros(graph.num_forward, dtype=bool), np.zeros(graph.num_forward, dtype=bool)
        for save in graph.saves:
            born = graph.values[save.value].born
            if 0 <= born < graph.num_forward:
                is_saved[born], unread[born] = True, unread[born] or save.read < 0
        self._runs_unless_kept = is_saved & ~unread  # wherever it is in a region that could retain it
        first, end = graph.arrays.first, np.array([call.end for call in graph.calls], dtype=np.int64)
        least, entries = _least_stops(graph, may_keep)
        self._spans = first, least, np.maximum(least, np.array(stops, dtype=np.int64)), end
        depths, hardware = np.array(graph.depths, dtype=np.int64), graph.hardware
        self._calls_at = {depth: depths == depth for depth in held}
        # With a region inside, the replay around it may end where that begins.
        inner_s = hardware.dispatch_s * (entries - first) + hardware.region_s
        self.fees_s = np.where(allowed, np.minimum(hardware.dispatch_s * (least - first), inner_s), np.inf)

    def costs(self, price: float) -> np.ndarray:
        """What each call costs as a region that retains what it best does at a price, less what its inputs cost."""
        first, least, stop, end = self._spans
        costs = self.fees_s.copy()
        for depth, held in self._held.items():
            may_keep, must_keep = self._may_keep[depth], self._must_keep
            kept, substituted = price * held, price * held + self._substituted_s
            must = np.where(must_keep, kept, 0.0)
            before = np.where(may_keep, np.minimum(self._seconds, substituted), self._seconds)
            behind = np.where(may_keep & self._runs_unless_kept, np.minimum(self._seconds, kept), 0.0)
            until_least = sums_of(np.where(must_keep, substituted, before))
            until_stop, until_end = sums_of(np.where(must_keep, must, behind)), sums_of(must)
            here = self._calls_at[depth]
            parts = ((until_least, first, least), (until_stop, least, stop), (until_end, stop, end))
            costs[here] += sum(sums[b] - sums[a] for sums, a, b in parts)[here]
        return costs

    def kept(self, index: int, price: float) -> list[int]:
        """The ops of a call, counted from its first, whose outputs it best retains at a price."""
        first, least, stop, end = (int(span[index]) for span in self._spans)
        depth = self._graph.depths[index]
        gained_s = self._seconds[first:end].copy()
        gained_s[: least - first] -= self._substituted_s[first:least]
        gained_s[least - first :] *= self._runs_unless_kept[least:end]
        gained_s[stop - first :] = 0.0
        worth = self._may_keep[depth][first:end] & (price * self._held[depth][first:end] < gained_s)
        return [int(op) for op in np.flatnonzero(worth | self._must_keep[first:end])]

    def seconds(self, index: int, kept: list[int] | tuple[int, ...]) -> float:
        """What a call takes at the least as a region that retains the outputs of some ops, counted from its first."""
        first, least, stop, _ = (int(span[index]) for span in self._spans)
        is_kept = np.zeros(max(stop, self._graph.calls[index].end) - first, dtype=bool)
        is_kept[list(kept)] = True
        before, behind = slice(first, least), slice(least, stop)
        runs = np.where(is_kept[: least - first], self._substituted_s[before], self._seconds[before])
        may_run = self._may_keep[self._graph.depths[index]][behind] & self._runs_unless_kept[behind]
        late = self._seconds[behind][may_run & ~is_kept[least - first : stop - first]]
        return float(self.fees_s[index]) + float(runs.sum()) + float(late.sum())


def sums_of(items: np.ndarray) -> np.ndarray:
    """The sums of the first items: of none, of one, and so on."""
    return np.concatenate([[0], np.cumsum(items)])


def _least_stops(graph: StepGraph, may_keep: Mapping[int, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The earliest positions at which replays of calls can end: at the last save that is read and cannot be retained.

    And with regions inside: for a save in a call inside, where that call begins.
    """
    least, entries = graph.arrays.first.copy(), graph.arrays.first.copy()
    for save in graph.saves:
        call, reached, born = save.call, save.made, graph.values[save.value].born
        while save.read >= 0 and call >= 0:
            is_inside = graph.calls[call].first <= born < graph.num_forward
            if not (is_inside and may_keep[graph.depths[call]][born]):
                least[call], entries[call] = max(least[call], save.made), max(entries[call], reached)
            call, reached = graph.calls[call].parent, graph.calls[call].first
    return least, entries
