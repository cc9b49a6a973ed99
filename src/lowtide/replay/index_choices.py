"""Index choices: the integer outputs of `topk`, `sort`, `argmax`, `nonzero` and similar ops, repeated by every replay.

A mixture-of-experts router picks the experts of a token with `topk`. A replay computes the scores again, and with
kernels that are not deterministic a near tie may go to another expert. The gradients would then be wrong, and as
shapes are the same with `grouped_mm`, no check would notice. So the forward keeps one small copy of each integer
output, and replays return these copies. Everything derived from them is then the same too.

Results of collectives that reduce or exchange tensors between ranks (tensor and expert parallelism) are kept in the
same way: a replay does not communicate, and does not wait for other ranks. A functional collective has two ops. The
first starts it, and in a replay returns an empty tensor; the second, `wait_tensor`, returns the result of the
forward. One that writes to its argument (`torch.distributed.all_to_all_single`) is waited for in the forward, and a
replay copies its result to the argument.

An op whose inputs are such indices, or integers made of them alone, has no choice: a sort of expert numbers gives the
same in each replay, and is run again. The forward decides that, by the integers that it has marked as settled; the log
has an entry without a result for it. Traces tell these ops from others likewise (`trace_records.settled_flags`), but
for those whose shape depends on values (`nonzero`): they are always kept, as the host waits for them on an accelerator.

The copies are in an `IndexChoiceLog`, in the order in which the outermost region makes them. A nested region stores
the position in that log at which it begins, so that its own replay and the outer one read the same entries. Only
modules whose own ops have such outputs run under a dispatch mode, and only inside of regions.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide import _compat
from lowtide.replay.arguments import tensors_in
from lowtide.replay.divergence import ReplayError
from lowtide.replay.op_facts import UNFILLED, OpFacts, facts_of


class IndexChoice(NamedTuple):
    """The output of one op."""

    op: Any
    parts: list[Tensor | None] | None  # None: the op is run again; a part is None if it is a floating-point one
    build: Callable[[list[Any]], Any]  # makes the output from such parts
    num_saves: int  # by the region, before


IndexChoiceLog = list[IndexChoice]


# Ops whose result is not settled though their inputs are: a kernel that torch does not see may fill it, or which of
# several values is written to one place may vary on a GPU.
_UNSETTLED_OPS = (*UNFILLED, "aten.scatter.src", "aten.scatter_.src", "aten.index_put", "aten.kthvalue")


class _Marks:
    """Marks the settled tensors of a module's forward: those computed from kept choices and Python numbers alone.

    Every replay of the module computes them with the same values. Marks of a module around this one do not count, as
    this one may be replayed alone, on other inputs. Only the forward marks tensors and decides by them, so a missing
    mark costs memory and nothing else.
    """

    def __init__(self, around: _Marks | None) -> None:
        self._around = around
        # By the id of a tensor, with the version at which it was made.
        self._made: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def add(self, output: Any, *, is_written: bool = False) -> Any:
        """Mark the output of an op, with the version that it gets when the op has returned; returns it."""
        for tensor in (output,) if isinstance(output, Tensor) else tensors_in(output):
            self._made[id(tensor)] = weakref.ref(tensor), _compat.version_of(tensor) + is_written
        return output

    def add_integers(self, output: Any) -> Any:
        """Mark the choices in the output of an op, not the values that come with them; returns it."""
        self.add([each for each in tensors_in((output,)) if not each.is_floating_point()])
        return output

    def settle(self, facts: OpFacts, args: Any, kwargs: Any) -> bool:
        """Whether an op with these arguments gives the same in each replay. An op that may change marks clears them."""
        may_be = "random" not in facts.flags and not facts.name.startswith(_UNSETTLED_OPS) and not facts.is_foreign
        if may_be and self._has_all(tensors_in((args, kwargs))):
            return True
        may_write = facts.may_write or facts.is_foreign
        if may_write and not all(tensor.is_floating_point() for tensor in tensors_in((args, kwargs))):
            self._clear()
        return False

    def _has_all(self, tensors: Iterable[Tensor]) -> bool:
        """Whether all these tensors are marked, and were not written to since."""
        for tensor in tensors:
            made = self._made.get(id(tensor))
            if made is None or made[0]() is not tensor or made[1] != _compat.version_of(tensor):
                return False
        return True

    def _clear(self) -> None:
        """Forget all marks: an op writes to integers, and some ops do so without giving them a new version."""
        self._made.clear()
        if self._around is not None:
            self._around._clear()

    def end(self) -> _Marks | None:
        """The module has returned: the one around it knows these marks too. Returns those of that one."""
        if self._around is not None:
            self._around._made.update(self._made)
        return self._around


@dataclass(eq=False, slots=True)
class _Cursor:
    """A thread's position in a log. A forward appends to the log at its end; a replay only reads it."""

    log: IndexChoiceLog
    position: int
    is_replay: bool
    frame: Any = None  # of the region whose forward this is
    marks: _Marks | None = None  # of the innermost module whose ops return indices; None: of none, or an inner region
    is_in_force: bool = False  # whether the dispatch mode is
    pending: dict[int, _compat.StorageReference] = field(default_factory=dict)  # collectives that were not waited for


