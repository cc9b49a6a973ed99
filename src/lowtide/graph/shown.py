"""Ops whose outputs autograd saves inside a call, so that saved-tensor hooks around the call are shown them.

A region that holds only such outputs finds them among what autograd hands to its hooks, and nobody has to watch the ops
of its forward. Its replay is watched all the same: there the held outputs take the place of ops. The two need not cost
the same: the host is ahead of a device in the backward, and in the forward perhaps not.
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

    `replay_op_s` and `forward_op_s` are what it costs to watch an op, `spared_s[o]` what it costs to spare forward op
    `o` in a replay.
    """

    def __init__(self, graph: StepGraph) -> None:
        self._calls, self._call_depths = graph.calls, graph.depths
        self.replay_op_s = graph.hardware.dispatch_s
        self.forward_op_s = graph.hardware.dispatch_s * graph.hardware.forward_dispatch_factor
        self.spared_s = np.minimum(graph.arrays.seconds[: graph.num_forward], graph.hardware.spare_s)
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

    def watching_s(self, call: int, kept: Sequence[int], stop: int, *, has_inner: bool) -> float:
        """Seconds of watching ops for a region to hold outputs of some, in its forward and its replay up to `stop`.

        With those of holding them. Hooks see the forward instead where they are shown all that is held, unless other
        regions are inside.
        """
        if not kept:
            return 0.0
        first, end = self._calls[call].first, self._calls[call].end
        replay_s = self.replay_op_s * max(0, stop - first) + self.sparing_s(call, kept)
        is_watched = has_inner or not self.are_all(call, kept)
        return replay_s + self.forward_op_s * (end - first) if is_watched else replay_s

    def sparing_s(self, call: int, ops: Sequence[int]) -> float:
        """What it costs to spare some ops of a call, counted from its first."""
        return float(self.spared_s[self._calls[call].first + np.array(sorted(set(ops)), dtype=np.int64)].sum())
