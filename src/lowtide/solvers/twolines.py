"""Plans for steps with two time lines, host and device.

What a plan adds to one line is a sum over its regions, which pricing needs; what it adds to the step is not. So plans
are found for each line by itself, by a `Search` on the graph of that line, and judged by the simulation of both. Only
the line that limits the plain step is searched, unless the other is close: then plans can make that one the limit. A
trace of the other line is mixed in: of plans that are alike on one line, the one that asks less of the other is better.

A step takes no less than either line works, nor than their mean, so the larger of the two bounds is one for the step.
"""

from __future__ import annotations

from functools import cached_property

from lowtide.errors import InfeasibleBudgetError
from lowtide.graph import StepGraph
from lowtide.graph.lines import LINES, line_of
from lowtide.plans import Plan
from lowtide.simulator import Timeline
from lowtide.solvers.describing import described
from lowtide.solvers.searching import Search

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
        disk: int = 0,
        time_limit_s: float = 10.0,
        lossy: tuple[str, ...] = (),
        kind: type[Search] = Search,
    ) -> None:
        lines = {name: graph.lines.of(name) for name in LINES}
        limit = graph.lines.limit
        tried = [name for name in LINES if name == limit or lines[name] >= _NEAR * lines[limit]]
        share_s = time_limit_s / len(tried)
        self.graph, self._lossy = graph, bool(lossy)
        self._searches = {
            name: kind(graph, host, disk, share_s, lossy, line=line_of(graph, share))
            for name, share in _HOST_SHARES.items()
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
            return described(self.graph, self.plain, self.plain, budget, 0.0)
        found = [(search.fastest(budget), search) for search in self._tried]
        fitting = [(plan.extra_s, plan.peak_bytes, nth) for nth, (plan, _) in enumerate(found) if plan is not None]
        if not fitting:
            raise self._infeasible(budget)
        plan, search = found[min(fitting)[2]]
        assert plan is not None
        return described(self.graph, search.timeline_of(plan), self.plain, budget, self.lower_bound_s(budget))

    def lower_bound_s(self, budget: int) -> float:
        """Seconds that every plan adds whose peak is at most `budget`.

        What codecs take is the device's, and the graph of a mean line would charge it in full: no bound with codecs.
        """
        return 0.0 if self._lossy else max(search.lower_bound_s(budget) for search in self._searches.values())

    def _infeasible(self, budget: int) -> InfeasibleBudgetError:
        smallest = min(self._tried, key=lambda search: search.floor.peak_bytes)
        return smallest.infeasible(budget)
