"""Measured peaks lead to other variants or to an error, and candidates are timed in turns, on a clock with noise."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from compiled.fake_steps import (
    BASE,
    VARIANTS,
    FakeGraph,
    FakeMeter,
    Steps,
    TimedMeter,
    VariantsOnly,
    linked,
    saved,
    settled,
    spoil,
)
from lowtide.compiled.session import Session
from lowtide.compiled.step_profile import StepProfile
from lowtide.compiled.variant_choice import VariantChoice
from lowtide.errors import InfeasibleBudgetError
from lowtide.solvers.shared_budget import Variant
from sweeps import sweep


@pytest.mark.parametrize(("torch_s", "num_timed"), [(0.5, 2), (3.3, 5), (3.4, 5), (50.0, 2)])
def test_what_torchs_partitioner_does_is_timed_beside_ours(torch_s: float, num_timed: int) -> None:
    """Predicted to be slower, and kept if it is measured to be faster."""
    graph = FakeGraph(7)
    graph.torch_ways = {0.9: replace(VARIANTS[1], fraction=0.9), 0.5: Variant((2,), 21, (), 0, 0, 3.4, 0.5)}
    meter = TimedMeter(lambda variant: torch_s if variant.fraction else 1 + variant.extra_s)
    meter.session = Session(BASE + 75, chooser=VariantsOnly(model_bytes=BASE), num_blocks=3, meter_of=lambda _: meter)
    choice = settled(meter.session, graph)
    assert {variant.fraction for variant in choice.variants} == ({0.5} if torch_s < 10 / 3 else {None})
    timed = [each.variants[0].fraction for each, _ in meter.session.current.turns]
    assert timed == [None, 0.5] * num_timed, "in turns, until it is clear which is slower"


def test_torchs_choice_is_tried_before_a_budget_is_refused() -> None:
    """Each of ours takes far more than predicted."""
    steps = Steps(BASE + 50, lambda ran: BASE + (40 if all(each.fraction for each in ran) else 500))
    steps.graph.torch_ways = {0.5: Variant((2,), 35, (), 0, 0, 3.4, 0.5)}
    for _ in range(12):
        steps.run()
    sequence = steps.session.current
    assert sequence.is_settled and sequence.over is None
    assert [variant.fraction for variant in sequence.choice.variants] == [0.5] * 3


class CachingMeter(FakeMeter):
    """Tensors get cached blocks of earlier steps, which are larger by `unrequested` bytes in all."""

    unrequested = 0
    num_freed = 0

    @property
    def requested_bytes(self) -> int:
        return self.measured - self.unrequested

    def free_cached_blocks(self) -> None:
        self.num_freed += 1


@pytest.mark.parametrize("is_freed", [True, False])
def test_a_choice_over_the_budget_by_cached_blocks_is_measured_without_them(is_freed: bool) -> None:
    """Once: a choice that is still over the budget is over it."""
    meter = CachingMeter()
    meter.unrequested = 12
    steps = Steps(BASE + 90, lambda ran: BASE + saved(ran) + (0 if is_freed and meter.num_freed else 10))
    steps.meter = meter
    first = steps.run()
    assert saved(first) == 90
    ran = [steps.run() for _ in range(8)]
    if is_freed:
        assert all(each == first for each in ran) and meter.num_freed == 1
        assert steps.session.current.peaks == [BASE + 90]
    else:
        assert saved(ran[-1]) <= 80 and meter.num_freed == 1, "the smaller choice is over by more than cached blocks"
    assert meter.num_resets == len(steps.session.current.measured) + 1, "the step that allocates anew is not measured"
    assert steps.session.current.is_settled and steps.session.current.over is None


def test_a_choice_is_measured_without_cached_blocks_once_for_all_sizes() -> None:
    """With dynamic shapes each step may have a size of its own."""
    meter = CachingMeter()
    meter.unrequested = 12
    steps = Steps(BASE + 90, lambda ran: BASE + saved(ran) + 10)
    steps.meter = meter
    ran = [saved(steps.run(input_bytes=number + 1)) for number in range(20)]
    assert meter.num_freed == 1 and max(ran[6:]) <= 80


def test_steps_that_are_left_out_do_not_settle_a_choice_by_prediction() -> None:
    meter = CachingMeter()
    meter.unrequested = 12
    steps = Steps(BASE + 90, lambda ran: BASE + saved(ran) + 10)
    steps.meter = meter
    for _ in range(18):
        steps.run()
        spoil(steps.session)
    assert max(saved(steps.run()) for _ in range(4)) == 90 and saved(steps.run()) <= 80


def test_a_choice_that_never_ran_is_not_settled() -> None:
    """The first choice that held is over the budget in a later turn: what is left is measured before it is kept."""
    graph = FakeGraph(7)
    graph.torch_ways = {0.5: Variant((2,), 21, (), 0, 0, 3.1, 0.5)}
    for first_over in range(1, 12):
        meter = LaterOver(first_over)
        meter.session = Session(
            BASE + 75, chooser=VariantsOnly(model_bytes=BASE), num_blocks=3, meter_of=lambda _, meter=meter: meter
        )
        choice = settled(meter.session, graph)
        assert meter.session.current.has_run(choice), first_over


class LaterOver(TimedMeter):
    """From one measured step on, all choices but torch's take more than they did."""

    def __init__(self, first_over: int) -> None:
        super().__init__(lambda variant: 1 + variant.extra_s)
        self._num_left = first_over

    def peak_bytes(self) -> int:
        self._num_left -= 1
        is_torchs = any(variant.fraction for variant in self.session.sequences.current.choice.variants)
        return super().peak_bytes() + (50 if self._num_left < 0 and not is_torchs else 0)


