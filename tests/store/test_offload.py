"""`lowtide.offload` and `checkpoint(store=)`: saved tensors live in the store, and nothing else changes."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import ActivationStore
from lowtide._compat.profiler import cpu_allocation_totals
from lowtide.errors import CapacityError
from lowtide.solvers.placement import Placement
from stepping import Runner, assert_exact, plainly


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def model(width: int = 32) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, width), nn.GELU(), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, width), nn.Tanh()
    )


def offloading(**options: Any) -> Runner:
    """Runs its function inside `offload`; the plain run leaves it out."""

    def run(function: Any, *args: Any, **kwargs: Any) -> Any:
        with lowtide.offload(min_bytes=0, **options):
            return plainly(function, *args, **kwargs)

    return run


TIERS: dict[str, dict[str, Any]] = {
    "host": {"host": "1GiB"},
    "device": {"device": "1GiB", "host": None},
    "device then host": {"device": 9000, "host": "1GiB"},
    "disk": {"host": None, "disk": "1GiB"},
    "host then disk": {"host": 9000, "disk": "1GiB"},
    "lossless": {"host": "1GiB", "codec": "lossless"},
}


@pytest.mark.parametrize("tiers", TIERS)
def test_gradients_are_exact(tiers: str) -> None:
    def step(run: Runner, model: nn.Module, inputs: Any) -> Tensor:
        outer = offloading(**TIERS[tiers]) if run is lowtide.checkpoint else plainly
        return outer(model, inputs[0])

    assert_exact(step, model(), [leaf(64, 32)])


@pytest.mark.parametrize("order", ["checkpoint inside", "offload inside"])
def test_with_checkpoint_inside_and_outside(order: str) -> None:
    def step(run: Runner, model: nn.Module, inputs: Any) -> Tensor:
        outer = offloading(host="1GiB") if run is lowtide.checkpoint else plainly
        if order == "checkpoint inside":
            return outer(lambda x: run(model[3:], run(model[:3], x)), inputs[0])
        return run(lambda x: outer(model, x), inputs[0])

    assert_exact(step, model(), [leaf(64, 32)])


def test_double_backward_and_retained_graphs() -> None:
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        with lowtide.offload(min_bytes=0, host="1MiB"):
            return x.sin().exp() * x

    assert torch.autograd.gradcheck(function, x) and torch.autograd.gradgradcheck(function, x)
    output = function(x).sum()
    first = torch.autograd.grad(output, x, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(output, x)[0])


def test_everything_is_released() -> None:
    store = ActivationStore(host="1GiB")
    net, x = model(), leaf(64, 32)

    def forward(fail: bool = False) -> Tensor:
        with lowtide.offload(store, min_bytes=0):
            h = net(x)
            if fail:
                raise RuntimeError("boom")
            return h.sum()

    gc.disable()
    try:
        for _ in range(3):
            loss = forward()
            assert store.stats().held_bytes > 0
            loss.backward()  # outside of the context
            assert store.stats().held_bytes == 0 and len(store) == 0
            loss = forward()
            del loss  # no backward at all
            assert len(store) == 0
            with pytest.raises(RuntimeError, match="boom"):
                forward(fail=True)
            assert len(store) == 0
    finally:
        gc.enable()


def test_saved_bytes_leave_the_device_tier_and_the_books_match_the_profiler() -> None:
    store = ActivationStore(host="1GiB")
    x, held = leaf(256, 256), []

    def forward() -> None:
        with lowtide.offload(store, min_bytes=0):
            h = x
            for _ in range(4):
                h = h.sin()
            held.append(h.sum())

    totals = cpu_allocation_totals(forward)
    # x itself and three intermediates are saved and copied; the last one's source is gone, the result is a scalar
    assert store.stats().held_bytes == 4 * x.nbytes
    assert totals[-1] == store.stats().held_bytes + held[0].nbytes


def test_the_last_layers_stay_on_the_device() -> None:
    store = ActivationStore(device=3 * 4096, host="1GiB")
    x = leaf(1024)
    with lowtide.offload(store, min_bytes=0):
        h = x
        for _ in range(8):
            h = h.exp().tanh()
    tiers = [entry.tier for entry in store.stats().entries]
    assert tiers == sorted(tiers, reverse=True) and tiers.count("device") == 3
    h.sum().backward()
    (plain,) = torch.autograd.grad(_eight(x).sum(), x)
    assert torch.equal(x.grad, plain)


def _eight(x: Tensor) -> Tensor:
    for _ in range(8):
        x = x.exp().tanh()
    return x


def test_parameters_and_buffers_are_not_moved() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.register_buffer("mask", torch.rand(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.mask + x @ self.mask.t()

    store, net = ActivationStore(host="1GiB"), Masked()
    x = leaf(64, 64)
    with lowtide.offload(store, min_bytes=0):
        loss = net(x).sum()
    shapes = store.stats().num_held
    assert shapes == 1 and store.stats().held_bytes == x.nbytes  # the input of the linear layer, and no weight or mask
    loss.backward()


def test_views_of_one_storage_are_moved_once() -> None:
    store = ActivationStore(host="1GiB")
    x = leaf(64, 96)
    with lowtide.offload(store, min_bytes=0):
        q, k, v = (x * 1).view(64, 3, 32).unbind(1)
        loss = (q * k + k * v).sum()
    assert store.stats().held_bytes == x.nbytes
    loss.backward()
    (plain,) = torch.autograd.grad((lambda q, k, v: (q * k + k * v).sum())(*(x * 1).view(64, 3, 32).unbind(1)), x)
    assert torch.equal(x.grad, plain)


def test_parts_of_one_storage_with_version_counters_of_their_own_are_not_mixed_up() -> None:
    """A GRU writes in place into the results of `unsafe_chunk`, one after the other, each saved when it is done."""

    def gradients(context: Any) -> list[Tensor]:
        torch.manual_seed(0)
        cells, x = nn.GRU(8, 8), torch.randn(4, 2, 8)
        with context:
            loss = cells(x)[0].square().mean()
        loss.backward()
        return [parameter.grad for parameter in cells.parameters()]

    expected = gradients(contextlib.nullcontext())
    for actual, wanted in zip(gradients(lowtide.offload(min_bytes=0)), expected, strict=True):
        assert torch.equal(actual, wanted)


def test_small_tensors_stay() -> None:
    store = ActivationStore(host="1GiB")
    with lowtide.offload(store, min_bytes="1KiB"):
        loss = leaf(10).exp().sum() + leaf(1000).exp().sum()
    assert store.stats().num_held == 1
    loss.backward()


@pytest.mark.parametrize("min_bytes", [0, "1MiB"])
@pytest.mark.parametrize("alive", [True, False])
def test_a_change_in_place_is_refused_as_autograd_would(min_bytes: Any, alive: bool) -> None:
    """Whether the tensor was moved or left where it was, and whether its own object still lives or only an alias."""
    base = leaf(64) * 1
    with lowtide.offload(min_bytes=min_bytes, host="1MiB"):
        h = base.view(8, 8)
        loss = h.exp().sum() + (h * h).sum()
    if not alive:
        del h
    base.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_several_threads_share_a_store() -> None:
    store = ActivationStore(device=50_000, host="1GiB")
    failures: list[int] = []

    def train(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(64, 64, generator=generator).requires_grad_()
        for _ in range(10):
            with lowtide.offload(store, min_bytes=0):
                loss = _eight(x).sum()
            (ours,) = torch.autograd.grad(loss, x)
            (plain,) = torch.autograd.grad(_eight(x).sum(), x)
            if not torch.equal(ours, plain):
                failures.append(seed)

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len(store) == 0


def test_a_lossy_codec_is_close_and_halves_the_bytes() -> None:
    x = leaf(64, 64)
    exact, half = ActivationStore(host="1GiB"), ActivationStore(host="1GiB", codec="bfloat16")
    for store in (exact, half):
        with lowtide.offload(store, min_bytes=0):
            loss = _eight(x).sum()
        store_bytes = store.stats().held_bytes
        if store is exact:
            exact_bytes = store_bytes
        loss.backward()
    assert store_bytes < 0.52 * exact_bytes


def test_an_evicting_store_is_explained() -> None:
    store = ActivationStore(device=5000, on_full="evict")
    with lowtide.offload(store, min_bytes=0):
        loss = _eight(leaf(1000)).sum()
    with pytest.raises(lowtide.StoreError, match="on_full='spill'"):
        loss.backward()


def test_full_budgets_raise_in_the_forward() -> None:
    with pytest.raises(CapacityError, match="Give it more"), lowtide.offload(host=5000, min_bytes=0):
        _eight(leaf(1000))


def test_bad_input() -> None:
    with pytest.raises(TypeError, match="ActivationStore, not dict"):
        lowtide.offload({})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give budgets and codec to the store itself"):
        lowtide.offload(ActivationStore(), codec="int8")


# checkpoint(store=)


@pytest.mark.parametrize("tiers", [{}, {"host": "1GiB"}, {"disk": "1GiB"}], ids=str)
def test_region_inputs_in_a_store(tiers: dict[str, Any], tmp_path: Path) -> None:
    store = ActivationStore(**tiers, folder=tmp_path)

    def step(run: Runner, model: nn.Module, inputs: Any) -> Tensor:
        h = inputs[0]
        for part in (model[:2], model[2:4], model[4:]):
            h = run(lambda state, part=part: part(state["h"]), {"h": h}, store=store)
        if run is lowtide.checkpoint:
            assert store.stats().num_held == 3
        return h

    assert_exact(step, model(), [leaf(64, 32)])
    assert len(store) == 0
    store.close()


def test_a_stored_input_changed_in_place_is_refused() -> None:
    h = leaf(8) * 1
    output = lowtide.checkpoint(lambda h: h.sin().exp(), h, store=ActivationStore(host="1MiB"))
    h.add_(1)
    with pytest.raises(lowtide.CheckpointError, match=r"argument 'h'.*changed in place"):
        output.sum().backward()


@pytest.mark.parametrize("determinism_check", ["default", "none"])
def test_a_replay_keeps_no_copy_of_stored_inputs(determinism_check: str) -> None:
    store, h = ActivationStore(disk="1MiB"), leaf(8) * 1
    seen: list[weakref.ref[Tensor]] = []

    def region(h: Tensor) -> Tensor:
        if lowtide.is_recomputing():
            seen.append(weakref.ref(h))
        return h.sin().exp()

    output = lowtide.checkpoint(region, h, store=store, determinism_check=determinism_check, early_stop=False)
    torch.autograd.grad(output.sum(), h, retain_graph=True)
    assert [reference() for reference in seen] == [None]


def test_store_is_reserved() -> None:
    with pytest.raises(TypeError, match=r"functools\.partial"):
        lowtide.checkpoint(lambda x, store: x, leaf(3), store={})
    with pytest.raises(ValueError, match="use_reentrant=False"):
        lowtide.checkpoint(torch.sin, leaf(3), store=ActivationStore(), use_reentrant=True)
    lowtide.checkpoint(torch.sin, leaf(3), store=None).sum().backward()


# Regressions


def test_small_outputs_dropped_without_a_backward_leak_nothing() -> None:
    """An output kept with its own history would be a cycle through the graph that nothing collects."""
    store = ActivationStore(host="1GiB")
    gc.disable()
    try:
        for _ in range(3):
            with lowtide.offload(store, min_bytes="16KiB"):
                output = leaf(100, 100).exp().mean(0).sigmoid()
            assert len(store) == 1
            del output
            assert len(store) == 0
    finally:
        gc.enable()


def test_subclasses_keep_the_check() -> None:
    class Mine(Tensor):
        pass

    x = leaf(8).as_subclass(Mine) * 1
    with lowtide.offload(min_bytes=0, host="1MiB"):
        loss = x.exp().sum() + (x * x).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.filterwarnings("ignore")
def test_around_a_compiled_function() -> None:
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.Tanh())
    compiled = torch.compile(net, backend="aot_eager")
    x = leaf(8, 16)
    with lowtide.offload(min_bytes=0, host="1MiB"):
        loss = compiled(x).sum()
    (ours,) = torch.autograd.grad(loss, x)
    (plain,) = torch.autograd.grad(net(x).sum(), x)
    assert torch.equal(ours, plain)


def test_sparse_buffers_in_modules_are_no_trouble() -> None:
    net = nn.Linear(8, 8)
    net.register_buffer("sparse", torch.eye(8).to_sparse())
    with lowtide.offload(min_bytes=0, host="1MiB"):
        loss = net(leaf(4, 8)).sum()
    loss.backward()


def test_budgets_beside_a_store_are_refused() -> None:
    with pytest.raises(ValueError, match="to the store itself"):
        lowtide.offload(ActivationStore(), host="1GiB")


def test_noise_that_is_saved_before_it_is_drawn_is_refused() -> None:
    layer = nn.RReLU(0.1, 0.9)
    x = torch.randn(8, 8, requires_grad=True)
    with lowtide.offload(host="1GiB", min_bytes=0):
        loss = layer(x * 2).sum()
    with pytest.raises(lowtide.StoreError, match="saves its noise before the forward draws it"):
        loss.backward()
    with lowtide.offload(host="1GiB", min_bytes=0):  # the cure that the error names
        torch.manual_seed(0)
        loss = lowtide.checkpoint(layer, x * 2).sum()
    (found,) = torch.autograd.grad(loss, x)
    torch.manual_seed(0)
    (expected,) = torch.autograd.grad(layer(x * 2).sum(), x)
    assert torch.equal(found, expected)


def test_plans_never_move_noise_that_is_saved_before_it_is_drawn() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.RReLU(), nn.Linear(8, 8))
    graph = lowtide.trace(model, lambda x: model(x).sum(), torch.randn(4, 8))
    noise = [save.value for save in graph.saves if "rrelu" in graph.ops[save.made].name]
    assert noise
    assert not any(map(Placement(graph).can_move, noise))
    assert any(Placement(graph).can_move(save.value) for save in graph.saves)


def test_rrelu_in_place_on_a_view_is_refused() -> None:
    """There the node that runs in the backward is not that of the op, and does not tell what was saved."""
    model = nn.Sequential(nn.Linear(8, 8), nn.RReLU(inplace=True))
    x = torch.randn(2, 3, 8)  # so that the product is a view
    with pytest.raises(lowtide.StoreError, match="before it draws it"), lowtide.offload(min_bytes=0):
        model(x)
    with lowtide.offload(min_bytes=0):
        loss = model.eval()(x).sum()
    loss.backward()
