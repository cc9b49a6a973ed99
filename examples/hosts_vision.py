"""An image model of timm, or of transformers without timm, within a budget: `python examples/hosts_vision.py`."""

import torch
from torch import Tensor, nn

import lowtide


def make() -> nn.Module:
    try:
        import timm
    except (ImportError, RuntimeError):  # not installed, or a torchvision for another torch
        from transformers import ConvNextConfig, ConvNextForImageClassification

        return ConvNextForImageClassification(ConvNextConfig(hidden_sizes=[16, 32], depths=[1, 1], num_stages=2))
    model = timm.create_model("convnext_atto", num_classes=2)
    model.set_grad_checkpointing(False)  # timm's own checkpointing stays off
    return model


torch.manual_seed(0)
model, images = make(), torch.randn(8, 3, 64, 64)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)  # a fused optimizer needs no workspace


def loss_fn(images: Tensor) -> Tensor:
    output = model(images)
    return (output if isinstance(output, Tensor) else output.logits).square().mean()


estimate = lowtide.estimate(model, loss_fn, images, optimizer=optimizer)
print(estimate)
budget = (estimate.floor_bytes + 2 * estimate.peak_bytes) // 3
handle = lowtide.fit(model, loss_fn, images, budget=budget, optimizer=optimizer, tune_s=0, time_limit_s=1)
loss_fn(images).backward()
optimizer.step()
print(handle.stats())
