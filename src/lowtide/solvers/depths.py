"""Plans that recompute every module call at some depths of the module tree: regions nested in regions."""

from __future__ import annotations

from collections.abc import Iterable

from lowtide.graph import StepGraph
from lowtide.plans import Plan, Recompute


def regions_at(graph: StepGraph, depths: Iterable[int]) -> Plan:
    """The plan that recomputes every module call at these depths of the module tree (the model itself is 0)."""
    wanted, depth_of = set(depths), {-1: -1}
    regions, seen = [], dict.fromkeys(graph.calls_by_path, 0)
    for index, call in enumerate(graph.calls):
        depth_of[index] = depth_of[call.parent] + 1
        nth = seen[call.path]
        seen[call.path] += 1
        if depth_of[index] in wanted and call.end > call.first:
            regions.append(Recompute(call.path, nth))
    return Plan(regions=tuple(regions))


def deepest(graph: StepGraph) -> int:
    """The depth of the deepest module call."""
    depth_of = {-1: -1}
    for index, call in enumerate(graph.calls):
        depth_of[index] = depth_of[call.parent] + 1
    return max(depth_of.values())
