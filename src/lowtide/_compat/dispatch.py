"""torch's dispatcher: dispatch modes, schemas and tags of ops, autocast, and pytrees of op outputs.

Tracing records every op through a dispatch mode; replays that retain op outputs or repeat index choices run under one
too. All of them decide by what an op's schema says: what it writes, whether it is random, a view, or reveals values to
Python.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowtide._compat.dynamo import never_compiled
from lowtide._compat.internals import optional, required
from lowtide._compat.tensors import disable_modes, is_plain, num_dispatch_modes, storage_id

# A mode in which every op that reaches a kernel can be seen. Obsolete when `torch.utils` exports it.
if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    TorchDispatchMode = required(
        "torch.utils._python_dispatch.TorchDispatchMode", "steps cannot be traced and replays cannot retain op outputs"
    )

# Obsolete with a public pytree.
_PYTREE = "outputs of ops cannot be taken apart, as traces and retained outputs need"
_tree_flatten = required("torch.utils._pytree.tree_flatten", _PYTREE)
_tree_unflatten = required("torch.utils._pytree.tree_unflatten", _PYTREE)
_tree_leaves = required("torch.utils._pytree.tree_leaves", _PYTREE)

_flop_registry = required("torch.utils.flop_counter.flop_registry", "ops cannot be costed by their FLOPs")
_interpreter_stack = required("torch._C._functorch.peek_interpreter_stack", "torch.func transforms cannot be detected")
_DisableAutocast = required("torch._C._DisableAutocast", "replays cannot copy tensors outside of autocast")

# Whether autocast is on for any type of device, in one call: it runs once per region. Obsolete with a public one.
is_any_autocast_enabled: Callable[[], bool] = required(
    "torch._C._is_any_autocast_enabled", "replays cannot restore the autocast state of their forward"
)

# Namespaces of ops that communicate. Obsolete when torch tags such ops.
COLLECTIVE_NAMESPACES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_dtensor"})

_CAST, _INDEX = torch.ops.aten._to_copy.default, torch.ops.aten.index.Tensor
_COPIES = (_CAST, torch.ops.aten.copy_.default, torch.ops.aten.copy.default)


class DispatchMode(TorchDispatchMode):
    """A `TorchDispatchMode` that also sees random ops of DTensors, and whose method Dynamo skips without a wrapper.

    torch's own wraps `__torch_dispatch__` in two Python calls per op for the same purpose. Obsolete when it does not,
    sees these ops, and is public.
    """

    def __init__(self) -> None:
        if type(self) not in _SEE_RANDOM_OPS:
            _see_random_ops(type(self))
        super().__init__()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__torch_dispatch__" in vars(cls):
            cls.__torch_dispatch__ = never_compiled(cls.__torch_dispatch__)  # type: ignore[method-assign]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


_SEE_RANDOM_OPS: set[type] = set()


def _see_random_ops(kind: type) -> None:
    """Let modes of this type see random ops of DTensors on CUDA, as they see all others.

    DTensor calls them through a higher-order op that sets the generator's offset for this rank's shard; a mode without
    a rule for it raises `NotImplementedError`. The rule runs the random op itself under the mode. Obsolete when such a
    rule is part of torch (2.11 has no such higher-order op).
    """
    prims = sys.modules.get("torch._prims.rng_prims")  # imported by torch.distributed.tensor
    random_op = getattr(prims, "run_dtensor_rng_op", None)
    if random_op is None:
        return
    _SEE_RANDOM_OPS.add(kind)

    @random_op.py_impl(kind)
    def run(mode: Any, start: int, end: int, op: Any, *args: Any, **kwargs: Any) -> Any:
        def seen(*args: Any, **kwargs: Any) -> Any:
            with mode:
                return op(*args, **kwargs)

        return random_op(start, end, seen, *args, **kwargs)


def flattened(output: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the leaves of an op's output and a function that builds it from leaves. Obsolete with a public pytree."""
    parts, structure = _tree_flatten(output)
    return parts, functools.partial(_tree_unflatten, treespec=structure)


def is_cast_of_weight(op: Any, args: Any) -> bool:
    """Return whether an op casts a parameter or leaf, which autocast caches. Obsolete with a public `_to_copy`."""
    return op is _CAST and (isinstance(args[0], nn.Parameter) or (args[0].requires_grad and args[0].is_leaf))


def gives_views(op: Any) -> bool:
    """Return whether an op returns a view of an argument. Relies on `OpOverload.is_view`, which is undocumented."""
    return getattr(op, "is_view", False)


def reveals_values(op: Any, args: Any, output: Any) -> bool:
    """Return whether an op reveals values: as a number, a shape, or a copy on the host. Obsolete when torch tags it."""
    if op is _INDEX:
        return any(isinstance(index, Tensor) and index.dtype in _MASKS for index in args[1])
    if op in _COPIES:
        return output.device.type == "cpu" and any(isinstance(a, Tensor) and a.device.type != "cpu" for a in args)
    known = _reveals_values.get(id(op))
    if known is None:
        tags = getattr(op, "tags", ())
        returns = getattr(getattr(op, "_schema", None), "returns", None)
        _reveals_values[id(op)] = known = (
            torch.Tag.data_dependent_output in tags
            or torch.Tag.dynamic_output_shape in tags
            or returns is None  # an op that calls functions
            or not all("Tensor" in str(value.type) for value in returns)
        )
    return known


_reveals_values: dict[int, bool] = {}  # by the id of the op: ops live as long as torch and are slow to hash
_MASKS = (torch.bool, torch.uint8)


