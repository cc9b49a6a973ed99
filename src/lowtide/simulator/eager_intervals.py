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
from lowtide.graph.time_lines import StepLines, device_starts, step_seconds
from lowtide.simulator.lifetimes import bytes_by_value
from lowtide.simulator.planned_regions import NEVER, PlannedRegions

_FORWARD, _REPLAY, _BACKWARD, _OPTIMIZER = 0, 1, 2, 3
_ZERO = np.zeros(1, dtype=np.int64)


def _ends_before(
    lives: np.ndarray, ends: np.ndarray, floor: np.ndarray, num_ticks: int
) -> tuple[np.ndarray, np.ndarray]:
    """For holds sorted by lifetime and start: the last end of earlier holds of the same lifetime, and which are first.

    The end is at least the `floor` of the lifetime, and equals it for a hold that is the first.
    """
    is_first, floors, begins = np.ones(len(lives), dtype=bool), floor[lives], lives * (num_ticks + 1)
    np.not_equal(lives[1:], lives[:-1], out=is_first[1:])
    latest = np.maximum.accumulate(begins + np.maximum(ends, floors)) - begins
    before = floors.copy()
    before[1:] = np.where(is_first[1:], floors[1:], latest[:-1])
    return before, is_first


class EagerIntervals:
    """One step in which `regions` are replayed: calls, with the ops of each whose outputs it retains.

    A save of a retained output holds it from the forward on, like a save outside of regions.
    """

    host_bytes = 0

    def __init__(self, graph: StepGraph, regions: Mapping[int, Sequence[int]]) -> None:
        self.graph, self.facts = graph, graph.arrays
        self.planned = planned = PlannedRegions(graph, regions)
        self.engine_s = planned.engine.total_s
        self._set_ticks()
        self._set_lifetimes()
        self._set_holds()

    def _set_ticks(self) -> None:
        """Number the ticks and the events. An event is an op that runs after a tick."""
        facts, planned, forward = self.facts, self.planned, self.facts.num_forward
        first = planned.first[planned.order]
        lengths = planned.stop[planned.order] - first + 1
        ends = lengths.cumsum()
        begun = ends - lengths
        all_ends = np.concatenate([_ZERO, ends])
        positions, doubled = facts.backward_positions, facts.backward_ticks
        before = doubled + all_ends[planned.replayed_at.searchsorted(positions, side="left")]
        behind = doubled + 1 + all_ends[planned.replayed_at.searchsorted(positions, side="right")]
        begins = forward + 2 + 2 * (planned.replayed_at - forward) + begun
        self._begin = np.full(len(planned.calls), -1)  # of each replay: its first tick
        self._begin[planned.order] = begins
        self._num_ticks = int(behind[-1]) + 1
        self._ticks = np.concatenate([facts.forward_ticks, before, behind, [self._num_ticks]])  # by tick row
        all_lengths = lengths.repeat(lengths)
        inner = np.arange(int(ends[-1]) if len(ends) else 0) - begun.repeat(lengths)
        replay_ticks = begins.repeat(lengths) + inner
        replay_ops = first.repeat(lengths) + inner
        runs = inner < all_lengths - 1
        if planned.retains:
            runs &= planned.keeper[replay_ops] != planned.order.repeat(lengths)
        replay_ticks = replay_ticks[runs]
        op_at, phase_at = np.full(self._num_ticks, -2), np.zeros(self._num_ticks, dtype=np.int64)  # phase _FORWARD
        op_at[:forward] = facts.forward_ticks[:forward]
        op_at[replay_ticks], phase_at[replay_ticks] = replay_ops[runs], _REPLAY
        op_at[behind[:-1]], phase_at[behind[:-1]] = positions[:-1], _BACKWARD
        op_at[-1], phase_at[-1] = -1, _OPTIMIZER
        has_event = op_at > -2
        self.ops, self.phases = op_at[has_event], phase_at[has_event]
        self._event = np.zeros(self._num_ticks + 1, dtype=np.int64)  # the next one from each tick on
        has_event.cumsum(out=self._event[1:])

    def _set_lifetimes(self) -> None:
        """Create all lifetimes: first those of the forward and backward ops, then those of each replay in turn."""
        facts, planned, order = self.facts, self.planned, self.planned.order
        first, stop = planned.first[order], planned.stop[order]
        low, high = facts.starts[first], facts.starts[stop]
        counts = high - low
        begun = counts.cumsum() - counts
        self._low, self._high = np.zeros_like(planned.first), np.zeros_like(planned.first)
        self._low[order], self._high[order] = low, high
        self._life_of_low = np.zeros_like(planned.first)
        self._life_of_low[order] = len(facts.sizes) + begun
        indices = (low - begun).repeat(counts)
        indices += np.arange(len(indices))
        base = (self._begin[order] - first).repeat(counts)  # the tick of position 0
        self._again = indices  # of the values that replays make
        sizes = facts.sizes[indices]
        if planned.retains:
            sizes *= self._is_made_again
        self._size = np.concatenate([facts.sizes, sizes])
        self._birth = np.concatenate([self._ticks[facts.birth_rows], base + facts.maker[indices]])
        dropped = base + np.minimum(facts.dropped_in_replay[indices], stop.repeat(counts))
        self._drop = np.concatenate([self._ticks[facts.drop_rows], dropped])

    @property
    def _is_made_again(self) -> np.ndarray:
        """For each value of `_again`, whether the replay makes it: a retained output is not made again."""
        order = self.planned.order
        rank = order.repeat((self._high - self._low)[order])
        return self.planned.keeper[self.facts.maker[self._again]] != rank

    @cached_property
    def _value_index(self) -> np.ndarray:
        """The value of each lifetime."""
        return np.concatenate([np.arange(len(self.facts.sizes)), self._again])

    @cached_property
    def _exists(self) -> np.ndarray:
        return np.concatenate([np.ones(len(self.facts.sizes), dtype=bool), self._is_made_again])

    def _set_holds(self) -> None:
        """Compute the holds of lifetimes, each from tick to tick: by saves, as regions' inputs, as retained outputs."""
        facts, planned, owner = self.facts, self.planned, self.planned.owner
        is_own = owner < 0
        ends = self._ticks[np.where(is_own, facts.release_rows, facts.last_use_rows)]
        held = (is_own & facts.is_save_of_made).nonzero()[0]
        holds = [(facts.save_index[held], facts.save_made[held], ends[held])]
        again = (~is_own & facts.is_save_of_made).nonzero()[0]
        owners = owner[again]
        is_replayed = self._begin[owners] >= 0
        if not is_replayed.all():
            again, owners = again[is_replayed], owners[is_replayed]
        made = facts.save_made[again]
        lives = self._find(facts.save_index[again], owners, made)
        holds.append((lives, self._begin[owners] + made - planned.first[owners], ends[again]))
        left = self._ticks[facts.backward_rows(planned.ends, planned.last_read == planned.ends)]
        replay_ends = self._begin + planned.stop - planned.first
        self._left, self._done = left, np.where(self._begin >= 0, replay_ends, left)
        entered, entry = self._entries(left)
        holds.append(self._inputs(entered, entry, left))
        life, start, end = (np.concatenate(parts) for parts in zip(*holds, strict=True))
        valid = (end > start) & (self._birth[life] < start)
        self._hold_life, self._hold_start, self._hold_end = life[valid], start[valid], end[valid]
        if planned.retains:
            self._hold_retained()
        self._drop_stale_holds()
        self._end = self._drop.copy()
        np.maximum.at(self._end, self._hold_life, self._hold_end)

    def _hold_retained(self) -> None:
        """Add the holds of retained outputs, until the replay of their region is over."""
        facts, planned = self.facts, self.planned
        ops = (planned.keeper >= 0).nonzero()[0]
        ops = ops[planned.has_saves[planned.keeper[ops]]]
        counts = facts.starts[ops + 1] - facts.starts[ops]
        kept = (facts.starts[ops] - (counts.cumsum() - counts)).repeat(counts)
        kept += np.arange(len(kept))
        until = self._done[planned.keeper[ops]].repeat(counts)
        self._hold_life = np.concatenate([self._hold_life, kept])
        self._hold_start = np.concatenate([self._hold_start, self._birth[kept]])
        self._hold_end = np.concatenate([self._hold_end, until])

    @cached_property
    def _states(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """From which tick to which regions hold captured state, and how many bytes.

        A region, nested or not, holds its state from its forward until autograd has released all of its saves. Its
        replay captures the state of the regions inside once more and also holds the present state, which it restores
        at its end; both are freed when the replay is over.
        """
        facts, planned, left, done = self.facts, self.planned, self._left, self._done
        captured, changed = facts.frame_bytes[planned.calls], facts.replay_bytes[planned.calls]
        ranks, again = planned.has_saves.nonzero()[0], planned.order
        spans = [(planned.first[ranks], left[ranks], captured[ranks])]
        spans.append((self._begin[again], done[again], changed[again]))
        for rank in ranks[planned.outer[ranks] >= 0].tolist():
            outer = int(planned.outer[rank])
            while outer >= 0:
                if self._begin[outer] >= 0 and planned.first[rank] < planned.stop[outer]:
                    entry = self._begin[outer] + planned.first[rank] - planned.first[outer]
                    spans.append((entry[None], done[outer, None], captured[rank, None]))
                outer = int(planned.outer[outer])
        starts, ends, sizes = (np.concatenate(parts).astype(np.int64) for parts in zip(*spans, strict=True))
        return starts, ends, sizes

    def _entries(self, left: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the regions that are entered, in the forward or in a replay around them, and all entry ticks."""
        planned, outer = self.planned, self.planned.outer
        is_outermost, begin = outer < 0, self._begin[outer]
        entry = np.where(is_outermost, planned.first, begin + planned.first - planned.first[outer])
        happens = planned.has_saves & (is_outermost | ((begin >= 0) & (entry < left)))
        return happens.nonzero()[0], entry

    def _inputs(
        self, entered: np.ndarray, entry: np.ndarray, left: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        facts, planned = self.facts, self.planned
        calls = planned.calls[entered]
        starts = facts.input_starts[calls]
        counts = facts.input_starts[calls + 1] - starts
        rank = entered.repeat(counts)
        inputs = (starts - (counts.cumsum() - counts)).repeat(counts)
        inputs += np.arange(len(inputs))
        indices = facts.inputs[inputs]
        there = indices >= 0
        rank, indices = rank[there], indices[there]
        return self._find(indices, planned.outer[rank], planned.first[rank]), entry[rank], left[rank]

    def _find(self, indices: np.ndarray, rank: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Return the lifetime that a region's replay (-1: the forward) sees of each value at a position."""
        facts, planned, lives = self.facts, self.planned, indices.copy()
        open_ = (rank >= 0).nonzero()[0]
        upto: np.ndarray | int = facts.starts[position[open_]]
        at, index = rank[open_], indices[open_]
        while len(open_):
            low = self._low[at]
            inside = (low <= index) & (index < np.minimum(self._high[at], upto))
            if planned.retains:
                inside &= planned.keeper[facts.maker[index]] != at
            lives[open_[inside]] = (self._life_of_low[at] + index - low)[inside]
            at = planned.outer[at]
            outside = ((at >= 0) & ~inside).nonzero()[0]
            open_, at, index = open_[outside], at[outside], index[outside]
            upto = NEVER  # the replay around has run to its end
        return lives

    def _drop_stale_holds(self) -> None:
        """Remove holds of lifetimes that have ended: a region may read a freed value that it was not given."""
        late = self._hold_start > self._drop[self._hold_life]
        if not late.any():
            return
        is_suspect = np.zeros(len(self._drop), dtype=bool)
        is_suspect[self._hold_life[late]] = True
        among = is_suspect[self._hold_life].nonzero()[0]
        keys = self._hold_life[among] * (self._num_ticks + 1) + self._hold_start[among]
        order = among[keys.argsort(kind="stable")]
        before, is_first = _ends_before(self._hold_life[order], self._hold_end[order], self._drop, self._num_ticks)
        is_late = self._hold_start[order] > before
        if not is_late.any():
            return
        is_stale = is_late.astype(np.int64)
        count = is_stale.cumsum()
        count_before_life = np.maximum.accumulate(np.where(is_first, count - is_stale, 0))
        keep = np.ones(len(self._hold_life), dtype=bool)
        keep[order[count > count_before_life]] = False  # a lifetime that has ended does not begin again
        self._hold_life, self._hold_start = self._hold_life[keep], self._hold_start[keep]
        self._hold_end = self._hold_end[keep]

    @cached_property
    def total_bytes(self) -> np.ndarray:
        """Live bytes at each event."""
        changes = self._changes(self._birth, self._end, self._size) + self._region_changes()
        made = changes.cumsum().astype(np.int64) + self.facts.workspaces[self.ops]
        return made + (self.facts.static_bytes + self.facts.static_gradient_bytes)

    def _region_changes(self) -> np.ndarray | float:
        if not self.facts.has_state:
            return 0.0
        return self._changes(*self._states)

    def _changes(self, starts: np.ndarray, ends: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Return how live bytes change at each event, for `sizes` that live from tick to tick."""
        num = len(self.ops)
        changes = np.bincount(self._event[starts], weights=sizes, minlength=num + 1)
        return (changes - np.bincount(self._event[ends], weights=sizes, minlength=num + 1))[:num]

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
        facts, planned, event = self.facts, self.planned, self._event
        num = np.arange(len(facts.sizes), len(self._value_index))
        rank = planned.order.repeat((self._high - self._low)[planned.order])
        has_inner = np.zeros(len(planned.calls) + 1, dtype=bool)
        has_inner[planned.outer] = True  # at the end, of none
        wanted = (
            (planned.outer[rank] < 0)
            & ~has_inner[rank]
            & self._exists[num]
            & may_keep[facts.maker[self._value_index[num]]]
        )
        lives, rank = num[wanted], rank[wanted]
        index = self._value_index[lives]
        released = np.zeros(len(facts.sizes), dtype=np.int64)  # of each value, the last tick at which it is saved
        born = facts.is_save_of_made
        np.maximum.at(released, facts.save_index[born], self._ticks[facts.release_rows[born]])
        ends = event[np.maximum((self._begin + planned.stop - planned.first)[rank], released[index])]
        starts = np.concatenate([event[self._end[index]], event[self._end[lives]]])
        stops = np.concatenate([event[self._birth[lives]], ends])
        ops, sizes = np.tile(facts.maker[index], 2), np.tile(self._size[lives], 2)
        return ops, sizes, starts, np.maximum(starts, stops)

    @cached_property
    def _seconds(self) -> np.ndarray:
        return self.facts.seconds[self.ops]

    @cached_property
    def _host_s(self) -> np.ndarray:
        """Host seconds of each event, with the engine's work before it."""
        planned, engine, found = self.planned, self.planned.engine, self.facts.host_s[self.ops]
        for host_s, ticks in ((engine.forward_s, planned.first), (engine.replay_s, self._begin)):
            due = [rank for rank, call in enumerate(planned.calls.tolist()) if host_s.get(call)]
            np.add.at(found, self._event[ticks[due]], [host_s[call] for call in planned.calls[due].tolist()])
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
            total_s = float(self._starts_s[-1]) + self.engine_s
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
        return self.replayed_s + self.engine_s

    def live_at(self, event: int, most: int | None = None) -> dict[int, int]:
        """Return the bytes of each value that lives at an event, or of the `most` largest ones."""
        lives = (self._event[self._birth] <= event) & (event < self._event[self._end]) & self._exists
        values, sizes = self.facts.value[self._value_index[lives]], self._size[lives].astype(int)
        return bytes_by_value(zip(values.tolist(), sizes.tolist(), strict=True), most)

    def _kept_bytes(self) -> np.ndarray:
        """Return the bytes of activations that a save or a region holds at each event."""
        order = np.lexsort((self._hold_start, self._hold_life))
        life, start, end = self._hold_life[order], self._hold_start[order], self._hold_end[order]
        nothing = np.zeros(len(self._drop), dtype=np.int64)
        start = np.maximum(start, _ends_before(life, end, nothing, self._num_ticks)[0])  # held already
        counted = (end > start) & ~self.facts.is_gradient[self._value_index[life]]
        life, start, end = life[counted], start[counted], end[counted]
        changes = self._changes(start, end, self._size[life])
        return np.cumsum(changes + self._region_changes()).astype(np.int64)

    def _gradient_bytes(self) -> np.ndarray:
        sizes = self._size * self.facts.is_gradient[self._value_index]
        changes = self._changes(self._birth, self._end, sizes)
        return np.cumsum(changes).astype(np.int64) + self.facts.static_gradient_bytes

    def columns(self) -> dict[str, Any]:
        """Return the fields of a `Timeline`."""
        static, kept, gradients = self.facts.static_bytes, self._kept_bytes(), self._gradient_bytes()
        transient = self.total_bytes - static - kept - gradients
        live = np.stack([np.full(len(kept), static), kept, transient, gradients, np.zeros_like(kept)], axis=1)
        return {
            "live_bytes": live,
            "ops": self.ops,
            "phases": self.phases,
            "starts_s": self._starts_s,
            "replayed_s": self.replayed_s,
            "engine_s": self.engine_s,
            "lines": self.lines,
        }
