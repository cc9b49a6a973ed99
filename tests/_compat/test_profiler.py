"""Canaries for `_compat/profiler.py`: Kineto's trace has the events and names that are read there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.profiler import profile, record_function

from lowtide._compat import profiler
from lowtide.errors import LowtideError

BYTES = 1 << 20


def test_allocations_are_counted() -> None:
    totals = profiler.cpu_allocation_totals(lambda: torch.empty(BYTES, dtype=torch.uint8).zero_())
    assert max(totals) >= BYTES, "the profiler has no [memory] events with alloc_size: CPU peaks cannot be measured"
    assert totals[-1] < BYTES


def test_peaks_within_marks() -> None:
    def call() -> None:
        for factor in (1, 2):
            with record_function("here"):
                torch.empty(factor * BYTES, dtype=torch.uint8)

    peaks = profiler.cpu_peaks_within(call, "here")
    assert [peak // BYTES for peak in peaks] == [1, 2], "events of record_function have no times, or other names"


def test_releases_without_an_event() -> None:
    """gloo's threads release the last reference to the input of a collective now and then; the profiler misses it."""
    blocks = [(100, 50), (200, 50), (300, 50), (120, 100), (300, -50), (100, 10)]  # the fourth overlaps two others
    events = [(time, address, change) for time, (address, change) in enumerate(blocks)]
    assert profiler._allocations(events) == [(0, 50), (1, 50), (2, 50), (3, -50), (3, -50), (3, 100), (4, -50), (5, 10)]


def test_an_active_profiler_is_seen() -> None:
    assert not profiler.profiler_is_active()
    with profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert profiler.profiler_is_active(), "autograd.profiler._is_profiler_enabled is not set by torch.profiler"
        with pytest.raises(LowtideError, match="one is active"):
            profiler.cpu_allocation_totals(lambda: None)


def test_names_of_events() -> None:
    with profile(activities=[torch.profiler.ProfilerActivity.CPU]) as run:
        torch.ones(2).add(1)
    name = profiler.profiler_name("aten.add.Tensor")
    assert name in {event.name for event in run.events()}, f"ops are not named {name} in traces: op times are not found"
    assert profiler.waits_for_device("cudaStreamSynchronize") and not profiler.waits_for_device("cudaLaunchKernel")


@pytest.mark.gpu
def test_categories_of_events() -> None:
    import json
    import tempfile
    from pathlib import Path

    with profile(acc_events=True) as run:  # torch 2.11 warns without it
        torch.ones(2, device="cuda").add(1).cpu()
    with tempfile.TemporaryDirectory() as folder:
        run.export_chrome_trace(str(path := Path(folder) / "trace.json"))
        categories = {event.get("cat") for event in json.loads(path.read_text())["traceEvents"]}
    assert categories & set(profiler.RUNTIME_EVENTS), "launches have another category: the two lines cannot be matched"
    assert categories & set(profiler.DEVICE_EVENTS), "kernels have another category: device times are not found"


def test_allocations_between_marks() -> None:
    trace = profiler.AllocationTrace()
    assert trace.start()
    assert not profiler.AllocationTrace().start(), "one profiler at a time"
    first = torch.ones(1000)
    trace.mark()
    torch.ones(500)
    trace.mark()
    del first
    assert trace.stop() == [(4000, 4000), (6000, 4000), (4000, 0)]
    assert trace.start()
    trace.cancel()
    assert not trace.is_active


def test_a_trace_is_ended_in_its_own_thread() -> None:
    """torch has one profiler per thread: another thread cannot stop it, and the thread could start no other."""
    with ThreadPoolExecutor(1) as other:
        trace, again = profiler.AllocationTrace(), profiler.AllocationTrace()
        assert other.submit(trace.start).result()
        trace.cancel()
        assert not trace.is_active and not again.start(), "still active in its thread"
        assert other.submit(again.start).result()
        assert other.submit(again.stop).result() == [(0, 0)]
    assert not profiler.profiler_is_active()


def test_a_profiler_that_is_started_within_a_trace_ends_it() -> None:
    trace = profiler.AllocationTrace()
    assert trace.start()
    with torch.profiler.profile() as users:
        assert trace.stop() is None
        torch.ones(1000)
    assert users.key_averages(), "left alone"
    assert trace.start()
    with torch.profiler.profile():
        pass
    assert trace.stop() is None and trace.start(), "nothing is left of it"
    trace.cancel()
    assert not profiler.profiler_is_active()


def test_a_thread_ends_its_trace() -> None:
    trace, again = profiler.AllocationTrace(), profiler.AllocationTrace()
    with ThreadPoolExecutor(1) as other:
        assert other.submit(trace.start).result()
        assert not again.start()
    assert again.start()
    torch.ones(1000)
    assert again.stop() == [(4000, 0)], "thread-local values are freed in another thread"
    trace.cancel()
    assert not profiler.profiler_is_active()


def test_a_trace_that_is_freed_is_ended() -> None:
    trace = profiler.AllocationTrace()
    assert trace.start()
    del trace
    assert not profiler.profiler_is_active()
