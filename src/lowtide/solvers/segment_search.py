"""Plans with segments: chains of calls cut in the best way for each amount of memory, and as people do by hand.

None of these plans depends on the budget: each is simulated, and of those that fit a budget the fastest is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import TypeVar

import numpy as np

from lowtide.graph.segments import Span, has_gaps, runs, with_segments
from lowtide.graph.step_graph import StepGraph
from lowtide.plans.step_plan import Plan
from lowtide.simulator.eager_intervals import EagerIntervals
from lowtide.simulator.timeline import simulate
from lowtide.solvers.candidate import Candidate, Codecs, Regions
from lowtide.solvers.chain_program import ChainProgram, Item, ItemCosts, Segmentation, items_of, kept_ops
from lowtide.solvers.hull import HullPoint, Pricing
from lowtide.solvers.placement import OffloadSelector
from lowtide.solvers.region_costs import replayable, stops_of

_NUM_SLOTS = 256
_FINE = (4, 1)  # slots for what passes between two calls
_MOST_WAYS = 6  # of the choices on a hull
_MOST_RETAINING = 4  # sets of outputs that segments retain
_LEAST_GAIN = 0.05  # of the time of a chain's forward
_MOST_LEVELS = 3  # of calls inside an item that are regions
_MOST_PLAYED_OPS = 600_000  # of all plans that are simulated
_MOST_PLANS = 400
_FEWEST_PLANS = 32
_MOST_MOVED = 6  # plans of which values are moved
_MOST_DEPTH = 8  # of segments inside one another: each is replayed from inside the replay of the one around it
_MOST_PARTS = 24  # of a chain that is cut evenly

_SEQUENTIAL, _EVERY_PART, _TWO_LEVELS = "sequential checkpoints", "a checkpoint per part", "two levels of checkpoints"

_Item = TypeVar("_Item")


class SegmentSearch:
    """Finds plans of a graph whose regions are segments, of which there are none if no calls follow each other."""

    def __init__(self, pricing: Pricing, choices: Sequence[HullPoint]) -> None:
        self._graph, self._pricing, self._choices = pricing.graph, pricing, choices
        self.chains = chosen_runs(self._graph)
        self._can = replayable(self._graph, stops_of(self._graph))
        self._known: dict[Segmentation, Candidate | None] = {}

    def plans(
        self,
        is_late: Callable[[], bool],
        mover: OffloadSelector,
        shares: Iterable[float] = (),
        all_codecs: Iterable[Codecs] = (),
    ) -> list[Candidate]:
        """Plans with segments, each simulated; the best of them also with values moved and encoded.

        `shares` are of the link, and `all_codecs` what may be encoded; those that use neither are simulated anyway.
        """
        if not self.chains:
            return []
        most = max(_FEWEST_PLANS, min(_MOST_PLANS, _MOST_PLAYED_OPS // max(len(self._graph.ops), 1)))
        found: list[Candidate] = []
        has_any_gaps = any(has_gaps(self._graph, chain) for chain in self.chains)
        retaining = [] if has_any_gaps else self._retaining()
        for wanted in (
            list(self._by_hand.values()),
            self._best(is_late),
            *([self._by_hand_retaining(retaining), self._best(is_late, retaining)] if retaining else ()),
        ):
            for number, plan in enumerate(_thinned(wanted, most)):
                if number >= _FEWEST_PLANS and is_late():
                    break
                played = self._found(plan)
                found += [] if played is None else [played]
        front = _front(found)
        ways = [(share, codecs) for share, codecs in product({0.0, *shares}, {(), *all_codecs}) if share or codecs]
        more = [
            replace(plan, share=share, codecs=codecs)
            for share, codecs in sorted(ways)
            for plan in _thinned(front, _MOST_MOVED)
        ]
        return front + [_simulated(self._graph, plan, mover) for plan in more if not is_late()]

    def by_hand(self) -> dict[str, Candidate]:
        """What people do with torch's checkpoint on a chain, by name, each simulated."""
        found = {name: self._found(plan) for name, plan in self._by_hand.items()}
        return {name: plan for name, plan in found.items() if plan is not None}

    def _found(self, plan: Segmentation) -> Candidate | None:
        """A plan on the graph with its segments, simulated; None if it has none, or the engine cannot run them."""
        if plan not in self._known:
            can_be = bool(plan.spans) and _depth(plan.spans) <= _MOST_DEPTH
            self._known[plan] = self._played(plan) if can_be else None
        return self._known[plan]

    def _played(self, plan: Segmentation) -> Candidate | None:
        graph = with_segments(self._graph, plan.spans)
        numbers = {graph.names_of(call): call for call in range(len(graph.calls))}
        names = [(self._graph.names_of(call), kept) for call, kept in plan.regions.items() if self._can[call]]
        regions: Regions = {numbers[name]: kept for name, kept in names}
        for call, facts in enumerate(graph.calls):
            if facts.kind == "Segment":
                regions[call] = tuple(sorted(op - facts.first for op in plan.kept if facts.first <= op < facts.end))
        if any(call in graph.unreplayable for call in regions):
            return None
        played = EagerIntervals(graph, dict(sorted(regions.items())))
        return Candidate(regions, 0.0, (), played.peak_bytes, played.extra_s, plan.spans)

    def _best(self, is_late: Callable[[], bool], retained: Sequence[Regions] = ()) -> list[Segmentation]:
        """The best cuts of the chains, for memory from the least on, in fine steps and if there is time in others."""
        graph, items = self._graph, items_of(self._graph, self.chains)
        measuring = ItemCosts(graph, items)
        ways = [measuring.way({}, is_inner=True)]
        ways += [measuring.way(regions, is_inner=True) for regions in self._inner_levels(items)]
        retaining = [measuring.way(regions, is_inner=False) for regions in retained]
        ways += [*retaining, *(measuring.way(regions, is_inner=False) for regions in self._of_choices(items))]
        calls: Regions = {call: () for item in items for call in item.calls if self._can[call]}
        dropped, carried = measuring.way(calls, is_inner=False), measuring.carried(ways[0])
        lowest = float(np.minimum.reduce([way.backward for way in ways]).min())
        range_bytes = max(float(EagerIntervals(graph, {}).peak_bytes) - lowest, 1.0)
        links = sorted(size for size in measuring.links if size)
        coarse = range_bytes / (_NUM_SLOTS - 1)
        link = links[len(links) // 2] if links else 0
        if link > coarse:  # what most calls are given takes up whole slots
            coarse = link / (link // coarse)
        found: dict[Segmentation, None] = {}
        for slot in sorted({coarse, *(link / number for number in _FINE if 0 < link / number < coarse)}):
            if found and is_late():
                break
            num = min(_NUM_SLOTS, math.ceil(range_bytes / slot) + 1)
            table = ChainProgram(graph, items, ways, dropped, retaining, measuring.links, carried, slot, num)
            found |= dict.fromkeys(table.all_plans())
        return list(found)

    def _inner_levels(self, items: Sequence[Item]) -> list[Regions]:
        """The calls inside each item as regions: those of one level, and those of the next inside them."""
        graph = self._graph
        around = {call for item in items for call in item.calls}
        found: list[Regions] = []
        level, regions = around, dict[int, tuple[int, ...]]()
        for _ in range(_MOST_LEVELS):
            level = {call for call in range(len(graph.calls)) if graph.calls[call].parent in level}
            inside: Regions = {call: () for call in sorted(level) if self._can[call]}
            if not inside:
                break
            regions = {**regions, **inside}
            found.append(regions)
            if len(found) > 1:
                found.append(inside)
        return found

    def _of_choices(self, items: Sequence[Item]) -> list[Regions]:
        """Some of the choices on a hull, less regions that are in no single item."""
        starts = [item.first for item in items]
        found: dict[tuple[object, ...], Regions] = {}
        for choice in self._choices[1:]:
            regions: Regions = {}
            for call, kept in choice.regions.items():
                first, end = self._graph.calls[call].first, self._graph.calls[call].end
                item = items[max(np.searchsorted(starts, first, "right") - 1, 0)]
                if end <= item.end and len(item.calls) < 2:
                    regions[call] = kept
            if regions:
                found.setdefault(tuple(sorted(regions.items())), regions)
        return _thinned(list(found.values()), _MOST_WAYS)

    def _retaining(self) -> list[Regions]:
        """The calls of the chains as regions that retain outputs: those that gain most seconds per byte, or more.

        None where that gains hardly anything: the dispatch mode of such replays costs the host more than is modelled.
        """
        graph = self._graph
        gains_s = graph.arrays.seconds[: graph.num_forward] - graph.retainable.substituted_s
        gains: dict[int, dict[int, float]] = {}  # per byte, by call and op
        for call in (call for run in self.chains for call in run if self._can[call]):
            ops = [op for op in self._pricing.keepable_in(call) if gains_s[op] > 0]
            sizes = [sum(graph.values[value].bytes for value in graph.ops[op].outputs) for op in ops]
            gains[call] = {op: float(gains_s[op]) / size for op, size in zip(ops, sizes, strict=True) if size}
        all_gains = sorted((gain for each in gains.values() for gain in each.values()), reverse=True)
        total_s = sum(float(graph.arrays.seconds[graph.calls[c].first : graph.calls[c].end].sum()) for c in gains)
        found: list[Regions] = []
        for least in dict.fromkeys(_thinned(all_gains, _MOST_RETAINING + 1)[1:]):
            kept = {call: [op for op, gain in each.items() if gain >= least] for call, each in gains.items()}
            if sum(float(gains_s[ops].sum()) for ops in kept.values()) > _LEAST_GAIN * total_s:
                found.append({call: tuple(op - graph.calls[call].first for op in ops) for call, ops in kept.items()})
        return found

    @cached_property
    def _by_hand(self) -> dict[str, Segmentation]:
        """The longest chain in parts of about the same size, by name: recomputed as they are, and layer by layer.

        torch's `checkpoint_sequential` keeps the last part.
        """
        if not self.chains:
            return {}
        chain = max(self.chains, key=len)
        found: dict[str, Segmentation] = {}
        layers: Regions = dict.fromkeys(chain, ())
        for parts in range(2, min(_MOST_PARTS, len(chain)) + 1):
            size = len(chain) // parts  # as checkpoint_sequential cuts
            starts = range(0, size * parts, size)
            spans = [chain[start : start + size] for start in starts[:-1]] + [chain[starts[-1] :]]
            for kind, some in ((_SEQUENTIAL, spans[:-1]), (_EVERY_PART, spans)):
                segments = tuple((span[0], span[-1]) for span in some if len(span) > 1)
                singles: Regions = {span[0]: () for span in some if len(span) == 1}
                found[f"{kind}, {parts} parts"] = Segmentation(segments, singles)
                found[f"{_TWO_LEVELS}, {kind}, {parts} parts"] = Segmentation(segments, layers)
        return found

    def _by_hand_retaining(self, retained: Sequence[Regions]) -> list[Segmentation]:
        """As by hand, with outputs retained instead of regions inside."""
        all_kept = [frozenset(kept_ops(self._graph, regions)) for regions in retained]
        plain = [plan for name, plan in self._by_hand.items() if not name.startswith(_TWO_LEVELS)]
        return [replace(plan, kept=kept) for plan in plain for kept in all_kept]


def plan_of(graph: StepGraph, found: Candidate, mover: OffloadSelector) -> Plan:
    """What was found, as a plan names it."""
    return mover.on(with_segments(graph, found.spans)).plan(*found.decisions)


def _simulated(graph: StepGraph, found: Candidate, mover: OffloadSelector) -> Candidate:
    timeline = simulate(graph, plan_of(graph, found, mover))
    return replace(found, peak_bytes=timeline.peak_bytes, extra_s=timeline.extra_s)


def _depth(spans: Iterable[Span]) -> int:
    """How many segments lie inside one another."""
    deepest, around = 0, list[int]()
    for first, last in sorted(spans, key=lambda span: (span[0], -span[1])):
        while around and around[-1] < first:
            around.pop()
        around.append(last)
        deepest = max(deepest, len(around))
    return deepest


def chosen_runs(graph: StepGraph) -> list[tuple[int, ...]]:
    """Runs to cut, none inside another: those first that have many calls, and many ops."""

    def weight(run: tuple[int, ...]) -> int:
        return len(run) ** 2 * (graph.calls[run[-1]].end - graph.calls[run[0]].first)

    found: list[tuple[int, ...]] = []
    for run in sorted(runs(graph), key=lambda run: (-weight(run), run)):
        first, end = graph.calls[run[0]].first, graph.calls[run[-1]].end
        if all(graph.calls[o[-1]].end <= first or end <= graph.calls[o[0]].first for o in found):
            found.append(run)
    return found


def _thinned(items: list[_Item], most: int) -> list[_Item]:
    if len(items) <= most:
        return items
    return [items[index] for index in np.unique(np.linspace(0, len(items) - 1, most).round().astype(int))]


def _front(plans: list[Candidate]) -> list[Candidate]:
    """Plans that no other is faster and smaller than, the smallest first."""
    found: list[Candidate] = []
    for plan in sorted(plans, key=lambda plan: (plan.extra_s, plan.peak_bytes)):
        if not found or plan.peak_bytes < found[-1].peak_bytes:
            found.append(plan)
    return found[::-1]
