"""Whether a budget still holds while a fitted model trains, and one warning when it does not.

A plan counts what there was when it was made. Parameters that are unfrozen later, an optimizer that `fit` was not
given, other experts than those traced: all of them take memory that no plan has counted. So the handle looks at the
memory from time to time, at the start of a forward: after 1, 2, 4, ... forwards, and from 128 on after every 128th.

On an accelerator it reads the allocator's own peak, and never resets it: a peak above the budget counts once it is
higher than the one that was there when the handle was made, or once someone else has reset it. On the CPU no allocator
counts, so what can be counted is: parameters, gradients and optimizer states, against those planned for. There
`handle.step` measures its 2nd, 16th, 128th, ... step with torch.profiler as well, unless a profiler is running. (A
profiler left open from one forward to the next would see all steps; but a user's own could then not be started.)
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowtide.engines import _compat
from lowtide.memory.meter import cpu_allocation_totals
from lowtide.replay.arguments import tensors_in
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.engines.planned import AppliedPlan

logger = logging.getLogger("lowtide")

_LONGEST_PAUSE = 128  # forwards between two looks: each costs an accelerator's step tens of microseconds
_PROFILED_EVERY = 8  # the factor between steps that `handle.step` profiles on the CPU: each takes several times as long


class BudgetWatch:
    """Looks at the memory of a model that was fitted to `budget_bytes`. Make it when the plan is on the model."""

    hidden_from_replay = True

    def __init__(
        self, handle: AppliedPlan, device: torch.device, budget_bytes: int, planned_state_bytes: int, static_bytes: int
    ) -> None:
        self._handle, self._device, self.budget_bytes = handle, device, budget_bytes
        self._planned_states, self._static = planned_state_bytes, static_bytes
        self._planned_parameters, self._planned_gradients = _model_bytes(handle.model, device)
        self._has_warned = False
        self._num_forwards = 0
        self._next = 1
        self._next_profiled = 2
        self._last_peak = self._read_peak()  # what was reached before says nothing about this handle
        self._ran_without = False

    def forward_without_plan(self) -> None:
        """The model runs with the handle switched off: what it reaches says nothing about the plan."""
        self._ran_without = True

    def forward_begins(self) -> None:
        """The model is about to run a forward of a training step; the steps before are over."""
        if self._ran_without:
            self._ran_without, self._last_peak = False, self._read_peak()
        self._num_forwards += 1
        if self._num_forwards <= self._next or self._has_warned:
            return
        self._next = min(2 * self._next, self._next + _LONGEST_PAUSE)
        if self._device.type == "cpu":
            self._count()
            return
        peak, before = self._read_peak(), self._last_peak
        self._last_peak = peak
        if peak > self._limit and peak != before:
            self._warn(f"a peak of {format_bytes(peak)} was reached", self._growth())

    def missing_state_bytes(self) -> int:
        """Of the optimizer's states that were planned for, what is not there yet: its first step is still to come."""
        return max(0, self._planned_states - _state_bytes(self._handle.model, self._device))

    def run_step(self, number: int, step: Callable[[], Tensor]) -> Tensor:
        """`step()`, a forward and a backward under the plan; some of them measured, on the CPU."""
        is_due = number + 1 >= self._next_profiled and self._device.type == "cpu"
        if not is_due or self._has_warned or _compat.profiler_is_active():
            return step()
        self._next_profiled = _PROFILED_EVERY * (number + 1)
        found: list[Tensor] = []
        present = sum(p.grad.nbytes for p in self._handle.model.parameters() if p.grad is not None)
        totals = cpu_allocation_totals(lambda: found.append(step()))
        growth = self._growth()
        there = sum(size for name, size in growth.items() if name != _TRAINABLE)  # of gradients, what is there counts
        peak = max([0, *totals]) + self._static + present + there
        if peak > self._limit:
            self._warn(f"a peak of {format_bytes(peak)} was measured", growth)
        return found[0]

    @property
    def _limit(self) -> int:
        """The budget; or the peak of a plan for larger inputs that is above it, which was said when it was made."""
        return max([self.budget_bytes, *(planned.plan.peak_bytes for planned in self._handle.shapes.all)])

    def _read_peak(self) -> int:
        return 0 if self._device.type == "cpu" else torch.accelerator.max_memory_allocated(self._device)

    def _count(self) -> None:
        """Warn if what was not planned for does not fit, or if it keeps activations that nobody can count."""
        growth = self._growth()
        expected = (self._handle.measured_peak_bytes or self._handle.plan.peak_bytes) + sum(growth.values())
        if growth and expected > self._limit:
            self._warn(f"the step needs {format_bytes(expected)} or more", growth)
        elif _TRAINABLE in growth:  # and their backward needs activations that the plan does not know of
            self._warn(f"the step needs {format_bytes(expected)} and more activations than planned for", growth)

    def _growth(self) -> dict[str, int]:
        """Bytes on the device that were not planned for, by what they are."""
        parameters, gradients = _model_bytes(self._handle.model, self._device)
        states = _state_bytes(self._handle.model, self._device)
        found = {
            "new parameters": parameters - self._planned_parameters,
            _TRAINABLE: gradients - self._planned_gradients,
            "optimizer state": states - self._planned_states,
        }
        return {name: size for name, size in found.items() if size > 0}

    def _warn(self, found: str, growth: dict[str, int]) -> None:
        self._has_warned = True
        grown = ", ".join(f"{format_bytes(size)} of {name}" for name, size in growth.items())
        why = f"not planned for: {grown}" if grown else (
            "no parameter, gradient or optimizer state is new: the step takes another path than the one traced (other "
            "experts, longer loops), or the process holds other tensors"
        )  # fmt: skip
        cure = "handle.refit(optimizer=...)" if "optimizer state" in growth else "handle.refit()"
        logger.warning(
            "the budget of %s may no longer hold: %s (%s). %s plans anew.",
            format_bytes(self.budget_bytes),
            found,
            why,
            cure,
        )


_TRAINABLE = "gradients of parameters that were frozen"


def _model_bytes(model: nn.Module, device: torch.device) -> tuple[int, int]:
    """Bytes of a model's parameters, and of the gradients that they will have."""
    here = [parameter for parameter in model.parameters() if parameter.device == device]
    return sum(p.nbytes for p in here), sum(p.nbytes for p in here if p.requires_grad)


def _state_bytes(model: nn.Module, device: torch.device) -> int:
    """Bytes of the states that any optimizer holds for a model's parameters by now."""
    wanted = {id(parameter) for parameter in model.parameters()}
    sizes: dict[int, int] = {}
    for optimizer in _optimizers():
        for parameter, state in dict(optimizer.state).items():
            if id(parameter) in wanted:
                for tensor in tensors_in(state):
                    if tensor.device == device and tensor.numel() > 1:  # else a step counter
                        sizes[id(tensor)] = tensor.nbytes
    return sum(sizes.values())


def _optimizers() -> list[Any]:
    """All optimizers there are: a handle is not told of one that is made after it."""
    return [item for item in gc.get_objects() if issubclass(type(item), torch.optim.Optimizer)]
