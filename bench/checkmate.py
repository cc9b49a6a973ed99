"""A Checkmate-style MILP over the eager engine's decisions, solved by HiGHS.

Jain et al., "Checkmate: breaking the memory wall with optimal tensor rematerialization" (2020), decide for each value
at each time; here the decisions are those that the eager engine can run:

- `z[c]`: module call `c` is a region. At most one region on each path of the module tree.
- `w[c, o]`: region `c` retains the output of its op `o`, which is saved in it; at most `z[c]`.
- minimise the seconds of all ops of regions up to their last save, less those of held outputs;
- `h[v, t] >= 0`: value `v` is held at point `t`. It is at least `1 - (sum of z over regions around the save that are
  not replayed by then)` for each save of it, at least `z[c]` where it is an input of region `c` and `w[c, o]` where op
  `o` makes it, until the region is replayed;
- at each point, `base[t] + sum of bytes[v] * h[v, t] <= budget`, with `base` from the simulated plain step. At the
  point of a region's replay, what the replay itself needs at most is added, times `z[c]`.

Time points are added where the simulated plan is over the budget, until it fits. Simplifications: no regions inside
regions; a value replayed while it also lives elsewhere counts once; held outputs do not shrink what a replay needs.
Where these make the MILP's estimate of memory too low, it is solved again for a smaller budget.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from rivals import Regions, plan_of
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from lowtide.graph import StepGraph
from lowtide.simulator import Timeline, simulate

_UNIT = 2**20  # bytes are divided by this in the MILP, for numerical stability
_MOST_ROUNDS = 25
_MOST_NEW = 12  # time points added per round

TimePoint = tuple[str, int]  # ("op", op that runs) or ("replay", call)


@dataclass
class Answer:
    """Result of the MILP: the extra seconds of a plan that fits, if there is one, and whether it is optimal."""

    regions: Regions | None
    extra_s: float | None
    seconds: float
    is_proven: bool


@dataclass
class _Rows:
    """Constraints being written: lower <= sum of coefficient * variable <= upper."""

    row: list[int] = field(default_factory=list)
    column: list[int] = field(default_factory=list)
    coefficient: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)

    def add(self, terms: dict[int, float], lower: float = -np.inf, upper: float = np.inf) -> None:
        for column, coefficient in terms.items():
            self.row.append(len(self.lower))
            self.column.append(column)
            self.coefficient.append(coefficient)
        self.lower.append(lower)
        self.upper.append(upper)

    def constraint(self, num_columns: int) -> LinearConstraint:
        shape = (len(self.lower), num_columns)
        matrix = csr_matrix((self.coefficient, (self.row, self.column)), shape=shape)
        return LinearConstraint(matrix, self.lower, self.upper)


class Checkmate:
    """The MILP of one graph."""

    def __init__(self, graph: StepGraph, plain: Timeline) -> None:
        self.graph, self.plain = graph, plain
        self._event_of = {int(op): event for event, op in enumerate(plain.ops)}
        num = len(graph.calls)
        self._stop, self._replayed_at = [0] * num, [len(graph.ops) + 1] * num
        self._saves_of: dict[int, list[int]] = defaultdict(list)
        for index, save in enumerate(graph.saves):
            self._saves_of[save.value].append(index)
            for call in self._around(save.call):
                self._stop[call] = max(self._stop[call], save.made)
                if save.read >= 0:
                    self._replayed_at[call] = min(self._replayed_at[call], save.read)
        self._z: dict[int, int] = {}
        self._w: dict[tuple[int, int], int] = {}
        for index, call in enumerate(graph.calls):
            if call.parent >= 0 and self._stop[index] > call.first and not call.path.startswith("<"):
                self._z[index] = len(self._z)
        mutated = {value for op in graph.ops[: graph.num_forward] for value in op.mutates}
        for call in self._z:
            for op in range(graph.calls[call].first, self._stop[call]):
                made, is_retainable = graph.ops[op].outputs, graph.retainable.depths[op] >= graph.depths[call]
                is_constant = not graph.ops[op].mutates and mutated.isdisjoint(made)
                if is_retainable and is_constant and any(map(self._is_counted, made)):
                    self._w[call, op] = len(self._z) + len(self._w)
        self._alone: dict[int, Timeline] = {}

    def solve(self, budget: int, time_limit_s: float) -> Answer:
        """The plan for a budget, within a time limit for all rounds together."""
        started = time.perf_counter()
        points: dict[TimePoint, None] = {("op", int(self.plain.ops[self.plain.peak_event])): None}
        allowed, is_proven = budget, True
        for _ in range(_MOST_ROUNDS):
            left = time_limit_s - (time.perf_counter() - started)
            if left <= 0:
                return Answer(None, None, time.perf_counter() - started, False)
            regions, ended = self._solved(list(points), allowed, left)
            is_proven = is_proven and ended
            if regions is None:
                return Answer(None, None, time.perf_counter() - started, is_proven)
            timeline = simulate(self.graph, plan_of(self.graph, regions))
            if timeline.peak_bytes <= budget:
                return Answer(regions, timeline.extra_s, time.perf_counter() - started, is_proven)
            new = [point for point in self._over(timeline, budget, regions) if point not in points]
            if new:
                points |= dict.fromkeys(new[:_MOST_NEW])
            else:
                allowed -= timeline.peak_bytes - budget
        return Answer(None, None, time.perf_counter() - started, False)

    def _over(self, timeline: Timeline, budget: int, regions: Regions) -> list[TimePoint]:
        """The worst point of each call and direction in which a step is over the budget, the worst of all first."""
        worst: dict[tuple[int, int], tuple[int, TimePoint]] = {}
        for event in np.flatnonzero(timeline.total_bytes > budget):
            op, phase, size = int(timeline.ops[event]), int(timeline.phases[event]), int(timeline.total_bytes[event])
            if op < 0:
                continue
            point: TimePoint = ("op", op)
            if phase == 1:
                point = ("replay", next(c for c in self._around(self.graph.ops[op].call) if c in regions))
            key = self.graph.ops[op].call, phase
            worst[key] = max(worst.get(key, (0, point)), (size, point))
        return [point for _, point in sorted(worst.values(), reverse=True)]

    def _solved(self, points: list[TimePoint], budget: int, time_limit_s: float) -> tuple[Regions | None, bool]:
        """The regions, and whether they are optimal; None where there are none, for sure or in time."""
        graph, z, w = self.graph, self._z, self._w
        rows, num = _Rows(), len(z) + len(w)
        cost = np.zeros(num)
        for call, column in z.items():
            cost[column] = sum(op.seconds for op in graph.ops[graph.calls[call].first : self._stop[call]])
            outer = [c for c in self._around(call) if c in z]
            if len(outer) > 1:
                rows.add(dict.fromkeys((z[c] for c in outer), 1.0), upper=1.0)
        for (call, op), column in w.items():
            cost[column] = -graph.ops[op].seconds
            must = "index" in graph.ops[op].flags
            rows.add({column: 1.0, z[call]: -1.0}, lower=0.0 if must else -np.inf, upper=0.0)
        for point in points:
            num = self._add_point(rows, num, point, budget)
        result = milp(
            np.concatenate([cost, np.zeros(num - len(cost))]) * 1e3,
            integrality=np.concatenate([np.ones(len(cost)), np.zeros(num - len(cost))]),
            bounds=Bounds(0, 1),
            constraints=rows.constraint(num),
            options={"time_limit": time_limit_s},
        )
        if result.x is None:
            return None, result.status != 1
        regions = {
            call: tuple(
                sorted(op - graph.calls[call].first for (c, op), k in w.items() if c == call and result.x[k] > 0.5)
            )
            for call, column in z.items()
            if result.x[column] > 0.5
        }
        return regions, result.status == 0

    def _add_point(self, rows: _Rows, num: int, point: TimePoint, budget: int) -> int:
        """Add the constraints of a time point: what is held there, and that it fits. Returns the new `num`."""
        graph, values = self.graph, self.graph.values
        kind, which = point
        replayed = which if kind == "replay" else -1
        at = self._replayed_at[replayed] if replayed >= 0 else which
        held: dict[int, int] = {}
        memory: dict[int, float] = {}

        def variable(value: int) -> int:
            nonlocal num
            if value not in held:
                held[value] = num
                memory[num] = values[value].bytes / _UNIT
                num += 1
            return held[value]

        plain_bytes = 0
        for value, saves in self._saves_of.items():
            if not self._is_counted(value) or values[value].dropped > at:
                continue
            mine = [graph.saves[s] for s in saves if graph.saves[s].made <= at < graph.saves[s].released]
            mine = [save for save in mine if replayed < 0 or replayed not in self._around(save.call)]
            plain_bytes += values[value].bytes if mine else 0
            for save in mine:
                is_used = 0 <= save.used <= at
                regions = [c for c in self._around(save.call) if c in self._z]
                regions = [c for c in regions if is_used or at < graph.num_forward or self._replayed_at[c] > at]
                rows.add({variable(value): 1.0} | {self._z[c]: 1.0 for c in regions}, lower=1.0)
        for call, column in self._z.items():
            if graph.calls[call].first > at or not (self._replayed_at[call] > at or call == replayed):
                continue
            for value in set(graph.calls[call].inputs):
                if self._is_counted(value) and values[value].dropped <= at:
                    rows.add({variable(value): 1.0, column: -1.0}, lower=0.0)
        for (call, op), column in self._w.items():
            if op < at < self._replayed_at[call] and call != replayed:
                for value in graph.ops[op].outputs:
                    if self._is_counted(value) and values[value].dropped <= at:
                        rows.add({variable(value): 1.0, column: -1.0}, lower=0.0)
        plain_total = int(self.plain.total_bytes[self._event_of[at]])
        base = plain_total - self._plain_held(at)
        if replayed >= 0:
            memory[self._z[replayed]] = max(0, self._replay_peak(replayed) - plain_bytes - base) / _UNIT
        rows.add(memory, upper=(budget - base) / _UNIT)
        return num

    def _plain_held(self, at: int) -> int:
        graph = self.graph
        held = {s.value for s in graph.saves if s.made <= at < s.released and graph.values[s.value].dropped <= at}
        return sum(graph.values[value].bytes for value in held if self._is_counted(value))

    def _replay_peak(self, call: int) -> int:
        """The most that lives while one call alone is replayed, its input not counted where nothing else saves it."""
        if call not in self._alone:
            self._alone[call] = simulate(self.graph, plan_of(self.graph, {call: ()}))
        timeline = self._alone[call]
        peak = int(timeline.total_bytes[timeline.phases == 1].max())
        inputs = {v for v in self.graph.calls[call].inputs if self._is_counted(v) and v not in self._saves_of}
        return peak - sum(self.graph.values[value].bytes for value in inputs)

    def _is_counted(self, value: int) -> bool:
        facts = self.graph.values[value]
        return facts.kind == "activation" and facts.bytes > 0 and facts.born >= 0

    def _around(self, call: int) -> list[int]:
        """A call and those it lies in, from the inside out."""
        found = []
        while call >= 0:
            found.append(call)
            call = self.graph.calls[call].parent
        return found
