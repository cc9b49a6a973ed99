"""All plans between the choices on the hull: from one to the next, one call at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from lowtide.graph import StepGraph
from lowtide.solvers.pricing import Choice

Regions = dict[int, tuple[int, ...]]


@dataclass(frozen=True)
class _Leg:
    """From one choice to the next: the outermost calls in which they differ, and the regions inside each.

    Earliest calls come first: what the first layers save lives longest, while gradients pile up.
    """

    before: Regions
    after: Regions
    units: tuple[tuple[int, ...], ...]


class Chain:
    """Plans numbered from 0 (everything kept) to `len - 1` (as little kept as can be), each slower than the last."""

    def __init__(self, graph: StepGraph, choices: list[Choice]) -> None:
        self._legs = [_leg(graph, a.regions, b.regions) for a, b in pairwise(choices)]
        self._length = 1 + sum(len(leg.units) for leg in self._legs)
        self._first = choices[0].regions

    def __len__(self) -> int:
        return self._length

    def regions(self, number: int) -> Regions:
        """The regions of plan `number`, by call, with the ops whose outputs each holds."""
        if number == 0:
            return self._first
        for leg in self._legs:
            if number <= len(leg.units):
                changed = {call for unit in leg.units[:number] for call in unit}
                regions = {call: ops for call, ops in leg.before.items() if call not in changed}
                return regions | {call: ops for call, ops in leg.after.items() if call in changed}
            number -= len(leg.units)
        raise IndexError(number)


def first_that(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The smallest number found by bisection in `low..high` for which `holds`, given that it does for `high`.

    If `holds` becomes true for more numbers, the answer never grows: a larger budget never gives a slower plan.
    """
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return high


def _leg(graph: StepGraph, before: Regions, after: Regions) -> _Leg:
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
    return _Leg(before, after, tuple(tuple(differing[unit]) for unit in order))
