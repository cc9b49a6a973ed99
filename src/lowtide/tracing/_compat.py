"""The private torch API that tracing needs, one small function each, with what would make it obsolete."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

from lowtide._compat import (
    BOOKKEEPING_OPS,
    PLAIN_TYPES,
    accelerator,
    autograd_nodes_since,
    generator_id,
    is_plain,
    is_uninitialized,
    module_tensors,
    profiler_is_active,
    sequence_number,
    set_version,
    storage_id,
    submodules,
    version_of,
    without_modes,
)
from lowtide.replay._compat import inner_tensors, op_facts, parts_of

__all__ = [
    "BOOKKEEPING_OPS",
    "PLAIN_TYPES",
    "accelerator",
    "generator_id",
    "inner_tensors",
    "is_plain",
    "is_uninitialized",
    "module_tensors",
    "op_facts",
    "parts_of",
    "profiler_is_active",
    "register_optimizer_step_pre_hook",
    "sequence_number",
    "set_version",
    "storage_id",
    "submodules",
    "version_of",
    "without_modes",
]


# What sees every op that reaches a kernel. Obsolete when `torch.utils` exports it.
DispatchMode = TorchDispatchMode


def running_node() -> Any | None:
    """The autograd node whose backward runs now. Obsolete with a public one."""
    return torch._C._current_autograd_node()


def node_number(node: Any) -> int:
    """The number of a node: nodes are numbered in the order the forward made them. Obsolete with a public one."""
    return node._sequence_nr()


def remove_global_hook(handle: Any) -> None:
    """Take off a hook of all modules. torch 2.13 forgets one of its books, and `torch.compile` then warns of hooks."""
    handle.remove()
    nn.modules.module._global_forward_hooks_with_kwargs.pop(handle.id, None)


class StorageUses:
    """How many tensors share a storage, without counting as one of them. Obsolete with a public use count."""

    __slots__ = ("_reference", "id")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._reference = StorageWeakRef(storage)
        self.id: int = self._reference.cdata

    def count(self) -> int:
        return 0 if self._reference.expired() else torch._C._storage_Use_Count(self.id) - _uses_by_python()


@functools.cache
def _uses_by_python() -> int:
    """What a storage's own Python object adds to its uses: it differs between versions of torch."""
    with _disable_current_modes():
        tensor = torch.empty(1)
        return torch._C._storage_Use_Count(StorageWeakRef(tensor.untyped_storage()).cdata) - 1


def compiler_is_imported() -> bool:
    """Whether anything can have been compiled. Obsolete when `torch.compiler.set_stance` imports no compiler."""
    return "torch._dynamo" in sys.modules


def fake_mode() -> Any:
    """Tensors that have shapes and devices and no bytes. Obsolete when `torch.compiler` or `torch.utils` exports it."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: Tensor) -> bool:
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    return fake is not None and isinstance(tensor, fake.FakeTensor)


def fake_type() -> type:
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """A block in which fake tensors raise and do not also log; their logger has no public name."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = was


def fake_kernel(op: Any) -> Callable[..., Any]:
    """What runs an op on fake tensors: the op itself, or a kernel for what torch's fake version of it refuses."""
    return _fake_grouped_mm if op is torch.ops.aten._grouped_mm.default else op


