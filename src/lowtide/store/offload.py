"""Which storages belong to modules.

Parameters are told by their class; a buffer is a tensor like any other, and so is `buffer.t()`. While a context is
open, every module that is called is looked at once, and its parameters' and buffers' storages are noted.

`offload`: whatever autograd saves inside it lives in a store.

Saved-tensor hooks hand every saved tensor to the store and take it back in the backward. They also switch off
autograd's own version check, so that a value changed in place would give wrong gradients with no error; the check
is made here instead.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Hashable, Iterable
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from lowtide import _compat
from lowtide.errors import ChangedInPlaceError, StoreError
from lowtide.store.activation_store import ActivationStore, Missing, check_store
from lowtide.store.storage_units import is_left_alone
from lowtide.units import parse_bytes


class ModuleTensors:
    """`tensor in module_tensors`: whether its storage belongs to a module called since `watch()`."""

    def __init__(self) -> None:
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._storages: dict[int, _compat.StorageReference] = {}
        self._hook: Any = None

    def start(self) -> None:
        self._hook = register_module_forward_pre_hook(lambda module, args: _look(self, module))

    def stop(self) -> None:
        self._hook.remove()

    def __contains__(self, tensor: Tensor) -> bool:
        return _compat.storage_id(tensor) in self._storages

    def look(self, module: nn.Module) -> None:
        """Note the storages of a module's own parameters and buffers."""
        if module in self._seen:
            return
        self._seen.add(module)
        for tensors in _compat.module_tensors(module):
            for tensor in tensors.values():
                if tensor is not None and _compat.is_plain(tensor):
                    reference = _compat.StorageReference(tensor)  # holds the id, so that no activation gets it
                    self._storages[reference.id] = reference


@_compat.disable_dynamo
def _look(module_tensors: ModuleTensors, module: nn.Module) -> None:
    if isinstance(module, nn.RReLU) and module.inplace and module.training:
        # On a view autograd wraps its node, and what is saved cannot be told from that of other in-place ops.
        raise StoreError(
            "nn.RReLU(inplace=True) saves its noise before it draws it, so a copy in a store would hold nothing. "
            "Use inplace=False in lowtide.checkpoint, or run it outside of lowtide.offload."
        )
    module_tensors.look(module)


_serial = itertools.count()
_DEFAULT_HOST = "50%"


class KeptHere:
    """What autograd keeps in place of a tensor that stays where it is, with autograd's own check."""

    __slots__ = ("_saved_at", "_tensor")

    def __init__(self, tensor: Tensor) -> None:
        self._saved_at = _compat.version_of(tensor)
        # Detached: an output that holds its own history would be a cycle through the graph, which nothing collects.
        self._tensor = tensor.detach()

    @property
    def is_intact(self) -> bool:
        """Whether nothing was written into the tensor since."""
        return _compat.version_of(self._tensor) == self._saved_at

    def restore(self) -> Tensor:
        if not self.is_intact:
            raise _changed()
        return self._tensor


class KeptInStore:
    """What autograd keeps in place of a tensor in a store. When the graph lets go of it, so does the store."""

    __slots__ = ("_key", "_sequence", "_store", "_watch")

    def __init__(self, tensor: Tensor, store: ActivationStore, codec: str | EllipsisType | None = ...) -> None:
        self._store: ActivationStore | None = None
        self._key: Hashable = ("saved", next(_serial))
        self._watch = _compat.VersionWatch(tensor)
        self._sequence = _compat.sequence_number()  # one more than that of the node that saves the tensor
        store.put_saved(self._key, tensor, self._watch, codec)
        self._store = store

    @property
    def is_intact(self) -> bool:
        """Whether nothing was written into the tensor since."""
        return not self._watch.has_changed()

    def restore(self) -> Tensor:
        if not self.is_intact:
            raise _changed()
        node = _compat.running_node()
        if node is not None and _compat.fills_later(node) and _compat.sequence_of(node) + 1 == self._sequence:
            raise StoreError(
                f"{node.name()} saves its noise before the forward draws it, so the copy in the store is not what the "
                "backward needs. Run this layer (nn.RReLU) outside of offload, or in lowtide.checkpoint."
            )
        assert self._store is not None
        value = self._store.get(self._key)
        if isinstance(value, Missing):
            raise StoreError(
                f"a saved activation of shape {tuple(value.shape)} was evicted before the backward. Autograd cannot "
                "compute it again: use a store with on_full='spill'."
            )
        return value

    def __del__(self) -> None:
        if self._store is not None:
            self._store.release_later(self._key)


