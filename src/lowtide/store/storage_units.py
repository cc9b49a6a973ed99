"""What a store holds: `Unit`, the bytes of one storage, `Entry`, a view of a unit under a key, and the statistics.

Autograd saves many views of one storage. A `Unit` is the contents of one storage at one version, as a flat typed
tensor, in one tier. Each entry of a store is a view of a unit, given by shape, strides and offset. So a storage is
counted, moved and fetched once, however many of its views were put. `store.tiers` moves units, `store.activation_store`
maps keys to entries.

`StoreStats` is what `ActivationStore.stats()` returns: plain numbers whose totals are the sums of their rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide import _compat
from lowtide.store.codecs import Codec, Encoded
from lowtide.store.disk import SpilledFile
from lowtide.store.transfer import Fetched, HostCopy, Mover, Parts
from lowtide.units import format_bytes, format_seconds

DEVICE, HOST, DISK = TIERS = ("device", "host", "disk")

# A view of less than this share of its storage is copied alone. Moving the whole storage would copy bytes that may
# never be needed; moving each small view alone would copy shared bytes several times.
_WHOLE_STORAGE_SHARE = 0.5


class SourceKey(NamedTuple):
    """Identifies a unit: two tensors with equal keys share one."""

    storage: int
    version: int
    dtype: torch.dtype
    start: int
    numel: int
    codec: str | None
    put_at: int  # 0; for inference tensors, which have no version counter, the time of the put: never shared


@dataclass(eq=False, slots=True)
class Unit:
    """The bytes of one storage (or of a small part of one), in one tier."""

    source: SourceKey
    storage: _compat.StorageReference
    watch: _compat.VersionWatch
    dtype: torch.dtype
    device: torch.device
    mover: Mover  # for its device
    encoded: Encoded | None  # how to decode it, without its parts
    stored_bytes: int  # of its parts, in any tier
    device_bytes: int  # memory it holds on the device: the whole storage, unless it is encoded
    tier: str
    nbytes: int  # counted in its tier's budget
    parts: Parts | None = None  # while on the device
    host: HostCopy | None = None
    file: SpilledFile | None = None
    fetched: Fetched | None = None  # while it is being fetched
    is_counted: bool = False  # whether its tier counts it
    depends_on_source: bool = True  # until a copy is complete: changing the source in place changes the unit
    is_lost: bool = False  # its source was changed in place before it was copied
    ready: Any = None  # on the device: the producing stream and an event, which copies wait for
    num_entries: int = 0
    num_unevictable: int = 0  # entries that may not be evicted: the unit can be moved down, but not dropped
    num_served: int = 0  # entries returned since it was last fetched, and not freed
    served_in: int = 0  # number of the backward in which all of its entries were returned
    cost: float = 0.0
    put_at: int = 0
    touched_at: int = 0

    def decode(self, parts: Parts) -> Tensor:
        """The flat tensor, decoded from its parts on the device."""
        return parts[0] if self.encoded is None else self.encoded.codec.decode(self.encoded, parts)


_NO_SHAPE = torch.Size()


@dataclass(eq=False, slots=True)
class Entry:
    """One key of a store: a view of a unit, or a tensor that is not stored (`is_left_alone`)."""

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
    """A new unit for the storage of `tensor`, on the device, not counted in any tier yet."""
    flat = tensor.detach()
    if tensor.is_contiguous() and tensor.numel() == source.numel:
        flat = flat.view(-1)
    else:
        flat = flat.as_strided((source.numel,), (1,), source.start)  # over the same bytes
    encoded = None if codec is None else codec.encode(flat, tensor.shape[-1] if tensor.dim() else 1)
    # A view keeps its whole storage alive, so all of it counts.
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
    """Whether a store does not take a tensor: parameters, and tensors that are not plain strided memory."""
    return (
        not _compat.is_plain(tensor)
        or tensor.is_meta
        or tensor.numel() == 0
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
        or _span(tensor) > _storage_numel(tensor)  # its storage was resized to less, as by FSDP
        or _compat.is_parameter_or_view_of_one(tensor)
    )


def source_of(tensor: Tensor, codec: Codec | None, now: int) -> SourceKey:
    """The key of the unit that holds `tensor`: its whole storage, or only its part of a much larger one."""
    start, numel = 0, _storage_numel(tensor)
    if not stands_for_storage(tensor):
        start, numel = int(tensor.storage_offset()), _span(tensor)
    storage, version = _compat.storage_id(tensor), _compat.version_of(tensor)
    codec_name = None if codec is None else codec.name
    return SourceKey(storage, version, tensor.dtype, start, numel, codec_name, now if tensor.is_inference() else 0)


def stands_for_storage(tensor: Tensor) -> bool:
    """Whether a tensor is stored with its whole storage, and not as a unit of its own.

    Only if its version counter covers the whole storage. Chunks made by `unsafe_chunk` or `unsafe_split`, as in GRU and
    LSTM cells, have a counter each: a copy of the storage made for one chunk could be stale for the next.
    """
    numel = _storage_numel(tensor)
    return _span(tensor) >= _WHOLE_STORAGE_SHARE * numel and _span(_compat.version_owner(tensor)) >= numel


def _span(tensor: Tensor) -> int:
    """Number of elements from the first to the last that the tensor reads, inclusive."""
    if tensor.is_contiguous():
        return tensor.numel()
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _storage_numel(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


_SHOWN_ENTRIES = 20


@dataclass(frozen=True)
class EntryStats:
    """One value. The bytes of a storage with several views are those of the oldest view's row."""

    key: Hashable
    nbytes: int
    age: int  # operations of the store since it was put
    cost: float | None
    tier: str


