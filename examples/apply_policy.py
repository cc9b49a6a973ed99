"""Recompute all layers but each third of a model, and take that off again: `python examples/apply_policy.py`."""

import torch
from torch import nn

import lowtide


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), *(Block(64) for _ in range(9)), nn.Linear(64, 4))
x = torch.randn(128, 16)
model(x).square().mean().backward()
plain = [parameter.grad.clone() for parameter in model.parameters()]
model.zero_grad()

handle = lowtide.apply(model, lowtide.EveryN(3), regions=Block)
model(x).square().mean().backward()
print(handle.stats())
assert all(torch.equal(a, p.grad) for a, p in zip(plain, model.parameters(), strict=True))
with handle.disabled():
    model(x)  # runs plainly
handle.remove()
