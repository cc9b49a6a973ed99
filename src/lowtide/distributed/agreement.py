"""How all ranks get one plan: common costs, one rank that solves, a broadcast, and a comparison of hashes.

All ranks trace, since a step with collectives needs everyone. Their graphs differ in bytes and seconds, so memory
that is allocated during the whole step is raised to the largest of any rank, and the step time is the lowest rank's
(`with_common_costs`). The lowest rank solves; its plan is sent to the others without its graph, and each rank
attaches its own (`plan_of_first`). Plans name modules, so a plan made on one rank fits a graph on another if both run
the same modules.

Retained outputs are an exception: a plan names them by the position of their op, and ranks may run different ops in a
module (ring attention skips blocks by rank under a causal mask). So they are sent as `OpName`s and located in each
rank's own graph. An output that one rank cannot retain is retained on none.

Once the plan is on the model, `check_same_plan` compares a hash of its decisions. Predictions are not part of it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from lowtide.distributed.ranks import Ranks
from lowtide.errors import PlanError, RankError
from lowtide.graph.step_graph import StepGraph
from lowtide.plans.step_plan import Move, Plan


def plan_hash(plan: Plan) -> str:
    """A hash of a plan's decisions, the same for every order in which they are listed."""
    decisions = {
        "regions": sorted(json.dumps(asdict(region), sort_keys=True) for region in plan.regions),
        "moves": sorted(json.dumps(asdict(move), sort_keys=True) for move in plan.moves),
        "keeps": sorted(plan.keeps),
        "choosers": sorted(plan.choosers),
        "splits": sorted(json.dumps(asdict(split), sort_keys=True) for split in plan.splits),
        "in_flight_bytes": plan.in_flight_bytes,
        "engine": plan.engine,
    }
    return hash_of(decisions)


def hash_of(data: Any) -> str:
    """A hash of data that JSON can represent."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def check_same_plan(ranks: Ranks, plan: Plan) -> None:
    """Raise `RankError` on all ranks unless all have the same plan."""
    if ranks.is_alone:
        return
    sent = sendable(plan)
    hashes = ranks.gathered((plan_hash(sent.plan), hash_of(sorted(sent.retained))), "hash of the plan")
    if len(set(hashes)) > 1:
        ranks_by_hash = {each: [n for n, other in enumerate(hashes) if other == each] for each in hashes}
        texts = ", ".join(f"ranks {members} have {each[0][:8]}" for each, members in ranks_by_hash.items())
        raise RankError(
            f"the ranks have different plans ({texts}), so that a step could wait forever in a collective. Call "
            "lowtide.fit with the same model and the same options on every rank."
        )


def with_common_costs(ranks: Ranks, graph: StepGraph) -> StepGraph:
    """The graph with the most fixed bytes of any rank, and the step time of the lowest rank."""
    if ranks.is_alone:
        return graph
    own = sum(graph.static_bytes.values())
    sizes = ranks.gathered((own, graph.step_s, graph.optimizer_workspace_bytes), "costs of the step")
    most, workspace = max(fixed for fixed, *_ in sizes), max(size for *_, size in sizes)
    return replace(
        graph, other_bytes=graph.other_bytes + most - own, step_s=sizes[0][1], optimizer_workspace_bytes=workspace
    )


def plan_of_first(ranks: Ranks, graph: StepGraph, make: Callable[[], Plan]) -> Plan:
    """The plan that `make` returns on the lowest rank, with this rank's graph."""
    if ranks.is_alone:
        return make()
    return attached(ranks, graph, ranks.made_by_first(lambda: sendable(make()), "plan"))


# An op by the call that runs it (path of the module, number of its call), its name, and how many ops of that name that
# call runs before it.
OpName = tuple[str, int, str, int]


@dataclass(frozen=True)
class SentPlan:
    """A plan without positions of ops. `retained[n]` names the ops that the n-th region of `plan` retains outputs of.

    `moved` are those among them whose outputs are moved off the device, with the moves, which have no position either.
    """

    plan: Plan
    retained: tuple[tuple[OpName, ...], ...] = ()
    moved: tuple[tuple[OpName, Move], ...] = ()


