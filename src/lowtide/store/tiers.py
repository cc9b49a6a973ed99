"""Placement of units in the tiers of a store: moving them down when a tier is full, and fetching them back.

`StorageTiers` is the inside of `ActivationStore`, which maps keys to units and holds a lock around every call. It
places a new unit in the first tier with room, moves others down, drops or refuses as `on_full` says, and counts bytes
per tier. Copies are done by the `Mover` of each device (`store.transfer`).

`Prefetch` fetches units ahead of use. A backward asks for values in the reverse order of the forward's puts, so with
each unit that is returned, the units put before it are fetched, the latest first, as far as the device memory for
unfinished copies allows. If a backward asks in another order, units fetched too early are cancelled.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter

import torch
from torch import Tensor

from lowtide import _compat
from lowtide.errors import CapacityError, ChangedInPlaceError
from lowtide.store.codecs import Codec
from lowtide.store.disk import SpillFolder
from lowtide.store.storage_units import (
    DEVICE,
    HOST,
    TIERS,
    EntryStats,
    SourceKey,
    StoreStats,
    Unit,
    new_unit,
    source_of,
)
from lowtide.store.transfer import AcceleratorMover, Fetched, Mover, Parts, PinnedPool
from lowtide.units import format_bytes


class Prefetch:
    """Units fetched to the device ahead of use. `bytes` counts units of which some entries were not returned yet.

    The tiers that it fetches from are passed to each call, as holding them would be a reference cycle.
    """

    def __init__(self) -> None:
        self._on_host: list[Unit] = []  # the oldest first
        self._in_progress: dict[int, Unit] = {}
        self._front = 0  # put time of the latest unit that this backward asked for
        self._backward = 1  # number of the backward; a unit asked for a second time begins a new one
        self.bytes = 0

    def add(self, unit: Unit) -> None:
        """Note a unit that was moved to host memory."""
        if not self._on_host or self._on_host[-1].put_at <= unit.put_at:  # the usual case
            self._on_host.append(unit)
        else:
            insort(self._on_host, unit, key=_put_at)

    def discard(self, unit: Unit) -> None:
        """Forget a unit that left host memory, if it was there."""
        index = bisect_left(self._on_host, unit.put_at, key=_put_at)
        if index < len(self._on_host) and self._on_host[index] is unit:
            del self._on_host[index]

    def receive(self, unit: Unit, tiers: StorageTiers) -> Parts:
        """The unit's parts on its device, fetched now if they were not. The current stream waits for them."""
        if unit.served_in == self._backward:
            self._backward += 1
            self._front = 0
        if unit.fetched is None:
            if self.bytes >= tiers.prefetch_limit():
                self.cancel_all()  # the backward asks in another order
            try:
                self._fetch(unit, tiers)
            except torch.OutOfMemoryError:
                self.cancel_all()  # free what was fetched ahead, and try once more
                self._fetch(unit, tiers)
        assert unit.fetched is not None
        parts = unit.fetched.wait()
        if unit.encoded is None and any(_compat.versions_of(parts)):
            raise ChangedInPlaceError(
                "a stored value was changed in place after an earlier get(). Clone what you get before you change it."
            )
        unit.num_served += 1
        if unit.num_served >= unit.num_entries:
            unit.served_in = self._backward
            self.cancel(unit)
        return parts

    def fetch_before(self, put_before: int, tiers: StorageTiers) -> None:
        """Start fetching the units put before that time, the latest first, up to the limit."""
        self._front = max(self._front, put_before)
        limit = tiers.prefetch_limit()
        for index in range(bisect_left(self._on_host, self._front, key=_put_at) - 1, -1, -1):
            earlier = self._on_host[index]
            if self.bytes >= limit or (self.bytes and self.bytes + earlier.stored_bytes > limit):
                return
            if earlier.fetched is None and earlier.served_in != self._backward and earlier.mover.is_asynchronous:
                try:
                    self._fetch(earlier, tiers)
                except torch.OutOfMemoryError:
                    return  # fetching ahead is optional

    def cancel(self, unit: Unit) -> None:
        """Free a unit's copy on the device."""
        if self._in_progress.pop(id(unit), None) is not None:
            self.bytes -= unit.stored_bytes
        unit.fetched = None

    def cancel_all(self) -> None:
        """Free units that were fetched ahead. Those with entries in use are kept."""
        for unit in list(self._in_progress.values()):
            if not unit.num_served:
                self.cancel(unit)

    def _fetch(self, unit: Unit, tiers: StorageTiers) -> None:
        unit.fetched = tiers.bring(unit)
        unit.num_served = 0
        self._in_progress[id(unit)] = unit
        self.bytes += unit.stored_bytes


