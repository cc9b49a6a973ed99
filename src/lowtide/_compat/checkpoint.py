"""`torch.utils.checkpoint`: its settings, its selective policies, and whether one of its regions is running.

`lowtide.checkpoint` is a drop-in for torch's: it follows the same settings, falls back to torch's own inside
`torch.compile`, and raises errors that code written for torch's catches. Each docstring ends with the change of torch
that would make it obsolete.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any

import torch.utils.checkpoint as torch_checkpoint_module

from lowtide._compat.autograd import current_hooks
from lowtide._compat.internals import optional


def checkpoint_in_force() -> Any | None:
    """Return the pack hook of the innermost checkpoint region that runs or replays in this thread; None outside of any.

    A hook that was installed inside the region hides it, unless that hook has an attribute `passes_on_to`. Obsolete
    with a public function that returns the current region.
    """
    hooks = current_hooks()
    while hooks is not None and "passes_on_to" in getattr(hooks[0], "__dict__", ()):
        hooks = hooks[0].passes_on_to  # type: ignore[attr-defined]
    module = "" if hooks is None else getattr(hooks[0], "__module__", None) or ""
    return hooks[0] if hooks is not None and module.startswith(_CHECKPOINTS) else None


_CHECKPOINTS = ("torch.utils.checkpoint", "lowtide.replay.")


def early_stop(default: bool) -> bool:
    """Return the value of `torch.utils.checkpoint.set_checkpoint_early_stop` if in force, else `default`.

    Obsolete with a public getter. Without the private one, the setting is ignored: it only saves time.
    """
    enabled: bool | None = getattr(torch_checkpoint_module, "_enable_checkpoint_early_stop", None)
    return default if enabled is None else enabled


def checkpoint_debug(default: bool) -> bool:
    """Return the value of `torch.utils.checkpoint.set_checkpoint_debug_enabled` if in force, else `default`.

    Obsolete likewise.
    """
    enabled: bool | None = getattr(torch_checkpoint_module, "_checkpoint_debug_enabled", None)
    return default if enabled is None else enabled


def selective_ops(mode: Any) -> tuple[Callable[..., Any], list[str], bool] | None:
    """Return the policy of a selective checkpoint's forward mode, the ops that ran, and whether any was saved.

    None for a context of another kind. On torch 2.11 only ops that were saved are listed. Obsolete when torch itself
    reports policies that match no op.
    """
    mode_type: Any = getattr(torch_checkpoint_module, "_CachingTorchDispatchMode", ())
    if not isinstance(mode, mode_type):
        return None
    recompute = getattr(torch_checkpoint_module, "_RECOMPUTE", None)
    saved = any(
        entry is not recompute
        for entries in mode.storage.values()
        for entry in (entries.values() if isinstance(entries, dict) else entries)
    )
    return mode.policy_fn, [str(key[0] if isinstance(key, tuple) else key) for key in mode.storage], saved


def find_torch_checkpoint() -> Callable[..., Any]:
    """Return torch's own `checkpoint`, also if another library has replaced it in `torch.utils.checkpoint`.

    Such libraries keep a reference to torch's: in another attribute of the module (Unsloth, ms-swift), or in what their
    function wraps, closes over or is a partial of. If none of these is torch's, the replacement is returned. Obsolete
    when libraries stop replacing it.
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
    """Return whether a function is defined by torch and decorated only by torch."""
    chain = [function]
    while hasattr(chain[-1], "__wrapped__"):
        chain.append(chain[-1].__wrapped__)
    spaces = [getattr(each, "__globals__", {}) for each in chain]
    is_defined_there = spaces[-1] is vars(torch_checkpoint_module) and chain[-1].__name__ == "checkpoint"
    return is_defined_there and all(str(space.get("__name__")).startswith("torch.") for space in spaces)


# Bound at import: a user who replaces `torch.utils.checkpoint.checkpoint` by lowtide's must not make it call itself.
torch_checkpoint = find_torch_checkpoint()
if TYPE_CHECKING:
    TorchCheckpointError = torch_checkpoint_module.CheckpointError
else:  # a RuntimeError; not in torch's `__all__`
    TorchCheckpointError = optional("torch.utils.checkpoint.CheckpointError", RuntimeError)
