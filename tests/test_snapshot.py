"""After `lowtide.trace` everything is as it was, to the bit, however the step ended."""

from __future__ import annotations

import copy
import gc
import random
from collections import deque
from collections.abc import Generator, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide._compat.autograd import version_of
from lowtide._compat.fake_tensors import is_fake

MODES = pytest.mark.parametrize("mode", ["real", "fake"])


class Model(nn.Module):
    """Has whatever a step may change: statistics, noise, caches, counters, flags."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))
        self.counter = torch.zeros(2)  # neither parameter nor buffer
        self.num_calls = 0
        self.last: Tensor | None = None
        self.caches: dict[str, Any] = {"outputs": [], "shapes": {"deep": [deque()]}}
        self.config = SimpleNamespace(width=8, mask=None)

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.seen += 1
        self.counter.add_(1)
        y = self.drop(self.norm(self.first(x)))
        y = y * random.random() + float(np.random.rand())
        self.last, self.newcomer = y, y.detach()
        self.caches["outputs"].append(y)
        self.caches["shapes"]["deep"][0].append(y)
        self.config.mask = y > 0
        self.drop.eval()
        self.drop.train()
        self.norm.register_forward_hook(lambda *_: None)
        return self.frozen(self.second(y))


def everything(model: Model, *more: Tensor) -> dict[str, Any]:
    """All that must not change, as values, identities and version counters."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), "counter": model.counter}
    tensors |= {f"more {index}": tensor for index, tensor in enumerate(more)}
    tensors |= {f"gradient of {name}": tensor.grad for name, tensor in tensors.items() if tensor.grad is not None}
    return {
        "values": {name: tensor.detach().clone() for name, tensor in tensors.items()},
        "objects": {name: id(tensor) for name, tensor in tensors.items()},
        "storages": {name: tensor.data_ptr() for name, tensor in tensors.items()},
        "versions": {name: version_of(tensor) for name, tensor in tensors.items()},
        "flags": [(module.training, len(module._forward_hooks), sorted(vars(module))) for module in model.modules()],
        "attributes": (model.num_calls, model.last, copy.deepcopy(model.caches), copy.copy(model.config)),
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),  # type: ignore[union-attr,index]
    }


def assert_equal(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    assert before["values"].keys() == after["values"].keys()
    for name, value in before["values"].items():
        assert torch.equal(value, after["values"][name]), name
    assert torch.equal(before["torch"], after["torch"])
    for part in before.keys() - {"values", "torch"}:
        assert before[part] == after[part], part


def fakes() -> list[Tensor]:
    gc.collect()
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor) and is_fake(thing)]


@pytest.fixture(autouse=True)
def _fakes_of_others() -> Iterator[None]:
    """The compiler keeps some, where a test before has used it."""
    OTHERS[:] = fakes()
    yield
    OTHERS.clear()


OTHERS: list[Tensor] = []


def assert_no_fakes() -> None:
    others = {id(fake) for fake in OTHERS}
    assert not [fake for fake in fakes() if id(fake) not in others]


@MODES
@pytest.mark.parametrize("has_gradients", [False, True])
def test_everything_is_restored(mode: Any, has_gradients: bool) -> None:
    model, x = Model(), torch.randn(4, 8)
    if has_gradients:
        torch.manual_seed(3)
        model.second(torch.randn(4, 16)).sum().backward()
    before = everything(model, x)
    lowtide.trace(model, lambda x: model(x).square().mean(), x, mode=mode)
    assert_equal(before, everything(model, x))
    assert_no_fakes()


class Stop(Exception):
    pass


class FailingBackward(torch.autograd.Function):
    error: type[BaseException] = Stop

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise FailingBackward.error("in the backward")


@MODES
@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
@pytest.mark.parametrize("when", ["at once", "in the forward", "in the second forward", "in the backward"])
def test_after_an_exception(mode: Any, error: Any, when: str) -> None:
    model, x = Model(), torch.randn(4, 8)
    model.second(torch.randn(4, 16)).sum().backward()
    num_calls = 0

    def loss_fn(x: Tensor) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        if when == "at once":
            raise error(when)
        if when == "in the backward":
            x = FailingBackward.apply(model.first(x))
            FailingBackward.error = error
            return model.second(x).mean()
        if when == "in the forward" or num_calls == 2:
            model.frozen.register_forward_hook(raising)
        return model(x).mean()

    def raising(*_: Any) -> None:
        raise error(when)

    before = everything(model, x)
    expected = error if mode == "real" or error is KeyboardInterrupt else lowtide.TraceError
    with pytest.raises(expected):
        lowtide.trace(model, loss_fn, x, mode=mode)
    assert_equal(before, everything(model, x))
    assert_no_fakes()
    assert not torch.nn.modules.module._has_any_global_hook()
    lowtide.trace(model, lambda x: model(x).mean(), x, mode=mode)  # and the next trace works


@MODES
def test_written_to_by_the_step(mode: Any) -> None:
    """The batch in place, a weight through its data, a weight given other data."""
    model, x = Model(), torch.randn(4, 8)

    def loss_fn(x: Tensor) -> Tensor:
        model.first.weight.data.mul_(0.9)
        with torch.no_grad():
            model.first.weight.add_(0.1)
        model.second.weight.data = model.second.weight.data * 2
        return model(x.mul_(2)).mean()

    before = everything(model, x)
    lowtide.trace(model, loss_fn, x, mode=mode)
    assert_equal(before, everything(model, x))


