"""The two time lines of a step: the host issues ops, the device runs them later. Used by simulator, solvers and trace.

The device starts an op once it was issued and the device is free. In a training loop the host issues the first ops of
a step while the device still runs the last ops of the previous one. A step therefore takes as long as the line with
more work, and longer only if an op synchronises (flag "sync"), which makes the host wait for the device.

`play_lines` computes when each op is issued and started, `step_seconds` the time of one step among many.
`EngineHostCosts` is the engine's own work for regions, on the host: half in the forward, half in the replay. `line_of`
gives a graph with a single line, for solvers that need costs which add up.

Graphs without host seconds (from a CPU) have one line, to which the engine's work is added.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from lowtide.graph.step_graph import StepGraph

LINES = ("host", "device")
# Data loaders, other processes and Python's garbage collector slow a host down, by 1.2 to 1.5 times between two moments
# on the H200 of bench/results/eager-cuda.md. Plans are compared for a host that is slower by this factor half of the
# time: too little, and plans are kept that a busy host slows down; too much, and they recompute more than they need to.
_BUSY_HOST, _BUSY_SHARE = 1.25, 0.5
_HOST_FEES = ("region_s", "save_s", "dispatch_s", "spare_s", "move_s")


@dataclass(frozen=True)
class StepLines:
    """Seconds of work on each line of a step, and of the step itself."""

    host_s: float
    device_s: float
    step_s: float

    @property
    def limit(self) -> str:
        """The line with more work: "host" or "device"."""
        return "host" if self.host_s > self.device_s else "device"

    def of(self, line: str) -> float:
        return self.host_s if line == "host" else self.device_s

    def within(self, seconds: float) -> StepLines:
        """The lines of a step that was measured to take `seconds`: neither has more work than that."""
        return StepLines(min(self.host_s, seconds), min(self.device_s, seconds), seconds)

    @property
    def busy_host_s(self) -> float:
        """Seconds that a host which is busy now and then adds to the step, on average.

        Nothing as long as it stays ahead of the device: plans that leave it little to spare are slowed down first.
        """
        busy_s = max(_BUSY_HOST * self.host_s, self.device_s)
        return _BUSY_SHARE * (busy_s - max(self.host_s, self.device_s))


def play_lines(host_s: np.ndarray, device_s: np.ndarray, is_sync: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return when the host has issued each event and when the device starts it, from the times of both.

    Between two synchronising events, event `j` starts at `before[j] + max(issued[k] - before[k] for k <= j)`, where
    `before` is the device time of all events before it: the maximum is at the last event that the device waited for.
    """
    issues, starts = np.zeros(len(host_s)), np.zeros(len(host_s))
    host = device = 0.0
    first = 0
    for end in [*(np.flatnonzero(is_sync[:-1]) + 1).tolist(), len(host_s)]:
        issued, done = host + np.cumsum(host_s[first:end]), np.cumsum(device_s[first:end])
        before = done - device_s[first:end]
        issues[first:end] = issued
        starts[first:end] = before + np.maximum(np.maximum.accumulate(issued - before), device)
        if end > first:
            device = float(starts[end - 1] + device_s[end - 1])
            host = max(float(issued[-1]), device)  # the host waits for the device
        first = end
    return issues, starts


def device_starts(host_s: np.ndarray, device_s: np.ndarray, is_sync: np.ndarray) -> np.ndarray:
    """Return when the device starts each event."""
    return play_lines(host_s, device_s, is_sync)[1]


def step_seconds(host_s: np.ndarray, device_s: np.ndarray, is_sync: np.ndarray) -> float:
    """Return the time of a step of these events that is repeated many times.

    Both lines meet at an op that synchronises, so the events are played once around, starting after the last such op.
    """
    syncs = np.flatnonzero(is_sync)
    if not len(syncs):
        return max(float(host_s.sum()), float(device_s.sum()))
    host, device, waits = (np.roll(each, -1 - syncs[-1]) for each in (host_s, device_s, is_sync))
    issued, starts = play_lines(host, device, waits)
    return max(float(issued[-1]), float(starts[-1] + device[-1]))


def plain_lines(graph: StepGraph) -> StepLines:
    """Return both lines of the step without a plan."""
    arrays = graph.arrays
    if not graph.has_host_line:
        total_s = float(np.cumsum(arrays.seconds)[-1])
        return StepLines(0.0, total_s, total_s)
    return StepLines(float(arrays.host_s.sum()), float(arrays.seconds.sum()), arrays.step_s)


class EngineHostCosts:
    """Host seconds of the eager engine for the regions of a plan: `total_s`, and per region in forward and replay.

    `kept` are the regions' retained ops, `stops` where the replay of each region with saves ends, and `num_saves` the
    number of saves directly in each region. Half of a region's cost is in its forward, the rest in its replay; all of
    it is in the forward if the region is not among those `replayed`. The replay of a region around it runs its forward
    once more, if it does not end before.
    """

    def __init__(
        self,
        graph: StepGraph,
        kept: Mapping[int, Sequence[int]],
        stops: Mapping[int, int],
        num_saves: Mapping[int, int],
        replayed: Container[int],
    ) -> None:
        hardware, num_modules = graph.hardware, graph.arrays.num_modules
        retaining_s = {
            call: graph.retainable.retaining_s(call, kept[call], stops.get(call, 0))
            for call in sorted(kept)
            if kept[call]
        }
        self.total_s = sum(retaining_s.values(), 0.0)
        self.total_s += int(num_modules[sorted(stops)].sum()) * hardware.region_s
        self.total_s += sum(num_saves.values()) * hardware.save_s
        self.forward_s, self.replay_s = dict[int, float](), dict[int, float]()
        again_s: dict[int, float] = {}  # for the regions inside of each, in its replay
        for call in stops:
            half_s = (int(num_modules[call]) * hardware.region_s + num_saves.get(call, 0) * hardware.save_s) / 2
            around = graph.calls[call].parent
            while around >= 0:
                if around in replayed and graph.calls[call].first < stops.get(around, 0):
                    again_s[around] = again_s.get(around, 0.0) + half_s
                around = graph.calls[around].parent
            if graph.has_host_line:
                later_s = half_s + retaining_s.get(call, 0.0)
                self.replay_s[call] = later_s if call in replayed else 0.0
                self.forward_s[call] = half_s if call in replayed else half_s + later_s
        self.total_s += sum(again_s.values(), 0.0)
        for call, seconds in again_s.items() if graph.has_host_line else ():
            self.replay_s[call] += seconds


def line_of(graph: StepGraph, host_share: float) -> StepGraph:
    """Return the graph with one line instead of two: `host_share` of the host's seconds plus the rest of the device's.

    What a plan adds to such a graph is a sum over its ops and regions, which solvers need. A step takes at least as
    long as either line, hence at least as long as their weighted mean. Start times (`arrays.clock`) remain those of the
    whole step, since copies run beside both lines.
    """
    host, device = host_share, 1 - host_share
    ops = tuple(replace(op, seconds=host * op.host_s + device * op.seconds, host_s=0.0) for op in graph.ops)
    fees = {name: host * getattr(graph.hardware, name) for name in _HOST_FEES}
    line = replace(graph, ops=ops, hardware=replace(graph.hardware, **fees))
    line.arrays.clock = graph.arrays.clock
    line.retainable.substituted_s = host * graph.retainable.substituted_s
    return line
