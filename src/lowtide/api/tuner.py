"""`Tuner`: picks the fastest candidate plan whose measured peak is within the budget, for `fit`.

Predicted times and peaks can be wrong by several per cent, so candidates are compared on real steps. First each one
runs a few steps, which gives its peak and a first time. Those that hold and are not clearly slower then take turns with
each other, and with the plain step if it fits on the device, so that a busy machine slows all of them alike. The
fastest turn of each counts, as other processes only ever add time. After each round the slower ones are dropped. Only
one plan is on the model at a time: memory that one of them holds never counts against another.

`FitCache` keeps the result in a JSON file, one entry per graph, hardware, budget, limits and version of lowtide and
torch. A file is replaced by renaming, so no reader sees half of one; if two processes write at once, the entries of one
may be lost. A file in another format is left as it is, with a warning.

`Progress` and `log_fitted` report what `fit` is doing: one line on a terminal, log lines elsewhere.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lowtide.api.measure import RealSteps
from lowtide.api.split_search import SplitSearch
from lowtide.distributed.ranks import ALONE, Ranks, is_out_of_memory
from lowtide.eager.out_of_memory import give_back_memory
from lowtide.eager.plan_handle import AppliedPlan
from lowtide.eager.replanning import Limits
from lowtide.errors import LowtideError, RankError
from lowtide.graph.step_graph import StepGraph
from lowtide.plans.plan_text import KEPT, Trial, split_texts, trials_table
from lowtide.plans.step_plan import Plan
from lowtide.simulator.timeline import simulate
from lowtide.solvers.candidate import with_predictions
from lowtide.solvers.solve import SEARCHED, ShortlistedPlan, search_for
from lowtide.tracing.step_checks import CacheOff
from lowtide.units import format_bytes, own_version

logger = logging.getLogger("lowtide")

_ACTIONS = {"keep": "kept", "recompute": "recomputed", "host": "offloaded", "disk": "offloaded to disk"}
_ALWAYS_LOGGED = ("keep", "recompute", "host")


class Progress:
    """Reports the stage that `fit` is in. As a context manager it clears its line on the terminal at the end.

    If the logger "lowtide" logs INFO, each stage is a log line. Otherwise, if stderr is a terminal, each stage
    overwrites the one before; a logger level above WARNING silences that too. A replaced `sys.stderr` (a notebook, a
    progress bar, a test) is not written to.
    """

    def __init__(self) -> None:
        self._is_on_terminal = False

    def __call__(self, stage: str) -> None:
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s", stage)
        elif logger.isEnabledFor(logging.WARNING) and sys.stderr is sys.__stderr__:
            self._write(f"lowtide: {stage} ")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_on_terminal:
            self._write("")

    def _write(self, text: str) -> None:
        if sys.stderr is not None and sys.stderr.isatty():
            self._is_on_terminal = True
            sys.stderr.write(f"\r\x1b[2K{text}")
            sys.stderr.flush()


def log_fitted(handle: AppliedPlan, budget_bytes: int) -> None:
    """Log one line on the plan that was kept, and a table of the candidates if there were several."""
    plan, peak, slowdown = handle.plan, handle.measured_peak_bytes, handle.measured_slowdown
    sizes = {action: size for action, size in plan.bytes_by_action().items() if size or action in _ALWAYS_LOGGED}
    logger.info(
        "%s: %d regions, %s%s; peak %s predicted, %s measured, within %s; %.1f %% slower predicted, %s measured",
        "nothing to do, the step fits as it is" if plan.is_plain else "fitted",
        len(plan.regions),
        ", ".join(f"{format_bytes(size)} {_ACTIONS.get(action, 'compressed')}" for action, size in sizes.items()),
        "".join(f", {text}" for text in split_texts(plan.splits)),
        format_bytes(plan.peak_bytes),
        "not" if peak is None else format_bytes(peak),
        format_bytes(budget_bytes),
        100 * plan.slowdown,
        "not" if slowdown is None else f"{100 * slowdown:.1f} %",
    )
    if len(handle.candidates) > 1:
        logger.info("candidates:\n%s", trials_table(handle.candidates))


FORMAT, VERSION = "lowtide fit cache", 2


@dataclass(frozen=True)
class CachedFit:
    """A cached plan, and by how many bytes measured peaks were above predictions when it was made."""

    plan: Plan
    correction_bytes: int


class FitCache:
    """Reads and writes the entry of one graph, budget and set of limits in a cache file."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        graph: StepGraph,
        budget_bytes: int,
        limits: Limits,
        splits: SplitSearch | None = None,
    ) -> None:
        self._path, self._graph, self._budget, self._splits = Path(path), graph, budget_bytes, splits
        self._limits = limits
        parts = {
            "graph": graph.fingerprint,
            "optimizer_state_bytes": graph.optimizer_state_bytes,
            "hardware": graph.hardware.name,
            "budget_bytes": budget_bytes,
            "host": limits.host,
            "lossy": limits.lossy,
            "split": limits.split,
            "lowtide": own_version(),
            "torch": graph.versions.get("torch", ""),
        }
        self._key = json.dumps(parts, sort_keys=True, default=str)

    def read(self) -> CachedFit | None:
        """The cached plan, with predictions for this graph; None if there is no usable entry."""
        entries, problem = self._entries()
        if problem:
            logger.warning("the cache %s is not used, and left as it is: %s", self._path, problem)
        if self._key not in entries:
            return None
        try:
            entry = entries[self._key]
            decided = Plan.from_json(entry["plan"])
            correction = entry["correction_bytes"]
            if type(correction) is not int or correction < 0:
                raise ValueError(f"correction_bytes is {correction!r:.50}")
            graph = self._splits.graph(decided.splits) if self._splits is not None else self._graph
            plan = Plan(decided.regions, decided.moves, decided.in_flight_bytes, splits=decided.splits)
            timeline = simulate(graph, plan)
        except (LowtideError, ValueError, KeyError, TypeError) as error:
            logger.warning("the cache %s has a damaged entry for this step: %s", self._path, error)
            return None
        # The cached bound is for the times that were measured then.
        limits = self._limits
        search = search_for(graph, "eager", limits.host, limits.time_limit_s, limits.lossy)
        found = with_predictions(graph, timeline, simulate(graph), self._budget, search.lower_bound_s(self._budget))
        return CachedFit(found if self._splits is None else self._splits.predicted(found), correction)

    def write(self, plan: Plan, correction_bytes: int, trials: Sequence[Trial]) -> None:
        """Write the entry to the file; log a warning if that fails."""
        entries, problem = self._entries()
        if problem:
            return  # `read` has logged it
        bare = replace(plan, rows=(), graph=None, modules=())
        entry = {
            "plan": bare.to_json(graph=False),
            "correction_bytes": correction_bytes,
            "candidates": [asdict(trial) for trial in trials],
        }
        content = {"format": FORMAT, "version": VERSION, "entries": {**entries, self._key: entry}}
        try:
            handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    json.dump(content, file, indent=1)
                os.replace(name, self._path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise
        except OSError as error:
            logger.warning("the cache %s cannot be written: %s", self._path, error)

    def _entries(self) -> tuple[dict[str, Any], str]:
        """The entries of the file, and why it cannot be used (empty if it can)."""
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}, ""
        except (OSError, ValueError, RecursionError) as error:
            return {}, f"it cannot be read: {error}"
        is_ours = isinstance(content, dict) and content.get("format") == FORMAT
        if not is_ours or content.get("version") != VERSION or not isinstance(content.get("entries"), dict):
            return {}, f"it is no {FORMAT} of version {VERSION}"
        return content["entries"], ""


