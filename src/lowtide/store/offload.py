"""`lowtide.offload`: keeps what autograd saves inside a context in an `ActivationStore`, for any model.

Saved-tensor hooks pass every saved tensor to the store and get it back in the backward. Such hooks switch off
autograd's own check for in-place changes, which would otherwise give wrong gradients without an error; `KeptHere` and
`KeptInStore`, the objects that autograd holds instead of the tensors, make that check. Plans use the same objects for
their moves (`eager.moves`, `compiled.planned_graph`).

Parameters and buffers are not offloaded. A parameter has its own class, but a buffer, or a view such as `buffer.t()`,
is a plain tensor. `ModuleTensors` therefore notes the storages of every module that is called while the context is
open.
"""

from __future__ import annotations

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
    """`tensor in module_tensors`: whether its storage belongs to a module called since `start()`."""

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
                    reference = _compat.StorageReference(tensor)  # keeps the id from being reused by an activation
                    self._storages[reference.id] = reference


@_compat.disable_dynamo
def _look(module_tensors: ModuleTensors, module: nn.Module) -> None:
    if isinstance(module, nn.RReLU) and module.inplace and module.training:
        # On a view, autograd wraps the node, and its saves cannot be told from those of other in-place ops.
        raise StoreError(
            "nn.RReLU(inplace=True) saves its noise before it draws it, so a copy in a store would hold nothing. "
            "Use inplace=False in lowtide.checkpoint, or run it outside of lowtide.offload."
        )
    module_tensors.look(module)


_serial = itertools.count()
_DEFAULT_HOST = "50%"


class KeptHere:
    """Held by autograd for a saved tensor that is not moved. Checks for in-place changes as autograd does."""

    __slots__ = ("_saved_at", "_tensor")

    def __init__(self, tensor: Tensor) -> None:
        self._saved_at = _compat.version_of(tensor)
        # Detached: an output that refers to its own graph would be a cycle that the garbage collector cannot see.
        self._tensor = tensor.detach()

    @property
    def is_intact(self) -> bool:
        """Whether the tensor was not changed in place since."""
        return _compat.version_of(self._tensor) == self._saved_at

    def restore(self) -> Tensor:
        if not self.is_intact:
            raise _changed()
        return self._tensor


class KeptInStore:
    """Held by autograd for a saved tensor in a store. The store frees the tensor when autograd frees this object."""

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
        """Whether the tensor was not changed in place since."""
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
    """Saved-tensor hooks that store tensors of at least `min_bytes` that do not belong to a module."""

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
    """The unpack hook: the tensor that `kept` was made for."""
    return kept.restore()


def end_of_forward(store: ActivationStore, outputs: Iterable[Tensor]) -> None:
    """Call after a forward with its outputs: the store starts fetching when the backward reaches them."""
    if not len(store):
        return
    put_before = store.end_of_forward()
    for node in {tensor.grad_fn for tensor in outputs}:
        if node is not None:
            node.register_prehook(lambda gradients: store.fetch_before(put_before))


class offload:
    """Context manager that keeps the activations saved inside it in a store, for any model.

    - `store`: an `ActivationStore`, or None for one made from `device`, `host` and `disk`: budgets in bytes or `"8GiB"`
      (`host` and `disk` also `"50%"`). With a `device` budget, the last layers' activations stay on the device.
    - `min_bytes`: smaller tensors stay where they are.
    - `codec`: the codec of the store made here; None stores values as they are.

    The backward may run outside of the context, later, or never. Without a lossy codec, gradients are bit-equal to
    those without offload. A tensor changed in place after it was saved raises, as with plain autograd. `with` returns
    the store.

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
