"""Undo a training step: restore gradients, buffers, attributes, random states and what else it wrote, to the bit.

Three parts, each used on its own:

- `ObjectSnapshot` stores the contents of attributes and of the containers in them, and restores them.
- `Restorer` is for traces and measurements, which run a real step and must leave no effect. It copies a tensor when
  an op is about to write it, and also restores optimizers that a hook steps in the backward.
- `StepUndo` is for steps of a training loop that may run out of memory and are run again under another plan. No
  dispatch mode sees their ops, so everything that a step may change is copied before it runs. Parameters are not:
  `what_cannot_be_restored` reports steps that change them.

A backward adds to existing gradients in place, so `StepUndo` copies these to the host, during the forward. Copies on
the device would take memory where it is short, and what was added cannot be subtracted, as floating-point sums round.
A step that begins without gradients, as after `zero_grad()`, copies none. On the CPU the copies add to the peak of
the step. Buffers up to 256 KiB are copied on their device, larger ones to the host until a step was seen not to write
them.
"""

from __future__ import annotations

import contextlib
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from lowtide import _compat
from lowtide.graph.arrays import ALWAYS_COPIED_BYTES
from lowtide.replay.arguments import tensors_in
from lowtide.replay.function_state import CapturedState
from lowtide.replay.object_state import fill

# Caches of a module may be nested this deep; deeper contents are taken for other objects' state and not restored.
_MAX_DEPTH = 6
_MAX_LENGTH = 10_000  # longer containers are taken for data and not searched
_LEFT_ALONE = (Tensor, nn.Module, type, types.ModuleType, types.FunctionType, str, bytes)
# Process groups, meshes and the states of sharding runtimes follow what the C++ side has done, which stays done.
_RUNTIMES = ("torch.distributed", "torch._C._distributed", "torch.nn.parallel")


class ObjectSnapshot:
    """A snapshot of `roots` and of the lists, dicts, sets and attributes in them, without tensors and modules."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self._contents: list[tuple[Any, Any]] = []
        seen: set[int] = set()
        level = list(roots)
        for _ in range(_MAX_DEPTH):
            following: list[Any] = []
            for container in level:
                if id(container) not in seen:
                    seen.add(id(container))
                    if not isinstance(container, tuple):
                        self._contents.append((container, container.copy()))
                    if len(container) <= _MAX_LENGTH:
                        following += containers(container.values() if isinstance(container, dict) else container)
            level = following

    def restore(self) -> None:
        """Restore the containers that were changed."""
        for container, content in self._contents:
            is_dict = isinstance(container, dict)
            if not _same(container, content) or (is_dict and not _same(container.values(), content.values())):
                fill(container, content.items() if is_dict else content)


def containers(items: Iterable[Any]) -> list[Any]:
    """Return the items that are containers, and the attribute dicts of the others."""
    result = []
    for item in items:
        if isinstance(item, types.MethodType):
            item = item.__self__
        if isinstance(item, dict | list | set | deque | tuple):
            result.append(item)
        elif _is_runtime(item):
            continue
        elif not isinstance(item, _LEFT_ALONE) and not getattr(type(item), "hidden_from_replay", False):
            attributes = getattr(item, "__dict__", None)
            if isinstance(attributes, dict):
                result.append(attributes)
    return result


def _is_runtime(item: Any) -> bool:
    return type(item).__module__.startswith(_RUNTIMES)


def _same(a: Iterable[Any], b: Iterable[Any]) -> bool:
    """Return whether both hold the same objects in the same order."""
    a, b = list(a), list(b)
    return len(a) == len(b) and all(one is other for one, other in zip(a, b, strict=True))


_noted: ContextVar[list[Tensor | torch.Generator] | None] = ContextVar("what traced steps change", default=None)


@contextlib.contextmanager
def noted_changes() -> Iterator[list[Tensor | torch.Generator]]:
    """Collect what steps traced inside the block change: tensors from before the step, and the user's own generators.

    A step without a dispatch mode cannot detect them, so its caller copies them before it.
    """
    changed: list[Tensor | torch.Generator] = []
    token = _noted.set(changed)
    try:
        yield changed
    finally:
        _noted.reset(token)


def note_change(target: Tensor | torch.Generator) -> None:
    """Add a tensor or generator to those of `noted_changes`."""
    noted = _noted.get()
    if noted is not None:
        noted.append(target)


class Restorer:
    """Undoes a traced step: make it before the step, call `restore()` after.

    Tensors are copied when an op is about to write them (`before_write`). With `copies_on_host`, the copies take no
    device memory, for a step whose peak is measured.

    Restored are the attributes of modules (training flags, hooks, caches) with their contents, gradients of leaves,
    states of random generators and of optimizers that a hook steps in the backward, and variables and objects that
    `loss_fn` names: counters, lists of losses, a gradient scaler.
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
        captured = CapturedState(loss_fn)
        self._variables = captured.variables
        modules = [part for module in (model, *captured.modules) for part in _compat.submodules(module)]
        named = [variable.value for variable in captured.variables]
        attributes = [vars(module) for module in modules if not _is_runtime(module)]
        self._attributes = ObjectSnapshot([*attributes, *containers(named), *containers([loss_fn])])
        self._optimizers: dict[int, ObjectSnapshot] = {}
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._seen: set[int] = set()
        given = [*model.parameters(), *tensors]
        self.add_leaves(given)
        self._data = [(tensor, tensor.detach()) for tensor in [*given, *model.buffers()] if _compat.is_plain(tensor)]
        self._versions = [(tensor, _compat.version_of(tensor)) for tensor, _ in self._data]
        self._device = device if device.type not in ("cpu", "meta") and _compat.accelerator() is not None else None
        self._generators = generator_states(self._device)
        self._own_generators: dict[int, tuple[torch.Generator, Tensor]] = {}
        for item in (*captured.generators, *(item for module in modules for item in vars(module).values())):
            if isinstance(item, torch.Generator):  # now, as the step may seed it before the first draw
                self.before_write(item)
        self._copies: dict[int, tuple[Tensor, Tensor, Tensor, int]] = {}
        self._hook = register_optimizer_step_pre_hook(self._before_optimizer_step)

    def add_leaves(self, tensors: Iterable[Tensor]) -> None:
        """Add leaves whose gradients are restored."""
        for tensor in tensors:
            if tensor.is_leaf and id(tensor) not in self._seen:
                self._seen.add(id(tensor))
                self._gradients.append((tensor, tensor.grad))

    def before_write(self, target: Tensor | torch.Generator) -> None:
        """Copy a tensor that an op is about to write, or the state of a generator that it will draw from."""
        if isinstance(target, torch.Generator):
            if _compat.generator_id(target) not in self._own_generators:
                self._own_generators[_compat.generator_id(target)] = target, target.get_state()
                note_change(target)
            return
        with _compat.without_modes(), torch.no_grad():
            for tensor in _compat.parts_of(target):
                key = _compat.storage_id(tensor)
                if key not in self._copies and not _compat.is_fake(tensor) and not tensor.is_meta:
                    everything = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                    everything.set_(tensor.untyped_storage())  # type: ignore[call-overload]
                    kept = everything.to("cpu", copy=True) if self._copies_on_host else everything.clone()
                    self._copies[key] = tensor, everything, kept, _compat.version_of(tensor)
                    note_change(tensor)

    def reset_gradients(self) -> None:
        """Set the gradients to the tensors of before the step; `restore` restores their values."""
        for leaf, gradient in self._gradients:
            if leaf.grad is not gradient:
                leaf.grad = gradient

    def restore(self) -> None:
        self._hook.remove()
        self.reset_gradients()
        for variable in self._variables:
            variable.bind(variable.value)
        for snapshot in (self._attributes, *self._optimizers.values()):
            snapshot.restore()
        for tensor, data in self._data:
            if _compat.storage_id(tensor) != _compat.storage_id(data):
                tensor.data = data
        for tensor, everything, copy, version in self._copies.values():
            if everything.untyped_storage().nbytes() < copy.nbytes:
                continue  # freed since, as sharding runtimes free gathered parameters
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
            self._optimizers[id(optimizer)] = ObjectSnapshot([vars(optimizer)])


