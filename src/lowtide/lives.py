"""Values of a simulated step while they are on the device, and the running totals of their bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import nlargest

import numpy as np

from lowtide.graph import StepGraph, Value


def largest(sizes: dict[int, int], most: int) -> dict[int, int]:
    """Of bytes by value, the `most` largest."""
    return dict(nlargest(most, sizes.items(), key=lambda item: item[1]))


class Life:
    """A value on the device, from an op that made it: held by Python, and by saves and regions."""

    __slots__ = ("bytes", "holds", "is_gradient", "python", "value")

    def __init__(self, value: int, size: int, is_gradient: bool) -> None:
        self.value, self.bytes, self.is_gradient = value, size, is_gradient
        self.python, self.holds = True, 0

    @property
    def is_over(self) -> bool:
        return not self.python and not self.holds


class Ledger:
    """Bytes of what lives: `kept` by saves and regions, `transient` where only Python holds it, and `gradients`."""

    def __init__(self) -> None:
        self.kept = self.transient = self.gradients = 0
        self._born: list[Life] = []

    def bear(self, index: int, value: Value) -> Life:
        """A value was made, and Python holds it."""
        life = Life(index, value.bytes, value.kind == "gradient")
        self._born.append(life)
        if life.is_gradient:
            self.gradients += life.bytes
        else:
            self.transient += life.bytes
        return life

    def alive(self) -> list[Life]:
        """What lives now, in the order of birth."""
        self._born = [life for life in self._born if not life.is_over]  # the dead are passed over once
        return self._born

    def encode(self, index: int, size: int) -> Life:
        """A codec wrote a value in fewer bytes, which Python holds until a save does."""
        life = Life(index, size, is_gradient=False)
        self._born.append(life)
        self.transient += size
        return life

    def hold(self, life: Life) -> None:
        if not life.holds and not life.is_gradient:
            self.transient -= life.bytes
            self.kept += life.bytes
        life.holds += 1

    def unhold(self, life: Life) -> None:
        life.holds -= 1
        if not life.holds:
            if not life.is_gradient:
                self.kept -= life.bytes
                self.transient += life.bytes
            if not life.python:
                self._free(life)

    def drop(self, life: Life) -> None:
        """Python lets go, if it has not yet."""
        if life.python:
            life.python = False
            if not life.holds:
                self._free(life)

    def _free(self, life: Life) -> None:
        if life.is_gradient:
            self.gradients -= life.bytes
        else:
            self.transient -= life.bytes


def ends_before(
    lives: np.ndarray, ends: np.ndarray, floor: np.ndarray, num_ticks: int
) -> tuple[np.ndarray, np.ndarray]:
    """For holds sorted by life and start: when the life's holds before it end, `floor` at least; and if it is first."""
    is_first = np.concatenate([[True], lives[1:] != lives[:-1]]) if len(lives) else np.zeros(0, dtype=bool)
    unit = num_ticks + 1
    latest = np.maximum.accumulate(lives * unit + np.maximum(ends, floor[lives])) - lives * unit
    return np.where(is_first, floor[lives], np.concatenate([[0], latest[:-1]])[: len(lives)]), is_first


class PassingStates:
    """Random states that regions hold while they run and let go of then, as nothing was drawn: bytes at each op.

    The replay of a region that retains outputs holds them too: under its dispatch mode other kernels may draw.
    """

    def __init__(self, graph: StepGraph, regions: Mapping[int, Sequence[int]]) -> None:
        sizes = graph.arrays.passing_bytes
        self.forward = np.zeros(graph.arrays.num_ops + 1, dtype=np.int64)  # at the end, of the optimizer's step
        self.not_replayed: dict[int, int] = {}  # by region: what is around it, and so not held in its replay
        for region, kept in sorted(regions.items()):
            around = sum(int(sizes[call]) for call in graph.around(graph.calls[region].parent) if call in regions)
            self.not_replayed[region] = around + (0 if kept else int(sizes[region]))
            self.forward[graph.calls[region].first : graph.calls[region].end] += sizes[region]

    def at_ticks(self, ops: np.ndarray, runs: np.ndarray, ticks: np.ndarray, regions: np.ndarray) -> np.ndarray:
        """Bytes at each tick: of those that `runs` the forward, some are `ticks` of replays of `regions`."""
        found = self.forward[np.maximum(ops, -1)] * runs
        found[ticks] -= np.array([self.not_replayed[region] for region in regions.tolist()], dtype=np.int64)
        return found
