"""`plan.report()` and `handle.report()`: a plan as an HTML page, a picture, Markdown or a Perfetto trace.

`report_facts` simulates the step with and without the plan. For a page it also searches for the trade-off curve:
plans for some 17 budgets, first a few far apart and then those between, until `time_limit_s` is over. The package
`reports` makes texts, tables and charts of the result.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from lowtide.errors import InfeasibleBudgetError, PlanError
from lowtide.graph.step_graph import StepGraph
from lowtide.plans.plan_text import rows_of
from lowtide.plans.step_plan import Frontier, Plan, Reference
from lowtide.reports.charts import plan_figure, trace_json
from lowtide.reports.page import Report, to_html
from lowtide.reports.report_facts import ReportFacts
from lowtide.reports.report_text import to_markdown, verdict
from lowtide.simulator.timeline import simulate
from lowtide.solvers.candidate import with_predictions
from lowtide.solvers.solve import alternatives, search_for
from lowtide.units import counted

logger = logging.getLogger("lowtide")

SUFFIXES = (".html", ".png", ".md", ".json")
# Budgets of the curve, in sixteenths of the way from the smallest known peak to the plain one: coarse ones first.
_CURVE_SHARES = (16, 8, 4, 12, 0, 2, 6, 10, 14, 1, 3, 5, 7, 9, 11, 13, 15)
_FLOOR_BEFORE = 0.5  # share of the time limit: the floor is searched for only if less than this was spent


def write_report(plan: Plan, path: str | os.PathLike[str], *, time_limit_s: float, **known: Any) -> Report:
    """Write the report of a plan, as `Plan.report` says; `known` are its other options."""
    start = time.monotonic()
    path, kind = Path(path), Path(path).suffix.lower()
    if kind not in SUFFIXES:
        raise ValueError(f"a report is written to a file that ends in {', '.join(SUFFIXES)}; {str(path)!r} does not")
    curve_s = time_limit_s if kind == ".html" else 0.0  # only the page shows the curve
    facts = report_facts(plan, time_limit_s=curve_s, **known)
    if kind == ".png":
        plan_figure(facts).savefig(path)
    else:
        text = {".html": to_html, ".md": to_markdown, ".json": trace_json}[kind](facts)
        path.write_text(text, encoding="utf-8", newline="\n")
    report = Report(path, path.stat().st_size, time.monotonic() - start, verdict(facts), facts.notes)
    logger.info("%s", report)
    return report


def report_facts(
    plan: Plan,
    *,
    frontier: Frontier | None = None,
    references: tuple[Reference, ...] = (),
    time_limit_s: float = 0.0,
    **known: Any,
) -> ReportFacts:
    """Everything a report shows. The curve is `frontier`; without one it is searched for if `time_limit_s` is above 0.

    `references` are listed beside the usual alternatives. `known` are measurements and candidates, as in `ReportFacts`.
    """
    graph, notes = _graph_of(plan), tuple[str, ...]()
    if not plan.rows:  # written by the user, not made by a solver
        plan = replace(plan, rows=rows_of(graph, plan))
    others = (*alternatives(graph, plan.engine), *references)
    if frontier is None and time_limit_s > 0:
        frontier, note = _curve(graph, plan, others, time_limit_s)
        notes = (note,)
    return ReportFacts(plan, graph, simulate(graph, plan), simulate(graph), others, frontier, notes=notes, **known)


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


def _curve(graph: StepGraph, plan: Plan, known: tuple[Reference, ...], time_limit_s: float) -> tuple[Frontier, str]:
    """Plans for budgets up to the plain peak, as many as the time limit allows, and a note that says how many.

    The floor takes the longest to find, so it comes last; the budgets before it start at the peak of a checkpoint per
    block.
    """
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
        plans_by_budget[floor] = with_predictions(least, floor, search.lower_bound_s(floor))
    plans = tuple(plans_by_budget[budget] for budget in sorted(plans_by_budget))
    note = f"the trade-off curve was made from {counted(len(plans), 'budget')} in {time.monotonic() - start:.1f} s"
    if num_left:
        note += f"; the {time_limit_s:g} s allowed for it were over before {num_left} more"
    return Frontier(plans, known, graph.step_s, floor, plain), note
