"""`fit_pipeline`: a plan per stage within its budget, and the gradients of the same schedule without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import lowtide
from distributed.jobs import Block, gradients, run_ranks, same, succeeded
from lowtide.api.fit_pipeline import in_flight
from sweeps import sweep

MICROBATCHES = 4


class Stage(nn.Module):
    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16, dropout=0.1) for _ in range(3))
        self.head = nn.Linear(16, 4) if is_last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Pipeline:
    """A schedule with its stages, `num_stages` in all."""

    def __init__(self, kind: Any, num_stages: int) -> None:
        rank, world = distributed.get_rank(), distributed.get_world_size()
        torch.manual_seed(0)
        modules = [Stage(number == num_stages - 1) for number in range(num_stages)]
        is_folded = kind is ScheduleZBVZeroBubble  # the first rank has the first and the last stage
        places = [min(number, num_stages - 1 - number) if is_folded else number % world for number in range(num_stages)]
        own = [number for number in range(num_stages) if places[number] == rank]
        stages = [PipelineStage(modules[n], n, num_stages, torch.device("cpu")) for n in own]
        self.model = nn.ModuleList(modules[n] for n in own)
        is_multi = kind not in (Schedule1F1B, ScheduleGPipe)
        self.schedule = kind(stages if is_multi else stages[0], MICROBATCHES, loss_fn=nn.functional.mse_loss)
        self.is_first, self.is_last = 0 in own, num_stages - 1 in own

    def step(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        x, target = torch.randn(1024, 16, generator=generator), torch.randn(1024, 4, generator=generator)
        torch.manual_seed(seed)
        given = {"target": target, "losses": []} if self.is_last else {}
        self.schedule.step(*([x] if self.is_first else []), **given)


SCHEDULES = {
    "1f1b": (Schedule1F1B, 2),
    "gpipe": (ScheduleGPipe, 2),
    "interleaved": (ScheduleInterleaved1F1B, 4),
    "split backward": (ScheduleInterleavedZeroBubble, 4),  # gradients of inputs first, of weights later
    "split backward, folded": (ScheduleZBVZeroBubble, 4),
}


def planned(name: str) -> dict[str, Any]:
    plain, pipeline = Pipeline(*SCHEDULES[name]), Pipeline(*SCHEDULES[name])
    whole = lowtide.fit_pipeline(pipeline.schedule, pipeline.step, budget="1GiB", time_limit_s=1.0)
    before = whole.measured_peak_bytes
    whole.remove()
    fixed = 2 * sum(parameter.nbytes for parameter in pipeline.model.parameters())
    budget = int(fixed + 0.65 * (before - fixed))
    handle = lowtide.fit_pipeline(pipeline.schedule, pipeline.step, budget=budget, time_limit_s=1.0)
    clean = all(gradient is None for gradient in gradients(pipeline.model))
    results = []
    for seed in (1, 2):
        plain.step(seed)
        pipeline.step(seed)
        results.append(same(gradients(plain.model), gradients(pipeline.model)))
    return {
        "same": results == [True, True],
        "clean": clean,
        "peaks": (handle.measured_peak_bytes, budget, before),
        "in flight": handle.in_flight,
        "regions": {number: len(each.plan.regions) for number, each in handle.handles.items()},
        "plain": [each.plan.is_plain for each in whole.handles.values()],
    }


@pytest.mark.parametrize("name", sweep(SCHEDULES, keep=1))
def test_each_stage_holds_its_budget(name: str) -> None:
    results = succeeded(run_ranks(planned, name))
    for each in results:
        measured, budget, before = each["peaks"]
        assert each["same"] and each["clean"] and measured <= budget < before
        assert all(each["plain"]) and any(each["regions"].values())
    expected = {"1f1b": [{0: 2}, {1: 1}], "gpipe": [{0: MICROBATCHES}, {1: MICROBATCHES}]}
    if name in expected:
        assert [each["in flight"] for each in results] == expected[name]


def broken_on_one_rank() -> tuple[str, str]:
    pipeline = Pipeline(Schedule1F1B, 2)
    if distributed.get_rank() == 1:
        pipeline.schedule.pipeline_order = None
    try:
        lowtide.fit_pipeline(pipeline.schedule, pipeline.step, budget="1GiB", time_limit_s=1.0)
    except lowtide.LowtideError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_schedule_that_one_rank_cannot_plan_for() -> None:
    """The other rank is told at once: it does not begin a step in which it would wait."""
    one, other = succeeded(run_ranks(broken_on_one_rank, group_s=60, limit_s=30))
    assert one[0] == other[0] == "LowtideError"
    assert other[1].startswith("Schedule1F1B has no list of its actions") and one[1].startswith("rank 1 failed")


def test_microbatches_in_flight() -> None:
    split = [(0, "F"), (0, "F"), (0, "I"), (0, "F"), (0, "W")]
    assert [counts[0] for counts in in_flight(split)] == [1, 2, 3]


def too_small() -> tuple[str, bool]:
    pipeline = Pipeline(Schedule1F1B, 2)
    budget = "1GiB" if distributed.get_rank() else 1000
    try:
        lowtide.fit_pipeline(pipeline.schedule, pipeline.step, budget=budget, time_limit_s=1.0)
    except lowtide.InfeasibleBudgetError as error:
        return str(error), not any("forward" in vars(module) for module in pipeline.model.modules())
    return "", False


def test_a_stage_that_cannot_fit_ends_on_all_ranks() -> None:
    (own, clean), (other, also_clean) = succeeded(run_ranks(too_small))
    assert own.startswith("stages [0] need") and other.startswith("on rank 0: stages [0] need")
    assert clean and also_clean
