"""The private torch API that replays with retained outputs need, with what would make it obsolete."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from types import CellType, FunctionType
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint_module
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lowtide._compat import (
    BOOKKEEPING_OPS,
    PLAIN_TYPES,
    StorageReference,
    bare_kernels,
    is_op,
    is_plain,
    never_compiled,
    set_version,
    storage_id,
    under_functorch,
    version_of,
    without_modes,
)

__all__ = [
    "BOOKKEEPING_OPS",
    "PLAIN_TYPES",
    "StorageReference",
    "bare_kernels",
    "is_op",
    "is_plain",
    "never_compiled",
    "set_version",
    "storage_id",
    "under_functorch",
    "version_of",
    "without_modes",
]

# A bound method of a module with one of these names runs the whole module. Obsolete with a public way to ask.
WHOLE_MODULE_METHODS = frozenset({"forward", "__call__", "_call_impl", "_wrapped_call_impl"})
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


def marked(tensor: Tensor) -> Tensor:
    """The same bytes with changes counted from a number that no one comes to, so that it and its views are known again.

    Obsolete with a public `preserve_version_counter`.
    """
    alias = tensor.data
    set_version(alias, _MARK)
    return alias


def is_marked(tensor: Tensor) -> bool:
    return version_of(tensor) == _MARK


def pass_mark_on(op: Any, args: Any, output: Any) -> None:
    """Mark what shares a marked argument's bytes but does not count changes with it."""
    if op in _UNTOLD_VIEWS and is_marked(args[0]):
        set_version(output, _MARK)


_MARK = 1 << 30
_UNTOLD_VIEWS = (torch.ops.aten._unsafe_view.default, torch.ops.aten._reshape_alias.default)


def taken_apart(output: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """What an op's output consists of, and how to put it together again. Obsolete with a public `pytree`."""
    parts, structure = tree_flatten(output)
    return parts, functools.partial(tree_unflatten, treespec=structure)


_CAST = torch.ops.aten._to_copy.default


def is_cast_of_weight(op: Any, args: Any) -> bool:
    """Whether an op casts a parameter, or another leaf, as autocast does once and then remembers.

    Obsolete with a public `_to_copy`.
    """
    return op is _CAST and (isinstance(args[0], nn.Parameter) or may_be_remembered(op, args))


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


def tells_values(op: Any, args: Any, output: Any) -> bool:
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


def is_own(tensor: Tensor) -> bool:
    """Whether a tensor is all of its memory, and its numbers are there as they are: none to be conjugated or negated.

    Obsolete with a public way to ask for tensors that stand for zeros.
    """
    return (
        is_plain(tensor)
        and tensor.storage_offset() == 0
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor._is_zerotensor())
    )


def may_be_remembered(op: Any, args: Any) -> bool:
    """Whether an op is a cast that autocast remembers, for all of its block. Obsolete with a public `_to_copy`."""
    return op is _CAST and args[0].requires_grad and args[0].is_leaf


def storages_of(tensor: Tensor) -> list[int]:
    """What a tensor's bytes are in, as a trace tells it: one storage, several for a wrapper of several tensors."""
    return list(dict.fromkeys(storage_id(part) for part in parts_of(tensor)))


def early_stop(default: bool) -> bool:
    """`torch.utils.checkpoint.set_checkpoint_early_stop`, if in force, else `default`. Obsolete when it can be read."""
    enabled: bool | None = torch_checkpoint_module._enable_checkpoint_early_stop
    return default if enabled is None else enabled


def checkpoint_debug(default: bool) -> bool:
    """`torch.utils.checkpoint.set_checkpoint_debug_enabled`, if in force, else `default`. Obsolete likewise."""
    enabled: bool | None = torch_checkpoint_module._checkpoint_debug_enabled
    return default if enabled is None else enabled


