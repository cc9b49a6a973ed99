"""The arguments of a region: flattened into a list of tensors and a template, and rebuilt for the replay.

`region` takes the arguments of every forward. torch's checkpoint looks at positional tensors only: a tensor inside a
dict, a dataclass or a keyword is held by reference, hidden from outer checkpoints and from offload. Here every tensor
in any nesting of dicts, lists, tuples, NamedTuples and dataclasses becomes one entry of a flat list, and the containers
are rebuilt around the tensors for the replay. A container that the caller changes after the call does no harm. (torch's
pytree was the alternative; it has no dataclasses unless each is registered, and no paths for error messages.)

Objects of other classes are passed by reference. A `Fingerprint` of each is taken, and a replay is refused if it has
changed.

`LastCall` holds the templates and metadata of a module's previous call. A call that has equal ones shares them, so that
fewer objects stay alive until the backward.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import operator
import random
import types
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lowtide import _compat
from lowtide._compat.modules import companion_of
from lowtide.replay.object_state import attributes_of

_MAX_DEPTH = 32
# Types of values that cannot change, and through which nothing is reached.
CONSTANTS = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, type, range, slice, type(Ellipsis)),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
        *(types.BuiltinFunctionType, types.ModuleType),
    }
)
_IMMUTABLE = (*CONSTANTS, enum.Enum, types.FunctionType, nn.Module)
_SEQUENCES = (list, tuple)
_PLAIN_CONTAINERS = (dict, *_SEQUENCES)
_CALLABLES = (nn.Module, types.FunctionType, types.MethodType, functools.partial)

Path = tuple[Any, ...]


class _Slot:
    """The placeholder in a template for the tensor with this index."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


_SLOTS = tuple(map(_Slot, range(64)))  # shared, so that a call's templates hold no objects of their own


class _Container(NamedTuple):
    """The placeholder in a template for a container: its class, its parts by key, and the function that rebuilds it."""

    kind: type
    parts: dict[Any, Any]
    rebuild: Callable[[dict[Any, Any]], Any]


class Arguments:
    """The template of `(args, kwargs)`: its structure and values without the tensors. Made by `take`."""

    __slots__ = ("_args", "_kwargs", "callables", "generators", "has_containers", "objects")

    def __init__(self) -> None:
        self.generators: list[torch.Generator] | None = None  # None if there are none, as below
        self.objects: list[Any] | None = None  # of unknown classes
        self.callables: list[Any] | None = None  # functions, methods and objects that may lead to modules
        self.has_containers = False
        self._args: tuple[Any, ...] = ()
        self._kwargs: dict[str, Any] | None = None

    @classmethod
    def take(
        cls, args: tuple[Any, ...], kwargs: dict[str, Any], module: nn.Module | None = None
    ) -> tuple[Arguments, list[Tensor]]:
        """Return the template of some arguments, of the last call of `module` if it is the same, and their tensors."""
        if not kwargs and len(args) == 1 and type(args[0]) is Tensor:
            return _ONE_TENSOR, [args[0]]
        tensors: list[Tensor] = []
        tree = None if module is None else companion_of(module)
        last = None if tree is None else tree.last_call.arguments
        if last is not None and last._fits(args, kwargs, tensors):
            return last, tensors
        arguments = cls()
        tensors = []
        indices: dict[int, int] = {}  # of tensors, by their id
        arguments._args = tuple([arguments._take(value, 0, tensors, indices) for value in args])
        if kwargs:
            arguments._kwargs = {name: arguments._take(value, 0, tensors, indices) for name, value in kwargs.items()}
        return arguments, tensors

    def _fits(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> bool:
        """Return whether this is the template of these arguments; if so, add their tensors to the list."""
        if self.callables is not None or self.generators is not None or self.objects is not None:
            return False
        names = self._kwargs or _NO_KEYWORDS
        if len(args) != len(self._args) or list(kwargs) != list(names):
            return False
        templates = chain(self._args, names.values())
        return all(map(_is_from, templates, chain(args, kwargs.values()), repeat(tensors)))

    def build(self, tensors: Sequence[Tensor]) -> tuple[Iterable[Any], dict[str, Any]]:
        """Rebuild the arguments from the template and `tensors`."""
        if self is _ONE_TENSOR:
            return tensors, {}
        args = [_build(template, tensors) for template in self._args]
        if self._kwargs is None:
            return args, {}
        return args, {name: _build(template, tensors) for name, template in self._kwargs.items()}

    def changed_container(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]
    ) -> Path | None:
        """Return the path of a container among the arguments that has changed since `take`, or None."""
        for path, template in self._named():
            value = kwargs[path[0]] if isinstance(path[0], str) else args[path[0]]
            changed = _find_change(value, template, path, tensors)
            if changed is not None:
                return changed
        return None

    def path_of_tensor(self, index: int) -> Path:
        """Return the path of the tensor with this index among the arguments, for error messages."""
        slots = ((path, part) for path, part in self._templates() if isinstance(part, _Slot))
        return next(path for path, slot in slots if slot.index == index)

    def path_of(self, value: Any) -> Path:
        """Return the path of an object among the arguments, for error messages."""
        return next(path for path, part in self._templates() if part is value)

    def _named(self) -> list[tuple[Path, Any]]:
        named = [*enumerate(self._args), *(self._kwargs or {}).items()]
        return [((name,), template) for name, template in named]

    def _templates(self) -> Iterator[tuple[Path, Any]]:
        """Iterate over the template: each container before its parts."""
        for path, template in self._named():
            yield from _walk(template, path)

    def _take(self, value: Any, depth: int, tensors: list[Tensor], indices: dict[int, int]) -> Any:
        kind = type(value)
        if kind in CONSTANTS:
            return value
        if isinstance(value, Tensor):
            # One entry for a tensor that is passed twice: code may test `key is value`, as torch's attention does.
            index = indices.setdefault(id(value), len(tensors))
            if index == len(tensors):
                tensors.append(value)
            return _SLOTS[index] if index < len(_SLOTS) else _Slot(index)
        parts = _parts(value) if depth < _MAX_DEPTH else None
        rebuild = None if parts is None else _rebuilder(value, parts)
        if parts is not None and rebuild is not None:
            self.has_containers |= kind is not tuple  # which only its parts can change
            taken = {key: self._take(part, depth + 1, tensors, indices) for key, part in parts.items()}
            return _Container(kind, taken, rebuild)
        if isinstance(value, torch.Generator):
            self.generators = [*(self.generators or ()), value]
        elif isinstance(value, _CALLABLES):
            self.callables = [*(self.callables or ()), value]
        elif not isinstance(value, _IMMUTABLE):
            self.callables = [*(self.callables or ()), value]
            self.objects = [*(self.objects or ()), value]
        return value


