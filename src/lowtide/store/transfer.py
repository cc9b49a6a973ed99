"""Host memory that an accelerator can copy to and from on its own: locked once, used again step after step.

Locking pages takes milliseconds and torch's own pinned allocator rounds each request up to a power of two. So memory
is locked in slabs whose sizes are powers of two (what is counted is what is locked), and handed out in extents:
one piece where one fits, several where not, so that free bytes are never too scattered to use.

Copies between device and host.

On an accelerator copies run beside compute, on a stream out and a stream in. Three things must hold, and each is a
wait on the device, never on the host:

- a source stays alive until its copy out is done: released early, the allocator would hand its memory out while the
  copy still reads it. Sources are let go in order, and where too many bytes are in flight, the stream they
  were made on waits for the oldest copy first;
- a destination is written only after what used its memory before; so the stream in waits for the stream it was
  allocated on;
- locked host memory is written again only after the copy in that read it; so the stream out waits for the stream in,
  whenever copies in were started since it last did.

Starting a copy has to be quick: while the host is at it, the device may run out of work. Events are used again, as a
wait for an event is for what was recorded when the wait was asked for, whatever is recorded in it later. One that is
asked about later belongs to one copy alone, until that is known to be over or nobody holds it.
"""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide import _compat
from lowtide.store import codecs
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


Parts = tuple[Tensor, ...]


_UNREAD_WAITS = 64  # so many times are taken before the events of the first are read, and used again


class HostCopy(ABC):
    """Parts of a value in host memory. `nbytes` is what they take there."""

    __slots__ = ("nbytes",)

    nbytes: int

    @abstractmethod
    def fetch(self) -> Fetched:
        """Start bringing the parts back to the device they came from."""

    @abstractmethod
    def on_host(self) -> Parts:
        """The parts as CPU tensors, once they have arrived."""

    @abstractmethod
    def release(self) -> None:
        """Give the host memory back."""


class Fetched(ABC):
    """Parts on their way back to the device."""

    __slots__ = ()

    @abstractmethod
    def wait(self) -> Parts:
        """The parts, ready for whatever the current stream does next."""


class Mover(ABC):
    """Moves values of one device. `in_flight_bytes` counts sources held until their copies are done."""

    in_flight_bytes = 0
    is_asynchronous = False  # whether copies go on beside what comes next

    @abstractmethod
    def cost_bytes(self, nbytes: int) -> int:
        """What `nbytes` will take of the host's budget."""

    def now(self) -> Any:
        """This moment on the current stream, for copies to wait for; None where there are no streams."""
        return None

    @abstractmethod
    def to_host(self, parts: Parts, ready: Any) -> HostCopy | None:
        """Start copying parts to the host; None if the pool has no room. They are there since `ready`, or since now."""

    def settle(self, max_in_flight_bytes: float) -> None:
        """Let go of sources whose copies are done, and of as many others as are beyond the limit."""
        return

    def waited_s(self) -> float:
        """Seconds for which compute stood still for a copy, as far as known."""
        return 0.0


class PlainMover(Mover):
    """For values that are in host memory already: a copy out is a copy, and coming back is free."""

    def cost_bytes(self, nbytes: int) -> int:
        return nbytes

    def to_host(self, parts: Parts, ready: Any) -> HostCopy:
        copies = tuple(part.clone() for part in parts)
        for copy in copies:
            _compat.reset_version(copy)
        return _PlainCopy(copies)

    @staticmethod
    def here(parts: Parts) -> Fetched:
        """Parts that are where they belong already."""
        return _Here(parts)


class _PlainCopy(HostCopy):
    __slots__ = ("_parts",)

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.nbytes = sum(part.nbytes for part in parts)

    def fetch(self) -> Fetched:
        return _Here(self._parts)

    def on_host(self) -> Parts:
        return self._parts

    def release(self) -> None:
        self._parts = ()


class _Here(Fetched):
    __slots__ = ("_parts",)

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def wait(self) -> Parts:
        return self._parts


