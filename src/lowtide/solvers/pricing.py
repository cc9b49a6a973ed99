"""The best plan for a price: `seconds + price * bytes held`, exactly, over all plans the eager engine can run.

A forward op is either outside of every replayed region, and then its saves are held; or inside one, and then it is run
again or its output is held. So with a price per byte each op of a region decides for itself, a region costs the sum
over its ops and its inputs, and which regions to take is decided from the leaves of the module tree upwards: a call is
either one region, or what is best for its ops and the calls inside it. Regions inside regions change what a replay
holds, not what the forward leaves behind, so they have no place here.

Bytes are those held at one moment, while op `at` runs; each value is charged once, at the first save of it that
the backward has yet to read. Charging no value twice and none that the moment does not hold is what makes
`seconds + price * bytes` a lower bound for every plan (see `bounds`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lowtide.graph import StepGraph
from lowtide.simulator import Timeline

NEVER = 1 << 30


@dataclass(frozen=True)
class Choice:
    """Regions to replay (a call, and ops inside it whose outputs are held), what they take and what is held in all."""

    seconds: float
    bytes: float
    regions: dict[int, tuple[int, ...]]


class Pricing:
    """A graph's costs as arrays, for the moment at which op `at` of the plain step `plain` runs.

    `discount` is taken off the price of values that could be moved instead: saves outside of regions, and inputs.
    """

    def __init__(self, graph: StepGraph, plain: Timeline, at: int, discount: float = 0.0) -> None:
        self.graph = graph
        self.at = at
        self._dispatch_s = graph.hardware.dispatch_s
        num = graph.num_forward
        self._depth, self._last = _depths(graph)
        homes = _homes(graph, at)
        self.charged_bytes = sum(graph.values[value].bytes for value in homes)
        event = int(np.flatnonzero(plain.ops == at)[0])
        self.base_bytes = int(plain.total_bytes[event]) - self.charged_bytes
        self._seconds = np.array([op.seconds for op in graph.ops[:num]])
        self._size = np.zeros(num)
        self._shared_depth = np.full(num, NEVER)  # how deep a region may be and still pay for an op's output
        self._may_keep = np.zeros(num, dtype=bool)
        self._must_keep = np.zeros(num, dtype=bool)
        mutated = {value for op in graph.ops[:num] for value in op.mutates}
        for index, op in enumerate(graph.ops[:num]):
            made = [value for value in op.outputs if graph.values[value].kind == "activation"]
            self._size[index] = sum(graph.values[value].bytes for value in made)
            self._may_keep[index] = bool(made) and "mutates" not in op.flags and mutated.isdisjoint(made)
            self._must_keep[index] = self._may_keep[index] and "index" in op.flags
            if len(made) == 1 and made[0] in homes:
                self._shared_depth[index] = self._common_depth(op.call, homes[made[0]])
        self._direct, self._inputs = (sizes * (1 - discount) for sizes in self._charges(homes))
        self._stop = _stops(graph)
        self._children: list[list[int]] = [[] for _ in graph.calls]
        self._roots: list[int] = []
        for index, call in enumerate(graph.calls):
            (self._roots if call.parent < 0 else self._children[call.parent]).append(index)
        self.replayable = [
            stop > call.first and call.parent >= 0 and not call.path.startswith("<")
            for call, stop in zip(graph.calls, self._stop, strict=True)
        ]

    def _charges(self, homes: dict[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Bytes that each call holds directly if it is no region, and as inputs if it is one."""
        graph = self.graph
        direct, inputs = np.zeros(len(graph.calls) + 1), np.zeros(len(graph.calls))
        for value, home in homes.items():
            direct[home] += graph.values[value].bytes
        payers = self._payers(homes)
        for index, call in enumerate(graph.calls):
            for value in set(call.inputs):
                if value in payers and index <= payers[value] <= self._last[index]:
                    inputs[index] += graph.values[value].bytes
        return direct, inputs

    def _payers(self, homes: dict[int, int]) -> dict[int, int]:
        """For each value that regions would hold as an input: the call that a region must contain to be charged for it.

        That is the call that saves it first; of a value that nothing saves, the innermost call that it goes to first.
        """
        graph, at = self.graph, self.at
        saved = {save.value for save in graph.saves}
        payers = dict(homes)
        for index, call in enumerate(graph.calls):
            if call.first > at:
                continue
            for value in call.inputs:
                facts = graph.values[value]
                if facts.kind != "activation" or facts.dropped > at or value in saved:
                    continue
                payer = payers.setdefault(value, index)
                if payer < index <= self._last[payer]:
                    payers[value] = index
        return payers

    def _common_depth(self, a: int, b: int) -> int:
        calls, depth = self.graph.calls, self._depth
        while a != b:
            if depth[a] >= depth[b]:
                a = calls[a].parent
            else:
                b = calls[b].parent
        return depth[a]

    def best(self, price: float) -> Choice:
        """The choice that minimises seconds plus `price` times bytes."""
        calls = self.graph.calls
        held = price * self._size
        plain_sums = np.concatenate([[0.0], np.cumsum(self._seconds)])
        must_sums = np.concatenate([[0], np.cumsum(self._must_keep)])
        sums = {}
        for depth in sorted(set(self._depth[:-1])):
            charge = np.where(depth <= self._shared_depth, held, 0.0)
            either = np.where(self._may_keep, np.minimum(self._seconds, charge), self._seconds)
            either = np.where(self._must_keep, charge, either)
            sums[depth] = np.concatenate([[0.0], np.cumsum(either)])
        cost = np.zeros(len(calls))
        as_region: list[int] = [0] * len(calls)  # 0: no region, 1: a plain one, 2: one that holds outputs
        for index in range(len(calls) - 1, -1, -1):
            apart = price * self._direct[index] + sum(cost[child] for child in self._children[index])
            cost[index] = apart
            if not self.replayable[index]:
                continue
            first, stop = calls[index].first, self._stop[index]
            entry = price * self._inputs[index]
            simple = entry + plain_sums[stop] - plain_sums[first]
            if must_sums[stop] > must_sums[first]:
                simple = np.inf
            by_depth = sums[self._depth[index]]
            holding = entry + by_depth[stop] - by_depth[first] + self.dispatch_s(index)
            if min(simple, holding) < apart * (1 - 1e-9):
                as_region[index] = 1 if simple <= holding else 2
                cost[index] = min(simple, holding)
        return self._collect(price, as_region)

    def dispatch_s(self, call: int) -> float:
        """What it costs to watch each op of a region, in its forward and in its replay."""
        first, end = self.graph.calls[call].first, self.graph.calls[call].end
        return self._dispatch_s * ((end - first) + (self._stop[call] - first))

    def _collect(self, price: float, as_region: list[int]) -> Choice:
        regions: dict[int, tuple[int, ...]] = {}
        seconds, size = 0.0, float(self._direct[-1])
        pending = list(self._roots)
        while pending:
            index = pending.pop()
            call = self.graph.calls[index]
            if not as_region[index]:
                size += self._direct[index]
                pending += self._children[index]
                continue
            kept: list[int] = []
            size += self._inputs[index]
            if as_region[index] == 2:
                seconds += self.dispatch_s(index)
                for op in range(call.first, self._stop[index]):
                    shared = self._depth[index] <= self._shared_depth[op]
                    charge = price * self._size[op] if shared else 0.0
                    if self._must_keep[op] or (self._may_keep[op] and charge < self._seconds[op]):
                        kept.append(op - call.first)
                        size += self._size[op] if shared else 0.0
                    else:
                        seconds += self._seconds[op]
            else:
                seconds += float(self._seconds[call.first : self._stop[index]].sum())
            regions[index] = tuple(kept)
        return Choice(seconds, size, regions)


