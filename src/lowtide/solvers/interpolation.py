"""Candidates between neighbouring points of the time/memory hull, ordered along a path from fast to small.

Hull points are exact optima for some price per byte, but the best plan within a budget is rarely one of them: moving
from one point to the next may change every layer. `HullPath` numbers the candidates in between, which change one call
at a time. Early calls change first, because what early layers save lives longest. Each of these changes has two steps:
the new regions of a call first retain extra outputs, those that take longest to recompute per byte, up to half of the
bytes that the change frees.

`first_past_stops` finds the first candidate of a path that fits a budget by bisection. Paths do not depend on the
budget, and the bisection is monotone: a larger budget never gives a slower candidate, a smaller one never a larger
peak.

Cost: one simulation per bisection step, and one per stop of a path (100,000 simulated ops). Above 3,000 ops, where
single calls are a small part of the step, changes have one step.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Protocol, TypeVar

import numpy as np

from lowtide.graph.step_graph import StepGraph
from lowtide.solvers.candidate import Codecs, Regions, thinned
from lowtide.solvers.hull import HullPoint, Pricing

_SHARE = 0.5  # of the bytes that a change frees: what is spent again on retained outputs; more shares gained nothing
_MOST_OPS = 3_000
_Item = TypeVar("_Item")


_FEWEST_STOPS = 9
_STOPPED_OPS = 100_000  # simulated ops of all stops of a path


@dataclass(frozen=True)
class _HullStep:
    """The candidates between two neighbouring hull points: **units** change one after the other, the earliest first.

    A unit is an outermost call in which the points differ, with the regions inside it. Values that are encoded in only
    one of the points belong to the unit in which they are made, or are units themselves.
    """

    before: HullPoint
    after: HullPoint
    units: tuple[tuple[int, ...], ...]
    values: tuple[tuple[int, ...], ...]  # per unit
    freed_bytes: float = 0.0  # per unit, on average


class HullPath:
    """Candidates numbered from 0 (everything kept) to `len - 1` (as little as possible): ever smaller and slower.

    Peak and time need not change monotonically at each step. Calls change from the first on; or, if `is_spread`, in an
    order in which changed calls are evenly spaced among the others, so that an offload link always has work.
    """

    def __init__(self, pricing: Pricing, choices: list[HullPoint], *, is_spread: bool = False) -> None:
        graph = pricing.graph
        hull_steps = [_hull_step(graph, a, b) for a, b in pairwise(choices)]
        self._hull_steps = [_spread(hull_step) for hull_step in hull_steps] if is_spread else hull_steps
        self._pricing, self._steps = pricing, 1 + (len(graph.ops) <= _MOST_OPS)  # per unit
        ends = list(accumulate((self._steps * len(hull_step.units) for hull_step in self._hull_steps), initial=0))
        self._length = ends[-1] + 1
        self._first = choices[0]
        most = max(_FEWEST_STOPS, _STOPPED_OPS // max(len(graph.ops), 1))
        self.stops = list(range(self._length)) if self._length <= most else thinned(ends, most)
        self._bytes = np.interp(range(self._length), ends, [choice.bytes for choice in choices])

    def __len__(self) -> int:
        return self._length

    def bytes(self, number: int) -> float:
        """Estimated bytes of candidate `number` at the critical point, beyond those that every plan holds."""
        return float(self._bytes[number])

    def regions(self, number: int) -> Regions:
        """The regions of candidate `number`."""
        if number == 0:
            return self._first.regions
        hull_step, num_units, step = self._position(number)
        before, after = hull_step.before.regions, hull_step.after.regions
        regions = _mixed(before, after, hull_step.units[: num_units + (step > 0)])
        if step:
            new = {call: after[call] for call in hull_step.units[num_units] if call in after}
            regions |= _retaining_more(self._pricing, new, hull_step.freed_bytes * _SHARE)
        return regions

    def codecs(self, number: int) -> Codecs:
        """The values that candidate `number` holds encoded."""
        if number == 0:
            return tuple(sorted(self._first.codecs.items()))
        hull_step, num_units, step = self._position(number)
        codecs = _mixed(hull_step.before.codecs, hull_step.after.codecs, hull_step.values[: num_units + (step > 0)])
        return tuple(sorted(codecs.items()))

    def _position(self, number: int) -> tuple[_HullStep, int, int]:
        """The hull step of candidate `number`, how many of its units changed, and whether the next one is under way."""
        for hull_step in self._hull_steps:
            if number <= self._steps * len(hull_step.units):
                return hull_step, *divmod(number, self._steps)
            number -= self._steps * len(hull_step.units)
        raise IndexError(number)


class PlanCost(Protocol):
    """Peak and added time of a candidate."""

    @property
    def peak_bytes(self) -> int: ...

    @property
    def extra_s(self) -> float: ...


def first_fitting(cost: Callable[[int], PlanCost], last: int, budget: int, *, is_late: Callable[[], bool]) -> int:
    """A fast candidate of `0..last` that fits in `budget`, by bisection, given that `last` fits.

    Peaks need not fall at every step of a path. To make the result monotone in the budget, a candidate is accepted only
    if it is no smaller and no slower than the one accepted before, and no faster than any that exceeded the budget.
    Proof: the bisections for two budgets are identical up to the first candidate that fits only the larger budget. From
    there on, the larger budget accepts candidates that are no smaller than it and no slower, and the smaller budget
    accepts candidates that are no faster.
    """
    return _bisect(cost, 0, last, budget, 0.0, math.inf, is_late)


def first_past_stops(
    cost: Callable[[int], PlanCost],
    stops: Sequence[int],
    budget: int,
    *,
    most_s: float,
    is_late: Callable[[], bool],
) -> int | None:
    """`first_fitting` between the first of `stops` that fits and the stop before it; None if none fits.

    For paths whose peaks rise and fall: every stop is simulated, from the fastest on. Stops that are faster than an
    earlier one are ignored, which keeps the result monotone. The bisection may stop early once its result is known to
    be slower than `most_s`.
    """
    before, least_s = 0, 0.0
    for stop in stops:
        if cost(stop).extra_s >= least_s:
            if cost(stop).peak_bytes <= budget:
                return _bisect(cost, before, stop, budget, least_s, most_s, is_late)
            least_s = cost(stop).extra_s
        if least_s > most_s:
            return None
        before = stop + 1
    return None


def monotone_stops(cost: Callable[[int], PlanCost], stops: Sequence[int]) -> list[int]:
    """The stops at which `first_past_stops` can end: each no faster than those before it."""
    slower: list[int] = []
    for stop in stops:
        if not slower or cost(stop).extra_s >= cost(slower[-1]).extra_s:
            slower.append(stop)
    return slower


def _bisect(
    cost: Callable[[int], PlanCost],
    low: int,
    high: int,
    budget: int,
    least_s: float,
    most_s: float,
    is_late: Callable[[], bool],
) -> int:
    found = high
    while low < high and least_s <= most_s and not is_late():
        middle = (low + high) // 2
        peak_bytes, extra_s = cost(middle).peak_bytes, cost(middle).extra_s
        if peak_bytes < cost(found).peak_bytes or extra_s > cost(found).extra_s:
            high = middle
        elif extra_s < least_s:
            low = middle + 1
        elif peak_bytes <= budget:
            found = high = middle
        else:
            low, least_s = middle + 1, extra_s
    return found


def _retaining_more(pricing: Pricing, regions: Regions, room: float) -> Regions:
    """`regions` with up to `room` bytes of additional retained outputs, those with the most seconds per byte first."""
    graph = pricing.graph
    sizes: dict[tuple[int, int], int] = {}
    for call, kept in regions.items():
        for op in pricing.keepable_in(call):
            size = sum(graph.values[value].bytes for value in graph.ops[op].outputs)
            if size and op - graph.calls[call].first not in kept:
                sizes[call, op] = size
    retained = {call: set(kept) for call, kept in regions.items()}
    for call, op in sorted(sizes, key=lambda key: (-graph.ops[key[1]].seconds / sizes[key], key)):
        if sizes[call, op] <= room:
            room -= sizes[call, op]
            retained[call].add(op - graph.calls[call].first)
    return {call: tuple(sorted(kept)) for call, kept in retained.items()}


def _mixed(before: dict[int, _Item], after: dict[int, _Item], changed: Iterable[tuple[int, ...]]) -> dict[int, _Item]:
    """`before`, with the items of `after` for the keys that are `changed`."""
    keys = {key for some in changed for key in some}
    kept = {key: item for key, item in before.items() if key not in keys}
    return kept | {key: item for key, item in after.items() if key in keys}


def _spread(hull_step: _HullStep) -> _HullStep:
    """The same hull step, whose units change in bit-reversed order, so that changed units are evenly spaced."""
    num_bits = len(hull_step.units).bit_length()
    order = sorted(range(len(hull_step.units)), key=lambda number: f"{number:0{num_bits}b}"[::-1])
    units, values = (tuple(each[number] for number in order) for each in (hull_step.units, hull_step.values))
    return replace(hull_step, units=units, values=values)


def _hull_step(graph: StepGraph, first: HullPoint, second: HullPoint) -> _HullStep:
    before, after = first.regions, second.regions
    units: dict[int, list[int]] = {}
    outermost = graph.outermost({*before, *after})
    for call in sorted({*before, *after}):
        units.setdefault(outermost[call], []).append(call)
    differing = {
        unit: inside for unit, inside in units.items() if any(before.get(call) != after.get(call) for call in inside)
    }
    order = sorted(differing, key=lambda unit: graph.calls[unit].first)
    changed = [
        value for value in {*first.codecs, *second.codecs} if first.codecs.get(value) != second.codecs.get(value)
    ]
    starts = [graph.calls[unit].first for unit in order]
    inside: dict[int, list[int]] = {}
    alone: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
    for value in sorted(changed):
        born = graph.values[value].born
        at = bisect_right(starts, born) - 1
        if at >= 0 and born < graph.calls[order[at]].end:
            inside.setdefault(order[at], []).append(value)
        else:
            alone.append((born, (), (value,)))
    with_calls = [(graph.calls[unit].first, tuple(differing[unit]), tuple(inside.get(unit, ()))) for unit in order]
    parts = sorted([*with_calls, *alone])
    freed_bytes = (first.bytes - second.bytes) / max(len(parts), 1)
    calls, values = tuple(calls for _, calls, _ in parts), tuple(values for _, _, values in parts)
    return _HullStep(first, second, calls, values, freed_bytes)
