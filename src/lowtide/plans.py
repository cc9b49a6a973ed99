"""Plan: what happens to the activations of one step, as frozen data."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.errors import PlanError
from lowtide.graph import StepGraph


@dataclass(frozen=True, slots=True)
class Recompute:
    """One call of one module (its `nth`) whose activations are dropped and recomputed.

    `keep_ops` are ops, counted from the region's first, whose outputs are kept all the same and not computed again.
    """

    path: str
    nth: int = 0
    keep_ops: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Move:
    """A value that leaves the device: the one held by the `save`-th save made directly in the `nth` call of `path`."""

    path: str
    nth: int = 0
    save: int = 0
    to: str = "host"


@dataclass(frozen=True)
class Plan:
    """Which regions are recomputed and which values are moved; everything else is kept. An empty plan keeps all.

    >>> import lowtide
    >>> lowtide.Plan(regions=(lowtide.plans.Recompute("layers.0"),)).regions[0].path
    'layers.0'
    """

    regions: tuple[Recompute, ...] = ()
    moves: tuple[Move, ...] = ()
    in_flight_bytes: int = 0

    def calls(self, graph: StepGraph) -> dict[int, Recompute]:
        """The recomputed calls of `graph`, by their number. Raises `PlanError` where the graph has no such call."""
        found: dict[int, Recompute] = {}
        for region in self.regions:
            call = _call(graph, region.path, region.nth)
            if call in found:
                raise PlanError(f"{region.path} is recomputed twice")
            length = graph.calls[call].end - graph.calls[call].first
            if any(not 0 <= op < length for op in region.keep_ops):
                raise PlanError(f"{region.path} has {length} ops; {region.keep_ops} are to be kept")
            found[call] = region
        return found

    def moved_values(self, graph: StepGraph) -> dict[int, str]:
        """The moved values of `graph`, and where they go."""
        if not self.moves:
            return {}
        saves_of: dict[int, list[int]] = {}
        for save in graph.saves:
            saves_of.setdefault(save.call, []).append(save.value)
        found: dict[int, str] = {}
        for move in self.moves:
            values = saves_of.get(_call(graph, move.path, move.nth), [])
            if not 0 <= move.save < len(values):
                raise PlanError(f"{move.path} makes {len(values)} saves; number {move.save} is to be moved")
            found[values[move.save]] = move.to
        return found


def _call(graph: StepGraph, path: str, nth: int) -> int:
    calls = graph.calls_by_path.get(path)
    if calls is None:
        near = [known for known in graph.calls_by_path if known.split(".")[-1] == path.split(".")[-1]][:3]
        hint = f" Calls with such a name: {', '.join(near)}." if near else ""
        raise PlanError(f"the step calls no module {path!r}.{hint} Was the plan made for another model?")
    if not 0 <= nth < len(calls):
        raise PlanError(f"{path!r} is called {len(calls)} times in the step; call {nth} is planned")
    return calls[nth]
