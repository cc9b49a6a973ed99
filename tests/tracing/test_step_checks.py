"""Steps that `lowtide.trace` refuses: each error says what is wrong and what to do, and the model is restored."""

from __future__ import annotations

import gc
import random
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import TraceError
from lowtide.tracing.step_checks import old_objects_frozen

MODES = pytest.mark.parametrize("mode", ["auto", "real", "fake"])


def make() -> tuple[nn.Sequential, Tensor]:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(4, 8)


def run_backward(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).mean()
    loss.backward()
    return loss


LOSSES: dict[str, tuple[Any, str]] = {
    "tuple": (lambda model, x: (model(x).mean(), 1), "returned tuple, not a tensor: let it return the loss"),
    "nothing": (lambda model, x: None, "returned NoneType"),
    "number": (lambda model, x: 1.5, "returned float"),
    "output": (lambda model, x: SimpleNamespace(loss=model(x).mean()), r"return `\.loss`"),
    "not scalar": (lambda model, x: model(x), r"shape \(4, 4\), not a scalar.*mean"),
    "no grad": (lambda model, x: model(x).mean().detach(), "needs no gradient"),
    "backward": (run_backward, r"has run already.*without backward\(\)"),
    "empty": (lambda model, x: model(x)[:0], r"shape \(0, 4\)"),
    "not of the model": (
        lambda model, x: x.clone().requires_grad_().mean(),
        "no parameter of the model got a gradient",
    ),
}


@MODES
@pytest.mark.parametrize("loss, message", LOSSES.values(), ids=LOSSES)
def test_no_loss(mode: Any, loss: Any, message: str) -> None:
    model, x = make()
    state = torch.get_rng_state()
    with pytest.raises(TraceError, match=message):
        lowtide.trace(model, lambda x: loss(model, x), x, mode=mode)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(state, torch.get_rng_state())


@MODES
def test_not_of_the_model_with_gradients_there(mode: Any) -> None:
    model, x = make()
    model(x).sum().backward()
    with pytest.raises(TraceError, match="no parameter of the model got a gradient"):
        lowtide.trace(model, lambda x: x.clone().requires_grad_().mean(), x, mode=mode)


@MODES
def test_under_no_grad(mode: Any) -> None:
    model, x = make()
    with torch.no_grad(), pytest.raises(TraceError, match="needs no gradient"):
        lowtide.trace(model, lambda x: model(x).mean(), x, mode=mode)
    with pytest.raises(TraceError, match="needs no gradient"):
        lowtide.trace(model.requires_grad_(False), lambda x: model(x).mean(), x, mode=mode)


class LayerDrop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if random.random() < 0.5:
                x = layer(x)
        return x + self.layers[0].bias


@MODES
def test_other_layers_each_time(mode: Any) -> None:
    random.seed(1)
    model, x = LayerDrop(), torch.randn(4, 8)
    with pytest.raises(
        TraceError, match=r"varies between runs.* in layers\.\d+ and is now .* in (layers\.\d+|the model)"
    ):
        lowtide.trace(model, lambda x: model(x).mean(), x, mode=mode)


@MODES
def test_other_lengths_each_time(mode: Any) -> None:
    random.seed(1)
    model, _ = make()
    with pytest.raises(TraceError, match=r"varies between runs.*aten\.slice\.Tensor.* bytes and now on"):
        lowtide.trace(model, lambda x: model(x[: random.randrange(1, 1000)]).mean(), torch.randn(1000, 8), mode=mode)


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_caches_that_grow(mode: Any) -> None:
    model, x = make()
    past: list[Tensor] = []

    def loss_fn(x: Tensor) -> Tensor:
        past.append(x)
        return model(torch.cat(past)).mean()

    with pytest.raises(TraceError, match=r"varies between runs.*aten\.cat\.default"):
        lowtide.trace(model, loss_fn, x, mode=mode)


