"""The protocol by which all ranks get one plan: common costs, one solver, a broadcast, and a comparison of hashes.

All ranks trace, since a step with collectives needs everyone. Their graphs differ in bytes and seconds, so fixed bytes
are raised to the largest of any rank (`with_common_costs`), and times are the lowest rank's. That rank solves; its plan
is sent to the others without its graph, and each rank attaches its own (`plan_of_first`). Plans name modules and
positions of ops, so a plan made on one rank fits a graph on another if the ranks run the same modules.

`check_same_plan` compares a hash of the decisions once the plan is on the model. It covers what changes the step, in a
canonical order, and not predictions or names of graphs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace

from lowtide.distributed.ranks import Ranks
from lowtide.errors import PlanError, RankError
from lowtide.graph.step_graph import StepGraph
from lowtide.plans.step_plan import Plan


def plan_hash(plan: Plan) -> str:
    """A hash of a plan's decisions, the same for every order in which they are listed."""
    decisions = {
        "regions": sorted(json.dumps(asdict(region), sort_keys=True) for region in plan.regions),
        "moves": sorted(json.dumps(asdict(move), sort_keys=True) for move in plan.moves),
        "keeps": sorted(plan.keeps),
        "choosers": sorted(plan.choosers),
        "in_flight_bytes": plan.in_flight_bytes,
        "engine": plan.engine,
    }
    return hashlib.sha256(json.dumps(decisions, sort_keys=True).encode()).hexdigest()


def check_same_plan(ranks: Ranks, plan: Plan) -> None:
    """Raise `RankError` on all ranks unless all have the same plan."""
    if ranks.is_alone:
        return
    hashes = ranks.gathered(plan_hash(plan), "hash of the plan")
    if len(set(hashes)) > 1:
        ranks_by_hash = {each: [n for n, other in enumerate(hashes) if other == each] for each in hashes}
        texts = ", ".join(f"ranks {members} have {each[:8]}" for each, members in ranks_by_hash.items())
        raise RankError(f"the ranks have different plans ({texts}); a step under them could wait forever")


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


def sendable(plan: Plan) -> Plan:
    """The plan without its graph, which is large and of one rank."""
    return replace(plan, graph=None)


def attached(ranks: Ranks, graph: StepGraph, plan: Plan) -> Plan:
    """A received plan with this rank's graph. Raises on all ranks if the graph of one has no such calls."""
    with ranks.together("check of the plan"):
        try:
            plan.calls(graph)
        except PlanError as error:
            raise PlanError(
                f"the plan of the lowest rank does not fit the step of rank {ranks.rank}: {error}. All ranks must run "
                "the same modules in the same order."
            ) from error
    return replace(plan, graph=graph, fingerprint=graph.fingerprint)
