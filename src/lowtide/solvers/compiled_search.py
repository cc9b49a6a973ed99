"""The search for plans of a compiled step: which forward values are saved; the others are recomputed one by one.

`min_cut` gives the optimal choices for every price per byte held at a critical point, an op at which the step peaks.
These choices are the corners of a hull of seconds over bytes. A mix of two neighbouring corners decides ops up to
some position as the smaller one does, as early values live longest, and later ops as the faster one. Corners and
mixes form a `CutFamily`, numbered from fast to small. The first member whose *simulated* peak fits the budget is
found by bisection (`interpolation.first_fitting`). The plan is the fastest over all families and the usual
checkpoints. Families do not depend on the budget, so a larger budget never gives a slower plan.

**Anchors.** If nothing is saved along the forward, the first value that the backward needs has the whole forward
recomputed and live at once, and the peak rises again at small budgets. Anchors are values at which the forward is
narrow: inputs of blocks, or values that are the only live activation at some op. With an anchor saved, nothing before
it is recomputed until the backward gets there. Further families save all anchors, every second, every fourth and so
on: the square-root checkpoints of Chen et al. (2016) are among them.

Cost: one hull per family (up to 48 maximum flows each), one simulation per corner and bisection step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise

from lowtide.graph.segments import all_blocks
from lowtide.graph.step_graph import StepGraph
from lowtide.plans.step_plan import Plan
from lowtide.simulator.timeline import Timeline, simulate
from lowtide.solvers.candidate import Effort, infeasible, with_predictions
from lowtide.solvers.hull import peak_op
from lowtide.solvers.interpolation import first_fitting
from lowtide.solvers.min_cut import CutProblem

_LONG = 1 / 3  # of the forward: values read over a longer range (masks, position tables) do not count as crossing


def anchor_groups(graph: StepGraph) -> list[frozenset[int]]:
    """The ops whose outputs are the anchors at each narrow position, in the order of the forward.

    Narrow positions are the inputs of blocks; if fewer than three, positions at which one activation is live.
    """
    entries = [_makers(graph, graph.calls[call].inputs) for call in all_blocks(graph)]
    groups = [group for group in entries if group]
    return groups if len(groups) > 2 else _narrow_positions(graph)


def every(groups: list[frozenset[int]], step: int) -> frozenset[int]:
    """The ops of every `step`-th group."""
    return frozenset(op for group in groups[::step] for op in group)


def compiled_references(graph: StepGraph) -> dict[str, Plan]:
    """The plans of `baselines.reference_plans` for the compiled engine."""
    blocks = all_blocks(graph)
    plans = {"nothing": Plan(engine="compiled")}
    if blocks:
        outside = set(range(graph.num_forward))
        for call in blocks:
            outside -= set(range(graph.calls[call].first, graph.calls[call].end))
        skipped = {op for call in blocks[1::2] for op in range(graph.calls[call].first, graph.calls[call].end)}
        inputs = {op for call in blocks for op in _makers(graph, graph.calls[call].inputs)}
        products = {op for op in range(graph.num_forward) if graph.ops[op].flops}
        plans["a checkpoint per block"] = _plan(graph, outside | inputs)
        plans["every second block"] = _plan(graph, outside | inputs | skipped)
        plans["selective, all matmuls kept"] = _plan(graph, outside | inputs | products)
    return plans


def _plan(graph: StepGraph, keeps: set[int]) -> Plan:
    needs = graph.needs
    return Plan(engine="compiled", keeps=needs.keeps_of(needs.derive(keeps)))


def _makers(graph: StepGraph, values: tuple[int, ...]) -> frozenset[int]:
    facts = [graph.values[value] for value in values]
    return frozenset(value.born for value in facts if value.born >= 0 and value.kind == "activation")


def _narrow_positions(graph: StepGraph) -> list[frozenset[int]]:
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
    narrow = dict.fromkeys(values[0] for values in crossing if len(values) == 1)
    return [frozenset({graph.values[value].born}) for value in sorted(narrow, key=lambda v: graph.values[v].born)]


_MOST_CUTS = 256  # mixes of two neighbouring corners in a family; bisection simulates a few of them


@dataclass(frozen=True)
class CompiledCandidate:
    """The ops whose outputs are saved, with the simulated peak and time."""

    keeps: tuple[int, ...]
    peak_bytes: int
    extra_s: float


class CompiledSearch:
    """Finds plans for one graph; its work is shared by all budgets of a sweep."""

    def __init__(self, graph: StepGraph, time_limit_s: float = 10.0) -> None:
        self.graph = graph
        self._effort = Effort(time_limit_s)
        self._candidates: dict[tuple[int, ...], CompiledCandidate] = {}

    @cached_property
    def plain(self) -> Timeline:
        return simulate(self.graph)

    def plan(self, budget: int) -> Plan:
        """The fastest plan for a budget, with predictions and lower bound."""
        if self.plain.peak_bytes <= budget:
            return with_predictions(self._timeline(self._point(frozenset())), budget, 0.0)
        found = [reference for reference in self._references if reference.peak_bytes <= budget]
        for family in self._families:
            if not found or not self._effort.is_over():
                best = self._fastest_in(family, budget)
                found += [best] if best is not None else []
        if not found:
            raise infeasible(budget, self.floor)
        fastest = min(found, key=lambda each: (each.extra_s, each.peak_bytes, each.keeps))
        return with_predictions(self._timeline(fastest.keeps), budget, self.lower_bound_s(budget))

    def lower_bound_s(self, budget: int) -> float:
        """A lower bound on the seconds that every plan of the compiled engine within `budget` adds."""
        return max((problem.lower_bound_s(budget) for problem in self._cut_problems), default=0.0)

    @cached_property
    def floor(self) -> Timeline:
        """The candidate with the smallest peak."""
        ends = [self.cost(self._point(family.recomputed(len(family) - 1))) for family in self._families]
        found = [self.cost(self._point(frozenset())), *self._references, *ends]
        best = min(found, key=lambda each: (each.peak_bytes, each.extra_s))
        return self._timeline(best.keeps)

    # Families.

    @cached_property
    def _cut_problems(self) -> list[CutProblem]:
        """At the plain step's peaks in backward and forward, and where the smallest plan with all anchors peaks."""
        ops = [op for op in (peak_op(self.plain, 2), peak_op(self.plain, 0)) if op >= 0]
        problems = [CutProblem(self.graph, op) for op in dict.fromkeys(ops)]
        if self._anchors and problems:
            least = CutProblem(self.graph, problems[0].at, every(self._anchors, 1)).hull[-1]
            late = peak_op(self._timeline(self._point(least.recomputed)), 2)
            if late >= 0 and late not in ops:
                problems.append(CutProblem(self.graph, late))
        return problems

    @cached_property
    def _anchors(self) -> list[frozenset[int]]:
        return anchor_groups(self.graph)

    @cached_property
    def _families(self) -> list[CutFamily]:
        families = [self._family(problem) for problem in self._cut_problems]
        step = 1
        while self._cut_problems and step <= len(self._anchors):
            families.append(self._family(CutProblem(self.graph, self._cut_problems[0].at, every(self._anchors, step))))
            step *= 2
        return families

    def _family(self, problem: CutProblem) -> CutFamily:
        """The corners of a hull, up to the one with the smallest peak, and the mixes between them."""
        corners = list(dict.fromkeys(choice.recomputed for choice in problem.hull))
        peaks = [self.cost(self._point(corner)).peak_bytes for corner in corners]
        return CutFamily(corners[: peaks.index(min(peaks)) + 1])

    @cached_property
    def _references(self) -> list[CompiledCandidate]:
        """Checkpoints that users would write: included so that no plan is slower than those in simulation."""
        plans = [plan for plan in compiled_references(self.graph).values() if plan.keeps]
        return [self.cost(plan.keeps) for plan in plans]

    def _fastest_in(self, family: CutFamily, budget: int) -> CompiledCandidate | None:
        @cache
        def cost(number: int) -> CompiledCandidate:
            return self.cost(self._point(family.recomputed(number)))

        last = len(family) - 1
        if cost(last).peak_bytes > budget:
            return None
        return cost(first_fitting(cost, last, budget, is_late=self._effort.is_over))

    # Plans.

    def _point(self, recomputed: frozenset[int]) -> tuple[int, ...]:
        """The ops whose outputs are saved if only `recomputed` may run again."""
        needs = self.graph.needs
        return needs.keeps_of(needs.derive(frozenset(range(self.graph.num_forward)) - recomputed))

    def cost(self, keeps: tuple[int, ...]) -> CompiledCandidate:
        if keeps not in self._candidates:
            timeline = self._timeline(keeps)
            self._effort.spend(len(timeline.ops))
            self._candidates[keeps] = CompiledCandidate(keeps, timeline.peak_bytes, timeline.extra_s)
        return self._candidates[keeps]

    def _timeline(self, keeps: tuple[int, ...]) -> Timeline:
        # Any budget: a plan with neither keeps nor a budget is the plain step.
        return simulate(self.graph, Plan(engine="compiled", keeps=keeps, budget_bytes=1))


class CutFamily:
    """Candidates numbered from 0 (the first corner) to `len - 1` (the last): ever smaller and slower."""

    def __init__(self, corners: list[frozenset[int]]) -> None:
        self._corners = corners
        self._cuts = [_thinned(sorted(a ^ b)) for a, b in pairwise(corners)]

    def __len__(self) -> int:
        return 1 + sum(map(len, self._cuts))

    def recomputed(self, number: int) -> frozenset[int]:
        """The ops that candidate `number` recomputes: those of the smaller corner up to a position."""
        if number == 0:
            return self._corners[0]
        for (before, after), cuts in zip(pairwise(self._corners), self._cuts, strict=True):
            if number <= len(cuts):
                last = cuts[number - 1]
                return frozenset([op for op in after if op <= last] + [op for op in before if op > last])
            number -= len(cuts)
        raise IndexError(number)


def _thinned(cuts: list[int]) -> list[int]:
    """At most `_MOST_CUTS` of the positions, evenly spaced, with the last."""
    step = -(-len(cuts) // _MOST_CUTS)
    return cuts[::-1][:: max(step, 1)][::-1]
