"""What kernels allocate inside, where nothing can be measured: rules read off kernels as they are today.

Real traces measure this. Fake tensors have no kernels, so the reordered copies that oneDNN's convolutions and recurrent
layers make on the CPU, and the buffers of CUDA's reductions and attention, are foretold here.
"""

from __future__ import annotations

import torch

from lowtide.tracing.recorder import Recorder
from lowtide.tracing.records import RawOp

# Of an LSTM or GRU layer: its saved workspace per byte of output, and what it allocates per byte of one weight.
_RNN_SAVED_PER_OUTPUT = 15.6
_RNN_INSIDE_PER_WEIGHT = 3.1


# Of CUDA's reductions and attention: bytes per element or per byte of output, as seen on an H200.
_SUM_BYTES_PER_ELEMENT, _SUM_MOST_BYTES_PER_SM = 8, 1 << 20
_ATTENTION_BACKWARD_PER_OUTPUT = 2.0


def foretell_workspaces(recorder: Recorder) -> None:
    """Give each op of a recording on fake tensors the bytes it would allocate inside."""
    rule = {"cpu": _on_cpu, "cuda": _on_cuda}.get(recorder.device.type)
    if rule is not None:
        for op in recorder.ops:
            op.workspace_bytes = rule(op, recorder)


def _on_cuda(op: RawOp, recorder: Recorder) -> int:
    if op.name == "aten.sum.dim_IntList":
        most = torch.cuda.get_device_properties(recorder.device).multi_processor_count * _SUM_MOST_BYTES_PER_SM
        size = op.dtype.itemsize if op.dtype is not None else 4
        return min(most, _SUM_BYTES_PER_ELEMENT * op.moved_bytes // size)
    if "attention_backward" in op.name and op.outputs:
        return int(_ATTENTION_BACKWARD_PER_OUTPUT * recorder.values[op.outputs[0]].bytes)
    if op.name.startswith("aten.convolution"):  # copies with channels last, of all it reads and writes
        sizes = [recorder.values[value].bytes for value in (*op.inputs[:2], *op.outputs[:1])]
        return sum(sizes) if "backward" not in op.name else sum(sizes[:2])
    return 0


def _on_cpu(op: RawOp, recorder: Recorder) -> int:
    inputs = [recorder.values[value].bytes for value in op.inputs]
    outputs = [recorder.values[value].bytes for value in op.outputs]
    if not inputs or not outputs:
        return 0
    if op.name == "aten.convolution.default":
        return max(outputs[0], sum(inputs[:2]))
    if op.name == "aten.convolution_backward.default":
        gives_input_gradient = len(inputs) > 1 and outputs[0] >= inputs[1]
        return inputs[0] + (inputs[1] if gives_input_gradient else 0)
    if op.name == "aten.native_batch_norm_backward.default":
        return outputs[0]
    if op.name.startswith("aten.upsample_"):
        return outputs[0] + inputs[0] if "backward" not in op.name else inputs[0]
    if op.name == "aten.mkldnn_rnn_layer.default":
        saved = recorder.values[op.outputs[-1]]
        saved.bytes = saved.bytes or int(_RNN_SAVED_PER_OUTPUT * outputs[0])  # fakes make it empty
        return int(_RNN_INSIDE_PER_WEIGHT * inputs[1])
    if op.name == "aten.mkldnn_rnn_layer_backward.default":
        return int(_RNN_INSIDE_PER_WEIGHT * inputs[1])
    return 0
