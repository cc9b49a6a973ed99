"""Variants of a compiled graph, and several graphs under one budget, compared with all possible choices."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate, pairwise, product

import pytest

from graphs import random_graph, repeated_blocks
from lowtide.plans import Plan
from lowtide.simulator import simulate
from lowtide.solvers import shared_budget
from lowtide.solvers.shared_budget import OtherMemory, PeakPosition, SharedBudget, Variant, variants_of
from sweeps import sweep

SEEDS = sweep(range(40), keep=8)


def variants(rng: random.Random, *, movable: bool = False) -> tuple[Variant, ...]:
    """Each smaller and slower than the one before, and every byte dearer than the last."""
    steps = sorted((rng.randrange(1, 9) / 8, rng.randrange(1, 20)) for _ in range(rng.randint(0, 3)))
    saved, extra_s = sum(size for _, size in steps) + rng.randrange(5), 0.0
    found = [_variant(rng, saved, extra_s, movable)]
    for price, size in steps:
        saved, extra_s = saved - size, extra_s + price * size
        if found[-1].extra_s and (extra_s - found[-1].extra_s) / size == price and len(found) > 1:
            previous = (found[-1].extra_s - found[-2].extra_s) / (found[-2].saved_bytes - found[-1].saved_bytes)
            if previous == price:  # no corner
                found.pop()
        found.append(_variant(rng, saved, extra_s, movable))
    return tuple(found)


def _variant(rng: random.Random, saved: int, extra_s: float, movable: bool) -> Variant:
    sizes, left = [], saved
    while movable and left > 0:
        sizes.append(rng.randint(1, left))
        left -= sizes[-1]
    return Variant(None, saved, tuple(sorted(sizes, reverse=True)), rng.randrange(12), rng.randrange(12), extra_s)


def instance(seed: int, *, with_quotas: bool = False) -> SharedBudget:
    rng = random.Random(seed)
    num = rng.randint(1, 5)
    forward, backward = (tuple(rng.randrange(20) for _ in range(num)) for _ in range(2))
    around = OtherMemory(forward, rng.randrange(20), backward, rng.randrange(60))
    quotas = (*(rng.randrange(12) for _ in range(num - 1)), 0) if with_quotas else ()
    return SharedBudget([variants(rng, movable=with_quotas) for _ in range(num)], around, quotas)


def constant_memory(num: int, size: int) -> OtherMemory:
    """The same bytes outside of `num` instances at all times."""
    return OtherMemory((size,) * num, size, (size,) * num, size)


def all_choices(shared: SharedBudget) -> list[tuple[int, ...]]:
    return list(product(*(range(len(each)) for each in shared.instances)))


def seconds(shared: SharedBudget, chosen: tuple[int, ...]) -> float:
    return sum(each[number].extra_s for each, number in zip(shared.instances, chosen, strict=True))


def played(shared: SharedBudget, chosen: tuple[int, ...]) -> int:
    """The peak by a second opinion: moment by moment, what is here."""
    running = [each[number] for each, number in zip(shared.instances, chosen, strict=True)]
    moved = [sum(sizes) for sizes in shared.moved(chosen)]
    around = shared.surroundings
    in_flight = shared.in_flight_bytes(shared.moved(chosen))

    def here(now: int) -> int:
        """What instances up to this one have saved: what earlier ones moved is away, but for what is under way."""
        stays = sum(v.saved_bytes - moved[i] for i, v in enumerate(running[:now]))
        return stays + min(sum(moved[:now]), in_flight) + running[now].saved_bytes

    left = sum(v.saved_bytes for v in running) - sum(moved)
    moments = [around.elsewhere_bytes, around.between_bytes + left]
    for now, variant in enumerate(running):
        moments.append(around.forward_bytes[now] + here(now) + variant.forward_bytes)
        moments.append(around.backward_bytes[now] + here(now) + variant.backward_bytes)
    return max(moments)


@pytest.mark.parametrize("with_quotas", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_peaks_are_those_of_a_second_opinion(seed: int, with_quotas: bool) -> None:
    shared = instance(seed, with_quotas=with_quotas)
    for chosen in all_choices(shared):
        assert shared.peak_bytes(chosen) == played(shared, chosen)


@pytest.mark.parametrize("seed", SEEDS)
def test_choices_hold_and_the_bound_is_below_the_best(seed: int) -> None:
    shared = instance(seed)
    costs = [(shared.peak_bytes(chosen), seconds(shared, chosen)) for chosen in all_choices(shared)]
    for budget in sorted({peak for peak, _ in costs}):
        best_s = min(extra_s for peak, extra_s in costs if peak <= budget)
        assert shared.lower_bound_s(budget) <= best_s + 1e-12
        found = shared.choose(budget)
        if found is not None:
            assert found.peak_bytes == shared.peak_bytes(found.chosen) <= budget
            assert found.extra_s == seconds(shared, found.chosen) >= best_s
            assert found.lower_bound_s <= best_s + 1e-12


@pytest.mark.parametrize("seed", SEEDS)
def test_more_is_never_slower_and_less_never_larger(seed: int) -> None:
    shared = instance(seed, with_quotas=seed % 2 == 0)
    floor = shared.floor
    top = shared.peak_bytes((0,) * len(shared.instances))
    found = [shared.choose(budget) for budget in range(floor.peak_bytes, top + 2)]
    assert all(each is not None for each in found)
    for less, more in pairwise(found):
        assert more.extra_s <= less.extra_s
    assert shared.choose(floor.peak_bytes - 1) is None
    assert shared.choose(top).chosen == (0,) * len(shared.instances)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_smaller_budget_never_gives_a_larger_peak(seed: int) -> None:
    shared = instance(seed)
    found = [shared.choose(budget) for budget in range(shared.floor.peak_bytes, shared.floor.peak_bytes + 80)]
    peaks = [each.peak_bytes for each in found if each is not None]
    assert peaks == sorted(peaks)


@pytest.mark.parametrize("seed", SEEDS)
def test_more_is_never_slower_where_copies_cost_time(seed: int) -> None:
    """Along the steps, copies may become more or fewer."""
    shared = replace(instance(seed, with_quotas=True), moved_byte_s=0.3)
    floor = shared.floor.peak_bytes
    found = [shared.choose(budget) for budget in range(floor, floor + 80)]
    for less, more in pairwise(found):
        assert more.extra_s <= less.extra_s and less.peak_bytes <= more.peak_bytes
    for each in found:
        assert each.extra_s == pytest.approx(seconds(shared, each.chosen) + 0.3 * sum(map(sum, each.moved)))


def test_a_single_price_is_met_exactly() -> None:
    """Three equal instances: one after the other, the earliest first, until it fits."""
    each = (Variant(None, 10, (), 0, 0, 0.0), Variant((), 4, (), 0, 0, 3.0))
    shared = SharedBudget([each] * 3, constant_memory(3, 100))
    assert shared.choose(130).chosen == (0, 0, 0)
    assert shared.choose(129).chosen == (1, 0, 0)
    assert shared.choose(123).chosen == (1, 1, 0)
    assert shared.choose(111) is None
    assert shared.floor.chosen == (1, 1, 1) and shared.floor.peak_bytes == 112
    assert shared.choose(124).extra_s == 3.0 and shared.choose(124).lower_bound_s == 3.0


def test_the_link_is_never_behind_by_more_than_an_instance() -> None:
    each = (Variant(None, 30, (8, 7, 5), 0, 0, 0.0),)
    shared = SharedBudget([each] * 4, constant_memory(4, 0), (9, 5, 9, 0))
    # 9 take an 8. 5 take no 8 alone, but with the next 9: 3 are behind then. 6 are left, which take a 5.
    assert shared.moved((0, 0, 0, 0)) == [(8,), (8,), (5,), ()]
    assert shared.in_flight_bytes(shared.moved((0, 0, 0, 0))) == 8 + 5  # an 8 is not all copied when the 5 comes
    assert shared.peak((0, 0, 0, 0)) == (22 + 22 + 25 + 30 + 13, PeakPosition(num_held=4, index=3))


@pytest.mark.parametrize("seed", SEEDS)
def test_fewer_variants_hold_and_are_hardly_slower(seed: int) -> None:
    shared = instance(seed, with_quotas=seed % 2 == 0)
    shared = replace(shared, instances=[shared.instances[0]] * len(shared.instances))
    worth_s, compiled = 2.0, {number for number in range(3) if (seed >> number) % 2}
    for budget in range(shared.floor.peak_bytes, shared.floor.peak_bytes + 60, 3):
        best = shared.choose(budget)
        fewer = shared.with_fewer_variants(best, budget, worth_s, lambda index, number: number in compiled)
        spared = len(set(best.chosen) - compiled) - len(set(fewer.chosen) - compiled)
        assert fewer.peak_bytes == shared.peak_bytes(fewer.chosen) <= budget
        assert set(fewer.chosen) <= set(best.chosen) | compiled
        assert 0 <= fewer.extra_s - best.extra_s <= worth_s * spared
        assert shared.with_fewer_variants(best, budget, 0.0, lambda index, number: False) == best


def test_a_variant_that_saves_little_is_not_worth_a_compile() -> None:
    each = (
        Variant(None, 10, (), 0, 0, 0.0),
        Variant((0, 1), 8, (), 0, 0, 1.0),
        Variant((0,), 5, (), 0, 0, 3.0),
    )
    shared = SharedBudget([each] * 4, constant_memory(4, 100))
    best = shared.choose(127)
    assert best.chosen == (2, 2, 1, 1)
    assert shared.with_fewer_variants(best, 127, 4.0, lambda index, number: False) == best
    assert shared.with_fewer_variants(best, 127, 4.1, lambda index, number: False).chosen == (2, 2, 2, 2)
    assert shared.with_fewer_variants(best, 127, 4.1, lambda index, number: number == 1) == best, "it is compiled"


@pytest.mark.parametrize("seed", SEEDS)
def test_copies_keep_up_with_compute(seed: int) -> None:
    """Copied out one after the other, everything is away when the last instance has run."""
    shared = instance(seed, with_quotas=True)
    for chosen in all_choices(shared):
        moved, behind = shared.moved(chosen), 0
        for index, sizes in enumerate(moved):
            quota, following = ((*shared.quotas, 0)[at] for at in (index, index + 1))
            assert behind + sum(sizes) <= max(quota + following, behind)
            behind = max(0, behind + sum(sizes) - quota)
        assert behind == 0


def test_bytes_that_the_link_takes_away_are_not_recomputed() -> None:
    """Of four instances, the last cannot move anything. Where the link is slower, another one recomputes."""
    each = (Variant(None, 10, (10,), 0, 0, 0.0), Variant((), 0, (), 0, 0, 3.0))
    around = constant_memory(4, 100)
    found = SharedBudget([each] * 4, around, (10, 10, 10, 0)).choose(120)
    assert found.chosen == (0, 0, 0, 0) and found.moved == ((10,), (10,), (10,), ()) and found.in_flight_bytes == 10
    found = SharedBudget([each] * 4, around, (10, 10, 9, 0)).choose(120)
    assert found.chosen == (0, 0, 1, 0) and found.moved == ((10,), (10,), (), ()) and found.extra_s == 3.0
    assert SharedBudget([each] * 4, around).choose(120).extra_s == 6.0


@pytest.mark.parametrize("seed", sweep(range(60), keep=8))
def test_variants_begin_with_the_default_and_are_smaller_slower_and_convex(seed: int) -> None:
    graph = random_graph(seed, num_ops=8) if seed % 2 else repeated_blocks(seed, num_blocks=3)
    needs = graph.needs
    default = needs.keeps_of(needs.derive(frozenset(range(graph.num_forward))))
    found = variants_of(graph, default)
    assert found[0].keeps is None
    assert found[0].saved_bytes == sum(graph.values[v].bytes for v in needs.derive(frozenset(default)).saved)
    prices = []
    for fast, small in pairwise(found):
        assert small.saved_bytes < fast.saved_bytes
        assert small.extra_s >= fast.extra_s
        prices.append((small.extra_s - fast.extra_s) / (fast.saved_bytes - small.saved_bytes))
    assert all(low < high for low, high in pairwise(prices))
    for variant in found[1:]:
        derived = needs.derive(frozenset(variant.keeps))
        assert needs.keeps_of(derived) == variant.keeps
        assert variant.saved_bytes == sum(graph.values[v].bytes for v in derived.saved)
        peak = simulate(graph, Plan(engine="compiled", keeps=variant.keeps, budget_bytes=1)).peak_bytes
        assert peak >= variant.saved_bytes


def test_only_what_is_worth_a_copy_is_movable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_budget, "SMALLEST_MOVED", 12)
    graph = repeated_blocks(3, num_blocks=3)
    for variant in variants_of(graph, ()):
        assert all(size >= 12 for size in variant.movable)
        assert list(variant.movable) == sorted(variant.movable, reverse=True)
        assert sum(variant.movable) <= variant.saved_bytes


@pytest.mark.parametrize("seed", sweep(range(60), keep=20))
def test_the_floor_is_that_of_all_choices_though_small_variants_need_more_at_once(seed: int) -> None:
    """A variant that saves little may recompute so much at once that one with more saved needs less in all."""
    rng = random.Random(seed)
    kinds = []
    for _ in range(2):
        sizes, extra_s, found = sorted(rng.sample(range(5, 100), 4), reverse=True), 0.0, []
        for number, size in enumerate(sizes):
            extra_s += number * (sizes[max(0, number - 1)] - size)
            most = rng.choice([size + rng.randint(10, 60), sizes[0] + rng.randint(5, 30)])
            found.append(Variant((number,), size, (), rng.randint(0, 10), most - size, extra_s))
        kinds.append(tuple(found))
    forward = tuple(accumulate((rng.randrange(10) for _ in range(3)), initial=100))
    around = OtherMemory(forward, forward[-1] + rng.randrange(60), forward)
    shared = SharedBudget([rng.choice(kinds) for _ in forward], around)
    assert shared.floor.peak_bytes == min(map(shared.peak_bytes, all_choices(shared)))
