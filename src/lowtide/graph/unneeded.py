"""Ops of a region that its replay need not run: nothing reads what they make but ops whose outputs are held.

A replay brings back what autograd saved in a region. Where the output of an op is held, the op does not run again, and
whatever was computed for it alone need not be computed again either: the projection and the rotation before a query
that is held rotated, say.

An op that is left out is remembered with what it reads, in case that someone asks for what it would have made. So what
it reads stays until that is gone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowtide.graph import StepGraph

ALIASES = frozenset({"aten._unsafe_view.default", "aten._reshape_alias.default"})  # views but for their schemas
# What else they do than to make their outputs is not known, or has to happen.
ALWAYS_RUN = frozenset({"random", "collective", "custom", "opaque", "mutates", "index", "view"})


class Unneeded:
    """Finds such ops. `graph.unneeded` is the one to use.

    `readers[o]` are the forward ops that compute something from what forward op `o` makes; None if `o` always runs.
    """

    def __init__(self, graph: StepGraph) -> None:
        self._graph = graph
        self._calls, self._found = graph.calls, dict[tuple[int, tuple[int, ...]], tuple[int, ...]]()
        self._lasting: dict[tuple[int, tuple[int, ...], int], dict[int, int]] = {}
        # Memory without values may be there for kernels that no one sees, and those may read anything.
        self._allocations = [index for index, op in enumerate(graph.ops[: graph.num_forward]) if is_blank(op.name)]
        ops, num = graph.ops, graph.num_forward
        needed = {save.value for save in graph.saves}
        needed.update(value for op in ops for value in op.mutates)
        needed.update(value for op in ops[num:] for value in op.inputs)
        needed.update(number for number, value in enumerate(graph.values) if value.kind != "activation")
        readers_of: dict[int, list[int]] = {}
        for index, op in enumerate(ops[:num]):
            if "view" not in op.flags and op.name not in ALIASES:
                for value in dict.fromkeys(op.inputs):
                    readers_of.setdefault(value, []).append(index)
        self.readers: list[tuple[int, ...] | None] = []
        self._dropped: list[int] = []  # when the last of what each op makes is gone
        for op in ops[:num]:
            runs = not op.outputs or bool(op.mutates) or not ALWAYS_RUN.isdisjoint(op.flags)
            runs = runs or not needed.isdisjoint(op.outputs)
            # What no op reads was made for someone who is not seen: Python, for its numbers.
            runs = runs or any(graph.values[value].bytes and value not in readers_of for value in op.outputs)
            found = {reader for value in op.outputs for reader in readers_of.get(value, ())}
            self.readers.append(None if runs else tuple(sorted(found)))
            self._dropped.append(max((graph.values[value].dropped for value in op.outputs), default=0))

    def can_skip(self, call: int) -> bool:
        """Whether replays of a call may leave out anything."""
        first, end = self._calls[call].first, self._calls[call].end
        return bisect_left(self._allocations, first) == bisect_left(self._allocations, end)

    def may_skip(self, op: int, call: int) -> bool:
        """Whether a replay of a call may leave out an op, if all that read its outputs are held or left out."""
        readers, end = self.readers[op], self._calls[call].end
        return readers is not None and self._dropped[op] <= end and (not readers or readers[-1] < end)

    def of(self, call: int, kept: tuple[int, ...]) -> tuple[int, ...]:
        """The ops of a call that its replay need not run if it holds the outputs of those in `kept`.

        Both are counted from its first op.
        """
        key = call, kept
        if key not in self._found:
            first, end = self._calls[call].first, self._calls[call].end
            held = {first + op for op in kept}
            left_out: set[int] = set()
            for op in range(end - 1, first - 1, -1) if held and self.can_skip(call) else ():
                if op not in held and self.may_skip(op, call):
                    readers = self.readers[op]
                    if readers is not None and all(reader in held or reader in left_out for reader in readers):
                        left_out.add(op)
            self._found[key] = tuple(op - first for op in sorted(left_out))
        return self._found[key]

    def of_regions(self, regions: Mapping[int, Sequence[int]]) -> dict[int, tuple[int, ...]]:
        """For each region that holds outputs, the ops that need not run again. None of one with others inside."""
        found: dict[int, tuple[int, ...]] = {}
        for call, kept in regions.items():
            if kept and not self._graph.arrays.has_inside(call, regions):
                found[call] = self.of(call, tuple(sorted(set(kept))))
        return {call: ops for call, ops in found.items() if ops}

    def lasting(self, call: int, left_out: tuple[int, ...], stop: int) -> dict[int, int]:
        """Values that a replay up to `stop` makes and keeps longer for ops that it leaves out, and to which position.

        An op that is left out may read what another one would have made.
        """
        key = call, left_out, stop
        if key not in self._lasting:
            first, values = self._calls[call].first, self._graph.values
            ends: dict[int, int] = {}
            for number in sorted((first + op for op in left_out if first + op < stop), reverse=True):
                op = self._graph.ops[number]
                end = max(ends.get(value, values[value].dropped) for value in op.outputs)
                for value in op.inputs:
                    if values[value].born >= first and ends.get(value, values[value].dropped) < end:
                        ends[value] = end
            self._lasting[key] = ends
        return self._lasting[key]


def is_blank(name: str) -> bool:
    """Whether an op makes memory without values, or with zeros only."""
    return any(word in name.split(".")[1] for word in ("empty", "zeros")) if name.count(".") else False
