"""Losses and MLPs in parts: `python bench/split.py --part loss --out results`. One part of it per run, on a GPU.

- `--part loss`: a linear layer and cross-entropy, 16k tokens x 2048 x 128k words in bfloat16: plain, torch.compile,
  chunks by hand, torch's `F.linear_cross_entropy` where it exists, and the split output layer. Peak and time, in turns.
- `--part sequence --budget-gib 24 --way split`: a Llama-like model of 1B parameters (16 x 2048, 128k words) in bfloat16
  with AdamW: the longest sequence whose measured step stays within the budget. Ways: plain, checkpoint, lowtide, split,
  host (split and host memory).
- `--part large --tokens 65536`: a Llama-3.1-8B-like model with bfloat16 weights and gradients and no optimizer: whether
  the step fits on the device, its peak and its seconds.

`--small` shrinks everything for a look on the CPU. Results are appended to `<out>/split-<part>.md`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from reporting import device_name, timed, versions
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.api.measure import can_measure
from lowtide.api.split_search import SplitSearch
from lowtide.eager.replanning import Limits, with_parameters
from lowtide.plans import Split
from lowtide.split.split_forward import splitting

GIB = 1 << 30
HEADS = {
    "loss": [],
    "sequence": ["| budget | way | longest sequence | fails at | per token |", "|---|---|---|---|---|"],
    "large": ["| model | way | tokens | peak | step | per token | planned |", "|---|---|---|---|---|---|---|"],
}
DEADLINE_S = 75.0  # of searching for one longest sequence
ROOM = 0.98  # of the budget is planned for


class Norm(nn.RMSNorm):
    """RMSNorm with the epsilon of Llama."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-5)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, groups * self.size, bias=False)
        self.v = nn.Linear(width, groups * self.size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def split(y: Tensor, heads: int) -> Tensor:
            return y.view(*x.shape[:2], heads, self.size).transpose(1, 2)

        def turned(y: Tensor) -> Tensor:
            one, other = y.chunk(2, -1)
            return y * cos + torch.cat([-other, one], -1) * sin

        q, k, v = (
            turned(split(self.q(x), self.heads)),
            turned(split(self.k(x), self.groups)),
            split(self.v(x), self.groups),
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.groups)
        return self.o(y.transpose(1, 2).reshape(x.shape))


class MLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int, inner: int, heads: int, groups: int) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(width, heads, groups), MLP(width, inner)
        self.before, self.between = Norm(width), Norm(width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.before(x), cos, sin)
        return x + self.mlp(self.between(x))


@dataclass(frozen=True)
class Sizes:
    layers: int
    width: int
    inner: int
    heads: int
    groups: int
    words: int


SIZES = {
    "1B": Sizes(16, 2048, 8192, 32, 8, 128256),
    "8B": Sizes(32, 4096, 14336, 32, 8, 128256),
    "small": Sizes(2, 32, 128, 4, 2, 2048),
}


