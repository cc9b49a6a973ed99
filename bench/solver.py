"""The solver against its rivals, on graphs of 10^2 to 10^5 ops, at ten budgets each.

    python bench/solver.py [--quick] [--milp-seconds 60] [--repeats 3] [--out FOLDER] [names ...]

Steps are traced on fake tensors for an H100, so all slowdowns are predicted. Budgets go from the smallest that the
solver can meet up to the plain peak, which is left out. Rivals: the MILP of `checkmate.py`, the knapsacks of
`rivals.py`, the dynamic programme of `rotor.py`. All plans are judged by `lowtide.simulator.simulate`; a plan over
the budget is no answer.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field

import torch
import zoo
from checkmate import Answer, Checkmate
from reporting import Page, device_name, options_of, versions
from rivals import block_knapsack, torch_knapsack
from rotor import chain_of

import lowtide
from lowtide.graph import StepGraph
from lowtide.plans import Plan
from lowtide.simulator import simulate
from lowtide.tracing.model_blocks import find_regions

_NUM_BUDGETS = 10
_TIME_LIMIT_S = 60  # of our solver: no plan is cut short because the machine is busy
_MOST_OPS_MILP = 1_000
_MOST_OPS_THOROUGH = 20_000
_TOLERANCE = 1e-6  # of the step's time: less is equal
_COLUMNS = ("MILP", "torch", "blocks", "rotor")


def gpt(layers: int, width: int, tokens: tuple[int, int]) -> zoo.Job:
    with torch.device("meta"):
        job = zoo.gpt(layers, width, heads=16, vocabulary=50304, tokens=tokens)
        job.model.to(torch.bfloat16)
    return job


def scaled(name: str, scale: int) -> Callable[[], zoo.Job]:
    return lambda: zoo.make(name, "meta", torch.bfloat16, scale)


GRAPHS: dict[str, Callable[[], zoo.Job]] = {
    "unet": scaled("unet", 16),
    "hf_resnet": scaled("hf_resnet", 16),
    "gpt, 2 layers": lambda: gpt(2, 2048, (8, 2048)),
    "hf_vit": scaled("hf_vit", 8),
    "hf_gpt2": scaled("hf_gpt2", 16),
    "hf_bert": scaled("hf_bert", 16),
    "hf_llama": scaled("hf_llama", 16),
    "hf_t5": scaled("hf_t5", 16),
    "gpt, 24 layers": lambda: gpt(24, 2048, (8, 2048)),
    "gpt, 120 layers": lambda: gpt(120, 1024, (8, 1024)),
    "gpt, 1200 layers": lambda: gpt(1200, 1024, (4, 1024)),
}
QUICK = ("unet", "hf_resnet", "gpt, 2 layers", "hf_vit", "gpt, 24 layers")


@dataclass
class Row:
    """One budget: our plan, how long it took, and the extra seconds of each rival's (None: no answer)."""

    budget: int
    plan: Plan
    solve_s: float
    rivals: dict[str, float | None] = field(default_factory=dict)
    rotor_own_s: float | None = None
    milp: Future[Answer] | None = None
    milp_s: float = 0.0
    milp_is_proven: bool = True

    def worse_than(self) -> list[str]:
        """The rivals that beat our plan."""
        return [name for name, extra in self.rivals.items() if extra is not None and self._behind(extra) > _TOLERANCE]

    def _behind(self, extra_s: float) -> float:
        return (self.plan.extra_s - extra_s) / self.plan.step_s

    def outcome(self, name: str) -> str:
        extra = self.rivals[name]
        if extra is None:
            return "none"
        behind = self._behind(extra)
        return "worse" if behind > _TOLERANCE else "equal" if behind >= -_TOLERANCE else "better"


@dataclass
class Result:
    name: str
    graph: StepGraph
    trace_s: float
    rows: list[Row]


