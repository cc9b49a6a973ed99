"""Every plan of a tiny step without moves, simulated: what the best is, to hold a solver against."""

from __future__ import annotations

from itertools import chain, combinations

from lowtide.graph import StepGraph
from lowtide.plans import Plan, Recompute
from lowtide.simulator import simulate


def region_calls(graph: StepGraph) -> list[int]:
    """The calls that the eager engine can replay: modules of the model, not the model itself."""
    return [i for i, call in enumerate(graph.calls) if call.path and call.path[0] != "<" and call.end > call.first]


def keepable_ops(graph: StepGraph) -> set[int]:
    """Forward ops that make something, which nothing changes in place."""
    changed = {value for op in graph.ops[: graph.num_forward] for value in op.mutates}
    return {
        index
        for index, op in enumerate(graph.ops[: graph.num_forward])
        if not op.mutates
        and "mutates" not in op.flags
        and not changed & set(op.outputs)
        and any(graph.values[value].kind == "activation" for value in op.outputs)
    }


def index_ops(graph: StepGraph) -> set[int]:
    return {index for index, op in enumerate(graph.ops[: graph.num_forward]) if "index" in op.flags}


def _subsets(items: list[int]) -> chain[tuple[int, ...]]:
    return chain.from_iterable(combinations(items, size) for size in range(len(items) + 1))


def all_costs(graph: StepGraph, *, most: int) -> list[tuple[int, float]] | None:
    """Peak and extra seconds of every plan, None if there are more than `most`.

    Any regions, in one another or not; any ops held by those inside of none. Ops that make indices are held, always.
    """
    nth = {call: n for calls in graph.calls_by_path.values() for n, call in enumerate(calls)}
    calls, keepable, indices = region_calls(graph), keepable_ops(graph), index_ops(graph)
    if 2 ** len(calls) > most:
        return None
    found: dict[tuple[int, float], None] = {}
    count = 0
    for regions in _subsets(calls):
        outermost, ops, is_possible = {}, [], True
        for call in regions:
            first, end, outer = graph.calls[call].first, graph.calls[call].end, graph.calls[call].parent
            while outer >= 0 and outer not in outermost:
                outer = graph.calls[outer].parent
            inside = set(range(first, end))
            if outer >= 0:
                is_possible &= not inside & indices
            else:
                outermost[call] = first
                ops += sorted(inside & keepable - indices)
                is_possible &= (inside & indices) <= keepable
        if not is_possible:
            continue
        count += 2 ** len(ops)
        if count > most:
            return None
        for kept in map(set, _subsets(ops)):
            plan = Plan(
                tuple(
                    Recompute(
                        graph.calls[call].path,
                        nth[call],
                        tuple(
                            op - graph.calls[call].first
                            for op in range(graph.calls[call].first, graph.calls[call].end)
                            if call in outermost and op in (kept | indices)
                        ),
                    )
                    for call in regions
                )
            )
            timeline = simulate(graph, plan)
            found[timeline.peak_bytes, timeline.extra_s] = None
    return list(found)
