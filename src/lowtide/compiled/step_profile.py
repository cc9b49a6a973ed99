"""Measures memory and time of each call of a compiled step (`StepMeter`), and the time of compiling (`CompileWatch`).

The peak of a whole step tells that a prediction was wrong, but not for which call. In the first steps of a model the
session therefore marks where the forward and the backward of each call begin and end, and a `StepMeter` notes the peak
between marks; the result is a `StepProfile`. `StepMeasurement` says whether the present step is measured at all. On an
accelerator a meter reads the allocator's counters, which takes microseconds, and times calls by events on the stream.
On the CPU, whose allocator has no counters, it runs the step under torch.profiler; while a profiler of the user's is
active, nothing is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from lowtide import _compat
from lowtide.tracing.devices import read_allocator
from lowtide.units import format_seconds

FORWARD, FORWARD_END, BACKWARD, BACKWARD_END = range(4)
Mark = Callable[[int], None]  # marks one of these points of a call


@dataclass(frozen=True)
class CallProfile:
    """One call as measured: bytes when its forward and backward begin, and the most until the next mark.

    `seconds` are those of forward and backward on the device; None on the CPU.
    """

    forward_start_bytes: int
    forward_peak_bytes: int
    backward_start_bytes: int
    backward_peak_bytes: int
    seconds: float | None = None


@dataclass(frozen=True)
class StepProfile:
    """The calls of a step in order, and the peak outside of them: between forward and backward, and after both.

    One that `is_timed_only` has seconds and no bytes, and no calls.
    """

    calls: tuple[CallProfile, ...]
    between_bytes: int
    elsewhere_bytes: int
    seconds: float | None = None
    is_timed_only: bool = False

    @property
    def peak_bytes(self) -> int:
        inside = (max(call.forward_peak_bytes, call.backward_peak_bytes) for call in self.calls)
        return max(self.between_bytes, self.elsewhere_bytes, *inside)


def largest_profile(profiles: Sequence[StepProfile]) -> StepProfile | None:
    """The most bytes of several ranks' profiles at each point, with the first one's seconds; None if calls differ."""
    first = profiles[0]
    if len({len(each.calls) for each in profiles}) > 1:
        return None
    names = [each.name for each in fields(CallProfile) if each.name != "seconds"]
    calls = [
        replace(calls[0], **{name: max(getattr(call, name) for call in calls) for name in names})
        for calls in zip(*(each.calls for each in profiles), strict=True)
    ]
    between_bytes = max(each.between_bytes for each in profiles)
    return replace(
        first,
        calls=tuple(calls),
        between_bytes=between_bytes,
        elsewhere_bytes=max(each.elsewhere_bytes for each in profiles),
    )


@dataclass
class _Mark:
    kind: int
    index: int
    bytes: int = 0  # allocated at the mark
    peak_bytes: int = 0  # most allocated between this mark and the next one
    event: Any = None


class StepMeter:
    """Base class of meters, which measure the peak of allocated bytes since `reset()`, and between marks.

    `mark` is called in the order of execution. Set `times_only` before the first mark of a step that shall run as it
    does without a meter, as far as possible. One that `sees_all` measures whatever runs until it is reset again, others
    up to `stop()`.
    """

    sees_all = True

    def __init__(self) -> None:
        self._marks: list[_Mark] = []
        self.times_only = False

    def reset(self) -> None:
        """Start to measure."""
        raise NotImplementedError

    def peak_bytes(self) -> int | None:
        """The peak since `reset()`; None if it could not be measured."""
        raise NotImplementedError

    def mark(self, kind: int, index: int) -> None:
        self._marks.append(_Mark(kind, index))

    def stop(self) -> None:
        """The first backward of the step has returned or raised."""

    @property
    def requested_bytes(self) -> int | None:
        """The peak of what tensors asked for, some of which got larger cached blocks; None if it is not known."""
        return None

    def free_cached_blocks(self) -> None:
        """Let the next step allocate its memory anew."""

    def cancel(self) -> None:
        """Stop to measure this step."""
        self._marks = []

    def profile(self) -> StepProfile | None:
        """What was measured since `reset()`; None if a mark is missing, as after a forward without a backward."""
        profile = profile_of(self._marks)
        if profile is None or not self.times_only:
            return profile
        return StepProfile((), 0, 0, profile.seconds, is_timed_only=True)


def profile_of(marks: list[_Mark]) -> StepProfile | None:
    """The profile of a step from its marks; None if the forward and backward of each call are not among them once."""
    calls: dict[int, dict[int, _Mark]] = {}
    for mark in marks:
        if mark.kind in calls.setdefault(mark.index, {}):
            return None
        calls[mark.index][mark.kind] = mark
    if not calls or sorted(calls) != list(range(len(calls))) or any(len(kinds) < 4 for kinds in calls.values()):
        return None
    last_forward = calls[len(calls) - 1][FORWARD_END]
    last_backward = max((kinds[BACKWARD_END] for kinds in calls.values()), key=marks.index)
    peaks: dict[tuple[int, int], int] = {}
    inside = (FORWARD, 0)
    for mark in marks:
        if mark.kind in (FORWARD, BACKWARD):
            inside = (mark.kind, mark.index)
        if mark is not last_forward and mark is not last_backward:  # code between calls counts with the call before
            peaks[inside] = max(peaks.get(inside, 0), mark.peak_bytes)
    measured = []
    for index in range(len(calls)):
        kinds = calls[index]
        measured.append(
            CallProfile(
                kinds[FORWARD].bytes,
                peaks[FORWARD, index],
                kinds[BACKWARD].bytes,
                peaks[BACKWARD, index],
                _seconds(kinds[FORWARD], kinds[FORWARD_END], kinds[BACKWARD], kinds[BACKWARD_END]),
            )
        )
    seconds = _seconds(calls[0][FORWARD], last_backward)
    return StepProfile(tuple(measured), last_forward.peak_bytes, last_backward.peak_bytes, seconds)


def _seconds(*marks: _Mark) -> float | None:
    """Seconds on the device between the first and the second mark, the third and the fourth, and so on."""
    if any(mark.event is None for mark in marks):
        return None
    marks[-1].event.synchronize()
    pairs = zip(marks[::2], marks[1::2], strict=True)
    return sum(first.event.elapsed_time(second.event) for first, second in pairs) / 1e3


class AllocatorMeter(StepMeter):
    """Peaks from the CUDA allocator's statistics, which it resets (`torch.cuda.max_memory_allocated`).

    Reading them at each mark takes host time, which a step that is only timed must not spend: it records events.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device, self._most, self._most_requested = device, 0, 0

    def reset(self) -> None:
        read_allocator(self._device)
        self._marks, self._most, self._most_requested = [], 0, 0

    def mark(self, kind: int, index: int) -> None:
        mark = _Mark(kind, index)
        if not self.times_only:
            mark.bytes = self._close_part()
        if not self.times_only or kind == BACKWARD_END or (kind, index) == (FORWARD, 0):
            mark.event = torch.cuda.Event(enable_timing=True)
            mark.event.record(torch.cuda.current_stream(self._device))
        self._marks.append(mark)

    def peak_bytes(self) -> int | None:
        self._close_part()
        return self._most

    @property
    def requested_bytes(self) -> int | None:
        return self._most_requested or None  # cudaMallocAsync does not count it

    def free_cached_blocks(self) -> None:
        torch.cuda.empty_cache()

    def _close_part(self) -> int:
        """Note the peak since the last mark; the bytes allocated now."""
        now, peak, requested_peak = read_allocator(self._device)
        self._most, self._most_requested = max(self._most, peak), max(self._most_requested, requested_peak)
        if self._marks:
            self._marks[-1].peak_bytes = max(self._marks[-1].peak_bytes, peak)
        return now


