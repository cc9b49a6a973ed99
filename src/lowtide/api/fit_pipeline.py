"""`lowtide.fit_pipeline`: a plan for each stage of a pipeline, for the microbatches that it holds at once.

A stage of `torch.distributed.pipelining` holds the activations of all microbatches under GPipe. Under 1F1B it holds
as many as there are stages from it to the last: early stages hold more than late ones, so each stage gets its own
plan.

One microbatch of each stage is traced on fake tensors, and `sweep` gives plans from the fastest to the smallest. The
fastest is chosen whose predicted peak fits. Beside parameters, gradients and optimizer state, that peak has the bytes
that the plan keeps of a microbatch from forward to backward, times the most microbatches in flight by the schedule's
list of actions, and the most that one forward or backward needs in addition. Then a real step of the schedule is
measured. While the peak is above the budget on some rank, the ranks concerned go on to smaller plans and all measure
again. Ranks that run the same stages (data parallelism around the pipeline) choose the same plan.

Cost: one step of the schedule to record the microbatches, one search per stage, and one step per round.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from lowtide import _compat
from lowtide.api.measure import measure
from lowtide.distributed.agreement import plan_hash
from lowtide.distributed.ranks import Ranks, deciding_with, ranks_of
from lowtide.eager.plan_handle import AppliedPlan, apply_plan
from lowtide.eager.replanning import with_parameters
from lowtide.errors import InfeasibleBudgetError, LowtideError, TraceError
from lowtide.graph.step_graph import StepGraph
from lowtide.plans.step_plan import Plan
from lowtide.replay.arguments import map_tensors
from lowtide.simulator.timeline import KINDS, PHASES, simulate
from lowtide.snapshot import Restorer
from lowtide.solvers.solve import sweep
from lowtide.tracing import step_checks as checks
from lowtide.tracing.step_checks import one_at_a_time
from lowtide.tracing.trace import output_sum_loss, trace
from lowtide.tracing.untraced_memory import optimizer_memory, present_state_bytes
from lowtide.units import check_bytes, format_apart, parse_bytes

_MAX_ROUNDS = 8  # each goes on to a smaller plan where a rank is over its budget, of sixteen at most


@dataclass(frozen=True)
class PipelineHandle:
    """The plans on the stages of this rank: `handles` by the number of the stage; see `AppliedPlan`.

    `in_flight` is the most microbatches that a stage holds, `measured_peak_bytes` the peak of a whole step here.
    """

    handles: dict[int, AppliedPlan]
    in_flight: dict[int, int]
    measured_peak_bytes: int

    def remove(self) -> None:
        """Remove the plans from all stages."""
        for handle in self.handles.values():
            handle.remove()


@one_at_a_time
def fit_pipeline(
    schedule: Any,
    run: Callable[[], Any],
    *,
    budget: int | str,
    optimizer: torch.optim.Optimizer | None = None,
    time_limit_s: float = 10.0,
    group: Any = None,
) -> PipelineHandle:
    """Put a plan on each stage of a pipeline that this rank runs, so that its measured peak is within `budget`.

    Every rank calls it. `schedule` is one of `torch.distributed.pipelining` (GPipe, 1F1B, interleaved 1F1B) with its
    stages, and `run()` runs one step of it with a batch: `schedule.step(x)` on the first rank, `schedule.step()` or
    `schedule.step(target=y)` on others. Budgets may differ between ranks. The steps that are run leave parameters,
    gradients, buffers and random states as they were. `group` is as for `lowtide.fit`.

    Raises `InfeasibleBudgetError` on all ranks if a stage has no plan that holds its budget; no stage has a plan then.
    """
    with deciding_with(ranks_of(group)) as ranks, contextlib.ExitStack() as undo:
        with ranks.together("arguments of fit_pipeline"):  # before a step, in which ranks wait for each other
            check_bytes(budget)
            fitting = _PipelineFit(schedule, run, budget, optimizer, time_limit_s, ranks)
        undo.callback(fitting.remove_plans)
        with ranks.together("fit_pipeline"):
            handle = fitting.fitted()
        undo.pop_all()  # nothing has failed, on any rank
    return handle


@dataclass
class _Stage:
    """A stage with its microbatch and its plans, from the fastest to the smallest.

    `sizes` are the bytes that each plan holds of one microbatch between forward and backward, and takes on top of that.
    """

    number: int
    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    graph: StepGraph | None = None
    plans: list[Plan] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)

    def find_plans(self, time_limit_s: float) -> None:
        def loss_fn(args: Any, kwargs: Any) -> torch.Tensor:
            return output_sum_loss(self.module(*args, **kwargs))

        self.graph = trace(self.module, loss_fn, self.args, self.kwargs, mode="fake")
        frontier = sweep(self.graph, time_limit_s=time_limit_s)
        by_hash = {plan_hash(plan): plan for plan in reversed(frontier.plans)}
        self.plans = [with_parameters(plan, self.module) for plan in by_hash.values()]

    def use(self, plans: list[Plan]) -> None:
        """Take these plans over, and find their sizes."""
        assert self.graph is not None
        self.plans, self.sizes = plans, []
        for plan in plans:
            timeline = simulate(self.graph, plan)
            # Gradients of earlier microbatches exist already: they are part of what the rank holds anyway.
            gradients = timeline.live_bytes[:, KINDS.index("gradients")]
            live = timeline.total_bytes - gradients - self.graph.bytes_before
            num_forward = int((timeline.phases == PHASES.index("forward")).sum())
            held = max(0, int(live[min(num_forward, len(live) - 1)]))
            self.sizes.append((held, max(0, int(live.max()) - held)))


class _PipelineFit:
    def __init__(self, schedule: Any, run: Any, budget: Any, optimizer: Any, time_limit_s: float, ranks: Ranks) -> None:
        self._run, self._optimizer = run, optimizer
        self._time_limit_s, self._ranks = time_limit_s, ranks
        stages = _compat.pipeline_stages(schedule)
        self._stages = [_Stage(stage.stage_index, _compat.unwrapped(stage.submod)) for stage in stages]
        self._all = nn.ModuleList(stage.module for stage in self._stages)
        self._device = checks.device_of(self._all, ())
        total = torch.accelerator.get_memory_info(self._device)[1] if self._device.type != "cpu" else None
        self._budget = parse_bytes(budget, total_bytes=total)
        self._handles: dict[int, AppliedPlan] = {}
        counts = in_flight(_compat.pipeline_actions(schedule))
        if not counts:
            raise LowtideError(
                f"{type(schedule).__name__} has no list of its actions, from which the microbatches in flight at each "
                "stage are counted: use a schedule of torch.distributed.pipelining"
            )
        self._in_flight = counts

    def fitted(self) -> PipelineHandle:
        self._record_microbatches()
        self._find_common_plans()
        chosen, missing_bytes = 0, 0
        for _ in range(_MAX_ROUNDS):
            chosen = self._first_that_fits(chosen, missing_bytes)
            self._apply(chosen)
            with self._unchanged():
                measured = measure(self._run, device=self._device)
            peak_bytes = self._whole_peak(measured.peak_bytes, measured.total_peak_bytes)
            excess = peak_bytes - self._budget
            are_over = self._ranks.gathered(excess > 0, "whether a stage is over its budget")
            if not any(are_over):
                most = {stage: max(counts[stage] for counts in self._in_flight) for stage in self._in_flight[0]}
                return PipelineHandle(dict(self._handles), most, peak_bytes)
            if excess > 0:
                missing_bytes = max(missing_bytes, peak_bytes - self._predicted(chosen))
            chosen += any(are_over[rank] for rank in self._same)
        allowed, measured_peak = format_apart(self._budget, peak_bytes)
        raise InfeasibleBudgetError(
            f"no plan kept the stages within their budgets in {_MAX_ROUNDS} rounds; this rank has "
            f"{allowed} and measured {measured_peak}. Raise the budget, or use more and smaller microbatches.",
            peak_bytes,
        )

    def remove_plans(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        """A block in which steps run; on exit all state is as before."""
        restorer = Restorer(self._all, self._run, (), self._device, copies_on_host=True)
        gradients = [parameter.grad for parameter in self._all.parameters() if parameter.grad is not None]
        for tensor in (*self._all.buffers(), *gradients):
            restorer.before_write(tensor)
        try:
            yield
        finally:
            restorer.restore()

    def _record_microbatches(self) -> None:
        """Run one step, and note what each stage is called with first."""
        hooks = []
        for stage in self._stages:

            def note(module: nn.Module, args: Any, kwargs: Any, stage: _Stage = stage) -> None:
                if not stage.args and not stage.kwargs:
                    stage.args, stage.kwargs = map_tensors(_spec, (args, kwargs))

            hooks.append(stage.module.register_forward_pre_hook(note, with_kwargs=True))
        try:
            with self._ranks.together("step of the pipeline"), self._unchanged():
                self._run()
        finally:
            for hook in hooks:
                hook.remove()
        if any(not stage.args and not stage.kwargs for stage in self._stages):
            raise TraceError("run() did not call all stages of this rank: let it run one step of the schedule")

    def _find_common_plans(self) -> None:
        """Plans of each stage, of the lowest rank that runs the same stages."""
        key = tuple(stage.number for stage in self._stages)
        keys = self._ranks.gathered(key, "stages")
        made: list[list[Plan]] = []
        with self._ranks.together("plans of stages"):
            for stage in self._stages:
                stage.find_plans(self._time_limit_s)
            if keys.index(key) == self._ranks.rank:
                made = [[replace(plan, graph=None) for plan in stage.plans] for stage in self._stages]
        plans = self._ranks.gathered(made, "plans of stages")[keys.index(key)]
        for stage, own in zip(self._stages, plans, strict=True):
            stage.use(own)
        self._same = [rank for rank, other in enumerate(keys) if other == key]

    def _first_that_fits(self, first: int, missing_bytes: int) -> int:
        """The fastest plans, by position, with which all ranks that run these stages are predicted to fit."""
        num = max(len(stage.plans) for stage in self._stages)
        fits = [self._predicted(at) + missing_bytes <= self._budget for at in range(num)]
        of_ranks = self._ranks.gathered(fits, "predicted peaks of stages")
        found = [at for at in range(first, num) if all(of_ranks[rank][at] for rank in self._same)]
        with self._ranks.together("plans of stages"):
            if not found:
                floor = min(map(self._predicted, range(num))) + missing_bytes
                allowed, needed = format_apart(self._budget, floor)
                raise InfeasibleBudgetError(
                    f"stages {[stage.number for stage in self._stages]} need {needed} at least, with up "
                    f"to {max(max(counts.values()) for counts in self._in_flight)} microbatches in flight, and the "
                    f"budget is {allowed}. Raise it, or use more and smaller microbatches.",
                    floor,
                )
        return found[0]

    def _predicted(self, at: int) -> int:
        """The predicted peak of this rank with the plans at this position."""
        sizes = {stage.number: stage.sizes[min(at, len(stage.sizes) - 1)] for stage in self._stages}
        held = max(sum(num * sizes[number][0] for number, num in counts.items()) for counts in self._in_flight)
        # One of the microbatches in flight is the one that runs: it is held already.
        return self._fixed_bytes + held + max(extra for _, extra in sizes.values())

    @cached_property
    def _state_bytes(self) -> int:
        return optimizer_memory(self._optimizer, self._device)[0]

    @cached_property
    def _fixed_bytes(self) -> int:
        parameters = [*self._all.parameters()]
        own = sum(map(_compat.local_bytes, (*parameters, *self._all.buffers())))
        gradients = sum(_compat.local_bytes(parameter) for parameter in parameters if parameter.requires_grad)
        return own + gradients + self._state_bytes

    def _apply(self, at: int) -> None:
        self.remove_plans()
        for stage in self._stages:
            self._handles[stage.number] = apply_plan(stage.module, stage.plans[min(at, len(stage.plans) - 1)])

    def _whole_peak(self, step_bytes: int, total_bytes: int) -> int:
        if self._device.type != "cpu":
            return total_bytes + max(0, self._state_bytes - present_state_bytes(self._optimizer, self._device))
        tensors = [*self._all.parameters(), *self._all.buffers()]
        tensors += [parameter.grad for parameter in self._all.parameters() if parameter.grad is not None]
        return step_bytes + sum(map(_compat.local_bytes, tensors)) + self._state_bytes


def in_flight(actions: Sequence[tuple[int, str]]) -> list[Counter[int]]:
    """How many microbatches each stage holds after each forward, by the actions of a rank.

    A microbatch is in flight from its forward ("F") to its backward ("B"), or to the part of it that computes gradients
    of weights ("W") where the backward is split.

    >>> [dict(counts) for counts in in_flight([(0, "F"), (0, "F"), (0, "B"), (0, "F")])]
    [{0: 1}, {0: 2}, {0: 2}]
    """
    now: Counter[int] = Counter({stage: 0 for stage, _ in actions})
    found = []
    for stage, kind in actions:
        now[stage] += {"F": 1, "B": -1, "W": -1}.get(kind, 0)
        if kind == "F":
            found.append(Counter(now))
    return found


def _spec(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape without memory; small integer tensors as they are."""
    if not tensor.is_floating_point():
        return tensor.detach().clone()
    return torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
