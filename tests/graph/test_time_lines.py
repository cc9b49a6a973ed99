"""Steps with two time lines: when the host issues ops, when the device runs them, and how long a step takes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from graphs import chain, random_graph, random_plan, repeated_blocks, with_floats, with_host_line
from lowtide import Plan, StepGraph
from lowtide.graph.time_lines import LINES, device_starts, line_of
from lowtide.plans import Recompute
from lowtide.simulator import simulate
from lowtide.simulator.eager_events import EagerEvents
from referee import replay
from sweeps import sweep


def step(seed: int) -> StepGraph:
    graph = repeated_blocks(seed) if seed % 4 == 0 else random_graph(seed)
    return with_host_line(seed, with_floats(seed, graph) if seed % 3 == 0 else graph)


def close(a: float, b: float) -> bool:
    return math.isclose(a, b, abs_tol=1e-9)


@pytest.mark.parametrize("batch", sweep(range(4), keep=1))
def test_agrees_with_the_referee(batch: int) -> None:
    for seed in range(100 * batch, 100 * (batch + 1)):
        graph = step(seed)
        plain_s = replay(graph, Plan()).step_s
        assert close(simulate(graph).step_s, plain_s) and simulate(graph).extra_s == 0
        for nth in range(2):
            plan = random_plan(7 * seed + nth, graph)
            told, expected = simulate(graph, plan), replay(graph, plan)
            assert told.total_bytes.tolist() == expected.events, f"graph {seed}, {plan}"
            assert close(told.step_s, expected.step_s), f"graph {seed}, {plan}"
            assert close(told.extra_s, expected.step_s - plain_s), f"graph {seed}, {plan}"
            assert close(told.host_s, expected.busy_s[0]) and close(told.device_s, expected.busy_s[1])
            assert close(told.engine_s, expected.engine_s)
            assert told.step_s >= max(told.host_s, told.device_s) - 1e-9


@pytest.mark.parametrize("batch", sweep(range(2), keep=1))
def test_intervals_and_op_by_op_agree(batch: int) -> None:
    for seed in range(100 * batch, 100 * (batch + 1)):
        graph = step(seed)
        plan = replace(random_plan(7 * seed, graph), moves=())
        told, played = simulate(graph, plan), EagerEvents(graph, plan)
        played.play()
        columns = played.columns()
        assert np.allclose(told.starts_s, columns["starts_s"], atol=1e-9), f"graph {seed}, {plan}"
        assert all(close(getattr(told.lines, name), getattr(columns["lines"], name)) for name in vars(told.lines))


def test_each_line_adds_up() -> None:
    """What a plan adds to one line is what it adds to the graph of that line: what solvers price with."""
    for seed in range(60):
        graph = step(seed)
        plan = replace(random_plan(7 * seed, graph), moves=())
        told = simulate(graph, plan)
        for name in LINES:
            line = line_of(graph, float(name == "host"))
            added_s = told.lines.of(name) - graph.lines.of(name)
            assert close(simulate(line, plan).extra_s, added_s), f"graph {seed}, {name}"
            assert told.extra_s >= graph.lines.of(name) + added_s - graph.lines.step_s - 1e-9


def test_who_waits_for_whom() -> None:
    host, device = np.array([1.0, 1.0, 1.0, 1.0]), np.array([5.0, 1.0, 0.0, 2.0])
    never = np.zeros(4, dtype=bool)
    assert device_starts(host, device, never).tolist() == [1, 6, 7, 7]  # the device has a queue
    assert device_starts(4 * host, device, never).tolist() == [4, 9, 12, 16]  # it waits for the host
    syncs = np.array([False, True, False, False])
    assert device_starts(host, device, syncs).tolist() == [1, 6, 8, 9]  # the host goes on at 7


def two_lines(host_s: float) -> StepGraph:
    graph = chain([10, 20, 30, 40])
    return replace(graph, ops=tuple(replace(op, host_s=host_s) for op in graph.ops))


def test_where_the_host_limits_its_work_is_what_a_plan_adds() -> None:
    graph = two_lines(10.0)
    plan = Plan((Recompute("layers.1"),))
    told = simulate(graph, plan)
    num_replayed = int((told.phases == 1).sum())
    assert graph.lines.limit == "host" and told.extra_s == pytest.approx(10.0 * num_replayed)
    dear = replace(graph, hardware=replace(graph.hardware, region_s=3.0))
    assert simulate(dear, plan).extra_s == pytest.approx(told.extra_s + 3.0)


def test_where_the_device_limits_the_engine_works_beside_it() -> None:
    graph = two_lines(1 / 128)
    plan = Plan((Recompute("layers.1"),))
    told = simulate(graph, plan)
    assert graph.lines.limit == "device" and told.extra_s == pytest.approx(told.replayed_s)
    busy = replace(graph, hardware=replace(graph.hardware, region_s=1 / 4))
    assert simulate(busy, plan).extra_s == pytest.approx(told.extra_s) and simulate(busy, plan).engine_s > 0


def test_a_graph_says_which_line_limits() -> None:
    assert "limited by  the host" in str(two_lines(10.0)) and "limited by the host" in str(simulate(two_lines(10.0)))
    assert "limited by  the device" in str(two_lines(1 / 128))
    assert "limited by" not in str(chain([10, 20]))


def test_files_keep_both_lines() -> None:
    graph = with_host_line(3, random_graph(3), syncs=0.5)
    assert StepGraph.from_json(graph.to_json()) == graph
