"""The commands of `lowtide`, one function each: load a script or a plan, call the library, print the result.

Arguments are parsed by typer from the functions' signatures; `command` adds the options that all commands share. The
options that several commands take, and the checks of what was typed (`12G` for `12GiB`), come first. Results are
printed as text, or with `--json` as one JSON object (`cli.output`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from torch import nn

import lowtide
from lowtide.cli import output as showing
from lowtide.cli.output import EXIT_CODES, ExitCode, Output, UsageError, did_you_mean, exit_on_error
from lowtide.cli.script import GIVES, Job, load, load_function
from lowtide.errors import UnitError
from lowtide.store import LOSSY_CODECS
from lowtide.units import parse_bytes

SCRIPT_HELP = f"A script and a function in it: train.py:make. The function takes no arguments and returns {GIVES}."

BUDGET_HELP = "Memory for the whole step: 12GiB, 12GB, 512MiB, whole bytes, or 80% of the device."
LOSSY_HELP = "Allow compression by this codec, such as int8: gradients are then approximate."
SPLIT_HELP = "Allow the loss and MLPs to run a few rows at a time: gradients may differ in the last bits."
DEVICE_HELP = "The device to plan for, if not the model's own: cuda, or a name such as H100."

Script = Annotated[str, typer.Argument(metavar="SCRIPT:FUNCTION", help=SCRIPT_HELP, show_default=False)]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan written by `lowtide plan -o plan.json`.")]
Budget = Annotated[str, typer.Option("--budget", "-b", metavar="BYTES", help=BUDGET_HELP)]
Host = Annotated[str | None, typer.Option(metavar="BYTES", help="Host memory that activations may be moved to.")]
Lossy = Annotated[str | None, typer.Option(metavar="CODEC", help=LOSSY_HELP)]
SplitFlag = Annotated[bool, typer.Option("--split", help=SPLIT_HELP)]
Engine = Annotated[Literal["eager", "compiled"], typer.Option(help="The engine that will run the plan.")]
Fake = Annotated[bool, typer.Option("--fake", help="Trace on fake tensors: nothing is allocated, nothing runs.")]
Device = Annotated[str | None, typer.Option(metavar="NAME", help=DEVICE_HELP)]
TimeLimit = Annotated[float | None, typer.Option("--time-limit-s", help="Seconds that solving may take.", min=0.01)]

# A number without a unit below this is taken for a number of GiB whose unit was forgotten.
_FEWEST_BARE_BYTES = 1024


def _size(option: str, typed: str, *, total_bytes: int | None = None) -> int | str:
    """Return `typed` as the library takes it: an int, or text with a unit. Raises `UsageError`, with a suggestion.

    A share such as 80% is an error without `total_bytes`.
    """
    text = typed.strip()
    if text.isascii() and text.isdecimal():
        if int(text) == 0:
            raise UsageError(f"{option}: {typed} is 0 bytes. Write a size with a unit, such as 12GiB.")
        if int(text) < _FEWEST_BARE_BYTES:
            raise UsageError(f"{option}: {typed} would be {text} bytes. Did you mean {text}GiB?")
        return int(text)
    try:
        parse_bytes(text, total_bytes=total_bytes)
    except UnitError as error:
        raise UsageError(f"{option}: {error}{_meant(text)}") from None
    return text


def _checked_budget(typed: str) -> int | str:
    """Return `--budget` as the library takes it. A share such as 80% is allowed: the device is known later."""
    return _size("--budget", typed, total_bytes=1 << 62)


def _meant(text: str) -> str:
    """Return a suggestion for sizes such as `12G`, `12 gigs` and `12,5GiB`; empty for others."""
    match = re.fullmatch(r"(\d+)(?:[.,](\d+))?\s*([kmgt])\w*", text, re.IGNORECASE)
    if match is None:
        return ""
    number = f"{match[1]}.{match[2]}" if match[2] else match[1]
    return f" Did you mean {number}{match[3].upper()}iB?"


def _given(**options: Any) -> dict[str, Any]:
    """Return the options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def _moves(host: str | None, lossy: str | None) -> dict[str, Any]:
    """Return the options of `lowtide.solve` that allow more than recomputing, as far as they were given."""
    if lossy is not None and lossy not in LOSSY_CODECS:
        near = did_you_mean(lossy, LOSSY_CODECS)
        raise UsageError(f"--lossy: {lossy!r} is not a lossy codec.{near} There are {', '.join(LOSSY_CODECS)}.")
    return _given(host=None if host is None else _size("--host", host), lossy=lossy)


