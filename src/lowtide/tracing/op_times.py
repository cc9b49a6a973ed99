"""Seconds per op of a plain step, on the host and on the device: measured, or predicted from FLOPs and bytes.

`tracing.trace` calls this after recording a step (`set_seconds`). There are three sources:

- **One run under torch's profiler** (`profiled`, `matched`), on CUDA: gives both time lines. The trace has a span for
  every op on the host, a runtime call for every launch, and a span for every kernel on the device; launches and kernels
  share a correlation number. The recorded ops are aligned with the host's spans by name and order. An op's host time
  is from the end of the previous op to its own end, so it includes the Python in between; its device time is that of
  the kernels launched meanwhile. Profiling slows the host down, so `calibrated` scales host times to unprofiled steps.
- **Marks around each op** (`clock_for`, `fit_to_total`), if there is no profile: one time line, scaled so that the
  ops sum to the measured step.
- **Predictions** (`predicted_s`, `predicted_host_s`), for fake traces.
"""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from lowtide._compat.profiler import DEVICE_EVENTS, RUNTIME_EVENTS, profiler_name, waits_for_device
from lowtide.graph.step_graph import Hardware
from lowtide.graph.time_lines import play_lines
from lowtide.tracing.devices import BACKWARD_ISSUE_S, FORWARD_ISSUE_S, LAUNCH_S, MATMUL_EFFICIENCY, MEMORY_EFFICIENCY
from lowtide.tracing.trace_records import Clock, RawOp

_STEP = "lowtide::step"
_LOOKAHEAD = 64  # events or ops that may be missing in a row
_AGREEING = 4  # names in a row that must be equal before alignment continues after a mismatch
_MOST_MISSING = 0.05  # share of ops; if more are missing, the profiled step differs from the recorded one
_BLOCKED = 10  # times the median: a launch that takes this long was waiting for room in the device's queue


@dataclass
class ProfiledStep:
    """For each op: seconds on host and device, number of kernels, and whether the host waits for the device in it."""

    host_s: list[float]
    device_s: list[float]
    num_kernels: list[int]
    is_sync: list[bool]


