"""Canaries for `_compat/autograd.py`: version counters, saved-tensor hooks, autograd nodes and torch's checkpoint."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn

from lowtide._compat import autograd


def test_version_counters_can_be_read_and_set() -> None:
    x = torch.zeros(2)
    x.add_(1)
    assert autograd.version_of(x) == autograd.version_of_saved(x) == 1, "Tensor._version no longer counts changes"
    with torch.inference_mode():
        frozen = torch.zeros(2)
    assert autograd.versions_of([x, frozen]) == [1, 0], "inference tensors no longer raise for _version"
    autograd.set_version(x, 7)
    assert autograd.version_of(x) == 7, "_unsafe_set_version_counter no longer sets: buffers cannot be restored"
    autograd.set_version(x, 0)
    assert autograd.version_of(x) == 0, "_unsafe_set_version_counter no longer sets: buffers cannot be restored"


def test_tensors_are_overwritten_with_their_versions() -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    copies = autograd.clone_all(tensors)
    for tensor in tensors:
        tensor.zero_()
    autograd.overwrite_all(tensors, copies, [3, 4])
    assert all(bool(tensor.all()) for tensor in tensors), "_foreach_copy_ no longer copies: buffers cannot be restored"
    assert autograd.versions_of(tensors) == [3, 4], "_unsafe_set_version_counter no longer sets several counters"


def test_tensors_are_overwritten_whatever_became_of_their_memory() -> None:
    """Bytes fit only a tensor that is laid out as when it was copied."""
    matrix, strided = torch.arange(9.0).view(3, 3), torch.arange(6.0)[::2]
    resized, cast = torch.arange(4), torch.ones(3)
    tensors = [matrix, strided, resized, cast, torch.zeros(0), torch.ones(2, dtype=torch.complex64)]
    expected = [tensor.clone() for tensor in tensors]
    copies = autograd.clone_all(tensors)
    for tensor in tensors:
        tensor.zero_()
    matrix.t_()
    resized.resize_(7)
    cast.data = torch.zeros(3, dtype=torch.float64)
    autograd.overwrite_all(tensors, copies, [5] * len(tensors))
    assert all(map(torch.equal, tensors, [*expected[:3], expected[3].double(), *expected[4:]]))
    assert autograd.versions_of(tensors) == [5] * len(tensors)
    assert all(map(torch.equal, map(autograd.as_tensor, copies), expected))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")  # of torch 2.11
def test_statistics_of_norms_are_copied_in_one_kernel_per_dtype() -> None:
    norms = nn.Sequential(*(nn.BatchNorm1d(8) for _ in range(3))).cuda()
    statistics = list(norms.buffers())
    expected = [tensor.clone() for tensor in statistics]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        copies = autograd.clone_all(statistics)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.name.startswith("void ")]
    assert len(kernels) == 2, kernels  # float32 and int64
    norms(torch.ones(4, 8, device="cuda"))
    autograd.overwrite_all(statistics, copies, autograd.versions_of(statistics))
    assert all(map(torch.equal, statistics, expected))


def test_tensors_without_memory_of_their_own_are_copied_by_torch() -> None:
    def with_a_copy(x: Tensor) -> Tensor:
        (copied,) = autograd.clone_all([x])
        return x.sum() * autograd.as_tensor(copied).sum()

    assert torch.func.grad(with_a_copy)(torch.ones(3)).tolist() == [3, 3, 3]  # no gradient through the copy


def test_tensors_that_share_memory_are_exchanged_and_back() -> None:
    for strided in (False, True):  # bytes, or copies by torch
        whole = torch.arange(4.0)
        tensors = [whole, whole[::2] if strided else whole[:2]]
        before = autograd.clone_all(tensors)
        whole.add_(1)
        present, versions = autograd.exchange_all(tensors, before, [0, 0])
        assert whole.tolist() == [0, 1, 2, 3]
        autograd.overwrite_all(tensors, present, versions)
        assert whole.tolist() == [1, 2, 3, 4] and autograd.version_of(whole) == 1


def test_a_watch_sees_changes_of_aliases() -> None:
    x = torch.zeros(4)
    watch = autograd.VersionWatch(x)
    assert not watch.has_changed()
    x[:2].add_(1)
    assert watch.has_changed(), "setting .data of a detached alias no longer keeps its version counter"


def test_views_have_bases() -> None:
    x = torch.zeros(4)
    assert autograd.version_owner(x[1:]) is x, "Tensor._base is no longer the tensor that a view was made of"


def test_hooks_are_pushed_and_popped() -> None:
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    assert autograd.no_hooks_in_force() and not autograd.is_replayed()
    autograd.push_hooks(pack, lambda tensor: tensor)
    try:
        hooks = autograd.current_hooks()
        assert hooks is not None and hooks[0] is pack, "_top_saved_tensors_default_hooks returns other hooks"
        assert autograd.is_replayed() and not autograd.no_hooks_in_force()
        torch.ones(2, requires_grad=True).exp()
    finally:
        autograd.pop_hooks()
    assert len(seen) == 1, "_push_saved_tensors_default_hooks no longer installs hooks: replays see no saves"
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor) as hooks_in_force:
        del hooks_in_force
    hooks_object = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks_object:
        assert autograd.hooks_are_in_force(hooks_object), "saved_tensors_hooks.pack_hook is gone"


def test_gradients_are_switched() -> None:
    autograd.set_grad_enabled(False)
    try:
        assert not torch.is_grad_enabled(), "_set_grad_enabled no longer switches"
    finally:
        autograd.set_grad_enabled(True)


def test_nodes_are_numbered_in_the_order_of_the_forward() -> None:
    x = torch.ones(2, requires_grad=True)
    start = autograd.sequence_number()
    y = x.exp()
    z = y.sin()
    assert y.grad_fn is not None and z.grad_fn is not None
    numbers = [autograd.sequence_of(y.grad_fn), autograd.sequence_of(z.grad_fn)]
    assert numbers == [start, start + 1], "autograd nodes are no longer numbered one by one: early stops fail"
    nodes = autograd.autograd_nodes_since(start, [z.grad_fn])
    assert [node.name() for node in nodes[:2]] == ["ExpBackward0", "SinBackward0"], "names or order of nodes changed"
    assert "AccumulateGrad" in nodes[-1].name(), "accumulators no longer carry the highest sequence number"
    assert autograd.leaves_of(z)[0] is x, "AccumulateGrad.variable is gone: leaves of a loss are not found"


def test_the_running_node_is_known_in_a_backward() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    y.register_hook(lambda gradient: seen.append((autograd.running_node(), autograd.is_replayed())))
    y.sum().backward()
    assert autograd.running_node() is None
    assert seen[0][0] is not None, "_current_autograd_node is None in a backward"
    assert seen[0][1], "_current_graph_task_id is -1 in a backward"


def test_ops_that_save_before_they_fill_are_named_as_before() -> None:
    y = nn.functional.rrelu(torch.ones(2, requires_grad=True), training=True)
    assert y.grad_fn is not None and autograd.fills_later(y.grad_fn), f"rrelu's node is now {y.grad_fn.name()}"


def test_casts_and_views_of_parameters_are_recognised() -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    for derived in (weight, weight[0], weight.t(), weight.to(torch.float64).t()):
        assert autograd.is_parameter_or_view_of_one(derived), f"a view or cast of a parameter is now {derived.grad_fn}"
    assert not autograd.is_parameter_or_view_of_one(weight * 2)


def test_gradient_hooks_are_seen() -> None:
    x = torch.ones(2, requires_grad=True)
    assert not autograd.has_gradient_hooks(x)
    x.register_post_accumulate_grad_hook(lambda leaf: None)
    assert autograd.has_gradient_hooks(x), "Tensor._post_accumulate_grad_hooks is gone"


def test_marked_versions_are_shared_by_views() -> None:
    alias = autograd.with_marked_version(torch.ones(2, 2))
    assert autograd.has_marked_version(alias) and autograd.has_marked_version(alias[0]), "views count changes apart"
    op = torch.ops.aten._unsafe_view.default
    output = op(alias, [4])
    autograd.propagate_version_mark(op, (alias, [4]), output)
    assert autograd.has_marked_version(output)


def test_a_call_after_the_backward() -> None:
    calls: list[bool] = []
    original = torch.autograd._engine_run_backward
    watch = autograd.BackwardReturn(calls.append)
    watch.install()
    y = torch.ones(2, requires_grad=True).sum()
    y.backward(retain_graph=True)
    assert calls == [False], "torch.autograd.backward no longer calls _engine_run_backward"
    y.backward(retain_graph=True)
    assert len(calls) == 1 and torch.autograd._engine_run_backward is original
    watch.install()
    y.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        y.backward()
    assert calls[1:] == [True]


def test_a_backward_in_another_thread_is_not_the_next_one() -> None:
    calls: list[bool] = []
    watch = autograd.BackwardReturn(calls.append)
    watch.install()
    with ThreadPoolExecutor(1) as other:
        other.submit(torch.ones(2, requires_grad=True).sum().backward).result()
    assert not calls
    torch.ones(2, requires_grad=True).sum().backward()
    assert calls == [False]


def test_hooks_for_saves_of_ops_run_with_gradients_disabled() -> None:
    modes = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        modes.append(torch.is_grad_enabled())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        torch.ones(2, requires_grad=True).exp()
    assert modes == [False], "replays take a save under enabled gradients for the input of an inner region"


def test_ops_that_save_results_are_named_as_before() -> None:
    x = torch.ones(2, 4, requires_grad=True)
    for layer in (nn.ReLU(), nn.LayerNorm(4), nn.BatchNorm1d(4), nn.Softmax(-1), nn.Tanh(), nn.Sigmoid()):
        node = layer(x).grad_fn
        assert node is not None and autograd.saves_results(node), f"{layer} has the node {node and node.name()}"
    for layer in (nn.Linear(4, 4), nn.GELU()):
        node = layer(x).grad_fn
        assert node is not None and not autograd.saves_results(node)


def test_an_op_in_place_saves_a_clone_whose_node_is_the_newest() -> None:
    saved: list[tuple[bool, int]] = []

    def pack(tensor: Tensor) -> Tensor:
        node = tensor.grad_fn
        assert node is not None
        saved.append((autograd.is_clone(node), autograd.sequence_number() - 1 - autograd.sequence_of(node)))
        return tensor.detach()

    x = torch.ones(2, requires_grad=True) * 3
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        x.pow_(2)
    assert saved == [(True, 0)]


def test_settings_are_read() -> None:
    setting = autograd.checkpoint_setting
    assert setting("early_stop", True) and not setting("early_stop", False)
    with torch_checkpoint.set_checkpoint_early_stop(False):
        assert not setting("early_stop", True), "torch.utils.checkpoint._enable_checkpoint_early_stop is gone"
    with torch_checkpoint.set_checkpoint_debug_enabled(True):
        assert setting("debug_enabled", False), "torch.utils.checkpoint._checkpoint_debug_enabled is gone"


def test_a_running_checkpoint_is_recognised() -> None:
    seen: list[Any] = []

    def region(x: torch.Tensor) -> torch.Tensor:
        seen.append(autograd.checkpoint_in_force())
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
    seen = autograd.selective_ops(forward)
    assert seen is not None, "torch.utils.checkpoint._CachingTorchDispatchMode is gone: useless policies go unnoticed"
    policy, ran, saved_any = seen
    assert callable(policy) and str(op) in ran and saved_any, "the storage of selective checkpoints has another form"
    assert autograd.selective_ops(object()) is None


def test_torchs_function_and_error_are_found() -> None:
    assert autograd.find_torch_checkpoint() is torch_checkpoint.checkpoint, "torch's checkpoint is not recognised"
    assert issubclass(autograd.TorchCheckpointError, RuntimeError), "torch's CheckpointError is no RuntimeError"
