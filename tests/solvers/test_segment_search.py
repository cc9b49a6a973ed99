"""Segments, runs of calls that are recomputed as one region: as data, simulated, and as the solver cuts them."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from brute import all_costs_with_segments
from graphs import chain, drawing, random_graph, random_plan, repeated_blocks, seldom_saved
from lowtide.errors import GraphError, InfeasibleBudgetError, PlanError
from lowtide.graph import StepGraph
from lowtide.graph.segments import Span, runs, with_segments
from lowtide.graph.step_graph import check
from lowtide.graph.time_lines import line_of
from lowtide.plans import Plan, Recompute
from lowtide.simulator import simulate
from lowtide.simulator.eager_events import EagerEvents
from lowtide.simulator.eager_intervals import EagerIntervals
from lowtide.solvers.baselines import all_blocks, baseline_plans, recomputes
from lowtide.solvers.eager_search import EagerSearch
from referee import replay
from sweeps import sweep

UNIT = 16  # bytes that pass from one layer of a chain to the next


def some_graph(seed: int) -> StepGraph:
    """A small step with runs of calls, most of the time."""
    rng = random.Random(seed)
    if seed % 4 == 0:
        graph = chain([rng.randint(1, 30) for _ in range(rng.randint(2, 12))], gradient_bytes=3)
    elif seed % 4 == 1:
        graph = repeated_blocks(seed, num_blocks=rng.randint(2, 6))
    elif seed % 4 == 2:
        graph = random_graph(seed, num_ops=25)
    else:
        graph = seldom_saved(seed, num_blocks=4)
    hardware = replace(graph.hardware, region_s=0.25, dispatch_s=0.125)
    return drawing(replace(graph, hardware=hardware), seed)


def some_spans(rng: random.Random, run: tuple[int, ...]) -> list[Span]:
    """Parts of a run, and parts of these."""
    if len(run) < 2:
        return []
    cuts = sorted({0, len(run), *(rng.randint(1, len(run) - 1) for _ in range(rng.randint(1, 3)))})
    parts = [run[a:b] for a, b in pairwise(cuts)]
    found = [(part[0], part[-1]) for part in parts if len(part) > 1 and rng.random() < 0.8]
    return found + [span for part in parts for span in some_spans(rng, part)]


def segment(names: list[str]) -> Recompute:
    return Recompute(names[0], more=tuple((name, 0) for name in names[1:]))


def layers(first: int, end: int) -> list[str]:
    return [f"layers.{index}" for index in range(first, end)]


# As data


def test_a_segment_is_a_call_around_its_calls() -> None:
    graph = chain([10] * 6)
    segmented = with_segments(graph, [(2, 5), (2, 3)])
    assert [(call.path, call.parent) for call in segmented.calls] == [
        ("", -1),
        ("layers.0", 0),
        ("layers.1 ... layers.4", 0),
        ("layers.1 ... layers.2", 2),
        ("layers.1", 3),
        ("layers.2", 3),
        ("layers.3", 2),
        ("layers.4", 2),
        ("layers.5", 0),
    ]
    outer = segmented.calls[2]
    assert (outer.kind, outer.inputs, outer.outputs) == ("Segment", graph.calls[2].inputs, graph.calls[5].outputs)
    assert segmented.fingerprint == graph.fingerprint
    assert segmented.names_of(3) == (("layers.1", 0), ("layers.2", 0))


def test_graphs_with_segments_are_valid_and_play_the_same_plain_step() -> None:
    num = 0
    for seed in range(120):
        graph, rng = some_graph(seed), random.Random(seed)
        spans = [span for run in runs(graph) for span in some_spans(rng, run)]
        segmented = with_segments(graph, spans)
        check(segmented)
        num += bool(spans)
        assert np.array_equal(EagerIntervals(graph, {}).total_bytes, EagerIntervals(segmented, {}).total_bytes)
    assert num > 60


def test_regions_of_a_segmented_graph_are_simulated_without_copying_its_ops() -> None:
    """Solvers simulate hundreds of such graphs, and a copy of the ops takes longer than the simulation."""
    segmented = with_segments(chain([10] * 6), [(2, 5)])
    assert not segmented.unreplayable
    assert EagerIntervals(segmented, {2: ()}).peak_bytes
    assert not {"ops", "saves"} & vars(segmented).keys()


def test_runs_end_where_something_runs_between_two_calls_or_a_call_cannot_be_replayed() -> None:
    graph = chain([10] * 6)
    assert runs(graph) == [(1, 2, 3, 4, 5, 6)]
    calls = list(graph.calls)
    calls[3] = replace(calls[3], changes="past")
    assert runs(replace(graph, calls=tuple(calls))) == [(1, 2), (4, 5, 6)]
    skip = [*graph.calls]
    skip[5] = replace(skip[5], inputs=(*skip[5].inputs, graph.calls[2].outputs[0]))  # of a call further back
    assert runs(replace(graph, calls=tuple(skip))) == [(1, 2, 3, 4), (5, 6)]
    ops = [replace(op, call=0) if op.call == 3 else op for op in graph.ops]
    saves = [replace(save, call=0) if save.call == 3 else save for save in graph.saves]
    empty = [replace(call, first=call.end) if index == 3 else call for index, call in enumerate(graph.calls)]
    glued = replace(graph, calls=tuple(empty), ops=tuple(ops), saves=tuple(saves))
    assert runs(glued) == [(1, 2), (3, 4, 5, 6)]  # the op that was in call 3 runs before it


@pytest.mark.parametrize("spans", [[(1, 3), (2, 4)], [(1, 1)], [(0, 3)]], ids=["overlap", "one", "model"])
def test_spans_that_are_no_segments_are_refused(spans: list[Span]) -> None:
    with pytest.raises(GraphError):
        with_segments(chain([10] * 6), spans)


def test_plans_with_segments_go_through_json() -> None:
    graph = chain([UNIT] * 12)
    plan = lowtide.solve(graph, 7 * UNIT)
    assert any(region.more for region in plan.regions)
    assert Plan.from_json(plan.to_json()) == plan
    outer = segment(layers(1, 5))
    nested = Plan(regions=(outer, Recompute("layers.1"), segment(layers(2, 4))))
    assert Plan.from_json(nested.to_json()) == nested


@pytest.mark.parametrize("more", ["layers.2", [["layers.2"]], [["layers.2", -1]], [[2, "layers.2"]], [None], 3])
def test_damaged_segments_are_refused(more: object) -> None:
    content = json.loads(Plan(regions=(Recompute("layers.1"),)).to_json())
    content["regions"][0]["more"] = more
    with pytest.raises(PlanError, match="damaged plan"):
        Plan.from_json(json.dumps(content))


def test_the_same_segment_twice_is_refused() -> None:
    plan = Plan(regions=(segment(layers(1, 4)), segment(layers(1, 4))))
    with pytest.raises(PlanError, match="twice"):
        Plan.from_json(plan.to_json())
    with pytest.raises(PlanError, match=r"layers.1 ... layers.3 is recomputed twice"):
        simulate(chain([10] * 6), plan)


@pytest.mark.parametrize("names", [["layers.1", "layers.3"], ["layers.2", "layers.1"], ["layers.1", "layers.9"]])
def test_segments_that_a_step_does_not_have_are_refused(names: list[str]) -> None:
    with pytest.raises(PlanError, match="another model"):
        simulate(chain([10] * 6), Plan(regions=(segment(names),)))


def test_plans_name_segments() -> None:
    graph = chain([UNIT] * 12)
    plan = lowtide.solve(graph, 7 * UNIT)
    name = next(region.name for region in plan.regions if region.more)
    assert " ... layers." in name
    assert name in str(plan)
    assert {row.region for row in plan.rows} & {region.name for region in plan.regions if region.more}
    inside = next(region for region in plan.regions if region.more).more[0][0]
    assert f"{name} is recomputed in the backward as one" in plan.explain(inside)
    assert {module.path for module in plan.modules} >= {path for region in plan.regions for path in region.paths}


# Simulated


@pytest.mark.parametrize("first", sweep(range(0, 160, 40), keep=1))
def test_three_simulators_agree_on_segments(first: int) -> None:
    num = 0
    for seed in range(first, first + 40):
        graph, rng = some_graph(seed), random.Random(seed)
        spans = [span for run in runs(graph) for span in some_spans(rng, run)]
        segmented = with_segments(graph, spans)
        names = {(call.path, segmented.nths[index]): index for index, call in enumerate(segmented.calls)}
        drawn = random_plan(seed, segmented)
        regions = {names[region.path, region.nth]: region.keep_ops for region in drawn.regions}
        plan = Plan(recomputes(segmented, regions))
        num += any(region.more for region in plan.regions)
        timeline, step = simulate(graph, plan), EagerEvents(graph, plan)
        step.play()
        for name, column in step.columns().items():
            assert np.array_equal(column, getattr(timeline, name)), f"graph {seed}: {name}"
        verdict = replay(graph, plan)
        assert (verdict.peak_bytes, verdict.engine_s) == (timeline.peak_bytes, timeline.engine_s), f"graph {seed}"
    assert num > 10


def test_a_segment_is_entered_as_often_as_it_has_calls() -> None:
    graph = drawing(chain([10] * 6), 0, share=1.0)
    graph = replace(graph, hardware=replace(graph.hardware, region_s=0.5))
    timeline = simulate(graph, Plan(regions=(segment(layers(1, 4)),)))
    assert timeline.engine_s == 3 * 0.5
    assert timeline.replayed_s == 3.0


# The solver on chains of equal layers


@cache
def searched(num_layers: int) -> EagerSearch:
    return EagerSearch(chain([UNIT] * num_layers), time_limit_s=60)


def by_hand(num_layers: int, num_parts: int, *, keeps_last: bool, nested: bool) -> Plan:
    """A chain cut as by torch's `checkpoint_sequential`; `nested`, with a checkpoint on each layer besides."""
    size = num_layers // num_parts
    starts = [size * part for part in range(num_parts)]
    parts = [layers(a, b) for a, b in zip(starts, [*starts[1:], num_layers], strict=True)]
    regions = [segment(part) for part in parts[: num_parts - keeps_last] if len(part) > 1]
    regions += [Recompute(name) for name in layers(0, num_layers)] if nested else []
    return Plan(regions=tuple(regions))