app = typer.Typer(
    name="lowtide",
    help="Train PyTorch models inside a memory budget: look, plan, compare.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_COMMON = {
    "as_json": Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")],
    "quiet": Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes.")],
    "debug": Annotated[bool, typer.Option("--debug", help="Show tracebacks.")],
}


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Register a function as a command; the options that all commands share are passed to it as an `Output`."""
    signature = inspect.signature(function, eval_str=True)
    options = [parameter for name, parameter in signature.parameters.items() if name != "out"]
    options += [inspect.Parameter(name, _KEYWORD, default=False, annotation=kind) for name, kind in _COMMON.items()]

    @functools.wraps(function)
    def run(**typed: Any) -> None:
        out = Output(**{name: typed.pop(name) for name in _COMMON})
        with exit_on_error(out):
            function(out, **typed)

    run.__signature__ = signature.replace(parameters=options)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in options}
    app.command()(run)
    return function


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"lowtide {lowtide.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train PyTorch models inside a memory budget: look, plan, compare."""


@command
def estimate(
    out: Output,
    script: Script,
    *,
    device: Device = None,
    budget: Annotated[
        str | None, typer.Option("--budget", "-b", metavar="BYTES", help="Also say whether this is enough.")
    ] = None,
    split: SplitFlag = False,
    world: Annotated[
        int | None, typer.Option(metavar="RANKS", help="Estimate for one rank of a job with this many ranks.", min=1)
    ] = None,
    parallel: Annotated[
        list[str] | None,
        typer.Option(metavar="LAYOUT", help="With --world: fsdp=8,tp=8. May be repeated, to compare layouts."),
    ] = None,
) -> None:
    """Predict the memory and time of a step, from fake tensors: nothing is allocated."""
    allowed = None if budget is None else _checked_budget(budget)
    if world is not None:
        _estimate_parallel(out, script, world, parallel, allowed, device)
        return
    if parallel:
        raise UsageError("--parallel is for a job of several ranks: give their number too, --world 64")
    with out.working(2) as stage:
        job = _loaded(stage, script, device)
        stage("tracing on fake tensors")
        allows = _given(split=split or None)
        guess = lowtide.estimate(job.model, job.loss_fn, *job.args, optimizer=job.optimizer, device=device, **allows)
    text, data = showing.estimate(guess, allowed)
    out.result(text, data)
    if data.get("fits") == "no":
        raise typer.Exit(int(ExitCode.INFEASIBLE))


def _estimate_parallel(
    out: Output, script: str, world: int, parallel: list[str] | None, budget: int | str | None, device: str | None
) -> None:
    """The table of `lowtide estimate --world`."""
    with out.working(2) as stage:
        stage(f"loading {script}")
        make = load_function(script)
        _check_device(device)
        stage(f"simulating a rank of {world}")
        try:
            guess = lowtide.estimate_parallel(make, world=world, parallel=parallel, budget=budget, device=device)
        except ValueError as error:
            if isinstance(error, lowtide.LowtideError):
                raise
            raise UsageError(str(error)) from error
    out.result(*showing.parallel_estimate(guess))
    if guess.budget_bytes is not None and guess.best is None:
        raise typer.Exit(int(ExitCode.INFEASIBLE))


@command
def plan(
    out: Output,
    script: Script,
    *,
    budget: Budget,
    host: Host = None,
    lossy: Lossy = None,
    split: SplitFlag = False,
    engine: Engine = "eager",
    fake: Fake = False,
    device: Device = None,
    time_limit_s: TimeLimit = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the plan here.")] = None,
) -> None:
    """Find the fastest plan within a budget, and say what it does."""
    allowed = _checked_budget(budget)
    allows = {**_moves(host, lossy), **_given(time_limit_s=time_limit_s, split=split or None)}
    if split and (fake or device is not None or engine != "eager"):
        raise UsageError("--split plans eager steps on the model's own device: leave out --fake, --device and --engine")
    _check_file(output)
    with out.working(2) as stage:
        job = _loaded(stage, script, device)
        stage(f"tracing the step and solving for {budget}")
        if fake or device is not None or engine != "eager":
            found = lowtide.solve(job.trace(fake=fake, device=device), allowed, engine=engine, **allows)
        else:  # also records facts of the model, which `apply` checks
            found = lowtide.plan(job.model, job.loss_fn, *job.args, budget=allowed, optimizer=job.optimizer, **allows)
    if output is not None:
        with _writing(output):
            output.write_text(found.to_json())
        out.note(f"Written to {output}. See why: lowtide explain {output} MODULE; see all: lowtide report {output}")
    text, data = showing.plan(found, output)
    for note in data["notes"]:
        out.note(f"Note: {note}")
    out.result(text, data)