def generator_states(device: torch.device | None) -> dict[str, Any]:
    states = {"torch": torch.get_rng_state(), "random": random.getstate(), "numpy": np.random.get_state()}
    if device is not None:
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_generator_states(states: dict[str, Any], device: torch.device | None) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["random"])
    np.random.set_state(states["numpy"])
    if device is not None:
        torch.get_device_module(device).set_rng_state(states["device"], device)


class SnapshotBuffers:
    """Kept from one step to the next: which large buffers a step writes, and pinned host memory for gradients."""

    def __init__(self) -> None:
        self.is_written: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()
        self._pinned: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()
        self._stream: Any = None

    def copied_to_host(self, leaves: list[Tensor]) -> list[Tensor]:
        """Copy the leaves' gradients to the host; on an accelerator the copies may still be running, see `wait`."""
        on_device = [leaf for leaf in leaves if _is_staged(leaf)]
        if on_device:
            module = torch.get_device_module(on_device[0].device)
            if self._stream is None:
                self._stream = module.Stream(on_device[0].device)
            self._stream.wait_stream(module.current_stream(on_device[0].device))
            with module.stream(self._stream), torch.no_grad():
                for leaf in on_device:
                    self._staging(leaf).copy_(leaf.grad, non_blocking=True)  # type: ignore[arg-type]
        return [self._staging(leaf) if _is_staged(leaf) else leaf.grad.detach().clone() for leaf in leaves]  # type: ignore[union-attr]

    def wait(self, device: torch.device | None) -> None:
        """Make the device's current stream wait for the copies."""
        if self._stream is not None and device is not None:
            torch.get_device_module(device).current_stream(device).wait_stream(self._stream)

    def _staging(self, leaf: Tensor) -> Tensor:
        gradient, pinned = leaf.grad, self._pinned.get(leaf)
        assert gradient is not None
        if pinned is None or pinned.shape != gradient.shape or pinned.dtype != gradient.dtype:
            # Pinned once: pinning takes longer than the copy.
            pinned = torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=True)
            self._pinned[leaf] = pinned
        return pinned


