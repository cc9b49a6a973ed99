"""`ReportFacts`: what a report shows. `report_facts` gathers it.

It simulates the step with and without the plan, and searches for the trade-off curve of the page, as many budgets as
`time_limit_s` allows, coarse ones first. Measurements are passed in. HTML, Markdown, traces and figures are all made
from the result. `Layers` maps module paths to layers, so that tables can group equal modules (`layers.*.mlp`).
"""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from lowtide.errors import InfeasibleBudgetError, PlanError
from lowtide.graph.segments import all_blocks
from lowtide.graph.step_graph import StepGraph
from lowtide.plans.plan_text import Trial, rows_of
from lowtide.plans.step_plan import Frontier, Plan, Reference
from lowtide.simulator.timeline import Timeline, simulate
from lowtide.solvers.candidate import with_predictions
from lowtide.solvers.solve import alternatives, search_for

OUTSIDE = "outside of modules"
# Budgets of the curve, in sixteenths of the way from the smallest known peak to the plain one: coarse ones first.
_CURVE_SHARES = (16, 8, 4, 12, 0, 2, 6, 10, 14, 1, 3, 5, 7, 9, 11, 13, 15)
_FLOOR_BEFORE = 0.5  # share of the time limit: the floor is searched for only if less than this was spent


@dataclass(frozen=True)
class ReportFacts:
    """A plan, the timelines with and without it, the trade-off curve, and measurements (None: not measured)."""

    plan: Plan
    graph: StepGraph
    planned: Timeline
    plain: Timeline
    frontier: Frontier | None = None
    references: tuple[Reference, ...] = ()
    measured_peak_bytes: int | None = None
    measured_step_s: float | None = None
    notes: tuple[str, ...] = ()
    candidates: tuple[Trial, ...] = ()

    @cached_property
    def layers(self) -> Layers:
        return Layers(self.graph)

    @cached_property
    def alternatives(self) -> tuple[Reference, ...]:
        """What people use today, such as a checkpoint per block, and the `references` that were given."""
        return (*alternatives(self.graph, self.plan.engine), *self.references)

    @property
    def curve(self) -> Frontier:
        """The trade-off curve; without one, a frontier of the two simulated peaks only."""
        if self.frontier is not None:
            return self.frontier
        peaks = self.planned.peak_bytes, self.plain.peak_bytes
        return Frontier((), self.alternatives, self.graph.step_s, min(peaks), self.plain.peak_bytes)

    @property
    def budget_bytes(self) -> int:
        """The budget of the plan; 0 if it has none."""
        return self.plan.budget_bytes

    @property
    def slowdown(self) -> float:
        """The predicted slowdown, as a share of the plain step."""
        return self.planned.extra_s / self.graph.step_s if self.graph.step_s else 0.0

    @property
    def undivided(self) -> tuple[int, float, float]:
        """Peak and seconds of the plain step, and the predicted slowdown. With splits, all of the step not in parts."""
        plan = self.plan
        if self.graph.splits and plan.step_s:
            return plan.plain_peak_bytes, plan.step_s, plan.slowdown
        return self.plain.peak_bytes, self.graph.step_s, self.slowdown

    @property
    def measured_slowdown(self) -> float | None:
        """The measured slowdown; None unless both the plain and the planned step were measured."""
        if self.measured_step_s is None or not self.graph.is_measured or not self.graph.step_s:
            return None
        return self.measured_step_s / self.graph.step_s - 1

    @property
    def fits(self) -> bool:
        """Whether the measured peak, or else the predicted one, is within the budget."""
        peak = self.planned.peak_bytes if self.measured_peak_bytes is None else self.measured_peak_bytes
        return not self.budget_bytes or peak <= self.budget_bytes


def report_facts(
    plan: Plan, *, frontier: Frontier | None = None, time_limit_s: float = 0.0, **known: Any
) -> ReportFacts:
    """Everything a report shows. The curve is `frontier`; without one it is searched for if `time_limit_s` is above 0.

    `known` are measurements, candidates and references, as in `ReportFacts`.
    """
    graph = _graph_of(plan)
    if not plan.rows:  # written by the user, not made by a solver
        plan = replace(plan, rows=rows_of(graph, plan))
    facts = ReportFacts(plan, graph, simulate(graph, plan), simulate(graph), frontier, **known)
    if frontier is None and time_limit_s > 0:
        frontier, note = _curve(facts, time_limit_s)
        facts = replace(facts, frontier=frontier, notes=(note,))
    return facts


