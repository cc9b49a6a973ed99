"""Which outputs a region retains at a price per byte, and what that costs at the least.

A replay ends at the last save that is dropped, so what is retained also decides which ops run again. For each position
at which a replay may end: ops before it run again, or their outputs are retained, whichever is cheaper; of ops behind
it, all outputs that are saved are retained. The best position is somewhere from the last save that no plan can retain
(`least`) to the last save.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lowtide.graph import StepGraph


class RegionHolds:
    """What each call costs as a region that retains outputs, at the least, whatever regions are inside it.

    `may_keep[depth]` are the ops whose outputs regions at that depth may retain, and `held[depth]` the bytes that each
    takes then. `stops` are the positions at which replays end if nothing is retained. Calls that are not `allowed` to
    be regions cost inf. What is made from `run_firsts` on may be retained for a call.
    """

    def __init__(
        self,
        graph: StepGraph,
        stops: list[int],
        may_keep: Mapping[int, np.ndarray],
        held: Mapping[int, np.ndarray],
        allowed: np.ndarray,
        run_firsts: Sequence[int],
    ) -> None:
        self._graph, self._may_keep, self._held = graph, may_keep, held
        self._seconds, self._substituted_s = graph.arrays.seconds[: graph.num_forward], graph.retainable.substituted_s
        is_saved, unread = np.zeros(graph.num_forward, dtype=bool), np.zeros(graph.num_forward, dtype=bool)
        for save in graph.saves:
            born = graph.values[save.value].born
            if 0 <= born < graph.num_forward:
                is_saved[born], unread[born] = True, unread[born] or save.read < 0
        self._is_read = is_saved & ~unread  # a region that could retain the output brings it back, or does retain it
        first, end = graph.arrays.first, np.array([call.end for call in graph.calls], dtype=np.int64)
        least, entries = _least_stops(graph, may_keep, run_firsts)
        self._spans = first, least, np.maximum(least, np.array(stops, dtype=np.int64)), end
        # With a region inside, the replay around it may end where that begins.
        inner_s = graph.hardware.dispatch_s * (entries - first) + graph.hardware.region_s
        num_allowed = sums_of(allowed)
        has_inner = num_allowed[graph.arrays.after] > num_allowed[1:]
        self._inner_s = np.where(has_inner, inner_s, np.inf)
        self._allowed, depths = allowed, np.array(graph.depths, dtype=np.int64)
        self._calls_at = {depth: np.flatnonzero((depths == depth) & allowed) for depth in held}

    def costs(self, price: float) -> np.ndarray:
        """What each call costs as a region that retains what it best does at a price, less what its inputs cost."""
        dispatch_s = self._graph.hardware.dispatch_s
        costs = np.full(len(self._allowed), np.inf)
        for depth, calls in self._calls_at.items():
            first, least, stop, _ = (span[calls] for span in self._spans)
            before, behind = (sums_of(each) for each in self._choices(depth, price))
            ends = np.stack([least, stop + 1], axis=1).ravel()
            at_end = np.append(before - behind, np.inf)
            alone_s, inside_s = (
                np.minimum.reduceat(each, ends)[::2] if len(calls) else np.zeros(0)
                for each in (at_end + dispatch_s * np.arange(len(at_end)), at_end)
            )
            best = np.minimum(alone_s - dispatch_s * first, inside_s + self._inner_s[calls])
            costs[calls] = best - before[first] + behind[stop]
        return costs

    def _choices(self, depth: int, price: float) -> tuple[np.ndarray, np.ndarray]:
        """What each op costs in regions of a depth, before the end of a replay and behind it."""
        may_keep, kept = self._may_keep[depth], price * self._held[depth]
        before = np.where(may_keep, np.minimum(self._seconds, kept + self._substituted_s), self._seconds)
        return before, np.where(may_keep & self._is_read, kept, 0.0)

    def kept(self, index: int, price: float) -> list[int]:
        """The ops of a call, counted from its first, whose outputs it best retains at a price."""
        first, least, stop, end = (int(span[index]) for span in self._spans)
        depth = self._graph.depths[index]
        before, behind = (each[first:stop] for each in self._choices(depth, price))
        costs = sums_of(before)[least - first :] + behind.sum() - sums_of(behind)[least - first :]
        at = least + int(np.argmin(costs + [self._fee_s(index, position) for position in range(least, stop + 1)]))
        may_keep, gained_s = self._may_keep[depth], self._seconds - self._substituted_s
        is_kept = np.zeros(end - first, dtype=bool)
        is_kept[: at - first] |= may_keep[first:at] & (price * self._held[depth][first:at] < gained_s[first:at])
        is_kept[at - first : stop - first] |= (may_keep & self._is_read)[at:stop]
        return [int(op) for op in np.flatnonzero(is_kept)]

    def seconds(self, index: int, kept: Sequence[int]) -> float:
        """What a call takes at the least as a region that retains the outputs of some ops, counted from its first."""
        first, least, stop, end = (int(span[index]) for span in self._spans)
        is_kept = np.zeros(end - first, dtype=bool)
        is_kept[list(kept)] = True
        may_keep = self._may_keep[self._graph.depths[index]]
        dropped = np.flatnonzero((may_keep & self._is_read)[least:stop] & ~is_kept[least - first : stop - first])
        at = least + int(dropped[-1]) + 1 if len(dropped) else least
        runs = np.where(is_kept[: at - first], self._substituted_s[first:at], self._seconds[first:at])
        return self._fee_s(index, at) + float(runs.sum())

    def _fee_s(self, index: int, stop: int) -> float:
        """The dispatch of a call's replay that ends at `stop`, or earlier with regions inside."""
        alone_s = self._graph.hardware.dispatch_s * (stop - self._graph.calls[index].first)
        return min(alone_s, float(self._inner_s[index]))


def sums_of(items: np.ndarray) -> np.ndarray:
    """The sums of the first items: of none, of one, and so on."""
    return np.concatenate([[0], np.cumsum(items)])


def _least_stops(
    graph: StepGraph, may_keep: Mapping[int, np.ndarray], run_firsts: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """The earliest positions at which replays of calls can end: at the last save that is read and cannot be retained.

    And with regions inside: for a save in a call inside, where that call begins.
    """
    least, entries = graph.arrays.first.copy(), graph.arrays.first.copy()
    for save in graph.saves:
        call, reached, born = save.call, save.made, graph.values[save.value].born
        while save.read >= 0 and call >= 0:
            is_inside = run_firsts[call] <= born < graph.num_forward
            if not (is_inside and may_keep[graph.depths[call]][born]):
                least[call], entries[call] = max(least[call], save.made), max(entries[call], reached)
            call, reached = graph.calls[call].parent, graph.calls[call].first
    return least, entries
