"""What kernels allocate inside, where nothing can be measured: rules read off kernels as they are today.

Real traces measure this. Fake tensors have no kernels, so the reordered copies that oneDNN's convolutions and recurrent
layers make on the CPU, and the buffers of CUDA's reductions and attention, are foretold here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from lowtide.tracing.recorder import Recorder
from lowtide.tracing.records import Layout, RawOp

_Rule = Callable[[tuple[Layout, ...], list[int]], int]  # from what an op is given and the bytes of what it makes

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
    if op.name in _SHAPED:
        return _SHAPED[op.name](op.layouts, outputs)
    if op.name == "aten.convolution.default":
        return max(outputs[0], sum(inputs[:2]))
    if op.name == "aten.convolution_backward.default":
        gives_input_gradient = len(inputs) > 1 and outputs[0] >= inputs[1]
        return inputs[0] + (inputs[1] if gives_input_gradient else 0)
    if op.name.startswith("aten.upsample_"):
        return outputs[0] + inputs[0] if "backward" not in op.name else inputs[0]
    if op.name == "aten.mkldnn_rnn_layer.default":
        saved = recorder.values[op.outputs[-1]]
        saved.bytes = saved.bytes or int(_RNN_SAVED_PER_OUTPUT * outputs[0])  # fakes make it empty
        return int(_RNN_INSIDE_PER_WEIGHT * inputs[1])
    if op.name == "aten.mkldnn_rnn_layer_backward.default":
        return int(_RNN_INSIDE_PER_WEIGHT * inputs[1])
    return 0


def _attention(layouts: tuple[Layout, ...], outputs: list[int]) -> int:
    """Of each thread, a tile of scores, and of its rows the maxima, the sums and the output."""
    rows, columns, width = _tile(layouts[0], layouts[1])
    return torch.get_num_threads() * _FLOAT_BYTES * rows * (columns + 2 + width)


def _attention_backward(layouts: tuple[Layout, ...], outputs: list[int]) -> int:
    """Of each thread, two tiles; and a copy of the gradient, unless it lies as the output does."""
    gradient, query, key, *_ = layouts
    rows, columns, _ = _tile(query, key)
    copied = 0 if gradient.is_contiguous(0, 2, 1, 3) else gradient.bytes
    return _FLOAT_BYTES * rows * (2 * columns * torch.get_num_threads() + 1) + copied


def _tile(query: Layout, key: Layout) -> tuple[int, int, int]:
    """Rows and columns of the scores that one thread computes at a time, and the width of a head."""
    num_rows, num_columns = query.shape[-2], key.shape[-2]
    most = 256 if num_rows >= 768 else 64 if num_rows >= 192 else 32
    return min(num_rows, most), min(num_columns, 512), query.shape[-1]


def _layer_norm_backward(layouts: tuple[Layout, ...], outputs: list[int]) -> int:
    """Of each thread, sums for the weight and for the bias."""
    gradient, given, mean = layouts[:3]
    width = math.prod(given.shape) // max(math.prod(mean.shape), 1)
    return 2 * _FLOAT_BYTES * width * torch.get_num_threads() + _copied(gradient, given)


def _batch_norm_backward(layouts: tuple[Layout, ...], outputs: list[int]) -> int:
    """Another gradient of the input, if there is a fast path: gradient and input both contiguous or channels last."""
    for order in ((), (0, *range(2, len(layouts[0].shape)), 1)):
        if all(layout.is_contiguous(*order) for layout in layouts[:2]) and not (order and len(order) == 3):
            return outputs[0]
    return outputs[-1]


def _copied(*layouts: Layout) -> int:
    """Kernels that read contiguous tensors only copy others."""
    return sum(layout.bytes for layout in layouts if not layout.is_contiguous())


def _copies(num: int) -> _Rule:
    return lambda layouts, outputs: _copied(*layouts[:num])


_FLOAT_BYTES = 4
_SHAPED: dict[str, _Rule] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _attention_backward,
    "aten.native_layer_norm.default": _copies(1),
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
    "aten.logsumexp.default": lambda layouts, outputs: layouts[0].bytes + outputs[0],
    "aten._softmax.default": _copies(1),
    "aten._log_softmax.default": _copies(1),
    "aten._softmax_backward_data.default": _copies(2),
    "aten._log_softmax_backward_data.default": _copies(2),
    "aten.nll_loss_forward.default": _copies(1),
    "aten.embedding_dense_backward.default": _copies(1),
}
