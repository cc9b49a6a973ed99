"""Host memory that an accelerator can copy to and from on its own: locked once, used again step after step.

Locking pages takes milliseconds and torch's own pinned allocator rounds each request up to a power of two. So memory
is locked in slabs whose sizes are powers of two (what is counted is what is locked), and handed out in extents:
one piece where one fits, several where not, so that free bytes are never too scattered to use.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
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
        self._free: list[Extent] = []  # in the order of their places, no two of them neighbours
        self._free_bytes = 0
        self.locked_bytes = 0

    def allocate(self, nbytes: int) -> list[Extent] | None:
        """Extents of `round_up(nbytes)` in all, locking more memory if it takes it; None beyond the limit."""
        needed = round_up(nbytes)
        while self._free_bytes < needed:
            if not self._lock_slab(needed - self._free_bytes):
                return None
        whole = self._smallest_of(needed)
        if whole is not None:
            return [self._cut(whole, needed)]
        taken: list[Extent] = []
        for extent in sorted(self._free, key=lambda e: -e.nbytes):
            taken.append(self._cut(extent, min(needed, extent.nbytes)))
            needed -= taken[-1].nbytes
            if needed == 0:
                break
        return taken

    def _smallest_of(self, least_bytes: int) -> Extent | None:
        """The smallest free extent of at least so many bytes."""
        found, found_bytes = None, 0
        for extent in self._free:
            nbytes = extent[2]  # by its number: this loop is as long as memory is scattered
            if nbytes >= least_bytes and (found is None or nbytes < found_bytes):
                found, found_bytes = extent, nbytes
                if nbytes == least_bytes:
                    break
        return found

    def _cut(self, extent: Extent, nbytes: int) -> Extent:
        """Take the first bytes of a free extent; the rest of it stays free."""
        index = bisect_left(self._free, extent)
        self._free_bytes -= nbytes
        if nbytes == extent.nbytes:
            del self._free[index]
            return extent
        self._free[index] = Extent(extent.slab, extent.start + nbytes, extent.nbytes - nbytes)
        return Extent(extent.slab, extent.start, nbytes)

    def release(self, extents: list[Extent]) -> None:
        """Give extents back, joined with their free neighbours."""
        free = self._free
        for slab, start, nbytes in extents:
            self._free_bytes += nbytes
            index = bisect_left(free, (slab, start))
            if index < len(free) and free[index][:2] == (slab, start + nbytes):
                nbytes += free.pop(index).nbytes
            if index and free[index - 1].slab == slab and free[index - 1].start + free[index - 1].nbytes == start:
                index -= 1
                joined = free.pop(index)
                start, nbytes = joined.start, joined.nbytes + nbytes
            free.insert(index, Extent(slab, start, nbytes))

    def bytes_of(self, extent: Extent, nbytes: int) -> Tensor:
        """The first bytes of an extent, as a tensor."""
        return self._slabs[extent.slab][extent.start : extent.start + nbytes]

    def _lock_slab(self, wanted_bytes: int) -> bool:
        """Lock more memory, if not all of what is wanted then some; whether there was any left to lock."""
        room = self._limit_bytes - self.locked_bytes - sum(pool.locked_bytes for pool in self._others)
        size = min(_SLAB_BYTES, 1 << max(wanted_bytes - 1, GRANULE_BYTES - 1).bit_length())
        while size > room:
            size //= 2
        if size < GRANULE_BYTES:
            return False
        slab = self._host_memory(size)
        self._slabs.append(slab)
        self._free.append(Extent(len(self._slabs) - 1, 0, size))
        self._free_bytes += size
        self.locked_bytes += size
        return True

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
