"""Sessions, without compiling: measured peaks lead to other variants or to an error, and steps are separated."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise, product

import pytest
import torch
from torch import Tensor

from lowtide.compiled.call_sequences import StepSize
from lowtide.compiled.compiled_handle import describe
from lowtide.compiled.session import Session
from lowtide.compiled.step_profile import CallProfile, StepMeter, StepProfile
from lowtide.compiled.variant_choice import VariantChoice, VariantChooser
from lowtide.errors import InfeasibleBudgetError
from lowtide.solvers.shared_budget import SharedBudget, Variant
from sweeps import sweep

BASE = 100
VARIANTS = (
    Variant(None, 40, (), 0, 0, 0.0),
    Variant((0, 1), 30, (), 0, 0, 1.0),
    Variant((0,), 20, (), 0, 0, 3.0),
    Variant((), 10, (), 0, 0, 9.0),
)


class FakeGraph:
    """What a session sees of a compiled graph."""

    def __init__(self, number: int) -> None:
        self.number, self.variants, self.device, self.step = number, VARIANTS, torch.device("cpu"), None
        self.step_s, self.handed_out_bytes, self.static_bytes, self.batch_bytes = 10.0, 0, 0, 0
        self.forward_s, self.torch_ways, self.replayed = 1.0, {}, None
        self.has_collectives, self.identity = False, f"graph {number}"

    def is_compiled(self, variant: Variant) -> bool:
        return False


class VariantsOnly(VariantChooser):
    """One call is chosen for as several are: there is no step to solve."""

    def _single(self, graph: FakeGraph, budget_bytes: int) -> VariantChoice:
        return self._shared([graph], budget_bytes)


class FakeMeter(StepMeter):
    """Measures whole steps, not their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.measured, self.num_resets = 0, 0

    def peak_bytes(self) -> int:
        return self.measured

    def profile(self) -> None:
        return None

    def reset(self) -> None:
        self.num_resets += 1


def spoil(session: Session) -> None:
    """Compile something in the present step."""
    with session.compiling():
        pass


class Steps:
    """Steps of three calls of one graph; `measured` makes a peak of the variants that ran."""

    def __init__(self, budget: int, measured: Callable[[list[Variant]], int] | None, num_blocks: int = 3) -> None:
        self.meter = FakeMeter()
        self.session = Session(
            budget,
            chooser=VariantsOnly(model_bytes=BASE),
            num_blocks=num_blocks,
            meter_of=lambda device: self.meter if measured is not None else None,
        )
        self.graph, self._measured = FakeGraph(7), measured
        self.session.first_variant(self.graph)
        spoil(self.session)

    def run(
        self,
        num_calls: int = 3,
        *,
        graph: FakeGraph | None = None,
        has_backward: bool = True,
        input_bytes: int = 0,
        unused: int = -1,
    ) -> list[Variant]:
        x = self.forward(num_calls, graph or self.graph, input_bytes, unused)
        if has_backward:
            x.backward()
        if self._measured is not None:
            self.meter.measured = self._measured(self.ran)
        return self.ran

    def forward(self, num_calls: int, graph: FakeGraph, input_bytes: int = 0, unused: int = -1) -> Tensor:
        """The loss depends on all calls but the one at position `unused`."""
        x = torch.ones(1, requires_grad=True)
        self.ran = []
        for position in range(num_calls):
            run = self.session.next_run(graph, input_bytes)
            self.ran.append(run.variant)
            output = x * 2
            run.end((output,))
            x = x if position == unused else output
            del output
        return x


def saved(ran: list[Variant]) -> int:
    return sum(variant.saved_bytes for variant in ran)


def test_a_prediction_that_holds_settles_at_once() -> None:
    steps = Steps(BASE + 95, lambda ran: BASE + saved(ran))
    ran = [steps.run() for _ in range(5)]
    assert all(each == ran[0] for each in ran) and saved(ran[0]) <= 95
    assert steps.meter.num_resets == 1, "reset when clean steps begin, left alone when settled"
    assert "measured" in describe(steps.session)


