"""Which compiled graphs a step has called so far, and when it is over.

A step is all calls until a backward begins, be they of one forward or of several that share a backward. A call counts
while something can still run its backward: a forward that failed, or whose loss was thrown away, leaves nothing behind.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


class _Awaited:
    """Hangs on the autograd nodes of one call: called when the backward reaches them, gone when they are."""

    def __init__(self, calls: StepCalls) -> None:
        self._calls = calls

    def __call__(self, gradients: Any) -> None:
        self._calls.is_over = True


@dataclass
class _Call:
    number: int
    awaited: weakref.ref[_Awaited] | None = None

    @property
    def is_alive(self) -> bool:
        return self.awaited is not None and self.awaited() is not None


class StepCalls:
    """The calls of the step under way, by the numbers of their graphs."""

    def __init__(self) -> None:
        self.is_over = False
        self._calls: list[_Call] = []

    @property
    def numbers(self) -> tuple[int, ...]:
        """Calls whose backward is still to come."""
        if not self.is_over:
            self._calls = [call for call in self._calls if call.is_alive]
        return tuple(call.number for call in self._calls)

    def begin(self, number: int) -> Callable[[Any], None]:
        """A graph is about to run; what comes back is to be called with what it gave."""
        call = _Call(number)
        self._calls.append(call)

        def end(outputs: Any) -> None:
            awaited = _Awaited(self)
            nodes = {each.grad_fn for each in outputs if isinstance(each, Tensor)}
            for node in filter(None, nodes):
                node.register_prehook(awaited)
            call.awaited = weakref.ref(awaited)

        return end

    def take(self) -> tuple[int, ...]:
        """The calls of a step that is over, and a new one begins."""
        found = self.numbers
        self._calls, self.is_over = [], False
        return found
