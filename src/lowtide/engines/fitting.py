"""`plan`, `fit` and `max_batch`: from a model and a budget to a step that holds it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.engines.planned import AppliedPlan, apply_plan
from lowtide.errors import InfeasibleBudgetError
from lowtide.graph import StepGraph
from lowtide.memory.measuring import Measured, measure
from lowtide.plans import Plan
from lowtide.solvers.solving import solve
from lowtide.tracing import _compat
from lowtide.tracing.checks import device_of
from lowtide.tracing.eager import trace
from lowtide.tracing.records import tensors_in
from lowtide.tracing.restoring import Restorer
from lowtide.units import format_bytes, parse_bytes

logger = logging.getLogger("lowtide")

_MOST_ROUNDS = 4
_AFTER_OUT_OF_MEMORY = 0.05  # of the budget, taken off where a step ran out of memory and told no peak


def plan(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    *args: Any,
    budget: int | str,
    optimizer: torch.optim.Optimizer | None = None,
    time_limit_s: float = 10.0,
) -> Plan:
    """The fastest plan for one step of `model` within `budget` bytes: `lowtide.trace`, then `lowtide.solve`.

    The model is as it was. `lowtide.apply(model, plan)` carries the plan out.

    >>> import torch, lowtide
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> found = lowtide.plan(model, lambda x: model(x).mean(), torch.randn(4, 8), budget="1GiB")
    >>> found.regions
    ()
    """
    return solve(trace(model, loss_fn, *args, optimizer=optimizer), budget, time_limit_s=time_limit_s)


def fit(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    *args: Any,
    budget: int | str,
    optimizer: torch.optim.Optimizer | None = None,
    verify: bool = True,
    time_limit_s: float = 10.0,
) -> AppliedPlan:
    """Plan, apply, run one real step and measure it; plan again with what was measured until the peak holds.

    The step that is measured changes nothing: parameters, gradients, buffers and random states are as before. A model
    that fits anyway is left alone. Where no plan holds, everything is undone and `InfeasibleBudgetError` says what was
    measured. With `verify=False` the prediction is trusted.

    >>> import torch, lowtide
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> handle = lowtide.fit(model, lambda x: model(x).mean(), torch.randn(4, 8), budget="1GiB")
    >>> handle.remove()
    """
    graph = trace(model, loss_fn, *args, optimizer=optimizer)
    allowed = parse_bytes(budget, total_bytes=graph.hardware.memory_bytes or None)
    device = device_of(model, args)
    corrected, peak = graph, 0
    for _ in range(_MOST_ROUNDS):
        found = solve(corrected, allowed, time_limit_s=time_limit_s)
        handle = apply_plan(model, found)
        try:
            if not verify:
                return _logged(handle, allowed, None)
            measured = _measured_step(model, loss_fn, args, device)
            peak = _whole_peak(measured, graph, model, optimizer, device)
        except torch.OutOfMemoryError:
            handle.remove()
            corrected = replace(corrected, other_bytes=corrected.other_bytes + int(_AFTER_OUT_OF_MEMORY * allowed))
            continue
        except BaseException:
            handle.remove()
            raise
        if peak <= allowed:
            return _logged(handle, allowed, peak)
        handle.remove()
        logger.info("peak %s measured, %s allowed: planning again", format_bytes(peak), format_bytes(allowed))
        corrected = replace(corrected, other_bytes=corrected.other_bytes + max(1, peak - found.peak_bytes))
    raise InfeasibleBudgetError(
        f"no plan kept the measured peak within {format_bytes(allowed)} in {_MOST_ROUNDS} rounds; the last one "
        f"measured {format_bytes(peak)}. The model is as it was: raise the budget, or make the batch smaller.",
        peak,
    )


class LargestBatch(int):
    """A number of samples, with the `plan` that makes them fit."""

    plan: Plan


def max_batch(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    make_batch: Callable[[int], Any],
    *,
    budget: int | str,
    optimizer: torch.optim.Optimizer | None = None,
    most: int = 1 << 16,
) -> LargestBatch:
    """The largest batch, up to `most`, that some plan fits into `budget`, on fake tensors; its `plan` is that plan.

    `make_batch(n)` gives the arguments of `loss_fn` for `n` samples: a tuple, or one argument. Nothing larger than what
    it makes is allocated. Raises `InfeasibleBudgetError` where not even one sample fits.

    >>> import torch, lowtide
    >>> model = torch.nn.Linear(64, 1)
    >>> n = lowtide.max_batch(model, lambda x: model(x).mean(), lambda n: torch.randn(n, 64), budget="1MiB")
    >>> n > 1000
    True
    """

    def fitting(size: int) -> Plan | InfeasibleBudgetError:
        batch = make_batch(size)
        args = batch if isinstance(batch, tuple) else (batch,)
        try:
            return solve(trace(model, loss_fn, *args, optimizer=optimizer, mode="fake"), budget)
        except InfeasibleBudgetError as error:
            return error

    best = fitting(1)
    if isinstance(best, InfeasibleBudgetError):
        raise best
    low, high = 1, 2
    while high <= most and isinstance(found := fitting(high), Plan):
        low, best, high = high, found, high * 2
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        found = fitting(middle)
        if isinstance(found, Plan):
            low, best = middle, found
        else:
            high = middle
    largest = LargestBatch(low)
    largest.plan = best
    return largest


def _measured_step(model: nn.Module, loss_fn: Any, args: Any, device: torch.device) -> Measured:
    """One step under the plan, measured, with nothing left of it."""
    restorer = Restorer(model, loss_fn, tensors_in(args), device)
    for tensor in (*model.buffers(), *tensors_in(args)):
        restorer.before_write(tensor)
    gradients: dict[int, tuple[Tensor, Tensor]] = {}  # with copies on the host, where they are not measured

    def put_aside(leaves: Iterable[Tensor]) -> None:
        for gradient in (leaf.grad for leaf in leaves if leaf.is_leaf):
            if gradient is not None and id(gradient) not in gradients:
                gradients[id(gradient)] = gradient, gradient.detach().to("cpu", copy=True)

    def step() -> None:
        loss = loss_fn(*args)
        others = _compat.leaves_of(loss)  # such as parameters of a module that only `loss_fn` knows
        restorer.add_leaves(others)
        put_aside(others)
        loss.backward()

    put_aside((*model.parameters(), *tensors_in(args)))
    try:
        return measure(step, device=device)
    finally:
        restorer.restore()
        with torch.no_grad():
            for gradient, copy in gradients.values():
                gradient.copy_(copy)


def _whole_peak(measured: Measured, graph: StepGraph, model: nn.Module, optimizer: Any, device: torch.device) -> int:
    """The measured peak of the whole step, with what was not there yet: optimizer states of a first step to come."""
    if device.type == "cpu":  # only what the step allocates is counted there
        there = sum(size for kind, size in graph.static_bytes.items() if kind != "gradients")
        gradients = {id(p): p.grad.nbytes for p in model.parameters() if p.grad is not None}
        return measured.peak_bytes + there + sum(gradients.values())
    states = optimizer.state.values() if optimizer is not None else ()
    present = sum(t.nbytes for state in states for t in tensors_in(state) if t.device == device)
    return measured.total_peak_bytes + max(0, graph.optimizer_state_bytes - present)


def _logged(handle: AppliedPlan, allowed: int, peak: int | None) -> AppliedPlan:
    plan = handle.plan
    handle.measured_peak_bytes = peak
    sizes = plan.bytes_by_action()
    logger.info(
        "%s: %d regions, %s kept, %s recomputed; peak %s predicted, %s measured, within %s; %.1f %% slower predicted",
        "nothing to do" if not plan.regions else "fitted",
        len(plan.regions),
        format_bytes(sizes["keep"]),
        format_bytes(sizes["recompute"]),
        format_bytes(plan.peak_bytes),
        "not" if peak is None else format_bytes(peak),
        format_bytes(allowed),
        100 * plan.slowdown,
    )
    return handle
