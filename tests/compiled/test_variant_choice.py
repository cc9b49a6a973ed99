"""What is chosen for the calls of a step, with and without a link to host memory. Without compiling."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise, product

import pytest

from compiled.fake_steps import (
    BASE,
    FakeGraph,
    VariantsOnly,
    linked,
)
from lowtide.solvers.shared_budget import SharedBudget, Variant


def test_what_graphs_hand_to_one_another_counts() -> None:
    graph = FakeGraph(1)
    graph.handed_out_bytes, graph.batch_bytes = 5, 3
    assert VariantsOnly(model_bytes=BASE).choose([graph] * 3, 1 << 30).peak_bytes == BASE + 3 + 3 * (40 + 5)


def test_the_floor_is_the_smallest_with_the_link_or_without_it() -> None:
    """What is moved is on the device for a while; the least is there where little is saved, and nothing moved."""
    graph = FakeGraph(7)
    graph.variants = (Variant(None, 90, (90,), 0, 0, 0.0), Variant((), 10, (), 0, 0, 1.0))
    choices = [linked(host_bytes, 100.0).choose([graph] * 3, BASE + 20) for host_bytes in (0, 1000)]
    assert [choice.peak_bytes for choice in choices] == [BASE + 30, BASE + 30]
    assert not any(choice.is_within for choice in choices)


@pytest.mark.parametrize("seed", range(1, 13))
def test_no_choice_is_faster_than_the_bound_whatever_part_of_the_link_it_uses(seed: int) -> None:
    rng, chooser, graphs = random.Random(seed), linked(1000, 100.0), [FakeGraph(number) for number in range(3)]
    for graph in graphs:
        sizes = sorted(rng.sample(range(10, 100), 3), reverse=True)
        prices = sorted(rng.random() / 50 for _ in range(2))
        seconds = accumulate(
            (price * (a - b) for price, (a, b) in zip(prices, pairwise(sizes), strict=True)), initial=0
        )
        graph.variants = tuple(
            Variant((size,), size, (size - 5,), rng.randrange(20), rng.randrange(20), extra_s)
            for size, extra_s in zip(sizes, seconds, strict=True)
        )
    variants, around = [graph.variants for graph in graphs], chooser._around(graphs)
    budgets = [SharedBudget(variants, around, chooser._quotas(graphs, share)) for share in (0, 0.25, 0.5, 0.75, 0.95)]
    costs = [
        (shared.peak_bytes(chosen), sum(each[number].extra_s for each, number in zip(variants, chosen, strict=True)))
        for shared in budgets
        for chosen in product(range(3), repeat=3)
    ]
    for budget in range(BASE + 50, BASE + 250, 10):
        choice = chooser.choose(graphs, budget)
        if choice.is_within:
            assert choice.lower_bound_s <= min(extra_s for peak, extra_s in costs if peak <= budget) + 1e-9
