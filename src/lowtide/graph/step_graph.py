"""StepGraph: one training step as data.

Time is counted in **positions**: position `p` is the moment after `p` ops have finished, so op `i` runs between
positions `i` and `i + 1`. Ops `0 .. num_forward - 1` are the forward, the others the backward. A **value** is one
storage; its views are the same value. A value lives from the op that makes it (`born`) to the position at which Python
lets go of it (`dropped`), and beyond that as long as a **save** holds it for the backward. A **call** is one call of
one module, hence a run of forward ops: what can be replayed as a region.

Keeping Python's hold and autograd's apart is what lets a simulator say what happens when saves are dropped.

Whether a step graph can have run: everything in it refers to what is there, in order.
"""

from __future__ import annotations

import hashlib
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
FLAGS = ("random", "collective", "mutates", "view", "index", "custom", "opaque", "fused", "sync")


@dataclass(frozen=True, slots=True)
class Value:
    """One storage on the device. Static ones are there before the step: `born` is -1.

    `item_bytes` are those of one element where the storage holds floating-point numbers that a codec could write in
    fewer bytes, else 0; `row_length` is the last dimension of the tensor that was saved, for codecs that scale by row.
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
    """One kernel call: values it reads, values it makes (views make none), and what it costs.

    `seconds` are those of the device, `host_s` those in which the host issues the op, the Python before it included (0
    on the CPU, which has one line). `workspace_bytes` are allocated and freed inside. A backward op names the forward
    op whose derivative it is.
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


@dataclass(frozen=True, slots=True)
class Save:
    """A value that autograd holds for the backward, from `made` to `released`; first read at `read` (-1: never).

    Whoever reads it is done with it at `used`, a little before autograd lets go (-1: then). A value that was brought
    back for the read, by a replay or a copy, ends there. `number` counts the saves of one call as they are made, those
    included that are let go of before the backward and hence not in a graph (-1: by their order here).
    """

    value: int
    call: int
    made: int
    read: int
    released: int
    used: int = -1
    number: int = -1


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one module: forward ops `first` to `end - 1`. Calls of equal `structure` differ in names only.

    `changes` names an argument that is no tensor (a cache, a list) and is changed while the forward runs, if any is.
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


@dataclass(frozen=True)
class Hardware:
    """What the times are for: the most it can do. `link_bytes_per_s` is to host memory, each way; 0 for none.

    `half_flops_per_s` is for matrix products in bf16 and fp16, `single_flops_per_s` for fp32.

    What the eager engine adds on the host, in seconds: `region_s` for a region beside its ops, in its forward and its
    replay; `save_s` for each tensor saved in a region; `dispatch_s` for each op of a replay whose region retains
    outputs, and `spare_s` to return a retained output, if that is less than to compute it; `move_s` for each value that
    is moved, there and back.

    `region_bytes` are of random states: held on the device by each region while it runs, by one with ops that draw
    random numbers until its replay, and by that replay for the time after it. Allocations are rounded up to
    `block_bytes`.
    """

    name: str
    memory_bytes: int = 0
    half_flops_per_s: float = 0.0
    single_flops_per_s: float = 0.0
    memory_bytes_per_s: float = 0.0
    link_bytes_per_s: float = 0.0
    disk_bytes_per_s: float = 1e9
    dispatch_s: float = 0.0
    region_s: float = 0.0
    region_bytes: int = 0
    block_bytes: int = 1
    spare_s: float = 0.0
    save_s: float = 0.0
    move_s: float = 0.0


UNKNOWN_HARDWARE = Hardware("unknown")


