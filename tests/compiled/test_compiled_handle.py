"""Several compiled graphs as one step: ops in the order in which they run, memory and time add up."""

from __future__ import annotations

import pytest

import lowtide
from compiled.test_backend import MLP, Stack, squared_of_data
from kernelless import COMPILED_MARKS, PLENTY, session_of
from lowtide.compiled.compiled_handle import joined_step
from lowtide.plans.step_plan import Plan
from lowtide.simulator.timeline import simulate

pytestmark = COMPILED_MARKS


def test_joined_steps_add_up() -> None:
    model = lowtide.compile(Stack(MLP(), MLP(), MLP()), budget=PLENTY)
    squared_of_data(model).backward()
    first, other = (graph.step for graph in session_of(model).graphs)
    assert first is not None and other is not None
    alone = joined_step([other], [("blocks.1", "MLP")])
    for keeps in ((), session_of(model).graphs[1].default):
        plan = Plan(engine="compiled", keeps=keeps, budget_bytes=1)
        # Alone, the output counts until the end; joined, until its backward begins.
        difference = simulate(other, plan).peak_bytes - simulate(alone, plan).peak_bytes
        assert 0 <= difference <= other.handed_out_bytes
        assert simulate(alone, plan).extra_s == pytest.approx(simulate(other, plan).extra_s)
    steps = [first, other, other]
    joined = joined_step(steps, [(f"blocks.{index}", "MLP") for index in range(3)])
    firsts = [call.first for call in joined.calls if call.parent < 0]
    assert firsts == [0, first.num_forward, first.num_forward + other.num_forward]
    assert joined.num_forward == sum(step.num_forward for step in steps)
    assert [op.name for op in joined.ops] == [
        op.name
        for ops in (
            *(step.ops[: step.num_forward] for step in steps),
            *(step.ops[step.num_forward :] for step in reversed(steps)),
        )
        for op in ops
    ]
    assert joined.saved_bytes == sum(step.saved_bytes for step in steps)
    assert joined.step_s == pytest.approx(sum(step.step_s for step in steps))
    assert {call.path for call in joined.calls if call.parent < 0} == {"blocks.0", "blocks.1", "blocks.2"}
    least = simulate(joined, Plan(engine="compiled", keeps=(), budget_bytes=1))
    assert least.peak_bytes < simulate(joined).peak_bytes
