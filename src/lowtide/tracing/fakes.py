"""A model and its batch without bytes: fake tensors in place of parameters, buffers and arguments.

Numbers behind fake tensors, where they are cheap to know: whole numbers that follow from shapes and from the batch.

Models ask such tensors for values (is this mask all ones? are positions consecutive?) and choose their kernels by the
answer. Fake tensors have none. So small integer and boolean tensors, and single numbers on the host, have a shadow
there, on which the same ops are run, and questions are answered from it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import _compat
from lowtide.replay.arguments import map_tensors


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


_MOST_ELEMENTS = 1 << 20


class Shadows:
    """Host tensors with the values that fake tensors would have, as far as they are known."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def know(self, fake: Tensor, real: Tensor) -> None:
        """`fake` stands for `real`."""
        if _is_small_whole(real) and _is_real(real):
            with _compat.without_modes():
                self._keep(fake, real.detach().cpu().clone())

    def answer(self, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
        """For an op that asks for a number rather than a tensor: whether the answer is known, and the answer."""
        if not _compat.returns_number(func):
            return False, None
        known, args, kwargs = self._shadowed(args, kwargs)
        if not known:
            return False, None
        with _compat.without_modes():
            return True, func(*args, **kwargs)

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An op has been run on fakes: run it on their shadows too, if all of them are known."""
        if not isinstance(out, Tensor):
            return
        # A single number on the host may also be a random one: layers are skipped by such draws.
        is_number = out.ndim == 0 and out.device.type == "cpu"
        if not is_number and (not _is_small_whole(out) or _compat.op_facts(func)[3]):
            return
        known, args, kwargs = self._shadowed(args, kwargs)
        if known:
            with _compat.without_modes():
                shadow = func(*args, **kwargs)
            if shadow.shape == out.shape:
                self._keep(out, shadow)

    def _keep(self, fake: Tensor, shadow: Tensor) -> None:
        key = id(fake)
        self._by_id[key] = weakref.ref(fake, lambda _: self._by_id.pop(key, None)), shadow

    def _shadowed(self, args: Any, kwargs: Any) -> tuple[bool, Any, Any]:
        """Whether every tensor among the arguments has a shadow, and the arguments with the shadows in their place."""
        missing = False

        def swap(item: Any) -> Any:
            nonlocal missing
            if isinstance(item, Tensor):
                found = self._by_id.get(id(item))
                if found is not None and found[0]() is item:
                    return found[1]
                if item.device.type == "cpu" and _is_real(item) and item.numel() <= _MOST_ELEMENTS:
                    return item
                missing = True
            elif isinstance(item, list | tuple):
                return type(item)(swap(each) for each in item)
            elif isinstance(item, torch.device):
                return torch.device("cpu")
            return item

        swapped = swap(list(args)), {name: swap(item) for name, item in kwargs.items()}
        return not missing, *swapped


def _is_real(tensor: Tensor) -> bool:
    return type(tensor) in _compat.PLAIN_TYPES and not tensor.is_meta


def _is_small_whole(tensor: Tensor) -> bool:
    return tensor.numel() <= _MOST_ELEMENTS and not tensor.is_floating_point() and not tensor.is_complex()
