"""`lowtide demo` and `make demo`: train a small GPT on the CPU plainly, with a checkpoint per block, and with a budget.

The budget is halfway between the step's floor and its plain peak. `bench.compare` measures peaks, times and gradients
of the three; then the plain and the planned model are trained for some steps, whose losses are equal to the last bit.
`main` also writes a report. Takes about half a minute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.console import Group
from rich.text import Text
from torch import Tensor, nn

import lowtide
from lowtide.cli.bench import OURS, Comparison, compare
from lowtide.cli.output import Output
from lowtide.cli.script import Job
from lowtide.units import format_bytes

WIDTH, HEADS, LAYERS, VOCABULARY = 256, 8, 6, 512
BATCH, CONTEXT, STEPS, ROUNDS = 8, 128, 4, 3
NUM_STAGES = 7


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


def make() -> Job:
    """A model with its loss, batch and optimizer, the same each time."""
    torch.manual_seed(0)
    model = GPT()
    tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1))

    def loss_fn(tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return Job(model, loss_fn, (tokens,), torch.optim.SGD(model.parameters(), lr=0.1))


def losses(plan: lowtide.Plan) -> list[float]:
    """Train a new model for a few steps under a plan."""
    job, found = make(), []
    assert job.optimizer is not None
    lowtide.apply(job.model, plan)
    for _ in range(STEPS):
        loss = job.loss_fn(*job.args)
        loss.backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
        found.append(loss.item())
    return found


@dataclass(frozen=True)
class Demonstration:
    """What was measured, and whether the losses of all steps equal the plain run's to the last bit."""

    num_parameters: int
    predicted_bytes: int  # the peak of the plain step
    compared: Comparison
    is_exact: bool

    def print(self, out: Output) -> None:
        """Print the measurements and the plan."""
        table, data = self.compared.display()
        head = (
            f"A GPT of {self.num_parameters / 1e6:.1f}M parameters, {LAYERS} blocks, {BATCH} x {CONTEXT} tokens, on "
            f"the CPU\nA plain step would take {format_bytes(self.predicted_bytes)} (predicted); "
            f"the budget is {format_bytes(self.compared.budget_bytes)}"
        )
        tail = f"losses over {STEPS} steps equal to the last bit: {self.is_exact}\n\n{self.compared.plan}"
        data |= {"is_exact": self.is_exact, "predicted_plain_peak_bytes": self.predicted_bytes}
        out.result(Group(Text(head), table, Text(tail)), data)

    def report(self, path: str) -> str:
        """Write the plan's report with the measurements; return a summary of what was written."""
        plan = self.compared.plan
        ours = next(row for row in self.compared.rows if row.name == OURS)
        slowdown = self.compared.slowdown(ours)
        measured_step_s = None if slowdown is None else (1 + slowdown) * plan.step_s
        return str(plan.report(path, measured_peak_bytes=ours.peak_bytes, measured_step_s=measured_step_s))


def demonstrate(stage: Callable[[str], None] = lambda description: None) -> Demonstration:
    """Measure and train; `stage` is called with a description of each of the `NUM_STAGES` stages."""
    stage("estimating")
    job = make()
    guess = lowtide.estimate(job.model, job.loss_fn, *job.args, optimizer=job.optimizer)
    compared = compare(job, (guess.floor_bytes + guess.peak_bytes) // 2, ROUNDS, {}, stage)
    stage("training")
    is_exact = losses(lowtide.Plan()) == losses(compared.plan)
    num_parameters = sum(parameter.numel() for parameter in job.model.parameters())
    return Demonstration(num_parameters, guess.peak_bytes, compared, is_exact)


def main(report: str = "lowtide-demo.html") -> None:
    demonstration = demonstrate()
    demonstration.print(Output())
    print(f"\n{demonstration.report(report)}")


if __name__ == "__main__":
    main()
