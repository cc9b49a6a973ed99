"""Segments of a chain of calls, cut by dynamic programming: what is best for the calls `s` to `t` with so much memory.

The calls of some runs of a step (`graph.segments.runs`), and whatever lies between these runs, are the **items** of a
chain. Of the items `s` to `t`, with so much memory for all that is held:

- item `s` is run once, by one of several **ways** (its saves are held, or it has regions inside that hold less), and
  the rest has what memory is left; or
- `s` to `u - 1` are a segment: nothing but their input is held while `u` to `t` have their forward and backward. Then
  they are run once more, with all of the memory, as is best for it: so segments lie inside segments; or
- that segment, if it lies in no other, retains some op outputs of each of its items and computes only the rest again.
  Regions inside it would drop what it retains, so it has none.

This is the optimum for chains of Beaumont et al. (rotor), with ways to run an item, and only of plans that the engine
can run. Costs of items are read off simulated steps in which all items are run in one way, so that what is found is
only nearly the best; each plan is simulated before it is taken.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from lowtide.graph.segments import Span
from lowtide.graph.step_graph import StepGraph
from lowtide.simulator.eager_intervals import EagerIntervals

if TYPE_CHECKING:
    from lowtide.solvers.candidate import Regions

_MOST_ITEMS = 160  # calls of longer chains are taken together
_MOST_SPLITS = 32  # ends of a segment that are tried
_REPLAY = 1


@dataclass(frozen=True)
class Segmentation:
    """Segments (runs of calls, also inside one another) that are regions, and calls that are, by the plain graph.

    `kept` are the ops, as numbered in the step, whose outputs segments retain.
    """

    spans: tuple[Span, ...]
    regions: Regions = field(hash=False)
    kept: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Item:
    """A part of the forward, from op `first` to `end - 1`: calls of a run, or (-1) what lies between runs."""

    first: int
    end: int
    run: int
    calls: tuple[int, ...] = ()


def items_of(graph: StepGraph, chains: Sequence[Sequence[int]]) -> list[Item]:
    """The items of these runs and between them; the last is what follows the last run, be it nothing."""
    size = -(-sum(map(len, chains)) // _MOST_ITEMS)
    found: list[Item] = []
    at = 0
    for number, run in enumerate(sorted(chains, key=lambda run: graph.calls[run[0]].first)):
        if graph.calls[run[0]].first > at:
            found.append(Item(at, graph.calls[run[0]].first, -1))
        for start in range(0, len(run), size):
            calls = tuple(run[start : start + size])
            found.append(Item(graph.calls[calls[0]].first, graph.calls[calls[-1]].end, number, calls))
        at = found[-1].end
    return [*found, Item(at, graph.num_forward, -1)]


@dataclass(frozen=True)
class ItemOption:
    """A way to run all items: `regions` in each, bytes that each holds, its peaks in both directions, and seconds.

    Peaks are less what items before it hold. If `is_inner`, an item inside of a segment can be run in this way.
    """

    regions: list[Regions]
    held: np.ndarray
    forward: np.ndarray
    backward: np.ndarray
    seconds: np.ndarray
    is_inner: bool


class ItemCosts:
    """Reads what items cost off simulated steps."""

    def __init__(self, graph: StepGraph, items: Sequence[Item]) -> None:
        self._graph, self._items = graph, items
        starts = [item.first for item in items]
        of_op = [max(bisect_right(starts, op) - 1, 0) for op in range(graph.num_forward)]
        last = len(items) - 1
        for op in graph.ops[graph.num_forward :]:
            last = of_op[op.forward_op] if op.forward_op >= 0 else last
            of_op.append(last)
        self._of_op = np.array([*of_op, 0], dtype=np.int64)  # at the end, of the optimizer's step
        self.links: list[int] = []  # bytes that item i is given by the one before it
        self._item_linked: dict[int, int] = {}
        for number, item in enumerate(items):
            before = items[number - 1] if number else item
            given = {value for call in item.calls[:1] for value in graph.calls[call].inputs}
            made = [value for value in given if before.first <= graph.values[value].born < before.end and number]
            made = [value for value in made if graph.values[value].dropped <= graph.num_forward]
            self._item_linked.update(dict.fromkeys(made, number))
            self.links.append(sum(graph.values[value].bytes for value in made))

    def way(self, regions: Regions, *, is_inner: bool) -> ItemOption:
        """What these regions, each inside of one item, make of the items."""
        graph, num = self._graph, len(self._items)
        played = EagerIntervals(graph, regions)
        held = self._held(regions)
        before = np.concatenate([[0.0], np.cumsum(held)])[:-1]
        where, is_forward = self._of_op[played.ops], played.phases == 0
        above = played.total_bytes - before[where]
        peaks = np.full((2, num), float(graph.arrays.static_bytes + graph.arrays.static_gradient_bytes))
        np.maximum.at(peaks, ((~is_forward).astype(np.int64), where), above)
        is_replay = played.phases == _REPLAY
        replayed = graph.arrays.seconds[played.ops[is_replay]]
        seconds = np.bincount(where[is_replay], weights=replayed, minlength=num).astype(np.float64)
        inside: list[Regions] = [{} for _ in self._items]
        for call, kept in regions.items():
            item = int(self._of_op[graph.calls[call].first])
            inside[item][call] = kept
            seconds[item] += graph.hardware.region_s + graph.retainable.retaining_s(call, kept, graph.calls[call].end)
        return ItemOption(inside, held, peaks[0], peaks[1], seconds, is_inner)

    def _held(self, regions: Regions) -> np.ndarray:
        """Bytes that each item leaves behind for the backward."""
        graph = self._graph
        owner = graph.innermost(regions)
        kept = kept_ops(graph, regions)
        holders: dict[int, int] = {}
        for save in graph.saves:
            if owner[save.call] < 0 or graph.values[save.value].born in kept:
                item = int(self._of_op[min(max(save.made - 1, 0), graph.num_forward - 1)])
                holders[save.value] = min(item, holders.get(save.value, item))
        for call in regions:
            if owner[graph.calls[call].parent] < 0:
                item = int(self._of_op[graph.calls[call].first])
                for value in graph.calls[call].inputs:
                    holders[value] = min(item, holders.get(value, item))
        held = np.zeros(len(self._items))
        for value, item in holders.items():
            facts = graph.values[value]
            if facts.kind == "activation" and 0 <= facts.born and facts.dropped <= graph.num_forward:
                held[self._item_linked.get(value, item)] += facts.bytes
        return held

    def carried(self, plain: ItemOption) -> np.ndarray:
        """What else is there when the backward comes to each item: gradients, and all that is not held by items."""
        graph, played = self._graph, EagerIntervals(self._graph, {})
        where = self._of_op[played.ops]
        found = np.zeros(len(self._items))
        sums = np.cumsum(plain.held)
        for item in range(len(self._items)):
            events = np.flatnonzero((where == item) & (played.phases == 2))
            if len(events):
                first = graph.ops[played.ops[events[0]]]
                made = sum(graph.values[value].bytes for value in first.outputs) + first.workspace_bytes
                found[item] = played.total_bytes[events[0]] - made - sums[item]
        return found


@lru_cache
def _steps(most: int) -> np.ndarray:
    """Numbers of items that a segment may have, up to `most`: all, or evenly spaced ones."""
    return np.unique(np.linspace(1, most, min(most, _MOST_SPLITS)).round().astype(np.int64))


def _shifted(costs: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """Rows of costs by slot, each as if so many slots were taken; the first column is for too few."""
    width, steps = costs.shape[1] - 1, np.minimum(np.round(shifts).astype(np.int64), costs.shape[1] - 1)
    if (steps == steps[0]).all():
        found = np.full((len(costs), width), np.inf, dtype=costs.dtype)
        found[:, steps[0] :] = costs[:, 1 : width + 1 - steps[0]]
        return found
    return np.take_along_axis(costs, np.maximum(np.arange(width) - steps[:, None], -1) + 1, axis=1)


class ChainProgram:
    """The table of all parts of a chain, for memory in steps of `slot` bytes from `lowest` on.

    `ways[0]` holds all saves. `dropped` is the way in which each item of a run is a region by itself, `retaining` are
    ways in which these retain outputs, as segments may too, and `carried` is what is there besides in replays of
    segments that end with each item.
    """

    def __init__(
        self,
        graph: StepGraph,
        items: Sequence[Item],
        ways: Sequence[ItemOption],
        dropped: ItemOption,
        retaining: Sequence[ItemOption],
        links: Sequence[int],
        carried: np.ndarray,
        slot: float,
        num_slots: int,
    ) -> None:
        self._graph, self._items, self._options, self._slot = graph, items, ways, slot
        self._num = num_slots
        least = np.minimum.reduce([way.backward for way in ways])
        self.lowest = float(least.min())
        arrays = graph.arrays
        static = arrays.static_bytes + arrays.static_gradient_bytes
        self._links = links
        self._state = np.array([sum(int(arrays.frame_bytes[call]) for call in item.calls) for item in items])
        self._held = [np.array([self._slots(size) for size in way.held], dtype=np.int64) for way in ways]
        sums = np.concatenate([[0.0], np.cumsum(arrays.seconds[: graph.num_forward])])
        members = np.array([len(item.calls) for item in items])
        self._seconds = np.array([sums[item.end] - sums[item.first] for item in items])
        self._seconds += members * graph.hardware.region_s
        self._above = np.maximum(carried - static, 0.0)  # of replays, beyond the forward
        self._dropped_peak = dropped.forward
        self._retaining = retaining
        self._retained = [np.maximum(way.held - dropped.held, 0.0) for way in retaining]  # bytes of each item
        self._solve()

    def _slots(self, size: float) -> int:
        return int(np.round(size / self._slot))

    def _solve(self) -> None:
        """Fill the table: by (first, last), the least seconds for each slot; the first column is for too little."""
        num, width = len(self._items), self._num
        self._table = np.full((num, num, width + 1), np.inf, dtype=np.float32)
        self._chosen = np.zeros((num, num, width), dtype=np.int32)
        room = self.lowest + self._slot * np.arange(width)
        slots = np.arange(width)
        ends = self._run_ends()
        for last in range(num):
            for first in range(last, -1, -1):
                is_top = last == num - 1
                above = 0.0 if is_top else float(self._above[last])
                best, chosen = self._one_item(first, last, room, slots, above, is_top)
                splits = first + _steps(min(last, ends[first]) - first)
                if len(splits):
                    peaks = np.maximum.accumulate(self._dropped_peak[first : splits[-1]])[splits - first - 1] + above
                    seconds = np.cumsum(self._seconds[first : splits[-1]])[splits - first - 1]
                    state = np.cumsum(self._state[first : splits[-1]])[splits - first - 1]
                    costs = _shifted(self._table[splits, last], (self._links[first] + state) / self._slot)
                    costs += _shifted(self._table[first, splits - 1], state / self._slot)
                    costs += seconds[:, None].astype(np.float32)
                    costs[room < peaks[:, None]] = np.inf
                    least = costs.argmin(axis=0)
                    cost = costs[least, slots]
                    is_better = cost < best * (1 - 1e-6)
                    best = np.where(is_better, cost, best)
                    chosen = np.where(is_better, splits[least], chosen)
                    for number in range(len(self._retaining)) if is_top else ():
                        costs = self._as_retaining(number, first, splits, room, state)
                        least = costs.argmin(axis=0)
                        cost = costs[least, slots]
                        is_better = cost < best * (1 - 1e-6)
                        best = np.where(is_better, cost, best)
                        chosen = np.where(is_better, splits[least] + (number + 1) * num, chosen)
                self._table[first, last, 1:], self._chosen[first, last] = best, chosen

    def _as_retaining(
        self, number: int, first: int, splits: np.ndarray, room: np.ndarray, state: np.ndarray
    ) -> np.ndarray:
        """Costs by split and slot of a segment from `first` on that retains outputs, and of what follows it."""
        plain, way, retained = self._options[0], self._retaining[number], self._retained[number]
        upto, ends, last = slice(first, splits[-1]), splits - first - 1, len(self._items) - 1
        before = np.cumsum(plain.held[upto]) - plain.held[upto]  # what items of the segment before each hold
        backward = np.maximum.accumulate(plain.backward[upto] + before)[ends]
        again = np.maximum.accumulate(plain.forward[upto] + before)[ends] + self._above[splits - 1]
        sums = np.cumsum(retained[upto])
        forward = np.maximum.accumulate(self._dropped_peak[upto] + sums)[ends]
        costs = _shifted(self._table[splits, last], (self._links[first] + state + sums[ends]) / self._slot)
        costs += np.cumsum(way.seconds[upto])[ends][:, None].astype(np.float32)
        costs[room < np.maximum(np.maximum(backward, again) + state, forward)[:, None]] = np.inf
        return costs

    def _one_item(
        self, first: int, last: int, room: np.ndarray, slots: np.ndarray, above: float, is_top: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """The best way to run the first item by itself, for each slot; numbered from -1 downwards."""
        best, chosen = np.full(len(slots), np.inf), np.zeros(len(slots), dtype=np.int32)
        for number, way in enumerate(self._options):
            if not (is_top or way.is_inner):
                continue
            cost = np.full(len(slots), float(way.seconds[first]))
            if first < last:
                cost += self._table[first + 1, last, np.maximum(slots - self._held[number][first], -1) + 1]
            cost[room < max(way.backward[first], way.forward[first] + above)] = np.inf
            is_better = cost < best
            best, chosen = np.where(is_better, cost, best), np.where(is_better, -1 - number, chosen)
        return best, chosen

    def _run_ends(self) -> list[int]:
        """For each item, the last one that a segment from it on may end before: one behind its run; itself if none."""
        ends = list(range(len(self._items)))
        for number in range(len(self._items) - 2, -1, -1):
            item, after = self._items[number], self._items[number + 1]
            if item.run >= 0:
                ends[number] = ends[number + 1] if after.run == item.run else number + 1
        return ends

    def all_plans(self) -> list[Segmentation]:
        """The best for each slot, those of little memory first; each once."""
        last = len(self._items) - 1
        found: dict[Segmentation, None] = {}
        for slot in range(self._num):
            if self._table[0, last, slot + 1] < np.inf:
                spans: list[Span] = []
                regions: Regions = {}
                kept: set[int] = set()
                self._collect(0, last, slot, spans, regions, kept)
                found.setdefault(Segmentation(tuple(spans), regions, frozenset(kept)))
        return list(found)

    def _collect(self, first: int, last: int, slot: int, spans: list[Span], regions: Regions, kept: set[int]) -> None:
        while first <= last:
            chosen = int(self._chosen[first, last, slot])
            if chosen < 0:
                regions |= self._options[-1 - chosen].regions[first]
                slot -= int(self._held[-1 - chosen][first])
                first += 1
                continue
            retaining, split = divmod(chosen, len(self._items))
            calls = [call for item in self._items[first:split] for call in item.calls]
            if len(calls) > 1:
                spans.append((calls[0], calls[-1]))
            else:
                regions[calls[0]] = ()
            held = float(self._links[first] + self._state[first:split].sum())
            if retaining:
                way = self._retaining[retaining - 1]
                held += float(self._retained[retaining - 1][first:split].sum())
                if len(calls) > 1:
                    kept |= kept_ops(
                        self._graph, {c: ops for item in way.regions[first:split] for c, ops in item.items()}
                    )
                else:
                    regions |= way.regions[first]
            else:
                state = int(self._state[first:split].sum())
                self._collect(first, split - 1, slot - self._slots(state), spans, regions, kept)
            slot -= self._slots(held)
            first = split


def kept_ops(graph: StepGraph, regions: Regions) -> set[int]:
    """The ops whose outputs regions retain, as numbered in the step."""
    return {graph.calls[call].first + op for call, ops in regions.items() for op in ops}
