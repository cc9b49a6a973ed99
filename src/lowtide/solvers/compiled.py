"""Plans for the compiled engine: which values of the forward are saved, the others recomputed one by one.

`cutting` gives the best choices for every price of a byte at a moment at which memory is short. They make a **family**:
plans from everything saved to as little as can be, each slower than the last. The first whose *simulated* peak fits is
taken, then mixed along the forward with the one before it, which did not fit: early ops as in the slower plan, for what
they save lives longest, the others as in the faster one.

At the cheap end of a family the backward recomputes so much at once that the peak rises again. So there are families in
which anchors are saved whatever they weigh: all of them, every second, every fourth, and so on. The fastest plan of all
families is taken.

Every family is the same for all budgets and is searched so that a larger budget never ends at a slower plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise

from lowtide.graph import StepGraph
from lowtide.plans import Plan
from lowtide.simulator import Timeline, simulate
from lowtide.solvers.anchors import anchor_groups, compiled_references, every
from lowtide.solvers.chain import first_fitting
from lowtide.solvers.cutting import Moment
from lowtide.solvers.describing import described, infeasible
from lowtide.solvers.effort import Effort
from lowtide.solvers.moments import peak_op

_MOST_CUTS = 256  # mixes of two neighbours in a family


@dataclass(frozen=True)
class Found:
    """Ops whose outputs are saved, and what that costs."""

    keeps: tuple[int, ...]
    peak_bytes: int
    extra_s: float


class CompiledSearch:
    """What solving one graph for the compiled engine needs, shared by all budgets of a sweep."""

    def __init__(self, graph: StepGraph, time_limit_s: float = 10.0) -> None:
        self.graph = graph
        self._effort = Effort(time_limit_s)
        self._found: dict[tuple[int, ...], Found] = {}

    @cached_property
    def plain(self) -> Timeline:
        return simulate(self.graph)

    def plan(self, budget: int) -> Plan:
        """The plan for a budget, with everything a person wants to know about it."""
        if self.plain.peak_bytes <= budget:
            return described(self.graph, self._timeline(self._point(frozenset())), self.plain, budget, 0.0)
        found = [reference for reference in self._references if reference.peak_bytes <= budget]
        for family in self._families:
            if not found or not self._is_late():
                best = self._fastest_in(family, budget)
                found += [best] if best is not None else []
        if not found:
            raise infeasible(budget, self.floor)
        fastest = min(found, key=lambda each: (each.extra_s, each.peak_bytes, each.keeps))
        timeline = self._timeline(fastest.keeps)
        return described(self.graph, timeline, self.plain, budget, self.lower_bound_s(budget))

    def lower_bound_s(self, budget: int) -> float:
        """Seconds that every plan of the compiled engine adds if its peak is to be at most `budget`."""
        return max((moment.lower_bound_s(budget) for moment in self._moments), default=0.0)

    @cached_property
    def floor(self) -> Timeline:
        """The smallest peak found, of whatever plan."""
        ends = [self.cost(self._point(family.recomputed(len(family) - 1))) for family in self._families]
        found = [self.cost(self._point(frozenset())), *self._references, *ends]
        best = min(found, key=lambda each: (each.peak_bytes, each.extra_s))
        return self._timeline(best.keeps)

    # Families.

    @cached_property
    def _moments(self) -> list[Moment]:
        """When memory is short: at the plain step's peaks in both directions, and where a plan of anchors peaks."""
        ops = [op for op in (peak_op(self.plain, 2), peak_op(self.plain, 0)) if op >= 0]
        moments = [Moment(self.graph, op) for op in dict.fromkeys(ops)]
        if self._anchors and moments:
            least = Moment(self.graph, moments[0].at, every(self._anchors, 1)).hull[-1]
            late = peak_op(self._timeline(self._point(least.recomputed)), 2)
            if late >= 0 and late not in ops:
                moments.append(Moment(self.graph, late))
        return moments

    @cached_property
    def _anchors(self) -> list[frozenset[int]]:
        return anchor_groups(self.graph)

    @cached_property
    def _families(self) -> list[Family]:
        found = [self._family(moment) for moment in self._moments]
        step = 1
        while self._moments and step <= len(self._anchors):
            found.append(self._family(Moment(self.graph, self._moments[0].at, every(self._anchors, step))))
            step *= 2
        return found

    def _family(self, moment: Moment) -> Family:
        """The corners of a hull and the mixes between, up to the corner with the smallest peak."""
        corners = list(dict.fromkeys(choice.recomputed for choice in moment.hull))
        peaks = [self.cost(self._point(corner)).peak_bytes for corner in corners]
        return Family(corners[: peaks.index(min(peaks)) + 1])

    @cached_property
    def _references(self) -> list[Found]:
        """What people do by hand: no plan of ours may be slower than theirs."""
        plans = [plan for plan in compiled_references(self.graph).values() if plan.keeps]
        return [self.cost(plan.keeps) for plan in plans]

    def _fastest_in(self, family: Family, budget: int) -> Found | None:
        @cache
        def cost(number: int) -> Found:
            return self.cost(self._point(family.recomputed(number)))

        last = len(family) - 1
        if cost(last).peak_bytes > budget:
            return None
        return cost(first_fitting(cost, last, budget, is_late=self._is_late))

    # Plans.

    def _point(self, recomputed: frozenset[int]) -> tuple[int, ...]:
        """The ops whose outputs are saved if others may be recomputed."""
        needs = self.graph.needs
        return needs.keeps_of(needs.derive(self._all_ops - recomputed))

    @cached_property
    def _all_ops(self) -> frozenset[int]:
        return frozenset(range(self.graph.num_forward))

    def cost(self, keeps: tuple[int, ...]) -> Found:
        if keeps not in self._found:
            timeline = self._timeline(keeps)
            self._effort.spend(len(timeline.ops))
            self._found[keeps] = Found(keeps, timeline.peak_bytes, timeline.extra_s)
        return self._found[keeps]

    def _timeline(self, keeps: tuple[int, ...]) -> Timeline:
        # With a budget of any size: without keeps and without a budget, a plan is the plain step.
        return simulate(self.graph, Plan(engine="compiled", keeps=keeps, budget_bytes=1))

    def _is_late(self) -> bool:
        return self._effort.is_over()


class Family:
    """Plans numbered from 0 (the first corner) to `len - 1` (the last), on the whole smaller and slower."""

    def __init__(self, corners: list[frozenset[int]]) -> None:
        self._corners = corners
        self._cuts = [_thinned(sorted(a ^ b)) for a, b in pairwise(corners)]

    def __len__(self) -> int:
        return 1 + sum(map(len, self._cuts))

    def recomputed(self, number: int) -> frozenset[int]:
        """The ops that plan `number` recomputes: up to a cut those of one corner, from there on those of another."""
        if number == 0:
            return self._corners[0]
        for (before, after), cuts in zip(pairwise(self._corners), self._cuts, strict=True):
            if number <= len(cuts):
                last = cuts[number - 1]
                return frozenset([op for op in after if op <= last] + [op for op in before if op > last])
            number -= len(cuts)
        raise IndexError(number)


def _thinned(cuts: list[int]) -> list[int]:
    """At most so many, always with the last."""
    step = -(-len(cuts) // _MOST_CUTS)
    return cuts[::-1][:: max(step, 1)][::-1]
