"""Runs calls of patched modules inside the regions that a policy or plan puts them in, in forwards and replays.

`apply` replaces the forward of modules (`PatchedModule`). For each call of one, the handle looks up in its
`Decisions` which regions the call lies in, the outermost first: segments, which the call shares with others, and at
the innermost level a region of this call alone. `RegionRunner` runs the call inside them by `replay.region`. Policies
and plans share this code.

A replay must run the regions of its forward, or it would save other tensors, although the handle may have been
switched off or given another plan since. So each forward has a `ForwardRun`, with the decisions it started with and
the number of calls of each module so far, and a `CallPart` keeps of it what the replay of one call needs. If the step
itself calls a module several times, `StepForwards` numbers these forwards.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
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
from lowtide.replay.arguments import tensors_in
from lowtide.replay.recomputing import Hooks
from lowtide.replay.region import MakeFrame, OpenSegment
from lowtide.replay.retained import RetainedOps
from lowtide.split.lazy_logits import first_in_backward
from lowtide.split.split_forward import SplitForward


class RegionLock:
    """Lock that lets one thread at a time run a region, and raises in a second one.

    While a replay runs, the region's buffers hold the values from before its forward. Another thread's forward of the
    same region would read those, and its own writes would be lost. Waiting is not enough, as torch compares the
    buffers' versions again after the replay.
    """

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, threading.RLock()

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
    """A module whose forward is replaced: its own forward, how to replay it, and what was measured of it."""

    hidden_from_replay = True
    replay: Callable[..., Any]  # of a call without patched modules inside; bound once, as regions hold it

    def __init__(self, name: str, module: nn.Module, *, recomputed: bool = False) -> None:
        self.name, self.module, self.recomputed = name, module, recomputed
        self.own_forward = vars(module).get("forward")  # a patch by other code, restored by remove()
        self.patch: Any = None  # the function that replaces the forward
        self.inner_paths: tuple[str, ...] = ()  # of patched modules inside it
        self.chooses = self.has_index_choices = False  # ops that choose indices: its own, or inside it
        self.lock: RegionLock | None = None  # of a module with buffers; threads may share others
        self.saved_bytes = self.num_replays = 0
        self.measured_shape: Any = None
        self.began_with: dict[int, str] = {}  # by segment: its first layer when this one last ran in it

    def plain_forward(self, module: nn.Module) -> Callable[..., Any]:
        """The forward that was replaced, bound to the module or to its copy in a copied model."""
        if torch.compiler.is_compiling():  # Dynamo makes no bound methods
            return self.own_forward or functools.partial(type(module).forward, module)
        forward = self.own_forward or types.MethodType(type(module).forward, module)
        return functools.partial(choices.choosing, forward) if self.chooses else forward


def set_inner_paths(regions: Sequence[PatchedModule]) -> None:
    """Set `inner_paths` of each patched module: the patched modules inside it."""
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
    levels: dict[str, dict[int, Levels]] = {}
    for number, region in sorted(enumerate(plan.regions), key=lambda item: -len(item[1].more)):
        for path, nth in ((region.path, region.nth), *region.more):
            is_first = (path, nth) == (region.path, region.nth)
            retained = RetainedOps(region.path, region.keep_ops) if region.keep_ops and is_first else None
            level = Level(number if region.more else None, is_first, retained)
            calls = levels.setdefault(path, {})
            calls[nth] = (*calls.get(nth, ()), level)
    return levels


@dataclass(frozen=True)
class Decisions:
    """The decisions of a policy or plan: regions by path and number of the call, values to move, modules to split."""

    regions: dict[str, dict[int, Levels]] = field(default_factory=dict)
    moves: Moves | None = None
    splits: dict[str, SplitForward] = field(default_factory=dict)  # modules that run in parts, by path
    # `Plan.forwards` by path: for each forward of that module the numbers from which calls in it are counted.
    forwards: dict[str, list[dict[str, int]]] = field(default_factory=dict)

    def levels(self, path: str, nth: int) -> Levels:
        calls = self.regions.get(path)
        return () if calls is None else calls.get(nth, ())

    def in_parts(self, path: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A module's forward, in parts if the module is split."""
        split = self.splits.get(path)
        return forward if split is None else functools.partial(split.run, module, forward)


NO_DECISIONS = Decisions()


class StepForwards:
    """The forwards of modules that the step calls several times itself, since the step began.

    They are numbered by path. A forward whose graph is dropped before the next one begins does not count, such as one
    of an evaluation or of a step that failed. When the backward reaches one of them, the step `is_over`: forwards after
    that belong to another step.
    """

    def __init__(self) -> None:
        self.is_over = False
        self.num_forwards: dict[str, int] = {}
        self._recorded: list[tuple[str, weakref.ref[RecordedForward]]] = []

    def next_number(self, path: str) -> int:
        while not self.is_over and self._recorded and self._recorded[-1][1]() is None:
            self.num_forwards[self._recorded.pop()[0]] -= 1
        return self.num_forwards.get(path, 0)

    def lacks(self, forwards: dict[str, list[dict[str, int]]]) -> str | None:
        """Say which of the planned `forwards` this step did not run before its backward; None if it ran all."""
        for path, planned in forwards.items():
            number = self.num_forwards.get(path, 0)
            if number < len(planned) > 1:
                return f"a step called {path or 'the model'} {number} times, not {len(planned)} times"
        return None

    def begin(self, path: str) -> RecordedForward:
        forward = RecordedForward(self)
        self.num_forwards[path] = self.num_forwards.get(path, 0) + 1
        self._recorded.append((path, weakref.ref(forward)))
        return forward


class RecordedForward:
    """One of `StepForwards`. It lives as long as the graph does, as a hook of the nodes that made module outputs."""

    def __init__(self, step: StepForwards) -> None:
        self._step = step
        self.has_hooks = False

    def watch(self, output: Any) -> None:
        """Call with the outputs of modules in this forward."""
        for tensor in (source for each in tensors_in(output) for source in first_in_backward(each)):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self)
                self.has_hooks = True

    @_compat.disable_dynamo
    def __call__(self, gradients: Any) -> None:
        if not torch.is_grad_enabled():  # else a gradient is computed in the forward, as for a penalty
            self._step.is_over = True


@dataclass(eq=False, slots=True)
class ForwardRun:
    """State of one forward of the model, or of one replay of a part of it."""

    decisions: Decisions  # in force when it began
    counts: dict[str, int] | None = None  # calls of each module so far; None outside of the step's forwards
    checkpoint: Any = None  # the innermost one entered by this engine; one inside of it is the user's
    opens: dict[int, OpenSegment] = field(default_factory=dict)  # segments begun so far, by number
    within: frozenset[int] = frozenset()  # numbers of the segments that the current call is part of
    recorded: RecordedForward | None = None  # this forward among several of the step

    def segment(self, number: int) -> OpenSegment:
        """The open segment with this number, made if need be. Each of its replays has a new `ForwardRun`."""
        if number not in self.opens:
            self.opens[number] = OpenSegment(functools.partial(_new_run, self.decisions, self.counts is not None))
        return self.opens[number]

    def is_in_other_checkpoint(self) -> bool:
        """Whether the current call is inside a checkpoint of the user's own."""
        inner = _compat.checkpoint_in_force()
        return inner is not None and inner is not self.checkpoint

    def count(self, path: str) -> int:
        """Count a call of a module and return its number, from 0. Outside of the step's forwards it is always 0."""
        if self.counts is None:
            return 0
        nth = self.counts.get(path, 0)
        self.counts[path] = nth + 1
        return nth

    def inside(self, within: frozenset[int]) -> ForwardRun:
        """This run for code inside the checkpoint that was just entered, as part of the segments `within`."""
        checkpoint = _compat.checkpoint_in_force()
        return ForwardRun(self.decisions, self.counts, checkpoint, self.opens, within, self.recorded)


def _new_run(decisions: Decisions, is_counted: bool) -> ForwardRun:
    return ForwardRun(decisions, {} if is_counted else None)