def op_facts(op: Any) -> tuple[str, str, frozenset[int], bool, bool, bool]:
    """Return namespace, name, written indices of an op; if random, a view, dynamic. Obsolete with a public schema."""
    aliases = [argument.alias_info for argument in op._schema.arguments]
    written = frozenset(index for index, alias in enumerate(aliases) if alias is not None and alias.is_write)
    is_random, is_dynamic = torch.Tag.nondeterministic_seeded in op.tags, torch.Tag.dynamic_output_shape in op.tags
    return op.namespace, str(op), written, is_random, bool(op.is_view), is_dynamic


def op_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Map the names of an op's arguments to those given, or their defaults (or None). Obsolete with a public schema."""
    arguments = {argument.name: argument.default_value for argument in op._schema.arguments}
    return {**arguments, **dict(zip(arguments, args, strict=False)), **kwargs}


class ReadGuard(DispatchMode):
    """Calls `refuse(tensor)` when an op reads one of `tensors` or an alias of it. Obsolete like `DispatchMode`."""

    def __init__(self, tensors: Sequence[Tensor], refuse: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._guarded = {storage_id(tensor): tensor for tensor in tensors if is_plain(tensor)}
        self._refuse = refuse

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in _tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and is_plain(value) and storage_id(value) in self._guarded:
                self._refuse(self._guarded[storage_id(value)])
        return func(*args, **(kwargs or {}))


def under_functorch() -> bool:
    """Return whether torch.func transforms run. Obsolete when they support saved-tensor hooks (pytorch #122729)."""
    return _interpreter_stack() is not None


# Ops that compute nothing and allocate no storage: queries, aliases, and record_function's marks. Traces leave them
# out. An op that torch no longer has is left out here. Obsolete when torch tags such ops.
BOOKKEEPING_NAMES = (
    *("prim.device.default", "aten.detach.default", "aten.alias.default", "aten.lift_fresh.default"),
    *("profiler._record_function_enter_new.default", "profiler._record_function_exit._RecordFunction"),
)
# Their ids, as ops are slow to hash and live as long as torch.
BOOKKEEPING_IDS = frozenset(id(optional(f"torch.ops.{name}", None)) for name in BOOKKEEPING_NAMES)
DEVICE_QUERY = optional("torch.ops.prim.device.default", None)


def is_op(value: Any) -> bool:
    """Return whether a value is an op of any kind. Obsolete when `torch` exports the types of ops."""
    return isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket | torch._ops.HigherOrderOperator)


_NO_CONTEXT = contextlib.nullcontext()


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Return a context whose ops are hidden from dispatch modes, which may count them. Obsolete with a public one."""
    return disable_modes() if num_dispatch_modes() else _NO_CONTEXT


@contextlib.contextmanager
def bare_kernels() -> Iterator[None]:
    """Run a block without autograd, autocast and dispatch modes. Obsolete with public contexts for the last two."""
    with torch.no_grad(), _DisableAutocast(), without_modes():
        yield


def is_op_overload(target: Any) -> bool:
    """Return whether a value is an op with a schema. Obsolete when `torch` exports `OpOverload`."""
    return isinstance(target, torch._ops.OpOverload)


@functools.cache
def returns_number(op: Any) -> bool:
    """Return whether an op returns a number, as `item` and `equal` do. Obsolete with a public schema."""
    results = [str(result.type) for result in op._schema.returns]
    return bool(results) and all(kind in ("number", "Scalar", "bool", "int", "float") for kind in results)


def op_flops(op: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """Return the FLOPs of a call by torch's formulas; 0 for ops without one, symbolic for symbolic sizes.

    Attention is counted here: torch 2.11 cannot count fewer key heads than query heads, nor the CPU's attention, and
    no version counts that causal attention computes only half of the scores.

    Obsolete when torch documents `torch.utils.flop_counter.flop_registry` and counts attention as kernels run it.
    """
    try:
        if getattr(getattr(op, "overloadpacket", op), "__name__", "").startswith("_scaled_dot_product_"):
            return _attention_flops(op, args, kwargs)
        formula = _flop_formula(op)
        return 0 if formula is None else formula(*args, **kwargs, out_val=out)
    except Exception:  # a formula that does not take these arguments
        return 0


@functools.cache
def _flop_formula(op: Any) -> Any:
    """Torch's formula for an op, or for the op that it does in place: torch has none for `addmm_`."""
    packet = getattr(op, "overloadpacket", op)
    name, other = getattr(packet, "__name__", ""), packet
    if name.endswith("_") and not name.endswith("__"):
        other = getattr(torch.ops.aten, name[:-1], packet)
    return _flop_registry.get(packet, _flop_registry.get(other))


def _attention_flops(op: Any, args: Any, kwargs: Any) -> Any:
    given = op_arguments(op, args, kwargs)
    batch, heads, length, width = given["query"].shape
    others, out_width = given["key"].shape[-2], given["value"].shape[-1]
    # Forward: scores and output. Backward: scores again, then gradients of scores, values, queries and keys.
    widths = 3 * width + 2 * out_width if op.overloadpacket.__name__.endswith("_backward") else width + out_width
    flops = 2 * batch * heads * length * others * widths
    return flops // 2 if given["is_causal"] else flops


class OpNames(DispatchMode):
    """A dispatch mode that lists the ops a trace would record. Obsolete like `DispatchMode`."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if id(func) not in BOOKKEEPING_IDS:
            self.names.append(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


class SynchronizingOps(DispatchMode):
    """Lists ops that make the host wait: `(op, where())` in `found`. Obsolete when torch's sync debug mode does."""

    def __init__(self, where: Callable[[], Any]) -> None:
        super().__init__()
        self.found: list[tuple[str, Any]] = []
        self._where = where

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = torch.cuda.get_sync_debug_mode()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that this is a prototype
                torch.cuda.set_sync_debug_mode("error")
            return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            self.found.append((str(func), self._where()))
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return func(*args, **(kwargs or {}))
