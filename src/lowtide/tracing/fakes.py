"""Fake tensors for tracing: `Faker` replaces a model's and a batch's tensors, `Shadows` tracks small integer values.

A fake trace (`tracing.trace`, mode "fake") runs a step on fake tensors, which have shapes and dtypes but no memory.
`Faker` makes one for every parameter, buffer and argument, also for a device that this machine does not have.

Models branch on values that fake tensors do not have: is this mask all ones, are these positions consecutive? Most
such values follow from shapes and from integers in the batch. `Shadows` therefore keeps a host copy (a shadow) of
small integer and boolean tensors and of single numbers on the host, runs the same ops on it, and answers `.item()` and
the like from it. Values computed from floating-point tensors have no shadow: such steps need a real trace.

Models also cache tables that they compute once, outside of their modules: with `functools.lru_cache`, or in a dict of
their file. `uncache` removes fake tables from there, which real steps would take for real ones.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import _compat
from lowtide.replay.op_facts import facts_of


class Faker:
    """Makes fake tensors, one for each real tensor.

    Fakes of tensors on the meta device, or of all tensors if `moves_all`, are on `device`; others keep their device.
    """

    def __init__(self, device: torch.device, moves_all: bool) -> None:
        self.mode = _compat.fake_mode()
        self._device = device
        self._moves_all = moves_all
        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        self._gradients: dict[int, Tensor] = {}
        self._reals: dict[int, Tensor] = {}  # by the storages of their fakes

    def fake(self, tensor: Tensor) -> Tensor:
        """Return the fake of `tensor`."""
        if id(tensor) not in self._made:
            made = self._make(tensor)
            self._made[id(tensor)] = tensor, made
            self._reals.update((_compat.storage_id(part), tensor) for part in _compat.parts_of(made))
            if made.is_leaf and made.grad is not None:
                self._gradients[id(made)] = made.grad
        return self._made[id(tensor)][1]

    def _make(self, tensor: Tensor) -> Tensor:
        if tensor.is_nested:
            _compat.allow_nested(self.mode)
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
        """Return all pairs of a real tensor and its fake."""
        return list(self._made.values())

    def real_of(self, made: Tensor) -> Tensor | None:
        """Return the real tensor whose fake has the same storage as `made`."""
        found = (self._reals.get(_compat.storage_id(part)) for part in _compat.parts_of(made))
        return next((real for real in found if real is not None), None)

    def gradient_before(self, made: Tensor) -> Tensor | None:
        """Return the gradient that a fake had when it was made."""
        return self._gradients.get(id(made))

    def add_gradient(self, tensor: Tensor) -> None:
        """Give the fake of `tensor` a gradient from the start, as if a step had left one."""
        made = self.fake(tensor)
        if made.grad is None:
            with self.mode:
                made.grad = torch.empty_like(made)
            self._gradients[id(made)] = made.grad

    @contextlib.contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """A context in which the model's parameters and buffers are fakes."""
        reals = [
            (slots, name, tensor)
            for module in _compat.submodules(model)
            for slots in _compat.module_tensors(module)
            for name, tensor in slots.items()
            if tensor is not None
        ]
        try:
            for slots, name, tensor in reals:
                slots[name] = self.fake(tensor)
            with self.mode, _compat.scripts_run_op_by_op():
                yield
        finally:  # TorchScript modules hold theirs in C++, where `Restorer` does not look
            for slots, name, tensor in reals:
                slots[name] = tensor


_CACHED: Any = type(functools.lru_cache(lambda: None))
_MOST_NESTED = 4  # containers around a tensor in the result of a cached function


def uncache(faker: Faker) -> None:
    """Remove fake tensors that a step has made from the caches in which it has left them. Collect garbage first.

    An `lru_cache` is emptied, an entry of a dict or list is deleted, and a variable or attribute becomes None, which
    code takes for one that is still to be filled. Searches all objects of the process a few times.
    """
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()  # frozen objects would not be searched
    try:
        _clear_functions(_left_by(faker))
        _remove(_left_by(faker))
    finally:
        if was_frozen:
            gc.freeze()


