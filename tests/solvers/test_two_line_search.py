"""`solve` for steps with two time lines: against brute force, monotone, and with bounds that hold."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from itertools import count, pairwise, product
from pathlib import Path

import pytest

import lowtide
from brute import all_costs
from graphs import hidden_wide_narrow, random_graph, repeated_blocks, with_host_line
from lowtide import InfeasibleBudgetError, StepGraph
from lowtide.plans import Plan
from lowtide.simulator import simulate
from lowtide.solvers import candidate
from lowtide.solvers.candidate import Effort
from lowtide.solvers.eager_search import TwoLineSearch
from lowtide.solvers.solve import SEARCHED, STEADY, search_for, shortlist
from referee import replay
from sweeps import sweep


def tiny(seed: int) -> StepGraph:
    graph = repeated_blocks(seed, num_blocks=2) if seed % 3 == 0 else random_graph(seed, num_ops=7)
    return with_host_line(seed, graph)


def search_of(graph: StepGraph, host: int = 0) -> TwoLineSearch:
    search = search_for(graph, "eager", host, 1e6)
    assert isinstance(search, TwoLineSearch)
    return search


@pytest.mark.parametrize("first", sweep([0, 20, 40], keep=1))
def test_no_plan_beats_the_bound_and_most_are_the_best(first: int) -> None:
    num_plans = num_best = num_graphs = 0
    for seed in range(first, first + 20):
        graph = tiny(seed)
        costs = all_costs(graph, most=500) if graph.has_host_line else None
        if costs is None:
            continue
        num_graphs += 1
        search = search_of(graph)
        floor, plain = search.floor.peak_bytes, search.plain.peak_bytes
        for budget in sorted({peak for peak, _ in costs if peak <= plain})[-12:]:
            best = min(extra_s for peak, extra_s in costs if peak <= budget)
            assert search.lower_bound_s(budget) <= best + 1e-9, f"graph {seed}, budget {budget}"
            if budget < floor:
                with pytest.raises(InfeasibleBudgetError):
                    search.plan(budget)
                continue
            plan = search.plan(budget)
            assert plan.peak_bytes <= budget and best <= plan.extra_s + 1e-9, f"graph {seed}, budget {budget}"
            assert (plan.peak_bytes, plan.extra_s) in costs
            num_plans += 1
            num_best += plan.extra_s <= best + 1e-9
    assert num_graphs >= 7 and num_best >= 0.95 * num_plans, (num_graphs, num_best, num_plans)


@pytest.mark.parametrize("seed", sweep(range(12), keep=3))
@pytest.mark.parametrize("host", [0, 1 << 20])
def test_monotone_and_as_the_referee_says(seed: int, host: int) -> None:
    graph = with_host_line(seed, repeated_blocks(seed, num_blocks=6) if seed % 2 else random_graph(seed, num_ops=30))
    if host and not graph.hardware.link_bytes_per_s:
        pytest.skip("no link")
    search = search_of(graph, host)
    floor, plain = search.floor.peak_bytes, search.plain.peak_bytes
    plain_s = replay(graph, lowtide.Plan()).step_s
    plans = [search.plan(floor + (plain - floor) * share // 12) for share in range(13)]
    for smaller, larger in pairwise(plans):
        assert smaller.peak_bytes <= larger.peak_bytes and smaller.extra_s >= larger.extra_s
        assert smaller.lower_bound_s >= larger.lower_bound_s - 1e-12
    for plan in plans:
        verdict = replay(graph, plan)
        assert verdict.peak_bytes == plan.peak_bytes <= plan.budget_bytes
        assert verdict.step_s - plain_s == pytest.approx(plan.extra_s, abs=1e-9)
        assert plan.lower_bound_s <= plan.extra_s


def test_the_limit_decides() -> None:
    """Retaining outputs costs the host and spares the device: only a step with a patient host does."""
    kept = {}
    for host_s in (1e-4, 8.0):
        graph = hidden_wide_narrow(4, hidden_s=2.0)
        ops = tuple(replace(op, host_s=host_s) for op in graph.ops)
        graph = replace(graph, ops=ops, hardware=replace(graph.hardware, dispatch_s=8 * host_s, spare_s=host_s))
        search = search_of(graph)
        floor, plain = search.floor.peak_bytes, search.plain.peak_bytes
        plans = [search.plan(floor + (plain - floor) * share // 10) for share in range(10)]
        kept[host_s] = sum(len(region.keep_ops) for plan in plans for region in plan.regions)
        assert all(simulate(graph, plan).extra_s == plan.extra_s for plan in plans)
    assert kept[8.0] == 0 < kept[1e-4]


_ELSEWHERE = """
import sys, lowtide
from lowtide.solvers import candidate
candidate._PATIENCE = 1e9  # the clock is for machines that are far slower
graph = lowtide.StepGraph.from_json(sys.stdin.read())
for host in (0, 1 << 40):
    for limit_s in (0.02, 0.2, 10.0):
        print(lowtide.solve(graph, int(sys.argv[1]), host=host, time_limit_s=limit_s).to_json())
