"""Plans between two neighbours of a chain: a call's regions, with more outputs held in them than they need.

All plans between the choices on the hull: from one to the next, one call at a time.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np

from lowtide.graph.step_graph import StepGraph
from lowtide.solvers.candidate import Codecs
from lowtide.solvers.hull import HullPoint, Pricing

if TYPE_CHECKING:
    from lowtide.solvers.candidate import Regions

_SHARES = (0.75, 0.5, 0.25)  # of the bytes that a call gives up, held on to
_MOST_OPS = 3_000  # beyond it there are layers enough to choose from


class Interpolation:
    """Holds on to outputs in regions: those first that take longest to make for their size."""

    def __init__(self, graph: StepGraph, pricing: Pricing) -> None:
        self._graph, self._pricing = graph, pricing
        self.num_between = len(_SHARES) if len(graph.ops) <= _MOST_OPS else 0

    def candidate(self, regions: Regions, freed_bytes: float, number: int) -> Regions:
        """`regions` with the `number`-th share of `freed_bytes` in outputs held besides those that are."""
        room = freed_bytes * _SHARES[number]
        sizes: dict[tuple[int, int], int] = {}
        for call, kept in regions.items():
            first = self._graph.calls[call].first
            for op in self._pricing.keepable_in(call):
                size = sum(self._graph.values[value].bytes for value in self._graph.ops[op].outputs)
                if size and op - first not in kept:
                    sizes[call, op] = size
        eased = {call: set(kept) for call, kept in regions.items()}
        for call, op in sorted(sizes, key=lambda key: (-self._graph.ops[key[1]].seconds / sizes[key], key)):
            if sizes[call, op] <= room:
                room -= sizes[call, op]
                eased[call].add(op - self._graph.calls[call].first)
        return {call: tuple(sorted(kept)) for call, kept in eased.items()}


_FEWEST_STOPS = 9
_NUM_BETWEEN = 6  # plans between two stops that are looked at for the least peak
_STOPPED_OPS = 100_000  # ops to simulate for all stops together


@dataclass(frozen=True)
class _HullStep:
    """From one choice to the next: the outermost calls in which they differ, and the regions inside each.

    Earliest calls come first: what the first layers save lives longest, while gradients pile up. Values that are
    encoded in one choice only are units too: with the call that they are saved in, or by themselves.
    """

    before: HullPoint
    after: HullPoint
    units: tuple[tuple[int, ...], ...]
    values: tuple[tuple[int, ...], ...]  # of each unit
    freed_bytes: float = 0.0  # by each unit, on average


class HullPath:
    """Plans numbered from 0 (everything kept) to `len - 1` (as little kept as can be), on the whole slower, smaller.

    Each call that changes does so by way of `easing`: its new regions first hold on to more than they need. Calls
    change from the first one on; or, if `is_spread`, so that those that have changed lie evenly among the others.
    """

    def __init__(
        self, graph: StepGraph, choices: list[HullPoint], easing: Interpolation, *, is_spread: bool = False
    ) -> None:
        legs = [_hull_step(graph, a, b) for a, b in pairwise(choices)]
        self._legs = [_spread(leg) for leg in legs] if is_spread else legs
        self._interpolation, self._steps = easing, easing.num_between + 1
        ends = list(accumulate((self._steps * len(leg.units) for leg in self._legs), initial=0))
        self._length = ends[-1] + 1
        self._first = choices[0]
        most = max(_FEWEST_STOPS, _STOPPED_OPS // max(len(graph.ops), 1))
        self.stops = list(range(self._length)) if self._length <= most else _thinned(ends, most)
        self._bytes = np.interp(range(self._length), ends, [choice.bytes for choice in choices])

    def __len__(self) -> int:
        return self._length

    def bytes(self, number: int) -> float:
        """Roughly what plan `number` holds at the chain's moment, beyond what all plans do."""
        return float(self._bytes[number])

    def regions(self, number: int) -> Regions:
        """The regions of plan `number`, by call, with the ops whose outputs each holds."""
        if number == 0:
            return self._first.regions
        leg, num_units, step = self._place(number)
        before, after = leg.before.regions, leg.after.regions
        changed = {call for unit in leg.units[: num_units + (step > 0)] for call in unit}
        regions = {call: ops for call, ops in before.items() if call not in changed}
        regions |= {call: ops for call, ops in after.items() if call in changed}
        if step:
            new = {call: after[call] for call in leg.units[num_units] if call in after}
            regions |= self._interpolation.candidate(new, leg.freed_bytes, step - 1)
        return regions

    def codecs(self, number: int) -> Codecs:
        """The values that plan `number` holds encoded."""
        if number == 0:
            return tuple(sorted(self._first.codecs.items()))
        leg, num_units, step = self._place(number)
        changed = {value for values in leg.values[: num_units + (step > 0)] for value in values}
        codecs = {value: codec for value, codec in leg.before.codecs.items() if value not in changed}
        codecs |= {value: codec for value, codec in leg.after.codecs.items() if value in changed}
        return tuple(sorted(codecs.items()))

    def _place(self, number: int) -> tuple[_HullStep, int, int]:
        """The leg that plan `number` is on, how many of its units have changed, and how far the next one has."""
        for leg in self._legs:
            if number <= self._steps * len(leg.units):
                return leg, *divmod(number, self._steps)
            number -= self._steps * len(leg.units)
        raise IndexError(number)


