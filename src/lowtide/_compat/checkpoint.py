"""torch's own activation checkpointing: whether it is in force, and its settings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

import torch.utils.checkpoint as torch_checkpoint_module

from lowtide._compat.autograd import current_hooks


def checkpoint_in_force() -> Any | None:
    """What tells the innermost checkpoint that runs or replays here from others; None outside of any.

    Its pack hook, which a hook further in hides, unless that passes everything on. Obsolete with a public way to ask
    for the checkpoint one is in.
    """
    hooks = current_hooks()
    while hooks is not None and "passes_on_to" in getattr(hooks[0], "__dict__", ()):
        hooks = hooks[0].passes_on_to  # type: ignore[attr-defined]
    module = "" if hooks is None else getattr(hooks[0], "__module__", None) or ""
    return hooks[0] if hooks is not None and module.startswith(_CHECKPOINTS) else None


_CHECKPOINTS = ("torch.utils.checkpoint", "lowtide.replay.")


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
