"""Rules set by hand: which of `n` layers keep their activations, and which are recomputed.

A policy is frozen data. `decide(n)` answers for every layer, True for recomputed; `should_checkpoint(i)` answers for
one, with `n` where the rule depends on the number of layers. All print as they are written and go through JSON.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from lowtide.units import parse_bytes


@dataclass(frozen=True)
class Policy(ABC):
    """A rule. Subclasses say what they keep."""

    def decide(self, n: int, costs: Sequence[float] | None = None, bytes: Sequence[int] | None = None) -> list[bool]:
        """For each of `n` layers, whether its activations are recomputed.

        `costs` are what recomputing each layer takes, `bytes` what keeping it takes; rules that need them say so.
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise ValueError(f"n is a number of layers, 0 or more, not {n!r}")
        for name, values in (("costs", costs), ("bytes", bytes)):
            if values is not None and len(values) != n:
                raise ValueError(f"{name} has {len(values)} values for {n} layers")
            for layer, value in enumerate(values if values is not None else ()):
                if not value >= 0:  # also for a NaN
                    raise ValueError(f"{name} are numbers, 0 or more; layer {layer} has {value!r}")
        kept = self._kept(n, costs, bytes)
        return [layer not in kept for layer in range(n)]

    def regions(
        self, n: int, costs: Sequence[float] | None = None, bytes: Sequence[int] | None = None
    ) -> list[Segment]:
        """The runs of layers that `apply` recomputes, each from its input, the outer ones before those inside them.

        Rules that speak of single layers recompute each on its own.
        """
        return [Segment(layer, layer) for layer, recomputed in enumerate(self.decide(n, costs, bytes)) if recomputed]

    def should_checkpoint(self, i: int, n: int | None = None) -> bool:
        """Whether layer `i` of `n` is recomputed: `decide(n)[i]`. Rules that go by `i` alone need no `n`."""
        if n is None:
            raise TypeError(f"{self} needs to know how many layers there are: should_checkpoint({i}, n), or decide(n)")
        _check_layer(i, n)
        return self.decide(n)[i]

    @abstractmethod
    def _kept(self, n: int, costs: Sequence[float] | None, bytes: Sequence[int] | None) -> set[int] | range: ...

    def to_json(self) -> str:
        """The policy as text; `Policy.from_json` reads it."""
        return json.dumps({"policy": type(self).__name__, **self._to_fields()})

    @staticmethod
    def from_json(text: str) -> Policy:
        """The policy that `to_json` wrote."""
        try:
            content = json.loads(text)
            kind = _POLICIES[content.pop("policy")]
            return kind._from_fields(content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a policy: {text[:200]!r} ({error}); known are {', '.join(_POLICIES)}") from error

    def _to_fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def _from_fields(cls, content: dict[str, Any]) -> Policy:
        return cls(**content)


@dataclass(frozen=True)
class KeepAll(Policy):
    """Everything is kept: no recomputation, the most memory."""

    def should_checkpoint(self, i: int, n: int | None = None) -> bool:
        _check_layer(i, n)
        return False

    def _kept(self, n: int, costs: Any, bytes: Any) -> range:
        return range(n)


@dataclass(frozen=True)
class RecomputeAll(Policy):
    """Everything is recomputed: the least memory, one more forward."""

    def should_checkpoint(self, i: int, n: int | None = None) -> bool:
        _check_layer(i, n)
        return True

    def _kept(self, n: int, costs: Any, bytes: Any) -> set[int]:
        return set()


@dataclass(frozen=True)
class EveryN(Policy):
    """Layers 0, n, 2n ... are kept; `EveryN(0)` keeps none."""

    n: int

    def __post_init__(self) -> None:
        _check_count("EveryN", self.n)

    def should_checkpoint(self, i: int, n: int | None = None) -> bool:
        _check_layer(i, n)
        return self.n == 0 or i % self.n != 0

    def _kept(self, n: int, costs: Any, bytes: Any) -> range | set[int]:
        return range(0, n, self.n) if self.n else set()


@dataclass(frozen=True)
class Selective(Policy):
    """Layers that cost at least `cost_threshold` to recompute are kept."""

    cost_threshold: float = 100

    def __post_init__(self) -> None:
        if isinstance(self.cost_threshold, bool) or not isinstance(self.cost_threshold, int | float):
            raise ValueError(f"Selective takes a number, the least cost of layers to keep, not {self.cost_threshold!r}")

    def _kept(self, n: int, costs: Sequence[float] | None, bytes: Any) -> set[int]:
        costs = _needed(self, "costs", costs, n)
        return {layer for layer in range(n) if costs[layer] >= self.cost_threshold}


@dataclass(frozen=True)
class Segment:
    """Layers `start` to `end`, both inside."""

    start: int
    end: int

    def __post_init__(self) -> None:
        _check_count("Segment", self.start)
        _check_count("Segment", self.end)
        if self.end < self.start:
            raise ValueError(f"a segment goes from a start of 0 or more up, not from {self.start} to {self.end}")

    def __contains__(self, layer: int) -> bool:
        return self.start <= layer <= self.end


@dataclass(frozen=True)
class Segments(Policy):
    """Layers inside any of the segments are recomputed, the others kept."""

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "segments", tuple(self.segments))
        except TypeError:
            raise TypeError(f"Segments takes a list of Segment(start, end), not {self.segments!r}") from None
        for segment in self.segments:
            if not isinstance(segment, Segment):
                raise TypeError(f"Segments takes a list of Segment(start, end); {segment!r} is none")
        ordered = sorted(self.segments, key=lambda segment: segment.start)
        for before, after in pairwise(ordered):
            if after.start <= before.end:
                raise ValueError(f"{before} and {after} overlap: each layer belongs to one segment at most")

    def should_checkpoint(self, i: int, n: int | None = None) -> bool:
        _check_layer(i, n)
        return any(i in segment for segment in self.segments)

    def regions(self, n: int, costs: Any = None, bytes: Any = None) -> list[Segment]:
        return [Segment(segment.start, min(segment.end, n - 1)) for segment in self.segments if segment.start < n]

    def _kept(self, n: int, costs: Any, bytes: Any) -> set[int]:
        return {layer for layer in range(n) if not self.should_checkpoint(layer)}

    def _to_fields(self) -> dict[str, Any]:
        return {"segments": [[segment.start, segment.end] for segment in self.segments]}

    @classmethod
    def _from_fields(cls, content: dict[str, Any]) -> Policy:
        return cls(tuple(Segment(*pair) for pair in content["segments"]))


