"""A module whose forward is ours: how it is called, and what was seen of it.

What a forward under a policy or a plan goes by, kept for its replays.

Between a forward and its replay a handle may be switched off, removed, or given another plan. The replay must not see
any of it: with other regions inside than its forward had, it would save other tensors.

Calls of patched modules, run as parts of the regions that they lie in: one path for policies and for plans.

The regions of a call are its `levels`, the outermost first: segments, which the call is joined to (`replay.segment`),
and last the region of this call alone. Each level but the outermost runs inside of the one before it, in the forward
and in every replay. What happens inside is a `CallPart`, which waits for the replays. A call without patched modules
and further levels inside needs none.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from lowtide import _compat
from lowtide.eager.moves import Moves
from lowtide.errors import LowtideError
from lowtide.plans.step_plan import Plan
from lowtide.replay import index_choices as choices
from lowtide.replay import region as replay
from lowtide.replay import segment_replay as segments
from lowtide.replay.retained import RetainedCall, RetainedOps
from lowtide.replay.segment_replay import OpenSegment


class RegionLock:
    """A block in which only one thread may run a region; another one is refused.

    A replay puts the region's buffers back to what its forward found, for as long as it takes: another thread's
    forward of the same region would read those, and lose what it writes. To let it wait is not enough, as torch looks
    at the buffers' versions once more when the replay is over.
    """

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, threading.RLock()

    @staticmethod
    def for_module(name: str, module: nn.Module) -> RegionLock | None:
        """None for a module without buffers, which threads may run as they like."""
        return RegionLock(name) if next(iter(module.buffers()), None) is not None else None

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise LowtideError(
                f"two threads run {self._name or 'the model'} at once, which has buffers and is recomputed: a replay "
                "in one would change them for the other. Give each thread a copy of the model, or run them in turn."
            )

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    def during(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self:
            return call(*args, **kwargs)


class PatchedModule:
    """A module under a policy or a plan: how it is called, and what was seen of it."""

    hidden_from_replay = True

    def __init__(self, name: str, module: nn.Module, *, recomputed: bool = False) -> None:
        self.name, self.module, self.recomputed = name, module, recomputed
        self.own_forward = vars(module).get("forward")  # someone else's patch, kept and put back
        self.inner_paths: tuple[str, ...] = ()  # of patched modules inside it
        self.chooses = self.has_index_choices = False  # its own ops do, or those of modules inside it: for plans
        self.lock: RegionLock | None = None
        self.saved_bytes = self.num_replays = 0
        self.measured_shape: Any = None
        self.replay = self._replay  # bound once: what waits for the backward refers to it
        self.replay_in_segment = self._replay_in_segment

    def plain_forward(self, module: nn.Module) -> Callable[..., Any]:
        """The forward that this patch stands in front of, for the module or its copy."""
        if torch.compiler.is_compiling():  # Dynamo makes no bound methods
            return self.own_forward or functools.partial(type(module).forward, module)
        forward = self.own_forward or types.MethodType(type(module).forward, module)
        return functools.partial(choices.choosing, forward) if self.chooses else forward

    def _replay(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.num_replays += 1
        return self.plain_forward(module)(*args, **kwargs)

    def _replay_in_segment(self, run: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.replay(module, *args, **kwargs)


def set_inner_paths(regions: Sequence[PatchedModule]) -> None:
    """Tell each patched module which of the others lie inside of it."""
    for region in regions:
        prefix = f"{region.name}." if region.name else ""
        region.inner_paths = tuple(
            each.name for each in regions if each.name.startswith(prefix) and each.name not in ("", region.name)
        )


class Level(NamedTuple):
    """A region that a call belongs to: the call alone, or a `segment` by its number."""

    segment: int | None = None
    is_first: bool = True  # of the segment's calls
    retained: RetainedOps | None = None


Levels = tuple[Level, ...]  # the regions that a call lies in, the outermost first


def levels_of(plan: Plan) -> dict[str, dict[int, Levels]]:
    """The regions of every call that a plan recomputes, by module path and number of the call."""
    found: dict[str, dict[int, Levels]] = {}
    for number, region in sorted(enumerate(plan.regions), key=lambda item: -len(item[1].more)):
        for path, nth in ((region.path, region.nth), *region.more):
            is_first = (path, nth) == (region.path, region.nth)
            retained = RetainedOps(region.path, region.keep_ops) if region.keep_ops and is_first else None
            level = Level(number if region.more else None, is_first, retained)
            calls = found.setdefault(path, {})
            calls[nth] = (*calls.get(nth, ()), level)
    return found


@dataclass(frozen=True)
class Decisions:
    """What a policy or a plan has decided: the regions of calls, by module path and number of the call, and `moves`."""

    hidden_from_replay = True

    regions: dict[str, dict[int, Levels]] = field(default_factory=dict)
    moves: Moves | None = None

    def levels(self, path: str, nth: int) -> Levels:
        calls = self.regions.get(path)
        return () if calls is None else calls.get(nth, ())

    def retained(self, ops: RetainedOps, path: str, nth: int, args: Any, kwargs: dict[str, Any]) -> RetainedCall | None:
        """What a region retains that begins with this call."""
        keeps = {} if self.moves is None else self.moves.keeping_outputs(path, nth)
        return ops.call(args, kwargs, keeps)


NO_DECISIONS = Decisions()


class ForwardRun:
    """A forward of the model, or a replay of a part of it: the decisions it goes by, and the calls counted so far.

    `counts` is None outside of the model's forward. `checkpoint` is the innermost checkpoint that is known of: one
    further in is someone else's. `opens` are the segments that calls are joined to, by their numbers; `within` are
    those that the present call is a part of.
    """

    hidden_from_replay = True

    def __init__(
        self,
        decisions: Decisions,
        counts: dict[str, int] | None = None,
        checkpoint: Any = None,
        opens: dict[int, OpenSegment] | None = None,
        within: frozenset[int] = frozenset(),
    ) -> None:
        self.decisions, self.counts, self.checkpoint = decisions, counts, checkpoint
        self.opens, self.within = {} if opens is None else opens, within

    def segment(self, number: int) -> OpenSegment:
        """The segment with this number, to join a call to. Its replays are runs of their own."""
        if number not in self.opens:
            self.opens[number] = OpenSegment(functools.partial(_new_run, self.decisions, self.counts is not None))
        return self.opens[number]

    def is_in_other_checkpoint(self) -> bool:
        inner = _compat.checkpoint_in_force()
        return inner is not None and inner is not self.checkpoint

    def count(self, path: str) -> int:
        """The number of the call of a module that begins now. Outside of the model's forward each is the first."""
        if self.counts is None:
            return 0
        nth = self.counts.get(path, 0)
        self.counts[path] = nth + 1
        return nth

    def inside(self, within: frozenset[int]) -> ForwardRun:
        """This run, as seen from within the checkpoint that was just entered: a part of these segments."""
        return ForwardRun(self.decisions, self.counts, _compat.checkpoint_in_force(), self.opens, within)

    def counts_of(self, paths: tuple[str, ...]) -> dict[str, int] | None:
        """How often these were called so far, for a replay that begins here."""
        return None if self.counts is None else {path: self.counts[path] for path in paths if path in self.counts}


