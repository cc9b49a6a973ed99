"""`torch.profiler`: allocations on the CPU, and the names and categories of events in Kineto's trace.

torch's CPU allocator has no counters, so peaks on the CPU are measured from the profiler's allocation events, read from
its event tree: writing a trace to a file and parsing it takes longer. Op times are read from Kineto's trace.
Both formats are undocumented: each docstring names what it relies on.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import sys
import threading
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from lowtide.errors import LowtideError


class _Events(NamedTuple):
    """What the profiler recorded: time, address and bytes of allocations on the CPU (releases: below 0), and marks."""

    memory: list[tuple[int, int, int]]
    marks: list[tuple[int, int]]  # start and end of each block under `record_function`


def _events(profiler: Any, mark: str | None) -> _Events:
    """Return the events of a finished profiler, in order of time.

    Relies on `experimental_event_tree`, and on its events named `[memory]` with `ptr`, `alloc_size` and `device`.
    """
    memory: list[tuple[int, int, int]] = []
    marks: list[tuple[int, int]] = []
    waiting = list(profiler.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        name = event.name
        if name == "[memory]":
            allocation = event.typed[1]
            if allocation.device.type == "cpu":
                memory.append((event.start_time_ns, allocation.ptr, allocation.alloc_size))
        elif name == mark:
            marks.append((event.start_time_ns, event.end_time_ns))
    return _Events(sorted(memory, key=lambda each: each[0]), sorted(marks))


def cpu_allocation_totals(call: Callable[[], Any]) -> list[int]:
    """Return the bytes on the CPU after each allocation and release inside `call()`. Obsolete with counters for it."""
    changes = (change for _, change in _allocations(_profiled(call).memory))
    return list(itertools.accumulate(changes))  # the profiler's own total goes on from one profile to the next


def cpu_peaks_within(call: Callable[[], Any], mark: str) -> list[int]:
    """Return the peak of each block under `record_function(mark)` inside `call()`, in bytes. Obsolete likewise."""
    events = _profiled(call, mark)
    allocations = _allocations(events.memory)
    peaks, position = [], 0
    for start, end in events.marks:
        while position < len(allocations) and allocations[position][0] < start:
            position += 1
        total = peak = 0
        while position < len(allocations) and allocations[position][0] <= end:
            total += allocations[position][1]
            peak = max(peak, total)
            position += 1
        peaks.append(peak)
    return peaks


def _allocations(memory: list[tuple[int, int, int]]) -> list[tuple[float, int]]:
    """Return time and change of every allocation and release on the CPU, in order.

    Threads that the profiler does not follow, such as gloo's, release tensors without an event. Such a release is
    found when another block is allocated at the same addresses, and counted just before that.
    """
    found: list[tuple[float, int]] = []
    starts: list[int] = []  # addresses of blocks that are allocated now, sorted
    sizes: dict[int, int] = {}
    for time, address, change in memory:
        position = bisect_left(starts, address)
        if change > 0:
            if position and starts[position - 1] + sizes[starts[position - 1]] > address:
                position -= 1
            while position < len(starts) and starts[position] < address + change:
                found.append((time, -sizes.pop(starts.pop(position))))
            starts.insert(position, address)
            sizes[address] = change
        elif address in sizes:
            starts.pop(position)
            del sizes[address]
        found.append((time, change))
    return found


def _profiled(call: Callable[[], Any], mark: str | None = None) -> _Events:
    """Return the events that torch.profiler records of `call()`; refused while another profiler is active."""
    _ThreadProfiler.stop_unwanted()
    if profiler_is_active():
        raise LowtideError("memory on the CPU is measured by torch.profiler, and one is active: measure outside of it")
    with _quietly(), _cpu_profiler() as profiler:
        call()
    return _events(profiler, mark)


def _cpu_profiler() -> profile:
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Run a block without the profiler's warnings, and without what it prints at its start and stop."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def profiler_is_active() -> bool:
    """Return whether a profiler is active in any thread of this process, or in the warm-up of its schedule.

    Starting another profiler would end it. Profilers in warm-up are found through `gc.get_referrers` of their class,
    which takes half the time of a search through all objects. Obsolete when torch's profilers nest, or when torch has
    a public function for this.
    """
    profiler = torch.autograd.profiler
    return bool(profiler._is_profiler_enabled) or any(
        type(each) is profiler.profile and each.entered and each.kineto_results is None
        for each in gc.get_referrers(profiler.profile)
    )


# Categories of events in the profiler's trace: calls of the CUDA runtime, and work on the device. Obsolete when torch
# documents the format of its traces.
RUNTIME_EVENTS = ("cuda_runtime", "cuda_driver")
DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")


def waits_for_device(name: str) -> bool:
    """Return whether a runtime call of that name waits for the device. Obsolete likewise."""
    return "Synchronize" in name or name in ("cudaMemcpy", "hipMemcpy")


def profiler_name(name: str) -> str:
    """Return the name of an op's events in the trace: `aten::add` for `aten.add.Tensor`. Obsolete likewise."""
    space, _, rest = name.partition(".")
    return f"{space}::{rest.split('.')[0]}"


