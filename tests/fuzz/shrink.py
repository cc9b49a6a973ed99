"""A smaller program that fails in the same way.

Each candidate changes one thing: it drops a block, puts a block's inner blocks in its place, replaces a block by a
Linear, resets an option, or drops part of the engine. Candidates that fail in the same way are shrunk further, until
none does or the limit of runs is reached. Where a net changes, the paths in a plan go stale, so a candidate is also
tried with each single call recomputed and with all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fuzz.engines import Facts
from fuzz.features import LEAVES, WRAPPERS, Node, inner_nodes
from fuzz.judge import Verdict, judge, reference_of
from fuzz.programs import Spec

_DEFAULTS = Spec()
_OPTIONS = ("loop", "optimizer", "inputs", "output", "vary", "input_grad", "regulariser", "width", "batch", "length")


def shrink(failed: Verdict, max_runs: int = 600) -> Verdict:
    """The smallest failing program found within `max_runs` runs."""
    smallest, runs, shrank = failed, 0, True
    while shrank:
        shrank = False
        for candidate in _candidates(smallest.spec):
            if (runs := runs + 1) > max_runs:
                return smallest
            verdict = judge(candidate)
            if (verdict.outcome, verdict.kind) == (failed.outcome, failed.kind):
                smallest, shrank = verdict, True
                break
    return smallest


def _candidates(spec: Spec) -> Iterator[Spec]:
    if _size(spec.engine) > 1:
        for engine in _simple_plans(spec):
            if _size(engine) < _size(spec.engine):
                yield replace(spec, engine=engine)
    for net in _smaller_nets(spec.net):
        changed = replace(spec, net=net)
        yield changed
        if spec.engine["kind"] in ("plan", "policy") and not isinstance(reference_of(changed), str):
            for engine in _simple_plans(changed):
                if _size(engine) <= _size(spec.engine):
                    yield replace(changed, engine=engine)
    for name in _OPTIONS:
        if getattr(spec, name) != getattr(_DEFAULTS, name):
            yield replace(spec, **{name: getattr(_DEFAULTS, name)})
    for engine in _smaller_engines(spec.engine):
        yield replace(spec, engine=engine)


def _simple_plans(spec: Spec) -> list[dict[str, Any]]:
    """Each call recomputed on its own, the innermost first, then all of them."""
    if spec.engine["kind"] not in ("plan", "policy", "fit"):
        return []
    try:
        calls = Facts(spec).calls
    except Exception:  # a net that does not run
        return []
    single = sorted(calls, key=lambda call: -call[0].count("."))
    plans: list[list[tuple[str, int]]] = [[call] for call in single] + [calls]
    return [{"kind": "plan", "regions": [[path, nth, []] for path, nth in plan]} for plan in plans]


def _size(engine: dict[str, Any]) -> int:
    """How much there is to read in an engine; plans are the simplest, as they depend on no measured time."""
    if engine["kind"] in ("fit", "offload", "compiled"):
        return 1000 * (engine["kind"] == "fit")
    if engine["kind"] == "policy":
        return 500 + len(engine["regions"])
    kept = sum(len(region[2]) for region in engine["regions"])
    return len(engine["regions"]) + kept + len(engine.get("moves", ())) + engine.get("toggle", False)


def _smaller_nets(net: list[Node]) -> Iterator[list[Node]]:
    for index, node in enumerate(net):
        before, after = net[:index], net[index + 1 :]
        yield [*before, *after]
        inside = inner_nodes(node)
        if inside:
            yield [*before, *inside, *after]
            options = [part for part in node if not isinstance(part, list)]
            for smaller in _smaller_nets(inside):
                if smaller:
                    yield [*before, [*options, *smaller], *after]
        elif node != ["linear", ""]:
            yield [*before, ["linear", ""], *after]
        name, *options = [part for part in node if not isinstance(part, list)]
        known = (WRAPPERS if name in WRAPPERS else LEAVES)[name][1]
        for position, (value, values) in enumerate(zip(options, known, strict=True)):
            if value != values[0]:
                yield [*before, [name, *options[:position], values[0], *options[position + 1 :], *inside], *after]


def _smaller_engines(engine: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name in ("toggle", "store", "host", "moves"):
        if engine.get(name):
            yield {key: value for key, value in engine.items() if key != name}
    regions, moves = engine.get("regions", []), engine.get("moves", [])
    for index in range(len(moves)):
        yield {**engine, "moves": moves[:index] + moves[index + 1 :]}
    if len(regions) > 1:
        for index in range(len(regions)):
            left = regions[:index] + regions[index + 1 :]
            gone = regions[index][:2]
            yield (
                {**engine, "regions": left, "moves": [m for m in moves if m[:2] != gone]}
                if moves
                else {
                    **engine,
                    "regions": left,
                }
            )
    if engine["kind"] == "plan":
        for index, (path, nth, kept) in enumerate(regions):
            for op in kept:
                if [path, nth, 0, op] not in moves:
                    fewer = [path, nth, [other for other in kept if other != op]]
                    yield {**engine, "regions": [*regions[:index], fewer, *regions[index + 1 :]]}
