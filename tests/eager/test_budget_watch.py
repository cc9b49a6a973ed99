"""`BudgetWatch` warns when a fitted budget no longer holds, and `refit` plans again."""

from __future__ import annotations

import gc
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import lowtide
from lowtide.eager.over_budget import BudgetWatch
from lowtide.plans import Plan, Recompute
from lowtide.simulator import simulate


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.num_rounds = nn.Linear(16, 64), nn.Linear(64, 16), 1

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num_rounds):
            x = x + self.outer(self.inner(x).exp().sin().tanh())
        return x


pytestmark = pytest.mark.usefixtures("one_thread", "quick_fit")


@pytest.fixture
def job() -> Any:
    model = nn.Sequential(*(Block() for _ in range(4)))

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).square().mean()

    return SimpleNamespace(model=model, loss_fn=loss_fn, batch=torch.randn(64, 16))


def tight(job: Any, optimizer: Any = None, share: float = 0.3) -> int:
    graph = lowtide.trace(job.model, job.loss_fn, job.batch, optimizer=optimizer)
    floor, plain = lowtide.sweep(graph, [], time_limit_s=1).floor_bytes, simulate(graph).peak_bytes
    return int(floor + share * (plain - floor))


def fitted(job: Any, budget: int, **options: Any) -> Any:
    return lowtide.fit(job.model, job.loss_fn, job.batch, budget=budget, time_limit_s=1, **options)


def train(job: Any, num_steps: int, optimizer: Any = None) -> None:
    for _ in range(num_steps):
        job.model.zero_grad()
        job.loss_fn(job.batch).backward()
        if optimizer is not None:
            optimizer.step()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "may no longer hold" in record.message]


def test_parameters_unfrozen_later(job: Any, caplog: pytest.LogCaptureFixture) -> None:
    for block in job.model[:2]:
        block.requires_grad_(False)
    budget = tight(job, share=0.2)  # so that the unfrozen step does not fit by far
    handle = fitted(job, budget)
    assert not handle.plan.is_plain
    train(job, 4)
    assert not said(caplog)
    job.model.requires_grad_(True)
    train(job, 40)
    (message,) = said(caplog)
    num_bytes = sum(p.nbytes for block in job.model[:2] for p in block.parameters())
    assert lowtide.units.format_bytes(num_bytes) in message and "were frozen" in message
    assert lowtide.units.format_bytes(budget) in message and "handle.refit()" in message
    job.model.zero_grad()
    with pytest.raises(lowtide.InfeasibleBudgetError):
        handle.refit()
    assert handle.plan.budget_bytes == budget and handle.enabled  # as before
    train(job, 1)
    handle.remove()


def test_paused_while_a_step_is_captured(job: Any, caplog: pytest.LogCaptureFixture) -> None:
    job.model[0].requires_grad_(False)
    handle = fitted(job, tight(job, share=0.2))
    job.model.requires_grad_(True)
    with handle.watch.paused():
        train(job, 40)
    assert not said(caplog)
    train(job, 40)
    assert len(said(caplog)) == 1
    handle.remove()


def test_peaks_of_the_steps_that_fit_has_run_hide_no_later_ones(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator, whose allocator's peak only rises."""
    handle = fitted(job, tight(job))
    budget, peak = handle.watch.budget_bytes, [0]
    peak[0] = 3 * budget  # of plain steps
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: peak[0])
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda device: peak.__setitem__(0, 0))
    for has_captured in (False, True):
        watch = BudgetWatch(handle, torch.device("cuda"), budget, handle.plan.graph)
        warned: list[str] = []
        watch._warn = lambda *about, to=warned: to.append(about)  # type: ignore[method-assign]
        if has_captured:
            with watch.paused():
                peak[0] = 3 * budget
        for _ in range(8):
            peak[0] = max(peak[0], budget)
            watch.forward_begins()
        assert not warned
        peak[0] = max(peak[0], 2 * budget)
        for _ in range(8):
            watch.forward_begins()
        assert warned
    handle.remove()


