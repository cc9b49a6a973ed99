"""`lowtide.checkpoint` gives what the plain call gives: outputs, gradients, buffers and random state."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import inspect
import threading
import weakref
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn

import lowtide
from lowtide import _compat
from lowtide._compat.profiler import cpu_allocation_totals
from stepping import Runner, assert_exact, assert_same, plainly, run_step


def mlp(width: int = 8, dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, width), nn.Tanh())


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def call(run: Runner, model: nn.Module, inputs: Any) -> Tensor:
    return run(model, inputs[0])


class Pair(NamedTuple):
    a: Tensor
    b: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    scale: float = 2.0


@dataclasses.dataclass
class Box:
    x: Tensor
    more: dict[str, Any]
    derived: Any = dataclasses.field(init=False, default=None)


class Bag(dict):  # type: ignore[type-arg]
    label = "bag"


NESTINGS: dict[str, Any] = {
    "dict": (lambda x: {"x": x, "n": None}, lambda v: v["x"]),
    "list": (lambda x: [1, x], lambda v: v[1]),
    "tuple": (lambda x: (x, "s"), lambda v: v[0]),
    "named tuple": (lambda x: Pair(x, 3), lambda v: v.a),
    "frozen dataclass": (lambda x: Frozen(x), lambda v: v.x),
    "dataclass": (lambda x: Box(x, {"y": [x]}), lambda v: v.x + v.more["y"][0]),
    "ordered dict": (lambda x: OrderedDict(x=x), lambda v: v["x"]),
    "default dict": (lambda x: defaultdict(list, x=x), lambda v: v["x"]),
    "dict subclass": (lambda x: Bag(x=x), lambda v: v["x"] if v.label == "bag" else None),
    "deep": (lambda x: {"a": [({"b": Pair(x, None)},)]}, lambda v: v["a"][0][0]["b"].a),
}


@pytest.mark.parametrize("name", NESTINGS)
@pytest.mark.parametrize("by_keyword", [False, True])
def test_tensors_in_containers_are_inputs(name: str, by_keyword: bool) -> None:
    wrap, unwrap = NESTINGS[name]

    def step(run: Runner, model: nn.Module, inputs: Any) -> Tensor:
        nested = wrap(inputs[0] * 1)
        region = lambda value: model(unwrap(value))  # noqa: E731
        return run(region, value=nested) if by_keyword else run(region, nested)

    assert_exact(step, mlp(), [leaf(4, 8)])


@pytest.mark.parametrize("name", NESTINGS)
def test_modules_called_with_containers_again(name: str) -> None:
    wrap, unwrap = NESTINGS[name]

    class Layer(nn.Linear):
        def forward(self, value: Any) -> Any:
            return wrap(super().forward(unwrap(value)).tanh())

    def step(run: Runner, model: nn.Module, inputs: Any) -> Tensor:
        outputs = []
        for x in inputs:
            value = wrap(x * 1)
            for layer in model.children():
                value = run(layer, value)
            outputs.append(unwrap(value))
        return torch.cat(outputs)

    assert_exact(step, nn.Sequential(Layer(8, 8), Layer(8, 8)), [leaf(4, 8), leaf(2, 8)])


@pytest.mark.parametrize("name", NESTINGS)
def test_a_container_holds_no_more_bytes_than_a_positional_tensor(name: str) -> None:
    """Inside an outer region an inner region's inputs are dropped too, wherever in the arguments they are."""
    wrap, unwrap = NESTINGS[name]

    def held_bytes(inner: Any) -> int:
        x, held = leaf(64, 64), []

        def outer(x: Tensor) -> Tensor:
            for _ in range(8):
                x = inner(x.sin())
            return x

        gc.collect()  # nothing of other tests shall be freed meanwhile
        return cpu_allocation_totals(lambda: held.append(lowtide.checkpoint(outer, x)))[-1]

    positional = held_bytes(lambda x: lowtide.checkpoint(torch.cos, x))
    nested = held_bytes(lambda x: lowtide.checkpoint(lambda value: unwrap(value).cos(), wrap(x)))
    assert nested == positional


