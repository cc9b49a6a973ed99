"""What it costs at the least that a region holds outputs, against the regions of plans one by one."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from graphs import random_graph, repeated_blocks, seldom_saved
from lowtide import StepGraph, simulate
from lowtide.eagerlives import EagerLives
from lowtide.solvers.pricing import Pricing


def step(seed: int, factor: float) -> StepGraph:
    kinds = repeated_blocks, random_graph, lambda seed: seldom_saved(seed, num_ops=6)
    graph = kinds[seed % 3](seed)
    return replace(graph, hardware=replace(graph.hardware, dispatch_s=1 / 16, forward_dispatch_factor=factor))


def priced(graph: StepGraph) -> Pricing:
    plain = simulate(graph)
    return Pricing(graph, plain, int(plain.ops[plain.peak_event]))


@pytest.mark.parametrize("factor", [0.25, 1.0, 4.0, 8.0])
def test_fees_are_the_least_that_watching_costs(factor: float) -> None:
    """Of the ways that allow what is held, whatever regions are inside. Many cost just that."""
    num_tight = {"shown": 0, "hidden": 0, "with others inside": 0}
    for seed in range(30):
        graph = step(seed, factor)
        pricing = priced(graph)
        for call in (call for call, can in enumerate(pricing.replayable) if can):
            first = graph.calls[call].first
            may = [op - first for op in pricing.keepable_in(call)]
            inside = [i for i in range(call + 1, graph.arrays.after[call]) if pricing.replayable[i]]
            for kept in (ops for size in (1, 2) for ops in combinations(may, size)):
                is_shown = graph.shown.are_all(call, kept)
                ways = [pricing.ways[0], *(way for way in pricing.ways[1:] if is_shown)]
                fee_s = min(float(way.fees_s[call]) for way in ways)
                for inner in ((), *((each,) for each in inside), tuple(inside)):
                    watched_s = EagerLives(graph, {call: kept, **dict.fromkeys(inner, ())}).watched_s
                    assert fee_s <= watched_s, (seed, call, kept, inner)
                    kind = "with others inside" if inner else "shown" if is_shown else "hidden"
                    num_tight[kind] += fee_s == watched_s
    assert min(num_tight.values()) > 100, num_tight