def test_refit_makes_the_budget_hold_again(job: Any, caplog: pytest.LogCaptureFixture) -> None:
    job.model[0].requires_grad_(False)
    frozen_plain = simulate(lowtide.trace(job.model, job.loss_fn, job.batch)).peak_bytes
    budget = frozen_plain - 4096
    handle = fitted(job, budget)
    before, same = handle.plan, handle
    job.model.requires_grad_(True)
    train(job, 3)
    assert len(said(caplog)) == 1
    job.model.zero_grad()
    state = torch.get_rng_state()
    handle.refit()
    assert torch.equal(torch.get_rng_state(), state)
    assert handle is same and handle.plan != before
    assert handle.measured_peak_bytes <= budget
    plain_gradients = [p.grad for p in job.model.parameters()]
    assert plain_gradients == [None] * len(plain_gradients)
    with handle.disabled():
        train(job, 1)
        expected = [p.grad.clone() for p in job.model.parameters()]
    train(job, 40)
    assert all(torch.equal(p.grad, e) for p, e in zip(job.model.parameters(), expected, strict=True))
    assert handle.stats().num_replays
    assert len(said(caplog)) == 1  # nothing new
    handle.remove()
    assert not any("forward" in vars(module) for module in job.model.modules())


def test_an_optimizer_made_later(job: Any, caplog: pytest.LogCaptureFixture) -> None:
    handle = fitted(job, tight(job))
    optimizer = torch.optim.Adam(job.model.parameters())
    train(job, 8, optimizer)
    (message,) = said(caplog)
    num_bytes = sum(2 * p.nbytes + 4 for p in job.model.parameters())  # two moments and a counter
    assert f"{lowtide.units.format_bytes(num_bytes)} of optimizer state" in message
    assert "handle.refit(optimizer=...)" in message
    handle.remove()


def test_nothing_is_said_while_the_budget_holds(job: Any, caplog: pytest.LogCaptureFixture) -> None:
    optimizer = torch.optim.Adam(job.model.parameters())
    with fitted(job, tight(job, optimizer), optimizer=optimizer) as handle:
        train(job, 20, optimizer)
        for _ in range(3):
            job.model.zero_grad()
            handle.step(job.loss_fn, job.batch)
            optimizer.step()
        job.model.zero_grad()
        handle.refit()
        train(job, 3, optimizer)
    assert not said(caplog)


def test_a_step_that_takes_another_path(job: Any, caplog: pytest.LogCaptureFixture) -> None:
    with fitted(job, tight(job)) as handle:
        handle.step(job.loss_fn, job.batch)
        job.model[-1].num_rounds = 8
        gradient = job.model[0].inner.weight.grad.clone()
        for _ in range(3):
            job.model.zero_grad()
            handle.step(job.loss_fn, job.batch)
        assert not torch.equal(job.model[0].inner.weight.grad, gradient)
    (message,) = said(caplog)
    assert "a peak of" in message and "another path" in message


def test_a_profiler_of_the_users_is_left_alone(job: Any, caplog: pytest.LogCaptureFixture) -> None:
    with fitted(job, tight(job)) as handle:
        job.model[-1].num_rounds = 8
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            for _ in range(3):
                job.model.zero_grad()
                handle.step(job.loss_fn, job.batch)
            torch.ones(1 << 20).exp()
        assert max(event.cpu_memory_usage for event in profiler.events()) >= 1 << 22
    assert not said(caplog)


def test_a_model_that_fits_as_it_is(job: Any, caplog: pytest.LogCaptureFixture) -> None:
    job.model[0].requires_grad_(False)
    plain = simulate(lowtide.trace(job.model, job.loss_fn, job.batch)).peak_bytes
    with fitted(job, plain + 64) as handle:
        assert handle.plan.is_plain
        job.model.requires_grad_(True)
        for _ in range(3):
            handle.step(job.loss_fn, job.batch)
    assert len(said(caplog)) == 1


def test_refit_takes_another_step(job: Any) -> None:
    with fitted(job, tight(job)) as handle:
        handle.refit(lambda x, y: job.loss_fn(x) + y, torch.randn(32, 16), torch.zeros(()))
        assert handle.shapes.all[0].inputs == (((32, 16),),)
        with pytest.raises(TypeError, match="with its arguments"):
            handle.refit(job.loss_fn)