def test_more_than_cached_blocks_is_not_measured_again() -> None:
    meter = CachingMeter()
    meter.unrequested = 9
    steps = Steps(BASE + 90, lambda ran: BASE + saved(ran) + 10)
    steps.meter = meter
    ran = [saved(steps.run()) for _ in range(4)]
    assert ran[:2] == [90, 90] and ran[2] <= 80 and not meter.num_freed


def test_what_cannot_win_is_not_compiled() -> None:
    """Torch's choice is predicted to add far more than ours."""
    graph = FakeGraph(7)
    graph.torch_ways = {0.5: Variant((2,), 21, (), 0, 0, 20.0, 0.5)}
    meter = TimedMeter(lambda variant: 1 + variant.extra_s)
    meter.session = Session(BASE + 75, chooser=VariantsOnly(model_bytes=BASE), num_blocks=3, meter_of=lambda _: meter)
    settled(meter.session, graph)
    assert all(variant.fraction is None for each, _ in meter.session.current.measured for variant in each.variants)


@pytest.mark.parametrize("moved_byte_s", [0.0, 1.0])
def test_moves_are_taken_back_if_they_are_measured_to_be_slower(moved_byte_s: float) -> None:
    graph = FakeGraph(7)
    graph.variants = (Variant(None, 40, (30,), 0, 0, 0.0), Variant((), 10, (), 0, 0, 5.0))
    meter = TimedMeter(lambda variant: 1 + variant.extra_s, moved_byte_s)
    chooser = linked(host_bytes=1000, link_bytes_per_s=100.0)
    meter.session = Session(BASE + 100, chooser=chooser, num_blocks=3, meter_of=lambda _: meter)
    choice = settled(meter.session, graph)
    assert any(choice.moved) == (moved_byte_s == 0.0)
    assert any(any(each.moved) for each, _ in meter.session.current.turns)


@pytest.mark.parametrize("seed", [*sweep(range(60), keep=20), 110, 155, 959])
def test_host_memory_never_makes_a_step_slower(seed: int) -> None:
    """Whatever copies and variants cost and take in reality: the choice without moves that holds is timed too."""
    rng = random.Random(seed)
    sizes = sorted(rng.sample(range(10, 100), 3), reverse=True)
    extra = [0.0, rng.random(), 1 + 3 * rng.random()]
    moved_byte_s, budget = rng.choice([0.0, 0.001, 0.1]), BASE + rng.randrange(3 * sizes[-1], 3 * sizes[0])
    more_bytes, moving_bytes = rng.randrange(-20, 20), rng.choice([0, 0, 5, 40])
    errors = {key: rng.randrange(-10, 30) for key in (None, (1,), (2,))}
    found = []
    for host_bytes in (0, 1000):
        graph = FakeGraph(7)
        graph.variants = tuple(
            Variant(None if not number else (number,), size, (size - 5,), 0, 0, extra_s)
            for number, (size, extra_s) in enumerate(zip(sizes, extra, strict=True))
        )
        meter = TimedMeter(
            lambda variant: 4 + 2 * variant.extra_s,
            moved_byte_s,
            more_bytes=more_bytes,
            moving_bytes=moving_bytes,
            errors=errors,
        )
        chooser = linked(host_bytes, 100.0) if host_bytes else VariantsOnly(model_bytes=BASE)
        meter.session = Session(budget, chooser=chooser, num_blocks=3, meter_of=lambda _, meter=meter: meter)
        try:
            choice = settled(meter.session, graph)
        except InfeasibleBudgetError:
            found.append(None)
            continue
        sequence = meter.session.current
        assert all(peak <= budget for each, peak in sequence.measured if each.is_like(choice))
        assert len(sequence.measured) <= 86
        found.append(sequence.seconds_of(choice))
    without, with_host = found
    assert without is None or with_host <= without


