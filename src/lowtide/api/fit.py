"""`lowtide.plan` and `lowtide.fit`: from a model and a budget to a training step that holds it.

`plan` traces one step and solves for the budget; the model is not changed. `fit` goes on from there: it applies the
best few plans one after the other, measures real steps under each, and keeps the fastest whose measured peak is
within the budget. If the solver's own plan measures above the budget, `fit` adds the excess to the graph as memory
that no plan can avoid, and solves again. `_fit` lists these steps in order.

`api/measure.py` traces the example steps and measures them, `api/plan_search.py` finds the plans, `api/tuner.py`
picks one. The handle that `fit` returns plans again by itself for larger inputs (`eager/replanning.py`).

Cost: a search of up to `time_limit_s` per round, mostly one and at most four; with `split=True` also one for each set
of splits; and real steps for about `tune_s` seconds.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import _compat
from lowtide.api.measure import RealSteps, can_measure, trace_largest
from lowtide.api.plan_search import FitCache, PlanSearch
from lowtide.api.tuner import Tuner
from lowtide.distributed.agreement import check_same_plan
from lowtide.distributed.data_parallel import wrappers_of
from lowtide.distributed.ranks import Ranks, deciding_with, ranks_of
from lowtide.eager.handle import refuse_compiled, refuse_other_checkpointing
from lowtide.eager.over_budget import BudgetWatch
from lowtide.eager.plan_handle import AppliedPlan, apply_plan
from lowtide.eager.replanning import Limits, Planner, shapes_of, tensor_from_spec, tensor_spec
from lowtide.errors import InfeasibleBudgetError
from lowtide.plans.plan_text import split_texts, trials_table
from lowtide.plans.step_plan import Plan
from lowtide.replay.arguments import map_tensors, tensors_in
from lowtide.solvers.solve import SEARCHED
from lowtide.tracing import step_checks as checks
from lowtide.tracing.step_checks import one_at_a_time
from lowtide.tracing.untraced_memory import plain_optimizer
from lowtide.units import check_bytes, check_seconds, format_apart, format_bytes

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
            step = trace_largest(model, loss_fn, _examples(args, more_batches), optimizer)
        return step.for_model(PlanSearch(step, limits, budget).solved())


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
        refuse_compiled(model)
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
    had_tracker = _compat.random_tracker() is not None
    wrappers_of(model)  # before they are frozen
    ranks = ranks_of(request.group)
    with _progress() as say, deciding_with(ranks), checks.old_objects_frozen(), ExitStack() as undo:
        with ranks.together("fit"):
            say("tracing the step")
            step = trace_largest(model, request.loss_fn, request.examples, request.optimizer)
            search = PlanSearch(step, request.limits, request.budget)
            if not ranks.is_alone:
                search.tightest()  # now, as all ranks are here
            applied = functools.partial(_applied, search, apply)
            if ranks.all(request.verify and can_measure(step.device), "whether peaks can be measured"):
                tuner = Tuner(applied, RealSteps(step), search.budget_bytes, request.tune_s, say, ranks)
                undo.callback(tuner.remove_plan)
                handle = _fastest(tuner, search, FitCache(request.cache, search.splits, search.budget_bytes), say)
            else:
                say(f"solving for {format_bytes(search.budget_bytes)}")
                handle = applied(search.solved())
            undo.callback(handle.remove)
            check_same_plan(ranks, handle.plan)
            if not ranks.is_alone and not had_tracker:
                _share_random_state(ranks)
            handle.ranks, handle.refitter = ranks, Refitter(request).refit
            optimizer = plain_optimizer(step.optimizer)
            handle.watch = BudgetWatch(handle, step.device, search.budget_bytes, step.graph, optimizer)
            _log_fitted(handle, search.budget_bytes)
        undo.pop_all()  # nothing has failed, on any rank
    return handle


def _fastest(tuner: Tuner, search: PlanSearch, cache: FitCache, say: Callable[[str], None]) -> AppliedPlan:
    """The handle of the plan in the cache if its measured peak holds, else of the fastest candidate that does."""
    tuner.try_all(search.cached(cache))
    if tuner.has_one():
        return tuner.keep()
    _try_candidates(tuner, search, say)
    tuner.time_all()
    handle = tuner.keep()
    if search.ranks.is_first:
        cache.write(handle.plan, search.splits.correction_bytes, handle.candidates)
    return handle


def _try_candidates(tuner: Tuner, search: PlanSearch, say: Callable[[str], None]) -> None:
    """Measure candidates, and solve again with corrected memory until the solver's own plan holds.

    Raises `InfeasibleBudgetError` if no candidate holds.
    """
    search.splits.correct(0)
    error: InfeasibleBudgetError | None = None
    for number in range(_MAX_ROUNDS):
        say(f"solving for {format_bytes(search.budget_bytes)}")
        tuner.remove_plan()  # with split=True, the step is traced again
        candidates, error = search.candidates()
        if error is not None and number and not tuner.has_one():
            smallest = search.smallest()  # measured peaks were above predictions: its own may not be
            candidates += [smallest] if smallest.plan.peak_bytes <= search.budget_bytes else []
        tuner.try_all(candidates)
        searched = [each for each in candidates if each.name == SEARCHED or each.plan.splits]
        missing_bytes = max(map(tuner.missing_bytes, searched), default=0)
        if not missing_bytes:
            break
        logger.info("a plan takes %s more than predicted: planning again", format_bytes(missing_bytes))
        search.splits.correct(search.splits.correction_bytes + missing_bytes)
    if error is not None and not tuner.has_one() and search.may_run_smallest():
        tuner.try_all([search.smallest()])  # so that the floor in the error is a measured one
    if not tuner.has_one():
        tuner.remove_plan()
        raise _infeasible(search, error, tuner.smallest_peak_bytes)


def _infeasible(search: PlanSearch, error: InfeasibleBudgetError | None, smallest_bytes: int) -> InfeasibleBudgetError:
    """What to raise if no candidate holds. `error` is the solver's, `smallest_bytes` the smallest measured peak."""
    allowed, smallest = format_apart(search.budget_bytes, smallest_bytes)
    if error is None:
        return InfeasibleBudgetError(
            f"no plan kept the measured peak within {allowed} in {_MAX_ROUNDS} rounds; the "
            f"smallest measured is {smallest}. The model is as it was: raise the budget, or make the batch smaller.",
            smallest_bytes,
        )
    error = search.with_split_floor(error)
    if not smallest_bytes:
        return error
    text = f"{error}\nPlans near it were run for real: the smallest peak measured is {smallest}."
    return InfeasibleBudgetError(text, max(error.floor_bytes, smallest_bytes))