class _CurrentLog(threading.local):
    cursor: _Cursor | None = None
    # Counts the ops of a replay, of which plans retain some by their number: to be told of those that are not run.
    count: Callable[[Any, Any], Any] | None = None


_now = _CurrentLog()


@contextlib.contextmanager
def counted_by(count: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Context manager around a replay in which `count(op, args)` is called for each op that is not run."""
    before, _now.count = _now.count, count
    try:
        yield
    finally:
        _now.count = before


def begin() -> tuple[IndexChoiceLog, int]:
    """Return the log of a region that begins now and its position there; an inner region uses the outer one's log."""
    cursor = _now.cursor
    return ([], 0) if cursor is None else (cursor.log, cursor.position)


def recording(log: IndexChoiceLog, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a region and append its index choices to `log`."""
    if _now.cursor is not None:  # the outer region records
        return _without_choices(_now.cursor, forward, args, kwargs)
    cursor = _Cursor(log, 0, is_replay=False)
    hooks = _compat.current_hooks()
    cursor.frame = None if hooks is None else hooks[0]
    output = _at(cursor, forward, args, kwargs)
    # A replay ends with the region's last saved tensor, and does not reach collectives after it.
    num_saves = _num_saves(cursor)
    while log and log[-1].num_saves == num_saves >= 0 and facts_of(log[-1].op).kept_as != "index":
        log.pop()
    return output


def _without_choices(cursor: _Cursor, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run the forward of an inner region: what its own ops choose is recorded only if it is a module that chooses.

    A replay of this region alone does not run under the dispatch mode of the module around it.
    """
    marks, cursor.marks = cursor.marks, None
    try:
        return forward(*args, **kwargs)
    finally:
        cursor.marks = marks


def _num_saves(cursor: _Cursor) -> int:
    return getattr(cursor.frame, "num_own_saves", -1)


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
    if cursor is None:
        return forward(*args, **kwargs)
    was_in_force, before = cursor.is_in_force, cursor.marks
    cursor.is_in_force, cursor.marks = True, _Marks(before)
    try:
        with contextlib.nullcontext() if was_in_force else _IndexChoiceMode(cursor):
            return forward(*args, **kwargs)
    finally:
        cursor.is_in_force, cursor.marks = was_in_force, cursor.marks.end()


class _IndexChoiceMode(_compat.DispatchMode):
    """Records the index choices of a forward, and returns them in its replays."""

    def __init__(self, cursor: _Cursor) -> None:
        super().__init__()
        self._cursor = cursor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, cursor = kwargs or {}, self._cursor
        if any(map(_compat.is_distributed_type, types)):
            return NotImplemented  # a DTensor runs the op on its shard, under this mode
        facts = facts_of(func)
        kind = facts.kept_as
        if _now.cursor is not cursor:  # an inner replay belongs to another region
            return func(*args, **kwargs)
        marks = cursor.marks
        is_settled = marks is not None and not cursor.is_replay and marks.settle(facts, args, kwargs)
        if not kind or (kind == "index" and marks is None):
            output = func(*args, **kwargs)
            return marks.add(output, is_written=bool(facts.written)) if is_settled and marks is not None else output
        if kind == "wait" and _compat.storage_id(args[0]) not in cursor.pending:
            return func(*args, **kwargs)
        if kind != "index" and cursor.is_replay and cursor.position >= len(cursor.log):
            return func(*args, **kwargs)  # after the last saved tensor, in a replay that does not stop there
        number, cursor.position = cursor.position, cursor.position + 1
        if number < len(cursor.log):
            return self._from_log(cursor.log[number], kind, func, args, kwargs)
        if cursor.is_replay:
            raise _differs(func, "the forward made no choice there")
        output = func(*args, **kwargs)
        if kind == "index" and is_settled and not facts.has_dynamic_shape:
            cursor.log.append(IndexChoice(func, None, list, _num_saves(cursor)))
            return marks.add(output) if marks is not None else output
        parts, build = (list(tensors_in(args[0])), list) if kind == "in place" else _compat.flattened(output)
        if kind == "in place":
            _compat.wait_for_collective(output)
        with _compat.bare_kernels():  # copies, as the model may write to the originals
            copies: list[Tensor | None]
            if kind == "start":
                copies = [torch.empty_like(part, device="meta") for part in parts]
                self._note_pending(parts)
            else:
                copies = [None if kind == "index" and part.is_floating_point() else part.clone() for part in parts]
        cursor.log.append(IndexChoice(func, copies, build, _num_saves(cursor)))
        return marks.add_integers(output) if kind == "index" and marks is not None else output

    def _from_log(self, choice: IndexChoice, kind: str, func: Any, args: Any, kwargs: Any) -> Any:
        if choice.op is not func:
            raise _differs(func, f"the forward ran {facts_of(choice.op).name} there")
        if choice.parts is None:
            return func(*args, **kwargs)
        facts = facts_of(func)
        if kind == "index" and (None in choice.parts or "random" in facts.flags or facts.may_write):
            return _chosen_before(choice.parts, func, args, kwargs)
        if _now.count is not None:
            _now.count(func, args)
        if kind == "index":
            with _compat.bare_kernels():
                return choice.build([part.clone() for part in choice.parts if part is not None])
        if kind == "in place":
            return _written_before(choice.parts, func, args)
        with _compat.bare_kernels():
            if kind == "wait":
                return args[0].copy_(choice.parts[0])  # type: ignore[arg-type]
            device = next(tensor.device for tensor in tensors_in(args))
            parts = [torch.empty_like(part, device=device) for part in choice.parts if part is not None]
        self._note_pending(parts)
        return choice.build(parts)

    def _note_pending(self, parts: list[Tensor]) -> None:
        self._cursor.pending.update((each.id, each) for each in map(_compat.StorageReference, parts))


def _written_before(kept: list[Tensor | None], func: Any, args: Any) -> Any:
    """Write what a collective wrote in the forward to its argument; return what the collective returns."""
    targets = list(tensors_in(args[0]))
    shapes = [[list(tensor.shape) for tensor in tensors if tensor is not None] for tensors in (targets, kept)]
    if shapes[0] != shapes[1]:
        raise _differs(func, f"it writes to {shapes[0]}, and wrote to {shapes[1]} in the forward")
    with _compat.bare_kernels():
        for target, part in zip(targets, kept, strict=True):
            target.copy_(part)  # type: ignore[arg-type]
    return _compat.finished_collective(func, args[0])


def _chosen_before(kept_parts: list[Tensor | None], func: Any, args: Any, kwargs: Any) -> Any:
    """Run an op in a replay, and return its output with the indices of its forward."""
    output = func(*args, **kwargs)
    parts, _ = _compat.flattened(output)
    with _compat.bare_kernels():
        for part, kept in zip(parts, kept_parts, strict=True):
            if kept is not None and part.shape != kept.shape:
                raise _differs(func, f"it gives {list(part.shape)}, and gave {list(kept.shape)} in the forward")
            if kept is not None:
                part.copy_(kept)
        if len(parts) == 2 and kept_parts[0] is None and kept_parts[1] is not None:
            _put_values_at(kept_parts[1], func, args, kwargs, parts[0])
    return output


def _put_values_at(indices: Tensor, func: Any, args: Any, kwargs: Any, values: Tensor) -> None:
    """Write the values that topk, sort, max and similar ops return along with `indices`."""
    source, names = args[0], facts_of(func).argument_names
    if not source.dim():
        values.copy_(source)
        return
    at = names.index("dim")
    dim = args[at] if at < len(args) else kwargs.get("dim", -1)
    is_reduced = indices.dim() < source.dim()
    indices, values = (each.unsqueeze(dim) if is_reduced else each for each in (indices, values))
    torch.gather(source, dim, indices, out=values)


def _differs(func: Any, finding: str) -> ReplayError:
    return ReplayError(
        f"{facts_of(func).name} chooses otherwise in a replay: {finding}. The region does other things than its "
        "forward did: is one of its kernels not deterministic?"
    )
