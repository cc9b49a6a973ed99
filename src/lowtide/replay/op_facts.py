"""Facts about ops and about the code of module classes, worked out once for each.

`facts_of(op)` is read from an op's schema and name: what it writes, whether it is random, a view, a collective, or
returns indices. Traces store these flags, and replays decide by them what to keep.

`code_facts(cls)` is read from the names in a class's methods and in the functions that they call. It covers two effects
that leave no trace in torch: kernels of norms write their running statistics without a new version, and Python's and
numpy's global generators are drawn from without being attributes of a module. It is a guess; where it is wrong, a
replay makes a few small copies that it does not need.
"""

from __future__ import annotations

import dis
import functools
import random
import sys
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from lowtide import _compat
from lowtide.graph.step_graph import KEPT_IN_PLACE
from lowtide.replay.arguments import tensors_in

_INDEX_OPS = frozenset(
    "topk sort argsort argmax argmin multinomial nonzero unique _unique2 unique_dim unique_consecutive kthvalue".split()
)
_INDEX_OVERLOADS = frozenset({"aten.max.dim", "aten.min.dim"})  # other overloads of these ops return values only
# They write running statistics in training, which their schemas do not declare.
_BATCH_NORMS = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})
OWN_NAMESPACES = frozenset({"aten", "prim", "prims"})


@dataclass(frozen=True, slots=True)
class OpFacts:
    """Name and flags of an op, and the indices of the arguments that it writes, always or in training only."""

    name: str
    flags: tuple[str, ...]
    written: tuple[int, ...]
    written_in_training: tuple[int, ...]
    has_dynamic_shape: bool
    argument_names: tuple[str, ...]

    def written_tensors(self, args: Any, kwargs: Any) -> list[Tensor]:
        """List the tensors that a call with these arguments writes to."""
        indices = self.written
        if self.written_in_training and self._argument(self.argument_names.index("training"), args, kwargs):
            indices = self.written_in_training
        return [tensor for index in indices for tensor in tensors_in(self._argument(index, args, kwargs))]

    def flags_of_call(self, args: Any, kwargs: Any) -> tuple[str, ...]:
        """Return the flags of a call with these arguments: attention is random only if its dropout is not 0."""
        if "random" not in self.flags or "dropout_p" not in self.argument_names:
            return self.flags
        if self._argument(self.argument_names.index("dropout_p"), args, kwargs):  # the default is 0
            return self.flags
        return tuple(flag for flag in self.flags if flag != "random")

    def _argument(self, index: int, args: Any, kwargs: Any) -> Any:
        return args[index] if index < len(args) else kwargs.get(self.argument_names[index])


@functools.cache
def facts_of(func: Any) -> OpFacts:
    """Return the facts of an op, read from its schema once."""
    namespace, name, written, is_random, is_view = _compat.op_facts(func)
    base = name.split(".")[1]
    is_own = namespace in OWN_NAMESPACES
    flags = {
        "random": is_random,
        "collective": namespace in _compat.COLLECTIVE_NAMESPACES,
        "mutates": bool(written),
        "view": is_view,
        "index": (is_own and base in _INDEX_OPS) or name in _INDEX_OVERLOADS,
        "custom": not is_own and namespace not in _compat.COLLECTIVE_NAMESPACES,
    }
    if name.startswith(KEPT_IN_PLACE):  # their schemas declare no writes
        written, flags["mutates"] = frozenset({0}), True
    names = tuple(_compat.op_argument_names(func))
    is_batch_norm = is_own and base in _BATCH_NORMS
    return OpFacts(
        name=name,
        flags=tuple(flag for flag, holds in flags.items() if holds),
        written=tuple(sorted(written)),
        written_in_training=tuple(names.index(n) for n in ("running_mean", "running_var")) if is_batch_norm else (),
        has_dynamic_shape=_compat.has_dynamic_shape(func),
        argument_names=names,
    )


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
        names = code_names(function.__code__)
        hides_writes = hides_writes or not names.isdisjoint(_NORM_KERNELS)
        reads_training = reads_training or "training" in names
        for value in (*_read_globals(function, names), *_cell_contents(function), *imported(function.__code__)):
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
    """Return the names that code, and functions defined inside it, may look up in globals or on objects."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= code_names(constant)
    return frozenset(names)


@functools.lru_cache(maxsize=4096)
def imported(code: types.CodeType) -> tuple[types.ModuleType, ...]:
    """Return the modules that code, and functions defined inside it, import when they run; those loaded so far."""
    found = {each.argval for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME"}
    # `import numpy.random` binds numpy, and `from numpy.random import rand` what it names.
    modules = {sys.modules.get(part) for name in found for part in (name, name.partition(".")[0])}
    inner = (imported(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return (*(module for module in modules if module is not None), *(module for each in inner for module in each))


def drawn_from(value: Any, names: frozenset[str]) -> Iterator[PythonState]:
    """Yield the global generators of Python and numpy that a value leads to."""
    owner = getattr(value, "__self__", None) if callable(value) else None
    if value is random or owner is _PYTHON_STATE:
        yield _PYTHON_STATE
    if value is np.random or owner is _NUMPY_STATE or (value is np and "random" in names):
        yield _NUMPY_STATE


_MAX_FUNCTIONS = 500  # of a class and what it calls
_NORM_KERNELS = frozenset({"batch_norm", "instance_norm", "native_batch_norm"})
_PYTHON_STATE: random.Random = random.random.__self__  # type: ignore[attr-defined]
_NUMPY_STATE: np.random.RandomState = np.random.random.__self__  # type: ignore[attr-defined]
