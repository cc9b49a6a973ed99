"""Memory that recording a forward and backward does not show: optimizer state, and workspaces of kernels.

**Optimizer** (`optimizer_memory`): state that exists after the first step, and the most that a step allocates on top.
A copy of the optimizer with tensors on the meta device takes one step, in which allocations are counted; the optimizer
itself is only read. If that fails (an optimizer with its own CUDA kernels), the bytes of its present state are used,
with a note.

**Workspaces** (`predict_workspaces`): real traces measure what a kernel allocates internally; fake tensors run no
kernels. The rules here predict it for kernels with large workspaces: oneDNN's convolutions and recurrent layers,
attention and norms on the CPU; reductions, attention and convolutions on CUDA. They were read off torch's present
kernels and can go out of date; for other kernels the prediction is 0.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from lowtide import _compat
from lowtide.errors import LowtideError
from lowtide.replay.arguments import map_tensors, tensors_in
from lowtide.replay.op_facts import facts_of
from lowtide.snapshot import ObjectSnapshot
from lowtide.tracing.devices import block_bytes
from lowtide.tracing.recorder import Recorder
from lowtide.tracing.trace_records import Layout, RawOp
from lowtide.units import in_blocks

_META = torch.device("meta")
_MOST_WRAPPERS = 8  # nested around one optimizer


def plain_optimizer(optimizer: Any, model: nn.Module | None = None) -> torch.optim.Optimizer | None:
    """Return the `torch.optim.Optimizer` that holds the state: `optimizer`, or the `.optimizer` of a wrapper.

    A wrapper, such as accelerate's, is not an optimizer, or has `param_groups` or `state` as properties. Raises
    `TypeError` for anything else, and `ValueError` if a `model` is given and the optimizer has none of its parameters.
    """
    if optimizer is None:
        return None
    plain = optimizer
    for _ in range(_MOST_WRAPPERS):
        if not _is_plain(plain):
            plain = getattr(plain, "optimizer", None)
    if not _is_plain(plain):
        raise TypeError(
            "optimizer is a torch.optim.Optimizer, or a wrapper with one as its `.optimizer`, not "
            f"{optimizer!r:.80} of type {type(optimizer).__name__}"
        )
    if model is not None and not _updates(plain, model):
        raise ValueError(
            f"this {type(plain).__name__} has no parameter of the {type(model).__name__} given with it: make it from "
            "model.parameters() of this very model, not of a copy"
        )
    return plain


def _is_plain(optimizer: Any) -> TypeGuard[torch.optim.Optimizer]:
    """Whether this is an optimizer with parameter groups and states as plain attributes."""
    return isinstance(optimizer, torch.optim.Optimizer) and all(
        name in vars(optimizer) and not hasattr(type(optimizer), name) for name in ("param_groups", "state")
    )


def _updates(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    """Whether an optimizer has a parameter of the model, or one that shares its storage (a flattened one)."""

    def memory_of(parameters: Iterable[Tensor]) -> set[int]:
        return {_compat.storage_id(part) for parameter in parameters for part in _compat.parts_of(parameter)}

    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return not given or not memory_of(given).isdisjoint(memory_of(model.parameters()))


def optimizer_memory(optimizer: Any, device: torch.device) -> tuple[int, int, list[str]]:
    """Return the bytes of an optimizer's state after its first step, the most its step allocates on top, and notes.

    They are bytes on `device`, which the model may have been traced for only. State on the host (an offloaded
    optimizer, step counters unless they are `fused` or `capturable`) does not count, but for models on the CPU. The
    optimizer itself is only read.
    """
    optimizer = plain_optimizer(optimizer)
    if optimizer is None:
        return 0, 0, []
    try:
        state_bytes, workspace_bytes = _run_on_meta(optimizer, device)
    except Exception as error:  # such as an optimizer with its own CUDA kernels
        is_on_host = all(p.device.type == "cpu" for group in optimizer.param_groups for p in group["params"])
        present = _bytes_of(optimizer.state, block_bytes(device), with_host=is_on_host)
        note = (
            f"the state of {type(optimizer).__name__} could not be predicted ({type(error).__name__}: "
            f"{str(error)[:80]}); its present {present} bytes are counted. Trace after its first step."
        )
        return present, 0, [note]
    return state_bytes, workspace_bytes, []


def present_state_bytes(optimizer: Any, device: torch.device) -> int:
    """Return the bytes of an optimizer's present state on a device; 0 if the optimizer is None."""
    plain, block = plain_optimizer(optimizer), block_bytes(device)
    states = plain.state.values() if plain is not None else ()
    tensors = (tensor for state in states for tensor in tensors_in(state) if tensor.device == device)
    return sum(in_blocks(part.nbytes, block) for tensor in tensors for part in _compat.parts_of(tensor))


