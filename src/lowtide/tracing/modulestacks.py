"""Module calls, from the module stacks that Dynamo notes on each node of a graph."""

from __future__ import annotations

from typing import Any

from lowtide.graph import Call
from lowtide.tracing import _compat


class ModuleStacks:
    """Calls that are open while the nodes of a forward go by, and those that were.

    A node without a stack belongs to the call that is open.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._open: list[tuple[str, int]] = []  # the stack's key, and the call

    def enter(self, node: Any, op: int) -> int:
        """The call in which op `op`, a node's, runs."""
        stack = _compat.module_stack(node)
        if stack:
            keys = list(stack)
            shared = 0
            while shared < min(len(keys), len(self._open)) and self._open[shared][0] == keys[shared]:
                shared += 1
            self._close_to(shared, op)
            for key in keys[shared:]:
                path, kind = stack[key]
                parent = self._open[-1][1] if self._open else -1
                self._open.append((key, len(self.calls)))
                name = kind if isinstance(kind, str) else kind.__name__
                self.calls.append(Call(_compat.clean_path(str(path)), name.rsplit(".", 1)[-1], parent, op, op, (), ()))
        return self._open[-1][1] if self._open else -1

    def close(self, op: int) -> None:
        """The forward has ended before op `op`."""
        self._close_to(0, op)

    def _close_to(self, depth: int, op: int) -> None:
        while len(self._open) > depth:
            _, call = self._open.pop()
            opened = self.calls[call]
            self.calls[call] = Call(opened.path, opened.kind, opened.parent, opened.first, op, (), ())
