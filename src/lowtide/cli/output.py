"""What the `lowtide` command prints, and how it exits.

- `Output` writes results to stdout, as text or as JSON, and progress, notes and errors to stderr.
- `exit_on_error` turns exceptions into a message and one of the documented exit codes (`ExitCode`).
- The functions at the end (`estimate`, `plan`, `sweep`, ...) convert the library's results to a pair of text and
  JSON data, for `Output.result`. Predicted numbers are marked as such in both. Results of the command's own have a
  method for that: `Comparison.display`, or `doctor.display`.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import json
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import lowtide
from lowtide.api.estimate import Estimate, ParallelEstimate
from lowtide.errors import UnitError
from lowtide.plans import Frontier
from lowtide.units import format_bytes, parse_bytes

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
    def working(self, num_stages: int) -> Iterator[Callable[[str], None]]:
        """A context with a progress bar of `num_stages`, which is removed at its end. Each call begins the next stage.

        Output of user code goes to stderr meanwhile, so that stdout has results only.
        """
        description = TextColumn("{task.description}", markup=False)
        columns = (SpinnerColumn(), description, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        disable = self.quiet or not self._notes.is_terminal
        bar = Progress(*columns, console=self._notes, transient=True, refresh_per_second=4, disable=disable)
        task, numbers = bar.add_task("", total=num_stages), itertools.count()
        with contextlib.redirect_stdout(sys.stderr), bar:
            yield lambda description: bar.update(task, description=description, completed=next(numbers))

    @staticmethod
    def _print_json(data: dict[str, Any]) -> None:
        print(json.dumps(data, indent=2))


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
        code = next((code for kinds, code in _CODES.items() if isinstance(error, kinds)), ExitCode.FAILED)
        data = {"error": type(error).__name__, "exit_code": int(code)}
        if isinstance(error, lowtide.InfeasibleBudgetError):
            data["floor_bytes"] = error.floor_bytes
        out.error(_words(error, out.debug), data)
        raise typer.Exit(int(code)) from None


_CODES = {
    (KeyboardInterrupt,): ExitCode.INTERRUPTED,
    (UsageError, UnitError): ExitCode.USAGE,
    (lowtide.InfeasibleBudgetError,): ExitCode.INFEASIBLE,
}


def _words(error: BaseException, debug: bool) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, (UsageError, lowtide.LowtideError)):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        first_line = str(error).splitlines()[0]
        return f"the device is out of memory: {first_line}\nPlan on fake tensors instead: lowtide plan --fake"
    where = _raised_at(error)
    text = f"{type(error).__name__}{f': {error}' if str(error) else ''}{f' ({where})' if where else ''}"
    return text if debug else f"{text}\n--debug shows the traceback."


def _raised_at(error: BaseException) -> str:
    """Return the last line of the user's own code in the traceback, excluding lowtide and installed packages."""
    frames = traceback.extract_tb(error.__traceback__)
    others = (str(Path(lowtide.__file__).parent), "site-packages", "lib/python")
    own = [(Path(f.filename), f.lineno) for f in frames if not any(other in f.filename for other in others)]
    own = [(path, line) for path, line in own if path.is_file()]
    return f"{own[-1][0].name}, line {own[-1][1]}" if own else ""


Display = tuple[RenderableType, dict[str, Any]]


def _fields(item: Any, names: str) -> dict[str, Any]:
    """Return the named attributes of an object; all None if there is none."""
    return {name: None if item is None else getattr(item, name) for name in names.split()}


def parallel_estimate(guess: ParallelEstimate) -> Display:
    """Return text and data of a table over layouts."""
    rows = []
    for row in guess.rows:
        planned = {f"planned_{name}": value for name, value in _fields(row.plan, "peak_bytes slowdown").items()}
        of_graph = _fields(row.graph, "static_bytes step_s")
        rows.append({**_fields(row, "layout peak_bytes floor_bytes"), **of_graph, **planned})
    data = {"predicted": True, "world": guess.world, "budget_bytes": guess.budget_bytes, "layouts": rows}
    return str(guess), data


def estimate(guess: Estimate, budget: int | str | None) -> Display:
    """Return text and data of an estimate, and whether the budget is enough."""
    hardware = guess.graph.hardware
    data = {
        "predicted": True,
        **_fields(guess, "peak_bytes floor_bytes split_floor_bytes bytes_per_sample batch_size"),
        **_fields(guess.graph, "static_bytes step_s"),
        "largest_at_peak": dict(guess.largest),
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
    names = "is_plain engine budget_bytes peak_bytes peak_path peak_phase plain_peak_bytes step_s extra_s slowdown "
    return str(result), {
        "predicted": True,
        **_fields(result, f"{names} lower_bound_s gap fingerprint"),
        "is_step_measured": graph is not None and graph.is_measured,
        "num_regions": len(result.regions),
        "num_moves": len(result.moves),
        "splits": {split.path: split.num_parts for split in result.splits},
        "bytes_by_action": result.bytes_by_action(),
        "device": result.hardware.name,
        "notes": [] if graph is None else list(graph.notes),
        "output": None if output is None else str(output),
    }


def sweep(frontier: Frontier, png: Path | None) -> Display:
    """Return text and data of plans for many budgets."""
    return str(frontier), {
        "predicted": True,
        **_fields(frontier, "floor_bytes plain_peak_bytes step_s"),
        "plans": [_fields(found, "budget_bytes peak_bytes extra_s slowdown gap") for found in frontier.plans],
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
