"""`fit` with generators, profilers and other state around it, and with invalid arguments."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule

import lowtide
from lowtide.errors import UnitError
from sweeps import sweep

GLOBAL_GENERATOR = torch.Generator().manual_seed(7)


class Noise(nn.Module):
    """Draws from a generator of its own, or from one that only its code names."""

    def __init__(self, own: bool, seeds: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.seeds = seeds
        if own:
            self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        generator = getattr(self, "generator", GLOBAL_GENERATOR)
        if self.seeds:
            generator.manual_seed(11)
        return x + torch.randn(x.shape, generator=generator) * self.linear(x).relu()


def make(*modules: nn.Module) -> tuple[nn.Sequential, Callable[[Tensor], Tensor], Tensor]:
    block = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    model = nn.Sequential(block, *modules, nn.Linear(16, 16))
    return model, lambda x: model(x).square().mean(), torch.randn(32, 16)


def budget_of(model: nn.Module, loss_fn: Any, x: Tensor, is_tight: bool) -> int:
    guess = lowtide.estimate(model, loss_fn, x)
    return int(1.1 * guess.floor_bytes) if is_tight else 2 * guess.peak_bytes


@pytest.mark.parametrize("is_tight", sweep([True, False], keep=1))
@pytest.mark.parametrize(
    "noise", [lambda: Noise(own=True), lambda: Noise(own=False), lambda: Noise(own=True, seeds=True)]
)
def test_generators_are_where_they_were(noise: Callable[[], Noise], is_tight: bool) -> None:
    layer = noise()
    generator = getattr(layer, "generator", GLOBAL_GENERATOR)
    model, loss_fn, x = make(layer)
    before = generator.get_state()
    budget = budget_of(model, loss_fn, x, is_tight)
    assert torch.equal(generator.get_state(), before)
    lowtide.fit(model, loss_fn, x, budget=budget).remove()
    assert torch.equal(generator.get_state(), before)
    lowtide.max_batch(model, loss_fn, lambda n: torch.randn(n, 16), budget=budget, max_samples=4)
    assert torch.equal(generator.get_state(), before)


def test_a_generator_that_only_the_loss_names() -> None:
    model, _, x = make()
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()

    def loss_fn(x: Tensor) -> Tensor:
        return (model(x) * torch.rand(x.shape, generator=generator)).mean()

    lowtide.fit(model, loss_fn, x, budget="1GiB").remove()
    assert torch.equal(generator.get_state(), before)


class WritesItsWeights(nn.Module):
    """Writes parameters and a tensor that is no buffer in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 16, max_norm=1.0)
        self.online, self.target = nn.Linear(16, 16), nn.Linear(16, 16).requires_grad_(False)
        self.count = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.target.weight.lerp_(self.online.weight, 0.1)
            self.count += 1
        return self.online(x) + self.target(x) * self.count + self.words.weight[0] * self.words(torch.arange(8)).mean()


@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("is_tight", [True, False])
def test_parameters_that_a_forward_writes_are_as_before(is_tight: bool, has_gradients: bool) -> None:
    layer = WritesItsWeights()
    model, loss_fn, x = make(layer)
    if has_gradients:
        loss_fn(x).backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    before, budget = copy.deepcopy(layer), budget_of(model, loss_fn, x, is_tight)

    def check() -> None:
        assert all(map(torch.equal, layer.state_dict().values(), before.state_dict().values()))
        assert torch.equal(layer.count, before.count)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert gradient is None if parameter.grad is None else torch.equal(parameter.grad, gradient)

    check()
    lowtide.fit(model, loss_fn, x, budget=budget).remove()
    check()
    lowtide.max_batch(model, loss_fn, lambda n: torch.randn(n, 16), budget=budget, max_samples=4)
    check()


