"""Candidates that users would write themselves with `torch.utils.checkpoint`.

`reference_plans` has the four rules that reports compare a plan with: no plan, a checkpoint per block or every second
one (Chen et al. 2016, "Training deep nets with sublinear memory cost"), and selective checkpointing. `baseline_plans`
adds checkpoints on the first or the last `n` blocks, or on every subset of up to six. The eager search always includes
them, also when its time limit is spent, so that its plan is never slower in simulation than these rules.

Cost: one simulation of a single time line each. The seconds replayed are a lower bound on a baseline's time, and
baselines whose bound exceeds the best candidate so far are not simulated in full.
"""

from __future__ import annotations

from lowtide.graph.segments import all_blocks, every_kth
from lowtide.graph.step_graph import StepGraph
from lowtide.plans.step_plan import Plan, Recompute
from lowtide.simulator.eager_intervals import EagerIntervals
from lowtide.solvers.candidate import Regions, some_subsets
from lowtide.solvers.nesting import Nesting


def reference_plans(graph: StepGraph) -> dict[str, Plan]:
    """No plan, a checkpoint per block, every second block, and selective checkpointing that keeps matrix products."""
    return {name: Plan(recomputes(graph, regions)) for name, regions in reference_regions(graph).items()}


def reference_regions(graph: StepGraph) -> dict[str, Regions]:
    """The regions of `reference_plans`. Of matrix products, blocks keep those that autograd saves directly in them."""
    blocks = all_blocks(graph)
    plans: dict[str, Regions] = {"nothing": {}}
    if blocks:
        plans["a checkpoint per block"] = dict.fromkeys(blocks, ())
        plans["every second block"] = dict.fromkeys(every_kth(graph, blocks, 2), ())
        owner = graph.outermost(blocks)  # a module may call itself, and regions inside of others retain nothing
        plans["selective, all matmuls kept"] = {call: _products(graph, call) for call in blocks if owner[call] == call}
    return plans


def recomputes(graph: StepGraph, regions: Regions) -> tuple[Recompute, ...]:
    """Convert regions from call numbers to the module paths and call counts that plans use."""
    names = {call: graph.names_of(call) for call in sorted(regions)}
    return tuple(Recompute(*each[0], regions[call], each[1:]) for call, each in names.items())


def _products(graph: StepGraph, call: int) -> tuple[int, ...]:
    first, end, can_be = graph.calls[call].first, graph.calls[call].end, graph.retainable.at_depth(graph.depths[call])
    return tuple(op - first for op in range(first, end) if graph.ops[op].flops and can_be[op])


# Lengths of prefixes and suffixes of the blocks. On a GPT of 48 blocks, whose replays with retained outputs are
# limited by the host, 8 lengths gave steps up to 2 % slower than `checkpoint_sequential` in its best number of parts.
_MOST_CUTS = 64


def baseline_plans(graph: StepGraph, nesting: Nesting) -> list[tuple[float, Regions]]:
    """Regions of all baselines and a lower bound on the seconds each adds, the fastest first."""
    unique: dict[tuple[object, ...], tuple[float, Regions]] = {}
    for chosen in (*reference_regions(graph).values(), *_some_blocks(graph)):
        if regions := nesting.without_redundant(chosen):
            unique.setdefault(tuple(regions.items()), (EagerIntervals(graph, regions).replayed_s, regions))
    return sorted(unique.values(), key=lambda pair: pair[0])


def _some_blocks(graph: StepGraph) -> list[Regions]:
    """Checkpoints on every subset of few blocks, or on prefixes and suffixes of many."""
    return [dict.fromkeys(calls, ()) for calls in some_subsets(all_blocks(graph), _MOST_CUTS)]
