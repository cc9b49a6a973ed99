"""Tables derived from a `StepGraph`, so that the simulator and the solvers need no Python loop over its ops.

Each is computed once per graph and reached through it:

- `graph.arrays` (`StepArrays`): ops, values, saves and calls as numpy arrays, for eager plans.
- `graph.retainable` (`Retainable`): which op outputs a region can retain.
- `graph.needs` (`BackwardNeeds`): what the backward reads and what can be recomputed for it, for compiled plans.
- `inlined`: values of a compiled step that are never written to memory. A compiler fuses pointwise ops and reductions,
  and values between them stay in registers. Only ops with the flag "fused" count, which eager graphs do not have.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from lowtide.graph.step_graph import Op, Value
from lowtide.graph.time_lines import device_starts, step_seconds

if TYPE_CHECKING:
    from lowtide.graph.step_graph import StepGraph

# Regions copy buffers up to this size before each forward, larger ones only if a forward was seen to write them
# (`replay.module_state`).
ALWAYS_COPIED_BYTES = 256 * 1024


class StepArrays:
    """Ops, values, saves and calls of a graph as arrays.

    - Values that the step makes are sorted by their op. `made_index[v]` is the index of value `v` in that order (-1:
      it existed before the step); `value` is the inverse. The outputs of op `o` are `starts[o]` to `starts[o + 1] - 1`.
      `sizes` are floats, which hold integers below 2**53 exactly.
    - `save_index` is that index for the value of each save; the other `save_...` are the fields of `Save`.
    - `seconds`, `host_s`, `is_sync` and `workspaces` are per op, with a last entry for the optimizer's step.
    - `clock[p]` is the time at which the device reaches position `p` of a plain step. `step_s` is the time of one plain
      step among many.
    - Per call, if it is a region: `frame_bytes` of state that its forward captures (copies of buffers, kept outputs of
      ops); `replay_bytes` of state that its replay restores at its end, and of parameters that FSDP gathers in it and
      does not free; `num_modules`, the number of calls that it consists of: 1, or more for a segment.
    - For simulations, which number the ticks of a step (`simulator.eager_intervals`): a **tick row** is an index into
      the table of ticks, which has the positions of the forward, those of the backward before the replays there, the
      same after them, and the end of the step. `birth_rows` and `drop_rows` are of values; `release_rows` and
      `last_use_rows` of saves, the latter if a region drops the save. They are the same for all plans.
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
        self.made_index = np.full(len(graph.values), -1, dtype=np.int64)
        self.made_index[made] = np.arange(len(made))
        values = [graph.values[value] for value in made]
        self.value = _ints(made)
        self.sizes = np.array([value.bytes for value in values], dtype=np.float64)
        self.is_gradient = np.array([value.kind == "gradient" for value in values], dtype=bool)
        self.dropped = _ints(value.dropped for value in values)
        self.save_index = self.made_index[_ints(save.value for save in graph.saves)]
        self.save_call = _ints(save.call for save in graph.saves)
        self.save_made = _ints(save.made for save in graph.saves)
        self.save_read = _ints(save.read for save in graph.saves)
        self.save_released = _ints(save.released for save in graph.saves)
        self.save_used = _ints(save.used for save in graph.saves)
        self.is_lost = np.array([save.is_lost_at(graph.num_forward) for save in graph.saves], dtype=bool)
        # A replay that runs a branch which the loss does not use holds what that saves until the replay is over.
        self.dropped_in_replay = self.dropped.copy()
        self.dropped_in_replay[self.save_index[self.is_lost & (self.save_index >= 0)]] = graph.num_forward
        self.set_calls(graph)
        self.frame_bytes, self.replay_bytes = _state_bytes(graph)
        self.num_modules = np.ones(len(graph.calls), dtype=np.int64)
        existing = [value for value in graph.values if value.born < 0 and value.kind != "elsewhere"]
        self.static_gradient_bytes = sum(value.bytes for value in existing if value.kind == "gradient")
        self.static_bytes = sum(value.bytes for value in existing) - self.static_gradient_bytes
        self.static_bytes += graph.optimizer_state_bytes + graph.other_bytes
        self._set_tick_rows()

    def _set_tick_rows(self) -> None:
        forward = self.num_forward
        self.forward_ticks = np.arange(forward + 1)
        self.backward_positions = np.arange(forward, self.num_ops + 1)
        self.backward_ticks = forward + 1 + 2 * (self.backward_positions - forward)  # before the replays, if none ran
        end = forward + 1 + 2 * len(self.backward_positions)
        before = forward + 1 + np.maximum(self.dropped - forward, 0)
        self.drop_rows = np.where(self.dropped <= forward, self.dropped, before)
        self.drop_rows[self.dropped >= self.num_ops] = end
        self.birth_rows = np.where(self.maker < forward, self.maker, self.backward_rows(self.maker, True))
        self.release_rows = self.backward_rows(self.save_released, self.save_read >= self.save_released)
        used = np.where(self.save_used >= 0, self.save_used, self.save_released)
        self.last_use_rows = self.backward_rows(used, self.save_read >= used)
        self.is_save_of_made = self.save_index >= 0

    def backward_rows(self, positions: np.ndarray, is_after: np.ndarray | bool) -> np.ndarray:
        """Return the tick rows of positions of the backward: after the replays there if `is_after`, else before."""
        rows = np.maximum(positions, self.num_forward) + 1
        return rows + len(self.backward_positions) * is_after

    @cached_property
    def has_state(self) -> bool:
        """Whether any call captures state as a region."""
        return bool(self.frame_bytes.any() or self.replay_bytes.any())

    def set_calls(self, graph: StepGraph) -> None:
        """Set the arrays of calls: their first ops, their nesting and their inputs."""
        self.first = _ints(call.first for call in graph.calls)
        self.parent = _ints(call.parent for call in graph.calls)
        self.after = self._after(graph)
        self.input_starts = _starts([len(call.inputs) for call in graph.calls])
        self.inputs = self.made_index[_ints(value for call in graph.calls for value in call.inputs)]

    def _after(self, graph: StepGraph) -> list[int]:
        """Return for each call the index of the first later call that is not inside it."""
        after = list(range(1, len(graph.calls) + 1))
        for index in range(len(graph.calls) - 1, -1, -1):
            parent = graph.calls[index].parent
            if parent >= 0:
                after[parent] = max(after[parent], after[index])
        return after

    def captured_bytes(self, calls: Iterable[int], region: int) -> int:
        """Return the bytes of state that the regions in `calls` capture; only of those inside `region`, unless -1."""
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
        value = facts.made_index[save.value]
        # A save of a value that was already freed, or is made later, holds nothing.
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


