"""The records that `Recorder` fills while a step runs: ops, values, saved tensors, module calls, changed arguments.

`RawOp`, `RawValue`, `RawSave` and `RawCall` have the fields of the frozen `Op`, `Value`, `Save` and `Call` of a
`StepGraph`, under the same names, and what is only needed until `tracing.trace` converts them. Positions (`born`,
`read`, ...) count ops.

`ArgumentChanges` finds module calls that cannot be replayed because the forward changes one of their arguments, such
as a key/value cache that a layer appends to. A replay runs a call again on the arguments it had, and would append
twice. Non-tensor arguments are therefore fingerprinted when a call begins and compared when it ends. Objects that are
neither tensors nor plain containers are passed to a replay by reference; they are compared until the forward ends, as
a later call may change them. Tensors changed in place are found from the ops instead (`StepGraph.unreplayable`).
"""

from __future__ import annotations

import time
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowtide import _compat
from lowtide.replay.arguments import CONSTANTS, Arguments, Fingerprint
from lowtide.replay.object_state import reachable
from lowtide.replay.op_facts import UNFILLED
from lowtide.store.storage_units import stands_for_storage


class Layout(NamedTuple):
    """Shape, strides and bytes of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    bytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.nbytes)

    def is_contiguous(self, *order: int) -> bool:
        """Whether it is contiguous, or would be with its dimensions in another order."""
        expected = 1
        for dim in reversed(order or range(len(self.shape))):
            if self.shape[dim] != 1 and self.strides[dim] != expected:
                return False
            expected *= self.shape[dim]
        return True


@dataclass(slots=True)
class RawOp:
    """One op of a recording; `seconds` and `host_s` are filled in when the step is over."""

    name: str
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
    """One storage: the op that made it (-1: before the step) and when Python dropped its last reference."""

    bytes: int
    kind: str
    name: str
    born: int
    storage: _compat.StorageReference | None
    dropped: int = -1
    num_aliases: int = 0  # the recorder's own references, one for each live saved tensor
    num_saved: int = 0  # those of them that were saved in the forward
    item_bytes: int | None = None  # unknown until it is saved; 0: codecs cannot encode it
    row_length: int = 1
    is_settled: bool = False  # equal in every replay: integers, and results computed from settled values only

    def note_saved(self, tensor: Tensor, *, is_plain: bool) -> None:
        """Record whether a codec can encode the value: one floating dtype, and always saved as its whole storage."""
        is_dense = is_plain and tensor.layout is torch.strided and tensor.is_floating_point()
        fits = is_dense and not tensor.is_neg() and stands_for_storage(tensor)
        item_bytes = tensor.element_size() if fits else 0
        if self.item_bytes is None:
            self.item_bytes, self.row_length = item_bytes, max(1, int(tensor.shape[-1])) if tensor.dim() else 1
        elif self.item_bytes != item_bytes:
            self.item_bytes = 0


def settled_flags(op: RawOp, values: Sequence[RawValue]) -> tuple[str, ...]:
    """Return the final flags of an op that has run, and mark its outputs as settled or not.

    An op that computes integers from floating-point numbers (`topk`) could give others in a replay: it keeps the flag
    "index", engines keep its outputs instead of recomputing them, and so they are settled. An op whose inputs are all
    settled cannot vary and loses the flag.
    """
    is_settled = _NEVER_SETTLED.isdisjoint(op.flags) and all(values[value].is_settled for value in op.inputs)
    is_settled &= not op.name.startswith(UNFILLED)
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
    """One saved tensor: when autograd saved, first read and released it, and until when the backward used it."""

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
    """One call of a module: `first` to `end` are its forward ops."""

    path: str
    kind: str
    parent: int
    first: int
    end: int = -1
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    num_saves: int = 0
    changes: str = ""  # the name of an argument that is changed while the forward runs
    has_begun: bool = True  # False while its forward pre-hooks run, which a replay of its forward does not repeat


@dataclass
class Clock:
    """How op times are taken: `mark` before and after each op, `seconds` from the marks when the step is over."""

    mark: Callable[[], Any] = time.perf_counter
    seconds: Callable[[list[tuple[Any, Any]]], list[float]] = field(
        default=lambda marks: [after - before for before, after in marks]
    )


_UNCHANGEABLE = (*CONSTANTS, torch.Generator, types.FunctionType, nn.Module)


@dataclass
class _TrackedObject:
    """An object passed to calls, with its fingerprint when it was last compared."""

    reference: Callable[[], Any]
    fingerprint: Fingerprint
    names: dict[int, str] = field(default_factory=dict)  # of the argument, by call


class ArgumentChanges:
    """Finds calls whose arguments change: `begin` and `end` go around each call, `finish` after the model's forward."""

    def __init__(self) -> None:
        self.changed: dict[int, str] = {}  # by call, the name of the argument
        self._open: dict[int, list[tuple[str, Any, Fingerprint]]] = {}
        self._objects: dict[int, _TrackedObject] = {}  # by id

    def begin(self, call: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Fingerprint the arguments of a call that is about to run."""
        named = [(f"argument {number}", value) for number, value in enumerate(args)] + list(kwargs.items())
        tracked = [(name, value) for name, value in named if not isinstance(value, (Tensor, *_UNCHANGEABLE))]
        self._open[call] = [(name, value, Fingerprint(value)) for name, value in tracked]
        for name, value in tracked:
            for item in _objects_in(value):
                self._compare(item).names[call] = name

    def end(self, call: int) -> None:
        """Compare the arguments of a call whose forward is over."""
        for name, value, fingerprint in self._open.pop(call, ()):
            if not fingerprint.still_holds(value):
                self.changed.setdefault(call, name)
            for item in _objects_in(value):
                self._compare(item)

    def finish(self) -> None:
        """Compare all tracked objects that are still alive, at the end of the model's forward."""
        for tracked in list(self._objects.values()):
            value = tracked.reference()
            if value is not None:
                self._compare(value)
        self._objects.clear()

    def _compare(self, value: Any) -> _TrackedObject:
        tracked = self._objects.get(id(value))
        if tracked is None or tracked.reference() is not value:
            tracked = self._objects[id(value)] = _TrackedObject(_reference_to(value), Fingerprint(value))
        elif not tracked.fingerprint.still_holds(value):
            tracked.fingerprint, tracked.reference = Fingerprint(value), _reference_to(value)
            for call, name in tracked.names.items():
                self.changed.setdefault(call, name)
        return tracked


def before_forwards(modules: Iterable[nn.Module], hook: Callable[..., None]) -> dict[nn.Module, Any]:
    """Register `hook(module, args, kwargs)` as a forward pre-hook of modules, after the hooks they already have.

    Returns the handles. torch's global pre-hook does not receive keyword arguments, so each module gets a hook. torch's
    own layers are left out: they take tensors only, and some choose other kernels if they have hooks.
    """

    def may_change_objects(module: nn.Module) -> bool:
        is_own = type(module).__module__.startswith("torch.nn.") and not isinstance(module, nn.Sequential)
        return not is_own and not isinstance(module, torch.jit.ScriptModule)

    return {m: m.register_forward_pre_hook(hook, with_kwargs=True) for m in modules if may_change_objects(m)}


def _objects_in(value: Any) -> list[Any]:
    """The objects in an argument that a replay would receive by reference."""
    return Arguments.take((value,), {})[0].objects or []


def _reference_to(value: Any) -> Callable[[], Any]:
    """A weak reference to an object that holds tensors, which a trace must not keep alive; a strong one to others.

    Strong, so that a change after the last call is seen also if only the forward holds the object. Classes that allow
    no weak references get strong ones too.
    """
    is_weak = type(value).__weakrefoffset__ and bool(reachable([value]).tensors)
    return weakref.ref(value) if is_weak else lambda: value
