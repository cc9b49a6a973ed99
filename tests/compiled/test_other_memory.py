"""Memory outside of blocks, from a trace of the whole step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowtide.compiled.other_memory import other_memory_of
from lowtide.solvers.shared_budget import OtherMemory
from lowtide.tracing.trace import trace_once


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8))


class Chosen(nn.Module):
    """Saves the numbers of its largest inputs, which regions of the eager engine keep."""

    def forward(self, x: Tensor) -> Tensor:
        return x.scatter(-1, x.topk(2).indices, 0.0)


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(8, 64)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Shuffled(Stack):
    """Blocks that are called in another order than they are named in, one of them twice."""

    def forward(self, x: Tensor) -> Tensor:
        for index in (1, 0, 1):
            x = self.blocks[index](x)
        return x.sum(0)


def around(model: Stack, batch: Tensor) -> OtherMemory | None:
    graph = trace_once(model, lambda batch: model(batch).square().mean(), batch)
    return other_memory_of(graph, [f"blocks.{index}" for index in range(len(model.blocks))])


def test_what_is_saved_inside_blocks_does_not_count() -> None:
    stacks = (Stack(*(mlp(width) for _ in range(3))) for width in (16, 48))
    narrow, wide = (around(stack, torch.randn(4, 6, 8)) for stack in stacks)
    assert narrow is not None and wide is not None
    weights = 4 * 3 * (48 - 16) * (8 + 8 + 1)
    assert [b - a for a, b in zip(narrow.forward_bytes, wide.forward_bytes, strict=True)] == [weights] * 3
    inputs = [b - a for a, b in zip(narrow.forward_bytes, narrow.forward_bytes[1:], strict=False)]
    assert inputs == [4 * 4 * 6 * 8] * 2


def test_indices_that_blocks_save_do_not_count() -> None:
    batch = torch.randn(4, 6, 8, requires_grad=True)
    found = around(Stack(Chosen(), Chosen(), Chosen()), batch)
    assert found is not None
    assert [b - a for a, b in zip(found.forward_bytes, found.forward_bytes[1:], strict=False)] == [4 * 4 * 6 * 8] * 2


def test_blocks_called_in_any_order_and_several_times() -> None:
    batch = torch.randn(4, 6, 8)
    shuffled, straight = around(Shuffled(mlp(32), mlp(32)), batch), around(Stack(mlp(32), mlp(32)), batch)
    assert shuffled is not None and straight is not None
    assert shuffled.forward_bytes[:2] == straight.forward_bytes
    assert len(shuffled.forward_bytes) == len(shuffled.backward_bytes) == 3
    assert list(shuffled.forward_bytes) == sorted(shuffled.forward_bytes), "inputs of blocks add up"