# A candidate is dropped if it takes more than this many times as long as the fastest: after its first step, which is
# timed alone, and after each round of turns. Too low drops a candidate for one disturbed step, too high costs time.
_MAX_RATIOS = (2.0, 1.25, 1.1, 1.05, 1.05)
# A candidate is not run if it is predicted to take this many times as long as one that holds, by that one's predicted
# and measured time.
_HOPELESS = 1.25
_ROUNDS_ALONE = 2  # turns of a single candidate with the plain step, to measure its slowdown
_NOISE = 0.01  # candidates within this share of the fastest are equally fast, as far as timing can tell
# Of equally fast candidates, the one is kept that would be fastest on a host slower by this factor. Data loaders, other
# processes and Python's garbage collector slow a host down, by 1.2 to 1.5 times between two moments on the H200 of
# bench/results/eager-cuda.md. A plan that only just keeps the host ahead of the device is then slower by as much.
_SLOWER_HOST = 1.25
_AFTER_OUT_OF_MEMORY = 0.05  # share of the budget assumed as excess if a step ran out of memory: its peak is not known


@dataclass
class MeasuredCandidate:
    """A candidate with its measured peak and times. `problem` says why it cannot be kept (empty if it can)."""

    candidate: ShortlistedPlan
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
        """Measured seconds of a step, the fewest that it took. Only for candidates that have run."""
        assert self.first_s is not None
        return min([self.first_s, *self.times])


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
        say: Progress,
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
            of_ranks = self._ranks.gathered(measured, "measured peaks")
            tried.peak_bytes, tried.first_s = max(peak for peak, _ in of_ranks), of_ranks[0][1]
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
        """The seconds that candidates are compared by: measured, or predicted with `tune_s=0`."""
        return tried.seconds if self._tune_s else self._steps.graph.step_s + tried.plan.extra_s

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
            self._time_plain()
            for tried in left:
                self._time(tried)
            left = _near_fastest([tried for tried in left if tried.holds], ratio)

    def _time_plain(self) -> None:
        """Time the plain step, if the trace has run one; otherwise it may not fit on the device."""
        self.remove_plan()
        if self._steps.graph.is_measured:
            try:
                with self._ranks.together("timing of the plain step"), CacheOff(self._steps.model):
                    seconds = self._steps.timed()
                self._plain_times.append(self._ranks.first(seconds, "plain time"))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                traceback.clear_frames(error.__traceback__)
                give_back_memory()

    def _time(self, tried: MeasuredCandidate) -> None:
        self.remove_plan()
        try:
            with self._ranks.together(f"timing of {tried.candidate.name}"):
                self._on = tried, self._apply(tried.plan)
                seconds = self._steps.timed()
            tried.times.append(self._ranks.first(seconds, "time"))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.remove_plan()
            tried.problem = "out of memory"
            traceback.clear_frames(error.__traceback__)
            give_back_memory()

    def keep(self) -> AppliedPlan:
        """Put the fastest candidate that holds on the model, with its measured numbers; returns its handle."""
        within = [each for each in self._tried.values() if (each.peak_bytes or self._budget + 1) <= self._budget]
        holding = self._holding() or within  # all ran out of memory after they were measured: something else took it
        timed = [tried for tried in holding if tried.times] or holding
        fastest_s = (1 + (_NOISE if self._tune_s else 0.0)) * min(map(self._rank, timed))
        best = _least_sensitive([tried for tried in timed if self._rank(tried) <= fastest_s])
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
        plain_s = self._plain_s()
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
        handle.candidates = tuple(self._trial(tried, best, plain_s) for tried in self._ranked())

    def _ranked(self) -> list[MeasuredCandidate]:
        return sorted(self._tried.values(), key=lambda tried: tried.plan.extra_s)

    def _plain_s(self) -> float | None:
        if self._plain_times:
            return min(self._plain_times)
        graph = self._steps.graph
        return graph.step_s if graph.is_measured else None

    def _trial(self, tried: MeasuredCandidate, best: MeasuredCandidate, plain_s: float | None) -> Trial:
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


def _least_sensitive(alike: list[MeasuredCandidate]) -> MeasuredCandidate:
    """Of candidates that are equally fast, the one predicted to be fastest if the host becomes slower."""

    def seconds(tried: MeasuredCandidate) -> tuple[float, float]:
        plan = tried.plan
        assert plan.graph is not None  # of all plans that have predictions
        lines = simulate(plan.graph, plan).lines
        return max(_SLOWER_HOST * lines.host_s, lines.device_s), plan.extra_s

    return min(alike, key=seconds) if len(alike) > 1 else alike[0]


def _is_of_candidate(error: Exception) -> bool:
    """Whether an error says that this plan cannot be used; others may be usable."""
    return isinstance(error, LowtideError) and not isinstance(error, RankError)


def _key(plan: Plan) -> object:
    return plan.regions, plan.moves, plan.splits


def _near_fastest(tried: list[MeasuredCandidate], ratio: float) -> list[MeasuredCandidate]:
    fastest_s = min((each.seconds for each in tried), default=0.0)
    return [each for each in tried if each.seconds <= ratio * fastest_s]
