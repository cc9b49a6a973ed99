"""Sessions, without compiling: measured peaks lead to other variants, and a plan can be switched off and on."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from compiled.fake_steps import (
    BASE,
    VARIANTS,
    FakeGraph,
    Steps,
    linked,
    saved,
)
from lowtide.compiled.call_sequences import StepSize
from lowtide.compiled.compiled_handle import describe
from lowtide.compiled.session import Session
from lowtide.errors import InfeasibleBudgetError
from lowtide.solvers.shared_budget import Variant


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


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("least_bytes", [0, 100])
def test_batches_of_ever_new_lengths(least_bytes: int, seed: int) -> None:
    """No two steps have the same size, so each choice is measured once, and smaller steps come between."""
    steps, size = Steps(BASE + 95, lambda ran: BASE + least_bytes + saved(ran) + size), 0
    steps.graph.torch_ways = {part: Variant((0,), 11, (), 0, 0, 8.0, part) for part in (0.3, 0.5)}
    sizes, peaks = random.Random(seed), []
    is_refused = False
    for _ in range(150 if least_bytes == 0 else 40):
        size = sizes.randrange(1, 60)
        try:
            peaks.append(BASE + least_bytes + saved(steps.run(input_bytes=size // 3 + 1)) + size)
        except InfeasibleBudgetError as error:
            is_refused = True
            assert BASE + 95 < error.floor_bytes <= BASE + least_bytes + 30 + 60 + 1
            break
    assert is_refused == (least_bytes > 0)
    assert is_refused or max(peaks[75:]) <= BASE + 95


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


def test_without_a_meter_predictions_decide() -> None:
    steps = Steps(BASE + 95, None)
    assert all(saved(steps.run()) <= 95 for _ in range(3))
    assert "measured" not in describe(steps.session)
    hopeless = Steps(BASE + 25, None)
    hopeless.run()  # three calls were a guess
    with pytest.raises(InfeasibleBudgetError, match="predicted") as caught:
        hopeless.run()
    assert caught.value.floor_bytes == BASE + 30


def test_two_sequences_are_each_measured() -> None:
    """Batches of two shapes, one after the other: two graphs, each with its own plan."""
    steps = Steps(BASE + 95, lambda ran: BASE + 13 + saved(ran))
    other = FakeGraph(9)
    steps.run()
    steps.session.first_variant(other)
    for _ in range(12):
        one, two = steps.run(), steps.run(graph=other)
    assert saved(one) <= 82 and saved(two) <= 82
    assert all(sequence.is_settled for sequence in steps.session.sequences.by_numbers.values())


def test_what_a_checkpoint_may_replay_always_runs_the_same() -> None:
    steps = Steps(BASE + 40, None)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert steps.run() == [VARIANTS[0]] * 3
    assert steps.session._calls.numbers == ()


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


def test_sequences_share_one_store() -> None:
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