def _applied(search: PlanSearch, apply: Callable[[nn.Module, Plan], AppliedPlan], plan: Plan) -> AppliedPlan:
    """Put a plan on the model, and give the handle a `Planner` for larger inputs than those of the examples."""
    step, ranks = search.step, search.ranks
    handle = apply(step.model, step.for_model(plan))
    try:
        split_graph = handle.plan.graph if plan.splits else None
        (first,) = handle.shapes.all
        arguments, graph = tuple(map(shapes_of, step.examples)), split_graph or search.splits.corrected()
        handle.shapes.become([replace(first, inputs=tuple(step.inputs), arguments=arguments, graph=graph)])
        handle.shapes.planner = Planner(
            handle.model,
            split_graph or step.graph,
            step.largest_inputs,
            budget_bytes=search.budget_bytes,
            limits=search.limits,
            correction_bytes=search.splits.correction_bytes,
            optimizer=step.optimizer,
            splits=plan.splits,
            ranks=ranks,
            smallest=None if ranks.is_alone else step.for_model(search.tightest(plan.splits)),
        )
    except BaseException:
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


def _examples(args: tuple[Any, ...], more_batches: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    for batch in more_batches:
        if not isinstance(batch, tuple):
            raise TypeError(
                "more_batches= holds a tuple of arguments for each further step, such as more_batches=[(batch,)], "
                f"not {type(batch).__name__}"
            )
    return [args, *more_batches]


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yields a function that reports the stage that `fit` is in; at the end its line on the terminal is cleared.

    If the logger "lowtide" logs INFO, each stage is a log line. Otherwise, if stderr is a terminal, each stage
    overwrites the one before; a logger level above WARNING silences that too. A replaced `sys.stderr` (a notebook, a
    progress bar, a test) is not written to.
    """
    is_on_terminal = False

    def write(text: str) -> None:
        nonlocal is_on_terminal
        if sys.stderr is not None and sys.stderr.isatty():
            is_on_terminal = True
            sys.stderr.write(f"\r\x1b[2K{text}")
            sys.stderr.flush()

    def say(stage: str) -> None:
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s", stage)
        elif logger.isEnabledFor(logging.WARNING) and sys.stderr is sys.__stderr__:
            write(f"lowtide: {stage} ")

    try:
        yield say
    finally:
        if is_on_terminal:
            write("")


_ACTIONS = {"keep": "kept", "recompute": "recomputed", "host": "offloaded", "disk": "offloaded to disk"}
_ALWAYS_LOGGED = ("keep", "recompute", "host")


def _log_fitted(handle: AppliedPlan, budget_bytes: int) -> None:
    """Log one line on the plan that was kept, and a table of the candidates if there were several."""
    plan, peak, slowdown = handle.plan, handle.measured_peak_bytes, handle.measured_slowdown
    sizes = {action: size for action, size in plan.bytes_by_action().items() if size or action in _ALWAYS_LOGGED}
    logger.info(
        "%s: %d regions, %s%s; peak %s predicted, %s measured, within %s; %.1f %% slower predicted, %s measured",
        "nothing to do, the step fits as it is" if plan.is_plain else "fitted",
        len(plan.regions),
        ", ".join(f"{format_bytes(size)} {_ACTIONS.get(action, 'compressed')}" for action, size in sizes.items()),
        "".join(f", {text}" for text in split_texts(plan.splits)),
        format_bytes(plan.peak_bytes),
        "not" if peak is None else format_bytes(peak),
        format_bytes(budget_bytes),
        100 * plan.slowdown,
        "not" if slowdown is None else f"{100 * slowdown:.1f} %",
    )
    if len(handle.candidates) > 1:
        logger.info("candidates:\n%s", trials_table(handle.candidates))
