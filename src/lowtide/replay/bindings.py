"""Names of modules: what they are bound to for a replay, and again after it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from lowtide import _compat

if TYPE_CHECKING:
    from lowtide.replay.module_state import ModuleTree

ABSENT: Any = object()
# Attributes that torch's modules have for themselves. `forward` is patched, by others too.
INTERNAL_NAMES = frozenset(vars(nn.Module())) - {"training"} | {"forward"}

Names = dict[str, Any]  # the dict behind a module's parameters, buffers, children or attributes


class Slot(NamedTuple):
    """A name that code may read a value from."""

    names: Names
    key: str
    owner: nn.Module

    def describe(self, tensor: Tensor) -> str:
        kind = "attribute" if self.names is vars(self.owner) else "buffer"
        kind = "parameter" if isinstance(tensor, nn.Parameter) else kind
        return f"{kind} {self.key!r} of {type(self.owner).__name__}"


def nothing() -> None:
    """For the common case that there is nothing to put back."""


def bind(tree: ModuleTree, values: list[Any]) -> Callable[[], None]:
    """Bind all names to `values`, where they are bound to something else; call the result to have them as they are."""
    if tree.are_bound_to(values):
        return functools.partial(_bind_if_changed, tree, values)
    tree.last = None  # it would keep values alive that nothing else holds
    new_slots = tree.new_slots()
    present, new_values = tree.read(), [slot.names.pop(slot.key) for slot in new_slots]
    _bind_each(tree, values)

    def undo() -> None:
        _bind_each(tree, present)
        for slot, value in zip(new_slots, new_values, strict=True):
            slot.names[slot.key] = value

    return undo


def _bind_if_changed(tree: ModuleTree, values: list[Any]) -> None:
    if not tree.are_bound_to(values):
        _bind_each(tree, values)


def _bind_each(tree: ModuleTree, values: list[Any]) -> None:
    for slot in tree.new_slots():
        del slot.names[slot.key]
    for slot, value in zip(tree.slots, values, strict=True):
        live = slot.names.get(slot.key, ABSENT)
        if live is value or slot.key in INTERNAL_NAMES or _is_swapped_by_sharding(live, value):
            continue
        if value is ABSENT:
            slot.names.pop(slot.key, None)
        else:
            slot.names[slot.key] = value


def _is_swapped_by_sharding(live: Any, recorded: Any) -> bool:
    """FSDP2 exchanges sharded and whole parameters around every forward; a replay leaves that to it."""
    return any(isinstance(each, Tensor) and _compat.is_sharded(each) for each in (live, recorded))
