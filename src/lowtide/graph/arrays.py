"""A graph's facts as arrays, so that playing a plan needs no loop over ops. `graph.arrays` is the one to use."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lowtide.graph.lines import device_starts, step_seconds

if TYPE_CHECKING:
    from lowtide.graph import StepGraph


# Regions copy buffers up to this size before each forward, larger ones only if the forward writes them.
_ALWAYS_COPIED_BYTES = 256 * 1024


class StepArrays:
    """Ops, the values that they make, saves and calls of a graph.

    Values that the step makes stand in the order of their ops: `places[v]` is where value `v` stands (-1: it is there
    before the step), and the outputs of op `o` stand at `starts[o]` up to `starts[o + 1]`. Sizes are exact in floats:
    they are integers far below 2**53. `seconds`, `host_s`, `is_sync` and `workspaces` have an entry for the optimizer's
    step at their end. `clock[p]` is when the device comes to position `p` of a plain step by itself.
    `step_s` is that of one plain step after another.
    For each call that is a region, `frame_bytes` are those of the state that it captures in its forward, random states
    if it draws from them, copies of buffers and choices ("index"), and `replay_bytes` those of the state that its
    replay puts back when it is over; `passing_bytes` are of random states that it lets go of at the end of its forward,
    as nothing was drawn; `num_modules` are the calls that it patches: one, but for segments.
    """

    def __init__(self, graph: StepGraph) -> None:
        self.num_forward, self.num_ops = graph.num_forward, len(graph.ops)
        self.seconds = np.array([*(op.seconds for op in graph.ops), 0.0])
        self.host_s = np.array([*(op.host_s for op in graph.ops), 0.0])
        self.is_sync = np.array([*("sync" in op.flags for op in graph.ops), False])
        self.clock = np.concatenate([[0.0], np.cumsum(self.seconds[:-1])])
        self.has_host_line = bool(self.host_s.any())
        if self.has_host_line:
            self.clock = device_starts(self.host_s, self.seconds, self.is_sync)
        self.step_s = step_seconds(self.host_s, self.seconds, self.is_sync)
        self.workspaces = _ints([*(op.workspace_bytes for op in graph.ops), graph.optimizer_workspace_bytes])
        made = [value for op in graph.ops for value in op.outputs]
        self.starts = _starts([len(op.outputs) for op in graph.ops])
        self.maker = np.repeat(np.arange(self.num_ops), np.diff(self.starts))
        self.places = np.full(len(graph.values), -1, dtype=np.int64)
        self.places[made] = np.arange(len(made))
        values = [graph.values[value] for value in made]
        self.value = _ints(made)
        self.sizes = np.array([value.bytes for value in values], dtype=np.float64)
        self.is_gradient = np.array([value.kind == "gradient" for value in values], dtype=bool)
        self.dropped = _ints(value.dropped for value in values)
        self.save_place = self.places[_ints(save.value for save in graph.saves)]
        self.save_call = _ints(save.call for save in graph.saves)
        self.save_made = _ints(save.made for save in graph.saves)
        self.save_read = _ints(save.read for save in graph.saves)
        self.save_released = _ints(save.released for save in graph.saves)
        self.save_used = _ints(save.used for save in graph.saves)
        self.set_calls(graph)
        self.frame_bytes, self.replay_bytes, self.passing_bytes = _state_bytes(graph)
        self.num_modules = np.ones(len(graph.calls), dtype=np.int64)
        there = [value for value in graph.values if value.born < 0 and value.kind != "elsewhere"]
        self.static_gradient_bytes = sum(value.bytes for value in there if value.kind == "gradient")
        self.static_bytes = sum(value.bytes for value in there) - self.static_gradient_bytes
        self.static_bytes += graph.optimizer_state_bytes + graph.other_bytes

    def set_calls(self, graph: StepGraph) -> None:
        """Where calls lie in the forward and in each other, and their inputs."""
        self.first = _ints(call.first for call in graph.calls)
        self.parent = _ints(call.parent for call in graph.calls)
        self.after = self._after(graph)
        self.input_starts = _starts([len(call.inputs) for call in graph.calls])
        self.inputs = self.places[_ints(value for call in graph.calls for value in call.inputs)]

    def _after(self, graph: StepGraph) -> list[int]:
        """For each call, the number of the first call behind it that is not inside it."""
        after = list(range(1, len(graph.calls) + 1))
        for index in range(len(graph.calls) - 1, -1, -1):
            parent = graph.calls[index].parent
            if parent >= 0:
                after[parent] = max(after[parent], after[index])
        return after

    def captured_bytes(self, calls: Iterable[int], region: int) -> int:
        """Bytes of state that regions capture: those of `calls` that are inside of `region`, or all if that is -1."""
        inside = range(region + 1, self.after[region] if region >= 0 else len(self.after))
        return sum(int(self.frame_bytes[call]) for call in calls if call in inside)

    def has_inside(self, call: int, calls: Container[int]) -> bool:
        """Whether any of `calls` is inside a call."""
        return any(inner in calls for inner in range(call + 1, self.after[call]))


def plain_peak_bytes(graph: StepGraph) -> int:
    """Return the peak of a step without a plan: equal to `simulate(graph).peak_bytes`, without the simulator.

    Each value lives from its op until Python has dropped it and the last save has released it.
    """
    facts = graph.arrays
    after_step = facts.num_ops + 1
    ends = np.where(facts.dropped < facts.num_ops, facts.dropped, after_step)
    for save in sorted(graph.saves, key=lambda save: save.made):
        value = facts.places[save.value]
        # A save of a value that was freed before it, or is made after it, holds nothing.
        if value >= 0 and facts.maker[value] < save.made <= ends[value]:
            ends[value] = max(ends[value], save.released)
    changes = np.bincount(facts.maker, weights=facts.sizes, minlength=after_step + 1)
    changes -= np.bincount(ends, weights=facts.sizes, minlength=after_step + 1)
    live = np.cumsum(changes[:after_step]).astype(np.int64) + facts.workspaces
    return int(live.max()) + facts.static_bytes + facts.static_gradient_bytes


def _ints(items: Iterable[int]) -> np.ndarray:
    return np.array(list(items), dtype=np.int64)


def _starts(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def _state_bytes(graph: StepGraph) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each call, the bytes of state that it captures as a region, that its replay puts back, and that pass."""
    is_buffer = [value.kind == "buffer" for value in graph.values]
    buffers = [index for index in range(len(graph.values)) if is_buffer[index]]
    draws = np.zeros(len(graph.calls), dtype=bool)
    for op in graph.ops[: graph.num_forward]:
        if "random" in op.flags:
            draws[list(graph.around(op.call))] = True
    captured, changed = (graph.hardware.region_bytes * draws.astype(np.int64) for _ in range(2))
    passing = graph.hardware.region_bytes - captured
    for op in graph.ops[: graph.num_forward]:
        if "index" in op.flags:
            chosen = op.outputs[1:] or op.outputs  # (values, indices), or indices alone
            for around in graph.around(op.call):
                captured[around] += sum(graph.values[value].bytes for value in chosen)
    if not buffers:
        return captured, changed, passing
    read: list[set[int]] = [set() for _ in graph.calls]
    written: list[set[int]] = [set() for _ in graph.calls]
    for op in graph.ops[: graph.num_forward]:
        if op.call >= 0:
            read[op.call].update(value for value in op.inputs if is_buffer[value])
            written[op.call].update(value for value in op.mutates if is_buffer[value])
    for index in range(len(graph.calls) - 1, -1, -1):
        call = graph.calls[index]
        own = {value for value in buffers if not call.path or graph.values[value].name.startswith(f"{call.path}.")}
        small = {value for value in own | read[index] if graph.values[value].bytes <= _ALWAYS_COPIED_BYTES}
        captured[index] += sum(graph.values[value].bytes for value in small | written[index])
        changed[index] += sum(graph.values[value].bytes for value in written[index])
        if call.parent >= 0:
            read[call.parent] |= read[index]
            written[call.parent] |= written[index]
    return captured, changed, passing
