"""`handle.step`: after running out of memory the batch runs again under a plan with a smaller peak, bit-equal."""

from __future__ import annotations

import functools
import logging
import random
import weakref
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

import lowtide
from lowtide.distributed.ranks import is_out_of_memory
from lowtide.simulator import simulate

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def predicted_times(monkeypatch: pytest.MonkeyPatch, quick_search: None) -> None:
    """Steps as small as these are all noise; with predicted times every run plans the same."""
    monkeypatch.setattr("lowtide.api.measure.trace", functools.partial(lowtide.trace, mode="fake"))


class Fuse(torch.autograd.Function):
    """Runs out of memory in the backward, if its model says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: Any) -> Tensor:
        ctx.model = model
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.model.maybe_fail("backward")
        return gradient, None


class Token(torch.autograd.Function):
    """Puts something into the graph that lives as long as that does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, references: list[Any]) -> Tensor:
        ctx.token = nn.Identity()
        references.append(weakref.ref(ctx.token))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 16))


class Model(nn.Module):
    """Dropout, BatchNorm, counters of its own, and failures to order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(block() for _ in range(3)))
        self.norm = nn.BatchNorm1d(12)
        self.register_buffer("large", torch.zeros(100_000))
        self.head = nn.Linear(16, 1)
        self.num_forwards = 0
        self.failures: dict[str, int] = {}  # how often to fail, and where
        self.num_failures = 0

    def maybe_fail(self, where: str) -> None:
        if self.failures.get(where, 0) > 0:
            self.failures[where] -= 1
            raise torch.OutOfMemoryError(f"tried to allocate 2.00 GiB in the {where}")

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        self.maybe_fail("forward")
        x = Fuse.apply(x + torch.rand(()) + random.random(), self)
        x = self.layers[:1](x)
        x = self.norm(x)
        self.large.add_(1)
        self.maybe_fail("middle")
        return self.head(Fuse.apply(self.layers[1:](x), self))


def made() -> tuple[Model, Any, Tensor]:
    torch.manual_seed(0)
    model = Model()

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).square().mean()

    return model, loss_fn, torch.randn(16, 12, 16)


def left_behind(model: Model, losses: list[Tensor]) -> list[Tensor]:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    numbers = torch.tensor([model.num_forwards, random.random()])
    return [*losses, *gradients, *model.buffers(), torch.get_rng_state(), numbers]


def train(model: Model, step: Any, x: Tensor, failures: list[dict[str, int]]) -> list[Tensor]:
    """Three steps that accumulate gradients."""
    torch.manual_seed(1)
    random.seed(1)
    losses = []
    for each in failures:
        model.failures = dict(each)
        losses.append(step(x).detach().clone())
        assert not any(model.failures.values())
    return left_behind(model, losses)


def said(caplog: pytest.LogCaptureFixture, text: str) -> list[logging.LogRecord]:
    """Warnings with a text. Steps that accumulate gradients have one of their own."""
    return [record for record in caplog.records if text in record.getMessage()]


def plainly(loss_fn: Any) -> Any:
    def step(x: Tensor) -> Tensor:
        loss = loss_fn(x)
        loss.backward()
        return loss

    return step


def budget_of(model: nn.Module, loss_fn: Any, x: Tensor, share: float) -> int:
    """So far from the floor to the plain peak."""
    guess = lowtide.estimate(model, loss_fn, x)
    return int(guess.floor_bytes + share * (guess.peak_bytes - guess.floor_bytes))


@pytest.mark.parametrize("where", ["forward", "middle", "backward"])
def test_nothing_is_lost(where: str, caplog: pytest.LogCaptureFixture) -> None:
    model, loss_fn, x = made()
    expected = train(model, plainly(loss_fn), x, [{}] * 3)
    model, loss_fn, x = made()
    handle = lowtide.fit(model, loss_fn, x, budget=budget_of(model, loss_fn, x, 0.9), verify=False)
    budget = handle.shapes.planner.budget_bytes  # type: ignore[union-attr]
    model.num_forwards = 0
    actual = train(model, lambda x: handle.step(loss_fn, x), x, [{}, {where: 1}, {}])
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
    (event,) = handle.stats().out_of_memory
    assert event.step == 1
    assert event.budget_after_bytes < event.budget_before_bytes == budget
    assert event.peak_after_bytes < event.peak_before_bytes
    assert handle.plan.peak_bytes == event.peak_after_bytes <= event.budget_after_bytes
    assert "2.00 GiB" in event.error
    assert "out of memory 1 times" in str(handle.stats())
    (record,) = said(caplog, "ran out of memory")
    assert record.levelno == logging.WARNING
    assert "ran out of memory" in record.getMessage()


def test_down_to_the_floor_and_then_the_error() -> None:
    model, loss_fn, x = made()
    handle = lowtide.fit(model, loss_fn, x, budget=budget_of(model, loss_fn, x, 0.9), verify=False)
    with pytest.raises(lowtide.InfeasibleBudgetError) as infeasible:
        lowtide.solve(handle.shapes.all[0].graph, 1)  # type: ignore[arg-type]
    handle.step(loss_fn, x)
    gradients = [parameter.grad for parameter in model.parameters()]
    before = [t.clone() for t in left_behind(model, [])[:-1]]
    state = random.getstate()
    model.failures = {"backward": 100}
    with pytest.raises(torch.OutOfMemoryError, match=r"2\.00 GiB") as caught:
        handle.step(loss_fn, x)
    assert any("no plan has a smaller peak" in note for note in caught.value.__notes__)
    assert all(parameter.grad is gradient for parameter, gradient in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, left_behind(model, [])[:-1], strict=True))
    random.setstate(state)
    peaks = [event.peak_after_bytes for event in handle.stats().out_of_memory]
    assert peaks == sorted(peaks, reverse=True)
    assert 1 <= len(peaks) <= 3
    assert peaks[-1] == infeasible.value.floor_bytes
    model.failures = {}
    handle.step(loss_fn, x)  # and the loop may go on


def test_where_there_were_no_gradients_there_are_none_again() -> None:
    model, loss_fn, x = made()
    handle = lowtide.fit(model, loss_fn, x, budget="1GiB", verify=False)
    assert handle.plan.is_plain
    model.failures = {"backward": 100}
    with pytest.raises(torch.OutOfMemoryError):
        handle.step(loss_fn, x)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert handle.plan.regions  # a model that fitted has a plan now


def test_a_plan_without_a_graph_is_tightened_too() -> None:
    model, loss_fn, x = made()
    expected = train(model, plainly(loss_fn), x, [{}] * 2)
    model, loss_fn, x = made()
    plan = lowtide.plan(model, loss_fn, x, budget=budget_of(model, loss_fn, x, 0.9))
    model.num_forwards = 0
    handle = lowtide.apply(model, plan)
    actual = train(model, lambda x: handle.step(loss_fn, x), x, [{"middle": 1}, {}])  # type: ignore[attr-defined]
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
    (event,) = handle.stats().out_of_memory  # type: ignore[attr-defined]
    assert event.peak_after_bytes < event.peak_before_bytes


def test_other_errors_are_not_caught() -> None:
    model, loss_fn, x = made()
    handle = lowtide.fit(model, loss_fn, x, budget="1GiB", verify=False)
    with pytest.raises(ZeroDivisionError):
        handle.step(lambda x: 1 / 0, x)
    with pytest.raises(TypeError, match="not a tensor"):
        handle.step(lambda x: 3, x)
    assert handle.stats().out_of_memory == ()
    assert not is_out_of_memory(RuntimeError("some other"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))


def test_a_step_that_changes_weights_is_not_run_again() -> None:
    model, loss_fn, x = made()
    handle = lowtide.fit(model, loss_fn, x, budget=budget_of(model, loss_fn, x, 0.9), verify=False)
    optimizer = torch.optim.SGD([model.head.bias], lr=0.1)
    model.head.bias.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    model.failures = {"backward": 1}
    with pytest.raises(torch.OutOfMemoryError) as caught:
        handle.step(loss_fn, x)
    assert any("optimizer in the backward" in note for note in caught.value.__notes__)
    assert handle.stats().out_of_memory == ()


def test_nothing_of_a_failed_step_stays_allocated() -> None:
    model, loss_fn, x = made()
    handle = lowtide.fit(model, loss_fn, x, budget=budget_of(model, loss_fn, x, 0.9), verify=False)
    held: list[Any] = []

    def leaky(x: Tensor) -> Tensor:
        assert all(reference() is None for reference in held)  # of earlier attempts
        return Token.apply(loss_fn(x), held)

    model.failures = {"backward": 100}
    with pytest.raises(torch.OutOfMemoryError):
        handle.step(leaky, x)
    assert len(held) > 1
    assert all(reference() is None for reference in held)


def test_a_larger_batch_is_planned_for_with_its_loss(caplog: pytest.LogCaptureFixture) -> None:
    job = zoo.gpt(2, width=16, heads=2, vocabulary=256)
    ids = job.batch[0][:, :16]
    handle = lowtide.fit(job.model, job.loss_fn, ids, budget=budget_of(job.model, job.loss_fn, ids, 0.6), verify=False)
    larger = torch.randint(256, (4, 30))
    for _ in range(2):
        job.model.zero_grad()
        handle.step(job.loss_fn, larger)
        handle.step(job.loss_fn, larger[:, :25])
        handle.step(job.loss_fn, ids)
    (replan,) = handle.stats().replans
    assert (replan.seen, replan.planned_for, replan.is_new) == (((4, 30),), ((4, 32),), True)
    assert len(said(caplog, "are larger than")) == len(said(caplog, "gradients of an earlier backward")) == 1
    assert len(caplog.records) == 2
    job.model.zero_grad()
    with handle.disabled():
        graph = lowtide.trace(job.model, job.loss_fn, torch.randint(256, (4, 32)), mode="fake")
    found = handle.shapes.all[-1].plan
    assert found.plain_peak_bytes == pytest.approx(simulate(graph).peak_bytes, rel=0.1)
    assert simulate(graph, found).peak_bytes == pytest.approx(found.peak_bytes, rel=0.1)


def test_switched_off_it_is_a_plain_step() -> None:
    model, loss_fn, x = made()
    handle = lowtide.fit(model, loss_fn, x, budget=budget_of(model, loss_fn, x, 0.9), verify=False)
    model.failures = {"middle": 1}
    with handle.disabled(), pytest.raises(torch.OutOfMemoryError) as caught:
        handle.step(loss_fn, x)
    assert any("switched off" in note for note in caught.value.__notes__)
    assert torch.equal(model.large, torch.zeros_like(model.large))


def test_a_model_that_is_not_called_as_a_whole() -> None:
    """Its inputs are not seen, so the arguments of `step` say which plan it is."""
    model, _, x = made()

    def loss_fn(x: Tensor) -> Tensor:
        return model.forward(x).square().mean()  # past the hooks

    handle = lowtide.fit(model, loss_fn, x, budget=budget_of(model, loss_fn, x, 0.9), verify=False)
    assert handle.plan.input_shapes == ()
    first = handle.plan
    handle.step(loss_fn, torch.cat([x, x[:4]]))
    second = handle.plan
    assert second is not first
    assert second.plain_peak_bytes > first.plain_peak_bytes
    model.zero_grad()
    handle.step(loss_fn, x)
    assert handle.plan is first
    model.failures = {"middle": 1}
    handle.step(loss_fn, torch.cat([x, x[:4]]))
    (event,) = handle.stats().out_of_memory
    assert event.peak_before_bytes == second.peak_bytes > event.peak_after_bytes == handle.plan.peak_bytes
