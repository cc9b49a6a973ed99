"""Arguments of a region, taken apart into tensors and the rest, and put together again for the replay.

torch's checkpoint looks at positional tensors only: a tensor inside a dict, a dataclass or a keyword is held by
reference, hidden from outer checkpoints and from offload. Here every tensor in any nesting of dicts, lists, tuples,
NamedTuples and dataclasses becomes one entry of a flat list, and the containers are rebuilt around what that list
holds at replay. So a container changed by the caller after the call does no harm, just as rebinding a variable
that was passed positionally does none. (torch's pytree was the alternative; it has no dataclasses unless each is
registered, and names no paths.)

Objects of other classes are passed by reference. They are fingerprinted, and one that changed is refused.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import random
import types
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lowtide import _compat

_MAX_DEPTH = 32
_PLAIN_TYPES = (
    *(type(None), bool, int, float, complex, str, bytes, enum.Enum, type, range, slice, type(Ellipsis)),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType, nn.Module),
)

Path = tuple[Any, ...]


class _Slot:
    """Stands where the tensor with this index was."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _Container:
    """Stands where a container was: its class, what rebuilds it, and its parts by key."""

    __slots__ = ("kind", "parts", "rebuild")

    def __init__(self, kind: type, parts: dict[Any, Any], rebuild: Callable[[dict[Any, Any]], Any]) -> None:
        self.kind, self.parts, self.rebuild = kind, parts, rebuild


