"""`plan` and `fit`: from a model and a budget to a step that holds it."""

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

_MOST_ROUNDS = 4


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

    The model is as it was. `lowtide.apply(model, plan)` carries the plan out. `host` and `lossy` are as in `solve`.
    `more_batches` holds further arguments of `loss_fn`, a tuple for each step: the plan is for the step that peaks
    highest.

    >>> import torch, lowtide
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> found = lowtide.plan(model, lambda x: model(x).mean(), torch.randn(4, 8), budget="1GiB")
    >>> found.regions
    ()
    """
    check_bytes(budget)
    limits = Limits(host, lossy, time_limit_s)
    traced = trace_highest(model, loss_fn, _examples(args, more_batches), optimizer)
    return _described(limits.solve(traced.graph, budget), model, traced)


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
    """Plan, run the best few candidates for real, and keep the fastest whose measured peak holds.

    Takes what `plan` takes. Candidates are the search's own plans and what people do with torch's checkpoint; with
    `host=` the best plan without moves is one. They take turns, with the plain step where that fits, for
    about `tune_s` seconds; with 0 the prediction of time is trusted, and the first that holds is kept. If measured
    peaks are above predictions, it plans again with what was measured. `handle.candidates` has the numbers.

    Steps that are run change nothing: parameters, gradients, buffers and random states are as before. A model that
    fits anyway is left alone. Where no plan holds, or if it is interrupted, everything is undone;
    `InfeasibleBudgetError` says what was measured. With `verify=False` all predictions are trusted.

    `cache` names a JSON file. The next call for the same step, budget and versions applies the plan that was kept, and
    measures only its peak.

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
    limits, tuning = Limits(host, lossy, time_limit_s), Tuning(verify, tune_s, cache)
    return _fit(model, loss_fn, _examples(args, more_batches), budget, optimizer, limits, tuning, apply_plan)


@dataclass(frozen=True)
class Tuning:
    """Whether `fit` runs real steps, for how long it compares candidates, and where it remembers the result."""

    verify: bool
    tune_s: float
    cache: str | os.PathLike[str] | None

    def __post_init__(self) -> None:
        if self.tune_s != 0:
            check_seconds(self.tune_s, "tune_s")
        if self.cache is not None:
            os.fspath(self.cache)


def _fit(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    examples: list[tuple[Any, ...]],
    budget: int | str,
    optimizer: torch.optim.Optimizer | None,
    limits: Limits,
    tuning: Tuning,
    applied: Callable[[nn.Module, Plan], AppliedPlan],
) -> AppliedPlan:
    """See `fit`; `applied` gives the handle of a plan."""
    with Progress() as say:
        say("tracing the step")
        traced = trace_highest(model, loss_fn, examples, optimizer)
        fitting = _Fitting(model, loss_fn, examples, budget, optimizer, limits, traced, applied)
        refitter = Refitter(loss_fn, examples, budget, optimizer, limits, tuning)
        if tuning.verify and can_measure(fitting.device):
            handle = fitting.tuned(tuning, say)
        else:
            say(f"solving for {format_bytes(fitting.budget_bytes)}")
            handle = fitting.ready(limits.solve(traced.graph, fitting.budget_bytes))
        try:
            return _finished(handle, traced.graph, fitting.budget_bytes, fitting.device, refitter)
        except BaseException:
            handle.remove()
            raise


