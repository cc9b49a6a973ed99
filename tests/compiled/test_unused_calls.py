"""Calls of compiled blocks that the loss does not use lose their autograd nodes early, and budgets still hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from compiled.test_backend import MLP, rows
from compiled.test_step_profile import peak_bytes
from kernelless import COMPILED_MARKS, PLENTY
from lowtide.compiled import session
from sweeps import sweep

pytestmark = COMPILED_MARKS


@pytest.fixture(autouse=True)
def _measured(compiler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MEASURES_CPU", True)


class Unused(nn.Module):
    """Two stacks, of which the loss uses one; the other one's values are dropped before it runs, or after."""

    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self.used, self.unused = (nn.ModuleList(MLP() for _ in range(3)) for _ in range(2))
        self._is_first = is_first

    def forward(self, x: Tensor) -> Tensor:
        return self._run(self.unused, x).detach().mean() + self._run(self.used, x) if self._is_first else self._last(x)

    def _last(self, x: Tensor) -> Tensor:
        return self._run(self.used, x) + self._run(self.unused, x).detach().mean()

    def _run(self, blocks: nn.ModuleList, x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
        return x


class Skipped(nn.Module):
    """The output of one block is dropped when the next one has run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLP() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            output = block(x)
            x = x if number == 2 else output
        return x


def loss(model: nn.Module) -> Tensor:
    return model(rows(1024)).square().mean()


def run(model: nn.Module, num_steps: int) -> None:
    for _ in range(num_steps):
        model.zero_grad()
        loss(model).backward()


@pytest.mark.parametrize("is_first", sweep([True, False], keep=1))
def test_budgets_hold_or_are_refused(is_first: bool) -> None:
    torch.manual_seed(0)
    model = lowtide.compile(Unused(is_first), budget=1)
    with pytest.raises(lowtide.InfeasibleBudgetError, match="measured") as caught:
        run(model, 24)
    floor = caught.value.floor_bytes
    plain = peak_bytes(lowtide.compile(model, budget=PLENTY), loss)
    assert floor < plain
    lowtide.compile(model, budget=floor)
    run(model, 14)
    handle = lowtide.handle_of(model)
    assert handle.measured_peak_bytes is not None and handle.measured_peak_bytes <= floor
    assert peak_bytes(model, loss) <= 1.02 * floor


def test_calls_after_one_that_is_dropped_run_the_variants_chosen_for_them() -> None:
    torch.manual_seed(0)
    model = lowtide.compile(Skipped(), budget=1)
    with pytest.raises(lowtide.InfeasibleBudgetError, match="measured") as caught:
        run(model, 24)
    floor, plain = caught.value.floor_bytes, peak_bytes(lowtide.compile(model, budget=PLENTY), loss)
    for share in (0.25, 0.5, 0.75):
        budget = int(floor + share * (plain - floor))
        lowtide.compile(model, budget=budget)
        run(model, 16)
        handle = lowtide.handle_of(model)
        assert handle.measured_peak_bytes is not None, "no step ran the variants that were chosen"
        assert peak_bytes(model, loss) <= handle.measured_peak_bytes <= budget
