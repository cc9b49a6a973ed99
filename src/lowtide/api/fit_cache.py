"""`FitCache`: the file in which `fit` remembers the plans that it kept.

A JSON file with one entry per graph, hardware, budget, limits and version of lowtide and torch. It is replaced by
renaming, so no reader sees half of one; if two processes write at once, the entries of one may be lost. A file in
another format is left as it is, with a warning.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lowtide.api.split_search import SplitSearch
from lowtide.errors import LowtideError
from lowtide.plans.plan_text import Trial
from lowtide.plans.step_plan import Plan
from lowtide.simulator.timeline import simulate
from lowtide.solvers.candidate import with_predictions
from lowtide.solvers.solve import search_for
from lowtide.units import own_version

logger = logging.getLogger("lowtide")

FORMAT, VERSION = "lowtide fit cache", 2


class FitCache:
    """Reads and writes the entry of one step, budget and set of limits in a cache file. Without a path it is empty."""

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
        found = with_predictions(graph, timeline, simulate(graph), self._budget, search.lower_bound_s(self._budget))
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
