"""Every decision of `fit` and of its handle is the same on all ranks, and a failure on one rank ends on all."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import lowtide
from distributed.jobs import Net, Raised, batch, gradients, rank, run_ranks, same, seeded, succeeded
from distributed.test_data_parallel import FAST, loss_of, tight_budget
from lowtide.api import measure
from lowtide.distributed.agreement import plan_hash
from lowtide.plans import Move, Plan, Recompute, Split
from lowtide.solvers.solve import REMEMBERED


def test_the_hash_is_of_decisions_alone() -> None:
    regions = (Recompute("a", 0, (1, 2)), Recompute("b", 1))
    plan = Plan(regions=regions, moves=(Move("c"),))
    assert plan_hash(plan) == plan_hash(replace(plan, regions=regions[::-1], peak_bytes=7, fingerprint="x"))
    others = [replace(plan, moves=()), replace(plan, regions=regions[:1]), replace(plan, regions=(regions[0],) * 2)]
    others += [replace(plan, regions=(replace(regions[0], keep_ops=(1,)), regions[1]))]
    others += [replace(plan, splits=(Split("d", 4),)), replace(plan, splits=(Split("d", 8),))]
    assert len({plan_hash(each) for each in (plan, *others)}) == 7


def made(dropout: float = 0.1) -> Net:
    torch.manual_seed(0)
    return Net(dropout=dropout)


def one_step(model: nn.Module, x: Tensor, seed: int = 3) -> list[Tensor | None]:
    model.zero_grad()
    with seeded(seed):
        loss_of(model)(x).backward()
    return gradients(model)


def before_wrapping() -> Any:
    """The plan is made for the bare model, which is wrapped later; ranks have budgets of their own."""
    model = made()
    budget = tight_budget(model, batch())
    handle = lowtide.fit(model, loss_of(model), batch(), budget=budget + 1000 * rank(), **FAST)
    expected = one_step(DistributedDataParallel(made()), batch())
    return {
        "same": same(expected, one_step(DistributedDataParallel(model), batch())),
        "hash": plan_hash(handle.plan),
        "is smallest": handle.plan.budget_bytes == budget,
        "regions": len(handle.plan.regions),
    }


def uneven() -> Any:
    """The second rank has the longer batch: the plan of the first has to hold there too."""
    model = DistributedDataParallel(made())
    x = batch(128 + 128 * rank())
    budget = max(gather(tight_budget(model, x)))
    handle = lowtide.fit(model, loss_of(model), x, budget=budget, **FAST)
    bare = made()
    predicted = lowtide.plan(bare, loss_of(bare), x, budget=budget, time_limit_s=1.0)
    return {
        "peak": handle.measured_peak_bytes,
        "budget": budget,
        "hash": plan_hash(handle.plan),
        "planned": (plan_hash(predicted), predicted.peak_bytes),
    }


class Counter:
    """A number that `fit` does not put back."""

    hidden_from_replay = True
    value = 0


def tuned() -> Any:
    """Ranks that measure different times, and steps that take longer on one, keep the same candidate."""
    model = DistributedDataParallel(made())
    num_steps, plain = Counter(), measure.seconds_of

    def disturbed(*args: Any) -> float:
        return plain(*args) * (1 + 5 * ((num_steps.value + rank()) % 2))

    measure.seconds_of = disturbed

    def counted(x: Tensor) -> Tensor:
        num_steps.value += 1
        return loss_of(model)(x)

    handle = lowtide.fit(model, counted, batch(), budget=tight_budget(model, batch()), tune_s=0.5, time_limit_s=1.0)
    measure.seconds_of = plain
    return {"hash": plan_hash(handle.plan), "steps": num_steps.value, "seconds": handle.plan.measured_step_s}


def gather(item: Any) -> list[Any]:
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, item)
    return found


def infeasible() -> Any:
    model = DistributedDataParallel(made())
    budget = "1GiB" if rank() == 0 else 1000
    try:
        lowtide.fit(model, loss_of(model), batch(), budget=budget, **FAST)
    except lowtide.InfeasibleBudgetError as error:
        floor = error.floor_bytes
        return {"floor": floor, "clean": not any("forward" in vars(m) for m in model.modules())}
    return {}


def failing_forward() -> Any:
    """The second rank's third forward raises: before the collectives of the step, so the first rank must be told."""
    model, num = made(), [0]

    def loss_fn(x: Tensor) -> Tensor:
        num[0] += 1
        if num[0] == 3 and rank() == 1:
            raise KeyError("a bad batch")
        return loss_of(model)(x)

    try:
        lowtide.fit(model, loss_fn, batch(), budget="1GiB", **FAST)
    except Exception as error:
        return type(error).__name__, str(error)


def larger_inputs() -> Any:
    """Inputs grow on one rank only: a bare forward uses the smallest plan there; `step` plans on all ranks."""
    model, plain = DistributedDataParallel(made()), DistributedDataParallel(made())
    handle = lowtide.fit(model, loss_of(model), batch(), budget=tight_budget(model, batch()), **FAST)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lowtide").addHandler(handler)
    x = batch(256 + 256 * rank())
    forward_same = same(one_step(plain, x), one_step(model, x))
    num_plans = len(handle.shapes.all)
    expected = one_step(plain, x)
    model.zero_grad()
    with seeded(3):
        handle.step(loss_of(model), x)
    return {
        "same": forward_same and same(expected, gradients(model)),
        "in forward": num_plans - 1,
        "warned": sum("smallest peak" in text for text in records),
        "replans": [replan.planned_for for replan in handle.stats().replans],
        "hashes": plan_hash(handle.shapes.largest().plan),
    }


