"""Repeated structure in the calls of a graph: equal calls, segments of sibling calls, and the model's blocks.

**Structures**: `with_structures` numbers calls by what they run, so that solvers need to examine only one of equal
ones, and `with_even_times` gives equal calls equal op times.

**Segments**: a segment is a run of sibling calls (`layers.3 ... layers.9`) that is recomputed together from the inputs
of the run. `with_segments` inserts a call of kind "Segment" around each run, as the parent of its calls. Ops, values
and saves keep their numbers, so the simulator and the solvers treat a segment like any other region. `runs` finds the
longest possible segments.

**Blocks**: `block_levels` and `all_blocks` find the layers on which one would put a checkpoint.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import fields, replace
from functools import cached_property
from itertools import groupby, pairwise

import numpy as np

from lowtide.errors import GraphError
from lowtide.graph.arrays import StepArrays
from lowtide.graph.step_graph import Call, Op, Save, StepGraph, Value


def with_structures(graph_ops: Iterable[Op], calls: list[Call], values: list[Value], saves: list[Save]) -> list[Call]:
    """Return `calls` with a `structure` number, equal for calls that run the same ops on values of the same sizes."""
    ops = list(graph_ops)
    saves_of: dict[int, list[Save]] = {}
    for save in saves:
        saves_of.setdefault(save.call, []).append(save)
    children: dict[int, list[int]] = {}
    for index, call in enumerate(calls):
        children.setdefault(call.parent, []).append(index)
    numbers: dict[tuple[object, ...], int] = {}
    marked: list[Call] = list(calls)
    for index in range(len(calls) - 1, -1, -1):  # children come after their parents
        call = calls[index]
        local: dict[int, int] = {}

        def name(value: int, local: dict[int, int] = local) -> tuple[int, ...]:
            facts = values[value]
            return local.setdefault(value, len(local)), facts.bytes, facts.item_bytes, facts.row_length

        below = children.get(index, [])
        own: list[tuple[object, ...]] = []
        position = call.first
        for child in [*below, None]:
            until = call.end if child is None else calls[child].first
            for op in ops[position:until]:
                cost = (op.name, op.flops, op.flags, op.workspace_bytes)
                own.append((cost, tuple(map(name, op.inputs)), tuple(map(name, op.outputs))))
            if child is not None:
                c = marked[child]
                own.append((c.structure, tuple(map(name, c.inputs)), tuple(map(name, c.outputs))))
                position = c.end
        held = tuple((name(s.value), s.made - call.first) for s in saves_of.get(index, []))
        ends = tuple((number, min(values[v].dropped, call.end + 1) - call.first) for v, number in local.items())
        key = (call.kind, call.changes, call.end - call.first, tuple(own), held, ends, tuple(map(name, call.outputs)))
        structure = numbers.setdefault(key, len(numbers))
        marked[index] = replace(call, structure=structure)
    return marked


def with_even_times(ops: Sequence[Op], calls: Sequence[Call]) -> list[Op]:
    """Return `ops` with the mean of the measured seconds for corresponding ops of calls of one structure.

    Differences between equal layers are noise, which would otherwise influence the solver.
    """
    alike: dict[int, list[Call]] = {}
    for call in calls:
        alike.setdefault(call.structure, []).append(call)
    evened, is_done = list(ops), [False] * len(ops)
    for call in calls:  # the outermost first
        firsts = [each.first for each in alike[call.structure]]
        for offset in range(call.end - call.first if len(firsts) > 1 else 0):
            if is_done[call.first + offset]:
                continue
            same = [first + offset for first in firsts if not is_done[first + offset]]
            seconds, host_s = (
                _mean([ops[index].seconds for index in same]),
                _mean([ops[index].host_s for index in same]),
            )
            for index in same:
                is_done[index] = True
                if (ops[index].seconds, ops[index].host_s) != (seconds, host_s):
                    evened[index] = replace(ops[index], seconds=seconds, host_s=host_s)
    return evened


def _mean(seconds: list[float]) -> float:
    return math.fsum(seconds) / len(seconds) if min(seconds) < max(seconds) else seconds[0]


Span = tuple[int, int]  # the first and the last call of a segment, as numbered in the plain graph


class SegmentedGraph(StepGraph):
    """The graph `plain` with further calls, which are segments. Made by `with_segments`.

    `plain_members[c]` are the calls of the plain graph that call `c` consists of: one, or those of a segment. `numbers`
    are the new indices of the plain graph's calls. Ops and saves differ in their call indices only and are made on
    first access: simulating regions needs `arrays` only, and solvers simulate many such graphs.
    """

    plain: StepGraph
    plain_members: tuple[tuple[int, ...], ...]

    def __init__(
        self, plain: StepGraph, calls: tuple[Call, ...], plain_members: tuple[tuple[int, ...], ...], numbers: list[int]
    ) -> None:
        same = {field.name: getattr(plain, field.name) for field in fields(plain)}
        del same["ops"], same["saves"]
        vars(self).update(same, plain=plain, calls=calls, plain_members=plain_members, _numbers=[*numbers, -1])

    @cached_property
    def ops(self) -> tuple[Op, ...]:  # type: ignore[override]
        numbers = vars(self)["_numbers"]
        return tuple(replace(op, call=numbers[op.call]) for op in self.plain.ops)

    @cached_property
    def saves(self) -> tuple[Save, ...]:  # type: ignore[override]
        numbers = vars(self)["_numbers"]
        return tuple(replace(save, call=numbers[save.call]) for save in self.plain.saves)

    @cached_property
    def fingerprint(self) -> str:
        return self.plain.fingerprint

    @cached_property
    def last_writes(self) -> dict[int, int]:
        return self.plain.last_writes

    @cached_property
    def last_reads(self) -> dict[int, int]:
        return self.plain.last_reads

    @cached_property
    def num_gathers(self) -> list[int]:
        return self.plain.num_gathers

    @cached_property
    def arrays(self) -> StepArrays:
        """The plain graph's arrays with those of calls replaced.

        A segment captures the state of each of its calls, and restores it one call at a time.
        """
        arrays, plain = copy(self.plain.arrays), self.plain.arrays
        arrays.save_call = np.array(vars(self)["_numbers"], dtype=np.int64)[plain.save_call]
        arrays.set_calls(self)
        arrays.num_modules = np.array([len(members) for members in self.plain_members], dtype=np.int64)
        starts = np.cumsum(arrays.num_modules) - arrays.num_modules
        members = np.array([call for each in self.plain_members for call in each], dtype=np.int64)
        arrays.frame_bytes = np.add.reduceat(plain.frame_bytes[members], starts)
        arrays.replay_bytes = np.maximum.reduceat(plain.replay_bytes[members], starts)
        return arrays

    def names_of(self, call: int) -> tuple[tuple[str, int], ...]:
        return tuple((self.plain.calls[each].path, self.plain.nths[each]) for each in self.plain_members[call])

    def input_number(self, call: int, number: int) -> tuple[str, int, int]:
        value, plain = self.calls[call].inputs[number], self.plain
        taker = next(each for each in self.plain_members[call] if value in plain.calls[each].inputs)
        return plain.input_number(taker, plain.calls[taker].inputs.index(value))


def members_of(graph: StepGraph, span: Span) -> list[int]:
    """Return the calls of a segment, in the order of the forward."""
    first, last = span
    parent = graph.calls[first].parent
    return [call for call in range(first, last + 1) if graph.calls[call].parent == parent]


def runs(graph: StepGraph) -> list[tuple[int, ...]]:
    """Return the longest runs of two or more calls that can be recomputed together, sorted by their first call.

    The calls of a run have one parent and follow each other; an op between them may only make values that no later op
    reads, such as the random number of stochastic depth. Each is a replayable call of a module of the model. Of the
    values that the run makes, a call receives only outputs of the call before it.
    """
    candidates: list[tuple[int, ...]] = []
    for siblings in graph.children:
        run: list[int] = []
        for index in siblings:
            call = graph.calls[index]
            can_be = bool(call.path) and not call.path.startswith("<") and index not in graph.unreplayable
            if run and not (can_be and _is_linked(graph, run, index)):
                candidates.append(tuple(run))
                run = []
            run += [index] if can_be else []
        candidates.append(tuple(run))
    return sorted(run for run in candidates if sum(graph.calls[c].end > graph.calls[c].first for c in run) > 1)


def _is_linked(graph: StepGraph, run: Sequence[int], index: int) -> bool:
    call, before = graph.calls[index], graph.calls[run[-1]]
    made = [value for value in call.inputs if graph.values[value].born >= graph.calls[run[0]].first]
    return set(made) <= set(before.outputs) and not ops_that_matter(graph, before, call)


def ops_that_matter(graph: StepGraph, before: Call, after: Call) -> list[int]:
    """Return the ops between two calls that a replay would have to run: they change a value, or make one read later."""
    between = range(before.end, after.first)
    return [
        index
        for index in between
        if graph.ops[index].mutates
        or any(graph.last_reads.get(value, -1) >= after.first for value in graph.ops[index].outputs)
    ]


def has_gaps(graph: StepGraph, members: Sequence[int]) -> bool:
    """Whether ops run between these calls; the engine does not count such ops as the segment's."""
    return any(graph.calls[a].end != graph.calls[b].first for a, b in pairwise(members))