def _state_bytes(graph: StepGraph) -> tuple[np.ndarray, np.ndarray]:
    """Return `frame_bytes` and `replay_bytes` of each call, see `StepArrays`."""
    is_buffer = [value.kind == "buffer" for value in graph.values]
    buffers = [index for index in range(len(graph.values)) if is_buffer[index]]
    captured, changed = (np.zeros(len(graph.calls), dtype=np.int64) for _ in range(2))
    last_save = np.zeros(len(graph.calls), dtype=np.int64)
    for save in graph.saves:
        for around in graph.ancestors(save.call):
            last_save[around] = max(last_save[around], save.made)
    for index, op in enumerate(graph.ops[: graph.num_forward]):
        if kept := op.kept_outputs:
            for around in graph.ancestors(op.call):
                # A replay ends at the last saved tensor: collectives after it are not kept.
                if "index" in op.flags or index < last_save[around]:
                    captured[around] += sum(graph.values[value].bytes for value in kept)
    if graph.gathered:
        for index, call in enumerate(graph.calls):
            # FSDP frees them one after the other in the forward. In a replay it keeps all of them.
            sizes = [value.bytes for value in graph.gathered if call.first <= value.born < call.end]
            changed[index] += sum(sizes) - max(sizes, default=0)
    if not buffers:
        return captured, changed
    read: list[set[int]] = [set() for _ in graph.calls]
    written: list[set[int]] = [set() for _ in graph.calls]
    for op in graph.ops[: graph.num_forward]:
        if op.call >= 0:
            read[op.call].update(value for value in op.inputs if is_buffer[value])
            written[op.call].update(value for value in op.mutates if is_buffer[value])
    for index in range(len(graph.calls) - 1, -1, -1):
        call = graph.calls[index]
        own = {value for value in buffers if not call.path or graph.values[value].name.startswith(f"{call.path}.")}
        small = {value for value in own | read[index] if graph.values[value].bytes <= ALWAYS_COPIED_BYTES}
        captured[index] += sum(graph.values[value].bytes for value in small | written[index])
        changed[index] += sum(graph.values[value].bytes for value in written[index])
        if call.parent >= 0:
            read[call.parent] |= read[index]
            written[call.parent] |= written[index]
    return captured, changed


