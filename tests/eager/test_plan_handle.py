"""Plans for steps that call the model more than once: regions belong to one of the calls, as simulated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.plans import Plan, Recompute
from lowtide.solvers.baselines import reference_plans

pytestmark = pytest.mark.usefixtures("one_thread")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(32, 128), nn.Linear(128, 32), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Student:
    """A step that compares two outputs of one model; the first may be made without gradients."""

    def __init__(self, *, is_taught: bool) -> None:
        torch.manual_seed(0)
        self.model, self.x, self.is_taught = Stack(), torch.randn(128, 32), is_taught

    def loss_fn(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(not self.is_taught):
            target = self.model(x.neg())
        return (self.model(x) - target).square().mean()

    def step(self) -> list[Tensor]:
        self.model.zero_grad()
        torch.manual_seed(1)
        self.loss_fn(self.x).backward()
        return [parameter.grad.clone() for parameter in self.model.parameters() if parameter.grad is not None]

    def peak_bytes(self) -> int:
        self.model.zero_grad()
        own = self.x.nbytes + sum(parameter.nbytes for parameter in self.model.parameters())
        return own + lowtide.measure(lambda: self.loss_fn(self.x).backward(), device="cpu").peak_bytes


def per_block(student: Student) -> int:
    """The peak with torch's checkpoint on each block."""

    def wrap(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x: checkpoint(forward, x, use_reentrant=False)  # type: ignore[no-any-return]

    for block in student.model.blocks:
        block.forward = wrap(block.forward)  # type: ignore[method-assign]
    peak = student.peak_bytes()
    for block in student.model.blocks:
        del block.forward
    return peak


@pytest.mark.parametrize("is_taught", [True, False])
def test_fit_holds_what_a_checkpoint_per_block_holds(is_taught: bool) -> None:
    student = Student(is_taught=is_taught)
    plain, budget = student.step(), per_block(student)
    student.model.zero_grad()
    with lowtide.fit(student.model, student.loss_fn, student.x, budget=budget, tune_s=0) as handle:
        assert handle.plan.forwards == (int(not is_taught), 1)
        assert student.peak_bytes() <= budget
        assert all(map(torch.equal, student.step(), plain))
        text = handle.plan.to_json()
    with lowtide.apply(student.model, Plan.from_json(text)):
        assert student.peak_bytes() <= budget


@pytest.mark.parametrize("number", [0, 1])
def test_regions_of_one_forward_are_not_those_of_the_other(number: int) -> None:
    student = Student(is_taught=False)
    graph = lowtide.trace(student.model, student.loss_fn, student.x)
    regions = tuple(Recompute(f"blocks.{block}", number) for block in range(4))
    budget = lowtide.simulator.simulate(graph).peak_bytes
    modules = lowtide.solve(graph, lowtide.sweep(graph, []).floor_bytes).modules
    plan = Plan(regions=regions, forwards=graph.forwards, modules=modules)
    predicted = lowtide.simulator.simulate(graph, plan).peak_bytes
    assert predicted < budget
    with lowtide.apply(student.model, plan) as handle:
        for _ in range(2):
            assert student.peak_bytes() == predicted
            assert handle.stats().num_replays % 4 == 0
        with torch.no_grad():  # an evaluation between two steps, and a forward that fails
            student.model(student.x)
        hook = student.model.blocks[2].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            student.model(student.x)
        hook.remove()
        assert student.peak_bytes() == predicted


def test_every_second_block_of_each_forward() -> None:
    student = Student(is_taught=False)
    graph = lowtide.trace(student.model, student.loss_fn, student.x)
    plan = reference_plans(graph)["every second block"]
    assert [(region.path, region.nth) for region in plan.regions] == [
        (f"blocks.{block}", nth) for nth in range(2) for block in (0, 2)
    ]
