"""Vectorised simulation of an eager step with replayed regions and no moves.

The searches simulate thousands of candidate plans, so this module computes all lifetimes of a step at once with numpy.
The rules are those of `eager_events`, which goes op by op and also simulates copies and codecs; the tests of the
simulator compare the two. Without copies, the graph and the regions alone determine when each region is entered,
replayed and left. The step is then a sequence of **ticks**, the boundaries between ops: one for each position of the
forward, one for each position of each replay, and two for each position of the backward, before and after the replays
at that position. An op may run after a tick.

A lifetime is one value as made by the forward, the backward or a replay. It lasts from the tick of its op to the tick
at which Python drops it, or to the end of the last save or region that holds it, whichever is later. At one tick all
holds begin before any hold ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from lowtide.graph.step_graph import StepGraph
from lowtide.graph.time_lines import EngineHostCosts, StepLines, device_starts, step_seconds
from lowtide.simulator.lifetimes import ends_before, largest

_NEVER = 1 << 62
_FORWARD, _REPLAY, _BACKWARD, _OPTIMIZER = 0, 1, 2, 3


class EagerIntervals:
    """One step in which `regions` are replayed: calls, with the ops of each whose outputs it retains.

    A save of a retained output holds it from the forward on, like a save outside of regions.
    """

    host_bytes = 0

    def __init__(self, graph: StepGraph, regions: Mapping[int, Sequence[int]]) -> None:
        self.graph, self.facts = graph, graph.arrays
        self._set_regions(regions)
        self._set_ticks()
        self._set_lifetimes()

    def _set_regions(self, regions: Mapping[int, Sequence[int]]) -> None:
        """Number the regions by rank; compute where each begins and stops, when it is replayed and when it is left."""
        facts = self.facts
        self._calls = np.array(sorted(regions), dtype=np.int64)
        num = len(self._calls)
        owner = np.full(len(self.graph.calls) + 1, -1, dtype=np.int64)  # at the end, of no call
        for rank, call in enumerate(self._calls.tolist()):
            owner[call : facts.after[call]] = rank
        self._outer = owner[facts.parent[self._calls]]
        around = owner[facts.save_call]
        self._first = facts.first[self._calls]
        self._keeper = self._keepers(regions)
        is_retained = (around >= 0) & (facts.save_number >= 0)
        is_retained[is_retained] = self._keeper[facts.maker[facts.save_number[is_retained]]] == around[is_retained]
        self._owner = np.where(is_retained, -1, around)  # the region that drops each save
        self._stop = self._first.copy()
        self._ends, last_read = np.zeros(num, dtype=np.int64), np.zeros(num, dtype=np.int64)
        trigger = np.full(num, _NEVER, dtype=np.int64)  # the first read, and which save of those that are read there
        self._has_saves = np.zeros(num, dtype=bool)
        inside = np.flatnonzero(around >= 0)
        np.maximum.at(self._ends, around[inside], facts.save_released[inside])
        np.maximum.at(last_read, around[inside], facts.save_read[inside])
        self._has_saves[around[inside]] = True
        dropped = np.flatnonzero(self._owner >= 0)
        owners, reads = self._owner[dropped], facts.save_read[dropped]
        np.maximum.at(self._stop, owners, facts.save_made[dropped])
        np.minimum.at(trigger, owners, np.where(reads >= 0, reads * len(facts.save_read) + dropped, _NEVER))
        for rank in np.flatnonzero(self._outer >= 0)[::-1].tolist():  # inner ones first
            if self._has_saves[rank]:
                outer = self._outer[rank]
                self._has_saves[outer] = True
                self._stop[outer] = max(self._stop[outer], self._first[rank])
                self._ends[outer] = max(self._ends[outer], self._ends[rank])
                last_read[outer] = max(last_read[outer], last_read[rank])
                trigger[outer] = min(trigger[outer], trigger[rank])
        self._is_last_read_at_end = last_read == self._ends
        kept = np.flatnonzero(self._keeper >= 0)
        self._kept_ops = kept[self._has_saves[self._keeper[kept]]]
        self._kept_by = self._keeper[self._kept_ops]
        replayed = np.flatnonzero(trigger < _NEVER)
        self._order = replayed[np.argsort(trigger[replayed], kind="stable")]  # outer ones first
        self._replayed_at = trigger[self._order] // max(len(facts.save_read), 1)
        stops = dict(zip(self._calls[self._has_saves].tolist(), self._stop[self._has_saves].tolist(), strict=True))
        counts = zip(self._calls.tolist(), np.bincount(around[inside], minlength=num).tolist(), strict=True)
        self._fees = EngineHostCosts(self.graph, regions, stops, dict(counts), set(self._calls[replayed].tolist()))
        self.watched_s = self._fees.total_s

    def _keepers(self, regions: Mapping[int, Sequence[int]]) -> np.ndarray:
        """Return for each op the rank of the region that retains its outputs, -1 for none."""
        keeper = np.full(self.facts.num_ops + 1, -1, dtype=np.int64)
        for rank, call in enumerate(self._calls.tolist()):
            keeper[[self._first[rank] + op for op in regions[call]]] = rank
        return keeper

    def _set_ticks(self) -> None:
        """Number the ticks and the events. An event is an op that runs after a tick."""
        facts, forward = self.facts, self.facts.num_forward
        lengths = (self._stop - self._first)[self._order] + 1
        ends = np.cumsum(lengths)
        begun = ends - lengths
        positions = np.arange(forward, facts.num_ops + 1)
        all_ends = np.concatenate([[0], ends])
        doubled = forward + 1 + 2 * (positions - forward)
        self._before = doubled + all_ends[np.searchsorted(self._replayed_at, positions, side="left")]
        self._behind = doubled + 1 + all_ends[np.searchsorted(self._replayed_at, positions, side="right")]
        begins = forward + 2 + 2 * (self._replayed_at - forward) + begun
        self._begin = np.full(len(self._calls), -1, dtype=np.int64)  # of each replay: its first tick
        self._begin[self._order] = begins
        self._num_ticks = int(self._behind[-1]) + 1
        inner = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(begun, lengths)
        replay_ticks = np.repeat(begins, lengths) + inner
        replay_ops = np.repeat(self._first[self._order], lengths) + inner
        runs = (inner < np.repeat(lengths, lengths) - 1) & (self._keeper[replay_ops] != np.repeat(self._order, lengths))
        op_at = np.full(self._num_ticks, -2, dtype=np.int64)
        phase_at = np.full(self._num_ticks, _FORWARD, dtype=np.int64)
        op_at[:forward] = np.arange(forward)
        op_at[replay_ticks[runs]], phase_at[replay_ticks[runs]] = replay_ops[runs], _REPLAY
        op_at[self._behind[:-1]], phase_at[self._behind[:-1]] = np.arange(forward, facts.num_ops), _BACKWARD
        op_at[self._behind[-1]], phase_at[self._behind[-1]] = -1, _OPTIMIZER
        has_event = op_at > -2
        self.ops, self.phases = op_at[has_event], phase_at[has_event]
        self._event = np.zeros(self._num_ticks + 1, dtype=np.int64)  # the next one from each tick on
        np.cumsum(has_event, out=self._event[1:])

    def _set_lifetimes(self) -> None:
        """Create all lifetimes: first those of the forward and backward ops, then those of each replay in turn."""
        facts, forward, order = self.facts, self.facts.num_forward, self._order
        drops = np.full(len(facts.dropped), self._num_ticks, dtype=np.int64)
        early, late = facts.dropped <= forward, (facts.dropped > forward) & (facts.dropped < facts.num_ops)
        early &= facts.dropped < facts.num_ops
        drops[early] = facts.dropped[early]
        drops[late] = self._before[facts.dropped[late] - forward]
        births = np.where(facts.maker < forward, facts.maker, self._behind[np.maximum(facts.maker - forward, 0)])
        low, high = facts.starts[self._first[order]], facts.starts[self._stop[order]]
        counts = high - low
        begun = np.cumsum(counts) - counts
        self._low, self._high = np.zeros_like(self._first), np.zeros_like(self._first)
        self._low[order], self._high[order] = low, high
        self._life_of_low = np.zeros_like(self._first)
        self._life_of_low[order] = len(facts.sizes) + begun
        inner = np.arange(int(counts.sum())) - np.repeat(begun, counts)
        places = np.repeat(low, counts) + inner
        base = np.repeat(self._begin[order] - self._first[order], counts)  # the tick of position 0
        exists = self._keeper[facts.maker[places]] != np.repeat(order, counts)  # a retained output is not made again
        self._value_index = np.concatenate([np.arange(len(facts.sizes)), places])
        self._size = np.concatenate([facts.sizes, facts.sizes[places] * exists])
        self._exists = np.concatenate([np.ones(len(facts.sizes), dtype=bool), exists])
        self._birth = np.concatenate([births, base + facts.maker[places]])
        dropped = base + np.minimum(facts.dropped[places], np.repeat(self._stop[order], counts))
        self._drop = np.concatenate([drops, dropped])
        self._set_holds()

    def _set_holds(self) -> None:
        """Compute the holds of lifetimes, each from tick to tick: by saves, as regions' inputs, as retained outputs."""
        facts, owner = self.facts, self._owner
        ends_at = np.where((owner >= 0) & (facts.save_used >= 0), facts.save_used, facts.save_released)
        ends = self._either(ends_at, facts.save_read >= ends_at)
        is_own = owner < 0
        born = facts.save_number >= 0
        self._released = np.zeros(len(facts.sizes), dtype=np.int64)  # of each value, the last tick at which it is saved
        released = self._either(facts.save_released, facts.save_read >= facts.save_released)
        np.maximum.at(self._released, facts.save_number[born], released[born])
        held = np.flatnonzero(is_own & born)
        holds = [(facts.save_number[held], facts.save_made[held], ends[held])]
        again = np.flatnonzero(~is_own & born)
        again = again[self._begin[owner[again]] >= 0]
        starts = self._tick(owner[again], facts.save_made[again])
        lives = self._find(facts.save_number[again], owner[again], facts.save_made[again])
        holds.append((lives, starts, ends[again]))
        left = self._either(self._ends, self._is_last_read_at_end)
        entered, entry = self._entries(left)
        holds.append(self._inputs(entered, entry, left))
        done = np.where(self._begin >= 0, self._begin + self._stop - self._first, left)
        self._set_states(left, done)
        counts = facts.starts[self._kept_ops + 1] - facts.starts[self._kept_ops]
        inner = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        kept = np.repeat(facts.starts[self._kept_ops], counts) + inner
        kept_until = np.repeat(done[self._kept_by], counts)
        life, start, end = (np.concatenate(parts) for parts in zip(*holds, strict=True))
        valid = (life >= 0) & (end > start) & (self._birth[life] < start)
        life, start, end = life[valid], start[valid], end[valid]
        self._hold_life = np.concatenate([life, kept])
        self._hold_start = np.concatenate([start, self._birth[kept]])
        self._hold_end = np.concatenate([end, kept_until])
        self._drop_stale_holds()
        self._end = self._drop.copy()
        np.maximum.at(self._end, self._hold_life, self._hold_end)

    def _set_states(self, left: np.ndarray, done: np.ndarray) -> None:
        """Compute from which tick to which regions hold captured state, and how many bytes.

        A region, nested or not, holds its state from its forward until autograd has released all of its saves. Its
        replay captures the state of the regions inside once more and also holds the present state, which it restores
        at its end; both are freed when the replay is over.
        """
        captured, changed = self.facts.frame_bytes[self._calls], self.facts.replay_bytes[self._calls]
        ranks, again = np.flatnonzero(self._has_saves), self._order
        spans = [(self._first[ranks], left[ranks], captured[ranks]), (self._begin[again], done[again], changed[again])]
        for rank in ranks[self._outer[ranks] >= 0].tolist():
            outer = int(self._outer[rank])
            while outer >= 0:
                if self._begin[outer] >= 0 and self._first[rank] < self._stop[outer]:
                    entry = self._begin[outer] + self._first[rank] - self._first[outer]
                    spans.append((entry[None], done[outer, None], captured[rank, None]))
                outer = int(self._outer[outer])
        self._states = tuple(np.concatenate(parts).astype(np.int64) for parts in zip(*spans, strict=True))

    def _either(self, positions: np.ndarray, behind: np.ndarray) -> np.ndarray:
        """Return the tick of each position of the backward: after the replays there if `behind`, else before them."""
        at = np.maximum(positions - self.facts.num_forward, 0)
        return np.where(behind, self._behind[at], self._before[at])

    def _tick(self, rank: np.ndarray, position: np.ndarray) -> np.ndarray:
        return self._begin[rank] + position - self._first[rank]

    def _entries(self, left: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the regions that are entered, in the forward or in a replay around them, and all entry ticks."""
        outer = self._outer
        entry = np.where(outer < 0, self._first, self._begin[outer] + self._first - self._first[outer])
        happens = self._has_saves & ((outer < 0) | ((self._begin[outer] >= 0) & (entry < left)))
        return np.flatnonzero(happens), entry

    def _inputs(
        self, entered: np.ndarray, entry: np.ndarray, left: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        facts, calls = self.facts, self._calls[entered]
        counts = facts.input_starts[calls + 1] - facts.input_starts[calls]
        inner = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        rank = np.repeat(entered, counts)
        places = facts.inputs[np.repeat(facts.input_starts[calls], counts) + inner]
        there = np.flatnonzero(places >= 0)
        rank, places = rank[there], places[there]
        return self._find(places, self._outer[rank], self._first[rank]), entry[rank], left[rank]

    def _find(self, places: np.ndarray, rank: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Return the lifetime that a region's replay (-1: the forward) sees of each value at a position."""
        facts, lives, rank = self.facts, places.copy(), rank.copy()
        upto = facts.starts[position]
        open_ = np.flatnonzero(rank >= 0)
        while len(open_):
            at, place = rank[open_], places[open_]
            high = np.minimum(self._high[at], upto[open_])
            inside = (self._low[at] <= place) & (place < high) & (self._keeper[facts.maker[place]] != at)
            lives[open_[inside]] = self._life_of_low[at[inside]] + place[inside] - self._low[at[inside]]
            open_ = open_[~inside]
            rank[open_] = self._outer[rank[open_]]
            upto[open_] = _NEVER  # the replay around has run to its end
            open_ = open_[rank[open_] >= 0]
        return lives

    def _drop_stale_holds(self) -> None:
        """Remove holds of lifetimes that have ended: a region may read a freed value that it was not given."""
        late = self._hold_start > self._drop[self._hold_life]
        if not late.any():
            return
        is_suspect = np.zeros(len(self._drop), dtype=bool)
        is_suspect[self._hold_life[late]] = True
        among = np.flatnonzero(is_suspect[self._hold_life])
        order = among[np.lexsort((self._hold_start[among], self._hold_life[among]))]
        before, is_first = ends_before(self._hold_life[order], self._hold_end[order], self._drop, self._num_ticks)
        is_stale = (self._hold_start[order] > before).astype(np.int64)
        count = np.cumsum(is_stale)
        count_before_life = np.maximum.accumulate(np.where(is_first, count - is_stale, 0))
        keep = np.ones(len(self._hold_life), dtype=bool)
        keep[order[count > count_before_life]] = False  # a lifetime that has ended does not begin again
        self._hold_life, self._hold_start = self._hold_life[keep], self._hold_start[keep]
        self._hold_end = self._hold_end[keep]

    @cached_property
    def total_bytes(self) -> np.ndarray:
        """Live bytes at each event."""
        num = len(self.ops)
        changes = np.bincount(self._event[self._birth], weights=self._size, minlength=num + 1)[: num + 1]
        changes -= np.bincount(self._event[self._end], weights=self._size, minlength=num + 1)[: num + 1]
        made = np.cumsum(changes[:num] + self._region_changes()).astype(np.int64) + self.facts.workspaces[self.ops]
        return made + self.facts.static_bytes + self.facts.static_gradient_bytes

    def _region_changes(self) -> np.ndarray:
        num, (starts, ends, sizes) = len(self.ops), self._states
        changes = np.bincount(self._event[starts], weights=sizes, minlength=num + 1)[:num]
        return changes - np.bincount(self._event[ends], weights=sizes, minlength=num + 1)[:num]

    @property
    def peak_bytes(self) -> int:
        return int(self.total_bytes.max())

    def keeping(self, may_keep: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return what retaining outputs of replayed ops in `may_keep` would add: op, bytes, first and last event.

        An op has several rows, some of no length. A retained value also lives between the forward and the replay, and
        until the replay has ended and its saves are released. The rows of retained values do not depend on each other
        as long as the replay begins and ends where it did. Regions with regions inside are left out, because the inner
        ones would drop the retained values.
        """
        facts, event = self.facts, self._event
        num = np.arange(len(facts.sizes), len(self._value_index))
        rank = np.repeat(self._order, (self._high - self._low)[self._order])
        has_inner = np.zeros(len(self._calls) + 1, dtype=bool)
        has_inner[self._outer] = True  # at the end, of none
        wanted = (
            (self._outer[rank] < 0)
            & ~has_inner[rank]
            & self._exists[num]
            & may_keep[facts.maker[self._value_index[num]]]
        )
        lives, rank = num[wanted], rank[wanted]
        place = self._value_index[lives]
        ends = event[np.maximum((self._begin + self._stop - self._first)[rank], self._released[place])]
        starts = np.concatenate([event[self._end[place]], event[self._end[lives]]])
        stops = np.concatenate([event[self._birth[lives]], ends])
        ops, sizes = np.tile(facts.maker[place], 2), np.tile(self._size[lives], 2)
        return ops, sizes, starts, np.maximum(starts, stops)

    @cached_property
    def _seconds(self) -> np.ndarray:
        return self.facts.seconds[self.ops]

    @cached_property
    def _host_s(self) -> np.ndarray:
        """Host seconds of each event, with the engine's work before it."""
        found = self.facts.host_s[self.ops]
        for fees, ticks in ((self._fees.forward_s, self._first), (self._fees.replay_s, self._begin)):
            due = [rank for rank, call in enumerate(self._calls.tolist()) if fees.get(call)]
            np.add.at(found, self._event[ticks[due]], [fees[call] for call in self._calls[due].tolist()])
        return found

    @cached_property
    def _starts_s(self) -> np.ndarray:
        if not self.facts.has_host_line:
            return np.concatenate([[0.0], np.cumsum(self._seconds[:-1])])
        return device_starts(self._host_s, self._seconds, self.facts.is_sync[self.ops])

    @cached_property
    def lines(self) -> StepLines:
        """Seconds of work on each time line, and seconds of the step."""
        if not self.facts.has_host_line:
            total_s = float(self._starts_s[-1]) + self.watched_s
            return StepLines(0.0, total_s, total_s)
        step_s = step_seconds(self._host_s, self._seconds, self.facts.is_sync[self.ops])
        return StepLines(float(self._host_s.sum()), float(self._seconds.sum()), step_s)

    @cached_property
    def replayed_s(self) -> float:
        seconds = self._seconds[self.phases == _REPLAY]
        return float(np.cumsum(seconds)[-1]) if len(seconds) else 0.0

    @property
    def extra_s(self) -> float:
        if self.facts.has_host_line:
            return max(0.0, self.lines.step_s - self.facts.step_s)
        return self.replayed_s + self.watched_s

    def live_at(self, event: int, most: int | None = None) -> dict[int, int]:
        """Return the bytes of each value that lives at an event, or of the `most` largest ones."""
        lives = np.flatnonzero((self._event[self._birth] <= event) & (event < self._event[self._end]) & self._exists)
        sizes: dict[int, int] = {}
        for life in lives.tolist():
            value = int(self.facts.value[self._value_index[life]])
            sizes[value] = sizes.get(value, 0) + int(self._size[life])
        return sizes if most is None else largest(sizes, most)

    def _kept_bytes(self) -> np.ndarray:
        """Return the bytes of activations that a save or a region holds at each event."""
        num = len(self.ops)
        order = np.lexsort((self._hold_start, self._hold_life))
        life, start, end = self._hold_life[order], self._hold_start[order], self._hold_end[order]
        nothing = np.zeros(len(self._drop), dtype=np.int64)
        start = np.maximum(start, ends_before(life, end, nothing, self._num_ticks)[0])  # held already
        counted = (end > start) & ~self.facts.is_gradient[self._value_index[life]]
        life, start, end = life[counted], start[counted], end[counted]
        changes = np.bincount(self._event[start], weights=self._size[life], minlength=num + 1)[:num]
        changes -= np.bincount(self._event[end], weights=self._size[life], minlength=num + 1)[:num]
        return np.cumsum(changes + self._region_changes()).astype(np.int64)

    def _gradient_bytes(self) -> np.ndarray:
        num, sizes = len(self.ops), self._size * self.facts.is_gradient[self._value_index]
        changes = np.bincount(self._event[self._birth], weights=sizes, minlength=num + 1)[:num]
        changes -= np.bincount(self._event[self._end], weights=sizes, minlength=num + 1)[:num]
        return np.cumsum(changes).astype(np.int64) + self.facts.static_gradient_bytes

    def columns(self) -> dict[str, Any]:
        """Return the fields of a `Timeline`."""
        live = np.zeros((len(self.ops), 5), dtype=np.int64)
        live[:, 0] = self.facts.static_bytes
        live[:, 1] = self._kept_bytes()
        live[:, 3] = self._gradient_bytes()
        live[:, 2] = self.total_bytes - live[:, 0] - live[:, 1] - live[:, 3]
        return {
            "live_bytes": live,
            "ops": self.ops,
            "phases": self.phases,
            "starts_s": self._starts_s,
            "replayed_s": self.replayed_s,
            "stalled_s": 0.0,
            "watched_s": self.watched_s,
            "host_bytes": 0,
            "copied_out_s": 0.0,
            "copied_in_s": 0.0,
            "lines": self.lines,
        }
