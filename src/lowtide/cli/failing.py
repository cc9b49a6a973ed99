"""How the command ends: what its exit codes mean, and errors in words instead of tracebacks."""

from __future__ import annotations

import contextlib
import difflib
import traceback
from collections.abc import Iterable, Iterator
from enum import IntEnum
from pathlib import Path

import torch
import typer

import lowtide
from lowtide.cli.output import Output


class ExitCode(IntEnum):
    """What a script that calls `lowtide` can go by."""

    OK = 0
    FAILED = 1  # something went wrong: the step cannot be traced, a file is damaged, the device is out of memory
    USAGE = 2  # what was typed is wrong: an option, a file, a function, a module path, a budget
    INFEASIBLE = 3  # no plan fits the budget
    DOES_NOT_HOLD = 4  # doctor found a problem, or bench a peak over the budget or other gradients
    INTERRUPTED = 130


EXIT_CODES = (
    "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no plan fits the budget, "
    "4 a check does not hold (doctor, bench), 130 interrupted."
)


class UsageError(Exception):
    """What was typed names nothing there is; the message says what there is."""


def did_you_mean(wanted: str, known: Iterable[str]) -> str:
    """` Did you mean 'make'?`, or nothing where nothing is close."""
    near = difflib.get_close_matches(wanted, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""


@contextlib.contextmanager
def ending_well(out: Output) -> Iterator[None]:
    """Turn whatever is raised inside into a message and an exit code."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except BaseException as error:
        if isinstance(error, (SystemExit, GeneratorExit)):
            raise
        if out.debug:
            traceback.print_exc()
        code = _code_of(error)
        floor = {"floor_bytes": error.floor_bytes} if isinstance(error, lowtide.InfeasibleBudgetError) else {}
        out.error(_words(error, out.debug), {"error": _kind(error), "exit_code": int(code), **floor})
        raise typer.Exit(int(code)) from None


def _code_of(error: BaseException) -> ExitCode:
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    if isinstance(error, (UsageError, lowtide.UnitError)):
        return ExitCode.USAGE
    if isinstance(error, lowtide.InfeasibleBudgetError):
        return ExitCode.INFEASIBLE
    return ExitCode.FAILED


def _kind(error: BaseException) -> str:
    return type(error).__name__


def _words(error: BaseException, debug: bool) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, (UsageError, lowtide.LowtideError)):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        first_line = str(error).splitlines()[0]
        return f"the device is out of memory: {first_line}\nPlan on fake tensors instead: lowtide plan --fake"
    where = _raised_at(error)
    shown = f"{_kind(error)}{f': {error}' if str(error) else ''}{f' ({where})' if where else ''}"
    return shown if debug else f"{shown}\n--debug shows the traceback."


def _raised_at(error: BaseException) -> str:
    """The last line of the user's own code on the way to an error: neither lowtide's nor an installed package's."""
    frames = traceback.extract_tb(error.__traceback__)
    package = str(Path(lowtide.__file__).parent)
    own = [f for f in frames if not f.filename.startswith(package) and "site-packages" not in f.filename]
    own = [frame for frame in own if Path(frame.filename).is_file() and "lib/python" not in frame.filename]
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}" if own else ""
