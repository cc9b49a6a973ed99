"""Plans for steps that call the model, or modules in it, more than once: each call has regions of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.plans import Plan, Recompute
from lowtide.solvers.baselines import reference_plans

pytestmark = pytest.mark.usefixtures("one_thread")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(32, 128), nn.Linear(128, 32), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Student:
    """A step that compares two outputs of one model; the first may be made without gradients."""

    def __init__(self, *, is_taught: bool) -> None:
        torch.manual_seed(0)
        self.model, self.x, self.is_taught = Stack(), torch.randn(128, 32), is_taught

    def loss_fn(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(not self.is_taught):
            target = self.model(x.neg())
        return (self.model(x) - target).square().mean()

    def step(self) -> list[Tensor]:
        self.model.zero_grad()
        torch.manual_seed(1)
        self.loss_fn(self.x).backward()
        return [parameter.grad.clone() for parameter in self.model.parameters() if parameter.grad is not None]

    def peak_bytes(self) -> int:
        self.model.zero_grad()
        own = self.x.nbytes + sum(parameter.nbytes for parameter in self.model.parameters())
        return own + lowtide.measure(lambda: self.loss_fn(self.x).backward(), device="cpu").peak_bytes


def per_block(student: Student) -> int:
    """The peak with torch's checkpoint on each block."""

    def wrap(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x: checkpoint(forward, x, use_reentrant=False)  # type: ignore[no-any-return]

    for block in student.model.blocks:
        block.forward = wrap(block.forward)  # type: ignore[method-assign]
    peak = student.peak_bytes()
    for block in student.model.blocks:
        del block.forward
    return peak


@pytest.mark.parametrize("is_taught", [True, False])
def test_fit_holds_what_a_checkpoint_per_block_holds(is_taught: bool) -> None:
    student = Student(is_taught=is_taught)
    plain, budget = student.step(), per_block(student)
    student.model.zero_grad()
    with lowtide.fit(student.model, student.loss_fn, student.x, budget=budget, tune_s=0) as handle:
        assert [forward.path for forward in handle.plan.forwards] == [""] * (1 if is_taught else 2)
        assert student.peak_bytes() <= budget
        assert all(map(torch.equal, student.step(), plain))
        text = handle.plan.to_json()
    with lowtide.apply(student.model, Plan.from_json(text)):
        assert student.peak_bytes() <= budget


@pytest.mark.parametrize("number", [0, 1])
def test_regions_of_one_forward_are_not_those_of_the_other(number: int) -> None:
    student = Student(is_taught=False)
    graph = lowtide.trace(student.model, student.loss_fn, student.x)
    regions = tuple(Recompute(f"blocks.{block}", number) for block in range(4))
    budget = lowtide.simulator.simulate(graph).peak_bytes
    modules = lowtide.solve(graph, lowtide.sweep(graph, []).floor_bytes).modules
    plan = Plan(regions=regions, forwards=graph.forwards, modules=modules)
    predicted = lowtide.simulator.simulate(graph, plan).peak_bytes
    assert predicted < budget
    with lowtide.apply(student.model, plan) as handle:
        for _ in range(2):
            assert student.peak_bytes() == predicted
            assert handle.stats().num_replays % 4 == 0
        with torch.no_grad():  # an evaluation between two steps, and a forward that fails
            student.model(student.x)
        hook = student.model.blocks[2].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            student.model(student.x)
        hook.remove()
        assert student.peak_bytes() == predicted


def test_every_second_block_of_each_forward() -> None:
    student = Student(is_taught=False)
    graph = lowtide.trace(student.model, student.loss_fn, student.x)
    plan = reference_plans(graph)["every second block"]
    assert [(region.path, region.nth) for region in plan.regions] == [
        (f"blocks.{block}", nth) for nth in range(2) for block in (0, 2)
    ]


class Step:
    """A step that calls modules of a model itself. `loss_fn` is set by subclasses."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = self.make()
        self.x = torch.randn(128, 32)
        self.graph = lowtide.trace(self.model, self.loss_fn, self.x)

    def make(self) -> nn.Module:
        raise NotImplementedError

    def loss_fn(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def gradients(self) -> list[Tensor | None]:
        self.model.zero_grad()
        torch.manual_seed(1)
        self.loss_fn(self.x).backward()
        return [None if parameter.grad is None else parameter.grad.clone() for parameter in self.model.parameters()]

    def peak_bytes(self) -> int:
        self.model.zero_grad()
        own = self.x.nbytes + sum(parameter.nbytes for parameter in self.model.parameters())
        return own + lowtide.measure(lambda: self.loss_fn(self.x).backward(), device="cpu").peak_bytes


class Siamese(Step):
    """Calls one module of the model twice."""

    def make(self) -> nn.Module:
        model = nn.Module()
        model.backbone, model.head = Stack(), nn.Linear(32, 8)
        return model

    def loss_fn(self, x: Tensor) -> Tensor:
        a, b = self.model.backbone(x), self.model.backbone(x.neg())
        return (self.model.head(a) - self.model.head(b)).square().mean()


class Coder(Step):
    """A variational autoencoder by its methods, on two views of a batch."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder, self.norm = Stack(), Stack(), nn.LayerNorm(32)

        def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
            mean = self.norm(self.encoder(x))
            return mean, mean.tanh()

        def decode(self, z: Tensor) -> Tensor:
            return self.decoder(self.norm(z))  # type: ignore[no-any-return]

    def make(self) -> nn.Module:
        return self.Model()

    def loss_fn(self, x: Tensor) -> Tensor:
        losses = []
        for view in (x, x.flip(0)):
            mean, spread = self.model.encode(view)
            z = mean + spread * torch.randn_like(mean)
            losses.append((self.model.decode(z) - view).square().mean() + spread.square().mean())
        return sum(losses[1:], losses[0])


class Towers(Step):
    """Two towers in a ModuleDict that share an encoder; the dict is never called."""

    class Tower(nn.Module):
        def __init__(self, shared: nn.Module) -> None:
            super().__init__()
            self.encoder, self.head = shared, nn.Linear(32, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encoder(x).relu())  # type: ignore[no-any-return]

    def make(self) -> nn.Module:
        shared = Stack()
        return nn.ModuleDict({"text": self.Tower(shared), "image": self.Tower(shared)})

    def loss_fn(self, x: Tensor) -> Tensor:
        return (self.model["text"](x) - self.model["image"](x.neg())).square().mean()


class Layers(Step):
    """Calls the layers of a model itself, one after the other, twice."""

    def make(self) -> nn.Module:
        return nn.ModuleList(Block() for _ in range(4))

    def loss_fn(self, x: Tensor) -> Tensor:
        for layer in [*self.model, *self.model]:
            x = layer(x)
        return x.square().mean()


class Taught(Siamese):
    """Also calls it for a target, with gradients but detached: the graph of that call is dropped."""

    def loss_fn(self, x: Tensor) -> Tensor:
        target = self.model.backbone(x.flip(0)).detach()
        return super().loss_fn(x) + (self.model.backbone(x) - target).square().mean()


def applied(step: Step, number: int, of: int = 2) -> tuple[lowtide.eager.Applied, int]:
    """Recompute the blocks of the calls numbered `number`; returns the handle and the peak predicted."""
    paths = {call.path for call in step.graph.calls if call.kind == "Block"}
    regions = tuple(
        Recompute(path, nth)
        for path in sorted(paths)
        for nth in range(len(step.graph.calls_by_path[path]))
        if nth % of == number
    )
    plan = Plan(regions=regions, forwards=step.graph.forwards)
    return lowtide.apply(step.model, plan), lowtide.simulator.simulate(step.graph, plan).peak_bytes


STEPS: list[type[Step]] = [Siamese, Coder, Towers, Layers]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("kind", STEPS)
def test_each_call_of_a_step_by_methods_has_its_own_decision(kind: type[Step], number: int) -> None:
    step = kind()
    plain, plain_peak = step.gradients(), step.peak_bytes()
    handle, predicted = applied(step, number)
    with handle:
        assert predicted < plain_peak
        num_regions = len(handle.plan.regions)  # type: ignore[attr-defined]
        for repeat in range(3):
            before = handle.stats().num_replays
            assert same(step.gradients(), plain)
            assert handle.stats().num_replays - before == num_regions, repeat
            assert step.peak_bytes() == predicted


@pytest.mark.parametrize("number", [0, 1])
def test_calls_between_two_steps_by_methods_do_not_count(number: int, caplog: pytest.LogCaptureFixture) -> None:
    step = Siamese()
    handle, predicted = applied(step, number)
    with handle:
        assert step.peak_bytes() == predicted
        with torch.no_grad():
            step.model.backbone(step.x)
        assert step.peak_bytes() == predicted, "an evaluation"
        step.model.backbone(step.x).sum().item()
        assert step.peak_bytes() == predicted, "an evaluation with gradients that are dropped"
        hook = step.model.backbone.blocks[2].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError) as error:
            step.loss_fn(step.x)
        hook.remove()
        assert step.peak_bytes() == predicted, "a call that failed, and whose traceback is alive"
        del error
        with pytest.raises(TypeError):
            raise TypeError(step.model.backbone(step.x).shape)
        assert step.peak_bytes() == predicted, "a step that failed after its first call"
        kept = step.loss_fn(step.x)  # and no backward
        assert step.peak_bytes() - predicted < predicted / 100, "a step without backward"
        del kept
        step.model.eval()
        step.model.backbone(step.x)
        step.model.train()
        assert step.peak_bytes() == predicted
    assert not caplog.records


