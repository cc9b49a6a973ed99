"""torch's CUDA allocator: the memory pool of a capture that failed."""

from __future__ import annotations

from typing import Any

from lowtide._compat.internals import optional

_end_allocate = optional("torch._C._cuda_endAllocateToPool", None)
_release = optional("torch._C._cuda_releasePool", None)


def give_up_pool(device_index: int, pool: Any) -> None:
    """Tell the allocator that a capture into this pool has failed, so that it frees what the capture allocated.

    Before torch 2.13 it takes such a capture to go on until the process ends: `empty_cache` frees nothing any more, and
    the memory of the failed capture stays reserved (pytorch #180395). Obsolete with torch 2.13, which ends it itself.
    """
    if _end_allocate is None or _release is None:
        return
    try:
        _end_allocate(device_index, pool)
    except RuntimeError:  # torch has ended it
        return
    _release(device_index, pool)
