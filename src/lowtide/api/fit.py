"""`lowtide.plan` and `lowtide.fit`: from a model and a budget to a training step that holds it.

`plan` traces one step and solves for the budget; the model is not changed. `fit` goes on from there: it applies the
best few plans one after the other, measures real steps under each, and keeps the fastest whose measured peak is within
the budget. If the peak measured under the solver's own plan is above the budget, the difference is added to the graph
as memory that no plan can avoid, and `fit` solves again.

The measuring itself is in `api/tuner.py` (which candidate is kept) and `api/measure.py` (one step that leaves nothing
behind). The handle that `fit` returns plans again by itself for larger inputs (`eager/replanning.py`).

Cost: one or two searches of up to `time_limit_s`, and real steps for about `tune_s` seconds.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.api.measure import RealSteps, can_measure
from lowtide.api.tuner import FitCache, Progress, Tuner, log_fitted
from lowtide.eager.handle import refuse_other_checkpointing
from lowtide.eager.out_of_memory import BudgetWatch, why_not_single_process
from lowtide.eager.plan_handle import AppliedPlan, apply_plan
from lowtide.eager.replanning import (
    Limits,
    Planner,
    Shapes,
    recorded_input_shapes,
    shapes_of,
    tensor_from_spec,
    tensor_spec,
    with_parameters,
)
from lowtide.errors import InfeasibleBudgetError, TraceError
from lowtide.graph.step_graph import StepGraph
from lowtide.plans.step_plan import Plan
from lowtide.replay.arguments import map_tensors, tensors_in
from lowtide.simulator.timeline import simulate
from lowtide.snapshot.restore import noted_generators
from lowtide.solvers.solve import REMEMBERED, SEARCHED, SMALLEST, ShortlistedPlan
from lowtide.tracing import step_checks as checks
from lowtide.tracing.step_checks import one_at_a_time
from lowtide.tracing.trace import trace
from lowtide.units import check_bytes, check_seconds, format_bytes, parse_bytes

logger = logging.getLogger("lowtide")

_MAX_ROUNDS = 4  # of solving again with what was measured; each costs a search and a few steps


@one_at_a_time
def plan(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    *args: Any,
    budget: int | str,
    optimizer: torch.optim.Optimizer | None = None,
    host: int | str = 0,
    lossy: Any = None,
    more_batches: Sequence[tuple[Any, ...]] = (),
    time_limit_s: float = 10.0,
) -> Plan:
    """The fastest plan for one step of `model` within `budget` bytes: `lowtide.trace`, then `lowtide.solve`.

    The model is not changed; `lowtide.apply(model, plan)` puts the plan on it. `host`, `lossy` and `time_limit_s` are
    those of `solve`. `more_batches` holds the arguments of further calls of `loss_fn`, one tuple per call; the plan is
    made for the call whose plain step has the highest peak.

    >>> import torch, lowtide
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> plan = lowtide.plan(model, lambda x: model(x).mean(), torch.randn(4, 8), budget="1GiB")
    >>> plan.regions
    ()
    """
    check_bytes(budget)
    limits = Limits(host, lossy, time_limit_s)
    traced = _trace_largest(model, loss_fn, _examples(args, more_batches), optimizer)
    return _for_model(limits.solve(traced.graph, budget), model, traced)


@one_at_a_time
def fit(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    *args: Any,
    budget: int | str,
    optimizer: torch.optim.Optimizer | None = None,
    host: int | str = 0,
    lossy: Any = None,
    more_batches: Sequence[tuple[Any, ...]] = (),
    verify: bool = True,
    tune_s: float = 10.0,
    cache: str | os.PathLike[str] | None = None,
    time_limit_s: float = 10.0,
) -> AppliedPlan:
    """Put the fastest plan on `model` whose measured peak is within `budget`; returns the handle that controls it.

    Takes what `plan` takes. The candidates are the solver's own plans, the usual ways to use torch's checkpoint, and
    with `host=` the best plan that moves nothing. They run real steps in turns, with the plain step if it fits on the
    device, for about `tune_s` seconds. With `tune_s=0` only peaks are measured, and the first candidate that holds is
    kept; with `verify=False` nothing is measured. `handle.candidates` has all numbers.

    The steps that `fit` runs leave parameters, gradients, buffers and random states as they were. A model whose plain
    step fits is not patched. If no plan holds, or on any other exception, the model is as before the call;
    `InfeasibleBudgetError` has the smallest measured peak.

    `cache` names a JSON file that remembers the plan. A later call for the same step, budget and versions applies that
    plan and measures only its peak.

    Smaller inputs run under the same plan. For larger ones the handle makes a plan when the model first sees them, from
    a trace on fake tensors, and says so by a warning on the logger "lowtide"; such plans are not measured. From time to
    time the handle checks whether the budget still holds (parameters unfrozen, an optimizer made later) and warns once
    if not; `handle.refit()` fits again.

    >>> import torch, lowtide
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> handle = lowtide.fit(model, lambda x: model(x).mean(), torch.randn(4, 8), budget="1GiB")
    >>> handle.remove()
    """
    check_bytes(budget)
    limits = Limits(host, lossy, time_limit_s)
    examples = _examples(args, more_batches)
    return _fit(model, FitRequest(loss_fn, examples, budget, optimizer, limits, verify, tune_s, cache), apply_plan)


@dataclass(frozen=True, eq=False)
class FitRequest:
    """The arguments of one call of `fit`, but for the model. `examples` holds the arguments of each example step."""

    loss_fn: Callable[..., Tensor]
    examples: list[tuple[Any, ...]]
    budget: int | str
    optimizer: torch.optim.Optimizer | None
    limits: Limits
    verify: bool
    tune_s: float
    cache: str | os.PathLike[str] | None

    def __post_init__(self) -> None:
        if self.tune_s != 0:
            check_seconds(self.tune_s, "tune_s")
        if self.cache is not None:
            os.fspath(self.cache)


def _fit(model: nn.Module, request: FitRequest, apply: Callable[[nn.Module, Plan], AppliedPlan]) -> AppliedPlan:
    """Trace, solve, apply, measure, keep the fastest. `apply` puts a plan on the model and returns the handle."""
    with Progress() as say:
        say("tracing the step")
        traced = _trace_largest(model, request.loss_fn, request.examples, request.optimizer)
        fitting = _Fitting(model, request, traced, apply, say)
        handle = fitting.measured() if request.verify and can_measure(fitting.device) else fitting.predicted()
        try:
            fitting.watch_budget(handle)
            handle.refitter = Refitter(request)
            log_fitted(handle, fitting.budget_bytes)
        except BaseException:
            handle.remove()
            raise
        return handle


class _Fitting:
    """One call of `fit`, after the trace: finds candidates, has them measured, and prepares the handle."""

    def __init__(
        self,
        model: nn.Module,
        request: FitRequest,
        traced: TracedStep,
        apply: Callable[[nn.Module, Plan], AppliedPlan],
        say: Progress,
    ) -> None:
        self._model, self._request, self._traced, self._apply, self._say = model, request, traced, apply, say
        self._limits = request.limits
        self._corrected = traced.graph  # its other_bytes include measured bytes that the simulation did not predict
        self.budget_bytes = parse_bytes(request.budget, total_bytes=traced.graph.hardware.memory_bytes or None)
        self.device = checks.device_of(model, request.examples[0])

    def predicted(self) -> AppliedPlan:
        """The solver's plan, applied without running a step."""
        self._say_solving()
        return self._put_on_model(self._limits.solve(self._traced.graph, self.budget_bytes))

    def measured(self) -> AppliedPlan:
        """The cached plan if it still holds, else the fastest candidate that does; applied."""
        request, traced = self._request, self._traced
        steps = RealSteps(
            self._model,
            request.loss_fn,
            request.examples,
            traced.index,
            traced.graph,
            request.optimizer,
            traced.generators,
        )
        # Several processes must run the same steps, and measured times would make them choose differently.
        is_alone = why_not_single_process() is None
        tuner = Tuner(self._put_on_model, steps, self.budget_bytes, request.tune_s if is_alone else 0.0, self._say)
        cache = None
        if request.cache is not None:
            cache = FitCache(request.cache, traced.graph, self.budget_bytes, self._limits)
        try:
            if cache is not None:
                self._try_cached(cache, tuner)
            is_from_cache = tuner.has_one()
            if not is_from_cache:
                self._corrected = traced.graph
                self._try_candidates(tuner, is_alone)
                tuner.time_all()
            handle = tuner.keep()
        except BaseException:
            tuner.take_off()
            raise
        if cache is not None and not is_from_cache:
            cache.write(handle.plan, self._correction_bytes, handle.candidates)
        return handle

    def _try_cached(self, cache: FitCache, tuner: Tuner) -> None:
        cached = cache.read()
        if cached is not None:
            self._correct(cached.correction_bytes)
            tuner.try_all([ShortlistedPlan(REMEMBERED, cached.plan)])

    def _try_candidates(self, tuner: Tuner, is_alone: bool) -> None:
        """Measure candidates, and solve again with corrected memory until the solver's own plan holds.

        Raises `InfeasibleBudgetError` if no candidate holds.
        """
        error: InfeasibleBudgetError | None = None
        for number in range(_MAX_ROUNDS):
            self._say_solving()
            candidates, error = self._candidates(is_alone)
            if error is not None and number and not tuner.has_one():
                candidates += self._smallest()
            tuner.try_all(candidates)
            missing_bytes = sum(tuner.missing_bytes(each) for each in candidates if each.name == SEARCHED)
            if not missing_bytes:
                break
            logger.info("a plan takes %s more than predicted: planning again", format_bytes(missing_bytes))
            self._correct(missing_bytes)
        if tuner.has_one():
            return
        if error is not None and not tuner.smallest_peak_bytes:
            raise error
        smallest = format_bytes(tuner.smallest_peak_bytes)
        if error is not None:
            text = f"{error}\nPlans near it were run for real: the smallest peak measured is {smallest}."
            raise InfeasibleBudgetError(text, error.floor_bytes)
        raise InfeasibleBudgetError(
            f"no plan kept the measured peak within {format_bytes(self.budget_bytes)} in {_MAX_ROUNDS} rounds; the "
            f"smallest measured is {smallest}. The model is as it was: raise the budget, or make the batch smaller.",
            tuner.smallest_peak_bytes,
        )

    def _candidates(self, is_alone: bool) -> tuple[list[ShortlistedPlan], InfeasibleBudgetError | None]:
        """Plans to measure, and the solver's error if its own plan is not among them."""
        if is_alone:
            return self._limits.candidates(self._corrected, self.budget_bytes)
        try:
            return [ShortlistedPlan(SEARCHED, self._limits.solve(self._corrected, self.budget_bytes))], None
        except InfeasibleBudgetError as error:
            return [], error

    def _smallest(self) -> list[ShortlistedPlan]:
        """The plan with the smallest peak by the uncorrected graph: the correction may not apply to it."""
        plan = self._limits.tightest(self._traced.graph)
        return [ShortlistedPlan(SMALLEST, plan)] if plan.peak_bytes <= self.budget_bytes else []

    def _correct(self, num_bytes: int) -> None:
        self._corrected = replace(self._corrected, other_bytes=self._corrected.other_bytes + num_bytes)

    @property
    def _correction_bytes(self) -> int:
        return self._corrected.other_bytes - self._traced.graph.other_bytes

    def _put_on_model(self, plan: Plan) -> AppliedPlan:
        """Apply a plan, and give the handle what it needs to plan for larger inputs."""
        handle = self._apply(self._model, _for_model(plan, self._model, self._traced))
        try:
            self._prepare_replanning(handle)
        except BaseException:
            handle.remove()
            raise
        return handle

    def _prepare_replanning(self, handle: AppliedPlan) -> None:
        """Tell the handle which shapes its plan was made for, and give it a `Planner` for larger ones."""
        inputs = self._traced.inputs
        arguments = tuple(shapes_of(example) for example in self._request.examples)
        (first,) = handle.shapes.all
        handle.shapes.become([replace(first, inputs=tuple(inputs), arguments=arguments, graph=self._corrected)])
        handle.shapes.planner = Planner(
            handle.model,
            self._traced.graph,
            inputs[-1] if inputs else (),
            budget_bytes=self.budget_bytes,
            limits=self._limits,
            correction_bytes=self._correction_bytes,
            optimizer=self._request.optimizer,
        )

    def watch_budget(self, handle: AppliedPlan) -> None:
        """Have the handle check from time to time whether the budget still holds."""
        graph = self._traced.graph
        static_bytes = sum(size for kind, size in graph.static_bytes.items() if kind != "gradients")
        handle.watch = BudgetWatch(handle, self.device, self.budget_bytes, graph.optimizer_state_bytes, static_bytes)

    def _say_solving(self) -> None:
        self._say(f"solving for {format_bytes(self.budget_bytes)}")