def _new_run(decisions: Decisions, is_counted: bool) -> ForwardRun:
    return ForwardRun(decisions, {} if is_counted else None)


class CurrentRun(threading.local):
    """The run that this thread is in. A policy does not know where a forward begins: outside of any it has `base`."""

    def __init__(self, decisions: Decisions = NO_DECISIONS) -> None:
        self.run: ForwardRun | None = None
        self.base = ForwardRun(decisions)


class ReappliedPatches:
    """A block in which modules run under a plan again that was taken off them since."""

    def __init__(self, regions: Iterable[PatchedModule], patch: Callable[[PatchedModule], None]) -> None:
        self._regions, self._patch = list(regions), patch
        self._before: list[Any] = []

    def __enter__(self) -> None:
        self._before = [vars(region.module).get("forward") for region in self._regions]
        for region in self._regions:
            self._patch(region)

    def __exit__(self, *exception: object) -> None:
        for region, forward in zip(self._regions, self._before, strict=True):
            if forward is None:
                del region.module.forward
            else:
                region.module.forward = forward


class CallPart(NamedTuple):
    """A call inside one of its regions: the levels further in, and the segments that it is in by then."""

    region: PatchedModule
    nth: int
    levels: Levels
    within: frozenset[int]
    decisions: Decisions
    counts: dict[str, int] | None  # calls so far of the modules inside, for a replay to count on from


