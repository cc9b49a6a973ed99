"""Canaries for `_compat/checkpoint.py`: the settings and modes of torch's own checkpoint can be read."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint

from lowtide._compat import checkpoint


def test_settings_are_read() -> None:
    assert checkpoint.early_stop(True) and not checkpoint.early_stop(False)
    with torch_checkpoint.set_checkpoint_early_stop(False):
        assert not checkpoint.early_stop(True), "torch.utils.checkpoint._enable_checkpoint_early_stop is gone"
    with torch_checkpoint.set_checkpoint_debug_enabled(True):
        assert checkpoint.checkpoint_debug(False), "torch.utils.checkpoint._checkpoint_debug_enabled is gone"


def test_a_running_checkpoint_is_recognised() -> None:
    seen: list[Any] = []

    def region(x: torch.Tensor) -> torch.Tensor:
        seen.append(checkpoint.checkpoint_in_force())
        return x.exp()

    x = torch.ones(2, requires_grad=True)
    region(x)
    torch_checkpoint.checkpoint(region, x, use_reentrant=False)
    assert seen[0] is None
    assert seen[1] is not None, "the pack hook of torch's checkpoint is no longer defined in torch.utils.checkpoint"


def test_selective_modes_list_their_ops() -> None:
    op = torch.ops.aten.mm.default
    forward, _ = torch_checkpoint.create_selective_checkpoint_contexts([op])
    with forward:
        torch.ones(2, 2, requires_grad=True) @ torch.ones(2, 2)
    seen = checkpoint.selective_ops(forward)
    assert seen is not None, "torch.utils.checkpoint._CachingTorchDispatchMode is gone: useless policies go unnoticed"
    policy, ran, saved_any = seen
    assert callable(policy) and str(op) in ran and saved_any, "the storage of selective checkpoints has another form"
    assert checkpoint.selective_ops(object()) is None


def test_torchs_function_and_error_are_found() -> None:
    assert checkpoint.find_torch_checkpoint() is torch_checkpoint.checkpoint, "torch's checkpoint is not recognised"
    assert issubclass(checkpoint.TorchCheckpointError, RuntimeError), "torch's CheckpointError is no RuntimeError"