_NO_KEYWORDS: dict[str, Any] = {}
_ONE_TENSOR = Arguments()  # what most layers are called with
_ONE_TENSOR._args = _SLOTS[:1]


def _build(template: Any, tensors: Sequence[Tensor]) -> Any:
    kind = type(template)
    if kind is _Slot:
        return tensors[template.index]
    if kind is _Container:
        return template.rebuild({key: _build(part, tensors) for key, part in template.parts.items()})
    return template


def _walk(template: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    yield path, template
    if isinstance(template, _Container):
        for key, part in template.parts.items():
            yield from _walk(part, (*path, key))


def _find_change(value: Any, template: Any, path: Path, tensors: Sequence[Tensor]) -> Path | None:
    if isinstance(template, _Slot):
        return None if value is tensors[template.index] else path
    if not isinstance(template, _Container):
        return None if value is template else path
    parts = _parts(value)
    if parts is None or type(value) is not template.kind or parts.keys() != template.parts.keys():
        return path
    for key, part in parts.items():
        changed = _find_change(part, template.parts[key], (*path, key), tensors)
        if changed is not None:
            return changed[: len(path)]
    return None


def _is_from(template: Any, value: Any, tensors: list[Tensor]) -> bool:
    """Return whether a template is that of a value, whose tensors are then added to those before it.

    Containers must be of the plain kinds, and other values the very same objects.
    """
    if template is value:
        return True
    kind = type(template)
    if kind is _Slot:
        if not isinstance(value, Tensor):
            return False
        if template.index < len(tensors):
            return tensors[template.index] is value
        tensors.append(value)
        return not any(map(operator.is_, tensors[:-1], repeat(value)))
    if kind is not _Container or type(value) is not template.kind or template.kind not in _PLAIN_CONTAINERS:
        return False
    if len(value) != len(template.parts):
        return False
    parts = template.parts.values()
    if template.kind is dict:
        has_same_keys = all(map(operator.is_, value, template.parts))
        return has_same_keys and all(map(_is_from, parts, value.values(), repeat(tensors)))
    return all(map(_is_from, parts, value, repeat(tensors)))


def _parts(value: Any) -> dict[Any, Any] | None:
    """The parts of a container by key; None for anything else."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, _SEQUENCES) and not isinstance(value, torch.Size):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type | nn.Module):
        names = (field.name for field in dataclasses.fields(value))
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return None


def _rebuilder(container: Any, keys: Iterable[Any]) -> Callable[[dict[Any, Any]], Any] | None:
    """Return a function that builds a container of the same class from other parts; it holds none of the present ones.

    None for a class that cannot be copied; such an object is passed by reference.
    """
    kind = type(container)
    if kind in _REBUILD_PLAIN:
        return _REBUILD_PLAIN[kind]
    if isinstance(container, tuple):
        return functools.partial(_rebuild_tuple, kind, dict(getattr(container, "__dict__", {})))
    # Another class: a shallow copy keeps what else it carries, and is emptied so that it holds no tensor.
    put: Any = operator.setitem if isinstance(container, dict | list) else object.__setattr__
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


_REBUILD_PLAIN: dict[type, Callable[[dict[Any, Any]], Any]] = {
    dict: dict,
    list: lambda parts: list(parts.values()),
    tuple: lambda parts: tuple(parts.values()),
}


def _rebuild_tuple(kind: type, attributes: dict[str, Any], parts: dict[Any, Any]) -> Any:
    if kind.__module__ == "torch.return_types":  # a struct sequence, which only its own constructor makes
        return kind(parts.values())
    new: Any = tuple.__new__(kind, parts.values())
    if attributes:
        vars(new).update(attributes)
    return new


class Fingerprint:
    """The contents of an object of unknown class: numbers, containers, tensors with versions. To be compared later."""

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
            size = value.shape if isinstance(value, np.ndarray) else len(value)
            return (id(value), size, zlib.crc32(bytes(value)))
        if isinstance(value, random.Random):
            return value.getstate()
        if isinstance(value, np.random.Generator):
            return repr(value.bit_generator.state)
        if isinstance(value, Iterator):
            return object()  # equal to nothing: an iterator cannot be read twice
        if id(value) in seen:
            return ("seen", seen[id(value)])
        if isinstance(value, _IMMUTABLE) or depth >= _MAX_DEPTH or len(seen) >= self._MAX_NODES:
            return id(value)
        seen[id(value)] = len(seen)
        if isinstance(value, Mapping):
            return tuple((id(key), self._read(part, depth + 1, seen)) for key, part in value.items())
        if isinstance(value, list | tuple | deque):
            return tuple(self._read(part, depth + 1, seen) for part in value)
        if isinstance(value, set | frozenset):
            return frozenset(id(part) for part in value)
        return id(value), tuple(
            (name, self._read(part, depth + 1, seen))
            for name, part in attributes_of(value).items()
            if not isinstance(getattr(type(value), name, None), functools.cached_property)
        )


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested arguments, in order."""
    if type(tree) in CONSTANTS:  # most arguments of ops
        return
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for item in tree:
            if type(item) not in CONSTANTS:
                yield from tensors_in(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from tensors_in(item)
    elif hasattr(tree, "__dataclass_fields__"):
        for name in tree.__dataclass_fields__:
            yield from tensors_in(getattr(tree, name, None))


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return `tree` with every tensor replaced, in any nesting of tuples, lists, mappings and dataclasses."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        mapped = copy.copy(tree)
        for key, item in tree.items():
            mapped[key] = map_tensors(function, item)  # type: ignore[index]
        return mapped
    parts = _parts(tree)
    rebuild = None if parts is None else _rebuilder(tree, parts)
    if parts is None or rebuild is None:
        return tree
    return rebuild({key: map_tensors(function, part) for key, part in parts.items()})


def alias_of(tensor: Tensor) -> Tensor:
    """Return an alias without the autograd history, by which a later in-place change would make a reference cycle."""
    if is_held_itself(tensor):
        return tensor
    alias = tensor.detach()
    return alias.requires_grad_() if tensor.requires_grad else alias


def is_held_itself(tensor: Tensor) -> bool:
    """Return whether a tensor is held without an alias: parameters and inference tensors, which get no history."""
    is_parameter = type(tensor) is not Tensor and isinstance(tensor, nn.Parameter)  # isinstance() is slow here
    return is_parameter or tensor.is_inference()


@dataclasses.dataclass(slots=True)
class LastCall:
    """Template, versions and metadata of a module's previous call, shared by the next call if it has equal ones."""

    arguments: Arguments = dataclasses.field(default_factory=Arguments)
    input_versions: list[int] = dataclasses.field(default_factory=list)
    requires_grad: list[bool] = dataclasses.field(default_factory=list)
    metadata: list[Any] = dataclasses.field(default_factory=list)


def same(last: list[Any], now: list[Any]) -> list[Any]:
    """Return `last` if the two lists are equal, so that one can be freed, else `now`."""
    return last if last == now else now
