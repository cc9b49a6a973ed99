"""Chains of blocks, recomputed in segments: `python bench/segments.py`.

The least peak, and the time at equal peak, of torch's `checkpoint_sequential` with the best number of segments, of two
levels of checkpoints by hand, and of lowtide's plans. Peaks are of activations and gradients: parameters are left out.
The ways take turns. Writes bench/results/segments-<device>.md.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from reporting import RESULTS, Page, device_name, median_over, timed, versions
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from zoo import Block as TransformerBlock

import lowtide

NUM_ROUNDS = 7


class ConvBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


class Chain(nn.Module):
    """Blocks in a loop; how they are called can be exchanged."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.call: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.call is not None:
            return self.call(x)
        for block in self.blocks:
            x = block(x)
        return x


def chains(device: str) -> dict[str, tuple[Chain, Tensor]]:
    scale = 4 if device == "cuda" else 1

    def layers(number: int) -> tuple[Chain, Tensor]:
        width = 128 * scale
        blocks: list[nn.Module] = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(number)]
        return Chain(blocks), torch.randn(1024 * scale, width)

    def transformer(number: int, width: int, tokens: int) -> tuple[Chain, Tensor]:
        blocks: list[nn.Module] = [TransformerBlock(width, 4) for _ in range(number)]
        return Chain(blocks), torch.randn(4 * scale, tokens, width)

    return {
        **{f"{number} layers": layers(number) for number in (16, 64, 144)},
        "GPT, 48 blocks": transformer(48, 64 * scale, 128),
        "narrow transformer, 96 blocks": transformer(96, 32 * scale, 128),
        "ResNet, 48 blocks": (
            Chain([ConvBlock(8 * scale) for _ in range(48)]),
            torch.randn(4 * scale, 8 * scale, 32, 32),
        ),
    }


def step(chain: Chain, x: Tensor) -> None:
    chain.zero_grad(set_to_none=True)
    chain(x).square().mean().backward()


def nested(blocks: list[nn.Module], num_segments: int, x: Tensor) -> Tensor:
    """A checkpoint around each segment, and one around each block inside."""

    def run(part: list[nn.Module], x: Tensor) -> Tensor:
        for block in part:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    length = math.ceil(len(blocks) / num_segments)
    for start in range(0, len(blocks), length):
        x = checkpoint(functools.partial(run, blocks[start : start + length]), x, use_reentrant=False)
    return x


@contextlib.contextmanager
def by_hand(chain: Chain, call: Callable[[Tensor], Tensor] | None) -> Iterator[None]:
    chain.call = call
    try:
        yield
    finally:
        chain.call = None


def peak_bytes(chain: Chain, x: Tensor, way: Callable[[], Any], device: str) -> int:
    with way():
        step(chain, x)
        chain.zero_grad(set_to_none=True)
        found = lowtide.measure(functools.partial(step, chain, x), device=device).peak_bytes
    chain.zero_grad(set_to_none=True)
    return found


def numbers(num_blocks: int) -> list[int]:
    """Numbers of segments to try, about the square root."""
    root = math.sqrt(num_blocks)
    return sorted({max(2, round(root * factor)) for factor in (0.5, 0.7, 1.0, 1.4, 2.0)})


def rows_of(name: str, chain: Chain, x: Tensor, device: str, rounds: int) -> Iterator[str]:
    chain, x = chain.to(device).train(), x.to(device)
    blocks = list(chain.blocks)

    def sequential(number: int) -> Callable[[], Any]:
        call = functools.partial(checkpoint_sequential, blocks, number, use_reentrant=False)
        return lambda: by_hand(chain, lambda x: call(x))

    def two_levels(number: int) -> Callable[[], Any]:
        return lambda: by_hand(chain, functools.partial(nested, blocks, number))

    def least(way: Callable[[int], Callable[[], Any]]) -> tuple[int, Callable[[], Any]]:
        peaks = {number: peak_bytes(chain, x, way(number), device) for number in numbers(len(blocks))}
        best = min(peaks, key=peaks.__getitem__)
        return peaks[best], way(best)

    graph = lowtide.trace(chain, lambda x: chain(x).square().mean(), x, mode="real")
    chain.zero_grad(set_to_none=True)
    there = sum(size for kind, size in graph.static_bytes.items() if kind != "gradients")
    frontier = lowtide.sweep(graph, [])
    plain = peak_bytes(chain, x, contextlib.nullcontext, device)
    peers = {"checkpoint_sequential": least(sequential), "two levels by hand": least(two_levels)}
    for peer, (peak, theirs) in peers.items():
        plan = lowtide.solve(graph, there + peak)
        ours: Callable[[], Any] = functools.partial(lowtide.apply, chain, plan)
        measured = peak_bytes(chain, x, ours, device)
        ways = {"plain": contextlib.nullcontext, "theirs": theirs, "ours": ours}
        times: dict[str, list[float]] = {each: [] for each in ways}
        for turn in range(rounds + 1):
            for each, way in ways.items():
                with way():
                    step(chain, x)
                    seconds = timed(functools.partial(step, chain, x), device)
                if turn:
                    times[each].append(seconds)
        yield (
            f"| {name} | {peer} | {plain / 2**20:.1f} | {peak / 2**20:.1f} | {measured / 2**20:.1f} "
            f"| {100 * median_over(times['theirs'], times['plain']):+.0f} "
            f"| {100 * median_over(times['ours'], times['plain']):+.0f} | {100 * plan.slowdown:+.0f} "
            f"| {(frontier.floor_bytes - there) / 2**20:.1f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    page = Page(
        options.out,
        f"segments-{options.device}.md",
        f"# Chains in segments, {device_name(options.device)}",
        "",
        f"{versions()}. Peaks in MiB without parameters, measured; `ours` is the plan for the peak of the peer, "
        "times are over the plain step in percent, in turns, in the median. The peer has the best of five numbers of "
        "segments. `floor` is the least peak that a plan of ours reaches (predicted).",
        "",
        "| chain | peer | plain | peer's peak | our peak | peer's time | our time | our time, predicted | floor |",
        "|" + "---|" * 9,
    )
    for name, (chain, x) in chains(options.device).items():
        for line in rows_of(name, chain, x, options.device, options.rounds):
            page.add(line)


if __name__ == "__main__":
    main()
