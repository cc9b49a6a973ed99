"""Both time lines of a plain step, from one run under torch's profiler.

The profiler's trace has a span for every op on the host, a call of the runtime for every launch, and a span on the
device for every kernel, with a number that the last two share. The graph's ops are found among the host's spans in the
order in which they ran. An op's host seconds reach from the end of the op before it to its own end: the Python in
between is what it takes to issue the op. Its device seconds are those of the kernels launched in that time.

Profiling slows the host down, each op by about as much: `timing.calibrated` scales the sum to a step without it.

Seconds per op: measured on a device, or foretold from FLOPs and bytes.
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


_HALF = (torch.bfloat16, torch.float16)


class PlainTimes(NamedTuple):
    """A plain step: its forward and its backward, and what the host takes to issue each."""

    forward_s: float
    backward_s: float
    forward_host_s: float
    backward_host_s: float

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s


def clock_for(device: torch.device) -> Clock:
    """Device events where there is an accelerator, else the host's clock."""
    if device.type == "cpu":
        return Clock()

    def mark() -> Any:
        event = torch.Event(device, enable_timing=True)
        event.record()
        return event

    def seconds(marks: list[tuple[Any, Any]]) -> list[float]:
        torch.accelerator.synchronize(device)
        return [before.elapsed_time(after) / 1e3 for before, after in marks]

    return Clock(mark, seconds)


def time_step(loss_fn: Any, args: Any, device: torch.device) -> PlainTimes:
    """A plain step, timed without a profiler."""
    clock = clock_for(device) if device.type != "cpu" else Clock()
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


def predicted_s(op: RawOp, hardware: Hardware) -> float:
    """The longer of computing and moving memory, and a launch."""
    if "view" in op.flags:
        return 0.0
    flops_per_s = hardware.half_flops_per_s if op.dtype in _HALF else hardware.single_flops_per_s
    computing = op.flops / (flops_per_s * MATMUL_EFFICIENCY) if op.flops else 0.0
    moving = op.moved_bytes / (hardware.memory_bytes_per_s * MEMORY_EFFICIENCY)
    return max(computing, moving) + LAUNCH_S


def predicted_host_s(op: RawOp, hardware: Hardware, *, in_backward: bool) -> float:
    """What the host takes to issue an op, and the Python before it: 0 on the CPU, which has one line."""
    if hardware.name == "cpu":
        return 0.0
    return (BACKWARD_ISSUE_S if in_backward else FORWARD_ISSUE_S)["view" in op.flags]


def calibrated(step: ProfiledStep, num_forward: int, measured: PlainTimes) -> tuple[list[float], list[float]]:
    """Host and device seconds of each op, so that the simulated plain step takes what the measured one did.

    Profiling makes the host slower and never faster: forward and backward are scaled down to what the host took
    without. A host that waits for the device (in an op that synchronises, or for room in its queue) takes longer than
    its own work, so nothing is scaled up. What is still missing, or too much, is put down to the line that limits: the
    host's seconds are scaled, or the gap behind each kernel is what the device needs between two of them.
    """
    host, device, kernels = np.array(step.host_s), np.array(step.device_s), np.array(step.num_kernels)
    is_sync = np.array([*step.is_sync, False])

    def played(host: np.ndarray, device: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return play_lines(np.append(host, 0.0), np.append(device, 0.0), is_sync)

    def scaled(host: np.ndarray, first: int, end: int, scale: float) -> np.ndarray:
        return np.concatenate([host[:first], scale * host[first:end], host[end:]])

    def fitted(host: np.ndarray, first: int, end: int, until_s: float) -> np.ndarray:
        """With the host seconds of these ops scaled, so that the last of them is issued then."""
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
    """Where a rising function is 0, by bisection; the nearest end if that is outside."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if missing(middle) > 0 else (middle, high)
    return high


def medians(runs: list[list[float]]) -> list[float]:
    """Op by op over several runs of the same ops."""
    return [median(times) for times in zip(*runs, strict=True)]


def fit_to_total(times: list[float], total_s: float, *, device: torch.device) -> list[float]:
    """Op times that sum to what the ops took together.

    What the host does between ops is in no op's time: then the same is added to each. Watching on an accelerator adds
    about the same to each, the time between its marks: that is taken off again, down to nothing. On the CPU the marks
    hold nothing else, and a sum above the total is one slow run: all are scaled.
    """
    if not times:
        return []
    if device.type == "cpu" and sum(times) > total_s:
        return [seconds * total_s / sum(times) for seconds in times]
    low, high = -total_s, max(times)
    for _ in range(60):
        middle = (low + high) / 2
        if sum(max(t - middle, 0.0) for t in times) > total_s:
            low = middle
        else:
            high = middle
    return [max(t - high, 0.0) for t in times]