def test_over_the_budget_chooses_smaller_ones() -> None:
    steps = Steps(BASE + 95, lambda ran: BASE + 13 + saved(ran))
    ran = [steps.run() for _ in range(6)]
    assert saved(ran[0]) == saved(ran[1]) > 82
    assert saved(ran[2]) <= 82 and ran[2] == ran[-1]


def test_well_under_the_budget_chooses_faster_ones() -> None:
    steps = Steps(BASE + 75, lambda ran: BASE - 30 + saved(ran))
    ran = [steps.run() for _ in range(6)]
    assert saved(ran[0]) <= 75 < saved(ran[-1]) <= 105


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


def functions_entered(num_calls: int) -> int:
    """How many Python functions a settled step of so many calls enters."""
    steps = Steps(10_000, lambda ran: BASE, num_blocks=num_calls)
    for _ in range(4):
        steps.run(num_calls)
    num_entered = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal num_entered
        num_entered += event == "call"

    sys.setprofile(count)
    try:
        steps.run(num_calls)
    finally:
        sys.setprofile(None)
    return num_entered


def test_a_call_of_a_settled_step_costs_the_same_however_many_there_are() -> None:
    """The host runs this for every compiled block, of which a step may have a hundred."""
    assert functions_entered(64) - functions_entered(4) <= 19 * (64 - 4)


def test_steps_that_differ_from_settled_ones_are_noticed() -> None:
    steps = Steps(BASE + 95, lambda ran: BASE + saved(ran))
    for _ in range(4):
        steps.run(3)
    for num_calls in (2, 3, 5, 5, 5, 3, 1, 5):  # what is chosen for three calls does not hold for five
        ran = steps.run(num_calls)
    assert len(ran) == 5 and saved(ran) <= 95
    steps.run(5, has_backward=False)  # forgotten
    assert saved(steps.run(5)) == saved(ran)


def test_settled_steps_follow_the_loss_when_it_uses_other_calls() -> None:
    steps = Steps(BASE + 95, lambda ran: BASE + saved(ran) - 10)
    for _ in range(4):
        first = steps.run(4, unused=1)
    assert steps.session.current.is_settled and first[1] == VARIANTS[-1] and 60 < saved(first) - 10 <= 95
    for _ in range(2):
        second = steps.run(4, unused=2)
    assert second == [first[0], first[2], VARIANTS[-1], first[3]]


def test_gradients_that_are_kept_after_a_settled_step_make_the_next_one_larger() -> None:
    parameter, more = torch.nn.Parameter(torch.zeros(5)), 0
    steps = Steps(BASE + 95, lambda ran: BASE + more + saved(ran))
    steps.session.see((parameter,))
    for _ in range(4):
        ran = steps.run()
    assert steps.session.current.is_settled and 75 < saved(ran) <= 95
    parameter.grad, more = torch.zeros(5), 20
    for _ in range(4):
        ran = steps.run()
    assert steps.session.current.is_settled and saved(ran) <= 75
    assert steps.session.current.held_sizes == [StepSize(20)]


def test_a_gradient_counts_though_its_parameter_took_the_id_of_one_that_is_gone() -> None:
    session, data = Session(1), torch.zeros(3)
    parameter = torch.nn.Parameter(data)
    session.see((parameter,))
    assert session.has_run_with([parameter])
    number = id(parameter)
    del parameter
    others = [torch.nn.Parameter(data) for _ in range(1000)]
    parameter = next(each for each in others if id(each) == number)
    assert not session.has_run_with(others)
    session.see((parameter,))
    parameter.grad = torch.zeros(3)
    assert session._gradient_bytes() == 12 and session.has_run_with([parameter])


def test_garbage_of_the_last_step_that_goes_during_a_call_leaves_that_call() -> None:
    """A measured forward was dropped, and is freed while the first call of the next one runs."""
    graph, meter = FakeGraph(7), TimedMeter(lambda variant: 1.0)
    meter.session = Session(10_000, chooser=VariantsOnly(model_bytes=BASE), num_blocks=2, meter_of=lambda _: meter)
    meter.session.first_variant(graph)
    x = torch.ones(1, requires_grad=True)
    for _ in range(2):
        run = meter.session.next_run(graph)
        y = x * 2
        run.end((y,))
        y.backward()
    run, y = meter.session.next_run(graph), x * 2
    run.end((y,))
    run = meter.session.next_run(graph)
    del y
    z = x * 2
    run.end((z,))
    assert meter.session._calls.numbers == (7,) and meter.session._calls.begun == (7, 7)


