"""`StepGraph`: one training step as frozen data, made by `lowtide.trace` and read by the simulator and the solvers.

Time is counted in **positions**: position `p` is the point after `p` ops have finished, so op `i` runs between
positions `i` and `i + 1`. Ops `0 .. num_forward - 1` are the forward, the others the backward.

A **value** is one storage; its views are the same value. It is alive from the op that makes it (`born`) to the
position at which Python drops its last reference (`dropped`), and longer while a **save** (a saved tensor) holds it for
the backward. A **call** is one call of one module: a contiguous run of forward ops, which can be replayed as a region.

Python's references and autograd's are recorded separately, because plans change only what autograd holds: the
simulator can then tell which memory is freed when saves are dropped.

`check`, called on construction, raises `GraphError` if indices or positions contradict each other. Facts that are
derived from the graph are cached properties; the larger ones are computed in `graph.arrays` and `graph.time_lines`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from lowtide.errors import GraphError
from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.graph.arrays import BackwardNeeds, Retainable, StepArrays
    from lowtide.graph.time_lines import StepLines

STATIC_KINDS = ("parameter", "buffer", "batch", "constant")
VALUE_KINDS = (*STATIC_KINDS, "gradient", "activation", "elsewhere")
FLAGS = ("random", "collective", "mutates", "view", "index", "custom", "opaque", "fused", "sync", "rerun")


# Collectives whose outputs a region keeps for its replay, which then does not communicate. Gathers are left out: their
# outputs are large for what it costs to repeat them, and all ranks have the same plan.
KEPT_COLLECTIVES = tuple(
    f"_c10d_functional.{name}" for name in ("all_reduce", "reduce_scatter_tensor", "all_to_all_single")
)
# Those that torch.distributed's own functions call, such as `all_to_all_single`: they write to their first argument.
KEPT_IN_PLACE = tuple(
    f"c10d.{name}" for name in ("allreduce_", "reduce_scatter_", "_reduce_scatter_base_", "alltoall_")
)


GATHERED = "gathered parameters"  # begins the names of values that hold the gathered parameters of a sharded module


@dataclass(frozen=True, slots=True)
class Value:
    """One storage on the device. For storages from before the step, `born` is -1.

    `item_bytes` is the size of one element if the storage holds floating-point numbers that a codec can encode, else 0.
    `row_length` is the last dimension of the saved tensor, for codecs that scale by row.
    """

    bytes: int
    kind: str
    name: str
    born: int
    dropped: int
    item_bytes: int = 0
    row_length: int = 1


@dataclass(frozen=True, slots=True)
class Op:
    """One op as dispatched: values it reads, values it makes (views make none), and what it costs.

    `seconds` is device time. `host_s` is the host's time to issue the op, including the Python before it (0 on the CPU,
    which has one time line). `workspace_bytes` are allocated and freed inside the op. A backward op names the forward
    op whose derivative it computes (`forward_op`).
    """

    name: str
    call: int
    seconds: float
    flops: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    mutates: tuple[int, ...] = ()
    workspace_bytes: int = 0
    flags: tuple[str, ...] = ()
    forward_op: int = -1
    host_s: float = 0.0

    @property
    def is_kept(self) -> bool:
        """Whether a region around this op always keeps its result for the replay: chosen indices, reduced tensors."""
        return "index" in self.flags or self.name.startswith(KEPT_COLLECTIVES + KEPT_IN_PLACE)

    @property
    def kept_outputs(self) -> tuple[int, ...]:
        """The outputs that such a region keeps."""
        if "index" in self.flags:
            return self.outputs[1:] or self.outputs  # (values, indices), or indices alone
        return (self.outputs or self.mutates) if self.is_kept else ()


@dataclass(frozen=True, slots=True)
class Save:
    """A value that autograd holds for the backward, from `made` to `released`; first read at `read` (-1: never).

    `used` is the position at which the reading ops are done with it, shortly before `released` (-1: at `released`); a
    copy of the value made by a replay or a transfer is freed there. `number` counts the saves of one call in the order
    they are made, including saves released before the backward, which are not in the graph (-1: by their order here).
    """

    value: int
    call: int
    made: int
    read: int
    released: int
    used: int = -1
    number: int = -1

    def is_lost_at(self, num_forward: int) -> bool:
        """Whether its graph was dropped before the backward, as that of a branch that the loss does not use."""
        return self.read < 0 and self.released <= num_forward


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one module: forward ops `first` to `end - 1`. Calls of equal `structure` differ in names only.

    `changes` names a non-tensor argument (a cache, a list) that the forward changes, or is empty.
    """

    path: str
    kind: str
    parent: int
    first: int
    end: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    structure: int = -1
    changes: str = ""


