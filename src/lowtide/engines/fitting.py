"""`plan` and `fit`: from a model and a budget to a step that holds it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.engines.eager import refuse_other_checkpointing
from lowtide.engines.matching import with_parameters
from lowtide.engines.peakcheck import BudgetWatch
from lowtide.engines.planned import AppliedPlan, apply_plan
from lowtide.engines.replanning import Limits, Planner
from lowtide.engines.shapes import Shapes, recalled, remembered, shapes_of, watched_inputs
from lowtide.errors import InfeasibleBudgetError, TraceError
from lowtide.graph import StepGraph
from lowtide.memory.exclusive import one_at_a_time
from lowtide.memory.measuring import Measured, measure
from lowtide.plans import Plan
from lowtide.simulator import simulate
from lowtide.tracing import _compat, checks
from lowtide.tracing.eager import trace
from lowtide.tracing.faking import map_tensors
from lowtide.tracing.optimizers import present_state_bytes
from lowtide.tracing.records import tensors_in
from lowtide.tracing.restoring import Restorer, noted_generators
from lowtide.units import check_bytes, format_bytes, parse_bytes

logger = logging.getLogger("lowtide")

_MOST_ROUNDS = 4
_AFTER_OUT_OF_MEMORY = 0.05  # of the budget, taken off where a step ran out of memory and told no peak
_ACTIONS = {"keep": "kept", "recompute": "recomputed", "host": "offloaded", "disk": "offloaded to disk"}
_ALWAYS_SHOWN = ("keep", "recompute", "host")


@one_at_a_time
def plan(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    *args: Any,
    budget: int | str,
    optimizer: torch.optim.Optimizer | None = None,
    host: int | str = 0,
    disk: int | str = 0,
    lossy: Any = None,
    also: Sequence[tuple[Any, ...]] = (),
    time_limit_s: float = 10.0,
) -> Plan:
    """The fastest plan for one step of `model` within `budget` bytes: `lowtide.trace`, then `lowtide.solve`.

    The model is as it was. `lowtide.apply(model, plan)` carries the plan out. `host`, `disk` and `lossy` are as in
    `solve`. `also` holds further arguments of `loss_fn`, a tuple for each step: the plan is for the step that peaks
    highest.

    >>> import torch, lowtide
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> found = lowtide.plan(model, lambda x: model(x).mean(), torch.randn(4, 8), budget="1GiB")
    >>> found.regions
    ()
    """
    check_bytes(budget)
    limits = Limits(host, disk, lossy, time_limit_s)
    traced = _trace_highest(model, loss_fn, _examples(args, also), optimizer)
    return _described(limits.solve(traced.graph, budget), model, traced)


@one_at_a_time
def fit(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    *args: Any,
    budget: int | str,
    optimizer: torch.optim.Optimizer | None = None,
    host: int | str = 0,
    disk: int | str = 0,
    lossy: Any = None,
    also: Sequence[tuple[Any, ...]] = (),
    verify: bool = True,
    time_limit_s: float = 10.0,
) -> AppliedPlan:
    """Plan, apply, run real steps and measure them; plan again with what was measured until the peak holds.

    Takes what `plan` takes. Steps that are measured, `also` the further ones, change nothing: parameters, gradients,
    buffers and random states are as before. A model that fits anyway is left alone. Where no plan holds, or if it is
    interrupted, everything is undone; `InfeasibleBudgetError` says what was measured. With `verify=False` the
    prediction is trusted.

    Smaller inputs run under the same plan. Larger ones are planned for when the model first sees them, once for shapes
    of about that size: from a trace on fake tensors, within `time_limit_s` beside the trace, with a warning to the
    logger "lowtide". Such plans are not measured. `handle.step` knows the whole step and plans for that.

    From time to time the handle looks whether the budget still holds (parameters that were unfrozen, an optimizer made
    later), and warns once if not. `handle.refit()` plans anew.

    >>> import torch, lowtide
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> handle = lowtide.fit(model, lambda x: model(x).mean(), torch.randn(4, 8), budget="1GiB")
    >>> handle.remove()
    """
    check_bytes(budget)
    limits = Limits(host, disk, lossy, time_limit_s)
    return _fit(model, loss_fn, _examples(args, also), budget, optimizer, limits, verify, apply_plan)


def _fit(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    examples: list[tuple[Any, ...]],
    budget: int | str,
    optimizer: torch.optim.Optimizer | None,
    limits: Limits,
    verify: bool,
    applied: Callable[[nn.Module, Plan], AppliedPlan],
) -> AppliedPlan:
    """See `fit`; `applied` gives the handle of a plan."""
    traced = _trace_highest(model, loss_fn, examples, optimizer)
    graph = corrected = traced.graph
    allowed = parse_bytes(budget, total_bytes=graph.hardware.memory_bytes or None)
    device, peak = checks.device_of(model, examples[0]), 0
    refitter = Refitter(loss_fn, examples, budget, optimizer, limits, verify)
    verify = verify and can_measure(device)
    found: Plan | None = None
    for _ in range(_MOST_ROUNDS):
        found = _described(_next_plan(limits, graph, corrected, allowed, found), model, traced)
        handle: AppliedPlan | None = None
        try:
            handle = applied(model, found)
            _prepare_for_more(handle, traced, examples, corrected, allowed, limits, optimizer)
            if not verify:
                return _finished(handle, graph, allowed, device, refitter)
            measured = [_measured_step(model, loss_fn, example, device, traced.generators) for example in examples]
            peak = max(_whole_peak(each, graph, model, optimizer, device) for each in measured)
        except torch.OutOfMemoryError:
            _remove(handle)
            corrected = replace(corrected, other_bytes=corrected.other_bytes + int(_AFTER_OUT_OF_MEMORY * allowed))
            continue
        except BaseException:
            _remove(handle)
            raise
        if peak <= allowed:
            handle.measured_peak_bytes = peak
            if graph.is_measured:
                handle.measured_slowdown = measured[traced.index].seconds / graph.step_s - 1
            return _finished(handle, graph, allowed, device, refitter)
        handle.remove()
        logger.info("peak %s measured, %s allowed: planning again", format_bytes(peak), format_bytes(allowed))
        corrected = replace(corrected, other_bytes=corrected.other_bytes + max(1, peak - found.peak_bytes))
    raise InfeasibleBudgetError(
        f"no plan kept the measured peak within {format_bytes(allowed)} in {_MOST_ROUNDS} rounds; the last one "
        f"measured {format_bytes(peak)}. The model is as it was: raise the budget, or make the batch smaller.",
        peak,
    )


class Refitter:
    """What `fit` was given, for a handle to be fitted again.

    Batches are not held: they would count as memory of the step. What is kept are shapes and types, and the numbers in
    integer tensors (indices, masks) on the host, as what a step does may depend on those.
    """

    hidden_from_replay = True

    def __init__(
        self,
        loss_fn: Callable[..., Tensor],
        examples: list[tuple[Any, ...]],
        budget: int | str,
        optimizer: torch.optim.Optimizer | None,
        limits: Limits,
        verify: bool,
    ) -> None:
        self._loss_fn, self._optimizer = loss_fn, optimizer
        self._examples = map_tensors(remembered, examples)
        self._devices = [tensor.device for tensor in tensors_in(examples)]
        self._budget, self._limits, self._verify = budget, limits, verify

    def refit(
        self, handle: AppliedPlan, loss_fn: Callable[..., Tensor] | None, args: tuple[Any, ...], optimizer: Any
    ) -> None:
        """See `AppliedPlan.refit`."""
        if (loss_fn is None) != (not args):
            raise TypeError("refit() takes a loss function with its arguments, as fit() does, or neither")
        before, model = dict(vars(handle)), handle.model

        def applied(model: nn.Module, plan: Plan) -> AppliedPlan:
            refuse_other_checkpointing(model)
            AppliedPlan.__init__(handle, model, plan)
            return handle

        handle.remove()
        try:
            devices = iter(self._devices)
            examples = [args] if args else map_tensors(lambda kept: recalled(kept, next(devices)), self._examples)
            _fit(
                model,
                loss_fn or self._loss_fn,
                examples,
                self._budget,
                self._optimizer if optimizer is None else optimizer,
                self._limits,
                self._verify,
                applied,
            )
        except BaseException:
            vars(handle).clear()
            vars(handle).update(before)
            handle.put_back()
            handle.switch_cache_off(model)
            raise


def _finished(
    handle: AppliedPlan, graph: StepGraph, allowed: int, device: torch.device, refitter: Refitter
) -> AppliedPlan:
    static_bytes = sum(size for kind, size in graph.static_bytes.items() if kind != "gradients")
    handle.watch = BudgetWatch(handle, device, allowed, graph.optimizer_state_bytes, static_bytes)
    handle.refitter = refitter
    return _logged(handle, allowed)


def _next_plan(limits: Limits, graph: StepGraph, corrected: StepGraph, allowed: int, last: Plan | None) -> Plan:
    """The plan for the budget, less what the plans before it measured above their prediction.

    Another plan may be predicted better: before the budget is refused for that, the smallest plan of all is tried.
    """
    try:
        return limits.solve(corrected, allowed)
    except InfeasibleBudgetError:
        if last is None:
            raise
        tightest = limits.tightest(graph)
        if tightest.peak_bytes > allowed or (tightest.regions, tightest.moves) == (last.regions, last.moves):
            raise
        return tightest


@dataclass(frozen=True)
class _Traced:
    """The step that peaks highest: its number among the examples, its graph, and what the model is called with."""

    index: int
    graph: StepGraph
    inputs: list[Shapes]  # in any of the examples, the largest last
    generators: list[torch.Generator]  # that any of the examples draws from, beside torch's default ones


def _examples(args: tuple[Any, ...], also: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    for further in also:
        if not isinstance(further, tuple):
            raise TypeError(
                f"also= holds a tuple of arguments for each further step, such as also=[(batch,)], "
                f"not {type(further).__name__}"
            )
    return [args, *also]


def _trace_highest(model: nn.Module, loss_fn: Any, examples: list[tuple[Any, ...]], optimizer: Any) -> _Traced:
    checks.arguments(model, loss_fn, "auto")
    refuse_other_checkpointing(model)
    index = 0
    with watched_inputs(model) as inputs, noted_generators() as generators:
        if len(examples) > 1:
            peaks = [simulate(_trace_cheaply(model, loss_fn, each, optimizer)).peak_bytes for each in examples]
            index = peaks.index(max(peaks))
        graph = trace(model, loss_fn, *examples[index], optimizer=optimizer)
    return _Traced(index, graph, inputs, generators)


def _trace_cheaply(model: nn.Module, loss_fn: Any, args: tuple[Any, ...], optimizer: Any) -> StepGraph:
    try:
        return trace(model, loss_fn, *args, optimizer=optimizer, mode="fake")
    except TraceError:  # what it does depends on numbers in its tensors
        return trace(model, loss_fn, *args, optimizer=optimizer)


def _described(found: Plan, model: nn.Module, traced: _Traced) -> Plan:
    return replace(with_parameters(found, model), input_shapes=traced.inputs[-1] if traced.inputs else ())


def _prepare_for_more(
    handle: AppliedPlan,
    traced: _Traced,
    examples: list[tuple[Any, ...]],
    corrected: StepGraph,
    allowed: int,
    limits: Limits,
    optimizer: Any,
) -> None:
    """Let the handle know what its plan is for, and who plans for more than that."""
    arguments = tuple(shapes_of(example) for example in examples)
    (first,) = handle.shapes.all
    handle.shapes.become([replace(first, inputs=tuple(traced.inputs), arguments=arguments, graph=corrected)])
    handle.shapes.planner = Planner(
        handle.model,
        traced.graph,
        traced.inputs[-1] if traced.inputs else (),
        budget_bytes=allowed,
        limits=limits,
        correction_bytes=corrected.other_bytes - traced.graph.other_bytes,
        optimizer=optimizer,
    )


def _remove(handle: AppliedPlan | None) -> None:
    if handle is not None:
        handle.remove()


def can_measure(device: torch.device) -> bool:
    """Whether peaks can be measured here and now; a warning says so where not."""
    if device.type != "cpu" or not _compat.profiler_is_active():
        return True
    logger.warning("the peak is predicted and not measured: a torch.profiler is active, and on the CPU it cannot nest")
    return False


def measured_peak(
    model: nn.Module, loss_fn: Any, args: Any, graph: StepGraph, optimizer: Any, generators: Iterable[torch.Generator]
) -> int:
    """The measured peak of the whole step as the model is now; nothing is left of it. `generators` are put back."""
    device = checks.device_of(model, args)
    measured = _measured_step(model, loss_fn, args, device, generators)
    return _whole_peak(measured, graph, model, optimizer, device)


def _measured_step(
    model: nn.Module, loss_fn: Any, args: Any, device: torch.device, generators: Iterable[torch.Generator]
) -> Measured:
    """A step under the plan, measured and timed, with nothing left of it."""
    restorer = Restorer(model, loss_fn, tensors_in(args), device)
    for tensor in (*model.buffers(), *tensors_in(args)):
        restorer.before_write(tensor)
    for generator in generators:
        restorer.before_write(generator)
    gradients: dict[int, tuple[Tensor, Tensor]] = {}  # with copies on the host, where they are not measured

    def put_aside(leaves: Iterable[Tensor]) -> None:
        for gradient in (leaf.grad for leaf in leaves if leaf.is_leaf):
            if gradient is not None and id(gradient) not in gradients:
                gradients[id(gradient)] = gradient, gradient.detach().to("cpu", copy=True)

    num_runs = 0

    def step() -> None:
        nonlocal num_runs
        loss = loss_fn(*args)
        if num_runs == 0:
            others = _compat.leaves_of(loss)  # such as parameters of a module that only `loss_fn` knows
            restorer.add_leaves(others)
            put_aside(others)
        num_runs += 1
        loss.backward()
        restorer.reset_gradients()

    put_aside((*model.parameters(), *tensors_in(args)))
    try:
        if device.type != "cpu":
            return measure(step, device=device, repeat=3)
        first = measure(step, device=device)  # in which regions that retain outputs learn where these are saved
        later = measure(step, device=device, repeat=2)
        return replace(later, peak_bytes=max(first.peak_bytes, later.peak_bytes))
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
    present = present_state_bytes(optimizer, device)
    return measured.total_peak_bytes + max(0, graph.optimizer_state_bytes - present)


def _logged(handle: AppliedPlan, allowed: int) -> AppliedPlan:
    found, peak, slowdown = handle.plan, handle.measured_peak_bytes, handle.measured_slowdown
    shown = {action: size for action, size in found.bytes_by_action().items() if size or action in _ALWAYS_SHOWN}
    logger.info(
        "%s: %d regions, %s; peak %s predicted, %s measured, within %s; %.1f %% slower predicted, %s measured",
        "nothing to do, the step fits as it is" if found.is_plain else "fitted",
        len(found.regions),
        ", ".join(f"{format_bytes(size)} {_ACTIONS.get(action, 'compressed')}" for action, size in shown.items()),
        format_bytes(found.peak_bytes),
        "not" if peak is None else format_bytes(peak),
        format_bytes(allowed),
        100 * found.slowdown,
        "not" if slowdown is None else f"{100 * slowdown:.1f} %",
    )
    return handle
