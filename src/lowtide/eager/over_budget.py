"""Steps that exceed their budget: `BudgetWatch` warns of them, and `Stepper` recovers if one runs out of memory.

A plan counts only what was there when it was made. Parameters unfrozen later, gradients that accumulate over several
backwards, an optimizer that `fit` was not given or experts that the trace did not use add memory. `BudgetWatch`, which
`fit` puts on its handle, checks the memory at the start of a forward: after 1, 2, 4, ... forwards, and from 128 on
after every 128th. It warns once.

- On an accelerator it reads the allocator's peak. It resets that peak when the handle is made and after a capture, and
  never between training steps. A peak above the budget counts only if it changed since the last check, so that peaks
  of steps that ran with the plan switched off do not.
- On the CPU there is no allocator peak. It compares parameters, gradients and optimizer state with those planned for.
  In addition, `handle.step` measures its 2nd, 16th, 128th, ... step with torch.profiler, unless a profiler is running.
  (A profiler that stays open between forwards would see every step, but the user could not start another one.)

A plan's peak counts bytes that tensors ask for. Fragmentation of the allocator and memory of other processes are not
part of it, so a planned step can still run out of memory. `Stepper`, behind `handle.step`, then restores gradients,
buffers and random states, makes a plan with a smaller peak, and runs the same batch again. The smaller plan stays.
"""

from __future__ import annotations

import functools
import gc
import logging
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowtide import _compat
from lowtide._compat.profiler import cpu_allocation_totals
from lowtide.distributed.data_parallel import wrappers_of
from lowtide.distributed.ranks import is_out_of_memory
from lowtide.eager.replanning import (
    Limits,
    PlannedInputs,
    Planner,
    Shapes,
    recorded_input_shapes,
    rounded_up,
    shapes_of,
)
from lowtide.graph.step_graph import StepGraph
from lowtide.plans.step_plan import Plan
from lowtide.simulator.timeline import KINDS, simulate
from lowtide.snapshot import SnapshotBuffers, StepUndo
from lowtide.split.split_forward import splitting
from lowtide.tracing.trace import trace
from lowtide.tracing.untraced_memory import state_bytes_of
from lowtide.units import format_apart, format_bytes

if TYPE_CHECKING:
    from lowtide.eager.plan_handle import AppliedPlan

logger = logging.getLogger("lowtide")

_LONGEST_PAUSE = 128  # forwards between two checks, each of which takes tens of microseconds
_PROFILED_EVERY = 8  # factor between the numbers of profiled steps on the CPU, which take several times as long


