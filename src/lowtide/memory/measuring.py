"""`measure`: what a call really takes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from lowtide import _compat
from lowtide.memory.exclusive import one_at_a_time
from lowtide.memory.meter import cpu_allocation_totals
from lowtide.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Measured:
    """What a call took. All numbers are measured.

    `start_bytes` were allocated before it (0 on the CPU, whose allocator keeps no count), `peak_bytes` is the most on
    top of that at one time, `left_bytes` what of it is still allocated. `seconds` is the median of all runs but that
    under the profiler, where there was another.
    """

    peak_bytes: int
    start_bytes: int
    left_bytes: int
    seconds: float
    device: str

    @property
    def total_peak_bytes(self) -> int:
        """The allocator's own peak: what was there, and the most on top of it."""
        return self.start_bytes + self.peak_bytes

    @property
    def by_kind(self) -> dict[str, int]:
        """The peak by what became of it: there before, left behind, and given back."""
        left = max(0, self.left_bytes)
        return {"before": self.start_bytes, "left": left, "given back": self.peak_bytes - left}

    def __str__(self) -> str:
        kinds = ", ".join(f"{format_bytes(size)} {kind}" for kind, size in self.by_kind.items() if size)
        peak = f"peak {format_bytes(self.total_peak_bytes)} measured on {self.device}"
        return f"{peak} ({kinds}), {format_seconds(self.seconds)}"


@one_at_a_time
def measure(function: Callable[[], Any], *, device: torch.device | str | None = None, repeat: int = 1) -> Measured:
    """Call `function` and say what it allocated at most on `device` (default: the accelerator, else the CPU), and when.

    On an accelerator the allocator's own counters tell; on the CPU torch.profiler's events, which slow the call down:
    ask for `repeat` more than 1 to have it timed without. `function` is called `repeat` times.

    >>> import torch, lowtide
    >>> lowtide.measure(lambda: torch.ones(1000).exp(), device="cpu").peak_bytes
    8000
    """
    if repeat < 1:
        raise ValueError(f"repeat is a number of calls, 1 or more, not {repeat}")
    where = torch.device(device) if device is not None else (_compat.accelerator() or torch.device("cpu"))
    gc.collect()  # rubbish collected during the call would count as memory it gave back
    times: list[float] = []
    if where.type == "cpu":
        totals: list[int] = []
        profiled = _timed(lambda: totals.extend(cpu_allocation_totals(function)), where)
        times = [_timed(function, where) for _ in range(repeat - 1)] or [profiled]
        return Measured(max([0, *totals]), 0, totals[-1] if totals else 0, median(times), str(where))
    times = [_timed(function, where) for _ in range(repeat - 1)]
    torch.accelerator.synchronize(where)
    torch.accelerator.reset_peak_memory_stats(where)
    before = torch.accelerator.memory_allocated(where)
    times.append(_timed(function, where))
    peak = torch.accelerator.max_memory_allocated(where) - before
    return Measured(peak, before, torch.accelerator.memory_allocated(where) - before, median(times), str(where))


def _timed(function: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    start = time.perf_counter()
    function()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - start
