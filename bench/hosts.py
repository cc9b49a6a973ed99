"""What hosts do about memory, against a budget: `python bench/hosts.py llama lora unet`; `--small` tries it on the CPU.

`--ways ours plain` runs some of the ways only. A way that takes longer than `--limit-s` is given up. Writes
bench/results/hosts-<device>.md.

Each job runs whole training steps (forward, backward, gradient clipping, AdamW) in these ways:

- plain;
- the host's own checkpointing: every block, by torch's non-reentrant checkpoint;
- the host's offloading: every saved tensor to pinned host memory and back (`torch.autograd.graph.save_on_cpu`, which is
  TRL's `activation_offloading` without overlap), and checkpointing with the blocks' inputs offloaded;
- lowtide with the measured peak of the host's checkpointing as its budget, without and with host memory.

The machine may have no accelerate, TRL, PEFT or diffusers. The loops are therefore written here as the hosts run them:
the Trainer's step in bfloat16 autocast with float32 weights, a LoRA on `q_proj` and `v_proj` of a frozen bfloat16
model, and a UNet with the widths and depths of SDXL's. Peaks are the allocator's over a whole step; times are medians
of steps of one process, way by way. lowtide's rows come right after the one whose peak is their budget.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from reporting import Page, device_name, free, options_of, timed, versions
from sharing import TURN, Stages
from torch import Tensor, nn
from torch.nn.functional import gelu, mse_loss, scaled_dot_product_attention, silu
from ways import TORCH, wrapped

import lowtide
from lowtide.units import format_bytes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass
class HostJob:
    """A model, its loss, a batch and its optimizer; `blocks` are what the host checkpoints."""

    title: str
    model: nn.Module
    loss_fn: Callable[[Any], Tensor]
    batch: Any
    optimizer: torch.optim.Optimizer
    blocks: list[nn.Module]

    def step(self) -> None:
        """One training step, as the hosts run it."""
        self.loss_fn(self.batch).backward()
        nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.requires_grad], 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


# The models.


def _llama(small: bool, dtype: torch.dtype, **sizes: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    if small:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 256}
    config = LlamaConfig(
        num_attention_heads=sizes["hidden_size"] // (16 if small else 64 if sizes["hidden_size"] == 2048 else 128),
        num_key_value_heads=2 if small else 8,
        tie_word_embeddings=True,
        use_cache=False,
        **sizes,
    )
    with torch.device(DEVICE):
        return LlamaForCausalLM(config).to(dtype)


def llama(small: bool) -> HostJob:
    """As `Trainer` with bf16=True: float32 weights, autocast, fused AdamW."""
    model = _llama(
        small, torch.float32, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, vocab_size=128256
    )
    ids = torch.randint(0, 256, (2, 64) if small else (4, 2048), device=DEVICE)

    def loss_fn(ids: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            return model(input_ids=ids, labels=ids).loss

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    title = f"Llama of {_millions(model)}M parameters, AdamW, bfloat16 autocast, {ids.numel()} tokens"
    return HostJob(title, model, loss_fn, ids, optimizer, list(model.model.layers))


class Lora(nn.Module):
    """A frozen linear layer with a trained update of low rank, as PEFT's."""

    def __init__(self, base: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        self.base = base
        options: dict[str, Any] = {"bias": False, "device": base.weight.device, "dtype": torch.float32}
        self.down, self.up = nn.Linear(base.in_features, rank, **options), nn.Linear(rank, base.out_features, **options)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x.float())).to(x.dtype) * 2.0


def lora(small: bool) -> HostJob:
    """As TRL's SFTTrainer with a LoRA of PEFT: a frozen base in bfloat16, adapters in float32."""
    model = _llama(
        small, torch.bfloat16, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, vocab_size=128256
    ).requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Lora(getattr(layer.self_attn, name)))
    ids = torch.randint(0, 256, (2, 64) if small else (4, 2048), device=DEVICE)

    def loss_fn(ids: Tensor) -> Tensor:
        return model(input_ids=ids, labels=ids).loss

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    title = f"LoRA on a Llama of {_millions(model)}M parameters in bfloat16, {ids.numel()} tokens"
    return HostJob(title, model, loss_fn, ids, optimizer, list(model.model.layers))


