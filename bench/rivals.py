"""Knapsack algorithms to compare the solver with; their results are plans for `simulate`.

Each rival has a parameter that trades memory for time, and gives a plan for each of its values; its answer to a budget
is the fastest of these plans whose simulated peak fits. All are compared by the same simulator, so errors of a rival's
own memory model do not count against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch._functorch._activation_checkpointing import knapsack

from lowtide.graph import StepGraph
from lowtide.plans import Plan, Recompute
from lowtide.simulator import Timeline, simulate

_MOST_SIMULATED = 64
_FRACTIONS = 20
_MOST_ITEMS = {"greedy": 1_000_000, "dp": 3_000, "ilp": 1_000}  # dp's table has 10,001 columns of 4 bytes
_ALGORITHMS = {"greedy": knapsack.greedy_knapsack, "dp": knapsack.dp_knapsack, "ilp": knapsack.ilp_knapsack}

Regions = dict[int, tuple[int, ...]]


def plan_of(graph: StepGraph, regions: Regions) -> Plan:
    """Regions given by call numbers, with the ops whose outputs each holds, as a plan."""
    nths = {call: nth for calls in graph.calls_by_path.values() for nth, call in enumerate(calls)}
    return Plan(tuple(Recompute(graph.calls[call].path, nths[call], regions[call]) for call in sorted(regions)))


@dataclass
class Offers:
    """Plans of one rival, the fastest first by its own cost model."""

    graph: StepGraph
    regions: Sequence[Regions]
    _judged: dict[int, Timeline] = field(default_factory=dict)

    def best(self, budget: int) -> Timeline | None:
        """The fastest that fits: all are simulated, or, of very many, those that a bisection looks at."""
        if len(self.regions) <= _MOST_SIMULATED:
            looked_at = list(range(len(self.regions)))
        else:
            low, high, looked_at = 0, len(self.regions) - 1, [len(self.regions) - 1]
            while low < high:
                middle = (low + high) // 2
                looked_at.append(middle)
                if self._judge(middle).peak_bytes <= budget:
                    high = middle
                else:
                    low = middle + 1
        fitting = [t for t in map(self._judge, looked_at) if t.peak_bytes <= budget]
        return min(fitting, key=lambda timeline: timeline.extra_s, default=None)

    def _judge(self, number: int) -> Timeline:
        if number not in self._judged:
            self._judged[number] = simulate(self.graph, plan_of(self.graph, self.regions[number]))
        return self._judged[number]


@dataclass(frozen=True)
class Unit:
    """A call that a rival may replay as a region: what that takes and what it frees, by plain addition.

    `keepable` are ops whose outputs the region could retain, `saved` those of them that the plain step saves.
    """

    call: int
    seconds: float
    freed_bytes: int
    keepable: tuple[int, ...]
    saved: frozenset[int]


def units(graph: StepGraph, blocks: Iterable[int]) -> list[Unit]:
    """The blocks, and the outermost module calls beside them that save anything."""
    wanted = set(blocks)
    above: set[int] = set()
    for call in wanted:
        while (call := graph.calls[call].parent) >= 0:
            above.add(call)
    taken: set[int] = set()
    for index, call in enumerate(graph.calls):
        is_outermost = call.parent not in taken and (call.parent < 0 or call.parent in above)
        if index not in above and is_outermost and not call.path.startswith("<"):
            taken.add(index)
    inside = _top_of(graph, taken)
    stops, values, savers = dict[int, int](), dict[int, set[int]](), dict[int, set[int]]()
    for save in graph.saves:
        top = inside[save.call]
        savers.setdefault(save.value, set()).add(top)
        if top >= 0:
            stops[top] = max(stops.get(top, 0), save.made)
            values.setdefault(top, set()).add(save.value)
    return [_unit(graph, call, stops[call], values[call], savers) for call in sorted(stops)]


def _top_of(graph: StepGraph, taken: set[int]) -> dict[int, int]:
    top = {-1: -1}
    for index, call in enumerate(graph.calls):
        top[index] = index if index in taken else top[call.parent]
    return top


def _unit(graph: StepGraph, call: int, stop: int, saved: set[int], savers: dict[int, set[int]]) -> Unit:
    first = graph.calls[call].first
    ops = range(first, stop)
    keepable = []
    for index in ops:
        made = [value for value in graph.ops[index].outputs if graph.values[value].kind == "activation"]
        is_retainable = graph.retainable.depths[index] >= graph.depths[call]
        if is_retainable and "mutates" not in graph.ops[index].flags and any(graph.values[v].bytes for v in made):
            keepable.append(index - first)
    own = {value for value in saved if graph.values[value].born >= first and savers[value] == {call}}
    held = {v for v in graph.calls[call].inputs if graph.values[v].kind == "activation" and not savers.get(v)}
    freed = sum(graph.values[value].bytes for value in own) - sum(graph.values[value].bytes for value in held)
    seconds = sum(graph.ops[index].seconds for index in ops)
    makers = frozenset(graph.values[value].born - first for value in saved if graph.values[value].born in ops)
    return Unit(call, seconds, freed, tuple(keepable), makers.intersection(keepable))


def block_knapsack(graph: StepGraph, blocks: Iterable[int]) -> Offers:
    """Each unit is kept or recomputed: an exact knapsack over bytes, all its Pareto optima at once.

    Equal units are taken together, the earliest first, so that the states stay few. Bytes are added up; the moment at
    which they are held, transients and gradients are not its concern.
    """
    groups: dict[tuple[int, float], list[int]] = {}
    for unit in units(graph, blocks):
        if unit.freed_bytes > 0:
            groups.setdefault((unit.freed_bytes, unit.seconds), []).append(unit.call)
    states: list[tuple[float, int, tuple[int, ...]]] = [(0.0, 0, ())]  # seconds, bytes freed, how many of each group
    for (freed, seconds), calls in groups.items():
        grown = [(s + seconds * n, b + freed * n, (*t, n)) for s, b, t in states for n in range(len(calls) + 1)]
        states, most = [], -1
        for state in sorted(grown, key=lambda state: (state[0], -state[1])):
            if state[1] > most:
                most = state[1]
                states.append(state)
    members = list(groups.values())
    return Offers(
        graph,
        [
            {call: () for calls, n in zip(members, taken, strict=True) for call in calls[:n]}
            for _, _, taken in states[1:]
        ],
    )


def torch_knapsack(graph: StepGraph, blocks: Iterable[int], *, thorough: bool = True) -> Offers:
    """torch's own knapsacks over op outputs, as its compiled partitioner uses them for `activation_memory_budget`.

    An item is the output of an op: its bytes, as a share of what may be freed, against its seconds; one run per
    fraction of memory, 21 in all. As in torch, items are the outputs of compute-intensive ops (those with FLOPs);
    to be generous, also all outputs that the plain step saves. What is not saved is recomputed: each unit becomes a
    region that holds the items saved in it, and none where that is all that the plain step saves there. torch does not
    count what else the recomputation of one node needs, nor transients.
    """
    found: dict[tuple[tuple[int, tuple[int, ...]], ...], Regions] = {}
    every = units(graph, blocks)
    for wanted in (_products, _saved) if thorough else (_products,):
        items = [(unit.call, op) for unit in every for op in wanted(graph, unit)]
        sizes = [_output_bytes(graph, call, op) for call, op in items]
        seconds = [graph.ops[graph.calls[call].first + op].seconds for call, op in items]
        whole = max(1, sum(sizes))
        shares = [size / whole for size in sizes]
        for name, algorithm in _ALGORITHMS.items():
            if not items or len(items) > _MOST_ITEMS[name] or (name != "greedy" and not thorough):
                continue
            for step in range(_FRACTIONS + 1):
                chosen = algorithm(shares, seconds, step / _FRACTIONS)[1]
                regions = _regions_of(every, [items[number] for number in chosen])
                found.setdefault(tuple(sorted(regions.items())), regions)
    return Offers(graph, sorted(found.values(), key=lambda regions: _replayed_s(graph, every, regions)))


def _products(graph: StepGraph, unit: Unit) -> list[int]:
    first = graph.calls[unit.call].first
    return [op for op in unit.keepable if graph.ops[first + op].flops]


def _saved(graph: StepGraph, unit: Unit) -> list[int]:
    return sorted(unit.saved)


def _output_bytes(graph: StepGraph, call: int, op: int) -> int:
    return sum(graph.values[value].bytes for value in graph.ops[graph.calls[call].first + op].outputs)


def _regions_of(every: list[Unit], kept: list[tuple[int, int]]) -> Regions:
    held: dict[int, list[int]] = {unit.call: [] for unit in every}
    for call, op in kept:
        held[call].append(op)
    return {unit.call: tuple(sorted(held[unit.call])) for unit in every if not unit.saved <= set(held[unit.call])}


def _replayed_s(graph: StepGraph, every: list[Unit], regions: Regions) -> float:
    replayed = 0.0
    for unit in every:
        if unit.call in regions:
            first = graph.calls[unit.call].first
            replayed += unit.seconds - sum(graph.ops[first + op].seconds for op in regions[unit.call])
    return replayed
