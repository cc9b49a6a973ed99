"""`fit` with experts on different ranks: results of all-to-all are kept, and replays neither communicate nor count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.functional import gelu

import lowtide
from distributed.jobs import Block, Net, batch, gradients, rank, run_ranks, same, seeded, succeeded
from distributed.test_data_parallel import FAST, loss_of
from sweeps import sweep


class Exchange(torch.autograd.Function):
    """An all-to-all that writes to its output, as most libraries with experts call it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int]) -> Tensor:
        ctx.sizes = received, sent
        output = x.new_empty(sum(received), x.shape[1])
        distributed.all_to_all_single(output, x.contiguous(), received, sent)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        received, sent = ctx.sizes
        output = gradient.new_empty(sum(sent), gradient.shape[1])
        distributed.all_to_all_single(output, gradient.contiguous(), sent, received)
        return output, None, None


REPLAYED: list[nn.Module] = []  # of this rank


class Experts(nn.Module):
    """One expert per rank: each token goes to the rank of its expert and back. `load` counts tokens per expert."""

    load: Tensor

    def __init__(self, width: int, is_functional: bool) -> None:
        super().__init__()
        self.is_functional = is_functional
        self.gate, self.up, self.down = nn.Linear(width, 2), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("load", torch.zeros(2))
        with torch.no_grad():
            self.up.weight.mul_(1 + rank())

    def exchange(self, x: Tensor, received: list[int], sent: list[int]) -> Tensor:
        if self.is_functional:
            return functional.all_to_all_single_autograd(x, received, sent, distributed.group.WORLD)
        return Exchange.apply(x, received, sent)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        if lowtide.is_recomputing():
            REPLAYED.append(self)
        weight, chosen = self.gate(x).softmax(-1).topk(1, -1)
        counts = torch.bincount(chosen[:, 0], minlength=2)
        with torch.no_grad():
            total = counts.float()
            distributed.all_reduce(total)
            self.load += total
        there = torch.empty_like(counts)
        distributed.all_to_all_single(there, counts)
        sent, received = counts.tolist(), there.tolist()
        order = chosen[:, 0].argsort(stable=True)
        found = self.exchange(x[order], received, sent)
        found = self.exchange(self.down(gelu(self.up(found))), sent, received)
        return x + weight * torch.zeros_like(x).index_copy(0, order, found)


class ExpertNet(Net):
    def __init__(self, is_functional: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Block(16), Experts(16, is_functional)) for _ in range(3))


def made(is_functional: bool) -> ExpertNet:
    torch.manual_seed(0)
    return ExpertNet(is_functional)


def steps(model: nn.Module) -> list[list[Tensor | None]]:
    """Gradients and buffers after each of two steps."""
    found = []
    model.zero_grad()
    for number in range(2):
        with seeded(number):
            loss_of(model)(batch(seed=number)).backward()
        found.append([*gradients(model), *(buffer.clone() for buffer in model.buffers())])
    return found


def collectives(model: nn.Module) -> dict[str, int]:
    with CommDebugMode() as counted:
        loss_of(model)(batch()).backward()
    return {str(op): number for op, number in counted.get_comm_counts().items()}


def fitted(is_functional: bool) -> dict[str, Any]:
    plain, model = made(is_functional), made(is_functional)
    expected = steps(plain)
    graph = lowtide.trace(model, loss_of(model), batch(), mode="real")
    fixed = sum(graph.static_bytes.values())
    budget = int(fixed + 0.7 * (graph.plain_peak_bytes - fixed))
    handle = lowtide.fit(model, loss_of(model), batch(), budget=budget, **FAST)
    untouched = all(not buffer.any() for buffer in model.buffers())
    REPLAYED.clear()
    return {
        "same": all(map(same, expected, steps(model))),
        "untouched": untouched,
        "num_replayed": len(REPLAYED),
        "peaks": (handle.measured_peak_bytes, handle.plan.budget_bytes, graph.plain_peak_bytes),
        "collectives": (collectives(plain), collectives(model)),
    }


@pytest.mark.parametrize("is_functional", sweep([False, True], keep=1))
def test_replays_neither_communicate_nor_count(is_functional: bool) -> None:
    """A gate that counts the tokens of each expert counts those of replays too, under other checkpoints."""
    for each in succeeded(run_ranks(fitted, is_functional)):
        measured, budget, plain = each["peaks"]
        assert each["same"] and each["untouched"] and measured <= budget < plain
        assert each["num_replayed"]  # experts are replayed, and not only other modules
        assert each["collectives"][0] == each["collectives"][1]
