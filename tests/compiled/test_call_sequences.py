"""Where steps end, which calls belong to them, and which earlier step each of them repeats. Without compiling."""

from __future__ import annotations

import gc
import sys

import pytest
import torch

from compiled.fake_steps import (
    BASE,
    VARIANTS,
    FakeGraph,
    Steps,
    TimedMeter,
    VariantsOnly,
    saved,
)
from lowtide.compiled.session import Session
from lowtide.errors import InfeasibleBudgetError


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


def test_a_backward_through_an_earlier_step_does_not_end_this_one() -> None:
    steps = Steps(BASE + 95, lambda ran: BASE + saved(ran))
    for _ in range(4):
        ran = steps.run()
    earlier = steps.forward(3, steps.graph)
    earlier.backward(retain_graph=True)
    x = steps.forward(2, steps.graph)
    earlier.backward()
    run = steps.session.next_run(steps.graph)
    y = x * 2
    run.end((y,))
    y.backward()
    assert run.variant == ran[2] and steps.run() == ran
    assert list(steps.session.sequences.by_numbers) == [(7, 7, 7)]


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


def test_shorter_steps_over_the_budget_correct_what_is_chosen_for_the_longest() -> None:
    """Which may not come again for long."""
    steps = Steps(BASE + 130, lambda ran: BASE + 3 * saved(ran))
    for num_calls in (3, 5, *[3] * 8):
        ran = steps.run(num_calls)
    assert 3 * saved(ran) <= 130
    hopeless = Steps(BASE + 25, lambda ran: BASE + saved(ran))
    hopeless.run(3), hopeless.run(5)
    with pytest.raises(InfeasibleBudgetError):
        for _ in range(12):
            hopeless.run(3)


def test_shorter_steps_over_the_budget_do_not_wait_for_a_longest_that_held() -> None:
    """As where blocks were replaced by new ones, which are not compiled."""
    steps = Steps(BASE + 130, lambda ran: BASE + (saved(ran) if len(ran) == 6 else 200 + saved(ran)))
    for _ in range(6):
        steps.run(6)
    assert steps.session.current.is_settled
    with pytest.raises(InfeasibleBudgetError):
        for _ in range(12):
            steps.run(2)


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


def test_calls_of_a_failed_forward_whose_error_is_kept_are_left_out() -> None:
    steps = Steps(BASE + 130, lambda ran: BASE + 3 * saved(ran))
    kept = [steps.forward(2, steps.graph)]  # fails in the third call
    for _ in range(8):
        ran = steps.run()
    assert 3 * saved(ran) <= 130 and steps.session.sequences.current.peaks
    kept.append(steps.forward(3, steps.graph))  # fails in the loss
    steps.run(), steps.run()
    assert steps.run() == ran and list(steps.session.sequences.by_numbers) == [(7, 7, 7)]


def test_a_budget_is_refused_though_the_error_of_a_failed_forward_is_kept() -> None:
    steps = Steps(BASE + 25, lambda ran: BASE + saved(ran))
    kept = steps.forward(2, steps.graph)
    with pytest.raises(InfeasibleBudgetError):
        for _ in range(12):
            steps.run()
    assert kept.requires_grad


def test_calls_that_are_alive_though_the_loss_does_not_use_them_are_measured() -> None:
    steps = Steps(BASE + 130, lambda ran: BASE + 3 * saved(ran))
    for _ in range(8):
        kept = steps.forward(2, steps.graph)
        ran = steps.run()
    assert 3 * saved(ran) <= 130 and steps.session.sequences.current.peaks
    assert list(steps.session.sequences.by_numbers) == [(7,) * 5] and kept.requires_grad


def test_a_backward_that_fails_teaches_nothing() -> None:
    steps = Steps(BASE + 95, lambda ran: BASE + saved(ran))
    x = torch.ones(1, requires_grad=True)
    for position in range(3):
        run = steps.session.next_run(steps.graph)
        x = x * 2
        run.end((x,))
        if position == 0:
            x.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        x.backward()
    steps.meter.measured = 10 * BASE
    for _ in range(6):
        ran = steps.run()
    assert saved(ran) <= 95 and steps.session.sequences.current.numbers == (7, 7, 7)
    assert steps.session.sequences.current.peaks == [BASE + saved(ran)]


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


def test_settled_steps_leave_nothing_to_the_garbage_collector() -> None:
    steps = Steps(BASE + 95, lambda ran: BASE + saved(ran))
    for _ in range(4):
        steps.run()
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            steps.run()
        assert gc.collect() == 0
    finally:
        gc.enable()


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
    assert functions_entered(64) - functions_entered(4) <= 7 * (64 - 4)
