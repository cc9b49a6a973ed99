"""`solve` and `sweep`: against a referee and brute force, monotone in the budget, the same every time."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import zoo

import lowtide
from brute import all_costs, keepable_ops
from graphs import chain, hidden_wide_narrow, random_graph, repeated_blocks, seldom_saved
from lowtide import InfeasibleBudgetError, PlanError, StepGraph
from lowtide.errors import GraphError, UnitError
from lowtide.graph import Hardware, Op, Value
from lowtide.simulator import simulate
from lowtide.solvers.eager_search import EagerSearch, TwoLineSearch
from referee import assert_plan_refereed, budgets_of
from sweeps import sweep

MODELS = sweep(("gpt_dropout", "unet", "block_called_again", "lora", "hf_t5"), keep=2)


@cache
def traced(name: str) -> StepGraph:
    job = zoo.make(name)
    if name == "gpt_dropout":
        del job.model.layers[2]  # two are enough to choose between
    return lowtide.trace(job.model, job.loss_fn, *job.batch, device="H100")


@cache
def searched(name: str, host: int = 0) -> TwoLineSearch:
    """A search that several tests share: it knows nothing of the budgets that it was asked for before."""
    return TwoLineSearch(traced(name), host, time_limit_s=1e6)


def tiny(seed: int) -> StepGraph:
    """A step for brute force: some with ops that make indices, regions that read what they were not given, or dispatch
    that costs something. Every second is of pages: smaller values cost nothing at any price that is tried."""
    if seed % 4 == 3:
        graph = seldom_saved(seed, num_ops=4)
    else:
        graph = repeated_blocks(seed, num_blocks=2) if seed % 3 == 0 else random_graph(seed)
    ops, calls, hardware = list(graph.ops), list(graph.calls), graph.hardware
    if seed % 5 == 1:
        for index in sorted(keepable_ops(graph))[::3]:
            ops[index] = replace(ops[index], flags=("index",))
    if seed % 7 == 1:
        calls = [replace(call, inputs=call.inputs[index % 2 :]) for index, call in enumerate(calls)]
    if seed % 4 == 3 or seed % 11 == 1:
        dispatch_s, region_s = (1 / 64, 1 / 16)[seed // 4 % 2], (1 / 8, 0.0)[seed // 8 % 2]
        spare_s = (0.0, 1 / 16, 1 / 2)[seed % 3]
        hardware = replace(hardware, dispatch_s=dispatch_s, region_s=region_s, spare_s=spare_s)
    scale = 4096 if seed % 2 else 1
    ops = [replace(op, workspace_bytes=scale * op.workspace_bytes) for op in ops]
    values = tuple(replace(value, bytes=scale * value.bytes) for value in graph.values)
    step_s = sum(op.seconds for op in ops)
    return replace(graph, ops=tuple(ops), values=values, calls=tuple(calls), hardware=hardware, step_s=step_s)


def larger(seed: int) -> StepGraph:
    return repeated_blocks(seed, num_blocks=6) if seed % 2 else random_graph(seed, num_ops=60)


# Against the referee


@pytest.mark.parametrize("seed", sweep(range(24), keep=2))
def test_the_referee_agrees_on_random_steps(seed: int) -> None:
    search = EagerSearch(larger(seed))
    for budget in budgets_of(search, 6):
        assert_plan_refereed(search.graph, search.plan(budget))


@pytest.mark.parametrize("name", sweep(["unet", "gpt_dropout", "block_called_again"], keep=1))
def test_the_referee_agrees_on_models(name: str) -> None:
    search = searched(name)
    for budget in budgets_of(search, 3):
        assert_plan_refereed(search.graph, search.plan(budget))


# Against brute force


@pytest.mark.parametrize("batch", sweep(range(8), keep=1))
def test_the_certificate_against_brute_force(batch: int) -> None:
    """No plan is faster than the bound; none that was found is faster than the best; the floor is a plan's peak."""
    num_tried = 0
    for seed in range(16 * batch, 16 * (batch + 1)):
        graph = tiny(seed)
        costs = all_costs(graph, most=1000)
        if costs is None:
            continue
        num_tried += 1
        search = EagerSearch(graph)
        floor, plain = search.floor.peak_bytes, search.plain.peak_bytes
        peaks = {peak for peak, _ in costs}
        assert floor in peaks and floor >= min(peaks), seed
        for budget in sorted(peak for peak in peaks if peak <= plain)[-20:]:
            best = min(extra_s for peak, extra_s in costs if peak <= budget)
            assert search.lower_bound_s(budget) <= best + 1e-9, f"graph {seed}, budget {budget}"
            if budget < floor:
                with pytest.raises(InfeasibleBudgetError) as caught:
                    search.plan(budget)
                assert caught.value.floor_bytes == floor
                continue
            plan = search.plan(budget)
            assert plan.lower_bound_s <= best + 1e-9 and best <= plan.extra_s + 1e-9, f"graph {seed}, budget {budget}"
            assert (plan.peak_bytes, plan.extra_s) in costs
    assert num_tried >= 8


