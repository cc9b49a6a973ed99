"""Predicted and measured cost of plans: `python bench/predictions.py`.

Each family is traced once. Three plans are simulated on the graph and measured on the model: a checkpoint per block,
one on every second block, and the fastest found for the budget half way between their peaks. They take turns with the
plain step within one run, three steps in a row each, with Python's garbage collector as users have it. Predictions are
for a host that nothing disturbs, so the fastest rounds are compared beside the medians. Writes
bench/results/predictions-<device>.md, and with --graphs the graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import families
from reporting import NUM_IN_A_ROW, Page, device_name, free, median_over, options_of, versions
from rows import PREDICTED_WITHIN
from ways import Way, in_turns, step

import lowtide
from lowtide.plans import Plan
from lowtide.simulator import simulate
from lowtide.solvers.baselines import reference_plans

WAYS = ("a checkpoint per block", "every second block")
NUM_WARM = 2  # regions learn from the first two steps under a plan
SOLVE_S = 3.0


def plans_of(graph: lowtide.StepGraph) -> dict[str, Plan]:
    """The plans to measure, by name."""
    plans = {way: plan for way, plan in reference_plans(graph).items() if way in WAYS}
    middle = sum(simulate(graph, plan).peak_bytes for plan in plans.values()) // len(plans)
    return {**plans, "solved, half way": lowtide.solve(graph, middle, time_limit_s=SOLVE_S)}


def rows_of(
    family: str, device: str, rounds: int, graphs: Path | None, found: list[tuple[float, float]]
) -> Iterator[str]:
    """A row for each plan; adds to `found` by how many points predictions differ from medians and fastest rounds."""
    job = families.make(family, device)
    run = functools.partial(step, job)
    for _ in range(3):
        run()
    job.model.zero_grad(set_to_none=True)
    free(device)
    graph = lowtide.trace(job.model, job.loss_fn, *job.batch)
    if graphs is not None:
        graphs.mkdir(parents=True, exist_ok=True)
        (graphs / f"{family}.json").write_text(graph.to_json())
    plans = plans_of(graph)
    ways = {name: Way(run, functools.partial(lowtide.apply, job.model, plan)) for name, plan in plans.items()}
    times = in_turns({"plain": Way(run), **ways}, device, rounds, num_warm=NUM_WARM)
    plain, lines = times["plain"], graph.lines
    limit = lines.limit if graph.has_host_line else "one line"
    for name, plan in plans.items():
        told = simulate(graph, plan).extra_s / lines.step_s
        measured = median_over(times[name], plain), min(times[name]) / min(plain) - 1
        seconds = (min(plain), max(plain), lines.step_s, lines.host_s, lines.device_s)
        cells = [family, limit, *(f"{1e3 * each:.1f}" for each in seconds), name]
        cells += [f"{100 * share:+.1f}" for share in (told, *measured)]
        median, fastest = (100 * abs(told - share) for share in measured)
        found.append((median, fastest))
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    parser = options_of(__doc__, families.FAMILIES, rounds=6)
    parser.add_argument("--graphs", type=Path, help="a folder for the graphs")
    options = parser.parse_args()
    page = Page(
        options.out,
        f"predictions-{options.device}.md",
        f"# Predicted and measured cost of plans, {device_name(options.device)}",
        "",
        f"{versions()}. Percent of the plain step that a plan adds: predicted by the simulator from one trace, and "
        f"measured in turns, {NUM_IN_A_ROW} steps in a row, {options.rounds} rounds: the median over the plain steps "
        "of the same round, and the fastest round over the fastest plain one. Milliseconds of the plain step: its "
        "fastest and slowest round, simulated, and on its two time lines.",
        "",
        "| family | limit | plain, fastest | slowest | simulated | host | device | plan | predicted + % | median + % "
        "| fastest + % |",
        "|" + "---|" * 11,
    )
    found: list[tuple[float, float]] = []
    given = {"device": options.device, "rounds": options.rounds, "graphs": options.graphs, "found": found}
    page.add_cases(options, functools.partial(rows_of, **given))
    median, fastest = (sum(each[index] <= PREDICTED_WITHIN for each in found) for index in (0, 1))
    page.add(
        "",
        f"Within {PREDICTED_WITHIN:.0f} points of the prediction: {fastest} of {len(found)} by the fastest rounds, "
        f"{median} by the medians.",
    )


if __name__ == "__main__":
    main()
