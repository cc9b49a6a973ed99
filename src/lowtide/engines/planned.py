"""A plan carried out on a live model: regions replayed through `lowtide.checkpoint`, outputs of single ops held.

Which outputs a region holds is decided by op position in its forward; other ops than planned (in evaluation, say) make
it hold other outputs, never compute others. A module that is called several times in a step has a decision for each
call; calls are counted from the start of the model's forward, and a replay counts on from where its own forward began.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import noop_context_fn

from lowtide.engines import _compat
from lowtide.engines.eager import Applied, PatchedModule, refuse_other_checkpointing
from lowtide.errors import PlanError
from lowtide.memory.ambient import Ambient
from lowtide.memory.checkpoint import checkpoint
from lowtide.memory.region import is_recomputing
from lowtide.plans import Plan, Recompute
from lowtide.tracing.records import tensors_in

if TYPE_CHECKING:
    from lowtide.reports import Report
    from lowtide.solvers.sweeping import Frontier

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class _Calls(threading.local):
    """Calls of each module so far in the model's forward, in this thread. None outside of it, where none is counted."""

    counts: dict[str, int] | None = None


class AppliedPlan(Applied):
    """A plan on a model. As `Applied`: `enabled` switches it off and on, `remove()` takes it off for good."""

    def __init__(self, plan: Plan, modules: list[PatchedModule], decisions: dict[str, dict[int, Recompute]]) -> None:
        self.plan = plan
        self.measured_peak_bytes: int | None = None  # of the whole step, where `fit` measured it
        self._decisions = decisions
        self._calls = _Calls()
        super().__init__(None, modules)

    def run(self, region: PatchedModule, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a module's forward as planned."""
        if torch.compiler.is_compiling():
            return self._run_compiled(region, forward, args, kwargs)
        if not region.name:
            return self._run_counted({}, self._run_eagerly, (region, forward, args, kwargs), {})
        return self._run_eagerly(region, forward, args, kwargs)

    def _run_eagerly(
        self, region: PatchedModule, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        nth, counts = 0, self._calls.counts
        if counts is not None:
            nth = counts.get(region.name, 0)
            counts[region.name] = nth + 1
        decision = self._decisions.get(region.name, {}).get(nth)
        if decision is None or not self.enabled or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        forward, kwargs = self._without_options(forward, kwargs)
        held = functools.partial(_holding, decision) if decision.keep_ops else noop_context_fn
        call = functools.partial(self._replayable, region, forward, None if counts is None else dict(counts))
        return checkpoint(call, *args, context_fn=held, **kwargs)

    def _run_compiled(self, region: PatchedModule, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """For the compiler, which counts no calls: a module with a decision for any of them is recomputed in all."""
        if region.name not in self._decisions or not self.enabled or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        forward, kwargs = self._without_options(forward, kwargs)
        return checkpoint(forward, *args, **kwargs)

    def _run_counted(self, counts: dict[str, int] | None, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Count calls on from `counts`. Modules called outside of the model's forward are at their first."""
        before, self._calls.counts = self._calls.counts, counts
        try:
            return forward(*args, **kwargs)
        finally:
            self._calls.counts = before

    def _replayable(
        self,
        region: PatchedModule,
        forward: Callable[..., Any],
        counts: dict[str, int] | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not is_recomputing():
            with self._measuring(region, args):
                return forward(*args, **kwargs)
        region.num_replays += 1
        return self._run_counted(None if counts is None else dict(counts), forward, args, kwargs)

    def report(
        self, path: str | os.PathLike[str], *, frontier: Frontier | None = None, time_limit_s: float = 5.0
    ) -> Report:
        """As `Plan.report`, with what was measured on this model."""
        return self.plan.report(
            path, measured_peak_bytes=self.measured_peak_bytes, frontier=frontier, time_limit_s=time_limit_s
        )

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
    if decisions and "" not in decisions:
        patched.insert(0, PatchedModule("", model, False))  # to know where a forward begins
    return AppliedPlan(plan, patched, decisions)


def _difference(plan: Plan, modules: dict[str, nn.Module]) -> str:
    missing = [region.path for region in plan.regions if region.path not in modules]
    return f"{len(missing)} of its {len(plan.regions)} regions are missing here, such as {', '.join(missing[:3])}"


def _holding(region: Recompute) -> Contexts:
    """Contexts for one region: the forward keeps the outputs of the planned ops, the replay takes them from there."""
    held: dict[_Op, _Held] = {}
    return _Hold(held, frozenset(region.keep_ops)), _Reuse(held)


_Op = tuple[Any, int | None, int]  # the op, the parameter it casts, and how often that was done before


class _Held:
    """The output of one op, and the random states after it."""

    def __init__(self, op: Any, output: Any, kwargs: dict[str, Any]) -> None:
        self._output = _compat.detached(output)  # shares its version counter
        self._tensors = tensors_in(self._output)
        self._versions = [_compat.version_of(tensor) for tensor in self._tensors]
        self._random = None
        if torch.Tag.nondeterministic_seeded in getattr(op, "tags", ()):
            generators = [value for value in kwargs.values() if isinstance(value, torch.Generator)]
            with _compat.without_modes():
                self._random = Ambient({t.device for t in self._tensors}, generators, preserve_rng_state=True)

    @property
    def is_intact(self) -> bool:
        """Whether nothing was written into it since."""
        return self._versions == [_compat.version_of(tensor) for tensor in self._tensors]

    def take(self) -> Any:
        """The output; random numbers go on from where the op left them."""
        if self._random is not None:
            with _compat.without_modes():
                self._random.restore()
        return self._output


class _Counting(_compat.DispatchMode):
    """Knows the ops of a region again in its replay.

    Not by position: a parameter that autocast had cast before the forward came here is cast once more in the replay.
    """

    def __init__(self, held: dict[_Op, _Held]) -> None:
        super().__init__()
        self._held = held
        self._seen: Counter[tuple[Any, int | None]] = Counter()

    def __enter__(self) -> Any:
        self._seen.clear()
        return super().__enter__()

    def _counted(self, func: Any, args: Any) -> _Op | None:
        """The op that is about to run, as its replay knows it; None for one that computes nothing."""
        if func in _compat.BOOKKEEPING_OPS:
            return None
        kind = func, id(args[0]) if _compat.is_cast_of_parameter(func, args) else None
        self._seen[kind] += 1
        return *kind, self._seen[kind]


class _Hold(_Counting):
    def __init__(self, held: dict[_Op, _Held], positions: frozenset[int]) -> None:
        super().__init__(held)
        self._positions = positions

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        op = self._counted(func, args)
        output = func(*args, **kwargs)
        if op is not None and self._seen.total() - 1 in self._positions and not _compat.writes(func):
            self._held[op] = _Held(func, output, kwargs)
        return output


class _Reuse(_Counting):
    """Takes each output once. What is not there, in a second backward say, is computed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op = self._counted(func, args)
        held = None if op is None else self._held.pop(op, None)
        return held.take() if held is not None and held.is_intact else func(*args, **(kwargs or {}))
