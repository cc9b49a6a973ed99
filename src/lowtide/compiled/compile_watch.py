"""`CompileWatch`: how long compiling and planning have taken, for the handle and for `explain_compiled`.

Planning is what `lowtide.compile` adds: reading joint graphs, asking torch's partitioner for choices that are not used,
solving, and the trace of the first forward. Compiling is the rest of what AOTAutograd and inductor do.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from lowtide.units import format_seconds


class CompileWatch:
    """Seconds that compiling and planning have taken so far. Printed by `explain_compiled`."""

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