class _Fitting:
    """One call of `fit` after its trace: solve for candidates, try them, keep the fastest."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor],
        examples: list[tuple[Any, ...]],
        budget: int | str,
        optimizer: torch.optim.Optimizer | None,
        limits: Limits,
        traced: TracedStep,
        applied: Callable[[nn.Module, Plan], AppliedPlan],
    ) -> None:
        self._model, self._loss_fn, self._examples, self._optimizer = model, loss_fn, examples, optimizer
        self._limits, self._traced, self._applied = limits, traced, applied
        self.budget_bytes = parse_bytes(budget, total_bytes=traced.graph.hardware.memory_bytes or None)
        self.device = checks.device_of(model, examples[0])
        self._corrected = traced.graph  # with what was measured above predictions as further bytes

    def ready(self, plan: Plan) -> AppliedPlan:
        """The plan on the model, with what it takes to plan for larger inputs."""
        handle = self._applied(self._model, _described(plan, self._model, self._traced))
        try:
            self._prepare_for_more(handle)
        except BaseException:
            handle.remove()
            raise
        return handle

    def tuned(self, tuning: Tuning, say: Progress) -> AppliedPlan:
        """The fastest candidate that holds, on the model; the one of the cache, if that still holds."""
        graph = self._traced.graph
        is_alone = why_not_single_process() is None  # else candidates' steps would have to be the same in all processes
        steps = RealSteps(
            self._model,
            self._loss_fn,
            self._examples,
            self._traced.index,
            graph,
            self._optimizer,
            self._traced.generators,
        )
        tuner = Tuner(self.ready, steps, self.budget_bytes, tuning.tune_s if is_alone else 0.0, say)
        cache = None if tuning.cache is None else FitCache(tuning.cache, graph, self.budget_bytes, self._limits)
        try:
            known = None if cache is None else cache.read()
            if known is not None:
                self._correct(known.correction_bytes)
                tuner.try_all([ShortlistedPlan(REMEMBERED, known.plan)])
            if tuner.has_one():
                cache = None  # it knows
            else:
                self._corrected = graph
                self._try_candidates(tuner, is_alone, say)
                tuner.time_all()
            handle = tuner.keep()
        except BaseException:
            tuner.take_off()
            raise
        if cache is not None:
            cache.write(handle.plan, self._corrected.other_bytes - graph.other_bytes, handle.candidates)
        return handle

    def _try_candidates(self, tuner: Tuner, is_alone: bool, say: Progress) -> None:
        """Try candidates until the search's own plan holds: peaks above the prediction correct the graph it is from.

        Raises `InfeasibleBudgetError` where none holds.
        """
        error: InfeasibleBudgetError | None = None
        for number in range(_MOST_ROUNDS):
            say(f"solving for {format_bytes(self.budget_bytes)}")
            found, error = self._candidates(is_alone)
            if error is not None and number and not tuner.has_one():
                found += self._tightest()
            tuner.try_all(found)
            missing = sum(tuner.missing_bytes(each) for each in found if each.name == SEARCHED)
            if not missing:
                break
            logger.info("a plan takes %s more than predicted: planning again", format_bytes(missing))
            self._correct(missing)
        if tuner.has_one():
            return
        if error is not None and not tuner.smallest_peak_bytes:
            raise error
        smallest = format_bytes(tuner.smallest_peak_bytes)
        if error is not None:
            text = f"{error}\nPlans near it were run for real: the smallest peak measured is {smallest}."
            raise InfeasibleBudgetError(text, error.floor_bytes)
        raise InfeasibleBudgetError(
            f"no plan kept the measured peak within {format_bytes(self.budget_bytes)} in {_MOST_ROUNDS} rounds; the "
            f"smallest measured is {smallest}. The model is as it was: raise the budget, or make the batch smaller.",
            tuner.smallest_peak_bytes,
        )

    def _candidates(self, is_alone: bool) -> tuple[list[ShortlistedPlan], InfeasibleBudgetError | None]:
        if is_alone:
            return self._limits.candidates(self._corrected, self.budget_bytes)
        try:
            return [ShortlistedPlan(SEARCHED, self._limits.solve(self._corrected, self.budget_bytes))], None
        except InfeasibleBudgetError as error:
            return [], error

    def _tightest(self) -> list[ShortlistedPlan]:
        """The smallest plan by the uncorrected prediction, which may be right for it."""
        plan = self._limits.tightest(self._traced.graph)
        return [ShortlistedPlan(SMALLEST, plan)] if plan.peak_bytes <= self.budget_bytes else []

    def _correct(self, num_bytes: int) -> None:
        self._corrected = replace(self._corrected, other_bytes=self._corrected.other_bytes + num_bytes)

    def _prepare_for_more(self, handle: AppliedPlan) -> None:
        """Let the handle know what its plan is for, and who plans for more than that."""
        traced, inputs = self._traced, self._traced.inputs
        arguments = tuple(shapes_of(example) for example in self._examples)
        (first,) = handle.shapes.all
        handle.shapes.become([replace(first, inputs=tuple(inputs), arguments=arguments, graph=self._corrected)])
        handle.shapes.planner = Planner(
            handle.model,
            traced.graph,
            inputs[-1] if inputs else (),
            budget_bytes=self.budget_bytes,
            limits=self._limits,
            correction_bytes=self._corrected.other_bytes - traced.graph.other_bytes,
            optimizer=self._optimizer,
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
        tuning: Tuning,
    ) -> None:
        self._loss_fn, self._optimizer = loss_fn, optimizer
        self._examples = map_tensors(tensor_spec, examples)
        self._devices = [tensor.device for tensor in tensors_in(examples)]
        self._budget, self._limits, self._tuning = budget, limits, tuning

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
            examples = (
                [args] if args else map_tensors(lambda kept: tensor_from_spec(kept, next(devices)), self._examples)
            )
            _fit(
                model,
                loss_fn or self._loss_fn,
                examples,
                self._budget,
                self._optimizer if optimizer is None else optimizer,
                self._limits,
                self._tuning,
                applied,
            )
        except BaseException:
            vars(handle).clear()
            vars(handle).update(before)
            handle.reapply()
            handle.switch_cache_off(model)
            raise


def _finished(
    handle: AppliedPlan, graph: StepGraph, allowed: int, device: torch.device, refitter: Refitter
) -> AppliedPlan:
    static_bytes = sum(size for kind, size in graph.static_bytes.items() if kind != "gradients")
    handle.watch = BudgetWatch(handle, device, allowed, graph.optimizer_state_bytes, static_bytes)
    handle.refitter = refitter
    log_fitted(handle, allowed)
    return handle


@dataclass(frozen=True)
class TracedStep:
    """The step that peaks highest: its number among the examples, its graph, and what the model is called with."""

    index: int
    graph: StepGraph
    inputs: list[Shapes]  # in any of the examples, the largest last
    generators: list[torch.Generator]  # that any of the examples draws from, beside torch's default ones


def _examples(args: tuple[Any, ...], more_batches: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    for further in more_batches:
        if not isinstance(further, tuple):
            raise TypeError(
                f"more_batches= holds a tuple of arguments for each further step, such as more_batches=[(batch,)], "
                f"not {type(further).__name__}"
            )
    return [args, *more_batches]


def trace_highest(model: nn.Module, loss_fn: Any, examples: list[tuple[Any, ...]], optimizer: Any) -> TracedStep:
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
    except TraceError:  # what it does depends on numbers in its tensors
        return trace(model, loss_fn, *args, optimizer=optimizer)


def _described(found: Plan, model: nn.Module, traced: TracedStep) -> Plan:
    return replace(with_parameters(found, model), input_shapes=traced.inputs[-1] if traced.inputs else ())
