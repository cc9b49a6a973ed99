"""Outputs of single ops that a recomputed region holds, so that its replay takes them instead of making them again.

Two dispatch modes, one around the region's forward and one around its replay, see every op below autograd. The first
keeps the outputs of the planned ops, the second returns them when it comes to the same ops: autograd's nodes are made
as always, and what was not kept, or was written to since, is computed. What only those ops read need not be computed
either: that is `skippedops`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lowtide.engines import _compat
from lowtide.engines.moves import Keeping
from lowtide.memory.ambient import Ambient
from lowtide.memory.offload import KeptHere, KeptInStore
from lowtide.memory.region import replay_depth
from lowtide.tracing.opfacts import facts_of

Op = tuple[Any, int]  # the op, with the weight that it casts if it does; and how often that was done before


class Held:
    """The output of one op, its first tensor kept by `keep` if given, and the random states after it."""

    def __init__(self, op: Any, output: Any, kwargs: dict[str, Any], keep: Keeping | None) -> None:
        parts, self._build = _compat.taken_apart(output)
        tensors = [part for part in parts if isinstance(part, Tensor)]
        self._storages = [storage for tensor in tensors for storage in _compat.storage_references(tensor)]
        self._random = None
        is_random = torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())
        self._hides = _compat.without_modes if is_random or keep is not None else nullcontext  # it takes a while
        with self._hides():
            if is_random:
                generators = [value for value in kwargs.values() if isinstance(value, torch.Generator)]
                self._random = Ambient({tensor.device for tensor in tensors}, generators, preserve_rng_state=True)
            with _compat.sharing_versions():
                self._parts = [self._kept(part, keep, tensors) for part in parts]

    @staticmethod
    def _kept(part: Any, keep: Keeping | None, tensors: list[Tensor]) -> Any:
        if not isinstance(part, Tensor):
            return part
        return KeptHere(part) if keep is None or part is not tensors[0] else keep(part)

    @property
    def is_intact(self) -> bool:
        """Whether nothing was written into it since."""
        return all(part.is_intact for part in self._parts if isinstance(part, KeptHere | KeptInStore))

    def is_in(self, storages: set[int]) -> bool:
        """Whether a part of it was put into one of these storages."""
        return any(storage.id in storages for storage in self._storages)

    def take(self) -> Any:
        """The output; random numbers go on from where the op left them."""
        with self._hides():
            if self._random is not None:
                self._random.restore()
            kept = KeptHere | KeptInStore
            return self._build([part.restore() if isinstance(part, kept) else part for part in self._parts])


class Counting(_compat.DispatchMode):
    """Knows the ops of a region again in its replay. It sees each of them, so what it does for each is little.

    Not by position: a weight that autocast had cast before the forward came here is cast once more in the replay. Nor
    by what replays run that begin inside, for a backward in the middle of a forward.
    """

    num_replays_in = 0  # to be in the region: none for its forward, one for its replay

    def __init__(self, held: dict[Op, Held]) -> None:
        super().__init__()
        self._held = held
        self._seen: dict[Any, int] = {}
        self._num_seen = 0
        self._depth = 0

    def __enter__(self) -> Any:
        self._depth = replay_depth() + self.num_replays_in
        self._seen.clear()
        self._num_seen = 0
        return super().__enter__()

    def _counted(self, func: Any, args: Any) -> Op | None:
        """The op that is about to run, as its replay knows it; None for one that computes nothing, or for others."""
        kind: Any = id(func)  # an op lives as long as torch does, and takes long to hash
        if kind in _BOOKKEEPING or replay_depth() != self._depth:
            return None
        if _compat.is_cast_of_weight(func, args):
            kind = kind, id(args[0])
        self._num_seen += 1
        self._seen[kind] = count = self._seen.get(kind, 0) + 1
        return kind, count


_BOOKKEEPING = frozenset(map(id, _compat.BOOKKEEPING_OPS))


class Hold(Counting):
    """Keeps the outputs of the ops at some positions; `elsewhere` says where, for those that do not stay."""

    def __init__(self, held: dict[Op, Held], positions: frozenset[int], elsewhere: dict[int, Keeping]) -> None:
        super().__init__(held)
        self._positions = positions
        self._elsewhere = elsewhere

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op, position = self._counted(func, args), self._num_seen - 1
        output = func(*args, **kwargs) if kwargs else func(*args)
        if _compat.writes(func):
            self._forget(func, args, kwargs)
        elif position in self._positions and op is not None and not _compat.gives_views(func):
            self._hold(op, position, func, output, kwargs)
        return output

    def _hold(self, op: Op, position: int, func: Any, output: Any, kwargs: Any) -> None:
        self._held[op] = Held(func, output, kwargs or {}, self._elsewhere.get(position))

    def _forget(self, func: Any, args: Any, kwargs: Any) -> None:
        """Let go of what was written to. Not all writes show in versions: those through `.data`, or to new tensors."""
        written = facts_of(func).written_tensors(args, kwargs or {})
        storages = {storage for tensor in written for storage in _compat.storages_of(tensor)}
        for op in [op for op, held in self._held.items() if held.is_in(storages)]:
            del self._held[op]


class Reuse(Counting):
    """Takes each output once. What is not there, in a second backward say, is computed."""

    num_replays_in = 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op = self._counted(func, args)
        held = None if op is None else self._held.pop(op, None)
        if held is not None and held.is_intact:
            return held.take()
        return func(*args, **kwargs) if kwargs else func(*args)