def test_steps_that_fail_after_settled_ones_change_nothing() -> None:
    steps = Steps(BASE + 95, lambda ran: BASE + saved(ran))
    for _ in range(4):
        ran = steps.run()
    run = steps.session.next_run(steps.graph)  # fails in the first call
    assert run.variant == ran[0] and steps.run() == ran
    x = steps.forward(2, steps.graph)  # fails in the third call
    steps.session.next_run(steps.graph)
    del x
    assert steps.run() == ran
    x = steps.forward(3, steps.graph)
    x.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        x.backward()
    del x
    assert steps.run() == ran and steps.run() == ran
    assert list(steps.session.sequences.by_numbers) == [(7, 7, 7)] and steps.meter.num_resets == 1


def test_a_settled_plan_is_switched_off_and_on_again() -> None:
    steps = Steps(BASE + 95, lambda ran: BASE + saved(ran))
    for _ in range(4):
        ran = steps.run()
    for num_calls in (3, 5):
        steps.session.enable(False)
        assert steps.run(num_calls) == [VARIANTS[0]] * num_calls
        steps.session.enable(True)
        assert steps.run() == ran and steps.session.current.is_settled
    assert list(steps.session.sequences.by_numbers) == [(7, 7, 7)] and steps.meter.num_resets == 1


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


def test_without_a_meter_predictions_decide() -> None:
    steps = Steps(BASE + 95, None)
    assert all(saved(steps.run()) <= 95 for _ in range(3))
    assert "measured" not in describe(steps.session)
    hopeless = Steps(BASE + 25, None)
    hopeless.run()  # three calls were a guess
    with pytest.raises(InfeasibleBudgetError, match="predicted") as caught:
        hopeless.run()
    assert caught.value.floor_bytes == BASE + 30


def test_calls_that_were_not_foreseen_run_the_smallest_until_they_are() -> None:
    steps = Steps(BASE + 130, None)
    assert steps.run(3) == [VARIANTS[0]] * 3
    assert steps.run(4) == [*[VARIANTS[0]] * 3, VARIANTS[-1]]
    assert saved(steps.run(4)) <= 130
    assert saved(steps.run(3)) <= 130, "as the first three of four"


def test_a_step_that_may_have_more_calls_runs_what_is_chosen_for_the_longest() -> None:
    """As where layers are skipped at random. Until longer ones have not come for some time."""
    steps = Steps(BASE + 130, lambda ran: BASE + saved(ran))
    for _ in range(4):
        steps.run(3), steps.run(5), steps.run(4)
    for num_calls in (5, 3, 4, 5):
        assert saved(steps.run(num_calls)) <= 130
    longest = steps.run(5)
    assert steps.run(3) == longest[:3] and steps.run(4) == longest[:4] and steps.run(5) == longest
    for _ in range(210):
        steps.run(3)
    assert steps.run(3) == [VARIANTS[0]] * 3
    assert steps.session.current.is_settled and steps.session.current.peaks, "by measuring"


def test_several_forwards_with_one_backward_are_one_step() -> None:
    steps = Steps(BASE + 130, None)
    for _ in range(2):
        first, second = steps.forward(3, steps.graph), steps.forward(3, steps.graph)
        (first + second).backward()
    assert len(steps.session.sequences.current.numbers) == 6
    both = [*(steps.forward(3, steps.graph), steps.ran)[1]]
    assert saved(both) <= 130


def test_a_forward_without_a_backward_is_forgotten() -> None:
    steps = Steps(BASE + 130, None)
    for _ in range(5):
        steps.run(3, has_backward=False)
        gc.collect()
    assert steps.run(3) == steps.run(3) == [VARIANTS[0]] * 3
    assert steps.session.sequences.current.numbers == (7, 7, 7)


