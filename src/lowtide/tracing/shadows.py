"""Numbers behind fake tensors, where they are cheap to know: whole numbers that follow from shapes and from the batch.

Models ask such tensors for values (is this mask all ones? are positions consecutive?) and choose their kernels by the
answer. Fake tensors have none. So small integer and boolean tensors, and single numbers on the host, have a shadow
there, on which the same ops are run, and questions are answered from it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from lowtide.tracing import _compat

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
        if not _compat.gives_a_number(func):
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
