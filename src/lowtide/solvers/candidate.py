"""`Candidate`, the value that all generators of an eager search produce, and what every search shares.

A candidate is a set of decisions (regions, retained outputs, offload, codecs) with the peak and the time that the
simulator gives it. `faster` and `smaller` pick one of several. `Effort` limits how much a search may simulate, counted
in simulated events, so that a search stops at the same point on every machine. `with_predictions` turns the best
candidate's timeline into the `Plan` that `solve` returns, and `infeasible` builds the error when no candidate fits.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TypeVar

import numpy as np

from lowtide.errors import InfeasibleBudgetError
from lowtide.graph.segments import Span
from lowtide.graph.step_graph import Forward, StepGraph
from lowtide.plans.plan_text import rows_of
from lowtide.plans.step_plan import Plan, PlannedModule
from lowtide.simulator.timeline import Timeline
from lowtide.units import check_seconds, counted, format_apart, format_bytes

Codecs = tuple[tuple[int, str], ...]  # values and the codec of each, by ascending value
Regions = dict[int, tuple[int, ...]]  # by recomputed call: ops, counted from its first, whose outputs it retains
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Candidate:
    """Decisions of a plan and what they cost in simulation.

    `share` is the share of the link's bandwidth that offload may use (0: nothing moves), `codecs` the values held
    encoded. `busy_host_s` is what a busy host adds to `extra_s` (`StepLines`). If `spans` is not empty, the calls in
    `regions` are numbered as in the graph with these segments (`graph.segments.with_segments`).
    """

    regions: Regions
    share: float
    codecs: Codecs
    peak_bytes: int
    extra_s: float
    spans: tuple[Span, ...] = ()
    busy_host_s: float = 0.0

    @property
    def expected_s(self) -> float:
        """Seconds that the plan is expected to add on a host that is busy at times."""
        return self.extra_s + self.busy_host_s

    @property
    def decisions(self) -> tuple[Regions, float, Codecs]:
        return self.regions, self.share, self.codecs


def faster(*candidates: Candidate | None) -> Candidate | None:
    """The fastest candidate, ignoring None; of two equally fast ones the smaller."""
    known = [candidate for candidate in candidates if candidate is not None]
    return min(known, key=lambda candidate: (candidate.extra_s, candidate.peak_bytes), default=None)


def smaller(*candidates: Candidate | None) -> Candidate | None:
    """The candidate with the smallest peak, ignoring None; of two equally small ones the faster."""
    known = [candidate for candidate in candidates if candidate is not None]
    return min(known, key=lambda candidate: (candidate.peak_bytes, candidate.extra_s), default=None)


def thinned(items: list[_Item], most: int) -> list[_Item]:
    """At most `most` of the items, evenly spaced, with the first and the last."""
    if len(items) <= most:
        return items
    return [items[index] for index in np.unique(np.linspace(0, len(items) - 1, most).round().astype(int))]


_MOST_SUBSETS = 6  # with up to this many items, every subset of them is tried (2^6)


def some_subsets(items: Sequence[_Item], most_cuts: int) -> list[tuple[_Item, ...]]:
    """Every subset of few items; of many, prefixes and suffixes of `most_cuts` lengths."""
    if len(items) <= _MOST_SUBSETS:
        return [subset for size in range(1, len(items) + 1) for subset in combinations(items, size)]
    step = -(-len(items) // most_cuts)
    cuts = range(step, len(items) + 1, step)
    return [tuple(part) for cut in cuts for part in (items[:cut], items[-cut:])]


# Simulated events per second of a time limit: what one core of a small server does, the search's own work included.
# Too high, and the clock ends searches, so that plans depend on the machine; too low, and large steps are searched for
# less time than the limit allows.
_EVENTS_PER_S = 1_000_000
_OVERHEAD = 2_000  # fixed cost of one simulation, in events
_BY_OP = 25  # cost of an event in `simulate` (op by op), in events of `EagerIntervals` (vectorised)
_PATIENCE = 3.0  # CPU time ends a search after this multiple of its limit, for machines that are slower


class Effort:
    """The simulated events that a search has left. The clock is only a safety net, as it depends on the machine.

    It counts the CPU time of the thread: on a busy machine, wall-clock time would end searches early and plans would
    differ from run to run.
    """

    def __init__(self, time_limit_s: float) -> None:
        check_seconds(time_limit_s, "time_limit_s")
        self._left, self._deadline = time_limit_s * _EVENTS_PER_S, time.thread_time() + _PATIENCE * time_limit_s

    def spend(self, num_events: int, *, times: int = 1, by_op: bool = False) -> None:
        """Count `times` simulations of `num_events` events each; `by_op` if they are simulated op by op."""
        self._left -= times * (_OVERHEAD + num_events * (_BY_OP if by_op else 1))

    def is_over(self) -> bool:
        return self._left <= 0 or time.thread_time() > self._deadline

    def is_over_after(self, num_plays: int, num_events: int) -> Callable[[], bool]:
        """Return an `is_over` for a loop: each call also counts `num_plays` simulations of `num_events` events."""

        def is_over() -> bool:
            self.spend(num_events, times=num_plays)
            return self.is_over()

        return is_over


def with_predictions(timeline: Timeline, budget: int, lower_bound_s: float) -> Plan:
    """The plan of a timeline, with its budget, predictions, lower bound and the facts of the graph filled in."""
    graph = timeline.graph
    modules = _modules(graph, timeline.plan)
    plan = replace(
        timeline.plan,
        splits=graph.splits,
        budget_bytes=budget,
        peak_bytes=timeline.peak_bytes,
        peak_path=timeline.peak_path,
        peak_phase=timeline.peak_phase,
        plain_peak_bytes=graph.plain_peak_bytes,
        step_s=graph.step_s,
        extra_s=timeline.extra_s,
        lower_bound_s=min(lower_bound_s, timeline.extra_s),
        host_bytes=timeline.host_bytes,
        hardware=graph.hardware,
        fingerprint=graph.fingerprint,
        versions=graph.versions,
        graph=graph,
        choosers=_index_choosing_modules(graph, timeline.plan),
        modules=modules,
        forwards=_forwards(graph, {module.path for module in modules}),
    )
    return replace(plan, rows=rows_of(graph, plan))


def _modules(graph: StepGraph, plan: Plan) -> tuple[PlannedModule, ...]:
    recomputed = [path for region in plan.regions for path in region.paths]
    paths = dict.fromkeys([*recomputed, *(move.path for move in plan.moves), *(split.path for split in graph.splits)])
    calls = {path: graph.calls_by_path[path] for path in paths if path in graph.calls_by_path}
    return tuple(PlannedModule(path, graph.calls[numbers[0]].kind, len(numbers)) for path, numbers in calls.items())


def _forwards(graph: StepGraph, paths: set[str]) -> tuple[Forward, ...]:
    """The calls that the step makes itself, with the counts of these modules; none if that is one call of the model."""
    forwards = tuple(
        Forward(each.path, tuple((path, nth) for path, nth in each.before if path in paths)) for each in graph.forwards
    )
    return () if forwards == (Forward(""),) else forwards


def _index_choosing_modules(graph: StepGraph, plan: Plan) -> tuple[str, ...]:
    """Paths of modules in regions with outputs that every replay takes from its forward: indices, reduced tensors.

    For unnamed modules it is the parent's path.
    """
    recomputed = {path for region in plan.regions for path in region.paths}
    choosers: dict[str, None] = {}
    for op in graph.ops[: graph.num_forward]:
        if op.is_kept:
            paths = [path for call in graph.ancestors(op.call) if not (path := graph.calls[call].path).startswith("<")]
            if not recomputed.isdisjoint(paths):
                choosers[paths[0]] = None
    return tuple(choosers)


_MUCH_EXCLUDED = 0.1  # of the saved bytes, from which an error names the calls that no plan can recompute


def _not_recomputed(graph: StepGraph) -> str:
    """A line on repeated calls, such as blocks, that no plan can recompute, if much is saved in them; else nothing."""
    num_alike = Counter(call.structure for call in graph.calls)
    reasons = {call: why for call, why in graph.unreplayable.items() if num_alike[graph.calls[call].structure] > 1}
    owner, saved = graph.outermost(reasons), dict[int, set[int]]()
    for save in graph.saves:
        if owner[save.call] >= 0 and graph.values[save.value].kind == "activation":
            saved.setdefault(owner[save.call], set()).add(save.value)
    sizes = {call: sum(graph.values[value].bytes for value in values) for call, values in saved.items()}
    if sum(sizes.values()) <= _MUCH_EXCLUDED * graph.saved_bytes:
        return ""
    largest = max(sizes, key=lambda call: sizes[call])
    calls = counted(len(sizes), "call")
    return f"{calls} cannot be recomputed, such as {graph.calls[largest].path}: {reasons[largest]}.\n"


def infeasible(budget: int, floor: Timeline, advice: str = "") -> InfeasibleBudgetError:
    """The error for a budget below the `floor`; `advice` is appended to what the user can do."""
    static = int(floor.peak_by_kind["static"] + floor.peak_by_kind["gradients"])
    where = f"while {floor.peak_path or 'the model'} runs its {floor.peak_phase}"
    given, needed = format_apart(budget, floor.peak_bytes)
    return InfeasibleBudgetError(
        f"budget {given} is below this step's floor of {needed}\n"
        f"  {format_bytes(static)}  parameters, gradients, optimizer state and batch\n"
        f"  {format_bytes(floor.peak_bytes - static)}  {where}\n"
        f"{_not_recomputed(floor.graph)}"
        f"Raise the budget{', ' if advice else ' or '}make the batch smaller{advice}.",
        floor.peak_bytes,
    )
