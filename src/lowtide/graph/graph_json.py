"""Read and write a `StepGraph` as JSON, for `StepGraph.to_json` and `from_json` and inside plan files.

Ops, values, saves and calls are stored as columns, and each name once, which keeps files of thousands of ops small.
Reading checks the type and range of every field, and `StepGraph` checks their consistency; damage raises `GraphError`.
No code is executed. A file of another version is refused.

`parse_json`, `checked_object` (format and version) and the readers of parts are shared with `plans.plan_json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from typing import Any

from lowtide.errors import GraphError
from lowtide.graph.step_graph import FLAGS, Call, Hardware, Op, Save, Split, StepGraph, Value

FORMAT = "lowtide step graph"
VERSION = 4

LARGEST = 1 << 53  # integers up to this are exact in every JSON reader

_RECORDS: dict[str, type[Any]] = {"ops": Op, "values": Value, "saves": Save, "calls": Call}
_SCALARS: dict[str, type[Any]] = {
    "num_forward": int,
    "optimizer_state_bytes": int,
    "optimizer_workspace_bytes": int,
    "other_bytes": int,
    "step_s": float,
    "is_measured": bool,
}


def encode(graph: StepGraph) -> dict[str, Any]:
    """Return the graph as an object that `json.dumps` accepts."""
    names: dict[str, int] = {}

    def number(item: Any) -> Any:
        return names.setdefault(item, len(names)) if isinstance(item, str) else item

    content: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    for part, record in _RECORDS.items():
        rows = getattr(graph, part)
        content[part] = {f.name: [_encode(getattr(row, f.name), number) for row in rows] for f in fields(record)}
    content |= {name: getattr(graph, name) for name in _SCALARS}
    content |= {"hardware": asdict(graph.hardware), "notes": list(graph.notes), "versions": graph.versions}
    content |= {"splits": [asdict(split) for split in graph.splits], "names": list(names)}
    return content


def decode(content: Any) -> StepGraph:
    """Return the graph that `encode` made an object of. Raises `GraphError` if the content is damaged."""
    content = checked_object(content, FORMAT, VERSION, GraphError)
    try:
        names = _strings(content["names"])
        parts: dict[str, Any] = {p: tuple(_rows(content[p], record, names)) for p, record in _RECORDS.items()}
        scalars: dict[str, Any] = {name: _number(content[name], kind, name) for name, kind in _SCALARS.items()}
        hardware = decode_hardware(content["hardware"])
        return StepGraph(
            **parts,
            **scalars,
            hardware=hardware,
            notes=tuple(_strings(content["notes"])),
            versions=decode_versions(content["versions"]),
            splits=tuple(_record(each, Split, "a split") for each in content["splits"]),
        )
    except GraphError:
        raise
    except (KeyError, ValueError, TypeError, IndexError, OverflowError) as error:
        cause = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise GraphError(f"damaged step graph: {cause}") from error


def parse_json(text: str, form: str, error: Callable[[str], Exception]) -> Any:
    """Parse `text` as JSON, or raise `error` with the name of the format."""
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as cause:
        raise error(f"not a {form}: it is not JSON ({str(cause)[:100]})") from cause


def checked_object(content: Any, form: str, version: int, error: Callable[[str], Exception]) -> dict[str, Any]:
    """Return `content` if it is an object of this format and version, else raise `error`."""
    if not isinstance(content, dict) or content.get("format") != form:
        raise error(f"not a {form}: it has no format field that says so")
    if content.get("version") != version:
        raise error(
            f"this {form} has version {content.get('version')!r}, and this lowtide reads version {version}. "
            "Make it again, or read it with the lowtide that wrote it."
        )
    return content


def _encode(item: Any, number: Callable[[Any], Any]) -> Any:
    return [number(each) for each in item] if isinstance(item, tuple) else number(item)


def _rows(columns: Any, record: type[Any], names: list[str]) -> Iterable[Any]:
    if not isinstance(columns, dict) or columns.keys() != {f.name for f in fields(record)}:
        raise ValueError(f"the columns of {record.__name__} are not those of version {VERSION}")
    if any(not isinstance(column, list) for column in columns.values()):
        raise ValueError(f"a column of {record.__name__} is not a list")
    if len({len(column) for column in columns.values()}) > 1:
        raise ValueError(f"the columns of {record.__name__} differ in length")
    decoded = [_column(columns[f.name], str(f.type), names, f.name) for f in fields(record)]
    return (record(*row) for row in zip(*decoded, strict=True))


def _column(column: list[Any], kind: str, names: list[str], label: str) -> list[Any]:
    if kind == "str":
        return [names[_index(item, names)] for item in column]
    if kind == "int":
        return [_number(item, int, label) for item in column]
    if kind == "float":
        return [_number(item, float, label) for item in column]
    if any(not isinstance(item, list) for item in column):
        raise ValueError(f"{label} holds an item that is not a list")
    if kind == "tuple[int, ...]":
        return [tuple(_number(each, int, label) for each in item) for item in column]
    flags = [tuple(names[_index(each, names)] for each in item) for item in column]
    unknown = {flag for item in flags for flag in item} - set(FLAGS)
    if unknown:
        raise ValueError(f"unknown flags {sorted(unknown)}")
    return flags


def _index(item: Any, names: list[str]) -> int:
    if type(item) is not int or not 0 <= item < len(names):
        raise ValueError(f"{item!r} is not an index of a name")
    return item


def _number(item: Any, kind: type[Any], label: str) -> Any:
    accepted = (int, float) if kind is float else (kind,)
    if type(item) not in accepted:
        raise ValueError(f"{label} is {item!r}, not {kind.__name__}")
    if type(item) is int and not -LARGEST <= item < LARGEST:
        raise ValueError(f"{label} is a number of {len(str(item))} digits")
    number = kind(item)
    if kind is float and not (0 <= number < float("inf")):
        raise ValueError(f"{label} is {number}, not a number of seconds or bytes")
    return number


def _strings(items: Any) -> list[str]:
    if not isinstance(items, list):
        raise ValueError(f"expected a list of names, not {type(items).__name__}")
    names = list(items)
    if any(not isinstance(item, str) for item in names):
        raise ValueError("a name is not a string")
    return names


def _record(content: Any, record: type[Any], label: str) -> Any:
    """Return the record of strings and numbers that `asdict` made an object of."""
    kinds = {field.name: str(field.type) for field in fields(record)}
    if not isinstance(content, dict) or content.keys() != kinds.keys():
        raise ValueError(f"{label} does not have the fields of a {record.__name__}")
    return record(**{name: _field(content[name], kind, name) for name, kind in kinds.items()})


def _field(item: Any, kind: str, label: str) -> Any:
    return _strings([item])[0] if kind == "str" else _number(item, int if kind == "int" else float, label)


def decode_versions(content: Any) -> dict[str, str]:
    """Return the versions of libraries by name. Raises `ValueError` if the content is anything else."""
    if not isinstance(content, dict) or not all(isinstance(version, str) for version in content.values()):
        raise ValueError("versions is not an object of names and versions")
    return content


def decode_hardware(content: Any) -> Hardware:
    """Return the `Hardware` that `asdict` wrote. Raises `ValueError` if it is damaged."""
    hardware: Hardware = _record(content, Hardware, "hardware")
    if min(hardware.memory_bytes, hardware.block_bytes) < 0:
        raise ValueError("a number of hardware is negative")
    return hardware
