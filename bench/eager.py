"""Eager training under a budget against torch's own checkpointing: families of models, measured peaks and times.

    python bench/eager.py --device cuda --families llama vit --targets 3 --seconds 120 --out FOLDER
    python bench/eager.py --join FOLDER/*.md        # one page from those of several runs

Torch's ways are a checkpoint per block, on every second block, and selective ones that keep all matrix products or
every other one. Ours is `lowtide.fit` at their measured peaks and between them; on a GPU also with host memory, and
captured as a CUDA graph. At each budget the plain step, the fastest of torch's ways that hold it, and ours take turns.
Budgets are ordered by how much they tell, so a run that is cut short by `--targets` or `--seconds` has the most
important ones.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import families
import rows
import torch
from reporting import NUM_IN_A_ROW, RESULTS, Page, device_name, median_over, versions
from rows import Row
from sharing import TURN, Stages
from ways import Way, checkpointed, free, host_and_device_s, in_turns, peak_of, selective, step, switched_on
from zoo import Job

import lowtide

PER_BLOCK, EVERY_SECOND = "checkpoint per block", "every second block"
SELECTIVE, EVERY_OTHER = "selective, all products", "selective, every other product"
HOST = 64 << 30
# A fitted model counts what is on the CPU after its 1st, 2nd, 4th, ... forward, which takes longer than a small step.
NUM_UNTIMED = {"cuda": 0, "cpu": 16}
CLOCKS = {"cuda": time.perf_counter, "cpu": time.thread_time}  # of the thread, so that other processes do not count


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


class Comparison:
    """One family: the plain step, torch's ways, and rows for ours."""

    def __init__(self, name: str, device: str, rounds: int) -> None:
        self._name, self._device, self._rounds = name, device, rounds
        self._job = families.make(name, device)
        self._plain = Way(functools.partial(step, self._job))
        self._ways = torch_ways(self._job)
        self._times: dict[str, list[float]] = {}
        self.peaks: dict[str, int] = {}  # of torch's ways

    def head(self) -> Iterator[str]:
        """Lines on the plain step and on torch's ways."""
        plain_peak = peak_of(self._job, self._device)
        host_s, device_s = host_and_device_s(self._job, self._device)
        notes = []
        for way in list(self._ways):
            try:
                self.peaks[way] = peak_of(self._job, self._device, self._ways[way].context)
            except Exception as error:  # that torch's checkpoint does not run a model is a result too
                del self._ways[way]
                notes.append(f"| {way} | {_failed(error)} |")
        self._times = in_turns(
            {"plain": self._plain, **self._ways}, self._device, min(2, self._rounds), clock=CLOCKS[self._device]
        )
        plain_ms = 1e3 * statistics.median(self._times["plain"])
        text = f"## {self._name}: plain {plain_ms:.1f} ms, {rows.gib(plain_peak / 2**30)} GiB"
        if host_s:
            limit = "host" if host_s > device_s else "device"
            text += f"; host {1e3 * host_s:.1f} ms, device {1e3 * device_s:.1f} ms: limited by the {limit}"
        yield from ("", text, "", "| torch's | GiB | ms | + % |", "|---|---|---|---|")
        for way in self._ways:
            ms, over = self._timed(self._times, way)
            yield f"| {way} | {rows.gib(self.peaks[way] / 2**30)} | {ms:.1f} | {over:+.1f} |"
        yield from notes

    def rows(self, target: Target) -> Iterator[Row | str]:
        """`fit` at a budget, beside the fastest of torch's ways that hold it; captured too if asked for.

        A row that fails is a line of text.
        """
        job, stages = self._job, Stages()
        job.model.zero_grad(set_to_none=True)  # gradients that are there would count as memory of the step
        free(self._device)
        try:
            with stages.listening():
                handle = lowtide.fit(job.model, job.loss_fn, *job.batch, budget=target.budget, host=target.host)
        except Exception as error:
            yield f"| {target.label} | {rows.gib(target.budget / 2**30)} | fit: {_failed(error)} |"
            return
        try:
            handle.enabled = False
            yield self._row(target, handle, stages)
            if target.is_captured:
                yield from self._captured(target, handle)
        except Exception as error:
            yield f"| {target.label} | {rows.gib(target.budget / 2**30)} | {_failed(error)} |"
        finally:
            handle.remove()
            job.model.zero_grad(set_to_none=True)

    def _row(self, target: Target, handle: Any, stages: Stages) -> Row:
        ours = functools.partial(switched_on, handle)
        peak = peak_of(self._job, self._device, ours)
        with ours():
            for _ in range(NUM_UNTIMED[self._device]):
                self._plain.step()
        kept = next((trial.name for trial in handle.candidates if trial.outcome == "kept"), "the plain step")
        if handle.measured_slowdown is not None:
            kept += f", {100 * handle.measured_slowdown:+.1f} measured by fit"
        return self._compared(target, Way(self._plain.step, ours), peak, 100 * handle.plan.slowdown, str(stages), kept)

    def _captured(self, target: Target, handle: Any) -> Iterator[Row | str]:
        """The fitted step as a CUDA graph."""
        label = f"{target.label}, captured"
        try:
            yield self._graph_row(Target(label, target.budget), handle)
        except lowtide.LowtideError as error:
            yield f"| {label} | {rows.gib(target.budget / 2**30)} | {_failed(error)} |"

    def _graph_row(self, target: Target, handle: Any) -> Row:
        job = self._job
        handle.enabled = True
        job.model.zero_grad(set_to_none=True)
        graph = handle.capture(job.loss_fn, *job.batch, ignore_host_draws=True)
        handle.enabled = False
        try:
            ours = Way(functools.partial(graph, *job.batch), functools.partial(switched_on, handle))
            return self._compared(target, ours, graph.peak_bytes, None, "", f"{len(graph.plan.regions)} regions")
        finally:
            graph.release()

    def _compared(self, target: Target, ours: Way, peak: int, predicted: float | None, fit: str, kept: str) -> Row:
        holding = [way for way in self._ways if self.peaks[way] <= target.budget]
        peer = min(holding or [EVERY_SECOND], key=lambda way: median_over(self._times[way], self._times["plain"]))
        ways = {"plain": self._plain, "peer": self._ways[peer], "ours": ours}
        times = in_turns(ways, self._device, self._rounds, clock=CLOCKS[self._device])
        return Row(
            self._name,
            target.label,
            target.budget / 2**30,
            peer,
            *self._timed(times, "peer"),
            *self._timed(times, "ours"),
            predicted=predicted,
            ours_gib=peak / 2**30,
            holds=peak <= target.budget,
            fit=fit,
            kept=kept,
        )

    @staticmethod
    def _timed(times: dict[str, list[float]], way: str) -> tuple[float, float]:
        """Milliseconds of a step, and percent above the plain steps right before."""
        return 1e3 * statistics.median(times[way]), 100 * median_over(times[way], times["plain"])


