"""Copies between device and host memory, and the pool of pinned host memory that they use.

`store.tiers` calls a `Mover` per device: `to_host` starts a copy out and returns a `HostCopy`, whose `fetch` starts the
copy in. For tensors on the CPU these are plain copies.

On an accelerator (`AcceleratorMover`) copies overlap with compute, on one stream out and one stream in. Three orderings
have to hold. Each is a wait of a stream on the device; the host does not wait.

- A source must stay alive until its copy out has finished, or the allocator would reuse its memory while the copy reads
  it. Sources are freed in order. If too many bytes are in flight, the stream that produced them first waits for the
  oldest copy.
- A destination may be written only after earlier work on its memory: the stream in waits for the stream on which it was
  allocated.
- Pinned memory may be overwritten only after the copy in that read it: the stream out waits for the stream in, if
  copies in were started since it last did.

Starting a copy must be fast, as the device may run out of work meanwhile. Events are therefore reused: a wait refers to
what was recorded when the wait was issued, whatever is recorded in the event later. An event that is queried later
belongs to one copy until that has finished.

`PinnedPool` holds the host memory. Pinning pages takes milliseconds, and torch's own pinned allocator rounds every
request up to a power of two. The pool pins slabs whose sizes are powers of two, keeps them for all later steps, and
hands out extents of them: one if one is large enough, else several, so that free memory is usable however scattered it
is.
"""

from __future__ import annotations

import os
import warnings
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide import _compat
from lowtide.store import codecs
from lowtide.units import format_bytes, in_blocks

GRANULE_BYTES = 64 * 1024
_SLAB_BYTES = 256 * 1024 * 1024


class Extent(NamedTuple):
    """A range of bytes in one slab."""

    slab: int
    start: int
    nbytes: int


def round_up(nbytes: int) -> int:
    """Bytes that an allocation of `nbytes` takes from the pool: whole granules."""
    return in_blocks(nbytes, GRANULE_BYTES)


class PinnedPool:
    """Hands out extents of pinned host memory, up to `limit_bytes` together with the pools `others`."""

    def __init__(self, limit_bytes: int, *, others: Sequence[PinnedPool] = (), pin: bool = True) -> None:
        self._limit_bytes = limit_bytes
        self._others = others
        self._pin = pin
        self._slabs: list[Tensor] = []
        self._free: list[Extent] = []  # sorted by slab and start; adjacent ones are joined
        self._free_bytes = 0
        self.locked_bytes = 0

    def allocate(self, nbytes: int) -> list[Extent] | None:
        """Extents of `round_up(nbytes)` bytes in total. Pins more memory if needed; None beyond the limit."""
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
        best, best_bytes = None, 0
        for extent in self._free:
            nbytes = extent[2]  # faster than by name; this loop can be long
            if nbytes >= least_bytes and (best is None or nbytes < best_bytes):
                best, best_bytes = extent, nbytes
                if nbytes == least_bytes:
                    break
        return best

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
        """Return extents to the pool, joined with adjacent free ones."""
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
        """Pin one more slab, smaller than wanted if need be. Returns False if the limit is reached."""
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


Parts = tuple[Tensor, ...]


_UNREAD_WAITS = 64  # pairs of timing events kept before the oldest are read and reused


class Fetched:
    """Parts that are on their device, or (`_Arriving`) are being copied there."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def wait(self) -> Parts:
        """The parts. The current stream waits until they have arrived."""
        return self._parts


class HostCopy:
    """Parts of a value in host memory, where they take `nbytes`: of a value on the CPU, the parts themselves."""

    __slots__ = ("_parts", "nbytes")

    def __init__(self, parts: Parts, nbytes: int) -> None:
        self._parts, self.nbytes = parts, nbytes

    def fetch(self) -> Fetched:
        """Start copying the parts back to their device."""
        return Fetched(self._parts)

    def on_host(self) -> Parts:
        """The parts as CPU tensors. Waits for the copy out."""
        return self._parts

    def release(self) -> None:
        """Free the host memory."""
        self._parts = ()


class Mover:
    """Copies values of one device to the host and back. This base class is for the CPU: a copy out is a clone."""

    in_flight_bytes = 0  # of sources held until their copies have finished
    is_asynchronous = False  # whether copies overlap with later work

    def cost_bytes(self, nbytes: int) -> int:
        """Bytes of the host's budget that a value of `nbytes` takes."""
        return nbytes

    def now(self) -> Any:
        """The current stream and an event on it, for copies to wait for; None without streams."""
        return None

    def to_host(self, parts: Parts, ready: Any) -> HostCopy | None:
        """Start copying parts to the host, after `ready` (from `now()`) or the current work; None without room."""
        copies = tuple(part.clone() for part in parts)
        for copy in copies:
            _compat.set_version(copy, 0)
        return HostCopy(copies, sum(part.nbytes for part in parts))

    def settle(self, max_in_flight_bytes: float) -> None:
        """Free sources whose copies have finished, and the oldest others until the limit holds."""
        return

    def waited_s(self) -> float:
        """Seconds for which compute waited for copies, as far as the events have been read."""
        return 0.0


