"""Charts of a simulated step in three forms: data for the HTML page, a Chrome trace, and matplotlib figures.

- `chart_data`: the JSON that the scripts of the page draw. Timelines are reduced to a few thousand events, keeping the
  highest and lowest of each group, so that no peak is lost; each name is stored once.
- `trace_json`: ops, replays and copies as a Chrome trace, for ui.perfetto.dev and chrome://tracing.
- `plan_figure`, `frontier_figure`: figures for `plan.plot()`, `frontier.plot()` and `.png` reports. They need
  matplotlib (the extra `report`).
"""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from lowtide.reports.report_facts import ReportFacts
from lowtide.reports.report_text import actions_of, layer_rows, short_op, size, verdict
from lowtide.simulator.timeline import KINDS, PHASES, Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lowtide.plans.step_plan import Frontier

_MOST_POINTS = 3000
_MOST_PLAIN_POINTS = 1500
_NUM_LIVE = 6  # values listed for each event
_MOST_COPIES = 2000


_Names = defaultdict[str, int]  # numbers texts by first use, so that each is stored once


def chart_data(facts: ReportFacts) -> dict[str, Any]:
    """Return the data of the page's charts. Times are in nanoseconds, sizes in bytes."""
    names = _Names(count().__next__)
    rows = layer_rows(facts)
    actions = actions_of(rows)
    return {
        "kinds": list(KINDS),
        "phases": list(PHASES),
        "budget": facts.budget_bytes,
        "measuredPeak": facts.measured_peak_bytes,
        "planned": _planned(facts, names),
        "plain": _outline(facts.plain),
        "copies": _copies(facts, names),
        "curve": _curve(facts),
        "actions": actions,
        "layers": [[names[row.layer], *(row.bytes.get(action, 0) for action in actions)] for row in rows],
        "names": list(names),  # last, when all names are numbered
    }


