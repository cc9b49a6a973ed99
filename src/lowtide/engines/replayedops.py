"""The replay of a region that holds outputs of ops: it takes those, puts off what only they read, and runs the rest."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from lowtide.engines import _compat
from lowtide.engines.heldops import Counting, is_random, writes
from lowtide.engines.lessons import Lessons, Shapes
from lowtide.engines.moves import Keeping
from lowtide.engines.shownops import Call, Shown, Watched
from lowtide.engines.skippedops import Unseen, allocates
from lowtide.plans import Recompute
from lowtide.tracing.opfacts import facts_of

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def holding(region: Recompute, elsewhere: dict[int, Keeping], lessons: Lessons, shapes: Shapes) -> Contexts:
    """Contexts for one call of a region: the forward keeps the outputs of planned ops, the replay takes them.

    `elsewhere` says where, for those that do not stay; `lessons` are the region's.
    """
    lesson = lessons.known(shapes)
    call = Call(lessons, shapes, lesson)
    forward = Watched(call, region, elsewhere) if lesson is None else Shown(call, lesson, elsewhere)
    return forward, _Replay(call)


class _Replay:
    """The context of a replay. What that needs is made when it begins: many regions wait for theirs."""

    __slots__ = ("_call", "_mode")

    def __init__(self, call: Call) -> None:
        self._call = call
        self._mode: Replayed | None = None

    def __enter__(self) -> Any:
        self._mode = Replayed(self._call)
        return self._mode.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        mode, self._mode = self._mode, None
        assert mode is not None
        mode.__exit__(kind, error, trace)


class Replayed(Counting):
    """Takes each output once. What is not there, in a second backward say, is computed."""

    num_replays_in = 1

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call
        self._stand_ins, self._later = call.begin_replay(), call.later
        self._unseen: Unseen | None = None

    def __enter__(self) -> Any:
        if self._stand_ins and _compat.accelerator() is None:
            self._unseen = Unseen(self._later)
            self._unseen.__enter__()
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if self._unseen is not None:
            self._unseen.__exit__(kind, error, trace)
            self._unseen = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op, later = self._counted(func, args), self._later
        if op is not None:
            goes_on = self._call.goes_on(op)
            held = self._call.held.pop(op, None)
            if held is not None and goes_on and held.is_intact and self._call.fits(op, args, kwargs):
                output, parts = held.take(marks=self._call.is_shown)
                self._call.took(op, parts)
                return output
            if self._call.drawn and is_random(func):
                self._call.draws()
            stand_in = self._stand_ins.get(op)
            if stand_in is not None and goes_on and later.may_put_off() and stand_in.fits(args, kwargs):
                return later.put_off(stand_in, func, args, kwargs)
        if later:
            later.before(func, args, kwargs)
        if self._call.taken and writes(func):
            self._call.writes(facts_of(func).written_tensors(args, kwargs or {}))
        output = func(*args, **kwargs) if kwargs else func(*args)
        if self._call.taken:
            _compat.pass_mark_on(func, args, output)
        if self._stand_ins and allocates(func):
            later.made_blank(output)
        return output
