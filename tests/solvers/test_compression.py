"""`solve` with codecs: against brute force and the referee, monotone in the budget, off by default, marked in plans.

Values of the steps here have some thousand elements. Codecs work on chunks of millions, and on one that is not full
they need several times its bytes; with chunks as small as the values, compression pays here too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from hypothesis import example, given, settings
from hypothesis import strategies as st

import lowtide
import lowtide.graph.codec_costs
from brute import all_costs, codec_choices
from graphs import chain, random_graph, repeated_blocks, with_floats
from lowtide import InfeasibleBudgetError, Plan, PlanError, StepGraph
from lowtide.graph.codec_costs import CODEC_COSTS
from lowtide.plans import Move, Recompute
from lowtide.plans.plan_text import rows_of
from lowtide.solvers.compression import CompressionOptions
from lowtide.solvers.eager_search import EagerSearch
from lowtide.tracing.devices import EngineCosts
from referee import assert_plan_refereed, budgets_of
from sweeps import sweep

CODECS = ("int8", "float16")


@pytest.fixture(autouse=True)
def small_chunks() -> Iterator[None]:
    before, lowtide.graph.codec_costs.CHUNK = lowtide.graph.codec_costs.CHUNK, 256
    yield
    lowtide.graph.codec_costs.CHUNK = before


def timed(graph: StepGraph) -> StepGraph:
    return replace(graph, step_s=sum(op.seconds for op in graph.ops))


def tiny(seed: int) -> StepGraph:
    graph = repeated_blocks(seed, num_blocks=2) if seed % 3 == 0 else random_graph(seed, num_ops=7)
    return timed(with_floats(seed, graph))


def larger(seed: int) -> StepGraph:
    graph = repeated_blocks(seed, num_blocks=6) if seed % 2 else random_graph(seed, num_ops=60)
    return timed(with_floats(seed, graph))


@cache
def stack() -> StepGraph:
    """Blocks that take long and memory that is fast: values are compressed before anything is recomputed."""
    graph = with_floats(5, repeated_blocks(5, num_blocks=6))
    ops = tuple(replace(op, seconds=op.seconds + 1) for op in graph.ops)
    values = tuple(replace(value, item_bytes=4, row_length=64) for value in graph.values)
    hardware = replace(graph.hardware, memory_bytes_per_s=2.0**40, link_bytes_per_s=0.0, block_bytes=1)
    return timed(replace(graph, ops=ops, values=values, hardware=hardware))


@cache
def traced() -> StepGraph:
    """A small GPT on a device whose memory is a thousand times as fast as it is, and whose host takes no time."""
    job = zoo.make("gpt_dropout")
    del job.model.layers[2]
    graph = lowtide.trace(job.model, job.loss_fn, *job.batch, device="H100")
    ops = tuple(replace(op, host_s=0.0) for op in graph.ops)
    hardware = replace(graph.hardware, memory_bytes_per_s=3.35e15, **EngineCosts()._asdict())
    return replace(graph, ops=ops, hardware=hardware, step_s=sum(op.seconds for op in ops))


@cache
def searched(*codecs: str) -> EagerSearch:
    """The search on `stack`; what it has found for one test it need not find for the next."""
    return EagerSearch(stack(), time_limit_s=1e6, lossy=codecs)


def lossy_plan() -> Plan:
    search = searched("int8")
    plan = search.plan(budgets_of(search, 5)[2])
    assert plan.is_lossy
    return plan


# Against brute force


@pytest.mark.parametrize("batch", sweep([1, 0, 2, 3, 4], keep=1))
def test_the_certificate_against_brute_force(batch: int) -> None:
    """No plan is faster than the bound, nor any that was found faster than the best; most that were are the best."""
    num_lossy = num_plans = num_best = num_floors = num_graphs = 0
    for seed in range(200 + 40 * batch, 240 + 40 * batch):
        graph, codecs = tiny(seed), ("int8",) if seed % 2 else ("int4", "float16")
        costs = all_costs(graph, most=1500, codecs=codecs)
        if costs is None or not codec_choices(graph, codecs):
            continue
        search = EagerSearch(graph, lossy=codecs)
        floor, plain = search.floor.peak_bytes, search.plain.peak_bytes
        peaks = {peak for peak, _ in costs}
        assert floor in peaks
        num_graphs += 1
        num_floors += floor == min(peaks)
        for budget in sorted(peak for peak in peaks if peak <= plain)[-12:]:
            best = min(extra_s for peak, extra_s in costs if peak <= budget)
            assert search.lower_bound_s(budget) <= best + 1e-9, f"graph {seed}, budget {budget}"
            if budget < floor:
                with pytest.raises(InfeasibleBudgetError):
                    search.plan(budget)
                continue
            plan = search.plan(budget)
            assert best <= plan.extra_s + 1e-9, f"graph {seed}, budget {budget}"
            num_plans += 1
            num_best += plan.extra_s <= best + 1e-9
            num_lossy += plan.is_lossy
    assert num_graphs >= 2 and num_lossy >= 1
    assert num_floors >= 0.9 * num_graphs and num_best >= 0.8 * num_plans


def test_what_may_be_compressed_is_what_brute_force_says() -> None:
    for seed in range(200):
        graph = tiny(seed)
        values = {choice[1][0] for choice in codec_choices(graph, ("int8",))}
        assert set(CompressionOptions(graph, ("int8",)).options) == values


# Against the referee, and monotone


@settings(max_examples=1, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([("int8",), CODECS, ("int4", "float8_e4m3")]), st.booleans())
@example(3773, ("int8",), False)  # a nested plan that is smaller than the floor
@example(5, ("int8",), False)  # a plan between the stops of a chain that is
def test_plans_are_monotone_and_refereed(seed: int, codecs: tuple[str, ...], moves: bool) -> None:
    graph = larger(seed)
    host = (1 << 18) * (moves and graph.hardware.link_bytes_per_s > 0)
    search, without = (EagerSearch(graph, host=host, time_limit_s=1000, lossy=each) for each in (codecs, ()))
    plans = [search.plan(budget) for budget in budgets_of(search, 8)]
    floor = search.floor.peak_bytes
    # What replays put off lives longer, so that a plan between two stops of a chain may be a little below both.
    assert 0.99 * floor <= plans[0].peak_bytes <= floor <= without.floor.peak_bytes
    for smaller, larger_one in pairwise(plans):
        assert smaller.peak_bytes <= larger_one.peak_bytes
        assert smaller.extra_s >= larger_one.extra_s
        assert smaller.lower_bound_s >= larger_one.lower_bound_s - 1e-12
    for plan in plans:
        assert_plan_refereed(graph, plan)
        assert search.lower_bound_s(plan.peak_bytes) <= plan.extra_s + 1e-12
        if plan.budget_bytes >= without.floor.peak_bytes:  # below it nothing bounds what is not to be had
            assert plan.lower_bound_s <= without.lower_bound_s(plan.budget_bytes) + 1e-12
            assert plan.extra_s <= without.plan(plan.budget_bytes).extra_s
    with pytest.raises(InfeasibleBudgetError):
        search.plan(int(0.99 * floor))


@pytest.mark.slow  # random steps are in the default run
@pytest.mark.parametrize("host", [1 << 20, 0])
def test_monotone_on_a_model(host: int) -> None:
    search = EagerSearch(traced(), host=host, time_limit_s=1000, lossy=CODECS)
    plans = [search.plan(budget) for budget in budgets_of(search, 4)]
    for smaller, larger_one in pairwise(plans):
        assert smaller.peak_bytes <= larger_one.peak_bytes and smaller.extra_s >= larger_one.extra_s
    for plan in plans[::2]:
        assert_plan_refereed(search.graph, plan)
    assert plans[0].is_lossy and not plans[-1].moves


# Used where it pays, and nowhere else


def test_compression_is_used_where_it_is_cheap() -> None:
    search, without = searched("int8"), searched()
    assert search.floor.peak_bytes <= without.floor.peak_bytes  # segments leave nothing behind to encode
    budget = budgets_of(without, 5)[3]
    plan = search.plan(budget)
    assert {(move.to, move.codec) for move in plan.moves} == {("device", "int8")}
    assert plan.extra_s < 0.1 * without.plan(budget).extra_s


def test_compression_is_not_used_where_it_is_dear() -> None:
    graph = replace(stack(), hardware=replace(stack().hardware, memory_bytes_per_s=1.0))
    search, without = EagerSearch(graph, lossy=("int8",)), EagerSearch(graph)
    for budget in budgets_of(without, 5):
        assert search.plan(budget).moves == () and search.plan(budget).regions == without.plan(budget).regions


def test_of_several_codecs_each_value_has_the_one_that_pays() -> None:
    """The quick one while there is room enough, the small one when there is not."""
    search = searched("float16", "int4")
    used = [{move.codec for move in search.plan(budget).moves} for budget in budgets_of(search, 8)]
    assert {"int4"} in used and used[-2] == {"float16"}


def test_encoded_values_cross_the_link() -> None:
    """Blocks that are long enough for a quarter of the bytes to leave, and not for all of them."""
    graph = stack()
    search = EagerSearch(
        replace(graph, hardware=replace(graph.hardware, link_bytes_per_s=2.0**15)), 1 << 22, lossy=("int8",)
    )
    plans = [search.plan(budget) for budget in budgets_of(search, 8)]
    places = {(move.to, move.codec) for plan in plans for move in plan.moves}
    assert ("host", "int8") in places
    for plan in plans:
        assert_plan_refereed(search.graph, plan)


def test_values_that_change_after_they_were_saved_are_left_alone() -> None:
    graph = stack()
    value = min(CompressionOptions(graph, ("int8",)).options)
    ops = list(graph.ops)
    last = graph.num_forward - 1
    ops[last] = replace(ops[last], mutates=(value,))
    assert value not in CompressionOptions(replace(graph, ops=tuple(ops)), ("int8",)).options


def test_statistics_are_left_alone() -> None:
    """Of a normalisation its output may be compressed, and never its means and deviations."""
    norm, batch = torch.nn.LayerNorm(2), torch.randn(4096, 2)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), norm, torch.nn.Linear(2, 2))
    graph = lowtide.trace(model, lambda x: model(x).square().mean(), batch, mode="fake")
    made = next(op.outputs for op in graph.ops if "native_layer_norm" in op.name)
    saved = {save.value for save in graph.saves}
    assert set(made) <= saved and all(graph.values[value].item_bytes == 4 for value in made)
    assert [value in CompressionOptions(graph, ("int8",)).options for value in made] == [True, False, False]


# Off unless asked for, and the same every time


def test_nothing_is_compressed_unless_asked_for() -> None:
    budget = budgets_of(searched(), 2)[0]
    plan = lowtide.solve(stack(), budget)
    assert not plan.is_lossy and plan.moves == ()
    assert plan == lowtide.solve(stack(), budget, lossy=None) == searched().plan(budget)


_ELSEWHERE = """
import sys, lowtide, lowtide.graph.codec_costs
lowtide.graph.codec_costs.CHUNK = 256
graph = lowtide.StepGraph.from_json(sys.stdin.read())
print(lowtide.solve(graph, int(sys.argv[1]), lossy=("int8", "float16")).to_json())
"""


@pytest.mark.slow  # test_two_line_search compares plans of two processes too
def test_the_same_plan_in_another_process() -> None:
    graph = stack()
    budget = budgets_of(searched(*CODECS), 5)[2]
    first = lowtide.solve(graph, budget, lossy=CODECS)
    assert first.is_lossy and first == lowtide.solve(graph, budget, lossy=list(CODECS))  # type: ignore[arg-type]
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(lowtide.__file__).parents[1])}
    command = [sys.executable, "-c", _ELSEWHERE, str(budget)]
    told = subprocess.run(
        command, input=graph.to_json(), capture_output=True, text=True, check=True, env=environment
    ).stdout
    assert told.strip() == first.to_json()


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_tiny_time_limit_gives_a_plan_all_the_same(share: float) -> None:
    search = searched(*CODECS)
    floor, plain = search.floor.peak_bytes, search.plain.peak_bytes
    budget = int(floor + share * (plain - floor))
    plan = lowtide.solve(search.graph, budget, lossy=CODECS, time_limit_s=1e-9)
    assert plan.peak_bytes <= budget and 0 <= plan.lower_bound_s <= plan.extra_s
    assert search.plan(budget).extra_s <= plan.extra_s


def test_sweep() -> None:
    frontier = lowtide.sweep(stack(), lossy="int8")
    assert frontier.floor_bytes <= searched().floor.peak_bytes
    assert any(plan.is_lossy for plan in frontier.plans)


# What a plan says


def test_a_lossy_plan_says_so() -> None:
    plan = lossy_plan()
    rows = [row for row in plan.rows if row.action == "compress"]
    assert len(rows) == len(plan.forms(stack())) > 0 and {row.codec for row in rows} == {"int8"}
    assert all(0 < row.stored_bytes < row.bytes and row.coding_s > 0 for row in rows)
    sizes = plan.bytes_by_action()
    assert sizes["compress"] == sum(row.bytes for row in rows)
    assert sum(sizes.values()) == stack().saved_bytes
    text = str(plan)
    assert f"{lowtide.units.format_bytes(sizes['compress'])} compressed" in text
    assert "lossy      by int8" in text and "gradients are approximate" in text
    assert Plan.from_json(plan.to_json()) == plan
    assert "gradients are approximate" not in str(searched().plan(plan.budget_bytes))


def test_explain_what_is_compressed() -> None:
    plan = lossy_plan()
    row = next(row for row in plan.rows if row.action == "compress")
    text = plan.explain(row.path)
    assert "is compressed on the device: int8 reduces it to " in text and "gradients are approximate" in text
    assert lowtide.units.format_bytes(row.stored_bytes) in text


def test_rows_of_encoded_moves() -> None:
    graph = chain([8192, 8192, 8192], link_bytes_per_s=1e6)
    values = tuple(replace(value, item_bytes=4) for value in graph.values)
    graph = replace(graph, values=values, hardware=replace(graph.hardware, memory_bytes_per_s=1e9))
    plan = Plan(moves=(Move("layers.1", codec="int8"), Move("layers.2", to="device", codec="float16")))
    rows = rows_of(graph, plan)
    assert [(row.action, row.codec, row.stored_bytes) for row in rows] == [
        ("host", "int8", 2048 + 64),
        ("compress", "float16", 4096 + 4),
    ]
    plan = replace(plan, rows=rows)
    assert "moved to host memory: its copy runs beside the compute, compressed: int8 reduces it to" in plan.explain(
        "layers.1"
    )
    integers = replace(graph, values=tuple(replace(value, item_bytes=0) for value in graph.values))
    assert [(row.action, row.codec) for row in rows_of(integers, plan)] == [("host", ""), ("keep", "")]


@pytest.mark.parametrize(
    ("moves", "is_lossy"),
    [((), False), ((Move("a"),), False), ((Move("a", codec="lossless"),), False), ((Move("a", codec="int4"),), True)],
)
def test_is_lossy(moves: tuple[Move, ...], is_lossy: bool) -> None:
    assert Plan((Recompute("b"),), moves).is_lossy == is_lossy


# Bad input


@pytest.mark.parametrize("lossy", ["int3", ("int8", "zip"), "", "none"])
def test_unknown_codecs(lossy: Any) -> None:
    with pytest.raises(ValueError, match="the codecs are 'float16', 'bfloat16', 'float8_e4m3'") as caught:
        lowtide.solve(stack(), "1GiB", lossy=lossy)
    assert all(repr(name) in str(caught.value) for name in CODEC_COSTS)
    with pytest.raises(ValueError, match="the codecs are"):
        lowtide.sweep(stack(), lossy=lossy)


@pytest.mark.parametrize("lossy", ["lossless", ("int8", "lossless")])
def test_lossless_is_not_lossy(lossy: Any) -> None:
    with pytest.raises(ValueError, match=r"'lossless' is not lossy.*Lossy codecs are 'float16'"):
        lowtide.solve(stack(), "1GiB", lossy=lossy)


@pytest.mark.parametrize("lossy", [8, True, ("int8", 8), {"int8"}, b"int8"])
def test_lossy_that_names_nothing(lossy: Any) -> None:
    with pytest.raises(ValueError, match="must be None, or the name of a codec, or several in a tuple"):
        lowtide.solve(stack(), "1GiB", lossy=lossy)


def test_no_codecs_at_all() -> None:
    with pytest.raises(ValueError, match="names no codec: leave it out"):
        lowtide.solve(stack(), "1GiB", lossy=())


def test_compiled_plans_compress_nothing() -> None:
    with pytest.raises(PlanError, match="compress no values: leave out lossy"):
        lowtide.solve(stack(), "1GiB", lossy="int8", engine="compiled")


def test_memory_of_unknown_speed() -> None:
    with pytest.raises(PlanError, match=r"speed of test's memory is not known.*device='H100'"):
        lowtide.solve(chain([8192, 8192]), "1GiB", lossy="int8")


def test_unknown_codecs_in_a_plan() -> None:
    with pytest.raises(PlanError, match="no codec is called 'int3': there are float16"):
        Move("layers.1", codec="int3")
    text = Plan(moves=(Move("a", codec="int8"),)).to_json().replace("int8", "int3")
    with pytest.raises(PlanError, match="no codec is called 'int3'"):
        Plan.from_json(text)