def solved(graph: StepGraph, budget: int, repeats: int) -> tuple[Plan, float]:
    """Our plan, and the least seconds that solving took."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        plan = lowtide.solve(graph, budget, time_limit_s=_TIME_LIMIT_S)
        seconds.append(time.perf_counter() - started)
    judged = simulate(graph, plan)
    assert judged.peak_bytes <= budget and judged.extra_s == plan.extra_s, "the plan is not what it says it is"
    return plan, min(seconds)


def milp_task(graph: StepGraph, budget: int, time_limit_s: float) -> Answer:
    return Checkmate(graph, simulate(graph)).solve(budget, time_limit_s)


def run(name: str, workers: ProcessPoolExecutor, milp_seconds: float, repeats: int) -> Result:
    job = GRAPHS[name]()
    started = time.perf_counter()
    graph = lowtide.trace(job.model, job.loss_fn, *job.batch, mode="fake", device="H100")
    trace_s = time.perf_counter() - started
    floor, plain = lowtide.sweep(graph, budgets=()).floor_bytes, simulate(graph)
    budgets = [floor + (plain.peak_bytes - floor) * step // _NUM_BUDGETS for step in range(_NUM_BUDGETS)]
    is_small = len(graph.ops) <= _MOST_OPS_THOROUGH
    rows = [Row(budget, *solved(graph, budget, repeats=repeats if is_small else 1)) for budget in budgets]
    paths = [path for path in find_regions(job.model, job.blocks) if path in graph.calls_by_path]
    blocks = [call for path in paths for call in graph.calls_by_path[path]]
    chain = chain_of(graph, plain, blocks)
    offers = {
        "torch": torch_knapsack(graph, blocks, thorough=is_small),
        "blocks": block_knapsack(graph, blocks),
    }
    whole = None
    if chain is not None:
        offers["rotor"] = chain.runnable()
        whole = chain.full_extra_s()
    for row in rows:
        for rival, offered in offers.items():
            best = offered.best(row.budget)
            row.rivals[rival] = best.extra_s if best else None
        if chain is not None and whole is not None:
            row.rotor_own_s = chain.full_at(whole, row.budget)
        if len(graph.ops) <= _MOST_OPS_MILP:
            row.milp = workers.submit(milp_task, graph, row.budget, milp_seconds)
    return Result(name, graph, trace_s, rows)


def collect(result: Result) -> None:
    """Wait for the MILPs of a graph."""
    for row in result.rows:
        if row.milp is not None:
            answer = row.milp.result()
            row.rivals["MILP"] = answer.extra_s
            row.milp_s, row.milp_is_proven = answer.seconds, answer.is_proven


def percent(seconds: float | None, step_s: float) -> str:
    return "-" if seconds is None else f"{100 * seconds / step_s:.2f} %"


def summary(results: list[Result]) -> list[str]:
    lines = [
        "| graph | ops | module calls | trace s | solve s | worst gap | median gap | "
        + " | ".join(f"against {name}" for name in _COLUMNS)
        + " |",
        "|" + "---|" * (7 + len(_COLUMNS)),
    ]
    for result in results:
        gaps = sorted(row.plan.gap for row in result.rows)
        cells = [
            result.name,
            f"{len(result.graph.ops):,}",
            f"{len(result.graph.calls):,}",
            f"{result.trace_s:.1f}",
            f"{max(row.solve_s for row in result.rows):.2f}",
            f"{100 * gaps[-1]:.1f} %",
            f"{100 * statistics.median(gaps):.2f} %",
        ]
        for name in _COLUMNS:
            if name not in result.rows[0].rivals:
                cells.append("not run")
                continue
            outcomes = [row.outcome(name) for row in result.rows]
            counts = [f"{outcomes.count(o)} {o}" for o in ("better", "equal", "worse") if o in outcomes]
            counts += [f"{outcomes.count('none')} without an answer"] if "none" in outcomes else []
            cells.append(", ".join(counts))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def table(result: Result) -> list[str]:
    step_s = result.graph.step_s
    lines = [
        f"## {result.name}",
        "",
        f"{len(result.graph.ops):,} ops, plain step {1e3 * step_s:.2f} ms, peak "
        f"{result.rows[0].plan.plain_peak_bytes / 2**30:.3f} GiB.",
        "",
        "| budget GiB | ours | gap | solve s | " + " | ".join(_COLUMNS) + " | MILP s | rotor's own account |",
        "|" + "---|" * (6 + len(_COLUMNS)),
    ]
    for row in result.rows:
        cells = [
            f"{row.budget / 2**30:.3f}",
            percent(row.plan.extra_s, step_s),
            f"{100 * row.plan.gap:.2f} %",
            f"{row.solve_s:.2f}",
        ]
        for name in _COLUMNS:
            text = percent(row.rivals[name], step_s) if name in row.rivals else "not run"
            cells.append(f"**{text}**" if name in row.worse_than() else text)
        timed = f"{row.milp_s:.1f}" + ("" if row.milp_is_proven else " (timed out)")
        cells += [timed if row.milp else "not run", percent(row.rotor_own_s, step_s)]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def losses(results: list[Result]) -> list[str]:
    """Every budget at which a rival's plan is faster than ours."""
    lines = ["## Where a rival is faster", ""]
    found = []
    for result in results:
        for row in result.rows:
            for name in row.worse_than():
                extra = row.rivals[name]
                found.append(
                    f"| {result.name} | {row.budget / 2**30:.3f} | {percent(row.plan.extra_s, row.plan.step_s)} "
                    f"| {percent(row.plan.lower_bound_s, row.plan.step_s)} | {name} "
                    f"| {percent(extra, row.plan.step_s)} |"
                )
    if not found:
        return [*lines, "Nowhere.", ""]
    return [*lines, "| graph | budget GiB | ours | our bound | rival | its plan |", "|" + "---|" * 6, *found, ""]


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller graphs, 5 s for each MILP")
    parser.add_argument("--milp-seconds", type=float)
    parser.add_argument("--repeats", type=int, default=3, help="how often each of our plans is solved for, to time it")
    options = parser.parse_args()
    milp_seconds = options.milp_seconds or (5.0 if options.quick else 60.0)
    names = options.names or (QUICK if options.quick else GRAPHS)
    started, results = time.perf_counter(), []
    with ProcessPoolExecutor(max_workers=1) as workers:
        for name in names:
            results.append(run(name, workers, milp_seconds, options.repeats))
            print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
        for result in results:
            collect(result)
    lines = [
        f"# The solver against its rivals, {device_name('cpu')} with {os.cpu_count()} cores",
        "",
        f"{versions()}. Steps traced for an H100, bf16. Slowdowns are predicted, as shares of the plain step's time, "
        f"and judged by `lowtide.simulator.simulate`; `-` is no plan that fits. `solve s` is one call of "
        f"`lowtide.solve`, the best of {options.repeats} (of one above {_MOST_OPS_THOROUGH:,} ops), at the slowest "
        f"budget; it may take "
        f"{_TIME_LIMIT_S} s. Gaps are those of the plans' own certificates. "
        f"The MILP has {milp_seconds:g} s for each budget, on graphs of up to {_MOST_OPS_MILP:,} "
        "ops; rotor needs a chain of blocks. What rotor's whole programme claims for itself is in the last column: "
        "nothing here can run it, so it is not judged. "
        f"Seconds are wall time; the load average was {os.getloadavg()[0]:.1f}.",
        "",
        *summary(results),
        "",
        *losses(results),
    ]
    for result in results:
        lines += table(result)
    Page(options.out, "solver.md").add(*lines[:-1])


if __name__ == "__main__":
    main()