def state_bytes_of(model: nn.Module, device: torch.device, given: torch.optim.Optimizer | None = None) -> int:
    """Return the bytes of state that optimizers hold on a device for a model's parameters now.

    They are all optimizers of the process, and the one `given`, which the user's `gc.freeze()` may hide.
    """
    wanted = {id(parameter) for parameter in model.parameters()}
    optimizers = [item for item in gc.get_objects() if issubclass(type(item), torch.optim.Optimizer)]
    sizes: dict[int, int] = {}
    for optimizer in [*optimizers, *([] if given is None else [given])]:
        # One whose constructor has raised has no state.
        for parameter, state in dict(getattr(optimizer, "state", None) or {}).items():
            if id(parameter) in wanted:
                for tensor in tensors_in(state):
                    if tensor.device == device:
                        sizes[id(tensor)] = _compat.local_bytes(tensor)
    return sum(sizes.values())


def _run_on_meta(optimizer: torch.optim.Optimizer, device: torch.device) -> tuple[int, int]:
    """Step a copy of the optimizer on the meta device; return its state's bytes and the step's workspace bytes."""
    snapshot, copies, block = ObjectSnapshot([vars(optimizer)]), _MetaCopies(), block_bytes(device)
    try:
        copy = copies.of(optimizer)
        before = _bytes_of(copy.state, block)
        live = _LiveBytes(copies.before_write, block)
        with torch.no_grad(), live:
            type(optimizer).step(copy)
    finally:
        copies.restore()
        snapshot.restore()  # the copy shares objects and queues in attributes with the original
    after, groups = _bytes_of(copy.state, block), optimizer.param_groups
    # The copy has its step counters on the host.
    counts_steps = device.type == "cpu" or any(group.get("fused") or group.get("capturable") for group in groups)
    state_bytes = _bytes_of(copy.state, block, with_host=counts_steps)
    if all(group.get("fused") for group in groups):  # one kernel updates all in place
        return state_bytes, 0
    return state_bytes, max(0, live.most_bytes - (after - before))


