"""What all benchmarks share: a timer, the line with date and versions above results, and pages of results."""

from __future__ import annotations

import contextlib
import datetime
import platform
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import lowtide

NUM_IN_A_ROW = 3  # steps on a GPU that follow one another, as in a training loop
RESULTS = Path(__file__).parent / "results"


def timed(
    call: Callable[[], Any], device: str, repeat: int = 1, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Mean seconds of `repeat` calls in a row, including the work that they start on the device."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = clock()
    for _ in range(repeat):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (clock() - start) / repeat


def median_over(times: list[float], plain: list[float]) -> float:
    """Median of how much longer steps take than the plain steps right before them, as a share of those.

    Clock rates and the load of the machine change more slowly than from one turn to the next.
    """
    return statistics.median(ours / theirs for ours, theirs in zip(times, plain, strict=True)) - 1


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else platform.machine()


def versions() -> str:
    """Date and versions, for the line under a title."""
    return (
        f"{datetime.date.today()}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"lowtide {lowtide.__version__}"
    )


def save(lines: list[str], folder: Path, name: str) -> None:
    """Print a page of results and write it to a file."""
    text = "\n".join(lines) + "\n"
    print(text)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


class Page:
    """A page of results, written line by line, so that what was measured is kept if a later part fails."""

    def __init__(self, folder: Path, name: str, *lines: str) -> None:
        self._folder, self._name = folder, name
        self._lines = list(lines)

    def add(self, *lines: str) -> None:
        self._lines += lines
        print(*lines, sep="\n", flush=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / self._name).write_text("\n".join(self._lines) + "\n")

    @contextlib.contextmanager
    def rows_of(self, name: str, limit_s: float = 0.0) -> Iterator[None]:
        """A block that adds the rows of one case. If it fails or takes longer, a row says so, and others follow."""
        try:
            with at_most(limit_s):
                yield
        except (Exception, TooSlow) as error:
            self.add(f"| {name} | failed: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]} |")


class TooSlow(BaseException):
    """A case ran past its limit. Not an `Exception`, which code under measurement may catch."""


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise `TooSlow` in the block after so many seconds, so that one slow case does not use up the time of the others.

    Python raises it when the running call into torch returns. 0 is no limit.
    """

    def stop(number: int, frame: Any) -> None:
        raise TooSlow(f"not done after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
