"""Recovers from running out of memory in `handle.step`.

A plan's peak counts bytes that tensors ask for. Fragmentation of the allocator and memory of other processes are not
part of it, so a planned step can still run out of memory. `Stepper`, behind `AppliedPlan.step`, then restores
gradients, buffers and random states, makes a plan with a smaller peak, and runs the same batch again. The smaller plan
stays.
"""

from __future__ import annotations

import functools
import gc
import logging
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowtide import _compat
from lowtide.distributed.data_parallel import wrappers_of
from lowtide.distributed.ranks import is_out_of_memory
from lowtide.eager.handle import AppliedStats
from lowtide.eager.replanning import (
    Limits,
    PlannedInputs,
    Planner,
    Replan,
    Shapes,
    recorded_input_shapes,
    rounded_up,
    shapes_of,
)
from lowtide.simulator.timeline import simulate
from lowtide.snapshot import SnapshotBuffers, StepUndo
from lowtide.split.split_forward import splitting
from lowtide.tracing.trace import trace
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.eager.plan_handle import AppliedPlan

logger = logging.getLogger("lowtide")

# After each failure: the new budget, as a share of the way from the smallest possible peak up to the failed plan's.
# Smaller steps down keep more speed, and run the batch more often.
_TIGHTENINGS = (0.6, 0.3, 0.0)


@dataclass(frozen=True)
class OutOfMemory:
    """A step that ran out of memory, and the plan that its batch ran with next. Peaks are predicted.

    `when_s` is in seconds since the epoch; `step` is the number of the call of `step()`, from 0. `allocated_bytes` is
    the allocator's peak at that time; None on the CPU.
    """

    step: int
    when_s: float
    budget_before_bytes: int
    budget_after_bytes: int
    peak_before_bytes: int
    peak_after_bytes: int
    allocated_bytes: int | None
    error: str


@dataclass(frozen=True)
class SplitStats:
    """A module that runs in parts: its calls so far, and in how many of them its whole output was computed after all.

    That happens where something other than a loss reads the logits.
    """

    path: str
    num_parts: int
    num_calls: int
    num_whole: int


@dataclass(frozen=True)
class PlanStats(AppliedStats):
    """What an applied plan did so far, with the plans made for larger inputs and after running out of memory."""

    replans: tuple[Replan, ...] = ()
    out_of_memory: tuple[OutOfMemory, ...] = ()
    splits: tuple[SplitStats, ...] = ()

    def __str__(self) -> str:
        text = super().__str__()
        if self.splits:
            whole = sum(split.num_whole for split in self.splits)
            text += f"; {len(self.splits)} modules in parts{f', {whole} times in full after all' if whole else ''}"
        if self.replans:
            text += f"; planned again {len(self.replans)} times for larger inputs"
        if self.out_of_memory:
            last = self.out_of_memory[-1]
            text += (
                f"; out of memory {len(self.out_of_memory)} times, budget now {format_bytes(last.budget_after_bytes)}"
            )
        return text