def test_no_step_of_a_refit_counts_for_the_watch_of_before(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with fitted(job, tight(job)) as handle:
        counted: list[BudgetWatch] = []
        monkeypatch.setattr(BudgetWatch, "forward_begins", lambda watch: counted.append(watch))
        handle.refit()
        assert not counted
        train(job, 1)
        assert counted == [handle.watch]


def test_batches_are_not_held(job: Any) -> None:
    batch = torch.randn(64, 16)
    alive = torch.multiprocessing.reductions.StorageWeakRef(batch.untyped_storage())
    handle = lowtide.fit(job.model, job.loss_fn, batch, budget=tight(job), time_limit_s=1)
    del batch
    assert alive.expired()
    handle.refit()
    handle.remove()


def test_refit_is_for_handles_from_fit(job: Any) -> None:
    with lowtide.apply(job.model, Plan((Recompute("0"),))) as handle, pytest.raises(lowtide.LowtideError, match="fit"):
        handle.refit()


# The allocator's own counter, as an accelerator has it.


class Counter:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.peak = 0
        monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device=None: self.peak)
        monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda device=None: None)

    def watch(self, job: Any, budget: int) -> BudgetWatch:
        handle: Any = SimpleNamespace(
            model=job.model, measured_peak_bytes=0, plan=Plan(), shapes=SimpleNamespace(all=[])
        )
        graph: Any = SimpleNamespace(optimizer_state_bytes=0, optimizer_workspace_bytes=0, bytes_before=0)
        return BudgetWatch(handle, torch.device("cuda", 0), budget, graph)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    return Counter(monkeypatch)


def test_a_peak_above_the_budget_is_said_once(job: Any, counter: Counter, caplog: pytest.LogCaptureFixture) -> None:
    watch = counter.watch(job, 1000)
    for peak in (0, 900, 900, 900, 2048, 2048, 2048, 4096, 8192, 8192, 8192):
        counter.peak = peak
        watch.forward_begins()
    (message,) = said(caplog)
    assert "2.0 KiB" in message and "1000 B" in message and "handle.refit()" in message


def test_a_peak_from_before_does_not_count(job: Any, counter: Counter, caplog: pytest.LogCaptureFixture) -> None:
    counter.peak = 5000
    watch = counter.watch(job, 1000)
    for _ in range(10):
        watch.forward_begins()
    counter.peak = 800  # the user has reset it
    for _ in range(10):
        watch.forward_begins()
    assert not said(caplog)
    counter.peak = 1200
    for _ in range(20):
        watch.forward_begins()
    assert len(said(caplog)) == 1


def test_steps_with_the_handle_off_do_not_count(job: Any, counter: Counter, caplog: pytest.LogCaptureFixture) -> None:
    watch = counter.watch(job, 1000)
    for _ in range(10):
        counter.peak = max(counter.peak, 900)
        watch.forward_begins()
        watch.forward_without_plan()
        counter.peak = 5000  # of the plain step, and it is not reset
        watch.forward_begins()
    assert not said(caplog)
    counter.peak = 5001
    for _ in range(40):
        watch.forward_begins()
    assert len(said(caplog)) == 1


def test_the_counter_is_read_seldom(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device=None: reads.append(0) or 0)
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda device=None: None)
    watch = Counter.watch(SimpleNamespace(), job, 1000)  # type: ignore[arg-type]
    for _ in range(1000):
        watch.forward_begins()
    assert len(reads) == 1 + 8 + 6  # 1, 2, ... 128, then every 128


def backward_twice(job: Any) -> None:
    """Two backwards per update: the second begins with the gradients of the first."""
    job.model.zero_grad()
    for _ in range(2):
        job.loss_fn(job.batch).backward()


def test_gradients_of_an_earlier_backward(job: Any, caplog: pytest.LogCaptureFixture) -> None:
    num_bytes = sum(p.nbytes for p in job.model.parameters())
    handle = fitted(job, budget := tight(job, share=0.6))
    train(job, 4)
    assert not said(caplog)
    handle.watch.budget_bytes = handle.measured_peak_bytes  # whichever candidate was the fastest
    for _ in range(8):
        backward_twice(job)
    (message,) = said(caplog)
    assert f"{lowtide.units.format_bytes(num_bytes)} of gradients of an earlier backward" in message
    handle.refit()  # they are still there, so the plan is for a step that begins with them
    job.batch.mul_(2)  # so that gradients are new
    measured = lowtide.measure(lambda: job.loss_fn(job.batch).backward(), device="cpu")
    static = sum(size for kind, size in handle.plan.graph.static_bytes.items() if kind != "gradients")
    assert static + num_bytes + measured.peak_bytes <= budget
    for _ in range(40):
        backward_twice(job)
    assert len(said(caplog)) == 1
    handle.remove()