@pytest.mark.parametrize("first", sweep([200, 220, 240], keep=1))
def test_most_tiny_steps_are_solved_to_the_optimum(first: int) -> None:
    num_best = num_plans = num_floors = num_graphs = 0
    for seed in range(first, first + 20):
        graph = tiny(seed)
        costs = all_costs(graph, most=500)
        if costs is None:
            continue
        search = EagerSearch(graph)
        num_graphs += 1
        floor = search.floor.peak_bytes
        num_floors += floor == min(peak for peak, _ in costs)
        for budget in {peak for peak, _ in costs if floor <= peak}:
            best = min(extra_s for peak, extra_s in costs if floor <= peak <= budget)
            num_plans += 1
            num_best += search.plan(budget).extra_s <= best + 1e-9
    assert num_floors >= 0.95 * num_graphs
    assert num_best >= 0.97 * num_plans


@pytest.mark.parametrize(("dispatch_s", "expected"), [(0.0, (2,)), (1 / 16, (2,)), (4.0, ())])
def test_regions_retain_what_hooks_see_if_it_is_worth_the_dispatch(
    dispatch_s: float, expected: tuple[int, ...]
) -> None:
    """The first op of a block takes long, and what it makes is saved by nobody; the bound knows that."""
    graph = hidden_wide_narrow(2, hidden_s=2.0)
    graph = replace(graph, hardware=replace(graph.hardware, dispatch_s=dispatch_s))
    costs, search = all_costs(graph, most=1000), EagerSearch(graph)
    assert costs is not None
    kept: list[tuple[int, ...]] = []
    for budget in {peak for peak, _ in costs if search.floor.peak_bytes <= peak <= search.plain.peak_bytes}:
        best, bound_s = min(extra_s for peak, extra_s in costs if peak <= budget), search.lower_bound_s(budget)
        plan = search.plan(budget)
        assert bound_s <= best + 1e-9 and plan.extra_s == pytest.approx(best), budget
        if bound_s > best - 1e-6:
            kept += [region.keep_ops for region in plan.regions]
    assert expected in kept and not any(0 in ops for ops in kept)
    assert expected or not any(kept)


def test_no_candidate_retains_what_no_hook_sees() -> None:
    """With host memory or without, also between two plans of a chain."""
    graph = hidden_wide_narrow(6, hidden_s=2.0)
    hardware = replace(graph.hardware, dispatch_s=1 / 64, link_bytes_per_s=20.0 * 4096)
    graph = replace(graph, hardware=hardware)
    num_retaining = 0
    for host in (0, 1 << 30):
        search = EagerSearch(graph, host)
        for budget in budgets_of(search, 20):
            assert_plan_refereed(graph, search.plan(budget))
        for each, _, _ in search._all_paths():
            for number in range(each.stops[-1] + 1):
                regions = each.regions(number)
                num_retaining += any(regions.values())
                assert graph.retainable.missing(regions) == {}
    assert num_retaining > 100