def _changed() -> ChangedInPlaceError:
    return ChangedInPlaceError(
        "one of the variables needed for gradient computation has been modified by an inplace operation after it was "
        "saved. Use the out-of-place form of the op that changes it, or change it after the backward."
    )


class SavedInStore(torch.autograd.graph.saved_tensors_hooks):
    """Saved-tensor hooks that keep in `store` what has at least `min_bytes` and does not belong to a module."""

    def __init__(self, store: ActivationStore, min_bytes: int, module_tensors: ModuleTensors | None = None) -> None:
        def pack(tensor: Tensor) -> KeptHere | KeptInStore:
            return _keep(tensor, store, min_bytes, module_tensors)

        super().__init__(pack, restore)


@_compat.disable_dynamo
def _keep(
    tensor: Tensor, store: ActivationStore, min_bytes: int, module_tensors: ModuleTensors | None
) -> KeptHere | KeptInStore:
    alone = (
        is_left_alone(tensor) or tensor.nbytes < min_bytes or (module_tensors is not None and tensor in module_tensors)
    )
    return KeptHere(tensor) if alone else KeptInStore(tensor, store)


@_compat.disable_dynamo
def restore(kept: KeptHere | KeptInStore) -> Tensor:
    """What the backward gets for what autograd kept."""
    return kept.restore()


def end_of_forward(store: ActivationStore, outputs: Iterable[Tensor]) -> None:
    """A forward is over. When the backward gets to its outputs, what is in the store starts on its way back."""
    if not len(store):
        return
    moment = store.end_of_forward()
    for node in {tensor.grad_fn for tensor in outputs}:
        if node is not None:
            node.register_prehook(functools.partial(_begin_backward, store, moment))


def _begin_backward(store: ActivationStore, moment: int, gradients: Any) -> None:
    store.fetch_before(moment)


class offload:
    """A context in which activations saved for the backward live in a store, whatever the model.

    - `store`: an `ActivationStore`, or None for one made from `device`, `host` and `disk`: budgets in bytes or `"8GiB"`
      (`host` and `disk` also `"50%"`). With a `device` budget, what comes back first (the last layers) stays there.
    - `min_bytes`: smaller tensors stay where they are.
    - `codec`: how values are written in the store made here; lossless unless you ask for a lossy one.

    The backward may run outside of the context, later, or never; gradients equal the plain run's to the last bit
    without a codec. A tensor changed in place after it was saved raises, as with plain autograd. Entering the context
    gives the store.

    >>> import torch, lowtide
    >>> x = torch.randn(8, 1024, requires_grad=True)
    >>> with lowtide.offload(host="1GiB", min_bytes=0) as store:
    ...     loss = (x.sin() * x.exp()).sum()
    >>> store.stats().held_bytes > 0
    True
    >>> loss.backward()
    >>> store.stats().held_bytes
    0
    """

    def __init__(
        self,
        store: ActivationStore | None = None,
        *,
        host: int | str | None = _DEFAULT_HOST,
        disk: int | str | None = None,
        device: int | str | None = None,
        min_bytes: int | str = "1MiB",
        codec: str | None = None,
    ) -> None:
        check_store(store)
        if store is not None and (codec, disk, device, host) != (None, None, None, _DEFAULT_HOST):
            raise ValueError("give budgets and codec to the store itself, or leave store out")
        if store is None:
            store = ActivationStore(device=device, host=host, disk=disk, codec=codec)
        self._store = store
        self._min_bytes = parse_bytes(min_bytes)
        self._entered: list[tuple[SavedInStore, ModuleTensors]] = []

    def __enter__(self) -> ActivationStore:
        module_tensors = ModuleTensors()
        hooks = SavedInStore(self._store, self._min_bytes, module_tensors)
        module_tensors.start()
        hooks.__enter__()
        self._entered.append((hooks, module_tensors))
        return self._store

    def __exit__(self, *exception: Any) -> None:
        hooks, module_tensors = self._entered.pop()
        hooks.__exit__(*exception)
        module_tensors.stop()
