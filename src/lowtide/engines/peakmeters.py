"""How a step's peak is measured where that can be done while it runs."""

from __future__ import annotations

from typing import Protocol

import torch


class PeakMeter(Protocol):
    """Says the most bytes that were allocated since it was last reset."""

    def peak_bytes(self) -> int: ...
    def reset(self) -> None: ...


class AllocatorMeter:
    """torch's own statistics of a device's allocator, which it resets."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


def meter_of(device: torch.device) -> PeakMeter | None:
    """None on the CPU, where only a profiler knows peaks."""
    return AllocatorMeter(device) if device.type == "cuda" else None
