"""What a step changes, put back to the bit if it fails: gradients, buffers, random states, attributes, variables.

Gradients that are there before a step are copied to the host, beside its forward, as a backward adds to them in place.
The alternatives are worse: copies on the device take memory where it is short; fresh gradients that are added to the
old ones at the end take as much; and what a backward has added cannot be subtracted again, as floating-point sums
round. A step that begins without gradients, as after `zero_grad()`, copies none. On the CPU the copies are in the same
memory as the rest, and come on top of the step.

Small buffers are copied where they are. Larger ones go to the host until a step has shown that it leaves them alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.engines import _compat
from lowtide.replay.arguments import tensors_in
from lowtide.replay.function_state import Reach
from lowtide.tracing.restoring import generator_states, set_generator_states

_SMALL_BYTES = 256 * 1024


class Books:
    """What is kept from one step to the next: which large buffers a step writes, and host memory for gradients."""

    def __init__(self) -> None:
        self.is_written: _compat.WeakTensorKeyDictionary = _compat.WeakTensorKeyDictionary()
        self._pinned: _compat.WeakTensorKeyDictionary = _compat.WeakTensorKeyDictionary()
        self._stream: Any = None

    def copied_to_host(self, leaves: list[Tensor]) -> list[Tensor]:
        """Copies of the leaves' gradients; on an accelerator they may still be under way, see `wait`."""
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
        """What comes next on the device comes after the copies."""
        if self._stream is not None and device is not None:
            torch.get_device_module(device).current_stream(device).wait_stream(self._stream)

    def _staging(self, leaf: Tensor) -> Tensor:
        gradient, found = leaf.grad, self._pinned.get(leaf)
        assert gradient is not None
        if found is None or found.shape != gradient.shape or found.dtype != gradient.dtype:
            # Pinned once: pinning takes longer than the copy.
            found = torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=True)
            self._pinned[leaf] = found
        return found


def _is_staged(leaf: Tensor) -> bool:
    gradient = leaf.grad
    return gradient is not None and gradient.device.type != "cpu" and type(gradient) in _compat.PLAIN_TYPES


class Undo:
    """Make it before a step. `restore()` puts everything back, as often as needed; `done()` if all went well."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any], args: Any, books: Books) -> None:
        reach = Reach(loss_fn)
        self._books = books
        self._cells, self._globals = reach.cells, reach.globals
        modules = list({part: None for root in (model, *reach.modules) for part in _compat.submodules(root)})
        self._attributes = [(vars(m), dict(vars(m))) for m in modules if not type(m).__module__.startswith("torch.nn.")]
        self._slots = [(slots, dict(slots)) for m in modules for slots in _compat.module_tensors(m)]
        self._add_generators(reach)
        parameters, buffers = ([t for *_, s in self._slots[n::2] for t in s.values() if t is not None] for n in (0, 1))
        self._weights = list({id(tensor): tensor for tensor in parameters}.values())
        self._device = next((t.device for t in self._weights if t.device.type != "cpu"), None)
        self._add_buffers(list({id(tensor): tensor for tensor in buffers}.values()))
        leaves = [*self._weights, *(t for t in (*tensors_in(args), *reach.tensors) if t.is_leaf)]
        self._gradients = [(leaf, leaf.grad) for leaf in leaves if leaf.requires_grad]
        self._with_gradient = [leaf for leaf, gradient in self._gradients if gradient is not None]
        self._gradient_copies = books.copied_to_host(self._with_gradient)
        self._versions = _compat.versions_of(self._weights)
        self._random = generator_states(self._device)

    def _add_generators(self, reach: Reach) -> None:
        own = [value for _, content in self._attributes for value in content.values() if type(value) is torch.Generator]
        self._generators = [(generator, generator.get_state()) for generator in (*reach.generators, *own)]

    def _add_buffers(self, buffers: list[Tensor]) -> None:
        self._small = [b for b in buffers if b.nbytes <= _SMALL_BYTES]
        large = [b for b in buffers if b.nbytes > _SMALL_BYTES]
        self._large = [b for b in large if self._books.is_written.get(b, True)]
        self._trusted = [b for b in large if not self._books.is_written.get(b, True)]
        self._small_copies = _compat.clone_all(self._small)
        self._large_copies = [b.detach().to("cpu", copy=True) for b in self._large]
        self._buffer_versions = [_compat.versions_of(b) for b in (self._small, self._large, self._trusted)]

    def before_backward(self) -> None:
        """The backward adds to gradients: their copies have to be there."""
        self._books.wait(self._device)

    def done(self) -> None:
        """Learn which large buffers such a step leaves alone."""
        for tensors, versions in ((self._large, self._buffer_versions[1]), (self._trusted, self._buffer_versions[2])):
            for buffer, now, then in zip(tensors, _compat.versions_of(tensors), versions, strict=True):
                self._books.is_written[buffer] = now != then

    def what_cannot_be_put_back(self) -> str | None:
        """In words, what the step has changed that no copy was made of; None if there is nothing."""
        if _compat.versions_of(self._weights) != self._versions:
            return "the step changes parameters itself (an optimizer in the backward, or max_norm)"
        if _compat.versions_of(self._trusted) != self._buffer_versions[2]:
            return f"the step wrote to a buffer of more than {_SMALL_BYTES >> 10} KiB that it used to leave alone"
        return None

    def restore(self) -> None:
        """Everything as it was before the step."""
        self._books.wait(self._device)
        for slots, content in self._slots:
            _put_back(slots, content)
        for attributes, content in self._attributes:
            _put_back(attributes, content, but="forward")  # a plan for larger inputs may have been taken up meanwhile
        for cell, contents in self._cells:
            cell.cell_contents = contents
        for namespace, name, value in self._globals:
            namespace[name] = value
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


def _put_back(place: dict[str, Any], content: dict[str, Any], but: str = "") -> None:
    """Names bound to what they were bound to; what is in it is not looked at."""
    if place.keys() == content.keys() and all(place[name] is content[name] for name in content):
        return
    kept = {but: place[but]} if but in place else {}
    place.clear()
    place.update({name: value for name, value in content.items() if name != but} | kept)
