"""What the `lowtide` command prints, and how it exits.

- `Output` writes results to stdout, as text or as JSON, and progress, notes and errors to stderr.
- `exit_on_error` turns exceptions into a message and one of the documented exit codes (`ExitCode`).
- The functions at the end (`estimate`, `plan`, `sweep`, ...) convert the library's results to a pair of text and
  JSON data, for `Output.result`. Predicted numbers are marked as such in both.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

import lowtide
from lowtide.api.estimate import Estimate, ParallelEstimate
from lowtide.errors import UnitError
from lowtide.plans import Frontier
from lowtide.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from lowtide.cli.bench import Comparison
    from lowtide.cli.doctor import Finding

_PIPE_WIDTH = 200


class Output:
    """Prints for one command. Progress is shown on terminals only, and not with `--quiet`."""

    def __init__(self, *, as_json: bool = False, quiet: bool = False, debug: bool = False) -> None:
        self.as_json, self.quiet, self.debug = as_json, quiet, debug
        # A pipe has no width; without one, rich would wrap lines at 80 columns.
        self._results = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
        self._notes = Console(file=sys.stderr, highlight=False, soft_wrap=True)

    def result(self, text: RenderableType, data: dict[str, Any]) -> None:
        """Print the result: `text`, or `data` with `--json`."""
        if self.as_json:
            self._print_json(data)
        else:
            self._results.print(text, markup=False, soft_wrap=isinstance(text, str))

    def note(self, text: str) -> None:
        """Print a note to stderr, unless `--quiet`."""
        if not self.quiet:
            self._notes.print(text, markup=False, style="dim")

    def error(self, text: str, data: dict[str, Any]) -> None:
        """Print an error to stderr, and with `--json` also as data to stdout."""
        self._notes.print("Error: ", style="bold red", end="")
        self._notes.print(text, markup=False)
        if self.as_json:
            self._print_json({**data, "message": text})

    @contextlib.contextmanager
    def working(self, num_stages: int) -> Iterator[Stages]:
        """A context with a progress bar of `num_stages`, which is removed at its end.

        Output of user code goes to stderr meanwhile, so that stdout has results only.
        """
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        shows = not self.quiet and self._notes.is_terminal
        with contextlib.redirect_stdout(sys.stderr):
            with Progress(
                *columns, console=self._notes, transient=True, refresh_per_second=4, disable=not shows
            ) as bar:
                yield Stages(bar, num_stages)

    @staticmethod
    def _print_json(data: dict[str, Any]) -> None:
        print(json.dumps(data, indent=2))


class Stages:
    """A progress bar's stages: each call begins the next one."""

    def __init__(self, bar: Progress, num_stages: int) -> None:
        self._bar, self._begun = bar, False
        self._task = bar.add_task("", total=num_stages)

    def __call__(self, description: str) -> None:
        self._bar.update(self._task, description=description, advance=int(self._begun))
        self._begun = True


class ExitCode(IntEnum):
    """Exit codes of the command; documented in docs/command.md."""

    OK = 0
    FAILED = 1  # the step cannot be traced, a file is damaged, the device is out of memory
    USAGE = 2  # a wrong option, file, function, module path or budget
    INFEASIBLE = 3  # no plan fits the budget
    DOES_NOT_HOLD = 4  # doctor found a problem, or bench a peak over the budget or different gradients
    INTERRUPTED = 130


EXIT_CODES = (
    "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no plan fits the budget, "
    "4 a check failed (doctor, bench), 130 interrupted."
)


class UsageError(Exception):
    """An argument of the command is wrong; the message lists what is available."""


