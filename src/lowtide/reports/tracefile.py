"""A plan's step as a Chrome trace: opens in ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from lowtide.reports.facts import Facts
from lowtide.reports.layers import short_op
from lowtide.simulator import KINDS, PHASES, Timeline

_COMPUTE = 1
_LANES = {"out": (2, "copies out"), "in": (3, "copies in"), "stall": (4, "stalls")}


def trace_json(facts: Facts) -> str:
    """Ops, replays, copies and stalls as slices and live bytes as counters, with and without the plan. Predicted."""
    steps = {"with the plan (predicted)": facts.planned, "without a plan (predicted)": facts.plain}
    named: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for process, (name, timeline) in enumerate(steps.items(), start=1):
        named.append(_named("process_name", process, 0, name))
        lanes = {1: "compute", **(dict(_LANES.values()) if timeline.copies else {})}
        named += [_named("thread_name", process, thread, lane) for thread, lane in lanes.items()]
        events += _slices(timeline, process) + _copies(timeline, process) + _counters(timeline, process)
    events.sort(key=lambda event: event["ts"])
    other = {"graph": facts.graph.fingerprint, "hardware": facts.graph.hardware.name, "numbers": "predicted"}
    content = {"displayTimeUnit": "ms", "otherData": other, "traceEvents": named + events}
    return json.dumps(content, separators=(",", ":"))


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "ts": 0, "args": {"name": name}}


def _slice(process: int, thread: int, name: str, start_s: float, seconds: float, **more: Any) -> dict[str, Any]:
    where = {"pid": process, "tid": thread}
    return {"ph": "X", "name": name, **where, "ts": _micro(start_s), "dur": _micro(seconds), **more}


def _slices(timeline: Timeline, process: int) -> list[dict[str, Any]]:
    graph = timeline.graph
    found = []
    columns = zip(timeline.ops.tolist(), timeline.phases.tolist(), timeline.starts_s.tolist(), strict=True)
    for index, phase, start_s in columns:
        if index < 0 or PHASES[phase] in ("compression", "decompression"):  # no op of the graph's own
            continue
        op = graph.ops[index]
        seconds = timeline.again_s(index) if PHASES[phase] == "replay" else op.seconds
        if seconds:  # views take no time, nor does what a replay leaves out
            facts = {"module": graph.path_of(index), "phase": PHASES[phase]}
            found.append(_slice(process, _COMPUTE, short_op(op.name), start_s, seconds, cat=PHASES[phase], args=facts))
    return found


def _copies(timeline: Timeline, process: int) -> list[dict[str, Any]]:
    graph = timeline.graph
    found = []
    for copy in timeline.copies:
        value = graph.values[copy.value]
        facts = {"bytes": value.bytes, "module": graph.path_of(value.born) if value.born >= 0 else ""}
        thread, _ = _LANES[copy.kind]
        seconds = copy.end_s - copy.start_s
        found.append(_slice(process, thread, short_op(value.name), copy.start_s, seconds, cat="copy", args=facts))
    return found


def _counters(timeline: Timeline, process: int) -> list[dict[str, Any]]:
    """Live bytes by kind wherever they change."""
    live = timeline.live_bytes
    changed = np.ones(len(live), dtype=bool)
    changed[1:] = (live[1:] != live[:-1]).any(axis=1)
    found = []
    for event in np.flatnonzero(changed).tolist():
        sizes = dict(zip(KINDS, live[event].tolist(), strict=True))
        at = _micro(float(timeline.starts_s[event]))
        found.append({"ph": "C", "name": "live bytes", "pid": process, "tid": 0, "ts": at, "args": sizes})
    return found


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)