def out_of_memory() -> Any:
    """The second rank runs out of memory in a forward of `handle.step`: all ranks start over under a smaller plan."""
    model, plain = DistributedDataParallel(made(0.0)), DistributedDataParallel(made(0.0))
    handle = lowtide.fit(model, loss_of(model), batch(), budget=tight_budget(model, batch(), 0.8), **FAST)
    peak, num = handle.plan.peak_bytes, [0]

    def loss_fn(x: Tensor) -> Tensor:
        num[0] += 1
        if num[0] == 1 and rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss_of(model)(x)

    model.zero_grad()
    handle.step(loss_fn, batch())
    return {
        "same": same(one_step(plain, batch()), gradients(model)),
        "smaller": handle.plan.peak_bytes < peak,
        "runs": num[0],
        "events": len(handle.stats().out_of_memory),
        "hash": plan_hash(handle.plan),
    }


def cached(folder: str) -> Any:
    """Only the first rank has the cache file; the second follows."""
    model = DistributedDataParallel(made())
    budget, path = tight_budget(model, batch()), Path(folder, f"{rank()}.json")
    for _ in range(2):
        handle = lowtide.fit(model, loss_of(model), batch(), budget=budget, cache=path, **FAST)
        names = [trial.name for trial in handle.candidates]
        handle.remove()
    return {"hash": plan_hash(handle.plan), "names": names, "is written": path.exists()}


def refitted() -> Any:
    model = DistributedDataParallel(made())
    handle = lowtide.fit(model, loss_of(model), batch(), budget=tight_budget(model, batch(384)), **FAST)
    first = plan_hash(handle.plan)
    handle.refit(loss_of(model), batch(384))
    return {"first": first, "hash": plan_hash(handle.plan), "shapes": handle.plan.input_shapes}


def all_scenarios() -> dict[str, Any]:
    scenarios = [before_wrapping, uneven, tuned, infeasible, failing_forward, larger_inputs, out_of_memory]
    return {scenario.__name__: scenario() for scenario in scenarios}


@pytest.fixture(scope="module")
def scenarios() -> list[dict[str, Any]]:
    return succeeded(run_ranks(all_scenarios))


@pytest.mark.parametrize("name", ["before_wrapping", "uneven", "tuned", "out_of_memory"])
def test_ranks_have_one_plan(scenarios: list[dict[str, Any]], name: str) -> None:
    assert scenarios[0][name]["hash"] == scenarios[1][name]["hash"]


def test_a_plan_made_before_wrapping_holds_the_smallest_budget(scenarios: list[dict[str, Any]]) -> None:
    for found in (each["before_wrapping"] for each in scenarios):
        assert found["same"] and found["is smallest"] and found["regions"]


def test_the_peak_is_the_highest_of_any_rank(scenarios: list[dict[str, Any]]) -> None:
    one, other = (each["uneven"] for each in scenarios)
    assert one["peak"] == other["peak"] <= one["budget"]
    assert one["planned"] == other["planned"] and one["planned"][1] <= one["budget"]


def test_measured_times_are_one_ranks(scenarios: list[dict[str, Any]]) -> None:
    one, other = (each["tuned"] for each in scenarios)
    assert one == other and one["steps"] > 10


def test_a_budget_that_one_rank_cannot_meet(scenarios: list[dict[str, Any]]) -> None:
    one, other = (each["infeasible"] for each in scenarios)
    assert one == other and one["clean"] and one["floor"] > 1000


def test_an_exception_on_one_rank(scenarios: list[dict[str, Any]]) -> None:
    one, other = (each["failing_forward"] for each in scenarios)
    assert one[0] == "RankError" and "rank 1 failed" in one[1] and "a bad batch" in one[1]
    assert other == ("KeyError", "'a bad batch'")


def test_larger_inputs_on_one_rank(scenarios: list[dict[str, Any]]) -> None:
    one, other = (each["larger_inputs"] for each in scenarios)
    assert one["same"] and other["same"]
    assert (one["in forward"], other["in forward"]) == (0, 1) and (one["warned"], other["warned"]) == (0, 1)
    assert one["replans"] == other["replans"] == [((512, 16),)] and one["hashes"] == other["hashes"]


def test_out_of_memory_on_one_rank(scenarios: list[dict[str, Any]]) -> None:
    for found in (each["out_of_memory"] for each in scenarios):
        assert found["same"] and found["smaller"] and found["runs"] == 2 and found["events"] == 1


def refitted_and_cached(folder: str) -> dict[str, Any]:
    return {"refitted": refitted(), "cached": cached(folder)}


@pytest.mark.slow
def test_refit_and_cache(tmp_path: Path) -> None:
    results = succeeded(run_ranks(refitted_and_cached, str(tmp_path)))
    for number, each in enumerate(results):
        assert each["refitted"]["shapes"] == ((384, 16),)
        assert each["cached"]["is written"] == (number == 0) and each["cached"]["names"] == [REMEMBERED]
    for name in ("refitted", "cached"):
        assert results[0][name]["hash"] == results[1][name]["hash"]


def stuck_in_a_collective() -> None:
    """The second rank raises in the middle of a step, while the first waits for it in DDP's all-reduce."""
    model, num = DistributedDataParallel(made()), [0]

    def loss_fn(x: Tensor) -> Tensor:
        num[0] += 1
        if num[0] == 3 and rank() == 1:
            raise KeyError("a bad batch")
        return loss_of(model)(x)

    lowtide.fit(model, loss_fn, batch(), budget="1GiB", **FAST)


def test_a_rank_stuck_in_a_collective_is_told_after_its_timeout() -> None:
    one, other = run_ranks(stuck_in_a_collective, group_s=3)
    assert isinstance(one, Raised) and isinstance(other, Raised)
    assert (one.kind, other.kind) == ("RankError", "KeyError")
    assert "rank 1 failed" in one.text and "a bad batch" in one.text