class PlanCost(Protocol):
    """What a plan takes."""

    @property
    def peak_bytes(self) -> int: ...

    @property
    def extra_s(self) -> float: ...


def first_fitting(
    cost: Callable[[int], PlanCost], last: int, budget: int, *, most_s: float = math.inf, is_late: Callable[[], bool]
) -> int:
    """A fast plan of `0..last` that fits in `budget`, found by bisection, given that `last` does.

    Peaks fall along a chain on the whole, and not at every step. So that a larger budget never gives a slower plan, and
    a smaller one never a larger peak, a plan is taken only if it is no smaller and no slower than the one taken before
    it, and no faster than any that was over the budget. Then two budgets go the same way up to a plan that fits the
    larger only: all taken from there on are no smaller than that plan for the larger budget, so above the smaller, and
    no slower; for the smaller budget, they are no faster.

    Where it turns out that the plan is slower than `most_s`, it need not be the one.
    """
    return _bisect(cost, 0, last, budget, 0.0, most_s, is_late)


def first_past_stops(
    cost: Callable[[int], PlanCost],
    stops: Sequence[int],
    budget: int,
    *,
    most_s: float = math.inf,
    is_late: Callable[[], bool],
) -> int | None:
    """As `first_fitting`, between the first of `stops` that fits and the one before; None if none does.

    For chains on which peaks rise and fall again: each stop is looked at, from the fastest on, but for those that are
    faster than one before them.
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


def near_stops(cost: Callable[[int], PlanCost], stops: Sequence[int]) -> list[int]:
    """The numbers of `stops` that some budget may lead to, and some between those around the least peak of them."""
    found: list[int] = []
    for stop in stops:
        if not found or cost(stop).extra_s >= cost(found[-1]).extra_s:
            found.append(stop)
    least = stops.index(min(found, key=lambda number: (cost(number).peak_bytes, cost(number).extra_s)))
    low, high = stops[max(least - 1, 0)], stops[min(least + 1, len(stops) - 1)]
    between = np.linspace(low, high, _NUM_BETWEEN + 2).round().astype(int).tolist()
    return list(dict.fromkeys([*found, *between]))


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


def _thinned(numbers: list[int], most: int) -> list[int]:
    """At most `most` of the numbers, evenly chosen, first and last among them."""
    return [numbers[index] for index in np.unique(np.linspace(0, len(numbers) - 1, most).round().astype(int))]


def _spread(leg: _HullStep) -> _HullStep:
    """A leg whose units change in another order: halves, then quarters, and so on, as the bits of numbers reversed."""
    num_bits = len(leg.units).bit_length()
    order = sorted(range(len(leg.units)), key=lambda number: f"{number:0{num_bits}b}"[::-1])
    units, values = (tuple(each[number] for number in order) for each in (leg.units, leg.values))
    return replace(leg, units=units, values=values)


def _hull_step(graph: StepGraph, first: HullPoint, second: HullPoint) -> _HullStep:
    before, after = first.regions, second.regions
    units: dict[int, list[int]] = {}
    every = {*before, *after}
    for call in sorted(every):
        outermost, up = call, graph.calls[call].parent
        while up >= 0:
            outermost = up if up in every else outermost
            up = graph.calls[up].parent
        units.setdefault(outermost, []).append(call)
    differing = {
        unit: inside for unit, inside in units.items() if any(before.get(call) != after.get(call) for call in inside)
    }
    order = sorted(differing, key=lambda unit: graph.calls[unit].first)
    changed = [
        value for value in {*first.codecs, *second.codecs} if first.codecs.get(value) != second.codecs.get(value)
    ]
    if not changed:
        freed_bytes = (first.bytes - second.bytes) / max(len(order), 1)
        return _HullStep(
            first, second, tuple(tuple(differing[unit]) for unit in order), ((),) * len(order), freed_bytes
        )
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
    return _HullStep(
        first, second, tuple(calls for _, calls, _ in parts), tuple(values for _, _, values in parts), freed_bytes
    )
