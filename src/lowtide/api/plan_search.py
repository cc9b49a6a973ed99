"""`PlanSearch`: the plans that `plan` and `fit` consider for one step and budget, the same on all ranks.

They come from the solver, with modules in parts from `SplitSearch`, and from `FitCache`, the file in which `fit`
remembers the plans that it kept.

Several ranks trace the step together; the lowest solves and reads the cache, and sends its plans to the others.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import uuid
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lowtide.api.measure import TracedStep
from lowtide.api.split_search import SplitSearch
from lowtide.distributed.agreement import SentPlan, attached, plan_of_first, sendable
from lowtide.distributed.ranks import current
from lowtide.eager.replanning import Limits
from lowtide.errors import InfeasibleBudgetError, LowtideError
from lowtide.graph.step_graph import Split
from lowtide.plans.plan_text import Trial
from lowtide.plans.step_plan import Plan
from lowtide.simulator.timeline import simulate
from lowtide.solvers.candidate import with_predictions
from lowtide.solvers.solve import REMEMBERED, SMALLEST, ShortlistedPlan, search_for
from lowtide.units import own_version

logger = logging.getLogger("lowtide")

_MAX_ROUNDS = 4  # of solving for less until the plan holds on the rank with the longest inputs too
FORMAT, VERSION = "lowtide fit cache", 2


class PlanSearch:
    """Plans for one step within `budget`. Every rank calls the same methods in the same order."""

    def __init__(self, step: TracedStep, limits: Limits, budget: int | str) -> None:
        self.step, self.limits, self.ranks = step, limits, current()
        self.budget_bytes = self.ranks.min(step.budget_bytes(budget), "budget")
        self.splits = SplitSearch(step, limits)
        self._tightest: dict[tuple[Split, ...], Plan] = {}

    def solved(self) -> Plan:
        """The solver's plan, which nothing was measured for. Its predicted peak is within the budget on every rank."""
        ranks, missing_bytes = self.ranks, 0
        if ranks.is_alone:
            return self.splits.solve(self.budget_bytes)
        for _ in range(_MAX_ROUNDS):
            allowed = self.budget_bytes - missing_bytes
            sent = self.splits.by_first(lambda allowed=allowed: sendable(self.splits.solve(allowed)), "plan")  # type: ignore[misc]
            made = attached(ranks, graph := self.splits.graph(sent.plan.splits), sent)
            peak_bytes = ranks.max(simulate(graph, made).peak_bytes, "predicted peaks")
            if peak_bytes <= self.budget_bytes:
                break
            # A rank with longer inputs than the one that solves: leave as much room on the one that solves.
            missing_bytes += peak_bytes - self.budget_bytes
        return replace(made, peak_bytes=peak_bytes, budget_bytes=self.budget_bytes)

    def candidates(self) -> tuple[list[ShortlistedPlan], InfeasibleBudgetError | None]:
        """Plans to measure, and the solver's error if its own plan is not among them."""
        if self.ranks.is_alone:
            return self._own_candidates()

        def made() -> tuple[list[tuple[ShortlistedPlan, SentPlan]], InfeasibleBudgetError | None]:
            candidates, error = self._own_candidates()
            return [(replace(each, plan=Plan()), sendable(each.plan)) for each in candidates], error

        sent, error = self.splits.by_first(made, "candidates")
        graphs = [self.splits.corrected(plan.plan.splits) for _, plan in sent]
        pairs = zip(sent, graphs, strict=True)
        return [replace(each, plan=attached(self.ranks, graph, plan)) for (each, plan), graph in pairs], error

    def _own_candidates(self) -> tuple[list[ShortlistedPlan], InfeasibleBudgetError | None]:
        found, error = self.limits.candidates(self.splits.corrected(), self.budget_bytes)
        fits_plainly = bool(found) and found[0].plan.is_plain and found[0].plan.peak_bytes <= self.budget_bytes
        if not self.limits.split or fits_plainly:
            return found, error
        plans = self.splits.plans(self.budget_bytes)
        found += [ShortlistedPlan(_split_name(each), each, is_essential=True) for each in plans]
        return sorted(found, key=lambda each: each.plan.extra_s), None if plans else error

    def cached(self, cache: FitCache) -> list[ShortlistedPlan]:
        """The plan that an earlier call has kept, if there is one. Corrects the graph by what was measured then."""

        def read() -> tuple[SentPlan, int] | None:
            found = cache.read()
            return None if found is None else (sendable(found[0]), found[1])

        found = self.splits.by_first(read, "cached plan")
        if found is None:
            return []
        sent, correction_bytes = found
        self.splits.correct(correction_bytes)
        return [ShortlistedPlan(REMEMBERED, attached(self.ranks, self.splits.corrected(sent.plan.splits), sent))]

    def tightest(self, splits: tuple[Split, ...] = ()) -> Plan:
        """The plan with the smallest peak by the uncorrected graph. The first call for these splits is a collective."""
        if splits not in self._tightest:
            graph = self.splits.graph(splits)
            self._tightest[splits] = plan_of_first(self.ranks, graph, lambda: self.limits.solve_or_tightest(graph, 1))
        return self._tightest[splits]

    def smallest(self) -> ShortlistedPlan:
        """`tightest` as a candidate."""
        return ShortlistedPlan(SMALLEST, replace(self.tightest(), budget_bytes=self.budget_bytes))

    def may_run_smallest(self) -> bool:
        """Whether the plan with the smallest peak is worth a run where none fits.

        It fits on the device where the plain step did. With `split=True` the floor is that of another graph.
        """
        return self.ranks.all(self.step.graph.is_measured and not self.limits.split, "whether the plain step ran")

    def with_split_floor(self, error: InfeasibleBudgetError) -> InfeasibleBudgetError:
        """The error of a budget that the plain step cannot meet, with what the split one could."""
        if not (self.ranks.is_alone or self.limits.split):
            return error
        return self.splits.by_first(lambda: self.splits.with_floor(error), "floor with split=True")


