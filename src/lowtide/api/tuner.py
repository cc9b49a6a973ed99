"""`Tuner`: runs the candidate plans of `fit` and keeps the fastest whose measured peak is within the budget.

Predicted times and peaks can be wrong by several per cent, so candidates are compared on real steps. Each one first
runs a few steps, for its peak and a first time. Those within the budget and not clearly slower then take turns with
each other, and with the plain step if it fits on the device, so that a busy machine slows all of them alike. After
each round the slower ones are dropped. What counts is the fastest turn of each, as other processes only ever add time,
plus what a busy host is predicted to add on average (`StepLines.busy_host_s`). Only one plan is on the model at a time,
so that memory of one never counts against another.
"""

from __future__ import annotations

import gc
import logging
import math
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from lowtide.api.measure import RealSteps
from lowtide.distributed.ranks import ALONE, Ranks, is_out_of_memory
from lowtide.eager.over_budget import give_back_memory
from lowtide.eager.plan_handle import AppliedPlan
from lowtide.errors import LowtideError, RankError
from lowtide.graph.time_lines import StepLines
from lowtide.plans.plan_text import KEPT, Trial
from lowtide.plans.step_plan import Plan
from lowtide.simulator.timeline import simulate
from lowtide.solvers.solve import SEARCHED, ShortlistedPlan
from lowtide.tracing.step_checks import CacheOff
from lowtide.units import format_bytes

logger = logging.getLogger("lowtide")

# A candidate is dropped if it takes more than this many times as long as the fastest: after its first step, which is
# timed alone, and after each round of turns. Too low drops a candidate for one disturbed step, too high costs time.
_MAX_RATIOS = (2.0, 1.25, 1.1, 1.05, 1.05)
# A candidate is not run if it is predicted to take this many times as long as one that holds, by that one's predicted
# and measured time.
_HOPELESS = 1.25
_ROUNDS_ALONE = 2  # turns of a single candidate with the plain step, to measure its slowdown
_AFTER_OUT_OF_MEMORY = 0.05  # share of the budget assumed as excess if a step ran out of memory: its peak is not known


@dataclass
class MeasuredCandidate:
    """A candidate with its measured peak and times. `problem` says why it cannot be kept (empty if it can).

    `lines` are the two time lines that are predicted for a step, where it has two.
    """

    candidate: ShortlistedPlan
    peak_bytes: int | None = None
    first_s: float | None = None
    times: list[float] = field(default_factory=list)
    problem: str = ""
    lines: StepLines | None = None

    @property
    def plan(self) -> Plan:
        return self.candidate.plan

    @property
    def holds(self) -> bool:
        return self.peak_bytes is not None and not self.problem

    @property
    def seconds(self) -> float:
        """Measured seconds of a step, the fewest that it took. Only for candidates that have run."""
        assert self.first_s is not None
        return min([self.first_s, *self.times])

    @property
    def expected_s(self) -> float:
        """Seconds that a step is expected to take on a host that is busy now and then. Only for those that have run."""
        return self.seconds if self.lines is None else self.seconds + self.lines.within(self.seconds).busy_host_s