class ResBlock(nn.Module):
    def __init__(self, inner: int, outer: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(16, inner), nn.Conv2d(inner, outer, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(16, outer), nn.Conv2d(outer, outer, 3, padding=1)
        self.time = nn.Linear(time, outer)
        self.skip = nn.Identity() if inner == outer else nn.Conv2d(inner, outer, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(silu(self.norm1(x))) + self.time(silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(silu(self.norm2(h)))


class TextBlock(nn.Module):
    """Attention of an image to itself and to a text, and a gated MLP."""

    def __init__(self, width: int, text: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own, self.own_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.query, self.text, self.text_out = (
            nn.Linear(width, width), nn.Linear(text, 2 * width), nn.Linear(width, width)
        )  # fmt: skip
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        x = x + self.own_out(_attention(*self.own(self.norms[0](x)).chunk(3, -1)))
        x = x + self.text_out(_attention(self.query(self.norms[1](x)), *self.text(text).chunk(2, -1)))
        value, gate = self.up(self.norms[2](x)).chunk(2, -1)
        return x + self.down(value * gelu(gate))


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads = max(1, q.shape[-1] // 64)
    q, k, v = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in (q, k, v))
    return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


class UNet(nn.Module):
    """Three resolutions down and up, with skips; `depths` transformer blocks after each residual block."""

    def __init__(self, widths: tuple[int, ...], depths: tuple[int, ...], text: int) -> None:
        super().__init__()
        time = 4 * widths[0]
        self.first, self.last = nn.Conv2d(4, widths[0], 3, padding=1), nn.Conv2d(widths[0], 4, 3, padding=1)
        self.embed = nn.Linear(widths[0], time)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        inner = widths[0]
        for width, depth in zip(widths, depths, strict=True):
            self.down.append(self._level(inner, width, time, depth, text))
            inner = width
        for number in reversed(range(len(widths))):
            outer = widths[max(0, number - 1)]
            self.up.append(self._level(2 * widths[number], outer, time, depths[number], text))

    @staticmethod
    def _level(inner: int, outer: int, time: int, depth: int, text: int) -> nn.ModuleDict:
        return nn.ModuleDict(
            {
                "residual": nn.ModuleList([ResBlock(inner, outer, time), ResBlock(outer, outer, time)]),
                "text": nn.ModuleList(TextBlock(outer, text) for _ in range(2 * depth)),
            }
        )

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        x, time = self.first(x), self.embed(time)
        skips = []
        for number, level in enumerate(self.down):
            x = self._run(level, x, time, text)
            skips.append(x)
            x = x if number == len(self.down) - 1 else nn.functional.avg_pool2d(x, 2)
        for number, level in enumerate(self.up):
            x = self._run(level, torch.cat([x, skips.pop()], 1), time, text)
            x = x if number == len(self.up) - 1 else nn.functional.interpolate(x, scale_factor=2.0)
        return self.last(x)

    @staticmethod
    def _run(level: Any, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        half = len(level["text"]) // 2
        for number, residual in enumerate(level["residual"]):
            x = residual(x, time)
            shape = x.shape
            rows = x.flatten(2).transpose(1, 2)
            for block in level["text"][number * half : (number + 1) * half]:
                rows = block(rows, text)
            x = rows.transpose(1, 2).reshape(shape)
        return x


def unet(small: bool) -> HostJob:
    """As diffusers' SDXL script with bf16: float32 weights, autocast, fused AdamW."""
    with torch.device(DEVICE):
        model = UNet((32, 64), (0, 1), 32) if small else UNet((320, 640, 1280), (0, 2, 10), 2048)
        size, width, text = (16, 32, 32) if small else (128, 320, 2048)
        num = 2 if small else 8
        batch = torch.randn(num, 4, size, size), torch.randn(num, width), torch.randn(num, 77, text)

    def loss_fn(batch: Any) -> Tensor:
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            return mse_loss(model(*batch).float(), batch[0])

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    blocks = [module for module in model.modules() if isinstance(module, ResBlock | TextBlock)]
    title = f"UNet of {_millions(model)}M parameters, AdamW, bfloat16 autocast, {num} latents of {size} x {size}"
    return HostJob(title, model, loss_fn, batch, optimizer, blocks)


def _millions(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters()) // 10**6


# The ways.


def checkpointed(job: HostJob, offload: bool = False) -> Any:
    """Every block by torch's checkpoint, as the hosts' switches do; with `offload`, its inputs in host memory."""

    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        saved = torch.autograd.graph.save_on_cpu(pin_memory=DEVICE.type == "cuda")
        with saved if offload else contextlib.nullcontext():
            return TORCH(forward, *args, **kwargs)

    return wrapped(job.blocks, run)


@contextlib.contextmanager
def offloaded(job: HostJob) -> Any:
    """Every saved tensor of the forward in host memory."""
    plain = job.loss_fn

    def loss_fn(batch: Any) -> Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=DEVICE.type == "cuda"):
            return plain(batch)

    job.loss_fn = loss_fn
    try:
        yield
    finally:
        job.loss_fn = plain


def measured(job: HostJob, most_s: float = 25.0) -> tuple[int, float]:
    """The peak of a whole step, and the median of as many steps as fit into `most_s`, 3 to 8."""
    for _ in range(2):
        job.step()
    free(DEVICE.type)
    peak = lowtide.measure(job.step, device=DEVICE).total_peak_bytes
    if DEVICE.type == "cpu":  # what was there before the step does not count there
        states = [item for state in job.optimizer.state.values() for item in state.values()]
        peak += sum(each.nbytes for each in (*job.model.parameters(), *job.model.buffers(), *states))
    times: list[float] = []
    while len(times) < 3 or (len(times) < 8 and sum(times) < most_s):
        times.append(timed(job.step, DEVICE.type))
    return peak, statistics.median(times)


WAYS = {
    "plain": "plain",
    "checkpointing": "checkpointing, every block",
    "ours": "lowtide, at the checkpointing's peak",
    "ours-host": "lowtide, the same with host memory",
    "checkpointing-offloading": "checkpointing, inputs of blocks offloaded",
    "offloading": "offloading, every saved tensor",
}  # in the order in which they run
JOBS = {"llama": llama, "lora": lora, "unet": unet}


class Ways:
    """The ways of one job, run one after the other: the plain step's time and the checkpointing's peak are kept."""

    def __init__(self, job: HostJob) -> None:
        self.job, self._plain_s, self._budget = job, 0.0, 0

    def row(self, way: str) -> str:
        """The row of a way."""
        job, note = self.job, ""
        if way in ("ours", "ours-host"):
            if not self._budget:  # its row was not wanted, or has failed
                with checkpointed(job):
                    self._budget, _ = measured(job, most_s=0.0)
            given = job.model, job.loss_fn, job.batch
            stages, host = Stages(), "64GiB" if way == "ours-host" else 0
            with stages.listening():
                handle = lowtide.fit(*given, budget=self._budget, optimizer=job.optimizer, host=host)
            with handle:
                peak, seconds = measured(job)
            note = f"budget {format_bytes(self._budget)}, fit s {stages}"
        else:
            contexts = {"plain": contextlib.nullcontext(), "offloading": offloaded(job)}
            with contexts.get(way) or checkpointed(job, offload=way == "checkpointing-offloading"):
                peak, seconds = measured(job)
        if way == "checkpointing":
            self._budget = peak
        self._plain_s = seconds if way == "plain" else self._plain_s
        slower = f"{100 * (seconds / self._plain_s - 1):+.1f} %" if self._plain_s else ""
        return f"| {WAYS[way]} | {format_bytes(peak)} | {1000 * seconds:.0f} ms | {slower} | {note} |"


def run(name: str, options: argparse.Namespace, page: Page) -> None:
    torch.manual_seed(0)
    ways = Ways(JOBS[name](options.small))
    page.add("", f"### {ways.job.title}", "", "| | peak | step | over plain | |", "|---|---|---|---|---|")
    for way in WAYS:
        if way in options.ways and not (way == "ours-host" and DEVICE.type == "cpu"):
            with TURN, page.rows_of(WAYS[way], options.limit_s):
                page.add(ways.row(way))
            ways.job.optimizer.zero_grad(set_to_none=True)


def main() -> None:
    parser = options_of(__doc__, JOBS, limit_s=120.0)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="those to run, of each job")
    parser.add_argument("--small", action="store_true", help="tiny models, to try the script")
    options = parser.parse_args()
    title = f"# Training steps as hosts run them, {device_name(DEVICE.type)}"
    page = Page(options.out, f"hosts-{DEVICE.type}.md", title, "", versions())
    for name in options.cases:
        run(name, options, page)
        free(DEVICE.type)


if __name__ == "__main__":
    main()