def selective_ops(mode: Any) -> tuple[Callable[..., Any], list[str], bool] | None:
    """What a selective checkpoint's forward mode saw: its policy, the ops that ran, and whether any was saved.

    None for a context of another kind. On torch 2.11 only ops that were saved are listed.
    """
    if not isinstance(mode, torch_checkpoint_module._CachingTorchDispatchMode):
        return None
    recompute = getattr(torch_checkpoint_module, "_RECOMPUTE", None)
    saved = any(
        entry is not recompute
        for entries in mode.storage.values()
        for entry in (entries.values() if isinstance(entries, dict) else entries)
    )
    return mode.policy_fn, [str(key[0] if isinstance(key, tuple) else key) for key in mode.storage], saved


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that hold a tensor's bytes: itself, or what a wrapper subclass wraps, all the way down."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [inner for name in names for inner in inner_tensors(getattr(tensor, name))]
    if tensor.layout is not torch.strided:
        parts = {
            torch.sparse_coo: ("_indices", "_values"),
            torch.sparse_csr: ("crow_indices", "col_indices", "values"),
        }.get(tensor.layout, ())
        with _disable_current_modes():
            return [part for name in parts for part in inner_tensors(getattr(tensor, name)())]
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return [tensor]


def parts_of(tensor: Tensor) -> Sequence[Tensor]:
    """`inner_tensors`, quickly."""
    if (
        type(tensor) in PLAIN_TYPES
        and tensor.layout is torch.strided
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    ):
        return (tensor,)
    return inner_tensors(tensor)


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


def find_torch_checkpoint() -> Callable[..., Any]:
    """torch's own `checkpoint`, also where another library has put a function of its own in its place.

    Such libraries keep torch's: as another attribute of the module (Unsloth, ms-swift), or as what their function
    wraps, closes over or is a partial of. If it is not found, the function that is there is returned.
    """
    names = vars(torch_checkpoint_module)
    candidates, seen = [names["checkpoint"], *names.values()], set()
    for candidate in candidates:  # grows
        if id(candidate) in seen or not isinstance(candidate, FunctionType | functools.partial):
            continue
        seen.add(id(candidate))
        if _is_torch_checkpoint(candidate):
            return candidate
        cells = getattr(candidate, "__closure__", None) or ()
        candidates += [cell.cell_contents for cell in cells if cell != CellType()]
        candidates += [getattr(candidate, name, None) for name in ("__wrapped__", "func")]
    return names["checkpoint"]  # type: ignore[no-any-return]


def _is_torch_checkpoint(function: Any) -> bool:
    """Whether a function is the one that torch defines, under decorators of torch's and nobody else's."""
    chain = [function]
    while hasattr(chain[-1], "__wrapped__"):
        chain.append(chain[-1].__wrapped__)
    spaces = [getattr(each, "__globals__", {}) for each in chain]
    is_defined_there = spaces[-1] is vars(torch_checkpoint_module) and chain[-1].__name__ == "checkpoint"
    return is_defined_there and all(str(space.get("__name__")).startswith("torch.") for space in spaces)


# Bound once, at import: people who replace `torch.utils.checkpoint.checkpoint` by ours must not make ours call itself.
torch_checkpoint = find_torch_checkpoint()
TorchCheckpointError = torch_checkpoint_module.CheckpointError


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


def companion_of(module: nn.Module) -> Any:
    """What `set_companion` has given to a module, else None."""
    return getattr(vars(module).get("_state_dict_pre_hooks"), _COMPANION, None)


def set_companion(module: nn.Module, companion: Any) -> None:
    """Let an object belong to a module and live as long, out of sight: it is an attribute of one of its hook dicts.

    The module's own attributes are its user's. Obsolete with ephemerons in Python, or a public slot on modules.
    """
    with contextlib.suppress(AttributeError):  # a ScriptModule: what it holds is found anew for each call
        setattr(vars(module).get("_state_dict_pre_hooks"), _COMPANION, companion)


_COMPANION = "lowtide_companion"
