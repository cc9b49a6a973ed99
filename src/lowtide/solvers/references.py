"""What people use today, as plans: to see where a plan stands."""

from __future__ import annotations

from collections import defaultdict

from lowtide.graph import StepGraph
from lowtide.plans import Plan, Recompute


def block_calls(graph: StepGraph) -> list[int]:
    """The calls that one would put a checkpoint on: those of the repeated structure with most ops in all, and its kin.

    Blocks of the same class at the same place in the tree count even where their structure differs, as that of a first
    or last layer does.
    """
    return max(_repeated(graph), key=lambda calls: _num_ops(graph, calls), default=[])


def all_blocks(graph: StepGraph) -> list[int]:
    """The blocks of every stack in a model, an encoder's and a decoder's, say: those of `block_calls` and their like.

    Their like are repeated calls with at least a quarter as many ops in all, in no block and with no block inside.
    """
    groups = sorted(_repeated(graph), key=lambda calls: (-_num_ops(graph, calls), calls))
    found: list[int] = []
    for calls in groups:
        spans = [(graph.calls[call].first, graph.calls[call].end) for call in found]
        apart = all(
            graph.calls[call].end <= first or end <= graph.calls[call].first for call in calls for first, end in spans
        )
        if apart and 4 * _num_ops(graph, calls) >= _num_ops(graph, groups[0]):
            found += calls
    return sorted(found)


def _repeated(graph: StepGraph) -> list[list[int]]:
    groups: dict[tuple[str, int], list[int]] = defaultdict(list)
    for index, call in enumerate(graph.calls):
        if call.parent >= 0 and call.end > call.first and index not in graph.unreplayable:
            groups[call.kind, call.parent].append(index)
    return [calls for calls in groups.values() if len(calls) > 1]


def _num_ops(graph: StepGraph, calls: list[int]) -> int:
    return sum(graph.calls[call].end - graph.calls[call].first for call in calls)


def reference_plans(graph: StepGraph) -> dict[str, Plan]:
    """Nothing, a checkpoint per block, every second block, and selective checkpointing that keeps matrix products.

    Of the latter those that autograd saves: no plan can retain the others.
    """
    blocks = block_calls(graph)
    found = {"nothing": Plan()}
    if blocks:
        found["a checkpoint per block"] = _plan(graph, dict.fromkeys(blocks, ()))
        found["every second block"] = _plan(graph, dict.fromkeys(blocks[::2], ()))
        found["selective, all matmuls kept"] = _plan(graph, {call: _products(graph, call) for call in blocks})
    return found


def _plan(graph: StepGraph, regions: dict[int, tuple[int, ...]]) -> Plan:
    return Plan(regions=recomputes(graph, regions))


def recomputes(graph: StepGraph, regions: dict[int, tuple[int, ...]]) -> tuple[Recompute, ...]:
    """Regions given by call numbers, as a plan names them."""
    names = {call: graph.names_of(call) for call in sorted(regions)}
    return tuple(Recompute(*each[0], regions[call], each[1:]) for call, each in names.items())


def _products(graph: StepGraph, call: int) -> tuple[int, ...]:
    first, end, depth = graph.calls[call].first, graph.calls[call].end, graph.depths[call]
    return tuple(op - first for op in range(first, end) if graph.ops[op].flops and graph.retainable.depths[op] >= depth)
