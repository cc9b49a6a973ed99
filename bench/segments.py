"""Chains of blocks, recomputed in segments: `python bench/segments.py --device cuda`.

The least peak of torch's `checkpoint_sequential` with the best number of segments and of two levels of checkpoints by
hand, and the time at equal peak of these and of lowtide's plans; also lowtide at its own floor. Peaks are of
activations and gradients: parameters are left out. All ways of a chain take turns. Writes
bench/results/segments-<device>.md.
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
from reporting import NUM_IN_A_ROW, RESULTS, Page, device_name, median_over, timed, versions
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from zoo import Block as TransformerBlock

import lowtide
from lowtide.solvers.solving import Search

NUM_ROUNDS = 5
MOST_TRIES = 4
SOLVE_S = 10.0  # for all plans of a chain


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


def chains(device: str) -> dict[str, Callable[[], tuple[Chain, Tensor]]]:
    """What makes each chain and its input. On a GPU they are large enough to keep it busy, but for the narrow one."""
    is_large = device == "cuda"

    def layers(number: int) -> tuple[Chain, Tensor]:
        width = 2048 if is_large else 128
        blocks: list[nn.Module] = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(number)]
        return Chain(blocks), torch.randn(8192 if is_large else 1024, width)

    def transformer(number: int, width: int, batch: int, tokens: int) -> tuple[Chain, Tensor]:
        blocks: list[nn.Module] = [TransformerBlock(width, 4) for _ in range(number)]
        return Chain(blocks), torch.randn(batch, tokens, width)

    def resnet(number: int, width: int, batch: int, side: int) -> tuple[Chain, Tensor]:
        return Chain([ConvBlock(width) for _ in range(number)]), torch.randn(batch, width, side, side)

    gpt, narrow, images = (
        ((1024, 8, 1024), (256, 16, 512), (64, 64, 56)) if is_large else ((64, 4, 128), (32, 4, 128), (8, 4, 32))
    )
    return {
        **{f"{number} layers": functools.partial(layers, number) for number in (16, 64, 144)},
        "GPT, 48 blocks": functools.partial(transformer, 48, *gpt),
        "narrow transformer, 96 blocks": functools.partial(transformer, 96, *narrow),
        "ResNet, 48 blocks": functools.partial(resnet, 48, *images),
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
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    chain, x = chain.to(device, dtype).train(), x.to(device, dtype)
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
    plain = peak_bytes(chain, x, contextlib.nullcontext, device)
    peers = {"checkpoint_sequential": least(sequential), "two levels by hand": least(two_levels)}
    search = Search(graph, time_limit_s=SOLVE_S)
    floor = search.floor.peak_bytes - there
    limits = {**{peer: peak for peer, (peak, _) in peers.items()}, "none: our floor": floor}
    plans: dict[str, lowtide.Plan] = {}
    measured: dict[str, int] = {}
    ways: dict[str, Callable[[], Any]] = {"plain": contextlib.nullcontext}
    for peer, limit in limits.items():
        plans[peer], measured[peer] = plan_within(chain, x, search, there, limit, device)
        ways |= {peer: peers[peer][1]} if peer in peers else {}
        ways[f"ours, {peer}"] = functools.partial(lowtide.apply, chain, plans[peer])
    times: dict[str, list[float]] = {each: [] for each in ways}
    for turn in range(rounds + 1):
        for each, way in ways.items():
            with way():
                step(chain, x)
                seconds = timed(functools.partial(step, chain, x), device, NUM_IN_A_ROW if device == "cuda" else 1)
            if turn:
                times[each].append(seconds)
    for peer in limits:
        peak, slower = "", ""
        if peer in peers:
            peak, slower = mib(peers[peer][0]), f"{100 * median_over(times[peer], times['plain']):+.0f}"
        yield (
            f"| {name} | {peer} | {mib(plain)} | {peak} | {mib(measured[peer])} | {slower} "
            f"| {100 * median_over(times[f'ours, {peer}'], times['plain']):+.0f} "
            f"| {100 * plans[peer].slowdown:+.0f} | {mib(floor)} |"
        )


def plan_within(
    chain: Chain, x: Tensor, search: Search, there: int, limit: int, device: str
) -> tuple[lowtide.Plan, int]:
    """The plan for a peak, and its measured one: made for less where it takes more than that, and for more if less."""
    floor, best = search.floor.peak_bytes, None
    budget = max(there + limit, floor)
    for _ in range(MOST_TRIES):
        plan = search.plan(budget)
        measured = peak_bytes(chain, x, functools.partial(lowtide.apply, chain, plan), device)
        is_known = best is not None and (measured > limit or plan.regions == best[0].regions)
        if is_known or (budget <= floor and measured > limit):
            break
        best = (plan, measured) if measured <= limit else best
        budget = max(floor, budget + limit - measured)
    return best or (plan, measured)


def mib(size: int) -> str:
    return f"{size / 2**20:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", default="", help="chains whose names contain this; their rows are added to the page")
    options = parser.parse_args()
    name = f"segments-{options.device}.md"
    header = [
        f"# Chains in segments, {device_name(options.device)}",
        "",
        f"{versions()}. Peaks in MiB without parameters, measured; `ours` is the plan for the peak of the peer, "
        "times are over the plain step in percent, in turns, in the median. The peer has the best of five numbers of "
        "segments. `floor` is the least peak that a plan of ours reaches (predicted); the last row of each chain is "
        "measured there.",
        "",
        "| chain | peer | plain | peer's peak | our peak | peer's time | our time | our time, predicted | floor |",
        "|" + "---|" * 9,
    ]
    if options.only and (options.out / name).exists():
        header = (options.out / name).read_text().splitlines()
    page = Page(options.out, name, *header)
    for title, make in chains(options.device).items():
        if options.only in title:
            for line in rows_of(title, *make(), options.device, options.rounds):
                page.add(line)


if __name__ == "__main__":
    main()
