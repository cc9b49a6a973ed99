"""What a captured step takes for granted: its batch's form, the model's tensors, and the Python values it read.

A CUDA graph runs no Python and reads memory at fixed addresses. What the step's Python would have decided differently
is therefore looked at before every run: a batch of another form, another `training` flag, dropout rate or variable of
the loss function lead to another graph; a parameter that lies elsewhere by now, or has become trainable, to an error.
Not seen are values inside of other objects (a config's fields) and what Python does for its own sake (prints, lists).
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.engines import _compat
from lowtide.errors import CaptureError
from lowtide.replay.function_state import Reach
from lowtide.tracing.snapshots import Snapshot

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def form_of(item: Any) -> Any:
    """What a graph depends on in an argument, hashable: the form of tensors, everything else by value."""
    if isinstance(item, Tensor):
        if not _compat.is_plain(item):
            raise CaptureError(f"a batch with a {type(item).__name__} cannot be captured: plain tensors can")
        return item.shape, item.stride(), item.dtype, item.device, item.requires_grad
    if isinstance(item, float | complex):
        return type(item), repr(item)  # 0.0 and -0.0 are equal
    if isinstance(item, (*_PLAIN, Enum)):
        return type(item), item
    if isinstance(item, tuple | list):
        return type(item), *map(form_of, item)
    if isinstance(item, Mapping):
        return type(item), *((form_of(key), form_of(value)) for key, value in item.items())
    if is_dataclass(item) and not isinstance(item, type):
        return type(item), *(form_of(getattr(item, field.name)) for field in fields(item))
    raise CaptureError(
        f"an argument of type {type(item).__name__} cannot be captured, as no one can tell when it changes: give "
        "tensors, numbers, text, and tuples, lists, dicts or dataclasses of these"
    )


class StepFacts:
    """The modules and variables that a step reads, as far as the model and the loss function tell."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any]) -> None:
        reach = Reach(loss_fn)
        self._roots = roots = (model, *reach.modules)
        self.modules = self._all_modules()
        self._names = {module: name for root in reversed(roots) for name, module in root.named_modules()}
        self._slots = [slots for module in self.modules for slots in _compat.module_tensors(module)]
        self._attributes = [
            (vars(module), [name for name, value in vars(module).items() if isinstance(value, (*_PLAIN, Tensor))])
            for module in self.modules
        ]
        self._cells = [cell for cell, _ in reach.cells]
        read = set(_global_names(loss_fn))
        self._globals = [(namespace, name) for namespace, name, _ in reach.globals if name in read]
        own = (value for module in self.modules for value in vars(module).values())
        self.generators = [
            each
            for each in (*reach.generators, *own)
            if isinstance(each, torch.Generator) and each.device.type == "cuda"
        ]
        # A graph reads memory that it does not own: what attributes and variables refer to now must not be freed.
        self._held = Snapshot([*map(vars, self.modules), [cell.cell_contents for cell in self._cells]])
        self.tensors = self._tensors()

    def values(self) -> tuple[Any, ...]:
        """Python values that the step may read: numbers and text as they are, others by identity."""
        found = [_value(attributes.get(name)) for attributes, names in self._attributes for name in names]
        found += [_value(cell.cell_contents) for cell in self._cells]
        found += [_value(namespace.get(name)) for namespace, name in self._globals]
        return tuple(found)

    def numbers(self) -> dict[str, Any]:
        """Numbers and text in attributes of modules, by name."""
        return {
            f"{self._names.get(module) or type(module).__name__}.{name}": attributes.get(name)
            for module, (attributes, names) in zip(self.modules, self._attributes, strict=True)
            for name in names
            if isinstance(attributes.get(name), bool | int | float | str)
        }

    @property
    def parameters(self) -> list[Tensor]:
        return [tensor for slots in self._slots[::2] for tensor in slots.values() if tensor is not None]

    @property
    def buffers(self) -> list[Tensor]:
        return [tensor for slots in self._slots[1::2] for tensor in slots.values() if tensor is not None]

    def _all_modules(self) -> list[nn.Module]:
        return list({part: None for root in self._roots for part in _compat.submodules(root)})

    def _tensors(self) -> list[tuple[int, int, bool]]:
        return [
            (id(tensor), tensor.data_ptr(), tensor.requires_grad)
            for slots in self._slots
            for tensor in slots.values()
            if tensor is not None
        ]

    def what_moved(self) -> str | None:
        """In words, a module, parameter or buffer that is not the one there was, where it was and as trainable."""
        if self._all_modules() != self.modules:
            return "modules were added or replaced"
        return self._first_changed() if self._tensors() != self.tensors else None

    def _first_changed(self) -> str:
        now, then = self._tensors(), self.tensors
        if len(now) != len(then):
            return "parameters or buffers were added or removed"
        position = next(index for index, pair in enumerate(zip(now, then, strict=True)) if pair[0] != pair[1])
        name = [name for slots in self._slots for name, tensor in slots.items() if tensor is not None][position]
        modules = [m for m in self.modules for s in _compat.module_tensors(m) for t in s.values() if t is not None]
        path = f"{self._names.get(modules[position], '')}.{name}".lstrip(".")
        if now[position][:2] == then[position][:2]:
            return f"{path} became {'trainable' if now[position][2] else 'frozen'}"
        return f"{path} was replaced or moved"


def _value(item: Any) -> Any:
    return item if isinstance(item, _PLAIN) else (id(item), item.data_ptr()) if isinstance(item, Tensor) else id(item)


def _global_names(function: Any) -> Iterator[str]:
    """Globals that a function reads, and functions inside it; not the attributes of the same names."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    codes: list[types.CodeType] = [] if code is None else [code]
    for each in codes:  # grows while it is walked
        yield from (i.argval for i in dis.get_instructions(each) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
        codes += [constant for constant in each.co_consts if isinstance(constant, types.CodeType)]


def changed_number(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """The first attribute whose number or text differs, in words."""
    for name, value in before.items():
        if name in after and (type(after[name]) is not type(value) or after[name] != value):
            return f"{name} from {value!r} to {after[name]!r}"
    return None
