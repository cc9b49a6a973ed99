"""Units on their way back to the device: those asked for, and those a backward will ask for next.

A backward asks for what the forward put last. So with each unit given out, the ones put before it are fetched, latest
first, as far as the device memory that copies may hold allows; where the backward asks in another order, what was
fetched in vain gives way.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter
from typing import Protocol

import torch

from lowtide import _compat
from lowtide.errors import ChangedInPlaceError
from lowtide.memory.transfer import Fetched, Parts
from lowtide.memory.units import Unit


class Origin(Protocol):
    """Where units are. Passed to each call rather than held, which would be a cycle."""

    def bring(self, unit: Unit) -> Fetched:
        """Start a unit's way back to its device."""
        ...

    def arrivals_limit(self) -> float:
        """How many bytes may be under way, or given out in part."""
        ...


class Arrivals:
    """Units on their way back; `bytes` counts those under way and those given out in part."""

    def __init__(self) -> None:
        self._on_host: list[Unit] = []  # in the order they were put
        self._under_way: dict[int, Unit] = {}
        self._front = 0  # the moment at which the latest unit that this backward asked for was put
        self._backward = 1  # which backward this is, as far as one can tell: a unit asked for again begins another
        self.bytes = 0

    def add(self, unit: Unit) -> None:
        """A unit has come to host memory."""
        if not self._on_host or self._on_host[-1].put_at <= unit.put_at:  # as for all that leaves at once
            self._on_host.append(unit)
        else:
            insort(self._on_host, unit, key=_put_at)

    def discard(self, unit: Unit) -> None:
        """A unit has left host memory, or was never there."""
        index = bisect_left(self._on_host, unit.put_at, key=_put_at)
        if index < len(self._on_host) and self._on_host[index] is unit:
            del self._on_host[index]

    def take_in(self, unit: Unit, origin: Origin) -> Parts:
        """The unit's parts, ready for use on its device."""
        if unit.served_in == self._backward:
            self._backward += 1
            self._front = 0
        if unit.fetched is None:
            if self.bytes >= origin.arrivals_limit():
                self.cancel_all()  # fetched in vain: the backward asks in another order
            try:
                self._fetch(unit, origin)
            except torch.OutOfMemoryError:
                self.cancel_all()  # make room with what was fetched ahead, and try once more
                self._fetch(unit, origin)
        assert unit.fetched is not None
        parts = unit.fetched.wait()
        if unit.encoded is None and any(_compat.versions_of(parts)):
            raise ChangedInPlaceError(
                "a stored value was changed in place by whoever got it before. Clone what you get before you change it."
            )
        unit.num_served += 1
        if unit.num_served >= unit.num_entries:
            unit.served_in = self._backward
            self.cancel(unit)
        return parts

    def fetch_ahead(self, unit: Unit, origin: Origin) -> None:
        """Start bringing back what was put before `unit`, which was just asked for."""
        if unit.mover.is_asynchronous:
            self.fetch_before(unit.put_at, origin)

    def fetch_before(self, moment: int, origin: Origin) -> None:
        """Start bringing back what was put before `moment`, the latest first."""
        self._front = max(self._front, moment)
        limit = origin.arrivals_limit()
        for index in range(bisect_left(self._on_host, self._front, key=_put_at) - 1, -1, -1):
            earlier = self._on_host[index]
            if self.bytes >= limit or (self.bytes and self.bytes + earlier.stored_bytes > limit):
                return
            if earlier.fetched is None and earlier.served_in != self._backward and earlier.mover.is_asynchronous:
                try:
                    self._fetch(earlier, origin)
                except torch.OutOfMemoryError:
                    return  # it was only meant to help

    def cancel(self, unit: Unit) -> None:
        """Let go of a unit's copy on the device."""
        if self._under_way.pop(id(unit), None) is not None:
            self.bytes -= unit.stored_bytes
        unit.fetched = None

    def cancel_all(self) -> None:
        """Let go of what was fetched and not asked for yet; what was given out in part is in use."""
        for unit in list(self._under_way.values()):
            if not unit.num_served:
                self.cancel(unit)

    def _fetch(self, unit: Unit, origin: Origin) -> None:
        unit.fetched = origin.bring(unit)
        unit.num_served = 0
        self._under_way[id(unit)] = unit
        self.bytes += unit.stored_bytes


_put_at = attrgetter("put_at")
