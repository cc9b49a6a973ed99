"""Candidates on real steps: which of them hold the budget, and which of those is the fastest.

First each candidate runs a few steps that are measured and timed. Then those that hold and are not clearly slower take
turns with each other, and with the plain step where that fits on the device, so that a busy machine slows all of them
alike; after each round those that have fallen behind are left out. Only one plan is on the model at a time, so that
nothing one of them holds counts against another.
"""

from __future__ import annotations

import gc
import math
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from statistics import median

from lowtide.engines.planned import AppliedPlan
from lowtide.engines.progress import Progress, logger
from lowtide.engines.realsteps import RealSteps
from lowtide.engines.stepping import give_back_memory, is_out_of_memory
from lowtide.errors import LowtideError
from lowtide.plans import Plan
from lowtide.plans.trials import KEPT, Trial
from lowtide.solvers.candidates import SEARCHED, Candidate
from lowtide.tracing.usecache import CacheOff
from lowtide.units import format_bytes

# How many times as long as the fastest a candidate may take and stay: after its first step, which is timed alone, and
# after each round of turns. Too little drops a candidate for a single disturbed step, too much costs time only.
_MOST_BEHIND = (2.0, 1.25, 1.1, 1.05, 1.05)
# A candidate predicted to take so many times as long as one that holds, by prediction and as measured, is not run.
_HOPELESS = 1.25
_ROUNDS_ALONE = 2  # turns of a candidate with nobody but the plain step, for what it costs to be told
_NOISE = 0.01  # within this of the fastest, the one that was predicted to be faster is kept
_AFTER_OUT_OF_MEMORY = 0.05  # of the budget, taken off where a step ran out of memory and told no peak


@dataclass
class Tried:
    """A candidate and what was measured of it. `problem` says why it cannot be kept."""

    candidate: Candidate
    peak_bytes: int | None = None
    first_s: float | None = None
    times: list[float] = field(default_factory=list)
    problem: str = ""

    @property
    def plan(self) -> Plan:
        return self.candidate.plan

    @property
    def holds(self) -> bool:
        return self.peak_bytes is not None and not self.problem

    @property
    def seconds(self) -> float:
        """Of a step, measured; not to be asked before."""
        assert self.first_s is not None
        return median(self.times or [self.first_s])


