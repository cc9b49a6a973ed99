"""Costs that `hull.Pricing` adds up: what a call costs as a region at a price per byte, and which call holds a value.

`RegionCosts` decides which outputs a region retains at a price. A replay ends at the last saved tensor that was
dropped, so retained outputs also decide which ops run again. For each possible end: ops before it run again, or their
outputs are retained, whichever is cheaper; of later ops, all saved outputs are retained. The best end lies between
the last saved tensor that no plan can retain (`least`) and the last saved tensor.

`HeldValues` charges the bytes that the plain step holds at the critical point (op `at`). Saved tensors that only
autograd holds there, and that the backward has yet to read, are charged to a call, which may recompute them; what
every plan holds is in `base_bytes`. Left out of both, to keep the bound valid, is what some plan may not hold at that
point: saved tensors that are never read, values recomputed and released before, and whatever a replay before this
point has released.

The functions at the end say which calls can be regions and which ops' outputs a region may retain. Cost: linear in
ops, saves and calls, once per graph and critical point; `RegionCosts.costs` is vectorised over calls, per price.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile

import numpy as np

from lowtide.graph.step_graph import Save, StepGraph
from lowtide.simulator.timeline import Timeline


class RegionCosts:
    """The least cost of each call as a region that retains outputs, whatever regions are inside it.

    `may_keep[depth]` marks the ops whose outputs regions at that depth may retain, and `held[depth]` the bytes of each.
    `stops` are the ends of replays if nothing is retained. Calls that are not `allowed` to be regions cost inf. A call
    may retain values made from op `run_firsts[call]` on.
    """

    def __init__(
        self,
        graph: StepGraph,
        stops: list[int],
        may_keep: Mapping[int, np.ndarray],
        held: Mapping[int, np.ndarray],
        allowed: np.ndarray,
        run_firsts: Sequence[int],
    ) -> None:
        self._graph, self._may_keep, self._held = graph, may_keep, held
        self._seconds, self._substituted_s = graph.arrays.seconds[: graph.num_forward], graph.retainable.substituted_s
        is_saved, unread = np.zeros(graph.num_forward, dtype=bool), np.zeros(graph.num_forward, dtype=bool)
        for save in graph.saves:
            born = graph.values[save.value].born
            if 0 <= born < graph.num_forward:
                is_saved[born], unread[born] = True, unread[born] or save.read < 0
        self._is_read = is_saved & ~unread  # regions recompute or retain these outputs
        first, end = graph.arrays.first, np.array([call.end for call in graph.calls], dtype=np.int64)
        least, entries = _least_stops(graph, may_keep, run_firsts)
        self._spans = first, least, np.maximum(least, np.array(stops, dtype=np.int64)), end
        # With a region inside, the replay of the outer region may end where the inner one begins.
        inner_s = graph.hardware.dispatch_s * (entries - first) + graph.hardware.region_s
        num_allowed = prefix_sums(allowed)
        has_inner = num_allowed[graph.arrays.after] > num_allowed[1:]
        self._inner_s = np.where(has_inner, inner_s, np.inf)
        self._allowed, depths = allowed, np.array(graph.depths, dtype=np.int64)
        self._calls_at = {depth: np.flatnonzero((depths == depth) & allowed) for depth in held}

    def costs(self, price: float) -> np.ndarray:
        """The cost of each call as a region with the best retained outputs at a price, without its inputs."""
        dispatch_s = self._graph.hardware.dispatch_s
        costs = np.full(len(self._allowed), np.inf)
        for depth, calls in self._calls_at.items():
            first, least, stop, _ = (span[calls] for span in self._spans)
            before, behind = (prefix_sums(each) for each in self._choices(depth, price))
            ends = np.stack([least, stop + 1], axis=1).ravel()
            at_end = np.append(before - behind, np.inf)
            alone_s, inside_s = (
                np.minimum.reduceat(each, ends)[::2] if len(calls) else np.zeros(0)
                for each in (at_end + dispatch_s * np.arange(len(at_end)), at_end)
            )
            best = np.minimum(alone_s - dispatch_s * first, inside_s + self._inner_s[calls])
            costs[calls] = best - before[first] + behind[stop]
        return costs

    def _choices(self, depth: int, price: float) -> tuple[np.ndarray, np.ndarray]:
        """The cost of each op in regions of a depth: before the end of the replay, and after it."""
        may_keep, kept = self._may_keep[depth], price * self._held[depth]
        before = np.where(may_keep, np.minimum(self._seconds, kept + self._substituted_s), self._seconds)
        return before, np.where(may_keep & self._is_read, kept, 0.0)

    def kept(self, index: int, price: float) -> list[int]:
        """The ops of a call, counted from its first, whose outputs are best retained at a price."""
        first, least, stop, end = (int(span[index]) for span in self._spans)
        depth = self._graph.depths[index]
        before, behind = (each[first:stop] for each in self._choices(depth, price))
        costs = prefix_sums(before)[least - first :] + behind.sum() - prefix_sums(behind)[least - first :]
        at = least + int(np.argmin(costs + [self._fee_s(index, position) for position in range(least, stop + 1)]))
        may_keep, gained_s = self._may_keep[depth], self._seconds - self._substituted_s
        is_kept = np.zeros(end - first, dtype=bool)
        is_kept[: at - first] |= may_keep[first:at] & (price * self._held[depth][first:at] < gained_s[first:at])
        is_kept[at - first : stop - first] |= (may_keep & self._is_read)[at:stop]
        return [int(op) for op in np.flatnonzero(is_kept)]

    def seconds(self, index: int, kept: Sequence[int]) -> float:
        """The least seconds of a call as a region that retains the outputs of ops `kept`, counted from its first."""
        first, least, stop, end = (int(span[index]) for span in self._spans)
        is_kept = np.zeros(end - first, dtype=bool)
        is_kept[list(kept)] = True
        may_keep = self._may_keep[self._graph.depths[index]]
        dropped = np.flatnonzero((may_keep & self._is_read)[least:stop] & ~is_kept[least - first : stop - first])
        at = least + int(dropped[-1]) + 1 if len(dropped) else least
        runs = np.where(is_kept[: at - first], self._substituted_s[first:at], self._seconds[first:at])
        return self._fee_s(index, at) + float(runs.sum())

    def _fee_s(self, index: int, stop: int) -> float:
        """Host seconds for the dispatch mode of a replay that ends at `stop`, or earlier with regions inside."""
        alone_s = self._graph.hardware.dispatch_s * (stop - self._graph.calls[index].first)
        return min(alone_s, float(self._inner_s[index]))


def prefix_sums(items: np.ndarray) -> np.ndarray:
    """Cumulative sums, beginning with 0."""
    return np.concatenate([[0], np.cumsum(items)])


def _least_stops(
    graph: StepGraph, may_keep: Mapping[int, np.ndarray], run_firsts: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """The earliest end of each call's replay: its last saved tensor that is read and cannot be retained.

    The second array is for replays with regions inside: for a tensor saved in an inner call, where that call begins.
    """
    least, entries = graph.arrays.first.copy(), graph.arrays.first.copy()
    for save in graph.saves:
        reached, born = save.made, graph.values[save.value].born
        for call in graph.ancestors(save.call) if save.read >= 0 else ():
            is_inside = run_firsts[call] <= born < graph.num_forward
            if not (is_inside and may_keep[graph.depths[call]][born]):
                least[call], entries[call] = max(least[call], save.made), max(entries[call], reached)
            reached = graph.calls[call].first
    return least, entries


class HeldValues:
    """The call that each value held while op `at` runs is charged to, so that none is charged twice.

    - `homes`: for each saved value that the backward has yet to read, the call of its last save. The value is held if
      that call is in no region, or in one that does not recompute it.
    - `passed`: for each value that is not saved and that a region would hold as its input, the innermost call that
      reads it first.
    - `has_begun`: for each call, whether the backward has read one of its saves: as a region it may have been replayed
      by then and have released its inputs.
    - `base_bytes`: bytes that every plan holds in addition.
    """

    def __init__(self, graph: StepGraph, plain: Timeline, at: int) -> None:
        self._graph = graph
        self._given = [frozenset(call.inputs) for call in graph.calls]
        in_use: set[int] = set()
        by_saves: set[int] = set()
        self.homes: dict[int, int] = {}
        for save in sorted(graph.saves, key=lambda save: save.made):
            value = graph.values[save.value]
            if not (save.made <= at < save.released and 0 <= value.born and value.dropped <= at):
                continue
            by_saves.add(save.value)
            if save.read < 0 or value.dropped < save.made or not self._comes_back(save):
                continue
            if at < save.read:
                if value.kind == "activation" and value.bytes:
                    # The last save: a region around an earlier one does not free the value.
                    self.homes[save.value] = save.call
            elif at < (save.released if save.used < 0 else save.used):
                in_use.add(save.value)
        self.homes = {value: home for value, home in self.homes.items() if value not in in_use}
        loose_bytes = sum(graph.values[value].bytes for value in by_saves - in_use)
        self.base_bytes = int(plain.total_bytes[at]) - loose_bytes
        self.in_use = in_use
        self.has_begun = self._begun(at)
        self.passed = self._passed(at)

    def _comes_back(self, save: Save) -> bool:
        """Whether every region around a save has its value in the replay: made inside it, or one of its inputs."""
        return all(save.value in self._given[call] for call in self._entered(save.value, save.call))

    def takers(self, value: int, payer: int) -> list[int]:
        """The calls from `payer` outwards that would hold a value as an input if they were regions."""
        return [call for call in self._entered(value, payer) if value in self._given[call]]

    def _entered(self, value: int, call: int) -> Iterator[int]:
        """A call and the calls around it, from the inside out, that begin after the op that makes a value."""
        born = self._graph.values[value].born
        return takewhile(lambda around: born < self._graph.calls[around].first, self._graph.ancestors(call))

    def _begun(self, at: int) -> list[bool]:
        begun = [False] * len(self._graph.calls)
        for save in self._graph.saves:
            for call in self._graph.ancestors(save.call) if 0 <= save.read <= at else ():
                begun[call] = True
        return begun

    def _passed(self, at: int) -> dict[int, int]:
        graph = self._graph
        saved = {save.value for save in graph.saves}
        passed: dict[int, int] = {}
        for index, call in enumerate(graph.calls):
            if call.first > at:
                continue
            for value in call.inputs:
                facts = graph.values[value]
                if facts.born < 0 or facts.kind != "activation" or facts.dropped > at or value in saved:
                    continue
                if value not in passed or self._is_inside(index, passed[value]):
                    passed[value] = index
        return passed

    def _is_inside(self, call: int, outer: int) -> bool:
        return call > outer and self._graph.calls[call].end <= self._graph.calls[outer].end


def keepable(graph: StepGraph) -> np.ndarray:
    """For each forward op, whether a region may retain its outputs.

    Not if the op writes in place or its output is written later: the retained value would differ. The outputs of ops
    that produce indices and of reducing collectives are always kept by the engine (`lowtide.replay.index_choices`).
    """
    may = np.zeros(graph.num_forward, dtype=bool)
    mutated = {value for op in graph.ops[: graph.num_forward] for value in op.mutates}
    for index, op in enumerate(graph.ops[: graph.num_forward]):
        makes = any(graph.values[value].kind == "activation" for value in op.outputs)
        is_changed = bool(op.mutates) or "mutates" in op.flags or not mutated.isdisjoint(op.outputs)
        may[index] = makes and not is_changed and not op.is_kept
    return may


def replayable(graph: StepGraph, stops: list[int]) -> list[bool]:
    """For each call, whether it can be a region: a named module with ops to replay, all of them replayable.

    So can a call whose saves no backward reads (`Save.is_lost_at`): as a region, it does not hold them in the forward.
    """
    num_lost = saves_inside(graph, [save for save in graph.saves if save.is_lost_at(graph.num_forward)])
    return [
        (stop > call.first or num_lost[index] > 0)
        and bool(call.path)
        and not call.path.startswith("<")
        and index not in graph.unreplayable
        for index, (call, stop) in enumerate(zip(graph.calls, stops, strict=True))
    ]


def contains_layers(graph: StepGraph) -> list[bool]:
    """For each call, whether it contains several layers: calls of one class that themselves contain calls."""
    has_inner = [False] * len(graph.calls)
    for call in graph.calls:
        if call.parent >= 0 and call.end > call.first:
            has_inner[call.parent] = True
    kinds: list[set[str]] = [set() for _ in graph.calls]
    found = [False] * len(graph.calls)
    for index in range(len(graph.calls) - 1, -1, -1):
        call = graph.calls[index]
        if call.parent >= 0:
            if has_inner[index]:
                found[call.parent] |= call.kind in kinds[call.parent]
                kinds[call.parent].add(call.kind)
            found[call.parent] |= found[index]
    return found


def saves_inside(graph: StepGraph, saves: Iterable[Save]) -> np.ndarray:
    """For each call, how many of these saves of the graph were made in it and in calls inside it."""
    found = [0] * len(graph.calls)
    for save in saves:
        for call in graph.ancestors(save.call):
            found[call] += 1
    return np.array(found, dtype=np.int64)


def stops_of(graph: StepGraph) -> list[int]:
    """For each call, the end of its replay as a region that retains nothing: its last saved tensor that is read."""
    stops = [0] * len(graph.calls)
    for save in graph.saves:
        for call in graph.ancestors(save.call) if save.read >= 0 else ():
            stops[call] = max(stops[call], save.made)
    return stops
