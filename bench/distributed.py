"""Memory per rank of Llama-3-like models on 8 to 512 GPUs, and what a budget costs: simulated, nothing is run.

    python bench/distributed.py 8B > bench/results/distributed-8B.md
    python bench/distributed.py 70B > bench/results/distributed-70B.md

One rank of each job is traced on a fake process group and fake tensors (`lowtide.estimate_parallel`). The models have
the shapes of Llama 3, are trained in bfloat16 with AdamW whose state is in bfloat16 too, one sequence of 8,192 tokens
per data-parallel rank, under FSDP2 by block; the 70B one also under tensor parallelism of 8.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

import lowtide
from lowtide.units import format_bytes, format_seconds, parse_bytes

WORDS, TOKENS = 128_256, 8_192


@dataclass(frozen=True)
class Shape:
    layers: int
    width: int
    heads: int
    groups: int
    inner: int
    tp: int


SHAPES = {"8B": Shape(32, 4096, 32, 8, 14_336, 1), "70B": Shape(80, 8192, 64, 8, 28_672, 8)}
JOBS = {"8B": (8, 64, 512), "70B": (64, 256, 512)}
BUDGETS = {"8B": ("78GiB", "40GiB", "30GiB"), "70B": ("78GiB", "40GiB", "30GiB")}


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, head = shape.width, shape.width // shape.heads
        self.head = head
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, head * shape.groups, bias=False)
        self.v = nn.Linear(width, head * shape.groups, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, shape.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        y = self.norm1(x)
        q, k, v = (each(y).view(rows, length, -1, self.head).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(rows, length, -1))
        y = self.norm2(x)
        return x + self.down(silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm, self.out = nn.RMSNorm(shape.width), nn.Linear(shape.width, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x))


def split() -> dict[str, Any]:
    columns = dict.fromkeys(("q", "k", "v", "gate", "up"), ColwiseParallel())
    return {**columns, "o": RowwiseParallel(), "down": RowwiseParallel()}


def job(shape: Shape) -> Any:
    def make(mesh: Any) -> Any:
        model = Llama(shape).to(torch.bfloat16)
        for layer in model.layers:
            if shape.tp > 1:
                parallelize_module(layer, mesh["tp"], split())
            fully_shard(layer, mesh=mesh["fsdp"])
        fully_shard(model, mesh=mesh["fsdp"])

        def loss_fn(words: Tensor, targets: Tensor) -> Tensor:
            return cross_entropy(model(words).flatten(0, 1).float(), targets.flatten())

        batch = tuple(torch.zeros(1, TOKENS, dtype=torch.long) for _ in range(2))
        return model, loss_fn, batch, torch.optim.AdamW(model.parameters(), foreach=False)

    return make


def main(name: str) -> None:
    shape = SHAPES[name]
    print(f"# Llama-3-{name}-like on many GPUs, per rank (predicted)\n")
    print(f"`python bench/distributed.py {name}`: one rank simulated on a CPU, nothing ran on GPUs. H100, bfloat16,")
    print(f"one sequence of {TOKENS:,} tokens per data-parallel rank, AdamW, FSDP2 by block. The step time counts")
    print("compute and tensor parallelism's collectives; FSDP's are taken to overlap.\n")
    print("| GPUs | layout | static | plain peak | floor | plain step | budget | peak | slower by |")
    print("|---|---|---|---|---|---|---|---|---|")
    for world in JOBS[name]:
        sizes = {"fsdp": world // shape.tp, **({"tp": shape.tp} if shape.tp > 1 else {})}
        start = time.monotonic()
        (row,) = lowtide.estimate_parallel(job(shape), world=world, parallel=sizes, device="H100").rows
        first = f"| {world} | {row.name} | {format_bytes(row.static_bytes)} | {format_bytes(row.peak_bytes)} | "
        first += f"{format_bytes(row.floor_bytes)} | {format_seconds(row.graph.step_s)} |"
        for budget in BUDGETS[name]:
            if row.peak_bytes <= parse_bytes(budget):
                print(f"{first} {budget} | {format_bytes(row.peak_bytes)} | 0 % |", flush=True)
                continue
            try:
                plan = lowtide.solve(row.graph, budget, time_limit_s=10)
            except lowtide.InfeasibleBudgetError:
                print(f"{first} {budget} | does not fit | |", flush=True)
                continue
            print(f"{first} {budget} | {format_bytes(plan.peak_bytes)} | {100 * plan.slowdown:.1f} % |", flush=True)
        print(f"{world} ranks: {time.monotonic() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="8B", choices=SHAPES)
    main(parser.parse_args().model)
