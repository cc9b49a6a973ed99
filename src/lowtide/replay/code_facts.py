"""What the code of a class tells of its forwards, found from the names in it and worked out once per class.

Two things leave no trace that a replay could see: a norm's kernel writes its statistics without a new version, and
Python's and numpy's process-wide generators are drawn from without being held by any module. The names that code uses
tell that it may do so. Where the guess is wrong, a few small copies are made for nothing.
"""

from __future__ import annotations

import functools
import random
import types
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from torch import nn

PythonState = random.Random | np.random.RandomState


class CodeFacts(NamedTuple):
    """What code calls, as far as the names in it tell: a guess that costs copies where it is wrong."""

    hides_writes: bool  # it hands statistics to a norm's kernel, which writes them without a new version
    states: tuple[PythonState, ...]  # the generators of Python or numpy it draws from
    reads_training: bool = True  # it may look whether the module is in training


_facts: weakref.WeakKeyDictionary[type, CodeFacts] = weakref.WeakKeyDictionary()


def code_facts(kind: type) -> CodeFacts:
    """The facts of all methods of a class, and of the functions that they name."""
    if kind not in _facts:
        _facts[kind] = _read_code(kind)
    return _facts[kind]


def _read_code(kind: type) -> CodeFacts:
    if kind.__module__ == nn.BatchNorm1d.__module__:  # its counter tells of its writes
        return CodeFacts(False, (), True)
    bases = kind.__mro__[: kind.__mro__.index(nn.Module)] if nn.Module in kind.__mro__ else kind.__mro__
    members = (getattr(member, "__func__", member) for base in bases for member in vars(base).values())
    functions = [member for member in members if isinstance(member, types.FunctionType)]
    hides_writes = reads_training = False
    states: dict[int, PythonState] = {}
    for function in functions:  # grows while it is walked
        names = code_names(function.__code__)
        hides_writes = hides_writes or not names.isdisjoint(_NORM_KERNELS)
        reads_training = reads_training or "training" in names
        for value in (*_read_globals(function, names), *_cell_contents(function)):
            states.update((id(state), state) for state in drawn_from(value, names))
            is_users = isinstance(value, types.FunctionType) and value.__module__.partition(".")[0] != "torch"
            if is_users and value not in functions and len(functions) < _MAX_FUNCTIONS:
                functions.append(value)
    return CodeFacts(hides_writes, tuple(states.values()), reads_training)


def _read_globals(function: types.FunctionType, names: frozenset[str]) -> list[Any]:
    return [function.__globals__[name] for name in names if name in function.__globals__]


def _cell_contents(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue


@functools.lru_cache(maxsize=4096)
def code_names(code: types.CodeType) -> frozenset[str]:
    """Names that code, and functions made inside it, may look up in globals or on objects."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= code_names(constant)
    return frozenset(names)


def drawn_from(value: Any, names: frozenset[str]) -> Iterator[PythonState]:
    """The process-wide generators that a global leads to."""
    owner = getattr(value, "__self__", None) if callable(value) else None
    if value is random or owner is _PYTHON_STATE:
        yield _PYTHON_STATE
    if value is np.random or owner is _NUMPY_STATE or (value is np and "random" in names):
        yield _NUMPY_STATE


_MAX_FUNCTIONS = 500  # of a class and what it calls
_NORM_KERNELS = frozenset({"batch_norm", "instance_norm", "native_batch_norm"})
_PYTHON_STATE: random.Random = random.random.__self__  # type: ignore[attr-defined]
_NUMPY_STATE: np.random.RandomState = np.random.random.__self__  # type: ignore[attr-defined]
