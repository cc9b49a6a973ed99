"""Tensors and their storages: kinds, parts, identity."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

_LAZY_TYPES = (nn.UninitializedParameter, nn.UninitializedBuffer)


PLAIN_TYPES = (Tensor, nn.Parameter)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is strided bytes and no more: nothing sparse, wrapped or of another class."""
    return type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided and not tensor.is_nested


def is_copyable(tensor: Tensor) -> bool:
    """Whether a tensor can be given other values: plain, and no element there twice, as in an expanded one."""
    return is_plain(tensor) and not any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def is_uninitialized(tensor: Tensor) -> bool:
    """Whether this is a lazy module's parameter or buffer before its first forward."""
    return type(tensor) in _LAZY_TYPES  # isinstance() goes through a slow metaclass here


def is_sharded(tensor: Tensor) -> bool:
    """Whether a sharding runtime (FSDP2, TP) manages this tensor and swaps it in and out on its own."""
    dtensor = sys.modules.get("torch.distributed.tensor")
    return dtensor is not None and isinstance(tensor, dtensor.DTensor)


def has_values(tensor: Tensor) -> bool:
    """Whether there are numbers to look at: none in fake, meta, functional and other wrapped tensors."""
    return type(tensor) in PLAIN_TYPES and not tensor.is_meta and torch._C._len_torch_dispatch_stack() == 0


class StorageReference:
    """Tells whether a storage still lives, without keeping it alive; its `id` is not given to another meanwhile.

    Obsolete when `weakref.ref(tensor.untyped_storage())` says so on every torch we allow.
    """

    __slots__ = ("id",)

    def __init__(self, tensor: Tensor) -> None:
        self.id: int = 0
        storage: Any = tensor.untyped_storage()
        self.id = storage._weak_ref()

    def __del__(self, free: Callable[[int], None] = torch.UntypedStorage._free_weak_ref) -> None:
        if self.id:
            free(self.id)  # bound above: when Python ends, `torch` may be gone before the last of these

    def is_alive(self) -> bool:
        return not torch.UntypedStorage._expired(self.id)

    def as_tensor(self, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
        """The storage, which is alive, as a tensor from its beginning."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.id)
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, shape, stride)


def storage_id(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def num_storages(tensor: Tensor) -> int:
    """`len(storages_of(tensor))`, quickly."""
    return 1 if len(parts_of(tensor)) == 1 else len(storages_of(tensor))


def is_own(tensor: Tensor) -> bool:
    """Whether a tensor is all of its memory, and its numbers are there as they are: none to be conjugated or negated.

    Obsolete with a public way to ask for tensors that stand for zeros.
    """
    return (
        is_plain(tensor)
        and tensor.storage_offset() == 0
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor._is_zerotensor())
    )


def storages_of(tensor: Tensor) -> list[int]:
    """What a tensor's bytes are in, as a trace tells it: one storage, several for a wrapper of several tensors."""
    return list(dict.fromkeys(storage_id(part) for part in parts_of(tensor)))


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that hold a tensor's bytes: itself, or what a wrapper subclass wraps, all the way down."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [inner for name in names for inner in inner_tensors(getattr(tensor, name))]
    if tensor.layout is not torch.strided:
        parts = {
            torch.sparse_coo: ("_indices", "_values"),
            torch.sparse_csr: ("crow_indices", "col_indices", "values"),
        }.get(tensor.layout, ())
        with _disable_current_modes():
            return [part for name in parts for part in inner_tensors(getattr(tensor, name)())]
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return [tensor]


def parts_of(tensor: Tensor) -> Sequence[Tensor]:
    """`inner_tensors`, quickly."""
    if (
        type(tensor) in PLAIN_TYPES
        and tensor.layout is torch.strided
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    ):
        return (tensor,)
    return inner_tensors(tensor)


class StorageUses:
    """How many tensors share a storage, without counting as one of them. Obsolete with a public use count."""

    __slots__ = ("_reference", "id")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._reference = StorageWeakRef(storage)
        self.id: int = self._reference.cdata

    def count(self) -> int:
        return 0 if self._reference.expired() else torch._C._storage_Use_Count(self.id) - _uses_by_python()


@functools.cache
def _uses_by_python() -> int:
    """What a storage's own Python object adds to its uses: it differs between versions of torch."""
    with _disable_current_modes():
        tensor = torch.empty(1)
        return torch._C._storage_Use_Count(StorageWeakRef(tensor.untyped_storage()).cdata) - 1
