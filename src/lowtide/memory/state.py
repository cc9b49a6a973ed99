"""What a function reads around it, as the forward found it: weights, buffers, variables, training flags.

A replay must find them so, and leave them as it found them:

- what was changed in place in between, with no copy to go back to (a weight after an optimizer step), is *lost*: a
  replay that reads it is refused;
- what was put in another's place (`torch.func.functional_call`, `module.weight = ...`, the variable of a loop that a
  lambda closes over) is put back for the replay;
- buffers get their value from before the forward for the replay, and their present value back after it, so that what
  a forward adds to them (BatchNorm statistics, counters, moving averages) is added once. Small ones are copied
  whether written or not: some kernels write without a trace, and finding out would stop an accelerator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowtide import _compat
from lowtide.memory.reach import Reach

# Buffers up to this size are copied before every forward; a larger one only if an earlier forward wrote it.
_ALWAYS_COPIED_BYTES = 256 * 1024
_ABSENT = object()

# Per module and training flag: the names of large buffers that its forward was seen to write.
_written_names: weakref.WeakKeyDictionary[nn.Module, dict[bool, set[str]]] = weakref.WeakKeyDictionary()
_has_own_attributes: dict[type, bool] = {}


class Slot(NamedTuple):
    """Where a tensor is read from, and what was there before the forward."""

    place: dict[str, Any]
    key: str
    tensor: Tensor
    owner: nn.Module | None

    def __str__(self) -> str:
        if self.owner is None:
            return f"a tensor of shape {tuple(self.tensor.shape)} that the function closes over"
        kind = "parameter" if isinstance(self.tensor, nn.Parameter) else "buffer"
        return f"{kind} {self.key!r} of {type(self.owner).__name__}"


class FunctionState:
    """Everything in a function's reach, from just before its forward to its last replay.

    This runs around every region, so parameters, the many, are kept as bare tuples and looked at little.
    """

    def __init__(self, reach: Reach) -> None:
        self._reach: Reach | None = reach  # until the forward is over
        self._slots: list[Slot] = []  # never copied: parameters, and large buffers not known to be written
        self._empty: list[tuple[dict[str, Any], str]] = []  # buffers that were None
        self._copied: list[Slot] = []
        self._unsure: dict[Tensor, bool] = {}  # copied large buffers of unknown habit; whether they were surely in use
        self._training: dict[nn.Module, bool] = {}
        for root, whole in reach.modules.items():
            for module in _compat.submodules(root):
                if module not in self._training:
                    self._training[module] = module.training
                    parameters, buffers = _compat.module_tensors(module)
                    if parameters or buffers or _has_own_attributes.get(type(module), True):
                        self._add_module(reach, module, parameters, buffers, whole)
        for tensor in reach.tensors:
            slot = Slot({"": tensor}, "", tensor, None)  # a place of its own, which nobody rebinds
            copy = not tensor.requires_grad and _compat.is_copyable(tensor) and tensor.nbytes <= _ALWAYS_COPIED_BYTES
            (self._copied if copy else self._slots).append(slot)
        self._copies = _compat.clone_all([slot.tensor for slot in self._copied])
        self._copied_versions = _compat.versions_of([slot.tensor for slot in self._copied])
        self._tensors = [slot.tensor for slot in self._slots]
        self._versions = _compat.versions_of(self._tensors)
        self._variables: list[tuple[Any, Any]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []

    def _add_module(
        self, reach: Reach, module: nn.Module, parameters: dict[str, Any], buffers: dict[str, Any], whole: bool
    ) -> None:
        if not isinstance(parameters, dict):  # a ScriptModule: what it holds is its own affair
            return
        for key, tensor in parameters.items():
            if tensor is not None and not _compat.is_uninitialized(tensor):
                self._slots.append(Slot(parameters, key, tensor, module))
        for key, tensor in buffers.items():
            self._add_buffer(module, buffers, key, tensor, whole)
        kind = type(module)
        if _has_own_attributes.setdefault(kind, not kind.__module__.startswith("torch.nn.")):
            attributes = vars(module)
            for key, value in attributes.items():
                if type(value) is Tensor and not value.requires_grad:
                    self._add_buffer(module, attributes, key, value, whole)
                elif type(value) is torch.Generator:
                    reach.generators.append(value)

    def _add_buffer(self, module: nn.Module, place: dict[str, Any], key: str, tensor: Any, whole: bool) -> None:
        if tensor is None:
            self._empty.append((place, key))
            return
        if _compat.is_uninitialized(tensor):
            return
        slot = Slot(place, key, tensor, module)
        if not _compat.is_copyable(tensor):
            self._slots.append(slot)
        elif tensor.nbytes <= _ALWAYS_COPIED_BYTES:
            self._copied.append(slot)
        else:
            written = _written_names.setdefault(module, {}).get(module.training)
            if written is None:
                self._unsure[slot.tensor] = whole
            (self._copied if written is None or key in written else self._slots).append(slot)

    def devices(self) -> set[torch.device]:
        return {slot.tensor.device for slot in self._slots}

    def forward_done(self) -> None:
        """Note what the forward did: versions of weights now, variables it left as they were, large buffers it wrote.

        Versions now, not before: a forward may renorm its own weight (Embedding with max_norm), to the same values.
        """
        versions = _compat.versions_of(self._tensors)
        if versions != self._versions:
            for index, slot in enumerate(self._slots):
                if versions[index] != self._versions[index]:
                    if isinstance(slot.tensor, nn.Parameter) or slot.owner is None:
                        self._versions[index] = versions[index]
                    else:
                        self._learn(slot, written=True)
                        self._versions[index] = _LOST
        if self._unsure:
            self._settle_unsure()
        # A variable that the forward itself changed (a counter) is left alone: its changes are meant to be seen.
        reach, self._reach = self._reach, None
        assert reach is not None
        self._variables = [found for found in reach.cells if _contents(found[0]) is found[1]]
        self._globals = [found for found in reach.globals if found[0].get(found[1]) is found[2]]

    def _settle_unsure(self) -> None:
        """Keep copies of those large buffers that were written, and remember which module writes which."""
        kept = []
        for index, slot in enumerate(self._copied):
            is_sure = slot.tensor not in self._unsure
            written = is_sure or _compat.version_of(slot.tensor) != self._copied_versions[index]
            if not written and self._unsure[slot.tensor] and _compat.has_values(slot.tensor):
                written = not torch.equal(self._copies[index], slot.tensor)  # a write through `.data` shows only so
                self._learn(slot, written=written)
            elif not is_sure and written:
                self._learn(slot, written=True)
            if written:
                kept.append(index)
            else:
                self._slots.append(slot)
                self._tensors.append(slot.tensor)
                self._versions.append(_compat.version_of(slot.tensor))
        self._copied = [self._copied[index] for index in kept]
        self._copies = [self._copies[index] for index in kept]
        self._copied_versions = [self._copied_versions[index] for index in kept]
        self._unsure = {}

    def _learn(self, slot: Slot, *, written: bool) -> None:
        assert slot.owner is not None
        names = _written_names.setdefault(slot.owner, {}).setdefault(self._training[slot.owner], set())
        if written:
            names.add(slot.key)

    def lost_slots(self) -> list[Slot]:
        """Those changed in place since the forward, with no copy to go back to."""
        versions = _compat.versions_of(self._tensors)
        if versions == self._versions:
            return []
        return [slot for slot, now, then in zip(self._slots, versions, self._versions, strict=True) if now != then]

    def restore(self) -> Callable[[], None]:
        """Put everything back to what the forward found; call the result to have all as it is now."""
        rebound: list[tuple[dict[str, Any], str, Any, Any]] = [
            (slot.place, slot.key, slot.tensor, live)
            for slots in (self._slots, self._copied)
            for slot in slots
            if (live := slot.place.get(slot.key, _ABSENT)) is not slot.tensor
            and not _swapped_by_sharding(live, slot.tensor)
        ]
        rebound += [
            (place, key, None, live) for place, key in self._empty if (live := place.get(key, _ABSENT)) is not None
        ]
        rebound += [
            (place, name, value, live)
            for place, name, value in self._globals
            if (live := place.get(name, _ABSENT)) is not value
        ]
        cells = [
            (cell, contents, live) for cell, contents in self._variables if (live := _contents(cell)) is not contents
        ]
        flags = [module for module, training in self._training.items() if module.training != training]
        tensors = [slot.tensor for slot in self._copied]
        values, versions = _compat.clone_all(tensors), _compat.versions_of(tensors)

        def undo() -> None:
            for module in flags:
                module.training = not self._training[module]
            _compat.overwrite_all(tensors, values, versions)
            for cell, _, live in cells:
                _set_contents(cell, live)
            for place, key, _, live in rebound:
                if live is _ABSENT:
                    place.pop(key, None)
                else:
                    place[key] = live

        for place, key, value, _ in rebound:
            place[key] = value
        for cell, contents, _ in cells:
            cell.cell_contents = contents
        _compat.overwrite_all(tensors, self._copies, self._copied_versions)
        for module in flags:
            module.training = self._training[module]
        return undo


_LOST = -1  # no version of any tensor


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


def _set_contents(cell: Any, contents: Any) -> None:
    if contents is _ABSENT:
        del cell.cell_contents
    else:
        cell.cell_contents = contents


def _swapped_by_sharding(live: Any, recorded: Tensor) -> bool:
    """FSDP2 exchanges sharded and whole parameters around every forward; that is not ours to undo."""
    return (isinstance(live, Tensor) and _compat.is_sharded(live)) or _compat.is_sharded(recorded)
