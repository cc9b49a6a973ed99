"""A plan carried out on a live model: regions replayed through `lowtide.checkpoint`, outputs of single ops held.

Which outputs a region holds is decided by op position, counted afresh in each forward and in each replay. A module
that is called several times in a step has a decision for each call; calls are counted from the start of the model's
forward, and a replay counts on from where its own forward began.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts, noop_context_fn

from lowtide import _compat
from lowtide.engines.eager import Applied, PatchedModule, refuse_other_checkpointing
from lowtide.errors import PlanError
from lowtide.memory.checkpoint import checkpoint
from lowtide.memory.region import is_recomputing
from lowtide.plans import Plan, Recompute

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class AppliedPlan(Applied):
    """A plan on a model. As `Applied`: `enabled` switches it off and on, `remove()` takes it off for good."""

    def __init__(self, plan: Plan, modules: list[PatchedModule], decisions: dict[str, dict[int, Recompute]]) -> None:
        self.plan = plan
        self.measured_peak_bytes: int | None = None  # of the whole step, where `fit` measured it
        self._decisions = decisions
        self._is_in_model = False
        self._counts: dict[str, int] = {}  # calls of each module so far in the model's forward
        super().__init__(None, modules)

    def run(self, region: PatchedModule, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a module's forward as planned."""
        if not region.name:
            return self._run_model(forward, args, kwargs)
        nth = self._counts.get(region.name, 0)
        if self._is_in_model or is_recomputing():
            self._counts[region.name] = nth + 1
        decision = self._decisions[region.name].get(nth)
        if decision is None or not self.enabled or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        forward, kwargs = self._without_options(forward, kwargs)
        if torch.compiler.is_compiling():
            return checkpoint(forward, *args, **kwargs)
        held = functools.partial(_holding, decision) if decision.keep_ops else noop_context_fn
        call = functools.partial(self._replayable, region, forward, dict(self._counts))
        return checkpoint(call, *args, context_fn=held, **kwargs)

    def _run_model(self, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """The model's own forward: calls are counted from here. Modules called outside of it are at their first."""
        before = self._is_in_model, self._counts
        self._is_in_model, self._counts = True, {}
        try:
            return forward(*args, **kwargs)
        finally:
            self._is_in_model, self._counts = before

    def _replayable(
        self, region: PatchedModule, forward: Callable[..., Any], counts: dict[str, int], *args: Any, **kwargs: Any
    ) -> Any:
        if not is_recomputing():
            with self._measuring(region, args):
                return forward(*args, **kwargs)
        region.num_replays += 1
        before, self._counts = self._counts, dict(counts)
        try:
            return forward(*args, **kwargs)
        finally:
            self._counts = before

    def __str__(self) -> str:
        return f"{self.plan}\n({'on' if self.enabled else 'off'})"


def apply_plan(model: nn.Module, plan: Plan) -> AppliedPlan:
    """Carry out a plan on a live model, in place and reversibly."""
    if plan.engine != "eager":
        raise PlanError(f"this plan is for the {plan.engine} engine: solve with engine='eager' for apply()")
    if plan.moves:
        raise PlanError(
            "this plan moves values to the host, which apply() does not carry out yet: solve without host and disk, "
            "or use lowtide.offload around the forward"
        )
    refuse_other_checkpointing(model)
    modules = dict(model.named_modules())
    decisions: dict[str, dict[int, Recompute]] = {}
    for region in plan.regions:
        if region.path not in modules:
            raise PlanError(
                f"the plan recomputes {region.path!r}, and this model has no such module: it is for another. "
                f"{_difference(plan, modules)}"
            )
        decisions.setdefault(region.path, {})[region.nth] = region
    patched = [PatchedModule(path, modules[path], True) for path in decisions]
    if decisions:
        patched.insert(0, PatchedModule("", model, False))  # to know where a forward begins
    return AppliedPlan(plan, patched, decisions)


def _difference(plan: Plan, modules: dict[str, nn.Module]) -> str:
    missing = [region.path for region in plan.regions if region.path not in modules]
    return f"{len(missing)} of its {len(plan.regions)} regions are missing here, such as {', '.join(missing[:3])}"


def _holding(region: Recompute) -> Contexts:
    """Contexts for one region: the forward keeps the outputs of the planned ops, the replay takes them from there."""
    kept, seen = frozenset(region.keep_ops), {False: 0, True: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in _compat.BOOKKEEPING_OPS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        position = seen[context.is_recompute]
        seen[context.is_recompute] = position + 1
        return CheckpointPolicy.MUST_SAVE if position in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
