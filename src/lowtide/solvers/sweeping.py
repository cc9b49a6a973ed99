"""`sweep`: the whole trade-off between memory and time, in one go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowtide.errors import InfeasibleBudgetError
from lowtide.graph import StepGraph
from lowtide.plans import Plan
from lowtide.simulator import simulate
from lowtide.solvers.anchors import compiled_references
from lowtide.solvers.references import reference_plans
from lowtide.solvers.solving import search_for
from lowtide.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NUM_BUDGETS = 16


@dataclass(frozen=True)
class Reference:
    """Something people use today, as simulated on the same graph."""

    name: str
    peak_bytes: int
    extra_s: float


@dataclass(frozen=True)
class Frontier:
    """Plans from the smallest budget to the plain peak, and where the usual alternatives stand. All predicted."""

    plans: tuple[Plan, ...]
    references: tuple[Reference, ...]
    step_s: float
    floor_bytes: int
    plain_peak_bytes: int

    def plot(self) -> Figure:
        """A matplotlib figure of slowdown against peak memory, with the alternatives (the extra `report`)."""
        from lowtide.reports.plots import frontier_figure

        return frontier_figure(self)

    def __str__(self) -> str:
        lines = [f"{'budget':>12}  {'peak':>12}  {'slower':>8}  {'gap':>6}   (predicted)"]
        for plan in self.plans:
            lines.append(
                f"{format_bytes(plan.budget_bytes):>12}  {format_bytes(plan.peak_bytes):>12}  "
                f"{100 * plan.slowdown:>6.1f} %  {100 * plan.gap:>4.1f} %"
            )
        for reference in self.references:
            slower = 100 * reference.extra_s / self.step_s if self.step_s else 0.0
            lines.append(
                f"{'':>12}  {format_bytes(reference.peak_bytes):>12}  {slower:>6.1f} %          {reference.name}"
            )
        return "\n".join(lines)


def sweep(
    graph: StepGraph,
    budgets: Sequence[int | str] | None = None,
    *,
    host: int | str = 0,
    disk: int | str = 0,
    engine: str = "eager",
    time_limit_s: float = 60.0,
) -> Frontier:
    """Plans for many budgets (default: sixteen from the floor to the plain peak), sharing all work between them.

    Budgets below the floor are left out. The alternatives shown beside them are simulated on the same graph: nothing, a
    checkpoint per block, every second block, and selective checkpointing that keeps all matrix products.
    """
    search = search_for(graph, engine, host, disk, time_limit_s)
    floor, plain = search.floor.peak_bytes, search.plain.peak_bytes
    if budgets is None:
        steps = range(_NUM_BUDGETS)
        wanted = sorted({floor + (plain - floor) * step // (_NUM_BUDGETS - 1) for step in steps})
    else:
        total = graph.hardware.memory_bytes or None
        wanted = sorted(parse_bytes(budget, total_bytes=total) for budget in budgets)
    plans = []
    for budget in wanted:
        try:
            plans.append(search.plan(budget))
        except InfeasibleBudgetError:
            continue
    return Frontier(tuple(plans), alternatives(graph, engine), graph.step_s, floor, plain)


def alternatives(graph: StepGraph, engine: str) -> tuple[Reference, ...]:
    """What people use today, and what it costs on this graph."""
    known = compiled_references(graph) if engine == "compiled" else reference_plans(graph)
    timelines = {name: simulate(graph, plan) for name, plan in known.items()}
    return tuple(Reference(name, t.peak_bytes, t.extra_s) for name, t in timelines.items())
