"""Units in tiers: placing them, moving them down when a tier is full, and bringing them back ahead of use.

The inside of `ActivationStore`; it knows bytes and units, and nothing of keys. Its caller holds a lock.
"""

from __future__ import annotations

import dataclasses
import os
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lowtide import _compat
from lowtide.errors import CapacityError
from lowtide.memory.codecs import Codec
from lowtide.memory.disk import SpillFolder
from lowtide.memory.pinned import PinnedPool
from lowtide.memory.statistics import EntryStats, StoreStats
from lowtide.memory.transfer import AcceleratorMover, Mover, Parts, PlainMover
from lowtide.memory.units import DEVICE, HOST, TIERS, SourceKey, Unit, flat_of, source_of
from lowtide.units import format_bytes


class _Tier:
    def __init__(self, budget_bytes: float) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = self.peak_bytes = 0

    def add(self, nbytes: int) -> None:
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)


class Shelves:
    """Units in their tiers, within budgets. `evicted` is told of a unit before it is dropped for want of room."""

    def __init__(
        self,
        budgets: dict[str, float],
        *,
        on_full: str,
        order: str,
        folder: str | os.PathLike[str] | None,
        in_flight_bytes: int,
        evicted: Callable[[Unit], None],
    ) -> None:
        self._tiers = {tier: _Tier(budgets[tier]) for tier in TIERS if tier in budgets}
        self._on_full, self._order = on_full, order
        self._folder = folder
        self._spill_folder: SpillFolder | None = None
        self._in_flight_bytes = in_flight_bytes
        self._evicted = evicted
        self._units: dict[SourceKey, Unit] = {}
        self._on_host: list[Unit] = []  # units in host memory, in the order they were put
        self._arriving: list[Unit] = []  # fetched ahead, and not asked for yet
        self._on_device: dict[int, list[Unit]] = {}  # units that keep one storage alive; the first carries its bytes
        self._movers: dict[torch.device, Mover] = {}
        self._pool: PinnedPool | None = None
        self.clock = 0
        self._num_spilled = self._moved_down_bytes = self._moved_up_bytes = 0
        self._waited_s = 0.0
        self._has_costs = False
        # What the last round (from the first unit put to the last one dropped) had beyond the device's budget.
        self._round_bytes = 0
        self._overflow_bytes = 0.0

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def put(self, tensor: Tensor, codec: Codec | None, cost: float | None, *, ahead: bool) -> tuple[Unit, int]:
        """The unit that holds the tensor's storage, made and placed if need be, and where in the storage it starts.

        With `ahead`, a unit that would have to leave the device later, by the last round's measure, leaves at once:
        copies then have the whole forward to hide in, not only what is left of it when the device is full.
        """
        source, start, numel = source_of(tensor, codec)
        unit = self._units.get(source)
        if unit is None or not unit.storage.is_alive():
            unit = self._new_unit(tensor, source, start, numel, codec)
            self._round_bytes += unit.nbytes
            self._place(unit, leaves_at_once=ahead and self._round_bytes <= self._overflow_bytes)
            self._units[source] = unit
        unit.num_entries += 1
        if cost is not None:
            self._has_costs = True
            unit.cost = max(unit.cost, cost)
        return unit, start

    def _new_unit(self, tensor: Tensor, source: SourceKey, start: int, numel: int, codec: Codec | None) -> Unit:
        flat = flat_of(tensor, start, numel)
        encoded = None if codec is None else codec.encode(flat, tensor.shape[-1] if tensor.dim() else 1)
        unit = Unit(
            source=source,
            storage=_compat.StorageReference(tensor),
            numel=numel,
            dtype=tensor.dtype,
            device=tensor.device,
            encoded=None if encoded is None else dataclasses.replace(encoded, parts=()),
            stored_bytes=flat.nbytes if encoded is None else encoded.nbytes,
            tier=DEVICE,
            # A view on the device keeps its whole storage alive, so the whole storage is what it costs.
            nbytes=tensor.untyped_storage().nbytes() if encoded is None else encoded.nbytes,
            parts=(flat,) if encoded is None else encoded.parts,
            depends_on_source=encoded is None,
            put_at=self.tick(),
        )
        unit.touched_at = unit.put_at
        return unit

    def get(self, unit: Unit) -> Tensor:
        """The unit's flat tensor on its device. Those the backward is likely to ask for next start on their way."""
        unit.touched_at = self.tick()
        self._settle()
        if unit.parts is not None:
            flat = unit.decode(unit.parts)
        else:
            if unit.fetched is None:
                if self._arriving_bytes() >= self._in_flight_limit():
                    for other in list(self._arriving):  # fetched in vain: the backward asks in another order
                        self._cancel_fetch(other)
                self._fetch(unit)
            assert unit.fetched is not None
            flat = unit.decode(unit.fetched.wait())
            if unit in self._arriving:
                self._arriving.remove(unit)
            unit.num_served += 1
            if unit.num_served >= unit.num_entries:
                unit.fetched = None
        if not unit.depends_on_source or unit.parts is None:
            _compat.reset_version(flat)  # filling it was no change of the value
        self._fetch_ahead(unit)
        return flat

    def release(self, unit: Unit) -> None:
        """One entry fewer; the last one takes the unit along."""
        unit.num_entries -= 1
        if unit.num_entries == 0:
            self._drop(unit)

    @contextmanager
    def without(self, unit: Unit | None) -> Iterator[None]:
        """A block in which the bytes of a unit about to be replaced count as free."""
        if unit is None or unit.num_entries > 1:
            yield
            return
        tier = self._tiers[unit.tier]
        hidden = self._units.pop(unit.source, None)
        tier.used_bytes -= unit.nbytes
        try:
            yield
        finally:
            tier.used_bytes += unit.nbytes
            if hidden is not None:
                self._units.setdefault(unit.source, hidden)

    def close(self) -> None:
        self._movers.clear()
        self._pool = None
        if self._spill_folder is not None:
            self._spill_folder.close()

    def stats(self, entries: tuple[EntryStats, ...], *, num_created: int, num_evicted: int) -> StoreStats:
        self._settle()
        return StoreStats(
            entries=entries,
            held_bytes_by_tier={
                name: sum(entry.nbytes for entry in entries if entry.tier == name) for name in self._tiers
            },
            peak_bytes_by_tier={name: tier.peak_bytes for name, tier in self._tiers.items()},
            budget_bytes_by_tier={name: tier.budget_bytes for name, tier in self._tiers.items()},
            num_created=num_created,
            num_evicted=num_evicted,
            num_spilled=self._num_spilled,
            moved_down_bytes=self._moved_down_bytes,
            moved_up_bytes=self._moved_up_bytes,
            in_flight_bytes=sum(mover.in_flight_bytes for mover in self._movers.values()) + self._arriving_bytes(),
            locked_bytes=0 if self._pool is None else self._pool.locked_bytes,
            waited_s=self._waited_s + sum(mover.waited_s() for mover in self._movers.values()),
        )

    # Room

    def _place(self, unit: Unit, *, leaves_at_once: bool) -> None:
        """Put a new unit into the first tier that is large enough for it."""
        sizes = {tier: self._size_in(unit, tier) for tier in self._tiers}
        tier = next((tier for tier in self._tiers if sizes[tier] <= self._tiers[tier].budget_bytes), None)
        if tier is None:
            budgets = ", ".join(f"{name} {format_bytes(t.budget_bytes)}" for name, t in self._tiers.items())
            raise CapacityError(
                f"a value of {format_bytes(unit.nbytes)} is larger than every tier ({budgets}). "
                "Give a tier more, or choose a codec."
            )
        if leaves_at_once and tier == DEVICE and HOST in self._tiers:
            host = self._tiers[HOST]
            tier = HOST if host.used_bytes + sizes[HOST] <= host.budget_bytes else DEVICE
        self._make_room(tier, sizes[tier])
        if tier != DEVICE:
            self._move_down(unit, tier)
        unit.is_counted = True
        self._enter(unit)

    def _size_in(self, unit: Unit, tier: str) -> int:
        if tier == DEVICE:
            return 0 if unit.depends_on_source and unit.source.storage in self._on_device else unit.nbytes
        return self._mover(unit.device).cost_bytes(unit.stored_bytes) if tier == HOST else unit.stored_bytes

    def _make_room(self, tier_name: str, nbytes: int) -> None:
        tier = self._tiers[tier_name]
        while tier.used_bytes + nbytes > tier.budget_bytes:
            if not any(self._push_out(unit, tier_name) for unit in self._leaving_order(tier_name)):
                raise CapacityError(
                    f"no room for {format_bytes(nbytes)} in the {tier_name} tier: {format_bytes(tier.used_bytes)} of "
                    f"{format_bytes(tier.budget_bytes)} are held, and on_full={self._on_full!r} finds nothing to move. "
                    "Give it more, add a tier below it, or take values out."
                )

    def _push_out(self, unit: Unit, tier_name: str) -> bool:
        """Get a unit out of a full tier; whether that was possible."""
        if self._on_full == "error":
            return False
        if self._on_full == "evict":
            self._evicted(unit)
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
        """Count a unit in its tier; on the device, only if no other unit keeps the same storage alive."""
        if unit.tier == DEVICE and unit.encoded is None:
            sharing = self._on_device.setdefault(unit.source.storage, [])
            if sharing:
                unit.nbytes = 0
            sharing.append(unit)
        self._tiers[unit.tier].add(unit.nbytes)

    def _leave(self, unit: Unit) -> None:
        """Count a unit out of its tier; a storage that others keep alive goes on counting with one of them."""
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
        units = [unit for unit in self._units.values() if unit.tier == tier_name]
        if self._order == "oldest" or (self._order == "auto" and not self._has_costs):
            return units  # in the order they were put
        # DTR's heuristic (Kirisame et al. 2021): what is cheap to have again, large, and long unused goes first.
        return sorted(
            units, key=lambda unit: (unit.cost / (unit.stored_bytes * (1 + self.clock - unit.touched_at)), unit.put_at)
        )

    # Moves

    def _mover(self, device: torch.device) -> Mover:
        if device not in self._movers:
            if device.type == "cpu":
                self._movers[device] = PlainMover()
            else:
                if self._pool is None:
                    self._pool = PinnedPool(int(self._tiers[HOST].budget_bytes) if HOST in self._tiers else 0)
                self._movers[device] = AcceleratorMover(device, self._pool)
        return self._movers[device]

    def _move_down(self, unit: Unit, tier: str) -> None:
        """Move a unit to a lower tier that has room for it; if that fails, it stays where it is."""
        start = time.perf_counter()
        if tier == HOST:
            assert unit.parts is not None
            host = self._mover(unit.device).to_host(unit.parts)
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
        if unit.host is not None:
            unit.host.release()
        self._cancel_fetch(unit)
        # A copy on its way reads the source until it is done; a change of the source in that time would change both.
        unit.depends_on_source = unit.depends_on_source and file is None and unit.device.type != "cpu"
        unit.parts, unit.host, unit.file, unit.tier, unit.nbytes = None, host, file, tier, nbytes
        if host is not None:
            insort(self._on_host, unit, key=_put_at)
        elif unit in self._on_host:
            self._on_host.remove(unit)
        if unit.is_counted:
            self._enter(unit)
        self._moved_down_bytes += nbytes

    def _read_on_host(self, unit: Unit) -> Parts:
        if unit.host is not None:
            return unit.host.on_host()
        assert unit.parts is not None
        return tuple(part.cpu() for part in unit.parts)

    def _settle(self) -> None:
        """Let go of what copies out have read."""
        for mover in self._movers.values():
            mover.settle(self._in_flight_limit())

    def _in_flight_limit(self) -> float:
        """Bytes that copies may hold on the device: their own allowance, and what the device tier does not use."""
        device = self._tiers.get(DEVICE)
        return self._in_flight_bytes + (0 if device is None else device.budget_bytes - device.used_bytes)

    def _fetch(self, unit: Unit) -> None:
        start = time.perf_counter()
        if unit.host is not None:
            unit.fetched = unit.host.fetch()
        else:
            assert unit.file is not None and self._spill_folder is not None
            parts = self._spill_folder.read(unit.file)
            unit.fetched = PlainMover.here(tuple(part.to(unit.device) for part in parts))
        self._waited_s += time.perf_counter() - start
        unit.num_served = 0
        self._arriving.append(unit)
        self._moved_up_bytes += unit.nbytes

    def _arriving_bytes(self) -> int:
        return sum(unit.nbytes for unit in self._arriving)

    def _fetch_ahead(self, unit: Unit) -> None:
        """Start bringing back the units put before `unit`, latest first: the order in which a backward asks.

        Where it asks otherwise, what was fetched in vain gives way to what it asked for.
        """
        if unit.device.type == "cpu":
            return
        for index in range(bisect_left(self._on_host, unit.put_at, key=_put_at) - 1, -1, -1):
            if self._arriving_bytes() >= self._in_flight_limit():
                return
            earlier = self._on_host[index]
            if earlier.fetched is None and not earlier.num_served:
                self._fetch(earlier)

    def _cancel_fetch(self, unit: Unit) -> None:
        if unit in self._arriving:
            self._arriving.remove(unit)
        unit.fetched = None

    def _drop(self, unit: Unit) -> None:
        self._cancel_fetch(unit)
        self._leave(unit)
        if unit.host is not None:
            unit.host.release()
        if unit.file is not None and self._spill_folder is not None:
            self._spill_folder.remove(unit.file)
        if unit in self._on_host:
            self._on_host.remove(unit)
        self._settle()
        unit.parts = unit.host = unit.file = None
        if self._units.get(unit.source) is unit:
            del self._units[unit.source]
        if not self._units and DEVICE in self._tiers:
            self._overflow_bytes = max(0, self._round_bytes - self._tiers[DEVICE].budget_bytes)
            self._round_bytes = 0


def _put_at(unit: Unit) -> int:
    return unit.put_at