class Stepper:
    """Runs steps for a handle, and repeats those that run out of memory."""

    hidden_from_replay = True

    def __init__(self, handle: AppliedPlan) -> None:
        self.events: list[OutOfMemory] = []
        self._handle = handle
        self._buffers = SnapshotBuffers()
        self._num_steps = 0
        self._in_backward = False

    def step(self, loss_fn: Callable[..., Tensor], args: tuple[Any, ...]) -> Tensor:
        """See `AppliedPlan.step`."""
        number, self._num_steps = self._num_steps, self._num_steps + 1
        if self._handle.enabled:
            self.cover(loss_fn, args)
        undo = StepUndo(self._handle.model, loss_fn, args, self._buffers)
        first: BaseException | None = None
        tried: list[str] = []
        while True:
            try:
                loss = self._run(number, functools.partial(self._step, loss_fn, args, undo))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                traceback.clear_frames(error.__traceback__)  # the frames hold tensors of the failed step
                first = first or error
            else:
                undo.done()
                return loss
            why_not = self._why_not_again(undo)
            undo.restore()
            allocated = _allocated_bytes()
            give_back_memory()
            if why_not is None and not self._handle.enabled:
                why_not = "the plan is switched off"
            if why_not is None:
                why_not = self._tighten(loss_fn, args, number, str(first), allocated, len(tried))
            if why_not is not None:
                _add_note(first, tried, why_not)
                raise first
            tried.append(format_bytes(self.events[-1].peak_after_bytes))

    def _step(self, loss_fn: Callable[..., Tensor], args: tuple[Any, ...], undo: StepUndo) -> Tensor:
        """Forward and backward. If one of them fails on any rank, it raises on all before the next collective."""
        ranks, self._in_backward = self._handle.ranks, False
        self._handle.begin_step()
        with ranks.together("forward"):
            loss = loss_fn(*args)
            if not isinstance(loss, Tensor):
                raise TypeError(f"loss_fn returned {type(loss).__name__}, not a tensor: let it return the loss")
        undo.before_backward()
        self._in_backward = True
        with ranks.together("backward"):
            loss.backward()
        return loss.detach()

    def _why_not_again(self, undo: StepUndo) -> str | None:
        """Why this step cannot run again, on this or another rank; None if it can."""
        reason = undo.what_cannot_be_restored()
        if self._handle.ranks.is_alone:
            return reason or _why_not_in_job()
        if reason is None and self._in_backward and wrappers_of(self._handle.model):
            reason = "DistributedDataParallel cannot start over after a backward that failed"
        return next(filter(None, self._handle.ranks.gathered(reason, "whether the step can run again")), None)

    def _run(self, number: int, run: Callable[[], Tensor]) -> Tensor:
        watch = self._handle.watch if self._handle.enabled else None
        if watch is None:
            return run()
        if not self._handle.num_patched:  # no forward calls the watch
            watch.forward_begins()
        return watch.run_step(number, run)

    def cover(self, loss_fn: Callable[..., Tensor], args: tuple[Any, ...]) -> None:
        """See `AppliedPlan.cover`."""
        self.plan_for_larger(loss_fn, args)
        planned = self._handle.shapes.for_arguments(self._common_shapes(args))
        if planned is not None:
            self._handle.use(planned)  # used where the model's own input shapes do not select a plan

    def plan_for_larger(self, loss_fn: Callable[..., Tensor], args: tuple[Any, ...]) -> None:
        """If the batch is larger than any plan covers, trace the whole step and add a plan that covers it."""
        shapes, seen = self._handle.shapes, self._common_shapes(args)
        planner = shapes.planner
        if planner is None or not any(p.arguments for p in shapes.all) or shapes.for_arguments(seen) is not None:
            return
        start, largest = time.perf_counter(), shapes.largest()
        known = largest.arguments[-1] if largest.arguments else seen
        try:
            with self._handle.disabled(), self._handle.ranks.together("plan for a larger batch"):
                plan, graph, target, inputs = planner.for_arguments(rounded_up(seen, known), seen, loss_fn, args)
                planned = PlannedInputs(plan, self._handle.take_in(plan), tuple(inputs), (target,), graph)
        except Exception as error:  # if something is wrong with the batch, the step itself will raise
            logger.warning("a larger batch could not be planned for: %s: %s", type(error).__name__, error)
            shapes.become([*shapes.all, replace(largest, arguments=(seen,))])
            return
        shapes.add(planned, seen, known, target, time.perf_counter() - start)

    def _common_shapes(self, args: tuple[Any, ...]) -> Shapes:
        """The shapes of `loss_fn`'s arguments: in each position the largest of all ranks.

        If the ranks have different tensors, the lowest rank's: then plans are not selected by shapes of their own.
        """
        of_ranks = self._handle.ranks.gathered(shapes_of(args), "shapes of the batch")
        if len({tuple(map(len, shapes)) for shapes in of_ranks}) > 1:
            return of_ranks[0]
        return tuple(tuple(map(max, zip(*same, strict=True))) for same in zip(*of_ranks, strict=True))

    def _tighten(
        self, loss_fn: Any, args: tuple[Any, ...], step: int, error: str, allocated: int | None, num_tried: int
    ) -> str | None:
        """Use a plan with a smaller peak for this batch. Returns why that is not possible, or None."""
        try:
            planner, planned = self.planned_with_graph(loss_fn, args)
        except Exception as cause:
            return f"the step cannot be planned: {type(cause).__name__}: {str(cause)[:200]}"
        assert planned.graph is not None
        before, budget_before = planned.plan.peak_bytes, planner.budget_bytes
        tightest = planner.solve_or_tightest(planned.graph, 1)
        if before <= tightest.peak_bytes:
            return "no plan has a smaller peak"
        for share in _TIGHTENINGS[num_tried:]:
            budget = tightest.peak_bytes + int(share * (before - 1 - tightest.peak_bytes))
            if planner.solve(planned.graph, budget).peak_bytes < before:
                break
        else:
            budget = tightest.peak_bytes
        planner.budget_bytes = budget
        shapes = self._handle.shapes
        shapes.become([self._tightened(planner, each) for each in shapes.all])
        after = shapes.for_arguments(self._common_shapes(args)) or shapes.largest()
        self._handle.use(after)
        now = after.plan.peak_bytes
        self.events.append(
            OutOfMemory(step, time.time(), budget_before, budget, before, now, allocated, error.splitlines()[0][:300])
        )
        logger.warning(
            "step %d ran out of memory under a plan with a predicted peak of %s: the batch runs again with %s, %.1f %% "
            "slower than plain (predicted); budget %s, was %s",
            step,
            format_bytes(before),
            format_bytes(now),
            100 * after.plan.slowdown,
            format_bytes(budget),
            format_bytes(budget_before),
        )
        return None

    def _tightened(self, planner: Planner, planned: PlannedInputs) -> PlannedInputs:
        if planned.graph is None or planned.plan.peak_bytes <= planner.budget_bytes:
            return planned
        return self._handle.replanned(planned, planner.solve_or_tightest(planned.graph, planner.budget_bytes))

    def planned_with_graph(self, loss_fn: Any, args: tuple[Any, ...]) -> tuple[Planner, PlannedInputs]:
        """The plan for this batch and its graph. Without a graph, the step is traced on fake tensors."""
        shapes, seen = self._handle.shapes, self._common_shapes(args)
        current = shapes.for_arguments(seen) or shapes.largest()
        if shapes.planner is not None and current.graph is not None:
            return shapes.planner, current
        model, splits = self._handle.model, current.plan.splits
        with self._handle.disabled(), recorded_input_shapes(model) as inputs, splitting(model, splits):
            graph = replace(trace(model, loss_fn, *args, mode="fake"), splits=splits)
        peak = simulate(graph, current.plan).peak_bytes
        plan = replace(current.plan, peak_bytes=peak, budget_bytes=max(peak, current.plan.budget_bytes))
        widest: Shapes = inputs[-1] if inputs else ()
        planned = replace(current, plan=plan, graph=graph, arguments=(seen,), inputs=tuple(inputs))
        shapes.planner = Planner(
            self._handle.model,
            graph,
            widest,
            budget_bytes=plan.budget_bytes,
            limits=Limits(),
            correction_bytes=0,
            optimizer=None,
            splits=splits,
        )
        shapes.become([planned])
        return shapes.planner, planned


def _why_not_in_job() -> str | None:
    """Why a step cannot run again in a distributed job: other processes would wait in collectives. None otherwise."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return "other processes take part in the step, and cannot be made to start over with this one"
    return None


def _allocated_bytes() -> int | None:
    device = _compat.accelerator()
    return None if device is None else torch.accelerator.max_memory_allocated(device)


def give_back_memory() -> None:
    gc.collect()  # the failed step's autograd graph may be in reference cycles
    if _compat.accelerator() is not None:
        torch.accelerator.empty_cache()


def _add_note(error: BaseException, tried: list[str], why_not: str) -> None:
    runs = f"ran again under plans with predicted peaks of {', '.join(tried)}" if tried else "did not run again"
    note = f"lowtide: the step {runs}; {why_not}. Gradients, buffers and random states are as before the step."
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # Python 3.10
        error.args = (f"{error}\n{note}", *error.args[1:])
