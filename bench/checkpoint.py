"""The cost of `lowtide.checkpoint` over torch's own, on four transformer blocks: `python bench/checkpoint.py`.

The variants take turns within one run and their median times are compared, so that a busy machine slows all alike.
Writes a table to bench/results/checkpoint-<device>.md.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from reporting import RESULTS, device_name, save, timed, versions
from torch import Tensor, nn

import lowtide

CASES = {
    "cpu": {"small": (128, 4, 64, torch.float32), "medium": (512, 4, 256, torch.float32)},
    "cuda": {"small": (1024, 2, 512, torch.bfloat16), "large": (4096, 4, 2048, torch.bfloat16)},
}


class Block(nn.Module):
    """A Llama-like block: RMSNorm, attention, gated MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def torch_checkpoint(block: nn.Module, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)


def plain(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def compare(calls: dict[str, Callable[[], Any]], device: str, rounds: int) -> dict[str, float]:
    """Median seconds of each call, taking turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(3):
            call()
    for turn in range(rounds):
        order = list(calls.items())[:: 1 if turn % 2 else -1]
        for name, call in order:
            times[name].append(timed(call, device))
    return {name: statistics.median(values) for name, values in times.items()}


def train(run: Callable[..., Tensor], blocks: nn.ModuleList, x: Tensor) -> None:
    h = x
    for block in blocks:
        h = run(block, h)
    h.sum().backward()


def infer(run: Callable[..., Tensor], blocks: nn.ModuleList, x: Tensor) -> None:
    with torch.no_grad():
        h = x
        for block in blocks:
            h = run(block, h)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    lines = [
        f"# `lowtide.checkpoint` against torch's, {device_name(options.device)}",
        "",
        f"{versions()}; 4 Llama-like blocks, each checkpointed; medians of {options.rounds} turns in one run.",
        "",
        "| case | plain ms | torch ms | lowtide ms | lowtide / torch | no_grad: plain ms | lowtide ms | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, (width, batch, tokens, dtype) in CASES[options.device].items():
        blocks = nn.ModuleList(Block(width) for _ in range(4)).to(options.device, dtype)
        x = torch.randn(batch, tokens, width, device=options.device, dtype=dtype, requires_grad=True)
        runs = {"plain": plain, "torch": torch_checkpoint, "lowtide": lowtide.checkpoint}
        training, inference = (
            compare(
                {name: functools.partial(step, run, blocks, x) for name, run in runs.items()},
                options.device,
                options.rounds,
            )
            for step in (train, infer)
        )
        lines.append(
            f"| {case}: {batch} x {tokens} x {width}, {str(dtype).removeprefix('torch.')} "
            f"| {training['plain'] * 1e3:.2f} | {training['torch'] * 1e3:.2f} | {training['lowtide'] * 1e3:.2f} "
            f"| **{training['lowtide'] / training['torch']:.3f}** "
            f"| {inference['plain'] * 1e3:.2f} | {inference['lowtide'] * 1e3:.2f} "
            f"| {inference['lowtide'] / inference['plain']:.3f} |"
        )
    save(lines, options.out, f"checkpoint-{options.device}.md")


if __name__ == "__main__":
    main()
