"""Where the forward narrows: values to save so that what the backward recomputes at a time stays small.

With nothing saved along the way, the first value that the backward needs has the whole forward recomputed and held at
once. Saved anchors end that: what lies before an anchor is not touched before the backward gets there.
"""

from __future__ import annotations

from lowtide.graph import StepGraph
from lowtide.plans import Plan
from lowtide.solvers.references import block_calls

_LONG = 1 / 3  # of the forward: what is read over more than that (masks, position tables) is in nobody's way


def anchor_groups(graph: StepGraph) -> list[frozenset[int]]:
    """Ops that make what crosses each narrow place, in the order of the forward.

    Narrow places are the entries of blocks; with fewer than three of them, positions that a single activation crosses.
    """
    entries = [_makers(graph, graph.calls[call].inputs) for call in block_calls(graph)]
    groups = [group for group in entries if group]
    return groups if len(groups) > 2 else _narrow_places(graph)


def every(groups: list[frozenset[int]], step: int) -> frozenset[int]:
    """The ops of every `step`-th group."""
    return frozenset(op for group in groups[::step] for op in group)


def compiled_references(graph: StepGraph) -> dict[str, Plan]:
    """What people do today, as plans for the compiled engine: those of `references.reference_plans`."""
    blocks = block_calls(graph)
    found = {"nothing": Plan(engine="compiled")}
    if blocks:
        outside = set(range(graph.num_forward))
        for call in blocks:
            outside -= set(range(graph.calls[call].first, graph.calls[call].end))
        skipped = {op for call in blocks[1::2] for op in range(graph.calls[call].first, graph.calls[call].end)}
        inputs = {op for call in blocks for op in _makers(graph, graph.calls[call].inputs)}
        products = {op for op in range(graph.num_forward) if graph.ops[op].flops}
        found["a checkpoint per block"] = _plan(graph, outside | inputs)
        found["every second block"] = _plan(graph, outside | inputs | skipped)
        found["selective, all matmuls kept"] = _plan(graph, outside | inputs | products)
    return found


def _plan(graph: StepGraph, keeps: set[int]) -> Plan:
    needs = graph.needs
    return Plan(engine="compiled", keeps=needs.keeps_of(needs.derive(keeps)), budget_bytes=0)


def _makers(graph: StepGraph, values: tuple[int, ...]) -> frozenset[int]:
    facts = [graph.values[value] for value in values]
    return frozenset(value.born for value in facts if value.born >= 0 and value.kind == "activation")


def _narrow_places(graph: StepGraph) -> list[frozenset[int]]:
    num = graph.num_forward
    last_read: dict[int, int] = {}
    for index, op in enumerate(graph.ops[:num]):
        last_read.update(dict.fromkeys(op.inputs, index))
    crossing: list[list[int]] = [[] for _ in range(num + 1)]
    for value, last in last_read.items():
        facts = graph.values[value]
        if facts.kind == "activation" and facts.born >= 0 and last - facts.born <= max(_LONG * num, 1):
            for position in range(facts.born + 1, last + 1):
                crossing[position].append(value)
    found = dict.fromkeys(values[0] for values in crossing if len(values) == 1)
    return [frozenset({graph.values[value].born}) for value in sorted(found, key=lambda v: graph.values[v].born)]
