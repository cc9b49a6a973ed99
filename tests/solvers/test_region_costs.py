"""Lower bounds on the cost of regions that retain outputs, compared with simulated plans."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations

import pytest

from graphs import random_graph, repeated_blocks, seldom_saved
from lowtide import StepGraph
from lowtide.simulator import simulate
from lowtide.simulator.eager_intervals import EagerIntervals
from lowtide.solvers.hull import Pricing


def step(seed: int, region_s: float = 0.0) -> StepGraph:
    kinds = repeated_blocks, random_graph, lambda seed: seldom_saved(seed, num_ops=6, share_saved=0.6)
    graph = kinds[seed % 3](seed)
    spare_s = (0.0, 0.1, 0.5)[seed // 3 % 3]
    return replace(graph, hardware=replace(graph.hardware, dispatch_s=1 / 16, region_s=region_s, spare_s=spare_s))


def priced(graph: StepGraph) -> Pricing:
    plain = simulate(graph)
    return Pricing(graph, plain, int(plain.ops[plain.peak_event]))


def replayable_calls(pricing: Pricing) -> list[int]:
    return [call for call, can in enumerate(pricing.replayable) if can]


def kept_by(pricing: Pricing, call: int, most: int) -> list[tuple[int, ...]]:
    """Some ops that a call may retain, counted from its first: every subset of up to so many."""
    may = [op - pricing.graph.calls[call].first for op in pricing.keepable_in(call)]
    return list(chain.from_iterable(combinations(may, size) for size in range(most + 1)))


@pytest.mark.parametrize("region_s", [0.0, 1 / 8, 1.0])
def test_seconds_are_the_least_that_a_region_takes(region_s: float) -> None:
    """Whatever regions are inside. Many take just that."""
    num_tight = {"alone": 0, "with others inside": 0}
    for seed in range(30):
        graph = step(seed, region_s)
        pricing = priced(graph)
        for call in replayable_calls(pricing):
            inside = [i for i in range(call + 1, graph.arrays.after[call]) if pricing.replayable[i]]
            for kept in kept_by(pricing, call, 2)[1:]:
                for inner in ((), *((each,) for each in inside), tuple(inside)):
                    regions = {call: kept, **dict.fromkeys(inner, ())}
                    if not graph.retainable.missing(regions):
                        extra_s = EagerIntervals(graph, regions).extra_s
                        least_s = region_s + pricing.holds.seconds(call, kept)
                        assert least_s <= extra_s + 1e-9, (seed, call, kept, inner)
                        num_tight["with others inside" if inner else "alone"] += least_s >= extra_s - 1e-9
    assert num_tight["alone"] > 100 and num_tight["with others inside"] >= (0 if region_s == 1.0 else 5), num_tight


def test_a_region_retains_what_is_best_for_a_price() -> None:
    """Of every subset of what it may retain; and what it names comes to what it costs."""
    num_tried = num_retained = 0
    for seed in range(60):
        graph = step(seed)
        pricing = priced(graph)
        for call in replayable_calls(pricing):
            first, held = graph.calls[call].first, pricing._held[graph.depths[call]]
            if len(pricing.keepable_in(call)) > 6:
                continue
            for price in (0.0, 1 / 64, 1 / 16, 1 / 4, 1.0):
                chosen = tuple(pricing.holds.kept(call, price))
                subsets = [chosen, *kept_by(pricing, call, 6)]
                sizes = [float(held[[first + op for op in kept]].sum()) for kept in subsets]
                costs = [
                    pricing.holds.seconds(call, kept) + price * size for kept, size in zip(subsets, sizes, strict=True)
                ]
                assert pricing.holds.costs(price)[call] == pytest.approx(min(costs)), (seed, call, price)
                assert costs[0] == pytest.approx(min(costs)), (seed, call, price)
                num_tried, num_retained = num_tried + 1, num_retained + bool(chosen)
    assert num_tried > 500 and num_retained > 100, (num_tried, num_retained)
