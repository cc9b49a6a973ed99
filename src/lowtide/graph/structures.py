"""Which module calls are the same but for names, so that a solver need look at one of them only."""

from __future__ import annotations

from collections.abc import Iterable

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
        key = (call.kind, call.end - call.first, tuple(own), held, ends, tuple(map(name, call.outputs)))
        structure = numbers.setdefault(key, len(numbers))
        marked[index] = Call(
            call.path, call.kind, call.parent, call.first, call.end, call.inputs, call.outputs, structure
        )
    return marked
