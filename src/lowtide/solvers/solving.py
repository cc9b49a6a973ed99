"""`solve`: the fastest plan that fits, and how much faster any plan could be.

The plain step's peak names the moment at which memory is short. For that moment `pricing` gives the best plans for
every price of a byte, which lie on a convex hull; `chain` fills in the plans between them. The first plan of the chain
whose *simulated* peak fits is taken: what it holds at other moments, in replays too, counts. Where the chain ends above
the budget, `nesting` takes regions apart. With memory on the host, `moving` does the same for links used to various
shares, and the fastest of all is taken. The hull is also a lower bound on what any plan costs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from lowtide.errors import InfeasibleBudgetError, PlanError
from lowtide.graph import StepGraph
from lowtide.plans import Plan
from lowtide.plans.rows import rows_of
from lowtide.simulator import Timeline, simulate
from lowtide.solvers.chain import Chain, Regions, first_that
from lowtide.solvers.floors import floor_plan
from lowtide.solvers.moving import Mover
from lowtide.solvers.nesting import Nesting
from lowtide.solvers.pricing import Choice, Pricing, hull
from lowtide.solvers.references import recomputes, reference_plans
from lowtide.units import format_bytes, parse_bytes

# Of the link's bandwidth, and of the price of bytes that could be moved.
_SHARES = (0.5, 1.0)
_DISCOUNTS = (0.0, 0.3, 0.6, 0.9)
_MOST_LEVELS = 12


def solve(
    graph: StepGraph,
    budget: int | str,
    *,
    host: int | str = 0,
    disk: int | str = 0,
    time_limit_s: float = 10.0,
) -> Plan:
    """The fastest plan found whose simulated peak fits in `budget`, with a bound on how much faster any plan could be.

    `budget` covers the whole step, parameters and gradients included; `"80%"` is of the device the graph was traced
    for. `host` and `disk` are bytes that values may be moved to. A budget at or above the plain peak gives an empty
    plan. The same graph and budget give the same plan everywhere, unless `time_limit_s` cuts the search short: then
    the best so far, with its gap.

    Raises `InfeasibleBudgetError`, naming the smallest budget that would do and what fills it.
    """
    if not isinstance(graph, StepGraph):
        raise TypeError(f"a StepGraph is needed, from lowtide.trace, not {type(graph).__name__}")
    total = graph.hardware.memory_bytes or None
    search = Search(graph, parse_bytes(host), parse_bytes(disk), time_limit_s)
    return search.plan(parse_bytes(budget, total_bytes=total))


@dataclass(frozen=True)
class Found:
    """A plan's decisions, and what they cost."""

    regions: Regions
    timeline: Timeline

    @property
    def extra_s(self) -> float:
        return self.timeline.extra_s

    @property
    def peak_bytes(self) -> int:
        return self.timeline.peak_bytes


@dataclass(frozen=True)
class Moment:
    """A moment at which memory is short, and the best choices for it from everything held to as little as can be."""

    pricing: Pricing
    choices: list[Choice]


def _moment(graph: StepGraph, plain: Timeline, op: int) -> Moment:
    pricing = Pricing(graph, plain, op)
    return Moment(pricing, hull(pricing))


def _peak_op(timeline: Timeline, phase: int) -> int:
    """The op at which a phase of a step peaks."""
    events = np.flatnonzero(timeline.phases == phase)
    return int(timeline.ops[events[timeline.total_bytes[events].argmax()]])


def _fastest(candidates: Iterable[Found | None]) -> Found | None:
    found = [candidate for candidate in candidates if candidate is not None]
    return min(found, key=lambda candidate: (candidate.extra_s, candidate.peak_bytes), default=None)