def with_segments(graph: StepGraph, spans: Iterable[Span]) -> StepGraph:
    """Return `graph` with a "Segment" call around each of these runs of calls. Spans may nest, but not overlap.

    Raises `GraphError` if ops that a replay would need run between the calls of a span.
    """
    ordered = sorted(set(spans), key=lambda span: (span[0], -span[1]))
    if not ordered:
        return graph
    if isinstance(graph, SegmentedGraph):
        raise GraphError("this graph has segments already: add segments to the plain graph instead")
    all_members = [members_of(graph, span) for span in ordered]
    for span, members in zip(ordered, all_members, strict=True):
        _check(graph, span, members)
    firsts = np.array([first for first, _ in ordered])
    new_number = (np.arange(len(graph.calls)) + np.searchsorted(firsts, np.arange(len(graph.calls)), "right")).tolist()
    parents = [new_number[call.parent] if call.parent >= 0 else -1 for call in graph.calls]
    segment_parents: list[int] = []
    for number, (span, members) in enumerate(zip(ordered, all_members, strict=True)):  # the inner ones last
        segment_parents.append(parents[members[0]])
        if parents[members[0]] != parents[members[-1]]:
            raise GraphError(f"segments overlap: {_title(graph, members)} begins inside another and ends outside")
        for member in members:
            parents[member] = span[0] + number
    calls: list[Call] = []
    plain_members: list[tuple[int, ...]] = []
    number = 0
    for index, call in enumerate(graph.calls):
        while number < len(ordered) and ordered[number][0] == index:
            calls.append(_segment(graph, all_members[number], segment_parents[number]))
            plain_members.append(tuple(all_members[number]))
            number += 1
        calls.append(call if call.parent == parents[index] else replace(call, parent=parents[index]))
        plain_members.append((index,))
    return SegmentedGraph(graph, tuple(calls), tuple(plain_members), new_number)


