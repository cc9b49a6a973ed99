"""What a report is made from: a plan and its graph, played with and without the plan, and what was measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from lowtide.errors import PlanError
from lowtide.graph import StepGraph
from lowtide.plans import Plan
from lowtide.plans.rows import rows_of
from lowtide.plans.trials import Trial
from lowtide.reports.layers import Layers
from lowtide.simulator import Timeline, simulate
from lowtide.solvers.sweeping import Frontier, Reference


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
    alternatives: tuple[Reference, ...] = (),
    frontier: Frontier | None = None,
    measured_peak_bytes: int | None = None,
    measured_step_s: float | None = None,
    notes: tuple[str, ...] = (),
    candidates: tuple[Trial, ...] = (),
) -> Facts:
    """Simulate the step with and without the plan; the rest of what a report shows is given."""
    graph = graph_of(plan)
    if not plan.rows:  # one made by hand
        plan = replace(plan, rows=rows_of(graph, plan))
    return Facts(
        plan,
        graph,
        simulate(graph, plan),
        simulate(graph),
        alternatives,
        frontier,
        measured_peak_bytes,
        measured_step_s,
        notes,
        candidates,
    )


def graph_of(plan: Plan) -> StepGraph:
    """Return the graph that a plan was made for. Raises `PlanError` if the plan comes without it or with another."""
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
    return graph
