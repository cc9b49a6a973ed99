"""Read and write a `StepGraph` as JSON, for `StepGraph.to_json` and `from_json` and inside plan files.

Ops, values, saves and calls are stored as columns, and each name once, which keeps files of thousands of ops small.
Reading checks the type and range of every field, and `StepGraph` checks their consistency; damage raises `GraphError`.
No code is executed. A file of another version is refused.

`parse_json`, `checked_object` (format and version) and `read_field` are shared with `plans.plan_json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from lowtide.errors import GraphError
from lowtide.graph.step_graph import FLAGS, Call, Hardware, Op, Save, Split, StepGraph, Value

FORMAT = "lowtide step graph"
VERSION = 4

_LARGEST = 1 << 53  # integers up to this are exact in every JSON reader

_COLUMNS: dict[str, type[Any]] = {"ops": Op, "values": Value, "saves": Save, "calls": Call}
_OTHERS = {field.name: str(field.type) for field in fields(StepGraph) if field.name not in _COLUMNS}
_RECORDS = {"Hardware": Hardware, "Split": Split}


def encode(graph: StepGraph) -> dict[str, Any]:
    """Return the graph as an object that `json.dumps` accepts."""
    names: dict[str, int] = {}

    def number(item: Any) -> Any:
        return names.setdefault(item, len(names)) if isinstance(item, str) else item

    content: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    for part, record in _COLUMNS.items():
        rows = getattr(graph, part)
        content[part] = {f.name: [_encode(getattr(row, f.name), number) for row in rows] for f in fields(record)}
    content |= {name: getattr(graph, name) for name in _OTHERS}
    content |= {"hardware": asdict(graph.hardware), "splits": [asdict(split) for split in graph.splits]}
    return {**content, "names": list(names)}


def decode(content: Any) -> StepGraph:
    """Return the graph that `encode` made an object of. Raises `GraphError` if the content is damaged."""
    content = checked_object(content, FORMAT, VERSION, GraphError)
    try:
        names = read_field(content["names"], "tuple[str, ...]", "names")
        columns: dict[str, Any] = {part: tuple(_rows(content[part], kind, names)) for part, kind in _COLUMNS.items()}
        others = {name: read_field(content[name], kind, name, _RECORDS) for name, kind in _OTHERS.items()}
        return StepGraph(**columns, **others)
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


def read_field(
    item: Any, kind: str, label: str, records: Mapping[str, type[Any]] | None = None, *, least: int = 0
) -> Any:
    """Return a field from its JSON and the text of its annotation. Raises `ValueError` if it does not have that type.

    `records` are the dataclasses that annotations may name. Integers are `least` or more, other numbers 0 or more.
    """
    if kind.endswith(" | None"):
        return None if item is None else read_field(item, kind.removesuffix(" | None"), label)
    if kind.startswith("tuple["):
        if not isinstance(item, list):
            raise ValueError(f"{label} is not a list")
        kinds = [kind[6:-6]] * len(item) if kind.endswith(", ...]") else kind[6:-1].split(", ")
        if len(item) != len(kinds):
            raise ValueError(f"{label} holds an item of {len(item)} elements, not {len(kinds)}")
        return tuple(read_field(each, of, label, records, least=least) for each, of in zip(item, kinds, strict=True))
    if records and kind in records:
        of_field = {field.name: str(field.type) for field in fields(records[kind])}
        if not isinstance(item, dict) or item.keys() != of_field.keys():
            raise ValueError(f"{label} does not have the fields of a {kind} of this version")
        return records[kind](**{name: read_field(item[name], of, name) for name, of in of_field.items()})
    if kind == "dict[str, str]" and isinstance(item, dict) and all(isinstance(each, str) for each in item.values()):
        return item
    if (kind == "str" and isinstance(item, str)) or (kind == "bool" and isinstance(item, bool)):
        return item
    if kind == "int" and type(item) is int and least <= item < _LARGEST:
        return item
    if kind == "float" and type(item) in (int, float) and 0 <= item < float("inf"):
        return float(item)
    bounds = {"int": f" from {least} to {_LARGEST}", "float": " of 0 or more"}.get(kind, "")
    raise ValueError(f"{label} is {repr(item)[:50]}, not {kind}{bounds}")


def _encode(item: Any, number: Callable[[Any], Any]) -> Any:
    return [number(each) for each in item] if isinstance(item, tuple) else number(item)


def _rows(columns: Any, record: type[Any], names: Sequence[str]) -> Iterable[Any]:
    if not isinstance(columns, dict) or columns.keys() != {f.name for f in fields(record)}:
        raise ValueError(f"the columns of {record.__name__} are not those of version {VERSION}")
    if any(not isinstance(column, list) for column in columns.values()):
        raise ValueError(f"a column of {record.__name__} is not a list")
    if len({len(column) for column in columns.values()}) > 1:
        raise ValueError(f"the columns of {record.__name__} differ in length")
    decoded = [_column(columns[f.name], str(f.type), names, f.name) for f in fields(record)]
    return (record(*row) for row in zip(*decoded, strict=True))


def _column(column: list[Any], kind: str, names: Sequence[str], label: str) -> list[Any]:
    if kind == "str":
        return [names[_index(item, names)] for item in column]
    if kind != "tuple[str, ...]":
        return [read_field(item, kind, label, least=-_LARGEST) for item in column]
    numbers = [read_field(item, "tuple[int, ...]", label) for item in column]
    flags = [tuple(names[_index(each, names)] for each in item) for item in numbers]
    unknown = {flag for item in flags for flag in item} - set(FLAGS)
    if unknown:
        raise ValueError(f"unknown flags {sorted(unknown)}")
    return flags


def _index(item: Any, names: Sequence[str]) -> int:
    if type(item) is not int or not 0 <= item < len(names):
        raise ValueError(f"{item!r} is not an index of a name")
    return item
