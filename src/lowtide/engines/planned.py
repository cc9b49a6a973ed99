"""A plan carried out on a live model: regions replayed through `lowtide.checkpoint`, outputs of single ops held, values
moved through stores.

Which outputs a region holds is decided by op position in its forward; other ops than planned (in evaluation, say) make
it hold other outputs, never compute others. A module that is called several times in a step has a decision for each
call; calls are counted from the start of the model's forward, and a replay counts on from where its own forward began.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import noop_context_fn

from lowtide.engines import _compat
from lowtide.engines.eager import Applied, AppliedStats, PatchedModule, refuse_other_checkpointing
from lowtide.engines.moves import Moves
from lowtide.errors import PlanError
from lowtide.memory.ambient import Ambient
from lowtide.memory.checkpoint import checkpoint
from lowtide.memory.store import ActivationStore
from lowtide.plans import Plan, Recompute
from lowtide.tracing.records import tensors_in

if TYPE_CHECKING:
    from lowtide.reports import Report
    from lowtide.solvers.sweeping import Frontier

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class _Calls(threading.local):
    """Calls of each module so far in the model's forward, in this thread. None outside of it, where none is counted."""

    counts: dict[str, int] | None = None


class _Start:
    """Where a region's forward began counting calls, for its replays; `is_next` until it has begun."""

    hidden_from_replay = True

    def __init__(self, counts: dict[str, int] | None) -> None:
        self.counts = None if counts is None else dict(counts)
        self.is_next = True


class AppliedPlan(Applied):
    """A plan on a model. As `Applied`: `enabled` switches it off and on, `remove()` takes it off for good."""

    def __init__(
        self,
        plan: Plan,
        modules: list[PatchedModule],
        decisions: dict[str, dict[int, Recompute]],
        moves: Moves | None,
    ) -> None:
        self.plan = plan
        self.measured_peak_bytes: int | None = None  # of the whole step, where `fit` measured it
        self._decisions = decisions
        self._moves = moves
        self._calls = _Calls()
        super().__init__(None, modules)

    def run(self, region: PatchedModule, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a module's forward as planned."""
        if torch.compiler.is_compiling():
            return self._run_compiled(region, forward, args, kwargs)
        if region.name:
            return self._run_eagerly(region, forward, args, kwargs)
        output = self._run_counted({}, self._run_eagerly, (region, forward, args, kwargs), {})
        if self._moves is not None:
            self._moves.end_of_forward(output)
        return output

    def _run_eagerly(
        self, region: PatchedModule, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        nth, counts = 0, self._calls.counts
        if counts is not None:
            nth = counts.get(region.name, 0)
            counts[region.name] = nth + 1
        if self._moves is None:
            return self._run_nth(region, nth, forward, args, kwargs)
        caller = self._moves.set_aside()
        try:
            return self._run_nth(region, nth, forward, args, kwargs)
        finally:
            self._moves.resume(caller)

    def _run_nth(
        self, region: PatchedModule, nth: int, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        decision = self._decisions.get(region.name, {}).get(nth)
        if not self.enabled or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if decision is None:
            counting = None if self._moves is None else self._moves.counting(region.name, nth)
            with contextlib.nullcontext() if counting is None else counting:
                return forward(*args, **kwargs)
        inputs = None if self._moves is None else self._moves.hooks_for_inputs(region.name, nth, args, kwargs)
        forward, kwargs = self._without_options(forward, kwargs)
        held = functools.partial(_holding, decision) if decision.keep_ops else noop_context_fn
        call = functools.partial(self._replayable, region, forward, _Start(self._calls.counts))
        return checkpoint(call, *args, context_fn=held, store=inputs, **kwargs)

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
        self, region: PatchedModule, forward: Callable[..., Any], start: _Start, *args: Any, **kwargs: Any
    ) -> Any:
        if start.is_next:  # the region's own forward, be it in the replay of another around it
            start.is_next = False
            with self._measuring(region, args):
                return forward(*args, **kwargs)
        region.num_replays += 1
        return self._run_counted(None if start.counts is None else dict(start.counts), forward, args, kwargs)

    def stats(self) -> AppliedStats:
        """What became of the recomputed regions, and of values that were moved."""
        found = super().stats()
        return replace(found, regions=tuple(region for region in found.regions if region.recomputed))

    def _stores(self) -> list[ActivationStore]:
        return [] if self._moves is None else list(self._moves.stores.values())

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
    refuse_other_checkpointing(model)
    modules = dict(model.named_modules())
    decisions: dict[str, dict[int, Recompute]] = {}
    for region in plan.regions:
        decisions.setdefault(region.path, {})[region.nth] = region
    missing = [path for path in dict.fromkeys([*decisions, *(move.path for move in plan.moves)]) if path not in modules]
    if missing:
        raise PlanError(
            f"the plan recomputes or moves values of {missing[0]!r}, and this model has no such module: it is for "
            f"another. {len(missing)} of its modules are missing here, such as {', '.join(missing[:3])}"
        )
    moves = Moves(plan, model) if plan.moves else None
    paths = dict.fromkeys([*decisions, *_counted_paths(plan, modules, decisions)])
    patched = [PatchedModule(path, modules[path], path in decisions) for path in paths]
    if patched and "" not in paths:
        patched.insert(0, PatchedModule("", model, False))  # to know where a forward begins
    return AppliedPlan(plan, patched, decisions, moves)


def _counted_paths(plan: Plan, modules: dict[str, nn.Module], decisions: dict[str, dict[int, Recompute]]) -> list[str]:
    """Modules whose saves are counted, and all inside them, whose saves are not theirs."""
    paths_of = {module: path for path, module in modules.items()}
    found: list[str] = []
    for path, nth in dict.fromkeys((move.path, move.nth) for move in plan.moves):
        if nth in decisions.get(path, {}):
            found.append(path)
        else:
            found += [paths_of[module] for module in modules[path].modules()]
    return found


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