@dataclass(frozen=True)
class Uniform(Policy):
    """All layers in `num_segments` equal segments, the last with the remainder, recomputed segment by segment.

    The last layer of a segment is kept, since its output is what the next segment is recomputed from; the output of the
    last segment is not needed. Without layers or segments, or with more segments than layers, nothing is recomputed.

    >>> import lowtide
    >>> lowtide.Uniform(2).decide(6), lowtide.Uniform(2).should_checkpoint(2, 6)
    ([True, True, False, True, True, True], False)
    """

    num_segments: int

    def __post_init__(self) -> None:
        _check_count("Uniform", self.num_segments)

    def segments(self, n: int) -> list[Segment]:
        """The segments of `n` layers."""
        if not 0 < self.num_segments <= n:
            return []
        length = n // self.num_segments
        starts = [index * length for index in range(self.num_segments)]
        return [Segment(start, n - 1 if start == starts[-1] else start + length - 1) for start in starts]

    def regions(self, n: int, costs: Any = None, bytes: Any = None) -> list[Segment]:
        return self.segments(n)

    def _kept(self, n: int, costs: Any, bytes: Any) -> set[int] | range:
        segments = self.segments(n)
        return {segment.end for segment in segments[:-1]} if segments else range(n)


@dataclass(frozen=True)
class SqrtN(Policy):
    """Every k-th layer is kept, k the square root of their number: O(sqrt n) memory (Chen et al. 2016).

    Under `apply`, each run of k layers is recomputed from its input.
    """

    def regions(self, n: int, costs: Any = None, bytes: Any = None) -> list[Segment]:
        length = math.isqrt(n - 1) + 1 if n else 1
        return [Segment(start, min(start + length, n) - 1) for start in range(0, n, length)]

    def _kept(self, n: int, costs: Any, bytes: Any) -> range | set[int]:
        return range(0, n, math.isqrt(n - 1) + 1) if n else set()


