"""Image models as timm and torchvision have them: `fit` helps them, and `estimate` says what sets their floor."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from hosts.training import OPTIONS, assert_same_weights, trained, weights
from lowtide.errors import LowtideError
from sweeps import sweep

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("quick_search")


def resnet() -> Any:
    config = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic")
    return transformers.ResNetForImageClassification(config)


def swin() -> Any:
    config = transformers.SwinConfig(
        image_size=32, patch_size=2, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4
    )
    return transformers.SwinForImageClassification(config)


def convnext() -> Any:
    config = transformers.ConvNextConfig(hidden_sizes=[16, 32], depths=[1, 1], num_stages=2)
    return transformers.ConvNextForImageClassification(config)


def from_package(package: str, name: str, **options: Any) -> Any:
    """A model of timm or torchvision; skips if the package is missing, or was built for another torch."""
    try:
        module = importlib.import_module(package)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{package} cannot be imported: {error}")
    return getattr(module, name)(**options)


MODELS = {
    "resnet": resnet,
    "convnext": convnext,
    "swin": swin,
    "torchvision": lambda: from_package("torchvision.models", "resnet18", num_classes=4),
    "timm": lambda: from_package("timm", "create_model", model_name="resnet18", num_classes=4),
}


def scores(model: Any, images: Tensor) -> Tensor:
    output = model(images)
    return output if isinstance(output, Tensor) else output.logits


def train(model: Any, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> tuple[list[float], int]:
    return trained(model, optimizer, lambda images: scores(model, images).square().mean(), batches)


@pytest.mark.parametrize("name", sweep(MODELS, keep=1))
def test_fit_helps(name: str) -> None:
    torch.manual_seed(0)
    plain = MODELS[name]()
    torch.manual_seed(0)
    fitted = MODELS[name]()
    batches = [torch.randn(16, 3, 32, 32) for _ in range(3)]
    expected, plain_peak = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), batches)
    optimizer = torch.optim.SGD(fitted.parameters(), lr=0.1, momentum=0.9)
    guess = lowtide.estimate(
        fitted, lambda images: scores(fitted, images).square().mean(), batches[0], optimizer=optimizer
    )
    assert guess.floor_bytes < guess.peak_bytes and not guess.is_limited_by_optimizer
    budget = (guess.floor_bytes + 2 * plain_peak) // 3
    lowtide.fit(
        fitted,
        lambda images: scores(fitted, images).square().mean(),
        batches[0],
        budget=budget,
        optimizer=optimizer,
        **OPTIONS,
    )
    losses, peak = train(fitted, optimizer, batches)
    assert losses == expected and peak <= budget
    assert_same_weights(weights(plain), weights(fitted))


def test_the_floor_of_a_small_batch_is_the_optimizers_step() -> None:
    """Of one small image the activations take less than AdamW's workspace: no plan helps, a fused optimizer does."""
    model, image = resnet(), torch.randn(1, 3, 16, 16)

    def guess(**options: Any) -> lowtide.api.estimate.Estimate:
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        return lowtide.estimate(model, lambda x: scores(model, x).square().mean(), image, optimizer=optimizer)

    usual, fused = guess(), guess(fused=True)
    assert usual.is_limited_by_optimizer and usual.floor_bytes == usual.peak_bytes
    assert "in the optimizer's step, which no plan changes" in str(usual) and "fused=True needs none" in str(usual)
    assert fused.floor_bytes < usual.floor_bytes and fused.graph.optimizer_workspace_bytes == 0
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scores(model, image).square().mean().backward()
    optimizer.step()
    assert lowtide.measure(optimizer.step, device="cpu").peak_bytes < usual.graph.optimizer_workspace_bytes / 4


def test_timms_own_checkpointing_is_refused() -> None:
    """Its models have the attribute `grad_checkpointing`, which `set_grad_checkpointing` sets."""
    model = resnet()
    model.grad_checkpointing = True
    with pytest.raises(LowtideError, match=r"call model\.set_grad_checkpointing\(False\) first"):
        lowtide.fit(model, lambda x: scores(model, x).square().mean(), torch.randn(1, 3, 16, 16), budget="1GiB")
