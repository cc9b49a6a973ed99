"""Ops whose outputs autograd saves inside a call, so that saved-tensor hooks around the call are shown them.

A region that holds only such outputs finds them among what autograd hands to its hooks, and nobody has to watch the ops
of its forward. Its replay is watched all the same: there the held outputs take the place of ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from lowtide.graph import StepGraph


class Shown:
    """Finds such ops. `graph.shown` is the one to use.

    `depths[o]` is the depth of the innermost call around forward op `o` inside which all that `o` makes is saved for
    the backward, -1 if there is none. What is saved inside a call is saved inside those around it too.
    """

    def __init__(self, graph: StepGraph) -> None:
        self._calls, self._call_depths = graph.calls, graph.depths
        saved_in: dict[int, set[int]] = {}  # by value, the calls around its saves
        for save in graph.saves:
            calls, call = saved_in.setdefault(save.value, set()), save.call
            while call >= 0 and call not in calls:
                calls.add(call)
                call = graph.calls[call].parent
        self._shown_depths: list[int] = []
        for op in graph.ops[: graph.num_forward]:
            call = op.call
            for value in op.outputs:
                while call >= 0 and graph.values[value].bytes and call not in saved_in.get(value, ()):
                    call = graph.calls[call].parent
            self._shown_depths.append(graph.depths[call] if call >= 0 else -1)
        self.depths = np.array(self._shown_depths, dtype=np.int64)

    def are_all(self, call: int, kept: Sequence[int]) -> bool:
        """Whether all of some ops of a call, counted from its first, are shown there."""
        depth, first = self._call_depths[call], self._calls[call].first
        return all(self._shown_depths[first + op] >= depth for op in kept)

    def num_watched(self, call: int, kept: Sequence[int], stop: int, *, has_inner: bool) -> int:
        """How many ops are watched for a region to hold outputs of ops, in its forward and its replay up to `stop`.

        Hooks see the forward instead where they are shown all that is held, unless other regions are inside.
        """
        if not kept:
            return 0
        first, end = self._calls[call].first, self._calls[call].end
        is_watched = has_inner or not self.are_all(call, kept)
        return max(0, stop - first) + (end - first if is_watched else 0)
