"""Plans that users would write with torch's checkpoint are valid for the graph, whatever calls what."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import lowtide
from lowtide.simulator import simulate
from lowtide.solvers.baselines import reference_plans


class Tree(nn.Module):
    """Calls itself on each half of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.join = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, leaves: list[Tensor]) -> Tensor:
        if len(leaves) == 1:
            return leaves[0]
        middle = len(leaves) // 2
        return self.join(torch.cat([self(leaves[:middle]), self(leaves[middle:])], -1))


def test_blocks_inside_of_blocks_retain_nothing() -> None:
    tree = Tree()
    graph = lowtide.trace(tree, lambda x: tree(list(x.unbind(0))).square().mean(), torch.randn(8, 32, 16))
    plans = reference_plans(graph)
    assert len({each.path for each in plans["a checkpoint per block"].regions}) < len(
        plans["a checkpoint per block"].regions
    ), "a module is a block within itself"
    for plan in plans.values():
        simulate(graph, plan)
    assert len(lowtide.sweep(graph, time_limit_s=1.0).plans) > 1
