"""What else is on the device while a model's blocks run: from its eager step, every block recomputed."""

from __future__ import annotations

import numpy as np

from lowtide.graph import StepGraph
from lowtide.plans import Plan, Recompute
from lowtide.simulator import Timeline, simulate
from lowtide.solvers.sharing import Surroundings

_FORWARD, _REPLAY = 0, 1


def surroundings_of(graph: StepGraph, paths: list[str]) -> Surroundings | None:
    """Bytes beside what blocks save, block inputs included; None where a block is not called just once, in order.

    Played with a checkpoint on each block, so that what is left is what blocks share with nobody.
    """
    calls = [call for path in paths for call in graph.calls_by_path.get(path, ())]
    firsts = [graph.calls[call].first for call in calls]
    if len(calls) != len(paths) or firsts != sorted(firsts):
        return None
    timeline = simulate(graph, Plan(regions=tuple(Recompute(path) for path in paths)))
    spans = [(graph.calls[call].first, graph.calls[call].end) for call in calls]
    forward = [_start_bytes(timeline, _FORWARD, span) for span in spans]
    backward = [_start_bytes(timeline, _REPLAY, span) for span in spans]
    if None in forward or None in backward:
        return None
    inside = np.zeros(len(graph.ops) + 1, dtype=bool)
    for first, end in spans:
        inside[first:end] = True
    derived = np.array([op.forward_op for op in graph.ops] + [-1])
    is_inside = inside[timeline.ops] | (derived[timeline.ops] >= 0) & inside[derived[timeline.ops]]
    outside = np.where(is_inside, 0, timeline.total_bytes)
    starts = np.flatnonzero((timeline.phases == _FORWARD) & inside[timeline.ops])
    replays = np.flatnonzero(timeline.phases == _REPLAY)
    between = outside[starts[-1] : replays[0]] if len(replays) else outside[starts[-1] :]
    around = np.concatenate([outside[: starts[0]], outside[replays[-1] :]]) if len(replays) else outside[:0]
    return Surroundings(
        tuple(size for size in forward if size is not None),
        int(between.max(initial=0)),
        tuple(size for size in backward if size is not None),
        int(around.max(initial=0)),
    )


def _start_bytes(timeline: Timeline, phase: int, span: tuple[int, int]) -> int | None:
    """Bytes right before a block's first op of a phase: those at the event before it, or there without a workspace."""
    ops = timeline.ops
    events = np.flatnonzero((timeline.phases == phase) & (ops >= span[0]) & (ops < span[1]))
    if not len(events):
        return None
    first = int(events[0])
    made = sum(timeline.graph.values[value].bytes for value in timeline.graph.ops[int(ops[first])].outputs)
    workspace = timeline.graph.ops[int(ops[first])].workspace_bytes
    return int(timeline.total_bytes[first]) - made - workspace
