"""What a store holds: one copy per storage, wherever it is at the moment.

Autograd saves many views of one storage. A `Unit` is the bytes of one storage at one version, as a flat typed tensor;
each entry of a store is a view of a unit, described by shape, strides and offset. The unit is counted once, moved once
and brought back once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide import _compat
from lowtide.memory.codecs import Codec, Encoded
from lowtide.memory.disk import SpilledFile
from lowtide.memory.transfer import Fetched, HostCopy, Parts

DEVICE, HOST, DISK = TIERS = ("device", "host", "disk")

# A view of less than this share of its storage is held on its own: the rest of the storage is not ours to keep.
_WHOLE_STORAGE_SHARE = 0.5


class View(NamedTuple):
    """How a tensor lies in its unit's flat tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, flat: Tensor) -> Tensor:
        return torch.as_strided(flat, self.shape, self.stride, flat.storage_offset() + self.offset)


class SourceKey(NamedTuple):
    """What makes two tensors the same unit: storage, version, element type and codec."""

    storage: int
    version: int
    dtype: torch.dtype
    start: int
    numel: int
    codec: str | None
    moment: int  # 0, or when it was put: inference tensors count no changes, so each put is a unit of its own


@dataclass(eq=False)
class Unit:
    """The bytes of one storage (or of a small part of one), in one tier."""

    source: SourceKey
    storage: _compat.StorageReference
    watch: _compat.VersionWatch
    dtype: torch.dtype
    device: torch.device
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
    ready: Any = None  # the stream it was made on, and an event there: copies wait for it
    keys: dict[Any, None] = field(default_factory=dict)  # of the entries that are views of it
    num_entries: int = 0
    num_served: int = 0  # entries given out since it was last fetched, and not let go of
    served_in: int = 0  # the backward in which all of its entries were given out
    cost: float = 0.0
    put_at: int = 0
    touched_at: int = 0

    def let_go(self) -> None:
        """One entry fewer. Most likely it had been given out: those that are left are still to come."""
        self.num_entries -= 1
        self.num_served = max(0, self.num_served - 1)

    def decode(self, parts: Parts) -> Tensor:
        """The flat tensor, from parts on the device."""
        return parts[0] if self.encoded is None else self.encoded.codec.decode(self.encoded, parts)


def is_left_alone(tensor: Tensor) -> bool:
    """Whether a tensor is not for the store: someone else's (parameters), or not plain bytes behind a plain layout."""
    return (
        not _compat.is_plain(tensor)
        or tensor.device.type == "meta"
        or tensor.numel() == 0
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
        or _span(tensor) > _storage_numel(tensor)  # a storage that was shrunk: there is nothing to hold
        or _compat.is_parameter_or_view_of_one(tensor)
    )


def source_of(tensor: Tensor, codec: Codec | None, moment: int) -> SourceKey:
    """The key of the unit that `tensor` belongs to: its whole storage, or its own part of a much larger one."""
    is_whole = stands_for_storage(tensor)
    start, numel = (0, _storage_numel(tensor)) if is_whole else (int(tensor.storage_offset()), _span(tensor))
    return SourceKey(
        storage=_compat.storage_id(tensor),
        version=_compat.version_of(tensor),
        dtype=tensor.dtype,
        start=start,
        numel=numel,
        codec=None if codec is None else codec.name,
        moment=moment if tensor.is_inference() else 0,
    )


def stands_for_storage(tensor: Tensor) -> bool:
    """Whether a tensor is held as its whole storage, and not as a part of its own."""
    return _span(tensor) >= _WHOLE_STORAGE_SHARE * _storage_numel(tensor)


def _span(tensor: Tensor) -> int:
    """Elements from the first to the last that the tensor reads, both inside."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _storage_numel(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def flat_of(tensor: Tensor, source: SourceKey) -> Tensor:
    """The unit's elements of the tensor's storage, as a flat tensor over the same bytes."""
    return torch.as_strided(tensor.detach(), (source.numel,), (1,), source.start)
