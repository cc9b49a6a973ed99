"""`max_batch`: the largest batch that fits, found from fake traces and confirmed by a real step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.api.measure import can_measure, measured_peak
from lowtide.eager.handle import refuse_other_checkpointing
from lowtide.eager.plan_handle import apply_plan
from lowtide.eager.replanning import Limits, Shapes, recorded_input_shapes, with_parameters
from lowtide.errors import InfeasibleBudgetError
from lowtide.graph.step_graph import StepGraph
from lowtide.plans.step_plan import Plan
from lowtide.snapshot.restore import generator_states, noted_generators, set_generator_states
from lowtide.tracing import step_checks as checks
from lowtide.tracing.step_checks import one_at_a_time
from lowtide.tracing.trace import trace
from lowtide.units import check_bytes, format_bytes, parse_bytes

logger = logging.getLogger("lowtide")

_MOST_ROUNDS = 8
_AFTER_OUT_OF_MEMORY = 0.05  # of the budget


class LargestBatch(int):
    """A number of samples, with the `plan` that makes them fit, and the peak measured under it (None: not measured)."""

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
    max_samples: int = 1 << 16,
    confirm: bool = True,
    time_limit_s: float = 10.0,
) -> LargestBatch:
    """The largest batch, up to `max_samples`, that some plan fits into `budget`; its `plan` is that plan.

    `make_batch(n)` gives the arguments of `loss_fn` for `n` samples: a tuple, or one argument. The search runs on fake
    tensors. With `confirm` one real step then runs under the plan and is measured; where its peak is above the budget,
    the search goes on below, with what was measured. Model, gradients, optimizer and random states are as before.
    Raises `InfeasibleBudgetError` where not even one sample fits.

    >>> import torch, lowtide
    >>> model = torch.nn.Linear(64, 1)
    >>> n = lowtide.max_batch(model, lambda x: model(x).mean(), lambda n: torch.randn(n, 64), budget="1MiB")
    >>> n > 1000
    True
    """
    checks.arguments(model, loss_fn, "fake")
    if not callable(make_batch):
        raise TypeError(
            f"make_batch is a function that makes a batch of n samples, such as lambda n: torch.randn(n, 64), not "
            f"{type(make_batch).__name__}"
        )
    if not isinstance(max_samples, int) or max_samples < 1:
        raise ValueError(f"max_samples is a number of samples, 1 or more, not {max_samples!r:.80}")
    check_bytes(budget)
    refuse_other_checkpointing(model)
    limits = Limits(host, lossy, time_limit_s)
    device = checks.device_of(model, ())
    states_device = None if device.type in ("cpu", "meta") else device
    states = generator_states(states_device)
    search = _Search(model, loss_fn, make_batch, budget, optimizer, limits)
    confirm = confirm and device.type != "meta" and can_measure(device)
    try:
        largest = search.largest(max_samples)
        for _ in range(_MOST_ROUNDS if confirm else 0):
            if search.confirm(largest):
                return largest
            largest = search.largest(max(1, largest - 1))
        if confirm:
            raise InfeasibleBudgetError(
                f"no batch kept the measured peak within {format_bytes(search.allowed_bytes)} in {_MOST_ROUNDS} rounds",
                search.allowed_bytes,
            )
        return largest
    finally:
        set_generator_states(states, states_device)


class _Search:
    """Graphs of batches by their size, and by how much measured peaks were above those predicted."""

    def __init__(
        self, model: nn.Module, loss_fn: Any, make_batch: Any, budget: int | str, optimizer: Any, limits: Limits
    ) -> None:
        self._model, self._loss_fn, self._make_batch = model, loss_fn, make_batch
        self._budget, self._optimizer, self._limits = budget, optimizer, limits
        self._graphs: dict[int, tuple[StepGraph, Shapes]] = {}
        self._generators: list[torch.Generator] = []
        self._excess_bytes = 0
        self.allowed_bytes = 0

    def largest(self, max_samples: int) -> LargestBatch:
        """The largest batch up to `max_samples` that a plan is found for."""
        best = self._fitting(1)
        if isinstance(best, InfeasibleBudgetError):
            raise best
        low, high = 1, 2
        while high <= max_samples and isinstance(found := self._fitting(high), Plan):
            low, best, high = high, found, high * 2
        high = min(high, max_samples + 1)
        while high - low > 1:
            middle = (low + high) // 2
            found = self._fitting(middle)
            if isinstance(found, Plan):
                low, best = middle, found
            else:
                high = middle
        largest = LargestBatch(low)
        largest.plan = best
        return largest

    def confirm(self, largest: LargestBatch) -> bool:
        """Whether a real step holds the budget; where it does not, by how much is remembered."""
        args = self._args(largest)
        try:
            with apply_plan(self._model, largest.plan):
                graph = self._graphs[largest][0]
                peak = measured_peak(self._model, self._loss_fn, args, graph, self._optimizer, self._generators)
        except torch.OutOfMemoryError:
            self._excess_bytes += max(1, int(_AFTER_OUT_OF_MEMORY * self.allowed_bytes))
            return False
        if peak <= self.allowed_bytes:
            largest.measured_peak_bytes = peak
            return True
        predicted = largest.plan.peak_bytes - self._excess_bytes
        self._excess_bytes = max(self._excess_bytes + 1, peak - predicted)
        logger.info("%d samples peak at %s measured: looking below", largest, format_bytes(peak))
        return False

    def _fitting(self, size: int) -> Plan | InfeasibleBudgetError:
        if size not in self._graphs:
            with recorded_input_shapes(self._model) as inputs, noted_generators() as generators:
                graph = trace(self._model, self._loss_fn, *self._args(size), optimizer=self._optimizer, mode="fake")
            self._graphs[size] = graph, inputs[-1] if inputs else ()
            self._generators += generators
        graph, shapes = self._graphs[size]
        self.allowed_bytes = parse_bytes(self._budget, total_bytes=graph.hardware.memory_bytes or None)
        try:
            found = self._limits.solve(replace(graph, other_bytes=graph.other_bytes + self._excess_bytes), self._budget)
        except InfeasibleBudgetError as error:
            return error
        return replace(with_parameters(found, self._model), input_shapes=shapes)

    def _args(self, size: int) -> tuple[Any, ...]:
        batch = self._make_batch(size)
        return batch if isinstance(batch, tuple) else (batch,)
