"""Tracing with placeholders for equal blocks gives the same memory outside of the blocks as a full trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

from lowtide.compiled.other_memory import other_memory_of, placeholders
from lowtide.solvers.shared_budget import OtherMemory
from lowtide.tracing.trace import trace_once


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(8, 64)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x = x[0] if isinstance(x, tuple) else x
        return self.head(x)


class Pair(nn.Module):
    """Gives a tuple, with a tensor that has no gradient and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        hidden = self.up(x).relu()
        return self.down(hidden), hidden.detach().mean(-1), 3


class GivesBack(nn.Module):
    """Gives what it was given, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * self.weight).exp(), x


def mlp(width: int = 32) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8))


MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "alike": lambda: [mlp() for _ in range(4)],
    "two kinds": lambda: [mlp(16 if index % 2 else 48) for index in range(6)],
    "attention": lambda: [zoo.Block(8, 2, 0.0) for _ in range(3)],
    "tuples": lambda: [Pair() for _ in range(4)],
    "aliases": lambda: [GivesBack() for _ in range(3)],
}


def around(model: Stack, batch: Tensor, *, shortened: bool) -> tuple[OtherMemory | None, int]:
    def loss_fn(batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    if shortened:
        with placeholders(model.blocks):
            graph = trace_once(model, loss_fn, batch)
    else:
        graph = trace_once(model, loss_fn, batch)
    return other_memory_of(graph, [f"blocks.{index}" for index in range(len(model.blocks))]), len(graph.ops)


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("name", list(MODELS))
def test_what_surrounds_blocks_is_the_same(name: str, needs_gradient: bool) -> None:
    model = Stack(*MODELS[name]())
    batch = torch.randn(4, 6, 8, requires_grad=needs_gradient)
    full, num_ops = around(model, batch, shortened=False)
    short, num_shortened = around(model, batch, shortened=True)
    assert full is not None and short == full
    assert num_shortened == num_ops if name == "aliases" else num_shortened < num_ops
    assert not any("forward" in vars(block) for block in model.blocks)


def test_forwards_are_put_back_after_an_error() -> None:
    model = Stack(mlp(), mlp())

    def failing(*args: Any) -> None:
        raise RuntimeError("no")

    model.blocks[1].register_forward_hook(failing)
    with pytest.raises(RuntimeError, match="no"), placeholders(model.blocks):
        model(torch.randn(2, 3, 8))
    assert not any("forward" in vars(block) for block in model.blocks)


def test_a_forward_of_ones_own_is_left_alone() -> None:
    model = Stack(mlp(), mlp())
    own = model.blocks[1].forward
    model.blocks[1].forward = own  # type: ignore[method-assign]
    with placeholders(model.blocks):
        assert vars(model.blocks[1])["forward"] is own
    assert vars(model.blocks[1])["forward"] is own


class Shuffled(Stack):
    """Blocks that are called in another order than they are named in, one of them twice."""

    def forward(self, x: Tensor) -> Tensor:
        for index in (1, 0, 1):
            x = self.blocks[index](x)
        return x.sum(0)


def test_blocks_called_in_any_order_and_several_times() -> None:
    batch = torch.randn(4, 6, 8)
    shuffled, _ = around(Shuffled(mlp(), mlp()), batch, shortened=True)
    straight, _ = around(Shuffled(mlp(), mlp()), batch, shortened=False)
    assert shuffled is not None and straight is not None
    assert shuffled.forward_bytes == straight.forward_bytes and shuffled.between_bytes == straight.between_bytes
    assert len(shuffled.forward_bytes) == len(shuffled.backward_bytes) == 3
    assert list(shuffled.forward_bytes) == sorted(shuffled.forward_bytes), "inputs of blocks add up"