class Retainable:
    """Which op outputs a region can retain, and what retaining them costs. Use `graph.retainable`.

    A region's forward runs under saved-tensor hooks only, so an output can be retained if it is saved directly in the
    region, and not in a region inside it. The replay runs under a dispatch mode that returns retained outputs.

    `depths[o]` is the depth of the innermost call around forward op `o` inside which all outputs of `o` are saved for
    the backward, or -1. Calls around `o` of at most this depth can retain its outputs, unless all saves are in a region
    inside the call. `substituted_s[o]` is the time for a replay to return the output of `o` instead of computing it.

    Calls in which FSDP gathers parameters retain nothing: a replay finds some of them gathered already and runs fewer
    ops than the forward, and retained outputs are identified by counting ops.
    """

    def __init__(self, graph: StepGraph) -> None:
        self._graph = graph
        self._at_depth: dict[int, np.ndarray] = {}
        computing_s = graph.arrays.host_s if graph.has_host_line else graph.arrays.seconds
        self.substituted_s = np.minimum(computing_s[: graph.num_forward], graph.hardware.spare_s)

    @cached_property
    def depths(self) -> np.ndarray:
        """For each forward op the depth of the innermost call that can retain its outputs."""
        graph = self._graph
        saved_in: dict[int, set[int]] = {}  # by value, the calls around its saves
        for save in graph.saves:
            saved_in.setdefault(save.value, set()).update(graph.ancestors(save.call))
        depths: list[int] = []
        for op in graph.ops[: graph.num_forward]:
            call = op.call if op.outputs else -1
            for value in op.outputs:
                while call >= 0 and graph.values[value].bytes and call not in saved_in.get(value, ()):
                    call = graph.calls[call].parent
            depths.append(graph.depths[call] if call >= 0 else -1)
        return np.array(depths, dtype=np.int64)

    def at_depth(self, depth: int) -> np.ndarray:
        """For each forward op, whether a call around it at this depth of the call tree can retain its outputs."""
        if depth not in self._at_depth:
            self._at_depth[depth] = found = self.depths >= depth
            for index, call in enumerate(self._graph.calls):
                if self._graph.depths[index] == depth and self._graph.gathers_inside(index):
                    found[call.first : call.end] = False
        return self._at_depth[depth]

    def missing(self, regions: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
        """For each region, the ops among those to retain that have an output which is not saved directly in it."""
        graph, owner = self._graph, self._graph.innermost(regions)
        saved = {(owner[save.call], save.value) for save in graph.saves}
        missing: dict[int, list[int]] = {}
        for call, kept in regions.items():
            for op in kept:
                outputs = graph.ops[graph.calls[call].first + op].outputs
                is_missing = any(graph.values[v].bytes and (call, v) not in saved for v in outputs)
                if is_missing or not outputs or graph.gathers_inside(call):
                    missing.setdefault(call, []).append(op)
        return missing

    def retaining_s(self, call: int, kept: Sequence[int], stop: int) -> float:
        """Return the host seconds of the dispatch mode of a region that retains ops `kept` and replays up to `stop`."""
        if not kept:
            return 0.0
        first = self._graph.calls[call].first
        ops = [first + op for op in sorted(set(kept)) if first + op < stop]
        return self._graph.hardware.dispatch_s * max(0, stop - first) + float(self.substituted_s[ops].sum())


def inlined(ops: Sequence[Op], values: Sequence[Value], num_forward: int) -> tuple[list[bool], list[bool]]:
    """Return for each value whether it needs no memory where it is made, and whether it needs none if recomputed.

    It needs none where it is made if every reader in the same direction (forward or backward) is in the same run of
    fused ops. A recomputed value needs none if every reader is fused, as each may compute it again inside its kernel.
    """
    alone = [index for index, op in enumerate(ops) if "fused" not in op.flags]
    readers: dict[int, list[int]] = {}
    for index, op in enumerate(ops):
        for value in op.inputs:
            readers.setdefault(value, []).append(index)
    made, again = [False] * len(values), [False] * len(values)
    for number, facts in enumerate(values):
        if facts.born < 0 or "fused" not in ops[facts.born].flags or facts.kind != "activation":
            continue
        is_forward = facts.born < num_forward
        if facts.dropped > (num_forward if is_forward else len(ops) - 1):
            continue  # an output of the step
        all_readers = readers.get(number, [])
        near = [index for index in all_readers if (index < num_forward) == is_forward]
        # There is no unfused op between the op that makes it and its last reader in this direction.
        made[number] = bool(near) and bisect_left(alone, near[-1] + 1) == bisect_left(alone, facts.born)
        again[number] = is_forward and all("fused" in ops[index].flags for index in all_readers)
    return made, again


# The time to recompute a pointwise op or a reduction in compiled code, as a share of its eager time. Eagerly it reads
# and writes memory once each. Compiled, a chain of k such ops is fused into the kernel that reads its result and only
# its input is read: 1 / 2k of the time. Chains between two matrix products have one to four ops, so 1/2 to 1/8; this is
# the middle.
FUSED_SHARE = 0.25

_NEVER_AGAIN = ("random", "collective", "index", "mutates", "opaque")
_UNFUSED = ("custom", "opaque", "collective", "index")
_PRODUCTS = ("attention", "convolution")  # not fused, even if their FLOPs are unknown


def recompute_s(op: Op) -> float:
    """Return the time to recompute an op in compiled code: its own, or `FUSED_SHARE` of it if it will be fused.

    The time of an op with the flag "fused" already is its share of the fused kernel.
    """
    return op.seconds if "fused" in op.flags or is_own_kernel(op.name, op.flops, op.flags) else FUSED_SHARE * op.seconds


def is_own_kernel(name: str, flops: int, flags: tuple[str, ...]) -> bool:
    """Whether an op runs as a kernel of its own in compiled code."""
    return bool(flops) or any(flag in flags for flag in _UNFUSED) or any(product in name for product in _PRODUCTS)


@dataclass(frozen=True)
class DerivedSaves:
    """The consequence of a choice of ops to save: the values saved and the ops recomputed, both ascending."""

    saved: tuple[int, ...]
    recomputed: tuple[int, ...]


class BackwardNeeds:
    """What the backward reads and what can be recomputed for it, for compiled plans. Use `graph.needs`.

    Such a plan names forward ops whose outputs are **saved**; everything else that the backward reads is recomputed, op
    by op, from saved and static values. Views make no values, so they do not appear here.

    - `is_free[v]`: value `v` is available in the backward whatever is saved: it existed before the step, or Python
      still references it when the backward begins.
    - `recomputable[o]`: forward op `o` would give the same result again: it is deterministic, and its inputs are not
      changed later.
    - `is_rerun[o]`: it is recomputed in any case (flag "rerun"): by a checkpoint of the user's, or because its output
      is a sharded weight as a whole.
    - `seconds[o]`: the time to recompute it.
    - `reads[o]`: the values made in the step that it reads; `inputs[o]`: those of them that are not free.
    - `value_of`, `read_at`, `released_at`, `used_at`: one entry for each save that the backward reads.
    """

    def __init__(self, graph: StepGraph) -> None:
        self._graph = graph
        num = self.num_forward = graph.num_forward
        self.is_free = [value.born < 0 or value.dropped > num for value in graph.values]
        last_change: dict[int, int] = {}
        for index, op in enumerate(graph.ops):
            last_change.update(dict.fromkeys(op.mutates, index))
        self.is_rerun = ["rerun" in op.flags and bool(op.outputs) for op in graph.ops[:num]]
        self.recomputable = [
            bool(op.outputs)
            and not op.mutates
            and not any(flag in op.flags for flag in _NEVER_AGAIN)
            and not any(value in last_change for value in op.outputs)
            and not any(last_change.get(value, -1) > index for value in op.inputs)
            for index, op in enumerate(graph.ops[:num])
        ]
        self.recomputable = [can or must for can, must in zip(self.recomputable, self.is_rerun, strict=True)]
        self.seconds = [recompute_s(op) for op in graph.ops[:num]]
        self.reads = [tuple({v: None for v in op.inputs if graph.values[v].born >= 0}) for op in graph.ops[:num]]
        self.inputs = [tuple(value for value in reads if not self.is_free[value]) for reads in self.reads]
        outputs = ((index, graph.ops[index].outputs) for index in range(num - 1, -1, -1))
        self._makers = [(index, made) for index, made in outputs if made]
        reads = [save for save in graph.saves if save.read >= 0 and graph.values[save.value].born >= 0]
        self.value_of = _ints(save.value for save in reads)
        self.read_at = _ints(save.read for save in reads)
        self.released_at = _ints(save.released for save in reads)
        self.used_at = _ints(save.released if save.used < 0 else save.used for save in reads)

    @cached_property
    def has_bytes(self) -> tuple[np.ndarray, np.ndarray]:
        """For each value that is not saved, whether it is written to memory where it is made, and where recomputed."""
        made_inline, again_inline = inlined(self._graph.ops, self._graph.values, self.num_forward)
        return ~np.array(made_inline, dtype=bool), ~np.array(again_inline, dtype=bool)

    def derive(self, keeps: Container[int]) -> DerivedSaves:
        """Return what is saved and recomputed if the outputs of the ops in `keeps` are saved.

        Outputs that nothing needs are not saved. Ops that cannot be recomputed count as kept.
        """
        needed = [False] * len(self.is_free)
        for value in self.value_of.tolist():
            needed[value] = not self.is_free[value]
        saved: list[int] = []
        recomputed: list[int] = []
        for index, outputs in self._makers:  # from the last op to the first
            for value in outputs:
                if needed[value]:
                    break
            else:
                continue
            if (index in keeps and not self.is_rerun[index]) or not self.recomputable[index]:
                saved += [value for value in outputs if needed[value]]
            else:
                recomputed.append(index)
                for value in self.inputs[index]:
                    needed[value] = True
        return DerivedSaves(tuple(sorted(saved)), tuple(reversed(recomputed)))

    def seconds_of(self, derived: DerivedSaves) -> float:
        """Return the seconds of all recomputed ops; exactly rounded, so that the order of summation does not matter."""
        return math.fsum(self.seconds[op] for op in derived.recomputed)

    def keeps_of(self, derived: DerivedSaves) -> tuple[int, ...]:
        """Return the ops that make the saved values."""
        return tuple(sorted({self._graph.values[value].born for value in derived.saved}))
