"""What autograd does differently while a step is recorded, or holds for no backward: traces have it as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.plans import Plan, Recompute

pytestmark = pytest.mark.usefixtures("one_thread")


class Scan(nn.Module):
    """Reads a large tensor one step at a time, so that its gradient is a sum of many."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(48, 48), nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.into(x)[..., None] * torch.ones(8)
        state = torch.zeros_like(wide[:, 0])
        outputs = []
        for step in range(wide.shape[1]):
            state = 0.9 * state + wide[:, step]
            outputs.append(state.sum(-1))
        return x + self.out(torch.stack(outputs, 1))


class Pick(nn.Module):
    """Its backward fills a tensor of zeros, which torch does in place."""

    def __init__(self, pick: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.pick = nn.Parameter(torch.randn(64)), pick

    def forward(self, x: Tensor) -> Tensor:
        scores = x[:, :64] * self.weight
        return self.pick(scores, x[:, 64:]).sin()


class Sum(torch.autograd.Function):
    """Adds two tensors that its own backward makes: not in place, although nothing else needs them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.sin() + grad.cos()


def measured(model: nn.Module, x: Tensor) -> int:
    model.zero_grad()
    own = x.nbytes + sum(parameter.nbytes for parameter in model.parameters())
    return own + lowtide.measure(lambda: model(x).square().mean().backward(), device="cpu").peak_bytes


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_gradients_are_added_up_in_place(mode: Any) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Scan() for _ in range(3))), torch.randn(4, 12, 48)
    graph = lowtide.trace(model, lambda x: model(x).square().mean(), x, mode=mode)
    for plan in (Plan(), Plan(regions=tuple(Recompute(str(block)) for block in range(3)))):
        with lowtide.apply(model, plan):
            predicted = lowtide.simulator.simulate(graph, plan).peak_bytes
            assert predicted == pytest.approx(measured(model, x), rel=0.002 if mode == "real" else 0.044)


PICKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gather": lambda scores, x: scores.gather(1, x.long()),
    "take": lambda scores, x: scores.take(x.long()),
    "index": lambda scores, x: scores[x[:, 0].long()],
    "mask": lambda scores, x: scores.masked_select(x[:, :1] >= 0),
}


@pytest.mark.parametrize("pick", PICKS.values(), ids=PICKS)
def test_zeros_are_filled_in_place(pick: Callable[[Tensor, Tensor], Tensor]) -> None:
    model, x = Pick(pick), torch.cat([torch.randn(512, 64), torch.zeros(512, 1)], 1)
    graph = lowtide.trace(model, lambda x: model(x).square().mean(), x)
    names = [op.name for op in graph.ops[graph.num_forward :] if op.mutates and not op.outputs]
    assert len(names) == 1 and names[0].split(".")[1] in ("scatter_add", "put", "index_put", "masked_scatter")
    assert lowtide.simulator.simulate(graph).peak_bytes == pytest.approx(measured(model, x), rel=0.002)


class Tied(nn.Module):
    """Gradients of weights that are used several times are views, which autograd does not add to in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(512, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.inner(self.inner(self.embed(x)).relu()), self.embed.weight)


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_gradients_that_are_views_are_not_added_up_in_place(mode: Any) -> None:
    model, x = Tied(), torch.randint(0, 512, (8,))
    graph = lowtide.trace(model, lambda x: model(x).square().mean(), x, mode=mode)
    assert not any(op.name == "aten.add.Tensor" and op.mutates for op in graph.ops)
    assert lowtide.simulator.simulate(graph).peak_bytes == pytest.approx(measured(model, x), rel=0.002)


def test_sums_in_the_backward_of_one_function_are_not() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64))

        def forward(self, x: Tensor) -> Tensor:
            return Sum.apply(x * self.weight)  # type: ignore[no-any-return]

    model, x = Odd(), torch.randn(512, 64)
    graph = lowtide.trace(model, lambda x: model(x).square().mean(), x)
    assert lowtide.simulator.simulate(graph).peak_bytes == pytest.approx(measured(model, x), rel=0.002)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Branches(nn.Module):
    """Two branches, of which the loss uses only the first."""

    def __init__(self, unused_first: bool) -> None:
        super().__init__()
        self.main, self.other = (nn.Sequential(*(Residual() for _ in range(num))) for num in (2, 6))
        self.unused_first = unused_first

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.unused_first:
            unused = self.other(x)
            return self.main(x), unused
        return self.main(x), self.other(x)


@pytest.mark.parametrize("mode", ["real", "fake"])
@pytest.mark.parametrize("held", ["to the end", "to the loss"])
@pytest.mark.parametrize("unused_first", [True, False])
def test_what_the_loss_does_not_use(unused_first: bool, held: str, mode: Any) -> None:
    """No backward reads it. Regions drop it; the replay of one around both makes it again if it comes first."""
    model, x = nn.Sequential(Branches(unused_first)), torch.randn(256, 32)

    def loss_fn(x: Tensor) -> Tensor:
        if held == "to the loss":
            return model(x)[0].square().mean()
        outputs = model(x)
        return outputs[0].square().mean()

    graph = lowtide.trace(model, loss_fn, x, mode=mode)
    blocks = [f"0.main.{block}" for block in range(2)] + [f"0.other.{block}" for block in range(6)]
    own = x.nbytes + sum(parameter.nbytes for parameter in model.parameters())
    peaks = []
    for paths in ([], blocks, ["0"]):
        plan = Plan(regions=tuple(map(Recompute, paths)))
        with lowtide.apply(model, plan):
            for _ in range(2):
                model.zero_grad()
                peaks.append(own + lowtide.measure(lambda: loss_fn(x).backward(), device="cpu").peak_bytes)
            model.zero_grad()
        predicted = lowtide.simulator.simulate(graph, plan).peak_bytes
        assert predicted == pytest.approx(peaks[-1], rel=0.002 if mode == "real" else 0.044)
    assert peaks[3] < 0.6 * peaks[1]
    assert lowtide.solve(graph, int(1.05 * peaks[3])).peak_bytes <= 1.05 * peaks[3]


def test_a_replay_ends_before_a_branch_that_the_loss_does_not_use() -> None:
    model, x, num_calls = nn.Sequential(Branches(False)), torch.randn(16, 32), 0

    def loss_fn(x: Tensor) -> Tensor:
        outputs = model(x)
        return outputs[0].square().mean()

    plan = Plan(regions=(Recompute("0"),))
    graph = lowtide.trace(model, loss_fn, x)
    (call,) = plan.calls(graph)
    replayed = [int(op) for op, phase in zip(*_ops_of(graph, plan), strict=True) if phase == "replay"]
    other = next(each for each in graph.calls if each.path == "0.other")
    assert replayed and max(replayed) < other.first < graph.calls[call].end

    def count(*_: Any) -> None:
        nonlocal num_calls
        num_calls += 1

    with lowtide.apply(model, plan):
        model[0].other.register_forward_hook(count)
        loss_fn(x).backward()
    assert num_calls == 1


def _ops_of(graph: lowtide.StepGraph, plan: Plan) -> tuple[Any, list[str]]:
    timeline = lowtide.simulator.simulate(graph, plan)
    return timeline.ops, [lowtide.simulator.PHASES[phase] for phase in timeline.phases]
