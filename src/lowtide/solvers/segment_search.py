"""Candidates whose regions are segments: runs of consecutive layers that are recomputed together.

A segment holds only the input of its first layer, so memory can grow with the square root of the depth (Chen et al.
2016) or, nested, with its logarithm (Griewank and Walther 2000). Two sources: the chain cut into equal parts, as
`torch.utils.checkpoint.checkpoint_sequential` does, and the dynamic programme of `chain_program` (rotor, Beaumont et
al. 2019), whose table has a segmentation for every amount of memory. `EagerSearch` includes all of them, whatever the
budget.

Cost: up to three tables, and one simulation per candidate (600,000 simulated ops, 32 to 100 candidates per source).
Skipped if the step has no runs: calls of modules that follow each other with no op in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product

import numpy as np

from lowtide.graph.segments import Span, has_gaps, runs, with_segments
from lowtide.graph.step_graph import StepGraph
from lowtide.plans.step_plan import Plan
from lowtide.simulator.eager_intervals import EagerIntervals
from lowtide.simulator.timeline import simulate
from lowtide.solvers.candidate import Candidate, Codecs, Regions, thinned
from lowtide.solvers.chain_program import ChainProgram, Item, ItemCosts, Segmentation, items_of
from lowtide.solvers.hull import HullPoint, Pricing
from lowtide.solvers.placement import OffloadSelector
from lowtide.solvers.region_costs import replayable, stops_of

_NUM_SLOTS = 256  # memory steps of a table
_FINE = (4, 1)  # further tables, whose slot is the tensor between two layers divided by these numbers
_MOST_WAYS = 6  # hull points that are options for an item
_MOST_RETAINING = 4  # sets of outputs that segments retain
_LEAST_GAIN = 0.05  # of the time of a chain's forward: less is not worth a dispatch mode in every replay
_MOST_LEVELS = 3  # levels of calls inside an item that are regions
_MOST_PLAYED_OPS = 600_000  # of all candidates that are simulated
_MOST_PLANS = 100  # candidates per source; 400 gave the same plans
_FEWEST_PLANS = 32
_MOST_MOVED = 6  # candidates that are also simulated with offload
_MOST_DEPTH = 16  # of nested segments: each is replayed inside the replay of the one around it
_MOST_PARTS = 24  # of a chain that is cut into equal parts

_SEQUENTIAL, _EVERY_PART, _TWO_LEVELS = "sequential checkpoints", "a checkpoint per part", "two levels of checkpoints"


class SegmentSearch:
    """Finds candidates with segments; none if the graph has no runs. `choices` are hull points of `pricing`."""

    def __init__(self, pricing: Pricing, choices: Sequence[HullPoint]) -> None:
        self._graph, self._pricing, self._choices = pricing.graph, pricing, choices
        self.chains = chosen_runs(self._graph)
        self._can = replayable(self._graph, stops_of(self._graph))
        self._known: dict[Segmentation, Candidate | None] = {}

    def candidates(
        self,
        is_late: Callable[[], bool],
        mover: OffloadSelector,
        shares: Iterable[float] = (),
        all_codecs: Iterable[Codecs] = (),
    ) -> list[Candidate]:
        """Candidates with segments that no other is both faster and smaller than.

        Some of them are also simulated with offload at these `shares` of the link, and with each of `all_codecs`.
        """
        if not self.chains:
            return []
        most = max(_FEWEST_PLANS, min(_MOST_PLANS, _MOST_PLAYED_OPS // max(len(self._graph.ops), 1)))
        simulated: list[Candidate] = []
        has_any_gaps = any(has_gaps(self._graph, chain) for chain in self.chains)
        retaining = [] if has_any_gaps else self._retaining()
        for wanted in (
            list(self._equal_parts.values()),
            self._best(is_late),
            *([self._best(is_late, retaining)] if retaining else ()),
        ):
            for number, segmentation in enumerate(thinned(wanted, most)):
                if number >= _FEWEST_PLANS and is_late():
                    break
                candidate = self._candidate(segmentation)
                simulated += [] if candidate is None else [candidate]
        front = _front(simulated)
        options = [(share, codecs) for share, codecs in product({0.0, *shares}, {(), *all_codecs}) if share or codecs]
        more = [
            replace(plan, share=share, codecs=codecs)
            for share, codecs in sorted(options)
            for plan in thinned(front, _MOST_MOVED)
        ]
        return front + [_simulated(self._graph, plan, mover) for plan in more if not is_late()]

    def equal_parts(self) -> dict[str, Candidate]:
        """The candidates that users can write with torch's checkpoint: the chain in equal parts, by name."""
        all_parts = {name: self._candidate(parts) for name, parts in self._equal_parts.items()}
        return {name: candidate for name, candidate in all_parts.items() if candidate is not None}

    def _candidate(self, plan: Segmentation) -> Candidate | None:
        """The simulated candidate; None if it has no segments, or segments that the engine cannot run."""
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
        """The segmentations of the dynamic programme, with fine memory steps and, if there is time, coarser ones."""
        graph, items = self._graph, items_of(self._graph, self.chains)
        costs = ItemCosts(graph, items)
        options = [costs.option({}, is_inner=True)]
        options += [costs.option(regions, is_inner=True) for regions in self._inner_levels(items)]
        retaining = [costs.option(regions, is_inner=False) for regions in retained]
        options += [*retaining, *(costs.option(regions, is_inner=False) for regions in self._of_choices(items))]
        calls: Regions = {call: () for item in items for call in item.calls if self._can[call]}
        dropped, carried = costs.option(calls, is_inner=False), costs.carried(options[0])
        lowest = float(np.minimum.reduce([option.backward for option in options]).min())
        range_bytes = max(float(EagerIntervals(graph, {}).peak_bytes) - lowest, 1.0)
        links = sorted(size for size in costs.links if size)
        coarse = range_bytes / (_NUM_SLOTS - 1)
        link = links[len(links) // 2] if links else 0
        if link > coarse:  # so that the tensor between two layers takes a whole number of slots
            coarse = link / (link // coarse)
        unique: dict[Segmentation, None] = {}
        for slot in sorted({coarse, *(link / number for number in _FINE if 0 < link / number < coarse)}):
            if unique and is_late():
                break
            num = min(_NUM_SLOTS, math.ceil(range_bytes / slot) + 1)
            table = ChainProgram(costs, options, dropped, retaining, carried, slot, num)
            unique |= dict.fromkeys(table.segmentations())
        return list(unique)

    def _inner_levels(self, items: Sequence[Item]) -> list[Regions]:
        """Regions inside items: the calls of one level below, of two levels, of the second level alone, and so on."""
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
        """Some hull points, without their regions that span several items."""
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
        return thinned(list(found.values()), _MOST_WAYS)

    def _retaining(self) -> list[Regions]:
        """Sets of outputs that segments may retain, by call: those that save the most seconds per byte, then more.

        Empty where that saves little: the dispatch mode of such replays costs the host more than is modelled.
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
        for least in dict.fromkeys(thinned(all_gains, _MOST_RETAINING + 1)[1:]):
            kept = {call: [op for op, gain in each.items() if gain >= least] for call, each in gains.items()}
            if sum(float(gains_s[ops].sum()) for ops in kept.values()) > _LEAST_GAIN * total_s:
                found.append({call: tuple(op - graph.calls[call].first for op in ops) for call, ops in kept.items()})
        return found

    @cached_property
    def _equal_parts(self) -> dict[str, Segmentation]:
        """The longest chain in equal parts, by name: with all parts recomputed, or all but the last.

        torch's `checkpoint_sequential` does not recompute the last part. The variants with two levels have a region
        for each layer inside its part.
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


def plan_of(graph: StepGraph, candidate: Candidate, mover: OffloadSelector) -> Plan:
    """The `Plan` of a candidate with segments."""
    return mover.on(with_segments(graph, candidate.spans)).plan(*candidate.decisions)


def _simulated(graph: StepGraph, candidate: Candidate, mover: OffloadSelector) -> Candidate:
    timeline = simulate(graph, plan_of(graph, candidate, mover))
    return replace(candidate, peak_bytes=timeline.peak_bytes, extra_s=timeline.extra_s)


def _depth(spans: Iterable[Span]) -> int:
    """The number of levels of nested segments."""
    deepest, around = 0, list[int]()
    for first, last in sorted(spans, key=lambda span: (span[0], -span[1])):
        while around and around[-1] < first:
            around.pop()
        around.append(last)
        deepest = max(deepest, len(around))
    return deepest


def chosen_runs(graph: StepGraph) -> list[tuple[int, ...]]:
    """Disjoint runs to cut into segments, preferring runs with many calls and many ops."""

    def weight(run: tuple[int, ...]) -> int:
        return len(run) ** 2 * (graph.calls[run[-1]].end - graph.calls[run[0]].first)

    found: list[tuple[int, ...]] = []
    for run in sorted(runs(graph), key=lambda run: (-weight(run), run)):
        first, end = graph.calls[run[0]].first, graph.calls[run[-1]].end
        if all(graph.calls[o[-1]].end <= first or end <= graph.calls[o[0]].first for o in found):
            found.append(run)
    return found


def _front(plans: list[Candidate]) -> list[Candidate]:
    """Candidates that no other is both faster and smaller than, the smallest first."""
    found: list[Candidate] = []
    for plan in sorted(plans, key=lambda plan: (plan.extra_s, plan.peak_bytes)):
        if not found or plan.peak_bytes < found[-1].peak_bytes:
            found.append(plan)
    return found[::-1]