def segment_name(names: Sequence[tuple[str, int]]) -> str:
    """Return the display name of a region over these calls (path and nth): `layers.3 ... layers.9`."""
    return names[0][0] if len(names) == 1 else f"{names[0][0]} ... {names[-1][0]}"


def _segment(graph: StepGraph, members: Sequence[int], parent: int) -> Call:
    calls = [graph.calls[member] for member in members]
    first = calls[0].first
    given = dict.fromkeys(value for call in calls for value in call.inputs if graph.values[value].born < first)
    changes = next((call.changes for call in calls if call.changes), "")
    end, outputs = calls[-1].end, calls[-1].outputs
    return Call(_title(graph, members), "Segment", parent, first, end, tuple(given), outputs, changes=changes)


def _title(graph: StepGraph, members: Sequence[int]) -> str:
    return segment_name([(graph.calls[member].path, 0) for member in members])


def _check(graph: StepGraph, span: Span, members: Sequence[int]) -> None:
    title = _title(graph, members) if members else str(span)
    if len(members) < 2 or members[-1] != span[1]:
        raise GraphError(f"{title} is not a run of several calls under one parent")
    for before, after in pairwise(members):
        a, b = graph.calls[before], graph.calls[after]
        if ops := ops_that_matter(graph, a, b):
            raise GraphError(
                f"{title} cannot be a segment: {graph.ops[ops[0]].name} runs between {a.path} and {b.path}"
            )


