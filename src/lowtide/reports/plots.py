"""Figures of plans and frontiers, drawn with matplotlib (the extra `report`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lowtide.reports.facts import Facts
from lowtide.reports.series import thinned
from lowtide.reports.wording import size, verdict
from lowtide.simulator import KINDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lowtide.solvers.sweeping import Frontier

_COLOURS = {
    "static": "#aab4be",
    "kept": "#2f6db3",
    "transient": "#e69f00",
    "gradients": "#2a9d78",
    "in flight": "#c06c9d",
    "compressed": "#62b5e5",
}
_INK, _MOST_POINTS = "#16202b", 6000


def plan_figure(facts: Facts) -> Figure:
    """Memory over the step, stacked by kind, with the plain step and the budget."""
    figure = _figure(10, 4.5)
    axes = figure.subplots()
    planned, plain = facts.planned, facts.plain
    unit, name = _unit(max(planned.peak_bytes, plain.peak_bytes, facts.budget_bytes))
    has_times = bool(len(planned.ops)) and planned.starts_s[-1] > 0
    scale = 1e3 if has_times else 1.0

    def times(timeline: Any, events: np.ndarray) -> np.ndarray:
        return timeline.starts_s[events] * scale if has_times else events.astype(float)

    events = thinned(planned.total_bytes, _MOST_POINTS)
    below = np.zeros(len(events))
    for kind, sizes in zip(KINDS, planned.live_bytes[events].T / unit, strict=True):
        if sizes.any():
            axes.fill_between(
                times(planned, events), below, below + sizes, step="post", color=_COLOURS.get(kind), label=kind, lw=0
            )
        below = below + sizes
    events = thinned(plain.total_bytes, _MOST_POINTS)
    axes.step(
        times(plain, events), plain.total_bytes[events] / unit, where="post", color=_INK, lw=0.9, label="without a plan"
    )
    if facts.budget_bytes:
        axes.axhline(facts.budget_bytes / unit, color=_INK, ls="--", lw=1.3, label=f"budget {size(facts.budget_bytes)}")
    if facts.measured_peak_bytes is not None:
        text = f"measured peak {size(facts.measured_peak_bytes)}"
        axes.axhline(facts.measured_peak_bytes / unit, color=_INK, ls=":", lw=1.3, label=text)
    axes.set_xlabel("ms (predicted)" if has_times else "op")
    axes.set_ylabel(f"{name} (predicted)")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    axes.legend(frameon=False, fontsize=9, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    axes.set_title(_plain_text(verdict(facts)), loc="left", fontsize=10.5, wrap=True)
    _tidy(axes)
    return figure


def frontier_figure(frontier: Frontier) -> Figure:
    """The slowdown of the fastest plan found against its peak, the bound, and what people use today."""
    figure = _figure(7, 4.5)
    axes = figure.subplots()
    unit, name = _unit(frontier.plain_peak_bytes)
    step_s = frontier.step_s or 1.0
    plans = sorted(frontier.plans, key=lambda plan: plan.peak_bytes)
    slower = [100 * plan.extra_s / step_s for plan in plans]
    axes.plot([plan.peak_bytes / unit for plan in plans], slower, "o-", color=_COLOURS["kept"], ms=4, label="lowtide")
    bounded = sorted(plans, key=lambda plan: plan.budget_bytes)
    bounds = [100 * plan.lower_bound_s / step_s for plan in bounded]
    axes.plot(
        [plan.budget_bytes / unit for plan in bounded], bounds, ":", color="#8a949e", label="bound: no plan is below"
    )
    for marker, other in zip("sD^vP*Xph8" * 3, frontier.references, strict=False):
        at = other.peak_bytes / unit, 100 * other.extra_s / step_s
        axes.plot(*at, marker, color="#5a6673", ms=7, label=_plain_text(other.name))
    axes.set_xlabel(f"peak memory, {name} (predicted)")
    axes.set_ylabel("% slower (predicted)")
    axes.set_ylim(bottom=min(0.0, *slower) if slower else 0.0)
    axes.legend(frameon=False, fontsize=9)
    _tidy(axes)
    return figure


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plots are drawn with matplotlib, which is not here: pip install 'lowtide[report]'"
        ) from error
    return Figure(figsize=(width, height), dpi=150, layout="constrained")  # no pyplot: no global state


def _unit(num_bytes: int) -> tuple[int, str]:
    return next((u for u in ((1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB")) if num_bytes >= u[0]), (1, "bytes"))


def _plain_text(text: str) -> str:
    """Text that matplotlib takes for no formula."""
    return text.replace("$", r"\$")


def _tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e2e5e8", lw=0.8)
    axes.set_axisbelow(True)