class Search:
    """What solving one graph needs, made when it is first asked for and shared by all budgets of a sweep."""

    def __init__(self, graph: StepGraph, host: int = 0, disk: int = 0, time_limit_s: float = 10.0) -> None:
        if (host or disk) and not graph.hardware.link_bytes_per_s:
            raise PlanError(
                f"host={host} and disk={disk} were given, and {graph.hardware.name} has no link to host memory: "
                "there is nothing to move values to. Trace on the accelerator, or for one by name (device='H100')."
            )
        if time_limit_s <= 0:
            raise ValueError(f"time_limit_s is {time_limit_s}: it must be above 0")
        self.graph = graph
        self._deadline = time.monotonic() + time_limit_s
        ways = [(discount, share) for discount in _DISCOUNTS for share in _SHARES] if host or disk else []
        self._ways = [(0.0, 0.0), *ways]
        self._chains: dict[tuple[int, float], Chain] = {}
        self._mover = Mover(graph, host, disk)
        self._movable_bytes = host + disk
        self._timelines: dict[tuple[object, ...], Timeline] = {}

    @cached_property
    def plain(self) -> Timeline:
        return simulate(self.graph)

    @cached_property
    def _moments(self) -> list[Moment]:
        """When memory is short: at the plain step's peaks in both directions, and where the chain's last plan peaks."""
        ops = [_peak_op(self.plain, 2), _peak_op(self.plain, 0)]
        moments = [_moment(self.graph, self.plain, op) for op in dict.fromkeys(ops)]
        least = Chain(self.graph, moments[0].choices)
        late = _peak_op(self._play(least.regions(len(least) - 1), 0.0), 2)
        if late not in ops:
            moments.append(_moment(self.graph, self.plain, late))
        return moments

    def _chain(self, moment: int, discount: float) -> Chain:
        key = moment, discount
        if key not in self._chains:
            choices = self._moments[moment].choices
            if discount:
                choices = hull(Pricing(self.graph, self.plain, self._moments[moment].pricing.at, discount))
            self._chains[key] = Chain(self.graph, choices)
        return self._chains[key]

    @cached_property
    def _nesting(self) -> Nesting:
        return Nesting(self.graph, self._moments[0].pricing.replayable)

    def plan(self, budget: int) -> Plan:
        """The plan for a budget, with everything a person wants to know about it."""
        if self.plain.peak_bytes <= budget:
            return self._described(Found({}, self.plain), budget)
        candidates = [found for found in self._references if found.peak_bytes <= budget]
        for moment in range(len(self._moments)):
            for discount, share in self._ways:
                if not candidates or not self._is_late():
                    found = self._first_fitting(budget, self._chain(moment, discount), share)
                    candidates += [found] if found is not None else []
        fastest = _fastest(candidates)
        if fastest is None:
            raise self._infeasible(budget)
        return self._described(fastest, budget)

    @cached_property
    def _references(self) -> list[Found]:
        """What people do by hand: no plan of ours may be slower than theirs."""
        plans = [plan for plan in reference_plans(self.graph).values() if plan.regions]
        return [Found({}, simulate(self.graph, plan)) for plan in plans]

    def _first_fitting(self, budget: int, chain: Chain, share: float) -> Found | None:
        """The first plan of a chain that fits with this much of the link used; None if none does."""
        last = len(chain) - 1

        def fits(number: int) -> bool:
            return self._play(chain.regions(number), share).peak_bytes <= budget

        if fits(last):
            regions = chain.regions(first_that(fits, 0, last))
            return Found(regions, self._play(regions, share))
        found = []
        for splits in (True, False):
            if self._refined(chain.regions(last), budget, share, splits) is None:
                continue

            def fits_refined(number: int, splits: bool = splits) -> bool:
                return not self._is_late() and self._refined(chain.regions(number), budget, share, splits) is not None

            numbers = {first_that(fits_refined, 0, last), last}
            found += [self._refined(chain.regions(number), budget, share, splits) for number in sorted(numbers)]
        return _fastest(found) or self._refined(chain.regions(last), budget, share, splits=True, widens=True)

    def _refined(self, regions: Regions, budget: int, share: float, splits: bool, widens: bool = False) -> Found | None:
        """`regions` taken apart or nested wherever the step is over the budget; None if that is not enough."""
        for _ in range(_MOST_LEVELS):
            timeline = self._play(regions, share)
            if timeline.peak_bytes <= budget:
                return Found(regions, timeline)
            deeper = self._nesting.apart(regions, timeline, budget) if splits else regions
            if deeper == regions:
                splits = False
                deeper = self._nesting.deeper(regions, timeline, budget)
            if deeper == regions and widens:
                deeper = self._nesting.wider(regions, timeline, budget)
            if deeper == regions:
                return None
            regions = deeper
        return None

    def _play(self, regions: Regions, share: float) -> Timeline:
        key = (share, *sorted(regions.items()))
        if key not in self._timelines:
            plan = Plan(regions=recomputes(self.graph, regions), moves=self._mover.moves(regions, share))
            self._timelines[key] = simulate(self.graph, plan)
        return self._timelines[key]

    def _is_late(self) -> bool:
        return time.monotonic() > self._deadline

    # The bound.

    def lower_bound_s(self, budget: int) -> float:
        """Seconds that every plan of the eager engine adds, whatever it does, if its peak is to be at most `budget`.

        At each moment a plan holds at most `budget`, and on the host at most what the link has carried by then; the
        hull says what holding that little costs.
        """
        return max(self._bound_at(moment, budget) for moment in self._moments)

    def _bound_at(self, moment: Moment, budget: int) -> float:
        seconds = sum(op.seconds for op in self.graph.ops[: moment.pricing.at])
        moved = min(self._movable_bytes, self.graph.hardware.link_bytes_per_s * seconds)
        allowed = budget + moved - moment.pricing.base_bytes
        points = moment.choices
        if allowed >= points[0].bytes:
            return 0.0
        for high, low in pairwise(points):
            if allowed >= low.bytes:
                part = (high.bytes - allowed) / (high.bytes - low.bytes)
                return high.seconds + part * (low.seconds - high.seconds)
        return points[-1].seconds

    def _described(self, found: Found, budget: int) -> Plan:
        timeline = found.timeline
        bound = min(self.lower_bound_s(budget), found.extra_s) if found.timeline is not self.plain else 0.0
        return replace(
            timeline.plan,
            budget_bytes=budget,
            peak_bytes=timeline.peak_bytes,
            peak_path=timeline.peak_path,
            peak_phase=timeline.peak_phase,
            plain_peak_bytes=self.plain.peak_bytes,
            step_s=self.graph.step_s,
            extra_s=timeline.extra_s,
            lower_bound_s=bound,
            host_bytes=timeline.host_bytes,
            hardware=self.graph.hardware,
            fingerprint=self.graph.fingerprint,
            versions=self.graph.versions,
            rows=rows_of(self.graph, timeline.plan),
        )

    @cached_property
    def floor(self) -> Timeline:
        """The smallest peak found, with everything recomputed, nested and moved that helps."""
        candidates = [self.plain, simulate(self.graph, floor_plan(self.graph))]
        candidates += [self._deepest(share) for share in sorted({share for _, share in self._ways})]
        return min(candidates, key=lambda timeline: timeline.peak_bytes)

    def _deepest(self, share: float) -> Timeline:
        """The smallest peak on the way of taking regions apart as long as that helps."""
        chain = self._chain(0, 0.0)
        regions = chain.regions(len(chain) - 1)
        best = self._play(regions, share)
        for _ in range(_MOST_LEVELS):
            timeline, below = self._play(regions, share), best.peak_bytes - 1
            deeper = self._nesting.deeper(regions, timeline, below)
            if deeper == regions:
                deeper = self._nesting.wider(regions, timeline, below)
            if deeper == regions:
                break
            regions = deeper
            best = min(best, self._play(regions, share), key=lambda timeline: timeline.peak_bytes)
        return best

    def _infeasible(self, budget: int) -> InfeasibleBudgetError:
        floor = self.floor
        where = f"while {floor.peak_path or 'the model'} runs its {floor.peak_phase}"
        static = int(floor.peak_by_kind["static"] + floor.peak_by_kind["gradients"])
        advice = (
            ""
            if self._movable_bytes or not self.graph.hardware.link_bytes_per_s
            else ', or allow offload (host="32GiB")'
        )
        return InfeasibleBudgetError(
            f"budget {format_bytes(budget)} is below this step's floor of {format_bytes(floor.peak_bytes)}\n"
            f"  {format_bytes(static)}  parameters, gradients, optimizer state and batch\n"
            f"  {format_bytes(floor.peak_bytes - static)}  {where}\n"
            f"Raise the budget, make the batch smaller{advice}.",
            floor.peak_bytes,
        )
