"""A step as the compiled engine runs it: single values saved, single ops recomputed.

The forward saves the outputs of chosen ops; what it does not save goes when Python drops it. Every other value that the
backward needs is recomputed once, right before its first need, with what that takes in turn, in the order of the
forward. A recomputed value lives until its last need: the backward's own read, until its reader is done, or a later
recomputation. A saved value lives likewise, from the forward on, until autograd lets go.

All lives are intervals of events, so live bytes are sums over them, and a step of 10^4 ops is played in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lowtide.graph.step_graph import StepGraph
from lowtide.graph.time_lines import StepLines
from lowtide.simulator.lifetimes import largest

_KEPT, _TRANSIENT, _GRADIENTS = 0, 1, 2
_FORWARD, _REPLAY, _BACKWARD, _OPTIMIZER = 0, 1, 2, 3


@dataclass(frozen=True)
class CompiledIntervals:
    """The events of a step, and the lives in it: `value[i]` has `bytes[i]` from event `start[i]` to `last[i]`.

    `kind[i]` is 0 for kept, 1 for transient and 2 for gradients; workspaces are transient and no lives.
    """

    ops: np.ndarray
    phases: np.ndarray
    starts_s: np.ndarray
    replayed_s: float
    static_bytes: int
    static_gradient_bytes: int
    workspace_bytes: np.ndarray
    value: np.ndarray
    bytes: np.ndarray
    start: np.ndarray
    last: np.ndarray
    kind: np.ndarray

    def live_bytes(self) -> np.ndarray:
        """Bytes at each event: static, kept, transient, gradients, and 0 in flight."""
        num = len(self.ops)
        changes = np.zeros((num + 1, 3), dtype=np.int64)
        np.add.at(changes, (self.start, self.kind), self.bytes)
        np.add.at(changes, (self.last + 1, self.kind), -self.bytes)
        live = np.zeros((num, 5), dtype=np.int64)
        live[:, 0] = self.static_bytes
        live[:, 1:4] = np.cumsum(changes[:-1], axis=0)
        live[:, 2] += self.workspace_bytes
        live[:, 3] += self.static_gradient_bytes
        return live

    def columns(self) -> dict[str, Any]:
        """What a timeline is made of."""
        found = {"live_bytes": self.live_bytes(), "ops": self.ops, "phases": self.phases, "starts_s": self.starts_s}
        nothing = dict.fromkeys(("stalled_s", "watched_s", "copied_out_s", "copied_in_s"), 0.0)
        total_s = float(self.starts_s[-1])
        lines = StepLines(0.0, total_s, total_s)
        return {**found, **nothing, "replayed_s": self.replayed_s, "host_bytes": 0, "lines": lines}

    def live_at(self, event: int, most: int | None = None) -> dict[int, int]:
        """Bytes of each value that lives at an event; where `most` is given, those of as many of the largest."""
        found: dict[int, int] = {}
        for index in np.flatnonzero((self.start <= event) & (event <= self.last)):
            value = int(self.value[index])
            found[value] = found.get(value, 0) + int(self.bytes[index])
        return found if most is None else largest(found, most)


def play_compiled(graph: StepGraph, keeps: tuple[int, ...]) -> CompiledIntervals:
    """The step with the outputs of the ops `keeps` saved."""
    needs, num, end = graph.needs, graph.num_forward, len(graph.ops)
    derived = needs.derive(frozenset(keeps))
    order = _order(graph, derived.recomputed)  # (position, op)

    # Events. `event_of[p]` is that of backward op p (and of the optimizer's step, at the end): after the ops before
    # it and the recomputations up to its position. Recomputation k, at position p, is event p + k.
    positions = np.array([position for position, _ in order], dtype=np.int64)
    again = np.array([op for _, op in order], dtype=np.int64)
    event_of = np.arange(end + 1) + np.searchsorted(positions, np.arange(end + 1), side="right")
    event_of[:num] = np.arange(num)
    again_at = positions + np.arange(len(order))
    num_events = end + 1 + len(order)
    ops = np.full(num_events, -1, dtype=np.int64)
    phases = np.full(num_events, _OPTIMIZER, dtype=np.int64)
    ops[event_of[:end]] = np.arange(end)
    phases[event_of[:end]] = np.where(np.arange(end) < num, _FORWARD, _BACKWARD)
    ops[again_at], phases[again_at] = again, _REPLAY

    # Until when each value is needed: as it is saved, and as it is recomputed.
    read, value_of = needs.read_at, needs.value_of
    held, made_again = (np.full(len(graph.values), -1, dtype=np.int64) for _ in range(2))
    for until, ends in ((held, needs.released_at), (made_again, needs.used_at)):
        # Let go at once where a read is its own end: after the recomputations there, and before the op.
        np.maximum.at(until, value_of, np.where(read < ends, event_of[ends - 1], event_of[ends] - 1))
    again_event = dict(zip(again.tolist(), again_at.tolist(), strict=True))
    for op in derived.recomputed:
        for value in needs.reads[op]:
            held[value] = max(held[value], again_event[op])
            made_again[value] = max(made_again[value], again_event[op])

    # Lives of what the forward and the backward make, and of what is recomputed.
    facts = needs.facts
    made, first = facts.made, event_of[facts.born]
    dropped = np.where(facts.dropped == end, num_events - 1, event_of[facts.dropped - 1])
    needed = held[made]
    is_saved = np.zeros(len(graph.values), dtype=bool)
    is_saved[list(derived.saved)] = True
    is_kept = (is_saved[made] | (facts.is_free & (needed >= 0))) & ~facts.is_gradient
    is_left = is_kept & (dropped > needed)  # when nothing needs it any more, Python still holds it
    last = np.where(is_kept, needed, np.where(facts.is_gradient, np.maximum(dropped, needed), dropped))
    kind = np.where(is_kept, _KEPT, np.where(facts.is_gradient, _GRADIENTS, _TRANSIENT))
    lives = [np.stack([made, first, last, kind], axis=1)]
    left = made[is_left], needed[is_left] + 1, dropped[is_left], np.full(int(is_left.sum()), _TRANSIENT)
    lives.append(np.stack(left, axis=1))
    anew = [(value, again_event[op]) for op in derived.recomputed for value in graph.ops[op].outputs]
    values, events = np.array(anew, dtype=np.int64).reshape(-1, 2).T
    until_need = np.where(np.array(needs.is_free)[values], events, np.maximum(events, made_again[values]))
    lives.append(np.stack([values, events, until_need, np.full(len(anew), _TRANSIENT)], axis=1))
    table = np.concatenate(lives)
    has_bytes = np.concatenate(
        [facts.has_bytes[made] | (kind != _TRANSIENT), np.full(len(left[0]), True), facts.has_bytes_again[values]]
    )

    seconds = facts.seconds[ops]
    seconds[again_at] = np.array(needs.seconds)[again]
    return CompiledIntervals(
        ops=ops,
        phases=phases,
        starts_s=np.concatenate([[0.0], np.cumsum(seconds)[:-1]]),
        replayed_s=needs.seconds_of(derived),
        static_bytes=facts.static_bytes,
        static_gradient_bytes=facts.static_gradient_bytes,
        workspace_bytes=facts.workspaces[ops],
        value=table[:, 0],
        bytes=facts.sizes[table[:, 0]] * has_bytes,
        start=table[:, 1],
        last=table[:, 2],
        kind=table[:, 3],
    )


def _order(graph: StepGraph, recomputed: tuple[int, ...]) -> list[tuple[int, int]]:
    """When each op runs again, and in which order: at the first position at which anything needs its outputs."""
    needs = graph.needs
    first_need: dict[int, int] = {}
    for value, read in zip(needs.value_of.tolist(), needs.read_at.tolist(), strict=True):
        first_need[value] = min(first_need.get(value, read), read)
    order = []
    for op in reversed(recomputed):
        wanted = [value for value in graph.ops[op].outputs if value in first_need and not needs.is_free[value]]
        position = min(first_need[value] for value in wanted)
        order.append((position, op))
        for value in needs.inputs[op]:
            first_need[value] = min(first_need.get(value, position), position)
    return sorted(order)
