"""The private torch API that replays with retained outputs need, with what would make it obsolete."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint_module
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

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
    torch_checkpoint,
    under_functorch,
    version_of,
    without_modes,
)
from lowtide.tracing._compat import parts_of

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
    "torch_checkpoint",
    "under_functorch",
    "version_of",
    "without_modes",
]


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