def profiled(run: Callable[[], Any], device: torch.device) -> list[dict[str, Any]]:
    """Run `run()` under torch's profiler and return the events of its Chrome trace."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about profiler cycles; only one is needed
        with profile(activities=activities):  # warm-up: the first profile of a process loads a library
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
    """Return the costs of ops with these names (`aten.add.Tensor`), or None if too many are missing in the trace."""
    spans = [event for event in events if event.get("ph") == "X"]
    step = next(
        (event for event in spans if event.get("name") == _STEP and event.get("cat") == "user_annotation"), None
    )
    if step is None:
        return None
    begin, end = step["ts"], step["ts"] + step["dur"]
    wanted = [_as_recorded(profiler_name(name)) for name in names]
    ops = _outermost([event for event in spans if event.get("cat") == "cpu_op"], set(wanted))
    positions = _aligned(wanted, [_as_recorded(event["name"]) for event in ops])
    if sum(position is None for position in positions) > _MOST_MISSING * len(wanted):
        return None
    ends: list[float] = []
    for position in positions:
        before = ends[-1] if ends else begin
        ends.append(before if position is None else max(before, ops[position]["ts"] + ops[position]["dur"]))
    if ends:
        ends[-1] = max(ends[-1], end)  # includes the backward's work after its last op
    step_costs = ProfiledStep(
        [(after - before) / 1e6 for before, after in zip([begin, *ends], ends, strict=False)],
        [0.0] * len(ends),
        [0] * len(ends),
        [False] * len(ends),
    )
    _add_runtime(step_costs, spans, ends, begin)
    return step_costs


def _add_runtime(costs: ProfiledStep, spans: list[dict[str, Any]], ends: list[float], begin: float) -> None:
    """Add kernels to the ops that launched them, and subtract the time in which the host only waits."""
    calls = [
        event for event in spans if event.get("cat") in RUNTIME_EVENTS and begin <= event["ts"] <= (ends or [begin])[-1]
    ]
    usual = median([call["dur"] for call in calls if "Launch" in call["name"]] or [0.0])
    op_of: dict[Any, int] = {}
    for call in calls:
        op = min(bisect_left(ends, call["ts"]), len(ends) - 1)
        waited = 0.0
        if waits_for_device(call["name"]):
            costs.is_sync[op], waited = True, call["dur"]
        elif "Launch" in call["name"] and call["dur"] > _BLOCKED * usual:
            waited = call["dur"] - usual
        costs.host_s[op] = max(0.0, costs.host_s[op] - waited / 1e6)
        op_of[call.get("args", {}).get("correlation")] = op
    for event in spans:
        op = op_of.get(event.get("args", {}).get("correlation"), -1) if event.get("cat") in DEVICE_EVENTS else -1
        if op >= 0:
            costs.device_s[op] += event["dur"] / 1e6
            costs.num_kernels[op] += 1


def _as_recorded(name: str) -> str:
    """Return the name that an op of the profile has in a recording: without the `_` of in-place ops, and of a view.

    Autograd accumulates gradients in place if it holds the only reference; while recording, the recorder has one too.
    `reshape` makes its view by another op if no dispatch mode is active.
    """
    return "aten::view" if name == "aten::_reshape_alias" else name.rstrip("_")


def _outermost(events: list[dict[str, Any]], wanted: set[str]) -> list[dict[str, Any]]:
    """Return the events with these names, in order of their start, without events nested in one of them.

    Autocast puts an event around its casts and the op itself, with the name of the op. The casts and the inner event
    count in place of that, and the inner one ends with it.
    """
    ordered = sorted(events, key=lambda event: (event["ts"], -event["dur"]))
    ordered = [event for event in ordered if _as_recorded(event["name"]) in wanted]
    end_of = {id(event): event["ts"] + event["dur"] for event in ordered}
    around: set[int] = set()
    nested: dict[Any, list[dict[str, Any]]] = {}  # by thread: events that have not ended
    for event in ordered:
        begun = nested.setdefault(event["tid"], [])
        while begun and end_of[id(begun[-1])] <= event["ts"]:
            begun.pop()
        for outer in begun:
            if outer["name"] == event["name"]:
                around.add(id(outer))
                end_of[id(event)] = max(end_of[id(event)], end_of[id(outer)])
        begun.append(event)
    outermost: list[dict[str, Any]] = []
    ends: dict[Any, float] = {}  # by thread
    for event in ordered:
        if id(event) not in around and event["ts"] >= ends.get(event["tid"], 0.0):
            ends[event["tid"]] = end_of[id(event)]
            outermost.append({**event, "dur": end_of[id(event)] - event["ts"]})
    return outermost


def _aligned(wanted: Sequence[str], there: Sequence[str]) -> list[int | None]:
    """Return for each name in `wanted` its index in `there`, or None; both are in order, with gaps in either."""
    indices: list[int | None] = []
    at = 0
    while len(indices) < len(wanted):
        own = len(indices)
        if at < len(there) and wanted[own] == there[at]:
            indices.append(at)
            at += 1
            continue
        skips = sorted(((a, b) for a in range(_LOOKAHEAD) for b in range(_LOOKAHEAD)), key=sum)
        for missing, extra in skips:
            here = wanted[own + missing : own + missing + _AGREEING]
            if here and list(here) == list(there[at + extra : at + extra + len(here)]):
                break
        else:
            return indices + [None] * (len(wanted) - own)
        indices += [None] * missing
        at += extra
    return indices


_HALF = (torch.bfloat16, torch.float16)


class PlainTimes(NamedTuple):
    """Seconds of a plain step's forward and backward, and of the host to issue each."""

    forward_s: float
    backward_s: float
    forward_host_s: float
    backward_host_s: float

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s

    @property
    def host_s(self) -> float:
        return self.forward_host_s + self.backward_host_s


def clock_for(device: torch.device) -> Clock:
    """Return a clock that uses device events on an accelerator, else the host's clock."""
    if device.type == "cpu":
        return Clock()

    def mark() -> Any:
        event = torch.Event(device, enable_timing=True)
        event.record(torch.accelerator.current_stream(device))  # by default of the current device
        return event

    def seconds(marks: list[tuple[Any, Any]]) -> list[float]:
        torch.accelerator.synchronize(device)
        return [before.elapsed_time(after) / 1e3 for before, after in marks]

    return Clock(mark, seconds)


def time_step(loss_fn: Any, args: Any, device: torch.device) -> PlainTimes:
    """Run and time a plain step without a profiler."""
    clock = clock_for(device)
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    started, marks = time.perf_counter(), [clock.mark()]
    loss = loss_fn(*args)
    marks.append(clock.mark())
    between = time.perf_counter()
    loss.backward()
    marks.append(clock.mark())
    ended = time.perf_counter()
    forward, backward = clock.seconds([(marks[0], marks[1]), (marks[1], marks[2])])
    return PlainTimes(forward, backward, between - started, ended - between)