class Refitter:
    """The arguments of `fit` that a handle keeps for `handle.refit()`.

    Batches are not kept, as they would count as memory of the step. In place of a tensor there is its shape and dtype;
    integer tensors (indices, masks) are kept as copies on the host, as a step may branch on their values.
    """

    hidden_from_replay = True

    def __init__(self, request: FitRequest) -> None:
        self._request = replace(request, examples=map_tensors(tensor_spec, request.examples))
        self._devices = [tensor.device for tensor in tensors_in(request.examples)]

    def refit(
        self, handle: AppliedPlan, loss_fn: Callable[..., Tensor] | None, args: tuple[Any, ...], optimizer: Any
    ) -> None:
        """Fit the handle's model again, on the same handle; see `AppliedPlan.refit`."""
        if (loss_fn is None) != (not args):
            raise TypeError("refit() takes a loss function with its arguments, as fit() does, or neither")
        before, model = dict(vars(handle)), handle.model

        def apply_to_same_handle(model: nn.Module, plan: Plan) -> AppliedPlan:
            refuse_other_checkpointing(model)
            AppliedPlan.__init__(handle, model, plan)
            return handle

        handle.remove()
        try:
            request = replace(
                self._request,
                loss_fn=loss_fn or self._request.loss_fn,
                examples=[args] if args else self._made_examples(),
                optimizer=self._request.optimizer if optimizer is None else optimizer,
            )
            _fit(model, request, apply_to_same_handle)
        except BaseException:
            vars(handle).clear()
            vars(handle).update(before)
            handle.reapply()
            handle.switch_cache_off(model)
            raise

    def _made_examples(self) -> list[tuple[Any, ...]]:
        """Batches of the shapes that `fit` was given, with random numbers in floating-point tensors."""
        devices = iter(self._devices)
        return map_tensors(lambda kept: tensor_from_spec(kept, next(devices)), self._request.examples)


