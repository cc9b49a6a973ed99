"""Calls whose arguments the forward changes: no plan recomputes them, and a plan that names one is refused."""

from __future__ import annotations

import copy
import logging
import re
from collections import UserDict, UserList
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.plans import Plan, Recompute
from lowtide.simulator import simulate
from sweeps import sweep

pytestmark = pytest.mark.usefixtures("quick_fit")


class Cache:
    def __init__(self) -> None:
        self.items: list[Tensor] = []


class Layer(nn.Module):
    def __init__(self, change: Callable[[Any, Tensor], None] | None) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.GELU(), nn.Linear(32, 8))
        self.change = change

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        y = self.body(x.sin()).exp()
        if self.change is not None:
            self.change(cache, y)
        return y


class Layers(nn.Module):
    def __init__(self, make: Callable[[], Any], changes: list[Callable[[Any, Tensor], None] | None]) -> None:
        super().__init__()
        self.make, self.layers = make, nn.ModuleList(Layer(change) for change in changes)

    def forward(self, x: Tensor) -> Tensor:
        cache = self.make()
        for layer in self.layers:
            x = layer(x, cache=cache)
        return x.square().mean()


def append(cache: Any, y: Tensor) -> None:
    cache.append(y.detach())


def put(cache: Any, y: Tensor) -> None:
    cache[len(cache)] = y.detach()


def put_attribute(cache: Any, y: Tensor) -> None:
    cache.y = y.detach()


def add(cache: Any, y: Tensor) -> None:
    cache.items.append(y.detach())


def add_in_place(cache: Any, y: Tensor) -> None:
    cache.items[0].add_(1)


def one_tensor() -> Cache:
    cache = Cache()
    cache.items.append(torch.zeros(1))
    return cache


def unreplayable(graph: lowtide.StepGraph) -> set[str]:
    return {graph.calls[call].path for call in graph.unreplayable}


def gradients(model: nn.Module, loss_fn: Any, *args: Any) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    loss = loss_fn(*args)
    loss.backward()
    found = [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return found


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def budgets(model: nn.Module, loss_fn: Any, *args: Any, shares: tuple[float, ...] = (0.3, 0.8)) -> list[int]:
    """Between the floor of what `fit` can hold and the plain peak."""
    graph = lowtide.trace(model, loss_fn, *args)
    floor, plain = lowtide.sweep(graph, [], time_limit_s=2).floor_bytes, simulate(graph).peak_bytes
    return [int(floor + share * (plain - floor)) for share in shares]


@pytest.mark.parametrize("mode", ["real", "fake"])
@pytest.mark.parametrize(
    ("make", "change"),
    [
        (list, append),
        (dict, put),
        (Cache, add),
        (one_tensor, add_in_place),
        (UserDict, put),  # Hugging Face's Gemma3n shares keys and values of layers in one
        (SimpleNamespace, put_attribute),  # of which there are no weak references
        (lambda: (1, [Cache()]), None),
    ],
    ids=["list", "dict", "object", "tensor in an object", "mapping", "namespace", "unchanged"],
)
def test_calls_that_change_an_argument_are_known_from_the_trace(make: Any, change: Any, mode: Any) -> None:
    model = Layers(make, [None, change, None])
    graph = lowtide.trace(model, model, torch.randn(4, 8), mode=mode)
    # A replay is given an object by reference, and a container rebuilt as it was: the object also fails the others.
    by_reference = make not in (list, dict)
    changed = set() if change is None else {"layers.1", *(("layers.0",) if by_reference else ())}
    assert unreplayable(graph) == changed
    assert all("cache" in reason for reason in graph.unreplayable.values())


@pytest.mark.parametrize(("make", "change"), sweep([(list, append), (Cache, add)], keep=1), ids=["list", "object"])
def test_fit_never_recomputes_them(make: Any, change: Any) -> None:
    model = Layers(make, [None, change, change, None])
    x, larger = torch.randn(64, 8), torch.randn(200, 8)
    expected, expected_larger = gradients(model, model, x), gradients(model, model, larger)
    for budget in budgets(model, model, x):
        with lowtide.fit(model, model, x, budget=budget, time_limit_s=1, tune_s=0) as handle:
            assert handle.plan.regions
            assert_equal(gradients(model, model, x), expected)
            assert_equal(gradients(model, model, larger), expected_larger)
            assert handle.stats().replans
            planned = {region.path for each in handle.shapes.all for region in each.plan.regions}
            assert planned.isdisjoint({"layers.1", "layers.2"})


def dropout_block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.3, inplace=True), nn.Linear(32, 8))


