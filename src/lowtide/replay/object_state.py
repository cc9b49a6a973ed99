"""Python state that a replay restores: find it from values and from code, compare it, and put it back.

`module_state` and `function_state` use this for everything that is not a tensor. `reachable` lists the lists, dicts,
sets, deques, objects and generators that some values lead to. `Containers` stores what they hold; a comparison by
identity, in a few calls of C functions, tells whether they have changed. Random states of Python and numpy, arrays and
objects with `__slots__` have no parts to compare, and are copied for every call.

`code_facts` reads the names in a class's methods and in the functions that they call. It covers two effects that leave
no trace in torch: kernels of norms write their running statistics without a new version, and Python's and numpy's
global generators are drawn from without being attributes of a module. It is a guess; where it is wrong, a replay makes
a few small copies that it does not need.

Limits: containers nested more than 4 deep, with more than 10,000 parts, objects with more than 100 attributes and
arrays over 256 KiB are not restored; a replay reads them as they are.
"""

from __future__ import annotations

import dis
import functools
import operator
import random
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

_MAX_DEPTH = 4  # of containers in containers
_MAX_PARTS = 10_000  # of a container; longer ones are read as they are at the replay
_MAX_ATTRIBUTES = 100  # of an object; larger ones (a trainer, say) are read as they are too
_MAX_ARRAY_BYTES = 256 * 1024  # likewise

_RANDOM_STATES = (random.Random, np.random.Generator, np.random.RandomState)
_ARRAYS = (np.ndarray, bytearray)
_COPIED = (*_RANDOM_STATES, *_ARRAYS)  # without parts to compare
_SEQUENCES = (list, deque, set)
_INERT = (
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType),
    *(str, bytes, int, float, complex, bool, type(None), tuple, frozenset, torch.Generator),
)


class Reachable(NamedTuple):
    """Everything that can be reached from some values through containers and objects, each listed once."""

    containers: list[Any]
    generators: list[torch.Generator]
    tensors: list[Tensor]  # in containers
    modules: list[nn.Module]  # in containers


def reachable(values: Iterable[Any]) -> Reachable:
    containers: dict[int, Any] = {}
    generators: dict[int, torch.Generator] = {}
    tensors: dict[int, Tensor] = {}
    modules: dict[int, nn.Module] = {}

    # A stack: a recursive inner function would be a reference cycle that holds tensors.
    waiting = [(value, 0) for value in values]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, torch.Generator):
            generators[id(value)] = value
        elif isinstance(value, Tensor):
            if depth:
                tensors[id(value)] = value
        elif isinstance(value, nn.Module):
            if depth:
                modules[id(value)] = value
        elif depth > _MAX_DEPTH or id(value) in containers:
            continue
        elif isinstance(value, tuple):
            waiting += [(part, depth + 1) for part in value]
        elif not isinstance(value, _INERT) and _is_container(value):
            containers[id(value)] = value
            waiting += [(part, depth + 1) for part in _parts(value)]
    return Reachable(*(list(each.values()) for each in (containers, generators, tensors, modules)))


# Packages whose objects are not opened: locks and queues of threads must not be restored.
_NOT_OPENED = ("torch", "numpy", "threading", "queue", "multiprocessing", "asyncio", "concurrent")


def _is_container(value: Any) -> bool:
    if isinstance(value, _SEQUENCES) or isinstance(value, dict):
        return len(value) <= _MAX_PARTS
    if isinstance(value, _RANDOM_STATES):
        return True
    if isinstance(value, _ARRAYS):
        return (value.nbytes if isinstance(value, np.ndarray) else len(value)) <= _MAX_ARRAY_BYTES
    kind = type(value)
    if kind.__module__.partition(".")[0] in _NOT_OPENED or getattr(kind, "hidden_from_replay", False):
        return False
    return 0 < len(attributes_of(value)) <= _MAX_ATTRIBUTES


