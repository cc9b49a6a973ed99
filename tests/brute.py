"""Brute force for tiny steps: every plan is simulated, to compare a solver with the best of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations, product

from lowtide.graph import StepGraph
from lowtide.graph.codec_costs import encoded_form
from lowtide.graph.segments import runs, with_segments
from lowtide.plans import Plan
from lowtide.simulator import simulate
from lowtide.solvers.baselines import recomputes
from lowtide.solvers.placement import Placement


def region_calls(graph: StepGraph) -> list[int]:
    """The calls that the eager engine can replay: modules of the model, not the model itself."""
    named = (i for i, call in enumerate(graph.calls) if call.path and call.path[0] != "<" and call.end > call.first)
    return [call for call in named if call not in graph.unreplayable]


def keepable_ops(graph: StepGraph) -> set[int]:
    """Forward ops that make something, which nothing changes in place. Choices are kept by the engine anyway."""
    changed = {value for op in graph.ops[: graph.num_forward] for value in op.mutates}
    return {
        index
        for index, op in enumerate(graph.ops[: graph.num_forward])
        if not op.mutates
        and not {"mutates", "index"} & set(op.flags)
        and not changed & set(op.outputs)
        and any(graph.values[value].kind == "activation" for value in op.outputs)
    }


def codec_choices(graph: StepGraph, codecs: tuple[str, ...]) -> list[list[tuple[int, str]]]:
    """For each value that may be compressed, with which codec: with none (`""`), and with each that does it.

    That is what modules save and nobody else, the first that its op made, of anything but weights, which nothing
    changes from then on.
    """
    first_made: dict[int, int] = {}
    outside = {save.value for save in graph.saves if save.call < 0}
    for save in graph.saves:
        if save.call >= 0:
            first_made[save.value] = min(save.made, first_made.get(save.value, save.made))
    found: list[list[tuple[int, str]]] = []
    for value in first_made:
        facts = graph.values[value]
        if facts.born < 0 or facts.kind != "activation" or graph.ops[facts.born].outputs.index(value) > 0:
            continue
        sources = [graph.values[given].kind for given in graph.ops[facts.born].inputs]
        if value in outside or (sources and not set(sources) - {"parameter", "buffer"}):
            continue
        if any(value in op.mutates for op in graph.ops[first_made[value] : graph.num_forward]):
            continue
        named = [codec for codec in codecs if encoded_form(facts, codec, graph.hardware) is not None]
        if named:
            found.append([(value, codec) for codec in ("", *named)])
    return found


def _subsets(items: list[int]) -> chain[tuple[int, ...]]:
    return chain.from_iterable(combinations(items, size) for size in range(len(items) + 1))


def all_costs(graph: StepGraph, *, most: int, codecs: tuple[str, ...] = ()) -> list[tuple[int, float]] | None:
    """Peak and extra seconds of every plan, None if there are more than `most`.

    Any regions, in one another or not; those inside of none retain any outputs that are saved directly in them.
    Any values compressed by any of `codecs`.
    """
    choices = product(*codec_choices(graph, codecs))
    presses = [{value: ("device", codec) for value, codec in choice if codec} for choice in choices]
    calls, keepable = region_calls(graph), keepable_ops(graph)
    if 2 ** len(calls) * len(presses) > most:
        return None
    found: dict[tuple[int, float], None] = {}
    count, placement = 0, Placement(graph)
    for regions in _subsets(calls):
        outermost, ops, owner = {}, [], graph.innermost(regions)
        saved = {(owner[save.call], save.value) for save in graph.saves}
        for call in regions:
            first, end, outer = graph.calls[call].first, graph.calls[call].end, graph.calls[call].parent
            while outer >= 0 and outer not in outermost:
                outer = graph.calls[outer].parent
            if outer < 0:
                outermost[call] = first
                inside = keepable & set(range(first, end))
                outputs = {op: [v for v in graph.ops[op].outputs if graph.values[v].bytes] for op in inside}
                ops += sorted(op for op, made in outputs.items() if all((call, value) in saved for value in made))
        count += 2 ** len(ops) * len(presses)
        if count > most:
            return None
        moves = [placement.everywhere(ways, dict.fromkeys(regions, ())) for ways in presses]
        for kept in map(set, _subsets(ops)):
            held: dict[int, tuple[int, ...]] = dict.fromkeys(regions, ())
            for call, first in outermost.items():
                held[call] = tuple(op - first for op in range(first, graph.calls[call].end) if op in kept)
            plan = Plan(recomputes(graph, held))
            for everywhere in moves:
                timeline = simulate(graph, replace(plan, moves=everywhere) if everywhere else plan)
                found[timeline.peak_bytes, timeline.extra_s] = None
    return list(found)


def all_costs_with_segments(graph: StepGraph, *, most: int) -> list[tuple[int, float]] | None:
    """As `all_costs`, of plans with segments too: any part of a run of calls, and any that lie inside one another.

    All sets of segments that do not overlap are parts of full bracketings of the runs.
    """
    found: dict[tuple[int, float], None] = {}
    for brackets in product(*(_bracketings(run) for run in runs(graph))):
        segmented = with_segments(graph, [span for spans in brackets for span in spans])
        costs = all_costs(segmented, most=most)
        if costs is None:
            return None
        found |= dict.fromkeys(costs)
    return list(found)


def _bracketings(run: tuple[int, ...]) -> list[list[tuple[int, int]]]:
    if len(run) == 1:
        return [[]]
    cuts = ((_bracketings(run[:at]), _bracketings(run[at:])) for at in range(1, len(run)))
    return [[(run[0], run[-1]), *left, *right] for lefts, rights in cuts for left in lefts for right in rights]
