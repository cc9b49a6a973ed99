"""`fit` on models under DistributedDataParallel: the same gradients, the same plan on each rank, buckets counted."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lowtide
from distributed.jobs import Net, batch, gradients, run_ranks, same, seeded, succeeded
from lowtide.distributed.agreement import plan_hash
from sweeps import sweep

FAST: dict[str, Any] = {"tune_s": 0, "time_limit_s": 1.0}


def loss_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).square().mean()


def tight_budget(model: nn.Module, x: Tensor, share: float = 0.6) -> int:
    """A budget below the plain peak: fixed bytes and a share of the rest."""
    graph = lowtide.trace(model, loss_of(model), x, mode="fake")
    fixed = sum(graph.static_bytes.values())
    return int(fixed + share * (graph.plain_peak_bytes - fixed))


def steps(model: Any) -> list[list[Tensor | None]]:
    """Gradients after each of some steps: plain ones, accumulated, and under `no_sync`."""
    found = []
    for number in range(2):
        model.zero_grad()
        with seeded(number):
            loss_of(model)(batch(seed=number)).backward()
        found.append(gradients(model))
    model.zero_grad(set_to_none=False)
    with model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext(), seeded(5):
        loss_of(model)(batch(seed=5)).backward()
    with seeded(6):
        loss_of(model)(batch(seed=6)).backward()
    found.append(gradients(model))
    return found


class NeverUsed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(4, 4)


OPTIONS: dict[str, tuple[type[Net], dict[str, Any]]] = {
    "plain": (Net, {}),
    "views": (Net, {"gradient_as_bucket_view": True}),
    "static": (NeverUsed, {"static_graph": True}),
    "unused": (NeverUsed, {"find_unused_parameters": True}),
    "small buckets": (Net, {"bucket_cap_mb": 0.01}),
}


def fit_wrapped(name: str) -> dict[str, Any]:
    kind, options = OPTIONS[name]

    def made() -> DistributedDataParallel:
        torch.manual_seed(0)
        return DistributedDataParallel(kind(), **options)

    expected = steps(made())
    model = made()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    budget = tight_budget(model, batch())
    handle = lowtide.fit(model, loss_of(model), batch(), budget=budget, **FAST)
    unchanged = all(torch.equal(value, model.state_dict()[key]) for key, value in state.items())
    return {
        "same gradients": all(map(same, expected, steps(model))),
        "unchanged": unchanged and all(g is None for g in gradients(made())),
        "hash": plan_hash(handle.plan),
        "regions": [region.path for region in handle.plan.regions],
        "peak": handle.measured_peak_bytes,
        "budget": budget,
        "is inner": handle.model is model.module and lowtide.handle_of(model) is handle,
        "replays": handle.stats().num_replays,
    }


@pytest.mark.parametrize("name", sweep(OPTIONS, keep=2))
def test_gradients_equal_those_without_a_plan(name: str) -> None:
    results = succeeded(run_ranks(fit_wrapped, name))
    for each in results:
        assert each["same gradients"] and each["unchanged"] and each["is inner"]
        assert each["regions"] and each["replays"] and not any(path.startswith("module") for path in each["regions"])
        assert each["peak"] <= each["budget"]
    assert len({(each["hash"], each["peak"]) for each in results}) == 1


def fit_where_objects_may_be_frozen(by_user: bool) -> tuple[int, list[bool]]:
    """With the wrapper among the objects that are frozen: by the user before `fit`, or by `fit` itself."""
    gc.unfreeze()
    budget = tight_budget(seeded_net(), batch())
    model, expected = (DistributedDataParallel(seeded_net()) for _ in range(2))
    if by_user:
        gc.freeze()
    handle = lowtide.fit(model, loss_of(model), batch(), budget=budget, **FAST)
    return len(handle.plan.regions), list(map(same, steps(expected), steps(model)))


def seeded_net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize("by_user", [False, True])
def test_wrappers_that_are_hidden_from_the_garbage_collector(by_user: bool) -> None:
    for num_regions, are_same in succeeded(run_ranks(fit_where_objects_may_be_frozen, by_user)):
        assert num_regions > 0
        assert all(are_same)


def traced_both_ways(views: bool) -> tuple[int, ...]:
    model = DistributedDataParallel(Net(), gradient_as_bucket_view=views)
    real, fake = (lowtide.trace(model, loss_of(model), batch(), mode=mode) for mode in ("real", "fake"))
    bare = Net()
    return tuple(graph.plain_peak_bytes for graph in (real, fake, lowtide.trace(bare, loss_of(bare), batch())))


@pytest.mark.parametrize("views", [False, True])
def test_buckets_are_part_of_the_peak(views: bool) -> None:
    """A fake trace, which does not run DDP's own code, counts the same bytes as a real one."""
    for real, fake, bare in succeeded(run_ranks(traced_both_ways, views)):
        bucket_bytes = sum(parameter.nbytes for parameter in Net().parameters())
        assert real == fake
        # As views, the gradients exist before the backward: what that adds depends on where the peak is.
        assert real == bare + bucket_bytes if not views else bare <= real <= bare + bucket_bytes
