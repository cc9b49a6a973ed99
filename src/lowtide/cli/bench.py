"""`lowtide bench`: measure a plain step, torch's checkpoint on each block, and `lowtide.fit`, on the user's own model.

`compare` measures the peak and the gradients of each variant from the same state and seed, then times all of them in
turns, so that a busy machine affects them alike. `measure_plan` does the same for one plan, for
`lowtide report --measured`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.cli.output import Display, UsageError
from lowtide.cli.script import Job
from lowtide.units import format_bytes, format_seconds

PLAIN, PER_BLOCK, OURS = "plain", "torch checkpoint per block", "lowtide.fit"
_SEED = 0

Variant = Callable[[], AbstractContextManager[Any]]  # opens a context in which the model runs in that way


@dataclass(frozen=True)
class BenchRow:
    """One variant of the step. Peak (of the whole step) and seconds are measured; None if it did not run.

    `gradient_difference` is the largest absolute difference of any entry from the first variant that ran. For that one
    it is the difference from a second run, which is above 0 if kernels are not deterministic. `problem` says why
    nothing was measured.
    """

    name: str
    peak_bytes: int | None = None
    step_s: float | None = None
    gradient_difference: float | None = None
    problem: str = ""


@dataclass(frozen=True)
class Comparison:
    """Measurements of all variants, the plan of `lowtide.fit`, and the budget."""

    rows: tuple[BenchRow, ...]
    plan: lowtide.Plan
    budget_bytes: int

    @property
    def holds(self) -> bool:
        """Whether the measured peak of `lowtide.fit` is within the budget, with the same gradients.

        Gradients may differ if the plan compresses or splits, or if the same step run twice gives different gradients.
        """
        ours = next(row for row in self.rows if row.name == OURS)
        if ours.peak_bytes is None or ours.peak_bytes > self.budget_bytes:
            return False
        reference = next(row for row in self.rows if row.gradient_difference is not None)
        is_excused = (
            any(move.codec for move in self.plan.moves) or bool(self.plan.splits) or reference.gradient_difference != 0
        )
        return ours.gradient_difference == 0 or is_excused

    def slowdown(self, row: BenchRow) -> float | None:
        """Return a row's time over that of the plain step, minus 1."""
        plain_s = self.rows[0].step_s
        return None if plain_s is None or row.step_s is None else row.step_s / plain_s - 1

    def display(self) -> Display:
        """Return a table and data of the measurements."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("measured")
        for heading in ("peak", "step", "slower", "gradient difference"):
            table.add_column(heading, justify="right", no_wrap=True)
        rows = []
        for row in self.rows:
            slower = self.slowdown(row)
            apart = row.gradient_difference
            is_odd = apart is not None and not math.isfinite(apart)  # JSON has no infinity
            rows.append({**asdict(row), "gradient_difference": str(apart) if is_odd else apart, "slowdown": slower})
            if row.problem or row.peak_bytes is None or row.step_s is None:
                table.add_row(row.name, row.problem, "", "", "")
                continue
            percent = "" if slower is None else f"{100 * slower:+.1f} %"
            table.add_row(row.name, format_bytes(row.peak_bytes), format_seconds(row.step_s), percent, f"{apart:g}")
        verdict = Text(f"budget {format_bytes(self.budget_bytes)}: ", style="bold")
        verdict.append(
            "held, with the same gradients" if self.holds else "did not hold", "green" if self.holds else "red"
        )
        data = {
            "holds": self.holds,
            "budget_bytes": self.budget_bytes,
            "rows": rows,
            "predicted_slowdown": self.plan.slowdown,
        }
        return Group(table, verdict), data


def compare(
    job: Job, budget: int | str, rounds: int, options: dict[str, Any], stage: Callable[[str], None]
) -> Comparison:
    """Run the job's step in each variant, on the same batch and random numbers.

    Raises `InfeasibleBudgetError` before anything is compared if no plan fits.
    """
    _device_of(job)  # raises for a model on the meta device, before minutes of work
    stage("fitting the model into the budget")
    handle = lowtide.fit(job.model, job.loss_fn, *job.args, budget=budget, optimizer=job.optimizer, **options)
    plan = handle.plan
    handle.remove()
    bench = _ModelBench(job, plan, rounds)
    variants: dict[str, Variant] = {
        PLAIN: contextlib.nullcontext,
        PER_BLOCK: functools.partial(_torch_checkpoints, job.model),
        OURS: functools.partial(lowtide.apply, job.model, plan),
    }
    rows = {}
    for name, variant in variants.items():
        stage(f"measuring: {name}")
        rows[name] = bench.row(name, variant)
    stage("taking times in turns")
    times = bench.times({name: variant for name, variant in variants.items() if not rows[name].problem})
    timed = [replace(row, step_s=times.get(name)) for name, row in rows.items()]
    return Comparison(tuple(timed), plan, plan.budget_bytes)


def measure_plan(job: Job, plan: lowtide.Plan) -> BenchRow:
    """Measure a step of the job's model with a plan. Raises `PlanError` if the plan is for another model."""
    bench = _ModelBench(job, plan, rounds=3)
    variant = functools.partial(lowtide.apply, job.model, plan)
    row = bench.row(OURS, variant)
    return row if row.problem else replace(row, step_s=bench.times({OURS: variant})[OURS])


