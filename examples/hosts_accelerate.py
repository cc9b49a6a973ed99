"""A training loop with accelerate, in bfloat16 and within a budget: `python examples/hosts_accelerate.py`."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lowtide

torch.manual_seed(0)
blocks = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8))
model = nn.Sequential(*blocks, nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(2048, 64), torch.randn(2048, 1)), batch_size=512, shuffle=True)


def loss_fn(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


accelerator = Accelerator(mixed_precision="bf16", cpu=True)
model, optimizer, loader = lowtide.hosts.accelerate.prepare(
    accelerator, model, optimizer, loader, budget="8MiB", loss_fn=loss_fn, tune_s=0, time_limit_s=1
)
for batch in loader:
    loss = loss_fn(model, batch)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
print(lowtide.handle_of(model).stats())
bare = accelerator.unwrap_model(model)