_put_at = attrgetter("put_at")


class _Tier:
    def __init__(self, budget_bytes: float) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = self.peak_bytes = 0

    def add(self, nbytes: int) -> None:
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)


class StorageTiers:
    """Units in their tiers, within budgets. `evicted()` returns a callback for units that are about to be evicted."""

    def __init__(
        self,
        budgets: dict[str, float],
        *,
        on_full: str,
        order: str,
        folder: str | os.PathLike[str] | None,
        in_flight_bytes: int | None,
        evicted: Callable[[], Callable[[Unit], None] | None],
    ) -> None:
        self._tiers = {tier: _Tier(budgets[tier]) for tier in TIERS if tier in budgets}
        self._on_full, self._order = on_full, order
        self._folder = folder
        self._spill_folder: SpillFolder | None = None
        self.in_flight_bytes = in_flight_bytes  # None: the largest unit so far for copies out, twice that for copies in
        self._largest_bytes = 0
        self._evicted = evicted
        self._units: dict[SourceKey, Unit] = {}
        self._prefetch = Prefetch()
        self._replaced: Unit | None = None
        self._on_device: dict[int, list[Unit]] = {}  # by storage; the first unit of each counts its bytes
        self._movers: dict[torch.device, Mover] = {}
        self._pools: list[PinnedPool] = []
        self.clock = 0
        self._num_spilled = self._moved_down_bytes = self._moved_up_bytes = 0
        self._waited_s = 0.0
        self._has_costs = False
        # Bytes put in this round (from an empty store to the next time it is empty), and how far the last one was over
        # the device's budget.
        self._round_bytes = 0
        self._overflow_bytes = 0.0

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def put(
        self, tensor: Tensor, codec: Codec | None, cost: float | None, watch: _compat.VersionWatch, *, ahead: bool
    ) -> tuple[Unit, int]:
        """The unit for the tensor's storage, new or existing, and its start in the storage in elements.

        With `ahead`, a unit that had to leave the device later in the last round leaves at once. Copies then overlap
        with the whole forward, and not only with the part after the device is full.
        """
        source = source_of(tensor, codec, self.tick())
        unit = self._units.get(source)
        if unit is None or not unit.storage.is_alive():
            unit = new_unit(tensor, source, codec, watch, self._mover(tensor.device), self.clock)
            self._round_bytes += unit.nbytes
            self._largest_bytes = max(self._largest_bytes, unit.stored_bytes)
            self._place(unit, leaves_at_once=ahead and self._round_bytes <= self._overflow_bytes)
            self._units[source] = unit
        unit.num_entries += 1
        if cost is not None:
            self._has_costs = True
            unit.cost = max(unit.cost, cost)
        return unit, source.start

    def get(self, unit: Unit) -> Tensor:
        """The unit's flat tensor on its device. Starts fetching those that the backward is likely to ask for next."""
        unit.touched_at = self.tick()
        self._settle()
        flat = unit.decode(self._prefetch.receive(unit, self) if unit.parts is None else unit.parts)
        if unit.encoded is not None:
            _compat.set_version(flat, 0)  # decoding wrote to it, which is not a change of the value
        if unit.mover.is_asynchronous:
            self._prefetch.fetch_before(unit.put_at, self)
        return flat

    def release(self, unit: Unit, *, evictable: bool) -> None:
        """Remove one entry of a unit, assumed to be one of those already returned, and the unit with its last entry."""
        unit.num_entries -= 1
        unit.num_unevictable -= not evictable
        unit.num_served = max(0, unit.num_served - 1)
        if unit.num_entries == 0:
            self._drop(unit)

    @contextmanager
    def replacing(self, unit: Unit | None) -> Iterator[None]:
        """Inside this context a put may use the room of `unit`, which is dropped once the put has succeeded."""
        self._replaced = unit
        try:
            yield
        finally:
            self._replaced = None

    def close(self) -> None:
        self._movers.clear()
        self._pools.clear()
        if self._spill_folder is not None:
            self._spill_folder.close()

    def stats(self, entries: tuple[EntryStats, ...], **counted: int) -> StoreStats:
        self._settle()
        return StoreStats(
            entries=entries,
            held_bytes_by_tier={
                name: sum(entry.nbytes for entry in entries if entry.tier == name) for name in self._tiers
            },
            peak_bytes_by_tier={name: tier.peak_bytes for name, tier in self._tiers.items()},
            budget_bytes_by_tier={name: tier.budget_bytes for name, tier in self._tiers.items()},
            **counted,
            num_spilled=self._num_spilled,
            moved_down_bytes=self._moved_down_bytes,
            moved_up_bytes=self._moved_up_bytes,
            in_flight_bytes=self._leaving_bytes() + self._prefetch.bytes,
            locked_bytes=sum(pool.locked_bytes for pool in self._pools),
            waited_s=self._waited_s + sum(mover.waited_s() for mover in self._movers.values()),
        )

    # Room

    def _place(self, unit: Unit, *, leaves_at_once: bool) -> None:
        """Put a new unit into the first tier that is large enough and has, or can make, room."""
        tier = self._tier_for(unit, leaves_at_once)
        if tier == DEVICE:
            unit.ready = unit.mover.now()
        else:
            self._move_down(unit, tier)
        if self._replaced is not None:
            self._replaced.num_entries = 0
            self._drop(self._replaced)
        unit.is_counted = True
        self._enter(unit)

    def _tier_for(self, unit: Unit, leaves_at_once: bool) -> str:
        first = next(iter(self._tiers))
        if not (leaves_at_once and first == DEVICE) and self._has_room(first, self._size_in(unit, first)):
            return first  # the usual case
        sizes = {tier: self._size_in(unit, tier) for tier in self._tiers}
        large_enough = [tier for tier in self._tiers if sizes[tier] <= self._tiers[tier].budget_bytes]
        if not large_enough:
            budgets = ", ".join(f"{name} {format_bytes(t.budget_bytes)}" for name, t in self._tiers.items())
            raise CapacityError(
                f"a value of {format_bytes(unit.nbytes)} is larger than every tier ({budgets}). "
                "Give a tier more, or choose a codec."
            )
        if leaves_at_once and HOST in large_enough and self._has_room(HOST, sizes[HOST]):
            return HOST
        return self._tier_with_room(large_enough, sizes)

    def _tier_with_room(self, tiers: list[str], sizes: dict[str, int]) -> str:
        """The first of `tiers` in which room can be made. Tiers after the first are tried only with on_full="spill"."""
        for tier in tiers:
            try:
                self._make_room(tier, sizes[tier], for_newcomer=True)
            except CapacityError:
                if tier == tiers[-1] or self._on_full != "spill":
                    raise
            else:
                return tier
        raise AssertionError("there is at least one tier")

    def _room_of_replaced(self, tier: str) -> int:
        """Bytes of a tier that the unit being replaced will free."""
        unit = self._replaced
        if unit is None or unit.tier != tier:
            return 0
        shared = tier == DEVICE and unit.encoded is None and len(self._on_device[unit.source.storage]) > 1
        return 0 if shared else unit.nbytes

    def _has_room(self, tier: str, nbytes: int) -> bool:
        held = self._tiers[tier]
        return held.used_bytes + nbytes <= held.budget_bytes

    def _size_in(self, unit: Unit, tier: str) -> int:
        if tier == DEVICE:
            return 0 if unit.depends_on_source and unit.source.storage in self._on_device else unit.device_bytes
        return unit.mover.cost_bytes(unit.stored_bytes) if tier == HOST else unit.stored_bytes

    def _make_room(self, tier_name: str, nbytes: int, *, for_newcomer: bool = False) -> None:
        """Move units out of a tier until `nbytes` fit. A new unit may also use the room of the one it replaces."""
        self._check_room(tier_name, nbytes)
        while not self._has_room(tier_name, nbytes - (self._room_of_replaced(tier_name) if for_newcomer else 0)):
            if not any(self._push_out(unit, tier_name) for unit in self._leaving_order(tier_name)):
                raise self._no_room(tier_name, nbytes)

    def _check_room(self, tier_name: str, nbytes: int) -> None:
        """Raise before anything is evicted if units that may not be evicted leave too little room."""
        if self._on_full == "evict":
            staying = sum(unit.nbytes for unit in self._leaving_order(tier_name) if unit.num_unevictable)
            if staying + nbytes > self._tiers[tier_name].budget_bytes:
                raise self._no_room(tier_name, nbytes)

    def _no_room(self, tier_name: str, nbytes: int) -> CapacityError:
        tier = self._tiers[tier_name]
        return CapacityError(
            f"no room for {format_bytes(nbytes)} in the {tier_name} tier: {format_bytes(tier.used_bytes)} of "
            f"{format_bytes(tier.budget_bytes)} are held, and on_full={self._on_full!r} finds nothing to move. "
            "Give it more, add a tier below it, or take values out."
        )

    def _push_out(self, unit: Unit, tier_name: str) -> bool:
        """Move a unit down, or evict it. Returns whether that was possible."""
        if self._on_full == "error":
            return False
        if self._on_full == "evict":
            if unit.num_unevictable:
                return False
            if (callback := self._evicted()) is not None:
                callback(unit)
            unit.num_entries = 0
            self._drop(unit)
            return True
        names = list(self._tiers)
        for lower in names[names.index(tier_name) + 1 :]:
            size = self._size_in(unit, lower)
            if size > self._tiers[lower].budget_bytes:
                continue
            try:
                self._make_room(lower, size)
            except CapacityError:
                continue
            self._move_down(unit, lower)
            self._num_spilled += 1
            return True
        return False

    def _enter(self, unit: Unit) -> None:
        """Add a unit's bytes to its tier. On the device, units that share a storage count once."""
        if unit.tier == DEVICE and unit.encoded is None:
            sharing = self._on_device.setdefault(unit.source.storage, [])
            unit.nbytes = 0 if sharing else unit.device_bytes
            sharing.append(unit)
        self._tiers[unit.tier].add(unit.nbytes)

    def _leave(self, unit: Unit) -> None:
        """Subtract a unit's bytes from its tier. A storage that other units share is then counted by one of those."""
        self._tiers[unit.tier].add(-unit.nbytes)
        if unit.tier == DEVICE and unit.encoded is None:
            sharing = self._on_device[unit.source.storage]
            sharing.remove(unit)
            if not sharing:
                del self._on_device[unit.source.storage]
            elif unit.nbytes:
                sharing[0].nbytes = unit.nbytes
                self._tiers[DEVICE].add(unit.nbytes)

    def _leaving_order(self, tier_name: str) -> list[Unit]:
        units = [unit for unit in self._units.values() if unit.tier == tier_name and unit is not self._replaced]
        if self._order == "oldest" or (self._order == "auto" and not self._has_costs):
            return units  # dict order: the oldest first
        # DTR's heuristic (Kirisame et al. 2021): units that are cheap to recompute, large and long unused leave first.
        return sorted(
            units, key=lambda unit: (unit.cost / (unit.stored_bytes * (1 + self.clock - unit.touched_at)), unit.put_at)
        )

    # Moves

    def _mover(self, device: torch.device) -> Mover:
        mover = self._movers.get(device)
        if mover is None:
            if device.type == "cpu":
                mover = Mover()
            else:
                # One pool per device, as reuse of its memory is ordered by that device's streams.
                budget = int(self._tiers[HOST].budget_bytes) if HOST in self._tiers else 0
                self._pools.append(PinnedPool(budget, others=list(self._pools)))
                mover = AcceleratorMover(device, self._pools[-1])
            self._movers[device] = mover
        return mover

    def _move_down(self, unit: Unit, tier: str) -> None:
        """Move a unit to a lower tier that has room for it. If that raises, the unit stays in its tier."""
        start = time.perf_counter()
        if tier == HOST:
            assert unit.parts is not None
            host = unit.mover.to_host(unit.parts, unit.ready)
            self._settle()
            if host is None:
                raise CapacityError(
                    f"no room for {format_bytes(unit.stored_bytes)} in locked host memory. Raise host=, or lower it to "
                    "what the machine can lock."
                )
            file, nbytes = None, host.nbytes
        else:
            if self._spill_folder is None:
                self._spill_folder = SpillFolder(self._folder)
            host, file = None, self._spill_folder.write(self._read_on_host(unit))
            nbytes = file.nbytes
        self._waited_s += time.perf_counter() - start
        if unit.is_counted:
            self._leave(unit)
            self._prefetch.cancel(unit)
        if unit.host is not None:
            unit.host.release()
        # An asynchronous copy reads the source until it is done: changing the source before that changes the copy.
        unit.is_lost = unit.is_lost or (unit.depends_on_source and unit.watch.has_changed())
        unit.depends_on_source = unit.depends_on_source and file is None and unit.mover.is_asynchronous
        unit.parts, unit.ready, unit.host, unit.file, unit.tier, unit.nbytes = None, None, host, file, tier, nbytes
        if host is not None:
            self._prefetch.add(unit)
        else:
            self._prefetch.discard(unit)
        if unit.is_counted:
            self._enter(unit)
        self._moved_down_bytes += nbytes

    def _read_on_host(self, unit: Unit) -> Parts:
        if unit.host is not None:
            return unit.host.on_host()
        assert unit.parts is not None
        return tuple(part.cpu() for part in unit.parts)

    def _settle(self, free_all: bool = False) -> None:
        """Free sources of finished copies out, and of others beyond the limit; of all with `free_all`."""
        for mover in self._movers.values():
            if mover.in_flight_bytes:
                limit = self._in_flight_limit(self._prefetch.bytes, self._largest_bytes)
                mover.settle(limit if self._units and not free_all else 0)

    def end_of_forward(self) -> int:
        """Free the sources of all copies out, and return the current time, for `fetch_before`."""
        self._settle(free_all=True)
        return self.tick()

    def fetch_before(self, put_before: int) -> None:
        """Start fetching the units put before that time, as far as the device memory for it allows."""
        self._prefetch.fetch_before(put_before, self)

    def prefetch_limit(self) -> float:
        """Bytes that fetched units may hold on the device."""
        return self._in_flight_limit(self._leaving_bytes(), 2 * self._largest_bytes)

    def _leaving_bytes(self) -> int:
        return sum(mover.in_flight_bytes for mover in self._movers.values())

    def _in_flight_limit(self, other_way_bytes: int, by_size: int) -> float:
        """Device memory for copies in one direction: the allowance plus the unused part of the device's budget."""
        device = self._tiers.get(DEVICE)
        unused = 0 if device is None else device.budget_bytes - device.used_bytes
        allowance = by_size if self.in_flight_bytes is None else self.in_flight_bytes
        return allowance + max(0, unused - other_way_bytes)

    def bring(self, unit: Unit) -> Fetched:
        """Start fetching a unit to its device. From disk this blocks."""
        start = time.perf_counter()
        if unit.host is not None:
            fetched = unit.host.fetch()
        else:
            assert unit.file is not None and self._spill_folder is not None
            parts = self._spill_folder.read(unit.file)
            fetched = Fetched(tuple(part.to(unit.device) for part in parts))
        self._waited_s += time.perf_counter() - start
        self._moved_up_bytes += unit.nbytes
        return fetched

    def _drop(self, unit: Unit) -> None:
        """Remove a unit and free its memory or file."""
        if self._units.get(unit.source) is unit:  # first, so that an interruption leaves no half-freed unit to be found
            del self._units[unit.source]
        self._leave(unit)
        self._prefetch.cancel(unit)
        self._prefetch.discard(unit)
        if unit.host is not None:
            unit.host.release()
        if unit.file is not None and self._spill_folder is not None:
            self._spill_folder.remove(unit.file)
        unit.parts = unit.host = unit.file = None
        self._settle()
        if not self._units and DEVICE in self._tiers:
            self._overflow_bytes = max(0, self._round_bytes - self._tiers[DEVICE].budget_bytes)
            self._round_bytes = 0
