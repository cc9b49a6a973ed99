"""What a function can read without being passed it, found from the function alone.

A module, a bound method's owner, a partial's parts, closure cells, defaults, and the globals its code names, a few
steps deep. Recording every op of every forward would find more, and cost more than many regions are worth.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

_MAX_DEPTH = 4
_MAX_OBJECTS = 500
# A bound method of one of these names runs the whole module.
_WHOLE_MODULE_METHODS = frozenset({"forward", "__call__", "_call_impl", "_wrapped_call_impl"})


class Reach:
    """Modules (and whether the function surely runs all of each), tensors, generators and variables of a function."""

    def __init__(self, function: Callable[..., Any], arguments: Iterable[Any] = ()) -> None:
        self.modules: dict[nn.Module, bool] = {}
        self.tensors: list[Tensor] = []
        self.generators: list[torch.Generator] = []
        self.cells: list[tuple[types.CellType, Any]] = []
        self.globals: list[tuple[dict[str, Any], str, Any]] = []
        if isinstance(function, nn.Module):  # by far the most common
            self.modules[function] = True
        else:
            self._seen: set[int] = set()
            self._add(function, 0, True)
        for argument in arguments:
            self._seen = set()
            self._add(argument, 1, False)

    def _add(self, value: Any, depth: int, whole: bool) -> None:
        if isinstance(value, nn.Module):
            self.modules[value] = whole or self.modules.get(value, False)
        elif isinstance(value, Tensor):
            self.tensors.append(value)
        elif isinstance(value, torch.Generator):
            self.generators.append(value)
        elif isinstance(value, _SKIPPED) or id(value) in self._seen:
            return
        elif _is_hidden(value):
            return
        elif depth <= _MAX_DEPTH and len(self._seen) < _MAX_OBJECTS:
            self._seen.add(id(value))
            self._open(value, depth + 1, whole)

    def _open(self, value: Any, depth: int, whole: bool) -> None:
        if isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._add(part, depth, whole)
        elif isinstance(value, types.MethodType):
            if _is_hidden(value.__self__):
                return
            self._add(value.__self__, depth, whole and value.__func__.__name__ in _WHOLE_MODULE_METHODS)
            self._add(value.__func__, depth, False)
        elif isinstance(value, types.FunctionType):
            self._open_function(value, depth)
        elif isinstance(value, dict):
            for part in list(value.values()):
                self._add(part, depth, False)
        elif isinstance(value, list | tuple | set | frozenset):
            for part in list(value):
                self._add(part, depth, False)
        elif hasattr(value, "__wrapped__"):  # functools.lru_cache and other decorators
            self._add(value.__wrapped__, depth, False)
        else:
            if callable(value):
                self._add(vars(type(value)).get("__call__"), depth, False)
            for part in list(getattr(value, "__dict__", {}).values()):
                self._add(part, depth, False)

    def _open_function(self, function: types.FunctionType, depth: int) -> None:
        for cell in function.__closure__ or ():
            try:
                contents = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            self.cells.append((cell, contents))
            self._add(contents, depth, False)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._add(default, depth, False)
        for name in _names(function.__code__):
            if name in function.__globals__:
                value = function.__globals__[name]
                if not isinstance(value, _SKIPPED):
                    self.globals.append((function.__globals__, name, value))
                    self._add(value, depth, False)


def _is_hidden(value: Any) -> bool:
    """Whether this is one of an engine's own books, which lead to the whole model and hold nothing a layer reads."""
    return getattr(type(value), "hidden_from_replay", False)


_SKIPPED = (
    *(types.ModuleType, types.BuiltinFunctionType, type, str, bytes),
    *(torch.dtype, torch.device, torch.Size),
)


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> frozenset[str]:
    """Names that code, and functions made inside it, may look up in globals."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return frozenset(names)
