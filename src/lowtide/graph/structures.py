"""Which module calls are the same but for names: a solver need look at one of them only, and they take equally long."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from lowtide.graph import Call, Op, Save, Value


def with_structures(graph_ops: Iterable[Op], calls: list[Call], values: list[Value], saves: list[Save]) -> list[Call]:
    """`calls`, those that do the same to values of the same sizes marked by the same `structure` number."""
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
    """`ops`, those that do the same in calls of one structure with the same seconds: the mean of what was measured.

    What layers that are alike seem to differ in is noise, and a solver would go by it.
    """
    alike: dict[int, list[Call]] = {}
    for call in calls:
        alike.setdefault(call.structure, []).append(call)
    found, is_done = list(ops), [False] * len(ops)
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
                    found[index] = replace(ops[index], seconds=seconds, host_s=host_s)
    return found


def _mean(seconds: list[float]) -> float:
    return math.fsum(seconds) / len(seconds) if min(seconds) < max(seconds) else seconds[0]
