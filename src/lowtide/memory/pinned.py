"""Host memory that an accelerator can copy to and from on its own: locked once, used again step after step.

Locking pages takes milliseconds and torch's own pinned allocator rounds each request up to a power of two. So memory
is locked in slabs whose sizes are powers of two (what is counted is what is locked), and handed out in extents:
one piece where one fits, several where not, so that free bytes are never too scattered to use.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.units import format_bytes

GRANULE_BYTES = 64 * 1024
_SLAB_BYTES = 256 * 1024 * 1024


class Extent(NamedTuple):
    """A run of bytes in one slab."""

    slab: int
    start: int
    nbytes: int


def round_up(nbytes: int) -> int:
    """Whole granules: what an allocation of `nbytes` takes from the pool."""
    return -(-nbytes // GRANULE_BYTES) * GRANULE_BYTES


class PinnedPool:
    """Extents of locked host memory, up to `limit_bytes` in all, what `others` have locked included."""

    def __init__(self, limit_bytes: int, *, others: Sequence[PinnedPool] = (), pin: bool = True) -> None:
        self._limit_bytes = limit_bytes
        self._others = others
        self._pin = pin
        self._slabs: list[Tensor] = []
        self._free: list[Extent] = []
        self.locked_bytes = 0

    def allocate(self, nbytes: int) -> list[Extent] | None:
        """Extents of `round_up(nbytes)` in all, locking more memory if it takes it; None beyond the limit."""
        needed = round_up(nbytes)
        free_bytes = sum(extent.nbytes for extent in self._free)
        while free_bytes < needed:
            added = self._lock_slab(needed - free_bytes)
            if added == 0:
                return None
            free_bytes += added
        whole = min((extent for extent in self._free if extent.nbytes >= needed), key=lambda e: e.nbytes, default=None)
        taken: list[Extent] = []
        for extent in [whole] if whole is not None else sorted(self._free, key=lambda e: -e.nbytes):
            self._free.remove(extent)
            part = min(needed, extent.nbytes)
            taken.append(Extent(extent.slab, extent.start, part))
            if part < extent.nbytes:
                self._free.append(Extent(extent.slab, extent.start + part, extent.nbytes - part))
            needed -= part
            if needed == 0:
                break
        return taken

    def release(self, extents: list[Extent]) -> None:
        """Give extents back, joined with their free neighbours."""
        merged: list[Extent] = []
        for extent in sorted([*self._free, *extents]):
            last = merged[-1] if merged else None
            if last is not None and last.slab == extent.slab and last.start + last.nbytes == extent.start:
                merged[-1] = Extent(last.slab, last.start, last.nbytes + extent.nbytes)
            else:
                merged.append(extent)
        self._free = merged

    def bytes_of(self, extent: Extent) -> Tensor:
        """The extent as a tensor of bytes."""
        return self._slabs[extent.slab][extent.start : extent.start + extent.nbytes]

    def _lock_slab(self, wanted_bytes: int) -> int:
        room = self._limit_bytes - self.locked_bytes - sum(pool.locked_bytes for pool in self._others)
        size = min(_SLAB_BYTES, 1 << max(wanted_bytes - 1, GRANULE_BYTES - 1).bit_length())
        while size > room:
            size //= 2
        if size < GRANULE_BYTES:
            return 0
        slab = self._host_memory(size)
        self._slabs.append(slab)
        self._free.append(Extent(len(self._slabs) - 1, 0, size))
        self.locked_bytes += size
        return size

    def _host_memory(self, nbytes: int) -> Tensor:
        if self._pin:
            try:
                return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self._pin = False
                warnings.warn(
                    f"could not lock {format_bytes(nbytes)} of host memory ({str(error).splitlines()[0]}): "
                    "offloading with pageable copies from here on, which do not overlap with compute. "
                    "Raise the limit on locked memory (ulimit -l) or lower host=.",
                    stacklevel=2,
                )
        return torch.empty(nbytes, dtype=torch.uint8)
