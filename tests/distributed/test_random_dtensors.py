"""Dropout on DTensors under tensor parallelism: a replay draws the random numbers of its forward.

On CUDA, DTensor lets each rank draw its part of one random tensor: a tracker sets the generator's offset before the op,
and to the same value on all ranks after it. The CPU's generator has no offset, and torch has no tracker for it; the one
here seeds the generator instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch._C import DispatchKey
from torch._prims.rng_prims import run_dtensor_rng_op
from torch.distributed.tensor import _dispatch, _random
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import dropout, gelu

import lowtide
from distributed.jobs import Net, rank, run_ranks, same, succeeded
from distributed.test_data_parallel import FAST, loss_of
from distributed.test_sharding import local_gradients, one_mesh
from lowtide.distributed.agreement import plan_hash


class SeedingTracker(_random._RNGStateTracker):
    """DTensor's tracker for a generator without offsets."""

    num_made = 0

    def __init__(self, mesh: Any, run_state_sync: bool = True) -> None:
        super().__init__(torch.device("cpu"))
        SeedingTracker.num_made += 1
        if run_state_sync:
            state = self._get_device_state()
            distributed.broadcast(state, 0)
            self._set_device_state(state)

    def _get_device_state(self) -> Tensor:
        return torch.get_rng_state()

    def _set_device_state(self, state: Tensor) -> None:
        torch.set_rng_state(state)

    @contextlib.contextmanager
    def _distribute_region(self, spec: Any, generator: Any = None) -> Iterator[None]:
        seed = int(torch.empty((), dtype=torch.int64).random_())
        after = torch.get_rng_state()
        is_split = any(placement.is_shard() for placement in spec.placements)
        torch.manual_seed(seed + (rank() if is_split else 0))
        try:
            yield
        finally:
            torch.set_rng_state(after)


def use_tracker() -> None:
    """Have DTensor use the tracker on the CPU, for the rest of the process."""
    _random.OffsetBasedRNGTracker = SeedingTracker  # type: ignore[assignment, misc]
    _dispatch.is_rng_supported_mesh = lambda mesh: True  # type: ignore[assignment]


class DroppingBlock(nn.Module):
    """Two dropouts: on a DTensor that is split over ranks, and on one that all ranks have whole."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = dropout(gelu(self.up(self.norm(x))), 0.3)
        return x + dropout(self.down(hidden), 0.1).to_local()  # type: ignore[attr-defined, no-any-return]


def made() -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    model.blocks = nn.ModuleList(DroppingBlock(16) for _ in range(3))
    ways = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(use_local_output=False)}
    for block in model.blocks:
        parallelize_module(block, one_mesh(), ways)
    return model


def tokens(seed: int) -> Tensor:
    return torch.randn(256, 16, generator=torch.Generator().manual_seed(seed))  # the same on all ranks


def steps(model: nn.Module) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    for seed in range(3):
        model.zero_grad()
        if seed:
            torch.manual_seed(seed)
        loss_of(model)(tokens(seed)).backward()
        found += [*local_gradients(model), torch.get_rng_state()]
    return found


def fitted(has_tracker: bool) -> dict[str, Any]:
    if has_tracker:
        use_tracker()
    plain, model = made(), made()
    torch.manual_seed(7 + rank())  # the first step finds other states on each rank
    expected = steps(plain)
    _random._rng_tracker = None
    torch.manual_seed(7 + rank())
    graph = lowtide.trace(model, loss_of(model), tokens(0), mode="real")
    is_forgotten = _random._rng_tracker is None
    fixed = sum(graph.static_bytes.values())
    budget = int(fixed + 0.6 * (graph.plain_peak_bytes - fixed))
    handle = lowtide.fit(model, loss_of(model), tokens(0), budget=budget, **FAST)
    return {
        "same": same(expected, steps(model)),
        "regions": [region.path for region in handle.plan.regions],
        "hash": plan_hash(handle.plan),
        "forgotten": is_forgotten,
        "tracker": _random._rng_tracker is not None,
        "peaks": (handle.measured_peak_bytes, budget),
    }


@pytest.mark.parametrize("has_tracker", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_replays_draw_what_the_forward_drew(has_tracker: bool) -> None:
    """Ranks are not seeded alike here: DTensor then gives all of them the state of the first, when it first draws."""
    results = succeeded(run_ranks(fitted, has_tracker))
    for each in results:
        assert each["same"] and each["forgotten"] and each["tracker"] == has_tracker
        assert any(path.startswith("blocks") for path in each["regions"]) and each["peaks"][0] <= each["peaks"][1]
    assert results[0]["hash"] == results[1]["hash"]


class RandomOp(torch.autograd.Function):
    """A random op as DTensor runs it on CUDA: by a higher-order op, below autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        output, mask = run_dtensor_rng_op(4, 8, torch.ops.aten.native_dropout.default, x, 0.5, True)
        ctx.save_for_backward(mask)
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (mask,) = ctx.saved_tensors
        return gradient * mask * 2


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(RandomOp.apply(gelu(self.up(x))))


def test_the_higher_order_op_of_random_dtensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.13 draws random DTensors on CUDA inside a higher-order op, which dispatch modes need a rule for."""

    def on_cpu(start: int, end: int, op: Any, *args: Any, **kwargs: Any) -> Any:
        after = torch.get_rng_state()
        try:
            torch.manual_seed(int(torch.randint(1 << 30, ())) + start)
            return op(*args, **kwargs)
        finally:
            torch.set_rng_state(after)
            torch.rand(end)

    for key in (DispatchKey.CPU, DispatchKey.BackendSelect):
        monkeypatch.setitem(run_dtensor_rng_op.py_kernels, key, on_cpu)
    run_dtensor_rng_op._dispatch_cache.clear()
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Noisy() for _ in range(4))), torch.randn(256, 16)
    loss_fn = loss_of(model)

    def step() -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(3)
        loss_fn(x).backward()
        return [parameter.grad.clone() for parameter in model.parameters()] + [torch.get_rng_state()]  # type: ignore[union-attr]

    expected = step()
    graph = lowtide.trace(model, loss_fn, x)
    assert sum("native_dropout" in op.name for op in graph.ops[: graph.num_forward]) == 4
    handle = lowtide.fit(model, loss_fn, x, budget=int(0.6 * graph.plain_peak_bytes), **FAST)
    assert handle.plan.regions and all(map(torch.equal, expected, step()))
    run_dtensor_rng_op._dispatch_cache.clear()