def _fake_grouped_mm(a: Tensor, b: Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Tensor:
    """`_grouped_mm` in any dtype that its kernels take. torch 2.13's fake version takes bfloat16 alone."""
    from torch._meta_registrations import _create_grouped_mm_output_tensor

    return _create_grouped_mm_output_tensor(a, b, offs, out_dtype)


def fake_errors() -> tuple[type[Exception], ...]:
    """What fake tensors raise where only real numbers would tell: sizes or branches that depend on data."""
    from torch._subclasses import fake_tensor

    return (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedOperatorException,
        fake_tensor.UnsupportedFakeTensorException,
    )


def leaves_of(output: Tensor) -> list[Tensor]:
    """The leaves that a backward from `output` accumulates into."""
    return [node.variable for node in autograd_nodes_since(0, [output.grad_fn]) if hasattr(node, "variable")]


def allocator_meter(device: torch.device) -> Callable[[], tuple[int, int]] | None:
    """Reads bytes allocated now and the most since it was last read; None on the CPU, whose allocator does not count.

    Obsolete when `torch.accelerator.memory_allocated` is as quick.
    """
    if device.type != "cuda":
        return None

    def read() -> tuple[int, int]:
        counted = torch._C._cuda_memoryStats(device.index)["allocated_bytes"]["all"]
        torch._C._cuda_resetPeakMemoryStats(device.index)
        return counted["current"], counted["peak"]

    return read


def is_op(target: Any) -> bool:
    """Whether what a node calls is an op with a schema, and not Python or a graph inside the graph."""
    return isinstance(target, torch._ops.OpOverload)


def gives_a_number(op: Any) -> bool:
    """Whether an op's result is no tensor: `item`, `equal`. Obsolete with a public schema."""
    results = [str(result.type) for result in op._schema.returns]
    return bool(results) and all(kind in ("number", "Scalar", "bool", "int", "float") for kind in results)


def op_packet(op: Any) -> Any:
    return getattr(op, "_overloadpacket", op)


def holds_hooks(name: str) -> bool:
    """Whether the attribute of that name of an optimizer holds its hooks. Obsolete with a public way to list them."""
    return name.endswith("_hooks")


def foreach_rule() -> Callable[[dict[str, Any], list[Tensor]], bool]:
    """Whether an optimizer updates all parameters of a group at once. Obsolete when torch.optim says so publicly."""
    from torch.optim.optimizer import _default_to_fused_or_foreach

    def uses_foreach(group: dict[str, Any], parameters: list[Tensor]) -> bool:
        if group.get("fused"):
            return False
        if group.get("foreach") is not None:
            return bool(group["foreach"])
        return _default_to_fused_or_foreach(parameters, group.get("differentiable", False), use_fused=False)[1]

    return uses_foreach


# Categories of events in the profiler's trace. Obsolete when torch documents the format of its traces.
RUNTIME_EVENTS = ("cuda_runtime", "cuda_driver")
DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")


def waits_for_device(name: str) -> bool:
    """Whether a runtime call of the profiler's trace returns when the device has caught up. Obsolete likewise."""
    return "Synchronize" in name or name in ("cudaMemcpy", "hipMemcpy")


def profiler_name(name: str) -> str:
    """The name of an op's events in the profiler's trace: `aten::add` for `aten.add.Tensor`. Obsolete likewise."""
    space, _, rest = name.partition(".")
    return f"{space}::{rest.split('.')[0]}"


def is_tensor_value(value: Any) -> bool:
    """Whether what a node of a graph gives is a tensor, fake or not."""
    return isinstance(value, Tensor)


def value_of(node: Any) -> Any:
    """What a node of a graph gives, as AOTAutograd notes it: fake tensors, alone or in a tuple; None if unknown.

    Obsolete when `torch.fx` documents `node.meta["val"]`.
    """
    return node.meta.get("val")


def module_stack(node: Any) -> dict[str, tuple[str, Any]] | None:
    """The module calls in which Dynamo met a node, the outermost first: path and class (or its name) by call.

    Obsolete when Dynamo documents `node.meta["nn_module_stack"]`.
    """
    return node.meta.get("nn_module_stack")


_ROOTS = re.compile(r"^L\[['\"](\w+)['\"]\]|^L__(\w+?)___")


def clean_path(path: str) -> str:
    """A module's path as `named_modules` would give it, from the source that Dynamo names it by.

    >>> clean_path("L['self'].layers.0.attn"), clean_path("L['self']._modules['layers'][0]"), clean_path("L['self']")
    ('layers.0.attn', 'layers.0', '')
    """
    path = _ROOTS.sub("", path)
    path = re.sub(r"\._modules\[['\"]([^'\"]+)['\"]\]", r".\1", path)
    path = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", path)
    return path.strip(".")


def hinted_numel(value: Tensor) -> int:
    """Elements of a fake tensor; a symbolic size counts as what it was when the graph was made.

    Obsolete when `torch.export` or `torch.compiler` shows the hints of symbolic sizes.
    """
    return int(hint(value.numel()) or 0)


def flop_formula(op: Any) -> Callable[..., Any] | None:
    """The FLOP count of an op, as a function of its arguments and `out_val`; None for ops without one.

    Obsolete when torch documents `torch.utils.flop_counter.flop_registry`.
    """
    return flop_registry.get(op_packet(op))


def node_flops(node: Any) -> int:
    """FLOPs of one node of a graph by torch's own formulas; 0 for what has none."""
    formula = flop_formula(node.target)
    if formula is None:
        return 0
    args, kwargs = node_arguments(node, lambda value: value)
    try:
        # As hinted: a symbolic number that is asked for its value would be a constant of the graph from then on.
        return int(hint(formula(*args, **kwargs, out_val=value_of(node))))
    except (TypeError, ValueError, AttributeError, RuntimeError, AssertionError):  # sizes that a formula does not know
        return 0


def node_arguments(node: Any, change: Callable[[Any], Any]) -> tuple[Any, Any]:
    """The arguments of a node, with each node among them replaced by what `change` makes of its value."""
    from torch.fx.node import map_arg

    def value(each: Any) -> Any:
        return change(value_of(each))

    return map_arg(node.args, value), map_arg(node.kwargs, value)


def hint(size: Any) -> Any:
    """What a symbolic size was when the graph was made; other things as they are. Obsolete like `hinted_numel`."""
    node = getattr(size, "node", None)
    return node.hint if node is not None and isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool) else size


class OpNames(TorchDispatchMode):
    """Lists the ops inside it that a recorder would record. Obsolete like `DispatchMode`."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in BOOKKEEPING_OPS:
            self.names.append(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def real_world() -> Iterator[None]:
    """A block in which tensors are real, in the middle of a compiler's pass over fake ones.

    Obsolete when `torch.compiler` lets a backend run an op.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.utils._python_dispatch import _disable_current_modes

    with unset_fake_temporarily(), _disable_current_modes():
        yield


def node_argument(node: Any, name: str) -> Any:
    """The argument of that name in a node's call, its default where it is not given; None where there is none such."""
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.name == name:
            return node.args[index] if index < len(node.args) else node.kwargs.get(name, argument.default_value)
    return None


def written_inputs(joint: Any) -> list[Any]:
    """The inputs of a joint graph that its forward changes: in the graph, or by what runs it, from an output.

    Obsolete when AOTAutograd's descriptions of inputs and outputs are public.
    """
    nodes = list(joint.nodes)
    described = nodes[-1].meta.get("desc") or ()
    changed = [each.mutated_input for each in described if hasattr(each, "mutated_input")]
    inputs = [node for node in nodes if node.op == "placeholder"]
    found = [node for node in inputs if node.meta.get("desc") in changed]
    for node in nodes:
        if node.target is torch.ops.aten.copy_.default and node.args[0] in inputs:
            found.append(node.args[0])
    return found
