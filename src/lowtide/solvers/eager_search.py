"""The search for plans of an eager step: collects candidates from all generators and returns the fastest that fits.

`solve` creates one `EagerSearch` per graph and asks it for plans. The candidates are, in this order:

1. Paths along the hull. The plain step's peak is the first critical point; `hull` gives the optimal regions for every
   price per byte there, and `interpolation.HullPath` the candidates in between. The first of a path whose *simulated*
   peak fits is found by bisection. Further paths: without regions that contain several layers, with a discount on
   bytes that can be offloaded, with encoded values (`compression`).
2. With `host=`, offload (`placement`): further paths whose candidates move values, along which evenly spread layers
   change and not the first ones; and `LinkLoads`.
3. Segments (`segment_search`).
4. Candidates of the first path whose replays hold more than its critical point, with regions split or nested
   (`nesting`) until they do not.
5. Baselines (`baselines`).
6. Up to 3,000 ops: other sets of regions, and the smallest peak (`local_search`).

No generator depends on the budget. For each of them a larger budget gives no slower candidate, so neither does the
fastest of all. The hulls also give the lower bound (`lower_bound_s`). Once the time limit is spent and a candidate
fits, the remaining generators but the baselines are skipped.

**Two time lines.** Seconds on one line (host or device) add up over regions, as the hull requires; the seconds of the
step, the longer of both, do not. So `TwoLineSearch` runs an `EagerSearch` on the graph of each line, and every
candidate is simulated with both lines. Only the line that limits the plain step is searched, unless the other works
at least half as long. A small share of the other line is mixed in, so that of candidates equal on one line the one
that costs the other less is preferred. A step takes no less than either line, so the larger of their bounds is a
bound for the step.
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
from lowtide.solvers.baselines import baseline_plans
from lowtide.solvers.candidate import Candidate, Codecs, Effort, Regions, faster, infeasible, smaller, with_predictions
from lowtide.solvers.compression import CompressionOptions
from lowtide.solvers.hull import CriticalPoint, Pricing, critical_point_at, hull, peak_op
from lowtide.solvers.interpolation import HullPath, first_past_stops, monotone_stops
from lowtide.solvers.local_search import MOST_OPS, LocalSearch, LowestPeakSearch, evenly_spaced
from lowtide.solvers.nesting import Nesting
from lowtide.solvers.placement import LinkLoads, OffloadSelector
from lowtide.solvers.region_costs import contains_layers, keepable, replayable, stops_of
from lowtide.solvers.segment_search import SegmentSearch, plan_of

_SHARES = (0.5, 0.95)  # of the link's bandwidth that offload may use; 5 % are a margin for slower copies
_DISCOUNTS = (0.0, 0.9)  # on the price of bytes that could be offloaded
_MOST_LEVELS = 12  # of nesting
_NUM_NESTED = 32  # sizes along the first path at which candidates are nested; 128 gave the same plans
_NUM_RECENT = 12  # simulations kept in memory
_HULL = 40  # cost of building a hull, in simulations of a step


class EagerSearch:
    """Finds plans for one graph. Generators run when they are first needed; all budgets of a sweep share their work.

    If `graph` has two time lines, candidates are generated for one of them, `line` (by default the one that limits the
    plain step), and simulated with both. `_offset_s`, not above 0, is the line's own time less the plain step's.
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
        options = [(discount, share, False) for discount in _DISCOUNTS for share in _SHARES] if host else []
        self._move_options = [(0.0, 0.0, False), *options]
        if lossy:
            self._move_options += [(0.0, 0.0, True), *((each, 1.0, True) for each in _DISCOUNTS if host)]
        # Each in the order of the forward, and spread.
        self._paths: dict[tuple[float, bool, bool], list[HullPath]] = {}
        self._nested_known: dict[tuple[int, float, bool, Codecs], Candidate] = {}
        self._mover = OffloadSelector(graph, host, self._compression)
        self._movable_bytes = host
        self.candidates: dict[tuple[object, ...], Candidate] = {}
        self._recent: dict[tuple[object, ...], Timeline | EagerIntervals] = {}

    @property
    def limiting(self) -> EagerSearch:
        """The search of the line that limits the plain step: this one."""
        return self

    @cached_property
    def plain(self) -> Timeline:
        return simulate(self.graph)

    @cached_property
    def critical_points(self) -> list[CriticalPoint]:
        """At the plain step's peaks in backward and forward, and where the smallest hull point peaks."""
        ops = [op for op in (peak_op(self.plain, 2), peak_op(self.plain, 0)) if op >= 0]
        points = [critical_point_at(self.line, self.plain, op, self._compression) for op in dict.fromkeys(ops)]
        if points:
            late = peak_op(self._played(points[0].hull.choices[-1].regions, 0.0), 2)
            if late >= 0 and late not in ops:
                points.append(critical_point_at(self.line, self.plain, late, self._compression))
        return points

    @cached_property
    def _path_kinds(self) -> list[tuple[float, bool, float, bool]]:
        """The paths to build: discount, whether narrow, share of the link, whether values are encoded.

        All are for the first critical point; the others only strengthen the bound. While a region of several layers is
        replayed, everything they save is live. The critical point does not show that, so such regions can displace
        those of single layers: narrow paths, without them, come first.
        """
        if not self.critical_points:
            return []
        can = self.critical_points[0].pricing.replayable
        narrow = any(map(all, zip(can, contains_layers(self.graph), strict=False)))
        kinds = [(discount, narrow, share, coded) for discount, share, coded in self._move_options]
        return [*kinds, (0.0, False, 0.0, False)] if narrow else kinds

    def _path(self, discount: float, narrow: bool, coded: bool, is_spread: bool = False) -> HullPath:
        key = discount, narrow, coded
        if key not in self._paths:
            pricing, points = self.critical_points[0].pricing, self.critical_points[0].hull
            if discount or narrow or coded:
                pricing = Pricing(
                    self.line, self.plain, pricing.at, discount, narrow, self._compression if coded else None
                )
                points = hull(pricing)
                self.effort.spend(len(self.graph.ops), times=_HULL)
            self._paths[key] = [HullPath(pricing, points.choices, is_spread=each) for each in (False, True)]
        return self._paths[key][is_spread]

    def _all_paths(self) -> Iterator[tuple[HullPath | LinkLoads, float, bool]]:
        """All paths, each with the share of the link that its candidates use, and whether values are encoded."""
        for discount, narrow, share, coded in self._path_kinds:
            yield self._path(discount, narrow, coded), share, coded
            if share:
                yield self._path(discount, narrow, coded, is_spread=True), share, coded
        if self.critical_points and self._movable_bytes:
            yield self._loads, _SHARES[-1], False

    @cached_property
    def _loads(self) -> LinkLoads:
        last = self._first_path.regions(len(self._first_path) - 1)
        return LinkLoads(self.critical_points[0].pricing, last)

    @property
    def _first_path(self) -> HullPath:
        discount, narrow, _, coded = self._path_kinds[0]
        return self._path(discount, narrow, coded)

    @cached_property
    def nesting(self) -> Nesting:
        return Nesting(self.graph, self.critical_points[0].pricing.replayable)

    @cached_property
    def segmenting(self) -> SegmentSearch | None:
        points = self.critical_points
        return SegmentSearch(points[0].pricing, points[0].hull.choices) if points else None

    @cached_property
    def _segmented(self) -> list[Candidate]:
        """Candidates with segments."""
        if self.segmenting is None:
            return []
        shares, codecs = _SHARES if self._movable_bytes else (), self._all_codecs
        is_late = self.effort.is_over_after(1, len(self.graph.ops))
        return list(map(self.judged, self.segmenting.candidates(is_late, self._mover, shares, codecs)))

    def judged(self, found: Candidate) -> Candidate:
        """A candidate with segments that was generated for one line, with its time on both lines."""
        if self.line is self.graph:
            return found
        if found.share or found.codecs:
            self.effort.spend(len(self.graph.ops), times=2, by_op=True)
            return replace(found, extra_s=self.timeline_of(found).extra_s)
        return replace(found, extra_s=EagerIntervals(with_segments(self.graph, found.spans), found.regions).extra_s)

    @cached_property
    def _baselines(self) -> list[tuple[float, Regions, Codecs]]:
        plans = baseline_plans(self.line, self.nesting) if self.critical_points else []
        found: list[tuple[float, Regions, Codecs]] = [(seconds, regions, ()) for seconds, regions in plans]
        if self._compression is None:
            return found
        nested = [
            self._nested(number, share, splits, codecs).regions
            for least_bytes, _, number, share, splits, codecs in self._sample_budgets
            if not least_bytes and not share
        ]
        ends = {tuple(regions.items()): (EagerIntervals(self.line, regions).replayed_s, regions) for regions in nested}
        return found + self._compression.baseline_choices(plans, list(ends.values()))

    def plan(self, budget: int) -> Plan:
        """The fastest plan for a budget, with predictions and lower bound."""
        if self.plain.peak_bytes <= budget:
            return with_predictions(self.plain, budget, 0.0)
        fastest = self.fastest(budget)
        if fastest is None:
            raise self.infeasible(budget)
        return with_predictions(self.timeline_of(fastest), budget, self.lower_bound_s(budget))

    def fastest(self, budget: int) -> Candidate | None:
        """The fastest candidate that fits; None if none does."""
        fastest: Candidate | None = None
        is_late = self.effort.is_over
        for path, share, _ in self._all_paths():
            if fastest is None or not is_late():
                fastest = faster(fastest, self._of_path(budget, path, share, fastest))
        if fastest is None and budget < self.floor.peak_bytes:  # a nested candidate may fit
            return None
        if fastest is None or "_segmented" in vars(self) or not is_late():
            fastest = faster(fastest, *(plan for plan in self._segmented if plan.peak_bytes <= budget))
        for least_bytes, least_s, number, share, splits, codecs in self._sample_budgets:
            if least_bytes <= budget and (fastest is None or (least_s <= fastest.extra_s and not is_late())):
                nested = self._nested(number, share, splits, codecs)
                if least_bytes <= nested.peak_bytes <= budget and nested.extra_s >= least_s:
                    fastest = faster(fastest, nested)
        for seconds, regions, codecs in self._baselines:
            least_s = self._visible_s(seconds)
            if fastest is None or least_s <= fastest.extra_s * (1 + 1e-9):
                baseline = self.cost(regions, 0.0, codecs)
                fastest = faster(fastest, baseline if baseline.peak_bytes <= budget else None)
        if fastest is None or "_explored" in vars(self) or not is_late():
            others = (*self._explored, self._smallest)
            fastest = faster(fastest, *(plan for plan in others if plan is not None and plan.peak_bytes <= budget))
        return fastest

    def _visible_s(self, line_s: float) -> float:
        """A lower bound on what seconds on the line add to the step."""
        return line_s if self.line is self.graph else max(0.0, line_s + self._offset_s)

    def _of_path(
        self, budget: int, path: HullPath | LinkLoads, share: float, fastest: Candidate | None
    ) -> Candidate | None:
        """The first candidate of a path that fits, with this share of the link; None if none fits."""
        cost, most_s = self._costs(path, share), fastest.extra_s if fastest is not None else math.inf
        number = first_past_stops(cost, path.stops, budget, most_s=most_s, is_late=self.effort.is_over)
        return None if number is None else cost(number)

    @cached_property
    def _sample_budgets(self) -> list[tuple[float, float, int, float, bool, Codecs]]:
        """Candidates of the first path to be nested, evenly spaced in bytes, with lower bounds on bytes and seconds.

        Nesting makes a candidate slower, and it cannot hold less than at the critical point. So `fastest` only nests
        those whose bounds are within the budget and below the fastest candidate. A result below its bounds is ignored,
        as it would depend on which budgets were solved before.
        """
        if not self.critical_points:
            return []
        path, pricing = self._first_path, self.critical_points[0].pricing
        sizes = np.array([path.bytes(number) for number in range(len(path))])
        levels = np.linspace(sizes[0], sizes[-1], _NUM_NESTED + 1)[1:-1]
        numbers = sorted(set(np.searchsorted(-sizes, -levels).tolist()) - {len(path) - 1})

        def least_s(number: int) -> float:
            return self._visible_s(pricing.seconds_of(path.regions(number)))

        nested: list[tuple[float, float, int, float, bool, Codecs]] = [
            (pricing.base_bytes + sizes[number], least_s(number), number, 0.0, splits, ())
            for number in numbers
            for splits in (True, False)
        ]
        shares = sorted({share for _, share, _ in self._move_options})
        last_s = least_s(last := len(path) - 1)
        ends = product(self._all_codecs, shares, (True, False))
        return nested + [(0.0, last_s, last, share, splits, codecs) for codecs, share, splits in ends]

    def _costs(self, path: HullPath | LinkLoads, share: float) -> Callable[[int], Candidate]:
        return lambda number: self.cost(path.regions(number), share, path.codecs(number))

    def _nested(self, number: int, share: float, splits: bool, codecs: Codecs) -> Candidate:
        """A candidate of the first path, split or nested where replays hold more than the critical point."""
        if (key := (number, share, splits, codecs)) in self._nested_known:
            return self._nested_known[key]
        path = self._first_path
        slack = (path.bytes(0) - path.bytes(len(path) - 1)) / _NUM_NESTED
        level = self.critical_points[0].pricing.base_bytes + path.bytes(number) + slack
        regions, apart = path.regions(number), splits
        best = self.cost(regions, share, codecs)
        for _ in range(_MOST_LEVELS):
            timeline = self._played(regions, share, codecs)
            best = smaller(best, self.cost(regions, share, codecs)) or best
            now, level_now = regions, level - timeline.host_bytes
            if timeline.peak_bytes > level_now:
                regions, apart = self.nesting.further(now, timeline, level_now, apart)
            if regions == now:
                break
        self._nested_known[key] = best
        return best

    @cached_property
    def _explored(self) -> list[Candidate]:
        """Candidates of `LocalSearch`, started from paths, baselines and nested candidates."""
        smallest = self._smallest_of_regions if self.critical_points and len(self.graph.ops) <= MOST_OPS else None
        if smallest is None or smallest.peak_bytes >= self.plain.peak_bytes:
            return []
        pricing, floor, plain = self.critical_points[0].pricing, smallest.peak_bytes, self.plain.peak_bytes
        search = LocalSearch(self.line, pricing, self.nesting, floor, plain)
        seeds: list[Regions] = [{}, *(regions for _, regions, codecs in self._baselines if not codecs)]
        for path, share, coded in self._all_paths():  # the same seeds with and without offload and codecs
            if not share and not coded:
                seeds += [path.regions(stop) for stop in evenly_spaced(path.stops)]
        nested = [
            (number, splits) for _, _, number, share, splits, codecs in self._sample_budgets if not share and not codecs
        ]
        seeds += [self._nested(number, 0.0, splits, ()).regions for number, splits in evenly_spaced(nested)]
        num_events = len(self.graph.ops)
        search.explore([*seeds, smallest.regions], self.effort.is_over_after(2, num_events))
        candidates = search.candidates(self._line_cost, self.effort.is_over_after(4, num_events))
        return [self.cost(each.regions, 0.0) for each in candidates if each.peak_bytes >= floor]

    def _line_cost(self, regions: Regions) -> Candidate:
        """The cost of regions on the line alone, as `LocalSearch` compares them."""
        if self.line is self.graph:
            return self.cost(regions, 0.0)
        played = EagerIntervals(self.line, regions)
        return Candidate(regions, 0.0, (), played.peak_bytes, played.extra_s)

    def cost(self, regions: Regions, share: float, codecs: Codecs = ()) -> Candidate:
        key = (share, codecs, *sorted(regions.items()))
        if key not in self.candidates:
            self._played(regions, share, codecs)
        return self.candidates[key]

    def _played(self, regions: Regions, share: float, codecs: Codecs = ()) -> Timeline | EagerIntervals:
        key = (share, codecs, *sorted(regions.items()))
        if key in self._recent:
            return self._recent[key]
        has_moves = bool(share or codecs)
        if has_moves:
            played: Timeline | EagerIntervals = simulate(self.graph, self._mover.plan(regions, share, codecs))
        else:
            played = EagerIntervals(self.graph, regions)
        self.effort.spend(len(played.ops), by_op=has_moves)
        busy_host_s = played.lines.busy_host_s if self.graph.has_host_line else 0.0
        self.candidates[key] = Candidate(
            regions, share, codecs, played.peak_bytes, played.extra_s, busy_host_s=busy_host_s
        )
        self._recent[key] = played
        if len(self._recent) > _NUM_RECENT:
            del self._recent[next(iter(self._recent))]
        return played

    def timeline_of(self, found: Candidate) -> Timeline:
        plan = plan_of(self.graph, found, self._mover) if found.spans else self._mover.plan(*found.decisions)
        return simulate(self.graph, plan)

    # The bound.

    def lower_bound_s(self, budget: int) -> float:
        """A lower bound on the seconds that every plan of the eager engine within `budget` adds.

        At each critical point a plan holds at most `budget` on the device, and on the host at most what the link has
        copied by then; the hull bounds the time of holding so little.
        """
        if self.plain.peak_bytes <= budget:
            return 0.0
        offset_s, movable = self._offset_s, self._movable_bytes
        return max((point.least_s(budget, movable, offset_s) for point in self.critical_points), default=0.0)

    @cached_property
    def floor(self) -> Timeline:
        """The timeline of the candidate with the smallest peak."""
        if (best := self._smallest) is None or best.peak_bytes >= self.plain.peak_bytes:
            return self.plain
        return self.timeline_of(best)

    @cached_property
    def _smallest(self) -> Candidate | None:
        """The candidate with the smallest peak."""
        found = self._ends(regions_only=False) if self._movable_bytes or self._compression else []
        return smaller(*found, self._smallest_of_regions, *self._segmented, self._smallest_of_segments)

    @cached_property
    def _smallest_of_segments(self) -> Candidate | None:
        """The smallest candidate with segments, with other regions beside and inside its segments."""
        segmented = [each for each in self._segmented if not each.share and not each.codecs]
        if (best := smaller(*segmented)) is None or len(self.graph.ops) > MOST_OPS:
            return best
        graph = with_segments(self.graph, best.spans)
        search = LowestPeakSearch(graph, Nesting(graph, replayable(graph, stops_of(graph))), keepable(graph))
        alike = [each for each in segmented if each.spans == best.spans]
        regions = search.lowest_near(alike, self.effort.is_over_after(1, len(graph.ops)))
        played = EagerIntervals(graph, regions)
        return replace(best, regions=regions, peak_bytes=played.peak_bytes, extra_s=played.extra_s)

    @cached_property
    def _smallest_of_regions(self) -> Candidate | None:
        """The candidate with the smallest peak among those that neither offload nor encode values."""
        ends = self._ends(regions_only=True)
        if not ends or len(self.graph.ops) > MOST_OPS:
            return smaller(*ends)
        search = LowestPeakSearch(self.graph, self.nesting, self.critical_points[0].pricing.may_keep)
        return self.cost(search.lowest(ends, self.effort.is_over_after(1, len(self.graph.ops))), 0.0)

    def _ends(self, *, regions_only: bool) -> list[Candidate]:
        """The candidates with small peaks of the other generators."""
        baselines = [(regions, codecs) for _, regions, codecs in self._baselines if not (regions_only and codecs)]
        candidates = [self.cost(regions, 0.0, codecs) for regions, codecs in baselines]
        for path, share, coded in self._all_paths():
            if not (regions_only and (share or coded)):
                cost = self._costs(path, share)
                candidates += [cost(number) for number in monotone_stops(cost, path.stops)]
        for least_bytes, least_s, number, share, splits, codecs in self._sample_budgets:
            if not least_bytes and not (regions_only and (share or codecs)):
                nested = self._nested(number, share, splits, codecs)
                candidates += [nested] if nested.extra_s >= least_s else []
        return candidates

    def infeasible(self, budget: int) -> InfeasibleBudgetError:
        could_move = self.graph.hardware.link_bytes_per_s and not self._movable_bytes
        return infeasible(budget, self.floor, ', or allow offload (host="32GiB")' if could_move else "")


