"""Ranks that train a compiled model run the same variants, whatever they measure, and raise together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import lowtide
from distributed.jobs import Net, Raised, batch, gradients, rank, run_ranks, same, succeeded
from kernelless import Compiler, floor_of, session_of, squeeze
from lowtide import _compat
from lowtide.compiled.compiled_handle import describe
from lowtide.compiled.session import Session
from lowtide.compiled.step_profile import ProfilerMeter, StepProfile
from lowtide.errors import InfeasibleBudgetError

# How many steps a session takes to settle depends on measured peaks, which vary with when gloo's threads free buffers.
MOST_STEPS = 100


class DistortedMeter(ProfilerMeter):
    """Real peaks, higher on the second rank, and invented times: torch's ways are slow on one rank only."""

    def __init__(self, session: Session) -> None:
        super().__init__(session._start_bytes)
        self._session = session

    def peak_bytes(self) -> int | None:
        peak = super().peak_bytes()
        return None if peak is None else peak + 20_000 * rank()

    def profile(self) -> StepProfile | None:
        profile = super().profile()
        if profile is None:
            return None
        variants = self._session.current.choice.variants
        ways_s = (2.0, 0.6)[rank()]
        seconds = [0.5 if variant.keeps is None else ways_s if variant.fraction else 1.0 for variant in variants]
        whole = not profile.is_timed_only  # otherwise it has no calls
        calls = [replace(call, seconds=each) for call, each in zip(profile.calls, seconds, strict=whole)]
        return replace(profile, calls=tuple(calls), seconds=sum(seconds))


def compiled(model: nn.Module, budget: int | str, **options: Any) -> Session:
    """Compile without kernels, and measure with distorted meters."""
    torch._dynamo.reset()
    _compat.compile_with_inductor = Compiler()
    lowtide.compile(model, budget=budget, **options)
    session = session_of(_compat.unwrapped(model))
    meter = DistortedMeter(session)
    session._meter_of = lambda device: meter
    return session


def made(width: int = 16) -> Net:
    torch.manual_seed(0)
    return Net(width, dropout=0.0)


def step(model: nn.Module, x: Tensor) -> None:
    """Of a batch that needs a gradient, so that the first block needs no graph of its own."""
    model.zero_grad()
    model(x.detach().requires_grad_()).square().mean().backward()


def all_steps(wrapped: Callable[[Net], nn.Module], **options: Any) -> dict[str, Any]:
    """Run steps under a budget between the smallest and the plain peak, and say which variants each of them ran.

    Until the choice is settled, and one more, in which ranks tell each other so.
    """
    x, expected_model, model = batch(), wrapped(made()), wrapped(made())
    step(expected_model, x)
    session = compiled(model, "1GiB", **options)
    for _ in range(2):
        step(model, x)
    floor, plain = floor_of(_compat.unwrapped(model)), session.current.choice.peak_bytes
    budget = (floor + 3 * plain) // 4
    squeeze(_compat.unwrapped(model), budget)
    keys, is_same = [], []
    for _ in range(MOST_STEPS):
        is_last = session.current.is_settled
        step(model, x)
        is_same.append(same(_local(expected_model), _local(model)))
        keys.append([variant.key for variant in session.current.choice.variants])
        if is_last:
            break
    return {
        "keys": keys[1:],
        "same": all(is_same),
        "peak": session.current.peaks[-1],
        "budget": budget,
        "settled": session.current.is_settled,
        "open": session._ranks.is_open,
    }


def _local(model: nn.Module) -> list[Tensor | None]:
    return [getattr(each, "_local_tensor", each) for each in gradients(model)]


def sharded(model: Net) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def data_parallel() -> Any:
    return all_steps(DistributedDataParallel)


def whole_graph() -> Any:
    return all_steps(DistributedDataParallel, regional=False)


def fully_sharded() -> Any:
    return all_steps(sharded)


def tensor_parallel() -> Any:
    """Collectives are inside of the compiled blocks."""
    mesh = init_device_mesh("cpu", (2,))

    def wrapped(model: Net) -> nn.Module:
        for block in model.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model

    with patch(f"{__name__}.batch", lambda: torch.ones(256, 16)):
        return all_steps(wrapped)


