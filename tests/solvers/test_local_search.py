"""The local search on small steps: sets of regions and the outputs they retain, against simulator and brute force."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import zoo

import lowtide
from graphs import random_graph, repeated_blocks, seldom_saved
from lowtide import StepGraph
from lowtide.simulator.eager_intervals import EagerIntervals
from lowtide.solvers import eager_search
from lowtide.solvers.eager_search import EagerSearch
from lowtide.solvers.local_search import LocalSearch, RetentionKnapsack
from lowtide.solvers.region_costs import keepable
from sweeps import sweep


def step(seed: int) -> StepGraph:
    return repeated_blocks(seed, num_blocks=3) if seed % 2 else random_graph(seed, num_ops=40)


def some_regions(graph: StepGraph, seed: int) -> list[int]:
    """Calls of which none is inside another, and that can be replayed."""
    found: list[int] = []
    for index, call in enumerate(graph.calls):
        is_inside = any(outer < index < graph.arrays.after[outer] for outer in found)
        if call.end > call.first and not is_inside and (index + seed) % 3:
            found.append(index)
    return found


def may_keep(graph: StepGraph, regions: list[int]) -> np.ndarray:
    """The ops whose outputs these regions, none inside another, could retain."""
    saved = [op for call in regions for op in range(graph.calls[call].first, graph.calls[call].end)]
    depths = {
        op: graph.depths[call] for call in regions for op in range(graph.calls[call].first, graph.calls[call].end)
    }
    found = np.zeros(graph.num_forward, dtype=bool)
    found[saved] = [graph.retainable.depths[op] >= depths[op] for op in saved]
    return found & keepable(graph) & (graph.arrays.seconds[: graph.num_forward] > 0)


def with_kept(graph: StepGraph, regions: list[int], ops: tuple[int, ...]) -> EagerIntervals:
    """Those outputs retained."""
    spans = {call: (graph.calls[call].first, graph.calls[call].end) for call in regions}
    held = {call: tuple(op - first for op in ops if first <= op < end) for call, (first, end) in spans.items()}
    return EagerIntervals(graph, held)


@pytest.mark.parametrize("seed", sweep(range(60), keep=8))
def test_what_holding_outputs_adds(seed: int) -> None:
    """Rows of several retained ops add up to what is played with them retained; events of their replays are no more.

    Where replays begin and end as they did; else there may be less.
    """
    graph = step(seed)
    regions = some_regions(graph, seed)
    played = with_kept(graph, regions, ())
    ops, sizes, starts, stops = played.keeping(may_keep(graph, regions))
    chosen = tuple(sorted(set(ops.tolist()))[seed % 2 :: 2])
    expected = played.total_bytes.copy()
    for op, size, start, stop in zip(ops, sizes, starts, stops, strict=True):
        expected[start:stop] += int(size) if op in chosen else 0
    still_there = ~((played.phases == 1) & np.isin(played.ops, chosen))
    held = with_kept(graph, regions, chosen)
    one, other = held.planned, played.planned
    if not (np.array_equal(one.stop, other.stop) and np.array_equal(one.replayed_at, other.replayed_at)):
        assert held.extra_s <= played.extra_s - sum(graph.ops[op].seconds for op in chosen) + 1e-9
        return
    assert held.ops.tolist() == played.ops[still_there].tolist()
    assert (held.total_bytes <= expected[still_there]).all()  # less where a replay would make what still lives
    if seed % 2:
        assert held.total_bytes.tolist() == expected[still_there].tolist()
    assert held.extra_s == pytest.approx(played.extra_s - sum(graph.ops[op].seconds for op in chosen))


def test_the_outputs_to_hold() -> None:
    """They fit, none of those left out would fit too, and they save what was estimated."""
    num_some = 0
    for seed in range(120):
        graph = step(seed)
        regions = some_regions(graph, seed)
        filling = RetentionKnapsack(with_kept(graph, regions, ()), may_keep(graph, regions))
        if not len(filling.ops):
            continue
        full = filling.peak_bytes + int(filling.weights.sum(axis=1).max())
        for budget in np.linspace(filling.peak_bytes, full, 5).astype(int).tolist():
            held = np.isin(filling.ops, filling.best(budget))
            room = budget - filling.used - filling.weights[:, held].sum(axis=1)
            assert (room >= 0).all()
            assert not (filling.weights[:, ~held] <= room[:, None]).all(axis=0).any()
            estimated_s = filling.reached_s(np.array([float(budget)]))[0]
            assert estimated_s == pytest.approx(filling.extra_s - filling.seconds[held].sum())
            num_some += 0 < held.sum() < len(held)
        assert held.all()
        assert filling.reached_s(np.array([filling.peak_bytes - 1.0]))[0] == np.inf
    assert num_some > 40


def test_what_is_retained_is_worth_the_dispatch() -> None:
    """Of all that a region would retain and nothing, what takes less is taken, if replays end no earlier for it."""
    taken = {"nothing": 0, "everything": 0}
    for seed in range(40):
        graph = seldom_saved(seed, share_saved=0.5)
        hardware = replace(graph.hardware, dispatch_s=1 / (1 << seed % 5), spare_s=seed % 3 / 8)
        graph = replace(graph, hardware=hardware)
        search = EagerSearch(graph)
        exploring = LocalSearch(graph, search.critical_points[0].pricing, search.nesting, 0, 100)
        (call,) = graph.calls_by_path["blocks.0"]
        held = tuple(op for op in range(8) if not graph.retainable.missing({call: (op,)}))  # not the last, saved one
        seconds = {
            name: EagerIntervals(graph, {call: ops}) for name, ops in {"nothing": (), "everything": held}.items()
        }
        found = exploring._worth_dispatch(call, (), held)
        assert EagerIntervals(graph, {call: found}).extra_s == min(each.extra_s for each in seconds.values())
        taken["everything" if found else "nothing"] += bool(held)
    assert min(taken.values()) >= 3, taken


@cache
def traced(name: str) -> StepGraph:
    job = zoo.make(name)
    return lowtide.trace(job.model, job.loss_fn, *job.batch, mode="fake", device="H100")


@pytest.mark.parametrize("name", ["hf_resnet"])
def test_a_model_of_few_layers_gains(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan is slower than without exploring; some are faster by more than half a percent of the step."""
    graph = traced(name)
    explored, without = (EagerSearch(graph, time_limit_s=1e6) for _ in range(2))
    with monkeypatch.context() as patch:
        patch.setattr(eager_search, "MOST_OPS", 0)
        floor, plain = without.floor.peak_bytes, without.plain.peak_bytes
        budgets = [floor + (plain - floor) * step // 12 for step in range(12)]
        slower = [without.plan(budget).extra_s for budget in budgets]
    gains = [extra_s - explored.plan(budget).extra_s for budget, extra_s in zip(budgets, slower, strict=True)]
    assert explored.floor.peak_bytes <= floor
    assert min(gains) >= 0 and max(gains) > 0.005 * graph.step_s
