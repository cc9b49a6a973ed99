"""Policies: fixed rules for which of a model's `n` layers keep their activations and which are recomputed.

`lowtide.apply(model, policy)` carries one out on a model, `ActivationCheckpointer` in a layer loop without autograd. A
policy is frozen data that can be written as JSON. `decide(n)` returns the decision for every layer, True for
recomputed, and `should_checkpoint(i, n)` that for layer `i`. A plan from `lowtide.solve` decides for single
activations instead; nothing here imports torch.
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
    """Base class of policies. Each subclass documents which layers keep their activations."""

    def decide(self, n: int, costs: Sequence[float] | None = None, bytes: Sequence[int] | None = None) -> list[bool]:
        """Return for each of `n` layers whether its activations are recomputed.

        `costs` (in any unit) and `bytes` are the cost of recomputing each layer and the size of its activations, for
        policies that use them: `Selective` and `MaxBytes`.
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
        """Return the runs of layers that `apply` recomputes, each from its own input; outer runs before inner ones.

        By default every recomputed layer is a run by itself.
        """
        return [Segment(layer, layer) for layer, recomputed in enumerate(self.decide(n, costs, bytes)) if recomputed]

    def should_checkpoint(self, i: int, n: int | None = None) -> bool:
        """Return whether layer `i` of `n` is recomputed: `decide(n)[i]`. Some policies do not need `n`."""
        if n is None:
            raise TypeError(f"{self} needs to know how many layers there are: should_checkpoint({i}, n), or decide(n)")
        _check_layer(i, n)
        return self.decide(n)[i]

    @abstractmethod
    def _kept(self, n: int, costs: Sequence[float] | None, bytes: Sequence[int] | None) -> set[int] | range: ...

    def to_json(self) -> str:
        """Return the policy as JSON, which `Policy.from_json` reads."""
        return json.dumps({"policy": type(self).__name__, **self._to_fields()})

    @staticmethod
    def from_json(text: str) -> Policy:
        """Read a policy that `to_json` wrote. Raises `ValueError` if the text is damaged."""
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
class _LayerwisePolicy(Policy):
    """Base class of policies that decide for a layer by its number alone."""

    def should_checkpoint(self, i: int, n: int | None = None) -> bool:
        _check_layer(i, n)
        return not self._keeps(i)

    def _kept(self, n: int, costs: Any, bytes: Any) -> set[int]:
        return {layer for layer in range(n) if self._keeps(layer)}

    @abstractmethod
    def _keeps(self, i: int) -> bool: ...


@dataclass(frozen=True)
class KeepAll(_LayerwisePolicy):
    """Keeps all layers: nothing is recomputed, and memory is highest."""

    def _keeps(self, i: int) -> bool:
        return True


@dataclass(frozen=True)
class RecomputeAll(_LayerwisePolicy):
    """Recomputes every layer by itself: only layer inputs are held, for one more forward."""

    def _keeps(self, i: int) -> bool:
        return False


@dataclass(frozen=True)
class EveryN(_LayerwisePolicy):
    """Keeps layers 0, n, 2n, ... and recomputes the others. `EveryN(0)` keeps none."""

    n: int

    def __post_init__(self) -> None:
        _check_count("EveryN", self.n)

    def _keeps(self, i: int) -> bool:
        return self.n > 0 and i % self.n == 0


@dataclass(frozen=True)
class Selective(Policy):
    """Keeps the layers whose entry in `costs` is at least `cost_threshold`."""

    cost_threshold: float = 100

    def __post_init__(self) -> None:
        is_number = isinstance(self.cost_threshold, int | float) and not isinstance(self.cost_threshold, bool)
        if not is_number or math.isnan(self.cost_threshold):
            raise ValueError(f"Selective takes a number, the least cost of layers to keep, not {self.cost_threshold!r}")

    def _kept(self, n: int, costs: Sequence[float] | None, bytes: Any) -> set[int]:
        costs = _needed(self, "costs", costs, n)
        return {layer for layer in range(n) if costs[layer] >= self.cost_threshold}


