"""The data behind a page's charts: timelines thinned out so that no peak is lost, and names written once."""

from __future__ import annotations

from typing import Any

import numpy as np

from lowtide.reports.facts import Facts
from lowtide.reports.layers import short_op
from lowtide.reports.tables import actions_of, layer_rows
from lowtide.simulator import KINDS, PHASES, Timeline

_MOST_POINTS = 3000
_MOST_PLAIN_POINTS = 1500
_NUM_LIVE = 6  # values named at each moment
_MOST_COPIES = 2000


class _Names:
    """Texts by number, each written once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    def all(self) -> list[str]:
        return list(self._numbers)


def chart_data(facts: Facts) -> dict[str, Any]:
    """What the page draws, as plain data. Times are whole nanoseconds, sizes whole bytes."""
    names = _Names()
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
        "layers": [[names(row.layer), *(row.bytes.get(action, 0) for action in actions)] for row in rows],
        "names": names.all(),  # last: by now they are all known
    }


def thinned(total: np.ndarray, most: int) -> np.ndarray:
    """At most `most` events that tell the same story: first, last, lowest and highest of each run of events."""
    num = len(total)
    if num <= most:
        return np.arange(num)
    edges = np.linspace(0, num, most // 4 + 1).astype(int)
    chosen: set[int] = set()
    for first, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        run = total[first:end]
        chosen |= {first, end - 1, first + int(run.argmin()), first + int(run.argmax())}
    return np.array(sorted(chosen))


def _planned(facts: Facts, names: _Names) -> dict[str, Any]:
    timeline, graph = facts.planned, facts.graph
    events = thinned(timeline.total_bytes, _MOST_POINTS)
    ops = timeline.ops[events].tolist()
    labels: dict[int, int] = {}
    lists: dict[tuple[int, ...], int] = {}  # neighbours often have the same values live
    live = []
    for sizes in timeline.live_at_each(events.tolist(), most=_NUM_LIVE):
        flat: list[int] = []
        for value, size in ((value, size) for value, size in sizes.items() if size):
            if value not in labels:
                labels[value] = names(_label(timeline, value))
            flat += [labels[value], size]
        live.append(lists.setdefault(tuple(flat), len(lists)))
    return {
        "t": _nanoseconds(timeline, events),
        "end": _end(timeline),
        "bytes": timeline.live_bytes[events].T.tolist(),
        "op": [names(short_op(graph.ops[op].name) if op >= 0 else "the optimizer's step") for op in ops],
        "path": [names(graph.path_of(op) if op >= 0 else "") for op in ops],
        "phase": timeline.phases[events].tolist(),
        "live": live,
        "lists": [list(each) for each in lists],
        "peak": int(timeline.total_bytes[events].argmax()) if len(events) else -1,
    }


def _label(timeline: Timeline, value: int) -> str:
    """How a value is called: a gradient by its parameter, an activation by where and by which op it was made."""
    graph = timeline.graph
    known = graph.values[value]
    if known.kind == "gradient":
        return f"gradient of {known.name}" if known.name else "gradient"
    path = graph.path_of(known.born) if known.born >= 0 else ""
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
    return bool(len(timeline.starts_s)) and bool(timeline.starts_s[-1] > 0)


def _nanoseconds(timeline: Timeline, events: np.ndarray) -> list[int]:
    """When events start; where a graph knows no times, every event takes the same."""
    if not _has_times(timeline):
        return [int(event) * 1000 for event in events]
    return np.rint(timeline.starts_s[events] * 1e9).astype(np.int64).tolist()


def _end(timeline: Timeline) -> int:
    """When the optimizer's step is over, which is drawn with some width: it has no time of its own."""
    if not _has_times(timeline):
        return len(timeline.ops) * 1000
    return int(timeline.starts_s[-1] * 1e9 * 1.01) + 1


def _copies(facts: Facts, names: _Names) -> dict[str, list[list[int]]]:
    """Copies by direction, and stalls: [start, end, name, bytes]; the longest where there are very many."""
    graph = facts.graph
    found: dict[str, list[list[int]]] = {}
    for copy in facts.planned.copies:
        row = [int(copy.start_s * 1e9), int(copy.end_s * 1e9), names(_label(facts.planned, copy.value))]
        found.setdefault(copy.kind, []).append([*row, graph.values[copy.value].bytes])
    return {kind: sorted(sorted(rows, key=lambda row: row[0] - row[1])[:_MOST_COPIES]) for kind, rows in found.items()}


def _curve(facts: Facts) -> dict[str, Any]:
    """Points [peak bytes, slowdown, budget bytes, least slowdown of any plan] of plans, and the alternatives."""
    step_s = facts.graph.step_s or 1.0
    plans = [
        [plan.peak_bytes, plan.extra_s / step_s, plan.budget_bytes, plan.lower_bound_s / step_s]
        for plan in _undominated(facts)
    ]
    others = [[other.name, other.peak_bytes, other.extra_s / step_s] for other in facts.alternatives]
    here = [facts.planned.peak_bytes, facts.slowdown]
    return {"plans": plans, "others": others, "here": here, "floor": facts.curve.floor_bytes}


def _undominated(facts: Facts) -> list[Any]:
    """Plans that no other beats in both time and memory, by peak."""
    found: list[Any] = []
    for plan in sorted(facts.curve.plans, key=lambda plan: (plan.peak_bytes, plan.extra_s)):
        if not found or plan.extra_s < found[-1].extra_s:
            found.append(plan)
    return found
