"""`lowtide.plan` and `lowtide.fit`: from a model and a budget to a training step that holds it.

`plan` traces one step and solves for the budget; the model is not changed. `fit` goes on from there: it applies the
best few plans one after the other, measures real steps under each, and keeps the fastest whose measured peak is within
the budget. If the peak measured under the solver's own plan is above the budget, the difference is added to the graph
as memory that no plan can avoid, and `fit` solves again.

Measuring is in `api/tuner.py` (which candidate is kept) and `api/measure.py` (real steps whose effects are undone).
The handle that `fit` returns plans again by itself for larger inputs (`eager/replanning.py`).

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

from lowtide import _compat
from lowtide.api.measure import RealSteps, can_measure
from lowtide.api.split_search import SplitSearch
from lowtide.api.tuner import CachedFit, FitCache, Progress, Tuner, log_fitted
from lowtide.distributed.agreement import (
    SentPlan,
    attached,
    check_same_plan,
    plan_of_first,
    sendable,
    with_common_costs,
)
from lowtide.distributed.ranks import Ranks, current, deciding_with, ranks_of
from lowtide.eager.handle import refuse_other_checkpointing
from lowtide.eager.out_of_memory import BudgetWatch
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
from lowtide.graph.step_graph import Split, StepGraph
from lowtide.plans.step_plan import Plan
from lowtide.replay.arguments import map_tensors, tensors_in
from lowtide.simulator.timeline import simulate
from lowtide.snapshot import noted_generators
from lowtide.solvers.solve import REMEMBERED, SEARCHED, SMALLEST, ShortlistedPlan
from lowtide.tracing import step_checks as checks
from lowtide.tracing.step_checks import one_at_a_time
from lowtide.tracing.trace import trace
from lowtide.units import check_bytes, check_seconds, format_apart, format_bytes, parse_bytes

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
    split: bool = False,
    more_batches: Sequence[tuple[Any, ...]] = (),
    time_limit_s: float = 10.0,
    group: Any = None,
) -> Plan:
    """The fastest plan for one step of `model` within `budget` bytes: `lowtide.trace`, then `lowtide.solve`.

    The model is not changed; `lowtide.apply(model, plan)` puts the plan on it. `host`, `lossy` and `time_limit_s` are
    those of `solve`. With `split=True` the output layer with the loss, and token-wise modules such as MLPs, may run a
    few rows at a time; gradients may then differ in the last bits. `more_batches` holds the arguments of further calls
    of `loss_fn`, one tuple per call; the plan is made for the call whose plain step has the highest peak. In a
    distributed job every rank calls this, and gets the same plan; `group` is as for `fit`.

    >>> import torch, lowtide
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> plan = lowtide.plan(model, lambda x: model(x).mean(), torch.randn(4, 8), budget="1GiB")
    >>> plan.regions
    ()
    """
    with deciding_with(ranks_of(group)) as ranks:
        with ranks.together("trace"):
            check_bytes(budget)
            model, limits = checks.module(model), Limits(host, lossy, time_limit_s, split)
            examples = _examples(args, more_batches)
            traced = _trace_largest(model, loss_fn, examples, optimizer)
        budget_bytes = _budget_bytes(ranks, budget, traced.graph)
        search = SplitSearch(model, loss_fn, examples[traced.index], optimizer, traced.graph, limits)
        return _for_model(_solved(ranks, search, budget_bytes), model, traced)


@one_at_a_time
def fit(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    *args: Any,
    budget: int | str,
    optimizer: torch.optim.Optimizer | None = None,
    host: int | str = 0,
    lossy: Any = None,
    split: bool = False,
    more_batches: Sequence[tuple[Any, ...]] = (),
    verify: bool = True,
    tune_s: float = 10.0,
    cache: str | os.PathLike[str] | None = None,
    time_limit_s: float = 10.0,
    group: Any = None,
) -> AppliedPlan:
    """Put the fastest plan on `model` whose measured peak is within `budget`; returns the handle that controls it.

    Takes what `plan` takes. The candidates are the solver's own plans, the usual ways to use torch's checkpoint, with
    `host=` the best plan that moves nothing, and with `split=True` those that run modules in parts. They run real steps
    in turns, with the plain step if it fits on the device, for about `tune_s` seconds. With `tune_s=0` only peaks are
    measured, and the first candidate that holds is kept; with `verify=False` nothing is measured. `handle.candidates`
    has all numbers.

    `model` may be wrapped by `DistributedDataParallel` or `torch.compile`: the plan is for the model inside, and
    `loss_fn` calls the wrapper.

    The steps that `fit` runs leave parameters, gradients, buffers and random states as they were. A model whose plain
    step fits is not patched; `handle.see_inputs()` lets it be planned for larger inputs. If no plan holds, or on any
    other exception, the model is as before the call; `InfeasibleBudgetError` has the smallest measured peak.

    `cache` names a JSON file that remembers the plan. A later call for the same step, budget and versions applies that
    plan and measures only its peak.

    Inputs whose tensors are no larger in any dimension run under the same plan. For larger ones the handle makes a plan
    when the model first gets them, from a trace on fake tensors, with a warning on the logger "lowtide"; such plans are
    not measured. From time to time the handle checks whether the budget still holds (parameters unfrozen, an optimizer
    made later) and warns once if not; `handle.refit()` fits again.

    In a distributed job every rank calls `fit`, and all get the same plan: for the smallest of their budgets and the
    highest of their peaks. `model` may be wrapped in `DistributedDataParallel`; the plan is put on the module inside.
    If one rank fails, all raise. `group` is the process group of the ranks that run the step together, by default all.

    >>> import torch, lowtide
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> handle = lowtide.fit(model, lambda x: model(x).mean(), torch.randn(4, 8), budget="1GiB")
    >>> handle.remove()
    """
    with ranks_of(group).together("arguments of fit"):
        check_bytes(budget)
        model, limits = checks.module(model), Limits(host, lossy, time_limit_s, split)
        examples = _examples(args, more_batches)
        request = FitRequest(loss_fn, examples, budget, optimizer, limits, verify, tune_s, cache, group)
    return _fit(model, request, apply_plan)


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
    group: Any = None

    def __post_init__(self) -> None:
        check_seconds(self.tune_s, "tune_s", may_be_0=True)
        if self.cache is not None and not isinstance(self.cache, str | os.PathLike):
            raise TypeError(f"cache is the path of a file, such as 'fit.json', or None, not {self.cache!r:.80}")


def _fit(model: nn.Module, request: FitRequest, apply: Callable[[nn.Module, Plan], AppliedPlan]) -> AppliedPlan:
    """Trace, solve, apply, measure, keep the fastest. `apply` puts a plan on the model and returns the handle."""
    handle: AppliedPlan | None = None
    had_tracker = _compat.random_tracker() is not None
    with Progress() as say, deciding_with(ranks_of(request.group)) as ranks, checks.old_objects_frozen():
        try:
            with ranks.together("fit"):
                say("tracing the step")
                traced = _trace_largest(model, request.loss_fn, request.examples, request.optimizer)
                fitting = _Fitting(model, request, traced, apply, say)
                is_measured = ranks.all(request.verify and can_measure(fitting.device), "whether peaks can be measured")
                handle = fitting.measured() if is_measured else fitting.predicted()
                check_same_plan(ranks, handle.plan)
                handle.ranks = ranks
                if not ranks.is_alone and not had_tracker:
                    _share_random_state(ranks)
                fitting.watch_budget(handle)
                handle.refitter = Refitter(request)
                log_fitted(handle, fitting.budget_bytes)
        except BaseException:
            if handle is not None:
                handle.remove()
            raise
        return handle


def _share_random_state(ranks: Ranks) -> None:
    """Give all ranks the random state of the lowest, if the steps of `fit` drew the first random DTensor of the job.

    DTensor does so itself when it draws the first. In the first training step that would be inside a region, and the
    replay on other ranks would begin with the random state of before.
    """
    tracker = _compat.random_tracker()
    states = ranks.gathered(None if tracker is None else _compat.random_state_of(tracker), "random states of DTensors")
    if states[0] is not None and all(state is not None for state in states):
        _compat.set_random_state_of(tracker, states[0])


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
        self._limits, self._ranks = request.limits, current()
        self._corrected = traced.graph  # its other_bytes include measured bytes that the simulation did not predict
        self.budget_bytes = _budget_bytes(self._ranks, request.budget, traced.graph)
        self.device = checks.device_of(model, request.examples[0])
        args = request.examples[traced.index]
        self._splits = SplitSearch(model, request.loss_fn, args, request.optimizer, traced.graph, request.limits)
        self._smallest_plans: dict[tuple[Split, ...], Plan] = {}
        if not self._ranks.is_alone:
            self._tightest()  # now, as all ranks are here

    def _tightest(self, splits: tuple[Split, ...] = ()) -> Plan:
        """The plan with the smallest peak by the uncorrected graph."""
        if splits not in self._smallest_plans:
            graph = self._splits.graph(splits)
            self._smallest_plans[splits] = plan_of_first(self._ranks, graph, lambda: self._limits.tightest(graph))
        return self._smallest_plans[splits]

    def predicted(self) -> AppliedPlan:
        """The solver's plan, applied without running a step."""
        self._say_solving()
        return self._put_on_model(_solved(self._ranks, self._splits, self.budget_bytes))

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
        tuner = Tuner(self._put_on_model, steps, self.budget_bytes, request.tune_s, self._say, self._ranks)
        cache = None
        if request.cache is not None:
            cache = FitCache(request.cache, traced.graph, self.budget_bytes, self._limits, self._splits)
        try:
            if cache is not None:
                self._try_cached(cache, tuner)
            is_from_cache = tuner.has_one()
            if not is_from_cache:
                self._corrected = traced.graph
                self._try_candidates(tuner)
                tuner.time_all()
            handle = tuner.keep()
        except BaseException:
            tuner.remove_plan()
            raise
        if cache is not None and not is_from_cache and self._ranks.is_first:
            cache.write(handle.plan, self._correction_bytes, handle.candidates)
        return handle

    def _try_cached(self, cache: FitCache, tuner: Tuner) -> None:
        cached = self._splits.by_first(lambda: _sendable_cached(cache.read()), "cached plan")
        if cached is not None:
            sent, correction_bytes = cached
            self._correct(correction_bytes)
            graph = self._corrected_graph(sent.plan.splits)
            tuner.try_all([ShortlistedPlan(REMEMBERED, attached(self._ranks, graph, sent))])

    def _try_candidates(self, tuner: Tuner) -> None:
        """Measure candidates, and solve again with corrected memory until the solver's own plan holds.

        Raises `InfeasibleBudgetError` if no candidate holds.
        """
        error: InfeasibleBudgetError | None = None
        for number in range(_MAX_ROUNDS):
            self._say_solving()
            candidates, error = self._candidates()
            if error is not None and number and not tuner.has_one():
                candidates += self._smallest()
            tuner.try_all(candidates)
            searched = [each for each in candidates if each.name == SEARCHED or each.plan.splits]
            missing_bytes = max(map(tuner.missing_bytes, searched), default=0)
            if not missing_bytes:
                break
            logger.info("a plan takes %s more than predicted: planning again", format_bytes(missing_bytes))
            self._correct(missing_bytes)
        if tuner.has_one():
            return
        if error is not None and (self._ranks.is_alone or self._limits.split):
            found = error
            error = self._splits.by_first(lambda: self._splits.with_floor(found), "floor with split=True")
        if error is not None and not tuner.smallest_peak_bytes:
            raise error
        allowed, smallest = format_apart(self.budget_bytes, tuner.smallest_peak_bytes)
        if error is not None:
            text = f"{error}\nPlans near it were run for real: the smallest peak measured is {smallest}."
            raise InfeasibleBudgetError(text, error.floor_bytes)
        raise InfeasibleBudgetError(
            f"no plan kept the measured peak within {allowed} in {_MAX_ROUNDS} rounds; the "
            f"smallest measured is {smallest}. The model is as it was: raise the budget, or make the batch smaller.",
            tuner.smallest_peak_bytes,
        )

    def _candidates(self) -> tuple[list[ShortlistedPlan], InfeasibleBudgetError | None]:
        """Plans to measure, and the solver's error if its own plan is not among them."""
        if self._ranks.is_alone:
            return self._found_candidates()

        def made() -> tuple[list[tuple[ShortlistedPlan, SentPlan]], InfeasibleBudgetError | None]:
            candidates, error = self._found_candidates()
            return [(replace(each, plan=Plan()), sendable(each.plan)) for each in candidates], error

        sent, error = self._splits.by_first(made, "candidates")
        graphs = [self._corrected_graph(plan.plan.splits) for _, plan in sent]
        pairs = zip(sent, graphs, strict=True)
        return [replace(each, plan=attached(self._ranks, graph, plan)) for (each, plan), graph in pairs], error

    def _found_candidates(self) -> tuple[list[ShortlistedPlan], InfeasibleBudgetError | None]:
        found, error = self._limits.candidates(self._corrected, self.budget_bytes)
        if not self._limits.split or (found and found[0].plan.is_plain):
            return found, error
        plans = self._splits.plans(self.budget_bytes, self._correction_bytes)
        found += [ShortlistedPlan(_split_name(each), each, is_essential=True) for each in plans]
        return sorted(found, key=lambda each: each.plan.extra_s), None if plans else error

    def _corrected_graph(self, splits: tuple[Split, ...]) -> StepGraph:
        graph = self._splits.graph(splits)
        return replace(graph, other_bytes=graph.other_bytes + self._correction_bytes)

    def _smallest(self) -> list[ShortlistedPlan]:
        """The plan with the smallest peak, though measured peaks were above predictions: its own may not be."""
        plan = replace(self._tightest(), budget_bytes=self.budget_bytes)
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
        smallest = None if self._ranks.is_alone else self._tightest(handle.plan.splits)
        graph = (handle.plan.splits and handle.plan.graph) or self._corrected
        handle.shapes.become([replace(first, inputs=tuple(inputs), arguments=arguments, graph=graph)])
        handle.shapes.planner = Planner(
            handle.model,
            (handle.plan.splits and handle.plan.graph) or self._traced.graph,
            inputs[-1] if inputs else (),
            budget_bytes=self.budget_bytes,
            limits=self._limits,
            correction_bytes=self._correction_bytes,
            optimizer=self._request.optimizer,
            splits=handle.plan.splits,
            ranks=self._ranks,
            smallest=smallest and _for_model(smallest, handle.model, self._traced),
        )

    def watch_budget(self, handle: AppliedPlan) -> None:
        """Have the handle check from time to time whether the budget still holds."""
        graph = self._traced.graph
        static_bytes = sum(size for kind, size in graph.static_bytes.items() if kind != "gradients")
        handle.watch = BudgetWatch(handle, self.device, self.budget_bytes, graph.optimizer_state_bytes, static_bytes)

    def _say_solving(self) -> None:
        self._say(f"solving for {format_bytes(self.budget_bytes)}")