@dataclass(frozen=True)
class StepGraph:
    """One training step: ops, values, saves, module calls and static memory. Made by `lowtide.trace`.

    - `optimizer_state_bytes` counts states that the first step will create; `optimizer_workspace_bytes` is the most
      that the optimizer's own step allocates on top.
    - `other_bytes` is what else the process has allocated on the device.
    - `step_s` is the plain step, forward and backward: measured where `is_measured`, else predicted.
    - `notes` say what could not be seen, in words.

    `print(graph)` is a summary; `to_json` and `from_json` are in `lowtide.StepGraph` too.
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

    def __post_init__(self) -> None:
        check(self)

    @cached_property
    def has_host_line(self) -> bool:
        """Whether ops cost the host something beside the device: the step has two time lines then."""
        return self.arrays.has_host_line

    @cached_property
    def lines(self) -> StepLines:
        """Seconds of the plain step's two lines, as simulated."""
        from lowtide.graph.time_lines import plain_lines

        return plain_lines(self)

    @cached_property
    def static_bytes(self) -> dict[str, int]:
        """Bytes that are there during the whole step, by kind; gradients as they are when the step ends."""
        found = Counter({f"{kind}s" if kind != "batch" else kind: 0 for kind in ("parameter", "gradient", "buffer")})
        for value in self.values:
            if value.kind == "gradient" or (value.born < 0 and value.kind in STATIC_KINDS):
                found[value.kind if value.kind == "batch" else f"{value.kind}s"] += value.bytes
        found["optimizer state"] = self.optimizer_state_bytes
        found["other"] = self.other_bytes
        return dict(found)

    @cached_property
    def saved_bytes(self) -> int:
        """Bytes of activations that the backward of a plain step needs, each storage once."""
        saved = {save.value for save in self.saves}
        return sum(self.values[v].bytes for v in saved if self.values[v].kind == "activation")

    @cached_property
    def plain_peak_bytes(self) -> int:
        """The most bytes live at any time of a step without a plan, as simulated."""
        from lowtide.graph.arrays import plain_peak_bytes

        return plain_peak_bytes(self)

    @property
    def handed_out_bytes(self) -> int:
        """Bytes that the forward makes and Python still holds when the backward begins: for whoever called it."""
        return sum(value.bytes for value in self.values if 0 <= value.born < self.num_forward < value.dropped)

    @cached_property
    def calls_by_path(self) -> dict[str, tuple[int, ...]]:
        """Which calls belong to each module path, in the order they ran."""
        found: dict[str, list[int]] = {}
        for index, call in enumerate(self.calls):
            found.setdefault(call.path, []).append(index)
        return {path: tuple(indices) for path, indices in found.items()}

    @cached_property
    def reaches_model(self) -> int:
        """The position at which the backward comes to what the model gave: behind what the loss made of it."""
        spans = [(call.first, call.end) for call in self.calls if not call.path]
        own = (at for at, op in enumerate(self.ops) if any(first <= op.forward_op < end for first, end in spans))
        return next(own, self.num_forward)

    @cached_property
    def nths(self) -> list[int]:
        """For each call, how many calls of the same module came before it."""
        found = [0] * len(self.calls)
        for calls in self.calls_by_path.values():
            for nth, call in enumerate(calls):
                found[call] = nth
        return found

    def names_of(self, call: int) -> tuple[tuple[str, int], ...]:
        """What a plan calls a call, path and nth: one pair, or those of all calls of a segment."""
        return ((self.calls[call].path, self.nths[call]),)

    def input_number(self, call: int, number: int) -> tuple[str, int, int]:
        """What names an input of a recomputed call: path and nth of the call that is given it, and its number there."""
        return self.calls[call].path, self.nths[call], number

    @cached_property
    def last_writes(self) -> dict[int, int]:
        """The last forward op that changes each value in place, of those that are changed."""
        return {value: index for index, op in enumerate(self.ops[: self.num_forward]) for value in op.mutates}

    @cached_property
    def last_reads(self) -> dict[int, int]:
        """The last op that reads each value, of those that are read; a save is read where its value is made."""
        found = {value: index for index, op in enumerate(self.ops) for value in op.inputs}
        return found | {save.value: len(self.ops) for save in self.saves}

    @cached_property
    def unreplayable(self) -> dict[int, str]:
        """The calls that no plan can recompute, and why: the forward changes what they were called with."""
        last_write, found = self.last_writes, dict[int, str]()
        for index, call in enumerate(self.calls):
            written = max((last_write.get(value, -1) for value in call.inputs), default=-1)
            if call.changes:
                found[index] = f"the forward changes what it is called with ({call.changes})"
            elif written >= call.first:
                found[index] = f"{self.ops[written].name} changes one of its inputs in place"
        return found

    @cached_property
    def depths(self) -> list[int]:
        """For each call, how deep in the module tree it is: 0 for the outermost."""
        found: list[int] = []
        for call in self.calls:
            found.append(found[call.parent] + 1 if call.parent >= 0 else 0)
        return found

    def ancestors(self, call: int) -> Iterator[int]:
        """A call and those that it lies in, the innermost first; none for -1."""
        while call >= 0:
            yield call
            call = self.calls[call].parent

    def innermost(self, regions: Container[int]) -> dict[int, int]:
        """For each call, the innermost of `regions` that it is or lies in; -1 for none, and for no call at all (-1)."""
        found = {-1: -1}
        for index, call in enumerate(self.calls):
            found[index] = index if index in regions else found[call.parent]
        return found

    @cached_property
    def save_numbers(self) -> list[tuple[int, int]]:
        """For each save, what names it: a call that has a name, and the save's number there.

        Modules that are not part of the model have no name; what they save counts as their caller's.
        """
        named = {-1: -1}
        for index, call in enumerate(self.calls):
            named[index] = index if not call.path.startswith("<") else named[call.parent]
        found: list[tuple[int, int]] = []
        next_number: dict[int, int] = {}
        for save in self.saves:
            place = named[save.call]
            number = save.number if save.number >= 0 else next_number.get(place, 0)
            next_number[place] = number + 1
            found.append((place, number))
        return found

    @cached_property
    def saves_by_number(self) -> dict[tuple[int, int], int]:
        """The saves by what names them: the reverse of `save_places`."""
        return {place: index for index, place in enumerate(self.save_numbers)}

    def outermost(self, regions: Container[int]) -> dict[int, int]:
        """For each call, the outermost of `regions` that it is or lies in; -1 for none, and for no call at all (-1)."""
        found = {-1: -1}
        for index, call in enumerate(self.calls):
            outer = found[call.parent]
            found[index] = outer if outer >= 0 or index not in regions else index
        return found

    @cached_property
    def fingerprint(self) -> str:
        """A digest of what ran and how large it was; times and the machine do not count."""
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
        """Which ops' outputs a region can retain, and what that costs: for eager steps."""
        from lowtide.graph.arrays import Retainable

        return Retainable(self)

    @cached_property
    def needs(self) -> BackwardNeeds:
        """What the backward needs of the forward, where single ops can be recomputed: for compiled steps."""
        from lowtide.graph.arrays import BackwardNeeds

        return BackwardNeeds(self)

    @cached_property
    def arrays(self) -> StepArrays:
        """The graph's facts as arrays, for playing eager steps."""
        from lowtide.graph.arrays import StepArrays

        return StepArrays(self)

    def path_of(self, op: int) -> str:
        """The module in which op `op` runs (a backward op: its forward op), `""` for the model itself or none."""
        call = self.ops[op].call
        return self.calls[call].path if call >= 0 else ""

    def forward_s(self) -> float:
        """Seconds of the forward ops."""
        return sum(op.seconds for op in self.ops[: self.num_forward])

    def to_json(self) -> str:
        """The graph as text, with a version; `StepGraph.from_json` reads it."""
        from lowtide.graph.graph_json import write_graph

        return write_graph(self)

    @staticmethod
    def from_json(text: str) -> StepGraph:
        """The graph that `to_json` wrote. Raises `GraphError` where the text is damaged; nothing in it can run."""
        from lowtide.graph.graph_json import read_graph

        return read_graph(text)

    def _words_on_lines(self) -> list[str]:
        if not self.has_host_line:
            return []
        host, device = format_seconds(self.lines.host_s), format_seconds(self.lines.device_s)
        return [
            f"  limited by  the {self.lines.limit}: the host issues its ops in {host}, the device runs them in {device}"
        ]

    def __str__(self) -> str:
        structures = Counter(call.structure for call in self.calls if call.structure >= 0)
        repeated = max(
            (c for c in self.calls if structures[c.structure] > 1), key=lambda c: c.end - c.first, default=None
        )
        lines = [
            f"StepGraph on {self.hardware.name}: {self.num_forward} forward and {len(self.ops) - self.num_forward} "
            f"backward ops, {len(self.calls)} module calls",
            f"  step        {format_seconds(self.step_s)} {'measured' if self.is_measured else 'predicted'}",
            *self._words_on_lines(),
            f"  activations {format_bytes(self.saved_bytes)} saved for the backward",
        ]
        lines += [f"  {name:<11} {format_bytes(size)}" for name, size in self.static_bytes.items() if size]
        if repeated is not None:
            lines.append(f"  repeated    {structures[repeated.structure]} x {repeated.kind} (as {repeated.path})")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def check(graph: StepGraph) -> None:
    """Raise `GraphError` unless everything in the graph refers to what is there, in an order that can have run."""
    num_ops, num_values, num_calls = len(graph.ops), len(graph.values), len(graph.calls)
    _require(0 <= graph.num_forward <= num_ops, "num_forward is not a number of ops")
    sizes = (graph.optimizer_state_bytes, graph.optimizer_workspace_bytes, graph.other_bytes)
    _require(graph.hardware.block_bytes >= 1, f"allocations are rounded to {graph.hardware.block_bytes} bytes")
    _require(min(sizes) >= 0 and graph.step_s >= 0, "there are fewer than no bytes or seconds")
    made: set[int] = {index for index, value in enumerate(graph.values) if value.born < 0}
    for index, op in enumerate(graph.ops):
        where = f"op {index} ({op.name})"
        _require(-1 <= op.call < num_calls, f"{where} belongs to call {op.call}, which is not there")
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
            _require(0 <= new < num_values, f"{where} makes value {new}, which is not there")
            _require(graph.values[new].born == index, f"{where} makes value {new}, which was made elsewhere")
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
        _require(0 <= save.value < num_values, f"{where} holds value {save.value}, which is not there")
        _require(-1 <= save.call < num_calls, f"{where} belongs to call {save.call}, which is not there")
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
                outer.first <= call.first and call.end <= outer.end, f"call {index} ({call.path}) leaves its parent"
            )
        _require(last_end.get(call.parent, 0) <= call.first, f"call {index} ({call.path}) begins inside another")
        last_end[call.parent] = call.end
        _require(all(0 <= v < num_values for v in (*call.inputs, *call.outputs)), f"call {index} has unknown values")


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise GraphError(f"not a step that can have run: {problem}")
