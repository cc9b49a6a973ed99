"""Train with activations in host memory: `python examples/offload_training.py`. Uses a GPU if there is one."""

import torch
from torch import nn

import lowtide

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8))).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
store = lowtide.ActivationStore(device="1MiB", host="1GiB")
for step in range(5):
    x = torch.randn(512, 256, device=device)
    with lowtide.offload(store, min_bytes="64KiB"):
        loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
print(store.stats())