def _graph_of(plan: Plan) -> StepGraph:
    """Return the graph that a plan was made for. Raises `PlanError` if the plan comes without it or with another."""
    if not isinstance(plan, Plan):
        raise TypeError(f"a Plan is needed, not {type(plan).__name__}")
    graph = plan.graph
    if graph is None:
        raise PlanError(
            "this plan comes without the graph it was made for, which a report needs. Plans made by lowtide.solve have "
            "one, and so has a plan file unless it was written with graph=False; dataclasses.replace(plan, "
            "graph=graph) adds one."
        )
    if plan.fingerprint and plan.fingerprint != graph.fingerprint:
        raise PlanError(f"this plan was made for the graph {plan.fingerprint!r} and comes with {graph.fingerprint!r}")
    return graph


def _curve(facts: ReportFacts, time_limit_s: float) -> tuple[Frontier, str]:
    """Plans for budgets up to the plain peak, as many as the time limit allows, and a note that says how many.

    The floor takes the longest to find, so it comes last; the budgets before it start at the peak of a checkpoint per
    block.
    """
    graph, plan, known = facts.graph, facts.plan, facts.alternatives
    start = time.monotonic()

    def spent() -> float:
        return (time.monotonic() - start) / time_limit_s

    host = plan.host_bytes if plan.moves and graph.hardware.link_bytes_per_s else 0
    search = search_for(graph, plan.engine, host, 2 * time_limit_s)
    plain = search.plain.peak_bytes
    low = min([plain, *(other.peak_bytes for other in known)])
    plans_by_budget = {plan.budget_bytes: plan} if plan.budget_bytes and plan.step_s else {}
    num_left = 0
    for share in _CURVE_SHARES:
        budget = low + (plain - low) * share // 16
        if spent() > 1:
            num_left += 1
        elif budget not in plans_by_budget:
            # A reference may have a smaller peak than any plan of the search.
            with contextlib.suppress(InfeasibleBudgetError):
                plans_by_budget[budget] = search.plan(budget)
    floor = min(low, *(each.peak_bytes for each in plans_by_budget.values()))
    if spent() < _FLOOR_BEFORE:
        floor, least = search.floor.peak_bytes, search.floor
        plans_by_budget[floor] = with_predictions(graph, least, search.plain, floor, search.lower_bound_s(floor))
    plans = tuple(plans_by_budget[budget] for budget in sorted(plans_by_budget))
    budgets = f"{len(plans)} budget{'s' * (len(plans) != 1)}"
    note = f"the trade-off curve was made from {budgets} in {time.monotonic() - start:.1f} s"
    if num_left:
        note += f"; the {time_limit_s:g} s allowed for it were over before {num_left} more"
    return Frontier(plans, known, graph.step_s, floor, plain), note


class Layers:
    """The layers of a step: its repeated blocks, and the model's outermost modules for everything else."""

    def __init__(self, graph: StepGraph) -> None:
        self._blocks = {graph.calls[call].path for call in all_blocks(graph)}

    def layer_of(self, path: str) -> str:
        """Return the block that a module is or lies in, else the outermost module around it."""
        block = self._block(path)
        return block if block is not None else path.split(".")[0] or OUTSIDE

    def pattern_of(self, path: str) -> str:
        """Return a module's path with `*` for the number of its block: `layers.*.mlp` for `layers.7.mlp`."""
        block = self._block(path)
        if block is None:
            return path or OUTSIDE
        opened = re.sub(r"\d+(?=[^\d]*$)", "*", block)
        return opened + path[len(block) :]

    def _block(self, path: str) -> str | None:
        parts = path.split(".")
        for length in range(len(parts), 0, -1):
            if (prefix := ".".join(parts[:length])) in self._blocks:
                return prefix
        return None
