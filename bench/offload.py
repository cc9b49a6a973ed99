"""Step time and peak of one transformer with its activations offloaded, by us and by others: `python bench/offload.py`.

One run, one model, one batch. The link's bandwidth is measured first; from it and the bytes moved follows the best
possible step (copies wholly beside compute), and from that the share of copy time that each way of offloading hides.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checkpoint import Block
from reporting import RESULTS, device_name, save, versions
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


def trl_context() -> Any:
    """TRL's offloading with its defaults, but for the smallest size it moves; None where TRL cannot be imported."""
    try:
        from trl.models.activation_offloading import OffloadActivations
    except Exception:
        return None
    return OffloadActivations(min_offload_size=1024 * 1024)


class Model(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    model = Model(options.layers, options.width).to("cuda", torch.bfloat16)
    x = torch.randn(
        options.batch, options.tokens, options.width, device="cuda", dtype=torch.bfloat16, requires_grad=True
    )
    gb_out, gb_in = bandwidth_gb_s()
    everything = lowtide.ActivationStore(host="48GiB", in_flight="1GiB")
    plain_context: Callable[[], Any] = contextlib.nullcontext

    def forward(context: Callable[[], Any]) -> Tensor:
        with context():
            return model(x).float().square().mean()

    def step(context: Callable[[], Any]) -> None:
        forward(context).backward()
        model.zero_grad()
        x.grad = None

    forward_ms = milliseconds(lambda: forward(plain_context), options.rounds)
    plain_ms = milliseconds(lambda: step(plain_context), options.rounds)
    step(lambda: lowtide.offload(everything))
    before = everything.stats()
    step(lambda: lowtide.offload(everything))
    after = everything.stats()
    out_bytes = after.moved_down_bytes - before.moved_down_bytes
    in_bytes = after.moved_up_bytes - before.moved_up_bytes
    keep = [(f"ours, {share:.0%} kept on the device", int(out_bytes * share)) for share in (0.25, 0.5, 0.75)]
    ways: dict[str, Callable[[], Any]] = {
        "nothing offloaded": plain_context,
        "`lowtide.offload`, everything": lambda: lowtide.offload(everything),
    }
    stores = {"`lowtide.offload`, everything": everything}
    stores |= {name: lowtide.ActivationStore(device=nbytes, host="48GiB", in_flight="1GiB") for name, nbytes in keep}
    for name, _ in keep:
        ways[name] = lambda store=stores[name]: lowtide.offload(store)
    slim = lowtide.ActivationStore(host="48GiB", in_flight="256MiB")
    stores["ours, everything, 256 MiB in flight"] = slim
    ways["ours, everything, 256 MiB in flight"] = lambda: lowtide.offload(slim)
    trl = trl_context()
    if trl is not None:
        ways["TRL's `OffloadActivations`"] = lambda: trl
    ways["`save_on_cpu(pin_memory=True)`"] = lambda: torch.autograd.graph.save_on_cpu(pin_memory=True)

    lines = [
        f"# Offload on {device_name('cuda')}",
        "",
        f"{versions()}. {options.layers} Llama-like blocks of width {options.width}, {options.batch} x "
        f"{options.tokens} tokens, bfloat16, eager, forward and backward; medians of {options.rounds} steps, one run. "
        f"Pinned copies alone: {gb_out:.1f} GB/s out, {gb_in:.1f} GB/s in. "
        f"Everything offloaded is {out_bytes / GIB:.2f} GiB out, {in_bytes / GIB:.2f} GiB in.",
        "",
        "*Best possible* lets copies run wholly beside compute: the longer of the two in the forward, and in the "
        "backward. *Hidden* is the share of the copy time that could be hidden and was.",
        "",
        "| | ms | peak GiB | moved out GiB | best possible ms | hidden |",
        "|---|---|---|---|---|---|",
    ]
    for name, context in ways.items():
        store = stores.get(name)
        is_ours = store is not None
        rounds = options.rounds if is_ours or name == "nothing offloaded" else 3
        moved = 0.0
        if is_ours:
            step(context)
            start = store.stats().moved_down_bytes
            step(context)
            moved = float(store.stats().moved_down_bytes - start)
        elif name != "nothing offloaded":
            moved = float("nan")
        ms = milliseconds(lambda context=context: step(context), rounds)
        peak = peak_gib(lambda context=context: step(context))
        best, hidden = "", ""
        if store is not None:
            out_ms, in_ms = moved / gb_out / 1e6, moved / gb_in / 1e6
            best_ms = max(forward_ms, out_ms) + max(plain_ms - forward_ms, in_ms)
            serial_ms = plain_ms + out_ms + in_ms
            best = f"{best_ms:.0f}"
            hidden = f"{(serial_ms - ms) / (serial_ms - best_ms):.0%}"
        shown = "" if moved != moved else f"{moved / GIB:.2f}"
        lines.append(f"| {name} | {ms:.1f} | {peak:.2f} | {shown} | {best} | {hidden} |")
    if trl is None:
        lines += ["", "TRL's `OffloadActivations` is not in the table: TRL could not be imported."]
    save(lines, options.out, "offload-cuda.md")


if __name__ == "__main__":
    main()