@pytest.mark.parametrize("missing_bytes", [0, 1])
def test_gradients_of_an_earlier_backward_count_as_they_add_to_the_peak(
    job: Any, caplog: pytest.LogCaptureFixture, missing_bytes: int
) -> None:
    """At the end of a step all gradients exist anyway."""
    with fitted(job, tight(job)) as handle:
        handle.watch.budget_bytes = 1 << 40  # nothing is said before the peak is known
        train(job, 1)
        num_bytes = sum(p.nbytes for p in job.model.parameters())
        measured = lowtide.measure(lambda: job.loss_fn(job.batch).backward(), device="cpu")
        static = sum(size for kind, size in handle.plan.graph.static_bytes.items() if kind != "gradients")
        peak = static + num_bytes + measured.peak_bytes
        assert handle.measured_peak_bytes < peak < handle.measured_peak_bytes + num_bytes
        handle.watch.budget_bytes = peak - missing_bytes
        for _ in range(8):
            backward_twice(job)
    assert len(said(caplog)) == missing_bytes


def test_a_step_with_gradients_of_an_earlier_backward(job: Any, caplog: pytest.LogCaptureFixture) -> None:
    with fitted(job, tight(job)) as handle:
        handle.watch.budget_bytes = handle.measured_peak_bytes  # whichever candidate was the fastest
        handle.step(job.loss_fn, job.batch)
        assert not said(caplog)
        handle.step(job.loss_fn, job.batch)
    (message,) = said(caplog)
    assert "gradients of an earlier backward" in message and "other experts" not in message


def test_two_numbers_that_are_almost_the_same(job: Any, counter: Counter, caplog: pytest.LogCaptureFixture) -> None:
    watch = counter.watch(job, 10 << 20)
    counter.peak = (10 << 20) + 4096
    for _ in range(2):
        watch.forward_begins()
    (message,) = said(caplog)
    assert "the budget of 10.000 MiB" in message and "a peak of 10.004 MiB" in message


@pytest.mark.gpu
def test_on_a_device(caplog: pytest.LogCaptureFixture) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    model = nn.Sequential(*(Block() for _ in range(6))).cuda()
    job = SimpleNamespace(model=model, loss_fn=lambda x: model(x).square().mean(), batch=torch.randn(65536, 16).cuda())
    budget = tight(job)
    with fitted(job, budget) as handle:
        train(job, 8)
        assert not said(caplog)
        model[-1].num_rounds = 8
        train(job, 40)
        peak = torch.cuda.max_memory_allocated()
        assert peak > budget  # and was not reset
        assert len(said(caplog)) == 1
        model[-1].num_rounds = 1
        job.model.zero_grad()
        handle.refit()
        train(job, 8)
        assert len(said(caplog)) == 1
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        with fitted(job, budget):
            optimizer = torch.optim.Adam([*model.parameters(), torch.zeros(1 << 26, device="cuda", requires_grad=True)])
            optimizer.param_groups[0]["params"][-1].grad = torch.zeros(1 << 26, device="cuda")
            train(job, 4, optimizer)
        assert len(said(caplog)) == 1


@pytest.mark.parametrize("is_frozen", [False, True])
def test_state_that_an_optimizer_has_made_is_not_missing(job: Any, is_frozen: bool) -> None:
    optimizer = torch.optim.AdamW(job.model.parameters())
    handle = fitted(job, tight(job, optimizer), optimizer=optimizer)
    assert handle.watch.missing_state_bytes() > 0
    train(job, 1, optimizer)
    if is_frozen:
        gc.freeze()
    try:
        assert handle.watch.missing_state_bytes() == 0
    finally:
        gc.unfreeze()
