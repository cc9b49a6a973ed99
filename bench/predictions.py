"""Predicted and measured cost of plans: `python bench/predictions.py`.

Each step is traced. Two plans, a checkpoint per block and on every second block, are simulated on the graph, and
measured on the model. They take turns within one run, three steps in a row each, with Python's garbage collector as
users have it. Writes bench/results/predictions-<device>.md, and with --graphs the graphs.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from pathlib import Path

import families
import torch
from reporting import NUM_IN_A_ROW, RESULTS, Page, device_name, versions
from ways import Way, in_turns, step
from zoo import Job

import lowtide
from lowtide.plans import Plan
from lowtide.simulator import simulate
from lowtide.solvers.baselines import reference_plans

STEPS = ("convnext:0", "vit:0", "whisper:0", "gpt:0", "gpt:1", "llama:1")  # 1: with the small batch
WAYS = ("a checkpoint per block", "every second block")


def seconds_of(job: Job, device: str, plans: dict[str, Plan], rounds: int) -> dict[str, float]:
    """Seconds that each plan adds to the plain step, and of the plain step: medians."""
    run = functools.partial(step, job)
    ways = {name: Way(run, functools.partial(lowtide.apply, job.model, plan)) for name, plan in plans.items()}
    times = in_turns({"plain": Way(run), **ways}, device, rounds)
    plain = times["plain"]
    found = {name: statistics.median(a - b for a, b in zip(times[name], plain, strict=True)) for name in plans}
    return {**found, "plain": statistics.median(plain)}


def row_of(name: str, device: str, rounds: int, graphs: Path | None) -> str:
    family, _, small = name.partition(":")
    job = families.make(family, device, small_batch=small == "1")
    for _ in range(3):
        step(job)
    job.model.zero_grad(set_to_none=True)
    graph = lowtide.trace(job.model, job.loss_fn, *job.batch)
    if graphs is not None:
        graphs.mkdir(parents=True, exist_ok=True)
        (graphs / f"{family}-{small}.json").write_text(graph.to_json())
    plans = {way: plan for way, plan in reference_plans(graph).items() if way in WAYS}
    seconds = seconds_of(job, device, plans, rounds)
    lines = graph.lines
    cells = [f"{family}, batch {job.batch[0].shape[0]}", lines.limit if graph.has_host_line else "one line"]
    cells += [f"{1e3 * each:.1f}" for each in (seconds["plain"], lines.step_s, lines.host_s, lines.device_s)]
    for way, plan in plans.items():
        told = simulate(graph, plan).extra_s / lines.step_s
        cells += [f"{100 * told:+.1f}", f"{100 * seconds[way] / seconds['plain']:+.1f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", nargs="*", default=list(STEPS))
    parser.add_argument("--graphs", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    page = Page(
        options.out,
        f"predictions-{options.device}.md",
        f"# Predicted and measured cost of plans, {device_name(options.device)}",
        "",
        f"{versions()}. Percent of the plain step that a plan adds: predicted by the simulator from one trace, and "
        f"measured in turns, {NUM_IN_A_ROW} steps in a row, {options.rounds} rounds. Milliseconds of the plain step, "
        "measured and simulated, and of its two time lines.",
        "",
        "| step | limit | plain, measured | simulated | host | device "
        "| " + " | ".join(f"{way}, {how}" for way in WAYS for how in ("predicted", "measured")) + " |",
        "|" + "---|" * 10,
    )
    for name in options.steps:
        with page.rows_of(name):
            page.add(row_of(name, options.device, options.rounds, options.graphs))
        if options.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
