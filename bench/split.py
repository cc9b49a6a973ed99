"""Losses and MLPs in parts: `python bench/split.py loss sequence-24-split --limit-s 120 --out results`, on a GPU.

Cases are named on the command line and run one after the other, each in a process of its own with a time limit. Every
measurement is a row that is appended to `<out>/split-<part>.md` at once, so a run that is stopped keeps what it has.

- `loss`: a linear layer and cross-entropy, 16k tokens x 2048 x 128k words in bfloat16: plain, torch.compile, chunks by
  hand, torch's `F.linear_cross_entropy` where it exists, and the split output layer. Peak and time, in turns.
- `sequence-<GiB>-<way>`: a Llama-like model of 1B parameters (16 x 2048, 128k words) in bfloat16 with AdamW: the
  longest sequence whose measured step stays within the budget. Ways: plain, checkpoint, lowtide, split, host (split
  and host memory). The search starts at a predicted length.
- `large-<tokens>-<way>`: a Llama-3.1-8B-like model with bfloat16 weights and gradients and no optimizer: whether the
  step fits on the device, its peak and its seconds.

`--list` prints the usual cases; `--small` shrinks everything for a look on the CPU.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from reporting import Page, device_name, options_of, versions
from sharing import TURN
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from ways import Way, cost_of, in_turns

import lowtide
from lowtide.api.measure import can_measure, trace_largest
from lowtide.api.split_search import SplitSearch
from lowtide.eager.replanning import Limits
from lowtide.plans import Split
from lowtide.split.split_forward import splitting

GIB = 1 << 30
HEADS = {
    "loss": [],
    "sequence": ["| budget | way | tokens | peak | | per token | planned in |", "|---|---|---|---|---|---|---|"],
    "large": ["| model | way | tokens | peak | step | per token | planned |", "|---|---|---|---|---|---|---|"],
}
WAYS = ("plain", "checkpoint", "lowtide", "split", "host")
USUAL_CASES = [
    "loss",
    *(f"sequence-{gib}-{way}" for gib in (24, 40, 80) for way in WAYS),
    *(f"large-{tokens}-{way}" for tokens, way in ((65536, "checkpoint"), (300000, "split"), (650000, "host"))),
]
# The longest sequence of the 1B model by plans for a fake H200, within 24 GiB: where the search starts.
PREDICTED_TOKENS = {"lowtide": 11264, "split": 122880, "host": 122880}
STATIC_GIB = 11.2  # of that model: parameters, gradients and state of AdamW
GRACE_S = 60.0  # that a case may take beyond its limit, to end the step that it is in
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
        self.small, self.device = small, "cuda" if torch.cuda.is_available() else "cpu"
        head = [f"# split-{part}, {device_name(self.device)}", "", versions(), "", *HEADS[part]]
        self.say = Page(out, f"split-{part}.md", *head, is_added_to=True).add

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

    peaks = {}
    for name, way in list(ways.items()):
        try:
            step(way)
            peaks[name] = bench.peak(lambda way=way: step(way))  # type: ignore[misc]
        except (RuntimeError, NotImplementedError) as error:
            bench.say(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
            del ways[name]
    steps = {name: Way(functools.partial(step, way)) for name, way in ways.items()}
    times = in_turns(steps, bench.device, rounds)
    bench.say(
        f"{rows} tokens x {width} x {words} words, bfloat16; medians of {rounds} rounds in turns.",
        "",
        "| | peak GB | of plain | ms | over plain |",
        "|---|---|---|---|---|",
    )
    for name in ways:
        ms, over = cost_of(times, name)
        share = peaks[name] / peaks["plain"] if peaks["plain"] else 0.0
        bench.say(f"| {name} | {peaks[name] / 1e9:.2f} | {share:.2f} | {ms:.1f} | {over:+.1f} % |")


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


class LongestSequence:
    """The search of one case: which length is tried next, from peaks so far."""

    def __init__(self, first: int, budget: int, *, is_linear: bool) -> None:
        self.next: int | None = self._rounded(first)
        self.longest, self.fails_at = 0, 0
        self._budget, self._is_linear = budget, is_linear
        self._peaks: dict[int, int] = {}

    def note(self, tokens: int, peak: int | None) -> bool:
        """Whether a length with this peak holds (None: it does not run); sets the next length."""
        holds = peak is not None and peak <= self._budget
        if holds:
            self.longest = max(self.longest, tokens)
        else:
            self.fails_at = min(tokens, self.fails_at or tokens)
        if peak:
            self._peaks[tokens] = peak
        self.next = self._following()
        return holds

    def _following(self) -> int | None:
        if self.longest and self.fails_at and self.fails_at <= 1.06 * self.longest:
            return None
        guess = self._on_line() if self._is_linear and len(self._peaks) > 1 else 0
        if self.longest and self.fails_at:
            middle = (self.longest + self.fails_at) // 2
            guess = guess if 1.02 * self.longest < guess < 0.98 * self.fails_at else middle
        elif not guess:
            guess = int(1.25 * self.longest) if self.longest else int(0.8 * self.fails_at)
        guess = self._rounded(guess)
        return None if guess in (self.longest, self.fails_at) or guess in self._peaks else guess

    def _on_line(self) -> int:
        """The length at which a straight line through two measured peaks meets the budget."""
        (one, low), *_, (other, high) = sorted(self._peaks.items())
        return int(one + (self._budget - low) * (other - one) / max(1, high - low))

    @staticmethod
    def _rounded(tokens: int) -> int:
        return max(256, tokens // 256 * 256)


def predicted_tokens(way: str, budget_gib: float) -> int:
    """Where to start: in proportion to the memory beside parameters and optimizer."""
    known = {"plain": 5376, "checkpoint": 10240, **PREDICTED_TOKENS}[way]  # the first two were measured in 24 GiB
    return int(known * max(0.02, (budget_gib - STATIC_GIB) / (24 - STATIC_GIB)))


def sequence_part(bench: Bench, budget_gib: float, way: str, asked: Asked) -> None:
    budget, deadline = int(budget_gib * GIB), time.monotonic() + asked.limit_s
    model = llama(bench, "1B", checkpoints=way == "checkpoint")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    words = model.head.out_features

    def batch(tokens: int) -> Tensor:
        return torch.randint(0, words, (1, tokens), device=bench.device)

    def step(ids: Tensor) -> None:
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(batch(64))  # so that the optimizer's state is allocated
    limits = Limits(asked.host if way == "host" else 0, None, 2.0, way in ("split", "host"))
    search = LongestSequence(
        asked.tokens or predicted_tokens(way, budget_gib), budget, is_linear=way in ("plain", "checkpoint")
    )

    def planned(ids: Tensor) -> lowtide.Plan:
        """A plan from traces on fake tensors, as on a device of the budget's size, where no plain step fits.

        Some of the budget is left for what the allocator needs beside tensors: no plan is measured and corrected here.
        """
        traced = trace_largest(model, model, [(ids,)], optimizer, mode="fake")
        return traced.for_model(SplitSearch(traced, limits).solve(int(ROOM * budget)))

    while search.next is not None and time.monotonic() < deadline:
        tokens, handle, peak, why = search.next, None, None, ""
        ids, seconds, start = batch(tokens), 0.0, time.perf_counter()
        try:
            if way not in ("plain", "checkpoint"):
                handle = lowtide.apply(model, planned(ids))
            planned_s = time.perf_counter() - start
            with TURN:
                step(ids)  # the first step under a plan differs: it captures where retained outputs are saved
                start = time.perf_counter()
                peak = bench.peak(lambda ids=ids: step(ids))  # type: ignore[misc]
                seconds = time.perf_counter() - start
        except (torch.OutOfMemoryError, lowtide.InfeasibleBudgetError) as error:
            planned_s, why = time.perf_counter() - start, str(error).splitlines()[0][:100]
        finally:
            if handle is not None:
                handle.remove()
            optimizer.zero_grad()
        holds = search.note(tokens, peak)
        told = "holds" if holds else why or "above the budget"
        each = f"{1e6 * seconds / tokens:.1f} us" if seconds else ""
        size = f"{peak / GIB:.2f} GiB" if peak is not None else ""
        bench.say(f"| {budget_gib:g} GiB | {way} | {tokens} | {size} | {told} | {each} | {planned_s:.0f} s |")


def large_part(bench: Bench, tokens: int, way: str, asked: Asked) -> None:
    """One step of the 8B model, after another: planned by a trace on fake tensors."""
    model = llama(bench, "8B", checkpoints=way == "checkpoint")
    ids = torch.randint(0, model.head.out_features, (1, tokens), device=bench.device)
    options: dict[str, Any] = {"split": way in ("split", "host"), "verify": False, "time_limit_s": 5}
    if way == "host":
        options["host"] = asked.host
    start, predicted = time.perf_counter(), ""
    try:
        if way not in ("plain", "checkpoint"):
            budget = "95%" if can_measure(torch.device(bench.device)) and bench.device == "cuda" else "16GiB"
            handle = lowtide.fit(model, model, ids, budget=budget, **options)
            took = f"planned in {time.perf_counter() - start:.0f} s"
            predicted = f"{handle.plan.peak_bytes / GIB:.1f} GiB predicted, {took}"
            print(handle, flush=True)
        with TURN:
            model(ids).backward()
            model.zero_grad()
            start = time.perf_counter()
            peak = bench.peak(lambda: model(ids).backward())
            seconds = time.perf_counter() - start
    except (torch.OutOfMemoryError, lowtide.InfeasibleBudgetError) as error:
        bench.say(f"| 8B | {way} | {tokens} | {str(error).splitlines()[0][:100]} | | | {predicted} |")
        return
    each = f"{1e6 * seconds / tokens:.1f} us"
    bench.say(f"| 8B | {way} | {tokens} | {peak / GIB:.1f} GiB | {seconds:.1f} s | {each} | {predicted} |")


@dataclass(frozen=True)
class Asked:
    """The options of the command that cases use."""

    limit_s: float
    tokens: int | None
    host: str
    rounds: int


def run_here(case: str, out: Path, asked: Asked, *, small: bool) -> None:
    part, *rest = case.split("-")
    bench = Bench(part, out, small=small)
    if part == "loss":
        with TURN:
            loss_part(bench, asked.rounds)
    elif part == "sequence":
        sequence_part(bench, float(rest[0]), rest[1], asked)
    else:
        large_part(bench, int(rest[0]), rest[1], asked)


def case_name(text: str) -> str:
    part, *rest = text.split("-")
    is_known = (part == "loss" and not rest) or (
        part in ("sequence", "large") and len(rest) == 2 and rest[0].replace(".", "", 1).isdigit() and rest[1] in WAYS
    )
    if not is_known:
        raise argparse.ArgumentTypeError(f"{text} is no case: loss, sequence-<GiB>-<way> or large-<tokens>-<way>")
    return text


def main() -> None:
    parser = options_of(__doc__, rounds=10)
    parser.add_argument("cases", nargs="*", type=case_name)
    parser.add_argument("--list", action="store_true", help="print the usual cases")
    parser.add_argument("--limit-s", type=float, default=120.0, help="seconds after which a case tries no more lengths")
    parser.add_argument("--tokens", type=int, help="the first length tried")
    parser.add_argument("--host", default="64GiB", help="host memory of the way host")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--here", action="store_true", help="in this process, without a limit")
    given = parser.parse_args()
    if given.list:
        print(*USUAL_CASES, sep="\n")
    asked = Asked(given.limit_s, given.tokens, given.host, given.rounds)
    for case in given.cases:
        if given.here:
            run_here(case, given.out, asked, small=given.small)
            continue
        options = [word for word in sys.argv[1:] if word not in given.cases]
        try:
            done = subprocess.run(
                [sys.executable, __file__, case, *options, "--here"], timeout=given.limit_s + GRACE_S, check=False
            )
            told = "" if done.returncode == 0 else f"ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            told = f"was stopped after {given.limit_s + GRACE_S:.0f} s"
        if told:
            print(f"{case} {told}", flush=True)


if __name__ == "__main__":
    main()