def set_seconds(
    ops: Sequence[RawOp],
    alike: Sequence[Sequence[RawOp]],
    events: Sequence[dict[str, Any]],
    num_forward: int,
    plain: PlainTimes,
    device: torch.device,
) -> bool:
    """Set the measured seconds of a recording's ops; return whether they are on two time lines, host and device.

    They are if the profiler's `events` match the ops. Else an op takes its median over the recordings `alike`.
    """
    both_lines = matched(events, [op.name for op in ops])
    if both_lines is not None:
        host, device_s = calibrated(both_lines, num_forward, plain)
        for op, op_s, host_s, is_sync in zip(ops, device_s, host, both_lines.is_sync, strict=True):
            op.seconds, op.host_s = op_s, host_s
            op.flags = (*op.flags, "sync") if is_sync else op.flags
        return True
    medians_s = [median(op.seconds for op in same) for same in zip(*alike, strict=True)]
    fitted = fit_to_total(medians_s[:num_forward], plain.forward_s, device=device)
    fitted += fit_to_total(medians_s[num_forward:], plain.backward_s, device=device)
    for op, op_s in zip(ops, fitted, strict=True):
        op.seconds = op_s
    return False


def predicted_s(op: RawOp, hardware: Hardware) -> float:
    """Predict an op's device seconds: the longer of compute and memory traffic, plus a launch. Views take none."""
    if "view" in op.flags:
        return 0.0
    flops_per_s = hardware.half_flops_per_s if op.dtype in _HALF else hardware.single_flops_per_s
    computing = op.flops / (flops_per_s * MATMUL_EFFICIENCY) if op.flops else 0.0
    moving = op.moved_bytes / (hardware.memory_bytes_per_s * MEMORY_EFFICIENCY)
    return max(computing, moving) + LAUNCH_S


def predicted_host_s(op: RawOp, hardware: Hardware, *, in_backward: bool) -> float:
    """Predict the host seconds to issue an op, with the Python before it; 0 on the CPU, which has one time line."""
    if hardware.name == "cpu":
        return 0.0
    return (BACKWARD_ISSUE_S if in_backward else FORWARD_ISSUE_S)["view" in op.flags]


def calibrated(step: ProfiledStep, num_forward: int, measured: PlainTimes) -> tuple[list[float], list[float]]:
    """Return host and device seconds of each op, such that the simulated plain step takes as long as the measured one.

    Profiling only slows the host down, so the host's times of forward and backward are scaled down to unprofiled ones;
    never up, as a host that waits for the device takes longer than its own work. The remaining difference is assigned
    to the line that limits the step: host times are scaled, or a constant gap is added after each kernel.
    """
    host, device, kernels = np.array(step.host_s), np.array(step.device_s), np.array(step.num_kernels)
    is_sync = np.array([*step.is_sync, False])

    def played(host: np.ndarray, device: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return play_lines(np.append(host, 0.0), np.append(device, 0.0), is_sync)

    def scaled(host: np.ndarray, first: int, end: int, scale: float) -> np.ndarray:
        return np.concatenate([host[:first], scale * host[first:end], host[end:]])

    def fitted(host: np.ndarray, first: int, end: int, until_s: float) -> np.ndarray:
        """Return `host` with these ops scaled, so that the last of them is issued at `until_s`."""
        scale = _root(lambda by: float(played(scaled(host, first, end, by), device)[0][end - 1]) - until_s, 0.0, 1.0)
        return scaled(host, first, end, scale)

    ends = measured.forward_host_s, measured.forward_host_s + measured.backward_host_s
    for first, end, until_s in ((0, num_forward, ends[0]), (num_forward, len(host), ends[1])):
        host = fitted(host, first, end, until_s) if end > first else host
    if host.sum() > device.sum():
        scale = _root(lambda scale: float(played(scale * host, device)[1][-1]) - measured.step_s, 0.0, 2.0)
        return (scale * host).tolist(), device.tolist()
    most = measured.step_s / max(1, int(kernels.sum()))

    def spaced(gap: float) -> np.ndarray:
        return np.maximum(device + gap * kernels, 0.0)

    gap = _root(lambda gap: float(played(host, spaced(gap))[1][-1]) - measured.step_s, -most, most)
    return host.tolist(), spaced(gap).tolist()


def _root(missing: Callable[[float], float], low: float, high: float) -> float:
    """Find by bisection where an increasing function becomes positive (or true); the nearer end if it does outside."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if missing(middle) > 0 else (middle, high)
    return high


def fit_to_total(times: list[float], total_s: float, *, device: torch.device) -> list[float]:
    """Adjust op times so that they sum to `total_s`, the measured time of all of them together.

    A sum below the total lacks the host's work between ops: the same amount is added to each op. A sum above it has,
    on an accelerator, the overhead of the marks, about the same for each op: it is subtracted, down to 0. On the CPU
    marks cost nothing and such a run was slow: all times are scaled down.
    """
    if not times:
        return []
    if device.type == "cpu" and sum(times) > total_s:
        return [seconds * total_s / sum(times) for seconds in times]
    mark_s = _root(lambda by: sum(max(t - by, 0.0) for t in times) <= total_s, -total_s, max(times))
    return [max(t - mark_s, 0.0) for t in times]
