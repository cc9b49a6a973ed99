"""Checkpointing functions and plans for the models of diffusers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from hosts.training import OPTIONS, assert_same_weights, trained, weights
from lowtide.errors import LowtideError

diffusers = pytest.importorskip("diffusers")

pytestmark = pytest.mark.usefixtures("quick_fit")


def unet() -> Any:
    """As Stable Diffusion's, with blocks of convolutions, and of attention to a text."""
    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=8,
        attention_head_dim=4,
        norm_num_groups=4,
    )


def batches(num: int = 5) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "sample": torch.randn(2, 4, 16, 16, generator=generator),
            "timestep": torch.randint(0, 1000, (2,), generator=generator),
            "encoder_hidden_states": torch.randn(2, 6, 8, generator=generator),
        }
        for _ in range(num)
    ]


def train(model: Any, optimizer: torch.optim.Optimizer, num_steps: int = 5) -> tuple[list[float], int]:
    return trained(model, optimizer, lambda batch: model(**batch).sample.square().mean(), batches(num_steps))


def test_the_function_recomputes_some_blocks() -> None:
    plain = unet()
    expected, plain_peak = train(plain, torch.optim.AdamW(plain.parameters()), 2)
    peaks = {}
    store = lowtide.ActivationStore()
    for name, function in {
        "none": None,
        "all": lowtide.hosts.diffusers.func(),
        "half": lowtide.hosts.diffusers.func(every=2),
        "resnets": lowtide.hosts.diffusers.func(where=lambda block: "Resnet" in type(block).__name__, store=store),
    }.items():
        model = unet()
        model.enable_gradient_checkpointing(gradient_checkpointing_func=function)
        losses, peaks[name] = train(model, torch.optim.AdamW(model.parameters()), 2)
        assert losses == expected, name
        assert_same_weights(weights(plain), weights(model))
    assert peaks["all"] <= 1.01 * peaks["none"] and peaks["all"] < peaks["half"] < plain_peak
    assert peaks["resnets"] < plain_peak and len(store) == 0
    with pytest.raises(ValueError, match="every is a number of blocks, 1 or more, not 0"):
        lowtide.hosts.diffusers.func(every=0)


def test_a_block_that_is_passed_as_its_bound_call() -> None:
    """Some models do so, and some pass keywords. The choice of blocks is that of the first step."""
    seen: list[Any] = []
    function = lowtide.hosts.diffusers.func(every=2, where=lambda block: seen.append(block) is None)
    blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
    replays = [0, 0, 0]
    for number, block in enumerate(blocks):

        def count(*_: Any, number: int = number) -> None:
            replays[number] += lowtide.is_recomputing()

        block.register_forward_pre_hook(count)
    for _ in range(3):
        x = torch.ones(2, 4, requires_grad=True)
        for block in blocks:
            x = function(block.__call__, input=x).tanh()
        x.sum().backward()
    assert seen == list(blocks) and replays == [3, 0, 3]
    for wrong in ({"where": 3}, {"store": {}}):
        with pytest.raises(TypeError, match=f"{next(iter(wrong))}={next(iter(wrong.values()))}"):
            lowtide.hosts.diffusers.func(**wrong)  # type: ignore[arg-type]


@pytest.mark.slow  # test_transformers fits in a loop of its host, test_vision images
def test_fit() -> None:
    plain = unet()
    expected, plain_peak = train(plain, torch.optim.AdamW(plain.parameters()))
    fitted = unet()
    optimizer = torch.optim.AdamW(fitted.parameters())

    def loss_fn(batch: Any) -> Tensor:
        return fitted(**batch).sample.square().mean()

    fitted.enable_gradient_checkpointing()
    with pytest.raises(LowtideError, match=r"disable_gradient_checkpointing\(\)"):
        lowtide.fit(fitted, loss_fn, batches(1)[0], budget="1GiB")
    fitted.disable_gradient_checkpointing()
    budget = int(0.85 * plain_peak)
    handle = lowtide.fit(fitted, loss_fn, batches(1)[0], budget=budget, optimizer=optimizer, **OPTIONS)
    losses, peak = train(fitted, optimizer)
    assert losses == expected and peak <= budget and handle.stats().num_replays > 0
    assert_same_weights(weights(plain), weights(fitted))
