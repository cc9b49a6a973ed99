"""Outputs of single ops that a recomputed region holds, so that its replay takes them instead of making them again.

A region's forward keeps the outputs of planned ops (`shownops`), its replay returns them when it comes to the same ops
(`replayedops`): autograd's nodes are made as always, and what was not kept, or was written to since, is computed. What
only those ops read need not be computed either: that is `skippedops`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from lowtide.engines import _compat
from lowtide.engines.moves import Keeping
from lowtide.memory.ambient import Ambient
from lowtide.memory.offload import KeptHere, KeptInStore
from lowtide.memory.region import replay_depth
from lowtide.tracing.opfacts import OWN_NAMESPACES, facts_of

Op = tuple[Any, int]  # the op, with the weight that it casts if it does; and how often that was done before
Build = Callable[[list[Any]], Any]
_Fact = TypeVar("_Fact")


class Held:
    """The output of one op, in parts: tensors kept here or elsewhere, and what else there is."""

    __slots__ = ("_build", "_hides", "_parts", "_random")

    def __init__(self, parts: tuple[Any, ...], build: Build, random: Ambient | None, is_elsewhere: bool) -> None:
        self._parts, self._build = parts, build
        self._random = random  # the states after the op, if it draws numbers
        self._hides = _compat.without_modes if random is not None or is_elsewhere else nullcontext  # it takes a while

    @property
    def is_intact(self) -> bool:
        """Whether nothing was written into it since."""
        return all(part.is_intact for part in self._parts if isinstance(part, KeptHere | KeptInStore))

    def take(self, *, marks: bool) -> tuple[Any, list[Any]]:
        """The output, and its parts, marked if asked to be; random numbers go on from where the op left them."""
        with self._hides():
            if self._random is not None:
                self._random.restore()
            kept = KeptHere | KeptInStore
            parts = [part.restore() if isinstance(part, kept) else part for part in self._parts]
            if marks:
                parts = [_compat.marked(part) if isinstance(part, Tensor) else part for part in parts]
            return self._build(parts), parts


def kept(tensor: Tensor, keep: Keeping | None) -> KeptHere | KeptInStore:
    """A tensor that was just made, kept by `keep` if given."""
    with _compat.sharing_versions():
        return KeptHere(tensor) if keep is None else keep(tensor)


def random_states(tensors: Iterable[Tensor], generators: Iterable[torch.Generator]) -> Ambient:
    """The random states after an op that made these tensors, with those of the generators that it was given."""
    return Ambient({tensor.device for tensor in tensors}, generators, preserve_rng_state=True)


def is_foreign(func: Any) -> bool:
    """Whether an op is none of torch's own, and may do more than it says."""
    return getattr(func, "namespace", None) not in OWN_NAMESPACES


def asked_once(find: Callable[[Any], _Fact]) -> Callable[[Any], _Fact]:
    """A fact about ops, found once for each and kept by its id: ops live as long as torch does, and hash slowly."""
    known: dict[int, _Fact] = {}

    @functools.wraps(find)
    def ask(func: Any) -> _Fact:
        fact = known.get(id(func))
        if fact is None:
            known[id(func)] = fact = find(func)
        return fact

    return ask


@asked_once
def is_random(func: Any) -> bool:
    """Whether an op draws numbers, or may do so."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) or is_foreign(func)


@asked_once
def writes(func: Any) -> bool:
    """Whether an op may write to arguments: also a norm to its statistics, which it does not say."""
    return _compat.writes(func) or writes_statistics(func)


def writes_statistics(func: Any) -> bool:
    return _compat.is_op_with_schema(func) and bool(facts_of(func).written_in_training)


class Counting(_compat.DispatchMode):
    """Knows the ops of a region again in its replay. It sees each of them, so what it does for each is little.

    Not by position: a weight that autocast had cast before the forward came here is cast once more in the replay. Nor
    by what replays run that begin inside, for a backward in the middle of a forward.
    """

    num_replays_in = 0  # to be in the region: none for its forward, one for its replay

    def __init__(self) -> None:
        super().__init__()
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


def computes_nothing(func: Any) -> bool:
    return id(func) in _BOOKKEEPING