def hull(pricing: Pricing, most: int = 64) -> list[Choice]:
    """The choices on the lower convex hull of seconds over bytes, from everything held to as little as can be."""
    first, last = pricing.best(0.0), pricing.best(1e6)
    found = [first, last]

    def between(low: Choice, high: Choice) -> None:
        if len(found) >= most or low.bytes <= high.bytes or high.seconds <= low.seconds:
            return
        price = (high.seconds - low.seconds) / (low.bytes - high.bytes)
        choice = pricing.best(price)
        gain = (low.seconds + price * low.bytes) - (choice.seconds + price * choice.bytes)
        if gain <= 1e-9 * (low.seconds + high.seconds) or not high.bytes < choice.bytes < low.bytes:
            return
        found.append(choice)
        between(low, choice)
        between(choice, high)

    between(first, last)
    unique = {(choice.bytes, choice.seconds): choice for choice in found}
    return [unique[key] for key in sorted(unique, key=lambda key: (-key[0], key[1]))]


def _homes(graph: StepGraph, at: int) -> dict[int, int]:
    """For each value that only saves yet to be read hold while op `at` runs: the call of the first such save."""
    homes: dict[int, int] = {}
    for save in sorted(graph.saves, key=lambda save: save.made):
        value = graph.values[save.value]
        if save.made <= at < save.read and value.kind == "activation" and value.dropped <= at and value.bytes:
            homes.setdefault(save.value, save.call)
    in_use = {save.value for save in graph.saves if 0 <= save.read <= at < save.released}
    return {value: home for value, home in homes.items() if value not in in_use}


def _stops(graph: StepGraph) -> list[int]:
    """The position up to which each call is replayed if it is a region: its last save, or an inner call's."""
    stops = [0] * len(graph.calls)
    for save in graph.saves:
        call = save.call
        while call >= 0 and stops[call] < save.made:
            stops[call] = save.made
            call = graph.calls[call].parent
    return stops


def _depths(graph: StepGraph) -> tuple[list[int], list[int]]:
    """Each call's depth in the tree (of no call, at the end: -1), and the last call inside it."""
    depth: list[int] = []
    last = list(range(len(graph.calls)))
    for call in graph.calls:
        depth.append(depth[call.parent] + 1 if call.parent >= 0 else 0)
    for index in range(len(graph.calls) - 1, -1, -1):
        parent = graph.calls[index].parent
        if parent >= 0:
            last[parent] = max(last[parent], last[index])
    return [*depth, -1], last
