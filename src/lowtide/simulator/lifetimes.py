"""Parts that the simulations of eager steps share: lifetimes of values, totals of live bytes, and copy engines.

`Lifetime` is one value on the device and `Ledger` the running totals of bytes. `CopyEngines` simulates offload: one
engine copies values out and another copies them back, both beside the compute.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import nlargest

import numpy as np

from lowtide.errors import PlanError
from lowtide.graph.codec_costs import EncodedForm
from lowtide.graph.step_graph import StepGraph, Value
from lowtide.plans.step_plan import Move


def largest(sizes: dict[int, int], most: int) -> dict[int, int]:
    """Of bytes by value, the `most` largest."""
    return dict(nlargest(most, sizes.items(), key=lambda item: item[1]))


class Lifetime:
    """A value on the device, from an op that made it: held by Python, and by saves and regions."""

    __slots__ = ("bytes", "holds", "is_gradient", "python", "value")

    def __init__(self, value: int, size: int, is_gradient: bool) -> None:
        self.value, self.bytes, self.is_gradient = value, size, is_gradient
        self.python, self.holds = True, 0

    @property
    def is_over(self) -> bool:
        return not self.python and not self.holds


class Ledger:
    """Bytes of what lives: `kept` by saves and regions, `transient` where only Python holds it, and `gradients`."""

    def __init__(self) -> None:
        self.kept = self.transient = self.gradients = 0
        self._born: list[Lifetime] = []

    def add(self, index: int, value: Value) -> Lifetime:
        """A value was made, and Python holds it."""
        life = Lifetime(index, value.bytes, value.kind == "gradient")
        self._born.append(life)
        if life.is_gradient:
            self.gradients += life.bytes
        else:
            self.transient += life.bytes
        return life

    def alive(self) -> list[Lifetime]:
        """What lives now, in the order of birth."""
        self._born = [life for life in self._born if not life.is_over]  # the dead are passed over once
        return self._born

    def encode(self, index: int, size: int) -> Lifetime:
        """A codec wrote a value in fewer bytes, which Python holds until a save does."""
        life = Lifetime(index, size, is_gradient=False)
        self._born.append(life)
        self.transient += size
        return life

    def hold(self, life: Lifetime) -> None:
        if not life.holds and not life.is_gradient:
            self.transient -= life.bytes
            self.kept += life.bytes
        life.holds += 1

    def unhold(self, life: Lifetime) -> None:
        life.holds -= 1
        if not life.holds:
            if not life.is_gradient:
                self.kept -= life.bytes
                self.transient += life.bytes
            if not life.python:
                self._free(life)

    def drop(self, life: Lifetime) -> None:
        """Python lets go, if it has not yet."""
        if life.python:
            life.python = False
            if not life.holds:
                self._free(life)

    def _free(self, life: Lifetime) -> None:
        if life.is_gradient:
            self.gradients -= life.bytes
        else:
            self.transient -= life.bytes


def ends_before(
    lives: np.ndarray, ends: np.ndarray, floor: np.ndarray, num_ticks: int
) -> tuple[np.ndarray, np.ndarray]:
    """For holds sorted by life and start: when the life's holds before it end, `floor` at least; and if it is first."""
    is_first, floors, begins = np.ones(len(lives), dtype=bool), floor[lives], lives * (num_ticks + 1)
    np.not_equal(lives[1:], lives[:-1], out=is_first[1:])
    latest = np.maximum.accumulate(begins + np.maximum(ends, floors)) - begins
    before = floors.copy()
    before[1:] = np.where(is_first[1:], floors[1:], latest[:-1])
    return before, is_first


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a value `out` or `in`, or a `stall`: the step waits for one."""

    kind: str
    value: int
    start_s: float
    end_s: float


class _Trip:
    """A moved value on its way out and back; over once it is read, for it is there then."""

    __slots__ = ("back_at", "is_away", "is_over", "life", "num_saves", "out_at")

    def __init__(self, life: Lifetime, out_at: float) -> None:
        self.life, self.out_at, self.num_saves = life, out_at, 1
        self.back_at: float | None = None  # asked for
        self.is_away = self.is_over = False


class CopyEngines:
    """Where moved values are, and how long their copies take.

    What a codec has written smaller moves as what it is then: a life of its own, held by saves alone.

    A value's copy out starts when it is saved and the engine is free; its bytes are away once the copy has finished and
    nothing holds it on the device: not Python, nor a region that keeps it there. Copies back are asked for in the
    order of the backward's reads, as many ahead as `in_flight_bytes` allow (0: twice the largest). A read waits for its
    copy, unless the value has not gone away.
    """

    def __init__(
        self, graph: StepGraph, moves: dict[int, Move], forms: dict[int, EncodedForm], in_flight_bytes: int
    ) -> None:
        self._moved = {value for value, move in moves.items() if move.to != "device"}
        self._speed = graph.hardware.link_bytes_per_s
        if self._moved and not self._speed:
            raise PlanError(
                f"the plan moves values off the device, and {graph.hardware.name} has no link to move them over. "
                "Plan without host=."
            )
        sizes = [forms[value].bytes if value in forms else graph.values[value].bytes for value in self._moved]
        self._limit = in_flight_bytes or 2 * max(sizes, default=0)
        self._trips: dict[int, _Trip] = {}
        self._leaving: deque[_Trip] = deque()  # in the order of their copies
        self._copied: list[_Trip] = []  # copied out, and held on the device all the same
        self._returns: deque[_Trip] = deque()  # to be asked for
        self._num_asked = self._bytes_asked = 0
        self._out_free = self._in_free = 0.0
        self.bytes_away = self.bytes_in_flight = self.host_bytes = self.most_host_bytes = 0
        self.stalled_s = self.out_s = self.in_s = 0.0
        self.log: list[Copy] = []
        self.num_calls = self._num_taken = 0  # of the host: to send a value off, and to ask for it

    def take_num_calls(self) -> int:
        """Calls of the host since this was last asked."""
        new, self._num_taken = self.num_calls - self._num_taken, self.num_calls
        return new

    def saved(self, life: Lifetime, clock: float) -> None:
        """A value was saved, or is held by a region: as its input, or as an output that it is not to make again."""
        if life.value not in self._moved:
            return
        if life.value in self._trips:
            self._trips[life.value].num_saves += 1
            return
        self.num_calls += 1
        seconds = life.bytes / self._speed
        self._out_free = max(self._out_free, clock) + seconds
        self.out_s += seconds
        self.log.append(Copy("out", life.value, self._out_free - seconds, self._out_free))
        self._trips[life.value] = trip = _Trip(life, self._out_free)
        self._leaving.append(trip)
        self.host_bytes += life.bytes
        self.most_host_bytes = max(self.most_host_bytes, self.host_bytes)

    def advance(self, clock: float) -> None:
        """Time has come to `clock`: what has been copied out and is held by no one on the device is away."""
        while self._leaving and self._leaving[0].out_at <= clock:
            self._copied.append(self._leaving.popleft())
        if self._copied:
            copied = [trip for trip in self._copied if not trip.is_over]
            for trip in copied:
                if not trip.life.python and trip.life.holds == trip.num_saves:
                    trip.is_away = True
                    self.bytes_away += trip.life.bytes
                    self.bytes_in_flight += trip.life.bytes if trip.back_at is not None else 0
            self._copied = [trip for trip in copied if not trip.is_away]

    def moves(self, value: int) -> bool:
        return value in self._moved

    def begin_fetching(self, order: list[int], clock: float) -> None:
        """From now on values come back; the backward will read them in this order."""
        self._returns.extend(self._trips[value] for value in dict.fromkeys(order) if value in self._trips)
        self._fetch_ahead(clock)

    def read(self, life: Lifetime, clock: float) -> float:
        """The time at which a value can be used that is asked for at `clock`."""
        trip = self._trips.get(life.value)
        if trip is None or trip.life is not life or trip.is_over:
            return clock
        back_at = self._ask(trip, clock) if trip.back_at is None else trip.back_at
        trip.is_over = True
        self.num_calls += 1
        self._num_asked -= 1
        self._bytes_asked -= life.bytes
        if trip.is_away:
            trip.is_away = False
            self.bytes_away -= life.bytes
            self.bytes_in_flight -= life.bytes
            if back_at > clock:
                self.stalled_s += back_at - clock
                self.log.append(Copy("stall", life.value, clock, back_at))
                clock = back_at
        self._fetch_ahead(clock)
        return clock

    def released(self, life: Lifetime) -> None:
        """One save of a value was let go; with the last one it leaves the host too."""
        trip = self._trips.get(life.value)
        if trip is not None and trip.life is life:
            trip.num_saves -= 1
            if not trip.num_saves:
                self.host_bytes -= life.bytes
                trip.is_over = True
                if trip.is_away:  # let go without having been read
                    trip.is_away = False
                    self.bytes_away -= life.bytes

    def is_away(self, life: Lifetime) -> bool:
        """Whether a value's bytes are off the device, and not on their way back either."""
        trip = self._trips.get(life.value)
        return trip is not None and trip.life is life and trip.is_away and trip.back_at is None

    def _fetch_ahead(self, clock: float) -> None:
        while self._returns:
            trip = self._returns[0]
            if trip.back_at is None and not trip.is_over:
                if self._num_asked and self._bytes_asked + trip.life.bytes > self._limit:
                    return
                self._ask(trip, clock)
            self._returns.popleft()

    def _ask(self, trip: _Trip, clock: float) -> float:
        """Queue a value's copy back; the time at which it is done."""
        seconds = trip.life.bytes / self._speed
        trip.back_at = self._in_free = max(self._in_free, clock, trip.out_at) + seconds
        self.in_s += seconds
        self.log.append(Copy("in", trip.life.value, self._in_free - seconds, self._in_free))
        self._num_asked += 1
        self._bytes_asked += trip.life.bytes
        self.bytes_in_flight += trip.life.bytes if trip.is_away else 0
        return trip.back_at