def _is_staged(leaf: Tensor) -> bool:
    gradient = leaf.grad
    return gradient is not None and gradient.device.type != "cpu" and type(gradient) in _compat.PLAIN_TYPES


class StepUndo:
    """Undoes a step of a training loop: make it before the step, call `restore()` as often as needed.

    Call `done()` if the step succeeded.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any], args: Any, snapshots: SnapshotBuffers) -> None:
        captured = CapturedState(loss_fn)
        self._buffers = snapshots
        self._variables = captured.variables
        modules = list({part: None for root in (model, *captured.modules) for part in _compat.submodules(root)})
        self._attributes = [(vars(m), dict(vars(m))) for m in modules if not type(m).__module__.startswith("torch.nn.")]
        self._slots = [(slots, dict(slots)) for m in modules for slots in _compat.module_tensors(m)]
        self._add_generators(captured)
        parameters, buffers = ([t for *_, s in self._slots[n::2] for t in s.values() if t is not None] for n in (0, 1))
        self._weights = list({id(tensor): tensor for tensor in parameters}.values())
        self._device = next((t.device for t in self._weights if t.device.type != "cpu"), None)
        self._add_buffers(list({id(tensor): tensor for tensor in buffers}.values()))
        leaves = [*self._weights, *(t for t in (*tensors_in(args), *captured.tensors) if t.is_leaf)]
        self._gradients = [(leaf, leaf.grad) for leaf in leaves if leaf.requires_grad]
        self._with_gradient = [leaf for leaf, gradient in self._gradients if gradient is not None]
        self._gradient_copies = snapshots.copied_to_host(self._with_gradient)
        self._versions = _compat.versions_of(self._weights)
        self._random = generator_states(self._device)

    def _add_generators(self, captured: CapturedState) -> None:
        own = [value for _, content in self._attributes for value in content.values() if type(value) is torch.Generator]
        self._generators = [(generator, generator.get_state()) for generator in (*captured.generators, *own)]

    def _add_buffers(self, buffers: list[Tensor]) -> None:
        self._small = [b for b in buffers if b.nbytes <= ALWAYS_COPIED_BYTES]
        large = [b for b in buffers if b.nbytes > ALWAYS_COPIED_BYTES]
        self._large = [b for b in large if self._buffers.is_written.get(b, True)]
        self._trusted = [b for b in large if not self._buffers.is_written.get(b, True)]
        self._small_copies = _compat.clone_all(self._small)
        self._large_copies = [b.detach().to("cpu", copy=True) for b in self._large]
        self._buffer_versions = [_compat.versions_of(b) for b in (self._small, self._large, self._trusted)]

    def before_backward(self) -> None:
        """Wait for the copies of gradients, as the backward adds to the originals."""
        self._buffers.wait(self._device)

    def done(self) -> None:
        """Record which large buffers the step wrote."""
        for tensors, versions in ((self._large, self._buffer_versions[1]), (self._trusted, self._buffer_versions[2])):
            for buffer, now, then in zip(tensors, _compat.versions_of(tensors), versions, strict=True):
                self._buffers.is_written[buffer] = now != then

    def what_cannot_be_restored(self) -> str | None:
        """Describe a change by the step of which no copy was made; None if there is none."""
        if _compat.versions_of(self._weights) != self._versions:
            return "the step changes parameters itself (an optimizer in the backward, or max_norm)"
        if _compat.versions_of(self._trusted) != self._buffer_versions[2]:
            return (
                f"the step wrote to a buffer of more than {ALWAYS_COPIED_BYTES >> 10} KiB that it used to leave alone"
            )
        return None

    def restore(self) -> None:
        """Restore everything to its state before the step."""
        self._buffers.wait(self._device)
        for slots, content in self._slots:
            _rebind(slots, content)
        for attributes, content in self._attributes:
            _rebind(attributes, content, but="forward")  # a plan for larger inputs may have been applied meanwhile
        for variable in self._variables:
            variable.bind(variable.value)
        with torch.no_grad():
            for leaf, gradient in self._gradients:
                if leaf.grad is not gradient:
                    leaf.grad = gradient
            for leaf, copy in zip(self._with_gradient, self._gradient_copies, strict=True):
                leaf.grad.copy_(copy)  # type: ignore[union-attr]
        _compat.overwrite_all(self._small, self._small_copies, self._buffer_versions[0])
        _compat.overwrite_all(self._large, self._large_copies, self._buffer_versions[1])
        for generator, state in self._generators:
            generator.set_state(state)
        set_generator_states(self._random, self._device)


def _rebind(names: dict[str, Any], content: dict[str, Any], but: str = "") -> None:
    """Bind names to the values of before, without looking into these; `but` keeps its present value."""
    if names.keys() == content.keys() and all(names[name] is content[name] for name in content):
        return
    kept = {but: names[but]} if but in names else {}
    names.clear()
    names.update({name: value for name, value in content.items() if name != but} | kept)