_tokens = itertools.count(2)
_this_thread = threading.local()  # `at_end`, freed when the thread ends


class _ThreadProfiler:
    """A profiler of the thread that starts it, which is the only one that can stop it: at its end at the latest.

    In torch 2.11 a thread that ends under a profiler ends all profiling in the process. Obsolete when `profile.stop()`
    works in any thread.
    """

    def __init__(self) -> None:
        self._is_wanted = self._is_running = True
        self._thread = threading.get_ident()
        with _quietly():
            self.profiler = _cpu_profiler()
            self.profiler.start()
        # Every profiler that starts or stops sets this to True or False.
        self._token = next(_tokens)
        vars(torch.autograd.profiler)["_is_profiler_enabled"] = self._token
        _this_thread.at_end = _ThreadEnd(self)

    def stop(self) -> bool:
        """Stop now; in another thread: not later than when this one starts its next profiler.

        False if nothing was recorded: in another thread, or when somebody else has started a profiler, which ends all
        others and is left alone.
        """
        self._is_wanted = False
        if not self._is_running or self._thread != threading.get_ident():
            return False
        self._is_running = False
        if torch.autograd.profiler._is_profiler_enabled != self._token:
            vars(self.profiler.profiler)["entered"] = False  # it has ended
            return False
        with _quietly():
            self.profiler.stop()
        return True

    @staticmethod
    def stop_unwanted() -> None:
        """Stop this thread's, if another thread wanted that."""
        at_end: _ThreadEnd | None = getattr(_this_thread, "at_end", None)
        if at_end is not None and not at_end.running._is_wanted:
            at_end.running.stop()


class _ThreadEnd:
    """Stops a profiler when its thread ends, which deletes the thread's locals."""

    def __init__(self, running: _ThreadProfiler) -> None:
        self.running = running

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.running.stop()


class AllocationTrace:
    """Allocations on the CPU from `start` on, with marks between them. Obsolete like `cpu_allocation_totals`."""

    _MARK = "lowtide mark"

    def __init__(self) -> None:
        self._running: _ThreadProfiler | None = None

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.cancel()

    def start(self) -> bool:
        """Start to record what this thread does; False if another profiler is active."""
        self.cancel()
        _ThreadProfiler.stop_unwanted()
        if profiler_is_active():
            return False
        self._running = _ThreadProfiler()
        return True

    @property
    def is_active(self) -> bool:
        return self._running is not None

    def mark(self) -> None:
        """Set a mark at this moment."""
        with torch.autograd.profiler.record_function(self._MARK):
            pass

    def cancel(self) -> None:
        """Stop, and forget what was recorded."""
        running, self._running = self._running, None
        if running is not None:
            running.stop()

    def stop(self) -> list[tuple[int, int]] | None:
        """Stop; return the peak and the last number of bytes since the start: before, between and after the marks.

        None in another thread than that which called `start`, or if a profiler of the user's was started meanwhile.
        """
        running, self._running = self._running, None
        assert running is not None
        if not running.stop():
            return None
        events = _events(running.profiler, self._MARK)
        marks = [start for start, _ in events.marks]
        parts: list[tuple[int, int]] = []
        total = peak = 0
        allocations = [*_allocations(events.memory), (float("inf"), 0)]
        for time, change in allocations:
            while len(parts) < len(marks) and time >= marks[len(parts)]:
                parts.append((peak, total))
                peak = total
            total += change
            peak = max(peak, total)
        return [*parts, (peak, total)]