def test_outputs_may_be_any_structure() -> None:
    def step(run: Runner, model: nn.Module, inputs: Any) -> Tensor:
        out = run(lambda x: {"h": model(x), "pair": Pair(x.sin(), [x.cos(), "text"])}, inputs[0])
        return out["h"].sum() + out["pair"].a.sum() * out["pair"].b[0].sum()

    assert_exact(step, mlp(), [leaf(4, 8)])


def test_other_arguments_pass_through() -> None:
    seen: list[Any] = []
    marker = object()

    def function(x: Tensor, *rest: Any, flag: bool, **options: Any) -> Tensor:
        seen.append((rest, flag, options))
        return x.sin()

    lowtide.checkpoint(function, leaf(3), None, 3, "s", marker, flag=True, mode="a").sum().backward()
    assert seen == [((None, 3, "s", marker), True, {"mode": "a"})] * 2


def test_the_callers_own_containers_reach_the_forward() -> None:
    given = {"x": leaf(3)}
    received = []

    def function(value: dict[str, Tensor]) -> Tensor:
        received.append(value)
        return value["x"].sin()

    lowtide.checkpoint(function, given)
    assert received[0] is given


def test_a_container_changed_by_the_caller_does_no_harm() -> None:
    def step(run: Runner, model: nn.Module, inputs: Any) -> Tensor:
        state = {"h": inputs[0]}
        for layer in model:
            state["h"] = run(lambda state, layer=layer: layer(state["h"]).tanh(), state)
        return state["h"]

    assert_exact(step, nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), [leaf(4, 8)])


def test_signature_is_torchs() -> None:
    ours = inspect.signature(lowtide.checkpoint).parameters
    theirs = inspect.signature(torch_checkpoint.checkpoint).parameters
    assert list(ours) == list(theirs)
    assert [p.kind for p in ours.values()] == [p.kind for p in theirs.values()]


def test_reentrant_is_torchs_own() -> None:
    def step(run: Runner, model: nn.Module, inputs: Any) -> Tensor:
        return run(model, inputs[0], use_reentrant=True)

    assert_exact(step, mlp(), [leaf(4, 8)])
    with pytest.raises(ValueError, match="Unexpected keyword arguments"):
        lowtide.checkpoint(torch.sin, leaf(3), use_reentrant=True, extra=1)


@pytest.mark.parametrize("use_reentrant", [None, False])
def test_unspecified_reentrant_is_silent(use_reentrant: bool | None) -> None:
    lowtide.checkpoint(torch.sin, leaf(3), use_reentrant=use_reentrant).sum().backward()


# Random numbers and modes


def test_dropout_masks_are_replayed() -> None:
    assert_exact(call, mlp(dropout=0.5), [leaf(16, 8)])


def test_a_generator_among_the_arguments_is_replayed() -> None:
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]

    def step(generator: torch.Generator) -> Any:
        def run(run: Runner, model: nn.Module, inputs: Any) -> Tensor:
            def region(x: Tensor, options: dict[str, Any]) -> Tensor:
                return model(x * torch.rand(x.shape, generator=options["generator"]))

            return run(region, inputs[0], {"generator": generator})

        return run

    model, inputs = mlp(), [leaf(4, 8)]
    plain = run_step(step(generators[0]), model, inputs, plainly)
    ours = run_step(step(generators[1]), model, inputs, lowtide.checkpoint)
    assert_same(plain, ours)
    assert torch.equal(generators[0].get_state(), generators[1].get_state())