@dataclass(frozen=True)
class Segment:
    """Layers `start` to `end`, both included."""

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
class Segments(_LayerwisePolicy):
    """Recomputes each of the segments from its input, and keeps the other layers."""

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

    def _keeps(self, i: int) -> bool:
        return not any(i in segment for segment in self.segments)

    def regions(self, n: int, costs: Any = None, bytes: Any = None) -> list[Segment]:
        return [Segment(segment.start, min(segment.end, n - 1)) for segment in self.segments if segment.start < n]

    def _to_fields(self) -> dict[str, Any]:
        return {"segments": [[segment.start, segment.end] for segment in self.segments]}

    @classmethod
    def _from_fields(cls, content: dict[str, Any]) -> Policy:
        return cls(tuple(Segment(*pair) for pair in content["segments"]))


@dataclass(frozen=True)
class Uniform(Policy):
    """Recomputes all layers in `num_segments` segments of equal length; the last one also has the remainder.

    `decide` marks the last layer of each segment as kept, since the next segment is recomputed from its output; the
    output of the last segment is not needed. With 0 segments, or more segments than layers, nothing is recomputed.

    >>> import lowtide
    >>> lowtide.Uniform(2).decide(6), lowtide.Uniform(2).should_checkpoint(2, 6)
    ([True, True, False, True, True, True], False)
    """

    num_segments: int

    def __post_init__(self) -> None:
        _check_count("Uniform", self.num_segments)

    def segments(self, n: int) -> list[Segment]:
        """Return the segments of `n` layers."""
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
    """Keeps every k-th layer, where k is the square root of `n`: memory grows with sqrt(n) (Chen et al. 2016).

    `apply` recomputes each run of k layers from its input.
    """

    def regions(self, n: int, costs: Any = None, bytes: Any = None) -> list[Segment]:
        length = math.isqrt(n - 1) + 1 if n else 1
        return [Segment(start, min(start + length, n) - 1) for start in range(0, n, length)]

    def _kept(self, n: int, costs: Any, bytes: Any) -> range | set[int]:
        return range(0, n, math.isqrt(n - 1) + 1) if n else set()


@dataclass(frozen=True)
class Revolve(Policy):
    """Binomial checkpointing of a chain (Griewank and Walther 2000): holds at most `slots` states, the input included.

    It runs layers as few times as possible with that memory, `num_forwards(n)` times in total. `decide` returns which
    outputs are kept at the end of the forward. `ActivationCheckpointer` carries out the whole schedule, and `apply`
    does the same with nested segments.
    """

    slots: int

    def __post_init__(self) -> None:
        _check_count("Revolve", self.slots)
        if self.slots < 1:
            raise ValueError(f"Revolve needs at least one slot, for the input; got {self.slots}")

    def num_forwards(self, n: int) -> int:
        """Return the number of layer runs of a forward and a backward through `n` layers, replays included.

        The optimum for the backward is `r n - C(slots + r, slots + 1)`, with the smallest `r` for which
        `C(slots + r, slots) >= n`; one more run computes the last layer's output.
        """
        if n == 0:
            return 0
        r = 0
        while math.comb(self.slots + r, self.slots) < n:
            r += 1
        return 1 + r * n - (math.comb(self.slots + r, self.slots + 1) if r else 0)

    def next_kept(self, n: int) -> int:
        """Return how many layers to run from a held state before the next state is held, with `n` layers ahead.

        The first position whose cost is optimal by the formula of `num_forwards`; `n` if there is only one slot.
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
        """Return the regions of layers `start` to `end - 1`, whose input is held: up to `slots` side by side."""
        if end - start < 1:
            return []
        step = self.next_kept(end - start)
        if step == end - start:
            return self._one(start, end)
        return [*self._one(start, start + step), *Revolve(self.slots - 1)._split(start + step, end)]

    def _one(self, start: int, end: int) -> list[Segment]:
        """Return the region of layers `start` to `end - 1`, and the regions inside it."""
        return [Segment(start, end - 1), *self._inside(start, end)]

    def _inside(self, start: int, end: int) -> list[Segment]:
        """Return the regions inside one: of all its layers but the last, whose backward follows the replay at once."""
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
    """Keeps the layers that cost most to recompute per byte, as many as fit in `budget` (bytes, or `"12GiB"`)."""

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
    """Return for each of `n` layers whether `policy` recomputes it.

    >>> from lowtide.policies import EveryN, plan_recomputation
    >>> plan_recomputation(5, EveryN(2))
    [False, True, False, True, False]
    """
    check_policy(policy)
    return policy.decide(n, costs, bytes)


def check_policy(policy: object) -> None:
    """Raise `TypeError` if this is not a policy."""
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
