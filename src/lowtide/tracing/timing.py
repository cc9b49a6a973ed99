"""Seconds per op: measured on a device, or foretold from FLOPs and bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from lowtide.graph import Hardware
from lowtide.replay.checkpoint import checkpoint
from lowtide.tracing import _compat
from lowtide.tracing.devices import LAUNCH_S, MATMUL_EFFICIENCY, MEMORY_EFFICIENCY
from lowtide.tracing.records import Clock, RawOp

_HOST_AHEAD = 0.8  # the share of a step's time within which the host must have started all of it
# What counts of the host's time where an accelerator is the limit. In the backward it is hidden: on an H200, steps of a
# GPT and a Llama with a dispatch mode in their replays took what their kernels do. But it is not for nothing: of two
# plans alike, the one that asks less is better.
_IN_SIGHT = 0.05
# A loop over few ops finds all code and data in the caches. In a GPT and a Llama a dispatch mode took three times as
# long for each op, and a region nearly twice.
_IN_A_MODEL = 3.0
_REGION_IN_A_MODEL = 1.75
_SUBSTITUTED = 2.5  # times as long as the mode itself it takes to return a retained output in place of an op
_HALF = (torch.bfloat16, torch.float16)


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


def predicted_s(op: RawOp, hardware: Hardware) -> float:
    """The longer of computing and moving memory, and a launch."""
    if "view" in op.flags:
        return 0.0
    flops_per_s = hardware.half_flops_per_s if op.dtype in _HALF else hardware.single_flops_per_s
    computing = op.flops / (flops_per_s * MATMUL_EFFICIENCY) if op.flops else 0.0
    moving = op.moved_bytes / (hardware.memory_bytes_per_s * MEMORY_EFFICIENCY)
    return max(computing, moving) + LAUNCH_S


class HostCosts(NamedTuple):
    """What the host does for regions, in seconds, as the fields of `Hardware` that have these names."""

    dispatch_s: float
    region_s: float
    spare_s: float


def host_costs(device: torch.device, host_s: float, step_s: float) -> HostCosts:
    """What a dispatch mode costs for each op, a region beside its ops, and returning a retained output.

    Measured on tiny tensors. Where an accelerator is the limit, the share of it that is not hidden.
    """
    is_ahead = device.type != "cpu" and host_s < _HOST_AHEAD * step_s
    share = _IN_SIGHT if is_ahead else 1.0
    x = torch.zeros(4, 4, requires_grad=True)
    block = nn.Sequential(*(nn.Sequential(nn.LayerNorm(4), nn.GELU()) for _ in range(6)))  # draws no numbers

    def some_ops() -> None:
        for _ in range(20):
            (x.t() @ x).view(2, 8).mul(2.0)

    def some_dispatched_ops() -> int:
        with _compat.OpCounter() as counter:
            some_ops()
        return counter.num_ops

    plain_s, dispatched_s = _seconds_of(some_ops, some_dispatched_ops)
    with torch.enable_grad():
        forward_s, whole_s, region_s = _seconds_of(
            lambda: block(x),
            lambda: torch.autograd.grad(block(x).sum(), x),
            lambda: torch.autograd.grad(checkpoint(block, x).sum(), x),
        )
    dispatch_s = _IN_A_MODEL * max(0.0, dispatched_s - plain_s) / some_dispatched_ops()
    region_s = _REGION_IN_A_MODEL * max(0.0, region_s - whole_s - forward_s)
    return HostCosts(share * dispatch_s, share * region_s, share * _SUBSTITUTED * dispatch_s)


def _seconds_of(*calls: Callable[[], Any], rounds: int = 10) -> list[float]:
    """The least of several runs of each, in turns as clocks change; the first is left aside."""
    times: list[list[float]] = []
    for _ in range(rounds + 1):
        times.append([])
        for call in calls:
            start = time.perf_counter()
            call()
            times[-1].append(time.perf_counter() - start)
    return [min(runs) for runs in zip(*times[1:], strict=True)]


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
