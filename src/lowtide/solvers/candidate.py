"""A plan that a search has come across.

How much a search may do: counted in simulated events, so that it stops at the same point on every machine.

A plan that was found, with everything a person wants to know about it; or why there is none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from lowtide.errors import InfeasibleBudgetError
from lowtide.graph.segments import Span
from lowtide.graph.step_graph import StepGraph
from lowtide.plans.plan_text import rows_of
from lowtide.plans.step_plan import Plan, PlannedModule
from lowtide.simulator.timeline import Timeline
from lowtide.units import check_seconds, format_bytes

Codecs = tuple[tuple[int, str], ...]  # values and how they are written, ascending
Regions = dict[int, tuple[int, ...]]


@dataclass(frozen=True)
class Candidate:
    """A plan's decisions, and what they cost. `share` is how much of the link moves use, `codecs` what is encoded.

    With `spans`, calls of `regions` are those of the graph with these segments.
    """

    regions: Regions
    share: float
    codecs: Codecs
    peak_bytes: int
    extra_s: float
    spans: tuple[Span, ...] = ()

    @property
    def decisions(self) -> tuple[Regions, float, Codecs]:
        return self.regions, self.share, self.codecs


def faster(*candidates: Candidate | None) -> Candidate | None:
    """The fastest of those that there are; the smaller of two that are as fast."""
    found = [candidate for candidate in candidates if candidate is not None]
    return min(found, key=lambda candidate: (candidate.extra_s, candidate.peak_bytes), default=None)


def smaller(*candidates: Candidate | None) -> Candidate | None:
    """The one with the least peak of those that there are; the faster of two that are as small."""
    found = [candidate for candidate in candidates if candidate is not None]
    return min(found, key=lambda candidate: (candidate.peak_bytes, candidate.extra_s), default=None)


# Events per second of a time limit: what a core of a small server plays, with what the search does around them. If it
# is too high, the clock ends searches, and plans depend on the machine; too low, and large steps are searched less than
# there is time for.
_EVENTS_PER_S = 1_000_000
_OVERHEAD = 2_000  # events that take as long as it takes to begin to play a step
_BY_OP = 25  # times as long as an event of `EagerIntervals` takes one that is played op by op
_PATIENCE = 3.0  # times the limit until the clock ends a search: for machines that are slower, or busy


class Effort:
    """What is left of a search's effort. The clock is a safety net: it alone makes plans depend on the machine."""

    def __init__(self, time_limit_s: float) -> None:
        check_seconds(time_limit_s, "time_limit_s")
        self._left, self._deadline = time_limit_s * _EVENTS_PER_S, time.monotonic() + _PATIENCE * time_limit_s

    def spend(self, num_events: int, *, times: int = 1, by_op: bool = False) -> None:
        """A step of so many events was played, or something was done that takes as long."""
        self._left -= times * (_OVERHEAD + num_events * (_BY_OP if by_op else 1))

    def is_over(self) -> bool:
        return self._left <= 0 or time.monotonic() > self._deadline

    def is_over_after(self, num_plays: int, num_events: int) -> Callable[[], bool]:
        """As `is_over`, for a loop whose every turn takes as long as that many plays of a step, and asks once."""

        def is_over() -> bool:
            self.spend(num_events, times=num_plays)
            return self.is_over()

        return is_over


def with_predictions(graph: StepGraph, timeline: Timeline, plain: Timeline, budget: int, lower_bound_s: float) -> Plan:
    """The plan of a timeline, with what it was made for and what is predicted of it."""
    plan = replace(
        timeline.plan,
        budget_bytes=budget,
        peak_bytes=timeline.peak_bytes,
        peak_path=timeline.peak_path,
        peak_phase=timeline.peak_phase,
        plain_peak_bytes=plain.peak_bytes,
        step_s=graph.step_s,
        extra_s=timeline.extra_s,
        lower_bound_s=min(lower_bound_s, timeline.extra_s),
        host_bytes=timeline.host_bytes,
        hardware=graph.hardware,
        fingerprint=graph.fingerprint,
        versions=graph.versions,
        graph=graph,
        choosers=_index_choosing_modules(graph, timeline.plan),
        modules=_modules(graph, timeline.plan),
    )
    return replace(plan, rows=rows_of(graph, plan))


def _modules(graph: StepGraph, plan: Plan) -> tuple[PlannedModule, ...]:
    recomputed = [path for region in plan.regions for path in region.paths]
    paths = dict.fromkeys([*recomputed, *(move.path for move in plan.moves)])
    calls = {path: graph.calls_by_path[path] for path in paths if path in graph.calls_by_path}
    return tuple(PlannedModule(path, graph.calls[numbers[0]].kind, len(numbers)) for path, numbers in calls.items())


def _index_choosing_modules(graph: StepGraph, plan: Plan) -> tuple[str, ...]:
    """The modules inside of regions whose own ops choose; of modules that have no name, those around them."""
    recomputed = {path for region in plan.regions for path in region.paths}
    found: dict[str, None] = {}
    for op in graph.ops[: graph.num_forward]:
        if "index" in op.flags:
            paths = [path for call in graph.ancestors(op.call) if not (path := graph.calls[call].path).startswith("<")]
            if not recomputed.isdisjoint(paths):
                found[paths[0]] = None
    return tuple(found)


def infeasible(budget: int, floor: Timeline, advice: str = "") -> InfeasibleBudgetError:
    """The error for a budget below the `floor`; `advice` is what else would help."""
    static = int(floor.peak_by_kind["static"] + floor.peak_by_kind["gradients"])
    where = f"while {floor.peak_path or 'the model'} runs its {floor.peak_phase}"
    return InfeasibleBudgetError(
        f"budget {format_bytes(budget)} is below this step's floor of {format_bytes(floor.peak_bytes)}\n"
        f"  {format_bytes(static)}  parameters, gradients, optimizer state and batch\n"
        f"  {format_bytes(floor.peak_bytes - static)}  {where}\n"
        f"Raise the budget{', ' if advice else ' or '}make the batch smaller{advice}.",
        floor.peak_bytes,
    )
