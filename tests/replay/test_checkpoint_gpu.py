"""`lowtide.checkpoint` on a CUDA device: random states, autocast and memory of the device itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide

pytestmark = pytest.mark.gpu


def block(width: int = 64) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.3), nn.Linear(4 * width, width), nn.Tanh()
    )


def plainly(function: Any, *args: Any) -> Any:
    return function(*args)


def gradients(run: Any, region: Any, model: nn.Module, x: Tensor, *rest: Any) -> list[Tensor]:
    torch.manual_seed(5)
    output = run(region, x, *rest)
    found = torch.autograd.grad(output.float().square().sum(), [x, *model.parameters()])
    return [*found, output, torch.cuda.get_rng_state(), torch.get_rng_state()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_device_dropout_is_replayed(dtype: torch.dtype) -> None:
    model = block().to("cuda", dtype)
    x = torch.randn(32, 64, device="cuda", dtype=dtype, requires_grad=True)
    ours = gradients(lowtide.checkpoint, model, model, x)
    assert all(map(torch.equal, ours, gradients(plainly, model, model, x)))


def test_device_random_numbers_without_a_device_argument() -> None:
    """torch keeps random states of the devices of arguments only; here the argument is on the CPU."""
    model = block().cuda()

    def region(x: Tensor) -> Tensor:
        return model(x.cuda()).cpu()

    x = torch.randn(32, 64, requires_grad=True)
    ours = gradients(lowtide.checkpoint, region, model, x)
    assert all(map(torch.equal, ours, gradients(plainly, region, model, x)))


def test_device_generator_is_replayed() -> None:
    model = block().cuda()
    x = torch.randn(32, 64, device="cuda", requires_grad=True)
    found = []
    for run in (lowtide.checkpoint, plainly):
        generator = torch.Generator("cuda").manual_seed(3)
        region = lambda x, g: model(x * torch.rand(x.shape, device="cuda", generator=g))  # noqa: E731
        found.append([*gradients(run, region, model, x, generator), generator.get_state()])
    assert all(map(torch.equal, *found))


def test_device_autocast_is_replayed() -> None:
    model = block().cuda()
    x = torch.randn(32, 64, device="cuda", requires_grad=True)

    def step(run: Any) -> list[Tensor]:
        torch.manual_seed(5)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            output = run(model, x)
        return [output, *torch.autograd.grad(output.float().square().sum(), [x, *model.parameters()])]

    assert all(map(torch.equal, step(lowtide.checkpoint), step(plainly)))


def test_value_checks_on_the_device() -> None:
    model = block().cuda()
    x = torch.randn(32, 64, device="cuda", requires_grad=True)
    lowtide.checkpoint(model, x, determinism_check="values").sum().backward()
    output = lowtide.checkpoint(lambda x: x.exp() * (1 + lowtide.is_recomputing()) * x, x, determinism_check="values")
    with pytest.raises(lowtide.CheckpointError, match="different"):
        output.sum().backward()


def test_peak_falls_and_nothing_stays() -> None:
    model = nn.Sequential(*(block(256) for _ in range(6))).cuda()
    x = torch.randn(2048, 256, device="cuda", requires_grad=True)

    def step(run: Any) -> None:
        h = x
        for layer in model:
            h = run(layer, h)
        h.sum().backward()

    step(plainly)
    plain = lowtide.measure(lambda: step(plainly), device="cuda").peak_bytes
    ours = lowtide.measure(lambda: step(lowtide.checkpoint), device="cuda").peak_bytes
    assert ours < plain / 2
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        step(lowtide.checkpoint)
    assert torch.cuda.memory_allocated() == before