def test_peaks_that_follow_no_rule_end_at_a_choice_that_was_seen_to_hold() -> None:
    """Whatever is larger than the first choice measures too large, by less than was predicted."""
    steps = Steps(BASE + 70, lambda ran: BASE + (20 if saved(ran) <= 70 else 71))
    for _ in range(20):
        last = steps.run()
    sequence = steps.session.sequences.current
    assert sequence.is_settled and 2 <= len(sequence.measured) <= 6
    assert last in [choice.variants for choice, peak in sequence.measured if peak <= BASE + 70]


def test_a_budget_that_no_choice_meets_is_an_error_in_the_end() -> None:
    steps = Steps(BASE + 80, lambda ran: BASE + 200 + saved(ran))
    with pytest.raises(InfeasibleBudgetError, match="measured") as caught:
        for _ in range(20):
            steps.run()
    assert caught.value.floor_bytes == BASE + 200 + 30
    assert len(steps.session.sequences.current.measured) <= 6
    with pytest.raises(InfeasibleBudgetError):
        steps.run()


def test_larger_steps_are_measured_anew() -> None:
    """Graphs with symbolic shapes serve all lengths: a choice that holds for short ones may not for long ones."""
    length, steps = 1, Steps(BASE + 95, lambda ran: BASE + length * saved(ran))
    ran = [steps.run(input_bytes=1) for _ in range(4)]
    assert 60 < saved(ran[-1]) <= 95 and steps.session.current.is_settled
    length = 2
    longer = [steps.run(input_bytes=2) for _ in range(8)]
    assert saved(longer[0]) > 47 and saved(longer[-1]) <= 47 and steps.session.current.is_settled
    length = 1
    assert [steps.run(input_bytes=1) for _ in range(8)] == [longer[-1]] * 8, "one choice for all lengths"
    length = 4
    with pytest.raises(InfeasibleBudgetError, match="measured"):
        for _ in range(20):
            steps.run(input_bytes=4)


def test_short_steps_do_not_decide_for_long_ones() -> None:
    lengths = [1, 2] * 12
    steps = Steps(BASE + 95, lambda ran: BASE + length * saved(ran))
    for length in lengths:
        ran = steps.run(input_bytes=length)
    assert saved(ran) <= 47 and steps.session.current.is_settled
    assert steps.session.current.peaks == [BASE + 2 * saved(ran)]


def test_a_length_that_never_comes_again_is_not_waited_for() -> None:
    length, steps = 1, Steps(BASE + 95, lambda ran: BASE + length * saved(ran))
    for length in [1] * 4 + [2] + [1] * 24:
        steps.run(input_bytes=length)
    num_resets = steps.meter.num_resets
    assert steps.session.current.is_settled
    steps.run(input_bytes=1)
    assert steps.meter.num_resets == num_resets


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


def test_a_host_that_hides_what_variants_cost_leaves_no_budget_unused() -> None:
    """Every call is measured to take as long, whatever is recomputed: the device has less to do with more saved."""
    meter, graph = TimedMeter(lambda variant: 10.0), FakeGraph(7)
    meter.session = Session(BASE + 100, chooser=VariantsOnly(model_bytes=BASE), num_blocks=3, meter_of=lambda _: meter)
    assert saved(settled(meter.session, graph).variants) == 100
    measured = [meter.session.chooser._as_measured(graph, variant).extra_s for variant in graph.variants]
    assert measured == sorted(measured) and measured[1] > measured[0], "none costs nothing but the default"


def test_torchs_choice_is_timed_beside_one_that_is_predicted_to_cost_nothing() -> None:
    graph = FakeGraph(7)
    graph.variants = (Variant(None, 40, (), 0, 0, 0.0), Variant((0,), 20, (), 0, 0, 0.0))
    graph.torch_ways = {0.5: Variant((2,), 21, (), 0, 0, 0.1, 0.5)}
    meter = TimedMeter(lambda variant: 9.0 if variant.fraction else 10.0)
    meter.session = Session(BASE + 75, chooser=VariantsOnly(model_bytes=BASE), num_blocks=3, meter_of=lambda _: meter)
    assert {variant.fraction for variant in settled(meter.session, graph).variants} == {0.5}