def test_the_bound_counts_what_the_link_carries_while_a_plan_loses_time() -> None:
    """Every plan with moves of the whole search is above the bound for its peak."""
    search = searched("gpt_dropout", host=1 << 30)
    for budget in budgets_of(search, 8):
        plan = search.plan(budget)
        assert search.lower_bound_s(plan.peak_bytes) <= plan.extra_s + 1e-12


# Monotone


def assert_monotone(search: EagerSearch | TwoLineSearch, count: int = 24) -> None:
    plans = [search.plan(budget) for budget in budgets_of(search, count)]
    for smaller, larger in pairwise(plans):
        assert smaller.peak_bytes <= larger.peak_bytes
        assert smaller.extra_s >= larger.extra_s
        assert smaller.lower_bound_s >= larger.lower_bound_s - 1e-12
    assert all(plan.peak_bytes <= plan.budget_bytes for plan in plans)


@pytest.mark.parametrize("seed", sweep(range(40), keep=2))
def test_monotone_on_random_steps(seed: int) -> None:
    assert_monotone(EagerSearch(larger(seed)))


@pytest.mark.parametrize("name", MODELS)
def test_monotone_on_models(name: str) -> None:
    assert_monotone(searched(name))


def test_monotone_with_host_memory() -> None:
    assert_monotone(searched("gpt_dropout", host=1 << 20))


def test_a_search_for_many_budgets_finds_what_one_for_each_does() -> None:
    search = searched("unet")
    for budget in budgets_of(search, 4)[:2]:
        assert search.plan(budget) == lowtide.solve(search.graph, budget, time_limit_s=1e6)


# The ends


def test_nothing_to_do_at_the_plain_peak() -> None:
    graph = traced("gpt_dropout")
    plain = simulate(graph).peak_bytes
    for more in (0, 1, 10**12):
        plan = lowtide.solve(graph, plain + more)
        assert not plan.regions and not plan.moves
        assert plan.extra_s == plan.lower_bound_s == plan.gap == plan.slowdown == 0
        assert plan.peak_bytes == plan.plain_peak_bytes == plain
    assert lowtide.solve(graph, plain - 1).regions


@pytest.mark.parametrize("host", sweep(["1MiB", 0], keep=1))
def test_below_the_floor(host: int | str) -> None:
    graph = traced("gpt_dropout")
    with pytest.raises(InfeasibleBudgetError) as caught:
        lowtide.solve(graph, 1 << 20, host=host)
    floor = caught.value.floor_bytes
    message = str(caught.value)
    assert "budget 1.0 MiB is below this step's floor of" in message
    assert "parameters, gradients, optimizer state" in message
    assert "runs its" in message and "Raise the budget" in message
    assert ("allow offload" in message) == (not host)
    search = searched("gpt_dropout", lowtide.units.parse_bytes(host))
    assert search.plan(floor).peak_bytes == floor
    with pytest.raises(InfeasibleBudgetError):
        search.plan(floor - 1)


def test_a_step_that_nothing_can_be_done_about() -> None:
    op = Op("mm", -1, 1.0, 0, (0,), (1,))
    values = (Value(100, "parameter", "w", -1, 1), Value(4, "activation", "y", 0, 1))
    graph = StepGraph((op,), 1, values, (), (), Hardware("test"))
    assert lowtide.solve(graph, 104) == replace(lowtide.solve(graph, 105), budget_bytes=104)
    with pytest.raises(InfeasibleBudgetError, match="floor of 104 B") as caught:
        lowtide.solve(graph, 103)
    assert caught.value.floor_bytes == 104


def test_an_empty_step() -> None:
    graph = StepGraph((), 0, (), (), (), Hardware("test"), other_bytes=5)
    assert lowtide.solve(graph, 5).peak_bytes == 5
    with pytest.raises(InfeasibleBudgetError):
        lowtide.solve(graph, 4)


# The same every time

_ELSEWHERE = """
import sys, lowtide
graph = lowtide.StepGraph.from_json(sys.stdin.read())
print(lowtide.solve(graph, int(sys.argv[1]), host=int(sys.argv[2]), time_limit_s=1e6).to_json())
"""


