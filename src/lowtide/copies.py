"""The copy engines of a simulated step: one carries moved values out, another brings them back, beside the compute."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from lowtide.errors import PlanError
from lowtide.graph import StepGraph
from lowtide.plans import Plan


class Life(Protocol):
    """A value on the device, as the simulator keeps it."""

    value: int
    bytes: int
    python: bool
    is_moved: bool


class CopyEngines:
    """Where moved values are, and how long their copies take.

    A value's copy out starts when it is saved and the engine is free; its bytes are away once the copy has finished and
    Python holds it no more. Copies back start in the order of the backward's reads, as many ahead as
    `plan.in_flight_bytes` allows (0: twice the largest). A read waits for its copy.
    """

    def __init__(self, graph: StepGraph, plan: Plan) -> None:
        self._moved = plan.moved_values(graph)
        self._speed = graph.hardware.link_bytes_per_s
        if self._moved and not self._speed:
            raise PlanError(
                f"the plan moves values off the device, and {graph.hardware.name} has no link to move them over. "
                "Plan without host and disk."
            )
        sizes = [graph.values[value].bytes for value in self._moved]
        self._limit = plan.in_flight_bytes or 2 * max(sizes, default=0)
        self._saved: dict[int, Life] = {}
        self._out_free = self._in_free = 0.0
        self._out_done: dict[int, float] = {}
        self._leaving: list[tuple[float, Life]] = []
        self._away: set[int] = set()
        self._due: dict[int, float] = {}  # copies back under way: when they are done
        self._returns: deque[int] = deque()
        self._num_saves: dict[int, int] = {}
        self.bytes_away = self.bytes_in_flight = self.host_bytes = self.most_host_bytes = 0
        self.stalled_s = self.out_s = self.in_s = 0.0

    def saved(self, life: Life, clock: float) -> None:
        """A value was saved, or is held as the input of a region."""
        if life.value not in self._moved:
            return
        self._num_saves[life.value] = self._num_saves.get(life.value, 0) + 1
        if life.is_moved:
            return
        life.is_moved = True
        self._saved[life.value] = life
        seconds = life.bytes / self._speed
        self._out_free = max(self._out_free, clock) + seconds
        self.out_s += seconds
        self._out_done[life.value] = self._out_free
        self._leaving.append((self._out_free, life))
        self.host_bytes += life.bytes
        self.most_host_bytes = max(self.most_host_bytes, self.host_bytes)

    def advance(self, clock: float) -> None:
        """Time has come to `clock`: what has been copied out and is held by no one is away."""
        if not self._leaving:
            return
        staying = []
        for done, life in self._leaving:
            if done <= clock and not life.python:
                self._away.add(life.value)
                self.bytes_away += life.bytes
            else:
                staying.append((done, life))
        self._leaving = staying

    def begin_backward(self, order: list[int], clock: float) -> None:
        """The backward begins; it will read moved values in this order."""
        seen: set[int] = set()
        self._returns = deque(v for v in order if v in self._saved and not (v in seen or seen.add(v)))  # type: ignore[func-returns-value]
        self._fetch_ahead(clock)

    def read(self, life: Life, clock: float) -> float:
        """The time at which a value can be used that is asked for at `clock`."""
        if not life.is_moved or self._saved.get(life.value) is not life:
            return clock
        self._leaving = [(done, other) for done, other in self._leaving if other is not life]
        if life.value in self._away:
            if life.value not in self._due:
                self._fetch(life.value, clock)
            arrival = self._due.pop(life.value)
            self.bytes_in_flight -= life.bytes
            self.bytes_away -= life.bytes
            self._away.discard(life.value)
            if arrival > clock:
                self.stalled_s += arrival - clock
                clock = arrival
        self._fetch_ahead(clock)
        return clock

    def released(self, life: Life) -> None:
        """One save of a value was let go; with the last one it leaves the host too."""
        if life.is_moved and self._saved.get(life.value) is life:
            self._num_saves[life.value] -= 1
            if not self._num_saves[life.value]:
                del self._saved[life.value]
                self.host_bytes -= life.bytes
                if life.value in self._away:  # let go without having been read
                    self._away.discard(life.value)
                    self.bytes_away -= life.bytes
                    if self._due.pop(life.value, None) is not None:
                        self.bytes_in_flight -= life.bytes
                self._leaving = [(done, other) for done, other in self._leaving if other is not life]

    def is_away(self, life: Life) -> bool:
        return life.value in self._away and self._saved.get(life.value) is life

    def _fetch_ahead(self, clock: float) -> None:
        while self._returns:
            value = self._returns[0]
            if value not in self._away:  # on the device still, or read already
                self._returns.popleft()
                continue
            if value not in self._due:
                size = self._saved[value].bytes
                if self.bytes_in_flight and self.bytes_in_flight + size > self._limit:
                    return
                self._fetch(value, clock)
            self._returns.popleft()

    def _fetch(self, value: int, clock: float) -> None:
        life = self._saved[value]
        seconds = life.bytes / self._speed
        self._in_free = max(self._in_free, clock, self._out_done[value]) + seconds
        self.in_s += seconds
        self._due[value] = self._in_free
        self.bytes_in_flight += life.bytes
