"""The tensors a function reads without being passed them: parameters and buffers of the modules it can reach.

A replay must find them as the forward found them, and leave them as it found them:

- a parameter changed in place in between (an optimizer step, shared weights) makes the replay wrong, so it is refused;
- one put in another's place (`torch.func.functional_call`, `module.weight = ...`) is put back for the replay;
- a buffer that the forward writes (BatchNorm statistics, counters, moving averages) gets its earlier value for the
  replay and its present value back after it, so that its change happens once.

What a function can reach is found from the function alone: a module, a bound method's owner, a partial's parts,
closure cells and the globals its code names. Recording every op with a dispatch mode would find more, and cost more
than many regions are worth.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowtide import _compat

_MAX_CLOSURE_DEPTH = 3
# Buffers up to this size are copied before every forward; a larger one only if an earlier forward wrote it.
_ALWAYS_COPIED_BYTES = 256 * 1024
# A bound method of one of these names runs the whole module, so whatever the module holds is the region's own.
_WHOLE_MODULE_METHODS = frozenset({"forward", "__call__", "_call_impl", "_wrapped_call_impl"})

# Per module and training flag: the names of buffers that its forward was seen to write.
_written_names: weakref.WeakKeyDictionary[nn.Module, dict[bool, set[str]]] = weakref.WeakKeyDictionary()


class Reach:
    """The modules and loose tensors that a function can reach. `exact` modules are run whole by the region."""

    def __init__(self, function: Callable[..., Any], extra_modules: Iterable[nn.Module] = ()) -> None:
        self.modules: dict[nn.Module, bool] = dict.fromkeys(extra_modules, True)
        self.tensors: list[Tensor] = []
        self._add(function, 0, True)

    def _add(self, value: Any, depth: int, exact: bool) -> None:
        if isinstance(value, nn.Module):
            self.modules[value] = exact or self.modules.get(value, False)
        elif isinstance(value, Tensor):
            self.tensors.append(value)
        elif depth > _MAX_CLOSURE_DEPTH:
            return
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._add(part, depth + 1, exact)
        elif isinstance(value, types.MethodType):
            self._add(value.__self__, depth + 1, exact and value.__func__.__name__ in _WHOLE_MODULE_METHODS)
        elif isinstance(value, types.FunctionType):
            for cell in value.__closure__ or ():
                with contextlib.suppress(ValueError):  # a cell not filled yet
                    self._add(cell.cell_contents, depth + 1, False)
            for name in value.__code__.co_names:
                named = value.__globals__.get(name)
                if isinstance(named, nn.Module | Tensor | types.FunctionType | functools.partial):
                    self._add(named, depth + 1, False)
        elif isinstance(value, list | tuple):
            for part in value:
                if isinstance(part, nn.Module | Tensor):
                    self._add(part, depth + 1, False)
        elif depth == 0 and hasattr(value, "__dict__"):  # an object with __call__
            for part in vars(value).values():
                self._add(part, depth + 1, False)


class _Slot(NamedTuple):
    """Where a parameter, buffer or loose tensor is read from, and what was there before the forward."""

    place: dict[str, Any]
    key: str
    tensor: Tensor
    owner: nn.Module | None
    exact: bool

    @property
    def surely_read(self) -> bool:
        """Whether the region reads it for all one can tell from outside; leaves with gradients show in its graph."""
        return self.exact or (self.owner is None and not (self.tensor.requires_grad and self.tensor.is_leaf))

    def __str__(self) -> str:
        if self.owner is None:
            return f"a tensor of shape {tuple(self.tensor.shape)} that the function closes over"
        kind = "parameter" if isinstance(self.tensor, nn.Parameter) else "buffer"
        return f"{kind} {self.key!r} of {type(self.owner).__name__}"


class _Buffer:
    """A slot that the forward may write, with a copy of its value before the forward if there is one."""

    __slots__ = ("copied", "is_known", "slot", "version", "written")

    def __init__(self, slot: _Slot, *, copy: bool, is_known: bool) -> None:
        self.slot = slot
        self.version = _compat.version_of(slot.tensor)
        self.copied = slot.tensor.detach().clone() if copy else None
        self.is_known = is_known  # whether an earlier forward has shown if it is written
        self.written = False

    def forward_done(self, known_written: bool) -> None:
        tensor = self.slot.tensor
        self.written = known_written or _compat.version_of(tensor) != self.version
        if not self.written and not self.is_known and self.copied is not None and _compat.has_values(tensor):
            self.written = not torch.equal(self.copied, tensor)  # a write through `.data` leaves no other trace
        if not self.written:
            self.copied = None

    @property
    def is_lost(self) -> bool:
        """Whether its value from before the forward cannot be had any more."""
        return self.copied is None if self.written else _compat.version_of(self.slot.tensor) != self.version


class FunctionState:
    """Parameters, buffers and training flags in a function's reach, from just before its forward to its last replay.

    This runs around every region, so parameters, the many, are kept as bare tuples and looked at little.
    """

    def __init__(self, reach: Reach) -> None:
        self._slots: list[_Slot] = []
        self._versions: list[int] = []
        self._buffers: list[_Buffer] = []
        self._training: dict[nn.Module, bool] = {}
        for root, exact in reach.modules.items():
            for module in _compat.submodules(root):
                if module not in self._training:
                    self._training[module] = module.training
                    self._add_module(module, exact)
        for tensor in reach.tensors:
            slot = _Slot({"": tensor}, "", tensor, None, False)  # a place of its own, which nobody rebinds
            if tensor.requires_grad:
                self._slots.append(slot)
            else:
                copy = tensor.nbytes <= _ALWAYS_COPIED_BYTES
                self._buffers.append(_Buffer(slot, copy=copy, is_known=True))

    def _add_module(self, module: nn.Module, exact: bool) -> None:
        parameters, buffers = _compat.module_tensors(module)
        for key, tensor in parameters.items():
            if tensor is not None:
                self._slots.append(_Slot(parameters, key, tensor, module, exact))
        if buffers:
            written = _written_names.setdefault(module, {}).get(module.training)
            for key, tensor in buffers.items():
                if tensor is not None:
                    copy = written is None or key in written or tensor.nbytes <= _ALWAYS_COPIED_BYTES
                    slot = _Slot(buffers, key, tensor, module, exact)
                    self._buffers.append(_Buffer(slot, copy=copy, is_known=written is not None))

    def devices(self) -> set[torch.device]:
        return {slot.tensor.device for slot in self._slots}

    def forward_done(self) -> None:
        """Note which buffers the forward wrote, and what versions parameters have now.

        Now, not before: a forward may renorm its own weight (Embedding with max_norm), to the same values each time.
        """
        self._versions = [_compat.version_of(slot.tensor) for slot in self._slots]
        for buffer in self._buffers:
            owner, key = buffer.slot.owner, buffer.slot.key
            if owner is None:
                buffer.forward_done(known_written=False)
                continue
            known = _written_names[owner].setdefault(self._training[owner], set())
            buffer.forward_done(known_written=key in known)
            if buffer.written:
                known.add(key)

    def lost_slots(self) -> list[_Slot]:
        """Those whose value of the forward cannot be had: changed in place since, with no copy to go back to."""
        changed = [
            slot
            for slot, version in zip(self._slots, self._versions, strict=True)
            if _compat.version_of(slot.tensor) != version
        ]
        return changed + [buffer.slot for buffer in self._buffers if buffer.is_lost]

    def restore(self) -> Callable[[], None]:
        """Put every slot back to what the forward found; call the result to have all as it is now."""
        slots = [*self._slots, *(buffer.slot for buffer in self._buffers)]
        rebound = [
            (slot, live)
            for slot in slots
            if (live := slot.place.get(slot.key, _ABSENT)) is not slot.tensor
            and not _swapped_by_sharding(live, slot.tensor)
        ]
        flags = [module for module, training in self._training.items() if module.training != training]
        written = [
            (buffer, buffer.copied, buffer.slot.tensor.detach().clone(), _compat.version_of(buffer.slot.tensor))
            for buffer in self._buffers
            if buffer.copied is not None
        ]

        def undo() -> None:
            for module in flags:
                module.training = not self._training[module]
            for buffer, _, value, version in written:
                _overwrite(buffer.slot.tensor, value, version)
            for slot, live in rebound:
                if live is _ABSENT:
                    slot.place.pop(slot.key, None)
                else:
                    slot.place[slot.key] = live

        for slot, _ in rebound:
            slot.place[slot.key] = slot.tensor
        for buffer, copied, _, _ in written:
            _overwrite(buffer.slot.tensor, copied, buffer.version)
        for module in flags:
            module.training = self._training[module]
        return undo


_ABSENT = object()


def _overwrite(tensor: Tensor, value: Tensor, version: int) -> None:
    with torch.no_grad():
        tensor.copy_(value)
    _compat.set_version(tensor, version)


def _swapped_by_sharding(live: Any, recorded: Tensor) -> bool:
    """FSDP2 exchanges sharded and whole parameters around every forward; that is not ours to undo."""
    return (isinstance(live, Tensor) and _compat.is_sharded(live)) or _compat.is_sharded(recorded)