SPLIT_KINDS = ("loss", "tokens")


@dataclass(frozen=True, slots=True)
class Split:
    """A module that runs a few rows of its input at a time, in up to `num_parts` parts.

    Of `kind` "loss" it is a linear layer whose output goes to the loss: layer, loss and their gradients run for one
    part after the other. Of `kind` "tokens" it is a module that treats every token alike, and that the backward runs
    again for one part after the other.
    """

    path: str
    num_parts: int
    kind: str = "loss"

    def __post_init__(self) -> None:
        if self.kind not in SPLIT_KINDS:
            raise GraphError(f"a split is of the kind {' or '.join(map(repr, SPLIT_KINDS))}, not {self.kind!r}")
        if self.num_parts < 1:
            raise GraphError(f"{self.path} is to run in {self.num_parts} parts: a split has at least one")


@dataclass(frozen=True, slots=True)
class Forward:
    """A call of a module by the step itself, outside of all other modules, that autograd records.

    `before` has the modules called in it that the step called earlier, with the numbers of those earlier calls.
    """

    path: str
    before: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Hardware:
    """The device that times are for: peak speeds, and what the eager engine costs its host.

    `half_flops_per_s` is for matrix products in bf16 and fp16, `single_flops_per_s` for fp32. `link_bytes_per_s` is the
    bandwidth to host memory, in each direction; 0 if there is no link.

    Host seconds of the eager engine: `region_s` per region, for forward and replay together, beside its ops; `save_s`
    per tensor saved in a region; `dispatch_s` per op of a replay whose region retains outputs; `spare_s` to return a
    retained output, if that is less than computing it; `move_s` per moved value, out and back.

    Allocations are rounded up to `block_bytes`.
    """

    name: str
    memory_bytes: int = 0
    half_flops_per_s: float = 0.0
    single_flops_per_s: float = 0.0
    memory_bytes_per_s: float = 0.0
    link_bytes_per_s: float = 0.0
    dispatch_s: float = 0.0
    region_s: float = 0.0
    block_bytes: int = 1
    spare_s: float = 0.0
    save_s: float = 0.0
    move_s: float = 0.0


UNKNOWN_HARDWARE = Hardware("unknown")