def every_kth(graph: StepGraph, calls: Sequence[int], step: int) -> list[int]:
    """Return every `step`-th of these calls, counted anew in each forward of the model."""
    by_forward: dict[int, list[int]] = defaultdict(list)
    for call in calls:
        *_, forward = graph.ancestors(call)
        by_forward[forward].append(call)
    return sorted(call for blocks in by_forward.values() for call in blocks[::step])


def all_blocks(graph: StepGraph) -> list[int]:
    """Return the calls that one would put a checkpoint on: the last of `block_levels`."""
    levels = block_levels(graph)
    return levels[-1] if levels else []


def block_levels(graph: StepGraph) -> list[list[int]]:
    """Return the model's blocks at each level, the outermost first: stages or towers of blocks, then their blocks.

    Blocks are sibling calls of one class. Their structures may differ, as those of a first or last layer do. The
    outermost are the group with most ops, and groups with at least a quarter as many apart from it, such as the layers
    of an encoder and of a decoder. The next level has, for each block that is a chain of inner blocks, these instead.
    """
    groups = sorted(_repeated(graph), key=lambda calls: (-_num_ops(graph, calls), calls))
    outermost: list[int] = []
    for calls in groups:
        spans = [(graph.calls[call].first, graph.calls[call].end) for call in outermost]
        apart = all(
            graph.calls[call].end <= first or end <= graph.calls[call].first for call in calls for first, end in spans
        )
        if apart and 4 * _num_ops(graph, calls) >= _num_ops(graph, groups[0]):
            outermost += calls
    levels = [sorted(outermost)] if outermost else []
    chains = sorted(_chains_of_blocks(graph, groups), key=lambda calls: -_num_ops(graph, calls))
    while levels:
        inner = [each for call in levels[-1] for each in _inner_blocks(graph, call, chains)]
        if inner == levels[-1]:
            break
        levels.append(inner)
    return levels


def _inner_blocks(graph: StepGraph, call: int, chains: list[list[int]]) -> list[int]:
    """Return the blocks that have most of the ops of a call, or the call itself; `chains` has the largest first."""
    first, end = graph.calls[call].first, graph.calls[call].end
    for calls in chains:
        is_inside = call not in calls and first <= graph.calls[calls[0]].first and graph.calls[calls[-1]].end <= end
        if is_inside and 2 * _num_ops(graph, calls) >= end - first:
            return calls
    return [call]


def _chains_of_blocks(graph: StepGraph, groups: list[list[int]]) -> Iterator[list[int]]:
    """Yield siblings that contain calls, as single layers do not, and are each given an output of the one before.

    Experts of one layer are not, nor are the attentions of a decoder's layer, which have norms in between.
    """
    parents = {call.parent for call in graph.calls}
    for calls in groups:
        for _, group in groupby(calls, key=lambda call: graph.calls[call].parent):
            siblings = list(group)
            pairs = pairwise(graph.calls[call] for call in siblings)
            if len(siblings) > 1 and parents.issuperset(siblings):
                if all(not set(before.outputs).isdisjoint(after.inputs) for before, after in pairs):
                    yield siblings


def _repeated(graph: StepGraph) -> list[list[int]]:
    groups: dict[tuple[str, str | None], list[int]] = defaultdict(list)
    for index, call in enumerate(graph.calls):
        is_model = call.parent < 0 and not call.path
        if not is_model and call.end > call.first and index not in graph.unreplayable:
            groups[call.kind, graph.calls[call.parent].path if call.parent >= 0 else None].append(index)
    return [calls for calls in groups.values() if len(calls) > 1]


def _num_ops(graph: StepGraph, calls: list[int]) -> int:
    return sum(graph.calls[call].end - graph.calls[call].first for call in calls)