def thinned(total: np.ndarray, most: int) -> np.ndarray:
    """Return at most `most` event indices: the first, last, lowest and highest of each group of events."""
    num = len(total)
    if num <= most:
        return np.arange(num)
    edges = np.linspace(0, num, most // 4 + 1).astype(int)
    chosen: set[int] = set()
    for first, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        run = total[first:end]
        chosen |= {first, end - 1, first + int(run.argmin()), first + int(run.argmax())}
    return np.array(sorted(chosen))


def _planned(facts: ReportFacts, names: _Names) -> dict[str, Any]:
    timeline, graph = facts.planned, facts.graph
    events = thinned(timeline.total_bytes, _MOST_POINTS)
    ops = timeline.ops[events].tolist()
    labels: dict[int, int] = {}
    lists: dict[tuple[int, ...], int] = {}  # neighbouring events often have the same live values
    live = []
    for sizes in timeline.live_at_each(events.tolist(), most=_NUM_LIVE):
        flat: list[int] = []
        for value, num_bytes in ((value, num_bytes) for value, num_bytes in sizes.items() if num_bytes):
            if value not in labels:
                labels[value] = names[_label(timeline, value)]
            flat += [labels[value], num_bytes]
        live.append(lists.setdefault(tuple(flat), len(lists)))
    return {
        "t": _nanoseconds(timeline, events),
        "end": _end(timeline),
        "bytes": timeline.live_bytes[events].T.tolist(),
        "op": [names[short_op(graph.ops[op].name) if op >= 0 else "the optimizer's step"] for op in ops],
        "path": [names[graph.path_of(op)] for op in ops],
        "phase": timeline.phases[events].tolist(),
        "live": live,
        "lists": [list(each) for each in lists],
        "peak": int(timeline.total_bytes[events].argmax()),
    }


def _label(timeline: Timeline, value: int) -> str:
    """Return a value's display name: a gradient's parameter, or the module and op that made an activation."""
    graph = timeline.graph
    known = graph.values[value]
    if known.kind == "gradient":
        return f"gradient of {known.name}" if known.name else "gradient"
    path = graph.path_of(known.born)
    op = short_op(graph.ops[known.born].name) if known.born >= 0 else known.name
    return f"{path} · {op}" if path else op


def _outline(timeline: Timeline) -> dict[str, Any]:
    events = thinned(timeline.total_bytes, _MOST_PLAIN_POINTS)
    return {
        "t": _nanoseconds(timeline, events),
        "end": _end(timeline),
        "total": timeline.total_bytes[events].tolist(),
        "byKind": list(timeline.peak_by_kind.values()),
    }


def _has_times(timeline: Timeline) -> bool:
    return bool(timeline.starts_s[-1] > 0)


def _nanoseconds(timeline: Timeline, events: np.ndarray) -> list[int]:
    """Return the start times of events; in a graph without times, events are equally spaced."""
    if not _has_times(timeline):
        return [int(event) * 1000 for event in events]
    return np.rint(timeline.starts_s[events] * 1e9).astype(np.int64).tolist()


def _end(timeline: Timeline) -> int:
    """Return the end of the chart: the optimizer's step has no time, and is drawn 1 % wide."""
    if not _has_times(timeline):
        return len(timeline.ops) * 1000
    return int(timeline.starts_s[-1] * 1e9 * 1.01) + 1


def _copies(facts: ReportFacts, names: _Names) -> dict[str, list[list[int]]]:
    """Return copies by direction, and stalls: [start, end, name, bytes]; only the longest if there are very many."""
    graph = facts.graph
    copies: dict[str, list[list[int]]] = {}
    for copy in facts.planned.copies:
        row = [int(copy.start_s * 1e9), int(copy.end_s * 1e9), names[_label(facts.planned, copy.value)]]
        copies.setdefault(copy.kind, []).append([*row, graph.values[copy.value].bytes])
    return {kind: sorted(sorted(rows, key=lambda row: row[0] - row[1])[:_MOST_COPIES]) for kind, rows in copies.items()}


def _curve(facts: ReportFacts) -> dict[str, Any]:
    """Return points [peak bytes, slowdown, budget bytes, lower bound of the slowdown] of plans, and alternatives."""
    step_s = facts.graph.step_s or 1.0
    plans = [
        [plan.peak_bytes, plan.extra_s / step_s, plan.budget_bytes, plan.lower_bound_s / step_s]
        for plan in _undominated(facts)
    ]
    others = [[other.name, other.peak_bytes, other.extra_s / step_s] for other in facts.alternatives]
    here = [facts.planned.peak_bytes, facts.slowdown]
    return {"plans": plans, "others": others, "here": here, "floor": facts.curve.floor_bytes}


def _undominated(facts: ReportFacts) -> list[Any]:
    """Return the plans for which no other is better in both time and memory, sorted by peak."""
    best: list[Any] = []
    for plan in sorted(facts.curve.plans, key=lambda plan: (plan.peak_bytes, plan.extra_s)):
        if not best or plan.extra_s < best[-1].extra_s:
            best.append(plan)
    return best


_COMPUTE = 1
_LANES = {"out": (2, "copies out"), "in": (3, "copies in"), "stall": (4, "stalls")}


def trace_json(facts: ReportFacts) -> str:
    """Return a Chrome trace of the predicted step with and without the plan.

    Ops, replays, copies and stalls are slices, live bytes are counters.
    """
    steps = {"with the plan (predicted)": facts.planned, "without a plan (predicted)": facts.plain}
    named: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for process, (name, timeline) in enumerate(steps.items(), start=1):
        named.append(_event("M", "process_name", process, 0, 0, args={"name": name}))
        lanes = {1: "compute", **(dict(_LANES.values()) if timeline.copies else {})}
        named += [_event("M", "thread_name", process, thread, 0, args={"name": lane}) for thread, lane in lanes.items()]
        events += _slices(timeline, process) + _copy_slices(timeline, process) + _counters(timeline, process)
    events.sort(key=lambda event: event["ts"])
    other = {"graph": facts.graph.fingerprint, "hardware": facts.graph.hardware.name, "numbers": "predicted"}
    content = {"displayTimeUnit": "ms", "otherData": other, "traceEvents": named + events}
    return json.dumps(content, separators=(",", ":"))


def _event(ph: str, name: str, process: int, thread: int, start_s: float, **more: Any) -> dict[str, Any]:
    return {"ph": ph, "name": name, "pid": process, "tid": thread, "ts": _micro(start_s), **more}


def _slices(timeline: Timeline, process: int) -> list[dict[str, Any]]:
    graph = timeline.graph
    slices = []
    columns = zip(timeline.ops.tolist(), timeline.phases.tolist(), timeline.starts_s.tolist(), strict=True)
    for index, phase, start_s in columns:
        if index < 0 or PHASES[phase] in ("compression", "decompression"):  # not an op of the graph
            continue
        op = graph.ops[index]
        seconds = timeline.recomputed_s(index) if PHASES[phase] == "replay" else op.seconds
        if seconds:  # views take no time, nor do ops that a replay leaves out
            more = {"dur": _micro(seconds), "cat": PHASES[phase]}
            more["args"] = {"module": graph.path_of(index), "phase": PHASES[phase]}
            slices.append(_event("X", short_op(op.name), process, _COMPUTE, start_s, **more))
    return slices


def _copy_slices(timeline: Timeline, process: int) -> list[dict[str, Any]]:
    graph = timeline.graph
    slices = []
    for copy in timeline.copies:
        value = graph.values[copy.value]
        facts = {"bytes": value.bytes, "module": graph.path_of(value.born)}
        more = {"dur": _micro(copy.end_s - copy.start_s), "cat": "copy", "args": facts}
        slices.append(_event("X", short_op(value.name), process, _LANES[copy.kind][0], copy.start_s, **more))
    return slices


def _counters(timeline: Timeline, process: int) -> list[dict[str, Any]]:
    """Return counters of live bytes by kind, for each event that changes them."""
    live = timeline.live_bytes
    changed = np.ones(len(live), dtype=bool)
    changed[1:] = (live[1:] != live[:-1]).any(axis=1)
    counters = []
    for event in np.flatnonzero(changed).tolist():
        sizes = dict(zip(KINDS, live[event].tolist(), strict=True))
        counters.append(_event("C", "live bytes", process, 0, float(timeline.starts_s[event]), args=sizes))
    return counters


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)