def _split_name(plan: Plan) -> str:
    """How the table of candidates calls a plan with splits."""
    parts = {split.kind: split.num_parts for split in plan.splits}
    names = {"loss": "the loss", "tokens": "token-wise modules"}
    return "split: " + ", ".join(f"{names[kind]} in {number}" for kind, number in parts.items())


class FitCache:
    """The entry of one step, budget and set of limits in a cache file. Without a path it is empty.

    The file is JSON, with one entry per graph, hardware, budget, limits and version of lowtide and torch. It is
    replaced by renaming, so no reader sees half of one; if two processes write at once, the entries of one may be lost.
    A file in another format is left as it is, with a warning.
    """

    def __init__(self, path: str | os.PathLike[str] | None, splits: SplitSearch, budget_bytes: int) -> None:
        self._path = None if path is None else Path(path)
        self._budget, self._splits = budget_bytes, splits
        graph, limits = splits.graph(()), splits.limits
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

    def read(self) -> tuple[Plan, int] | None:
        """The cached plan, with predictions for this graph, and by how many bytes measured peaks were above them then.

        None if there is no usable entry.
        """
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
            graph = self._splits.graph(decided.splits)
            plan = Plan(decided.regions, decided.moves, decided.in_flight_bytes, splits=decided.splits)
            timeline = simulate(graph, plan)
        except (LowtideError, ValueError, KeyError, TypeError) as error:
            logger.warning("the cache %s has a damaged entry for this step: %s", self._path, error)
            return None
        # The cached bound is for the times that were measured then.
        limits = self._splits.limits
        search = search_for(graph, "eager", limits.host, limits.time_limit_s, limits.lossy)
        found = with_predictions(timeline, self._budget, search.lower_bound_s(self._budget))
        return self._splits.predicted(found), correction

    def write(self, plan: Plan, correction_bytes: int, trials: Sequence[Trial]) -> None:
        """Write the entry to the file; log a warning if that fails."""
        entries, problem = self._entries()
        if problem or self._path is None:
            return  # `read` has logged it
        bare = replace(plan, rows=(), graph=None, modules=())
        entry = {
            "plan": bare.to_json(graph=False),
            "correction_bytes": correction_bytes,
            "candidates": [asdict(trial) for trial in trials],
        }
        content = {"format": FORMAT, "version": VERSION, "entries": {**entries, self._key: entry}}
        unfinished = self._path.with_name(f".{self._path.name}.{uuid.uuid4().hex}")
        try:
            unfinished.write_text(json.dumps(content, indent=1), encoding="utf-8")
            unfinished.replace(self._path)
        except OSError as error:
            logger.warning("the cache %s cannot be written: %s", self._path, error)
            with contextlib.suppress(OSError):
                unfinished.unlink()

    def _entries(self) -> tuple[dict[str, Any], str]:
        """The entries of the file, and why it cannot be used (empty if it can)."""
        if self._path is None:
            return {}, ""
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
