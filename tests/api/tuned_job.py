"""A model with blocks, parts and all kinds of state, whose steps take the time of a simulated clock; for `fit`."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.eager.replanning import Limits
from lowtide.plans import Frontier
from lowtide.solvers import placement, solve
from lowtide.solvers.eager_search import EagerSearch

PER_BLOCK = "a checkpoint per block"
NUM_LAYERS = 4


class Clock:
    """Seconds that pass only where a test says so."""

    now = 0.0
    part_s = 0.0  # for each run of a part that is patched: a host that regions on small modules cost dearly
    moved_s = 0.0  # for each value that is moved


class Part(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        Clock.now += Clock.part_s if "forward" in vars(self) else 0.0
        return self.down(torch.nn.functional.gelu(self.up(x)))


class Layer(nn.Module):
    """A factor without a gradient takes most of its time, and its parts save most of its bytes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = Part(width), Part(width)

    def forward(self, x: Tensor) -> Tensor:
        Clock.now += 1.0
        some = x.detach()[:64]
        for _ in range(2):
            some = (some @ (some.t() @ some)).tanh()
        return x + self.second(torch.tanh(self.first(x * some.mean().sigmoid())))


class Model(nn.Module):
    """Layers, and all kinds of state that a step changes."""

    def __init__(self, width: int = 16, num_layers: int = NUM_LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(num_layers))
        self.norm, self.noise = nn.BatchNorm1d(width), torch.Generator().manual_seed(3)
        self.seen: list[int] = []
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.seen.append(self.num_calls)
        for layer in self.layers:
            x = layer(x)
        x = torch.nn.functional.dropout(self.norm(x), 0.1, self.training)
        return x + torch.rand(x.shape, generator=self.noise)


def trace(*_: Any, **__: Any) -> lowtide.StepGraph:
    """The graph of a job, traced once: with times that are the same each time, as if they were measured."""
    return known()[0]


class Job:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.batch = Model(), torch.randn(512, 16)

    def loss_fn(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()

    @property
    def graph(self) -> lowtide.StepGraph:
        return known()[0]

    @property
    def floor(self) -> int:
        return known()[1].floor_bytes

    def peak_of(self, name: str) -> int:
        """The simulated peak of one of torch's ways."""
        return {each.name: each.peak_bytes for each in known()[1].references}[name]

    def budget(self, share: float) -> int:
        return int(self.floor + share * (known()[1].plain_peak_bytes - self.floor))

    def fit(self, budget: int, **options: Any) -> Any:
        options = {"tune_s": 600, **options}  # of a clock of its own: a busy machine leaves no candidate out
        return lowtide.fit(self.model, self.loss_fn, self.batch, budget=budget, **options)

    def untouched(self) -> bool:
        return all("forward" not in vars(module) for module in self.model.modules())


# What `quick_fit` replaces: floors and budgets are those of the whole search in every test.
_OF_WHOLE_SEARCH = [(EagerSearch, name, vars(EagerSearch)[name]) for name in ("segmenting", "_sample_budgets")]


@functools.cache
def known() -> tuple[lowtide.StepGraph, Frontier]:
    job = Job()
    graph = lowtide.trace(job.model, job.loss_fn, job.batch, mode="fake")
    graph = replace(graph, is_measured=True)
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, value in _OF_WHOLE_SEARCH:
            patch.setattr(owner, name, value)
        return graph, lowtide.sweep(graph, [])


search_of, known_candidates = Limits.candidates, dict[object, Any]()


def candidates(limits: Limits, graph: lowtide.StepGraph, budget: int) -> Any:
    """The candidates for a job, searched for once for all tests."""
    key = limits, graph.fingerprint, graph.hardware, graph.other_bytes, budget, solve._MOST, placement._SMALLEST
    if key not in known_candidates:
        known_candidates[key] = search_of(limits, graph, budget)
    found, error = known_candidates[key]
    return list(found), error


def has_parts(plan: lowtide.Plan) -> bool:
    return any(".first" in region.name or ".second" in region.name for region in plan.regions)
