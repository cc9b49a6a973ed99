"""How far simulated peaks and times are from measured ones, for every model of the zoo.

    python bench/accuracy.py [names ...] [--device cuda] [--scale 2] [--out FOLDER]

Each model is traced twice, on fake and on real tensors, and run plainly and with a checkpoint on each block. Peaks are
whole-step peaks on a GPU (the allocator's counter) and, on the CPU, what the step allocates (the profiler's events).
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Iterator

import torch
import zoo
from reporting import Page, device_name, options_of, timed, versions

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


def rows_of(name: str, options: argparse.Namespace) -> Iterator[str]:
    device, rounds = options.device, options.rounds
    scale = min(options.scale, SCALE_OF_OTHERS.get(name, options.scale))
    job = zoo.make(name, device, getattr(torch, options.dtype), scale)
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
    cells = [
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
    yield f"| {' | '.join(cells)} |"


def growth(device: str) -> Iterator[str]:
    """Seconds to trace GPTs of more and more layers."""
    yield from ("", "| layers | ops | fake trace s | real trace s | simulate s |", "|---|---|---|---|---|")
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
        yield f"| {layers} | {len(graph.ops)} | " + " | ".join(f"{seconds:.3f}" for seconds in times) + " |"


def main() -> None:
    parser = options_of(__doc__, zoo.ZOO, rounds=10)
    parser.set_defaults(device="cpu")
    parser.add_argument("--scale", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    page = Page(
        options.out,
        f"accuracy-{options.device}.md",
        f"# Simulated against measured, {device_name(options.device)}",
        "",
        f"{versions()}, {options.dtype}, scale {options.scale}. Peaks in MiB; errors are simulated over measured.",
        "",
        "| model | ops | plain peak | real trace | fake trace | a checkpoint per block | real trace | fake trace "
        "| plain ms | extra ms measured | extra ms simulated | trace / step |",
        "|" + "---|" * 12,
    )
    page.add_cases(options, functools.partial(rows_of, options=options))
    if options.cases == list(zoo.ZOO):
        page.add("", "Cost of tracing, a GPT of width 64:", *growth(options.device))


if __name__ == "__main__":
    main()
