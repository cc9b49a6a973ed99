"""What a forward under a policy or a plan goes by, kept for its replays.

Between a forward and its replay a handle may be switched off, removed, or given another plan. The replay must not see
any of it: with other regions inside than its forward had, it would save other tensors.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lowtide.engines import _compat
from lowtide.engines.moves import Moves
from lowtide.engines.patched import PatchedModule
from lowtide.plans import Plan
from lowtide.replay.retained import RetainedCall, RetainedOps
from lowtide.replay.segment import OpenSegment


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


NOTHING = Decisions()


class Run:
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

    def inside(self, within: frozenset[int]) -> Run:
        """This run, as seen from within the checkpoint that was just entered: a part of these segments."""
        return Run(self.decisions, self.counts, _compat.checkpoint_in_force(), self.opens, within)

    def counts_of(self, paths: tuple[str, ...]) -> dict[str, int] | None:
        """How often these were called so far, for a replay that begins here."""
        return None if self.counts is None else {path: self.counts[path] for path in paths if path in self.counts}


def _new_run(decisions: Decisions, is_counted: bool) -> Run:
    return Run(decisions, {} if is_counted else None)


class Now(threading.local):
    """The run that this thread is in. A policy does not know where a forward begins: outside of any it has `base`."""

    def __init__(self, decisions: Decisions = NOTHING) -> None:
        self.run: Run | None = None
        self.base = Run(decisions)


class PatchesBack:
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