@dataclass(frozen=True)
class StepGraph:
    """One training step: ops, values, saves, module calls and static memory. Made by `lowtide.trace`.

    - `optimizer_state_bytes` includes state that the first step will create; `optimizer_workspace_bytes` is the most
      that the optimizer's own step allocates on top.
    - `other_bytes` is other memory that the process has allocated on the device.
    - `step_s` is the time of the plain step, forward and backward: measured if `is_measured`, else predicted.
    - `notes` are sentences on what the trace could not record.
    - `splits` are modules that ran in parts when the step was traced: the parts are among the ops.

    `print(graph)` is a summary; `to_json` and `from_json` write and read graphs.
    """

    ops: tuple[Op, ...]
    num_forward: int
    values: tuple[Value, ...]
    saves: tuple[Save, ...]
    calls: tuple[Call, ...]
    hardware: Hardware
    optimizer_state_bytes: int = 0
    optimizer_workspace_bytes: int = 0
    other_bytes: int = 0
    step_s: float = 0.0
    is_measured: bool = False
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    splits: tuple[Split, ...] = ()

    def __post_init__(self) -> None:
        check(self)

    @cached_property
    def has_host_line(self) -> bool:
        """Whether ops have host seconds: the step then has two time lines."""
        return self.arrays.has_host_line

    @cached_property
    def lines(self) -> StepLines:
        """Simulated seconds of the plain step's two time lines."""
        from lowtide.graph.time_lines import plain_lines

        return plain_lines(self)

    @cached_property
    def static_bytes(self) -> dict[str, int]:
        """Bytes allocated during the whole step, by kind; gradients as of the end of the step."""
        sizes = Counter({"parameters": 0, "gradients": 0, "buffers": 0})
        for value in self.values:
            if value.kind == "gradient" or (value.born < 0 and value.kind in STATIC_KINDS):
                sizes[value.kind if value.kind == "batch" else f"{value.kind}s"] += value.bytes
        sizes["optimizer state"] = self.optimizer_state_bytes
        sizes["other"] = self.other_bytes
        return dict(sizes)

    @property
    def bytes_before(self) -> int:
        """Bytes allocated before the step and during all of it: the static ones without gradients."""
        return sum(self.static_bytes.values()) - self.static_bytes["gradients"]

    @cached_property
    def saved_bytes(self) -> int:
        """Bytes of activations that the backward of a plain step needs, each storage once."""
        saved = {save.value for save in self.saves}
        return sum(self.values[v].bytes for v in saved if self.values[v].kind == "activation")

    @cached_property
    def plain_peak_bytes(self) -> int:
        """The simulated peak of a step without a plan."""
        from lowtide.graph.arrays import plain_peak_bytes

        return plain_peak_bytes(self)

    @property
    def handed_out_bytes(self) -> int:
        """Bytes made by the forward that Python still references when the backward begins, such as its outputs."""
        return sum(value.bytes for value in self.values if 0 <= value.born < self.num_forward < value.dropped)

    @cached_property
    def calls_by_path(self) -> dict[str, tuple[int, ...]]:
        """The calls of each module, by its path, in the order they ran."""
        by_path: dict[str, list[int]] = {}
        for index, call in enumerate(self.calls):
            by_path.setdefault(call.path, []).append(index)
        return {path: tuple(indices) for path, indices in by_path.items()}

    @cached_property
    def reaches_model(self) -> int:
        """The position at which the backward reaches the model, after the backward of the loss function."""
        spans = [(self.calls[call].first, self.calls[call].end) for call in self._forward_calls]
        own = (at for at, op in enumerate(self.ops) if any(first <= op.forward_op < end for first, end in spans))
        return next(own, self.num_forward)

    @cached_property
    def forwards(self) -> tuple[Forward, ...]:
        """The calls that the step makes itself, of the model or of modules in it, with tensors that autograd saved."""
        return tuple(
            Forward(self.calls[call].path, tuple((path, nth) for path, nth in first_nths.items() if nth))
            for call, first_nths in self._forward_calls.items()
        )

    @cached_property
    def _forward_calls(self) -> dict[int, dict[str, int]]:
        """The calls of `forwards`, with the number of the first call of each module in them."""
        outermost: list[int] = []
        for index, call in enumerate(self.calls):
            above = outermost[call.parent] if call.parent >= 0 else -1
            outermost.append(index if above < 0 and not call.path.startswith("<") else above)
        held = [save for save in self.saves if save.call >= 0 and not save.is_lost_at(self.num_forward)]
        recorded = {outermost[save.call] for save in held} - {-1}
        found: dict[int, dict[str, int]] = {call: {} for call in sorted(recorded)}
        for index, call in enumerate(self.calls):
            if outermost[index] in found:
                found[outermost[index]].setdefault(call.path, self.nths[index])
        return found

    @cached_property
    def nths(self) -> list[int]:
        """For each call, how many calls of the same module came before it."""
        nths = [0] * len(self.calls)
        for calls in self.calls_by_path.values():
            for nth, call in enumerate(calls):
                nths[call] = nth
        return nths

    def names_of(self, call: int) -> tuple[tuple[str, int], ...]:
        """Return how a plan names a call: (path, nth), or one such pair for each call of a segment."""
        return ((self.calls[call].path, self.nths[call]),)

    def input_number(self, call: int, number: int) -> tuple[str, int, int]:
        """Return how a plan names an input of a recomputed call: path and nth of the receiving call, input number."""
        return self.calls[call].path, self.nths[call], number

    @cached_property
    def last_writes(self) -> dict[int, int]:
        """For each value that the forward changes in place, the last op that does."""
        return {value: index for index, op in enumerate(self.ops[: self.num_forward]) for value in op.mutates}

    @cached_property
    def last_reads(self) -> dict[int, int]:
        """For each value that is read, the last op that does; the number of ops for a value that autograd saves."""
        last = {value: index for index, op in enumerate(self.ops) for value in op.inputs}
        return last | {save.value: len(self.ops) for save in self.saves}

    @cached_property
    def num_gathers(self) -> list[int]:
        """For each forward op, and for the end of the forward, how many gathers of FSDP run before it."""
        return [0, *itertools.accumulate(op.name.startswith("fsdp.") for op in self.ops[: self.num_forward])]

    def gathers_inside(self, call: int) -> bool:
        """Whether FSDP gathers parameters of modules inside a call. Those of its own module are gathered before it."""
        return self.num_gathers[self.calls[call].end] > self.num_gathers[self.calls[call].first]

    @cached_property
    def gathered(self) -> list[Value]:
        """The parameters that FSDP gathers in the forward, a value for each sharded module."""
        return [each for each in self.values if each.name.startswith(GATHERED) and 0 <= each.born < self.num_forward]

    @cached_property
    def unreplayable(self) -> dict[int, str]:
        """The calls that no plan can recompute, with the reason.

        The forward changes one of their arguments, or they are a segment with modules that FSDP shards: its replay
        would hold the gathered parameters of all of them.
        """
        last_write, reasons = self.last_writes, dict[int, str]()
        for index, call in enumerate(self.calls):
            written = max((last_write.get(value, -1) for value in call.inputs), default=-1)
            if call.changes:
                reasons[index] = f"the forward changes what it is called with ({call.changes})"
            elif written >= call.first:
                reasons[index] = f"{self.ops[written].name} changes one of its inputs in place"
            elif call.kind == "Segment" and self.gathers_inside(index):
                reasons[index] = "it spans modules that FSDP shards: a replay would hold the parameters of all at once"
        return reasons

    @cached_property
    def depths(self) -> list[int]:
        """For each call its depth in the call tree: 0 for the outermost."""
        depths: list[int] = []
        for call in self.calls:
            depths.append(depths[call.parent] + 1 if call.parent >= 0 else 0)
        return depths

    @cached_property
    def children(self) -> list[list[int]]:
        """For each call the calls directly inside it; the last entry (index -1) has the outermost calls."""
        children: list[list[int]] = [[] for _ in range(len(self.calls) + 1)]
        for index, call in enumerate(self.calls):
            children[call.parent].append(index)
        return children

    def ancestors(self, call: int) -> Iterator[int]:
        """Yield a call and the calls around it, from the inside out; nothing for -1."""
        while call >= 0:
            yield call
            call = self.calls[call].parent

    def innermost(self, regions: Container[int]) -> dict[int, int]:
        """For each call (and -1), the innermost of `regions` that is the call or contains it; -1 for none."""
        owners = {-1: -1}
        for index, call in enumerate(self.calls):
            owners[index] = index if index in regions else owners[call.parent]
        return owners

    @cached_property
    def save_numbers(self) -> list[tuple[int, int]]:
        """For each save how a plan names it: the call that it is counted in, and its number among that call's saves.

        Modules outside of the model have no path of their own: their saves are counted in the call around them.
        """
        named = {-1: -1}
        for index, call in enumerate(self.calls):
            named[index] = index if not call.path.startswith("<") else named[call.parent]
        numbers: list[tuple[int, int]] = []
        next_number: dict[int, int] = {}
        for save in self.saves:
            call_number = named[save.call]
            number = save.number if save.number >= 0 else next_number.get(call_number, 0)
            next_number[call_number] = number + 1
            numbers.append((call_number, number))
        return numbers

    @cached_property
    def saves_by_number(self) -> dict[tuple[int, int], int]:
        """The inverse of `save_numbers`."""
        return {number: index for index, number in enumerate(self.save_numbers)}

    def outermost(self, regions: Container[int]) -> dict[int, int]:
        """For each call (and -1), the outermost of `regions` that is the call or contains it; -1 for none."""
        owners = {-1: -1}
        for index, call in enumerate(self.calls):
            outer = owners[call.parent]
            owners[index] = outer if outer >= 0 or index not in regions else index
        return owners

    @cached_property
    def fingerprint(self) -> str:
        """A digest of ops, values and calls with their sizes; independent of times and hardware."""
        digest = hashlib.sha256()
        for op in self.ops:
            digest.update(repr((op.name, op.call, op.inputs, op.outputs)).encode())
        for value in self.values:
            digest.update(repr((value.bytes, value.kind, value.name, value.item_bytes, value.row_length)).encode())
        for call in self.calls:
            digest.update(repr((call.path, call.first, call.end)).encode())
        digest.update(repr(self.num_forward).encode())
        return digest.hexdigest()[:16]

    @cached_property
    def retainable(self) -> Retainable:
        """Which op outputs regions can retain, and what that costs; for eager plans."""
        from lowtide.graph.arrays import Retainable

        return Retainable(self)

    @cached_property
    def needs(self) -> BackwardNeeds:
        """Which forward values the backward needs, and which ops can be recomputed; for compiled plans."""
        from lowtide.graph.arrays import BackwardNeeds

        return BackwardNeeds(self)

    @cached_property
    def arrays(self) -> StepArrays:
        """The graph as numpy arrays, for simulating eager plans."""
        from lowtide.graph.arrays import StepArrays

        return StepArrays(self)

    def path_of(self, op: int) -> str:
        """Return the path of the module that an op belongs to; `""` for the model itself, no module or no op (-1)."""
        call = self.ops[op].call if op >= 0 else -1
        return self.calls[call].path if call >= 0 else ""

    def is_made_of_weights(self, value: int) -> bool:
        """Whether an op made this value from parameters and buffers alone: the engine treats such casts as weights."""
        kinds = {self.values[given].kind for given in self.ops[self.values[value].born].inputs}
        return bool(kinds) and kinds <= {"parameter", "buffer"}

    def forward_s(self) -> float:
        """Seconds of the forward ops."""
        return sum(op.seconds for op in self.ops[: self.num_forward])

    def to_json(self) -> str:
        """Return the graph as versioned JSON, which `StepGraph.from_json` reads."""
        from lowtide.graph.graph_json import encode

        return json.dumps(encode(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> StepGraph:
        """Read a graph that `to_json` wrote. Raises `GraphError` if the text is damaged. No code in it is executed."""
        from lowtide.graph.graph_json import FORMAT, decode, parse_json

        return decode(parse_json(text, FORMAT, GraphError))

    def __str__(self) -> str:
        structures = Counter(call.structure for call in self.calls if call.structure >= 0)
        repeated = max(
            (c for c in self.calls if structures[c.structure] > 1), key=lambda c: c.end - c.first, default=None
        )
        lines = [
            f"StepGraph on {self.hardware.name}: {self.num_forward} forward and {len(self.ops) - self.num_forward} "
            f"backward ops, {len(self.calls)} module calls",
            f"  step        {format_seconds(self.step_s)} {'measured' if self.is_measured else 'predicted'}",
        ]
        if self.has_host_line:
            host, device = format_seconds(self.lines.host_s), format_seconds(self.lines.device_s)
            lines.append(
                f"  limited by  the {self.lines.limit}: the host issues its ops in {host}, "
                f"the device runs them in {device}"
            )
        lines.append(f"  activations {format_bytes(self.saved_bytes)} saved for the backward")
        lines += [f"  {name:<11} {format_bytes(size)}" for name, size in self.static_bytes.items() if size]
        if repeated is not None:
            lines.append(f"  repeated    {structures[repeated.structure]} x {repeated.kind} (as {repeated.path})")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def check(graph: StepGraph) -> None:
    """Raise `GraphError` if an index is out of range, or if ops, values, saves and calls are in an impossible order."""
    num_ops, num_values, num_calls = len(graph.ops), len(graph.values), len(graph.calls)
    _require(0 <= graph.num_forward <= num_ops, "num_forward is not a number of ops")
    sizes = (graph.optimizer_state_bytes, graph.optimizer_workspace_bytes, graph.other_bytes)
    _require(graph.hardware.block_bytes >= 1, f"allocations are rounded to {graph.hardware.block_bytes} bytes")
    _require(min(sizes) >= 0 and graph.step_s >= 0, "a number of bytes or seconds is negative")
    made: set[int] = {index for index, value in enumerate(graph.values) if value.born < 0}
    for index, op in enumerate(graph.ops):
        where = f"op {index} ({op.name})"
        _require(-1 <= op.call < num_calls, f"{where} belongs to call {op.call}, which does not exist")
        _require(
            -1 <= op.forward_op < graph.num_forward,
            f"{where} is the derivative of op {op.forward_op}, not a forward op",
        )
        if op.call >= 0 and index < graph.num_forward:
            call = graph.calls[op.call]
            _require(call.first <= index < call.end, f"{where} runs outside of its call ({call.path})")
        costs = (op.seconds, op.host_s, op.flops, op.workspace_bytes)
        _require(min(costs) >= 0, f"{where} has a negative cost")
        for read in (*op.inputs, *op.mutates):
            _require(read in made, f"{where} reads value {read} before anything made it")
        _require(len(set(op.outputs)) == len(op.outputs), f"{where} makes a value twice")
        for new in op.outputs:
            _require(0 <= new < num_values, f"{where} makes value {new}, which does not exist")
            _require(graph.values[new].born == index, f"{where} makes value {new}, which another op made")
        made.update(op.outputs)
    for index, value in enumerate(graph.values):
        _require(value.bytes >= 0, f"value {index} has {value.bytes} bytes")
        _require(value.item_bytes in (0, 1, 2, 4, 8), f"value {index} has elements of {value.item_bytes} bytes")
        _require(value.row_length >= 1, f"value {index} has rows of {value.row_length} elements")
        _require(value.kind in VALUE_KINDS, f"value {index} is of the unknown kind {value.kind!r}")
        _require(-1 <= value.born < num_ops and index in made, f"value {index} is made by no op")
        _require(value.born < value.dropped <= num_ops, f"value {index} is dropped before it is made")
    for index, save in enumerate(graph.saves):
        where = f"save {index}"
        _require(0 <= save.value < num_values, f"{where} holds value {save.value}, which does not exist")
        _require(-1 <= save.call < num_calls, f"{where} belongs to call {save.call}, which does not exist")
        _require(save.number >= -1, f"{where} has the number {save.number}")
        first_read = save.released if save.read == -1 else save.read
        in_order = 0 <= save.made <= graph.num_forward <= first_read <= save.released <= num_ops
        in_order = in_order and (save.used == -1 or first_read <= save.used <= save.released)
        _require(in_order, f"{where} is made, read and released at {save.made}, {save.read}, {save.released}")
        _require(graph.values[save.value].born < save.made or save.made == 0, f"{where} is made before its value")
        if save.call >= 0:
            call = graph.calls[save.call]
            _require(call.first <= save.made <= call.end, f"{where} is made outside of its call ({call.path})")
    last_end: dict[int, int] = {}
    for index, call in enumerate(graph.calls):
        _require(0 <= call.first <= call.end <= graph.num_forward, f"call {index} ({call.path}) is not a run of ops")
        _require(-1 <= call.parent < index, f"call {index} ({call.path}) has a parent that comes after it")
        if call.parent >= 0:
            outer = graph.calls[call.parent]
            _require(
                outer.first <= call.first and call.end <= outer.end, f"call {index} ({call.path}) exceeds its parent"
            )
        _require(last_end.get(call.parent, 0) <= call.first, f"call {index} ({call.path}) begins inside another")
        last_end[call.parent] = call.end
        _require(all(0 <= v < num_values for v in (*call.inputs, *call.outputs)), f"call {index} has unknown values")


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise GraphError(f"this graph is not a valid step: {problem}")
