"""Where the forward narrows: values to save so that what the backward recomputes at a time stays small.

With nothing saved along the way, the first value that the backward needs has the whole forward recomputed and held at
once. Saved anchors end that: what lies before an anchor is not touched before the backward gets there.

Plans for the compiled engine: which values of the forward are saved, the others recomputed one by one.

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

from lowtide.graph.segments import block_calls
from lowtide.graph.step_graph import StepGraph
from lowtide.plans.step_plan import Plan
from lowtide.simulator.timeline import Timeline, simulate
from lowtide.solvers.candidate import Effort, infeasible, with_predictions
from lowtide.solvers.hull import peak_op
from lowtide.solvers.interpolation import first_fitting
from lowtide.solvers.min_cut import CutProblem

_LONG = 1 / 3  # of the forward: what is read over more than that (masks, position tables) is in nobody's way


def anchor_groups(graph: StepGraph) -> list[frozenset[int]]:
    """Ops that make what crosses each narrow place, in the order of the forward.

    Narrow places are the entries of blocks; with fewer than three of them, positions that a single activation crosses.
    """
    entries = [_makers(graph, graph.calls[call].inputs) for call in block_calls(graph)]
    groups = [group for group in entries if group]
    return groups if len(groups) > 2 else _narrow_places(graph)


def every(groups: list[frozenset[int]], step: int) -> frozenset[int]:
    """The ops of every `step`-th group."""
    return frozenset(op for group in groups[::step] for op in group)


def compiled_references(graph: StepGraph) -> dict[str, Plan]:
    """What people do today, as plans for the compiled engine: those of `references.reference_plans`."""
    blocks = block_calls(graph)
    found = {"nothing": Plan(engine="compiled")}
    if blocks:
        outside = set(range(graph.num_forward))
        for call in blocks:
            outside -= set(range(graph.calls[call].first, graph.calls[call].end))
        skipped = {op for call in blocks[1::2] for op in range(graph.calls[call].first, graph.calls[call].end)}
        inputs = {op for call in blocks for op in _makers(graph, graph.calls[call].inputs)}
        products = {op for op in range(graph.num_forward) if graph.ops[op].flops}
        found["a checkpoint per block"] = _plan(graph, outside | inputs)
        found["every second block"] = _plan(graph, outside | inputs | skipped)
        found["selective, all matmuls kept"] = _plan(graph, outside | inputs | products)
    return found


def _plan(graph: StepGraph, keeps: set[int]) -> Plan:
    needs = graph.needs
    return Plan(engine="compiled", keeps=needs.keeps_of(needs.derive(keeps)), budget_bytes=0)


def _makers(graph: StepGraph, values: tuple[int, ...]) -> frozenset[int]:
    facts = [graph.values[value] for value in values]
    return frozenset(value.born for value in facts if value.born >= 0 and value.kind == "activation")


def _narrow_places(graph: StepGraph) -> list[frozenset[int]]:
    num = graph.num_forward
    last_read: dict[int, int] = {}
    for index, op in enumerate(graph.ops[:num]):
        last_read.update(dict.fromkeys(op.inputs, index))
    crossing: list[list[int]] = [[] for _ in range(num + 1)]
    for value, last in last_read.items():
        facts = graph.values[value]
        if facts.kind == "activation" and facts.born >= 0 and last - facts.born <= max(_LONG * num, 1):
            for position in range(facts.born + 1, last + 1):
                crossing[position].append(value)
    found = dict.fromkeys(values[0] for values in crossing if len(values) == 1)
    return [frozenset({graph.values[value].born}) for value in sorted(found, key=lambda v: graph.values[v].born)]


_MOST_CUTS = 256  # mixes of two neighbours in a family


@dataclass(frozen=True)
class CompiledCandidate:
    """Ops whose outputs are saved, and what that costs."""

    keeps: tuple[int, ...]
    peak_bytes: int
    extra_s: float


class CompiledSearch:
    """What solving one graph for the compiled engine needs, shared by all budgets of a sweep."""

    def __init__(self, graph: StepGraph, time_limit_s: float = 10.0) -> None:
        self.graph = graph
        self._effort = Effort(time_limit_s)
        self._candidates: dict[tuple[int, ...], CompiledCandidate] = {}

    @cached_property
    def plain(self) -> Timeline:
        return simulate(self.graph)

    def plan(self, budget: int) -> Plan:
        """The plan for a budget, with everything a person wants to know about it."""
        if self.plain.peak_bytes <= budget:
            return with_predictions(self.graph, self._timeline(self._point(frozenset())), self.plain, budget, 0.0)
        found = [reference for reference in self._references if reference.peak_bytes <= budget]
        for family in self._families:
            if not found or not self._is_late():
                best = self._fastest_in(family, budget)
                found += [best] if best is not None else []
        if not found:
            raise infeasible(budget, self.floor)
        fastest = min(found, key=lambda each: (each.extra_s, each.peak_bytes, each.keeps))
        timeline = self._timeline(fastest.keeps)
        return with_predictions(self.graph, timeline, self.plain, budget, self.lower_bound_s(budget))

    def lower_bound_s(self, budget: int) -> float:
        """Seconds that every plan of the compiled engine adds if its peak is to be at most `budget`."""
        return max((moment.lower_bound_s(budget) for moment in self._cut_problems), default=0.0)

    @cached_property
    def floor(self) -> Timeline:
        """The smallest peak found, of whatever plan."""
        ends = [self.cost(self._point(family.recomputed(len(family) - 1))) for family in self._families]
        found = [self.cost(self._point(frozenset())), *self._references, *ends]
        best = min(found, key=lambda each: (each.peak_bytes, each.extra_s))
        return self._timeline(best.keeps)

    # Families.

    @cached_property
    def _cut_problems(self) -> list[CutProblem]:
        """When memory is short: at the plain step's peaks in both directions, and where a plan of anchors peaks."""
        ops = [op for op in (peak_op(self.plain, 2), peak_op(self.plain, 0)) if op >= 0]
        moments = [CutProblem(self.graph, op) for op in dict.fromkeys(ops)]
        if self._anchors and moments:
            least = CutProblem(self.graph, moments[0].at, every(self._anchors, 1)).hull[-1]
            late = peak_op(self._timeline(self._point(least.recomputed)), 2)
            if late >= 0 and late not in ops:
                moments.append(CutProblem(self.graph, late))
        return moments

    @cached_property
    def _anchors(self) -> list[frozenset[int]]:
        return anchor_groups(self.graph)

    @cached_property
    def _families(self) -> list[CutFamily]:
        found = [self._family(moment) for moment in self._cut_problems]
        step = 1
        while self._cut_problems and step <= len(self._anchors):
            found.append(self._family(CutProblem(self.graph, self._cut_problems[0].at, every(self._anchors, step))))
            step *= 2
        return found

    def _family(self, moment: CutProblem) -> CutFamily:
        """The corners of a hull and the mixes between, up to the corner with the smallest peak."""
        corners = list(dict.fromkeys(choice.recomputed for choice in moment.hull))
        peaks = [self.cost(self._point(corner)).peak_bytes for corner in corners]
        return CutFamily(corners[: peaks.index(min(peaks)) + 1])

    @cached_property
    def _references(self) -> list[CompiledCandidate]:
        """What people do by hand: no plan of ours may be slower than theirs."""
        plans = [plan for plan in compiled_references(self.graph).values() if plan.keeps]
        return [self.cost(plan.keeps) for plan in plans]

    def _fastest_in(self, family: CutFamily, budget: int) -> CompiledCandidate | None:
        @cache
        def cost(number: int) -> CompiledCandidate:
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

    def cost(self, keeps: tuple[int, ...]) -> CompiledCandidate:
        if keeps not in self._candidates:
            timeline = self._timeline(keeps)
            self._effort.spend(len(timeline.ops))
            self._candidates[keeps] = CompiledCandidate(keeps, timeline.peak_bytes, timeline.extra_s)
        return self._candidates[keeps]

    def _timeline(self, keeps: tuple[int, ...]) -> Timeline:
        # With a budget of any size: without keeps and without a budget, a plan is the plain step.
        return simulate(self.graph, Plan(engine="compiled", keeps=keeps, budget_bytes=1))

    def _is_late(self) -> bool:
        return self._effort.is_over()


class CutFamily:
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