def infeasible() -> Any:
    """A budget that only the second rank cannot meet."""
    model = DistributedDataParallel(made())
    compiled(model, "1GiB" if rank() == 0 else 1000)
    for number in range(MOST_STEPS):
        try:
            step(model, batch())
        except InfeasibleBudgetError as error:
            step(model, batch())  # plainly
            return number, error.floor_bytes
    return "did not raise"


def uneven() -> Any:
    """The second rank has longer batches, and so other graphs. Its own budget is too small for them."""
    model = DistributedDataParallel(made())
    x = batch(256 + 256 * rank())
    session = compiled(model, 400_000)
    for number in range(MOST_STEPS):
        try:
            step(model, x)
        except InfeasibleBudgetError as error:
            return number, error.floor_bytes, session._ranks.over is not None
    return "did not raise", describe(session)


def failing_choice() -> Any:
    """Planning fails on the second rank: the first must be told."""
    model = DistributedDataParallel(made())
    session = compiled(model, 300_000)
    step(model, batch())
    if rank() == 1:
        session.chooser.choose = None  # type: ignore[assignment, method-assign]
    try:
        step(model, batch())
    except Exception as error:
        return type(error).__name__, str(error)


def all_scenarios() -> dict[str, Any]:
    return {scenario.__name__: scenario() for scenario in (data_parallel, fully_sharded, infeasible, failing_choice)}


def slow_scenarios() -> dict[str, Any]:
    return {scenario.__name__: scenario() for scenario in (whole_graph, tensor_parallel, uneven)}


@pytest.fixture(scope="module")
def scenarios() -> list[dict[str, Any]]:
    return succeeded(run_ranks(all_scenarios))


def assert_agreed(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one == other and one["settled"]
    assert one["same"], "gradients differ from those without a budget"
    assert one["peak"] <= one["budget"], "the larger of both ranks"
    assert len({str(keys) for keys in one["keys"]}) > 1, "what was measured has changed nothing"


@pytest.mark.parametrize("name", ["data_parallel", "fully_sharded"])
def test_ranks_run_the_same_variants_whatever_they_measure(scenarios: list[dict[str, Any]], name: str) -> None:
    one, other = (each[name] for each in scenarios)
    assert_agreed(one, other)
    assert not one["open"], "ranks that have settled do not wait for each other any more"


def test_a_budget_that_one_rank_cannot_meet_raises_on_both(scenarios: list[dict[str, Any]]) -> None:
    one, other = (each["infeasible"] for each in scenarios)
    assert one == other and isinstance(one[0], int)


def test_an_error_while_one_rank_plans_raises_on_both(scenarios: list[dict[str, Any]]) -> None:
    one, other = (each["failing_choice"] for each in scenarios)
    assert one[0] == "RankError" and "rank 1 failed" in one[1] and other[0] == "TypeError"


@pytest.mark.slow
def test_ranks_agree_on_whole_graphs_on_collectives_inside_and_on_errors_of_uneven_batches() -> None:
    one, other = succeeded(run_ranks(slow_scenarios))
    for name in ("whole_graph", "tensor_parallel"):
        assert_agreed(one[name], other[name])
    assert one["uneven"] == other["uneven"] and isinstance(one["uneven"][0], int)


def failing_forward() -> None:
    """The second rank's fourth forward raises before its first block, while the first waits for its report."""
    model = DistributedDataParallel(made())
    compiled(model, 500_000)
    for number in range(5):
        if number == 3 and rank() == 1:
            raise KeyError("a bad batch")
        step(model, batch())


@pytest.mark.slow  # test_ranks.py has a rank that is gone, without compiling
def test_a_rank_that_is_gone_is_not_waited_for_forever() -> None:
    one, other = run_ranks(failing_forward, group_s=2)
    assert isinstance(one, Raised) and one.kind == "RankError" and "not all of them answered" in one.text
    assert isinstance(other, Raised) and other.kind == "KeyError"
