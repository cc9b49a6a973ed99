"""The cost of `lowtide.checkpoint` over torch's own, on four transformer blocks: `python bench/checkpoint.py`.

The variants take turns within one run and their median times are compared, so that a busy machine slows all alike.
Writes a table to bench/results/checkpoint-<device>.md.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from reporting import NUM_IN_A_ROW, Page, device_name, options_of, versions
from torch import Tensor, nn
from ways import TORCH, Way, in_turns

import lowtide

CASES = {
    "cpu": {"small": (128, 4, 64, torch.float32), "medium": (512, 4, 256, torch.float32)},
    "cuda": {"small": (1024, 2, 512, torch.bfloat16), "medium": (4096, 4, 2048, torch.bfloat16)},
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


def plain(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


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


def rows_of(case: str, device: str, rounds: int) -> Iterator[str]:
    width, batch, tokens, dtype = CASES[device][case]
    blocks = nn.ModuleList(Block(width) for _ in range(4)).to(device, dtype)
    x = torch.randn(batch, tokens, width, device=device, dtype=dtype, requires_grad=True)
    ms: list[dict[str, float]] = []
    for step in (train, infer):
        runs = {"plain": plain, "torch": TORCH, "lowtide": lowtide.checkpoint}
        ways = {name: Way(functools.partial(step, run, blocks, x)) for name, run in runs.items()}
        times = in_turns(ways, device, rounds, num_warm=3)
        ms.append({name: 1e3 * statistics.median(seconds) for name, seconds in times.items()})
    training, inference = ms
    yield (
        f"| {case}: {batch} x {tokens} x {width}, {str(dtype).removeprefix('torch.')} "
        f"| {training['plain']:.2f} | {training['torch']:.2f} | {training['lowtide']:.2f} "
        f"| **{training['lowtide'] / training['torch']:.3f}** | {inference['plain']:.2f} | {inference['lowtide']:.2f} "
        f"| {inference['lowtide'] / inference['plain']:.3f} |"
    )


def main() -> None:
    options = options_of(__doc__, ("small", "medium"), rounds=20).parse_args()
    page = Page(
        options.out,
        f"checkpoint-{options.device}.md",
        f"# `lowtide.checkpoint` against torch's, {device_name(options.device)}",
        "",
        f"{versions()}; 4 Llama-like blocks, each checkpointed; medians of {options.rounds} turns in one run, "
        f"{NUM_IN_A_ROW} steps in a row.",
        "",
        "| case | plain ms | torch ms | lowtide ms | lowtide / torch | no_grad: plain ms | lowtide ms | ratio |",
        "|---|---|---|---|---|---|---|---|",
    )
    page.add_cases(options, functools.partial(rows_of, device=options.device, rounds=options.rounds))


if __name__ == "__main__":
    main()
