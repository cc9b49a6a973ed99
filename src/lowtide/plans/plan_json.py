"""Read and write a `Plan` as JSON, for `Plan.to_json` and `Plan.from_json`.

Reading checks the type and range of every field, and that the plan is consistent: its bound is below its cost, and its
graph, if it has one, is the graph it was made for. Damage raises `PlanError`, and so does a file of another version. No
code is executed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace

from lowtide.errors import PlanError
from lowtide.graph.graph_json import checked_object, decode, encode, parse_json, read_field
from lowtide.graph.step_graph import Forward, Hardware, Split
from lowtide.plans.step_plan import Move, Plan, PlannedModule, Recompute, ValueRow

FORMAT = "lowtide plan"
VERSION = 5
_RECORDS = {kind.__name__: kind for kind in (Forward, Hardware, Move, PlannedModule, Recompute, Split, ValueRow)}


def write_plan(plan: Plan, with_graph: bool) -> str:
    """See `Plan.to_json`."""
    content = {"format": FORMAT, "version": VERSION, **asdict(replace(plan, graph=None))}
    content["graph"] = encode(plan.graph) if with_graph and plan.graph is not None else None
    return json.dumps(content, separators=(",", ":"))


def read_plan(text: str) -> Plan:
    """See `Plan.from_json`."""
    content = checked_object(parse_json(text, FORMAT, PlanError), FORMAT, VERSION, PlanError)
    kinds = {field.name: str(field.type) for field in fields(Plan)}
    if odd := sorted(content.keys() ^ {*kinds, "format", "version"}):
        raise PlanError(f"damaged plan: {', '.join(map(repr, odd[:5]))} missing or unknown")
    del kinds["graph"]
    try:
        graph = None if content["graph"] is None else decode(content["graph"])
        others = {name: read_field(content[name], kind, name, _RECORDS) for name, kind in kinds.items()}
        plan = Plan(**others, graph=graph)
    except (ValueError, TypeError, OverflowError) as error:
        raise PlanError(f"damaged plan: {error}") from error
    _check(plan)
    return plan


def _check(plan: Plan) -> None:
    """Raise `PlanError` if parts of the plan contradict each other."""
    paths = [(region.path, region.nth, region.more) for region in plan.regions]
    if len(set(paths)) < len(paths):
        raise PlanError("damaged plan: a module is recomputed twice")
    if list(plan.keeps) != sorted(set(plan.keeps)):
        raise PlanError("damaged plan: the ops to keep are not in order, or one is repeated")
    if (
        plan.peak_bytes > plan.budget_bytes > 0
        and not (plan.measured_peak_bytes or plan.peak_bytes) <= plan.budget_bytes
    ):
        raise PlanError(f"damaged plan: its peak of {plan.peak_bytes} bytes is above its budget of {plan.budget_bytes}")
    if plan.lower_bound_s > plan.extra_s * (1 + 1e-9):
        raise PlanError("damaged plan: its lower bound is above its cost")
    if plan.graph is not None and plan.graph.fingerprint != plan.fingerprint:
        raise PlanError(
            f"damaged plan: it was made for the graph {plan.fingerprint!r} and comes with {plan.graph.fingerprint!r}"
        )