def relu_block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.Sequential(nn.ReLU(inplace=True)), nn.Linear(32, 8), nn.Tanh())


@pytest.mark.parametrize(("make", "path"), [(dropout_block, "0.2"), (relu_block, "0.1.0"), (relu_block, "0.1")])
def test_a_call_that_changes_its_input_in_place_is_refused(make: Any, path: str) -> None:
    model = nn.Sequential(make(), make())

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).square().mean()

    x = torch.randn(4, 8)
    plan = lowtide.plan(model, loss_fn, x, budget="1GiB")
    graph = plan.graph
    assert graph is not None
    for regions in ((Recompute(path),), (Recompute("0"), Recompute(path))):
        with pytest.raises(lowtide.PlanError, match=rf"{path} cannot be recomputed: .* in place"):
            simulate(graph, Plan(regions))
        with pytest.raises(lowtide.PlanError, match=rf"{path} cannot be recomputed: .* in place"):
            lowtide.apply(model, replace(plan, regions=regions))
    expected = gradients(model, loss_fn, x)
    around = Plan((Recompute("0"), Recompute("0.0"), Recompute("1")))  # their own inputs stay as they are
    assert simulate(graph, around).peak_bytes > 0
    with lowtide.apply(model, around):
        assert_equal(gradients(model, loss_fn, x), expected)


@pytest.mark.parametrize("make", [dropout_block, relu_block])
def test_fit_around_calls_that_change_their_input_in_place(make: Any) -> None:
    model = nn.Sequential(*(make() for _ in range(3)))

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).square().mean()

    x, larger = torch.randn(64, 8), torch.randn(200, 8)
    expected, expected_larger = gradients(model, loss_fn, x), gradients(model, loss_fn, larger)
    for budget in budgets(model, loss_fn, x):
        with lowtide.fit(model, loss_fn, x, budget=budget, time_limit_s=1, tune_s=0):
            assert_equal(gradients(model, loss_fn, x), expected)
            assert_equal(gradients(model, loss_fn, larger), expected_larger)


