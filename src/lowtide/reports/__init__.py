"""Reports: what a plan does to a step, as a page, a picture, a trace or a table. Made without torch."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.reports.facts import gather
from lowtide.reports.markdown import to_markdown
from lowtide.reports.page import to_html
from lowtide.reports.tracefile import trace_json
from lowtide.reports.wording import size, verdict

if TYPE_CHECKING:
    from lowtide.plans import Plan
    from lowtide.plans.trials import Trial
    from lowtide.solvers.sweeping import Frontier

logger = logging.getLogger("lowtide")
SUFFIXES = (".html", ".png", ".md", ".json")


@dataclass(frozen=True)
class Report:
    """A report that was written: where, how large, how long it took, and what it says in one line."""

    path: Path
    num_bytes: int
    seconds: float
    verdict: str
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.path} ({size(self.num_bytes)}, made in {self.seconds:.1f} s)", f"  {self.verdict}"]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def write_report(
    plan: Plan,
    path: str | os.PathLike[str],
    *,
    measured_peak_bytes: int | None = None,
    measured_step_s: float | None = None,
    candidates: tuple[Trial, ...] = (),
    frontier: Frontier | None = None,
    time_limit_s: float = 5.0,
) -> Report:
    """Write the report of a plan: a page (`.html`), picture (`.png`), Markdown (`.md`) or Perfetto trace (`.json`).

    The plan has to have its graph, as plans of `lowtide.solve` do. What was measured is shown beside what is predicted,
    and the `candidates` that `lowtide.fit` tried in a table.
    The trade-off curve is `frontier`, from `lowtide.sweep`, or made here in about `time_limit_s`.
    """
    start = time.monotonic()
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"a report is written to a file that ends in {', '.join(SUFFIXES)}; {str(path)!r} does not")
    kind = path.suffix.lower()
    facts = gather(
        plan,
        measured_peak_bytes=measured_peak_bytes,
        measured_step_s=measured_step_s,
        candidates=candidates,
        frontier=frontier,
        time_limit_s=time_limit_s if kind == ".html" else 0.0,  # only the page shows the curve
    )
    if kind == ".png":
        from lowtide.reports.plots import plan_figure

        plan_figure(facts).savefig(path)
    else:
        text = {".html": to_html, ".md": to_markdown, ".json": trace_json}[kind](facts)
        path.write_text(text, encoding="utf-8", newline="\n")
    report = Report(path, path.stat().st_size, time.monotonic() - start, verdict(facts), facts.notes)
    logger.info("%s", report)
    return report