def test_sizes_that_follow_from_numbers_may_differ() -> None:
    """As in a mixture of experts behind dropout: not another step, only other numbers."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8))

    def loss_fn(x: Tensor) -> Tensor:
        rows = (model[0](x).sum(1) > 0).nonzero().squeeze(1)
        return model[1](x[rows]).sum()

    assert lowtide.trace(model, loss_fn, torch.randn(256, 8)).is_measured


def test_another_backward_each_time() -> None:
    """Whether gradients are copied depends on who else holds them, so backwards are not compared."""

    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            for _ in range(random.randrange(10)):
                gradient = gradient * 1.0
            return gradient

    model, x = make()
    assert lowtide.trace(model, lambda x: Noisy.apply(model(x)).mean(), x).is_measured


def test_batch_on_another_device() -> None:
    model, x = make()
    with pytest.raises(TraceError, match="the batch is on meta and the model on cpu: move the batch"):
        lowtide.trace(model, lambda x: model(x).mean(), x.to("meta"), mode="real")


def test_a_device_that_is_asked_for_inside() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    model, x = make()
    with pytest.raises(TraceError, match="allocates on cuda"):
        lowtide.trace(model, lambda x: model(x).mean() + torch.zeros(1, device="cuda").sum(), x, mode="fake")


def test_wrong_arguments() -> None:
    model, x = make()
    loss_fn = lambda x: model(x).mean()  # noqa: E731
    with pytest.raises(ValueError, match="'auto', 'real' or 'fake', not 'eager'"):
        lowtide.trace(model, loss_fn, x, mode="eager")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"nn\.Module, not function"):
        lowtide.trace(loss_fn, model, x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="loss_fn is a function"):
        lowtide.trace(model, x)  # type: ignore[arg-type]
    for device in ("H1000", "", "cuda:x", 1.5):
        with pytest.raises(TraceError, match="neither a torch device nor in lowtide's table"):
            lowtide.trace(model, loss_fn, x, device=device)  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        with pytest.raises(TraceError, match=r"has no cuda.*device='H100'"):
            lowtide.trace(model, loss_fn, x, device="cuda")


def test_uninitialised_modules() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU())
    with pytest.raises(TraceError, match=r"0\.weight is not initialised yet: run the model once"):
        lowtide.trace(model, lambda x: model(x).mean(), torch.randn(4, 8))


@MODES
def test_errors_of_the_step_itself(mode: Any) -> None:
    model, x = make()
    expected = TraceError if mode == "fake" else KeyError
    with pytest.raises(expected, match="labels"):
        lowtide.trace(model, lambda batch: model(batch["labels"]).mean(), {"inputs": x}, mode=mode)


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_transforms_that_allow_no_hooks(mode: Any) -> None:
    model = nn.Linear(8, 1)
    with pytest.raises(TraceError, match=r"the step uses torch.func.grad, .*: use torch.autograd.grad"):
        lowtide.trace(
            model, lambda x: torch.func.grad(lambda v: model(v).sum())(x).mean(), torch.randn(4, 8), mode=mode
        )


def test_collections_skip_old_objects_and_free_new_ones() -> None:
    class Node:
        def __init__(self) -> None:
            self.itself = self

    gc.unfreeze()
    before = gc.get_freeze_count()
    old, new = Node(), Node()
    references = [weakref.ref(old), weakref.ref(new)]
    del old
    with old_objects_frozen():
        assert references[0]() is None  # it would count as memory that a measured step needs
        assert gc.get_freeze_count() > len(gc.get_objects())
        later = weakref.ref(Node())
        gc.collect()
        assert later() is None
        del new
        gc.collect()
        assert references[1]() is not None
    gc.collect()
    assert references[1]() is None
    assert gc.get_freeze_count() == before


def test_objects_that_the_user_has_frozen_stay_frozen() -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    with old_objects_frozen():
        pass
    assert gc.get_freeze_count() >= before - 100  # some may have been freed
    gc.unfreeze()
