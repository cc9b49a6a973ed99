"""Ops whose outputs a region can retain: those that autograd saves inside the region.

A region's forward runs under saved-tensor hooks alone, so an output can be retained only if all of it reaches a hook:
it is saved directly in the region, not in a region inside. Its replay then runs under a dispatch mode that returns
retained outputs in place of computing them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from lowtide.graph import StepGraph


class Retainable:
    """Finds such ops, and what retaining them costs. `graph.retainable` is the one to use.

    `depths[o]` is the depth of the innermost call around forward op `o` inside which everything that `o` makes is
    saved for the backward, -1 if there is none. What is saved inside a call is saved inside those around it too: calls
    around `o` that are no deeper can retain its outputs, unless a region inside them has the only saves.
    `substituted_s[o]` is what it costs a replay to return the output of `o` instead of computing it.
    """

    def __init__(self, graph: StepGraph) -> None:
        self._graph = graph
        computing_s = graph.arrays.host_s if graph.has_host_line else graph.arrays.seconds
        self.substituted_s = np.minimum(computing_s[: graph.num_forward], graph.hardware.spare_s)

    @cached_property
    def depths(self) -> np.ndarray:
        """For each forward op the depth of that call."""
        graph = self._graph
        saved_in: dict[int, set[int]] = {}  # by value, the calls around its saves
        for save in graph.saves:
            calls, call = saved_in.setdefault(save.value, set()), save.call
            while call >= 0 and call not in calls:
                calls.add(call)
                call = graph.calls[call].parent
        depths: list[int] = []
        for op in graph.ops[: graph.num_forward]:
            call = op.call if op.outputs else -1
            for value in op.outputs:
                while call >= 0 and graph.values[value].bytes and call not in saved_in.get(value, ()):
                    call = graph.calls[call].parent
            depths.append(graph.depths[call] if call >= 0 else -1)
        return np.array(depths, dtype=np.int64)

    def missing(self, regions: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
        """By region, those of the ops it is to retain of which not every output is saved directly in it."""
        graph, owner = self._graph, self._graph.innermost(regions)
        saved = {(owner[save.call], save.value) for save in graph.saves}
        found: dict[int, list[int]] = {}
        for call, kept in regions.items():
            for op in kept:
                outputs = graph.ops[graph.calls[call].first + op].outputs
                if not outputs or any(graph.values[v].bytes and (call, v) not in saved for v in outputs):
                    found.setdefault(call, []).append(op)
        return found

    def retaining_s(self, call: int, kept: Sequence[int], stop: int) -> float:
        """Seconds of dispatch that it costs a region to retain outputs of some ops, if its replay ends at `stop`."""
        if not kept:
            return 0.0
        first = self._graph.calls[call].first
        ops = [first + op for op in sorted(set(kept)) if first + op < stop]
        return self._graph.hardware.dispatch_s * max(0, stop - first) + float(self.substituted_s[ops].sum())
