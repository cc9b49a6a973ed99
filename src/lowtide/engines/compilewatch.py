"""How long compiling takes, and how much of that is planning."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from lowtide.units import format_seconds


class CompileWatch:
    """Seconds spent so far."""

    def __init__(self) -> None:
        self.compiling_s = self.planning_s = 0.0  # the first without the second

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """A block that compiles, and may plan in between."""
        start, planned_s = time.perf_counter(), self.planning_s
        try:
            yield
        finally:
            self.compiling_s += time.perf_counter() - start - (self.planning_s - planned_s)

    @contextmanager
    def planning(self) -> Iterator[None]:
        """A block that plans."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.planning_s += time.perf_counter() - start

    def __str__(self) -> str:
        return f"{format_seconds(self.compiling_s)} of compiling, {format_seconds(self.planning_s)} of planning"
