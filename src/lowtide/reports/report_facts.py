"""Which layer a module belongs to, and what it is called in all layers that are alike.

What a report is made from: a plan and its graph, played with and without the plan, and what was measured.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property

from lowtide.errors import PlanError
from lowtide.graph.segments import all_blocks
from lowtide.graph.step_graph import StepGraph
from lowtide.plans.plan_text import Trial, rows_of
from lowtide.plans.step_plan import Frontier, Plan, Reference
from lowtide.simulator.timeline import Timeline, simulate

OUTSIDE = "outside of modules"


class Layers:
    """The layers of a step: its repeated blocks, and what is beside them by the model's outermost modules."""

    def __init__(self, graph: StepGraph) -> None:
        self._blocks = {graph.calls[call].path for call in all_blocks(graph)}

    def layer_of(self, path: str) -> str:
        """The block that a module is or lies in, else the outermost module around it."""
        block = self._block(path)
        return block if block is not None else path.split(".")[0] or OUTSIDE

    def pattern_of(self, path: str) -> str:
        """A module's path with the number of its block left open: `layers.*.mlp` for `layers.7.mlp`."""
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


def short_op(name: str) -> str:
    """`addmm` for `aten.addmm.default`: the namespace goes if it is torch's own, and so does the overload."""
    parts = name.split(".")
    if len(parts) >= 3 and parts[0] in ("aten", "prims"):
        return parts[1]
    return name


def counted(num: int, noun: str) -> str:
    return f"{num} {noun}" if num == 1 else f"{num} {noun}s"


@dataclass(frozen=True)
class ReportFacts:
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


def report_facts(
    plan: Plan,
    *,
    alternatives: tuple[Reference, ...] = (),
    frontier: Frontier | None = None,
    measured_peak_bytes: int | None = None,
    measured_step_s: float | None = None,
    notes: tuple[str, ...] = (),
    candidates: tuple[Trial, ...] = (),
) -> ReportFacts:
    """Simulate the step with and without the plan; the rest of what a report shows is given."""
    graph = graph_of(plan)
    if not plan.rows:  # one made by hand
        plan = replace(plan, rows=rows_of(graph, plan))
    return ReportFacts(
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
