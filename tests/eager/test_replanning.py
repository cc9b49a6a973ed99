"""Inputs that vary under a plan: smaller ones run under it, larger ones are planned for, gradients are the same."""

from __future__ import annotations

import copy
import functools
import logging
import threading
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide
from lowtide.eager import replanning
from lowtide.plans import Plan, Recompute
from lowtide.simulator import simulate
from lowtide.solvers.eager_search import EagerSearch

pytestmark = pytest.mark.usefixtures("one_thread", "quick_fit")


@pytest.fixture(autouse=True)
def predicted_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps as small as these are all noise; with predicted times every run plans the same."""
    monkeypatch.setattr("lowtide.api.measure.trace", functools.partial(lowtide.trace, mode="fake"))


class Tiny(nn.Module):
    """Two blocks, dropout, and a table of positions that ends."""

    def __init__(self, layers: int = 2, most: int = 128) -> None:
        super().__init__()
        self.layers = nn.ModuleList(zoo.Block(16, 2, dropout=0.1) for _ in range(layers))
        self.positions = nn.Parameter(torch.randn(most, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions[: x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return x


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    loss = model(x).square().mean()
    loss.backward()
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return [loss.detach(), *found, torch.get_rng_state()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


def halfway(model: nn.Module, loss_fn: Any, *args: Any) -> int:
    search = EagerSearch(lowtide.trace(model, loss_fn, *args, mode="fake"))
    return (search.floor.peak_bytes + search.plain.peak_bytes) // 2


def fitted(model: nn.Module, x: Tensor, **options: Any) -> Any:
    def loss_fn(x: Tensor) -> Tensor:
        return model(x).square().mean()

    budget = options.pop("budget", None) or halfway(model, loss_fn, x)
    return lowtide.fit(model, loss_fn, x, budget=budget, verify=False, **options)


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_each_bucket_is_planned_for_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Tiny()
    inputs = [torch.randn(2, length, 16) for length in (16, 8, 20, 24, 18, 30, 12)]
    expected = [gradients(model, x) for x in inputs]
    handle = fitted(model, inputs[0])
    assert handle.plan.input_shapes == ((2, 16, 16),)
    for x, wanted in zip(inputs, expected, strict=True):
        assert same(gradients(model, x), wanted)
    stats = handle.stats()
    assert [(r.seen, r.planned_for, r.is_new) for r in stats.replans] == [
        (((2, 20, 16),), ((2, 24, 16),), True),
        (((2, 30, 16),), ((2, 32, 16),), True),
    ]
    assert len(warned(caplog)) == 2
    assert "2 x 20 x 16" in warned(caplog)[0]
    assert "planned again" in str(stats)


def test_a_larger_input_is_held_within_the_budget() -> None:
    model, x, larger = Tiny(3), torch.randn(4, 32, 16), torch.randn(4, 44, 16)

    def loss_fn(x: Tensor) -> Tensor:
        return F.gelu(model(x)).square().mean()

    budget = lowtide.estimate(model, loss_fn, x).peak_bytes - 20_000  # a little short
    handle = lowtide.fit(model, loss_fn, x, budget=budget, tune_s=0)
    graph = lowtide.trace(model, loss_fn, larger, mode="fake")
    static = sum(size for kind, size in graph.static_bytes.items() if kind != "gradients")
    loss_fn(larger).backward()
    model.zero_grad(set_to_none=True)
    assert len(handle.stats().replans) == 1
    measured = lowtide.measure(lambda: loss_fn(larger).backward(), device="cpu").peak_bytes + static
    assert measured <= budget
    assert measured <= handle.plan.peak_bytes  # which is for an input rounded up


def test_what_cannot_be_rounded_up_is_planned_for_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model = Tiny(most=20)  # no 24 positions
    x, larger = torch.randn(2, 16, 16), torch.randn(2, 20, 16)
    expected = gradients(model, larger)
    handle = fitted(model, x)
    assert same(gradients(model, larger), expected)
    assert [(r.planned_for, r.is_new) for r in handle.stats().replans] == [(((2, 20, 16),), True)]


def test_a_plan_made_between_a_forward_and_its_backward() -> None:
    """It may recompute modules inside a region of the plan before, and the other way around."""
    plain = Tiny(most=64)
    inputs = [torch.randn(2, length, 16) for length in (16, 20, 40, 16)]

    def all_at_once(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(3)
        losses = [model(x).square().mean() for x in inputs]
        for loss in losses:
            loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    expected = all_at_once(copy.deepcopy(plain))
    for share in (0.05, 0.6):
        model = copy.deepcopy(plain)
        guess = lowtide.estimate(model, lambda x: model(x).square().mean(), inputs[0])  # noqa: B023
        budget = int(guess.floor_bytes * (1 - share) + guess.peak_bytes * share)
        with fitted(model, inputs[0], budget=budget) as handle:
            assert same(all_at_once(model), expected)
            assert handle.stats().replans


def test_shapes_that_none_covers_have_a_plan_each() -> None:
    model = Tiny()
    wide, long = torch.randn(8, 8, 16), torch.randn(2, 32, 16)
    expected = [gradients(model, x) for x in (wide, long)]
    handle = fitted(model, wide)
    for _ in range(2):
        assert same(gradients(model, wide), expected[0])
        first = handle.plan
        assert same(gradients(model, long), expected[1])
        assert handle.plan is not first
    assert len(handle.stats().replans) == 1


@pytest.mark.parametrize("failure", [RuntimeError("no"), lowtide.TraceError("no such kernel")])
def test_a_failed_replan_leaves_the_forward_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: Exception
) -> None:
    model = Tiny()
    x, larger = torch.randn(2, 16, 16), torch.randn(2, 20, 16)
    expected = gradients(model, larger)
    handle = fitted(model, x)

    def broken(*args: Any) -> Any:
        raise failure

    monkeypatch.setattr(handle.shapes.planner, "for_inputs", broken)
    for _ in range(3):
        assert same(gradients(model, larger), expected)
    assert [r.is_new for r in handle.stats().replans] == [False]
    assert len(warned(caplog)) == 1
    assert "stays in force" in warned(caplog)[0]


def test_a_replan_leaves_model_gradients_and_random_states_alone() -> None:
    model = Tiny()
    x, larger = torch.randn(2, 16, 16), torch.randn(2, 20, 16)
    model(x).mean().backward()
    handle = fitted(model, x)
    objects = [(p, p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None]
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    before = torch.get_rng_state()
    handle.shapes.decisions_for((larger,), {})
    assert len(handle.stats().replans) == 1
    assert torch.equal(before, torch.get_rng_state())
    for parameter, gradient, content in objects:
        assert parameter.grad is gradient
        assert torch.equal(gradient, content)
    for name, module in model.named_modules():
        now = {key: value for key, value in vars(module).items() if key != "forward"}
        assert all(attributes[name][key] is value for key, value in now.items())


def test_the_plan_changes_between_forward_and_backward() -> None:
    """Forwards of several plans, switched off or removed meanwhile, before one backward."""
    model = Tiny(2)
    inputs = [torch.randn(2, length, 16) for length in (16, 40, 16)]

    def all_at_once(between: Any = None) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(3)
        losses = [model(x).square().mean() for x in inputs]
        with torch.no_grad():
            model(inputs[-1])
        if between is not None:
            between()
        sum(losses).backward()  # type: ignore[union-attr]
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    expected = all_at_once()
    model.zero_grad()
    regions = (Recompute("layers.0"), Recompute("layers.0.mlp"), Recompute("layers.1", keep_ops=(1, 4)))
    for undo in ("off", "remove"):
        handle = fitted(model, inputs[0])
        handle.use(handle.shapes.all[0])
        nested = Plan(regions=regions, input_shapes=((2, 16, 16),))
        handle.shapes.become([replanning.PlannedInputs(nested, handle.take_in(nested), (((2, 16, 16),),))])

        def between(handle: Any = handle, undo: str | None = undo) -> None:
            if undo == "off":
                handle.enabled = False
            elif undo == "remove":
                handle.remove()

        assert same(all_at_once(between), expected)
        assert len(handle.stats().replans) == 1
        assert handle.stats().num_replays > 0
        handle.remove()
        assert all("forward" not in vars(module) for module in model.modules())
        model.zero_grad()


def test_apply_says_once_that_inputs_are_larger(caplog: pytest.LogCaptureFixture) -> None:
    model = Tiny()
    x, larger = torch.randn(2, 16, 16), torch.randn(2, 20, 16)
    expected = gradients(model, larger)
    loss_fn = lambda x: model(x).square().mean()  # noqa: E731
    plan = lowtide.plan(model, loss_fn, x, budget=halfway(model, loss_fn, x))
    handle = lowtide.apply(model, Plan.from_json(plan.to_json()))
    gradients(model, x)
    assert warned(caplog) == []
    for _ in range(2):
        assert same(gradients(model, larger), expected)
    assert len(warned(caplog)) == 1
    assert "2 x 16 x 16" in warned(caplog)[0]
    handle.remove()


def test_the_highest_of_several_batches_governs() -> None:
    model = Tiny()
    small, large, long = torch.randn(2, 8, 16), torch.randn(4, 32, 16), torch.randn(1, 48, 16)
    loss_fn = lambda x: model(x).square().mean()  # noqa: E731
    budget = halfway(model, loss_fn, large)
    plan = lowtide.plan(model, loss_fn, small, budget=budget, more_batches=[(large,), (long,)])
    assert plan.input_shapes == ((4, 32, 16),)
    handle = lowtide.fit(model, loss_fn, small, budget=budget, more_batches=[(large,), (long,)], tune_s=0)
    assert handle.measured_peak_bytes is not None and handle.measured_peak_bytes <= budget
    for x in (small, large, long):
        loss_fn(x).backward()
    assert handle.stats().replans == ()
    with pytest.raises(TypeError, match=r"more_batches=\[\(batch,\)\]"):
        lowtide.plan(model, loss_fn, small, budget=budget, more_batches=[large])


def test_autocast_around_a_larger_input() -> None:
    model = Tiny()
    x, larger = torch.randn(2, 16, 16), torch.randn(2, 20, 16)

    def loss_fn(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean() + model(x.flip(1)).float().square().mean()

    def outcome(x: Tensor) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(3)
        loss_fn(x).backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    expected = outcome(larger)
    model.zero_grad()
    handle = lowtide.fit(model, loss_fn, x, budget=halfway(model, loss_fn, x), verify=False)
    assert same(outcome(larger), expected)
    assert [r.is_new for r in handle.stats().replans] == [True]


def test_copies_and_threads_share_plans() -> None:
    model = Tiny()
    x, larger = torch.randn(2, 16, 16), torch.randn(2, 20, 16)
    handle = fitted(model.eval(), x)
    reference = copy.deepcopy(model)
    expected = gradients(copy.deepcopy(model), larger)[:-1]
    found: dict[int, list[Tensor]] = {}

    def work(number: int, model: nn.Module) -> None:
        leaves = list(model.parameters())
        found[number] = list(torch.autograd.grad(model(larger).square().mean(), leaves))

    threads = [threading.Thread(target=work, args=(n, m)) for n, m in enumerate([model, model, reference])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(handle.stats().replans) == 1
    assert all(same(found[n], expected[1:]) for n in range(3))


class Waiting(nn.Module):
    """Waits inside of its forward, if asked to, until another thread has had its turn. Its replay does not wait."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), norm
        self.inside, self.go_on = threading.Event(), threading.Event()

    def forward(self, x: Tensor, waits: bool = False) -> Tensor:
        if waits:
            self.inside.set()
            assert self.go_on.wait(10)
        return self.norm(self.linear(x))


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(16), nn.LayerNorm(16)])
def test_threads_in_one_region_are_refused_where_it_has_buffers(norm: nn.Module) -> None:
    model, x = Waiting(norm), torch.randn(4, 16)
    other: list[Any] = []

    def work() -> None:
        assert model.inside.wait(60)
        try:
            other.append(model(x))
        except lowtide.LowtideError as error:
            other.append(error)
        finally:
            model.go_on.set()

    with lowtide.apply(model, Plan(regions=(Recompute(""),))):
        thread = threading.Thread(target=work)
        thread.start()
        loss = model(x, waits=True).sum()
        thread.join()
        if isinstance(norm, nn.BatchNorm1d):
            with pytest.raises(lowtide.LowtideError, match="two threads run the model at once"):
                raise other[0]
        else:
            other[0].sum().backward()
        loss.backward()
        model(x).sum().backward()


