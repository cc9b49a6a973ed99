"""Copies between device and host.

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

from abc import ABC, abstractmethod
from collections import deque
from typing import Any

import torch
from torch import Tensor

from lowtide import _compat
from lowtide.memory import bits
from lowtide.memory.pinned import Extent, PinnedPool, round_up

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
        self._sources: deque[tuple[Parts, Any, _Moment, int]] = deque()  # no copies, which refer to this
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

    def to_device(self, extents: list[Extent], written: _Moment, parts: Parts) -> Fetched:
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

    def _record(self, stream: Any) -> _Moment:
        return _Moment(self._recorded(stream), self._idle_events)

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


class _Moment:
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

    def __init__(self, mover: AcceleratorMover, extents: list[Extent], sources: Parts, done: _Moment) -> None:
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
    # It has its event to itself: the garbage collector may end a `_Moment` before whoever holds that.
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
        return [(bits.as_bytes(parts[0]), pool.bytes_of(extents[0], parts[0].nbytes))]
    pairs = []
    extents = list(extents)
    for part in parts:
        raw = bits.as_bytes(part.view(-1))
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
