"""Several benchmarks on one device at once: one at a time measures, the others plan meanwhile.

Processes with the same lock file, `LOWTIDE_BENCH_LOCK=FILE`, take turns: `with TURN:` waits until no other process
measures. `fit` takes as long to solve as to measure, so `Stages` releases the lock while `fit` solves, and
`compiling_without_turn` while `lowtide.compile` compiles.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from quiet import QUIET

from lowtide.api import fit as fitting
from lowtide.api.measure import RealSteps
from lowtide.api.plan_search import PlanSearch
from lowtide.compiled.session import Session


class Turn:
    """A lock on the device, held while measuring. Without a lock file it is always free."""

    def __init__(self, path: str | None) -> None:
        self._file = open(path, "a") if path else None  # open as long as the process
        self._is_held = False
        self.waited_s = 0.0

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *exception: object) -> None:
        self.give()

    def take(self) -> None:
        """Wait for the lock; returns at once if this process holds it. Limits (`reporting.at_most`) wait too."""
        if self._file is not None and not self._is_held:
            start = time.perf_counter()
            left_s, _ = signal.setitimer(signal.ITIMER_REAL, 0)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX)
            finally:
                signal.setitimer(signal.ITIMER_REAL, left_s)
            self.waited_s += time.perf_counter() - start
            self._is_held = True

    def now(self) -> float:
        """Seconds, without those in which other benchmarks measured."""
        return time.perf_counter() - self.waited_s

    def give(self) -> None:
        """Release the lock, and the allocator's unused memory."""
        if self._file is not None and self._is_held:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._is_held = False

    @contextlib.contextmanager
    def given(self) -> Iterator[None]:
        """A block in which others may measure; a lock that is held is taken back at its end."""
        was_held = self._is_held
        self.give()
        try:
            yield
        finally:
            if was_held:
                self.take()


TURN = Turn(os.environ.get("LOWTIDE_BENCH_LOCK"))
if os.environ.get("LOWTIDE_BENCH_LOCK"):
    QUIET.leave()  # but for measuring


def _with_turn_given(search: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the search of `fit` for candidates so that the lock is released during it. `tune_s` counts from its end."""

    def searched(*args: Any) -> Any:
        with TURN.given():
            return search(*args)

    return searched


@contextlib.contextmanager
def compiling_without_turn() -> Iterator[None]:
    """Let other benchmarks measure while a session of `lowtide.compile` compiles in this block."""
    compiling = Session.compiling

    @contextlib.contextmanager
    def given(session: Session) -> Iterator[None]:
        with QUIET.unpinned(), TURN.given(), compiling(session):
            yield

    Session.compiling = given  # type: ignore[method-assign]
    try:
        yield
    finally:
        Session.compiling = compiling  # type: ignore[method-assign]


_trace = fitting.trace_largest
_traced: tuple[Any, Any] | None = None  # the model that was traced last, and its trace


def trace_once(model: Any, *args: Any) -> Any:
    """What `fit` traces; for the same model, the trace of before: its budgets share one."""
    global _traced
    if _traced is None or _traced[0] is not model:
        _traced = model, QUIET.measured(lambda: _trace(model, *args))[-1]
    return _traced[1]


def _on_a_quiet_core(measure: Callable[..., Any]) -> Callable[..., Any]:
    def measured(*args: Any, **kwargs: Any) -> Any:
        with QUIET.pinned():
            return measure(*args, **kwargs)

    return measured


@contextlib.contextmanager
def one_trace() -> Iterator[None]:
    """Let `fit` trace a model once for all budgets that it is fitted to in this block."""
    global _traced
    fitting.trace_largest = trace_once
    try:
        yield
    finally:
        fitting.trace_largest, _traced = _trace, None


class Stages(logging.Handler):
    """Seconds that `fit` spends in each stage, from its log lines: tracing, solving, trying, timing."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._starts: list[tuple[str, float]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            print(record.getMessage(), file=sys.stderr)
            return
        self._starts.append((record.getMessage().split()[0], TURN.now()))

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """A context for calling `fit`, in which this process holds the lock."""
        logger = logging.getLogger("lowtide")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        candidates, measured, timed = PlanSearch.candidates, RealSteps.measured, RealSteps.timed
        PlanSearch.candidates = _with_turn_given(candidates)  # type: ignore[method-assign]
        RealSteps.measured, RealSteps.timed = map(_on_a_quiet_core, (measured, timed))  # type: ignore[method-assign]
        try:
            yield
        finally:
            PlanSearch.candidates = candidates  # type: ignore[method-assign]
            RealSteps.measured, RealSteps.timed = measured, timed  # type: ignore[method-assign]
            logger.removeHandler(self)
            logger.setLevel(logging.NOTSET)
            self._starts.append(("", TURN.now()))

    def __str__(self) -> str:
        stages = dict.fromkeys(("tracing", "solving", "trying", "timing"), 0.0)
        for (stage, start), (_, end) in zip(self._starts, self._starts[1:], strict=False):
            if stage in stages:
                stages[stage] += end - start
        total = self._starts[-1][1] - self._starts[0][1]
        return f"{total:.1f}: {', '.join(f'{stage} {seconds:.1f}' for stage, seconds in stages.items())}"