@pytest.mark.slow  # test_two_line_search compares plans of two processes too
def test_the_same_plan_in_another_process() -> None:
    graph, host = traced("unet"), 1 << 20
    budget = budgets_of(searched("unet", host), 3)[1]
    first = lowtide.solve(graph, budget, host=host, time_limit_s=1e6).to_json()
    assert searched("unet", host).plan(budget).to_json() == first
    source = str(Path(lowtide.__file__).parents[1])
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": source}
    command = [sys.executable, "-c", _ELSEWHERE, str(budget), str(host)]
    told = subprocess.run(
        command, input=graph.to_json(), capture_output=True, text=True, check=True, env=environment
    ).stdout
    assert told.strip() == first


# Time limits


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_tiny_time_limit_gives_a_plan_all_the_same(share: float) -> None:
    search = searched("gpt_dropout")
    floor, plain = search.floor.peak_bytes, search.plain.peak_bytes
    budget = int(floor + share * (plain - floor))
    plan = lowtide.solve(search.graph, budget, time_limit_s=1e-9)
    assert plan.peak_bytes <= budget
    assert 0 <= plan.lower_bound_s <= plan.extra_s
    assert search.plan(budget).extra_s <= plan.extra_s


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan])
def test_no_time_at_all(seconds: float) -> None:
    with pytest.raises(ValueError, match="time_limit_s"):
        lowtide.solve(chain([1, 2]), 100, time_limit_s=seconds)


# Memory on the host


@pytest.mark.parametrize("host", sweep(["64KiB", "1GiB"], keep=1))
def test_host_memory_is_kept_to_and_makes_nothing_slower(host: str) -> None:
    graph, without, most = traced("gpt_dropout"), searched("gpt_dropout"), lowtide.units.parse_bytes(host)
    for budget in budgets_of(without, 4):
        plan = searched("gpt_dropout", most).plan(budget)
        assert plan.host_bytes <= most
        assert plan.extra_s <= without.plan(budget).extra_s
        assert_plan_refereed(graph, plan)


@pytest.mark.usefixtures("quick_search")
def test_host_memory_is_used() -> None:
    """A link that carries a layer's values in no time: moving beats recomputing."""
    graph = traced("gpt_dropout")
    graph = replace(graph, hardware=replace(graph.hardware, link_bytes_per_s=1e15, move_s=0.0))
    plain = simulate(graph).peak_bytes
    plan = lowtide.solve(graph, plain - (1 << 20), host="1GiB")
    assert plan.moves and plan.host_bytes > 0
    assert {move.to for move in plan.moves} == {"host"}
    assert plan.extra_s < 0.1 * lowtide.solve(graph, plain - (1 << 20)).extra_s


def test_nowhere_to_move_values_to() -> None:
    graph = chain([10, 20, 30])
    with pytest.raises(PlanError, match=r"no link to host memory.*H100"):
        lowtide.solve(graph, 70, host="1GiB")
    with pytest.raises(PlanError, match="no link to host memory"):
        lowtide.sweep(graph, host=1)


# Choices, and values that must not be held


@pytest.mark.parametrize("seed", sweep(range(30), keep=3))
def test_choices_are_in_regions_like_any_other_op_and_changed_values_never_held(seed: int) -> None:
    graph = larger(seed)
    ops = list(graph.ops)
    for index in range(0, graph.num_forward, 5):
        ops[index] = replace(ops[index], flags=("index",))
    graph = replace(graph, ops=tuple(ops))
    keepable, search = keepable_ops(graph), EagerSearch(graph)
    for budget in budgets_of(search, 6):
        plan = search.plan(budget)
        recomputed: set[int] = set()
        segmented = plan.segmented(graph)
        for number, region in plan.calls(graph).items():
            call = segmented.calls[number]
            assert {call.first + op for op in region.keep_ops} <= keepable
            recomputed |= set(range(call.first, call.end))
        chosen = {graph.path_of(op) for op in recomputed if "index" in graph.ops[op].flags}
        assert chosen <= set(plan.choosers)  # by their modules: other calls of which may be kept
        assert recomputed or budget == search.plain.peak_bytes