def _parts(container: Any) -> Iterable[Any]:
    if isinstance(container, _SEQUENCES):
        return container
    if isinstance(container, _COPIED):
        return ()
    return (container if isinstance(container, dict) else attributes_of(container)).values()


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, from its `__dict__` and its slots."""
    attributes: dict[str, Any] = getattr(value, "__dict__", {})
    slots = _slots(type(value))
    if not slots:
        return attributes
    return {**attributes, **{name: getattr(value, name) for name in slots if hasattr(value, name)}}


_slot_names: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()


def _slots(kind: type) -> tuple[str, ...]:
    names = _slot_names.get(kind)
    if names is None:
        members = [item for base in kind.__mro__ if "__slots__" in vars(base) for item in vars(base).items()]
        names = tuple(name for name, member in members if isinstance(member, types.MemberDescriptorType))
        _slot_names[kind] = names
    return names


class Containers:
    """A snapshot of the contents of some containers."""

    def __init__(self, containers: list[Any]) -> None:
        self._sequences: list[Any] = []
        self._dicts: list[dict[Any, Any]] = []
        self._copied: list[Any] = []
        for each in containers:
            if isinstance(each, _SEQUENCES):
                self._sequences.append(each)
            elif isinstance(each, dict):
                self._dicts.append(each)
            elif isinstance(each, _COPIED) or _slots(type(each)):
                self._copied.append(each)
            else:
                self._dicts.append(vars(each))
        self._sizes, self._parts = self._lengths(), list(self._read())
        self._contents = self._copy()

    def _read(self) -> Iterator[Any]:
        """Iterate over the keys and parts of all containers."""
        return chain.from_iterable(chain(self._dicts, map(dict.values, self._dicts), self._sequences))

    def _lengths(self) -> list[int]:
        return [*map(len, self._dicts), *map(len, self._sequences)]

    def _copy(self) -> list[Any]:
        items = (list(each.items()) for each in self._dicts)
        return [*map(_copy_of, self._copied), *map(tuple, self._sequences), *items]

    def are_unchanged(self) -> bool:
        # By identity: comparing keys may run any code, or raise, as of tensors.
        return not self._copied and self._lengths() == self._sizes and all(map(operator.is_, self._read(), self._parts))

    def restore(self) -> Callable[[], None]:
        """Restore the contents of all containers; call the result to restore the present contents."""
        if self.are_unchanged():
            return self._restore_if_changed
        present = self._copy()
        self._fill(self._contents)
        return functools.partial(self._fill, present)

    def _restore_if_changed(self) -> None:
        if not self.are_unchanged():
            self._fill(self._contents)

    def _fill(self, contents: list[Any]) -> None:
        for container, wanted in zip((*self._copied, *self._sequences, *self._dicts), contents, strict=True):
            fill(container, wanted)


def is_plain_state(value: Any) -> bool:
    """Return whether this is a random state or a small writable array, which are copied whole."""
    if isinstance(value, np.ndarray):
        return value.flags.writeable and value.nbytes <= _MAX_ARRAY_BYTES
    return isinstance(value, _RANDOM_STATES)


def _copy_of(container: Any) -> Any:
    """Return a copy of the contents of an object without comparable parts, for `fill`."""
    if isinstance(container, random.Random):
        return container.getstate()
    if isinstance(container, np.random.Generator):
        return container.bit_generator.state
    if isinstance(container, np.random.RandomState):
        return container.get_state()
    return container.copy() if isinstance(container, _ARRAYS) else dict(attributes_of(container))


def fill(container: Any, wanted: Any) -> None:
    """Set the contents of a container, by methods of its base class (`Counter.update` would add)."""
    if isinstance(container, list):
        list.__setitem__(container, slice(None), wanted)
    elif isinstance(container, deque):
        deque.clear(container)
        deque.extend(container, wanted)
    elif isinstance(container, set):
        set.clear(container)
        set.update(container, wanted)
    elif isinstance(container, dict):
        kind: Any = OrderedDict if isinstance(container, OrderedDict) else dict  # keeps an order of its own
        kind.clear(container)
        for key, value in wanted:
            kind.__setitem__(container, key, value)
    elif isinstance(container, random.Random):
        container.setstate(wanted)
    elif isinstance(container, np.random.Generator):
        container.bit_generator.state = wanted
    elif isinstance(container, np.random.RandomState):
        container.set_state(wanted)
    elif isinstance(container, np.ndarray):
        container[...] = wanted
    elif isinstance(container, bytearray):
        container[:] = wanted
    else:
        _set_attributes(container, dict(wanted))


def _set_attributes(container: Any, wanted: dict[str, Any]) -> None:
    for name in _slots(type(container)):
        if name in wanted:
            object.__setattr__(container, name, wanted.pop(name))
        elif hasattr(container, name):
            object.__delattr__(container, name)
    if hasattr(container, "__dict__"):
        vars(container).clear()
        vars(container).update(wanted)


def nothing() -> None:
    """The undo function of a restore that changed nothing."""


PythonState = random.Random | np.random.RandomState


class CodeFacts(NamedTuple):
    """What a class's code may do, judged by the names in it. A wrong guess costs copies."""

    hides_writes: bool  # it calls a norm's kernel, which writes running statistics without a new version
    states: tuple[PythonState, ...]  # the global generators of Python or numpy that it draws from
    reads_training: bool = True  # it may read `self.training`


