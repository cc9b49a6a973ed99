"""The two time lines of a step: the host issues ops, the device runs them later.

The device starts an op when it was issued and when it is free. Steps follow one another: while the device is busy with
the last ops of one, the host issues the first of the next. So a step takes as long as the line that works longer,
unless an op synchronises (flag `sync`) and makes the host wait for the device. What the engine does for a region runs
on the host: half of its fee in the forward, the rest in the replay.

A graph whose ops have no host seconds has one line: that of the CPU, or of a file from before there were two. There,
what the engine does is added to the step as it is.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from lowtide.graph.step_graph import StepGraph

LINES = ("host", "device")
_HOST_FEES = ("region_s", "save_s", "dispatch_s", "spare_s", "move_s")


@dataclass(frozen=True)
class StepLines:
    """Seconds that each line works in a step, and that the step takes."""

    host_s: float
    device_s: float
    step_s: float

    @property
    def limit(self) -> str:
        """The line that works longer."""
        return "host" if self.host_s > self.device_s else "device"

    def of(self, line: str) -> float:
        return self.host_s if line == "host" else self.device_s


def play_lines(host_s: np.ndarray, device_s: np.ndarray, is_sync: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """When the host has issued each of a row of events, and when the device starts it, from the seconds of both.

    Between two events that synchronise, event `j` starts at `before[j] + max(issued[k] - before[k] for k <= j)`, with
    `before` the device seconds of all events before it: the last event for which the device was idle sets the clock.
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
            host = max(float(issued[-1]), device)  # it has waited
        first = end
    return issues, starts


def device_starts(host_s: np.ndarray, device_s: np.ndarray, is_sync: np.ndarray) -> np.ndarray:
    """When the device starts each of a row of events."""
    return play_lines(host_s, device_s, is_sync)[1]


def step_seconds(host_s: np.ndarray, device_s: np.ndarray, is_sync: np.ndarray) -> float:
    """Seconds of a step of these events that is run again and again.

    At an op that synchronises both lines are at one point of time, so the row is played from there on around to it.
    """
    syncs = np.flatnonzero(is_sync)
    if not len(syncs):
        return max(float(host_s.sum()), float(device_s.sum()))
    host, device, waits = (np.roll(each, -1 - syncs[-1]) for each in (host_s, device_s, is_sync))
    issued, starts = play_lines(host, device, waits)
    return max(float(issued[-1]), float(starts[-1] + device[-1]))


def plain_lines(graph: StepGraph) -> StepLines:
    """Both lines of the step without a plan."""
    arrays = graph.arrays
    if not graph.has_host_line:
        total_s = float(np.cumsum(arrays.seconds)[-1])
        return StepLines(0.0, total_s, total_s)
    return StepLines(float(arrays.host_s.sum()), float(arrays.seconds.sum()), arrays.step_s)


class EngineHostCosts:
    """What the eager engine does on the host for the regions of a plan, in seconds: `total_s`, and when.

    `kept` are the regions' retained ops; `stops` says where replays end, for each region with saves; `num_saves` how
    many of these each region has itself. Half of a region's fee falls due in its forward, the rest in its replay; all
    of it in the forward, if it is not among those `replayed`.
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
            call: graph.retainable.retaining_s(call, kept[call], stops.get(call, 0)) for call in sorted(kept)
        }
        self.total_s = sum(retaining_s.values())
        self.total_s += int(num_modules[sorted(stops)].sum()) * hardware.region_s
        self.total_s += sum(num_saves.values()) * hardware.save_s
        self.forward_s, self.replay_s = dict[int, float](), dict[int, float]()
        for call in stops if graph.has_host_line else ():
            half_s = (int(num_modules[call]) * hardware.region_s + num_saves.get(call, 0) * hardware.save_s) / 2
            later_s = half_s + retaining_s[call]
            self.replay_s[call] = later_s if call in replayed else 0.0
            self.forward_s[call] = half_s if call in replayed else half_s + later_s


def line_of(graph: StepGraph, host_share: float) -> StepGraph:
    """The graph with one line in place of two: seconds are those of the host, of the device, or a mean of both.

    What a plan adds to this graph is a sum over its ops and regions, which solvers need; and as a step takes no less
    than either line works, it takes no less than their mean. Times of day (`arrays.clock`) stay those of the whole
    step, for copies run beside both lines.
    """
    host, device = host_share, 1 - host_share
    ops = tuple(replace(op, seconds=host * op.host_s + device * op.seconds, host_s=0.0) for op in graph.ops)
    fees = {name: host * getattr(graph.hardware, name) for name in _HOST_FEES}
    found = replace(graph, ops=ops, hardware=replace(graph.hardware, **fees))
    found.arrays.clock = graph.arrays.clock
    found.retainable.substituted_s = host * graph.retainable.substituted_s
    return found