# The whole curve


@pytest.mark.usefixtures("quick_search")
def test_sweep() -> None:
    graph = traced("gpt_dropout")
    frontier = lowtide.sweep(graph)
    assert len(frontier.plans) == 16
    assert frontier.plans[0].budget_bytes == frontier.floor_bytes == frontier.plans[0].peak_bytes
    assert frontier.plans[-1].budget_bytes == frontier.plain_peak_bytes and frontier.plans[-1].extra_s == 0
    names = [reference.name for reference in frontier.references]
    assert names == ["nothing", "a checkpoint per block", "every second block", "selective, all matmuls kept"]
    text = str(frontier)
    assert all(name in text for name in names) and "predicted" in text
    assert len(text.splitlines()) == 1 + 16 + 4


@pytest.mark.parametrize("name", MODELS)
def test_never_slower_than_what_people_do_by_hand(name: str) -> None:
    for reference in lowtide.sweep(traced(name), []).references:
        plan = searched(name).plan(reference.peak_bytes)
        assert plan.extra_s <= reference.extra_s, reference.name


@pytest.mark.usefixtures("quick_search")
def test_sweep_of_given_budgets() -> None:
    graph = traced("gpt_dropout")
    plain = simulate(graph).peak_bytes
    frontier = lowtide.sweep(graph, [plain, 1, int(plain * 0.99), "1TiB"])
    assert [plan.budget_bytes for plan in frontier.plans] == [int(plain * 0.99), plain, 1 << 40]
    assert frontier.plans[0] == lowtide.solve(graph, int(plain * 0.99))
    assert frontier.step_s == graph.step_s
    shares = lowtide.sweep(graph, ["50%"])
    assert shares.plans[0].budget_bytes == graph.hardware.memory_bytes // 2


def test_sweep_of_a_step_without_blocks() -> None:
    frontier = lowtide.sweep(chain([10]))
    assert [reference.name for reference in frontier.references] == ["nothing"]
    assert str(frontier)


# Bad input


@pytest.mark.parametrize("budget", [0.5, "12 apples", -1, "120%", True, None, "0.5", "", b"1GiB"])
def test_budgets_that_are_none(budget: object) -> None:
    graph = replace(chain([10, 20]), hardware=Hardware("test", memory_bytes=1 << 30))
    with pytest.raises(UnitError):
        lowtide.solve(graph, budget)  # type: ignore[arg-type]
    with pytest.raises(UnitError):
        lowtide.sweep(graph, [budget])  # type: ignore[list-item]


def test_a_share_of_an_unknown_device() -> None:
    with pytest.raises(UnitError, match="the total it is a share of is not known"):
        lowtide.solve(chain([1, 2]), "80%")


@pytest.mark.parametrize("host", [0.5, "12 apples", -1, True, None])
def test_host_sizes_that_are_none(host: object) -> None:
    with pytest.raises(UnitError):
        lowtide.solve(chain([10, 20]), 1, host=host)  # type: ignore[arg-type]


@pytest.mark.parametrize("graph", [None, "graph", {}, 3])
def test_no_graph(graph: object) -> None:
    with pytest.raises(TypeError, match=r"StepGraph is needed, from lowtide\.trace"):
        lowtide.solve(graph, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"StepGraph is needed, from lowtide\.trace"):
        lowtide.sweep(graph)  # type: ignore[arg-type]


def test_graphs_that_cannot_have_run() -> None:
    graph = chain([10, 20, 30])
    ops = list(graph.ops)
    ops[0] = replace(ops[0], inputs=(2,))  # what the next op makes: a cycle
    with pytest.raises(GraphError, match="before anything made it"):
        replace(graph, ops=tuple(ops))
    ops[0] = replace(ops[0], inputs=(99,))
    with pytest.raises(GraphError, match="before anything made it"):
        replace(graph, ops=tuple(ops))