def test_rng_can_be_left_alone() -> None:
    masks = []

    def noisy(x: Tensor) -> Tensor:
        masks.append(torch.rand(3))
        return x * masks[-1]

    lowtide.checkpoint(noisy, leaf(3), preserve_rng_state=False).sum().backward()
    assert not torch.equal(*masks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache_enabled", [True, False])
def test_autocast_is_replayed(dtype: torch.dtype, cache_enabled: bool) -> None:
    def step(run: Runner, model: nn.Module, inputs: Any) -> Tensor:
        with torch.autocast("cpu", dtype=dtype, cache_enabled=cache_enabled):
            return run(model, inputs[0]).float()

    assert_exact(step, mlp(), [leaf(4, 8)])


def test_autocast_around_the_backward_is_kept_out() -> None:
    x, model, gradients = leaf(4, 8), mlp(), []
    for run in (plainly, lowtide.checkpoint):
        output = run(model, x).sum()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            gradients.append(torch.autograd.grad(output, x)[0])
    assert torch.equal(*gradients)


def test_default_dtype_and_device_are_replayed() -> None:
    made = []

    def region(x: Tensor) -> Tensor:
        made.append(torch.ones(3))
        return (x * made[-1]).sin()

    x = leaf(3)
    torch.set_default_dtype(torch.float64)
    try:
        output = lowtide.checkpoint(region, x)
    finally:
        torch.set_default_dtype(torch.float32)
    output.sum().backward()
    assert [tensor.dtype for tensor in made] == [torch.float64] * 2

    devices = []

    def on_device(x: Tensor) -> Tensor:
        devices.append(torch.ones(3).device.type)
        return x.sin()

    with torch.device("meta"):
        output = lowtide.checkpoint(on_device, x)
    output.sum().backward()
    assert devices == ["meta", "meta"]


def test_backward_in_inference_mode() -> None:
    x = leaf(3)
    output = lowtide.checkpoint(lambda x: x.sin().exp(), x).sum()
    with torch.inference_mode():
        (gradient,) = torch.autograd.grad(output, x)
    (expected,) = torch.autograd.grad(x.sin().exp().sum(), x)
    assert torch.equal(gradient, expected)


def test_no_grad_is_a_plain_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.replay.checkpoint.run", None)
    with torch.no_grad():
        assert lowtide.checkpoint(torch.sin, torch.zeros(2)).sum() == 0
    with torch.inference_mode():
        assert lowtide.checkpoint(torch.sin, torch.zeros(2), preserve_rng_state=True).sum() == 0


def test_inference_tensors_as_inputs() -> None:
    with torch.inference_mode():
        frozen = torch.randn(3)
    x = leaf(3)
    lowtide.checkpoint(lambda x, f: (x + f.clone()).sin(), x, frozen).sum().backward()
    assert x.grad is not None


# Autograd


def test_nested() -> None:
    def step(run: Runner, model: nn.Module, inputs: Any) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return run(model[:2], x)

        return run(lambda x: run(model[2:], run(inner, x)).sin(), inputs[0])

    assert_exact(step, mlp(dropout=0.5), [leaf(4, 8)])


def test_retained_graph_and_partial_backward() -> None:
    x, y = leaf(4), leaf(4)
    output = lowtide.checkpoint(lambda x, y: (x.sin() * y.exp()).tanh(), x, y).sum()
    first = torch.autograd.grad(output, [x, y], retain_graph=True)
    again = torch.autograd.grad(output, [x, y], retain_graph=True)
    (only_y,) = torch.autograd.grad(output, [y])
    expected = torch.autograd.grad((x.sin() * y.exp()).tanh().sum(), [x, y])
    for gradients in (first, again):
        assert all(map(torch.equal, gradients, expected))
    assert torch.equal(only_y, expected[1])


def test_gradient_of_an_inner_value() -> None:
    inner = []

    def region(x: Tensor) -> Tensor:
        inner.append(x.sin())
        return inner[-1].exp()

    output = lowtide.checkpoint(region, leaf(4)).sum()
    (gradient,) = torch.autograd.grad(output, inner[0])
    assert torch.equal(gradient, inner[0].exp())


def test_double_backward() -> None:
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    function = functools.partial(lowtide.checkpoint, lambda x: x.sin().exp() * x)
    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)


