"""The private torch API that engines need, with what would make it obsolete."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from lowtide._compat import (
    BOOKKEEPING_OPS,
    PLAIN_TYPES,
    accelerator,
    clone_all,
    current_hooks,
    disable_dynamo,
    is_sharded,
    module_tensors,
    overwrite_all,
    storage_id,
    submodules,
    under_functorch,
    version_of,
    versions_of,
    without_modes,
)
from lowtide.tracing._compat import parts_of
from lowtide.tracing.records import tensors_in

__all__ = [
    "BOOKKEEPING_OPS",
    "PLAIN_TYPES",
    "accelerator",
    "clone_all",
    "disable_dynamo",
    "is_sharded",
    "module_tensors",
    "overwrite_all",
    "submodules",
    "under_functorch",
    "version_of",
    "versions_of",
    "without_modes",
]

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


def saves_are_nobodys() -> bool:
    """Whether saved-tensor hooks may be put on, and no one else has. Obsolete with public ways to ask."""
    return current_hooks() is None and torch._C._autograd._saved_tensors_hooks_is_enabled() and not under_functorch()


def are_in_force(hooks: Any) -> bool:
    """Whether these saved-tensor hooks are the ones that see what is saved now. Obsolete like `current_hooks`."""
    current = current_hooks()
    return current is not None and current[0] is hooks.pack_hook


def storages_of(tensor: Tensor) -> list[int]:
    """What a tensor's bytes are in, as a trace tells it: one storage, several for a wrapper of several tensors."""
    return list(dict.fromkeys(storage_id(part) for part in parts_of(tensor)))


def num_storages(tensor: Tensor) -> int:
    """`len(storages_of(tensor))`, quickly."""
    return 1 if len(parts_of(tensor)) == 1 else len(storages_of(tensor))


def checkpoint_in_force() -> Any | None:
    """What tells the innermost torch checkpoint that runs or replays here from others; None outside of any.

    Its pack hook, which a hook further in hides. Obsolete with a public way to ask for the checkpoint one is in.
    """
    hooks = current_hooks()
    if hooks is None or getattr(hooks[0], "__module__", None) != "torch.utils.checkpoint":
        return None
    return hooks[0]


def is_watched(inputs: Any) -> bool:
    """Whether tensors are stand-ins here, or every op is being watched: in a trace, a transform or a capture.

    Obsolete with public ways to ask for the dispatch modes in force and whether a tensor is fake.
    """
    if under_functorch() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return True
    return any(type(tensor) not in PLAIN_TYPES or tensor.is_meta for tensor in tensors_in(inputs))


def bare_twin(module: nn.Module, twins: dict[nn.Module, nn.Module], tensors: dict[int, Tensor]) -> nn.Module:
    """A module with the same attributes whose slots for parameters, buffers and modules are its own.

    `tensors` are the tensors that go into the slots, by the id of those in the original. This is how DataParallel makes
    replicas; obsolete with a public way to.
    """
    if module not in twins:
        twins[module] = twin = object.__new__(type(module))
        vars(twin).update(vars(module))
        for slots in ("_parameters", "_buffers"):
            own = {name: tensors.get(id(tensor), tensor) for name, tensor in vars(module)[slots].items()}
            vars(twin)[slots] = own
        children = vars(module)["_modules"].items()
        vars(twin)["_modules"] = {
            name: None if child is None else bare_twin(child, twins, tensors) for name, child in children
        }
    return twins[module]