@pytest.mark.parametrize("number", [0, 1])
def test_the_calls_of_two_steps_before_one_backward(number: int) -> None:
    step = Siamese()
    handle, _ = applied(step, number)
    with handle:
        torch.manual_seed(1)
        (step.loss_fn(step.x) + step.loss_fn(step.x.flip(0))).backward()
        assert handle.stats().num_replays == 2 * 4
        together = [parameter.grad for parameter in step.model.parameters()]
        with handle.disabled():
            step.model.zero_grad()
            torch.manual_seed(1)
            (step.loss_fn(step.x) + step.loss_fn(step.x.flip(0))).backward()
        assert same([parameter.grad for parameter in step.model.parameters()], together)
        for _ in range(3):  # gradients accumulate
            step.loss_fn(step.x).backward()
        assert handle.stats().num_replays == 5 * 4


def test_a_call_whose_output_is_detached_does_not_count() -> None:
    step = Taught()
    assert [each.path for each in step.graph.forwards] == ["backbone", "backbone", "head", "head", "backbone"]
    plain = step.gradients()
    for nth in (1, 2, 3):
        plan = Plan(
            regions=tuple(Recompute(f"backbone.blocks.{b}", nth) for b in range(4)), forwards=step.graph.forwards
        )
        with lowtide.apply(step.model, plan) as handle:
            for repeat in range(2):
                assert same(step.gradients(), plain)
                assert handle.stats().num_replays == 4 * (repeat + 1)