def test_hooks_fire_once() -> None:
    fired: list[str] = []
    model, x = mlp(), leaf(4, 8)
    x.register_hook(lambda grad: fired.append("input"))
    model[0].weight.register_hook(lambda grad: fired.append("weight"))
    torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), lambda grads: fired.append("all"))
    model[0].register_full_backward_hook(lambda *args: fired.append("module"))
    lowtide.checkpoint(model, x).sum().backward()
    assert sorted(fired) == ["all", "input", "module", "weight"]


def test_saved_tensor_hooks_outside_and_inside() -> None:
    packed = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tuple(tensor.shape))
        return tensor

    def step(run: Runner, model: nn.Module, inputs: Any) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            h = run(model, inputs[0])

        def region(x: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                return x.sin().exp()

        return run(region, h)

    assert_exact(step, mlp(), [leaf(4, 8)])
    packed.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        lowtide.checkpoint(lambda options: options["x"].sin().exp(), {"x": leaf(2, 3)})
    assert [shape for shape in packed if shape != (0,)] == [(2, 3)]  # the input alone, found inside the dict


def test_frozen_inputs_keep_the_gradients_of_parameters() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    assert_exact(call, model, [torch.randn(4, 8)])


def test_selective_policies() -> None:
    context_fn = functools.partial(
        torch_checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]
    )

    def step(run: Runner, model: nn.Module, inputs: Any) -> Tensor:
        return run(model, inputs[0], **({} if run is plainly else {"context_fn": context_fn}))

    assert_exact(step, mlp(dropout=0.3), [leaf(4, 8)])


def test_early_stop_and_its_switch() -> None:
    ends: list[int] = []

    def region(x: Tensor) -> Tensor:
        y = x.sin().exp()
        ends.append(1)
        return y

    lowtide.checkpoint(region, leaf(3)).sum().backward()
    assert len(ends) == 1
    with torch_checkpoint.set_checkpoint_early_stop(False):
        output = lowtide.checkpoint(region, leaf(3))
    output.sum().backward()
    assert len(ends) == 3
    lowtide.checkpoint(region, leaf(3), early_stop=False).sum().backward()
    assert len(ends) == 5


def test_graph_exec_group() -> None:
    runs: list[int] = []

    def region(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        runs.append(1)
        return x.sin().exp(), y.cos().exp()

    x, y = leaf(3), leaf(3)
    a, b = lowtide.checkpoint(region, x, y)
    with torch_checkpoint.GraphExecGroup():
        a.sum().backward()
        b.sum().backward()
    assert len(runs) == 2


def test_backward_inside_the_region() -> None:
    def region(x: Tensor) -> Tensor:
        y = x.sin().exp()
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y * gradient

    x = leaf(3)
    for early_stop in (True, False):
        (ours,) = torch.autograd.grad(lowtide.checkpoint(region, x, early_stop=early_stop).sum(), x)
        (plain,) = torch.autograd.grad(region(x).sum(), x)
        assert torch.equal(ours, plain)


# torch.func


@pytest.mark.parametrize(
    "transform",
    [
        torch.func.grad,
        torch.func.jacrev,
        torch.func.hessian,
        lambda f: torch.func.vmap(torch.func.grad(f)),
        lambda f: torch.func.grad(lambda x: torch.func.grad(f)(x).sum()),
        lambda f: lambda x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    ],
    ids=["grad", "jacrev", "hessian", "vmap of grad", "grad of grad", "jvp"],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch.func.jvp's own
def test_torch_func_transforms(transform: Any) -> None:
    def function(x: Tensor) -> Tensor:
        return (x.sin() * x).exp().sum()

    x = torch.randn(3, 4)
    assert torch.equal(transform(lambda x: lowtide.checkpoint(function, x))(x), transform(function)(x))


def test_vmap_with_a_backward_outside() -> None:
    x = leaf(5, 4)
    (ours,) = torch.autograd.grad(torch.func.vmap(lambda x: lowtide.checkpoint(torch.exp, x))(x).sum(), x)
    assert torch.equal(ours, x.exp())


def test_vmap_inside_a_region() -> None:
    def step(run: Runner, model: nn.Module, inputs: Any) -> Tensor:
        return run(lambda x: torch.func.vmap(torch.linalg.qr)(x)[0].sum(), inputs[0])

    assert_exact(step, nn.Identity(), [leaf(3, 4, 4)])


class Checkpointed(nn.Module):
    def __init__(self, run: Runner) -> None:
        super().__init__()
        self.run, self.block = run, mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.block, x)


@pytest.mark.parametrize("as_leaves", [True, False])
def test_functional_call_replays_with_the_parameters_it_was_given(as_leaves: bool) -> None:
    model = Checkpointed(lowtide.checkpoint)
    x = leaf(4, 8)
    leaves = {name: torch.randn_like(p, requires_grad=True) for name, p in model.named_parameters()}

    def gradients() -> Any:
        parameters = leaves if as_leaves else {name: p * 2 for name, p in leaves.items()}
        output = torch.func.functional_call(model, parameters, (x,))
        return torch.autograd.grad(output.sum(), [x, *leaves.values()])

    ours = gradients()
    model.run = plainly
    assert all(map(torch.equal, ours, gradients()))
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())