@command
def sweep(
    out: Output,
    script: Script,
    *,
    budgets: Annotated[
        list[str] | None,
        typer.Option(
            "--budget", "-b", metavar="BYTES", help="A budget to plan for; may be repeated. Default: sixteen budgets."
        ),
    ] = None,
    host: Host = None,
    lossy: Lossy = None,
    engine: Engine = "eager",
    fake: Fake = False,
    device: Device = None,
    time_limit_s: TimeLimit = None,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the curve into this file (.png, .svg or .pdf).")
    ] = None,
) -> None:
    """Show the trade-off of memory and time: plans for budgets from the floor to the plain peak, and alternatives."""
    wanted = [_checked_budget(budget) for budget in budgets] if budgets else None
    allows = {**_moves(host, lossy), **_given(time_limit_s=time_limit_s)}
    _check_ending("--png", png, ".png", ".svg", ".pdf")
    _check_file(png)
    with out.working(3 if png is None else 4) as stage:
        job = _loaded(stage, script, device)
        stage("tracing the step")
        graph = job.trace(fake=fake, device=device)
        stage("solving for many budgets")
        frontier = lowtide.sweep(graph, wanted, engine=engine, **allows)
        if png is not None:
            stage(f"drawing {png}")
            with _writing(png):
                frontier.plot().savefig(png)
    if png is not None:
        out.note(f"Drawn into {png}")
    out.result(*showing.sweep(frontier, png))


def _complete_module(context: typer.Context, incomplete: str) -> Iterable[str]:
    """Complete module paths from the plan file given before."""
    try:
        known = _known_modules(lowtide.Plan.from_json(Path(context.params["file"]).read_text()))
    except (OSError, KeyError, TypeError, lowtide.LowtideError):
        return []
    return [path for path in known if path.startswith(incomplete)]


@command
def explain(
    out: Output,
    file: PlanFile,
    module: Annotated[
        str | None,
        typer.Argument(
            metavar="MODULE",
            help="A module's name, such as layers.7. Left out, the modules are listed.",
            autocompletion=_complete_module,
        ),
    ] = None,
) -> None:
    """Explain what a plan does to the saved tensors of a module, and why."""
    found = _read_plan(file)
    known = _known_modules(found)
    nothing = "It is an empty plan: everything is kept."
    if module is None:
        out.result("\n".join(known) or nothing, {"modules": known})
        return
    if module not in known:
        outermost = [path for path in known if "." not in path][:8] or known[:8]
        listed = f"It has {', '.join(outermost)}, and modules inside them." if known else nothing
        raise UsageError(f"the plan in {file} has no module {module!r}.{did_you_mean(module, known)} {listed}")
    out.result(*showing.explanation(found, module))


@command
def report(
    out: Output,
    file: PlanFile,
    *,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="FILE", help="What to write: .html, .png, .md, or .json for ui.perfetto.dev."
        ),
    ] = Path("report.html"),
    measured: Annotated[
        str | None,
        typer.Option(
            metavar="SCRIPT:FUNCTION", help="Also run the plan on this script's model, and show what is measured."
        ),
    ] = None,
) -> None:
    """Write a plan's report: one HTML page that needs no network, or a picture, Markdown, a trace."""
    found = _read_plan(file)
    _check_ending("--output", output, ".html", ".png", ".md", ".json")
    _check_file(output)
    if output.resolve() == file.resolve():
        raise UsageError(f"the report would be written over the plan in {file}: choose another --output")
    seen: dict[str, Any] = {}
    with out.working(3 if measured is not None else 1) as stage:
        if measured is not None:
            from lowtide.cli.bench import measure_plan

            job = _loaded(stage, measured)
            stage("measuring a step under the plan")
            row = measure_plan(job, found)
            if row.problem:
                raise lowtide.LowtideError(f"a step under the plan could not be measured: {row.problem}")
            seen = {"measured_peak_bytes": row.peak_bytes, "measured_step_s": row.step_s}
        stage(f"writing {output}")
        with _writing(output):
            written = found.report(output, **seen)
    data = {"report": str(output), "num_bytes": written.num_bytes, "verdict": written.verdict}
    out.result(str(written), {**data, "notes": list(written.notes), **seen})


