"""Candidates are timed in turns, on a clock with noise; moves and torch's ways are kept only if they are faster."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from compiled.test_session import BASE, FakeGraph, TimedMeter, VariantsOnly, linked, settled
from lowtide.compiled.session import Session
from lowtide.compiled.step_profile import StepProfile
from lowtide.compiled.variant_choice import VariantChoice
from lowtide.solvers.shared_budget import Variant

SEEDS = range(40)


class NoisyMeter(TimedMeter):
    """Steps vary by `noise`, and one in ten is disturbed. `seconds_of` gives those of a choice without noise."""

    def __init__(self, seconds_of: Callable[[VariantChoice], float], noise: float, seed: int) -> None:
        super().__init__(lambda variant: 1 + variant.extra_s)
        self._seconds_of, self._noise, self._random = seconds_of, noise, random.Random(seed)

    def profile(self) -> StepProfile:
        factor = self._random.gauss(1, self._noise) + (self._random.random() < 0.1) * 0.3 * self._random.random()
        return replace(super().profile(), seconds=factor * self._seconds_of(self.session.sequences.current.choice))


def kept_with_moves(share: float, noise: float, seed: int) -> bool:
    """Whether moves are kept that make a step slower by this share of it."""
    graph = FakeGraph(7)
    graph.variants = (Variant(None, 40, (30,), 0, 0, 0.0), Variant((), 10, (), 0, 0, 5.0))
    meter = NoisyMeter(lambda choice: 1 + share * any(choice.moved), noise, seed)
    chooser = linked(host_bytes=1000, link_bytes_per_s=100.0)
    meter.session = Session(BASE + 100, chooser=chooser, num_blocks=3, meter_of=lambda _: meter)
    return any(settled(meter.session, graph).moved)


def test_moves_that_cost_two_per_cent_are_not_kept() -> None:
    assert sum(kept_with_moves(0.02, 0.015, seed) for seed in SEEDS) == 0


def test_moves_that_are_as_fast_are_not_kept_without_need() -> None:
    assert not kept_with_moves(0.0, 0.0, 1)


def test_moves_that_spare_two_per_cent_are_kept() -> None:
    assert sum(kept_with_moves(-0.02, 0.005, seed) for seed in SEEDS) >= 0.95 * len(SEEDS)


def kept_of_torch(share: float, noise: float, seed: int) -> bool:
    """Whether torch's partition is kept in place of ours if it is slower by this share of a step."""
    graph = FakeGraph(7)
    graph.torch_ways = {0.5: Variant((2,), 21, (), 0, 0, 3.1, 0.5)}
    meter = NoisyMeter(lambda choice: 1 + share * (choice.variants[0].fraction is not None), noise, seed)
    meter.session = Session(BASE + 75, chooser=VariantsOnly(model_bytes=BASE), num_blocks=3, meter_of=lambda _: meter)
    return settled(meter.session, graph).variants[0].fraction is not None


@pytest.mark.parametrize("share", [0.02, -0.02])
def test_the_faster_of_torchs_partition_and_ours_is_kept(share: float) -> None:
    kept = sum(kept_of_torch(share, 0.008, seed) for seed in SEEDS)
    assert kept == 0 if share > 0 else kept >= 0.95 * len(SEEDS)


def test_ours_is_kept_if_both_take_as_long() -> None:
    assert not kept_of_torch(0.0, 0.0, 1)


def test_what_torch_holds_at_this_peak_is_timed_though_predicted_slightly_over() -> None:
    """A budget that is torch's measured peak: the prediction for it may be over by a little, and it is faster."""
    graph = FakeGraph(7)
    graph.torch_ways = {0.5: Variant((2,), 22, (), 0, 11, 3.4, 0.5), 0.1: Variant((3,), 10, (), 0, 0, 9.5, 0.1)}
    meter = TimedMeter(lambda variant: 1.0 if variant.fraction == 0.5 else 1 + variant.extra_s)
    chooser, budget = VariantsOnly(model_bytes=BASE), BASE + 3 * 22 + 10
    meter.session = Session(budget, chooser=chooser, num_blocks=3, meter_of=lambda _: meter)
    assert {variant.fraction for variant in settled(meter.session, graph).variants} == {0.5}


def test_a_candidate_is_measured_call_by_call_once_and_then_only_timed() -> None:
    """Marks take host time, so they are not set in the steps that are compared."""
    graph = FakeGraph(7)
    graph.torch_ways = {0.5: Variant((2,), 21, (), 0, 0, 3.1, 0.5)}
    meter = TimedMeter(lambda variant: 1.0)
    meter.session = Session(BASE + 75, chooser=VariantsOnly(model_bytes=BASE), num_blocks=3, meter_of=lambda _: meter)
    settled(meter.session, graph)
    sequence = meter.session.current
    assert [choice.variants[0].fraction for choice, _ in sequence.profiled] == [None, 0.5]
    assert len(sequence.turns) == len(sequence.measured) - 2
