"""Indices (`topk`, `sort`) are saved, and computed again only where no other choice is within the budget."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import lowtide
from compiled.fake_steps import BASE, FakeGraph, TimedMeter, VariantsOnly, settled
from compiled.test_backend import MLP, Routed, Stack, squared
from kernelless import (
    COMPILED_MARKS,
    PLENTY,
    Compiler,
    assert_equal,
    floor_of,
    left_behind,
    running,
    session_of,
    squeeze,
)
from lowtide.compiled.compiled_handle import describe
from lowtide.compiled.session import Session
from lowtide.errors import InfeasibleBudgetError
from lowtide.solvers.shared_budget import Variant

pytestmark = COMPILED_MARKS
SAVES_INDICES = (Variant(None, 40, (), 0, 0, 0.0), Variant((0,), 10, (), 0, 0, 2.0))
REPLAYED = Variant((), 0, (), 0, 0, 2.1, replays_indices=True)


def smallest_with_indices(model: nn.Module) -> int:
    session = session_of(model)
    instances = session.instances_of(session.current)
    return session.chooser._shared(instances, 0).peak_bytes


@pytest.mark.filterwarnings("ignore:within .* there is no room for the indices")
def test_at_the_floor_nothing_is_saved_and_gradients_are_the_same(compiler: Compiler) -> None:
    """As with torch's checkpoint on the first block, where the step peaks."""
    torch.manual_seed(0)
    model = lowtide.compile(Stack(Routed(), Routed(), Routed()), budget=PLENTY)
    expected = left_behind(model, squared)
    left_behind(model, squared)
    squeeze(model, floor_of(model))
    for _ in range(2):
        assert_equal(expected, left_behind(model, squared))
    assert [variant.saved_bytes == 0 for variant in running(model)] == [True, False, False]
    (split,) = [each for each in compiler.splits if each.made == []]
    names = [str(node.target) for node in split.backward.graph.nodes]
    assert "aten.topk.default" in names
    assert "indices recomputed" in describe(session_of(model))


def test_indices_are_saved_wherever_that_fits() -> None:
    model = lowtide.compile(Stack(Routed(), Routed(), Routed()), budget=PLENTY)
    for _ in range(2):
        left_behind(model, squared)
    least = smallest_with_indices(model)
    assert floor_of(model) < least
    squeeze(model, least)
    left_behind(model, squared)
    assert not any(variant.replays_indices for variant in running(model))
    squeeze(model, least - 1)
    assert [variant.replays_indices for variant in running(model)].count(True) == 1, "as few as it takes"
    with pytest.warns(UserWarning, match=r"no room for the indices .* of 1 compiled call,"):
        for _ in range(2):
            left_behind(model, squared)


class DropsRouted(nn.Module):
    """A random op after the choice of experts: its outputs are saved, and belong to the indices of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.routed = Routed()

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.routed(x), 0.5).tanh()


def test_indices_are_not_computed_again_beside_what_was_saved_after_them() -> None:
    model = lowtide.compile(Stack(DropsRouted(), DropsRouted()), budget=PLENTY)
    plain = lowtide.compile(Stack(MLP(), MLP()), budget=PLENTY)
    for each in (model, plain):
        left_behind(each, squared)
        assert all(graph.replayed is None for graph in session_of(each).graphs)


def routed_session(budget: int) -> tuple[Session, FakeGraph]:
    graph, meter = FakeGraph(7), TimedMeter(lambda variant: 1 + variant.extra_s, more_bytes=3)
    graph.variants, graph.replayed = SAVES_INDICES, REPLAYED
    meter.session = Session(budget, chooser=VariantsOnly(model_bytes=BASE), num_blocks=3, meter_of=lambda _: meter)
    return meter.session, graph


@pytest.mark.parametrize(("room", "num_replayed"), [(33, 0), (32, 1), (23, 1), (22, 2), (3, 3)])
def test_measured_peaks_decide(room: int, num_replayed: int) -> None:
    """Three calls with indices take 30 bytes and 3 that were not predicted."""
    session, graph = routed_session(BASE + room)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        choice = settled(session, graph)
    assert [variant.replays_indices for variant in choice.variants].count(True) == num_replayed
    assert len(caught) == (num_replayed > 0)
    assert session.current.peaks[-1] <= BASE + room


def test_what_no_choice_meets_is_still_refused() -> None:
    session, graph = routed_session(BASE + 2)
    with pytest.raises(InfeasibleBudgetError) as caught:
        settled(session, graph)
    assert caught.value.floor_bytes == BASE + 3
    assert copy.copy(caught.value).floor_bytes == BASE + 3
