"""A step that leaves no trace: whatever it changes of a model and its surroundings is put back, to the bit."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.replay.function_state import Reach
from lowtide.tracing import _compat
from lowtide.tracing.snapshots import Snapshot, containers

_noted: ContextVar[list[torch.Generator] | None] = ContextVar("generators of traced steps", default=None)


@contextlib.contextmanager
def noted_generators() -> Iterator[list[torch.Generator]]:
    """The generators of someone's own that steps traced inside the block draw from.

    A step that nobody watches cannot tell: whoever runs one saves their states beforehand.
    """
    found: list[torch.Generator] = []
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


class Restorer:
    """Take it before the step, call `restore()` after. Contents are copied only when something is about to write them.
    With `copies_on_host`, copies take no memory of the device: for a step whose peak is measured.

    Modules get back their attributes, among them training flags, hooks and caches, with what lies in those. Leaves get
    back their gradients, random generators their states, optimizers that a hook steps in the backward theirs. So do
    variables and objects that `loss_fn` names: counters, lists of losses, a gradient scaler.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        tensors: Iterable[Tensor],
        device: torch.device,
        *,
        copies_on_host: bool = False,
    ) -> None:
        self._copies_on_host = copies_on_host
        reach = Reach(loss_fn)
        self._cells, self._globals = reach.cells, reach.globals
        modules = [part for module in (model, *reach.modules) for part in _compat.submodules(module)]
        named = [contents for _, contents in reach.cells] + [value for *_, value in reach.globals]
        self._attributes = Snapshot([*(vars(module) for module in modules), *containers(named), *containers([loss_fn])])
        self._optimizers: dict[int, Snapshot] = {}
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._seen: set[int] = set()
        given = [*model.parameters(), *tensors]
        self.add_leaves(given)
        self._data = [(tensor, tensor.detach()) for tensor in [*given, *model.buffers()] if _compat.is_plain(tensor)]
        self._versions = [(tensor, _compat.version_of(tensor)) for tensor, _ in self._data]
        self._device = device if device.type not in ("cpu", "meta") and _compat.accelerator() is not None else None
        self._generators = generator_states(self._device)
        self._own_generators: dict[int, tuple[torch.Generator, Tensor]] = {}
        for item in (*reach.generators, *(item for module in modules for item in vars(module).values())):
            if isinstance(item, torch.Generator):  # now, as a step may seed it before it draws
                self.before_write(item)
        self._copies: dict[int, tuple[Tensor, Tensor, Tensor, int]] = {}
        self._hook = _compat.register_optimizer_step_pre_hook(self._before_optimizer_step)

    def add_leaves(self, tensors: Iterable[Tensor]) -> None:
        """Leaves whose gradients belong to someone."""
        for tensor in tensors:
            if tensor.is_leaf and id(tensor) not in self._seen:
                self._seen.add(id(tensor))
                self._gradients.append((tensor, tensor.grad))

    def before_write(self, target: Tensor | torch.Generator) -> None:
        """An op is about to write to a tensor that was there before the step, or to draw from a generator."""
        if isinstance(target, torch.Generator):
            if _compat.generator_id(target) not in self._own_generators:
                self._own_generators[_compat.generator_id(target)] = target, target.get_state()
                noted = _noted.get()
                if noted is not None:
                    noted.append(target)
            return
        with _compat.without_modes(), torch.no_grad():
            for tensor in _compat.inner_tensors(target):
                key = _compat.storage_id(tensor)
                if key not in self._copies and not _compat.is_fake(tensor) and not tensor.is_meta:
                    everything = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                    everything.set_(tensor.untyped_storage())  # type: ignore[call-overload]
                    kept = everything.to("cpu", copy=True) if self._copies_on_host else everything.clone()
                    self._copies[key] = tensor, everything, kept, _compat.version_of(tensor)

    def reset_gradients(self) -> None:
        """The gradients there were, as objects; their content comes with `restore`."""
        for leaf, gradient in self._gradients:
            if leaf.grad is not gradient:
                leaf.grad = gradient

    def restore(self) -> None:
        self._hook.remove()
        self.reset_gradients()
        for cell, contents in self._cells:
            cell.cell_contents = contents
        for namespace, name, value in self._globals:
            namespace[name] = value
        for snapshot in (self._attributes, *self._optimizers.values()):
            snapshot.restore()
        for tensor, data in self._data:
            if _compat.storage_id(tensor) != _compat.storage_id(data):
                tensor.data = data
        for tensor, everything, copy, version in self._copies.values():
            with torch.no_grad():
                everything.copy_(copy)
            _compat.set_version(tensor, version)
        for tensor, version in self._versions:
            if _compat.version_of(tensor) != version:
                _compat.set_version(tensor, version)
        for held in (self._copies, self._gradients, self._data, self._versions):
            held.clear()  # type: ignore[attr-defined]
        for generator, state in self._own_generators.values():
            generator.set_state(state)
        set_generator_states(self._generators, self._device)

    def _before_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = Snapshot([vars(optimizer)])


def generator_states(device: torch.device | None) -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "random": random.getstate()}
    if device is not None:
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    return states


def set_generator_states(states: dict[str, Any], device: torch.device | None) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["random"])
    if device is not None:
        torch.get_device_module(device).set_rng_state(states["device"], device)
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