_facts: weakref.WeakKeyDictionary[type, CodeFacts] = weakref.WeakKeyDictionary()


def code_facts(kind: type) -> CodeFacts:
    """Return the facts of all methods of a class and of the functions that they name."""
    if kind not in _facts:
        _facts[kind] = _read_code(kind)
    return _facts[kind]


def _read_code(kind: type) -> CodeFacts:
    if kind.__module__ == nn.BatchNorm1d.__module__:  # the version of its counter shows its writes
        return CodeFacts(False, (), True)
    bases = kind.__mro__[: kind.__mro__.index(nn.Module)] if nn.Module in kind.__mro__ else kind.__mro__
    members = (getattr(member, "__func__", member) for base in bases for member in vars(base).values())
    functions = [member for member in members if isinstance(member, types.FunctionType)]
    hides_writes = reads_training = False
    states: dict[int, PythonState] = {}
    for function in functions:  # grows while it is walked
        names = _code_names(function.__code__)
        hides_writes = hides_writes or not names.isdisjoint(_NORM_KERNELS)
        reads_training = reads_training or "training" in names
        variables = variables_of(function)
        states.update((id(state), state) for state in states_drawn_by(function, variables))
        for _, _, value in variables:
            is_users = isinstance(value, types.FunctionType) and value.__module__.partition(".")[0] != "torch"
            if is_users and value not in functions and len(functions) < _MAX_FUNCTIONS:
                functions.append(value)
    return CodeFacts(hides_writes, tuple(states.values()), reads_training)


ABSENT: Any = object()


def variables_of(function: Any) -> list[tuple[types.CellType | dict[str, Any], str, Any]]:
    """Return the variables that a function reads, with their values: closure cells, and names in its globals."""
    found: list[Any] = []
    for cell in function.__closure__ or ():
        try:
            found.append((cell, "", cell.cell_contents))
        except ValueError:  # not filled yet
            continue
    names, code = function.__globals__, function.__code__
    return found + [(names, name, names[name]) for name in _code_names(code) if name in names]


@functools.lru_cache(maxsize=4096)
def _code_names(code: types.CodeType) -> frozenset[str]:
    """Return the names that code, and functions defined inside it, may look up in globals or on objects."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _code_names(constant)
    return frozenset(names)


@functools.lru_cache(maxsize=4096)
def _imported(code: types.CodeType) -> tuple[types.ModuleType, ...]:
    """Return the modules that code, and functions defined inside it, import when they run; those loaded so far."""
    found = {each.argval for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME"}
    # `import numpy.random` binds numpy, and `from numpy.random import rand` what it names.
    modules = {sys.modules.get(part) for name in found for part in (name, name.partition(".")[0])}
    inner = (_imported(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return (*(module for module in modules if module is not None), *(module for each in inner for module in each))


def states_drawn_by(function: types.FunctionType, variables: list[Any]) -> list[PythonState]:
    """Return the global generators of Python and numpy that a function's variables and imports lead to."""
    code = function.__code__
    found: list[PythonState] = []
    for value in (*[value for _, _, value in variables], *_imported(code)):
        owner = getattr(value, "__self__", None) if callable(value) else None
        if value is random or owner is _PYTHON_STATE:
            found.append(_PYTHON_STATE)
        if value is np.random or owner is _NUMPY_STATE or (value is np and "random" in _code_names(code)):
            found.append(_NUMPY_STATE)
    return found


_MAX_FUNCTIONS = 500  # of a class and what it calls
_NORM_KERNELS = frozenset({"batch_norm", "instance_norm", "native_batch_norm"})
_PYTHON_STATE: random.Random = random.random.__self__  # type: ignore[attr-defined]
_NUMPY_STATE: np.random.RandomState = np.random.random.__self__  # type: ignore[attr-defined]