_COLOURS = {
    "static": "#aab4be",
    "kept": "#2f6db3",
    "transient": "#e69f00",
    "gradients": "#2a9d78",
    "in flight": "#c06c9d",
    "compressed": "#62b5e5",
}
_INK, _MOST_PLOT_POINTS = "#16202b", 6000


def plan_figure(facts: ReportFacts) -> Figure:
    """Return a figure of memory over the step, stacked by kind, with the plain step and the budget."""
    figure = _figure(10, 4.5)
    axes = figure.subplots()
    planned, plain = facts.planned, facts.plain
    unit, name = _unit(max(planned.peak_bytes, plain.peak_bytes, facts.budget_bytes))
    has_times = _has_times(planned)

    def times(timeline: Timeline, events: np.ndarray) -> np.ndarray:
        return np.array(_nanoseconds(timeline, events)) / (1e6 if has_times else 1e3)  # ms, or numbers of ops

    events = thinned(planned.total_bytes, _MOST_PLOT_POINTS)
    below = np.zeros(len(events))
    for kind, sizes in zip(KINDS, planned.live_bytes[events].T / unit, strict=True):
        if sizes.any():
            axes.fill_between(
                times(planned, events), below, below + sizes, step="post", color=_COLOURS.get(kind), label=kind, lw=0
            )
        below = below + sizes
    events = thinned(plain.total_bytes, _MOST_PLOT_POINTS)
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
    """Return a figure of slowdown over peak memory: the plans, the lower bound, and common practices."""
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
        raise ImportError("plots need matplotlib, which is not installed: pip install matplotlib") from error
    return Figure(figsize=(width, height), dpi=150, layout="constrained")  # no pyplot: no global state


def _unit(num_bytes: int) -> tuple[int, str]:
    return next((u for u in ((1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB")) if num_bytes >= u[0]), (1, "bytes"))


def _plain_text(text: str) -> str:
    """Return text that matplotlib does not parse as a formula."""
    return text.replace("$", r"\$")


def _tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e2e5e8", lw=0.8)
    axes.set_axisbelow(True)