def did_you_mean(wanted: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'make'?`, or an empty text if nothing is similar."""
    near = difflib.get_close_matches(wanted, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""


@contextlib.contextmanager
def exit_on_error(out: Output) -> Iterator[None]:
    """A context that turns exceptions into a message and an exit code."""
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
    if isinstance(error, (UsageError, UnitError)):
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
    text = f"{_kind(error)}{f': {error}' if str(error) else ''}{f' ({where})' if where else ''}"
    return text if debug else f"{text}\n--debug shows the traceback."


def _raised_at(error: BaseException) -> str:
    """Return the last line of the user's own code in the traceback, excluding lowtide and installed packages."""
    frames = traceback.extract_tb(error.__traceback__)
    package = str(Path(lowtide.__file__).parent)
    own = [f for f in frames if not f.filename.startswith(package) and "site-packages" not in f.filename]
    own = [frame for frame in own if Path(frame.filename).is_file() and "lib/python" not in frame.filename]
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}" if own else ""


Display = tuple[RenderableType, dict[str, Any]]

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def parallel_estimate(guess: ParallelEstimate) -> Display:
    """Return text and data of a table over layouts."""
    rows = [
        {
            "layout": row.layout,
            "peak_bytes": row.peak_bytes,
            "floor_bytes": row.floor_bytes,
            "static_bytes": row.graph.static_bytes,
            "step_s": row.graph.step_s,
            "planned_peak_bytes": None if row.plan is None else row.plan.peak_bytes,
            "planned_slowdown": None if row.plan is None else row.plan.slowdown,
        }
        for row in guess.rows
    ]
    data = {"predicted": True, "world": guess.world, "budget_bytes": guess.budget_bytes, "layouts": rows}
    return str(guess), data


def estimate(guess: Estimate, budget: int | str | None) -> Display:
    """Return text and data of an estimate, and whether the budget is enough."""
    hardware = guess.graph.hardware
    data = {
        "predicted": True,
        "peak_bytes": guess.peak_bytes,
        "floor_bytes": guess.floor_bytes,
        "split_floor_bytes": guess.split_floor_bytes,
        "static_bytes": guess.graph.static_bytes,
        "bytes_per_sample": guess.bytes_per_sample,
        "batch_size": guess.batch_size,
        "largest_at_peak": dict(guess.largest),
        "step_s": guess.graph.step_s,
        "device": hardware.name,
        "device_bytes": hardware.memory_bytes,
        "notes": list(guess.graph.notes),
    }
    text = "\n".join([str(guess), *(f"Note: {note}" for note in guess.graph.notes)])
    if budget is None:
        return text, data
    allowed = parse_bytes(budget, total_bytes=hardware.memory_bytes or None)
    verdict = "plain" if guess.fits(allowed) else "with a plan" if guess.floor_bytes <= allowed else "no"
    data |= {"budget_bytes": allowed, "fits": verdict}
    sentence = {
        "plain": "is enough without a plan",
        "with a plan": "is enough with a plan: lowtide plan",
        "no": "is too small for recomputing alone: use a smaller batch, or lowtide plan with --host or --split",
    }
    return f"{text}\nA budget of {format_bytes(allowed)} {sentence[verdict]}", data


def plan(result: lowtide.Plan, output: Path | None) -> Display:
    """Return text and data of a plan that was written to `output`."""
    graph = result.graph
    return str(result), {
        "predicted": True,
        "is_plain": result.is_plain,
        "engine": result.engine,
        "budget_bytes": result.budget_bytes,
        "peak_bytes": result.peak_bytes,
        "peak_path": result.peak_path,
        "peak_phase": result.peak_phase,
        "plain_peak_bytes": result.plain_peak_bytes,
        "step_s": result.step_s,
        "is_step_measured": graph is not None and graph.is_measured,
        "extra_s": result.extra_s,
        "slowdown": result.slowdown,
        "lower_bound_s": result.lower_bound_s,
        "gap": result.gap,
        "num_regions": len(result.regions),
        "num_moves": len(result.moves),
        "splits": {split.path: split.num_parts for split in result.splits},
        "bytes_by_action": result.bytes_by_action(),
        "device": result.hardware.name,
        "fingerprint": result.fingerprint,
        "notes": [] if graph is None else list(graph.notes),
        "output": None if output is None else str(output),
    }


def sweep(frontier: Frontier, png: Path | None) -> Display:
    """Return text and data of plans for many budgets."""
    names = ("budget_bytes", "peak_bytes", "extra_s", "slowdown", "gap")
    return str(frontier), {
        "predicted": True,
        "floor_bytes": frontier.floor_bytes,
        "plain_peak_bytes": frontier.plain_peak_bytes,
        "step_s": frontier.step_s,
        "plans": [{name: getattr(found, name) for name in names} for found in frontier.plans],
        "references": [asdict(reference) for reference in frontier.references],
        "png": None if png is None else str(png),
    }


def explanation(plan: lowtide.Plan, module: str) -> Display:
    """Return text and data of what a plan does to a module."""

    def is_inside(path: str) -> bool:
        return path == module or path.startswith(f"{module}.")

    text = plan.explain(module)
    return text, {
        "module": module,
        "text": text,
        "regions": [asdict(region) for region in plan.regions if any(map(is_inside, region.paths))],
        "values": [asdict(row) for row in plan.rows if is_inside(row.path)],
    }


def comparison(compared: Comparison) -> Display:
    """Return a table and data of the measurements of `lowtide bench`."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("measured")
    for heading in ("peak", "step", "slower", "gradient difference"):
        table.add_column(heading, justify="right", no_wrap=True)
    rows = []
    for row in compared.rows:
        slower = compared.slowdown(row)
        apart = row.gradient_difference
        is_odd = apart is not None and not math.isfinite(apart)  # JSON has no infinity
        rows.append({**asdict(row), "gradient_difference": str(apart) if is_odd else apart, "slowdown": slower})
        if row.problem or row.peak_bytes is None or row.step_s is None:
            table.add_row(row.name, row.problem, "", "", "")
            continue
        percent = "" if slower is None else f"{100 * slower:+.1f} %"
        difference = f"{apart:g}"
        table.add_row(row.name, format_bytes(row.peak_bytes), format_seconds(row.step_s), percent, difference)
    verdict = Text(f"budget {format_bytes(compared.budget_bytes)}: ", style="bold")
    verdict.append(
        "held, with the same gradients" if compared.holds else "did not hold", "green" if compared.holds else "red"
    )
    data = {
        "holds": compared.holds,
        "budget_bytes": compared.budget_bytes,
        "rows": rows,
        "predicted_slowdown": compared.plan.slowdown,
    }
    return Group(table, verdict), data


def findings(found: list[Finding]) -> Display:
    """Return a table and data of the findings of `lowtide doctor`."""
    table = Table(box=None, show_header=False, pad_edge=False)
    group = ""
    for finding in found:
        if finding.group != group:
            table.add_row(Text(finding.group, style="bold"))
            group = finding.group
        mark = {"ok": "", "note": "note: ", "problem": "problem: "}[finding.status]
        table.add_row(Text(f"  {finding.name}"), Text(mark, _STYLES[finding.status]) + Text(finding.text))
    problems = sum(finding.status == "problem" for finding in found)
    verdict = Text(f"{problems} problem{'s' * (problems != 1)} found", style=_STYLES["problem" if problems else "ok"])
    data = {"num_problems": problems, "findings": [finding.as_json() for finding in found]}
    return Group(table, verdict), data