@dataclass(frozen=True)
class Revolve(Policy):
    """Binomial checkpointing of a chain with `slots` states, its input among them (Griewank and Walther 2000).

    The fewest runs of layers with that memory: `num_forwards(n)` of them. `decide` tells which outputs are kept after
    the forward; `ActivationCheckpointer` carries out the whole schedule, and `apply` does by segments in segments.
    """

    slots: int

    def __post_init__(self) -> None:
        _check_count("Revolve", self.slots)
        if self.slots < 1:
            raise ValueError(f"Revolve needs at least one slot, for the input; got {self.slots}")

    def num_forwards(self, n: int) -> int:
        """How often a layer is run in all, forward and replays, to go forward and then back through `n` layers.

        The optimum for going back is `r n - C(slots + r, slots + 1)`, with the smallest `r` for which
        `C(slots + r, slots) >= n`; one more run makes the last layer's output.
        """
        if n == 0:
            return 0
        r = 0
        while math.comb(self.slots + r, self.slots) < n:
            r += 1
        return 1 + r * n - (math.comb(self.slots + r, self.slots + 1) if r else 0)

    def next_kept(self, n: int) -> int:
        """How many layers to run from a kept state before keeping the next, with `n` layers ahead and `slots` states.

        A position that costs the optimum, found from the closed form alone; `n` if there is no second slot.
        """
        if self.slots == 1 or n <= 1:
            return n
        best = self.num_forwards(n) - 1
        inner = Revolve(self.slots - 1)
        for position in range(1, n):
            there = position + (inner.num_forwards(n - position) - 1) + (self.num_forwards(position) - 1)
            if there == best:
                return position
        raise AssertionError(f"no optimal split of {n} layers over {self.slots} slots")

    def regions(self, n: int, costs: Any = None, bytes: Any = None) -> list[Segment]:
        return self._split(0, n)

    def _split(self, start: int, end: int) -> list[Segment]:
        """The regions of layers whose input has one of the slots: so many of them side by side as there are slots."""
        if end - start < 1:
            return []
        step = self.next_kept(end - start)
        if step == end - start:
            return self._one(start, end)
        return [*self._one(start, start + step), *Revolve(self.slots - 1)._split(start + step, end)]

    def _one(self, start: int, end: int) -> list[Segment]:
        """One region, and those inside it."""
        return [Segment(start, end - 1), *self._inside(start, end)]

    def _inside(self, start: int, end: int) -> list[Segment]:
        """The regions inside one, of all its layers but the last, whose backward is the next after the replay."""
        if end - start == 1:
            return []
        step = self.next_kept(end - start)
        if step == end - start:  # no second slot
            return self._one(start, end - 1)
        return [*self._one(start, start + step), *Revolve(self.slots - 1)._inside(start + step, end)]

    def _kept(self, n: int, costs: Any, bytes: Any) -> set[int]:
        kept, state, policy = set(), 0, self
        while policy.slots > 1 and (step := policy.next_kept(n - state)) < n - state:
            state += step
            kept.add(state - 1)  # a state is the output of the layer before it
            policy = Revolve(policy.slots - 1)
        return kept


@dataclass(frozen=True)
class MaxBytes(Policy):
    """The layers that cost most to recompute per byte are kept, as many as fit in `budget` (bytes, or `"12GiB"`)."""

    budget: int | str

    def __post_init__(self) -> None:
        parse_bytes(self.budget)

    def _kept(self, n: int, costs: Sequence[float] | None, bytes: Sequence[int] | None) -> set[int]:
        bytes = _needed(self, "bytes", bytes, n)
        costs = costs if costs is not None else [1.0] * n
        left, kept = parse_bytes(self.budget), set()
        for layer in sorted(range(n), key=lambda layer: (-costs[layer] / max(bytes[layer], 1), layer)):
            if bytes[layer] <= left:
                kept.add(layer)
                left -= bytes[layer]
        return kept


_POLICIES: dict[str, type[Policy]] = {
    kind.__name__: kind
    for kind in (KeepAll, RecomputeAll, EveryN, Selective, Segments, Uniform, SqrtN, Revolve, MaxBytes)
}


def plan_recomputation(
    n: int, policy: Policy, costs: Sequence[float] | None = None, bytes: Sequence[int] | None = None
) -> list[bool]:
    """For each of `n` layers, whether `policy` has it recomputed.

    >>> from lowtide.policies import EveryN, plan_recomputation
    >>> plan_recomputation(5, EveryN(2))
    [False, True, False, True, False]
    """
    check_policy(policy)
    return policy.decide(n, costs, bytes)


def check_policy(policy: object) -> None:
    """Raise unless this is a policy."""
    if not isinstance(policy, Policy):
        raise TypeError(f"a policy such as EveryN(4) is needed, not {policy!r}")


def check_limit(max_checkpoints: object) -> None:
    """Raise unless this is a number of layers, or None for no limit."""
    is_count = isinstance(max_checkpoints, int) and not isinstance(max_checkpoints, bool) and max_checkpoints >= 0
    if max_checkpoints is not None and not is_count:
        raise ValueError(f"max_checkpoints is a number of layers, 0 or more, or None, not {max_checkpoints!r}")


def _check_layer(i: int, n: int | None) -> None:
    if n is not None and not 0 <= i < n:
        raise ValueError(f"layer {i} is not one of {n} layers")


def _check_count(name: str, count: object) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ValueError(f"{name} takes a whole number, 0 or more, not {count!r}")


def _needed(policy: Policy, name: str, values: Sequence[Any] | None, n: int) -> Sequence[Any]:
    if values is None and n:
        raise ValueError(f"{policy} decides by {name}: give {name}=[...], a value for each of the {n} layers")
    return values or []
