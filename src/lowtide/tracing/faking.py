"""A model and its batch without bytes: fake tensors in place of parameters, buffers and arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.replay.arguments import map_tensors
from lowtide.tracing import _compat


class Faker:
    """Makes fake tensors, the same one for the same tensor.

    Tensors on the meta device, and with `moves_all` every tensor, become fakes on `device`; others stay where they are.
    """

    def __init__(self, device: torch.device, moves_all: bool) -> None:
        self.mode = _compat.fake_mode()
        self._device = device
        self._moves_all = moves_all
        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        self._gradients: dict[int, Tensor] = {}

    def fake(self, tensor: Tensor) -> Tensor:
        """The fake that stands for `tensor`."""
        if id(tensor) not in self._made:
            made = self._make(tensor)
            self._made[id(tensor)] = tensor, made
            if made.is_leaf and made.grad is not None:
                self._gradients[id(made)] = made.grad
        return self._made[id(tensor)][1]

    def _make(self, tensor: Tensor) -> Tensor:
        if tensor.device == self._device or not (self._moves_all or tensor.is_meta):
            return self.mode.from_tensor(tensor)
        with self.mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            elif tensor.requires_grad:
                made.requires_grad_()
            if tensor.is_leaf and tensor.grad is not None:
                made.grad = torch.empty_like(made)
        return made

    def made(self) -> list[tuple[Tensor, Tensor]]:
        """Real tensors and the fakes that stand for them."""
        return list(self._made.values())

    def gradient_before(self, made: Tensor) -> Tensor | None:
        """The gradient that a fake had when it was made."""
        return self._gradients.get(id(made))

    def fake_all(self, tree: Any) -> Any:
        """`tree` with fakes in place of its tensors."""
        return map_tensors(self.fake, tree)

    @contextlib.contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """A block in which the model's parameters and buffers are fakes. Whoever opens it puts the real ones back."""
        for module in _compat.submodules(model):
            for slots in _compat.module_tensors(module):
                for name, tensor in slots.items():
                    if tensor is not None:
                        slots[name] = self.fake(tensor)
        with self.mode:
            yield


def as_kernels_lay_out(name: str, given: list[Tensor], out: Any) -> Any:
    """The fake output of an op with the strides that its kernel gives it, which later ops may depend on."""
    if name == "aten.native_batch_norm.default" and given[0].device.type == "cpu":
        # The fake keeps the input's strides; the kernel makes all contiguous that is neither that nor channels last.
        is_kept = any(given[0].is_contiguous(memory_format=each) for each in _dense_formats(given[0]))
        return out if is_kept else (out[0].contiguous(), *out[1:])
    return out


def _dense_formats(tensor: Tensor) -> list[torch.memory_format]:
    others = {4: [torch.channels_last], 5: [torch.channels_last_3d]}
    return [torch.contiguous_format, *others.get(tensor.ndim, [])]
