"""Blocks at each level of a model; segments are tested with the solver that uses them (tests/solvers)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.graph.segments import all_blocks, block_levels
from lowtide.simulator import simulate
from lowtide.solvers.baselines import reference_plans
from lowtide.solvers.solve import shortlist
from lowtide.tracing.model_blocks import find_regions

WIDTH = 16


class Layer(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stage(nn.Module):
    """Layers of one width, after a change of the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen = nn.Linear(width // 2, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.widen(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Towers(nn.Module):
    """An encoder and a decoder of one class."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Tower(), Tower()

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x + self.encoder(x))


class Experts(nn.Module):
    """A layer whose experts all read the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(WIDTH), nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + sum(expert(y) for expert in self.experts)


class TwoAttentions(nn.Module):
    """Two parts of one class with most of the ops, and a norm in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = Layer(), Layer(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.norm(x + self.first(x)))


MODELS = {
    "layers": (lambda: nn.Sequential(*(Layer() for _ in range(4))), [[f"{n}" for n in range(4)]]),
    "stages": (
        lambda: nn.Sequential(Stage(2 * WIDTH), Stage(4 * WIDTH)),
        [["0", "1"], [f"{stage}.layers.{n}" for stage in range(2) for n in range(3)]],
    ),
    "towers": (Towers, [["encoder", "decoder"], [f"{t}.blocks.{n}" for t in ("encoder", "decoder") for n in range(3)]]),
    "experts": (lambda: nn.Sequential(*(Experts() for _ in range(3))), [["0", "1", "2"]]),
    "parts": (lambda: nn.Sequential(*(TwoAttentions() for _ in range(3))), [["0", "1", "2"]]),
}


def graph_of(name: str) -> lowtide.StepGraph:
    model = MODELS[name][0]()
    x = torch.randn(64, WIDTH)
    return lowtide.trace(model, lambda x: model(x).square().mean(), x, device="H100")


@pytest.mark.parametrize("name", MODELS)
def test_levels_of_blocks(name: str) -> None:
    graph, levels = graph_of(name), MODELS[name][1]
    assert [[graph.calls[call].path for call in level] for level in block_levels(graph)] == levels
    assert [graph.calls[call].path for call in all_blocks(graph)] == list(find_regions(MODELS[name][0](), None))


@pytest.mark.parametrize("name", ["stages", "towers"])
def test_a_checkpoint_per_block_is_one_per_layer(name: str) -> None:
    """Not one per stage or tower."""
    graph, levels = graph_of(name), MODELS[name][1]
    plan = reference_plans(graph)["a checkpoint per block"]
    assert [region.path for region in plan.regions] == levels[-1]
    found = {each.name: each.plan for each in shortlist(graph, simulate(graph, plan).peak_bytes)[0]}
    of_blocks = [each.regions for kind, each in found.items() if "block" in kind]
    assert of_blocks and all({region.path for region in regions} <= set(levels[-1]) for regions in of_blocks)
