"""Index choices: the integer outputs of `topk`, `sort`, `argmax`, `nonzero` and similar ops, repeated by every replay.

A mixture-of-experts router picks the experts of a token with `topk`. A replay computes the scores again, and with
kernels that are not deterministic a near tie may go to another expert. The gradients would be those of another
function, and with `grouped_mm` no shape would show it. So the forward keeps one small copy of each integer output, and
replays return these copies. Everything derived from them is then the same too.

The copies are in an `IndexChoiceLog`, in the order in which the outermost region makes them. A nested region stores the
position in that log at which it begins, so that its own replay and the outer one read the same entries. Only modules
whose own ops return indices run under a dispatch mode, and only inside of regions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from lowtide import _compat
from lowtide.replay.divergence import ReplayError
from lowtide.replay.op_facts import facts_of


class IndexChoice(NamedTuple):
    """The output of one op: its parts, None for floating-point ones, and a function that rebuilds it from parts."""

    op: Any
    parts: list[Tensor | None]
    build: Callable[[list[Any]], Any]


IndexChoiceLog = list[IndexChoice]


class _Cursor:
    """A thread's position in a log. A forward appends to the log at its end; a replay only reads it."""

    __slots__ = ("is_choosing", "is_replay", "log", "position")

    def __init__(self, log: IndexChoiceLog, position: int, *, is_replay: bool) -> None:
        self.log, self.position, self.is_replay = log, position, is_replay
        self.is_choosing = False  # whether the dispatch mode is already in force


class _CurrentLog(threading.local):
    cursor: _Cursor | None = None


_now = _CurrentLog()


def begin() -> tuple[IndexChoiceLog, int]:
    """Return the log of a region that begins now and its position there; an inner region uses the outer one's log."""
    cursor = _now.cursor
    return ([], 0) if cursor is None else (cursor.log, cursor.position)


def recording(log: IndexChoiceLog, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a region and append its index choices to `log`."""
    if _now.cursor is not None:  # the outer region records
        return forward(*args, **kwargs)
    return _at(_Cursor(log, 0, is_replay=False), forward, args, kwargs)


def replaying(log: IndexChoiceLog, start: int, replay: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run the replay of a region that began at `start` in `log`, with the index choices of its forward."""
    return _at(_Cursor(log, start, is_replay=True), replay, args, kwargs)


def _at(cursor: _Cursor, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    before, _now.cursor = _now.cursor, cursor
    try:
        return call(*args, **kwargs)
    finally:
        _now.cursor = before


def choosing(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a module whose ops return indices; outside of regions, just call it."""
    cursor = _now.cursor
    if cursor is None or cursor.is_choosing:
        return forward(*args, **kwargs)
    cursor.is_choosing = True
    try:
        with _IndexChoiceMode(cursor):
            return forward(*args, **kwargs)
    finally:
        cursor.is_choosing = False


class _IndexChoiceMode(_compat.DispatchMode):
    """Records the index choices of a forward, and returns them in its replays."""

    def __init__(self, cursor: _Cursor) -> None:
        super().__init__()
        self._cursor = cursor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, cursor = kwargs or {}, self._cursor
        if _now.cursor is not cursor or not _chooses(func):  # ops of an inner replay belong to another region
            return func(*args, **kwargs)
        number, cursor.position = cursor.position, cursor.position + 1
        if number < len(cursor.log):
            return _chosen_before(cursor.log[number], func, args, kwargs)
        if cursor.is_replay:
            raise _differs(func, "the forward made no choice there")
        output = func(*args, **kwargs)
        parts, build = _compat.flattened(output)
        with _compat.bare_kernels():  # copies, as the model may write to the originals
            copies = [None if part.is_floating_point() else part.clone() for part in parts]
        cursor.log.append(IndexChoice(func, copies, build))
        return output


def _chosen_before(choice: IndexChoice, func: Any, args: Any, kwargs: Any) -> Any:
    """Return the output of an op in a replay, with the indices of its forward."""
    if choice.op is not func:
        raise _differs(func, f"the forward ran {facts_of(choice.op).name} there")
    if None not in choice.parts and "random" not in facts_of(func).flags:
        with _compat.bare_kernels():
            return choice.build([part.clone() for part in choice.parts if part is not None])
    output = func(*args, **kwargs)
    parts, _ = _compat.flattened(output)
    with _compat.bare_kernels():
        for part, kept in zip(parts, choice.parts, strict=True):
            if kept is not None and part.shape != kept.shape:
                raise _differs(func, f"it gives {list(part.shape)}, and gave {list(kept.shape)} in the forward")
            if kept is not None:
                part.copy_(kept)
        if len(parts) == 2 and choice.parts[0] is None and choice.parts[1] is not None:
            parts[0].copy_(_values_at(choice.parts[1], func, args, kwargs))
    return output


def _values_at(indices: Tensor, func: Any, args: Any, kwargs: Any) -> Tensor:
    """Return the values that topk, sort, max and similar ops return along with `indices`."""
    source, names = args[0], facts_of(func).argument_names
    if not source.dim():
        return source
    at = names.index("dim")
    dim = args[at] if at < len(args) else kwargs.get("dim", -1)
    is_reduced = indices.dim() < source.dim()
    values = source.gather(dim, indices.unsqueeze(dim) if is_reduced else indices)
    return values.squeeze(dim) if is_reduced else values


def _differs(func: Any, finding: str) -> ReplayError:
    return ReplayError(
        f"{facts_of(func).name} chooses otherwise in a replay: {finding}. The region does other things than its "
        "forward did: is one of its kernels not deterministic?"
    )


_known: dict[int, bool] = {}  # by the id of an op: ops live as long as torch and are slow to hash


def _chooses(func: Any) -> bool:
    known = _known.get(id(func))
    if known is None:
        is_known = _compat.is_op_with_schema(func)
        known = _known[id(func)] = is_known and "index" in facts_of(func).flags
    return known