class AcceleratorMover(Mover):
    """Copies out and in on two streams of its own, through a pool of pinned host memory."""

    is_asynchronous = True

    def __init__(self, device: torch.device, pool: PinnedPool) -> None:
        self.device = device
        self.pool = pool
        self._index = device.index  # current_stream() is faster with an index
        self.module: Any = torch.get_device_module(device)
        self.stream_out = self.module.Stream(device=device)
        self.stream_in = self.module.Stream(device=device)
        self._sources: deque[tuple[Parts, Any, _StreamEvent, int]] = deque()  # no HostCopy: those refer to this
        self._scratch_event = self.module.Event()  # recorded and waited for at once
        self._idle_events: list[Any] = []
        self._has_unawaited_copies_in = False
        self._waits: deque[tuple[Any, Any]] = deque()
        self._waited_s = 0.0

    def cost_bytes(self, nbytes: int) -> int:
        return round_up(nbytes)

    def current_stream(self) -> Any:
        return self.module.current_stream(self._index)

    def now(self) -> Any:
        stream = self.current_stream()
        return stream, stream.record_event()

    def to_host(self, parts: Parts, ready: Any) -> HostCopy | None:
        nbytes = parts[0].nbytes if len(parts) == 1 else sum(part.nbytes for part in parts)
        extents = self.pool.allocate(nbytes)
        if extents is None:
            return None
        out = self.stream_out
        try:
            if ready is None:
                producer = self.current_stream()
                self._wait_for(producer, out)
            else:
                producer, made = ready
                made.wait(out)
            if self._has_unawaited_copies_in:
                self._wait_for(self.stream_in, out)
                self._has_unawaited_copies_in = False
            with out:
                for source, target in _pair(parts, extents, self.pool):
                    target.copy_(source, non_blocking=True)
            done = self._record(out)
        except BaseException:
            out.synchronize()  # copies already started must not write into extents that are handed out again
            self.pool.release(extents)
            raise
        self._sources.append((parts, producer, done, nbytes))
        self.in_flight_bytes += nbytes
        return _PinnedCopy(self, extents, parts, done)

    def to_device(self, extents: list[Extent], written: _StreamEvent, parts: Parts) -> Fetched:
        """Start copying into `parts`, just allocated on the current stream, once the extents are `written`."""
        consumer = self.current_stream()
        into = self.stream_in
        self._wait_for(consumer, into)
        written.wait(into)
        self._has_unawaited_copies_in = True
        with into:
            for target, source in _pair(parts, extents, self.pool):
                target.copy_(source, non_blocking=True)
        for part in parts:
            _compat.set_version(part, 0)  # the copy is not a change of the value
        return _Arriving(self, parts, consumer, self._recorded(into))

    def _wait_for(self, other: Any, stream: Any) -> None:
        """Make `stream` wait for the work queued on `other` so far."""
        self._scratch_event.record(other)
        self._scratch_event.wait(stream)

    def _record(self, stream: Any) -> _StreamEvent:
        return _StreamEvent(self._recorded(stream), self._idle_events)

    def _recorded(self, stream: Any) -> Any:
        """An event recorded on `stream`. The caller returns it with `reuse`."""
        event = self._idle_events.pop() if self._idle_events else self.module.Event()
        event.record(stream)
        return event

    def reuse(self, event: Any) -> None:
        self._idle_events.append(event)

    def settle(self, max_in_flight_bytes: float) -> None:
        while self._sources:
            _, producer, done, nbytes = self._sources[0]
            if done.is_over():
                done.release()
            elif self.in_flight_bytes <= max_in_flight_bytes:
                return
            else:
                # The producing stream waits, not the host: the freed memory is reused only by later work on that
                # stream.
                self.stall(producer, done)
            self._sources.popleft()
            self.in_flight_bytes -= nbytes

    def stall(self, stream: Any, event: Any) -> None:
        """Make `stream` wait for an event, and time the wait."""
        before, after = self._timers()
        before.record(stream)
        event.wait(stream)
        after.record(stream)
        self._waits.append((before, after))

    def _timers(self) -> tuple[Any, Any]:
        """Two timing events; those of a finished wait, once there are many."""
        if len(self._waits) > _UNREAD_WAITS and self._waits[0][1].query():
            self._waited_s += self._waits[0][0].elapsed_time(self._waits[0][1]) / 1000
            return self._waits.popleft()
        return self.module.Event(enable_timing=True), self.module.Event(enable_timing=True)

    def waited_s(self) -> float:
        pending: deque[tuple[Any, Any]] = deque()
        for before, after in self._waits:
            if after.query():
                self._waited_s += before.elapsed_time(after) / 1000
            else:
                pending.append((before, after))
        self._waits = pending
        return self._waited_s