class _MetaCopies:
    """Copies of optimizers with their tensors on the meta device, so that stepping a copy leaves the original alone."""

    def __init__(self) -> None:
        self._tensors: dict[int, Tensor] = {}
        self._numbers: list[tuple[Tensor, Tensor]] = []

    def of(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return a copy of an optimizer, with a gradient for each parameter that requires one."""
        copy = object.__new__(type(optimizer))
        own = vars(copy)
        for name, item in vars(optimizer).items():
            if name.endswith("_hooks"):
                own[name] = OrderedDict()
            elif name == "state":
                own[name] = defaultdict(dict)
            elif isinstance(item, torch.optim.Optimizer):  # an inner optimizer, as in Lookahead
                own[name] = self.of(item)
            elif name not in ("step", "param_groups"):  # a scheduler's `step` is bound to the original
                own[name] = map_tensors(self._on_meta, item)
        own["param_groups"] = [self._group(group) for group in optimizer.param_groups]
        for parameter, state in optimizer.state.items():
            copy.state[self._on_meta(parameter)] = map_tensors(self._on_meta, state)
        return copy

    def _group(self, group: dict[str, Any]) -> dict[str, Any]:
        copied: dict[str, Any] = map_tensors(self._on_meta, group)
        if "foreach" in group:
            copied["foreach"] = _compat.uses_foreach(group, group["params"])
        if "fused" in group:
            copied["fused"] = None if copied.get("foreach") else False
        if group.get("capturable"):
            copied["capturable"] = False
        for parameter in copied["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        return copied

    def before_write(self, target: Tensor | torch.Generator) -> None:
        """Called before a write to a tensor from before the step: remember a single number, refuse anything else."""
        if not isinstance(target, Tensor) or (not target.is_meta and target.numel() > 1):
            raise LowtideError("its step writes to something that is not in its param_groups, state or attributes")
        if not target.is_meta:
            with _compat.without_modes():
                self._numbers.append((target, target.detach().clone()))

    def restore(self) -> None:
        """Restore numbers of the original that the step changed, such as step counters kept in a list."""
        for target, number in reversed(self._numbers):
            target.copy_(number)

    def _on_meta(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._tensors:
            if tensor.numel() == 1 and tensor.device.type == "cpu":
                self._tensors[id(tensor)] = tensor.clone()  # a step counter: its value is read
            else:
                # Of a DTensor the shard: optimizers work on it element by element, with a state of its size.
                held = _compat.parts_of(tensor)[0] if _compat.is_sharded(tensor) else tensor
                bare = torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device=_META)
                is_parameter = isinstance(tensor, nn.Parameter)
                self._tensors[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if is_parameter else bare
        return self._tensors[id(tensor)]


class _LiveBytes(_compat.DispatchMode):
    """Counts the bytes of tensors on the meta device that ops allocate and that are still referenced.

    `most_bytes` is their peak. An op that reads a number from a tensor (a norm, to scale by) returns 1.0, as no size
    depends on it. A finalizer subtracts a freed storage, so an op costs the same however many tensors are alive.
    """

    def __init__(self, before_write: Callable[[Tensor | torch.Generator], None], block: int) -> None:
        super().__init__()
        self.most_bytes = 0
        self._before_write, self._block = before_write, block
        self._live_bytes, self._made = 0, set[int]()  # storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _compat.returns_number(func):
            return 1.0
        kwargs = kwargs or {}
        for tensor in facts_of(func).written_tensors(args, kwargs):
            if _compat.storage_id(tensor) not in self._made:
                self._before_write(tensor)
        for item in (*args, *kwargs.values()):
            if isinstance(item, torch.Generator):
                self._before_write(item)
        given = {_compat.storage_id(part) for part in _plain_tensors((args, kwargs))}
        out = func(*args, **kwargs)
        for part in _plain_tensors(out):
            name = _compat.storage_id(part)
            if name not in given and name not in self._made:
                self._add(part, name)
        self.most_bytes = max(self.most_bytes, self._live_bytes)
        return out

    def _add(self, tensor: Tensor, name: int) -> None:
        storage = tensor.untyped_storage()
        size = in_blocks(storage.nbytes(), self._block) if tensor.is_meta else 0
        self._made.add(name)
        self._live_bytes += size
        weakref.finalize(storage, self._remove, name, size).atexit = False

    def _remove(self, name: int, size: int) -> None:
        self._made.discard(name)
        self._live_bytes -= size


def _plain_tensors(tree: Any) -> Iterator[Tensor]:
    return (part for tensor in tensors_in(tree) for part in _compat.parts_of(tensor))


def _bytes_of(states: Any, block: int, *, with_host: bool = False) -> int:
    """Return the bytes of states in blocks of an allocator, those of tensors on the host only `with_host`."""
    sizes: dict[int, int] = {}
    for state in states.values():
        for item in state.values() if isinstance(state, dict) else ():
            for tensor in item if isinstance(item, list | tuple) else [item]:
                if isinstance(tensor, Tensor) and (with_host or tensor.device.type != "cpu"):
                    for part in _compat.parts_of(tensor):
                        size = part.untyped_storage().nbytes()
                        sizes[_compat.storage_id(part)] = in_blocks(size, block)
    return sum(sizes.values())


# From the layouts of an op's inputs and the bytes of its outputs to its workspace bytes.
_Rule = Callable[[tuple[Layout, ...], list[int]], int]

# Of an LSTM or GRU layer: bytes of its saved workspace per byte of output, and of its temporaries per byte of a weight.
_RNN_SAVED_PER_OUTPUT = 15.6
_RNN_INSIDE_PER_WEIGHT = 3.1


# Of CUDA's reductions and attention: bytes per element or per byte of output, measured on an H200.
_SUM_BYTES_PER_ELEMENT, _SUM_MOST_BYTES_PER_SM = 8, 1 << 20
_ATTENTION_BACKWARD_PER_OUTPUT = 2.0


def predict_workspaces(recorder: Recorder) -> None:
    """Set the predicted workspace of each op of a recording on fake tensors."""
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
    if op.name.startswith("aten.convolution"):  # channels-last copies of inputs and output
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
    """Per thread: a tile of scores, and for its rows the maxima, the sums and the output."""
    rows, columns, width = _tile(layouts[0], layouts[1])
    return torch.get_num_threads() * _FLOAT_BYTES * rows * (columns + 2 + width)


def _attention_backward(layouts: tuple[Layout, ...], outputs: list[int]) -> int:
    """Per thread: two tiles; and a copy of the gradient if its strides differ from the output's."""
    gradient, query, key, *_ = layouts
    rows, columns, _ = _tile(query, key)
    copied = 0 if gradient.is_contiguous(0, 2, 1, 3) else gradient.bytes
    return _FLOAT_BYTES * rows * (2 * columns * torch.get_num_threads() + 1) + copied


def _tile(query: Layout, key: Layout) -> tuple[int, int, int]:
    """Return rows and columns of the scores that one thread computes at a time, and the width of a head."""
    num_rows, num_columns = query.shape[-2], key.shape[-2]
    most = 256 if num_rows >= 768 else 64 if num_rows >= 192 else 32
    return min(num_rows, most), min(num_columns, 512), query.shape[-1]


def _layer_norm_backward(layouts: tuple[Layout, ...], outputs: list[int]) -> int:
    """Per thread: sums for the gradients of weight and bias; and copies of non-contiguous inputs."""
    gradient, given, mean = layouts[:3]
    width = math.prod(given.shape) // max(math.prod(mean.shape), 1)
    return 2 * _FLOAT_BYTES * width * torch.get_num_threads() + _copied(gradient, given)


def _batch_norm_backward(layouts: tuple[Layout, ...], outputs: list[int]) -> int:
    """A second gradient of the input, if the fast path runs: gradient and input both contiguous or channels last."""
    for order in ((), (0, *range(2, len(layouts[0].shape)), 1)):
        if all(layout.is_contiguous(*order) for layout in layouts[:2]) and not (order and len(order) == 3):
            return outputs[0]
    return outputs[-1]


def _copied(*layouts: Layout) -> int:
    """Return the bytes of the non-contiguous tensors, which kernels copy."""
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