def test_a_penalty_computed_in_the_forward_does_not_end_the_step() -> None:
    step = Siamese()

    def loss_fn(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(step.model.backbone(x).sum(), x, create_graph=True)
        return gradient.square().sum() + step.model.backbone(x).square().sum()

    step.loss_fn = loss_fn  # type: ignore[method-assign]
    step.model.backbone.eval()
    plain = step.gradients()
    plan = Plan(regions=(Recompute("backbone.blocks.1", 1),), forwards=step.graph.forwards[:2])
    with lowtide.apply(step.model, plan) as handle:
        for repeat in range(2):
            assert same(step.gradients(), plain)
            assert handle.stats().num_replays == repeat + 1


class Opaque:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_calls_that_return_no_tensors(caplog: pytest.LogCaptureFixture) -> None:
    """Without a tensor that the backward reaches, calls cannot be told apart; those of modules inside may help."""
    step = Siamese()
    stack = step.model.backbone
    forward = stack.forward
    stack.forward = lambda x: Opaque(forward(x))
    step.loss_fn = lambda x: sum(stack(each).tensor.square().mean() for each in (x, x.neg()))  # type: ignore
    plain = step.gradients()
    for paths, is_said in ((("backbone.blocks.0", "backbone.blocks.1"), False), (("backbone",), True)):
        plan = Plan(regions=tuple(Recompute(path, 1) for path in paths), forwards=step.graph.forwards[:2])
        with lowtide.apply(step.model, plan) as handle:
            for repeat in range(2):
                assert same(step.gradients(), plain)
                if not is_said:
                    assert handle.stats().num_replays == len(paths) * (repeat + 1)
        assert len(caplog.records) == is_said
    assert "no tensors with gradients are found in what backbone returns" in caplog.text


def test_a_checkpoint_of_the_users_own_around_one_of_the_calls() -> None:
    step = Siamese()
    backbone, head = step.model.backbone, step.model.head

    def loss_fn(x: Tensor) -> Tensor:
        a, b = checkpoint(backbone, x, use_reentrant=False), backbone(x.neg())
        return (head(a) - head(b)).square().mean()  # type: ignore[no-any-return]

    step.loss_fn = loss_fn  # type: ignore[method-assign]
    plain = step.gradients()
    for number in (0, 1):
        handle, _ = applied(step, number)
        with handle:
            for repeat in range(2):
                assert same(step.gradients(), plain)
                assert handle.stats().num_replays == 4 * (repeat + 1)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_replay_of_a_checkpoint_inside_the_model_is_no_call_of_the_step(
    use_reentrant: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Model(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = checkpoint(super().forward, x, use_reentrant=use_reentrant)
            return x

    model, x = Model(), torch.randn(8, 32, requires_grad=True)
    plan = Plan(regions=tuple(Recompute(f"blocks.{block}", nth) for block in range(4) for nth in range(2)))
    with lowtide.apply(model, plan):
        model(x).sum().backward()
    assert not caplog.records


def test_a_step_that_makes_other_calls_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    step = Siamese()
    handle, predicted = applied(step, 1)
    with handle:
        for _ in range(3):
            step.model.backbone(step.x).sum().backward()
        assert step.peak_bytes() == predicted
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "called backbone 1 times, not 2 times" in caplog.text
    caplog.clear()
    plan = Plan(regions=(Recompute("backbone", 1),))
    with lowtide.apply(step.model, plan):
        step.gradients()
        step.gradients()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "which was not so in the step planned for" in caplog.text


@pytest.mark.parametrize("kind", STEPS)
def test_fit_of_a_step_by_methods(kind: type[Step]) -> None:
    step = kind()
    plain = step.gradients()
    step.model.zero_grad()
    low, high = lowtide.sweep(step.graph, []).floor_bytes, step.graph.plain_peak_bytes
    for budget in (low + (high - low) // 8, (low + high) // 2):
        with lowtide.fit(step.model, step.loss_fn, step.x, budget=budget, tune_s=0) as handle:
            assert step.peak_bytes() <= budget
            assert same(step.gradients(), plain)
            text = handle.plan.to_json()
        with lowtide.apply(step.model, Plan.from_json(text)):
            assert step.peak_bytes() <= budget


def same(a: list[Tensor | None], b: list[Tensor | None]) -> bool:
    return all(x is y or (x is not None and y is not None and torch.equal(x, y)) for x, y in zip(a, b, strict=True))