class _StreamEvent:
    """An event that marks the end of a stream's work so far. The event is reused when this object is deleted."""

    __slots__ = ("_event", "_idle_events")

    def __init__(self, event: Any, idle_events: list[Any]) -> None:
        self._event, self._idle_events = event, idle_events

    def is_over(self) -> bool:
        """Whether the work has finished."""
        return self._event is None or self._event.query()

    def wait(self, stream: Any) -> None:
        """Make later work on `stream` wait for it."""
        if self._event is not None:
            self._event.wait(stream)

    def synchronize(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def release(self) -> None:
        """Return the event for reuse: the work has finished, and nothing has to wait for it any more."""
        if self._event is not None:
            self._idle_events.append(self._event)
            self._event = None

    def __del__(self) -> None:
        self.release()


class _PinnedCopy(HostCopy):
    """A copy in pinned memory, complete once `_done` has passed. `release` gives its extents back to the pool."""

    __slots__ = ("_done", "_extents", "_mover", "_shapes")

    def __init__(self, mover: AcceleratorMover, extents: list[Extent], sources: Parts, done: _StreamEvent) -> None:
        super().__init__((), extents[0].nbytes if len(extents) == 1 else sum(extent.nbytes for extent in extents))
        self._mover, self._extents, self._done = mover, extents, done
        # Plain tuples of numbers: the garbage collector stops tracking those.
        self._shapes = tuple([(tuple(part.shape), part.dtype) for part in sources])

    def fetch(self) -> Fetched:
        device = self._mover.device
        parts = tuple([torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self._shapes])
        return self._mover.to_device(self._extents, self._done, parts)

    def on_host(self) -> Parts:
        self._done.synchronize()
        parts = tuple(torch.empty(shape, dtype=dtype) for shape, dtype in self._shapes)
        for target, source in _pair(parts, self._extents, self._mover.pool):
            target.copy_(source)
        return parts

    def release(self) -> None:
        self._mover.pool.release(self._extents)
        self._extents = []


class _Arriving(Fetched):
    """Parts that a stream is copying to the device. `wait` makes the current stream wait for the copy."""

    # Uses a plain event: the garbage collector may finalize a `_StreamEvent` before the object that holds it.
    __slots__ = ("_done", "_mover", "_owner", "_waited")

    def __init__(self, mover: AcceleratorMover, parts: Parts, owner: Any, done: Any) -> None:
        super().__init__(parts)
        self._mover, self._owner, self._done, self._waited = mover, owner, done, False

    def wait(self) -> Parts:
        consumer = self._mover.current_stream()
        if self._done.query():
            self._done.wait(consumer)  # no delay; torch's CUDA sanitizer only understands waits
        else:
            self._mover.stall(consumer, self._done)
        self._waited = True
        if consumer != self._owner:
            for part in self._parts:
                part.record_stream(consumer)
        return self._parts

    def __del__(self) -> None:
        # Never used: the memory returns to the stream that allocated it, which must not write to it before the copy
        # ends.
        if not self._waited:
            self._done.wait(self._owner)
        self._mover.reuse(self._done)


def _pair(parts: Parts, extents: list[Extent], pool: PinnedPool) -> list[tuple[Tensor, Tensor]]:
    """Pairs of byte ranges: of the parts, and of the host memory that belongs to them."""
    if len(parts) == len(extents) == parts[0].dim() == 1:  # the usual case
        return [(codecs.as_bytes(parts[0]), pool.bytes_of(extents[0], parts[0].nbytes))]
    pairs = []
    extents = list(extents)
    for part in parts:
        raw = codecs.as_bytes(part.view(-1))
        position = 0
        while position < raw.numel():
            extent = extents[0]
            length = min(extent.nbytes, raw.numel() - position)
            pairs.append((raw[position : position + length], pool.bytes_of(extent, length)))
            position += length
            if length == extent.nbytes:
                extents.pop(0)
            else:
                extents[0] = Extent(extent.slab, extent.start + length, extent.nbytes - length)
    return pairs


def host_bytes() -> int:
    """Host memory that this process may use: the machine's, or its cgroup's limit if that is less."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical
