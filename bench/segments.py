"""Chains of blocks, recomputed in segments: `python bench/segments.py --device cuda`.

The least peak of torch's `checkpoint_sequential` with the best number of segments and of two levels of checkpoints by
hand, and the time at equal peak of these and of what `lowtide.fit` keeps; also lowtide at its own floor. Peaks are of
activations and gradients: what is allocated before the plain step, the parameters among it, is subtracted from all of
them. On a GPU budgets are the allocator's peak of the peer as it is. The variants of a chain are timed in turns; on the
CPU one thread computes, and its own seconds are counted, by `fit` too, so that other processes do not change them.
Writes bench/results/segments-<device>.md; with names of chains, adds their rows to it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from reporting import Page, device_name, options_of, versions
from sharing import TURN, Stages, one_trace, trace_once
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from ways import CLOCKS, Way, cost_of, in_turns
from zoo import Block as TransformerBlock

import lowtide
from lowtide.api import measure
from lowtide.api.measure import Measured
from lowtide.plans.plan_text import KEPT
from lowtide.solvers.solve import search_for

OUR_FLOOR = "none: our floor"
SOLVE_S, TUNE_S = 3.0, 2.0  # of each fit


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
        **{f"layers-{number}": functools.partial(layers, number) for number in (16, 64, 144)},
        "gpt-48": functools.partial(transformer, 48, *gpt),
        "narrow-96": functools.partial(transformer, 96, *narrow),
        "resnet-48": functools.partial(resnet, 48, *images),
    }


def loss_of(chain: Chain, x: Tensor) -> Tensor:
    return chain(x).square().mean()


def step(chain: Chain, x: Tensor) -> None:
    chain.zero_grad(set_to_none=True)
    loss_of(chain, x).backward()


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


def measured(chain: Chain, x: Tensor, way: Callable[[], Any], device: str) -> Measured:
    """Return what one step allocates, after another one, with the blocks called as `way` says."""
    with way():
        step(chain, x)
        chain.zero_grad(set_to_none=True)
        result = lowtide.measure(functools.partial(step, chain, x), device=device)
    chain.zero_grad(set_to_none=True)
    return result


def numbers(num_blocks: int) -> list[int]:
    """Numbers of segments to try, about the square root."""
    root = math.sqrt(num_blocks)
    return sorted({max(2, round(root * factor)) for factor in (0.5, 0.7, 1.0, 1.4, 2.0)})


def rows_of(name: str, device: str, rounds: int) -> Iterator[str]:
    chain, x = chains(device)[name]()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    chain, x = chain.to(device, dtype).train(), x.to(device, dtype)
    blocks = list(chain.blocks)

    def sequential(number: int) -> Callable[[], Any]:
        call = functools.partial(checkpoint_sequential, blocks, number, use_reentrant=False)
        return lambda: by_hand(chain, lambda x: call(x))

    def two_levels(number: int) -> Callable[[], Any]:
        return lambda: by_hand(chain, functools.partial(nested, blocks, number))

    def least(way: Callable[[int], Callable[[], Any]]) -> tuple[int, Callable[[], Any]]:
        peaks = {number: measured(chain, x, way(number), device).total_peak_bytes for number in numbers(len(blocks))}
        best = min(peaks, key=peaks.__getitem__)
        return peaks[best], way(best)

    loss_fn = functools.partial(loss_of, chain)
    graph = trace_once(chain, loss_fn, [(x,)], None).graph
    chain.zero_grad(set_to_none=True)
    plain = measured(chain, x, contextlib.nullcontext, device)
    base = plain.start_bytes  # 0 on the CPU, where only what the step itself allocates is counted
    static = {kind: size for kind, size in graph.static_bytes.items() if kind != "gradients"}
    uncounted = sum(static.values()) if device == "cpu" else 0
    peers = {"checkpoint_sequential": least(sequential), "two levels by hand": least(two_levels)}
    fits = {peer: fitted(chain, loss_fn, x, uncounted + peak) for peer, (peak, _) in peers.items()}
    TURN.give()
    search = search_for(graph, "eager", 0, SOLVE_S)
    fits[OUR_FLOOR] = search.plan(search.floor.peak_bytes), "smallest peak"
    TURN.take()
    ways: dict[str, Callable[[], Any]] = {"plain": contextlib.nullcontext}
    for peer, (plan, _) in fits.items():
        ways |= {peer: peers[peer][1]} if peer in peers else {}
        ways[f"ours, {peer}"] = functools.partial(lowtide.apply, chain, plan)
    run = functools.partial(step, chain, x)
    times = in_turns({each: Way(run, way) for each, way in ways.items()}, device, rounds, clock=CLOCKS[device])
    for peer, (plan, kept) in fits.items():
        peak, slower = "", ""
        if peer in peers:
            peak, slower = mib(peers[peer][0] - base), f"{cost_of(times, peer)[1]:+.0f}"
        ours = measured(chain, x, ways[f"ours, {peer}"], device).total_peak_bytes
        yield (
            f"| {name} | {peer} | {mib(plain.peak_bytes)} | {peak} | {mib(ours - base)} "
            f"| {slower} | {cost_of(times, f'ours, {peer}')[1]:+.0f} "
            f"| {100 * plan.slowdown:+.0f} | {kept} |"
        )


def fitted(chain: Chain, loss_fn: Callable[[Tensor], Tensor], x: Tensor, budget: int) -> tuple[lowtide.Plan, str]:
    """The plan that `fit` keeps, and the name of the candidate that it is."""
    with Stages().listening():
        handle = lowtide.fit(chain, loss_fn, x, budget=budget, time_limit_s=SOLVE_S, tune_s=TUNE_S)
    with handle:
        (name,) = (trial.name for trial in handle.candidates if trial.outcome == KEPT)
        return handle.plan, name


def mib(size: int) -> str:
    return f"{size / 2**20:.1f}"


def main() -> None:
    options = options_of(__doc__, chains("cpu"), rounds=5).parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
        measure.perf_counter = time.thread_time  # what `fit` compares candidates by
    page = Page(
        options.out,
        f"segments-{options.device}.md",
        f"# Chains in segments, {device_name(options.device)}",
        "",
        f"{versions()}. Peaks in MiB without parameters, measured; `ours` is what `fit` keeps for the peak of the "
        "peer, times are over the plain step in percent, in turns, in the median. The peer has the number of segments "
        "with the least peak, of five. `kept` is the candidate that `fit` found to be the fastest. The last row of "
        "each chain is the plan with the smallest predicted peak.",
        "",
        "| chain | peer | plain | peer's peak | our peak | peer's time | our time | our time, predicted | kept |",
        "|" + "---|" * 9,
        is_added_to=options.cases != list(chains("cpu")),
    )
    with one_trace():
        page.add_cases(options, functools.partial(rows_of, device=options.device, rounds=options.rounds))


if __name__ == "__main__":
    main()