class BudgetWatch:
    """Warns once when a fitted model needs more than `budget_bytes`. Create it after the plan was applied."""

    def __init__(
        self,
        handle: AppliedPlan,
        device: torch.device,
        budget_bytes: int,
        graph: StepGraph,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self._handle, self._device, self.budget_bytes = handle, device, budget_bytes
        self._planned_states, self._static = graph.optimizer_state_bytes, graph.bytes_before
        self.optimizer_workspace_bytes = graph.optimizer_workspace_bytes
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._planned_parameters, self._planned_gradients = _model_bytes(handle.model, device)
        self._planned_existing = _existing_gradient_bytes(handle.model, device)
        self._existing = 0  # gradients that a checked forward began with, beyond those planned for
        self._has_warned = False
        self._num_forwards = 0
        self._next = 1
        self._next_profiled = 2
        self._reset_peak()
        self._last_peak = self._read_peak()
        self._ran_without = self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager in which steps are not checked, such as warm-ups that allocate workspaces of libraries."""
        self._is_paused = True
        try:
            yield
        finally:
            self._reset_peak()
            self._is_paused, self._ran_without = False, True

    def forward_without_plan(self) -> None:
        """Call when the model runs with the handle switched off: peaks so far are ignored."""
        self._ran_without = True

    def forward_begins(self) -> None:
        """Call before each training forward. Checks the memory of earlier steps when a check is due."""
        if self._is_paused:
            return
        if self._ran_without:
            self._ran_without, self._last_peak = False, self._read_peak()
        self._num_forwards += 1
        if self._num_forwards < self._next or self._has_warned:
            return
        self._note_existing_gradients()  # in two forwards in a row: every second one may follow a zero_grad()
        if self._num_forwards == self._next:
            return
        self._next = min(2 * self._next, self._next + _LONGEST_PAUSE)
        if self._device.type == "cpu":
            self._count()
            return
        peak, before = self._read_peak(), self._last_peak
        self._last_peak = peak
        if peak > self._limit and peak != before:
            self._warn("a peak of {} was reached", peak, self._growth())

    def missing_state_bytes(self) -> int:
        """Planned bytes of optimizer state that are not allocated yet, before the optimizer's first step."""
        return max(0, self._planned_states - self._state_bytes())

    def _state_bytes(self) -> int:
        """Bytes of state that optimizers hold for the model's parameters now."""
        # That given to `fit` may be hidden by the user's `gc.freeze()`, others may have been made after the handle.
        given = None if self._optimizer is None else self._optimizer()
        return state_bytes_of(self._handle.model, self._device, given)

    def run_step(self, number: int, step: Callable[[], Tensor]) -> Tensor:
        """Run `step`, a forward and a backward. On the CPU some of these steps are measured."""
        is_due = number + 1 >= self._next_profiled and self._device.type == "cpu"
        if not is_due or self._has_warned or _compat.profiler_is_active():
            return step()
        self._next_profiled = _PROFILED_EVERY * (number + 1)
        losses: list[Tensor] = []
        self._note_existing_gradients()
        present = _existing_gradient_bytes(self._handle.model, self._device)
        totals = cpu_allocation_totals(lambda: losses.append(step()))
        growth = self._growth()
        there = sum(size for name, size in growth.items() if name not in _GRADIENTS)  # those are in `present`
        peak = max([0, *totals]) + self._static + present + there
        if peak > self._limit:
            self._warn("a peak of {} was measured", peak, growth)
        return losses[0]

    @property
    def _limit(self) -> int:
        """The budget, or the peak of a plan for larger inputs above it, which was logged when it was made."""
        return max([self.budget_bytes, *(planned.plan.peak_bytes for planned in self._handle.shapes.all)])

    def _reset_peak(self) -> None:
        """Forget the peaks of steps that this library has run itself: later ones below them would not be seen."""
        if self._device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self._device)

    def _read_peak(self) -> int:
        return 0 if self._device.type == "cpu" else torch.accelerator.max_memory_allocated(self._device)

    def _count(self) -> None:
        """On the CPU: warn if new memory exceeds the budget, or if parameters were unfrozen."""
        growth = self._growth()
        plan = self._handle.plan
        expected = (self._handle.measured_peak_bytes or plan.peak_bytes) + sum(growth.values())
        if _EXISTING in growth:  # at the end of a step all gradients exist anyway
            expected += _added_by_existing_gradients(plan, growth[_EXISTING]) - growth[_EXISTING]
        if growth and expected > self._limit:
            self._warn("the step needs {} or more", expected, growth)
        elif _TRAINABLE in growth:  # their gradients need activations that the plan does not count
            self._warn("the step needs {} and more activations than planned for", expected, growth)

    def _note_existing_gradients(self) -> None:
        existing = _existing_gradient_bytes(self._handle.model, self._device)
        self._existing = max(self._existing, existing - self._planned_existing)

    def _growth(self) -> dict[str, int]:
        """Bytes on the device that were not planned for, by kind."""
        parameters, gradients = _model_bytes(self._handle.model, self._device)
        states = self._state_bytes()
        growth = {
            "new parameters": parameters - self._planned_parameters,
            _TRAINABLE: gradients - self._planned_gradients,
            _EXISTING: self._existing,
            "optimizer state": states - self._planned_states,
        }
        return {name: size for name, size in growth.items() if size > 0}

    def _warn(self, observed: str, num_bytes: int, growth: dict[str, int]) -> None:
        if self._has_warned:  # by the forward of this step
            return
        self._has_warned = True
        budget, needed = format_apart(self.budget_bytes, num_bytes)
        grown = ", ".join(f"{format_bytes(size)} of {name}" for name, size in growth.items())
        why = f"not planned for: {grown}" if grown else (
            "no parameter, gradient or optimizer state is new: the step takes another path than the one traced (other "
            "experts, longer loops), or the process holds other tensors"
        )  # fmt: skip
        cure = "handle.refit(optimizer=...)" if "optimizer state" in growth else "handle.refit()"
        if _EXISTING in growth:
            cure += ", called while these gradients exist,"
        logger.warning(
            "the budget of %s may no longer hold: %s (%s). %s plans anew.",
            budget,
            observed.format(needed),
            why,
            cure,
        )


_TRAINABLE = "gradients of parameters that were frozen"
_EXISTING = "gradients of an earlier backward, which exist throughout the step"
_GRADIENTS = (_TRAINABLE, _EXISTING)


def _model_bytes(model: nn.Module, device: torch.device) -> tuple[int, int]:
    """Bytes of a model's parameters, and of the gradients that they will have."""
    here = [parameter for parameter in model.parameters() if parameter.device == device]
    if _compat.gathered_units(model):  # some may be gathered now
        here = [parameter for parameter in here if _compat.is_sharded(parameter)]
    return sum(map(_compat.local_bytes, here)), sum(_compat.local_bytes(p) for p in here if p.requires_grad)


def _existing_gradient_bytes(model: nn.Module, device: torch.device) -> int:
    gradients = (parameter.grad for parameter in model.parameters())
    return sum(_compat.local_bytes(each) for each in gradients if each is not None and each.device == device)


def _added_by_existing_gradients(plan: Plan, num_bytes: int) -> int:
    """By how many bytes the peak rises if gradients of this size exist from the start of the step on."""
    if plan.graph is None:
        return num_bytes
    timeline = simulate(plan.graph, plan)
    gradients = timeline.live_bytes[:, KINDS.index("gradients")]
    added = (gradients.max() - gradients).clip(max=num_bytes)
    return int((timeline.total_bytes + added).max()) - timeline.peak_bytes


# After each failure: the new budget, as a share of the way from the smallest possible peak up to the failed plan's.
# Smaller steps down keep more speed, and run the batch more often.
_TIGHTENINGS = (0.6, 0.3, 0.0)


@dataclass(frozen=True)
class OutOfMemory:
    """A step that ran out of memory, and the plan that its batch ran with next. Peaks are predicted."""

    step: int  # the number of the call of `step()`, from 0
    when_s: float  # since the epoch
    budget_before_bytes: int
    budget_after_bytes: int
    peak_before_bytes: int
    peak_after_bytes: int
    allocated_bytes: int | None  # the allocator's peak at that time; None on the CPU
    error: str


class Stepper:
    """Runs steps for a handle, and repeats those that run out of memory."""

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
