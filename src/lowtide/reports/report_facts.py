"""`ReportFacts`: what a report shows. HTML, Markdown, traces and figures are all made from it.

`api/report.py` simulates the step with and without the plan, searches for the trade-off curve, and passes them in with
what was measured. `Layers` maps module paths to layers, so that tables can group equal modules (`layers.*.mlp`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from lowtide.graph.segments import all_blocks
from lowtide.graph.step_graph import StepGraph
from lowtide.plans.plan_text import Trial
from lowtide.plans.step_plan import Frontier, Plan, Reference
from lowtide.simulator.timeline import Timeline

OUTSIDE = "outside of modules"


@dataclass(frozen=True)
class ReportFacts:
    """A plan, the timelines with and without it, the trade-off curve, and measurements (None: not measured).

    `alternatives` are what people use today, such as a checkpoint per block, on the same step.
    """

    plan: Plan
    graph: StepGraph
    planned: Timeline
    plain: Timeline
    alternatives: tuple[Reference, ...] = ()
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