@pytest.mark.parametrize("num_layers", sweep([16, 64, 144], keep=2))
def test_chains_are_cut_at_least_as_well_as_by_hand(num_layers: int) -> None:
    search = searched(num_layers)
    root = round(num_layers**0.5)
    assert search.floor.peak_bytes < root * UNIT + 2 * UNIT
    for num_parts in {2, root // 2, root, root + 1, 2 * root}:
        for keeps_last, nested in ((True, False), (False, False), (False, True)):
            hand = simulate(search.graph, by_hand(num_layers, num_parts, keeps_last=keeps_last, nested=nested))
            assert search.floor.peak_bytes <= hand.peak_bytes
            plan = search.plan(hand.peak_bytes)
            assert plan.peak_bytes <= hand.peak_bytes and plan.extra_s <= hand.extra_s


@cache
def rotor(num_layers: int, room: int) -> float:
    """The least that is replayed of a chain of layers that each save their input, with room for so many inputs.

    The first layer is run once and its input held, or the first few are a segment: only their input is held, until they
    are run again with all of the room (Beaumont et al.; Griewank and Walther).
    """
    if room < 1 or num_layers == 1:
        return 0.0 if room >= 1 else float("inf")
    segments = (k + rotor(k, room) + rotor(num_layers - k, room - 1) for k in range(1, num_layers))
    return min(rotor(num_layers - 1, room - 1), *segments)


@pytest.mark.parametrize("num_layers", [16, 64])
def test_chains_are_cut_nearly_as_well_as_can_be(num_layers: int) -> None:
    search = searched(num_layers)
    floor = search.floor.peak_bytes
    for room in range(floor // UNIT - 1, num_layers + 1):
        plan = search.plan((room + 1) * UNIT + 1)  # a gradient, and a byte for the batch
        assert rotor(num_layers, room) <= plan.extra_s + 1e-9
        assert plan.extra_s <= 1.03 * rotor(num_layers, room), f"room for {room}"


@pytest.mark.parametrize("num_layers", sweep([64, 144], keep=1))
def test_segments_are_nested_sixteen_deep_at_most(num_layers: int) -> None:
    """Each is replayed from inside the replay of the one around it: the host's stack is not without end."""
    segmented = searched(num_layers).floor.plan.segmented(searched(num_layers).graph)
    assert 2 < max(segmented.depths) <= 16 + 2  # below the model, and a layer inside


def test_a_loss_that_saves_the_output_of_the_last_layer_counts_it() -> None:
    """The programme held it with the last layer, so that a segment at the end of the chain seemed to drop it."""
    layer = [nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(16)]
    model = nn.Sequential(OrderedDict(layers=nn.Sequential(*layer)))
    graph = lowtide.trace(model, lambda x: model(x).square().mean(), torch.randn(1024, 128), mode="fake", device="H100")
    graph = line_of(graph, 0.0)
    # A plan of rotor's (bench/rotor.py), in the lowest eighth of the range.
    spans = [(0, 12), (0, 7), (0, 4), (0, 2), (4, 6), (7, 11), (7, 10), (7, 9), (12, 16), (12, 15), (12, 14)]
    regions = [segment(layers(*span)) for span in spans] + [Recompute(f"layers.{k}") for k in (2, 4, 7, 12)]
    hand = simulate(graph, Plan(regions=tuple(regions)))
    assert lowtide.solve(graph, hand.peak_bytes).extra_s <= hand.extra_s


def test_the_floor_grows_slowly() -> None:
    """Of a chain with four times as many layers; a checkpoint on each would need four times as much."""
    assert searched(64).floor.peak_bytes <= 2 * searched(16).floor.peak_bytes


@pytest.mark.parametrize("seed", sweep(range(4), keep=2))
def test_larger_budgets_are_never_slower_and_smaller_ones_never_larger(seed: int) -> None:
    rng = random.Random(seed)
    search = EagerSearch(
        chain([rng.randint(5, 60) for _ in range(24)], gradient_bytes=rng.choice((0, 7))), time_limit_s=60
    )
    floor, plain = search.floor.peak_bytes, search.plain.peak_bytes
    plans = [search.plan(budget) for budget in range(floor, plain + 1, max((plain - floor) // 40, 1))]
    assert any(region.more for region in plans[0].regions)
    for small, large in pairwise(plans):
        assert small.peak_bytes <= large.peak_bytes and small.extra_s >= large.extra_s
        assert replay(search.graph, large).peak_bytes == large.peak_bytes


def test_infeasible_budgets_name_the_floor_of_segments() -> None:
    search = searched(16)
    with pytest.raises(InfeasibleBudgetError) as caught:
        search.plan(search.floor.peak_bytes - 1)
    assert caught.value.floor_bytes == search.floor.peak_bytes == lowtide.sweep(search.graph).floor_bytes


def test_segments_go_with_values_that_are_moved() -> None:
    graph = chain([1 << 17] * 16, link_bytes_per_s=float(1 << 16))
    alone, search = EagerSearch(graph), EagerSearch(graph, host=1 << 30)
    assert search.floor.peak_bytes <= alone.floor.peak_bytes
    moved = [plan for plan in search._segmented if plan.share]
    assert moved
    for found in moved:
        timeline = search.timeline_of(found)
        assert any(region.more for region in timeline.plan.regions)
        assert replay(graph, timeline.plan).peak_bytes == timeline.peak_bytes == found.peak_bytes
    assert any(search.timeline_of(found).plan.moves for found in moved)


@pytest.mark.parametrize(
    "seed", sweep([0, 1, 8, 9, 19, 23, 110, 114, *range(2, 8), *range(10, 16), 27, *range(118, 140, 4)], keep=8)
)
def test_the_bound_holds_for_all_plans_with_segments(seed: int) -> None:
    rng = random.Random(seed)
    if seed < 8:
        graph = chain([rng.randint(1, 30) for _ in range(rng.randint(2, 4))], gradient_bytes=rng.choice((0, 3)))
    elif seed < 16:
        graph = repeated_blocks(seed, num_blocks=2)
    else:
        graph = seldom_saved(seed, num_blocks=3, num_ops=3, share_saved=0.5)
    if seed > 100:  # with indices, which regions and segments have to retain
        ops, at = list(graph.ops), rng.randrange(graph.num_forward)
        ops[at] = replace(ops[at], flags=(*ops[at].flags, "index"))
        graph = replace(graph, ops=tuple(ops))
    region_s, dispatch_s = rng.choice((0, 0.25)), rng.choice((0, 0.125))
    graph = replace(graph, hardware=replace(graph.hardware, region_s=region_s, dispatch_s=dispatch_s))
    costs = all_costs_with_segments(graph, most=2_000)
    if costs is None:
        pytest.skip("too many plans")
    search = EagerSearch(graph)
    for budget in sorted({peak for peak, _ in costs}):
        best = min(extra_s for peak, extra_s in costs if peak <= budget)
        assert search.lower_bound_s(budget) <= best + 1e-9, f"budget {budget}"
        if budget >= search.floor.peak_bytes:
            assert search.plan(budget).extra_s >= best - 1e-9, f"budget {budget}"
    if seed < 8:
        assert search.floor.peak_bytes == min(peak for peak, _ in costs)


def test_steps_without_runs_have_no_segments() -> None:
    graph = chain([10])
    assert runs(graph) == []
    assert EagerSearch(graph)._segmented == []


def test_checkpoints_on_any_number_of_first_or_last_blocks_are_baselines() -> None:
    """As `checkpoint_sequential` in many parts: 20 single blocks have a baseline for each number of them."""
    graph = repeated_blocks(0, num_blocks=20)
    blocks = all_blocks(graph)
    assert len(blocks) == 20
    found = {tuple(regions) for _, regions in baseline_plans(graph, EagerSearch(graph).nesting)}
    for number in range(1, 21):
        assert {tuple(blocks[:number]), tuple(blocks[-number:])} <= found