class Tuner:
    """Runs candidates for about `tune_s` seconds and keeps the fastest that stays within `budget_bytes`.

    With `tune_s=0` the first that holds is kept. `apply` puts a plan on the model. After any exception, the caller
    calls `remove_plan()`, which leaves the model without a plan.

    All `ranks` keep the same candidate: a peak is the highest of any rank, times and deadlines are the lowest rank's,
    and a candidate that fails on one rank fails on all.
    """

    def __init__(
        self,
        apply: Callable[[Plan], AppliedPlan],
        steps: RealSteps,
        budget_bytes: int,
        tune_s: float,
        say: Callable[[str], None],
        ranks: Ranks = ALONE,
    ) -> None:
        self._apply, self._steps, self._budget, self._say, self._ranks = apply, steps, budget_bytes, say, ranks
        self._tune_s, self._left_s = tune_s, tune_s  # time spent solving between rounds does not count
        self._tried: dict[object, MeasuredCandidate] = {}
        self._plain_times: list[float] = []
        self._on: tuple[MeasuredCandidate, AppliedPlan] | None = None

    def remove_plan(self) -> None:
        """Remove the plan that is on the model, if there is one."""
        if self._on is not None:
            handle, self._on = self._on[1], None
            handle.remove()
            if handle.plan.moves:
                del handle
                gc.collect()  # frees the pinned host memory of its stores

    def try_all(self, candidates: Iterable[ShortlistedPlan]) -> None:
        """Measure each candidate that was not tried before, unless time is up or it is predicted to be too slow."""
        candidates = [each for each in candidates if _key(each.plan) not in self._tried]
        start = time.monotonic()
        for number, candidate in enumerate(candidates, 1):
            tried = self._tried[_key(candidate.plan)] = MeasuredCandidate(candidate)
            left_s = self._ranks.first(self._left_s - (time.monotonic() - start), "time left")
            tried.problem = self._why_not_try(candidate, left_s)
            if not tried.problem:
                self._say(f"trying candidate {number} of {len(candidates)}: {candidate.name}")
                self._measure(tried)
        self._left_s -= time.monotonic() - start

    def _why_not_try(self, candidate: ShortlistedPlan, left_s: float) -> str:
        holding, graph = self._holding(), self._steps.graph
        if not holding:
            return ""
        best = min(holding, key=self._rank)
        most_s = _HOPELESS * max(best.seconds, graph.step_s + best.plan.extra_s) if graph.is_measured else math.inf
        if self._tune_s == 0:
            most_s = graph.step_s + best.plan.extra_s
        if graph.step_s + candidate.plan.extra_s > most_s:
            return "not tried: predicted to be slower than one that holds"
        return "not tried: no time left" if left_s <= 0 and not candidate.is_essential else ""

    def _measure(self, tried: MeasuredCandidate) -> None:
        self.remove_plan()
        give_back_memory()  # this plan would be given larger cached blocks of other candidates, which count in full
        try:
            with self._ranks.together(f"candidate {tried.candidate.name}"):
                self._on = tried, self._apply(tried.plan)
                measured = self._steps.measured()
            of_ranks = self._ranks.gathered((*measured, _lines_of(tried.plan)), "measured peaks")
            tried.peak_bytes = max(peak for peak, *_ in of_ranks)
            _, tried.first_s, tried.lines = of_ranks[0]
        except Exception as error:
            self.remove_plan()
            if is_out_of_memory(error):
                tried.problem = "out of memory"
                traceback.clear_frames(error.__traceback__)  # its frames hold the tensors of the step
            elif _is_of_candidate(error) and tried.candidate.name != SEARCHED:
                tried.problem = f"failed: {type(error).__name__}"
                logger.warning("%s cannot be used: %s", tried.candidate.name, error)
            else:
                raise
        if not tried.problem and tried.peak_bytes is not None and tried.peak_bytes > self._budget:
            tried.problem = "over the budget"

    def missing_bytes(self, candidate: ShortlistedPlan) -> int:
        """By how many bytes a candidate exceeds its predicted peak; 0 if it holds or was not tried."""
        tried = self._tried[_key(candidate.plan)]
        if not tried.problem or tried.problem.startswith("not tried"):
            return 0
        if tried.peak_bytes is None:
            return int(_AFTER_OUT_OF_MEMORY * self._budget)
        return max(1, tried.peak_bytes - candidate.plan.peak_bytes)

    @property
    def smallest_peak_bytes(self) -> int:
        """The smallest measured peak; 0 if there is none."""
        return min((tried.peak_bytes for tried in self._tried.values() if tried.peak_bytes is not None), default=0)

    def has_one(self) -> bool:
        """Whether any candidate stays within the budget."""
        return bool(self._holding())

    def _holding(self) -> list[MeasuredCandidate]:
        return [tried for tried in self._tried.values() if tried.holds]

    def _rank(self, tried: MeasuredCandidate) -> float:
        """The seconds that candidates are compared by: expected from measured ones, or predicted with `tune_s=0`."""
        return tried.expected_s if self._tune_s else self._steps.graph.step_s + tried.plan.extra_s

    def time_all(self) -> None:
        """Time the candidates that hold in turns with the plain step, until time is up or one is left."""
        left = _near_fastest(self._holding(), _MAX_RATIOS[0]) if self._tune_s else []
        deadline = time.monotonic() + self._left_s
        for number, ratio in enumerate(_MAX_RATIOS[1:], 1):
            num_rounds = len(_MAX_RATIOS) - 1 if len(left) > 1 else _ROUNDS_ALONE
            is_late = self._ranks.first(time.monotonic() > deadline, "deadline")
            if all(tried.plan.is_plain for tried in left) or number > num_rounds or is_late:
                return
            self._say(f"timing {len(left)} candidates in turns, round {number} of at most {num_rounds}")
            gc.collect()
            # The plain step only if the trace has run one: otherwise it may not fit on the device.
            for each in [None, *left] if self._steps.graph.is_measured else left:
                self._time(each)
            left = _near_fastest([tried for tried in left if tried.holds], ratio)

    def _time(self, tried: MeasuredCandidate | None) -> None:
        """Time a step under a candidate; without one the plain step."""
        self.remove_plan()
        name = "the plain step" if tried is None else tried.candidate.name
        try:
            with self._ranks.together(f"timing of {name}"):
                if tried is not None:
                    self._on = tried, self._apply(tried.plan)
                with CacheOff(self._steps.model) if tried is None else nullcontext():
                    seconds = self._steps.timed()
            times = self._plain_times if tried is None else tried.times
            times.append(self._ranks.first(seconds, f"time of {name}"))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.remove_plan()
            if tried is not None:
                tried.problem = "out of memory"
            traceback.clear_frames(error.__traceback__)
            give_back_memory()

    def keep(self) -> AppliedPlan:
        """Put the fastest candidate that holds on the model, with its measured numbers; returns its handle."""
        within = [each for each in self._tried.values() if (each.peak_bytes or self._budget + 1) <= self._budget]
        holding = self._holding() or within  # all ran out of memory after they were measured: something else took it
        timed = [tried for tried in holding if tried.times] or holding
        best = min(timed, key=self._rank)
        if self._on is None or self._on[0] is not best:
            self.remove_plan()
            give_back_memory()
            with self._ranks.together("step under the chosen plan"):
                self._on = best, self._apply(best.plan)
                self._steps.run()  # the first step under a plan differs: it captures where retained outputs are saved
        handle = self._on[1]
        self._on = None
        self._record(handle, best)
        return handle

    def _record(self, handle: AppliedPlan, best: MeasuredCandidate) -> None:
        graph = self._steps.graph
        plain_s = min(self._plain_times, default=graph.step_s if graph.is_measured else None)
        # The bound of a later round counts memory that an earlier plan needed, and not every plan that holds does.
        bound_s = min(handle.plan.lower_bound_s, *(tried.plan.extra_s for tried in (best, *self._holding())))
        plan = replace(
            handle.plan,
            lower_bound_s=bound_s,
            measured_peak_bytes=best.peak_bytes,
            measured_step_s=best.seconds,
            measured_plain_s=plain_s,
        )
        (first,) = handle.shapes.all
        handle.shapes.become([replace(first, plan=plan)])
        handle.plan = plan
        handle.measured_peak_bytes, handle.measured_slowdown = plan.measured_peak_bytes, plan.measured_slowdown
        ranked = sorted(self._tried.values(), key=lambda tried: tried.plan.extra_s)
        handle.candidates = tuple(self._trial(tried, best, plain_s) for tried in ranked)

    def _trial(self, tried: MeasuredCandidate, best: MeasuredCandidate, plain_s: float | None) -> Trial:
        plan, seconds = tried.plan, None if tried.first_s is None else tried.seconds
        outcome = KEPT if tried is best else tried.problem
        if not outcome and not self._tune_s:
            outcome = "predicted to be no faster than the one kept"
        elif not outcome and best.seconds:
            outcome = f"{100 * (tried.expected_s / best.expected_s - 1):.1f} % slower than the one kept"
            outcome += " on a host that is busy at times" if tried.seconds < best.seconds else ""
        if tried.problem == "over the budget" and tried.peak_bytes is not None:
            outcome = f"{format_bytes(tried.peak_bytes - self._budget)} over the budget"
        return Trial(
            tried.candidate.name,
            len(plan.regions),
            len(plan.moves),
            plan.peak_bytes,
            plan.slowdown,
            tried.peak_bytes,
            seconds,
            None if seconds is None or not plain_s else seconds / plain_s - 1,
            outcome,
        )


def _is_of_candidate(error: Exception) -> bool:
    """Whether an error says that this plan cannot be used; others may be usable."""
    return isinstance(error, LowtideError) and not isinstance(error, RankError)


def _lines_of(plan: Plan) -> StepLines | None:
    return simulate(plan.graph, plan).lines if plan.graph is not None and plan.graph.has_host_line else None


def _key(plan: Plan) -> object:
    return plan.regions, plan.moves, plan.splits


def _near_fastest(tried: list[MeasuredCandidate], ratio: float) -> list[MeasuredCandidate]:
    fastest_s = min((each.expected_s for each in tried), default=0.0)
    return [each for each in tried if each.expected_s <= ratio * fastest_s]
