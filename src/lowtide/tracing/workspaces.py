"""What kernels allocate inside, where nothing can be measured: rules read off oneDNN's kernels on the CPU.

Real traces measure this. Fake tensors have no kernels, so for the CPU's convolutions, recurrent layers and the like the
reordered copies they make are foretold here; on accelerators nothing is added.
"""

from __future__ import annotations

import torch

from lowtide.tracing.recorder import Recorder
from lowtide.tracing.records import RawOp

# Of an LSTM or GRU layer: its saved workspace per byte of output, and what it allocates per byte of one weight.
_RNN_SAVED_PER_OUTPUT = 15.6
_RNN_INSIDE_PER_WEIGHT = 3.1


def foretell_workspaces(recorder: Recorder) -> None:
    """Give each op of a recording on fake CPU tensors the bytes it would allocate inside."""
    if recorder.device != torch.device("cpu"):
        return
    for op in recorder.ops:
        op.workspace_bytes = _workspace(op, recorder)


def _workspace(op: RawOp, recorder: Recorder) -> int:
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
