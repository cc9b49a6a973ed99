"""`split=True` where several ranks plan together: the same splits everywhere, and gradients within rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import lowtide
from distributed.jobs import Block, Raised, rank, run_ranks, succeeded
from distributed.test_data_parallel import FAST
from distributed.test_sharding import local_gradients, mixed, one_mesh
from lowtide.distributed.agreement import plan_hash
from lowtide.plans import Plan, Split

WORDS, NUM_TOKENS = 512, 128


class LanguageModel(nn.Module):
    """Returns logits, or with `labels` the loss and the logits."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width, 0.0) for _ in range(2))
        self.head = nn.Linear(width, WORDS)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits if labels is None else (loss_of_logits(logits, labels), logits)


def loss_of_logits(logits: Tensor, ids: Tensor) -> Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def outside(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda ids: loss_of_logits(model(ids), ids)


def inside(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda ids: model(ids, labels=ids)[0]  # type: ignore[no-any-return]


def sharded(model: Any, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=one_mesh(), **options)
    return fully_shard(model, mesh=one_mesh(), **options)


WAYS: dict[str, tuple[Callable[[nn.Module], nn.Module], Any]] = {
    "ddp": (DistributedDataParallel, outside),
    "fsdp": (sharded, outside),
    "ddp, loss inside": (DistributedDataParallel, inside),
    "fsdp, loss inside": (sharded, inside),
    "fsdp, mixed precision": (lambda model: sharded(model, mp_policy=mixed()), outside),
}


def made() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel()


def tokens(seed: int = 0) -> Tensor:
    """The second rank has fewer."""
    generator = torch.Generator().manual_seed(10 * seed + rank())
    return torch.randint(0, WORDS, (1, NUM_TOKENS - 32 * rank()), generator=generator)


def steps(model: nn.Module, loss_fn: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for seed in range(2):
        model.zero_grad()
        loss = loss_fn(tokens(seed))
        loss.backward()
        found += [loss.detach(), *(each for each in local_gradients(model) if each is not None)]
    return found


def largest_difference(one: list[Tensor], other: list[Tensor]) -> float:
    assert len(one) == len(other)
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(one, other, strict=True))


def fitted(ways: list[str]) -> dict[str, dict[str, Any]]:
    return {way: fitted_way(way) for way in ways}


def fitted_way(way: str) -> dict[str, Any]:
    wrap, loss = WAYS[way]
    plain, model = wrap(made()), wrap(made())
    expected = steps(plain, loss(plain))
    model.zero_grad()
    # Without a split there are three tensors of the size of the logits at once.
    budget = 3 * sum(parameter.nbytes for parameter in made().parameters()) + 3 * NUM_TOKENS * WORDS * 4 // 2
    handle = lowtide.fit(model, loss(model), tokens(), budget=budget, split=True, **FAST)
    found = steps(model, loss(model))
    stats = handle.stats().splits
    return {
        "hash": plan_hash(handle.plan),
        "difference": largest_difference(expected, found),
        "peaks": (handle.measured_peak_bytes, budget),
        "splits": [split.path for split in handle.plan.splits],
        "in full": sum(each.num_whole for each in stats),
    }


def check(results: list[dict[str, dict[str, Any]]]) -> None:
    for way in results[0]:
        assert len({each[way]["hash"] for each in results}) == 1
        for each in (found[way] for found in results):
            measured, budget = each["peaks"]
            assert "head" in each["splits"] and not each["in full"] and measured <= budget
            assert each["difference"] < (1e-2 if "mixed" in way else 5e-6), way


def test_ranks_split_alike() -> None:
    """A budget that only a split can meet; ranks have batches of different lengths."""
    check(succeeded(run_ranks(fitted, ["fsdp"])))


@pytest.mark.slow
def test_other_ways_to_run_several_ranks() -> None:
    check(succeeded(run_ranks(fitted, [way for way in WAYS if way != "fsdp"])))


def predicted() -> tuple[str, Any, int]:
    """`plan` runs the same search; a budget that the split cannot meet is refused on all ranks, with its floor."""
    model = DistributedDataParallel(made())
    plan = lowtide.plan(model, outside(model), tokens(), budget="700KB", split=True, time_limit_s=1.0)
    try:
        lowtide.plan(model, outside(model), tokens(), budget=1000, split=True, time_limit_s=1.0)
    except lowtide.InfeasibleBudgetError as error:
        return plan_hash(plan), plan.splits, error.floor_bytes
    return "", (), 0


@pytest.mark.slow
def test_plans_are_the_same() -> None:
    one, other = succeeded(run_ranks(predicted))
    assert one == other and one[1] and 1000 < one[2] < 700_000


def freed_weight() -> None:
    """The output layer is sharded on its own, and freed when its forward is over."""
    model = made()
    lowtide.apply(model, Plan(splits=(Split("head", 4),)))
    fully_shard(model.head, mesh=one_mesh())
    fully_shard(model, mesh=one_mesh())
    outside(model)(tokens()).backward()


def test_a_weight_that_is_freed_before_the_loss_is_an_error() -> None:
    for each in run_ranks(freed_weight):
        assert isinstance(each, Raised) and each.kind == "LowtideError"
        assert "freed before its loss was computed" in each.text