def test_an_input_that_the_caller_changes_later() -> None:
    class Later(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.Sequential(nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = x * 2
            y = self.layer(x + 0)
            z = self.layer[0](x)  # tanh saves what it gives, not what it is given
            x.add_(1)
            return self.last(y + z + x).square().mean()

    model = Later()
    graph = lowtide.trace(model, model, torch.randn(4, 8))
    assert [(graph.calls[c].path, graph.nths[c]) for c in graph.unreplayable] == [("layer.0", 1)]


def test_json_has_what_calls_change() -> None:
    model = Layers(list, [append, None])
    graph = lowtide.trace(model, model, torch.randn(4, 8))
    again = lowtide.StepGraph.from_json(graph.to_json())
    assert again == graph and again.unreplayable == graph.unreplayable != {}


# Hugging Face.


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=1, pad_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


def t5() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0, pad_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize("make", sweep([llama, t5, gpt2], keep=1))
def test_the_cache_is_off_in_training_and_on_again_after(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    model: Any = make()
    ids, larger = torch.randint(3, 64, (4, 16)), torch.randint(3, 64, (4, 40))

    def loss_fn(ids: Tensor) -> Tensor:
        return model(input_ids=ids, labels=ids).loss

    def without(ids: Tensor) -> Tensor:
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    expected, expected_larger = gradients(model, without, ids), gradients(model, without, larger)
    torch.testing.assert_close(expected, gradients(model, loss_fn, ids))
    prompt = ids[:1, :4]
    model.eval()
    tokens = model.generate(prompt, max_new_tokens=4, do_sample=False)
    model.train()
    with caplog.at_level(logging.WARNING, logger="lowtide"):
        for budget in budgets(model, loss_fn, ids, shares=(0.3,)):
            with lowtide.fit(model, loss_fn, ids, budget=budget, time_limit_s=1, tune_s=0) as handle:
                assert_equal(gradients(model, loss_fn, ids), expected)
                assert_equal(gradients(model, loss_fn, larger), expected_larger)
                assert handle.stats().replans
                model.eval()
                assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), tokens)
                model.train()
            assert model.config.use_cache
    assert len([record for record in caplog.records if "use_cache is switched off" in record.message]) == 1
    assert model(input_ids=ids, labels=ids).past_key_values is not None


@pytest.mark.parametrize("make", sweep([llama, gpt2], keep=1))
def test_a_cache_that_is_asked_for_is_left_on(make: Any) -> None:
    model: Any = make()
    ids, larger = torch.randint(3, 64, (4, 16)), torch.randint(3, 64, (4, 40))

    def loss_fn(ids: Tensor) -> Tensor:
        out = model(input_ids=ids, labels=ids, use_cache=True)
        assert out.past_key_values is not None
        return out.loss

    layers = "model.layers." if make is llama else "transformer.h."
    expected, expected_larger = gradients(model, loss_fn, ids), gradients(model, loss_fn, larger)
    for budget in budgets(model, loss_fn, ids, shares=(0.3,)):
        with lowtide.fit(model, loss_fn, ids, budget=budget, time_limit_s=1, tune_s=0) as handle:
            assert_equal(gradients(model, loss_fn, ids), expected)
            assert_equal(gradients(model, loss_fn, larger), expected_larger)
            planned = {region.path for each in handle.shapes.all for region in each.plan.regions}
            assert planned and not {f"{layers}{i}" for i in range(2)} & planned


def test_a_policy_on_layers_with_a_cache() -> None:
    model: Any = llama()
    ids = torch.randint(3, 64, (4, 16))

    def loss_fn(ids: Tensor) -> Tensor:
        return model(input_ids=ids, labels=ids).loss

    expected = gradients(model, loss_fn, ids)
    with lowtide.apply(model, lowtide.RecomputeAll()):
        assert_equal(gradients(model, loss_fn, ids), expected)
    assert model.config.use_cache


def test_the_trace_says_that_the_cache_was_off() -> None:
    model: Any = llama()
    before = copy.deepcopy(model.config.to_dict())
    graph = lowtide.trace(model, lambda ids: model(input_ids=ids, labels=ids).loss, torch.randint(3, 64, (2, 8)))
    assert any("use_cache is off" in note for note in graph.notes)
    assert not graph.unreplayable
    assert model.config.to_dict() == before


@pytest.mark.parametrize("make", [UserDict, UserList, SimpleNamespace], ids=lambda make: make.__name__)
def test_an_object_that_is_changed_after_the_last_call_is_known_though_it_is_gone(make: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(None) for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            cache = make()
            for layer in self.layers:
                x = layer(x, cache)
            if isinstance(cache, UserDict):
                cache["last"] = 1
            elif isinstance(cache, UserList):
                cache.append(1)
            else:
                cache.last = 1
            return x

    model = Model()
    graph = lowtide.trace(model, lambda: model(torch.randn(4, 8)).sum())
    assert unreplayable(graph) == {"layers.0", "layers.1"}


def test_an_infeasible_budget_names_the_calls_that_are_not_recomputed() -> None:
    model = Layers(list, [append] * 3)
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        lowtide.plan(model, model, torch.randn(256, 8), budget=20_000)
    expected = (
        r"\d calls cannot be recomputed, such as layers\.\d: the forward changes what it is called with \(cache\)\."
    )
    assert re.search(expected, str(caught.value))
    model = Layers(list, [None] * 3)
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        lowtide.plan(model, model, torch.randn(256, 8), budget=20_000)
    assert "cannot be recomputed" not in str(caught.value)

    class Collecting(nn.Module):
        """Its own argument changes, not that of the layers in it."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer(None) for _ in range(3))

        def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
            for layer in self.layers:
                x = layer(x)
                seen.append(x.detach())
            return x

    collecting = Collecting()
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        lowtide.plan(collecting, lambda x: collecting(x, []).square().mean(), torch.randn(256, 8), budget=20_000)
    assert "cannot be recomputed" not in str(caught.value)
