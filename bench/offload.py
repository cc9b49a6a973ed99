"""Step time and peak of one transformer with its activations offloaded, by us and by others: `python bench/offload.py`.

One run, one model, one batch. The link's bandwidth is measured first; from it and the bytes moved follows the best
possible step (copies wholly beside compute), and from that the share of copy time that each way of offloading hides.
Needs a CUDA device. Writes bench/results/offload-cuda.md.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from checkpoint import Block
from reporting import Page, device_name, options_of, versions
from torch import Tensor, nn

import lowtide

GIB = 1024**3


def milliseconds(call: Callable[[], Any], rounds: int) -> float:
    """Median of device times, after two warm-ups."""
    times = []
    for turn in range(rounds + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        end.synchronize()
        if turn >= 2:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def peak_gib(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / GIB


def bandwidth_gb_s() -> tuple[float, float]:
    """Bytes per second out and in, of pinned copies of 1 GiB."""
    device, host = (
        torch.empty(GIB, dtype=torch.uint8, device="cuda"),
        torch.empty(GIB, dtype=torch.uint8, pin_memory=True),
    )
    out = milliseconds(lambda: host.copy_(device, non_blocking=True), 5)
    back = milliseconds(lambda: device.copy_(host, non_blocking=True), 5)
    return GIB / out / 1e6, GIB / back / 1e6


class Model(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


KEPT = {"keep-25": 0.25, "keep-50": 0.5, "keep-75": 0.75}  # shares of what is saved that stay on the device
NAMES = {
    "nothing": "nothing offloaded",
    "everything": "`lowtide.offload`, everything",
    **{case: f"ours, {share:.0%} kept on the device" for case, share in KEPT.items()},
    "slim": "ours, everything, 256 MiB in flight",
    "trl": "TRL's `OffloadActivations`",
    "save-on-cpu": "`save_on_cpu(pin_memory=True)`",
}


class Bench:
    """The model, its plain step and the link, which every way is compared with."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._rounds = options.rounds
        shape = options.batch, options.tokens, options.width
        self._model = Model(options.layers, options.width).to("cuda", torch.bfloat16)
        self._x = torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        self.gb_out, self.gb_in = bandwidth_gb_s()
        self._forward_ms = milliseconds(lambda: self._forward(contextlib.nullcontext), self._rounds)
        self._plain_ms = milliseconds(lambda: self._step(contextlib.nullcontext), self._rounds)
        self._everything = lowtide.ActivationStore(host="48GiB", in_flight="1GiB")
        self.out_bytes, self.in_bytes = self._moved(self._everything)

    def _forward(self, context: Callable[[], Any]) -> Tensor:
        with context():
            return self._model(self._x).float().square().mean()

    def _step(self, context: Callable[[], Any]) -> None:
        self._forward(context).backward()
        self._model.zero_grad()
        self._x.grad = None

    def _moved(self, store: lowtide.ActivationStore) -> tuple[int, int]:
        """Bytes that a step moves out and in, after a first one."""
        self._step(lambda: lowtide.offload(store))
        before = store.stats()
        self._step(lambda: lowtide.offload(store))
        after = store.stats()
        return after.moved_down_bytes - before.moved_down_bytes, after.moved_up_bytes - before.moved_up_bytes

    def _store(self, case: str) -> lowtide.ActivationStore | None:
        if case in KEPT:
            kept_bytes = int(self.out_bytes * KEPT[case])
            return lowtide.ActivationStore(device=kept_bytes, host="48GiB", in_flight="1GiB")
        if case == "slim":
            return lowtide.ActivationStore(host="48GiB", in_flight="256MiB")
        return self._everything if case == "everything" else None

    def rows_of(self, case: str) -> Iterator[str]:
        store, rounds, moved, rest = self._store(case), self._rounds, "", "| |"
        context: Callable[[], Any] = contextlib.nullcontext
        if store is not None:
            moved_bytes, _ = self._moved(store)
            context = functools.partial(lowtide.offload, store)
        elif case != "nothing":
            rounds = min(rounds, 3)
            context = functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=True)
        if case == "trl":
            from trl.models.activation_offloading import OffloadActivations

            # Its defaults, but for the smallest size that it moves.
            offloading = OffloadActivations(min_offload_size=1024 * 1024)
            context = lambda: offloading  # noqa: E731
        ms = milliseconds(lambda: self._step(context), rounds)
        peak = peak_gib(lambda: self._step(context))
        if store is not None:
            out_ms, in_ms = moved_bytes / self.gb_out / 1e6, moved_bytes / self.gb_in / 1e6
            best_ms = max(self._forward_ms, out_ms) + max(self._plain_ms - self._forward_ms, in_ms)
            serial_ms = self._plain_ms + out_ms + in_ms
            moved = f"{moved_bytes / GIB:.2f}"
            rest = f"{best_ms:.0f} | {(serial_ms - ms) / (serial_ms - best_ms):.0%} |"
        yield f"| {NAMES[case]} | {ms:.1f} | {peak:.2f} | {moved} | {rest}"


def main() -> None:
    parser = options_of(__doc__, NAMES, rounds=7)
    for name, default in {"layers": 16, "width": 2048, "batch": 4, "tokens": 2048}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    bench = Bench(options)
    page = Page(
        options.out,
        "offload-cuda.md",
        f"# Offload on {device_name('cuda')}",
        "",
        f"{versions()}. {options.layers} Llama-like blocks of width {options.width}, {options.batch} x "
        f"{options.tokens} tokens, bfloat16, eager, forward and backward; medians of {options.rounds} steps, one run. "
        f"Pinned copies alone: {bench.gb_out:.1f} GB/s out, {bench.gb_in:.1f} GB/s in. "
        f"Everything offloaded is {bench.out_bytes / GIB:.2f} GiB out, {bench.in_bytes / GIB:.2f} GiB in.",
        "",
        "*Best possible* lets copies run wholly beside compute: the longer of the two in the forward, and in the "
        "backward. *Hidden* is the share of the copy time that could be hidden and was.",
        "",
        "| | ms | peak GiB | moved out GiB | best possible ms | hidden |",
        "|---|---|---|---|---|---|",
    )
    page.add_cases(options, bench.rows_of)


if __name__ == "__main__":
    main()
