"""Carries out a plan on a live model. `AppliedPlan` is the handle that `fit` and `apply(model, plan)` return.

A plan recomputes single calls of modules, retains op outputs inside them, moves values to host memory or disk, and
may run modules in parts. The handle patches every module that the plan names, and those that the step calls itself
(`Plan.forwards`; mostly the model alone), to see where a forward begins. A plan decides for each call of a module by
its number in the step, so calls are counted: a forward continues the count of the forward before it in the step, and
a replay starts at the number of the call that it repeats (`eager.calls`).

Op outputs that a region retains are given by op position. If other ops run than planned, as in evaluation, the region
retains other outputs or none; results stay the same.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowtide import _compat
from lowtide.distributed.ranks import ALONE
from lowtide.eager.calls import (
    NO_DECISIONS,
    Decisions,
    ForwardRun,
    Levels,
    PatchedModule,
    RegionLock,
    StepForwards,
    levels_of,
    set_inner_paths,
)
from lowtide.eager.handle import Applied, AppliedStats, refuse_compiled, refuse_other_checkpointing
from lowtide.eager.moves import Moves, counted_paths
from lowtide.eager.over_budget import OutOfMemory, Stepper
from lowtide.eager.replanning import PlannedInputs, Replan, ShapePlans, matching_modules, with_parameters
from lowtide.errors import LowtideError, PlanError
from lowtide.graph.step_graph import Split
from lowtide.graph.time_lines import line_of
from lowtide.plans.plan_text import Trial, trials_table
from lowtide.plans.step_plan import Plan
from lowtide.replay.recomputing import Hooks
from lowtide.solvers.solve import solve
from lowtide.split.split_forward import SplitForward, check_splits
from lowtide.store.activation_store import ActivationStore
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.plans.step_plan import Frontier
    from lowtide.reports.page import Report


logger = logging.getLogger("lowtide")


@dataclass(frozen=True)
class SplitStats:
    """A module that runs in parts, and its calls so far."""

    path: str
    num_parts: int
    num_calls: int
    num_whole: int  # calls whose whole output was computed after all, as something other than a loss read the logits


@dataclass(frozen=True)
class PlanStats(AppliedStats):
    """What an applied plan did so far, with the plans made for larger inputs and after running out of memory."""

    replans: tuple[Replan, ...] = ()
    out_of_memory: tuple[OutOfMemory, ...] = ()
    splits: tuple[SplitStats, ...] = ()

    def __str__(self) -> str:
        text = super().__str__()
        if self.splits:
            whole = sum(split.num_whole for split in self.splits)
            text += f"; {len(self.splits)} modules in parts{f', {whole} times in full after all' if whole else ''}"
        if self.replans:
            text += f"; planned again {len(self.replans)} times for larger inputs"
        if self.out_of_memory:
            last = self.out_of_memory[-1]
            text += (
                f"; out of memory {len(self.out_of_memory)} times, budget now {format_bytes(last.budget_after_bytes)}"
            )
        return text


class AppliedPlan(Applied):
    """The handle of a plan on a model, as `Applied` is of a policy. `plan` is the one used last; `fit` makes others."""

    plan: Plan
    shapes: ShapePlans
    stepper: Stepper
    refitter: Callable[..., None] | None  # from `fit`: runs it again

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        super().__init__(None, [])
        self.model = model
        self.plan = plan
        self.measured_peak_bytes: int | None = None  # of the whole step; None if not measured
        self.measured_slowdown: float | None = None  # over the plain step; None if not measured
        self.candidates: tuple[Trial, ...] = ()  # plans that `fit` tried, the fastest predicted first
        self.watch, self.ranks, self.refitter = None, ALONE, None  # from `fit`; those of before a refit are gone
        self._all_moves: list[Moves] = []  # of every plan so far
        self._split_forwards: dict[Split, SplitForward] = {}  # likewise
        self._has_said = False  # that forwards could not be numbered
        try:
            self.decisions = self.take_in(plan)
        except BaseException:
            self.remove()  # some modules may be patched already
            raise
        # A replay of the user's own checkpoint cannot tell which call it replays, nor the model's input shapes. Inside
        # one, only modules that are called once per step are regions, with the decisions of the first plan.
        several = {module.path for module in plan.modules if module.num_calls > 1}
        self._anywhere = {
            path: tuple(level for level in calls[0] if level.segment is None)
            for path, calls in self.decisions.regions.items()
            if calls.keys() == {0} and path not in several
        }
        self.shapes = ShapePlans(
            self, PlannedInputs(plan, self.decisions, (plan.input_shapes,) if plan.input_shapes else ())
        )
        self.stepper = Stepper(self)
        self.note_on_model()
        self.switch_cache_off(model)

    def take_in(self, plan: Plan) -> Decisions:
        """Patch the modules that a plan names, and return its decisions. Raises `PlanError` if the model has others."""
        modules = matching_modules(self.model, plan)
        moves = Moves(plan, self.model) if plan.moves else None
        known = {region.name: region for region in self._regions}
        regions = levels_of(plan)
        check_splits(self.model, plan.splits)
        splits = {split.path: self._split_forwards.setdefault(split, SplitForward(split)) for split in plan.splits}
        paths = dict.fromkeys([*regions, *splits, *plan.choosers, *counted_paths(plan, self.model)])
        forwards: dict[str, list[dict[str, int]]] = {}
        for forward in plan.forwards:
            forwards.setdefault(forward.path, []).append(dict(forward.before))
        for path in dict.fromkeys(["", *forwards, *paths]) if paths else {}:  # also to see where a forward begins
            if path not in known:
                known[path] = self._patched(path, modules[path])
            known[path].recomputed |= path in regions
            known[path].chooses |= path in plan.choosers
        set_inner_paths(self._regions)  # also for modules patched by earlier plans
        for patched in known.values():
            patched.has_index_choices = patched.chooses or any(known[path].chooses for path in patched.inner_paths)
        self._all_moves += [] if moves is None else [moves]
        return Decisions(regions, moves, splits, forwards)

    def _patched(self, path: str, module: nn.Module) -> PatchedModule:
        patched = PatchedModule(path, module)
        self._regions.append(patched)
        self._patch(patched)
        if next(module.buffers(), None) is not None:
            patched.lock = RegionLock(path)
        return patched

    def see_inputs(self) -> None:
        """Patch the model's forward if the plan patches nothing, so that larger inputs are seen. The hosts call it."""
        if not self._regions:
            self._patched("", self.model)
            self.note_on_model()

    def replanned(self, planned: PlannedInputs, plan: Plan) -> PlannedInputs:
        """Return `planned` with another plan for the same inputs, whose modules are patched."""
        plan = replace(with_parameters(plan, self.model), input_shapes=planned.plan.input_shapes)
        return replace(planned, plan=plan, decisions=self.take_in(plan))

    def use(self, planned: PlannedInputs) -> None:
        """Use another plan where the model's input shapes do not select one."""
        self.plan, self.decisions = planned.plan, planned.decisions

    def step(self, loss_fn: Callable[..., Tensor], *args: Any) -> Tensor:
        """Run `loss_fn(*args)` and its backward, and return the detached loss. Recovers from running out of memory.

        Gradients are accumulated, as by `backward()`. If memory runs out, gradients, buffers and random states are
        restored bit by bit, a plan with a smaller peak is made, and the batch runs again; `stats().out_of_memory` lists
        such steps. If the plan with the smallest peak fails too, the error is raised, with everything restored.

        On a handle that several ranks got from `fit`, all of them call `step`, and they plan again together: for inputs
        that are larger on any rank, and after any rank ran out of memory. An exception on one rank is one on all.
        """
        return self.stepper.step(loss_fn, args)

    def cover(self, loss_fn: Callable[..., Tensor], *args: Any) -> None:
        """Plan for `loss_fn(*args)` if its arguments are larger than any planned for. Runs no step; call it before one.

        For loops that know the batch, and models that are called through other methods than their forward, where the
        handle does not see the inputs.
        """
        if self.enabled:
            self.stepper.cover(loss_fn, args)

    def refit(
        self, loss_fn: Callable[..., Tensor] | None = None, *args: Any, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Plan again for the same budget, as `fit` does, with the model and the optimizer as they are now.

        For handles from `fit`. By default `loss_fn`, its arguments and `optimizer` are those given to `fit`; of the
        arguments, integer tensors have the same values and other tensors random ones. Call it between a backward and
        the next forward. If it raises, the plan stays as it was.
        """
        if self.refitter is None:
            raise LowtideError("refit() is for handles from lowtide.fit: a plan applied by hand has no budget to fit")
        self.refitter(self, loss_fn, args, optimizer)

    def plan_for_graph(
        self, loss_fn: Callable[..., Tensor], args: tuple[Any, ...], reserve_bytes: int
    ) -> PlannedInputs | None:
        if not self.plans_for_graphs or (self.plan.is_plain and not reserve_bytes):
            return None
        planner, planned = self.stepper.planned_with_graph(loss_fn, args)
        assert planned.graph is not None and self.watch is not None
        budget = max(1, self.watch.budget_bytes - reserve_bytes)
        plan = solve(line_of(planned.graph, 0.0), budget, time_limit_s=planner.limits.time_limit_s)
        return self.replanned(planned, plan)

    @contextmanager
    def under_graph_plan(self, planned: PlannedInputs | None) -> Iterator[Plan]:
        before, eager = self.shapes.all, (self.plan, self.decisions)
        if planned is not None:
            self.shapes.become([planned])
            self.use(planned)
        try:
            yield self.plan
        finally:
            if planned is not None:
                self.shapes.become(before)
                self.plan, self.decisions = eager

    def stats(self) -> PlanStats:
        """As for a policy, with the plans made for larger inputs and after running out of memory."""
        stats = super().stats()
        recomputed = tuple(region for region in stats.regions if region.recomputed)
        facts = {**vars(stats), "regions": recomputed}
        splits = tuple(
            SplitStats(each.split.path, each.split.num_parts, each.num_calls, each.num_whole)
            for each in self._split_forwards.values()
        )
        return PlanStats(
            **facts, replans=tuple(self.shapes.replans), out_of_memory=tuple(self.stepper.events), splits=splits
        )

    def run(self, region: PatchedModule, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called in place of a module's forward."""
        forward = region.plain_forward(module)
        if torch.compiler.is_compiling():
            return self._run_compiled(region, forward, args, kwargs)
        run = self._thread.run
        if run is not None and region.name:
            return self._run_eagerly(run, region, module, forward, args, kwargs)
        if not self.enabled and run is None:  # replays follow their forward
            if self.watch is not None:
                self.watch.forward_without_plan()
            return forward(*args, **kwargs)
        decisions = self._decisions_for(region.name, args, kwargs)
        run, before = self._begin_forward(region.name, decisions), _compat.sequence_number()
        try:
            output = self._run_in(run, self._run_eagerly, (run, region, module, forward, args, kwargs), {})
        except BaseException:
            self.begin_step()
            raise
        if run.recorded is not None and not run.recorded.has_hooks and _compat.sequence_number() != before:
            self._say_once(f"no tensors with gradients are found in what {region.name or 'the model'} returns")
        if decisions.moves is not None:
            decisions.moves.end_of_forward(output)
        return output

    def begin_step(self) -> None:
        """Count forwards that the step calls itself from here on, as at the start of a step."""
        self._thread.step = StepForwards()

    def _decisions_for(self, path: str, args: Any, kwargs: dict[str, Any]) -> Decisions:
        """The decisions for a forward. Model inputs that are larger than any plan covers are planned for here."""
        if not self.enabled:
            return NO_DECISIONS
        if not torch.is_grad_enabled():
            return self.decisions
        if self.watch is not None and path == next(iter(self.decisions.forwards), ""):
            self.watch.forward_begins()
        return self.decisions if path else self.shapes.decisions_for(args, kwargs)

    def _begin_forward(self, path: str, decisions: Decisions) -> ForwardRun:
        """The run for a forward that the step calls itself, with the counts that the plan has for it."""
        starts, checkpoint = decisions.forwards.get(path), _compat.checkpoint_in_force()
        if starts is None and not path:
            return ForwardRun(decisions, {}, checkpoint)
        if starts is None:
            is_replay = checkpoint is not None or _compat.running_node() is not None  # of the user's own checkpoint
            if not is_replay and any(decisions.regions.get(path, ())):
                self._say_once(f"{path} is called by the step itself, which was not so in the step planned for")
            return ForwardRun(decisions)
        if self._thread.base.decisions is not decisions:
            self._thread.base = ForwardRun(decisions)
        opens, step = self._thread.base.opens, self._thread.step
        if len(starts) == 1 or not torch.is_grad_enabled():
            return ForwardRun(decisions, dict(starts[0]), checkpoint, opens)
        # A replay of the user's own checkpoint does not tell which forward it repeats: `_anywhere` is for these.
        if _compat.running_node() is not None:
            return ForwardRun(decisions)
        number = step.next_number(path)
        if step.is_over or number == len(starts):
            if step.is_over and (lack := step.lacks(decisions.forwards)) is not None:
                self._say_once(lack)
            self.begin_step()
            number = 0
        return ForwardRun(decisions, dict(starts[number]), None, opens, recorded=self._thread.step.begin(path))

    def _say_once(self, what: str) -> None:
        if not self._has_said:
            self._has_said = True
            logger.warning(
                "%s: what the plan says of one call may be done in another, and peaks and times may differ from those "
                "predicted. Plan for a loss_fn that runs the whole step",
                what,
            )

    def _run_eagerly(
        self,
        run: ForwardRun,
        region: PatchedModule,
        module: nn.Module,
        forward: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
    ) -> Any:
        nth, moves = run.count(region.name), run.decisions.moves
        caller = None if moves is None else moves.set_aside()
        levels: Levels = ()
        try:
            if torch.is_grad_enabled() and not _compat.under_functorch():
                levels = run.decisions.levels(region.name, nth)
                if run.is_in_other_checkpoint():
                    levels = self._anywhere.get(region.name, ()) if self.enabled else ()
                forward = self._measured(region, forward, args) if levels else forward
                forward = run.decisions.in_parts(region.name, module, forward)
                forward = forward if moves is None else moves.counted(region.name, nth, forward)
            output = self._run_levels(run, levels, region, module, nth, forward, args, kwargs)
        finally:
            if moves is not None:
                moves.resume(caller)
        if run.recorded is not None:
            run.recorded.watch(output)
        return output

    def _hooks_for_inputs(
        self, run: ForwardRun, region: PatchedModule, nth: int, args: Any, kwargs: dict[str, Any]
    ) -> Hooks | None:
        moves = run.decisions.moves
        return None if moves is None else moves.hooks_for_inputs(region.name, nth, args, kwargs)

    def _run_compiled(self, region: PatchedModule, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The call as torch.compile sees it. Calls are not counted: a decision for one applies to all of a module."""
        if region.name not in self.decisions.regions or not self.enabled or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return self._checkpointed(forward, args, kwargs)

    def _segments(self) -> tuple[tuple[str, ...], ...]:
        return tuple(region.paths for region in self.plan.regions if region.more)

    def _stores(self) -> list[ActivationStore]:
        return [store for moves in self._all_moves for store in moves.stores.values()]

    def report(
        self, path: str | os.PathLike[str], *, frontier: Frontier | None = None, time_limit_s: float = 5.0
    ) -> Report:
        """As `Plan.report`, with the measured peak, slowdown and candidates."""
        slowdown = self.measured_slowdown
        return self.plan.report(
            path,
            measured_peak_bytes=self.measured_peak_bytes,
            measured_step_s=None if slowdown is None else self.plan.step_s * (1 + slowdown),
            candidates=self.candidates,
            frontier=frontier,
            time_limit_s=time_limit_s,
        )

    def __str__(self) -> str:
        tried = [trials_table(self.candidates)] if len(self.candidates) > 1 else []
        return "\n".join([str(self.plan), *tried, f"({'on' if self.enabled else 'off'})"])


def apply_plan(model: nn.Module, plan: Plan) -> AppliedPlan:
    """`lowtide.apply` for a plan."""
    if plan.engine != "eager":
        raise PlanError(f"this plan is for the {plan.engine} engine: solve with engine='eager' for apply()")
    model = _compat.unwrapped(model)
    refuse_other_checkpointing(model)
    refuse_compiled(model)
    return AppliedPlan(model, plan)
