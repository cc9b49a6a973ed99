"""Seconds per op: measured on a device, or foretold from FLOPs and bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from lowtide.graph import Hardware
from lowtide.graph.lines import play_lines
from lowtide.tracing.devices import (
    BACKWARD_ISSUE_S,
    FORWARD_ISSUE_S,
    LAUNCH_S,
    MATMUL_EFFICIENCY,
    MEMORY_EFFICIENCY,
)
from lowtide.tracing.profiling import ProfiledStep
from lowtide.tracing.records import Clock, RawOp

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