def _left_by(faker: Faker) -> list[Any]:
    kind: Any = _compat.fake_type()
    given = {id(fake) for _, fake in faker.made()}
    fakes = [each for each in gc.get_objects() if type(each) is kind]
    return [each for each in fakes if each.fake_mode is faker.mode and id(each) not in given]


def _clear_functions(held: list[Any]) -> None:
    """Empty the `lru_cache` of each function whose results contain what is `held`."""
    for _ in range(1 + _MOST_NESTED):
        holders = [each for each in gc.get_referrers(*held) if each is not held] if held else []
        for function in filter(lambda each: isinstance(each, _CACHED), holders):
            function.cache_clear()
        held = [each for each in holders if type(each) in (tuple, list, set, dict) and _owner_of(each) is None]


def _owner_of(names: Any) -> Any:
    """The module, class or object whose variables a dict holds; None for other containers."""
    if type(names) is not dict:
        return None
    referrers = gc.get_referrers(names)
    return next((each for each in referrers if isinstance(each, type) or _variables_of(each) is names), None)


def _variables_of(owner: Any) -> Any:
    return None if type(owner) is types.FrameType else getattr(owner, "__dict__", None)


def _remove(values: list[Any]) -> None:
    """Remove values from the containers, variables and attributes that hold them, or tuples with them."""
    ids = set(map(id, values))
    holders = [each for each in gc.get_referrers(*values) if each is not values] if values else []
    for holder in holders:
        if isinstance(holder, types.CellType):
            holder.cell_contents = None
        elif type(holder) is list:
            holder[:] = [each for each in holder if id(each) not in ids]
        else:
            is_dict = type(holder) is dict
            owner, names = (_owner_of(holder), holder) if is_dict else (holder, _variables_of(holder))
            for name in [name for name, held in names.items() if id(held) in ids] if type(names) is dict else ():
                if owner is None or (not isinstance(owner, type) and hasattr(type(owner), name)):
                    del names[name]
                else:
                    setattr(owner, name, None)
    tuples = [each for each in holders if type(each) is tuple]
    if tuples:
        _remove(tuples)


def as_kernels_lay_out(name: str, given: list[Tensor], out: Any) -> Any:
    """Return an op's fake output with the strides that the real kernel would give it; later ops depend on them."""
    if name == "aten.native_batch_norm.default" and given[0].device.type == "cpu":
        # The fake keeps the input's strides; the kernel does so for contiguous and channels-last inputs only.
        channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(given[0].ndim, torch.contiguous_format)
        if not (given[0].is_contiguous() or given[0].is_contiguous(memory_format=channels_last)):
            return out[0].contiguous(), *out[1:]
    return out


_MOST_ELEMENTS = 1 << 20


class Shadows:
    """Host tensors with the values of small integer fake tensors."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def add(self, fake: Tensor, real: Tensor) -> None:
        """Copy `real` as the shadow of its fake, if it is a small integer tensor."""
        if _is_small_whole(real) and _is_real(real):
            with _compat.without_modes():
                self._keep(fake, real.detach().cpu().clone())

    def number(self, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
        """For an op that returns a number (`.item()`): whether the shadows tell it, and the number."""
        if not _compat.returns_number(func):
            return False, None
        known, args, kwargs = self._shadowed(args, kwargs)
        if not known:
            return False, None
        with _compat.without_modes():
            return True, func(*args, **kwargs)

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Run an op that was run on fakes on their shadows too, if all of its tensors have one."""
        if not isinstance(out, Tensor):
            return
        # A single number on the host may also be random: stochastic depth skips layers by such draws.
        is_number = out.ndim == 0 and out.device.type == "cpu"
        if not is_number and (not _is_small_whole(out) or "random" in facts_of(func).flags):
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
        """Whether every tensor argument has a shadow, and the arguments with tensors replaced by shadows."""
        missing = False

        def swap(item: Any) -> Any:
            nonlocal missing
            if isinstance(item, Tensor):
                known = self._by_id.get(id(item))
                if known is not None and known[0]() is item:
                    return known[1]
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