"""


@pytest.mark.parametrize("has_host_line", sweep([True, False], keep=1))
def test_the_same_file_and_budget_give_the_same_plan(has_host_line: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is more to try than a search may do: what it does is counted, not timed."""
    graph = repeated_blocks(2, num_blocks=8)
    graph = replace(graph, hardware=replace(graph.hardware, link_bytes_per_s=64.0))
    graph = with_host_line(2, graph) if has_host_line else graph
    search = search_for(graph, "eager", 0, 1e6)
    budget = (search.floor.peak_bytes + search.plain.peak_bytes) // 2
    source = str(Path(lowtide.__file__).parents[1])
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": source}
    command = [sys.executable, "-c", _ELSEWHERE, str(budget)]
    run = subprocess.run(command, input=graph.to_json(), capture_output=True, text=True, check=True, env=environment)
    monkeypatch.setattr(candidate, "_PATIENCE", 1e9)
    limits = product((0, 1 << 40), (0.02, 0.2, 10.0))
    here = [lowtide.solve(graph, budget, host=host, time_limit_s=limit_s) for host, limit_s in limits]
    assert run.stdout.splitlines() == [plan.to_json() for plan in here]
    short, _, long = here[:3]
    assert long.extra_s <= short.extra_s


def test_a_busy_machine_does_not_end_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wall-clock time does not count, as other processes add to it."""
    effort = Effort(0.01)
    hours = count(time.monotonic(), 3600.0)
    for clock in ("monotonic", "perf_counter", "time"):
        monkeypatch.setattr(time, clock, lambda: next(hours))
    assert not effort.is_over()


def test_what_is_counted_ends_a_search() -> None:
    spent = Effort(1.0)
    assert not spent.is_over()
    is_over = spent.is_over_after(1, 100_000)
    assert [is_over() for _ in range(12)].index(True) == 9  # each turn a step of 100,000 events, and its beginning
    with pytest.raises(ValueError, match="time_limit_s"):
        Effort(0)


def test_the_shortlist_has_a_plan_for_a_busy_host() -> None:
    """Where the fastest leaves the host little to spare, one that is slower by less than a busy host would add."""
    num_steady = 0
    for seed in range(12):
        graph = repeated_blocks(seed, num_blocks=6)
        ops = tuple(replace(op, host_s=0.8 * op.seconds + 1 / 128) for op in graph.ops)
        graph = replace(graph, ops=ops, hardware=replace(graph.hardware, region_s=1 / 8, save_s=1 / 8))
        plain, floor = simulate(graph).peak_bytes, search_of(graph).floor.peak_bytes
        for share in (0.3, 0.6, 0.9):
            budget = int(floor + share * (plain - floor))
            found = {each.name: each.plan for each in shortlist(graph, budget)[0]}
            if STEADY not in found:
                continue
            num_steady += 1
            steady, fastest = found[STEADY], found[SEARCHED]
            assert steady.peak_bytes <= budget and steady.extra_s >= fastest.extra_s >= steady.lower_bound_s
            assert expected_s(steady) < expected_s(fastest)
    assert num_steady > 1


def expected_s(plan: Plan) -> float:
    assert plan.graph is not None
    return plan.extra_s + simulate(plan.graph, plan).lines.busy_host_s
