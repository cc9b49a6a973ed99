"""A device without hardware: its streams do their work at once, and every pair of accesses is checked for an order.

Nothing here is asynchronous, so values are always right; races of real hardware are detected by counting. Each
stream counts its operations; an event notes, for each stream, how many of them are over when it is, and a wait takes
that over (vector clocks). Two accesses to the same bytes, one of them a write, need an order that the waits give.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Clock = dict[int, int]  # by stream: how many of its operations are over


class Access(NamedTuple):
    start: int
    end: int
    stream: int
    position: int
    is_write: bool


class Device:
    """Stands for `torch.cuda`; `is_over` says what an event answers when it is asked whether it is over."""

    def __init__(self, is_over: Callable[[Event], bool] = lambda _: True) -> None:
        self.is_over = is_over
        self.accesses: list[Access] = []
        self.num_ordered = 0  # pairs of accesses that needed an order, and had one
        self.num_events = self.num_timers = self.num_waits = 0
        self.streams: list[Stream] = []
        self.known_over: Clock = {}  # to the host: whatever it starts from now on comes later
        self.compute = Stream(self)
        self._current = [self.compute]

    def Stream(self, device: Any = None) -> Stream:
        return Stream(self)

    def Event(self, enable_timing: bool = False) -> Event:
        self.num_timers += enable_timing
        self.num_events += not enable_timing
        return Event(self, enable_timing)

    def current_stream(self, device: Any = None) -> Stream:
        return self._current[-1]

    def used(self, tensor: Tensor, *, is_write: bool) -> None:
        """The current stream reads or writes a tensor's bytes, after all that it has waited for."""
        stream = self._current[-1]
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        for earlier in self.accesses:
            if earlier.start < end and start < earlier.end and (is_write or earlier.is_write):
                assert stream.knows(earlier), f"a race with {earlier}"
                self.num_ordered += earlier.stream != stream.number
        stream.position += 1
        self.accesses.append(Access(start, end, stream.number, stream.position, is_write))


class Stream:
    """Operations in their order, and what is over before the next of them begins."""

    def __init__(self, device: Device) -> None:
        self.device, self.number = device, len(device.streams)
        self.position = 0
        self.waited_for: Clock = {}
        device.streams.append(self)

    def knows(self, access: Access) -> bool:
        return access.stream == self.number or access.position <= max(
            clock.get(access.stream, 0) for clock in (self.waited_for, self.device.known_over)
        )

    def record_event(self) -> Event:
        event = self.device.Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _take_over(self.device.known_over, {**self.waited_for, self.number: self.position})

    def __enter__(self) -> None:
        self._mode = _Copies(self.device)
        self._mode.__enter__()
        self.device._current.append(self)

    def __exit__(self, *exception: Any) -> None:
        assert self.device._current.pop() is self
        self._mode.__exit__(*exception)


class Event:
    def __init__(self, device: Device, tells_time: bool) -> None:
        self.device, self.tells_time = device, tells_time
        self.clock: Clock = {}

    def record(self, stream: Stream) -> None:
        self.clock = {**stream.waited_for, stream.number: stream.position}

    def wait(self, stream: Stream) -> None:
        self.device.num_waits += 1
        _take_over(stream.waited_for, self.clock)

    def query(self) -> bool:
        if self.device.is_over(self):
            self.synchronize()
            return True
        return False

    def synchronize(self) -> None:
        _take_over(self.device.known_over, self.clock)

    def elapsed_time(self, later: Event) -> float:
        return 1.0


class _Copies(TorchDispatchMode):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._device.used(args[1], is_write=False)
            self._device.used(args[0], is_write=True)
        return func(*args, **(kwargs or {}))


def _take_over(clock: Clock, other: Clock) -> None:
    for stream, position in other.items():
        clock[stream] = max(clock.get(stream, 0), position)
