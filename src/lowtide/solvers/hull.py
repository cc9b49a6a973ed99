"""The optimal regions for every price per byte (the time/memory hull), and a lower bound on the time of any plan.

Lagrangian relaxation (Everett 1963): instead of a budget, put a price on each byte held at one **critical point**,
the op `at` at which a step peaks, and minimise `seconds + price * bytes`. `Pricing.best` solves that exactly over all
plans that the eager engine can run. A forward op is outside of every region, and its saved tensors are held; or it is
inside one and runs again, or its output is retained. Given a price, each op of a region decides independently
(`region_costs`), and a region costs the sum over its ops and inputs. The best regions are found from the leaves of
the module tree up: a call either is one region, or costs what its own ops and the calls inside it do. Nested regions
change what a replay holds, not what the forward leaves behind, so the hull has none (`nesting`); nor has it segments
(`segment_search`).

`hull` varies the price and returns the corners of the convex hull of seconds over bytes. Each price also gives a
bound: a plan that holds at most `allowed` bytes at the critical point takes at least `least - price * allowed`
seconds (`Hull.least_s`). For the bound to be valid, no value is charged to two calls, and none that a plan may have
freed by then is charged at all (`region_costs.HeldValues`). With `bounds_segments`, calls are charged less, so that
the bound also covers plans with segments.

Cost: up to 64 prices, each linear in ops and calls (numpy). `EagerSearch` builds a hull per critical point and per
combination of offload discount and codecs. Never skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import TypeVar

import numpy as np

from lowtide.graph.segments import runs
from lowtide.graph.step_graph import StepGraph
from lowtide.simulator.eager_intervals import EagerIntervals
from lowtide.simulator.timeline import Timeline
from lowtide.solvers.compression import CompressionOptions, EncodingCharges
from lowtide.solvers.region_costs import (
    HeldValues,
    RegionCosts,
    contains_layers,
    keepable,
    prefix_sums,
    replayable,
    saves_inside,
    stops_of,
)

NEVER = 1 << 30
_MOST_PRICES = 63  # of a hull, beside the lowest and the highest
_LEAST_GAIN = 1e-9  # of the seconds, for a new corner
_ROUNDING = 1e-8  # relative error of a least cost: sums of floats, and the tolerance of `Pricing.best`


@dataclass(frozen=True)
class PricedOptimum:
    """The seconds and the bytes at the critical point of a choice that is optimal for a price per byte."""

    price: float
    seconds: float
    bytes: float


_Optimum = TypeVar("_Optimum", bound=PricedOptimum)


def corners(
    first: _Optimum, last: _Optimum, best: Callable[[float], _Optimum], most: int, least_gain: float
) -> tuple[list[_Optimum], list[_Optimum]]:
    """Corners of the lower convex hull of seconds over bytes between two optima, and the optima of all prices tried.

    The widest gap between two corners is refined first, up to `most` prices. An optimum is a new corner if it is below
    the line between them by more than the share `least_gain` of the seconds.
    """
    found, tried = [first, last], list[_Optimum]()
    numbers = count()  # breaks ties between gaps of equal width
    gaps = [(0.0, next(numbers), first, last)]
    while gaps and len(tried) < most:
        _, _, low, high = heappop(gaps)
        if low.bytes <= high.bytes or high.seconds <= low.seconds:
            continue
        price = (high.seconds - low.seconds) / (low.bytes - high.bytes)
        choice = best(price)
        tried.append(choice)
        gain = (low.seconds + price * low.bytes) - (choice.seconds + price * choice.bytes)
        if gain > least_gain * high.seconds and high.bytes < choice.bytes < low.bytes:
            found.append(choice)
            for a, b in ((low, choice), (choice, high)):
                heappush(gaps, ((a.bytes - b.bytes) * (a.seconds - b.seconds), next(numbers), a, b))
    return found, tried


@dataclass(frozen=True)
class HullPoint(PricedOptimum):
    """The optimal regions for a price. `codecs` are values held encoded, outside of regions or as their inputs."""

    regions: dict[int, tuple[int, ...]]
    codecs: dict[int, str] = field(default_factory=dict)


class Pricing:
    """A graph's costs as arrays, for the critical point at op `at` of the plain step `plain`.

    `discount` reduces the price of values that could be offloaded: saved tensors outside of regions, and inputs of
    regions. With `narrow`, no region contains several layers. With `compression`, those values may also be encoded.

    With `bounds_segments`, calls of a run are not charged for values that the run makes (as inputs, or retained for the
    next call), nor for anything once the backward of the run has begun: less than any segment of these calls holds.
    """

    def __init__(
        self,
        graph: StepGraph,
        plain: Timeline,
        at: int,
        discount: float = 0.0,
        narrow: bool = False,
        compression: CompressionOptions | None = None,
        bounds_segments: bool = False,
    ) -> None:
        self.graph = graph
        self._compression = compression
        self.at = at
        self._region_s = graph.hardware.region_s + graph.hardware.save_s * saves_inside(graph, graph.saves)  # per call
        self._depth = [*graph.depths, -1]  # the last entry: no call
        self._seconds = graph.arrays.seconds[: graph.num_forward]
        self._stop = stops_of(graph)
        self._spans = graph.arrays.first, np.maximum(graph.arrays.first, np.array(self._stop, dtype=np.int64))
        self.may_keep = keepable(graph)
        self.replayable = replayable(graph, self._stop)
        if narrow:
            is_wide = contains_layers(graph)
            self.replayable = [can and not wide for can, wide in zip(self.replayable, is_wide, strict=True)]
        holding = HeldValues(graph, plain, at)
        self._in_runs: dict[int, np.ndarray] = {}  # by depth: ops in calls of runs
        self._run_firsts = [call.first for call in graph.calls]  # per call: the first op of its run
        if bounds_segments:
            self._begin_runs(holding)
        self.base_bytes = holding.base_bytes
        self._held = self._charges_of_ops(holding)
        self._may_keep = {depth: self._keepable_at(depth) for depth in self._held}
        allowed = np.array(self.replayable, dtype=bool)
        self.holds = RegionCosts(graph, self._stop, self._may_keep, self._held, allowed, self._run_firsts)
        self._direct, self._inputs = (sizes * (1 - discount) for sizes in self._charges_of_calls(holding))
        if compression is not None:
            num = len(graph.calls) + 1
            homes = [(home, value) for value, home in holding.homes.items() if value in compression.options]
            takers = [(call, value) for home, value in homes for call in self._takers(holding, value, home)]
            self._encoded_direct = EncodingCharges(compression, homes, num, 1 - discount)
            self._encoded_inputs = EncodingCharges(compression, takers, num, 1 - discount)

    def _begin_runs(self, holding: HeldValues) -> None:
        """Charge calls of runs as parts of segments (`bounds_segments`)."""
        for run in runs(self.graph):
            first, end = self.graph.calls[run[0]].first, self.graph.calls[run[-1]].end
            has_begun = any(holding.has_begun[call] for call in run)
            for call in run:
                self._run_firsts[call], holding.has_begun[call] = first, has_begun
                self.replayable[call] = self.replayable[call] or self._stop[call] > self.graph.calls[call].first
            at_depth = self._in_runs.setdefault(self._depth[run[0]], np.zeros(self.graph.num_forward, dtype=bool))
            at_depth[first:end] = True

    def _takers(self, holding: HeldValues, value: int, payer: int) -> list[int]:
        born = self.graph.values[value].born
        return [call for call in holding.takers(value, payer) if born < self._run_firsts[call]]

    def _keepable_at(self, depth: int) -> np.ndarray:
        """The ops whose outputs regions at a depth may retain; outputs that only segments may retain are free."""
        depths = self.graph.retainable.depths
        may_keep = self.may_keep & self.graph.retainable.at_depth(depth)
        if depth in self._in_runs:
            only_segments = self.may_keep & self._in_runs[depth] & (depths == depth - 1)
            self._held[depth][only_segments] = 0.0
            may_keep |= only_segments
        return may_keep

    def _charges_of_calls(self, holding: HeldValues) -> tuple[np.ndarray, np.ndarray]:
        """Bytes charged to each call: directly if it is no region, as inputs if it is one; without encodable values."""
        graph = self.graph
        direct, inputs = np.zeros(len(graph.calls) + 1), np.zeros(len(graph.calls))
        for value, home in holding.homes.items():
            if self._compression is None or value not in self._compression.options:
                direct[home] += graph.values[value].bytes
                inputs[self._takers(holding, value, home)] += graph.values[value].bytes
        for value, payer in holding.passed.items():
            for call in self._takers(holding, value, payer):
                inputs[call] += 0 if holding.has_begun[call] else graph.values[value].bytes
        return direct, inputs

    def _charges_of_ops(self, holding: HeldValues) -> dict[int, np.ndarray]:
        """By depth, bytes charged for each op whose outputs a region at that depth retains.

        Values that are charged to a call outside the region are not included.
        """
        graph, num = self.graph, self.graph.num_forward
        begun_depth = [-1] * (len(graph.calls) + 1)  # regions deeper than that have not been replayed yet
        for index, call in enumerate(graph.calls):
            begun_depth[index] = self._depth[index] if holding.has_begun[index] else begun_depth[call.parent]
        items = []  # op, bytes, and the depths of regions charged: above the first number, up to the second
        for number in np.flatnonzero(self.may_keep[: self.at + 1]):
            op = graph.ops[number]
            for value in op.outputs:
                facts = graph.values[value]
                if facts.kind != "activation" or facts.dropped > self.at or value in holding.in_use:
                    continue
                if value in holding.homes:
                    items.append((number, facts.bytes, -1, self._common_depth(op.call, holding.homes[value])))
                else:
                    passed = holding.passed.get(value)
                    most = NEVER if passed is None else self._common_depth(op.call, passed)
                    items.append((number, facts.bytes, begun_depth[op.call], most))
        ops, sizes, above, most = np.array(items, dtype=np.int64).reshape(-1, 4).T
        charges: dict[int, np.ndarray] = {}
        for depth in sorted(set(self._depth[:-1])):
            paid = (above < depth) & (depth <= most)
            charges[depth] = np.bincount(ops[paid], weights=sizes[paid], minlength=num)
        return charges

    def _common_depth(self, a: int, b: int) -> int:
        calls, depth = self.graph.calls, self._depth
        while a != b:
            if depth[a] >= depth[b]:
                a = calls[a].parent
            else:
                b = calls[b].parent
        return depth[a]

    @property
    def highest_price(self) -> float:
        """A price at which one page of memory outweighs all replays and codecs, low enough for seconds to matter."""
        codecs_s = self._compression.total_s if self._compression is not None else 0.0
        return (float(self._seconds.sum()) + codecs_s) / _PAGE_BYTES

    def keepable_in(self, call: int) -> list[int]:
        """The ops of a region whose outputs it could retain."""
        first, stop = self.graph.calls[call].first, self._stop[call]
        may_keep = self._may_keep[self._depth[call]]
        return [op for op in range(first, stop) if may_keep[op]]

    def retaining_s(self, call: int, kept: tuple[int, ...]) -> float:
        """Estimated host seconds that retaining outputs costs a region, as if its replay ended no earlier."""
        return self.graph.retainable.retaining_s(call, kept, self._stop[call])

    def best(self, price: float) -> HullPoint:
        """The choice that minimises seconds plus `price` times bytes."""
        costs = np.array(self._as_regions(price))
        retains, regions = costs.argmin(axis=0).tolist(), costs.min(axis=0).tolist()
        direct = (price * self._direct + (self._encoded_direct.costs(price) if self._compression else 0.0)).tolist()
        cost = [0.0] * len(self.graph.calls)
        as_region = [0] * len(self.graph.calls)  # 0: no region, 1: a plain one, 2: one that retains outputs
        for index in range(len(cost) - 1, -1, -1):
            cost[index] = direct[index] + sum(cost[child] for child in self.graph.children[index])
            if self.replayable[index] and regions[index] < cost[index] * (1 - 1e-9):
                as_region[index], cost[index] = 1 + retains[index], regions[index]
        return self._collect(price, as_region)

    def _as_regions(self, price: float) -> list[np.ndarray]:
        """The cost of each call as a region that retains no outputs, and as one that retains some."""
        first, stop = self._spans
        entry = self._region_s + price * self._inputs
        if self._compression:
            entry += self._encoded_inputs.costs(price)[:-1]
        seconds = prefix_sums(self._seconds)
        return [entry + seconds[stop] - seconds[first], entry + self.holds.costs(price)]

    def seconds_of(self, regions: dict[int, tuple[int, ...]]) -> float:
        """A lower bound on the seconds of these disjoint regions, whatever is nested in them."""
        total = sum(self._seconds_of(call, kept) for call, kept in regions.items())
        return (total + float(self._region_s[list(regions)].sum())) * (1 - _ROUNDING)

    def _seconds_of(self, call: int, kept: tuple[int, ...]) -> float:
        if kept:
            return self.holds.seconds(call, kept)
        return float(self._seconds[self.graph.calls[call].first : self._stop[call]].sum())

    def _collect(self, price: float, as_region: list[int]) -> HullPoint:
        regions: dict[int, tuple[int, ...]] = {}
        seconds, size = 0.0, float(self._direct[-1])
        direct = self._encoded_direct.chosen(price) if self._compression else {}
        inputs = self._encoded_inputs.chosen(price) if self._compression else {}
        encoded = direct.get(len(as_region), [])
        pending = list(self.graph.children[-1])
        while pending:
            index = pending.pop()
            call = self.graph.calls[index]
            encoded += (inputs if as_region[index] else direct).get(index, ())
            if not as_region[index]:
                size += self._direct[index]
                pending += self.graph.children[index]
                continue
            retains = as_region[index] == 2
            kept = tuple(self.holds.kept(index, price)) if retains else ()
            seconds += float(self._region_s[index]) + (self.holds.seconds if retains else self._seconds_of)(index, kept)
            size += self._inputs[index] + float(self._held[self._depth[index]][[call.first + op for op in kept]].sum())
            regions[index] = kept
        size += sum(pays for pays, _, _, _ in encoded)
        seconds += sum(takes for _, takes, _, _ in encoded)
        return HullPoint(price, seconds, size, regions, {value: codec for _, _, value, codec in encoded if codec})


_PAGE_BYTES = 4096


@dataclass(frozen=True)
class Hull:
    """Points of the lower convex hull of seconds over bytes, from everything held to as little as possible.

    `supports` are the optima of the prices that were tried.
    """

    choices: list[HullPoint]
    supports: list[HullPoint]

    def least_s(self, allowed: float) -> float:
        """A lower bound on the seconds of every plan that holds at most `allowed` bytes at the critical point."""
        bounds = [
            each.seconds + each.price * (each.bytes - allowed) - _ROUNDING * (each.seconds + each.price * each.bytes)
            for each in self.supports
        ]
        return max(bounds, default=0.0)


def hull(pricing: Pricing) -> Hull:
    """The hull of a critical point."""
    first = pricing.best(0.0)
    found, tried = corners(first, pricing.best(pricing.highest_price), pricing.best, _MOST_PRICES, _LEAST_GAIN)
    unique = {(choice.bytes, choice.seconds): choice for choice in found}
    return Hull([unique[key] for key in sorted(unique, key=lambda key: (-key[0], key[1]))], [first, *tried])


@dataclass(frozen=True)
class CriticalPoint:
    """The hull at an op where memory is short.

    `hull` has candidates without codecs and segments; `bound` is the hull whose lower bound covers those too.
    """

    pricing: Pricing
    hull: Hull
    bound: Hull

    def least_s(self, budget: int, movable_bytes: int, offset_s: float = 0.0) -> float:
        """A lower bound on the seconds of every plan that holds at most `budget` bytes on the device at this point.

        Up to `movable_bytes` may be elsewhere, limited by what the link can carry until then. With two time lines,
        `offset_s` (not above 0) is the line's own time less the step's: added time that the other line hides.
        """
        graph, at = self.pricing.graph, self.pricing.at
        plain_s = float(graph.arrays.clock[at])
        allowed = budget - self.pricing.base_bytes

        def least_s(extra_s: float) -> float:
            """The bound if the plan adds `extra_s` before the critical point, during which the link keeps copying."""
            carried = graph.hardware.link_bytes_per_s * (plain_s + extra_s)
            return self.bound.least_s(allowed + min(movable_bytes, carried)) + offset_s

        if not movable_bytes or at < graph.num_forward:
            return max(0.0, least_s(0.0))
        low, high = 0.0, max(0.0, least_s(0.0))
        for _ in range(50):  # find the fixed point by bisection
            middle = (low + high) / 2
            low, high = (low, middle) if least_s(middle) <= middle else (middle, high)
        return low


def critical_point_at(
    graph: StepGraph, plain: Timeline, op: int, compression: CompressionOptions | None
) -> CriticalPoint:
    """The critical point at op `op` of the plain step `plain`."""
    pricing = Pricing(graph, plain, op)
    points, has_runs = hull(pricing), bool(runs(graph))
    if compression is None and not has_runs:
        return CriticalPoint(pricing, points, points)
    return CriticalPoint(
        pricing, points, hull(Pricing(graph, plain, op, compression=compression, bounds_segments=has_runs))
    )


def peak_op(timeline: Timeline | EagerIntervals, phase: int) -> int:
    """The op at which a phase (0 forward, 1 replay, 2 backward) peaks; -1 if the step has no such phase."""
    events = np.flatnonzero(timeline.phases == phase)
    return int(timeline.ops[events[timeline.total_bytes[events].argmax()]]) if len(events) else -1
