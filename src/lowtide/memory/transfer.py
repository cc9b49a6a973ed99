"""Copies between device and host.

On an accelerator copies run beside compute, on a stream out and a stream in. Three things must hold, and each is a
wait on the device, never on the host:

- a source stays alive until its copy out is done: released early, the allocator would hand its memory out while the
  copy still reads it. Sources are let go in order, and where too many bytes are in flight, the stream they
  were made on waits for the oldest copy first;
- a destination is written only after what used its memory before; so the stream in waits for the stream it was
  allocated on;
- locked host memory is written again only after the copy in that read it; so the stream out waits for the stream in.
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


class HostCopy(ABC):
    """Parts of a value in host memory. `nbytes` is what they take there."""

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

    @abstractmethod
    def wait(self) -> Parts:
        """The parts, ready for whatever the current stream does next."""


class Mover(ABC):
    """Moves values of one device. `in_flight_bytes` counts sources held until their copies are done."""

    in_flight_bytes = 0

    @abstractmethod
    def cost_bytes(self, nbytes: int) -> int:
        """What `nbytes` will take of the host's budget."""

    def now(self) -> Any:
        """This moment on the current stream, for copies to wait for; None where there are no streams."""
        return None

    @abstractmethod
    def to_host(self, parts: Parts, ready: Any) -> HostCopy | None:
        """Start copying parts, which are there since `ready`, to the host; None if the pool has no room."""

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
    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def wait(self) -> Parts:
        return self._parts


class AcceleratorMover(Mover):
    """Copies out and in on streams of their own, through a pool of locked host memory."""

    def __init__(self, device: torch.device, pool: PinnedPool) -> None:
        self.device = device
        self.pool = pool
        self.module: Any = torch.get_device_module(device)
        self.stream_out = self.module.Stream(device=device)
        self.stream_in = self.module.Stream(device=device)
        self._sources: deque[tuple[Parts, Any, Any, int]] = deque()
        self._waits: list[tuple[Any, Any]] = []
        self._waited_s = 0.0

    def cost_bytes(self, nbytes: int) -> int:
        return round_up(nbytes)

    def now(self) -> Any:
        stream = self.module.current_stream(self.device)
        return stream, stream.record_event()

    def to_host(self, parts: Parts, ready: Any) -> HostCopy | None:
        nbytes = sum(part.nbytes for part in parts)
        extents = self.pool.allocate(nbytes)
        if extents is None:
            return None
        producer, made = ready
        self.stream_out.wait_event(made)
        self.stream_out.wait_stream(self.stream_in)
        try:
            with self.module.stream(self.stream_out):
                for source, target in _pair(parts, extents, self.pool):
                    target.copy_(source, non_blocking=True)
                done = self.stream_out.record_event()
        except BaseException:
            self.stream_out.synchronize()  # whatever was started must not write into memory that others will get
            self.pool.release(extents)
            raise
        self._sources.append((parts, producer, done, nbytes))
        self.in_flight_bytes += nbytes
        return _PinnedCopy(self, extents, parts, done)

    def settle(self, max_in_flight_bytes: float) -> None:
        while self._sources:
            _, producer, done, nbytes = self._sources[0]
            if not done.query():
                if self.in_flight_bytes <= max_in_flight_bytes:
                    return
                # Stop compute, not the host: memory freed now is used again only by what that stream does later.
                self.stall(producer, done)
            self._sources.popleft()
            self.in_flight_bytes -= nbytes

    def stall(self, stream: Any, event: Any) -> None:
        """Make `stream` wait for `event`, and note for how long it did."""
        before, after = self.module.Event(enable_timing=True), self.module.Event(enable_timing=True)
        before.record(stream)
        stream.wait_event(event)
        after.record(stream)
        self._waits.append((before, after))
        if len(self._waits) > 1000:
            self.waited_s()

    def waited_s(self) -> float:
        pending = []
        for before, after in self._waits:
            if after.query():
                self._waited_s += before.elapsed_time(after) / 1000
            else:
                pending.append((before, after))
        self._waits = pending
        return self._waited_s


class _PinnedCopy(HostCopy):
    def __init__(self, mover: AcceleratorMover, extents: list[Extent], parts: Parts, done: Any) -> None:
        self._mover, self._extents, self._done = mover, extents, done
        self._shapes = [(part.shape, part.dtype) for part in parts]
        self.nbytes = sum(extent.nbytes for extent in extents)

    def fetch(self) -> Fetched:
        mover = self._mover
        consumer = mover.module.current_stream(mover.device)
        parts = tuple(torch.empty(shape, dtype=dtype, device=mover.device) for shape, dtype in self._shapes)
        mover.stream_in.wait_stream(consumer)
        mover.stream_in.wait_event(self._done)
        with mover.module.stream(mover.stream_in):
            for target, source in _pair(parts, self._extents, mover.pool):
                target.copy_(source, non_blocking=True)
            done = mover.stream_in.record_event()
        for part in parts:
            _compat.reset_version(part)  # filling it is no change of the value
        return _Arriving(mover, parts, consumer, done)

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
    def __init__(self, mover: AcceleratorMover, parts: Parts, owner: Any, done: Any) -> None:
        self._mover, self._parts, self._owner, self._done = mover, parts, owner, done
        self._waited = False

    def wait(self) -> Parts:
        consumer = self._mover.module.current_stream(self._mover.device)
        self._mover.stall(consumer, self._done)
        self._waited = True
        if consumer != self._owner:
            for part in self._parts:
                part.record_stream(consumer)
        return self._parts

    def __del__(self) -> None:
        # Never used: its memory goes back to the stream it was allocated on, which must not write it before the copy.
        if not self._waited:
            self._owner.wait_event(self._done)


def _pair(parts: Parts, extents: list[Extent], pool: PinnedPool) -> list[tuple[Tensor, Tensor]]:
    """Runs of bytes of the parts, each with the run of host memory that belongs to it."""
    pairs = []
    extents = list(extents)
    for part in parts:
        raw = bits.as_bytes(part.view(-1))
        position = 0
        while position < raw.numel():
            extent = extents[0]
            length = min(extent.nbytes, raw.numel() - position)
            run = Extent(extent.slab, extent.start, length)
            pairs.append((raw[position : position + length], pool.bytes_of(run)))
            position += length
            if length == extent.nbytes:
                extents.pop(0)
            else:
                extents[0] = Extent(extent.slab, extent.start + length, extent.nbytes - length)
    return pairs