class Arguments:
    """The tensors, generators and objects in `(args, kwargs)`, and how to build the like around other tensors."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[Tensor] = []
        self.paths: list[Path] = []
        self._indices: dict[int, int] = {}  # of tensors, by their id
        self.generators: list[torch.Generator] = []
        self.objects: list[tuple[Path, Any]] = []
        self.callables: list[Any] = []  # whatever may lead to modules: functions, methods, objects
        self.has_containers = False
        self._args = [self._take(value, (position,)) for position, value in enumerate(args)]
        self._kwargs = {name: self._take(value, (name,)) for name, value in kwargs.items()}

    def build(self, tensors: Sequence[Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments as they were, with `tensors` in place of the tensors."""
        args = [_build(template, tensors) for template in self._args]
        return args, {name: _build(template, tensors) for name, template in self._kwargs.items()}

    def release_tensors(self) -> None:
        """Forget the tensors themselves; who replays holds them in its own way."""
        self.tensors = []

    def changed_container(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Path | None:
        """Where a live container is no longer what it was, or None. Call before `release_tensors`."""
        if not self.has_containers:
            return None
        pairs: list[tuple[Path, Any, Any]] = [
            ((position,), value, self._args[position]) for position, value in enumerate(args)
        ]
        pairs += [((name,), kwargs[name], template) for name, template in self._kwargs.items()]
        for path, value, template in pairs:
            changed = self._find_change(value, template, path)
            if changed is not None:
                return changed
        return None

    def _take(self, value: Any, path: Path) -> Any:
        if isinstance(value, Tensor):
            # Once for the same tensor passed twice: code may ask whether `key is value`, as torch's attention does.
            index = self._indices.setdefault(id(value), len(self.tensors))
            if index == len(self.tensors):
                self.tensors.append(value)
                self.paths.append(path)
            return _Slot(index)
        parts = _parts(value) if len(path) < _MAX_DEPTH else None
        rebuild = None if parts is None else _rebuilder(value, parts)
        if parts is not None and rebuild is not None:
            self.has_containers = True
            taken = {key: self._take(part, (*path, key)) for key, part in parts.items()}
            return _Container(type(value), taken, rebuild)
        if isinstance(value, torch.Generator):
            self.generators.append(value)
        elif isinstance(value, nn.Module | types.FunctionType | types.MethodType | functools.partial):
            self.callables.append(value)
        elif not isinstance(value, _PLAIN_TYPES):
            self.callables.append(value)
            self.objects.append((path, value))
        return value

    def _find_change(self, value: Any, template: Any, path: Path) -> Path | None:
        if isinstance(template, _Slot):
            return None if value is self.tensors[template.index] else path
        if not isinstance(template, _Container):
            return None if value is template else path
        parts = _parts(value)
        if parts is None or type(value) is not template.kind or parts.keys() != template.parts.keys():
            return path
        for key, part in parts.items():
            changed = self._find_change(part, template.parts[key], (*path, key))
            if changed is not None:
                return changed[: len(path)]
        return None


def _build(template: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(template, _Slot):
        return tensors[template.index]
    if isinstance(template, _Container):
        return template.rebuild({key: _build(part, tensors) for key, part in template.parts.items()})
    return template


def _parts(value: Any) -> dict[Any, Any] | None:
    """The parts of a container by key; None for anything else."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type | nn.Module):
        names = (field.name for field in dataclasses.fields(value))
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return None


def _rebuilder(container: Any, keys: Iterable[Any]) -> Callable[[dict[Any, Any]], Any] | None:
    """What makes another container of the same class around other parts, holding on to none of the present ones.

    None for a class that will not be copied; such an object is passed by reference.
    """
    kind = type(container)
    if kind is dict:
        return dict
    if kind is list:
        return lambda parts: list(parts.values())
    if isinstance(container, tuple):
        return functools.partial(_rebuild_tuple, kind, dict(getattr(container, "__dict__", {})))
    # Another class: a shallow copy keeps what else it carries, and is emptied so that it holds no tensor.
    put = _put_item if isinstance(container, dict | list) else object.__setattr__
    try:
        shell = copy.copy(container)
        for key in keys:
            put(shell, key, None)
    except Exception:
        return None

    def rebuild(parts: dict[Any, Any]) -> Any:
        new = copy.copy(shell)
        for key, part in parts.items():
            put(new, key, part)
        return new

    return rebuild


def _rebuild_tuple(kind: type, attributes: dict[str, Any], parts: dict[Any, Any]) -> Any:
    if kind is tuple:
        return tuple(parts.values())
    if kind.__module__ == "torch.return_types":  # a struct sequence, which only its own constructor makes
        return kind(parts.values())
    new: Any = tuple.__new__(kind, parts.values())
    if attributes:
        vars(new).update(attributes)
    return new


def _put_item(container: Any, key: Any, part: Any) -> None:
    try:
        container[key] = part
    except Exception:  # a class that forbids it, for others
        (dict if isinstance(container, dict) else list).__setitem__(container, key, part)


class Fingerprint:
    """What an object of an unknown class held at one moment: containers, numbers, and tensors with their versions."""

    _MAX_NODES = 10_000

    def __init__(self, value: Any) -> None:
        self._tensors: list[weakref.ref[Tensor]] = []
        self._mark = self._read(value, 0, {})

    def still_holds(self, value: Any) -> bool:
        # A dead tensor's id may be in use again, so the ids below say nothing once one has died.
        if any(ref() is None for ref in self._tensors):
            return False
        return Fingerprint(value)._mark == self._mark

    def _read(self, value: Any, depth: int, seen: dict[int, int]) -> Any:
        if isinstance(value, Tensor):
            self._tensors.append(weakref.ref(value))
            return (id(value), _compat.version_of(value))
        if isinstance(value, bool | int | float | complex | str | bytes | type(None)):
            return value
        if isinstance(value, np.ndarray | bytearray):
            return (id(value), getattr(value, "shape", len(value)), zlib.crc32(bytes(value)))
        if isinstance(value, random.Random):
            return value.getstate()
        if isinstance(value, np.random.Generator):
            return repr(value.bit_generator.state)
        if isinstance(value, Iterator):
            return object()  # equal to nothing: what was read from it is gone
        if id(value) in seen:
            return ("seen", seen[id(value)])
        if isinstance(value, _PLAIN_TYPES) or depth >= _MAX_DEPTH or len(seen) >= self._MAX_NODES:
            return id(value)
        seen[id(value)] = len(seen)
        if isinstance(value, Mapping):
            return tuple((id(key), self._read(part, depth + 1, seen)) for key, part in value.items())
        if isinstance(value, list | tuple | deque):
            return tuple(self._read(part, depth + 1, seen) for part in value)
        if isinstance(value, set | frozenset):
            return frozenset(id(part) for part in value)
        kind = type(value)
        attributes = {
            name: part
            for name, part in getattr(value, "__dict__", {}).items()
            if not isinstance(getattr(kind, name, None), functools.cached_property)
        }
        slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()) if hasattr(value, name)]
        parts = {**attributes, **{name: getattr(value, name) for name in slots}}
        return id(value), tuple((name, self._read(part, depth + 1, seen)) for name, part in parts.items())
