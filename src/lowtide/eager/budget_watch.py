"""Warns when a fitted budget no longer holds.

A plan counts only what was there when it was made. Parameters unfrozen later, gradients that accumulate over several
backwards, an optimizer that `fit` was not given or experts that the trace did not use add memory. `BudgetWatch`, which
`fit` puts on its handle, checks the memory at the start of a forward: after 1, 2, 4, ... forwards, and from 128 on
after every 128th. It warns once.

- On an accelerator it reads the allocator's peak, without resetting it. A peak above the budget counts only if it
  changed since the last check, so that a peak from before the handle does not.
- On the CPU there is no allocator peak. It compares parameters, gradients and optimizer state with those planned for.
  In addition, `handle.step` measures its 2nd, 16th, 128th, ... step with torch.profiler, unless a profiler is running.
  (A profiler that stays open between forwards would see every step, but the user could not start another one.)
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowtide import _compat
from lowtide._compat.profiler import cpu_allocation_totals
from lowtide.plans.step_plan import Plan
from lowtide.replay.arguments import tensors_in
from lowtide.simulator.timeline import KINDS, simulate
from lowtide.units import format_apart, format_bytes

if TYPE_CHECKING:
    from lowtide.eager.plan_handle import AppliedPlan

logger = logging.getLogger("lowtide")

_LONGEST_PAUSE = 128  # forwards between two checks, each of which takes tens of microseconds
_PROFILED_EVERY = 8  # factor between the numbers of profiled steps on the CPU, which take several times as long


class BudgetWatch:
    """Warns once when a fitted model needs more than `budget_bytes`. Create it after the plan was applied."""

    hidden_from_replay = True

    def __init__(
        self, handle: AppliedPlan, device: torch.device, budget_bytes: int, planned_state_bytes: int, static_bytes: int
    ) -> None:
        self._handle, self._device, self.budget_bytes = handle, device, budget_bytes
        self._planned_states, self._static = planned_state_bytes, static_bytes
        self._planned_parameters, self._planned_gradients = _model_bytes(handle.model, device)
        self._planned_existing = _existing_gradient_bytes(handle.model, device)
        self._existing = 0  # gradients that a checked forward began with, beyond those planned for
        self._has_warned = False
        self._num_forwards = 0
        self._next = 1
        self._next_profiled = 2
        self._last_peak = self._read_peak()  # peaks from before this handle do not count
        self._ran_without = False

    def forward_without_plan(self) -> None:
        """Call when the model runs with the handle switched off: peaks so far are ignored."""
        self._ran_without = True

    def forward_begins(self) -> None:
        """Call before each training forward. Checks the memory of earlier steps when a check is due."""
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
        return max(0, self._planned_states - _state_bytes(self._handle.model, self._device))

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
        states = _state_bytes(self._handle.model, self._device)
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


def _state_bytes(model: nn.Module, device: torch.device) -> int:
    """Bytes of state that optimizers hold for a model's parameters now."""
    wanted = {id(parameter) for parameter in model.parameters()}
    sizes: dict[int, int] = {}
    for optimizer in _optimizers():
        for parameter, state in dict(optimizer.state).items():
            if id(parameter) in wanted:
                for tensor in tensors_in(state):
                    if tensor.device == device and tensor.numel() > 1:  # else a step counter
                        sizes[id(tensor)] = _compat.local_bytes(tensor)
    return sum(sizes.values())


def _optimizers() -> list[Any]:
    """All optimizers of the process, as one may have been made after the handle."""
    return [item for item in gc.get_objects() if issubclass(type(item), torch.optim.Optimizer)]