class AcceleratorMover(Mover):
    """Copies out and in on streams of their own, through a pool of locked host memory."""

    is_asynchronous = True

    def __init__(self, device: torch.device, pool: PinnedPool) -> None:
        self.device = device
        self.pool = pool
        self._index = device.index  # asked for the stream of a number, torch answers sooner
        self.module: Any = torch.get_device_module(device)
        self.stream_out = self.module.Stream(device=device)
        self.stream_in = self.module.Stream(device=device)
        self._sources: deque[tuple[Parts, Any, _StreamEvent, int]] = deque()  # no copies, which refer to this
        self._scratch_event = self.module.Event()  # for a wait that is asked for at once
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
            out.synchronize()  # whatever was started must not write into memory that others will get
            self.pool.release(extents)
            raise
        self._sources.append((parts, producer, done, nbytes))
        self.in_flight_bytes += nbytes
        return _PinnedCopy(self, extents, parts, done)

    def to_device(self, extents: list[Extent], written: _StreamEvent, parts: Parts) -> Fetched:
        """Start filling parts, just allocated on the current stream, from host memory that is `written` by then."""
        consumer = self.current_stream()
        into = self.stream_in
        self._wait_for(consumer, into)
        written.wait(into)
        self._has_unawaited_copies_in = True
        with into:
            for target, source in _pair(parts, extents, self.pool):
                target.copy_(source, non_blocking=True)
        for part in parts:
            _compat.reset_version(part)  # filling it is no change of the value
        return _Arriving(self, parts, consumer, self._recorded(into))

    def _wait_for(self, other: Any, stream: Any) -> None:
        """Make `stream` wait for what `other` has to do by now."""
        self._scratch_event.record(other)
        self._scratch_event.wait(stream)

    def _record(self, stream: Any) -> _StreamEvent:
        return _StreamEvent(self._recorded(stream), self._idle_events)

    def _recorded(self, stream: Any) -> Any:
        """An event of its own for whoever asks, and gives it back with `use_again`."""
        event = self._idle_events.pop() if self._idle_events else self.module.Event()
        event.record(stream)
        return event

    def use_again(self, event: Any) -> None:
        self._idle_events.append(event)

    def settle(self, max_in_flight_bytes: float) -> None:
        while self._sources:
            _, producer, done, nbytes = self._sources[0]
            if done.is_over():
                done.let_go()
            elif self.in_flight_bytes <= max_in_flight_bytes:
                return
            else:
                # Stop compute, not the host: memory freed now is used again only by what that stream does later.
                self.stall(producer, done)
            self._sources.popleft()
            self.in_flight_bytes -= nbytes

    def stall(self, stream: Any, moment: Any) -> None:
        """Make `stream` wait for a moment or an event, and note for how long it did."""
        before, after = self._timers()
        before.record(stream)
        moment.wait(stream)
        after.record(stream)
        self._waits.append((before, after))

    def _timers(self) -> tuple[Any, Any]:
        """Two events that tell the time: those of a wait long over, once there are many."""
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
    """When a stream is through with what it had to do at some time.

    Its event is used again once nobody can ask about it: when this is let go of, wherever that happens.
    """

    __slots__ = ("_event", "_idle_events")

    def __init__(self, event: Any, idle_events: list[Any]) -> None:
        self._event, self._idle_events = event, idle_events

    def is_over(self) -> bool:
        """Whether the host sees it over: then whatever is started from now on comes later."""
        return self._event is None or self._event.query()

    def wait(self, stream: Any) -> None:
        """Let `stream` wait for it before what comes next there."""
        if self._event is not None:
            self._event.wait(stream)

    def synchronize(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def let_go(self) -> None:
        """It is over, and nothing has to wait for it any more."""
        if self._event is not None:
            self._idle_events.append(self._event)
            self._event = None

    def __del__(self) -> None:
        self.let_go()


class _PinnedCopy(HostCopy):
    __slots__ = ("_done", "_extents", "_mover", "_shapes")

    def __init__(self, mover: AcceleratorMover, extents: list[Extent], sources: Parts, done: _StreamEvent) -> None:
        self._mover, self._extents, self._done = mover, extents, done
        # Plain tuples of numbers: the garbage collector looks at those only once.
        self._shapes = tuple([(tuple(part.shape), part.dtype) for part in sources])
        self.nbytes = extents[0].nbytes if len(extents) == 1 else sum(extent.nbytes for extent in extents)

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
    # It has its event to itself: the garbage collector may end a `_StreamEvent` before whoever holds that.
    __slots__ = ("_done", "_mover", "_owner", "_parts", "_waited")

    def __init__(self, mover: AcceleratorMover, parts: Parts, owner: Any, done: Any) -> None:
        self._mover, self._parts, self._owner, self._done = mover, parts, owner, done
        self._waited = False

    def wait(self) -> Parts:
        consumer = self._mover.current_stream()
        if self._done.query():
            self._done.wait(consumer)  # for no time; torch's own sanitizer knows of waits only
        else:
            self._mover.stall(consumer, self._done)
        self._waited = True
        if consumer != self._owner:
            for part in self._parts:
                part.record_stream(consumer)
        return self._parts

    def __del__(self) -> None:
        # Never used: its memory goes back to the stream it was allocated on, which must not write it before the copy.
        if not self._waited:
            self._done.wait(self._owner)
        self._mover.use_again(self._done)


def _pair(parts: Parts, extents: list[Extent], pool: PinnedPool) -> list[tuple[Tensor, Tensor]]:
    """Runs of bytes of the parts, each with the run of host memory that belongs to it."""
    if len(parts) == len(extents) == parts[0].dim() == 1:  # as nearly always
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
    """The memory this process may use: the machine's, or its control group's if that is less."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical
