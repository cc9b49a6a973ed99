"""Calls of patched modules, run as parts of the regions that they lie in: one path for policies and for plans.

The regions of a call are its `levels`, the outermost first: segments, which the call is joined to (`replay.segment`),
and last the region of this call alone. Each level but the outermost runs inside of the one before it, in the forward
and in every replay. What happens inside is a `Part`, which waits for the replays. A call without patched modules and
further levels inside needs none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch import nn

from lowtide.engines.patched import PatchedModule
from lowtide.engines.runs import Decisions, Levels, Now, Run
from lowtide.replay import choices
from lowtide.replay import region as replay
from lowtide.replay import segment as segments


class Part(NamedTuple):
    """A call inside one of its regions: the levels further in, and the segments that it is in by then."""

    region: PatchedModule
    nth: int
    levels: Levels
    within: frozenset[int]
    decisions: Decisions
    counts: dict[str, int] | None  # calls so far of the modules inside, for a replay to count on from


_NO_TURN = nullcontext()


class Joining:
    """A handle that runs calls as parts of their regions."""

    _thread: Now

    def _hooks_for_inputs(
        self, run: Run, region: PatchedModule, nth: int, args: Any, kwargs: dict[str, Any]
    ) -> replay.Hooks | None:
        """What holds the inputs of a call; by default hooks further out do."""
        return None

    def _run_innermost(
        self, run: Run, region: PatchedModule, nth: int, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """The forward itself, inside of all of its regions."""
        return forward(*args, **kwargs)

    def _patches_back(self, region: PatchedModule) -> AbstractContextManager[None]:
        """A block in which the modules inside of this one are patched as they were in its forward."""
        return nullcontext()

    def _run_levels(
        self,
        run: Run,
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
            part = Part(region, nth, levels[1:], within, run.decisions, run.counts_of(region.inner_paths))
            function = functools.partial(self._run_part, part, run, module, forward)
        input_hooks = self._hooks_for_inputs(run, region, nth, args, kwargs)
        retain = None
        if retained is not None:
            retain = functools.partial(run.decisions.retained, retained, region.name, nth, args, kwargs)
        if number is None:
            again = region.replay if part is None else functools.partial(self._replay_part, part, None)
        else:
            again = region.replay_in_segment if part is None else functools.partial(self._replay_part, part)
        if region.has_choosers:
            log, start = choices.begin()
            function = functools.partial(choices.recording, log, function)
            again = functools.partial(choices.replaying, log, start, again)
        turn = region.turn
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

    def _run_in(self, run: Run, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        before, self._thread.run = self._thread.run, run
        try:
            return call(*args, **kwargs)
        finally:
            self._thread.run = before

    def _run_part(
        self, part: Part, run: Run, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        inside = run.inside(part.within)
        call = inside, part.levels, part.region, module, part.nth, forward, args, kwargs
        return self._run_in(inside, self._run_levels, call, {})

    def _replay_part(self, part: Part, run: Run | None, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """`run` is shared by the calls of a segment."""
        part.region.num_replays += 1
        if run is None:
            run = Run(part.decisions, None if part.counts is None else {})
        if run.counts is not None:
            run.counts.update(part.counts or {})
        with self._patches_back(part.region):
            return self._run_part(part, run, module, part.region.plain_forward(module), *args, **kwargs)
