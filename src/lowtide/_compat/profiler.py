"""What a call really allocates on the CPU, by the profiler's events."""

from __future__ import annotations

import gc
import json
import os
import tempfile
import warnings
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from lowtide.errors import LowtideError

_CPU_DEVICE_TYPE = 0


def cpu_allocation_totals(call: Callable[[], Any]) -> list[int]:
    """Bytes allocated on the CPU since the start of `call()`, after each allocation and each release inside it."""
    changes = (change for _, change in _allocations(_profiled(call)))
    return list(accumulate(changes))  # the trace's own "Total Allocated" goes on from one profile to the next


def cpu_peaks_within(call: Callable[[], Any], mark: str) -> list[int]:
    """For each block inside `call()` under `record_function(mark)`: the most bytes it had allocated at one time."""
    events = _profiled(call)
    allocations = _allocations(events)
    blocks = sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event.get("name") == mark)
    peaks, position = [], 0
    for start, end in blocks:
        while position < len(allocations) and allocations[position][0] < start:
            position += 1
        total = peak = 0
        while position < len(allocations) and allocations[position][0] <= end:
            total += allocations[position][1]
            peak = max(peak, total)
            position += 1
        peaks.append(peak)
    return peaks


def _allocations(events: list[dict[str, Any]]) -> list[tuple[float, int]]:
    """When the CPU's allocator gave or took how many bytes, in order."""
    memory = [event for event in events if event.get("name") == "[memory]"]
    memory.sort(key=lambda event: event["ts"])
    return [(e["ts"], e["args"]["Bytes"]) for e in memory if e["args"]["Device Type"] == _CPU_DEVICE_TYPE]


def _profiled(call: Callable[[], Any]) -> list[dict[str, Any]]:
    """The events of torch.profiler's trace of `call()`. A second profiler would end one that is active."""
    if profiler_is_active():
        raise LowtideError("memory on the CPU is measured by torch.profiler, and one is active: measure outside of it")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler prints its start and stop otherwise
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler reports its own housekeeping
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            call()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            return json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]


def profiler_is_active() -> bool:
    """Whether a profiler runs in any thread of this process, or is about to: in the warm-up of its schedule.

    To start another one would end it. Profilers are found as what refers to their class, as each object does: half the
    time of looking at every object. Obsolete when torch's profilers nest, or when torch tells whether one is active.
    """
    profiler = torch.autograd.profiler
    return profiler._is_profiler_enabled or any(
        type(each) is profiler.profile and each.entered and each.kineto_results is None
        for each in gc.get_referrers(profiler.profile)
    )


# Categories of events in the profiler's trace. Obsolete when torch documents the format of its traces.
RUNTIME_EVENTS = ("cuda_runtime", "cuda_driver")
DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")


def waits_for_device(name: str) -> bool:
    """Whether a runtime call of the profiler's trace returns when the device has caught up. Obsolete likewise."""
    return "Synchronize" in name or name in ("cudaMemcpy", "hipMemcpy")


def profiler_name(name: str) -> str:
    """The name of an op's events in the profiler's trace: `aten::add` for `aten.add.Tensor`. Obsolete likewise."""
    space, _, rest = name.partition(".")
    return f"{space}::{rest.split('.')[0]}"