def _failed(error: BaseException) -> str:
    text = " ".join(str(error).split()).replace("|", "/")
    return f"failed: {type(error).__name__}: {text[:500]}"


def compare(name: str, options: argparse.Namespace, page: Page) -> Iterator[Row | str]:
    """A family's rows, written to the page as they come."""
    start = time.perf_counter()
    comparison = Comparison(name, options.device, options.rounds)
    TURN.take()
    for line in comparison.head():
        page.add(line)
    page.add("", rows.HEAD, "|" + "---|" * (rows.HEAD.count("|") - 1))
    targets = targets_of(comparison.peaks, options.device)
    targets = [each for each in targets if options.only is None or each.label in options.only][: options.targets]
    for number, target in enumerate(targets):
        seconds = time.perf_counter() - start
        if options.seconds is not None and seconds > options.seconds:
            page.add("", f"Stopped after {seconds:.0f} s, with {number} of {len(targets)} budgets.")
            return
        for row in comparison.rows(target):
            page.add(str(row))
            yield row
    page.add("", f"All {len(targets)} budgets in {time.perf_counter() - start:.0f} s.")


def run(options: argparse.Namespace, page: Page) -> None:
    found: list[Row | str] = []
    for name in options.families:
        try:
            for row in compare(name, options, page):
                found.append(row)
        except Exception as error:  # one family must not cost the others their rows
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
        f"between the first two of them. The plain step, the fastest of torch's ways that hold the budget, and ours "
        f"run in turns, {NUM_IN_A_ROW} steps in a row, {options.rounds} rounds; `+ %` is over the plain steps right "
        "before, in the median. Kept: the candidate that `fit` chose.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--families", nargs="*", default=list(families.FAMILIES), choices=list(families.FAMILIES))
    parser.add_argument("--targets", type=int, help="budgets for each family; all by default")
    parser.add_argument("--only", nargs="*", help="budgets by their labels in the table")
    parser.add_argument("--seconds", type=float, help="for each family, after which no further budget is begun")
    parser.add_argument("--rounds", type=int, default=4, help="of turns, at each budget")
    parser.add_argument("--join", nargs="*", type=Path, help="measure nothing: join these pages, newest versions last")
    parser.add_argument("--suffix", default="", help="of the name of the page")
    parser.add_argument("--out", type=Path, default=RESULTS)
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