# The shorter line is searched too if it is at least this share of the longer one: a checkpoint on every block adds a
# third to the device's line and up to its whole length to the host's. Too high, and candidates are missed for which the
# other line becomes the limit; too low, and steps with a clear limit are searched twice.
_NEAR = 0.5
# The share of the other line, to decide between candidates equal on one line; it lowers the bound by this share.
_TRACE = 1e-4
_HOST_SHARES = {"host": 1 - _TRACE, "device": _TRACE}


class TwoLineSearch:
    """Finds plans for a graph with two time lines; its work is shared by all budgets of a sweep."""

    def __init__(
        self,
        graph: StepGraph,
        host: int = 0,
        time_limit_s: float = 10.0,
        lossy: tuple[str, ...] = (),
    ) -> None:
        lines = {name: graph.lines.of(name) for name in LINES}
        limit = graph.lines.limit
        tried = [name for name in LINES if name == limit or lines[name] >= _NEAR * lines[limit]]
        share_s = time_limit_s / len(tried)
        self.graph, self._lossy = graph, bool(lossy)
        self._searches = {
            name: EagerSearch(graph, host, share_s, lossy, line=line_of(graph, share))
            for name, share in _HOST_SHARES.items()
        }
        self._tried = [self._searches[name] for name in tried]
        self.limiting = self._searches[limit]  # the search of the line that limits the plain step

    @property
    def plain(self) -> Timeline:
        return self._tried[0].plain

    @cached_property
    def floor(self) -> Timeline:
        """The smaller floor of both searches."""
        return min((search.floor for search in self._tried), key=lambda floor: (floor.peak_bytes, floor.extra_s))

    def plan(self, budget: int) -> Plan:
        """The faster of the plans of both searches."""
        if self.plain.peak_bytes <= budget:
            return with_predictions(self.plain, budget, 0.0)
        found = {search: search.fastest(budget) for search in self._tried}
        if (fastest := faster(*found.values())) is None:
            raise min(self._tried, key=lambda search: search.floor.peak_bytes).infeasible(budget)
        search = next(search for search, each in found.items() if each is fastest)
        return with_predictions(search.timeline_of(fastest), budget, self.lower_bound_s(budget))

    def steadiest(self, budget: int, most_s: float) -> Plan | None:
        """Of the candidates without segments simulated so far that fit, the fastest on a host that is busy at times.

        None if all of them are expected to add more than `most_s` there.
        """
        fitting = [
            (candidate, search)
            for search in self._tried
            for candidate in search.candidates.values()
            if candidate.peak_bytes <= budget and candidate.expected_s <= most_s
        ]
        if not fitting:
            return None
        best, search = min(fitting, key=lambda each: (each[0].expected_s, each[0].peak_bytes))
        return with_predictions(search.timeline_of(best), budget, self.lower_bound_s(budget))

    def lower_bound_s(self, budget: int) -> float:
        """A lower bound on the seconds that every plan within `budget` adds.

        0 with codecs: their seconds are on the device's line only, and the mixed line would count them in full.
        """
        return 0.0 if self._lossy else max(search.lower_bound_s(budget) for search in self._searches.values())