@command
def bench(
    out: Output,
    script: Script,
    *,
    budget: Budget,
    host: Host = None,
    lossy: Lossy = None,
    split: SplitFlag = False,
    rounds: Annotated[int, typer.Option(help="Timed steps of each variant, of which the median is shown.", min=1)] = 5,
) -> None:
    """Run your own model plainly, with a checkpoint per block, and inside a budget: peaks, times, gradients."""
    from lowtide.cli.bench import compare

    allowed = _checked_budget(budget)
    allows = {**_moves(host, lossy), **_given(split=split or None)}
    with out.working(6) as stage:
        job = _loaded(stage, script)
        comparison = compare(job, allowed, rounds, allows, stage)
    out.result(*comparison.display())
    if not comparison.holds:
        out.note(
            "Over the budget, or other gradients than the plain step's: please report this with --json and --debug."
        )
        raise typer.Exit(int(ExitCode.DOES_NOT_HOLD))


@command
def doctor(
    out: Output,
    script: Annotated[
        str | None, typer.Argument(metavar="SCRIPT:FUNCTION", help="Also check this script's model.")
    ] = None,
) -> None:
    """Check versions, devices, the link to host memory, limits, and conflicts with other checkpointing."""
    from lowtide.cli.doctor import display, examine

    with out.working(4 if script is None else 5) as stage:
        findings = examine(None if script is None else _loaded(stage, script), stage)
    out.result(*display(findings))
    if any(finding.status == "problem" for finding in findings):
        raise typer.Exit(int(ExitCode.DOES_NOT_HOLD))


@command
def demo(out: Output) -> None:
    """Train a small GPT on the CPU inside a budget: half a minute, no GPU."""
    from lowtide.cli.demo import NUM_STAGES, demonstrate

    with out.working(NUM_STAGES) as stage:
        demonstration = demonstrate(stage)
    demonstration.print(out)


def _loaded(stage: Callable[[str], None], script: str, device: str | None = None) -> Job:
    """The script's job. Scripts may register devices, so `--device` is checked after it."""
    stage(f"loading {script}")
    job = load(script)
    _check_device(device)
    return job


def _check_device(name: str | None) -> None:
    """Raise `UsageError` if `--device` names no known device, which tracing a step of one layer for it shows."""
    if name is None:
        return
    model = nn.Linear(1, 1)
    try:
        lowtide.trace(model, lambda x: model(x).sum(), torch.ones(1, 1), mode="fake", device=name)
    except RuntimeError as error:
        raise UsageError(f"--device: {error}") from None


def _read_plan(file: Path) -> lowtide.Plan:
    if not file.is_file():
        folder = file.parent if file.parent.is_dir() else Path()
        near = did_you_mean(file.name, [found.name for found in folder.glob("*.json") if found.is_file()])
        raise UsageError(f"there is no file {str(file)!r}.{near} `lowtide plan ... -o plan.json` writes one.")
    try:
        return lowtide.Plan.from_json(file.read_text())
    except UnicodeDecodeError:
        raise lowtide.PlanError(f"{file} is not a plan: it is not a text file") from None
    except lowtide.PlanError as error:
        raise lowtide.PlanError(f"{file}: {error}") from None


def _known_modules(found: lowtide.Plan) -> list[str]:
    """Return every module that a plan names or has values of, and the modules around them."""
    paths = [row.path for row in found.rows] + [path for region in found.regions for path in region.paths]
    known: dict[str, None] = {}
    for path in paths:
        parts = path.split(".")
        known.update(dict.fromkeys(".".join(parts[: end + 1]) for end in range(len(parts))))
    return [path for path in known if path]


def _check_file(file: Path | None) -> None:
    """Raise `UsageError` if a file cannot be written; called before the work that would produce it."""
    if file is None:
        return
    if file.is_dir():
        raise UsageError(f"{str(file)!r} is a folder: name the file to write")
    if not file.parent.is_dir():
        raise UsageError(f"there is no folder {file.parent} to write {file.name} into")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UsageError(f"{file} cannot be written: permission denied")


@contextlib.contextmanager
def _writing(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror or error}") from error


def _check_ending(option: str, file: Path | None, *endings: str) -> None:
    if file is not None and file.suffix.lower() not in endings:
        raise UsageError(f"{option} {file}: the name should end in {', '.join(endings[:-1])} or {endings[-1]}")
