"""The search for plans of an eager step.

The plain step's peak names the moment at which memory is short. For that moment `pricing` gives the best plans for
every price of a byte, which lie on a convex hull; `chain` fills in the plans between them. The first plan of the chain
found whose *simulated* peak fits is taken: what it holds at other moments, in replays too, counts. Where replays hold
too much for that, `nesting` takes regions of the chain's plans apart. With memory on the host, `moving` does the same
for links used to various shares, also with layers that change in an even spread and with what `loading` makes. Where
codecs are allowed there are chains more, with values encoded (`pressing`). Beside these there are plans with segments
(`segmenting`), `standing` plans, and for smaller steps those that `exploring` finds and the smallest, by `lowering`;
the fastest that fits is taken. The hull is also a bound on what any plan costs.

Neither chains, nested or not, nor the others depend on the budget; each by itself gives no slower plan for a larger
budget, and the same plan for a smaller one that it fits in too, and so the fastest of them does as well.

Plans for steps with two time lines, host and device.

What a plan adds to one line is a sum over its regions, which pricing needs; what it adds to the step is not. So plans
are found for each line by itself, by a `EagerSearch` on the graph of that line, and judged by the simulation of both.
Only the line that limits the plain step is searched, unless the other is close: then plans can make that one the limit.
A trace of the other line is mixed in: of plans that are alike on one line, the one that asks less of the other is
better.

A step takes no less than either line works, nor than their mean, so the larger of the two bounds is one for the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import product

import numpy as np

from lowtide.errors import InfeasibleBudgetError, PlanError
from lowtide.graph.segments import with_segments
from lowtide.graph.step_graph import StepGraph
from lowtide.graph.time_lines import LINES, line_of
from lowtide.plans.step_plan import Plan
from lowtide.simulator.eager_intervals import EagerIntervals
from lowtide.simulator.timeline import Timeline, simulate
from lowtide.solvers.baselines import baseline_plans, replayed_s
from lowtide.solvers.candidate import Candidate, Codecs, Effort, Regions, faster, infeasible, smaller, with_predictions
from lowtide.solvers.compression import CompressionOptions
from lowtide.solvers.hull import CriticalPoint, Pricing, critical_point_at, hull, peak_op
from lowtide.solvers.interpolation import HullPath, Interpolation, first_past_stops, near_stops
from lowtide.solvers.local_search import MOST_OPS, LocalSearch, LowestPeakSearch, evenly_spaced
from lowtide.solvers.nesting import Nesting
from lowtide.solvers.placement import LinkLoads, OffloadSelector
from lowtide.solvers.region_costs import contains_layers
from lowtide.solvers.segment_search import SegmentSearch, plan_of

_SHARES = (0.5, 0.95)  # of the link: the last part of it is left for what it does slower than measured
_DISCOUNTS = (0.0, 0.3, 0.9)  # of the price of bytes that could be moved
_LOSSY_DISCOUNTS = (0.0, 0.6)  # with the whole link: values that are encoded take a smaller part of it
_MOST_LEVELS = 12
_NUM_STATIONS = 128
_NUM_RECENT = 12
_HULL = 40  # plays of a step that take as long as a hull does


class EagerSearch:
    """What solving one graph needs, made when it is first asked for and shared by all budgets of a sweep.

    Where `graph` has two time lines, plans are found by one of them, `line` (by default the one that limits the plain
    step), and judged by both. `_offset_s` is how much less the line works than the plain step takes: a number below 0.
    """

    def __init__(
        self,
        graph: StepGraph,
        host: int = 0,
        time_limit_s: float = 10.0,
        lossy: tuple[str, ...] = (),
        line: StepGraph | None = None,
    ) -> None:
        if host and not graph.hardware.link_bytes_per_s:
            raise PlanError(
                f"host={host} was given, and {graph.hardware.name} has no link to host memory: "
                "there is nothing to move values to. Trace on the accelerator, or for one by name (device='H100')."
            )
        self.graph, self.line, self.effort = graph, graph, Effort(time_limit_s)
        self._offset_s = 0.0
        if graph.has_host_line:
            self.line = line_of(graph, float(graph.lines.limit == "host")) if line is None else line
            self._offset_s = self.line.lines.step_s - graph.lines.step_s
        self._compression = CompressionOptions(self.line, lossy) if lossy else None
        self._all_codecs: list[Codecs] = [()] if self._compression is None else [(), self._compression.everything]
        ways = [(discount, share, False) for discount in _DISCOUNTS for share in _SHARES] if host else []
        self._move_options = [(0.0, 0.0, False), *ways]
        if lossy:
            self._move_options += [(0.0, 0.0, True), *((each, 1.0, True) for each in _LOSSY_DISCOUNTS if host)]
        self._chains: dict[
            tuple[int, float, bool, bool], list[HullPath]
        ] = {}  # in the order of the forward, and spread
        self._nested_found: dict[tuple[int, float, bool, Codecs], Candidate] = {}
        self._mover = OffloadSelector(graph, host, self._compression)
        self._movable_bytes = host
        self._candidates: dict[tuple[object, ...], Candidate] = {}
        self._recent: dict[tuple[object, ...], Timeline | EagerIntervals] = {}

    @cached_property
    def plain(self) -> Timeline:
        return simulate(self.graph)

    @cached_property
    def _critical_points(self) -> list[CriticalPoint]:
        """When memory is short: at the plain step's peaks in both directions, and where the chain's last plan peaks."""
        ops = [op for op in (peak_op(self.plain, 2), peak_op(self.plain, 0)) if op >= 0]
        moments = [critical_point_at(self.line, self.plain, op, self._compression) for op in dict.fromkeys(ops)]
        if moments:
            late = peak_op(self._played(moments[0].hull.choices[-1].regions, 0.0), 2)
            if late >= 0 and late not in ops:
                moments.append(critical_point_at(self.line, self.plain, late, self._compression))
        return moments

    @cached_property
    def _kinds_of_chains(self) -> list[tuple[int, float, bool, float, bool]]:
        """By moment, discount, whether regions are narrow, share of the link, and whether values may be encoded.

        A region of several layers holds all they save when it is replayed. The moment does not show that, so that such
        regions can crowd out those of single layers: chains without them come first.
        """
        can = self._critical_points[0].pricing.replayable if self._critical_points else ()
        narrow = any(map(all, zip(can, contains_layers(self.graph), strict=False)))
        found = [(moment, *way) for moment in range(len(self._critical_points)) for way in self._move_options]
        kinds = [(moment, discount, narrow, share, coded) for moment, discount, share, coded in found]
        return [*kinds, (0, 0.0, False, 0.0, False)] if narrow and kinds else kinds

    def _chain(self, moment: int, discount: float, narrow: bool, coded: bool, is_spread: bool = False) -> HullPath:
        key = moment, discount, narrow, coded
        if key not in self._chains:
            pricing, found = self._critical_points[moment].pricing, self._critical_points[moment].hull
            if discount or narrow or coded:
                pricing = Pricing(
                    self.line, self.plain, pricing.at, discount, narrow, self._compression if coded else None
                )
                found = hull(pricing)
                self.effort.spend(len(self.graph.ops), times=_HULL)
            easing = Interpolation(self.line, pricing)
            self._chains[key] = [HullPath(self.graph, found.choices, easing, is_spread=each) for each in (False, True)]
        return self._chains[key][is_spread]

    def _all_chains(self) -> Iterator[tuple[HullPath | LinkLoads, float, bool]]:
        """Chains, each with the share of the link that its moves use, and whether values may be encoded."""
        for moment, discount, narrow, share, coded in self._kinds_of_chains:
            yield self._chain(moment, discount, narrow, coded), share, coded
            if share:
                yield self._chain(moment, discount, narrow, coded, is_spread=True), share, coded
        if self._critical_points and self._movable_bytes:
            yield self._loads, _SHARES[-1], False

    @cached_property
    def _loads(self) -> LinkLoads:
        last = self._first_chain.regions(len(self._first_chain) - 1)
        return LinkLoads(self.line, last, self._critical_points[0].pricing)

    @property
    def _first_chain(self) -> HullPath:
        moment, discount, narrow, _, coded = self._kinds_of_chains[0]
        return self._chain(moment, discount, narrow, coded)

    @cached_property
    def _nesting(self) -> Nesting:
        pricing = self._critical_points[0].pricing
        return Nesting(self.graph, pricing.replayable)

    @cached_property
    def _segmenting(self) -> SegmentSearch | None:
        return (
            SegmentSearch(self._critical_points[0].pricing, self._critical_points[0].hull.choices)
            if self._critical_points
            else None
        )

    @cached_property
    def _segmented(self) -> list[Candidate]:
        """Plans with segments."""
        if self._segmenting is None:
            return []
        shares, codecs = _SHARES if self._movable_bytes else (), self._all_codecs
        is_late = self.effort.is_over_after(1, len(self.graph.ops))
        return list(map(self._judged, self._segmenting.plans(is_late, self._mover, shares, codecs)))

    def _judged(self, found: Candidate) -> Candidate:
        """A plan with segments that was found by one line, with what it costs by both."""
        if self.line is self.graph:
            return found
        if found.share or found.codecs:
            self.effort.spend(len(self.graph.ops), times=2, by_op=True)
            return replace(found, extra_s=self.timeline_of(found).extra_s)
        return replace(found, extra_s=EagerIntervals(with_segments(self.graph, found.spans), found.regions).extra_s)

    @cached_property
    def _baselines(self) -> list[tuple[float, Regions, Codecs]]:
        plans = baseline_plans(self.line, self._nesting) if self._critical_points else []
        found: list[tuple[float, Regions, Codecs]] = [(seconds, regions, ()) for seconds, regions in plans]
        if self._compression is None:
            return found
        nested = [
            self._nested(number, share, splits, codecs).regions
            for least_bytes, _, number, share, splits, codecs in self._sample_budgets
            if not least_bytes and not share
        ]
        ends = {tuple(regions.items()): (replayed_s(self.line, regions), regions) for regions in nested}
        return found + self._compression.baseline_choices(plans, list(ends.values()))

    def plan(self, budget: int) -> Plan:
        """The plan for a budget, with everything a person wants to know about it."""
        if self.plain.peak_bytes <= budget:
            return with_predictions(self.graph, self.plain, self.plain, budget, 0.0)
        fastest = self.fastest(budget)
        if fastest is None:
            raise self.infeasible(budget)
        return with_predictions(self.graph, self.timeline_of(fastest), self.plain, budget, self.lower_bound_s(budget))

    def fastest(self, budget: int) -> Candidate | None:
        """The fastest plan found that fits, None if none does."""
        fastest: Candidate | None = None
        for chain, share, _ in self._all_chains():
            if fastest is None or not self._is_late():
                fastest = faster(fastest, self._of_chain(budget, chain, share, fastest))
        if fastest is None and budget < self.floor.peak_bytes:  # some nested plan may fit
            return None
        if fastest is None or "_segmented" in vars(self) or not self._is_late():
            fastest = faster(fastest, *(plan for plan in self._segmented if plan.peak_bytes <= budget))
        for least_bytes, least_s, number, share, splits, codecs in self._sample_budgets:
            if least_bytes <= budget and (fastest is None or (least_s <= fastest.extra_s and not self._is_late())):
                nested = self._nested(number, share, splits, codecs)
                if least_bytes <= nested.peak_bytes <= budget and nested.extra_s >= least_s:
                    fastest = faster(fastest, nested)
        for seconds, regions, codecs in self._baselines:
            least_s = self._visible_s(seconds)
            if fastest is None or not (self._is_late() or least_s > fastest.extra_s * (1 + 1e-9)):
                standing = self._cost(regions, 0.0, codecs)
                fastest = faster(fastest, standing if standing.peak_bytes <= budget else None)
        if fastest is None or "_explored" in vars(self) or not self._is_late():
            others = (*self._explored, self._smallest)
            fastest = faster(fastest, *(plan for plan in others if plan is not None and plan.peak_bytes <= budget))
        return fastest

    def _visible_s(self, line_s: float) -> float:
        """What seconds on the line make the step longer, at the least."""
        return line_s if self.line is self.graph else max(0.0, line_s + self._offset_s)

    def _of_chain(
        self, budget: int, chain: HullPath | LinkLoads, share: float, fastest: Candidate | None
    ) -> Candidate | None:
        """A plan of a chain that fits with this much of the link used; None if the last does not."""
        cost, most_s = self._costs(chain, share), fastest.extra_s if fastest is not None else math.inf
        number = first_past_stops(cost, chain.stops, budget, most_s=most_s, is_late=self._is_late)
        return None if number is None else cost(number)

    @cached_property
    def _sample_budgets(self) -> list[tuple[float, float, int, float, bool, Codecs]]:
        """Plans of the first chain to be nested, evenly spaced in bytes: least bytes, least seconds, and which.

        Nesting makes a plan slower, and no smaller than what it holds when memory is short. So only those between a
        budget and a plan that fits it need be looked at; one that turns out faster or smaller is left out.
        """
        if not self._critical_points:
            return []
        chain, pricing = self._first_chain, self._critical_points[0].pricing
        sizes = np.array([chain.bytes(number) for number in range(len(chain))])
        levels = np.linspace(sizes[0], sizes[-1], _NUM_STATIONS + 1)[1:-1]
        numbers = sorted(set(np.searchsorted(-sizes, -levels).tolist()) - {len(chain) - 1})

        def least_s(number: int) -> float:
            return self._visible_s(pricing.seconds_of(chain.regions(number)))

        found: list[tuple[float, float, int, float, bool, Codecs]] = [
            (pricing.base_bytes + sizes[number], least_s(number), number, 0.0, splits, ())
            for number in numbers
            for splits in (True, False)
        ]
        shares = sorted({share for _, share, _ in self._move_options})
        last_s = least_s(last := len(chain) - 1)
        ends = product(self._all_codecs, shares, (True, False))
        return found + [(0.0, last_s, last, share, splits, codecs) for codecs, share, splits in ends]

    def _costs(self, chain: HullPath | LinkLoads, share: float) -> Callable[[int], Candidate]:
        return lambda number: self._cost(chain.regions(number), share, chain.codecs(number))

    def _nested(self, number: int, share: float, splits: bool, codecs: Codecs) -> Candidate:
        """A plan of the first chain, its regions taken apart or nested where replays hold more than is held anyway."""
        if (key := (number, share, splits, codecs)) in self._nested_found:
            return self._nested_found[key]
        chain = self._first_chain
        slack = (chain.bytes(0) - chain.bytes(len(chain) - 1)) / _NUM_STATIONS
        level = self._critical_points[0].pricing.base_bytes + chain.bytes(number) + slack
        regions, apart = chain.regions(number), splits
        best = self._cost(regions, share, codecs)
        for _ in range(_MOST_LEVELS):
            timeline = self._played(regions, share, codecs)
            best = smaller(best, self._cost(regions, share, codecs)) or best
            now, level_now = regions, level - timeline.host_bytes
            if timeline.peak_bytes > level_now:
                regions, apart = self._nesting.further(now, timeline, level_now, apart)
            if regions == now:
                break
        self._nested_found[key] = best
        return best

    @cached_property
    def _explored(self) -> list[Candidate]:
        """Plans with other regions, found from those of the chains, the standing plans and some nested ones."""
        smallest = self._smallest_of_regions if self._critical_points and len(self.graph.ops) <= MOST_OPS else None
        if smallest is None or smallest.peak_bytes >= self.plain.peak_bytes:
            return []
        pricing, floor, plain = self._critical_points[0].pricing, smallest.peak_bytes, self.plain.peak_bytes
        exploring = LocalSearch(self.line, pricing, self._nesting, floor, plain)
        seeds: list[Regions] = [{}, *(regions for _, regions, codecs in self._baselines if not codecs)]
        for chain, share, coded in self._all_chains():  # the same whatever else is allowed
            if not share and not coded:
                seeds += [chain.regions(stop) for stop in evenly_spaced(chain.stops)]
        nested = [
            (number, splits) for _, _, number, share, splits, codecs in self._sample_budgets if not share and not codecs
        ]
        seeds += [self._nested(number, 0.0, splits, ()).regions for number, splits in evenly_spaced(nested)]
        num_events = len(self.graph.ops)
        exploring.explore([*seeds, smallest.regions], self.effort.is_over_after(2, num_events))
        found = exploring.plans(self._line_cost, self.effort.is_over_after(4, num_events))
        return [self._cost(plan.regions, 0.0) for plan in found if plan.peak_bytes >= floor]

    def _line_cost(self, regions: Regions) -> Candidate:
        """What regions cost by the line alone: what `exploring` can add up."""
        if self.line is self.graph:
            return self._cost(regions, 0.0)
        played = EagerIntervals(self.line, regions)
        return Candidate(regions, 0.0, (), played.peak_bytes, played.extra_s)

    def _cost(self, regions: Regions, share: float, codecs: Codecs = ()) -> Candidate:
        key = (share, codecs, *sorted(regions.items()))
        if key not in self._candidates:
            self._played(regions, share, codecs)
        return self._candidates[key]

    def _played(self, regions: Regions, share: float, codecs: Codecs = ()) -> Timeline | EagerIntervals:
        key = (share, codecs, *sorted(regions.items()))
        if key in self._recent:
            return self._recent[key]
        has_moves = bool(share or codecs)
        played = self._timeline(regions, share, codecs) if has_moves else EagerIntervals(self.graph, regions)
        self.effort.spend(len(played.ops), by_op=has_moves)
        self._candidates[key] = Candidate(regions, share, codecs, played.peak_bytes, played.extra_s)
        self._recent[key] = played
        if len(self._recent) > _NUM_RECENT:
            del self._recent[next(iter(self._recent))]
        return played

    def timeline_of(self, found: Candidate) -> Timeline:
        plan = plan_of(self.graph, found, self._mover) if found.spans else self._mover.plan(*found.decisions)
        return simulate(self.graph, plan)

    def _timeline(self, regions: Regions, share: float, codecs: Codecs = ()) -> Timeline:
        return simulate(self.graph, self._mover.plan(regions, share, codecs))

    def _is_late(self) -> bool:
        return self.effort.is_over()

    # The bound.

    def lower_bound_s(self, budget: int) -> float:
        """Seconds that every plan of the eager engine adds, whatever it does, if its peak is to be at most `budget`.

        At each moment a plan holds at most `budget`, and on the host at most what the link has carried by then; the
        hull says what holding that little costs.
        """
        if self.plain.peak_bytes <= budget:
            return 0.0
        offset_s, movable = self._offset_s, self._movable_bytes
        return max((moment.least_s(budget, movable, offset_s) for moment in self._critical_points), default=0.0)

    @cached_property
    def floor(self) -> Timeline:
        """The smallest peak found, with everything recomputed, nested and moved that helps."""
        if (best := self._smallest) is None or best.peak_bytes >= self.plain.peak_bytes:
            return self.plain
        return self.timeline_of(best)

    @cached_property
    def _smallest(self) -> Candidate | None:
        """The plan with the smallest peak of all."""
        found = self._ends(regions_only=False) if self._movable_bytes or self._compression else []
        return smaller(*found, self._smallest_of_regions, *self._segmented)

    @cached_property
    def _smallest_of_regions(self) -> Candidate | None:
        """The plan with the smallest peak of those that neither move nor encode values."""
        ends = self._ends(regions_only=True)
        if not ends or len(self.graph.ops) > MOST_OPS:
            return smaller(*ends)
        lowering = LowestPeakSearch(self.graph, self._nesting, self._critical_points[0].pricing.may_keep)
        return self._cost(lowering.lowest(ends, self.effort.is_over_after(1, len(self.graph.ops))), 0.0)

    def _ends(self, *, regions_only: bool) -> list[Candidate]:
        """Where each of the other generators ends: plans with small peaks."""
        standing = [(regions, codecs) for _, regions, codecs in self._baselines if not (regions_only and codecs)]
        candidates = [self._cost(regions, 0.0, codecs) for regions, codecs in standing]
        for chain, share, coded in self._all_chains():
            if not (regions_only and (share or coded)):
                cost = self._costs(chain, share)
                candidates += [cost(number) for number in near_stops(cost, chain.stops)]
        for least_bytes, least_s, number, share, splits, codecs in self._sample_budgets:
            if not least_bytes and not (regions_only and (share or codecs)):
                nested = self._nested(number, share, splits, codecs)
                candidates += [nested] if nested.extra_s >= least_s else []
        return candidates

    def infeasible(self, budget: int) -> InfeasibleBudgetError:
        could_move = self.graph.hardware.link_bytes_per_s and not self._movable_bytes
        return infeasible(budget, self.floor, ', or allow offload (host="32GiB")' if could_move else "")


# The line that works less is searched too if it works at least this share of the other: a checkpoint on every block
# adds a third to the device's line and up to as much as it was to the host's. If it is too high, plans that a
# host-limited replay makes slow are missed; too low, and twice the time goes into steps with a clear limit.
_NEAR = 0.5
# The share of the other line. It decides between plans that are alike; the bound is lower by this share of the step.
_TRACE = 1e-4
_HOST_SHARES = {"host": 1 - _TRACE, "device": _TRACE}


class TwoLineSearch:
    """What solving one graph with two lines needs, shared by all budgets of a sweep."""

    def __init__(
        self,
        graph: StepGraph,
        host: int = 0,
        time_limit_s: float = 10.0,
        lossy: tuple[str, ...] = (),
        kind: type[EagerSearch] = EagerSearch,
    ) -> None:
        lines = {name: graph.lines.of(name) for name in LINES}
        limit = graph.lines.limit
        tried = [name for name in LINES if name == limit or lines[name] >= _NEAR * lines[limit]]
        share_s = time_limit_s / len(tried)
        self.graph, self._lossy = graph, bool(lossy)
        self._searches = {
            name: kind(graph, host, share_s, lossy, line=line_of(graph, share)) for name, share in _HOST_SHARES.items()
        }
        self._tried = [self._searches[name] for name in tried]
        self.limiting = self._searches[limit]  # of the line that limits the plain step

    @property
    def plain(self) -> Timeline:
        return self._tried[0].plain

    @cached_property
    def floor(self) -> Timeline:
        """The smallest peak found."""
        return min((search.floor for search in self._tried), key=lambda floor: (floor.peak_bytes, floor.extra_s))

    def plan(self, budget: int) -> Plan:
        """The plan for a budget: the faster of those found by each line."""
        if self.plain.peak_bytes <= budget:
            return with_predictions(self.graph, self.plain, self.plain, budget, 0.0)
        found = [(search.fastest(budget), search) for search in self._tried]
        fitting = [(plan.extra_s, plan.peak_bytes, nth) for nth, (plan, _) in enumerate(found) if plan is not None]
        if not fitting:
            raise self._infeasible(budget)
        plan, search = found[min(fitting)[2]]
        assert plan is not None
        return with_predictions(self.graph, search.timeline_of(plan), self.plain, budget, self.lower_bound_s(budget))

    def lower_bound_s(self, budget: int) -> float:
        """Seconds that every plan adds whose peak is at most `budget`.

        What codecs take is the device's, and the graph of a mean line would charge it in full: no bound with codecs.
        """
        return 0.0 if self._lossy else max(search.lower_bound_s(budget) for search in self._searches.values())

    def _infeasible(self, budget: int) -> InfeasibleBudgetError:
        smallest = min(self._tried, key=lambda search: search.floor.peak_bytes)
        return smallest.infeasible(budget)
