"""A step that leaves no trace: whatever it changes of a model and its surroundings is put back, to the bit."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.tracing import _compat


class Restorer:
    """Take it before the step, call `restore()` after. Contents are copied only when something is about to write them.

    Modules get back their attributes, among them training flags, hooks and caches, lists and dicts among those with the
    content they had. Leaves get back their gradients, random generators their states.
    """

    def __init__(self, model: nn.Module, tensors: Iterable[Tensor], device: torch.device) -> None:
        self._states = [(module, _state_of(module)) for module in _compat.submodules(model)]
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._seen: set[int] = set()
        self.add_leaves([*model.parameters(), *tensors])
        self._device = device if device.type not in ("cpu", "meta") and _compat.accelerator() is not None else None
        self._generators = _generator_states(self._device)
        self._copies: dict[int, tuple[Tensor, Tensor, Tensor, int]] = {}

    def add_leaves(self, tensors: Iterable[Tensor]) -> None:
        """Leaves whose gradients belong to someone."""
        for tensor in tensors:
            if tensor.is_leaf and id(tensor) not in self._seen:
                self._seen.add(id(tensor))
                self._gradients.append((tensor, tensor.grad))

    def before_write(self, tensor: Tensor) -> None:
        """An op is about to write to a tensor that was there before the step."""
        with _compat.without_modes(), torch.no_grad():
            storage = tensor.untyped_storage()
            if _compat.storage_id(tensor) not in self._copies and not _compat.is_fake(tensor):
                everything = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)  # type: ignore[call-overload]
                copy = everything.clone()
                self._copies[_compat.storage_id(tensor)] = tensor, everything, copy, _compat.version_of(tensor)

    def reset_gradients(self) -> None:
        """The gradients there were, as objects; their content comes with `restore`."""
        for leaf, gradient in self._gradients:
            if leaf.grad is not gradient:
                leaf.grad = gradient

    def restore(self) -> None:
        self.reset_gradients()
        for module, state in self._states:
            _restore_state(module, state)
        for tensor, everything, copy, version in self._copies.values():
            with torch.no_grad():
                everything.copy_(copy)
            _compat.set_version(tensor, version)
        self._copies.clear()
        _set_generator_states(self._generators, self._device)


def _state_of(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Each attribute and, of a container, its content."""
    return {name: (value, _content(value)) for name, value in vars(module).items()}


def _content(value: Any) -> Any:
    return value.copy() if isinstance(value, dict | list | set) else None


def _restore_state(module: nn.Module, state: dict[str, tuple[Any, Any]]) -> None:
    attributes = vars(module)
    for name in [name for name in attributes if name not in state]:
        del attributes[name]
    for name, (value, content) in state.items():
        attributes[name] = value
        if isinstance(value, list):
            value[:] = content
        elif isinstance(value, dict | set):
            value.clear()
            value.update(content)


def _generator_states(device: torch.device | None) -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "random": random.getstate()}
    if device is not None:
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    return states


def _set_generator_states(states: dict[str, Any], device: torch.device | None) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["random"])
    if device is not None:
        torch.get_device_module(device).set_rng_state(states["device"], device)
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
