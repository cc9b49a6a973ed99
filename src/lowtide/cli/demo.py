"""`lowtide demo` and `make demo`: train a small GPT on the CPU plainly, with a checkpoint per block, and with a budget.

All three runs start from the same seed. The demo prints times, measured peaks, the largest gradient difference (0) and
the plan; `main` also writes a report. Takes about half a minute.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.eager import Applied
from lowtide.units import format_bytes, format_seconds

WIDTH, HEADS, LAYERS, VOCABULARY = 256, 8, 6, 512
BATCH, CONTEXT, STEPS = 8, 128, 4
PLAIN, PER_BLOCK, OURS = "plain", "a checkpoint per block", "lowtide.fit"
NUM_STAGES = 4

Prepare = Callable[[nn.Module, Callable[..., Tensor], Tensor], Any]


class Block(nn.Module):
    """A pre-norm transformer block with dropout, so that replays must reproduce random numbers."""

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
    """A small decoder-only transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass(frozen=True)
class Trained:
    """Measurements of a few training steps."""

    step_s: float
    peak_bytes: int
    losses: list[float]
    gradients: list[Tensor]


def train(prepare: Prepare) -> Trained:
    """Prepare a model, train it for a few steps from a fixed seed and time them; then measure one more."""
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1))
    losses, seconds = [], []

    def loss_fn(tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def forward_backward() -> None:
        loss = loss_fn(tokens)
        loss.backward()
        losses.append(loss.item())

    prepare(model, loss_fn, tokens)
    for _ in range(STEPS):
        start = time.perf_counter()
        forward_backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    peak_bytes = lowtide.measure(forward_backward, device="cpu").peak_bytes
    peak_bytes += sum(parameter.nbytes for parameter in model.parameters()) + tokens.nbytes
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return Trained(min(seconds), peak_bytes, losses, gradients)


def half_of_the_activations() -> tuple[int, int]:
    """Return a budget halfway between the step's floor and its plain peak, and that peak; from a fake trace."""
    model = GPT()
    tokens = torch.zeros(BATCH, CONTEXT + 1, dtype=torch.long)
    guess = lowtide.estimate(
        model, lambda t: F.cross_entropy(model(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten()), tokens
    )
    return (guess.floor_bytes + guess.peak_bytes) // 2, guess.peak_bytes


@dataclass(frozen=True)
class Demonstration:
    """Three trainings of the same model, compared. Everything but `predicted_bytes` is measured."""

    num_parameters: int
    predicted_bytes: int  # the peak of the plain step
    budget_bytes: int
    plan: lowtide.Plan
    measured_peak_bytes: int | None  # by `fit`, of the whole step
    runs: dict[str, Trained]

    @property
    def is_within_budget(self) -> bool:
        return self.runs[OURS].peak_bytes <= self.budget_bytes

    @property
    def is_exact(self) -> bool:
        """Whether the losses of all steps equal the plain run's to the last bit."""
        return self.runs[OURS].losses == self.runs[PLAIN].losses

    def gradient_difference(self, name: str) -> float:
        """Return the largest absolute difference of any gradient entry from the plain run, after the last step."""
        pairs = zip(self.runs[PLAIN].gradients, self.runs[name].gradients, strict=True)
        return max((a - b).abs().max().item() for a, b in pairs)

    def report(self, path: str | os.PathLike[str]) -> str:
        """Write the plan's report with the measurements; return a summary of what was written."""
        ratio = self.runs[OURS].step_s / self.runs[PLAIN].step_s
        written = self.plan.report(
            path, measured_peak_bytes=self.measured_peak_bytes, measured_step_s=ratio * self.plan.step_s
        )
        return str(written)

    def as_json(self) -> dict[str, Any]:
        rows = [
            {"name": name, "step_s": run.step_s, "peak_bytes": run.peak_bytes, "losses": run.losses}
            | {"gradient_difference": self.gradient_difference(name)}
            for name, run in self.runs.items()
        ]
        return {
            "budget_bytes": self.budget_bytes,
            "predicted_plain_peak_bytes": self.predicted_bytes,
            "is_within_budget": self.is_within_budget,
            "is_exact": self.is_exact,
            "rows": rows,
        }

    def __str__(self) -> str:
        plain_s = self.runs[PLAIN].step_s
        lines = [
            f"A GPT of {self.num_parameters / 1e6:.1f}M parameters, {LAYERS} blocks, {BATCH} x {CONTEXT} tokens, "
            "on the CPU",
            f"A plain step would take {format_bytes(self.predicted_bytes)} (predicted); "
            f"the budget is {format_bytes(self.budget_bytes)}\n",
            f"{'':<24}{'step':>10}{'ratio':>8}{'measured peak':>16}{'max gradient difference':>26}",
        ]
        for name, run in self.runs.items():
            ratio, peak = f"{run.step_s / plain_s:.2f}x", format_bytes(run.peak_bytes)
            difference = self.gradient_difference(name)
            lines.append(f"{name:<24}{format_seconds(run.step_s):>10}{ratio:>8}{peak:>16}{difference:>26g}")
        lines += [
            f"\nmeasured peak within the budget: {self.is_within_budget}",
            f"losses over {len(self.runs[OURS].losses)} steps equal to the last bit: {self.is_exact}\n",
            str(self.plan),
        ]
        return "\n".join(lines)


def demonstrate(stage: Callable[[str], None] = lambda description: None) -> Demonstration:
    """Run all three trainings; `stage` is called with a description of each of the `NUM_STAGES` stages."""
    num_parameters = sum(parameter.numel() for parameter in GPT().parameters())
    stage("estimating")
    budget, predicted = half_of_the_activations()
    handles: list[Applied] = []

    def per_block(model: nn.Module, *_: Any) -> None:
        lowtide.apply(model, lowtide.RecomputeAll())

    def within_budget(model: nn.Module, loss_fn: Any, tokens: Tensor) -> None:
        handles.append(lowtide.fit(model, loss_fn, tokens, budget=budget))

    variants: dict[str, Prepare] = {PLAIN: lambda *_: None, PER_BLOCK: per_block, OURS: within_budget}
    runs = {}
    for name, prepare in variants.items():
        stage(f"training: {name}")
        runs[name] = train(prepare)
    handle: Any = handles[0]
    return Demonstration(num_parameters, predicted, budget, handle.plan, handle.measured_peak_bytes, runs)


def main(report: str = "lowtide-demo.html") -> None:
    demonstration = demonstrate()
    print(demonstration)
    print(f"\n{demonstration.report(report)}")


if __name__ == "__main__":
    main()