@MODES
def test_random_generators_of_ones_own(mode: Any) -> None:
    model, generator = nn.Linear(8, 1), torch.Generator().manual_seed(1)
    before = generator.get_state()
    lowtide.trace(
        model, lambda x: model(x + torch.randn(4, 8, generator=generator)).mean(), torch.randn(4, 8), mode=mode
    )
    assert torch.equal(before, generator.get_state())


@MODES
def test_gradients_of_others(mode: Any) -> None:
    """Of the batch, and of a second model in the loss, with gradients and without."""
    model, fresh, used = (nn.Linear(8, 8) for _ in range(3))
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    used(x).sum().backward()
    leaves = [x, weight, *model.parameters(), *fresh.parameters(), *used.parameters()]
    before = [(leaf.grad, leaf.grad.clone() if leaf.grad is not None else None) for leaf in leaves]
    versions = [version_of(leaf) for leaf in leaves]
    lowtide.trace(model, lambda x: (model(x) * fresh(x) * used(x) * weight).mean(), x, mode=mode)
    for leaf, (gradient, content) in zip(leaves, before, strict=True):
        assert leaf.grad is gradient
        assert content is None or torch.equal(content, gradient)
    assert versions == [version_of(leaf) for leaf in leaves]
    assert_no_fakes()


@MODES
def test_buffers_of_others(mode: Any) -> None:
    model, teacher = nn.Linear(8, 8), nn.BatchNorm1d(8)
    before = copy.deepcopy(teacher.state_dict())
    lowtide.trace(model, lambda x: (model(x) - teacher(x)).square().mean(), torch.randn(4, 8), mode=mode)
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    assert_no_fakes()


def test_optimizers_that_step_in_the_backward() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizers = {parameter: torch.optim.AdamW([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)

    def train(x: Tensor) -> None:
        model(x).mean().backward()

    def states() -> Any:
        return copy.deepcopy([list(o.state_dict()["state"].values()) for o in optimizers.values()])

    x = torch.randn(4, 8)
    for _ in range(2):  # without states, and with
        weights, before = copy.deepcopy(model.state_dict()), states()
        graph = lowtide.trace(model, lambda x: model(x).mean(), x, mode="real")
        assert str(before) == str(states())
        assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
        assert not any(note for note in graph.notes)
        train(x)


@MODES
def test_hooks_stay(mode: Any) -> None:
    model, fired = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), []
    model[0].register_forward_hook(lambda *_: fired.append("forward"))
    model[1].register_full_backward_hook(lambda *_: fired.append("backward"))
    model[0].weight.register_hook(lambda gradient: fired.append("gradient"))
    x = torch.randn(4, 8)
    lowtide.trace(model, lambda x: model(x).mean(), x, mode=mode)
    fired.clear()
    model(x).mean().backward()
    assert fired == ["forward", "backward", "gradient"]


NUM_STEPS, LOSSES = 0, [1.0]


class Trainer:
    """A step with a memory: in itself, in what it holds, in globals."""

    def __init__(self) -> None:
        self.model, self.teacher = nn.Linear(8, 1), Model()
        self.scaler = torch.amp.GradScaler("cpu")
        self.step, self.history = 0, {"outputs": []}

    def loss(self, x: Tensor) -> Tensor:
        self.step += 1
        output = self.model(x) + self.teacher(x).mean()
        self.history["outputs"].append(output)
        return remembered(self.scaler.scale(output.mean()))


def remembered(loss: Tensor) -> Tensor:
    global NUM_STEPS
    NUM_STEPS += 1
    LOSSES.append(loss.detach())
    return loss


@pytest.mark.parametrize("mode", ["auto", "real", "fake"])
@pytest.mark.parametrize("is_method", [False, True])
def test_what_the_loss_function_remembers(mode: Any, is_method: bool) -> None:
    trainer, x, num_calls = Trainer(), torch.randn(4, 8), 0

    def loss_fn(x: Tensor) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        return remembered(trainer.scaler.scale(trainer.model(x).mean() + trainer.teacher(x).mean()))

    teacher = everything(trainer.teacher)
    lowtide.trace(trainer.model, trainer.loss if is_method else loss_fn, x, mode=mode)
    assert (trainer.step, trainer.history, num_calls, NUM_STEPS, LOSSES) == (0, {"outputs": []}, 0, 0, [1.0])
    assert_equal(teacher, everything(trainer.teacher))
    assert_no_fakes()
    trainer.loss(x).backward()
    assert trainer.step == 1 and len(LOSSES) == 2
    LOSSES.pop()
    globals()["NUM_STEPS"] = 0


def test_fakes_held_elsewhere_are_named() -> None:
    model, outputs = nn.Linear(8, 8), iter_of_one_deque()
    kept = next(outputs)

    def loss_fn(x: Tensor) -> Tensor:
        outputs.send(model(x).detach())
        return model(x).mean()

    graph = lowtide.trace(model, loss_fn, torch.randn(4, 8), mode="fake")
    assert any("aten.addmm.default" in note and "outside of the model" in note for note in graph.notes)
    kept.clear()


def iter_of_one_deque() -> Generator[deque[Any], Any, None]:
    """A container that no attribute leads to, and of a kind that no cache is taken for: what is sent is kept."""
    kept: deque[Any] = deque()
    while True:
        kept.append((yield kept))


def test_auto_restores_too() -> None:
    model, x = Model(), torch.randn(4, 8)
    before = everything(model, x)
    assert lowtide.trace(model, lambda x: model(x).mean(), x).is_measured
    assert_equal(before, everything(model, x))
