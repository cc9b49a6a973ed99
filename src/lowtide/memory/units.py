"""What a store holds: one copy per storage, wherever it is at the moment.

Autograd saves many views of one storage. A `Unit` is the bytes of one storage at one version, as a flat typed tensor;
each entry of a store is a view of a unit, described by shape, strides and offset. The unit is counted once, moved once
and brought back once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide import _compat
from lowtide.memory.codecs import Codec, Encoded
from lowtide.memory.disk import SpilledFile
from lowtide.memory.transfer import Fetched, HostCopy, Mover, Parts

DEVICE, HOST, DISK = TIERS = ("device", "host", "disk")

# A view of less than this share of its storage is held on its own: the rest of the storage is not ours to keep.
_WHOLE_STORAGE_SHARE = 0.5


class SourceKey(NamedTuple):
    """What makes two tensors the same unit: storage, version, element type and codec."""

    storage: int
    version: int
    dtype: torch.dtype
    start: int
    numel: int
    codec: str | None
    moment: int  # 0, or when it was put: inference tensors count no changes, so each put is a unit of its own


@dataclass(eq=False, slots=True)
class Unit:
    """The bytes of one storage (or of a small part of one), in one tier."""

    source: SourceKey
    storage: _compat.StorageReference
    watch: _compat.VersionWatch
    dtype: torch.dtype
    device: torch.device
    mover: Mover  # of its device
    encoded: Encoded | None  # how to decode it, without the parts themselves
    stored_bytes: int  # of its parts, wherever they are
    device_bytes: int  # what it keeps alive on the device: the whole storage, unless it is encoded
    tier: str
    nbytes: int  # what it takes of its tier's budget
    parts: Parts | None = None  # while on the device
    host: HostCopy | None = None
    file: SpilledFile | None = None
    fetched: Fetched | None = None  # on the way back
    is_counted: bool = False  # in the books of its tier
    depends_on_source: bool = True  # until a copy is complete, a change of the source is a change of the unit
    is_lost: bool = False  # its source had been changed when it was copied
    ready: Any = None  # while on the device: the stream it was made on, and an event there. Copies wait for it
    num_entries: int = 0
    num_unevictable: int = 0  # of its entries; while there is one, the unit may be moved down and not be dropped
    num_served: int = 0  # entries given out since it was last fetched, and not let go of
    served_in: int = 0  # the backward in which all of its entries were given out
    cost: float = 0.0
    put_at: int = 0
    touched_at: int = 0

    def let_go(self, *, evictable: bool = True) -> None:
        """One entry fewer. Most likely it had been given out: those that are left are still to come."""
        self.num_entries -= 1
        self.num_unevictable -= not evictable
        self.num_served = max(0, self.num_served - 1)

    def decode(self, parts: Parts) -> Tensor:
        """The flat tensor, from parts on the device."""
        return parts[0] if self.encoded is None else self.encoded.codec.decode(self.encoded, parts)


_NO_SHAPE = torch.Size()


@dataclass(eq=False, slots=True)
class Entry:
    """One key of a store: a view of a unit, or a tensor left alone."""

    key: Hashable
    unit: Unit | None
    left_alone: Tensor | None
    watch: _compat.VersionWatch
    cost: float | None
    put_at: int
    shape: torch.Size = _NO_SHAPE
    stride: tuple[int, ...] = ()
    offset: int = 0  # in the unit's flat tensor
    is_evictable: bool = True

    def view_of(self, flat: Tensor) -> Tensor:
        """The value, from its unit's flat tensor."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)


def new_unit(
    tensor: Tensor, source: SourceKey, codec: Codec | None, watch: _compat.VersionWatch, mover: Mover, now: int
) -> Unit:
    """A unit of what `tensor` has in its storage, on the device so far, and in no books."""
    flat = tensor.detach()
    if tensor.is_contiguous() and tensor.numel() == source.numel:
        flat = flat.view(-1)
    else:
        flat = flat.as_strided((source.numel,), (1,), source.start)  # over the same bytes
    encoded = None if codec is None else codec.encode(flat, tensor.shape[-1] if tensor.dim() else 1)
    # A view on the device keeps its whole storage alive, so the whole storage is what it costs.
    device_bytes = tensor.untyped_storage().nbytes() if encoded is None else encoded.nbytes
    return Unit(
        source=source,
        storage=_compat.StorageReference(tensor),
        watch=watch,
        dtype=tensor.dtype,
        device=tensor.device,
        mover=mover,
        encoded=None if encoded is None else dataclasses.replace(encoded, parts=()),
        stored_bytes=flat.nbytes if encoded is None else encoded.nbytes,
        device_bytes=device_bytes,
        tier=DEVICE,
        nbytes=device_bytes,
        parts=(flat,) if encoded is None else encoded.parts,
        depends_on_source=encoded is None,
        put_at=now,
        touched_at=now,
    )


def is_left_alone(tensor: Tensor) -> bool:
    """Whether a tensor is not for the store: someone else's (parameters), or not plain bytes behind a plain layout."""
    return (
        not _compat.is_plain(tensor)
        or tensor.is_meta
        or tensor.numel() == 0
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
        or _span(tensor) > _storage_numel(tensor)  # a storage that was shrunk: there is nothing to hold
        or _compat.is_parameter_or_view_of_one(tensor)
    )


def source_of(tensor: Tensor, codec: Codec | None, moment: int) -> SourceKey:
    """The key of the unit that `tensor` belongs to: its whole storage, or its own part of a much larger one."""
    start, numel = 0, _storage_numel(tensor)
    if not stands_for_storage(tensor):
        start, numel = int(tensor.storage_offset()), _span(tensor)
    storage, version = _compat.storage_id(tensor), _compat.version_of(tensor)
    codec_name = None if codec is None else codec.name
    return SourceKey(storage, version, tensor.dtype, start, numel, codec_name, moment if tensor.is_inference() else 0)


def stands_for_storage(tensor: Tensor) -> bool:
    """Whether a tensor is held as its whole storage, and not as a part of its own.

    Only where its version counter counts for the whole storage. Parts made by `unsafe_chunk` or `unsafe_split`, as in
    GRU and LSTM cells, have a counter each: a copy of the storage made for one part would be stale for the next.
    """
    numel = _storage_numel(tensor)
    return _span(tensor) >= _WHOLE_STORAGE_SHARE * numel and _span(_compat.version_owner(tensor)) >= numel


def _span(tensor: Tensor) -> int:
    """Elements from the first to the last that the tensor reads, both inside."""
    if tensor.is_contiguous():
        return tensor.numel()
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _storage_numel(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()