_NO_TURN = nullcontext()


class RegionRunner:
    """A handle that runs calls as parts of their regions."""

    _thread: CurrentRun

    def _hooks_for_inputs(
        self, run: ForwardRun, region: PatchedModule, nth: int, args: Any, kwargs: dict[str, Any]
    ) -> replay.Hooks | None:
        """What holds the inputs of a call; by default hooks further out do."""
        return None

    def _run_innermost(
        self,
        run: ForwardRun,
        region: PatchedModule,
        nth: int,
        forward: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
    ) -> Any:
        """The forward itself, inside of all of its regions."""
        return forward(*args, **kwargs)

    def _patches_back(self, region: PatchedModule) -> AbstractContextManager[None]:
        """A block in which the modules inside of this one are patched as they were in its forward."""
        return nullcontext()

    def _run_levels(
        self,
        run: ForwardRun,
        levels: Levels,
        region: PatchedModule,
        module: nn.Module,
        nth: int,
        forward: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a module's forward as a part of the regions that the call lies in."""
        while levels and levels[0].segment in run.within:  # as a part of the call around
            levels = levels[1:]
        if not levels:
            return self._run_innermost(run, region, nth, forward, args, kwargs)
        number, is_first, retained = levels[0]
        function, part = forward, None
        again: Callable[..., Any]
        if region.inner_paths or len(levels) > 1:
            within = run.within if number is None else run.within | {number}
            part = CallPart(region, nth, levels[1:], within, run.decisions, run.counts_of(region.inner_paths))
            function = functools.partial(self._run_part, part, run, module, forward)
        input_hooks = self._hooks_for_inputs(run, region, nth, args, kwargs)
        retain = None
        if retained is not None:
            retain = functools.partial(run.decisions.retained, retained, region.name, nth, args, kwargs)
        if number is None:
            again = region.replay if part is None else functools.partial(self._replay_part, part, None)
        else:
            again = region.replay_in_segment if part is None else functools.partial(self._replay_part, part)
        if region.has_index_choices:
            log, start = choices.begin()
            function = functools.partial(choices.recording, log, function)
            again = functools.partial(choices.replaying, log, start, again)
        turn = region.lock
        if turn is not None:
            again = functools.partial(turn.during, again)
        with turn or _NO_TURN:
            if number is None:
                kept = None if retain is None else retain()
                return replay.run(
                    function, args, kwargs, module=module, replay=again, input_hooks=input_hooks, retained=kept
                )
            return segments.run(
                run.segment(number), function, args, kwargs, is_first=is_first, module=module, replay=again,
                input_hooks=input_hooks, retained=retain,
            )  # fmt: skip

    def _run_in(self, run: ForwardRun, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        before, self._thread.run = self._thread.run, run
        try:
            return call(*args, **kwargs)
        finally:
            self._thread.run = before

    def _run_part(
        self,
        part: CallPart,
        run: ForwardRun,
        module: nn.Module,
        forward: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        inside = run.inside(part.within)
        call = inside, part.levels, part.region, module, part.nth, forward, args, kwargs
        return self._run_in(inside, self._run_levels, call, {})

    def _replay_part(
        self, part: CallPart, run: ForwardRun | None, module: nn.Module, /, *args: Any, **kwargs: Any
    ) -> Any:
        """`run` is shared by the calls of a segment."""
        part.region.num_replays += 1
        if run is None:
            run = ForwardRun(part.decisions, None if part.counts is None else {})
        if run.counts is not None:
            run.counts.update(part.counts or {})
        with self._patches_back(part.region):
            return self._run_part(part, run, module, part.region.plain_forward(module), *args, **kwargs)
