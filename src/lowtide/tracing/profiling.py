"""Both time lines of a plain step, from one run under torch's profiler.

The profiler's trace has a span for every op on the host, a call of the runtime for every launch, and a span on the
device for every kernel, with a number that the last two share. The graph's ops are found among the host's spans in the
order in which they ran. An op's host seconds reach from the end of the op before it to its own end: the Python in
between is what it takes to issue the op. Its device seconds are those of the kernels launched in that time.

Profiling slows the host down, each op by about as much: `timing.calibrated` scales the sum to a step without it.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from lowtide.tracing._compat import DEVICE_EVENTS, RUNTIME_EVENTS, profiler_name, waits_for_device

_STEP = "lowtide::step"
_LOOKAHEAD = 64  # events or ops that may be missing in a row
_AGREEING = 4  # names in a row that must be the same where the two lists meet again
_MOST_MISSING = 0.05  # of the ops: with more, the step that was profiled is another one
_BLOCKED = 10  # times the median: a launch that takes as long waits for the device's queue


@dataclass
class ProfiledStep:
    """For each op: seconds on the host and on the device, how many kernels, and whether the host waits in it."""

    host_s: list[float]
    device_s: list[float]
    num_kernels: list[int]
    is_sync: list[bool]


def profiled(run: Callable[[], Any], device: torch.device) -> list[dict[str, Any]]:
    """The events of the profiler's trace of `run()`."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of cycles, of which there is one
        with profile(activities=activities):  # the first one in a process loads a library in the middle of it
            torch.zeros(1, device=device)
            torch.accelerator.synchronize(device)
        with profile(activities=activities) as profiler:
            with record_function(_STEP):
                run()
            torch.accelerator.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.json"
        profiler.export_chrome_trace(str(path))
        return list(json.loads(path.read_text())["traceEvents"])


def matched(events: Sequence[dict[str, Any]], names: Sequence[str]) -> ProfiledStep | None:
    """The costs of ops with these names (`aten.add.Tensor`), None if too many of them are not in the trace."""
    spans = [event for event in events if event.get("ph") == "X"]
    step = next(
        (event for event in spans if event.get("name") == _STEP and event.get("cat") == "user_annotation"), None
    )
    if step is None:
        return None
    begin, end = step["ts"], step["ts"] + step["dur"]
    wanted = [_as_recorded(profiler_name(name)) for name in names]
    ops = _outermost([event for event in spans if event.get("cat") == "cpu_op"], set(wanted))
    places = _aligned(wanted, [_as_recorded(event["name"]) for event in ops])
    if sum(place is None for place in places) > _MOST_MISSING * len(wanted):
        return None
    ends: list[float] = []
    for place in places:
        before = ends[-1] if ends else begin
        ends.append(before if place is None else max(before, ops[place]["ts"] + ops[place]["dur"]))
    if ends:
        ends[-1] = max(ends[-1], end)  # what the backward does after its last op
    found = ProfiledStep(
        [(after - before) / 1e6 for before, after in zip([begin, *ends], ends, strict=False)],
        [0.0] * len(ends),
        [0] * len(ends),
        [False] * len(ends),
    )
    _add_runtime(found, spans, ends, begin)
    return found


def _add_runtime(found: ProfiledStep, spans: list[dict[str, Any]], ends: list[float], begin: float) -> None:
    """Give kernels to the ops that launched them; take time in which the host only waits off its seconds."""
    calls = [
        event for event in spans if event.get("cat") in RUNTIME_EVENTS and begin <= event["ts"] <= (ends or [begin])[-1]
    ]
    usual = median([call["dur"] for call in calls if "Launch" in call["name"]] or [0.0])
    op_of: dict[Any, int] = {}
    for call in calls:
        op = min(bisect_left(ends, call["ts"]), len(ends) - 1)
        waited = 0.0
        if waits_for_device(call["name"]):
            found.is_sync[op], waited = True, call["dur"]
        elif "Launch" in call["name"] and call["dur"] > _BLOCKED * usual:
            waited = call["dur"] - usual
        found.host_s[op] = max(0.0, found.host_s[op] - waited / 1e6)
        op_of[call.get("args", {}).get("correlation")] = op
    for event in spans:
        op = op_of.get(event.get("args", {}).get("correlation"), -1) if event.get("cat") in DEVICE_EVENTS else -1
        if op >= 0:
            found.device_s[op] += event["dur"] / 1e6
            found.num_kernels[op] += 1


def _as_recorded(name: str) -> str:
    """Gradients are added up in place if nobody else holds them; while a step is recorded, the recorder does."""
    return name.rstrip("_")


def _outermost(events: list[dict[str, Any]], wanted: set[str]) -> list[dict[str, Any]]:
    """Events with these names in the order in which they began, without those inside of another of them."""
    found: list[dict[str, Any]] = []
    ends: dict[Any, float] = {}  # by thread
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        if _as_recorded(event["name"]) in wanted and event["ts"] >= ends.get(event["tid"], 0.0):
            ends[event["tid"]] = event["ts"] + event["dur"]
            found.append(event)
    return found


def _aligned(wanted: Sequence[str], there: Sequence[str]) -> list[int | None]:
    """For each name in `wanted` its place in `there`; both in order, and either may lack some of the other's."""
    found: list[int | None] = []
    at = 0
    while len(found) < len(wanted):
        own = len(found)
        if at < len(there) and wanted[own] == there[at]:
            found.append(at)
            at += 1
            continue
        skips = sorted(((a, b) for a in range(_LOOKAHEAD) for b in range(_LOOKAHEAD)), key=sum)
        for missing, extra in skips:
            here = wanted[own + missing : own + missing + _AGREEING]
            if here and list(here) == list(there[at + extra : at + extra + len(here)]):
                break
        else:
            return found + [None] * (len(wanted) - own)
        found += [None] * missing
        at += extra
    return found
