"""The private torch API that engines need, with what would make it obsolete."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from lowtide._compat import BOOKKEEPING_OPS, version_of, without_modes

__all__ = ["BOOKKEEPING_OPS", "version_of", "without_modes"]

# What sees every op that reaches a kernel. Obsolete when `torch.utils` exports it.
DispatchMode = TorchDispatchMode


def detached(output: Any) -> Any:
    """An op's output without its history, sharing its version counters: below autograd, views do so only if asked.

    Obsolete with a public `pytree`, and when torch's selective checkpoint says how it does this.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tree_map_only(Tensor, Tensor.detach, output)


def is_cast_of_parameter(op: Any, args: Any) -> bool:
    """Whether an op casts a parameter, as autocast does once and then remembers. Obsolete with a public `_to_copy`."""
    return op is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter)


def writes(op: Any) -> bool:
    """Whether an op writes to an argument, so that its output is not its own. Obsolete with a public schema."""
    return getattr(getattr(op, "_schema", None), "is_mutable", False)
