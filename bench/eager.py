"""Eager training under a budget against torch's own checkpointing: families of models, measured peaks and times.

    python bench/eager.py --device cuda --families llama vit --targets 3 --seconds 120 --out FOLDER
    python bench/eager.py --join FOLDER/*.md        # one page from those of several runs

Torch's ways are a checkpoint per block, on every second block, and selective ones that keep all matrix products or
every other one. Ours is `lowtide.fit` at their measured peaks and between them; on a GPU also with host memory, and
captured as a CUDA graph. All budgets of a family share one trace. The plain step, torch's ways and the plans for all
budgets take turns; the peer at a budget is the fastest of torch's ways that hold it. Budgets are ordered by how much
they tell, so a run that is cut short by `--targets` or `--seconds` has the most important ones.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import families
import rows
import torch
from quiet import QUIET
from reporting import NUM_IN_A_ROW, Page, TooSlow, at_most, device_name, free, median_over, options_of, versions
from rows import Row
from sharing import TURN, Stages, one_trace
from ways import (
    CLOCKS,
    Way,
    checkpointed,
    cost_of,
    host_and_device_s,
    in_turns,
    peak_of,
    selective,
    step,
    switched_on,
)
from zoo import Job

import lowtide
from lowtide.plans import Plan
from lowtide.plans.plan_text import KEPT, Trial

PER_BLOCK, EVERY_SECOND = "checkpoint per block", "every second block"
SELECTIVE, EVERY_OTHER = "selective, all products", "selective, every other product"
HOST = 64 << 30
_LAST_ROUND, _HARD_LIMIT = 1.5, 2.0  # times `--limit-s`: no further round is begun, and the family is given up
BEATEN = 0.8  # of the time of a way; selective ones that another way beats by as much take no turns
# Regions learn from the first two steps under a plan, which is applied anew in each turn.
NUM_WARM = 2


def torch_ways(job: Job) -> dict[str, Way]:
    run = functools.partial(step, job)
    return {
        PER_BLOCK: Way(run, functools.partial(checkpointed, job)),
        EVERY_SECOND: Way(run, functools.partial(checkpointed, job, every=2)),
        SELECTIVE: Way(run, functools.partial(checkpointed, job, function=selective(1))),
        EVERY_OTHER: Way(run, functools.partial(checkpointed, job, function=selective(2))),
    }


@dataclass(frozen=True)
class Target:
    """A budget for ours, in bytes."""

    label: str
    budget: int
    host: int = 0
    is_captured: bool = False


def targets_of(peaks: dict[str, int], device: str) -> list[Target]:
    """The budgets, the most important first. `peaks` are those of torch's ways that ran."""
    found = []
    if PER_BLOCK in peaks:
        found.append(Target(PER_BLOCK, peaks[PER_BLOCK]))
        if device == "cuda":
            found.append(Target(f"{PER_BLOCK}, with host memory", peaks[PER_BLOCK], host=HOST))
    if EVERY_SECOND in peaks:
        found.append(Target(EVERY_SECOND, peaks[EVERY_SECOND], is_captured=device == "cuda"))
    between = []
    if PER_BLOCK in peaks and EVERY_SECOND in peaks:
        low, high = peaks[PER_BLOCK], peaks[EVERY_SECOND]
        between = [Target(f"{percent} % between", low + (high - low) * percent // 100) for percent in (50, 25, 75)]
    return [
        *found,
        *between[:1],
        *(Target(way, peaks[way]) for way in (SELECTIVE, EVERY_OTHER) if way in peaks),
        *between[1:],
    ]


@dataclass(frozen=True)
class Fitted:
    """What `fit` kept for a budget: the plan, its measured peak, seconds of its stages, and the candidate's name."""

    target: Target
    plan: lowtide.Plan
    peak: int
    stages: str
    kept: str
    trials: tuple[Trial, ...] = ()


class Comparison:
    """One family: the plain step, torch's ways, and rows for ours."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self._name, self._device, self._options = name, options.device, options
        self._job = families.make(name, options.device)
        self._plain = Way(functools.partial(step, self._job))
        self._ways = torch_ways(self._job)
        self.peaks: dict[str, int] = {}  # of torch's ways

    def head(self) -> Iterator[str]:
        """Lines on the plain step, and on torch's ways that fail."""
        plain_peak = peak_of(self._job, self._device)
        host_s, device_s = host_and_device_s(self._job, self._device)
        text = f"## {self._name}: plain {rows.gib(plain_peak / 2**30)} GiB"
        if host_s:
            limit = "host" if host_s > device_s else "device"
            text += f"; host {1e3 * host_s:.1f} ms, device {1e3 * device_s:.1f} ms: limited by the {limit}"
        yield from ("", text, "")
        for way in list(self._ways):
            try:
                self.peaks[way] = peak_of(self._job, self._device, self._ways[way].context)
            except Exception as error:  # that torch's checkpoint does not run a model is a result too
                del self._ways[way]
                yield from (f"{way}: {_failed(error)}", "")
        once = in_turns({"plain": self._plain, **self._ways}, self._device, 1, clock=CLOCKS[self._device])
        dear = [way for way in (SELECTIVE, EVERY_OTHER) if way in self._ways]  # others are peers at their own peaks
        for way in [way for way in dear if self._is_beaten(way, once)]:
            del self._ways[way]
            ms, over = cost_of(once, way)
            size = rows.gib(self.peaks[way] / 2**30)
            yield from (f"{way}, in one round: {ms:.1f} ms, {over:+.1f} %, {size} GiB: another is better.", "")

    def _is_beaten(self, way: str, times: dict[str, list[float]]) -> bool:
        """Whether another way has no larger peak and takes at most `BEATEN` of the time."""
        return any(
            self.peaks[other] <= self.peaks[way] and times[other][0] <= BEATEN * times[way][0] for other in self._ways
        )

    def fitted(self, target: Target) -> Iterator[Fitted | Row | str]:
        """`fit` at a budget; captured too if asked for, with its row. What fails is a line of text."""
        job, stages = self._job, Stages()
        job.model.zero_grad(set_to_none=True)  # gradients that are there would count as memory of the step
        free(self._device)
        failed = functools.partial("| {} | {} | {} |".format, target.label, rows.gib(target.budget / 2**30))
        try:
            with stages.listening():
                handle = lowtide.fit(
                    *(job.model, job.loss_fn, *job.batch),
                    budget=target.budget,
                    host=target.host,
                    tune_s=self._options.tune_s,
                )
        except Exception as error:
            yield failed(f"fit: {_failed(error)}")
            return
        try:
            handle.enabled = False
            peak = peak_of(job, self._device, functools.partial(switched_on, handle))
            kept = next((trial.name for trial in handle.candidates if trial.outcome == KEPT), "the plain step")
            if handle.measured_slowdown is not None:
                kept += f", {100 * handle.measured_slowdown:+.1f} measured by fit"
            yield Fitted(target, handle.plan, peak, str(stages), kept, handle.candidates)
            if target.is_captured:
                yield self._captured(target, handle)
        except Exception as error:
            yield failed(_failed(error))
        finally:
            handle.remove()
            job.model.zero_grad(set_to_none=True)

    def _captured(self, target: Target, handle: Any) -> Row:
        """The fitted step as a CUDA graph, in turns with the plain step and torch's every second block."""
        job = self._job
        handle.enabled = True
        job.model.zero_grad(set_to_none=True)
        graph = handle.capture(job.loss_fn, *job.batch, ignore_host_draws=True)
        handle.enabled = False
        try:
            ours = Way(functools.partial(graph, *job.batch), functools.partial(switched_on, handle))
            ways = {"plain": self._plain, EVERY_SECOND: self._ways[EVERY_SECOND], "ours": ours}
            times = in_turns(ways, self._device, self._options.rounds, num_warm=NUM_WARM)
            kept = f"{len(graph.plan.regions)} regions"
            fitted = Fitted(Target(f"{target.label}, captured", target.budget), Plan(), graph.peak_bytes, "", kept)
            return self._row(fitted, EVERY_SECOND, "ours", times, None)
        finally:
            graph.release()
            torch._C._cuda_clearCublasWorkspaces()  # the capture's would count as memory of all later plans

    def compared(self, found: list[Fitted], is_over: Callable[[], bool]) -> Iterator[str | Row]:
        """The plain step, torch's ways and all fitted plans in turns: a table of torch's ways, and a row for each plan.

        At each budget the fastest of torch's ways that hold it is the peer.
        """
        job = self._job
        ours = {each.target.label: functools.partial(lowtide.apply, job.model, each.plan) for each in found}
        ways = {label: Way(self._plain.step, context) for label, context in ours.items()}
        times = in_turns(
            {"plain": self._plain, **self._ways, **{f"ours: {label}": way for label, way in ways.items()}},
            self._device,
            self._options.rounds,
            num_warm=NUM_WARM,
            clock=CLOCKS[self._device],
            is_over=is_over,
        )
        yield from (f"Plain: {1e3 * statistics.median(times['plain']):.1f} ms.", "")
        yield from ("| torch's | GiB | ms | + % |", "|---|---|---|---|")
        for way in self._ways:
            ms, over = cost_of(times, way)
            yield f"| {way} | {rows.gib(self.peaks[way] / 2**30)} | {ms:.1f} | {over:+.1f} |"
        yield from ("", rows.HEAD, "|" + "---|" * (rows.HEAD.count("|") - 1))
        for each in found:
            holding = [way for way in self._ways if self.peaks[way] <= each.target.budget]
            peer = min(holding or [EVERY_SECOND], key=lambda way: median_over(times[way], times["plain"]))
            yield self._row(each, peer, f"ours: {each.target.label}", times, 100 * each.plan.slowdown)

    def _row(self, fitted: Fitted, peer: str, ours: str, times: dict[str, list[float]], predicted: float | None) -> Row:
        return Row(
            self._name,
            fitted.target.label,
            fitted.target.budget / 2**30,
            peer,
            *cost_of(times, peer),
            *cost_of(times, ours),
            predicted=predicted,
            ours_gib=fitted.peak / 2**30,
            holds=fitted.peak <= fitted.target.budget,
            fit=fitted.stages,
            kept=fitted.kept,
        )

    def save(self, found: list[Fitted], folder: Path) -> None:
        """Write the graph, with what was predicted and measured for each plan, for work on the cost model."""
        folder.mkdir(parents=True, exist_ok=True)
        graph = next(each.plan.graph for each in found if each.plan.graph is not None)
        with gzip.open(folder / f"{self._name}.json.gz", "wt") as file:
            file.write(graph.to_json())
        plans = {each.target.label: [each.plan.to_json(graph=False), each.trials] for each in found}
        (folder / f"{self._name}-plans.json").write_text(json.dumps(plans, default=asdict))


def _failed(error: BaseException) -> str:
    text = " ".join(str(error).split()).replace("|", "/")
    return f"failed: {type(error).__name__}: {text[:500]}"


def compare(name: str, options: argparse.Namespace, page: Page) -> Iterator[Row | str]:
    """A family's rows, written to the page when all its budgets are fitted."""
    start = TURN.now()
    comparison = Comparison(name, options)
    TURN.take()
    began = TURN.now()
    page.add(*comparison.head())
    headed = TURN.now()
    targets = targets_of(comparison.peaks, options.device)
    targets = [each for each in targets if options.only is None or each.label in options.only][: options.targets]
    found: list[Fitted] = []
    others: list[Row | str] = []  # captured steps, and what failed
    with one_trace():
        for number, target in enumerate(targets):
            seconds = TURN.now() - start
            if 0 < options.limit_s < seconds:
                others.append(f"Stopped after {seconds:.0f} s, with {number} of {len(targets)} budgets.")
                break
            for each in comparison.fitted(target):
                (found if isinstance(each, Fitted) else others).append(each)  # type: ignore[arg-type]
    if found and options.data is not None:
        comparison.save(found, options.data)
    most_s, fitted = _LAST_ROUND * options.limit_s, TURN.now()
    for row in [*comparison.compared(found, lambda: 0 < most_s < TURN.now() - start), *others]:
        page.add(str(row))
        if isinstance(row, Row) or "failed: " in row:
            yield row
    stages_s = began - start, headed - began, fitted - headed, TURN.now() - fitted
    told = ", ".join(f"{seconds:.0f}" for seconds in stages_s)
    page.add("", f"{len(found)} budgets; seconds of making the model, torch's ways, fitting, turns: {told}{QUIET}.")


def run(options: argparse.Namespace, page: Page) -> None:
    found: list[Row | str] = []
    for name in options.cases:
        try:
            with at_most(_HARD_LIMIT * options.limit_s):
                for row in compare(name, options, page):
                    found.append(row)
        except (Exception, TooSlow) as error:  # one family must not cost the others their rows
            found.append(_failed(error))
            page.add("", f"{name} {found[-1]}")
        free(options.device)
        TURN.give()
    measured = [row for row in found if isinstance(row, Row)]
    page.add("", "## Summary", "", rows.summary(measured, len(found) - len(measured)))


def join(pages: list[Path], page: Page) -> None:
    """The families of several pages on one, the last of each, and a summary of all."""
    parts = {name: part for each in pages for name, part in rows.sections(each.read_text()).items()}
    for part in parts.values():
        page.add("", part)
    text = "\n\n".join(parts.values())
    page.add("", "## Summary", "", rows.summary(rows.read(text), text.count("failed: ")))


def title_of(options: argparse.Namespace) -> list[str]:
    return [
        f"# Eager training under a budget, {device_name(options.device)}",
        "",
        f"{versions()}. Forward and backward. Budgets are measured peaks of torch's ways, of the whole step, or lie "
        f"between the first two of them. The plain step, torch's ways and ours run in turns, {NUM_IN_A_ROW} steps in a "
        f"row, {options.rounds} rounds; `+ %` is over the plain steps of the same round, in the median. Kept: the "
        "candidate that `fit` chose. The budgets of a family share one trace, which the first `fit` took; "
        f"`tune_s={options.tune_s:g}`.",
    ]


def main() -> None:
    parser = options_of(__doc__, families.FAMILIES, rounds=4)
    parser.add_argument("--targets", type=int, help="budgets for each family; all by default")
    parser.add_argument("--only", nargs="*", help="budgets by their labels in the table")
    parser.add_argument("--tune-s", type=float, default=10.0, help="of `fit`")
    parser.add_argument("--data", type=Path, help="a folder for graphs and plans")
    parser.add_argument("--join", nargs="*", type=Path, help="measure nothing: join these pages, newest versions last")
    parser.add_argument("--suffix", default="", help="of the name of the page")
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    title = options.join[-1].read_text().splitlines()[:3] if options.join else title_of(options)
    page = Page(options.out, f"eager-{options.device}{options.suffix}.md", *title)
    if options.join:
        join(options.join, page)
    else:
        run(options, page)


if __name__ == "__main__":
    main()
