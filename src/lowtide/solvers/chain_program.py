"""Dynamic programme over a chain of calls: where to cut it into segments, for every amount of memory.

The calls of some runs of a step (`graph.segments.runs`), and the ops between these runs, are the **items** of a chain.
For the items `s` to `t` and a number of bytes, the table has the least time of these choices:

- Item `s` runs once, with one of several **options** (it holds its saved tensors, or has regions inside that hold
  less), and the items `s + 1` to `t` have the remaining memory.
- The items `s` to `u - 1` are a segment: only their input is held during forward and backward of `u` to `t`. Afterwards
  they run once more, with all of the memory and the best choice for it, so that segments can be nested.
- That segment, if it is in no other, retains some op outputs of each item and recomputes only the rest. Regions inside
  it would drop the retained outputs, so it has none.

This is rotor (Beaumont et al. 2019, "Optimal checkpointing for heterogeneous chains") with several options per item,
limited to plans that the eager engine can run. Costs of items are measured on simulated steps in which every item runs
with the same option, so results are near-optimal only; `segment_search`, which builds the table, simulates each result.

Cost: `items^2 * slots * (splits + options)` operations in numpy; chains are grouped to 160 items and 32 splits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from lowtide.graph.segments import Span
from lowtide.graph.step_graph import StepGraph
from lowtide.simulator.eager_intervals import EagerIntervals
from lowtide.solvers.candidate import Regions
from lowtide.solvers.region_costs import prefix_sums, stops_of

_MOST_ITEMS = 160  # in longer chains several calls are one item
_MOST_SPLITS = 32  # lengths of a segment that are tried
_REPLAY = 1


@dataclass(frozen=True)
class Segmentation:
    """Segments that are regions (nested ones too), and single calls that are, numbered as in the plain graph.

    `kept` are the ops, numbered as in the step, whose outputs segments retain.
    """

    spans: tuple[Span, ...]
    regions: Regions = field(hash=False)
    kept: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Item:
    """Ops `first` to `end - 1` of the forward: calls of the run number `run`, or ops between runs (-1)."""

    first: int
    end: int
    run: int
    calls: tuple[int, ...] = ()


def items_of(graph: StepGraph, chains: Sequence[Sequence[int]]) -> list[Item]:
    """The items of these runs and of the ops between them; the last item (maybe empty) is what follows all runs."""
    size = -(-sum(map(len, chains)) // _MOST_ITEMS)
    items: list[Item] = []
    at = 0
    for number, run in enumerate(sorted(chains, key=lambda run: graph.calls[run[0]].first)):
        if graph.calls[run[0]].first > at:
            items.append(Item(at, graph.calls[run[0]].first, -1))
        for start in range(0, len(run), size):
            calls = tuple(run[start : start + size])
            items.append(Item(graph.calls[calls[0]].first, graph.calls[calls[-1]].end, number, calls))
        at = items[-1].end
    return [*items, Item(at, graph.num_forward, -1)]


@dataclass(frozen=True)
class ItemOption:
    """One option for all items; per item: its regions, bytes held, peaks of forward and backward, seconds added.

    Peaks exclude what earlier items hold. If `is_inner`, items inside a segment may use this option.
    """

    regions: list[Regions]
    held: np.ndarray
    forward: np.ndarray
    backward: np.ndarray
    seconds: np.ndarray
    is_inner: bool


class ItemCosts:
    """Measures the costs of items on simulated steps."""

    def __init__(self, graph: StepGraph, items: Sequence[Item]) -> None:
        self.graph, self.items = graph, items
        starts = [item.first for item in items]
        of_op = [max(bisect_right(starts, op) - 1, 0) for op in range(graph.num_forward)]
        last = len(items) - 1
        for op in graph.ops[graph.num_forward :]:
            last = of_op[op.forward_op] if op.forward_op >= 0 else last
            of_op.append(last)
        self._of_op = np.array([*of_op, 0], dtype=np.int64)  # the last entry is the optimizer's step
        self.links: list[int] = []  # bytes that item i reads from the one before it
        self._item_linked: dict[int, int] = {}
        for number, item in enumerate(items):
            before = items[number - 1] if number else item
            if item.calls:
                given = set(graph.calls[item.calls[0]].inputs)
            else:  # such as the loss, which may save the output of the last block
                given = {value for op in graph.ops[item.first : item.end] for value in op.inputs}
            made = [value for value in given if before.first <= graph.values[value].born < before.end and number]
            made = [value for value in made if graph.values[value].dropped <= graph.num_forward]
            self._item_linked.update(dict.fromkeys(made, number))
            self.links.append(sum(graph.values[value].bytes for value in made))

    def option(self, regions: Regions, *, is_inner: bool) -> ItemOption:
        """The option in which items contain these regions; each region is inside one item."""
        graph, num = self.graph, len(self.items)
        played = EagerIntervals(graph, regions)
        held = self._held(regions)
        before = prefix_sums(held)[:-1]
        where, is_forward = self._of_op[played.ops], played.phases == 0
        above = played.total_bytes - before[where]
        peaks = np.full((2, num), float(graph.arrays.static_bytes + graph.arrays.static_gradient_bytes))
        np.maximum.at(peaks, ((~is_forward).astype(np.int64), where), above)
        is_replay = played.phases == _REPLAY
        replayed = graph.arrays.seconds[played.ops[is_replay]]
        seconds = np.bincount(where[is_replay], weights=replayed, minlength=num).astype(np.float64)
        inside: list[Regions] = [{} for _ in self.items]
        for call, kept in regions.items():
            item = int(self._of_op[graph.calls[call].first])
            inside[item][call] = kept
            seconds[item] += graph.hardware.region_s + graph.retainable.retaining_s(call, kept, graph.calls[call].end)
        return ItemOption(inside, held, peaks[0], peaks[1], seconds, is_inner)

    def _held(self, regions: Regions) -> np.ndarray:
        """Bytes that each item holds for the backward."""
        graph = self.graph
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
        held = np.zeros(len(self.items))
        for value, item in holders.items():
            facts = graph.values[value]
            if facts.kind == "activation" and 0 <= facts.born and facts.dropped <= graph.num_forward:
                held[self._item_linked.get(value, item)] += facts.bytes
        return held

    def carried(self, plain: ItemOption) -> np.ndarray:
        """Bytes not held by items when the backward of each item begins: gradients and everything else."""
        graph, played = self.graph, EagerIntervals(self.graph, {})
        where = self._of_op[played.ops]
        found = np.zeros(len(self.items))
        sums = np.cumsum(plain.held)
        for item in range(len(self.items)):
            events = np.flatnonzero((where == item) & (played.phases == 2))
            if len(events):
                first = graph.ops[played.ops[events[0]]]
                made = sum(graph.values[value].bytes for value in first.outputs) + first.workspace_bytes
                found[item] = played.total_bytes[events[0]] - made - sums[item]
        return found


@lru_cache
def _steps(most: int) -> np.ndarray:
    """Lengths of segments up to `most` items: all of them, or evenly spaced ones."""
    return np.unique(np.linspace(1, most, min(most, _MOST_SPLITS)).round().astype(np.int64))


def _shifted(costs: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """Rows of costs by slot, each shifted by a number of used slots; the first input column means infeasible."""
    width, steps = costs.shape[1] - 1, np.minimum(np.round(shifts).astype(np.int64), costs.shape[1] - 1)
    if (steps == steps[0]).all():
        found = np.full((len(costs), width), np.inf, dtype=costs.dtype)
        found[:, steps[0] :] = costs[:, 1 : width + 1 - steps[0]]
        return found
    return np.take_along_axis(costs, np.maximum(np.arange(width) - steps[:, None], -1) + 1, axis=1)


class ChainProgram:
    """The table for all sub-chains, with memory in steps of `slot` bytes from `lowest` on.

    `options[0]` holds all saved tensors. In `dropped` every item of a run is a region of its own; in the `retaining`
    options these regions retain outputs, as segments may. `carried` are the other bytes live when the replay of a
    segment that ends with each item begins.
    """

    def __init__(
        self,
        costs: ItemCosts,
        options: Sequence[ItemOption],
        dropped: ItemOption,
        retaining: Sequence[ItemOption],
        carried: np.ndarray,
        slot: float,
        num_slots: int,
    ) -> None:
        graph, items = costs.graph, costs.items
        self._graph, self._items, self._links = graph, items, costs.links
        self._options, self._slot, self._num = options, slot, num_slots
        least = np.minimum.reduce([option.backward for option in options])
        self.lowest = float(least.min())
        arrays = graph.arrays
        static = arrays.static_bytes + arrays.static_gradient_bytes
        self._state = np.array([sum(int(arrays.frame_bytes[call]) for call in item.calls) for item in items])
        self._held = [np.array([self._slots(size) for size in option.held], dtype=np.int64) for option in options]
        sums = prefix_sums(arrays.seconds[: graph.num_forward])
        members = np.array([len(item.calls) for item in items])
        self._seconds = np.array([sums[item.end] - sums[item.first] for item in items])
        self._seconds += members * graph.hardware.region_s
        # The replay of a segment ends at the last saved tensor of its last item.
        stops = stops_of(graph)
        ends = [max(item.first, *(stops[call] for call in item.calls)) if item.calls else item.end for item in items]
        self._after_last_save = np.array([sums[item.end] - sums[end] for item, end in zip(items, ends, strict=True)])
        self._above = np.maximum(carried - static, 0.0)  # bytes of a replay beyond those of the forward
        self._dropped_peak = dropped.forward
        self._retaining = retaining
        self._retained = [np.maximum(option.held - dropped.held, 0.0) for option in retaining]  # bytes of each item
        self._solve()

    def _slots(self, size: float) -> int:
        return int(np.round(size / self._slot))

    def _solve(self) -> None:
        """Fill the table: for (first, last), the least seconds per slot; the first column means infeasible."""
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
                    seconds = seconds - self._after_last_save[splits - 1]
                    state = np.cumsum(self._state[first : splits[-1]])[splits - first - 1]
                    costs = _shifted(self._table[splits, last], (self._links[first] + state) / self._slot)
                    costs += _shifted(self._table[first, splits - 1], state / self._slot)
                    costs += seconds[:, None].astype(np.float32)
                    costs[room < peaks[:, None]] = np.inf
                    all_costs = [costs]
                    if is_top:
                        numbers = range(len(self._retaining))
                        all_costs += [self._as_retaining(number, first, splits, room, state) for number in numbers]
                    for number, costs in enumerate(all_costs):
                        least = costs.argmin(axis=0)
                        cost = costs[least, slots]
                        is_better = cost < best * (1 - 1e-6)
                        best = np.where(is_better, cost, best)
                        chosen = np.where(is_better, splits[least] + number * num, chosen)
                self._table[first, last, 1:], self._chosen[first, last] = best, chosen

    def _as_retaining(
        self, number: int, first: int, splits: np.ndarray, room: np.ndarray, state: np.ndarray
    ) -> np.ndarray:
        """Costs by split and slot: a segment from `first` on that retains outputs, and the items after it."""
        plain, option, retained = self._options[0], self._retaining[number], self._retained[number]
        upto, ends, last = slice(first, splits[-1]), splits - first - 1, len(self._items) - 1
        before = np.cumsum(plain.held[upto]) - plain.held[upto]  # held by earlier items of the segment
        backward = np.maximum.accumulate(plain.backward[upto] + before)[ends]
        again = np.maximum.accumulate(plain.forward[upto] + before)[ends] + self._above[splits - 1]
        sums = np.cumsum(retained[upto])
        forward = np.maximum.accumulate(self._dropped_peak[upto] + sums)[ends]
        costs = _shifted(self._table[splits, last], (self._links[first] + state + sums[ends]) / self._slot)
        costs += np.cumsum(option.seconds[upto])[ends][:, None].astype(np.float32)
        costs[room < np.maximum(np.maximum(backward, again) + state, forward)[:, None]] = np.inf
        return costs

    def _one_item(
        self, first: int, last: int, room: np.ndarray, slots: np.ndarray, above: float, is_top: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """The best option for the first item alone, for each slot; options are numbered from -1 downwards."""
        best, chosen = np.full(len(slots), np.inf), np.zeros(len(slots), dtype=np.int32)
        for number, option in enumerate(self._options):
            if not (is_top or option.is_inner):
                continue
            cost = np.full(len(slots), float(option.seconds[first]))
            if first < last:
                cost += self._table[first + 1, last, np.maximum(slots - self._held[number][first], -1) + 1]
            cost[room < max(option.backward[first], option.forward[first] + above)] = np.inf
            is_better = cost < best
            best, chosen = np.where(is_better, cost, best), np.where(is_better, -1 - number, chosen)
        return best, chosen

    def _run_ends(self) -> list[int]:
        """For each item, the latest end of a segment that begins with it: the end of its run; itself if in no run."""
        ends = list(range(len(self._items)))
        for number in range(len(self._items) - 2, -1, -1):
            item, after = self._items[number], self._items[number + 1]
            if item.run >= 0:
                ends[number] = ends[number + 1] if after.run == item.run else number + 1
        return ends

    def segmentations(self) -> list[Segmentation]:
        """The best segmentation for each slot, from little memory to much, without duplicates."""
        last = len(self._items) - 1
        unique: dict[Segmentation, None] = {}
        for slot in range(self._num):
            if self._table[0, last, slot + 1] < np.inf:
                spans: list[Span] = []
                regions: Regions = {}
                kept: set[int] = set()
                self._collect(0, last, slot, spans, regions, kept)
                unique.setdefault(Segmentation(tuple(spans), regions, frozenset(kept)))
        return list(unique)

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
                option = self._retaining[retaining - 1]
                held += float(self._retained[retaining - 1][first:split].sum())
                if len(calls) > 1:
                    kept |= kept_ops(
                        self._graph, {c: ops for item in option.regions[first:split] for c, ops in item.items()}
                    )
                else:
                    regions |= option.regions[first]
            else:
                state = int(self._state[first:split].sum())
                self._collect(first, split - 1, slot - self._slots(state), spans, regions, kept)
            slot -= self._slots(held)
            first = split


def kept_ops(graph: StepGraph, regions: Regions) -> set[int]:
    """The ops whose outputs regions retain, numbered as in the step."""
    return {graph.calls[call].first + op for call, ops in regions.items() for op in ops}
