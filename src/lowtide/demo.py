"""A small GPT trained on the CPU, plain and with `lowtide.checkpoint` on each block: `python -m lowtide.demo`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.memory.meter import peak_bytes_of
from lowtide.units import format_bytes, format_seconds

WIDTH, HEADS, LAYERS, VOCABULARY = 256, 8, 6, 512
BATCH, CONTEXT, STEPS = 8, 128, 4

Runner = Callable[..., Any]


class Block(nn.Module):
    """A pre-norm transformer block with dropout, so that the replay has random numbers to repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(batch, context, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, context, width))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """`run` calls each block: plainly, or through a checkpoint."""

    def __init__(self, run: Runner) -> None:
        super().__init__()
        self.run = run
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x)


@dataclass(frozen=True)
class Trained:
    """What a few steps of training left behind."""

    step_s: float
    peak_bytes: int
    losses: list[float]
    gradients: list[Tensor]


def train(run: Runner) -> Trained:
    """Train for a few steps from a fixed seed; time the steps, then measure the peak of one more."""
    torch.manual_seed(0)
    model = GPT(run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1))
    losses, seconds = [], []

    def forward_backward() -> None:
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        losses.append(loss.item())

    for _ in range(STEPS):
        start = time.perf_counter()
        forward_backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    peak_bytes = peak_bytes_of(forward_backward)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return Trained(min(seconds), peak_bytes, losses, gradients)


def main() -> None:
    parameters = sum(parameter.numel() for parameter in GPT(lowtide.checkpoint).parameters())
    print(f"A GPT of {parameters / 1e6:.1f}M parameters, {LAYERS} blocks, {BATCH} x {CONTEXT} tokens, on the CPU")
    plain = train(lambda block, x: block(x))
    ours = train(lowtide.checkpoint)
    difference = max((a - b).abs().max().item() for a, b in zip(plain.gradients, ours.gradients, strict=True))
    print(f"{'':<30}{'step':>10}{'ratio':>8}{'measured peak':>16}{'max gradient difference':>26}")
    for name, run, shown in (("plain", plain, "-"), ("lowtide.checkpoint per block", ours, f"{difference:g}")):
        ratio = f"{run.step_s / plain.step_s:.2f}x"
        print(f"{name:<30}{format_seconds(run.step_s):>10}{ratio:>8}{format_bytes(run.peak_bytes):>16}{shown:>26}")
    print(f"losses over {len(ours.losses)} steps equal to the last bit: {plain.losses == ours.losses}")


if __name__ == "__main__":
    main()
