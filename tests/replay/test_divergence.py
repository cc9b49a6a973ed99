"""What cannot be replayed faithfully is refused, with a name and a cure; never silently wrong."""

from __future__ import annotations

import functools
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn

import lowtide


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


class Cache:
    """Collects keys over layers, as models do for generation."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.length = 0

    def append(self, key: Tensor) -> Tensor:
        self.keys.append(key)
        return torch.stack(self.keys).sum(0)


class TensorCache:
    __slots__ = ("keys",)

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


# Arguments


def test_a_cache_object_appended_to_is_refused() -> None:
    def attend(x: Tensor, past_key_values: Cache) -> Tensor:
        return past_key_values.append(x.sin()).exp()

    output = lowtide.checkpoint(attend, leaf(3), Cache())
    with pytest.raises(lowtide.CheckpointError, match=r"'past_key_values' of .*attend.* was changed"):
        output.sum().backward()


@pytest.mark.parametrize("cache", [[], {"keys": []}, (1, [])], ids=["list", "dict", "in a tuple"])
def test_a_container_appended_to_by_the_region_is_refused(cache: Any) -> None:
    def attend(x: Tensor, cache: Any) -> Tensor:
        keys = cache["keys"] if isinstance(cache, dict) else cache[1] if isinstance(cache, tuple) else cache
        keys.append(x.sin())
        return torch.stack(keys).sum(0).exp()

    output = lowtide.checkpoint(attend, leaf(3), cache=cache)
    with pytest.raises(lowtide.CheckpointError, match="argument 'cache"):
        output.sum().backward()


@pytest.mark.parametrize("change", [lambda c: c.keys.add_(1), lambda c: setattr(c, "keys", torch.ones(3))])
def test_a_tensor_inside_an_object_changed_or_replaced_is_refused(change: Any) -> None:
    cache = TensorCache(torch.ones(3))
    output = lowtide.checkpoint(lambda x, cache: (x * cache.keys).sin(), leaf(3), cache)
    change(cache)
    with pytest.raises(lowtide.CheckpointError, match="argument 'cache'"):
        output.sum().backward()


def test_an_unchanged_object_is_fine() -> None:
    cache, x = Cache(), leaf(3)
    cache.keys.append(torch.ones(3))
    lowtide.checkpoint(lambda x, cache: (x * cache.keys[0]).sin(), x, cache).sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_an_input_changed_in_place_is_refused(nested: bool, requires_grad: bool) -> None:
    x, other = leaf(3), torch.randn(3)
    value = x * 2 if requires_grad else other
    argument = {"h": [value]} if nested else value
    output = lowtide.checkpoint(lambda w, state: (w * (state["h"][0] if nested else state)).sin(), leaf(3), argument)
    value.add_(1)
    with pytest.raises(lowtide.CheckpointError, match=r"argument .*state.* changed in place") as raised:
        output.sum().backward()
    assert "modified by an inplace operation" in str(raised.value)
    if nested:
        assert "['h'][0]" in str(raised.value)


def test_an_input_changed_in_place_by_the_region_is_refused() -> None:
    def region(x: Tensor) -> Tensor:
        x.mul_(2)
        return x.sin().exp()

    output = lowtide.checkpoint(region, leaf(3) * 1)
    with pytest.raises(lowtide.CheckpointError, match="argument 'x'"):
        output.sum().backward()


def test_a_base_changed_after_its_view_was_passed_is_refused() -> None:
    base = leaf(4) * 1
    output = lowtide.checkpoint(lambda v: v.sin().exp(), base[:2])
    base.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_numpy_arrays_and_iterators_are_watched() -> None:
    array = np.ones(3, dtype=np.float32)
    output = lowtide.checkpoint(lambda x, array: (x * torch.tensor(array)).sin(), leaf(3), array)
    array *= 2
    with pytest.raises(lowtide.CheckpointError, match="argument 'array'"):
        output.sum().backward()
    output = lowtide.checkpoint(lambda x, scales: (x * next(scales)).sin(), leaf(3), iter([1.0, 2.0]))
    with pytest.raises(lowtide.CheckpointError, match="argument 'scales'"):
        output.sum().backward()
    draws = random.Random(0)
    output = lowtide.checkpoint(lambda x, draws: (x * draws.random()).sin(), leaf(3), draws)
    with pytest.raises(lowtide.CheckpointError, match="argument 'draws'"):
        output.sum().backward()


# Parameters, buffers, saved values


def optimizer_step(module: nn.Module) -> None:
    torch.optim.SGD(module.parameters(), lr=0.1).step()


@pytest.mark.parametrize("how", ["module", "forward", "partial", "closure", "method", "bias only"])
def test_a_parameter_changed_before_the_backward_is_refused(how: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)

    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def run(self, x: Tensor) -> Tensor:
            return self.model(x)

    function = {
        "module": model,
        "forward": model.forward,
        "partial": functools.partial(model),
        "closure": lambda x: model(x),
        "method": Owner().run,
        "bias only": model,
    }[how]
    output = lowtide.checkpoint(function, leaf(2, 3))
    if how == "bias only":
        with torch.no_grad():
            model[0].bias.add_(1)
    else:
        optimizer_step(model)
    with pytest.raises(lowtide.CheckpointError, match=r"parameter '(weight|bias)' of Linear.*modified by an inplace"):
        output.sum().backward()


def test_a_frozen_parameter_changed_is_refused() -> None:
    model = nn.Linear(3, 3).requires_grad_(False)
    output = lowtide.checkpoint(model, leaf(2, 3)).exp()
    with torch.no_grad():
        model.weight.add_(1)
    with pytest.raises(lowtide.CheckpointError, match="parameter 'weight'"):
        output.sum().backward()


def test_what_leaves_no_trace_in_the_graph_is_refused_too() -> None:
    """A frozen bias, read in a method of a larger module, under no_grad, or on the way to another output."""

    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
            self.linear.bias.requires_grad_(False)

        def run(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                shift = self.other(x)
            return (self.linear(x) + shift).exp(), self.other(x).exp()

    for name in ("linear.bias", "other.weight"):
        owner = Owner()
        first, _ = lowtide.checkpoint(owner.run, leaf(2, 3))
        with torch.no_grad():
            owner.get_parameter(name).add_(1)
        with pytest.raises(lowtide.CheckpointError, match=f"parameter '{name.split('.')[1]}' of Linear"):
            first.sum().backward()


def test_a_tensor_closed_over_and_changed_is_refused() -> None:
    scale = torch.ones(3)
    output = lowtide.checkpoint(lambda x: (x * scale).sin(), leaf(3))
    scale.add_(1)
    with pytest.raises(lowtide.CheckpointError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_buffer_changed_by_someone_else_is_refused() -> None:
    norm = nn.BatchNorm1d(3).eval()
    output = lowtide.checkpoint(nn.Sequential(norm, nn.Tanh()), leaf(2, 3))
    norm.running_mean.add_(1)
    with pytest.raises(lowtide.CheckpointError, match="modified by an inplace operation"):
        output.sum().backward()


def test_parameters_out_of_the_regions_way_may_change() -> None:
    """An optimizer that steps inside the backward changes later layers before earlier regions are replayed."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
            self.norm = nn.BatchNorm1d(3)

        def run(self, i: int, x: Tensor) -> Tensor:
            return self.norm(self.layers[i](x)).tanh()

        def forward(self, x: Tensor) -> Tensor:
            for i in range(3):
                x = lowtide.checkpoint(self.run, i, x)
            return x

    def trained(step_in_backward: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Model()

        def sgd(parameter: Tensor) -> None:
            with torch.no_grad():
                parameter.sub_(parameter.grad)

        if step_in_backward:
            for parameter in model.layers.parameters():
                parameter.register_post_accumulate_grad_hook(sgd)
        model(torch.randn(4, 3)).square().sum().backward()
        return [p.grad for p in model.parameters()]

    assert all(map(torch.equal, trained(False), trained(True)))


def test_a_saved_value_changed_in_place_inside_the_region_is_refused() -> None:
    """torch drops autograd's version check here and gives wrong gradients."""

    def region(x: Tensor) -> Tensor:
        h = x.exp()
        y = h * 1
        h.mul_(3)
        return y.sin()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        region(leaf(3)).sum().backward()
    output = lowtide.checkpoint(region, leaf(3))
    with pytest.raises(lowtide.CheckpointError, match="modified by an inplace operation"):
        output.sum().backward()


def test_in_place_ops_that_autograd_allows_are_fine() -> None:
    x = leaf(3)

    def region(x: Tensor) -> Tensor:
        h = (x * 2).add_(1)
        h.relu_()
        return h.exp()

    (ours,) = torch.autograd.grad(lowtide.checkpoint(region, x).sum(), x)
    (plain,) = torch.autograd.grad(region(x).sum(), x)
    assert torch.equal(ours, plain)


# Divergence


def diverge(region: Any, *args: Any, **kwargs: Any) -> str:
    output = lowtide.checkpoint(region, *args, **kwargs)
    with pytest.raises(lowtide.CheckpointError) as raised:
        output.sum().backward()
    assert isinstance(raised.value, RuntimeError)
    assert isinstance(raised.value, torch_checkpoint.CheckpointError)
    assert len(str(raised.value).splitlines()) <= 40
    return str(raised.value)


def test_a_different_number_of_tensors_names_both_ops() -> None:
    runs: list[int] = []

    def region(x: Tensor) -> Tensor:
        runs.append(1)
        h = x.sin()
        return h.cos().exp() if len(runs) == 1 else h.tan()

    message = diverge(region, leaf(3))
    assert "different number of tensors" in message
    assert "cos in the forward, tan in the replay" in message
    assert "region" in message and "test_divergence.py" in message
    assert "data-dependent branch" in message and "what to do" in message


def test_different_metadata_names_the_module() -> None:
    class Growing(nn.Module):
        calls = 0  # of the class, which is nobody's attribute to restore

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            Growing.calls += 1
            return (x * self.weight).repeat(Growing.calls).exp()

    model = nn.Sequential(nn.ModuleDict({"deep": Growing()}))
    message = diverge(model[0]["deep"], leaf(3))
    assert "different metadata" in message
    assert "0.deep (Growing)" in message


def test_many_differences_stay_short() -> None:
    def region(x: Tensor) -> Tensor:
        for _ in range(200):
            x = x.sin()
        return x

    def growing(x: Tensor) -> Tensor:
        return region(x.repeat(2 if lowtide.is_recomputing() else 1))

    diverge(growing, leaf(3))


def test_python_random_is_named_as_a_cause() -> None:
    draws = iter((0.1, 0.9))  # drawn before

    def layer_drop(x: Tensor) -> Tensor:
        h = x.sin()
        return h.exp() if next(draws) > 0.5 else h.cos().exp()

    message = diverge(layer_drop, leaf(3))
    assert "RNG" in message and "Python's random" in message


def test_changed_grad_mode_is_named_as_a_cause() -> None:
    weight = torch.randn(3, requires_grad=True)

    def region(x: Tensor) -> Tensor:
        h = x.sin()
        with torch.set_grad_enabled(not lowtide.is_recomputing()):
            return (h * weight).exp()

    assert "grad mode" in diverge(region, leaf(3))


def test_values_are_compared_on_request() -> None:
    def region(x: Tensor) -> Tensor:
        return (x * (2.0 if lowtide.is_recomputing() else 1.0)).exp()

    lowtide.checkpoint(region, leaf(3)).sum().backward()  # shapes agree: the default check cannot see it
    assert "different" in diverge(region, leaf(3), determinism_check="values")
    lowtide.checkpoint(
        lambda x: nn.functional.dropout(x.sin()).exp(), leaf(3), determinism_check="values"
    ).sum().backward()


@pytest.mark.parametrize("swap", [True, False])
def test_value_checks_see_order(swap: bool) -> None:
    def region(x: Tensor) -> Tensor:
        mask = torch.tensor([True, False] if lowtide.is_recomputing() and swap else [False, True])
        return x.masked_fill(mask, 0.0)

    output = lowtide.checkpoint(region, leaf(2), determinism_check="values")
    if swap:
        with pytest.raises(lowtide.CheckpointError):
            output.sum().backward()
    else:
        output.sum().backward()


def test_none_switches_the_checks_off() -> None:
    def region(x: Tensor) -> Tensor:
        return (x.double() if lowtide.is_recomputing() else x).exp()

    lowtide.checkpoint(region, leaf(3), determinism_check="none").sum().backward()


@pytest.mark.usefixtures("unchanged_debug_logger")
def test_debug_is_torchs() -> None:
    def region(x: Tensor) -> Tensor:
        return x.sin().exp() if not lowtide.is_recomputing() else x.sin()

    output = lowtide.checkpoint(region, leaf(3), debug=True)
    with pytest.raises(RuntimeError, match="you passed `debug=True`"):
        output.sum().backward()


# Bad input


def test_something_to_call_is_needed() -> None:
    with pytest.raises(TypeError, match=r"write checkpoint\(block, x\)"):
        lowtide.checkpoint(torch.ones(3), leaf(3))  # type: ignore[arg-type]


def test_unknown_determinism_check() -> None:
    with pytest.raises(ValueError, match=r"\['default', 'values', 'none'\], but got 'vaules'"):
        lowtide.checkpoint(torch.sin, leaf(3), determinism_check="vaules")


def by_list() -> Any:
    return torch_checkpoint.create_selective_checkpoint_contexts([torch.ops.aten.convolution.default])


def by_packet() -> Any:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        kept = op in (torch.ops.aten.sin, torch.ops.aten.mm)
        return (
            torch_checkpoint.CheckpointPolicy.MUST_SAVE if kept else torch_checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
        )

    return torch_checkpoint.create_selective_checkpoint_contexts(policy)


@pytest.mark.parametrize("context_fn", [by_list, by_packet])
def test_a_policy_that_matches_nothing_is_refused_at_the_call(context_fn: Any) -> None:
    with pytest.raises(ValueError, match="saves none of the ops that ran") as raised:
        lowtide.checkpoint(lambda x: x.sin().exp(), leaf(3), context_fn=context_fn)
    if hasattr(torch_checkpoint, "_RECOMPUTE"):  # older torch notes only ops that are saved
        assert "aten.sin.default" in str(raised.value)


def test_a_policy_that_recomputes_everything_by_design_is_fine() -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return torch_checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    context_fn = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, policy)
    lowtide.checkpoint(lambda x: x.sin().exp(), leaf(3), context_fn=context_fn).sum().backward()


def test_errors_go_between_processes() -> None:
    def region(x: Tensor) -> Tensor:
        return (x.double() if lowtide.is_recomputing() else x).exp()

    with pytest.raises(lowtide.CheckpointError) as raised:
        lowtide.checkpoint(region, leaf(3)).sum().backward()
    error = pickle.loads(pickle.dumps(raised.value))
    assert isinstance(error, lowtide.CheckpointError) and str(error) == str(raised.value)
