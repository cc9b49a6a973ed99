"""Cores of a shared server that run at full speed: where a benchmark measures.

Other tenants of a server use the second hyperthreads of its cores. A core then runs Python at half speed, for seconds
at a time, which shows neither as stolen time nor as CPU time of this machine: a step that the host limits takes 1.2 to
1.5 times as long. So each turn begins with a short probe. If the core is slower than it can be, the process moves to
the fastest of the cores; a turn that ends on a slowed core is measured again.

With a lock file (`sharing.Turn`), processes that do not measure leave some cores to the one that does.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from lowtide.tracing.host_speed import probe_s

T = TypeVar("T")

_SHARE = 3 / 8  # of the cores, which only the process that measures uses
_SLOWED = 1.15  # times the fastest probe of this process; a busy hyperthread takes 1.5 to 2
_ATTEMPTS = 2  # at a turn on a core at full speed


class QuietCores:
    """The cores for measuring, and how many of the turns ran at full speed."""

    def __init__(self) -> None:
        available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        num = int(_SHARE * len(available))
        self._cores, self._others = available if num else [], available[num:]
        self._fastest_s = float("inf")
        self._last = 0
        self._before: set[int] | None = None  # where the process may run when it is not pinned; None if it is not
        self.num_turns = self.num_quiet = 0

    def leave(self) -> None:
        """Keep off the cores for measuring."""
        if self._cores:
            _move_to(self._others)

    @contextlib.contextmanager
    def pinned(self) -> Iterator[None]:
        """A block on one core, the fastest of those for measuring; nothing happens inside of another such block."""
        if not self._cores or self._before is not None:
            yield
            return
        self._before = os.sched_getaffinity(0)
        _move_to([self._cores[self._last]])
        try:
            if self._is_slowed():
                self._last = min(range(len(self._cores)), key=self._seconds_on)
                _move_to([self._cores[self._last]])
            yield
        finally:
            _move_to(self._before)
            self._before = None

    @contextlib.contextmanager
    def unpinned(self) -> Iterator[None]:
        """A part of such a block that is not measured, and may use all cores."""
        if self._before is None:
            yield
            return
        _move_to(self._before)
        try:
            yield
        finally:
            _move_to([self._cores[self._last]])

    def turn(self, measure: Callable[[], float]) -> float:
        """The seconds that `measure` returns, of a turn on a core at full speed if one of a few is."""
        return min(self.measured(measure))

    def measured(self, measure: Callable[[], T]) -> list[T]:
        """What `measure` returns each time: it is called again if the core is slowed at the end, a few times."""
        found = []
        self.num_turns += 1
        for _ in range(_ATTEMPTS if self._cores else 1):
            with self.pinned():
                found.append(measure())
                if not self._is_slowed():
                    self.num_quiet += 1
                    break
        return found

    def __str__(self) -> str:
        if not self.num_turns:
            return ""
        probe = f"{1e3 * self._fastest_s:.2f} ms for the fastest probe"
        return f"; {self.num_quiet} of {self.num_turns} turns ended on a core at full speed ({probe})"

    def _is_slowed(self) -> bool:
        return self._probe_s() > _SLOWED * self._fastest_s

    def _seconds_on(self, number: int) -> float:
        _move_to([self._cores[number]])
        return self._probe_s()

    def _probe_s(self) -> float:
        seconds = probe_s()
        self._fastest_s = min(self._fastest_s, seconds)
        return seconds


def _move_to(cores: Iterable[int]) -> None:
    """Let all threads of the process run on these cores only."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # ended meanwhile
            os.sched_setaffinity(int(thread.name), cores)


QUIET = QuietCores()