def _budget_bytes(ranks: Ranks, budget: int | str, graph: StepGraph) -> int:
    """The smallest budget of all ranks, in bytes."""
    return ranks.min(parse_bytes(budget, total_bytes=graph.hardware.memory_bytes or None), "budget")


def _solved(ranks: Ranks, search: SplitSearch, budget_bytes: int) -> Plan:
    """The solver's plan, whose predicted peak is within the budget on every rank."""
    if ranks.is_alone:
        return search.solve(budget_bytes)
    missing_bytes = 0
    for _ in range(_MAX_ROUNDS):
        allowed = budget_bytes - missing_bytes
        sent = search.by_first(lambda allowed=allowed: sendable(search.solve(allowed)), "plan")  # type: ignore[misc]
        made = attached(ranks, graph := search.graph(sent.plan.splits), sent)
        peak_bytes = ranks.max(simulate(graph, made).peak_bytes, "predicted peaks")
        if peak_bytes <= budget_bytes:
            break
        # A rank with longer inputs than the one that solves: leave as much room on the one that solves.
        missing_bytes += peak_bytes - budget_bytes
    return replace(made, peak_bytes=peak_bytes, budget_bytes=budget_bytes)


def _sendable_cached(cached: CachedFit | None) -> tuple[SentPlan, int] | None:
    return None if cached is None else (sendable(cached.plan), cached.correction_bytes)


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
    index, ranks = 0, current()
    with recorded_input_shapes(model) as inputs, noted_generators() as generators:
        if len(examples) > 1:
            peaks = [simulate(_trace_cheaply(model, loss_fn, each, optimizer)).peak_bytes for each in examples]
            index = ranks.first(peaks.index(max(peaks)), "largest example")
        graph = trace(model, loss_fn, *examples[index], optimizer=optimizer)
    return TracedStep(index, with_common_costs(ranks, graph), inputs, generators)


def _trace_cheaply(model: nn.Module, loss_fn: Any, args: tuple[Any, ...], optimizer: Any) -> StepGraph:
    try:
        return trace(model, loss_fn, *args, optimizer=optimizer, mode="fake")
    except TraceError:  # the step depends on values of tensors, which fake tensors do not have
        return trace(model, loss_fn, *args, optimizer=optimizer)


def _split_name(plan: Plan) -> str:
    """How the table of candidates calls a plan with splits."""
    parts = {split.kind: split.num_parts for split in plan.splits}
    names = {"loss": "the loss", "tokens": "token-wise modules"}
    return "split: " + ", ".join(f"{names[kind]} in {number}" for kind, number in parts.items())


def _for_model(plan: Plan, model: nn.Module, traced: TracedStep) -> Plan:
    """`plan` with the model's parameter counts and input shapes, by which `apply` recognises another model."""
    return replace(with_parameters(plan, model), input_shapes=traced.inputs[-1] if traced.inputs else ())
