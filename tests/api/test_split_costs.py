"""Measured costs on the graph of a split step: common ops have the plain step's, others in proportion."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.api.split_search import with_costs_of
from lowtide.graph.step_graph import StepGraph
from lowtide.plans import Split
from lowtide.split.split_forward import splitting


@pytest.fixture(scope="module")
def graphs() -> tuple[StepGraph, StepGraph]:
    """A plain step with made-up measurements, and the same step with its loss in 4 parts."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 256, bias=False))
    x, labels = torch.randn(64, 16), torch.randint(0, 256, (64,))

    def loss_fn(x: Tensor) -> Tensor:
        return F.cross_entropy(model(x).float(), labels)

    plain = lowtide.trace(model, loss_fn, x, mode="fake")
    with splitting(model, [Split("2", 4)]):
        split = lowtide.trace(model, loss_fn, x, mode="fake")
    ops = tuple(replace(op, seconds=3 * op.seconds, workspace_bytes=64) for op in plain.ops)
    measured = replace(plain, ops=ops, other_bytes=77, is_measured=True)
    return replace(measured, step_s=2 * measured.lines.step_s), split


def test_a_graph_takes_its_own_costs_back(graphs: tuple[StepGraph, StepGraph]) -> None:
    measured, _ = graphs
    forgotten = replace(measured, ops=tuple(replace(op, seconds=1.0, workspace_bytes=0) for op in measured.ops))
    again = with_costs_of(forgotten, measured)
    assert again.ops == measured.ops and again.step_s == pytest.approx(measured.step_s)
    assert again.other_bytes == 77 and not again.is_measured


def test_parts_take_as_long_as_the_whole(graphs: tuple[StepGraph, StepGraph]) -> None:
    measured, split = graphs
    found = with_costs_of(split, measured)
    tanh = [op for op in found.ops if op.name == "aten.tanh.default"]
    assert [op.seconds for op in tanh] == [op.seconds for op in measured.ops if op.name == "aten.tanh.default"]
    assert [op.workspace_bytes for op in tanh] == [64]

    def total(graph: StepGraph, name: str) -> float:
        return sum(op.seconds for op in graph.ops if op.name == name)

    name = "aten._log_softmax.default"
    assert len([op for op in found.ops if op.name == name and op.seconds]) == 4
    assert total(found, name) == pytest.approx(total(measured, name))


def test_new_names_with_flops_take_as_long_as_other_products(graphs: tuple[StepGraph, StepGraph]) -> None:
    """Weight gradients are added up by `addmm_`, which no plain step has."""
    measured, split = graphs
    products = [op for op in measured.ops if op.flops]
    s_per_flop = sum(op.seconds for op in products) / sum(op.flops for op in products)
    added = [op for op in with_costs_of(split, measured).ops if op.name == "aten.addmm_.default"]
    assert added and all(op.flops and op.seconds == pytest.approx(op.flops * s_per_flop) for op in added)