class Tuner:
    """Runs candidates and keeps the fastest that holds `budget_bytes`, in about `tune_s` seconds.

    With `tune_s` 0 the first that holds is kept. `apply` puts a plan on the model. Whatever is raised, by an
    interruption too, `take_off()` leaves the model without a plan.
    """

    def __init__(
        self, apply: Callable[[Plan], AppliedPlan], steps: RealSteps, budget_bytes: int, tune_s: float, say: Progress
    ) -> None:
        self._apply, self._steps, self._budget, self._say = apply, steps, budget_bytes, say
        self._tune_s, self._left_s = tune_s, tune_s  # the search between two rounds of candidates does not count
        self._tried: dict[object, Tried] = {}
        self._plain_times: list[float] = []
        self._on: tuple[Tried, AppliedPlan] | None = None

    def take_off(self) -> None:
        """Leave the model without a plan."""
        if self._on is not None:
            handle, self._on = self._on[1], None
            handle.remove()
            if handle.plan.moves:
                del handle
                gc.collect()  # its stores, which hold locked host memory until then

    def try_all(self, candidates: Iterable[Candidate]) -> None:
        """Measure each candidate that was not tried before, as far as there is time and hope."""
        candidates = [each for each in candidates if _key(each.plan) not in self._tried]
        start = time.monotonic()
        for number, candidate in enumerate(candidates, 1):
            tried = self._tried[_key(candidate.plan)] = Tried(candidate)
            tried.problem = self._why_not_try(candidate, self._left_s - (time.monotonic() - start))
            if not tried.problem:
                self._say(f"trying candidate {number} of {len(candidates)}: {candidate.name}")
                self._measure(tried)
        self._left_s -= time.monotonic() - start

    def _why_not_try(self, candidate: Candidate, left_s: float) -> str:
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

    def _measure(self, tried: Tried) -> None:
        self.take_off()
        give_back_memory()  # cached blocks of other candidates are larger than this one asks for, and count in full
        try:
            self._on = tried, self._apply(tried.plan)
            tried.peak_bytes, tried.first_s = self._steps.measured()
        except Exception as error:
            self.take_off()
            if is_out_of_memory(error):
                tried.problem = "out of memory"
                traceback.clear_frames(error.__traceback__)  # they hold what the step had allocated
            elif isinstance(error, LowtideError) and tried.candidate.name != SEARCHED:
                tried.problem = f"failed: {type(error).__name__}"
                logger.warning("%s cannot be used: %s", tried.candidate.name, error)
            else:
                raise
        if not tried.problem and tried.peak_bytes is not None and tried.peak_bytes > self._budget:
            tried.problem = "over the budget"

    def missing_bytes(self, candidate: Candidate) -> int:
        """By how much a candidate that was predicted to fit exceeds its prediction; 0 if it holds."""
        tried = self._tried[_key(candidate.plan)]
        if not tried.problem or tried.problem.startswith("not tried"):
            return 0
        if tried.peak_bytes is None:
            return int(_AFTER_OUT_OF_MEMORY * self._budget)
        return max(1, tried.peak_bytes - candidate.plan.peak_bytes)

    @property
    def smallest_peak_bytes(self) -> int:
        """The smallest peak that was measured; 0 if none was."""
        return min((tried.peak_bytes for tried in self._tried.values() if tried.peak_bytes is not None), default=0)

    def has_one(self) -> bool:
        """Whether any candidate holds."""
        return bool(self._holding())

    def _holding(self) -> list[Tried]:
        return [tried for tried in self._tried.values() if tried.holds]

    def _rank(self, tried: Tried) -> float:
        """The seconds that candidates are compared by: measured, or with `tune_s` 0 predicted."""
        return tried.seconds if self._tune_s else self._steps.graph.step_s + tried.plan.extra_s

    def time_all(self) -> None:
        """Let the candidates that hold take turns with the plain step, until the time is over or one is left."""
        left = _not_behind(self._holding(), _MOST_BEHIND[0]) if self._tune_s else []
        deadline = time.monotonic() + self._left_s
        for number, behind in enumerate(_MOST_BEHIND[1:], 1):
            most = len(_MOST_BEHIND) - 1 if len(left) > 1 else _ROUNDS_ALONE
            if all(tried.plan.is_plain for tried in left) or number > most or time.monotonic() > deadline:
                return
            self._say(f"timing {len(left)} candidates in turns, round {number} of at most {most}")
            gc.collect()
            self._time_plain()
            for tried in left:
                self._time(tried)
            left = _not_behind([tried for tried in left if tried.holds], behind)

    def _time_plain(self) -> None:
        """A turn of the plain step, where the trace has run one: elsewhere it may not fit on the device."""
        self.take_off()
        if self._steps.graph.is_measured:
            try:
                with CacheOff(self._steps.model):
                    self._plain_times.append(self._steps.timed())
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                traceback.clear_frames(error.__traceback__)
                give_back_memory()

    def _time(self, tried: Tried) -> None:
        self.take_off()
        try:
            self._on = tried, self._apply(tried.plan)
            tried.times.append(self._steps.timed())
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.take_off()
            tried.problem = "out of memory"
            traceback.clear_frames(error.__traceback__)
            give_back_memory()

    def keep(self) -> AppliedPlan:
        """The fastest candidate that holds, on the model, with what was measured of it."""
        within = [each for each in self._tried.values() if (each.peak_bytes or self._budget + 1) <= self._budget]
        holding = self._holding() or within  # if all of them ran out of memory later, it was for another reason
        timed = [tried for tried in holding if tried.times] or holding
        fastest_s = (1 + _NOISE) * min(map(self._rank, timed))
        best = min((tried for tried in timed if self._rank(tried) <= fastest_s), key=lambda tried: tried.plan.extra_s)
        if self._on is None or self._on[0] is not best:
            self.take_off()
            give_back_memory()
            self._on = best, self._apply(best.plan)
            self._steps.run()  # its first step under the plan is not like the others
        handle = self._on[1]
        self._on = None
        self._note(handle, best)
        return handle

    def _note(self, handle: AppliedPlan, best: Tried) -> None:
        plain_s = self._plain_s()
        plan = replace(
            handle.plan,
            measured_peak_bytes=best.peak_bytes,
            measured_step_s=best.seconds,
            measured_plain_s=plain_s,
        )
        (first,) = handle.shapes.all
        handle.shapes.become([replace(first, plan=plan)])
        handle.plan = plan
        handle.measured_peak_bytes, handle.measured_slowdown = plan.measured_peak_bytes, plan.measured_slowdown
        handle.candidates = tuple(self._trial(tried, best, plain_s) for tried in self._ranked())

    def _ranked(self) -> list[Tried]:
        return sorted(self._tried.values(), key=lambda tried: tried.plan.extra_s)

    def _plain_s(self) -> float | None:
        if self._plain_times:
            return median(self._plain_times)
        graph = self._steps.graph
        return graph.step_s if graph.is_measured else None

    def _trial(self, tried: Tried, best: Tried, plain_s: float | None) -> Trial:
        plan, seconds = tried.plan, None if tried.first_s is None else tried.seconds
        outcome = KEPT if tried is best else tried.problem
        if not outcome:
            outcome = (
                f"{100 * (tried.seconds / best.seconds - 1):.1f} % slower than the one kept" if best.seconds else ""
            )
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


def _key(plan: Plan) -> object:
    return plan.regions, plan.moves


def _not_behind(tried: list[Tried], behind: float) -> list[Tried]:
    fastest_s = min((each.seconds for each in tried), default=0.0)
    return [each for each in tried if each.seconds <= behind * fastest_s]
