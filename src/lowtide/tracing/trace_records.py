"""What a recorder writes down, before it is a graph.

Which module calls are given an argument that changes during the forward: those cannot be replayed.

A replay runs a call again on the arguments it had. A cache that the call appends to, or any other object, list or dict
that it changes, is not what it was by then. So arguments that are not tensors are fingerprinted when a call begins and
compared when it ends. Objects that are neither tensors nor plain containers are passed to a replay by reference; those
are compared until the forward is over, as a later call may change what an earlier one was given. Tensors that are
changed in place need no watching here: the recorded ops say so (`StepGraph.unreplayable`).
"""

from __future__ import annotations

import dataclasses
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowtide import _compat
from lowtide.replay.arguments import Fingerprint
from lowtide.store.storage_units import stands_for_storage


class Layout(NamedTuple):
    """How a tensor lies in memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    bytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.nbytes)

    def is_contiguous(self, *order: int) -> bool:
        """Whether it is contiguous, or would be with its dimensions in another order."""
        dims = order or range(len(self.shape))
        return _is_dense([self.shape[dim] for dim in dims], [self.strides[dim] for dim in dims])


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


@dataclass(slots=True)
class RawOp:
    name: str
    packet: Any
    call: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    mutates: tuple[int, ...]
    flags: tuple[str, ...]
    flops: int
    moved_bytes: int  # read and written, views as large as they are
    dtype: torch.dtype | None
    forward_op: int
    workspace_bytes: int = 0
    has_dynamic_shape: bool = False
    seconds: float = 0.0
    host_s: float = 0.0
    layouts: tuple[Layout, ...] = ()  # of the tensors among its arguments


@dataclass(slots=True)
class RawValue:
    bytes: int
    kind: str
    name: str
    born: int
    uses: _compat.StorageUses | None
    dropped: int = -1
    num_aliases: int = 0
    item_bytes: int | None = None  # unknown until it is saved; 0: not for codecs
    row_length: int = 1
    is_settled: bool = False  # the same in every replay: integers, and what is made of nothing but those

    def note_saved(self, tensor: Tensor, *, is_plain: bool) -> None:
        """What a codec would find: numbers of one floating type, saved as their whole storage and not in parts."""
        is_dense = is_plain and tensor.layout is torch.strided and tensor.is_floating_point()
        fits = is_dense and not tensor.is_neg() and stands_for_storage(tensor)
        item_bytes = tensor.element_size() if fits else 0
        if self.item_bytes is None:
            self.item_bytes, self.row_length = item_bytes, max(1, int(tensor.shape[-1])) if tensor.dim() else 1
        elif self.item_bytes != item_bytes:
            self.item_bytes = 0


def settled_flags(op: RawOp, values: Sequence[RawValue]) -> tuple[str, ...]:
    """The flags of an op that has run, and whether what it makes is settled.

    Integers that ops make of floating-point numbers are choices: a replay could choose otherwise, so an engine keeps
    them, and they are settled too. An op that has settled inputs alone chooses nothing: it is not flagged "index".
    """
    is_settled = _NEVER_SETTLED.isdisjoint(op.flags) and all(values[value].is_settled for value in op.inputs)
    for value in op.outputs:
        values[value].is_settled = is_settled or ("index" in op.flags and values[value].is_settled)
    for value in op.mutates:
        values[value].is_settled &= is_settled
    dropped = {"view"} if op.outputs else set[str]()
    dropped |= {"index"} if is_settled else set()
    return tuple(flag for flag in op.flags if flag not in dropped)


_NEVER_SETTLED = frozenset({"random", "custom", "collective"})


@dataclass(slots=True)
class RawSave:
    value: int
    call: int
    made: int
    read: int = -1
    released: int = -1
    used: int = -1
    in_backward: bool = False
    number: int = -1


@dataclass(slots=True)
class RawCall:
    path: str
    kind: str
    parent: int
    first: int
    end: int = -1
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    num_saves: int = 0
    changes: str = ""  # the name of an argument that is changed while the forward runs


@dataclass
class Clock:
    """How op times are taken: `mark` before and after each op, `seconds` from the marks when the step is over."""

    mark: Callable[[], Any] = time.perf_counter
    seconds: Callable[[list[tuple[Any, Any]]], list[float]] = field(
        default=lambda marks: [after - before for before, after in marks]
    )


_MAX_DEPTH = 32
_UNCHANGEABLE = (
    *(type(None), bool, int, float, complex, str, bytes, type, range, slice, torch.dtype, torch.device, torch.Size),
    *(torch.Generator, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, nn.Module),
)


class _TrackedObject:
    """An object that calls were given, as it was when last compared."""

    def __init__(self, value: Any) -> None:
        self.reference = weakref.ref(value)
        self.fingerprint = Fingerprint(value)
        self.names: dict[int, str] = {}  # of the argument, by call

    def has_changed(self, value: Any) -> bool:
        if self.fingerprint.still_holds(value):
            return False
        self.fingerprint = Fingerprint(value)
        return True


class ArgumentChanges:
    """Call `begin` and `end` around each call's forward, `finish` after the model's."""

    def __init__(self) -> None:
        self.changed: dict[int, str] = {}  # by call, the name of the argument
        self._open: dict[int, list[tuple[str, Any, Fingerprint]]] = {}
        self._objects: dict[int, _TrackedObject] = {}  # by id

    def begin(self, call: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call's forward is about to run with these arguments."""
        named = [(f"argument {number}", value) for number, value in enumerate(args)] + list(kwargs.items())
        watched = [(name, value) for name, value in named if not isinstance(value, (Tensor, *_UNCHANGEABLE))]
        self._open[call] = [(name, value, Fingerprint(value)) for name, value in watched]
        for name, value in watched:
            for item in _objects_in(value):
                self._compare(item).names[call] = name

    def end(self, call: int) -> None:
        """The call's forward is over."""
        for name, value, fingerprint in self._open.pop(call, ()):
            if not fingerprint.still_holds(value):
                self.changed.setdefault(call, name)
            for item in _objects_in(value):
                self._compare(item)

    def finish(self) -> None:
        """The model's forward is over: compare whatever is still alive."""
        for watched in list(self._objects.values()):
            value = watched.reference()
            if value is not None:
                self._compare(value)
        self._objects.clear()

    def _compare(self, value: Any) -> _TrackedObject:
        found = self._objects.get(id(value))
        if found is None or found.reference() is not value:
            found = self._objects[id(value)] = _TrackedObject(value)
        elif found.has_changed(value):
            for call, name in found.names.items():
                self.changed.setdefault(call, name)
        return found


def before_forwards(modules: Iterable[nn.Module], hook: Callable[..., None]) -> list[Any]:
    """Have `hook(module, args, kwargs)` called before the forwards of modules, behind hooks that they have already.

    torch has no hook of all modules that is shown keywords. Its own modules take tensors only, but for containers, and
    some choose other kernels where they have hooks; those are left out.
    """

    def may_change_objects(module: nn.Module) -> bool:
        is_own = type(module).__module__.startswith("torch.nn.") and not isinstance(module, nn.Sequential)
        return not is_own and not isinstance(module, torch.jit.ScriptModule)

    return [m.register_forward_pre_hook(hook, with_kwargs=True) for m in modules if may_change_objects(m)]


def _objects_in(value: Any, depth: int = 0) -> Iterator[Any]:
    """The objects in an argument that a replay would get by reference, as far as weak references to them can be had."""
    if isinstance(value, (Tensor, *_UNCHANGEABLE)) or depth >= _MAX_DEPTH:
        return
    parts: Any = None
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        parts = value
    elif dataclasses.is_dataclass(value):
        parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    if parts is not None:
        for part in list(parts):
            yield from _objects_in(part, depth + 1)
    elif type(value).__weakrefoffset__:
        yield value