@dataclass(frozen=True)
class TracedStep:
    """The trace of the example whose plain step has the highest peak."""

    index: int  # of that example
    graph: StepGraph
    inputs: list[Shapes]  # that the model is called with in any of the examples, the largest last
    generators: list[torch.Generator]  # that any of the examples draws from, beside torch's default ones


def _examples(args: tuple[Any, ...], more_batches: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    for batch in more_batches:
        if not isinstance(batch, tuple):
            raise TypeError(
                "more_batches= holds a tuple of arguments for each further step, such as more_batches=[(batch,)], "
                f"not {type(batch).__name__}"
            )
    return [args, *more_batches]


def _trace_largest(model: nn.Module, loss_fn: Any, examples: list[tuple[Any, ...]], optimizer: Any) -> TracedStep:
    """Trace the example with the highest peak. With several, all are first traced on fake tensors where possible."""
    checks.arguments(model, loss_fn, "auto")
    refuse_other_checkpointing(model)
    index = 0
    with recorded_input_shapes(model) as inputs, noted_generators() as generators:
        if len(examples) > 1:
            peaks = [simulate(_trace_cheaply(model, loss_fn, each, optimizer)).peak_bytes for each in examples]
            index = peaks.index(max(peaks))
        graph = trace(model, loss_fn, *examples[index], optimizer=optimizer)
    return TracedStep(index, graph, inputs, generators)


def _trace_cheaply(model: nn.Module, loss_fn: Any, args: tuple[Any, ...], optimizer: Any) -> StepGraph:
    try:
        return trace(model, loss_fn, *args, optimizer=optimizer, mode="fake")
    except TraceError:  # the step depends on values of tensors, which fake tensors do not have
        return trace(model, loss_fn, *args, optimizer=optimizer)


def _for_model(plan: Plan, model: nn.Module, traced: TracedStep) -> Plan:
    """`plan` with the model's parameter counts and input shapes, by which `apply` recognises another model."""
    return replace(with_parameters(plan, model), input_shapes=traced.inputs[-1] if traced.inputs else ())
