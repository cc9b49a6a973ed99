"""The calls of a graph that a plan names, and whether the plan can be carried out on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lowtide.errors import GraphError, PlanError
from lowtide.graph import StepGraph
from lowtide.graph.segments import SegmentedGraph, has_gaps, members_of, with_segments

if TYPE_CHECKING:
    from lowtide.plans import Recompute


def segmented(graph: StepGraph, regions: Sequence[Recompute]) -> StepGraph:
    """`graph` with the segments among `regions` as calls. Raises `PlanError` where it has no such segment."""
    segments = [region for region in regions if region.more]
    if not segments or isinstance(graph, SegmentedGraph):
        return graph
    spans = []
    for region in segments:
        calls = [call_named(graph, path, nth) for path, nth in ((region.path, region.nth), *region.more)]
        if members_of(graph, (calls[0], calls[-1])) != calls:
            raise PlanError(
                f"{region.name} is no segment of this step: it takes {len(calls)} calls, one after the other and "
                "under one parent. Was the plan made for another model?"
            )
        spans.append((calls[0], calls[-1]))
    try:
        return with_segments(graph, spans)
    except GraphError as error:
        raise PlanError(f"{error}. Was the plan made for another model?") from error


def check_retained(graph: StepGraph, regions: dict[int, tuple[int, ...]]) -> None:
    """Raise `PlanError` where a region is to retain what it cannot."""
    owner = graph.innermost(regions)
    for call, kept in regions.items():
        if kept and isinstance(graph, SegmentedGraph) and has_gaps(graph.plain, graph.plain_members[call]):
            raise PlanError(
                f"{graph.calls[call].path} keeps ops, and other ops run between its calls: that shifts the numbers of "
                "ops in its replay. Leave keep_ops empty for such a segment."
            )
        if kept and owner[graph.calls[call].parent] >= 0:
            raise PlanError(f"{graph.calls[call].path} keeps ops inside a region that is itself recomputed")
    for call, ops in graph.retainable.missing(regions).items():
        path, first = graph.calls[call].path, graph.calls[call].first
        names = ", ".join(f"{op} ({graph.ops[first + op].name})" for op in ops[:5])
        raise PlanError(
            f"{path or 'the model'} is to retain the outputs of ops {names}, and autograd does not save all of them "
            "directly in it, so that no saved-tensor hook sees them. Leave these ops out of keep_ops."
        )


def call_named(graph: StepGraph, path: str, nth: int) -> int:
    calls = graph.calls_by_path.get(path)
    if calls is None:
        near = [known for known in graph.calls_by_path if known.split(".")[-1] == path.split(".")[-1]][:3]
        hint = f" Calls with such a name: {', '.join(near)}." if near else ""
        raise PlanError(f"the step calls no module {path!r}.{hint} Was the plan made for another model?")
    if not 0 <= nth < len(calls):
        raise PlanError(f"{path!r} is called {len(calls)} times in the step; call {nth} is planned")
    return calls[nth]
