"""What `fit` learned, in a small JSON file: the plan that was kept, and all candidates as measured.

An entry is for one graph, hardware, budget and set of limits, under one version of lowtide and torch. Files are written
beside the old one and renamed over it, so that a reader or another writer never sees half a file; of two that write at
once, the entries of one may be lost. A file that cannot be read as one of these is left as it is, with a warning.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lowtide.engines.replanning import Limits
from lowtide.errors import LowtideError
from lowtide.graph import StepGraph
from lowtide.plans import Plan
from lowtide.plans.trials import Trial
from lowtide.simulator import simulate
from lowtide.solvers.describing import described
from lowtide.units import own_version

logger = logging.getLogger("lowtide")

FORMAT, VERSION = "lowtide fit cache", 1


@dataclass(frozen=True)
class Remembered:
    """The plan that was kept, and by how much measured peaks were above predictions."""

    plan: Plan
    correction_bytes: int


class FitCache:
    """The entries of one file for one graph and budget."""

    def __init__(self, path: str | os.PathLike[str], graph: StepGraph, budget_bytes: int, limits: Limits) -> None:
        self._path, self._graph, self._budget = Path(path), graph, budget_bytes
        parts = {
            "graph": graph.fingerprint,
            "optimizer_state_bytes": graph.optimizer_state_bytes,
            "hardware": graph.hardware.name,
            "budget_bytes": budget_bytes,
            "host": limits.host,
            "disk": limits.disk,
            "lossy": limits.lossy,
            "lowtide": own_version(),
            "torch": graph.versions.get("torch", ""),
        }
        self._key = json.dumps(parts, sort_keys=True, default=str)

    def read(self) -> Remembered | None:
        """The plan kept last time, with its predictions for this graph; None if there is none that can be used."""
        entries, problem = self._entries()
        if problem:
            logger.warning("the cache %s is not used, and left as it is: %s", self._path, problem)
        if self._key not in entries:
            return None
        try:
            entry = entries[self._key]
            decided = Plan.from_json(entry["plan"])
            correction, bound_s = entry["correction_bytes"], decided.lower_bound_s
            if type(correction) is not int or correction < 0:
                raise ValueError(f"correction_bytes is {correction!r:.50}")
            plan = Plan(regions=decided.regions, moves=decided.moves, in_flight_bytes=decided.in_flight_bytes)
            played = simulate(self._graph, plan)
        except (LowtideError, ValueError, KeyError, TypeError) as error:
            logger.warning("the cache %s has a damaged entry for this step: %s", self._path, error)
            return None
        return Remembered(described(self._graph, played, simulate(self._graph), self._budget, bound_s), correction)

    def write(self, plan: Plan, correction_bytes: int, trials: Sequence[Trial]) -> None:
        """Add what was learned to the file, or say why that cannot be done."""
        entries, problem = self._entries()
        if problem:
            return  # as `read` said
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
        """What the file holds, and what is wrong with it."""
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