def test_a_forward_that_fails_is_forgotten() -> None:
    steps = Steps(BASE + 130, None)
    steps.run()
    steps.session.next_run(steps.graph)  # and nothing comes of it
    assert steps.run() == [VARIANTS[0]] * 3
    steps.run()
    assert steps.session.sequences.current.numbers == (7, 7, 7)


def test_graphs_that_are_gone_are_not_planned_for() -> None:
    steps = Steps(BASE + 130, None)
    steps.run()
    steps.run()
    steps.graph = FakeGraph(8)
    gc.collect()
    assert steps.session.graphs == []
    steps.session.first_variant(steps.graph)
    assert steps.run() == steps.run() == [VARIANTS[0]] * 3
    assert list(steps.session.sequences.by_numbers) == [(8, 8, 8)]


def test_two_courses_are_each_measured() -> None:
    """Batches of two shapes, one after the other: two graphs, each with its own plan."""
    steps = Steps(BASE + 95, lambda ran: BASE + 13 + saved(ran))
    other = FakeGraph(9)
    steps.run()
    steps.session.first_variant(other)
    for _ in range(12):
        one, two = steps.run(), steps.run(graph=other)
    assert saved(one) <= 82 and saved(two) <= 82
    assert all(sequence.is_settled for sequence in steps.session.sequences.by_numbers.values())


def test_what_graphs_hand_to_one_another_counts() -> None:
    graph = FakeGraph(1)
    graph.handed_out_bytes, graph.batch_bytes = 5, 3
    assert VariantsOnly(model_bytes=BASE).choose([graph] * 3, 1 << 30).peak_bytes == BASE + 3 + 3 * (40 + 5)


def test_what_a_checkpoint_may_replay_always_runs_the_same() -> None:
    steps = Steps(BASE + 40, None)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert steps.run() == [VARIANTS[0]] * 3
    assert steps.session._calls.numbers == ()


def linked(host_bytes: int, link_bytes_per_s: float) -> VariantsOnly:
    """A chooser that knows of a link, which the CPU has none of."""
    chooser = VariantsOnly(model_bytes=BASE, host_bytes=host_bytes)
    chooser.__dict__["_link_bytes_per_s"] = link_bytes_per_s
    return chooser


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


KIB = 1 << 10


