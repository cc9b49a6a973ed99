"""The private torch API that replays with retained outputs need, with what would make it obsolete."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import flop_registry

from lowtide._compat.dynamo import never_compiled
from lowtide._compat.tensors import is_plain, storage_id

# Namespaces of ops that communicate. Obsolete when torch tags such ops.
COLLECTIVE_NAMESPACES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_dtensor"})


class DispatchMode(TorchDispatchMode):
    """What sees every op that reaches a kernel. Obsolete when `torch.utils` exports it.

    torch's own keeps the compiler out by two calls before each op; here it is kept out for nothing.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__torch_dispatch__" in vars(cls):
            cls.__torch_dispatch__ = never_compiled(cls.__torch_dispatch__)  # type: ignore[method-assign]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def flattened(output: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """What an op's output consists of, and how to put it together again. Obsolete with a public `pytree`."""
    parts, structure = tree_flatten(output)
    return parts, functools.partial(tree_unflatten, treespec=structure)


_CAST = torch.ops.aten._to_copy.default


def is_cast_of_weight(op: Any, args: Any) -> bool:
    """Whether an op casts a parameter, or another leaf, as autocast does once and then remembers.

    Obsolete with a public `_to_copy`.
    """
    return op is _CAST and (isinstance(args[0], nn.Parameter) or is_cached_cast(op, args))


def writes(op: Any) -> bool:
    """Whether an op writes to an argument, so that its output is not its own. Obsolete with a public schema."""
    return getattr(getattr(op, "_schema", None), "is_mutable", False)


def is_op_with_schema(op: Any) -> bool:
    """Whether an op is one that says what it does with its arguments, unlike those that take functions."""
    return hasattr(op, "_schema")


def gives_views(op: Any) -> bool:
    """Whether what an op gives is a view of what it was given. Obsolete with a public schema."""
    return getattr(op, "is_view", False)


def has_dynamic_shape(op: Any) -> bool:
    """Whether the shape of an op's output depends on values."""
    return torch.Tag.dynamic_output_shape in getattr(op, "tags", ())


def reveals_values(op: Any, args: Any, output: Any) -> bool:
    """Whether Python may decide by values after an op ran: read from a tensor, from a shape, or from host memory.

    Obsolete when torch tags every op that does.
    """
    if op is _INDEX:
        return any(isinstance(index, Tensor) and index.dtype in _MASKS for index in args[1])
    if op in _COPIES:
        return output.device.type == "cpu" and any(isinstance(a, Tensor) and a.device.type != "cpu" for a in args)
    known = _tells_values.get(id(op))
    if known is None:
        tags = getattr(op, "tags", ())
        returns = getattr(getattr(op, "_schema", None), "returns", None)
        _tells_values[id(op)] = known = (
            torch.Tag.data_dependent_output in tags
            or torch.Tag.dynamic_output_shape in tags
            or returns is None  # an op that calls functions
            or not all(_is_of_tensors(value.type) for value in returns)
        )
    return known


def _is_of_tensors(kind: Any) -> bool:
    return "Tensor" in str(kind)


_tells_values: dict[int, bool] = {}  # by op, which lives as long as torch does and takes long to hash
_INDEX = torch.ops.aten.index.Tensor
_MASKS = (torch.bool, torch.uint8)
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default, torch.ops.aten.copy.default)


def is_cached_cast(op: Any, args: Any) -> bool:
    """Whether an op is a cast that autocast remembers, for all of its block. Obsolete with a public `_to_copy`."""
    return op is _CAST and args[0].requires_grad and args[0].is_leaf


def op_facts(op: Any) -> tuple[str, str, frozenset[int], bool, bool]:
    """Of an op: namespace, name, which arguments it writes to, whether it draws random numbers, whether it is a view.

    Obsolete when `OpOverload` shows its schema publicly.
    """
    schema = op._schema
    written = frozenset(
        index for index, arg in enumerate(schema.arguments) if arg.alias_info is not None and arg.alias_info.is_write
    )
    is_random = torch.Tag.nondeterministic_seeded in op.tags
    return op.namespace, str(op), written, is_random, bool(op.is_view)


def op_argument_names(op: Any) -> list[str]:
    return [argument.name for argument in op._schema.arguments]


class ReadGuard(TorchDispatchMode):
    """Calls `refuse(tensor)` for the first of `tensors` (or an alias) that an op is given."""

    def __init__(self, tensors: Sequence[Tensor], refuse: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._guarded = {storage_id(tensor): tensor for tensor in tensors if is_plain(tensor)}
        self._refuse = refuse

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and is_plain(value) and storage_id(value) in self._guarded:
                self._refuse(self._guarded[storage_id(value)])
        return func(*args, **(kwargs or {}))


def under_functorch() -> bool:
    """Whether a torch.func transform is running. Obsolete when torch.func supports saved-tensor hooks (#122729)."""
    return torch._C._functorch.peek_interpreter_stack() is not None


# Ops that compute nothing and make no storage: questions about a tensor, other names for one, a constant's first.
BOOKKEEPING_OPS = frozenset(
    {
        torch.ops.prim.device.default,
        torch.ops.aten.detach.default,
        torch.ops.aten.alias.default,
        torch.ops.aten.lift_fresh.default,
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    }
)


def is_op(value: Any) -> bool:
    return isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket | torch._ops.HigherOrderOperator)


num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack  # in this thread. Obsolete with a public one


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """A block whose ops no dispatch mode sees (a selective checkpoint would count them)."""
    return _disable_current_modes() if num_dispatch_modes() else contextlib.nullcontext()


# For any device type, in one call. Obsolete with a public one.
is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled


@contextlib.contextmanager
def bare_kernels() -> Iterator[None]:
    """A block whose ops are kernels and nothing else: no history, no casts, and nobody sees them.

    Obsolete with a public way to switch autocast off for all devices.
    """
    with torch.no_grad(), torch._C._DisableAutocast(), without_modes():
        yield


# What sees every op that reaches a kernel. Obsolete when `torch.utils` exports it.
PlainDispatchMode = TorchDispatchMode


def is_op_overload(target: Any) -> bool:
    """Whether what a node calls is an op with a schema, and not Python or a graph inside the graph."""
    return isinstance(target, torch._ops.OpOverload)


def returns_number(op: Any) -> bool:
    """Whether an op's result is no tensor: `item`, `equal`. Obsolete with a public schema."""
    results = [str(result.type) for result in op._schema.returns]
    return bool(results) and all(kind in ("number", "Scalar", "bool", "int", "float") for kind in results)


def op_packet(op: Any) -> Any:
    return getattr(op, "_overloadpacket", op)


def flop_formula(op: Any) -> Callable[..., Any] | None:
    """The FLOP count of an op, as a function of its arguments and `out_val`; None for ops without one.

    Obsolete when torch documents `torch.utils.flop_counter.flop_registry`.
    """
    return flop_registry.get(op_packet(op))


class OpNames(TorchDispatchMode):
    """Lists the ops inside it that a recorder would record. Obsolete like `PlainDispatchMode`."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in BOOKKEEPING_OPS:
            self.names.append(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))
