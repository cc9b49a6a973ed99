"""`plan.report()` and `handle.report()`: a plan as an HTML page, a picture, Markdown or a Perfetto trace.

Gathers what a report shows and writes the file; the texts, tables and charts are made by the `reports` package. The
trade-off curve of the page takes further searches, as many as `time_limit_s` allows: coarse budgets come first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Any

from lowtide.errors import InfeasibleBudgetError
from lowtide.graph.step_graph import StepGraph
from lowtide.plans.step_plan import Frontier, Plan, Reference
from lowtide.reports.charts import trace_json
from lowtide.reports.page import to_html
from lowtide.reports.report_text import Report, ReportFacts, counted, graph_of, report_facts, to_markdown, verdict
from lowtide.solvers.candidate import with_predictions
from lowtide.solvers.solve import alternatives, search_for

logger = logging.getLogger("lowtide")
SUFFIXES = (".html", ".png", ".md", ".json")
# Budgets of the curve, in sixteenths of the way from the smallest known peak to the plain one: coarse ones first.
_CURVE_SHARES = (16, 8, 4, 12, 0, 2, 6, 10, 14, 1, 3, 5, 7, 9, 11, 13, 15)
_FLOOR_BEFORE = 0.5  # share of the time limit: the floor is searched for only if less than this was spent


def write_report(plan: Plan, path: str | os.PathLike[str], *, time_limit_s: float, **known: Any) -> Report:
    """Write the report of a plan, as `Plan.report` says; `known` are its other options."""
    start = time.monotonic()
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"a report is written to a file that ends in {', '.join(SUFFIXES)}; {str(path)!r} does not")
    kind = path.suffix.lower()
    curve_s = time_limit_s if kind == ".html" else 0.0  # only the page shows the curve
    facts = gather_with_curve(plan, time_limit_s=curve_s, **known)
    if kind == ".png":
        from lowtide.reports.charts import plan_figure

        plan_figure(facts).savefig(path)
    else:
        text = {".html": to_html, ".md": to_markdown, ".json": trace_json}[kind](facts)
        path.write_text(text, encoding="utf-8", newline="\n")
    report = Report(path, path.stat().st_size, time.monotonic() - start, verdict(facts), facts.notes)
    logger.info("%s", report)
    return report


def gather_with_curve(
    plan: Plan,
    *,
    frontier: Frontier | None = None,
    references: tuple[Reference, ...] = (),
    time_limit_s: float = 0.0,
    **measured: Any,
) -> ReportFacts:
    """Everything a report shows. The curve is `frontier`; without one it is searched for if `time_limit_s` is above 0.

    `measured` is passed on to `report_facts`.
    """
    graph = graph_of(plan)
    note, known = "", (*alternatives(graph, plan.engine), *references)
    if frontier is None and time_limit_s > 0:
        frontier, note = _curve(graph, plan, known, time_limit_s)
    return report_facts(plan, alternatives=known, frontier=frontier, notes=(note,) if note else (), **measured)


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
        plans_by_budget[floor] = with_predictions(graph, least, search.plain, floor, search.lower_bound_s(floor))
    plans = tuple(plans_by_budget[budget] for budget in sorted(plans_by_budget))
    note = f"the trade-off curve was made from {counted(len(plans), 'budget')} in {time.monotonic() - start:.1f} s"
    if num_left:
        note += f"; the {time_limit_s:g} s allowed for it were over before {num_left} more"
    return Frontier(plans, known, graph.step_s, floor, plain), note
