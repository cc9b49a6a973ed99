"""Several compiled graphs under one budget: which variant each of them runs, and what it offloads.

A model that is compiled block by block, or with graph breaks, is a chain of **instances**: calls of compiled graphs in
the order of the forward. A **variant** of a graph saves a certain number of bytes from its forward to its backward and
adds some seconds to the graph's fastest variant (`variants_of`, from the hull of `min_cut`). `SharedBudget` starts with
everything saved and repeatedly gives one instance a smaller variant: the one that frees bytes *at the current peak* for
the fewest seconds per byte, early instances first. A second path also lets an instance go back to a variant that saves
more and recomputes less at once. The result is the fastest choice along these greedy paths at which the chain fits
everywhere. The paths do not depend on the budget, so a larger budget never gives a slower choice; a Lagrangian bound
says how far it is from the optimum.

Called by `lowtide.compiled`, which measures `OtherMemory` around the instances. Cost: instances times variants steps,
each linear in the instances; no simulation after `variants_of`.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from lowtide.graph.step_graph import StepGraph
from lowtide.plans.step_plan import Plan
from lowtide.simulator.timeline import Timeline, simulate
from lowtide.solvers.min_cut import CutProblem

SMALLEST_MOVED = 1 << 20  # smaller copies cost more in launches than they free


@dataclass(frozen=True)
class Variant:
    """A compiled graph with certain op outputs saved: `keeps` (None: as torch's own partitioner decides).

    With a `fraction`, torch's partitioner chose them under that `activation_memory_budget`, and it is asked again when
    the variant is compiled. One that `replays_indices` recomputes even ops that make indices, as torch's checkpoint
    does.
    `saved_bytes` are held from its forward to its backward; `movable` are the sizes of saved values worth a copy,
    largest first; `forward_bytes` and `backward_bytes` are the most that forward and backward need in addition,
    without the graph's outputs.
    """

    keeps: tuple[int, ...] | None
    saved_bytes: int
    movable: tuple[int, ...]
    forward_bytes: int
    backward_bytes: int
    extra_s: float
    fraction: float | None = None
    replays_indices: bool = False

    @property
    def key(self) -> tuple[tuple[int, ...] | None, float | None, bool]:
        """What tells variants of a graph apart."""
        return self.keeps, self.fraction, self.replays_indices


def variants_of(graph: StepGraph, default: tuple[int, ...], others: Sequence[Variant] = ()) -> tuple[Variant, ...]:
    """The variants of a graph on its time/memory hull, each smaller and slower than the one before.

    The first saves the outputs of the ops `default`, as torch's own partitioner does, and counts as the fastest. The
    others are the optimal choices for each price per byte, and those of `others` that are better.
    """
    needs = graph.needs
    default_s = needs.seconds_of(needs.derive(frozenset(default)))
    best = [variant_of(graph, None, default, default_s)]
    if graph.num_forward < len(graph.ops):
        every = frozenset(range(graph.num_forward))
        points = (
            needs.derive(every - choice.recomputed)
            for choice in CutProblem(graph, graph.num_forward - 1, is_over=True).hull
        )
        found = [variant_of(graph, keeps, keeps, default_s) for keeps in dict.fromkeys(map(needs.keeps_of, points))]
        found += others
        for variant in sorted(found, key=lambda each: (each.extra_s, each.saved_bytes)):
            if variant.saved_bytes < best[-1].saved_bytes:
                best.append(variant)
    return _convex(best)


def variant_of(graph: StepGraph, keeps: tuple[int, ...] | None, saved: tuple[int, ...], default_s: float) -> Variant:
    """The variant that saves the outputs of the ops `saved`; its `extra_s` is relative to `default_s`."""
    timeline = simulate(graph, Plan(engine="compiled", keeps=saved, budget_bytes=1))
    derived = graph.needs.derive(frozenset(saved))
    sizes = [graph.values[value].bytes for value in derived.saved]
    saved_bytes = sum(sizes)
    return Variant(
        keeps,
        saved_bytes,
        tuple(sorted((size for size in sizes if size >= SMALLEST_MOVED), reverse=True)),
        max(0, _most(timeline, (0,)) - saved_bytes),
        max(0, _most(timeline, (1, 2)) - saved_bytes - graph.handed_out_bytes),
        max(0.0, graph.needs.seconds_of(derived) - default_s),
    )


def _most(timeline: Timeline, phases: tuple[int, ...]) -> int:
    events = np.isin(timeline.phases, phases)
    return int(timeline.total_bytes[events].max()) if events.any() else 0


def _convex(variants: list[Variant]) -> tuple[Variant, ...]:
    """Those on the lower convex hull of seconds over saved bytes."""
    found: list[Variant] = []
    for variant in variants:
        while len(found) > 1 and _price(found[-2], found[-1]) >= _price(found[-1], variant):
            found.pop()
        found.append(variant)
    return tuple(found)


def _price(fast: Variant, small: Variant) -> float:
    """Seconds per saved byte from one variant to a smaller one."""
    return (small.extra_s - fast.extra_s) / (fast.saved_bytes - small.saved_bytes)


@dataclass(frozen=True)
class OtherMemory:
    """Bytes that are live whatever the instances save, inputs of instances included.

    They are given for the beginning of each instance's forward and backward, as the most between the last forward and
    the first backward (the loss), and as the most elsewhere (the optimizer's step).
    """

    forward_bytes: tuple[int, ...]
    between_bytes: int
    backward_bytes: tuple[int, ...]
    elsewhere_bytes: int = 0


@dataclass(frozen=True)
class PeakPosition:
    """Where a step peaks: the number of instances that hold saved values, and the index of the running one (or -1)."""

    num_held: int
    index: int = -1
    is_backward: bool = False


_ELSEWHERE = PeakPosition(num_held=0)


@dataclass(frozen=True)
class SharedChoice:
    """The variant number of each instance, the sizes of the values it offloads, and the resulting peak and seconds.

    Up to `in_flight_bytes` of offloaded values may be on the device, in each direction.
    """

    chosen: tuple[int, ...]
    moved: tuple[tuple[int, ...], ...]
    in_flight_bytes: int
    peak_bytes: int
    extra_s: float
    lower_bound_s: float


@dataclass(frozen=True)
class SharedBudget:
    """Instances in the order of the forward, each with its variants, and the memory around them.

    `quotas[i]` are the bytes that the link copies to the host while instance `i + 1` runs; the last instance has none,
    as its values are needed again at once. All copies out end with the last forward. Up to `in_flight_bytes` of
    offloaded values are on the device as well, in each direction: being copied out, or prefetched. Each offloaded byte
    slows the compute beside it by `moved_byte_s`.
    """

    instances: Sequence[tuple[Variant, ...]]
    surroundings: OtherMemory
    quotas: tuple[int, ...] = ()
    moved_byte_s: float = 0.0

    def choose(self, budget: int) -> SharedChoice | None:
        """The fastest choice along the path whose peak fits; None if none fits."""
        fitting = [chosen for chosen, peak_bytes in self._path if peak_bytes <= budget]
        return self._shared(min(fitting, key=self._seconds), budget) if fitting else None

    def with_fewer_variants(
        self, choice: SharedChoice, budget: int, worth_s: float, is_compiled: Callable[[int, int], bool]
    ) -> SharedChoice:
        """The same choice, in which variants that few instances run are replaced by smaller ones that others run.

        That spares a compile each, for less than `worth_s`. `is_compiled` says of an instance and the number of a
        variant that no compile is to be spared.
        """
        chosen = choice.chosen
        while True:
            groups: dict[tuple[int, int], list[int]] = {}
            for index, number in enumerate(chosen):
                groups.setdefault((id(self.instances[index]), number), []).append(index)
            found: list[tuple[float, tuple[int, ...]]] = []
            for (kind, number), indices in groups.items():
                variants, first = self.instances[indices[0]], indices[0]
                others = (each for each in range(number + 1, len(variants)))
                target = next((each for each in others if (kind, each) in groups or is_compiled(first, each)), None)
                if target is None or is_compiled(first, number):
                    continue
                merged = tuple(target if index in indices else each for index, each in enumerate(chosen))
                cost_s = len(indices) * (variants[target].extra_s - variants[number].extra_s)
                if cost_s < worth_s and self.peak_bytes(merged) <= budget:
                    found.append((cost_s, merged))
            if not found:
                return choice if chosen == choice.chosen else self._shared(chosen, budget)
            chosen = min(found)[1]

    @property
    def floor(self) -> SharedChoice:
        """The choice along the path with the smallest peak."""
        return self._shared(*min(self._path, key=lambda each: each[1]))

    @functools.cached_property
    def _path(self) -> list[tuple[tuple[int, ...], int]]:
        """Choices and their peaks, from everything saved on; each gives one more instance a smaller variant.

        Only bytes live at the peak count: values that the link has taken away, or that are saved later, do not. Peaks
        need not fall along the path, because values that are not saved are live while they are recomputed. Where that
        ends the path, an instance may have taken too small a variant, so a second path goes back from such variants.
        """
        lowest = self._lowest()
        return [*self._walk(goes_back=False), *self._walk(goes_back=True), (lowest, self.peak_bytes(lowest))]

    def _lowest(self) -> tuple[int, ...]:
        """The choice with the smallest peak of all, if nothing is moved: by bisection over peaks."""
        best = tuple(len(variants) - 1 for variants in self.instances)
        low, high = 0, self.peak_bytes(best)
        while low < high:
            middle = (low + high) // 2
            found = self._within(middle)
            best, low, high = (best, middle + 1, high) if found is None else (found, low, middle)
        return best

    def _within(self, most_bytes: int) -> tuple[int, ...] | None:
        """A choice whose peak is `most_bytes` or less, if there is one without moves.

        An instance runs beside what earlier ones have saved, so each takes the smallest variant with which it fits.
        """
        around, held, chosen = self.surroundings, 0, list[int]()
        for variants, forward, backward in zip(
            self.instances, around.forward_bytes, around.backward_bytes, strict=True
        ):
            needs = (max(forward + each.forward_bytes, backward + each.backward_bytes) for each in variants)
            sizes = [held + variant.saved_bytes for variant in variants]
            fitting = [n for n, (size, need) in enumerate(zip(sizes, needs, strict=True)) if size + need <= most_bytes]
            if not fitting:
                return None
            chosen.append(min(fitting, key=sizes.__getitem__))
            held = sizes[chosen[-1]]
        return tuple(chosen) if max(around.between_bytes + held, around.elsewhere_bytes) <= most_bytes else None

    def _walk(self, goes_back: bool) -> list[tuple[tuple[int, ...], int]]:
        chosen, path, left = [0] * len(self.instances), [], set[tuple[int, int]]()
        step: tuple[int, int] | None = (0, 0)
        while step is not None:
            index, number = step
            if number < chosen[index]:
                left.add((index, chosen[index]))
            chosen[index] = number
            peak_bytes, position = self.peak(chosen)
            path.append((tuple(chosen), peak_bytes))
            step = self._next_step(chosen, position, left if goes_back else None)
        return path

    def _next_step(
        self, chosen: list[int], peak: PeakPosition, left: set[tuple[int, int]] | None
    ) -> tuple[int, int] | None:
        """The instance and its next variant that free bytes at the peak for the fewest seconds per byte.

        If `left` is given, the instance that runs there may also get a variant that saves more and recomputes less at
        once. The variants that instances have `left` in this way are not tried again.
        """
        # Of equal instances only the first is considered.
        alike = {(self._kinds[index], chosen[index]): index for index in reversed(range(peak.num_held))}
        cheapest: tuple[float, int, int] | None = None
        for index in {*alike.values(), peak.index} - {-1}:
            number, variants = chosen[index], self.instances[index]
            size = self._bytes_at(peak, index, number)
            for other in range(0 if left is not None and index == peak.index else number + 1, len(variants)):
                spared = size - self._bytes_at(peak, index, other)
                if spared > 0 and (not left or (index, other) not in left):
                    step = (variants[other].extra_s - variants[number].extra_s) / spared, index, other
                    cheapest = min(cheapest or step, step)
        return None if cheapest is None else cheapest[1:]

    @functools.cached_property
    def _kinds(self) -> list[Hashable]:
        """Keys under which instances are equal: the same variants and the same quotas."""
        return [
            (id(variants), self._quota(index), self._quota(index + 1)) for index, variants in enumerate(self.instances)
        ]

    def _bytes_at(self, position: PeakPosition, index: int, number: int) -> int:
        """Bytes of an instance at a position, as if no other instance used the link."""
        variant = self.instances[index][number]
        if index == position.index:
            return variant.saved_bytes + (variant.backward_bytes if position.is_backward else variant.forward_bytes)
        return variant.saved_bytes - sum(self._fitting(index, variant, 0))

    def peak_bytes(self, chosen: Sequence[int]) -> int:
        """The peak of the step."""
        return self.peak(chosen)[0]

    def peak(self, chosen: Sequence[int]) -> tuple[int, PeakPosition]:
        """The peak of the step and its position."""
        running, moved = self._running(chosen), self.moved(chosen)
        around, in_flight = self.surroundings, self.in_flight_bytes(moved)
        away = [0, *accumulate(map(sum, moved))]  # offloaded by instances before the i-th
        held = [0, *accumulate(variant.saved_bytes - sum(sizes) for variant, sizes in zip(running, moved, strict=True))]
        peaks = [
            (around.elsewhere_bytes, _ELSEWHERE),
            (around.between_bytes + held[-1], PeakPosition(num_held=len(running))),
        ]
        for index, variant in enumerate(running):
            here = held[index] + min(away[index], in_flight) + variant.saved_bytes
            forward = around.forward_bytes[index] + here + variant.forward_bytes
            backward = around.backward_bytes[index] + here + variant.backward_bytes
            peaks.append((forward, PeakPosition(index + 1, index)))
            peaks.append((backward, PeakPosition(index + 1, index, is_backward=True)))
        return max(peaks, key=lambda each: each[0])

    def moved(self, chosen: Sequence[int]) -> list[tuple[int, ...]]:
        """The sizes of the values that each instance offloads: the largest that fit its quota first."""
        found, behind = [], 0
        for index, variant in enumerate(self._running(chosen)):
            sizes = self._fitting(index, variant, behind)
            found.append(sizes)
            behind = max(0, behind + sum(sizes) - self._quota(index))
        return found

    def _fitting(self, index: int, variant: Variant, behind: int) -> tuple[int, ...]:
        """The values that an instance can offload with `behind` bytes still to be copied: within its quota, except that
        one value may use the next instance's quota too.
        """
        room, sizes = self._quota(index) - behind, list[int]()
        most = room + self._quota(index + 1)
        for size in variant.movable:
            if size <= room or (not sizes and size <= most):
                sizes.append(size)
                room -= size
        return tuple(sizes)

    def _quota(self, index: int) -> int:
        return self.quotas[index] if index < len(self.quotas) else 0

    def in_flight_bytes(self, moved: Sequence[Sequence[int]]) -> int:
        """The most bytes being copied to the host at the end of an instance; values count until fully copied."""
        under_way, copied, most = deque[int](), 0, 0  # in copy order; bytes of them already copied
        for index, sizes in enumerate(moved):
            under_way.extend(sizes)
            most = max(most, sum(under_way))
            copied += self._quota(index)
            while under_way and under_way[0] <= copied:
                copied -= under_way.popleft()
            copied = copied if under_way else 0
        return most

    def _running(self, chosen: Sequence[int]) -> list[Variant]:
        return [variants[number] for variants, number in zip(self.instances, chosen, strict=True)]

    def _shared(self, chosen: tuple[int, ...], budget: int) -> SharedChoice:
        extra_s, moved = self._seconds(chosen), tuple(self.moved(chosen))
        bound_s = min(extra_s, self.lower_bound_s(budget))
        return SharedChoice(chosen, moved, self.in_flight_bytes(moved), self.peak_bytes(chosen), extra_s, bound_s)

    def _seconds(self, chosen: Sequence[int]) -> float:
        recomputed_s = sum(variant.extra_s for variant in self._running(chosen))
        return recomputed_s + self.moved_byte_s * sum(map(sum, self.moved(chosen)))

    def lower_bound_s(self, budget: int) -> float:
        """A lower bound on the seconds of every choice of variants: Lagrangian, at the beginning of the backward."""
        allowed = budget - self.surroundings.between_bytes + sum(self.quotas)
        prices = {_price(fast, small) for variants in set(self.instances) for fast, small in pairwise(variants)}
        least_s = sum(variants[0].extra_s for variants in self.instances)
        for price in prices:
            duals = (min(v.extra_s + price * v.saved_bytes for v in variants) for variants in self.instances)
            least_s = max(least_s, sum(duals) - price * allowed)
        return least_s
