"""What all benchmarks share: options, a timer, the line with date and versions above results, and pages of results."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import platform
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from sharing import TURN

import lowtide

NUM_IN_A_ROW = 3  # steps on a GPU that follow one another, as in a training loop
RESULTS = Path(__file__).parent / "results"


def options_of(
    doc: str | None, cases: Iterable[str] = (), *, rounds: int = 0, limit_s: float = 0.0
) -> argparse.ArgumentParser:
    """A parser with the options that benchmarks share. `--help` prints `doc`, which says what a script measures.

    With `cases` come the names to run, a limit for each of them, and the device; with `rounds`, how many there are.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(cases)

    def known(name: str) -> str:
        if name not in names:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(names)}")
        return name

    if names:
        told = f"those to run, all by default: {', '.join(names)}"
        parser.add_argument("cases", nargs="*", type=known, default=names, metavar="case", help=told)
        told = "seconds for each case, by default %(default)g; 0 is no limit"
        parser.add_argument("--limit-s", type=float, default=limit_s, help=told)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        parser.add_argument("--device", default=device, choices=("cuda", "cpu"))
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds, help="of turns; by default %(default)s")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder for the page of results")
    return parser


def free(device: str) -> None:
    """Give memory back that nothing uses."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


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


class Page:
    """A page of results, written line by line, so that what was measured is kept if a later part fails.

    It begins with `lines`, or with what is there already if `is_added_to`.
    """

    def __init__(self, folder: Path, name: str, *lines: str, is_added_to: bool = False) -> None:
        self._path = folder / name
        is_there = is_added_to and self._path.exists()
        self._lines = self._path.read_text().splitlines() if is_there else list(lines)

    def add(self, *lines: str) -> None:
        self._lines += lines
        print(*lines, sep="\n", flush=True)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text("\n".join(self._lines) + "\n")

    @contextlib.contextmanager
    def rows_of(self, name: str, limit_s: float = 0.0) -> Iterator[None]:
        """A block that adds the rows of one case. If it fails or takes longer, a row says so, and others follow."""
        try:
            with at_most(limit_s):
                yield
        except (Exception, TooSlow) as error:
            self.add(f"| {name} | failed: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]} |")

    def add_cases(self, options: argparse.Namespace, rows_of: Callable[[str], Iterable[str]]) -> None:
        """Add the rows of each case that was asked for, one by one as they are measured."""
        for case in options.cases:
            with TURN, self.rows_of(case, options.limit_s):
                for row in rows_of(case):
                    self.add(row)
            free(options.device)


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