def test_func_grad_through_functional_call() -> None:
    model, x = Checkpointed(lowtide.checkpoint), torch.randn(4, 8)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    transform = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    parameters = dict(model.named_parameters())
    ours = transform(parameters, x)
    model.run = plainly
    plain = transform(parameters, x)
    assert all(torch.equal(ours[name], plain[name]) for name in plain)


# Side effects


class Counting(nn.Module):
    """Buffers of every habit: in place, rebound, through `.data`, read before they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        for name in ("in_place", "rebound", "data", "ema"):
            self.register_buffer(name, torch.ones(8))
        self.register_buffer("large", torch.ones(512, 512))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.linear(x)) * self.ema.clone() + self.rebound * self.in_place.clone()
        h = h * self.large.mean()
        with torch.no_grad():
            self.in_place += h.mean(0)
            self.rebound = self.rebound + 1
            self.data.data.add_(2)
            self.ema.mul_(0.9).add_(h.mean(0), alpha=0.1)
            self.large.mul_(1.5)
        return h.tanh().sin()


@pytest.mark.parametrize("early_stop", [True, False])
def test_buffers_are_written_once(early_stop: bool) -> None:
    def step(run: Runner, model: nn.Module, inputs: Any) -> Tensor:
        x = inputs[0]
        for _ in range(3):  # the same module several times before one backward
            x = run(model, x, early_stop=early_stop)
        return x

    assert_exact(step, Counting(), [leaf(16, 8)])


def test_buffers_are_written_once_over_several_steps() -> None:
    def step(run: Runner, model: nn.Module, inputs: Any) -> Tensor:
        for _ in range(3):
            output = run(model, inputs[0])
            output.sum().backward(retain_graph=True)
        return output

    assert_exact(step, Counting(), [leaf(16, 8)])


def test_buffers_reached_through_a_closure_or_a_method() -> None:
    def step(run: Runner, model: nn.Module, inputs: Any) -> Tensor:
        x = run(lambda x: model(x).exp(), inputs[0])
        x = run(model.forward, x)
        return run(functools.partial(model.__call__), x)

    assert_exact(step, Counting(), [leaf(16, 8)])


class Holder:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def run(self, x: Tensor) -> Tensor:
        return self.model(x).exp()

    __call__ = run


WAYS_TO_A_MODULE: dict[str, Any] = {
    "default argument": lambda model: lambda x, model=model: model(x).exp(),
    "dict in a closure": lambda model: (lambda models: lambda x: models["m"](x).exp())({"m": model}),
    "method of an object": lambda model: Holder(model).run,
    "callable object": lambda model: Holder(model),
    "object in a closure": lambda model: (lambda holder: lambda x: holder.model(x).exp())(Holder(model)),
    "partial argument": lambda model: functools.partial(lambda model, x: model(x).exp(), model),
    "a function that calls a function": lambda model: (lambda inner: lambda x: inner(x))(lambda x: model(x).exp()),
}


@pytest.mark.parametrize("way", WAYS_TO_A_MODULE)
def test_batchnorm_counts_once_however_it_is_reached(way: str) -> None:
    """Its statistics are written by a kernel that leaves no trace in the version counter."""

    def step(run: Runner, model: nn.Module, inputs: Any) -> Tensor:
        skipped = run(lambda x: x.sin() if model is not None else model(x), inputs[0])  # in reach, and not run
        return run(WAYS_TO_A_MODULE[way](model), skipped, early_stop=False)

    assert_exact(step, nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()), [leaf(16, 8)])


def test_a_module_reached_through_an_argument() -> None:
    def step(run: Runner, model: nn.Module, inputs: Any) -> Tensor:
        x = run(lambda x, f: f(x).exp(), inputs[0], model, early_stop=False)
        x = run(lambda x, f: f(x).exp(), x, functools.partial(model), early_stop=False)
        return run(lambda x, holder: holder.run(x), x, Holder(model), early_stop=False)

    assert_exact(step, nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()), [leaf(16, 8)])


def test_the_variable_of_a_loop() -> None:
    def step(run: Runner, model: nn.Module, inputs: Any) -> Tensor:
        x = inputs[0]
        for layer, scale in zip(model, (1.0, 2.0, 3.0), strict=True):
            x = run(lambda x: (layer(x) * scale).sin(), x)  # noqa: B023  the trap
        return x

    assert_exact(step, nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), [leaf(4, 8)])


def test_a_gradient_taken_inside_a_region_with_weights() -> None:
    def step(run: Runner, model: nn.Module, inputs: Any) -> Tensor:
        def penalty(x: Tensor) -> Tensor:
            (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            return gradient.square().sum() + x.sum()

        return run(penalty, inputs[0])

    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid())
    assert_exact(step, model, [leaf(4, 8)])


def test_batchnorm_under_a_selective_policy() -> None:
    context_fn = functools.partial(
        torch_checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]
    )

    def step(run: Runner, model: nn.Module, inputs: Any) -> Tensor:
        return run(model, inputs[0], **({} if run is plainly else {"context_fn": context_fn}))

    assert_exact(step, nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()), [leaf(16, 8)])


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)
        self.drawn = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.drawn += 1
        return (x * torch.rand(x.shape, generator=self.generator)).sin() * self.drawn.clone()


def test_generators_and_tensors_that_are_plain_attributes() -> None:
    found = []
    for run in (plainly, lowtide.checkpoint):
        torch.manual_seed(0)
        model, x = Drawing(), leaf(4)
        for _ in range(2):
            run(model, x, early_stop=False).sum().backward()
        found.append([x.grad, model.generator.get_state(), model.drawn])
    assert all(map(torch.equal, *found))


def test_unusual_tensors_in_reach() -> None:
    class Unusual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("sparse", torch.eye(8).to_sparse())
            self.register_buffer("expanded", torch.ones(1).expand(8))
            self.register_buffer("late", None)
            self.register_buffer("growing", torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            if self.late is None:
                self.late = x.detach().mean()
            self.growing.resize_(2).fill_(2.0)
            return torch.sparse.mm(self.sparse, self.linear(x)).exp() * self.expanded * self.late

    model, x, lazy = Unusual(), leaf(8, 8), nn.LazyLinear(8)
    found = []
    for run in (plainly, lowtide.checkpoint):
        copied = copy.deepcopy(model)
        run(copied, x, early_stop=False).sum().backward()
        found.append([x.grad, copied.linear.weight.grad, copied.late, copied.growing])
        x.grad = None
    assert all(map(torch.equal, *found))
    lowtide.checkpoint(lambda x: x.sin() if lazy is not None else lazy(x), x).sum().backward()


def test_a_loose_tensor_is_written_once() -> None:
    counter = torch.zeros(())

    def region(x: Tensor) -> Tensor:
        with torch.no_grad():
            counter.add_(1)
        return x.sin().exp()

    x = leaf(3)
    for _ in range(2):
        x = lowtide.checkpoint(region, x, early_stop=False)
    x.sum().backward()
    assert counter == 2


def test_training_mode_of_the_forward_is_replayed() -> None:
    def step(run: Runner, model: nn.Module, inputs: Any) -> Tensor:
        output = run(model, inputs[0])
        model.eval()
        return output

    assert_exact(step, nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh()), [leaf(16, 8)])


def test_embedding_with_max_norm() -> None:
    def step(run: Runner, model: nn.Module, inputs: Any) -> Tensor:
        return run(lambda i: model(i).sin().exp(), inputs[0])

    assert_exact(step, nn.Embedding(10, 4, max_norm=0.5), [torch.arange(10)])


def test_is_recomputing_only_in_the_replay_and_per_thread() -> None:
    seen: list[Any] = []

    def region(x: Tensor) -> Tensor:
        elsewhere: list[bool] = []
        thread = threading.Thread(target=lambda: elsewhere.append(lowtide.is_recomputing()))
        thread.start()
        thread.join()
        seen.append((lowtide.is_recomputing(), elsewhere[0]))
        return x.sin().exp()

    output = lowtide.checkpoint(region, leaf(3))
    assert not lowtide.is_recomputing()
    output.sum().backward()
    assert not lowtide.is_recomputing()
    assert seen == [(False, False), (True, False)]


# Nothing stays behind


class Boom(Exception):
    pass


def test_no_leak_through_exceptions() -> None:
    """Exceptions in forward, replay and backward: nothing stays allocated, with the garbage collector off."""
    model, x = mlp(16, dropout=0.1), leaf(64, 16)
    model.insert(1, nn.BatchNorm1d(16))
    alive: list[weakref.ref[Tensor]] = []

    class Raise(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise Boom

    def region(x: Tensor, where: str, options: dict[str, Any]) -> Tensor:
        h = model(x + options["shift"])
        alive.append(weakref.ref(h))
        if where == "forward" or (where == "replay" and lowtide.is_recomputing()):
            raise Boom
        return (Raise.apply(h) if where == "backward" else h).sin()

    gc.disable()
    try:
        for step in range(200):
            where = ("forward", "replay", "backward", "nowhere")[step % 4]
            try:
                output = lowtide.checkpoint(region, x, where, {"shift": torch.ones(16) * step})
                output.sum().backward()
            except Boom:
                pass
            output = None
            assert not any(ref() is not None for ref in alive), f"step {step}, exception in the {where}"
            alive.clear()
            assert not lowtide.is_recomputing()
    finally:
        gc.enable()
    x.grad = None
    model.zero_grad()
    assert_exact(call, model, [x])


def test_dropped_graph_frees_its_inputs() -> None:
    x = torch.randn(4)
    storage = _compat.StorageReference(x)
    output = lowtide.checkpoint(lambda v: v["x"].sin() * v["w"], {"x": x, "w": leaf(4)})
    del x
    assert storage.is_alive()
    del output
    assert not storage.is_alive()


def test_a_selective_checkpoint_in_a_checkpoint_takes_what_its_own_ops_made() -> None:
    """Its input comes from a replay of the outer one, whose products are none of its own."""
    torch.manual_seed(0)
    layers, x = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), torch.randn(4, 8)

    def inner(x: Tensor) -> Tensor:
        return layers[3](layers[2](x).tanh()).tanh()

    contexts = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])

    def outer(x: Tensor) -> Tensor:
        return lowtide.checkpoint(inner, layers[1](layers[0](x).tanh()).tanh(), context_fn=contexts)

    lowtide.checkpoint(outer, x).square().sum().backward()
    actual = [parameter.grad for parameter in layers.parameters()]
    layers.zero_grad()
    inner(layers[1](layers[0](x).tanh()).tanh()).square().sum().backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(actual, layers.parameters(), strict=True))
