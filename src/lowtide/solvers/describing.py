"""A plan that was found, with everything a person wants to know about it; or why there is none."""

from __future__ import annotations

from dataclasses import replace

from lowtide.errors import InfeasibleBudgetError
from lowtide.graph import StepGraph
from lowtide.plans import Plan, PlannedModule
from lowtide.plans.rows import rows_of
from lowtide.simulator import Timeline
from lowtide.units import format_bytes


def described(graph: StepGraph, timeline: Timeline, plain: Timeline, budget: int, lower_bound_s: float) -> Plan:
    """The plan of a timeline, with what it was made for and what is predicted of it."""
    plan = replace(
        timeline.plan,
        budget_bytes=budget,
        peak_bytes=timeline.peak_bytes,
        peak_path=timeline.peak_path,
        peak_phase=timeline.peak_phase,
        plain_peak_bytes=plain.peak_bytes,
        step_s=graph.step_s,
        extra_s=timeline.extra_s,
        lower_bound_s=min(lower_bound_s, timeline.extra_s),
        host_bytes=timeline.host_bytes,
        hardware=graph.hardware,
        fingerprint=graph.fingerprint,
        versions=graph.versions,
        graph=graph,
        choosers=_choosers(graph, timeline.plan),
        modules=_modules(graph, timeline.plan),
    )
    return replace(plan, rows=rows_of(graph, plan))


def _modules(graph: StepGraph, plan: Plan) -> tuple[PlannedModule, ...]:
    recomputed = [path for region in plan.regions for path in region.paths]
    paths = dict.fromkeys([*recomputed, *(move.path for move in plan.moves)])
    calls = {path: graph.calls_by_path[path] for path in paths if path in graph.calls_by_path}
    return tuple(PlannedModule(path, graph.calls[numbers[0]].kind, len(numbers)) for path, numbers in calls.items())


def _choosers(graph: StepGraph, plan: Plan) -> tuple[str, ...]:
    """The modules inside of regions whose own ops choose; of modules that have no name, those around them."""
    recomputed = {path for region in plan.regions for path in region.paths}
    found: dict[str, None] = {}
    for op in graph.ops[: graph.num_forward]:
        if "index" in op.flags:
            paths = [path for call in graph.around(op.call) if not (path := graph.calls[call].path).startswith("<")]
            if not recomputed.isdisjoint(paths):
                found[paths[0]] = None
    return tuple(found)


def infeasible(budget: int, floor: Timeline, advice: str = "") -> InfeasibleBudgetError:
    """The error for a budget below the `floor`; `advice` is what else would help."""
    static = int(floor.peak_by_kind["static"] + floor.peak_by_kind["gradients"])
    where = f"while {floor.peak_path or 'the model'} runs its {floor.peak_phase}"
    return InfeasibleBudgetError(
        f"budget {format_bytes(budget)} is below this step's floor of {format_bytes(floor.peak_bytes)}\n"
        f"  {format_bytes(static)}  parameters, gradients, optimizer state and batch\n"
        f"  {format_bytes(floor.peak_bytes - static)}  {where}\n"
        f"Raise the budget{', ' if advice else ' or '}make the batch smaller{advice}.",
        floor.peak_bytes,
    )
