"""From what a recorder saw to a `StepGraph`; and a loss for tracing a model without its own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowtide.errors import LowtideError
from lowtide.graph import Call, Hardware, Op, Save, StepGraph, Value
from lowtide.graph.structures import with_even_times, with_structures
from lowtide.replay.arguments import tensors_in
from lowtide.tracing.recorder import Recorder


def build(recorder: Recorder, hardware: Hardware, *, notes: list[str], **facts: Any) -> StepGraph:
    """The graph of a finished recording."""
    values = [
        Value(v.bytes, v.kind, v.name, v.born, v.dropped, v.item_bytes or 0, v.row_length) for v in recorder.values
    ]
    ops = [
        Op(
            op.name,
            op.call,
            op.seconds,
            op.flops,
            op.inputs,
            op.outputs,
            op.mutates,
            op.workspace_bytes,
            op.flags,
            op.forward_op,
            op.host_s,
        )
        for op in recorder.ops
    ]
    saves = [Save(s.value, s.call, s.made, s.read, s.released, s.used, s.number) for s in recorder.saves]
    calls = [
        Call(c.path, c.kind, c.parent, c.first, c.end, c.inputs, c.outputs, changes=c.changes) for c in recorder.calls
    ]
    calls = with_structures(ops[: recorder.num_forward], calls, values, saves)
    return StepGraph(
        ops=tuple(with_even_times(ops, calls)),
        num_forward=recorder.num_forward,
        values=tuple(values),
        saves=tuple(saves),
        calls=tuple(calls),
        hardware=hardware,
        notes=(*dict.fromkeys(recorder.notes), *notes),
        **facts,
    )


def output_sum_loss(output: Any) -> Tensor:
    """Return the sum of a model's outputs that need a gradient, or of its scalar ones alone if there are any.

    Scalar outputs are losses that the model computed itself.
    """
    found = [tensor for tensor in tensors_in((output, getattr(output, "loss", None))) if tensor.requires_grad]
    found = list({id(tensor): tensor for tensor in found}.values())
    numbers = [tensor for tensor in found if tensor.ndim == 0]
    total = sum(tensor.sum() for tensor in numbers or found)
    if not isinstance(total, Tensor):
        raise LowtideError(f"the model gave {type(output).__name__}, with no tensor that needs a gradient in it")
    return total.real if total.is_complex() else total
