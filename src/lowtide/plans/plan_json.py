"""Read and write a `Plan` as JSON, for `Plan.to_json` and `Plan.from_json`.

Reading checks the type and range of every field, and that the plan is consistent: its bound is below its cost, and its
graph, if it has one, is the graph it was made for. Damage raises `PlanError`, and so does a file of another version. No
code is executed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from typing import Any

from lowtide.errors import GraphError, PlanError
from lowtide.graph.graph_json import (
    LARGEST,
    checked_object,
    decode,
    decode_hardware,
    decode_versions,
    encode,
    parse_json,
)
from lowtide.graph.step_graph import Forward, Split
from lowtide.plans.step_plan import Move, Plan, PlannedModule, Recompute, ValueRow

FORMAT = "lowtide plan"
VERSION = 5
_RECORDS: dict[str, type[Any]] = {
    "regions": Recompute,
    "moves": Move,
    "modules": PlannedModule,
    "forwards": Forward,
    "rows": ValueRow,
    "splits": Split,
}


def write_plan(plan: Plan, with_graph: bool) -> str:
    """See `Plan.to_json`."""
    content = {"format": FORMAT, "version": VERSION, **asdict(replace(plan, graph=None))}
    content["graph"] = encode(plan.graph) if with_graph and plan.graph is not None else None
    return json.dumps(content, separators=(",", ":"))


def read_plan(text: str) -> Plan:
    """See `Plan.from_json`."""
    content = checked_object(parse_json(text, FORMAT, PlanError), FORMAT, VERSION, PlanError)
    del content["format"], content["version"]
    known = {field.name: str(field.type) for field in fields(Plan)}
    if set(content) != set(known):
        odd = sorted(set(content) ^ set(known))
        raise PlanError(f"damaged plan: {', '.join(map(repr, odd[:5]))} missing or unknown")
    try:
        for name, record in _RECORDS.items():
            content[name] = tuple(_record(row, record) for row in _list(content[name], name))
        content["input_shapes"] = tuple(
            _scalar(shape, "tuple[int, ...]", "input_shapes")
            for shape in _list(content["input_shapes"], "input_shapes")
        )
        content["hardware"] = decode_hardware(content["hardware"])
        content["versions"] = decode_versions(content["versions"])
        for name, kind in known.items():
            if kind.removesuffix(" | None") in ("int", "float", "str", "tuple[int, ...]", "tuple[str, ...]"):
                content[name] = _scalar(content[name], kind, name)
        content["graph"] = None if content["graph"] is None else decode(content["graph"])
        plan = Plan(**content)
    except (PlanError, GraphError) as error:
        raise PlanError(f"damaged plan: {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise PlanError(f"damaged plan: {error}") from error
    _check(plan)
    return plan


def _record(row: Any, record: type[Any]) -> Any:
    kinds = {field.name: str(field.type) for field in fields(record)}
    if not isinstance(row, dict) or row.keys() != kinds.keys():
        raise ValueError(f"a {record.__name__} does not have the fields of version {VERSION}")
    return record(**{name: _scalar(row[name], kind, name) for name, kind in kinds.items()})


def _list(items: Any, name: str) -> list[Any]:
    if not isinstance(items, list):
        raise ValueError(f"{name} is not a list")
    return items


def _scalar(item: Any, kind: str, name: str) -> Any:
    if kind == "tuple[tuple[str, int], ...]":
        pairs = [_list(each, name) for each in _list(item, name)]
        if any(len(pair) != 2 for pair in pairs):
            raise ValueError(f"{name} holds an item that is not the path and number of a call")
        return tuple((_scalar(path, "str", name), _scalar(nth, "int", name)) for path, nth in pairs)
    if kind in ("tuple[int, ...]", "tuple[str, ...]"):
        return tuple(_scalar(each, kind[6:9], name) for each in _list(item, name))
    if kind == "float" and type(item) in (int, float) and 0 <= item < float("inf"):
        return float(item)
    if kind == "int" and type(item) is int and 0 <= item < LARGEST:
        return item
    if kind.endswith("| None"):
        return None if item is None else _scalar(item, kind.removesuffix(" | None"), name)
    if kind == "str" and isinstance(item, str):
        return item
    raise ValueError(f"{name} is {str(item)[:50]!r}, not a {kind} of 0 or more, within bounds")


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