@dataclass(frozen=True)
class StoreStats:
    """The state and the counters of a store. `print` it for a table.

    `num_created` (every `put`, also one that replaces a value), `num_evicted`, `num_spilled`, `moved_*_bytes`,
    `compressed_bytes` and `waited_s` count since the store was made; `clear` does not reset them. Values of
    `compressed_bytes` were encoded as `compressed_to_bytes`.
    """

    entries: tuple[EntryStats, ...]
    held_bytes_by_tier: Mapping[str, int]
    peak_bytes_by_tier: Mapping[str, int]
    budget_bytes_by_tier: Mapping[str, float]
    num_created: int
    num_evicted: int
    num_spilled: int
    compressed_bytes: int
    compressed_to_bytes: int
    moved_down_bytes: int
    moved_up_bytes: int
    in_flight_bytes: int
    locked_bytes: int
    waited_s: float

    @property
    def held_bytes(self) -> int:
        """In all tiers."""
        return sum(self.held_bytes_by_tier.values())

    @property
    def num_held(self) -> int:
        return len(self.entries)

    @property
    def num_held_by_tier(self) -> Mapping[str, int]:
        return {tier: sum(entry.tier == tier for entry in self.entries) for tier in self.held_bytes_by_tier}

    @property
    def budget_bytes(self) -> float:
        """Of all tiers."""
        return sum(self.budget_bytes_by_tier.values())

    @property
    def utilization_by_tier(self) -> Mapping[str, float]:
        """Held bytes as a share of each tier's budget; 0 without a limit."""
        return {tier: held / self.budget_bytes_by_tier[tier] for tier, held in self.held_bytes_by_tier.items()}

    def __str__(self) -> str:
        lines = [
            f"{self.num_held} values, {format_bytes(self.held_bytes)} held; "
            f"{self.num_created} created, {self.num_evicted} evicted, {self.num_spilled} spilled",
            f"moved down {format_bytes(self.moved_down_bytes)}, up {format_bytes(self.moved_up_bytes)}; "
            f"{format_bytes(self.in_flight_bytes)} in flight, {format_bytes(self.locked_bytes)} locked; "
            f"waited {format_seconds(self.waited_s)}",
            f"{'tier':<8}{'values':>8}{'held':>12}{'peak':>12}{'budget':>12}{'used':>6}",
        ]
        for tier, held in self.held_bytes_by_tier.items():
            budget = self.budget_bytes_by_tier[tier]
            limit = "no limit" if budget == float("inf") else format_bytes(budget)
            lines.append(
                f"{tier:<8}{self.num_held_by_tier[tier]:>8}{format_bytes(held):>12}"
                f"{format_bytes(self.peak_bytes_by_tier[tier]):>12}{limit:>12}{self.utilization_by_tier[tier]:>6.0%}"
            )
        for entry in self.entries[:_SHOWN_ENTRIES]:
            cost = "" if entry.cost is None else f", cost {entry.cost:g}"
            lines.append(f"  {entry.key!r}: {format_bytes(entry.nbytes)} on {entry.tier}, age {entry.age}{cost}")
        if self.num_held > _SHOWN_ENTRIES:
            lines.append(f"  and {self.num_held - _SHOWN_ENTRIES} more")
        return "\n".join(lines)
