"""Which module calls are given an argument that changes during the forward: those cannot be replayed.

A replay runs a call again on the arguments it had. A cache that the call appends to, or any other object, list or dict
that it changes, is not what it was by then. So arguments that are not tensors are fingerprinted when a call begins and
compared when it ends. Objects that are neither tensors nor plain containers are passed to a replay by reference; those
are compared until the forward is over, as a later call may change what an earlier one was given. Tensors that are
changed in place need no watching here: the recorded ops say so (`StepGraph.unreplayable`).
"""

from __future__ import annotations

import dataclasses
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.replay.arguments import Fingerprint

_MAX_DEPTH = 32
_UNCHANGEABLE = (
    *(type(None), bool, int, float, complex, str, bytes, type, range, slice, torch.dtype, torch.device, torch.Size),
    *(torch.Generator, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, nn.Module),
)


class _Watched:
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
        self._objects: dict[int, _Watched] = {}  # by id

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

    def _compare(self, value: Any) -> _Watched:
        found = self._objects.get(id(value))
        if found is None or found.reference() is not value:
            found = self._objects[id(value)] = _Watched(value)
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
