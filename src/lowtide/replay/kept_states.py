"""The kept activations of a layer loop, in an `ActivationStore` that may evict some of them and may be shared.

A state is the output of a layer, a tensor or a numpy array, under its position in the loop. What the store has evicted
is noted when it is missed. Whatever is left when this object goes is released from the store.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtide.memory.store import ActivationStore, Missing

State = Any  # a tensor or a numpy array
INPUT = -1  # the position before the first layer

_numbers = itertools.count(1)


class _Kept(NamedTuple):
    nbytes: int  # as given, before any codec
    cost: float | None
    is_array: bool


class KeptStates:
    """States by position (or by another key), in a store. The input is never evicted, and is not counted."""

    hidden_from_replay = True

    def __init__(self, store: ActivationStore) -> None:
        self.store = store
        self._name = f"checkpointer {next(_numbers)}"
        self._kept: dict[Hashable, _Kept] = {}
        self._evicted: set[Hashable] = set()
        self._by_worth: list[tuple[float, int, Hashable]] = []  # the least worth keeping first
        self._age = 0
        self.num_created = self.num_evicted = self.evicted_bytes = 0

    def __contains__(self, key: Hashable) -> bool:
        """Whether it is kept; it may have been evicted since it was last looked for."""
        return key in self._kept

    def __iter__(self) -> Iterator[Hashable]:
        """What is kept, the input left out."""
        return (key for key in list(self._kept) if key != INPUT)

    def __len__(self) -> int:
        return len(self._kept) - (INPUT in self._kept)

    def put(self, key: Hashable, value: State, cost: float | None = None) -> None:
        is_array = isinstance(value, np.ndarray)
        # An array counts no changes, so the store gets a copy of its own.
        tensor = torch.from_numpy(np.array(value, order="C")) if is_array else value
        self.store.put(self._key(key), tensor, cost=cost, evictable=key != INPUT)
        self.num_created += key != INPUT and key not in self._kept
        self._kept[key] = _Kept(tensor.nbytes, cost, is_array)
        self._evicted.discard(key)

    def get(self, key: Hashable) -> State | None:
        """The state as it was put; None if it was not, or was evicted."""
        kept = self._kept.get(key)
        if kept is None:
            return None
        value = self.store.get(self._key(key)) if self.store.has(self._key(key)) else None
        if value is None or isinstance(value, Missing):
            self._note_evicted(key)
            return None
        return value.numpy().copy() if kept.is_array else value

    def drop(self, key: Hashable) -> None:
        """Let go of a state, if it is here."""
        if self._kept.pop(key, None) is not None:
            self.store.release_later(self._key(key))

    def was_evicted(self, key: Hashable) -> bool:
        return key in self._evicted

    def make_room(self, budget_bytes: int, key: Hashable, nbytes: int, cost: float | None) -> int | None:
        """Drop states that are worth less per byte than this one, until it fits too; of equals the earlier one stays.

        The bytes dropped, or None if this one is worth the least.
        """
        self._age += 1
        heapq.heappush(self._by_worth, ((1.0 if cost is None else cost) / max(nbytes, 1), -self._age, key))
        needed = nbytes - budget_bytes + sum(self._kept[each].nbytes for each in self if each != key)
        dropped_bytes = 0
        while needed > dropped_bytes:
            least = heapq.heappop(self._by_worth)[2]
            if least == key:
                self.drop(key)
                return None
            if least in self._kept:
                dropped_bytes += self._kept[least].nbytes
                self.drop(least)
        return dropped_bytes

    def clear(self) -> None:
        """Let go of everything, and count from zero."""
        for key in list(self._kept):
            self.drop(key)
        self._evicted.clear()
        self._by_worth.clear()
        self.num_created = self.num_evicted = self.evicted_bytes = 0

    def look(self) -> None:
        """Note what was evicted."""
        for key in list(self._kept):
            if not self.store.has(self._key(key)):
                self._note_evicted(key)

    def held_bytes_by_tier(self) -> dict[str, int]:
        """What the states take as they are written, the input left out."""
        stats = self.store.stats()
        keys = {self._key(key) for key in self}
        held = Counter(dict.fromkeys(stats.held_bytes_by_tier, 0))
        for entry in stats.entries:
            if entry.key in keys:
                held[entry.tier] += entry.nbytes
        return dict(held)

    def copied(self, store: ActivationStore, *, deep: bool) -> KeptStates:
        """The same states under keys of their own."""
        new = KeptStates(store)
        for key, kept in list(self._kept.items()):
            value = self.get(key)
            if value is not None:
                new.put(key, value.clone() if deep and isinstance(value, Tensor) else value, kept.cost)
        new._evicted, new._by_worth, new._age = set(self._evicted), list(self._by_worth), self._age
        new.num_created, new.num_evicted = self.num_created, self.num_evicted
        new.evicted_bytes = self.evicted_bytes
        return new

    def _note_evicted(self, key: Hashable) -> None:
        self.num_evicted += 1
        self.evicted_bytes += self._kept[key].nbytes
        self.drop(key)
        self._evicted.add(key)

    def _key(self, key: Hashable) -> Hashable:
        return (self._name, key)

    def __del__(self) -> None:
        for key in self._kept:
            self.store.release_later(self._key(key))
