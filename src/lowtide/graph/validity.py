"""Whether a step graph can have run: everything in it refers to what is there, in order."""

from __future__ import annotations

from lowtide.errors import GraphError
from lowtide.graph import VALUE_KINDS, StepGraph


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