class Llama(nn.Module):
    """A Llama-like language model that returns its loss, computed as Hugging Face's models do."""

    def __init__(self, sizes: Sizes, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.size, self.checkpoints = sizes.width // sizes.heads, checkpoints
        self.embed = nn.Embedding(sizes.words, sizes.width)
        self.blocks = nn.ModuleList(
            Block(sizes.width, sizes.inner, sizes.heads, sizes.groups) for _ in range(sizes.layers)
        )
        self.norm, self.head = Norm(sizes.width), nn.Linear(sizes.width, sizes.words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        steps = torch.arange(ids.shape[1], device=ids.device, dtype=torch.float32)
        bases = 500000.0 ** (-torch.arange(0, self.size, 2, device=ids.device, dtype=torch.float32) / self.size)
        angles = torch.outer(steps, bases).repeat(1, 2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=False) if self.checkpoints else block(x, cos, sin)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Bench:
    """The device and the page of one run."""

    def __init__(self, part: str, out: Path, *, small: bool) -> None:
        self.small, self._part = small, part
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._path = out / f"split-{part}.md"
        out.mkdir(parents=True, exist_ok=True)

    def say(self, *lines: str) -> None:
        """Print lines and append them to the page."""
        title = f"# {self._path.stem}, {device_name(self.device)}"
        head = [] if self._path.exists() else [title, "", versions(), "", *HEADS[self._part]]
        with self._path.open("a") as page:
            page.write("\n".join([*head, *lines, ""]))
        print(*lines, sep="\n", flush=True)

    def peak(self, call: Callable[[], Any]) -> int:
        """Bytes allocated at most during a call, what was there before included; 0 on the CPU."""
        if self.device == "cpu":
            call()
            return 0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()


# A linear layer and the loss.


class ByHand(torch.autograd.Function):
    """Chunks as Liger writes them: gradients in the forward, the weight's added up in its own type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, num_parts: int) -> Tensor:
        for_x, for_weight = torch.empty_like(x), torch.zeros_like(weight)
        total = torch.zeros((), device=x.device)
        for part, target, out in zip(x.chunk(num_parts), labels.chunk(num_parts), for_x.chunk(num_parts), strict=True):
            with torch.enable_grad():
                logits = (part @ weight.t()).detach().requires_grad_()
                loss = F.cross_entropy(logits.float(), target, reduction="sum") / len(labels)
            (gradient,) = torch.autograd.grad(loss, logits)
            torch.mm(gradient, weight, out=out)
            for_weight.addmm_(gradient.t(), part)
            total += loss.detach()
        ctx.save_for_backward(for_x, for_weight)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        for_x, for_weight = ctx.saved_tensors
        return for_x * gradient, for_weight * gradient, None, None


class Head(nn.Module):
    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).float(), labels)


def loss_part(bench: Bench, rounds: int) -> None:
    rows, width, words = (256, 32, 1024) if bench.small else (16384, 2048, 128256)
    torch.manual_seed(0)
    with torch.device(bench.device):
        model = Head(width, words).bfloat16()
        x = torch.randn(rows, width).bfloat16().requires_grad_()
        labels = torch.randint(0, words, (rows,))
    compiled = torch.compile(model)

    def split(num_parts: int) -> Callable[[], Tensor]:
        def loss() -> Tensor:
            with splitting(model, [Split("head", num_parts)]):
                return model(x, labels)

        return loss

    ways: dict[str, Callable[[], Tensor]] = {
        "plain": lambda: model(x, labels),
        "torch.compile": lambda: compiled(x, labels),
        "8 chunks by hand": lambda: ByHand.apply(x, model.head.weight, labels, 8),
        **{f"lowtide, {number} parts": split(number) for number in (4, 8, 16, 32)},
    }
    fused = getattr(F, "linear_cross_entropy", None)
    if fused is not None:
        ways["F.linear_cross_entropy"] = lambda: fused(x, model.head.weight, labels)

    def step(way: Callable[[], Tensor]) -> None:
        model.zero_grad()
        x.grad = None
        way().backward()

    peaks, times = {}, {name: list[float]() for name in ways}
    for name, way in list(ways.items()):
        try:
            step(way)
            peaks[name] = bench.peak(lambda way=way: step(way))  # type: ignore[misc]
        except (RuntimeError, NotImplementedError) as error:
            bench.say(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
            del ways[name]
    for _ in range(rounds):
        for name, way in ways.items():
            times[name].append(timed(lambda way=way: step(way), bench.device))  # type: ignore[misc]
    plain_s = statistics.median(times["plain"])
    bench.say(
        f"{rows} tokens x {width} x {words} words, bfloat16; medians of {rounds} steps in turns.",
        "",
        "| | peak GB | of plain | ms | of plain |",
        "|---|---|---|---|---|",
    )
    for name in ways:
        seconds = statistics.median(times[name])
        share = peaks[name] / peaks["plain"] if peaks["plain"] else 0.0
        bench.say(f"| {name} | {peaks[name] / 1e9:.2f} | {share:.2f} | {1e3 * seconds:.1f} | {seconds / plain_s:.2f} |")


# The longest sequence.


def llama(bench: Bench, size: str, **options: Any) -> Llama:
    torch.manual_seed(0)
    with torch.device(bench.device):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            return Llama(SIZES["small" if bench.small else size], **options)
        finally:
            torch.set_default_dtype(before)


def sequence_part(bench: Bench, way: str, budget_gib: float, start: int | None, host: str) -> None:
    budget = int(budget_gib * GIB)
    model = llama(bench, "1B", checkpoints=way == "checkpoint")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    words = model.head.out_features

    def batch(tokens: int) -> Tensor:
        return torch.randint(0, words, (1, tokens), device=bench.device)

    model(batch(64)).backward()
    optimizer.step()  # so that its state is allocated
    optimizer.zero_grad()
    options: dict[str, Any] = {"split": way in ("split", "host")}
    if way == "host":
        options["host"] = host
    seconds_of: dict[int, float] = {}

    def step(ids: Tensor) -> None:
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    def planned(ids: Tensor) -> lowtide.Plan:
        """A plan from traces on fake tensors, as on a device of the budget's size, where no plain step fits.

        Some of the budget is left for what the allocator needs beside tensors: no plan is measured and corrected here.
        """
        graph = lowtide.trace(model, model, ids, optimizer=optimizer, mode="fake")
        search = SplitSearch(model, model, (ids,), optimizer, graph, Limits(**options, time_limit_s=2.0))
        return with_parameters(search.solve(int(ROOM * budget)), model)

    def peak_of(tokens: int) -> int | None:
        """The measured peak of a step of so many tokens; None if no plan fits or memory runs out."""
        ids, handle = batch(tokens), None
        try:
            if way not in ("plain", "checkpoint"):
                handle = lowtide.apply(model, planned(ids))
            step(ids)
            seconds_of[tokens] = timed(lambda: step(ids), bench.device)
            return bench.peak(lambda: step(ids))
        except (torch.OutOfMemoryError, lowtide.InfeasibleBudgetError) as error:
            print(f"  {way}, {tokens} tokens: {str(error).splitlines()[0][:150]}", flush=True)
            return None
        finally:
            if handle is not None:
                handle.remove()
            optimizer.zero_grad()

    found, deadline = 0, time.monotonic() + DEADLINE_S
    tokens = start or {"plain": 4096, "checkpoint": 6144, "lowtide": 8192}.get(way, 49152) * max(
        1, int(budget_gib / 24)
    )
    failed: int | None = None
    while time.monotonic() < deadline and (failed is None or failed > 1.06 * found):
        peak = peak_of(tokens)
        holds = peak is not None and peak <= budget
        print(f"  {way}, {tokens} tokens: {(peak or 0) / GIB:.2f} GiB, {'holds' if holds else 'does not'}", flush=True)
        if holds:
            found = tokens
        else:
            failed = min(tokens, failed or tokens)
        if failed is None:
            tokens = int(1.4 * tokens)
        elif not found:
            tokens = int(tokens / 1.4)
        else:
            tokens = (found + failed) // 2
        tokens = max(256, tokens // 256 * 256)
        if tokens in (found, failed):
            break
    told = f"{1e6 * seconds_of[found] / found:.1f} us" if found else ""
    upper = "none tried" if failed is None else str(failed)
    bench.say(f"| {budget_gib:g} GiB | {way} | {found} | {upper} | {told} |")


def large_part(bench: Bench, tokens: int, way: str, host: str) -> None:
    """One step of the 8B model: planned by a trace on fake tensors, then run once."""
    model = llama(bench, "8B", checkpoints=way == "checkpoint")
    ids = torch.randint(0, model.head.out_features, (1, tokens), device=bench.device)
    options: dict[str, Any] = {"split": way in ("split", "host"), "verify": False, "time_limit_s": 5}
    if way == "host":
        options["host"] = host
    start = time.perf_counter()
    predicted = ""
    if way not in ("plain", "checkpoint"):
        budget = "95%" if can_measure(torch.device(bench.device)) and bench.device == "cuda" else "16GiB"
        handle = lowtide.fit(model, model, ids, budget=budget, **options)
        predicted = f"{handle.plan.peak_bytes / GIB:.1f} GiB predicted, planned in {time.perf_counter() - start:.0f} s"
        print(handle, flush=True)
    start = time.perf_counter()
    peak = bench.peak(lambda: model(ids).backward())
    seconds = time.perf_counter() - start
    each = f"{1e6 * seconds / tokens:.1f} us"
    bench.say(f"| 8B | {way} | {tokens} | {peak / GIB:.1f} GiB | {seconds:.1f} s | {each} | {predicted} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("loss", "sequence", "large"), required=True)
    parser.add_argument("--way", choices=("plain", "checkpoint", "lowtide", "split", "host"), default="split")
    parser.add_argument("--budget-gib", type=float, default=24.0)
    parser.add_argument("--tokens", type=int, help="the first length tried, or that of the large model")
    parser.add_argument("--host", default="64GiB", help="host memory of --way host")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--small", action="store_true")
    asked = parser.parse_args()
    bench = Bench(asked.part, asked.out, small=asked.small)
    if asked.part == "loss":
        loss_part(bench, asked.rounds)
    elif asked.part == "sequence":
        sequence_part(bench, asked.way, asked.budget_gib, asked.tokens, asked.host)
    else:
        large_part(bench, asked.tokens or 65536, asked.way, asked.host)


if __name__ == "__main__":
    main()