def test_buckets_and_words() -> None:
    assert replanning.rounded_up(((9, 33), (5,)), ((8, 64), (4,))) == ((12, 33), (6,))
    assert replanning.rounded_up(((9,), (5,)), ((8,),)) == ((9,), (5,))
    assert not replanning.covers(((8, 8),), ((8, 8), (1,)))
    assert replanning.describe_shapes(()) == "unknown shapes"
    assert replanning.describe_shapes(((1,),) * 5) == "1, 1, 1, ..."


def test_a_loss_that_calls_the_model_twice_is_planned_for_as_such() -> None:
    model = nn.Sequential(*(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(3)))

    def loss_fn(x: Tensor) -> Tensor:
        return (model(x).softmax(-1) * model(x)).sum()

    def batch(length: int) -> Tensor:
        return torch.randn(4, length, 32, generator=torch.Generator().manual_seed(length))

    large = lowtide.estimate(model, loss_fn, batch(48))
    budget = int(large.floor_bytes + 0.25 * (large.peak_bytes - large.floor_bytes))
    with lowtide.fit(model, loss_fn, batch(32), budget=budget, tune_s=0) as handle:
        loss_fn(batch(48)).backward()
        assert len(handle.shapes.all) == 2
        model.zero_grad()
        peak = lowtide.measure(lambda: loss_fn(batch(48)).backward(), device="cpu").peak_bytes
    static = sum(each.nbytes for each in model.parameters())
    assert peak + static <= budget


@pytest.mark.usefixtures("quick_search")
def test_a_batch_may_be_a_nested_tensor() -> None:
    """Samples of several lengths in one tensor, as `torch.nested` has them."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)))

    def batch(*lengths: int) -> Tensor:
        return torch.nested.nested_tensor([torch.randn(length, 32) for length in lengths], layout=torch.jagged)

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).values().square().mean()

    def gradients(x: Tensor) -> list[Tensor]:
        model.zero_grad()
        loss_fn(x).backward()
        return [parameter.grad for parameter in model.parameters()]

    x = batch(20, 50, 60)
    expected = gradients(x)
    model.zero_grad()
    budget = int(0.8 * simulate(lowtide.trace(model, loss_fn, x)).peak_bytes)
    with lowtide.fit(model, loss_fn, x, budget=budget, tune_s=0) as handle:
        assert handle.plan.regions and handle.plan.input_shapes == ((3, 130, 32),)
        assert handle.measured_peak_bytes <= budget
        assert all(map(torch.equal, gradients(x), expected))
        model.zero_grad()
        handle.refit()
        gradients(batch(40, 40, 40))
        assert not handle.stats().replans
        gradients(batch(60, 60, 60))
        assert len(handle.stats().replans) == 1
