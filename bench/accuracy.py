"""How far simulated peaks and times are from measured ones, for every model of the zoo.

    python bench/accuracy.py [--device cuda] [--scale 2] [--out FOLDER] [names ...]

Each model is traced twice, on fake and on real tensors, and run plainly and with a checkpoint on each block. Peaks are
whole-step peaks on a GPU (the allocator's counter) and, on the CPU, what the step allocates (the profiler's events).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import zoo
from reporting import RESULTS, device_name, save, timed, versions

import lowtide
from lowtide.plans import Plan, Recompute
from lowtide.simulator import simulate
from lowtide.tracing.model_blocks import find_regions

# Pictures grow with the square of the scale.
SCALE_OF_OTHERS = {"unet": 12, "hf_vit": 12, "hf_resnet": 16}


def block_plan(job: zoo.Job, graph: lowtide.StepGraph) -> Plan:
    """A checkpoint on each block."""
    paths = [path for path in find_regions(job.model, job.blocks) if path in graph.calls_by_path]
    return Plan(tuple(Recompute(path, nth) for path in paths for nth in range(len(graph.calls_by_path[path]))))


def measured_peak(job: zoo.Job, device: str) -> int:
    job.step()
    job.model.zero_grad(set_to_none=True)
    measured = lowtide.measure(job.step, device=device)
    job.model.zero_grad(set_to_none=True)
    return measured.total_peak_bytes


def step_seconds(job: zoo.Job, device: str, rounds: int) -> float:
    def step() -> None:
        job.step()
        job.model.zero_grad(set_to_none=True)

    for _ in range(3):
        step()
    return statistics.median(timed(step, device) for _ in range(rounds))


def simulated_peak(graph: lowtide.StepGraph, plan: Plan | None, device: str) -> int:
    peak = simulate(graph, plan).peak_bytes
    if device == "cpu":  # the profiler sees what the step allocates, not what was there
        peak -= sum(size for kind, size in graph.static_bytes.items() if kind != "gradients")
    return peak


def row(name: str, device: str, dtype: torch.dtype, scale: int, rounds: int) -> list[str]:
    job = zoo.make(name, device, dtype, min(scale, SCALE_OF_OTHERS.get(name, scale)))
    plain_s = step_seconds(job, device, rounds)
    started = time.perf_counter()
    real = lowtide.trace(job.model, job.loss_fn, *job.batch, mode="real")
    trace_s = time.perf_counter() - started
    try:
        fake = lowtide.trace(job.model, job.loss_fn, *job.batch, mode="fake")
    except lowtide.TraceError:
        fake = None
    plan = block_plan(job, real)
    plain = measured_peak(job, device)
    with lowtide.apply(job.model, lowtide.RecomputeAll(), regions=job.blocks):
        blocks = measured_peak(job, device)
        blocks_s = step_seconds(job, device, rounds)
    plain_s = min(plain_s, step_seconds(job, device, rounds))

    def error(simulated: int, measured: int) -> str:
        return f"{100 * (simulated / measured - 1):+.1f} %"

    extra, foretold = blocks_s - plain_s, simulate(real, plan).extra_s
    return [
        name,
        str(len(real.ops)),
        f"{plain / 2**20:.1f}",
        error(simulated_peak(real, None, device), plain),
        error(simulated_peak(fake, None, device), plain) if fake else "no fake kernel",
        f"{blocks / 2**20:.1f}",
        error(simulated_peak(real, plan, device), blocks),
        error(simulated_peak(fake, plan, device), blocks) if fake else "no fake kernel",
        f"{1e3 * plain_s:.2f}",
        f"{1e3 * extra:.2f}",
        f"{1e3 * foretold:.2f}",
        f"{trace_s / plain_s:.0f}",
    ]


def growth(device: str) -> list[str]:
    """Seconds to trace GPTs of more and more layers."""
    lines = ["", "| layers | ops | fake trace s | real trace s | simulate s |", "|---|---|---|---|---|"]
    for layers in (12, 24, 48, 96):
        job = zoo.gpt(layers)
        job.model.to(device)
        job.batch = tuple(tensor.to(device) for tensor in job.batch)
        times = []
        for mode in ("fake", "real"):
            started = time.perf_counter()
            graph = lowtide.trace(job.model, job.loss_fn, *job.batch, mode=mode)  # type: ignore[arg-type]
            times.append(time.perf_counter() - started)
        started = time.perf_counter()
        simulate(graph, block_plan(job, graph))
        times.append(time.perf_counter() - started)
        lines.append(f"| {layers} | {len(graph.ops)} | " + " | ".join(f"{seconds:.3f}" for seconds in times) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scale", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    lines = [
        f"# Simulated against measured, {device_name(options.device)}",
        "",
        f"{versions()}, {options.dtype}, scale {options.scale}. Peaks in MiB; errors are simulated over measured.",
        "",
        "| model | ops | plain peak | real trace | fake trace | a checkpoint per block | real trace | fake trace "
        "| plain ms | extra ms measured | extra ms simulated | trace / step |",
        "|" + "---|" * 12,
    ]
    for name in options.names or zoo.ZOO:
        try:
            lines.append("| " + " | ".join(row(name, options.device, dtype, options.scale, options.rounds)) + " |")
        except Exception as error:
            lines.append(f"| {name} | {type(error).__name__}: {str(error).splitlines()[0][:100]} |")
        print(lines[-1], file=sys.stderr, flush=True)
    if not options.names:
        lines += ["", "Cost of tracing, a GPT of width 64:", *growth(options.device)]
    save(lines, options.out, f"accuracy-{options.device}.md")


if __name__ == "__main__":
    main()