class ProfilerMeter(StepMeter):
    """Peaks on the CPU from torch.profiler's allocation events, from a step's first call until its first backward ends.

    `start_bytes()` are allocated when the step begins: the profiler sees changes only. It cannot stay active until the
    next forward: stopped inside of a compiled call, it crashed.
    """

    sees_all = False

    def __init__(self, start_bytes: Callable[[], int]) -> None:
        super().__init__()
        self._start_bytes, self._trace = start_bytes, _compat.AllocationTrace()
        self._base = 0
        self._peak: int | None = None

    def reset(self) -> None:
        self._marks, self._peak = [], None
        self._base = self._start_bytes()  # first: should it fail, no profiler stays active
        self._trace.start()

    def mark(self, kind: int, index: int) -> None:
        if self._trace.is_active:
            self._trace.mark()
            super().mark(kind, index)

    def stop(self) -> None:
        if not self._trace.is_active:
            return
        parts = self._trace.stop()
        if parts is None or len(parts) != 1 + len(self._marks):
            self._marks = []
            return
        self._peak = self._base + max(peak for peak, _ in parts)
        for mark, (_, start), (peak, _) in zip(self._marks, parts, parts[1:], strict=False):
            mark.bytes, mark.peak_bytes = self._base + start, self._base + peak
        if self._marks:  # what runs before the first call is outside of calls, as what runs after the last
            self._marks[-1].peak_bytes = max(self._marks[-1].peak_bytes, self._base + parts[0][0])

    def cancel(self) -> None:
        super().cancel()
        self._peak = None
        self._trace.cancel()

    def peak_bytes(self) -> int | None:
        return self._peak


