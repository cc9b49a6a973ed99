"""`ActivationStore`: holds tensors by key between forward and backward, in device, host and disk tiers.

Each tier has a budget in bytes, which counts the memory really held: `device` (tensors as they are, or encoded), `host`
(pinned memory if there is an accelerator) and `disk` (files). New values go to the first tier. When a tier is full, the
least valuable ones are moved down or dropped, or the new one is refused (`on_full`). `lowtide.offload`, the plans'
moves and `checkpoint(store=...)` put values here; this file has keys, entries and the public operations, and
`store.tiers` the placement and the copies.

One lock guards all state. Copies are only started under it, and run asynchronously. The garbage collector may release a
value at any point, also while this thread holds the lock: `release_later` only queues the key, and the next operation
frees it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from lowtide import _compat
from lowtide.errors import ChangedInPlaceError, StoreError
from lowtide.store import transfer
from lowtide.store.codecs import Codec, find_codec
from lowtide.store.disk import free_disk_bytes
from lowtide.store.storage_units import DEVICE, DISK, HOST, Entry, EntryStats, StoreStats, Unit, is_left_alone
from lowtide.store.tiers import StorageTiers
from lowtide.units import parse_bytes


@dataclass(frozen=True)
class Missing:
    """Returned by `get` for a value that was evicted: its key, shape, dtype and size. False as a bool."""

    key: Hashable
    shape: torch.Size
    dtype: torch.dtype
    nbytes: int

    def __bool__(self) -> bool:
        return False


@dataclass(frozen=True)
class Handle:
    """Refers to one value in a store."""

    store: ActivationStore
    key: Hashable

    def get(self) -> Tensor | Missing:
        return self.store.get(self.key)

    def take(self) -> Tensor | Missing:
        return self.store.take(self.key)


class ActivationStore:
    """Holds tensors by key, in up to three tiers, each within its budget.

    - `device`, `host`, `disk`: budgets, in bytes or as `"8GiB"`; `host` and `disk` also as `"50%"` of what there is.
      A tier without a budget is not used; with none at all, the device holds everything, without limit.
    - `on_full`: `"spill"` moves values down a tier until there is room, `"evict"` drops them (`get` then returns a
      `Missing`), `"error"` raises `CapacityError`.
    - `order`: which value leaves first. `"oldest"`: the one put longest ago. `"cost"`: the smallest
      `cost / (bytes x operations since last use)`. `"auto"`: `"cost"` once a value came with a cost, else `"oldest"`.
    - `codec`: how values are encoded, unless `put` is given another (see `docs/store.md`).
    - `folder`: the parent of the disk tier's folder; by default the system's temporary folder.
    - `in_flight`: bytes of device memory that unfinished copies may hold, in each direction. None: the bytes of the
      largest value so far for copies out, and twice that for copies in.

    A storage is held once, however many views of it are put. Values come back without gradient history. Parameters,
    sparse, quantized, empty and subclass tensors are not stored: `get` returns the same tensor, and no bytes are
    counted. Do not change a tensor in place after putting it: in the device tier it is the stored value itself, and
    `get` raises `ChangedInPlaceError`.

    >>> import torch, lowtide
    >>> with lowtide.ActivationStore(device="1MiB", host="4MiB") as store:
    ...     handle = store.put("h", torch.arange(6.0))
    ...     store.take("h").sum().item(), len(store)
    (15.0, 0)
    """

    def __init__(
        self,
        *,
        device: int | str | None = None,
        host: int | str | None = None,
        disk: int | str | None = None,
        on_full: str = "spill",
        order: str = "auto",
        codec: str | None = None,
        folder: str | os.PathLike[str] | None = None,
        in_flight: int | str | None = "256MiB",
    ) -> None:
        _check_choice("on_full", on_full, ("spill", "evict", "error"))
        _check_choice("order", order, ("auto", "oldest", "cost"))
        budgets: dict[str, float] = {}
        if device is not None:
            budgets[DEVICE] = parse_bytes(device)
        if host is not None:
            budgets[HOST] = parse_bytes(host, total_bytes=transfer.host_bytes())
        if disk is not None:
            budgets[DISK] = parse_bytes(disk, total_bytes=free_disk_bytes(folder))
        if not budgets:
            budgets[DEVICE] = float("inf")
        if not any(budgets.values()):
            raise ValueError("every tier has a budget of 0 bytes: set device=, host= or disk= to more")
        self.on_full = on_full
        options = {"device": device, "host": host, "disk": disk, "on_full": on_full, "order": order, "codec": codec}
        defaults = {"on_full": "spill", "order": "auto"}
        self._options = {name: value for name, value in options.items() if value != defaults.get(name)}
        self._codec = find_codec(codec)
        self._tiers = StorageTiers(
            {tier: budget for tier, budget in budgets.items() if budget},
            on_full=on_full,
            order=order,
            folder=folder,
            in_flight_bytes=None if in_flight is None else parse_bytes(in_flight),
            evicted=weakref.WeakMethod(self._evicted),  # a bound method would be a reference cycle
        )
        self._entries: dict[Hashable, Entry] = {}
        self._missing: dict[Hashable, Missing] = {}
        self._num_created = self._num_evicted = self._compressed_bytes = self._compressed_to_bytes = 0
        self._is_closed = False
        self._lock = threading.Lock()
        self._released: deque[Hashable] = deque()

    # Public operations

    def put(
        self,
        key: Hashable,
        tensor: Tensor,
        *,
        cost: float | None = None,
        codec: str | EllipsisType | None = ...,
        evictable: bool = True,
    ) -> Handle:
        """Store `tensor` under `key`, replacing a value there. `cost` is what recomputing it would take, in any unit.

        `codec` defaults to the store's; None stores the value as it is. With `evictable=False` the value is never
        dropped (`on_full="evict"`); it may be moved to a lower tier.

        Raises `CapacityError` if no tier has room; the store is then unchanged.
        """
        if not isinstance(tensor, Tensor):
            raise TypeError(f"a store holds tensors, not {type(tensor).__name__}")
        chosen = self._codec if isinstance(codec, EllipsisType) else find_codec(codec)
        if cost is not None and not (isinstance(cost, int | float) and cost >= 0):
            raise ValueError(f"cost is a number, 0 or more, not {cost!r}")
        with self._locked():
            old = self._entries.get(key)
            unit = old.unit if old is not None and old.unit is not None and old.unit.num_entries == 1 else None
            with self._tiers.replacing(unit):
                entry = self._new_entry(key, tensor, cost, chosen)
            if not evictable and entry.unit is not None:
                entry.is_evictable = False
                entry.unit.num_unevictable += 1
            if unit is not None and unit.num_entries == 0:
                del self._entries[key]  # it was dropped to make room for the new one
            self._forget(key)
            self._add(entry)
        return Handle(self, key)

    def put_saved(
        self, key: Hashable, tensor: Tensor, watch: _compat.VersionWatch, codec: str | EllipsisType | None = ...
    ) -> None:
        """`put` under a new key, for tensors that autograd saves in a repeated step.

        Values that had to leave the device in the last step are moved at once. `tensor` must be storable
        (`is_left_alone` is False).
        """
        chosen = self._codec if isinstance(codec, EllipsisType) else find_codec(codec)
        with self._locked():
            self._add(self._stored(key, tensor, None, chosen, watch, ahead=True))

    def allow_in_flight(self, num_bytes: int) -> None:
        """Set the bytes of device memory that unfinished copies may hold, in each direction."""
        with self._locked():
            self._tiers.in_flight_bytes = num_bytes

    def end_of_forward(self) -> int:
        """Call after a forward: frees the sources of copies out. Returns the time to pass to `fetch_before`."""
        with self._locked():
            return self._tiers.end_of_forward()

    def fetch_before(self, put_before: int) -> None:
        """Call when a backward begins: starts fetching values put before that time, the latest first."""
        with self._locked():
            self._tiers.fetch_before(put_before)

    def get(self, key: Hashable) -> Tensor | Missing:
        """The value under `key`, on its device; a `Missing` if it was evicted. Raises `KeyError` for an unknown key."""
        with self._locked():
            return self._get(key)

    def take(self, key: Hashable) -> Tensor | Missing:
        """`get`, then remove it from the store. A second `take` raises `KeyError`."""
        with self._locked():
            value = self._get(key)
            self._forget(key)
            return value

    def has(self, key: Hashable) -> bool:
        """Whether `get` would return a tensor."""
        with self._locked():
            return key in self._entries

    def remove(self, key: Hashable) -> None:
        """Free the value under `key`. Raises `KeyError` if there is none."""
        with self._locked():
            if key not in self._entries and key not in self._missing:
                raise KeyError(self._unknown(key))
            self._forget(key)

    def clear(self) -> None:
        """Free all values, and forget evicted ones. Counters in the statistics are kept."""
        with self._locked():
            self._forget_all()

    def close(self) -> None:
        """Free all values and remove the spill folder. Later operations raise `StoreError`."""
        with self._lock:
            if not self._is_closed:
                self._drain()
                self._forget_all()
                self._is_closed = True
                self._tiers.close()

    def __len__(self) -> int:
        with self._locked():
            return len(self._entries)

    def __iter__(self) -> Iterator[Hashable]:
        """Keys, the oldest first."""
        with self._locked():
            return iter(list(self._entries))

    def __contains__(self, key: Hashable) -> bool:
        return self.has(key)

    def __repr__(self) -> str:
        return f"ActivationStore({', '.join(f'{name}={value!r}' for name, value in self._options.items())})"

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} cannot be copied or pickled: it holds the activations of a step. Make another with these "
            "options."
        )

    def __enter__(self) -> ActivationStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def num_evicted(self) -> int:
        """Values dropped so far to make room; also in `stats()`."""
        return self._num_evicted

    def stats(self) -> StoreStats:
        """The values held in each tier, and counters since the store was made. Totals are the sums of the rows."""
        with self._locked():
            rows, seen = [], set()
            now = self._tiers.clock
            for entry in self._entries.values():
                unit = entry.unit
                counted = unit is not None and id(unit) not in seen  # a storage counts with its first view
                seen.add(id(unit))
                rows.append(
                    EntryStats(
                        key=entry.key,
                        nbytes=unit.nbytes if unit is not None and counted else 0,
                        age=now - entry.put_at,
                        cost=entry.cost,
                        tier=DEVICE if unit is None else unit.tier,
                    )
                )
            return self._tiers.stats(
                tuple(rows),
                num_created=self._num_created,
                num_evicted=self._num_evicted,
                compressed_bytes=self._compressed_bytes,
                compressed_to_bytes=self._compressed_to_bytes,
            )

    def release_later(self, key: Hashable) -> None:
        """Free `key`, now or in the next operation. Safe in a destructor, which may run while the lock is held."""
        self._released.append(key)
        if self._lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._lock.release()

    # Private; the lock is held

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # Not a class with `__enter__`, although that is faster: Ctrl-C between two of its lines would leave the lock
        # held. Inference mode is left, as tensors made in it cannot be saved for a backward.
        outside = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
        with self._lock, outside:
            if self._is_closed:
                raise StoreError("this store is closed")
            self._drain()
            yield
            self._drain()

    def _drain(self) -> None:
        while self._released:
            self._forget(self._released.popleft())

    def _new_entry(self, key: Hashable, tensor: Tensor, cost: float | None, codec: Codec | None) -> Entry:
        watch = _compat.VersionWatch(tensor)
        if is_left_alone(tensor):
            held = tensor if tensor.grad_fn is None else tensor.detach()
            return Entry(key, None, held, watch, cost, self._tiers.tick())
        return self._stored(key, tensor, cost, codec, watch, ahead=False)

    def _stored(
        self,
        key: Hashable,
        tensor: Tensor,
        cost: float | None,
        codec: Codec | None,
        watch: _compat.VersionWatch,
        *,
        ahead: bool,
    ) -> Entry:
        unit, start = self._tiers.put(tensor, codec, cost, watch, ahead=ahead)
        if unit.encoded is not None and unit.num_entries == 1:
            self._compressed_bytes += unit.source.numel * tensor.element_size()
            self._compressed_to_bytes += unit.stored_bytes
        offset = int(tensor.storage_offset()) - start
        return Entry(key, unit, None, watch, cost, self._tiers.tick(), tensor.shape, tensor.stride(), offset)

    def _add(self, entry: Entry) -> None:
        self._entries[entry.key] = entry
        self._num_created += 1

    def _get(self, key: Hashable) -> Tensor | Missing:
        entry = self._entries.get(key)
        if entry is None:
            if key in self._missing:
                return self._missing[key]
            raise KeyError(self._unknown(key))
        unit = entry.unit
        if unit is not None and (unit.is_lost or (unit.depends_on_source and entry.watch.has_changed())):
            raise ChangedInPlaceError(
                f"the value under {key!r} was changed in place after it was put, so what was put is gone. "
                "Put a clone, or change it after taking it."
            )
        if unit is None:
            assert entry.left_alone is not None
            return entry.left_alone
        return entry.view_of(self._tiers.get(unit))

    def _forget(self, key: Hashable) -> None:
        self._missing.pop(key, None)
        entry = self._entries.pop(key, None)
        if entry is not None and entry.unit is not None:
            self._tiers.release(entry.unit, evictable=entry.is_evictable)

    def _forget_all(self) -> None:
        for key in [*self._entries, *self._missing]:
            self._forget(key)

    def _evicted(self, unit: Unit) -> None:
        for entry in [entry for entry in self._entries.values() if entry.unit is unit]:
            del self._entries[entry.key]
            self._missing[entry.key] = Missing(entry.key, entry.shape, unit.dtype, unit.nbytes)
            self._num_evicted += 1

    def _unknown(self, key: Hashable) -> str:
        held = ", ".join(repr(k) for k in list(self._entries)[:8])
        if not held:
            return f"nothing is stored under {key!r}; the store is empty"
        return f"nothing is stored under {key!r}; there is {held}{' ...' * (len(self._entries) > 8)}"


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} should be one of {list(choices)}, but got {value!r}")


def check_store(store: object) -> None:
    """Raise unless `store` is None or an `ActivationStore`."""
    if store is not None and not isinstance(store, ActivationStore):
        raise TypeError(f"store should be an ActivationStore, not {type(store).__name__}")