class _ModelBench:
    """Measures one model repeatedly, each time from the same buffers and seed."""

    def __init__(self, job: Job, plan: lowtide.Plan, rounds: int) -> None:
        self._job, self._rounds = job, rounds
        self._device = _device_of(job)
        self._absent_bytes = _absent_bytes(job, plan.graph or job.trace(), self._device)
        # Copied to the host, so that they are not part of the measured peak.
        self._buffers = [buffer.detach().to("cpu", copy=True) for buffer in job.model.buffers()]
        self._first: list[Tensor] | None = None

    def row(self, name: str, variant: Variant) -> BenchRow:
        """Measure peak and gradients; if that fails, return the reason."""
        try:
            with variant():
                return self._measured(name)
        except torch.OutOfMemoryError:
            return BenchRow(name, problem="out of memory")
        except _NoBlocks as error:
            return BenchRow(name, problem=str(error))
        finally:
            self._start_over()

    def times(self, variants: dict[str, Variant]) -> dict[str, float]:
        """Return the median seconds of a step for each variant, timed in turns."""
        times: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(self._rounds):
            for name, variant in variants.items():
                with variant():
                    self._timed_step()  # warm-up
                    times[name].append(self._timed_step())
        self._start_over()
        return {name: median(seconds) for name, seconds in times.items()}

    def _measured(self, name: str) -> BenchRow:
        if self._first is None:
            self._first = self._gradients()
        pairs = zip(self._gradients(), self._first, strict=True)
        difference = max((_apart(one, other) for one, other in pairs), default=0.0)
        self._start_over()
        peak = lowtide.measure(self._step, device=self._device).total_peak_bytes
        return BenchRow(name, peak + self._absent_bytes, gradient_difference=difference)

    def _step(self) -> None:
        self._job.loss_fn(*self._job.args).backward()

    def _timed_step(self) -> float:
        self._job.model.zero_grad(set_to_none=True)
        self._synchronize()
        start = time.perf_counter()
        self._step()
        self._synchronize()
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def _start_over(self) -> None:
        """Clear gradients, restore buffers and seed the random number generators."""
        self._job.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, first in zip(self._job.model.buffers(), self._buffers, strict=True):
                buffer.copy_(first)
        torch.manual_seed(_SEED)

    def _gradients(self) -> list[Tensor]:
        """Run one step and return its gradients on the host; zeros for parameters without one."""
        self._start_over()
        self._step()
        pairs = [(p if p.grad is None else p.grad, p.grad is None) for p in self._job.model.parameters()]
        return [torch.zeros(g.shape) if is_none else g.detach().to_dense().to("cpu", copy=True) for g, is_none in pairs]


def _apart(one: Tensor, other: Tensor) -> float:
    """Return the largest absolute difference of two tensors; NaN equals NaN and differs from everything else."""
    differs = (one != other) & ~(one.isnan() & other.isnan())
    if not differs.any():
        return 0.0
    difference = (one[differs].double() - other[differs].double()).abs()
    return float(difference.nan_to_num(nan=torch.inf).max())


def _device_of(job: Job) -> torch.device:
    devices = {parameter.device for parameter in job.model.parameters()}
    device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
    if device.type == "meta":
        raise UsageError("the model is on the meta device, where nothing can be measured: create it on a real device")
    return device


def _absent_bytes(job: Job, graph: lowtide.StepGraph, device: torch.device) -> int:
    """Return the bytes that belong to the step's peak and that `lowtide.measure` does not count.

    On the CPU, everything allocated before the step; elsewhere, optimizer state that does not exist yet.
    """
    if device.type == "cpu":
        return sum(size for kind, size in graph.static_bytes.items() if kind not in ("gradients", "other"))
    states = job.optimizer.state.values() if job.optimizer is not None else ()
    present = sum(t.nbytes for state in states for t in state.values() if isinstance(t, Tensor) and t.device == device)
    return max(0, graph.optimizer_state_bytes - present)


class _NoBlocks(Exception):
    """The model has no repeated blocks to checkpoint."""


@contextlib.contextmanager
def _torch_checkpoints(model: torch.nn.Module) -> Iterator[None]:
    """A context in which torch's own checkpoint wraps each repeated block."""
    try:
        with lowtide.apply(model, lowtide.RecomputeAll()) as handle:
            names = [region.name for region in handle.stats().regions]
    except ValueError:
        raise _NoBlocks("no repeated blocks") from None
    blocks = [model.get_submodule(name) for name in names]
    patched = [block for block in blocks if "forward" not in vars(block)]
    for block in patched:
        block.forward = functools.partial(checkpoint, type(block).forward, block, use_reentrant=False)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for block in patched:
            del block.forward
