"""`lowtide.max_batch`: the largest batch for which some plan fits into a budget.

The search doubles the batch while a plan is found and then bisects; each size is traced on fake tensors and solved
for. Real steps under the resulting plan confirm it. If their measured peak is above the budget, the excess is added
to all predictions and the search goes on with smaller batches.

Cost: one fake trace per size tried, about twice the logarithm of the result; a solve for each, and again after each
excess; and two real steps per confirmation, eight confirmations at most.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.api.measure import RealSteps, TracedStep, can_measure, trace_largest
from lowtide.api.split_search import SplitSearch
from lowtide.eager.handle import refuse_other_checkpointing
from lowtide.eager.plan_handle import apply_plan
from lowtide.eager.replanning import Limits
from lowtide.errors import InfeasibleBudgetError
from lowtide.plans.step_plan import Plan
from lowtide.snapshot import generator_states, set_generator_states
from lowtide.tracing import step_checks as checks
from lowtide.tracing.step_checks import one_at_a_time
from lowtide.units import check_bytes, format_bytes

logger = logging.getLogger("lowtide")

_MAX_ROUNDS = 8
# Share of the budget that is added to predictions after a step ran out of memory, as its peak is not known.
_AFTER_OUT_OF_MEMORY = 0.05


class LargestBatch(int):
    """A number of samples, with the `plan` under which they fit and its measured peak (None if not measured)."""

    plan: Plan
    measured_peak_bytes: int | None = None


@one_at_a_time
def max_batch(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    make_batch: Callable[[int], Any],
    *,
    budget: int | str,
    optimizer: torch.optim.Optimizer | None = None,
    host: int | str = 0,
    lossy: Any = None,
    split: bool = False,
    max_samples: int = 1 << 16,
    confirm: bool = True,
    time_limit_s: float = 10.0,
) -> LargestBatch:
    """The largest batch, up to `max_samples`, that some plan fits into `budget`; its `plan` is that plan.

    `make_batch(n)` returns the arguments of `loss_fn` for `n` samples: a tuple, or one argument. The search runs on
    fake tensors. With `confirm=True` one real step is then measured under the plan; if its peak is above the budget,
    the search goes on with smaller batches and corrected predictions. Model, gradients, optimizer and random states are
    as before. `host`, `lossy` and `time_limit_s` are those of `lowtide.solve`, `split` is that of `lowtide.fit`.
    Raises `InfeasibleBudgetError` if not even one sample fits.

    >>> import torch, lowtide
    >>> model = torch.nn.Linear(64, 1)
    >>> n = lowtide.max_batch(model, lambda x: model(x).mean(), lambda n: torch.randn(n, 64), budget="1MiB")
    >>> n > 1000
    True
    """
    model = checks.arguments(model, loss_fn, "fake")
    if not callable(make_batch):
        raise TypeError(
            f"make_batch is a function that makes a batch of n samples, such as lambda n: torch.randn(n, 64), not "
            f"{type(make_batch).__name__}"
        )
    if not isinstance(max_samples, int) or max_samples < 1:
        raise ValueError(f"max_samples is a number of samples, 1 or more, not {max_samples!r:.80}")
    check_bytes(budget)
    refuse_other_checkpointing(model)
    limits = Limits(host, lossy, time_limit_s, split)
    device = checks.device_of(model, ())
    states_device = None if device.type in ("cpu", "meta") else device
    states = generator_states(states_device)
    search = _Search(model, loss_fn, make_batch, budget, optimizer, limits)
    confirm = confirm and device.type != "meta" and can_measure(device)
    try:
        largest = search.largest(max_samples)
        for _ in range(_MAX_ROUNDS if confirm else 0):
            if search.confirm(largest):
                return largest
            largest = search.largest(max(1, largest - 1))
        if confirm:
            raise InfeasibleBudgetError(
                f"no batch kept the measured peak within {format_bytes(search.allowed_bytes)} in {_MAX_ROUNDS} rounds. "
                "Raise the budget, or use confirm=False, which takes the predicted peak.",
                search.allowed_bytes,
            )
        return largest
    finally:
        set_generator_states(states, states_device)


class _Search:
    """The search of one call of `max_batch`: traces by batch size, and the measured excess over predicted peaks."""

    def __init__(
        self, model: nn.Module, loss_fn: Any, make_batch: Any, budget: int | str, optimizer: Any, limits: Limits
    ) -> None:
        self._model, self._loss_fn, self._make_batch = model, loss_fn, make_batch
        self._budget, self._optimizer, self._limits = budget, optimizer, limits
        self._traced: dict[int, TracedStep] = {}  # without their batches, which take memory
        self._excess_bytes = 0
        self.allowed_bytes = 0

    def largest(self, max_samples: int) -> LargestBatch:
        """The largest batch up to `max_samples` for which a plan fits."""
        best = self._solve(1)
        if isinstance(best, InfeasibleBudgetError):
            raise best
        low, high = 1, 2
        while high <= max_samples and isinstance(plan := self._solve(high), Plan):
            low, best, high = high, plan, high * 2
        high = min(high, max_samples + 1)
        while high - low > 1:
            middle = (low + high) // 2
            result = self._solve(middle)
            if isinstance(result, Plan):
                low, best = middle, result
            else:
                high = middle
        largest = LargestBatch(low)
        largest.plan = best
        return largest

    def confirm(self, largest: LargestBatch) -> bool:
        """Whether a real step stays within the budget; if not, its excess is added to later predictions."""
        steps = RealSteps(self._step(largest))
        try:
            with apply_plan(self._model, largest.plan):
                peak, _ = steps.measured(is_timed=False)
        except torch.OutOfMemoryError:
            self._excess_bytes += max(1, int(_AFTER_OUT_OF_MEMORY * self.allowed_bytes))
            return False
        if peak <= self.allowed_bytes:
            largest.measured_peak_bytes = peak
            return True
        predicted = largest.plan.peak_bytes - self._excess_bytes
        self._excess_bytes = max(self._excess_bytes + 1, peak - predicted)
        logger.info("%d samples: measured peak %s, trying smaller batches", largest, format_bytes(peak))
        return False

    def _solve(self, size: int) -> Plan | InfeasibleBudgetError:
        """The plan for a batch of `size` samples, or the error that says why there is none."""
        step = self._step(size)
        self.allowed_bytes = step.budget_bytes(self._budget)
        search = SplitSearch(step, self._limits)
        search.correct(self._excess_bytes)
        try:
            # Only the error for one sample is raised; the others need no floor, which takes traces of its own.
            return step.for_model(search.solve(self.allowed_bytes, names_floor=size == 1))
        except InfeasibleBudgetError as error:
            return error

    def _step(self, size: int) -> TracedStep:
        """The step of a batch of `size` samples, which is traced on fake tensors once."""
        batch = self._make_batch(size)
        examples = [batch if isinstance(batch, tuple) else (batch,)]
        if size not in self._traced:
            traced = trace_largest(self._model, self._loss_fn, examples, self._optimizer, mode="fake")
            self._traced[size] = replace(traced, examples=[])
        return replace(self._traced[size], examples=examples)
