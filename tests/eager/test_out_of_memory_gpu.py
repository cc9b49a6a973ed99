"""Running out of memory on a real allocator: training goes on, with the same gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import lowtide

pytestmark = pytest.mark.gpu

WIDTH, BATCH, LAYERS = 1024, 8192, 6


@pytest.fixture(autouse=True)
def whole_device_again() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def limit_to(num_bytes: int) -> None:
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(num_bytes / torch.cuda.get_device_properties(0).total_memory)


def made() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    blocks = (
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))
        for _ in range(LAYERS)
    )
    model = nn.Sequential(*blocks, nn.BatchNorm1d(WIDTH)).cuda()
    return model, torch.randn(BATCH, WIDTH, device="cuda")


def left_behind(model: nn.Module) -> list[Tensor]:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [t.cpu() for t in (*gradients, *model.buffers())] + [torch.cuda.get_rng_state()]


def test_a_device_that_turns_out_smaller() -> None:
    model, x = made()

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).square().mean()

    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(1)
    for _ in range(3):
        loss_fn(x).backward()
    expected = left_behind(model)
    model.zero_grad()
    model.load_state_dict(weights)
    torch.cuda.empty_cache()
    for parameter in model.parameters():  # there from the start: they are put back, and added to
        parameter.grad = torch.zeros_like(parameter)
    guess = lowtide.estimate(model, loss_fn, x)
    handle = lowtide.fit(model, loss_fn, x, budget=guess.peak_bytes - (guess.peak_bytes - guess.floor_bytes) // 20)
    torch.manual_seed(1)
    # Before the first step, after which gradients would hold on to segments that the limit does not count again.
    limit_to((guess.floor_bytes + guess.peak_bytes) // 2 + (64 << 20))
    losses = [handle.step(loss_fn, x) for _ in range(3)]
    events = handle.stats().out_of_memory
    assert events
    assert all(event.peak_after_bytes < event.peak_before_bytes for event in events)
    assert events[0].allocated_bytes is not None
    assert all(torch.equal(a, b) for a, b in zip(expected, left_behind(model), strict=True))
    assert not any(loss.requires_grad for loss in losses)


def test_a_device_that_is_too_small() -> None:
    model, x = made()

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).square().mean()

    handle = lowtide.fit(model, loss_fn, x, budget="64GiB", verify=False)
    loss_fn(x).backward()
    before = left_behind(model)
    allocated = torch.cuda.memory_allocated()
    limit_to(allocated + (256 << 20))
    with pytest.raises(torch.OutOfMemoryError):
        handle.step(loss_fn, x)
    assert all(torch.equal(a, b) for a, b in zip(before, left_behind(model), strict=True))
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= allocated + (1 << 20)
    torch.cuda.set_per_process_memory_fraction(1.0)
    handle.step(loss_fn, x)


def test_a_larger_batch_is_held_too() -> None:
    model, x = made()

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).square().mean()

    smaller = x[: BATCH // 2]
    small, large = (lowtide.estimate(model, loss_fn, each) for each in (smaller, x))
    budget = max(small.floor_bytes + (small.peak_bytes - small.floor_bytes) * 4 // 5, large.floor_bytes * 11 // 10)
    handle = lowtide.fit(model, loss_fn, smaller, budget=min(budget, small.peak_bytes - (32 << 20)))
    if not handle.plan.regions:
        pytest.skip("the larger batch's floor is above the smaller one's peak")
    handle.shapes.planner.budget_bytes = budget  # type: ignore[union-attr]
    loss_fn(x).backward()
    model.zero_grad()
    (replan,) = handle.stats().replans
    assert replan.is_new
    assert lowtide.measure(lambda: loss_fn(x).backward()).total_peak_bytes <= budget


def test_the_peak_that_fit_measures_is_that_of_the_step_alone() -> None:
    """Copies of the batch, and the models that the engine is measured on, are not the step's."""
    model, x = made()

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).square().mean()

    loss_fn(x).backward()
    model.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    loss_fn(x).backward()
    plain = torch.cuda.max_memory_allocated()
    model.zero_grad()
    handle = lowtide.fit(model, loss_fn, x, budget=int(0.7 * plain))
    torch.cuda.reset_peak_memory_stats()
    loss_fn(x).backward()
    peak = torch.cuda.max_memory_allocated()
    assert handle.measured_peak_bytes is not None and abs(handle.measured_peak_bytes - peak) <= 1 << 20 < x.nbytes