class CurrentRun(threading.local):
    """The run of the current thread."""

    def __init__(self, decisions: Decisions = NO_DECISIONS) -> None:
        self.run: ForwardRun | None = None
        self.base = ForwardRun(decisions)  # of calls outside of any run, and with segments that forwards share
        self.step = StepForwards()  # numbers these forwards


class CallPart(NamedTuple):
    """What a replay needs to run a call inside one of its regions: the levels further in and the segments around it."""

    region: PatchedModule
    nth: int
    levels: Levels
    within: frozenset[int]
    decisions: Decisions
    counts: dict[str, int] | None  # calls of the modules inside, before this one


_NO_LOCK = nullcontext()


def _counted(region: PatchedModule, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    region.num_replays += 1
    return forward(*args, **kwargs)


class RegionRunner(ABC):
    """Base class of handles: runs a call inside the regions that it lies in."""

    _thread: CurrentRun

    @abstractmethod
    def _hooks_for_inputs(
        self, run: ForwardRun, region: PatchedModule, nth: int, args: Any, kwargs: dict[str, Any]
    ) -> Hooks | None:
        """Saved-tensor hooks for the inputs of a call; None for those of the caller."""

    @abstractmethod
    def _patches_back(self, region: PatchedModule) -> AbstractContextManager[None]:
        """Context for a replay in which the modules inside `region` are patched as in its forward."""

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
        """Call a module's forward inside the regions `levels`, the outermost first."""
        while levels and levels[0].segment in run.within:  # a call around this one is in the same segment
            levels = levels[1:]
        if not levels:
            return forward(*args, **kwargs)
        number, is_first, retained = levels[0]
        function, part = forward, None
        again: Callable[..., Any] = region.replay
        if region.inner_paths or len(levels) > 1 or region.name in run.decisions.splits:
            within = run.within if number is None else run.within | {number}
            counts = run.counts
            before = None if counts is None else {path: counts[path] for path in region.inner_paths if path in counts}
            part = CallPart(region, nth, levels[1:], within, run.decisions, before)
            function = functools.partial(self._run_part, part, run, module, forward)
            again = functools.partial(self._replay_part, part)
        input_hooks = self._hooks_for_inputs(run, region, nth, args, kwargs)
        new_frame: MakeFrame | None = None
        if retained is not None:  # of a segment's calls only the first, which always begins a frame
            moves = run.decisions.moves
            keeps = {} if moves is None else moves.keeping_outputs(region.name, nth)
            new_frame = retained.frame(args, kwargs, keeps)
        if region.has_index_choices:
            log, start = choices.begin()
            function = functools.partial(choices.recording, log, function)
            again = functools.partial(choices.replaying, log, start, again)
        lock = region.lock
        if lock is not None:
            again = functools.partial(lock.during, again)
        with lock or _NO_LOCK:
            segment = None if number is None else run.segment(number)
            if segment is not None and is_first:
                segment.end()
            try:
                return replay.run(
                    function, args, kwargs, module=module, replay=again, input_hooks=input_hooks, new_frame=new_frame,
                    segment=segment, name=region.name,
                )  # fmt: skip
            finally:
                if number is not None and segment is not None:
                    region.began_with[number] = segment.first

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

    def _replay_alone(self, region: PatchedModule, run: Any, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Replay a call that had no patched modules inside. Modules patched by later plans run plainly."""
        region.num_replays += 1
        if not region.inner_paths:
            return region.plain_forward(module)(*args, **kwargs)
        return self._run_in(ForwardRun(NO_DECISIONS).inside(frozenset()), region.plain_forward(module), args, kwargs)

    def _replay_part(
        self, part: CallPart, run: ForwardRun | None, module: nn.Module, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Replay a call. The calls of a segment share `run`; None for a region of one call."""
        if run is None:
            run = ForwardRun(part.decisions, None if part.counts is None else {})
        if run.counts is not None:
            run.counts.update(part.counts or {})
        with self._patches_back(part.region):
            forward = part.decisions.in_parts(part.region.name, module, part.region.plain_forward(module))
            # Counted where it runs: a replay may end at the input of a region inside.
            return self._run_part(part, run, module, functools.partial(_counted, part.region, forward), *args, **kwargs)