def sendable(plan: Plan) -> SentPlan:
    """The plan without its graph, which is large and of one rank, and without positions in that graph."""
    graph = plan.graph
    if graph is None or not any(region.keep_ops for region in plan.regions):
        return SentPlan(replace(plan, graph=None))
    names = op_names(graph)
    graph = plan.segmented(graph)
    firsts = [graph.calls[call].first for call in plan.calls(graph)]
    retained = [
        tuple(names[first + op] for op in region.keep_ops) for first, region in zip(firsts, plan.regions, strict=True)
    ]
    by_call = {(region.path, region.nth): first for first, region in zip(firsts, plan.regions, strict=True)}
    moved = [
        (names[by_call[move.path, move.nth] + move.op], replace(move, op=0))
        for move in plan.moves
        if move.op is not None
    ]
    bare = tuple(replace(region, keep_ops=()) for region in plan.regions)
    others = tuple(move for move in plan.moves if move.op is None)
    return SentPlan(replace(plan, graph=None, regions=bare, moves=others), tuple(retained), tuple(moved))


def attached(ranks: Ranks, graph: StepGraph, sent: SentPlan) -> Plan:
    """A received plan with this rank's graph. Raises on all ranks if the graph of one has no such calls."""
    with ranks.together("check of the plan"):
        try:
            found, not_here = _located(graph, sent)
        except PlanError as error:
            raise PlanError(
                f"the plan of the lowest rank does not fit the step of rank {ranks.rank}: {error}. All ranks must run "
                "the same modules in the same order."
            ) from error
    plan = sent.plan
    if any(sent.retained):
        nowhere = set().union(*ranks.gathered(not_here, "outputs that cannot be retained"))
        found = [{name: at for name, at in each.items() if name not in nowhere} for each in found]
        keeps = [tuple(sorted(each.values())) for each in found]
        regions = tuple(replace(region, keep_ops=ops) for region, ops in zip(plan.regions, keeps, strict=True))
        positions = {name: at for each in found for name, at in each.items()}
        moves = (replace(move, op=positions[name]) for name, move in sent.moved if name in positions)
        plan = replace(plan, regions=regions, moves=(*plan.moves, *moves))
    return replace(plan, graph=graph, fingerprint=graph.fingerprint)


def _located(graph: StepGraph, sent: SentPlan) -> tuple[list[dict[OpName, int]], set[OpName]]:
    """For each region, where the ops that it retains are in this graph, counted from its first op.

    The second result are those that do not run in their region here, or whose outputs it cannot retain.
    """
    calls, segmented = sent.plan.calls(graph), sent.plan.segmented(graph)
    found: list[dict[OpName, int]] = []
    not_here: set[OpName] = set()
    if not any(sent.retained):
        return found, not_here
    numbers = {name: number for number, name in enumerate(op_names(graph))}
    for call, retained in zip(calls, sent.retained, strict=True):
        first, end = segmented.calls[call].first, segmented.calls[call].end
        found.append({name: numbers[name] - first for name in retained if first <= numbers.get(name, -1) < end})
        not_here.update(name for name in retained if name not in found[-1])
    missing = segmented.retainable.missing(
        {call: tuple(each.values()) for call, each in zip(calls, found, strict=True)}
    )
    for call, each in zip(calls, found, strict=True):
        not_here.update(name for name, at in each.items() if at in missing.get(call, ()))
    return found, not_here


def op_names(graph: StepGraph) -> list[OpName]:
    """The name of each op of the forward."""
    counts: Counter[tuple[str, int, str]] = Counter()
    names: list[OpName] = []
    for op in graph.ops[: graph.num_forward]:
        place = (graph.calls[op.call].path, graph.nths[op.call], op.name) if op.call >= 0 else ("", 0, op.name)
        names.append((*place, counts[place]))
        counts[place] += 1
    return names
