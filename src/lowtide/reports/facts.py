"""What a report is made from: a plan and its graph, played with and without the plan, and what was measured."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace
from functools import cached_property

from lowtide.errors import InfeasibleBudgetError, PlanError
from lowtide.graph import StepGraph
from lowtide.plans import Plan
from lowtide.plans.rows import rows_of
from lowtide.plans.trials import Trial
from lowtide.reports.layers import Layers, counted
from lowtide.simulator import Timeline, simulate
from lowtide.solvers.describing import described
from lowtide.solvers.solving import search_for
from lowtide.solvers.sweeping import Frontier, Reference, alternatives

# Budgets of the curve in sixteenths of the way to the plain peak. Coarse first: what time is left for refines it.
_SHARES = (16, 8, 4, 12, 0, 2, 6, 10, 14, 1, 3, 5, 7, 9, 11, 13, 15)
_FLOOR_BEFORE = 0.5  # of the time allowed


@dataclass(frozen=True)
class Facts:
    """A plan, the timelines with and without it, the trade-off around it, and what was measured (None: was not)."""

    plan: Plan
    graph: StepGraph
    planned: Timeline
    plain: Timeline
    alternatives: tuple[Reference, ...]
    frontier: Frontier | None = None
    measured_peak_bytes: int | None = None
    measured_step_s: float | None = None
    notes: tuple[str, ...] = ()
    candidates: tuple[Trial, ...] = ()

    @cached_property
    def layers(self) -> Layers:
        return Layers(self.graph)

    @property
    def curve(self) -> Frontier:
        """The trade-off, or as much of it as is known without looking."""
        if self.frontier is not None:
            return self.frontier
        peaks = self.planned.peak_bytes, self.plain.peak_bytes
        return Frontier((), self.alternatives, self.graph.step_s, min(peaks), self.plain.peak_bytes)

    @property
    def budget_bytes(self) -> int:
        """0 where the plan was made for none."""
        return self.plan.budget_bytes

    @property
    def slowdown(self) -> float:
        """Predicted, as a share of the plain step."""
        return self.planned.extra_s / self.graph.step_s if self.graph.step_s else 0.0

    @property
    def measured_slowdown(self) -> float | None:
        """Only where both the plain step and the planned one were measured."""
        if self.measured_step_s is None or not self.graph.is_measured or not self.graph.step_s:
            return None
        return self.measured_step_s / self.graph.step_s - 1

    @property
    def fits(self) -> bool:
        """Whether the measured peak, or else the predicted one, is within the budget."""
        peak = self.planned.peak_bytes if self.measured_peak_bytes is None else self.measured_peak_bytes
        return not self.budget_bytes or peak <= self.budget_bytes


def gather(
    plan: Plan,
    *,
    measured_peak_bytes: int | None = None,
    measured_step_s: float | None = None,
    candidates: tuple[Trial, ...] = (),
    frontier: Frontier | None = None,
    time_limit_s: float = 0.0,
) -> Facts:
    """Everything a report shows. The curve is `frontier`; without one it is made, if `time_limit_s` is above 0."""
    if not isinstance(plan, Plan):
        raise TypeError(f"a Plan is needed, not {type(plan).__name__}")
    graph = plan.graph
    if graph is None:
        raise PlanError(
            "this plan comes without the graph it was made for, and a report is drawn from that. Plans made by "
            "lowtide.solve have theirs, and so has a plan file, unless it was written with graph=False; "
            "dataclasses.replace(plan, graph=graph) gives one back."
        )
    if plan.fingerprint and plan.fingerprint != graph.fingerprint:
        raise PlanError(f"this plan was made for the graph {plan.fingerprint!r} and comes with {graph.fingerprint!r}")
    note, known = "", alternatives(graph, plan.engine)
    if frontier is None and time_limit_s > 0:
        frontier, note = _curve(graph, plan, known, time_limit_s)
    if not plan.rows:  # one made by hand
        plan = replace(plan, rows=rows_of(graph, plan))
    return Facts(
        plan,
        graph,
        simulate(graph, plan),
        simulate(graph),
        known,
        frontier,
        measured_peak_bytes,
        measured_step_s,
        (note,) if note else (),
        candidates,
    )


def _curve(graph: StepGraph, plan: Plan, known: tuple[Reference, ...], time_limit_s: float) -> tuple[Frontier, str]:
    """Plans for budgets up to the plain peak, as many as there is time for, and how many those are in words.

    The smallest peak of all takes the longest to find, so it comes last: the others start from a checkpoint per block.
    """
    start = time.monotonic()

    def spent() -> float:
        return (time.monotonic() - start) / time_limit_s

    host = plan.host_bytes if plan.moves and graph.hardware.link_bytes_per_s else 0
    search = search_for(graph, plan.engine, host, 0, 2 * time_limit_s)
    plain = search.plain.peak_bytes
    low = min([plain, *(other.peak_bytes for other in known)])
    found = {plan.budget_bytes: plan} if plan.budget_bytes and plan.step_s else {}
    num_left = 0
    for share in _SHARES:
        budget = low + (plain - low) * share // 16
        if spent() > 1:
            num_left += 1
        elif budget not in found:
            with contextlib.suppress(InfeasibleBudgetError):  # the alternative may hold less than any plan found
                found[budget] = search.plan(budget)
    floor = min(low, *(each.peak_bytes for each in found.values()))
    if spent() < _FLOOR_BEFORE:
        floor, least = search.floor.peak_bytes, search.floor
        found[floor] = described(graph, least, search.plain, floor, search.lower_bound_s(floor))
    plans = tuple(found[budget] for budget in sorted(found))
    note = f"the trade-off curve was made from {counted(len(plans), 'budget')} in {time.monotonic() - start:.1f} s"
    if num_left:
        note += f"; the {time_limit_s:g} s allowed for it were over before {num_left} more"
    return Frontier(plans, known, graph.step_s, floor, plain), note