class StepMeasurement:
    """Whether the present step is measured, and by which meter.

    It is from `begin` on, until `cancel`, as when something is compiled in the step, or until the next `begin`. A step
    that `was_dropped`, as its forward failed or its loss was deleted, is to be measured in the next forward.

    The peak of a step whose first backward raised, or that ran another backward which the meter does not see, is at
    least what was measured. It counts if that is over the budget; otherwise the step counts as not measured.
    `unseen_backward` is the path and class of the module of the first such other backward in any step.
    """

    def __init__(self) -> None:
        self.meter: StepMeter | None = None  # None: the present step is not measured
        self.was_dropped = False
        self.unseen_backward: tuple[str, str] | None = None
        self._backward = _compat.BackwardReturn(self._backward_returned)
        self._number = 0  # of the present step
        self._has_begun_backward = self._has_returned = self._is_partial = False

    def begin(self, meter: StepMeter | None) -> None:
        """Measure the step that begins now; without a meter, do not."""
        self.meter, self.was_dropped = None, False
        self._number += 1
        self._has_begun_backward = self._has_returned = self._is_partial = False
        self._backward.remove()
        if meter is not None:
            meter.reset()
            self.meter = meter
            self._backward.install()

    def cancel(self) -> None:
        """The present step cannot be measured."""
        if self.meter is not None:
            self.meter.cancel()
            self.meter = None
            self._backward.remove()

    def drop(self) -> None:
        """The calls of the present step have lost their autograd nodes. A profiler must not stay active meanwhile."""
        self.cancel()
        self.was_dropped = True

    def marker(self, position: int, module: tuple[str, str], times_only: bool) -> Mark | None:
        """Mark where the forward of a call of `module` begins; return what marks the other points of it."""
        meter, number, has_begun = self.meter, self._number, False
        if meter is None:
            return None
        if position == 0:
            meter.times_only = times_only
        meter.mark(FORWARD, position)

        def mark(kind: int) -> None:
            nonlocal has_begun
            if meter is not self.meter:
                return
            if kind == BACKWARD:
                self._note_backward(meter, number, module)
                if has_begun:
                    return
                has_begun = True
            meter.mark(kind, position)

        return mark

    def _note_backward(self, meter: StepMeter, number: int, module: tuple[str, str]) -> None:
        """A backward through a call of step `number` begins, or goes on."""
        if number == self._number and not self._has_returned:
            self._has_begun_backward = True
        elif not meter.sees_all:
            self._is_partial = True
            self.unseen_backward = self.unseen_backward or module

    def _backward_returned(self, has_failed: bool) -> None:
        if self.meter is None:
            return
        if not self._has_begun_backward:
            if has_failed:  # perhaps this step's, before it came to a compiled call: the profiler would stay active
                self.drop()
            else:  # of another model, in the middle of this step
                self._backward.install()
            return
        self._has_returned = True
        self._is_partial |= has_failed
        self.meter.stop()

    def result(self, budget_bytes: int) -> tuple[int | None, StepProfile | None]:
        """The peak of the step that has ended, and its profile; None where they could not be measured."""
        if self.meter is None:
            return None, None
        peak_bytes = self.meter.peak_bytes()
        if not self._is_partial:
            return peak_bytes, self.meter.profile()
        return (None if peak_bytes is None or peak_bytes <= budget_bytes else peak_bytes), None


class CompileWatch:
    """Seconds that compiling and planning have taken so far. Printed by `explain_compiled`.

    Planning is what `lowtide.compile` adds: reading joint graphs, asking torch's partitioner for choices that are not
    used, solving, and the trace of the first forward. Compiling is the rest of what AOTAutograd and inductor do.
    """

    def __init__(self) -> None:
        self.compiling_s = self.planning_s = 0.0  # compiling_s does not include planning_s

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Context manager around code that compiles. Planning inside it counts as planning."""
        start, planned_s = time.perf_counter(), self.planning_s
        try:
            yield
        finally:
            self.compiling_s += time.perf_counter() - start - (self.planning_s - planned_s)

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Context manager around code that plans."""
        began = self.now
        try:
            yield
        finally:
            self.plan_since(began)

    @property
    def now(self) -> tuple[float, float]:
        """A point in time for `plan_since`."""
        return time.perf_counter(), self.planning_s

    def plan_since(self, began: tuple[float, float]) -> None:
        """Count all time since then as planning."""
        start, planned_s = began
        self.planning_s = planned_s + time.perf_counter() - start

    def __str__(self) -> str:
        return f"{format_seconds(self.compiling_s)} of compiling, {format_seconds(self.planning_s)} of planning"
