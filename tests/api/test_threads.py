"""Several threads that trace, fit and measure: one after the other, each with the result it has alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import lowtide

NUM_THREADS = 3


def block(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def fitted(width: int) -> tuple[int, int, int | None, list[Tensor]]:
    """What a model's graph and fit are like, and its gradients under the plan."""
    model = nn.Sequential(*(block(width) for _ in range(2)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    x = torch.ones(128, width)

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).square().mean()

    guess = lowtide.estimate(model, loss_fn, x)
    budget = (guess.peak_bytes + guess.floor_bytes) // 2
    handle = lowtide.fit(model, loss_fn, x, budget=budget, time_limit_s=60.0, tune_s=0)
    loss_fn(x).backward()
    handle.remove()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return len(guess.graph.ops), guess.peak_bytes, handle.measured_peak_bytes, gradients


@pytest.mark.usefixtures("quick_search")
def test_fits_in_several_threads() -> None:
    widths = [8, 16, 24]
    alone = [fitted(width) for width in widths]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        together = list(pool.map(fitted, widths))
    for one, other in zip(alone, together, strict=True):
        assert one[:2] == other[:2]
        assert one[2] is not None and other[2] is not None
        assert all(map(torch.equal, one[3], other[3]))


def test_measurements_in_several_threads() -> None:
    def measured(size: int) -> int:
        return lowtide.measure(lambda: torch.ones(size).exp(), device="cpu").peak_bytes

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        assert list(pool.map(measured, range(1000, 1009))) == [8 * size for size in range(1000, 1009)]


def test_modules_called_in_another_thread_are_not_part_of_a_trace() -> None:
    model, other, x = block(8), block(4), torch.ones(2, 8)

    def loss_fn(x: Tensor) -> Tensor:
        helper = threading.Thread(target=other, args=(torch.ones(2, 4),))
        helper.start()
        helper.join()
        return model(x).mean()

    paths = [call.path for call in lowtide.trace(model, loss_fn, x, mode="real").calls]
    assert paths == ["", "0", "1", "2"]


def test_calls_may_nest() -> None:
    model, x = block(8), torch.ones(2, 8)

    def traced() -> None:
        lowtide.trace(model, lambda x: model(x).mean(), x, mode="fake")

    assert lowtide.measure(traced, device="cpu").peak_bytes >= 0
