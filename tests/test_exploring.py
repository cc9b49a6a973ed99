"""Regions explored on small steps, and the outputs that they hold: against the simulator and against brute force."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations

import numpy as np
import pytest
import zoo

import lowtide
from graphs import random_graph, repeated_blocks, seldom_saved
from lowtide import StepGraph
from lowtide.eagerlives import EagerLives
from lowtide.solvers import solving
from lowtide.solvers.exploring import Exploring
from lowtide.solvers.filling import Filling, roughly_least_s
from lowtide.solvers.pricing import keepable
from lowtide.solvers.solving import Search


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


def may_keep(graph: StepGraph) -> np.ndarray:
    return keepable(graph)[0] & (graph.arrays.seconds[: graph.num_forward] > 0)


def with_kept(graph: StepGraph, regions: list[int], ops: tuple[int, ...]) -> EagerLives:
    """Those outputs held, and nothing left out besides: what holding one spares shall not depend on others."""
    spans = {call: (graph.calls[call].first, graph.calls[call].end) for call in regions}
    held = {call: tuple(op - first for op in ops if first <= op < end) for call, (first, end) in spans.items()}
    return EagerLives(graph, held, skipped={})


@pytest.mark.parametrize("seed", range(60))
def test_what_holding_outputs_adds(seed: int) -> None:
    """Rows of several held ops add up to what is played with them held; events of their replays are no more."""
    graph = step(seed)
    regions = some_regions(graph, seed)
    played = with_kept(graph, regions, ())
    ops, sizes, starts, stops = played.keeping(may_keep(graph))
    chosen = tuple(sorted(set(ops.tolist()))[seed % 2 :: 2])
    expected = played.total_bytes.copy()
    for op, size, start, stop in zip(ops, sizes, starts, stops, strict=True):
        expected[start:stop] += int(size) if op in chosen else 0
    still_there = ~((played.phases == 1) & np.isin(played.ops, chosen))
    held = with_kept(graph, regions, chosen)
    assert held.ops.tolist() == played.ops[still_there].tolist()
    assert (held.total_bytes <= expected[still_there]).all()  # less where a replay would make what still lives
    if seed % 2:
        assert held.total_bytes.tolist() == expected[still_there].tolist()
    assert held.extra_s == pytest.approx(played.extra_s - sum(graph.ops[op].seconds for op in chosen))


def best_by_brute_force(filling: Filling, budget: int) -> float:
    room = budget - filling.used
    most = 0.0
    for size in range(len(filling.ops) + 1):
        for picks in combinations(range(len(filling.ops)), size):
            if (filling.weights[:, picks].sum(axis=1) <= room).all():
                most = max(most, float(filling.seconds[list(picks)].sum()))
    return filling.extra_s - most


def test_the_best_outputs_to_hold() -> None:
    num_tried = num_not_greedy = 0
    for seed in range(120):
        graph = step(seed)
        filling = Filling(with_kept(graph, some_regions(graph, seed), ()), may_keep(graph))
        if not 3 <= len(filling.ops) <= 10:
            continue
        full = filling.peak_bytes + int(filling.weights.sum(axis=1).max())
        for budget in np.linspace(filling.peak_bytes, full, 5).astype(int).tolist():
            held = filling.best(budget)
            taken_s = filling.extra_s - sum(graph.ops[op].seconds for op in held)
            best_s = best_by_brute_force(filling, budget)
            one = np.array([float(budget)])
            assert taken_s == pytest.approx(best_s, abs=1e-9), f"graph {seed}, budget {budget}"
            assert filling.least_s(one)[0] <= best_s + 1e-9 <= filling.reached_s(one)[0] + 2e-9
            num_tried += 1
            num_not_greedy += filling.reached_s(one)[0] > best_s + 1e-9
    assert num_tried > 100 and num_not_greedy > 5


@pytest.mark.parametrize("seed", range(20))
def test_a_rough_bound_is_no_higher_than_the_better_one(seed: int) -> None:
    graph = step(seed)
    played = with_kept(graph, some_regions(graph, seed), ())
    budgets = np.linspace(played.peak_bytes - 10, 1.5 * played.peak_bytes, 20)
    rough = roughly_least_s(played, may_keep(graph), budgets)
    assert (rough <= Filling(played, may_keep(graph)).least_s(budgets) + 1e-9).all()
    assert (np.isinf(rough) == (budgets < played.peak_bytes)).all()


def test_what_is_held_is_worth_watching() -> None:
    """Of all that a region would hold, what hooks are shown of it and nothing, what takes least is taken."""
    taken = {"nothing": 0, "shown": 0, "everything": 0}
    for seed in range(40):
        graph = seldom_saved(seed)
        dispatch_s, factor = 1 / (4 << seed % 5), (1.0, 4.0, 8.0)[seed // 5 % 3]
        hardware = replace(graph.hardware, dispatch_s=dispatch_s, forward_dispatch_factor=factor, spare_s=seed % 3 / 8)
        graph = replace(graph, hardware=hardware)
        search = Search(graph)
        exploring = Exploring(graph, search._moments[0].pricing, search._nesting, 0, 100)
        for call in graph.calls_by_path["blocks.0"]:
            shown = tuple(op for op in range(9) if graph.shown.are_all(call, (op,)))
            held = tuple(op for op in range(9) if op in shown or (seed + op) % 4 == 0)
            if () != shown != held:
                choices = {"nothing": (), "shown": shown, "everything": held}
                seconds = {name: EagerLives(graph, {call: ops}).extra_s for name, ops in choices.items()}
                found = exploring._worth_watching(call, (), set(held))
                assert EagerLives(graph, {call: found}).extra_s == min(seconds.values())
                taken[next(name for name, ops in choices.items() if ops == found)] += 1
    assert min(taken.values()) >= 3, taken


def test_in_place_of_what_is_not_worth_watching_more_is_held_that_hooks_are_shown() -> None:
    """Of that, as much as fits. Some plans are faster for it."""
    num_plans = num_faster = 0
    for seed in range(20):
        graph = seldom_saved(seed, share_saved=0.5)
        graph = replace(graph, hardware=replace(graph.hardware, dispatch_s=1 / 64, forward_dispatch_factor=16.0))
        search = Search(graph)
        (call,) = graph.calls_by_path["blocks.0"]
        first = graph.calls[call].first
        ops = np.flatnonzero(may_keep(graph)[: graph.calls[call].end]).tolist()
        shown = [op for op in ops if op >= first and graph.shown.are_all(call, (op - first,))]
        subsets = [ops for size in range(len(shown) + 1) for ops in combinations(shown, size)]
        plain, smallest = search.plain.peak_bytes, with_kept(graph, [call], ()).peak_bytes
        exploring = Exploring(graph, search._moments[0].pricing, search._nesting, smallest, plain)
        exploring._visit((call,))
        for budget in exploring.stations[::6] if smallest < plain else ():
            held = [regions[call] for regions in exploring._filled((call,), budget)]
            if len(held) == 3 and held[2]:
                num_plans += 1
                *others, extra_s = (EagerLives(graph, {call: kept}).extra_s for kept in held)
                num_faster += extra_s < min(others)
                chosen = tuple(first + op for op in held[2])
                assert chosen in subsets and with_kept(graph, [call], chosen).peak_bytes <= budget
                fitting = [ops for ops in subsets if with_kept(graph, [call], ops).peak_bytes <= budget]
                most_s = max(sum(graph.ops[op].seconds for op in ops) for ops in fitting)
                assert sum(graph.ops[op].seconds for op in chosen) == most_s
    assert num_plans > 20 and num_faster > 5, (num_plans, num_faster)


@cache
def traced(name: str) -> StepGraph:
    job = zoo.make(name)
    return lowtide.trace(job.model, job.loss_fn, *job.batch, mode="fake", device="H100")


@pytest.mark.parametrize("name", ["hf_resnet"])
def test_a_model_of_few_layers_gains(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan is slower than without exploring; some are faster by more than a percent of the step."""
    graph = traced(name)
    explored, without = (Search(graph, time_limit_s=1e6) for _ in range(2))
    with monkeypatch.context() as patch:
        patch.setattr(solving, "MOST_OPS", 0)
        floor, plain = without.floor.peak_bytes, without.plain.peak_bytes
        budgets = [floor + (plain - floor) * step // 12 for step in range(12)]
        slower = [without.plan(budget).extra_s for budget in budgets]
    gains = [extra_s - explored.plan(budget).extra_s for budget, extra_s in zip(budgets, slower, strict=True)]
    assert explored.floor.peak_bytes <= floor
    assert min(gains) >= 0 and max(gains) > 0.01 * graph.step_s