class Moving:
    """Steps of three calls, of graphs that each save tensors of another size. Without the link they do not fit."""

    def __init__(self, *sizes: int, host_bytes: int) -> None:
        self.graphs = [FakeGraph(number) for number in range(len(sizes))]
        self.sizes = dict(zip(self.graphs, sizes, strict=True))
        chooser = linked(host_bytes, 1e9)
        self.session = Session(BASE + 64 * KIB, chooser=chooser, num_blocks=3, meter_of=lambda device: None)
        for graph, size in self.sizes.items():
            graph.variants = (Variant(None, 24 * KIB, (size, size), 0, 0, 0.0), Variant((), KIB, (), 0, 0, 1.0))
            self.session.first_variant(graph)
            self.step(graph).backward()

    def step(self, graph: FakeGraph, num_calls: int = 3) -> Tensor:
        x = torch.ones(self.sizes[graph] // 4, requires_grad=True)
        for _ in range(num_calls):
            run = self.session.next_run(graph)
            with run.context:
                x = (x * 1.5).sin().exp()  # each saves a tensor
            run.end((x,))
        return x.sum()

    @property
    def held_bytes(self) -> int:
        assert self.session.store is not None
        return self.session.store.stats().held_bytes


def test_courses_share_one_store() -> None:
    """Host memory is locked once, and what may be used of it is not allowed to each."""
    steps = Moving(4 * KIB, 8 * KIB, host_bytes=33 * KIB)
    small, large = steps.graphs
    waiting = steps.step(large)
    waiting.backward(retain_graph=True)
    store = steps.session.store
    assert steps.held_bytes == 32 * KIB
    steps.step(small)
    choices = [sequence.choice for sequence in steps.session.sequences.by_numbers.values()]
    assert {choice.in_flight_bytes for choice in choices} == {8 * KIB, 16 * KIB}
    assert steps.session.store is store and steps.held_bytes == 32 * KIB, "no room for more"
    waiting.backward()
    assert steps.held_bytes == 0
    loss = steps.step(small)
    assert steps.held_bytes == 16 * KIB and store._tiers.in_flight_bytes == 8 * KIB
    loss.backward()
    assert steps.held_bytes == 0


@pytest.mark.parametrize("num_calls", [1, 2, 3, 4, 6])
def test_nothing_is_left_in_the_store_however_many_calls_a_step_makes(num_calls: int) -> None:
    steps = Moving(8 * KIB, host_bytes=1 << 20)
    (graph,) = steps.graphs
    for _ in range(3):
        steps.step(graph, num_calls).backward()
        assert steps.held_bytes == 0
        steps.step(graph, num_calls)  # and nothing comes of it
        assert steps.held_bytes == 0
        first, second = steps.step(graph), steps.step(graph, num_calls)
        (first + second).backward()
        assert steps.held_bytes == 0


class TimedMeter(StepMeter):
    """Measures peaks as predicted, and the seconds that `seconds` gives for each variant and moved byte.

    Every step takes `more_bytes` more than predicted, one with moves also `moving_bytes`.
    """

    def __init__(
        self,
        seconds: Callable[[Variant], float],
        moved_byte_s: float = 0.0,
        *,
        more_bytes: int = 0,
        moving_bytes: int = 0,
    ) -> None:
        super().__init__()
        self.session: Session | None = None
        self._seconds, self._moved_byte_s = seconds, moved_byte_s
        self._more_bytes, self._moving_bytes = more_bytes, moving_bytes

    def reset(self) -> None:
        pass

    def peak_bytes(self) -> int:
        return self._whole_profile().peak_bytes

    def profile(self) -> StepProfile:
        profile = self._whole_profile()
        return StepProfile((), 0, 0, profile.seconds, is_timed_only=True) if self.times_only else profile

    def _whole_profile(self) -> StepProfile:
        choice, calls = self.session.sequences.current.choice, []
        held = BASE + self._more_bytes + (self._moving_bytes if any(choice.moved) else 0)
        for variant, moved in zip(choice.variants, choice.moved, strict=True):
            after = held + variant.saved_bytes
            calls.append(CallProfile(held, after, after, after, self._seconds(variant)))
            held += variant.saved_bytes - sum(moved)
        seconds = sum(map(self._seconds, choice.variants)) + self._moved_byte_s * sum(map(sum, choice.moved))
        return StepProfile(tuple(calls), held, BASE, seconds)


def settled(session: Session, graph: FakeGraph) -> VariantChoice:
    session.first_variant(graph)
    spoil(session)
    for _ in range(90):
        if session.current is not None and session.current.is_settled:
            break
        x = torch.ones(1, requires_grad=True)
        for _ in range(3):
            run = session.next_run(graph)
            x = x * 2
            run.end((x,))
        x.backward()
    assert session.current is not None and session.current.is_settled
    return session.current.choice


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


@pytest.mark.parametrize("seed", sweep(range(60), keep=20))
def test_host_memory_never_makes_a_step_slower(seed: int) -> None:
    """Whatever copies cost and take in reality: the choice without moves that holds is timed too."""
    rng = random.Random(seed)
    sizes = sorted(rng.sample(range(10, 100), 3), reverse=True)
    extra = [0.0, rng.random(), 1 + 3 * rng.random()]
    moved_byte_s, budget = rng.choice([0.0, 0.001, 0.1]), BASE + rng.randrange(3 * sizes[-1], 3 * sizes[0])
    more_bytes, moving_bytes = rng.randrange(-20, 20), rng.choice([0, 0, 5, 40])
    found = []
    for host_bytes in (0, 1000):
        graph = FakeGraph(7)
        graph.variants = tuple(
            Variant(None if not number else (number,), size, (size - 5,), 0, 0, extra_s)
            for number, (size, extra_s) in enumerate(zip(sizes, extra, strict=True))
        )
        meter = TimedMeter(
            lambda variant: 4 + 2 * variant.extra_s, moved_byte_s, more_bytes=more_bytes, moving_bytes=moving_bytes
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
