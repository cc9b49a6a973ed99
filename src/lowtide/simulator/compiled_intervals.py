"""Simulation of a compiled step, in which single values are saved and single ops recomputed.

`simulate` calls `play_compiled` for plans of the compiled engine. The rules:

- The forward saves the outputs of the chosen ops. Other values are freed when Python drops them.
- Every other value that the backward needs is recomputed once, right before its first use and after the values that
  it is computed from. It lives until its last use, by the backward or by another recomputation.
- A saved value lives from the forward until autograd releases it, or until the last recomputation that reads it.

Each lifetime is an interval of events, and live bytes are sums over intervals: a step of 10^4 ops takes milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lowtide.graph.step_graph import StepGraph
from lowtide.graph.time_lines import StepLines
from lowtide.simulator.lifetimes import bytes_by_value

_KEPT, _TRANSIENT, _GRADIENTS = 0, 1, 2
_FORWARD, _REPLAY, _BACKWARD, _OPTIMIZER = 0, 1, 2, 3


@dataclass(frozen=True)
class CompiledIntervals:
    """The events of a step and the lifetimes in it: `value[i]` takes `bytes[i]` from event `start[i]` to `last[i]`.

    `kind[i]` is 0 for kept, 1 for transient and 2 for gradients. Workspaces have no lifetime of their own: they
    count as transient at the event of their op.
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
        """Return the bytes at each event: static, kept, transient, gradients, and in flight (always 0)."""
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
        """Return the fields of a `Timeline`."""
        events = {"live_bytes": self.live_bytes(), "ops": self.ops, "phases": self.phases, "starts_s": self.starts_s}
        total_s = float(self.starts_s[-1])
        return {**events, "replayed_s": self.replayed_s, "lines": StepLines(0.0, total_s, total_s)}

    def live_at(self, event: int, most: int | None = None) -> dict[int, int]:
        """Return the bytes of each value that lives at an event, or of the `most` largest ones."""
        lives = (self.start <= event) & (event <= self.last)
        return bytes_by_value(zip(self.value[lives].tolist(), self.bytes[lives].tolist(), strict=True), most)


def play_compiled(graph: StepGraph, keeps: tuple[int, ...]) -> CompiledIntervals:
    """Simulate the step with the outputs of the ops `keeps` saved and the rest recomputed where it is needed."""
    needs, num, end = graph.needs, graph.num_forward, len(graph.ops)
    derived = needs.derive(frozenset(keeps))
    order = _order(graph, derived.recomputed)  # (position, op)

    # Events. `event_of[p]` is the event of op p, and at the end that of the optimizer's step. A backward op comes after
    # the ops before it and the recomputations up to its position. Recomputation k, at position p, is event p + k.
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

    # The last event at which each value is needed: `held` if it is saved, `made_again` if it is recomputed.
    read, value_of = needs.read_at, needs.value_of
    held, made_again = (np.full(len(graph.values), -1, dtype=np.int64) for _ in range(2))
    for until, ends in ((held, needs.released_at), (made_again, needs.used_at)):
        # A read that releases its value at once ends after the recomputations at this position and before the op.
        np.maximum.at(until, value_of, np.where(read < ends, event_of[ends - 1], event_of[ends] - 1))
    again_event = dict(zip(again.tolist(), again_at.tolist(), strict=True))
    for op in derived.recomputed:
        for value in needs.reads[op]:
            held[value] = max(held[value], again_event[op])
            made_again[value] = max(made_again[value], again_event[op])

    # Lifetimes of the values that the forward and the backward make, then of recomputed values.
    facts, (has_bytes_made, has_bytes_again) = graph.arrays, needs.has_bytes
    made, first = facts.value, event_of[facts.maker]
    dropped = np.where(facts.dropped == end, num_events - 1, event_of[facts.dropped - 1])
    needed = held[made]
    is_saved = np.zeros(len(graph.values), dtype=bool)
    is_saved[list(derived.saved)] = True
    is_kept = (is_saved[made] | ((facts.dropped > num) & (needed >= 0))) & ~facts.is_gradient
    is_left = is_kept & (dropped > needed)  # Python holds it longer than the backward needs it
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
        [has_bytes_made[made] | (kind != _TRANSIENT), np.full(len(left[0]), True), has_bytes_again[values]]
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
        bytes=facts.sizes.astype(np.int64)[facts.made_index[table[:, 0]]] * has_bytes,
        start=table[:, 1],
        last=table[:, 2],
        kind=table[:, 3],
    )


def _order(graph: StepGraph, recomputed: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return (position, op) for each recomputed op, sorted: it runs at the first position that needs its outputs."""
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
