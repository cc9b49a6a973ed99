"""What `lowtide bench` measures: a plain step, torch's checkpoint on each block, and `lowtide.fit`, on one model."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.cli.output import UsageError
from lowtide.cli.script import Job

PLAIN, PER_BLOCK, OURS = "plain", "torch checkpoint per block", "lowtide.fit"
_SEED = 0

Way = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class BenchRow:
    """One way to run the step. Peaks (of the whole step) and seconds are measured; None where it did not run.

    `gradient_difference` is the largest of any entry against the first way that ran; that one's own is against itself
    run again, which is more than 0 where kernels are not deterministic. `problem` says why nothing was measured.
    """

    name: str
    peak_bytes: int | None = None
    step_s: float | None = None
    gradient_difference: float | None = None
    problem: str = ""


@dataclass(frozen=True)
class Comparison:
    rows: tuple[BenchRow, ...]
    plan: lowtide.Plan
    budget_bytes: int

    @property
    def holds(self) -> bool:
        """Whether ours kept its promise: the measured peak within the budget, and the same gradients.

        Gradients are excused where the plan compresses, and where the same step run twice does not give the same.
        """
        ours = next(row for row in self.rows if row.name == OURS)
        if ours.peak_bytes is None or ours.peak_bytes > self.budget_bytes:
            return False
        reference = next(row for row in self.rows if row.gradient_difference is not None)
        is_excused = any(move.codec for move in self.plan.moves) or reference.gradient_difference != 0
        return ours.gradient_difference == 0 or is_excused

    def slowdown(self, row: BenchRow) -> float | None:
        """Over the plain step, less one."""
        plain_s = self.rows[0].step_s
        return None if plain_s is None or row.step_s is None else row.step_s / plain_s - 1


def compare(
    job: Job, budget: int | str, rounds: int, options: dict[str, Any], stage: Callable[[str], None]
) -> Comparison:
    """Run the job's step in each of the ways, one after another, on the same batch and random numbers.

    Raises `InfeasibleBudgetError` before anything is compared where no plan fits.
    """
    _device_of(job)  # before minutes of work, not after
    stage("fitting the model into the budget")
    handle = lowtide.fit(job.model, job.loss_fn, *job.args, budget=budget, optimizer=job.optimizer, **options)
    plan = handle.plan
    handle.remove()
    bench = _ModelBench(job, plan, rounds)
    ways: dict[str, Way] = {
        PLAIN: contextlib.nullcontext,
        PER_BLOCK: functools.partial(_torch_checkpoints, job.model),
        OURS: functools.partial(lowtide.apply, job.model, plan),
    }
    rows = {}
    for name, way in ways.items():
        stage(f"measuring: {name}")
        rows[name] = bench.row(name, way)
    stage("taking times in turns")
    times = bench.times({name: way for name, way in ways.items() if not rows[name].problem})
    timed = [replace(row, step_s=times.get(name)) for name, row in rows.items()]
    return Comparison(tuple(timed), plan, plan.budget_bytes)


def measure_plan(job: Job, plan: lowtide.Plan, rounds: int = 3) -> BenchRow:
    """What a plan takes on the job's model, measured. Raises where the plan is for another model."""
    bench = _ModelBench(job, plan, rounds)
    way = functools.partial(lowtide.apply, job.model, plan)
    row = bench.row(OURS, way)
    return row if row.problem else replace(row, step_s=bench.times({OURS: way})[OURS])


class _ModelBench:
    """Measures one model again and again from the same state."""

    def __init__(self, job: Job, plan: lowtide.Plan, rounds: int) -> None:
        self._job, self._rounds = job, rounds
        self._device = _device_of(job)
        self._absent_bytes = _absent_bytes(job, plan.graph or job.trace(), self._device)
        # On the host, where they do not count.
        self._buffers = [buffer.detach().to("cpu", copy=True) for buffer in job.model.buffers()]
        self._first: list[Tensor] | None = None

    def row(self, name: str, way: Way) -> BenchRow:
        """Peak and gradients, or the reason why there are none."""
        try:
            with way():
                return self._measured(name)
        except torch.OutOfMemoryError:
            return BenchRow(name, problem="out of memory")
        except _NoBlocks as error:
            return BenchRow(name, problem=str(error))
        finally:
            self._start_over()

    def times(self, ways: dict[str, Way]) -> dict[str, float]:
        """Median seconds of a step in each way. They take turns, so that a busy machine slows all alike."""
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(self._rounds):
            for name, way in ways.items():
                with way():
                    self._timed_step()  # the first step in a way is not like the others
                    found[name].append(self._timed_step())
        self._start_over()
        return {name: median(seconds) for name, seconds in found.items()}

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
        """No gradients, the first buffers, the first random numbers."""
        self._job.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, first in zip(self._job.model.buffers(), self._buffers, strict=True):
                buffer.copy_(first)
        torch.manual_seed(_SEED)

    def _gradients(self) -> list[Tensor]:
        """Those of one step, copied to the host; zeros for a parameter that gets none."""
        self._start_over()
        self._step()
        found = [(p if p.grad is None else p.grad, p.grad is None) for p in self._job.model.parameters()]
        return [torch.zeros(g.shape) if is_none else g.detach().to_dense().to("cpu", copy=True) for g, is_none in found]


def _apart(one: Tensor, other: Tensor) -> float:
    """The largest difference of two tensors, in which NaN equals NaN and nothing else."""
    differs = (one != other) & ~(one.isnan() & other.isnan())
    if not differs.any():
        return 0.0
    difference = (one[differs].double() - other[differs].double()).abs()
    return float(difference.nan_to_num(nan=torch.inf).max())


def _device_of(job: Job) -> torch.device:
    devices = {parameter.device for parameter in job.model.parameters()}
    found = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
    if found.type == "meta":
        raise UsageError("the model is on the meta device, where nothing can be measured: let the script make it real")
    return found


def _absent_bytes(job: Job, graph: lowtide.StepGraph, device: torch.device) -> int:
    """What belongs to the step's peak and is not in what `lowtide.measure` sees.

    On the CPU that is all that was there before; elsewhere the optimizer's state as far as it is still to come.
    """
    if device.type == "cpu":
        return sum(size for kind, size in graph.static_bytes.items() if kind not in ("gradients", "other"))
    states = job.optimizer.state.values() if job.optimizer is not None else ()
    present = sum(t.nbytes for state in states for t in state.values() if isinstance(t, Tensor) and t.device == device)
    return max(0, graph.optimizer_state_bytes - present)


class _NoBlocks(Exception):
    """A model that has nothing to put a checkpoint per block on."""


@contextlib.contextmanager
def _torch_checkpoints(model: torch.nn.Module) -> Iterator[None]:
    """torch's own checkpoint on each repeated block."""
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
