"""The state of a step in `eager_events`: lifetimes of values, totals of live bytes, and copy engines.

`Lifetime` is one value on the device and `Ledger` the running totals of bytes. `CopyEngines` simulates offload: one
engine copies values out and another copies them back, both beside the compute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import nlargest

from lowtide.errors import PlanError
from lowtide.graph.codec_costs import EncodedForm
from lowtide.graph.step_graph import StepGraph, Value
from lowtide.plans.step_plan import Move


def bytes_by_value(lives: Iterable[tuple[int, int]], most: int | None) -> dict[int, int]:
    """Return the bytes of each value that lives, or of the `most` largest ones, from (value, bytes) of lifetimes."""
    sizes: dict[int, int] = {}
    for value, size in lives:
        sizes[value] = sizes.get(value, 0) + size
    return sizes if most is None else dict(nlargest(most, sizes.items(), key=lambda item: item[1]))


class Lifetime:
    """A value on the device, from the op that makes it until neither Python nor a save or region (`holds`) holds it."""

    __slots__ = ("bytes", "holds", "is_gradient", "python", "value")

    def __init__(self, value: int, size: int, is_gradient: bool) -> None:
        self.value, self.bytes, self.is_gradient = value, size, is_gradient
        self.python, self.holds = True, 0

    @property
    def is_over(self) -> bool:
        return not self.python and not self.holds


class Ledger:
    """Totals of live bytes: `kept` by saves and regions, `transient` if only Python holds them, and `gradients`."""

    def __init__(self) -> None:
        self.kept = self.transient = self.gradients = 0
        self._born: list[Lifetime] = []

    def add(self, index: int, value: Value) -> Lifetime:
        """Add a new value, which Python holds."""
        return self._begin(Lifetime(index, value.bytes, value.kind == "gradient"))

    def alive(self) -> list[Lifetime]:
        """The live values, in the order in which they were made."""
        self._born = [life for life in self._born if not life.is_over]  # freed values are removed here
        return self._born

    def encode(self, index: int, size: int) -> Lifetime:
        """Add the encoded form of a value, which Python holds until a save does."""
        return self._begin(Lifetime(index, size, is_gradient=False))

    def _begin(self, life: Lifetime) -> Lifetime:
        self._born.append(life)
        if life.is_gradient:
            self.gradients += life.bytes
        else:
            self.transient += life.bytes
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
        """Drop Python's reference, if it still has one."""
        if life.python:
            life.python = False
            if not life.holds:
                self._free(life)

    def _free(self, life: Lifetime) -> None:
        if life.is_gradient:
            self.gradients -= life.bytes
        else:
            self.transient -= life.bytes


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a value (`kind` "out" or "in"), or a wait of the step for one ("stall")."""

    kind: str
    value: int
    start_s: float
    end_s: float


class _Offloaded:
    """The copies of a moved value, out and back. `is_over` once it was read: it is on the device then."""

    __slots__ = ("back_at", "is_away", "is_over", "life", "num_saves", "out_at")

    def __init__(self, life: Lifetime, out_at: float) -> None:
        self.life, self.out_at, self.num_saves = life, out_at, 1
        self.back_at: float | None = None  # when the copy back ends; None before it was queued
        self.is_away = self.is_over = False


class CopyEngines:
    """Two copy engines, one out and one back, and which moved values are off the device ("away").

    A value's copy out starts when it is saved and the engine is free. Its bytes are away once the copy has finished and
    nothing else holds it on the device, neither Python nor a region. Copies back are queued in the order of the
    backward's reads, as many ahead as `in_flight_bytes` allow (0: twice the largest value). A read of a value that is
    away waits for its copy. An encoded value moves as its encoded form, which has a lifetime of its own.
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
        self._offloaded: dict[int, _Offloaded] = {}
        self._leaving: deque[_Offloaded] = deque()  # being copied out, in order
        self._copied: list[_Offloaded] = []  # copied out, and still held on the device
        self._returns: deque[_Offloaded] = deque()  # whose copies back are not queued yet
        self._num_queued = self._bytes_queued = 0
        self._out_free = self._in_free = 0.0
        self.bytes_away = self.bytes_in_flight = self.host_bytes = self.most_host_bytes = 0
        self.stalled_s = 0.0
        self.log: list[Copy] = []
        self.num_calls = self._num_taken = 0  # by the host, to start a copy out and to wait for one back

    def take_num_calls(self) -> int:
        """Return the number of host calls since the last call of this method."""
        new, self._num_taken = self.num_calls - self._num_taken, self.num_calls
        return new

    def saved(self, life: Lifetime, clock: float) -> None:
        """Start the copy out of a moved value that a save holds, or a region as its input or retained output."""
        if life.value not in self._moved:
            return
        if life.value in self._offloaded:
            self._offloaded[life.value].num_saves += 1
            return
        self.num_calls += 1
        seconds = life.bytes / self._speed
        self._out_free = max(self._out_free, clock) + seconds
        self.log.append(Copy("out", life.value, self._out_free - seconds, self._out_free))
        self._offloaded[life.value] = moved = _Offloaded(life, self._out_free)
        self._leaving.append(moved)
        self.host_bytes += life.bytes
        self.most_host_bytes = max(self.most_host_bytes, self.host_bytes)

    def advance(self, clock: float) -> None:
        """Advance to `clock`: values that are copied out by then, and that nothing holds on the device, are away."""
        while self._leaving and self._leaving[0].out_at <= clock:
            self._copied.append(self._leaving.popleft())
        if self._copied:
            copied = [moved for moved in self._copied if not moved.is_over]
            for moved in copied:
                if not moved.life.python and moved.life.holds == moved.num_saves:
                    moved.is_away = True
                    self.bytes_away += moved.life.bytes
                    self.bytes_in_flight += moved.life.bytes if moved.back_at is not None else 0
            self._copied = [moved for moved in copied if not moved.is_away]

    def moves(self, value: int) -> bool:
        return value in self._moved

    def begin_fetching(self, order: list[int], clock: float) -> None:
        """Begin copies back, in the order in which the backward will read the values."""
        self._returns.extend(self._offloaded[value] for value in dict.fromkeys(order) if value in self._offloaded)
        self._fetch_ahead(clock)

    def read(self, life: Lifetime, clock: float) -> float:
        """Return when a value that is read at `clock` is on the device."""
        moved = self._offloaded.get(life.value)
        if moved is None or moved.life is not life or moved.is_over:
            return clock
        back_at = self._queue_fetch(moved, clock) if moved.back_at is None else moved.back_at
        moved.is_over = True
        self.num_calls += 1
        self._num_queued -= 1
        self._bytes_queued -= life.bytes
        if moved.is_away:
            moved.is_away = False
            self.bytes_away -= life.bytes
            self.bytes_in_flight -= life.bytes
            if back_at > clock:
                self.stalled_s += back_at - clock
                self.log.append(Copy("stall", life.value, clock, back_at))
                clock = back_at
        self._fetch_ahead(clock)
        return clock

    def released(self, life: Lifetime) -> None:
        """Release one hold of a value. With the last one, its host memory is freed."""
        moved = self._offloaded.get(life.value)
        if moved is not None and moved.life is life:
            moved.num_saves -= 1
            if not moved.num_saves:
                self.host_bytes -= life.bytes
                moved.is_over = True
                if moved.is_away:  # released without having been read
                    moved.is_away = False
                    self.bytes_away -= life.bytes

    def is_away(self, life: Lifetime) -> bool:
        """Whether a value's bytes are off the device, and its copy back is not queued."""
        moved = self._offloaded.get(life.value)
        return moved is not None and moved.life is life and moved.is_away and moved.back_at is None

    def _fetch_ahead(self, clock: float) -> None:
        while self._returns:
            moved = self._returns[0]
            if moved.back_at is None and not moved.is_over:
                if self._num_queued and self._bytes_queued + moved.life.bytes > self._limit:
                    return
                self._queue_fetch(moved, clock)
            self._returns.popleft()

    def _queue_fetch(self, moved: _Offloaded, clock: float) -> float:
        """Queue a value's copy back, and return when it ends."""
        seconds = moved.life.bytes / self._speed
        moved.back_at = self._in_free = max(self._in_free, clock, moved.out_at) + seconds
        self.log.append(Copy("in", moved.life.value, self._in_free - seconds, self._in_free))
        self._num_queued += 1
        self._bytes_queued += moved.life.bytes
        self.bytes_in_flight += moved.life.bytes if moved.is_away else 0
        return moved.back_at
