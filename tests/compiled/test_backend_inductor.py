"""The compiled engine with inductor's own kernels: two tiny compiles."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch

import lowtide
from compiled.test_backend import MLP, Stack, squared
from kernelless import PLENTY, floor_of, running, session_of, squeeze

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # whatever inductor has to say


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_autotuned_kernels_hold_the_budget() -> None:
    model = Stack(MLP(), MLP(), MLP())
    eager = copy.deepcopy(model)
    squared(eager).backward()
    lowtide.compile(model, budget=52_000, regional=False, mode="max-autotune")
    for _ in range(5):
        model.zero_grad()
        squared(model).backward()
    handle = lowtide.handle_of(model)
    assert handle.measured_peak_bytes is not None and handle.measured_peak_bytes <= 52_000
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_backwards_are_compiled_with_their_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that compiling counts as compiling, and never falls into a backward."""
    inductor = importlib.import_module("torch._inductor.compile_fx")
    compiled = Mock(wraps=inductor.compile_fx_backward)
    monkeypatch.setattr(inductor, "compile_fx_backward", compiled)
    model = Stack(MLP(), MLP())
    lowtide.compile(model, budget=PLENTY)
    loss = squared(model)
    assert compiled.call_count == 1
    loss.backward()
    assert compiled.call_count == 1


@pytest.mark.parametrize("regional", [True, False], ids=["regional", "whole"])
def test_kernels_at_several_budgets(regional: bool) -> None:
    """Compiled again for other budgets, from placeholders of the first inputs; gradients are the eager model's."""
    model = Stack(MLP(), MLP(), MLP())
    eager = copy.deepcopy(model)
    squared(eager).backward()
    lowtide.compile(model, budget=PLENTY, regional=regional)
    for _ in range(2):
        model.zero_grad()
        squared(model).backward()
    floor, plain = floor_of(model), session_of(model).sequences.current.choice.peak_bytes
    for budget in (floor, (floor + plain) // 2):
        squeeze(model, budget)
        model.zero_grad()
        squared(model).backward()
        assert any(variant.keeps is not None for variant in running(model))
        for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