class ShrinksItsWeight(nn.Module):
    """Writes a trainable weight before its forward reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.mul_(0.9)
        return self.down(nn.functional.gelu(self.up(x)))


@pytest.mark.usefixtures("quick_fit")
def test_layers_that_write_their_trainable_weights_are_recomputed(caplog: pytest.LogCaptureFixture) -> None:
    def run(budget: int | None) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        model = nn.Sequential(*(ShrinksItsWeight() for _ in range(4)))
        x, left, num_regions = torch.randn(256, 16), [], 0

        def loss_fn(x: Tensor) -> Tensor:
            return model(x).square().mean()

        handle = None if budget is None else lowtide.fit(model, loss_fn, x, budget=budget, tune_s=0)
        for _ in range(2):
            loss = loss_fn(x)
            loss.backward()
            left += [loss.detach(), *(t.clone() for p in model.parameters() for t in (p.detach(), p.grad))]
            model.zero_grad()
        if handle is not None:
            num_regions = len(handle.plan.regions)
            handle.remove()
        return left, num_regions

    model = nn.Sequential(*(ShrinksItsWeight() for _ in range(4)))
    guess = lowtide.estimate(model, lambda x: model(x).square().mean(), torch.randn(256, 16))
    plain, _ = run(None)
    planned, num_regions = run(int(1.05 * guess.floor_bytes))
    assert num_regions > 0
    assert not caplog.records  # such as "the first 3 blocks cannot be used: parameter 'weight' was modified"
    assert all(map(torch.equal, plain, planned))


def memory_events(profiler: Any) -> list[tuple[str, int]]:
    return [(event.name, event.cpu_memory_usage) for event in profiler.events() if event.cpu_memory_usage]


def test_an_active_profiler_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    model, loss_fn, x = make()
    budget = budget_of(model, loss_fn, x, is_tight=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        with caplog.at_level(logging.WARNING, logger="lowtide"):
            handle = lowtide.fit(model, loss_fn, x, budget=budget)
        torch.ones(12345)
    assert ("aten::ones", 4 * 12345) in memory_events(profiler)
    assert handle.measured_peak_bytes is None
    assert [record.getMessage() for record in caplog.records] == [
        "the peak is predicted and not measured: a torch.profiler is active, and on the CPU it cannot nest"
    ]
    handle.remove()
    assert lowtide.fit(model, loss_fn, x, budget=budget).measured_peak_bytes is not None  # outside of it


def test_workspaces_are_predicted_under_a_profiler() -> None:
    """As in a trace on fake tensors: from the layouts of what ops are given."""
    attention = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.Sequential(attention, nn.Unflatten(-1, (4, 4)), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
    x = torch.randn(2, 8, 16)

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).logsumexp(-1).mean()

    def workspaces(mode: str) -> list[tuple[str, int]]:
        return [(op.name, op.workspace_bytes) for op in lowtide.trace(model, loss_fn, x, mode=mode).ops]

    with profile(activities=[ProfilerActivity.CPU]):
        found = workspaces("real")
    assert found == workspaces("fake")
    assert {"aten.native_batch_norm_backward.default", "aten.logsumexp.default"} <= {name for name, _ in found}


def test_a_profiler_that_warms_up_goes_on() -> None:
    model, loss_fn, x = make()
    seen: list[tuple[str, int]] = []
    steps = schedule(wait=1, warmup=1, active=1, repeat=1)
    with profile(
        activities=[ProfilerActivity.CPU],
        profile_memory=True,
        schedule=steps,
        on_trace_ready=lambda profiler: seen.extend(memory_events(profiler)),
    ) as profiler:
        profiler.step()
        handle = lowtide.fit(model, loss_fn, x, budget="1GiB")
        profiler.step()
        torch.ones(12345)
        profiler.step()
    assert ("aten::ones", 4 * 12345) in seen
    assert handle.measured_peak_bytes is None


def test_measure_and_max_batch_under_a_profiler() -> None:
    model, loss_fn, _ = make()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        with pytest.raises(lowtide.LowtideError, match=r"measured by torch.profiler, and one is active"):
            lowtide.measure(lambda: torch.ones(10), device="cpu")
        largest = lowtide.max_batch(model, loss_fn, lambda n: torch.randn(n, 16), budget="1GiB", max_samples=4)
        torch.ones(12345)
    assert largest == 4 and largest.measured_peak_bytes is None
    assert ("aten::ones", 4 * 12345) in memory_events(profiler)


@pytest.mark.parametrize("verb", ["plan", "fit", "max_batch"])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"time_limit_s": "a"}, TypeError, "time_limit_s is a number of seconds, above 0, such as 10.0, not 'a'"),
        ({"time_limit_s": -1.0}, ValueError, "time_limit_s is a number of seconds, above 0"),
        ({"budget": "12 apples"}, UnitError, "12 apples"),
        ({"budget": 0.5}, UnitError, "0.5 is not a number of bytes"),
        ({"host": "much"}, UnitError, "much"),
        ({"host": -1}, UnitError, "-1 bytes is negative"),
        ({"lossy": "int3"}, ValueError, "int3"),
    ],
)
def test_arguments_are_read_before_anything_runs(verb: str, options: Any, error: Any, message: str) -> None:
    def not_called(*args: Any) -> Any:
        raise AssertionError("the step ran")

    model, _, x = make()
    with pytest.raises(error, match=message) as raised:
        batch = not_called if verb == "max_batch" else x
        getattr(lowtide, verb)(model, not_called, batch, **{"budget": "1GiB", **options})
    assert "\n" not in str(raised.value)


def test_a_batch_in_place_of_what_makes_one() -> None:
    model, loss_fn, x = make()
    with pytest.raises(TypeError, match=r"make_batch is a function .*lambda n: torch.randn\(n, 64\), not Tensor$"):
        lowtide.max_batch(model, loss_fn, x, budget="1GiB")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"max_samples is a number of samples, 1 or more, not tensor\(4\)$"):
        lowtide.max_batch(model, loss_fn, lambda n: x, budget="1GiB", max_samples=torch.tensor(4))  # type: ignore[arg-type]


@pytest.mark.parametrize("verb", ["trace", "estimate", "plan", "fit", "max_batch", "compile"])
def test_script_modules_are_refused(verb: str) -> None:
    model, _, x = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scripting is deprecated
        scripted = torch.jit.script(model)
    options = {} if verb in ("trace", "estimate") else {"budget": "1GiB"}
    arguments = () if verb == "compile" else (lambda x: scripted(x).mean(), x)
    with pytest.raises(TypeError, match=r"^model is a RecursiveScriptModule, .*: give the nn.Module it was made from$"):
        getattr(lowtide, verb)(scripted, *arguments, **options)
