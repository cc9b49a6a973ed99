"""docs/coming-from.md: each row of the page is a test here, under the text of its first cell."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint_sequential, create_selective_checkpoint_contexts

import lowtide
from lowtide import ActivationCheckpointer, ActivationStore, EveryN, KeepAll, RecomputeAll, Selective, Uniform
from lowtide.errors import CapacityError
from lowtide.policies import Segment, Segments, plan_recomputation

PAGE = Path(__file__).parent.parent / "docs" / "coming-from.md"
TESTS: dict[str, Callable[[], None]] = {}


def row(start: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """A test for the row whose first cell begins with `start`."""

    def add(test: Callable[[], None]) -> Callable[[], None]:
        assert start not in TESTS
        TESTS[start] = test
        return test

    return add


def rows() -> list[str]:
    cells = re.findall(r"^\| (.+?) (?<!\\)\| .*\|$", PAGE.read_text(), re.MULTILINE)
    return [cell for cell in cells if cell != "there"]


@pytest.mark.parametrize("cell", rows())
def test_row(cell: str) -> None:
    tests = [test for start, test in TESTS.items() if cell.startswith(start)]
    assert len(tests) == 1, f"{len(tests)} tests for the row {cell!r}"
    tests[0]()


def test_every_test_has_a_row() -> None:
    assert [start for start in TESTS if not any(cell.startswith(start) for cell in rows())] == []


# A model, a loop, and what they give without lowtide


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)))


def gradients(module: nn.Module, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    module.zero_grad()
    run(torch.ones(4, 32)).square().sum().backward()
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def check_gradients(run_of: Callable[[nn.Sequential], Callable[[Tensor], Tensor]]) -> None:
    plain, ours = model(), model()
    expected = gradients(plain, plain)
    assert all(map(torch.equal, gradients(ours, run_of(ours)), expected)) and len(expected) == 12


def layer(x: Any, i: int) -> Any:
    return x * 1.1 + i * 0.01


def states_of(x: Any, n: int) -> list[Any]:
    states = []
    for i in range(n):
        x = layer(x, i)
        states.append(x)
    return states


def layer_backward(x: Any, grad: Any, i: int) -> Any:
    return grad * 1.1


X = torch.tensor([1.0, 2.0, 3.0])


# torch.utils.checkpoint


@row("`checkpoint(fn, *args, use_reentrant=False)`")
def torch_checkpoint() -> None:
    check_gradients(lambda m: lambda x: lowtide.checkpoint(m, x))
    check_gradients(lambda m: lambda x: lowtide.checkpoint(m, x, use_reentrant=False, preserve_rng_state=True))


def selective(op: Any) -> Any:
    def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if func == op else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


@row("`create_selective_checkpoint_contexts`")
def torch_selective() -> None:
    contexts = selective(torch.ops.aten.addmm.default)
    check_gradients(lambda m: lambda x: lowtide.checkpoint(m, x, context_fn=contexts))
    with pytest.raises(ValueError, match="saves none of the ops"):
        lowtide.checkpoint(model(), torch.ones(4, 32), context_fn=selective(torch.ops.aten.mm))


@row("`checkpoint_sequential(model, segments, x)`")
def torch_sequential() -> None:
    def applied(m: nn.Sequential) -> nn.Sequential:
        assert len(lowtide.apply(m, Uniform(3), regions="*").stats().segments) == 3
        return m

    check_gradients(lambda m: lambda x: checkpoint_sequential(m, 3, x, use_reentrant=False))
    check_gradients(applied)


@row("`save_on_cpu(pin_memory=True)`")
def torch_save_on_cpu() -> None:
    def run(m: nn.Sequential, x: Tensor) -> Tensor:
        with lowtide.offload(host="1GiB", min_bytes=0) as store:
            y = m(x)
        assert store.stats().num_held_by_tier["host"] > 0
        return y

    check_gradients(lambda m: functools.partial(run, m))


@row("`checkpoint_wrapper` (distributed)")
def torch_wrapper() -> None:
    module = model()
    names = list(module.state_dict())
    lowtide.apply(module, RecomputeAll())
    assert list(module.state_dict()) == names


# JAX


@row("`jax.checkpoint(f)` / `jax.remat`")
def jax_checkpoint() -> None:
    x = torch.ones(3, requires_grad=True)
    lowtide.checkpoint(lambda x: x.sin().sin(), x).sum().backward()
    assert x.grad is not None


@row("`policy=jax.checkpoint_policies.everything_saveable`")
def jax_everything() -> None:
    assert KeepAll().decide(3) == [False] * 3


@row("`policy=nothing_saveable`")
def jax_nothing() -> None:
    assert RecomputeAll().decide(3) == [True] * 3


@row("`policy=dots_saveable`")
def jax_dots() -> None:
    torch_selective()


@row("`save_and_offload_only_these_names(...)`")
def jax_offload() -> None:
    torch_save_on_cpu()
    check_gradients(lambda m: lambda x: lowtide.checkpoint(m, x, store=ActivationStore(host="1GiB")))


@row("`print_saved_residuals`")
def jax_residuals() -> None:
    module = model()
    handle = lowtide.apply(module, EveryN(2))
    gradients(module, module)
    assert str(handle.stats())


# DeepSpeed, FairScale, Hugging Face


@row("`deepspeed.checkpointing.checkpoint`")
def deepspeed() -> None:
    check_gradients(lambda m: lambda x: lowtide.checkpoint(m, x, store=ActivationStore(host="64MiB")))


@row("`fairscale.nn.checkpoint_wrapper")
def fairscale() -> None:
    def applied(m: nn.Sequential) -> nn.Sequential:
        lowtide.apply(m, RecomputeAll(), regions=nn.Linear, store=ActivationStore(host="64MiB"))
        return m

    check_gradients(applied)


@row("`model.gradient_checkpointing_enable()`")
def hugging_face() -> None:
    module = model()
    for parameter in module[:3].parameters():  # as under LoRA: the first blocks are frozen, the input needs no gradient
        parameter.requires_grad_(False)
    expected = gradients(module, module)
    expected = [grad.clone() for grad in expected]
    lowtide.apply(module, RecomputeAll())
    assert all(map(torch.equal, gradients(module, module), expected)) and len(expected) == 6


@row("TRL's `activation_offloading=True`")
def trl() -> None:
    torch_save_on_cpu()


# Rockmate


def fitted() -> tuple[nn.Module, Any]:
    module, batch = model(), torch.ones(512, 32)
    handle = lowtide.fit(module, lambda x: module(x).square().mean(), batch, budget="64MiB")
    return module, handle


@row("`PureRockmate(model, sample, budget)`")
def rockmate() -> None:
    assert fitted()[1].plan.budget_bytes == 64 * 2**20


@row("`Offmate(...)`")
def offmate() -> None:
    module, batch = model(), torch.ones(4096, 32)
    where = [parameter.data_ptr() for parameter in module.parameters()]
    graph = lowtide.trace(module, lambda x: module(x).square().sum(), batch, device="H100")
    plan = next(plan for plan in lowtide.sweep(graph, host="64MiB").plans if plan.moves)
    expected = [grad.clone() for grad in gradients(module, module)]
    lowtide.apply(module, plan)
    assert all(map(torch.equal, gradients(module, module), expected))
    assert [parameter.data_ptr() for parameter in module.parameters()] == where


@row("the budget is for activations")
def rockmate_budget() -> None:
    module = nn.Linear(512, 512)  # its weights alone are above the budget
    with pytest.raises(lowtide.InfeasibleBudgetError):
        lowtide.fit(module, lambda x: module(x).sum(), torch.ones(2, 512), budget="512KiB")


@row("a new module, run in place of the model")
def rockmate_module() -> None:
    module, handle = fitted()
    handle.remove()
    assert type(module) is nn.Sequential


# numr


@row("`checkpoint(\\|inputs, client\\| ..., &[&x])`")
def numr() -> None:
    x, y = torch.tensor([2.0], requires_grad=True), torch.tensor([5.0], requires_grad=True)
    lowtide.checkpoint(lambda x, y: x * y, x, y).sum().backward()
    assert x.grad is not None and y.grad is not None and (x.grad.item(), y.grad.item()) == (5, 2)
    z = torch.tensor([2.0], requires_grad=True)
    square = lambda x: x * x  # noqa: E731
    lowtide.checkpoint(square, lowtide.checkpoint(square, z)).sum().backward()
    assert z.grad is not None and z.grad.item() == 32


# scirs2-neural


@row("`RecomputationPolicy::CheckpointAll`")
def scirs2_all() -> None:
    checkpointer = ActivationCheckpointer(KeepAll())
    assert all(checkpointer.maybe_save(i, X) for i in range(3))


@row("`RecomputationPolicy::CheckpointNone`")
def scirs2_none() -> None:
    checkpointer = ActivationCheckpointer(RecomputeAll())
    assert not any(checkpointer.maybe_save(i, X) for i in range(3))


@row("`RecomputationPolicy::Selective { cost_threshold }`")
def scirs2_selective() -> None:
    checkpointer = ActivationCheckpointer(Selective())
    assert Selective().cost_threshold == 100
    assert [checkpointer.maybe_save(i, X, cost=cost) for i, cost in enumerate((99, 100, 101))] == [False, True, True]


@row("`RecomputationPolicy::EveryN { n }`")
def scirs2_every_n() -> None:
    checkpointer = ActivationCheckpointer(EveryN(3))
    assert [checkpointer.maybe_save(i, X) for i in range(7)] == [True, False, False, True, False, False, True]
    assert not ActivationCheckpointer(EveryN(0)).maybe_save(0, X)


@row("`GradientCheckpointManager::new(context, memory_budget, policy)`")
def scirs2_manager() -> None:
    checkpointer = ActivationCheckpointer(KeepAll(), budget=24, order="oldest")
    assert checkpointer.num_checkpoints == checkpointer.stored_bytes == 0
    for i in range(3):
        checkpointer.maybe_save(i, X + i, cost=3 - i)
    assert [checkpointer.has(i) for i in range(3)] == [False, True, True]


@row("`checkpoint_activation(layer_id, &x, cost)`")
def scirs2_checkpoint_activation() -> None:
    x, checkpointer = X.clone(), ActivationCheckpointer(EveryN(2))
    assert checkpointer.maybe_save(0, x, cost=5) and not checkpointer.maybe_save(1, x, cost=5)
    assert torch.equal(checkpointer.get(0), x)


@row("`get_checkpoint(layer_id)`, which removes it")
def scirs2_get_checkpoint() -> None:
    checkpointer = ActivationCheckpointer(KeepAll())
    checkpointer.maybe_save(0, X)
    assert torch.equal(checkpointer.take(0), X) and checkpointer.stored_bytes == 0
    with pytest.raises(KeyError):
        checkpointer.take(0)


@row("`has_checkpoint`, `remove_checkpoint`")
def scirs2_has_and_remove() -> None:
    checkpointer = ActivationCheckpointer(KeepAll())
    checkpointer.maybe_save(0, X)
    assert checkpointer.has(0)
    for _ in range(2):
        checkpointer.remove(0)
        assert not checkpointer.has(0)


@row("`clear`, `clear_checkpoints`")
def scirs2_clear() -> None:
    checkpointer = ActivationCheckpointer(KeepAll())
    checkpointer.maybe_save(0, X)
    checkpointer.clear()
    assert (checkpointer.stats().num_created, checkpointer.num_checkpoints, checkpointer.stored_bytes) == (0, 0, 0)


@row("`num_checkpoints()`, `memory_usage()`, `memory_budget()`")
def scirs2_usage() -> None:
    checkpointer = ActivationCheckpointer(KeepAll(), budget=2**30)
    checkpointer.maybe_save(0, X)
    assert (checkpointer.num_checkpoints, checkpointer.stored_bytes, checkpointer.budget) == (1, 12, 2**30)


@row("`get_statistics()`")
def scirs2_statistics() -> None:
    checkpointer = ActivationCheckpointer(KeepAll(), budget=24)
    for i in (0, 0, 1, 2):
        checkpointer.maybe_save(i, X + i)
    stats = checkpointer.stats()
    assert (stats.num_created, stats.num_checkpoints, stats.num_evicted) == (3, 2, 1)
    assert stats.utilization_by_tier == {"device": 1.0}


@row("`EfficientBackprop::new(..., enabled)`")
def scirs2_enabled() -> None:
    checkpointer = ActivationCheckpointer(KeepAll(), enabled=False)
    checkpointer.forward(X, range(3), layer)
    assert checkpointer.num_checkpoints == 0
    checkpointer.enabled = True
    checkpointer.forward(X, range(3), layer)
    assert checkpointer.enabled and checkpointer.num_checkpoints == 3


@row("`forward_with_checkpoint(layer_id, &x, f, cost)`")
def scirs2_forward() -> None:
    checkpointer = ActivationCheckpointer(Selective(10))
    assert torch.equal(checkpointer.forward(X, range(4), layer, costs=[1, 10, 1, 20]), states_of(X, 4)[-1])
    assert [checkpointer.has(i) for i in range(4)] == [False, True, False, True]


@row("`backward_with_recomputation(layer_id, &grad, f, backward)`")
def scirs2_backward() -> None:
    checkpointer = ActivationCheckpointer(KeepAll(), budget=24)
    checkpointer.forward(X, range(4), layer)
    seen: list[Tensor] = []
    checkpointer.backward(X, range(4), layer, lambda x, grad, i: seen.append(x) or layer_backward(x, grad, i))
    assert all(map(torch.equal, reversed(seen), [X, *states_of(X, 3)]))


@row("`CpuActivationStore::store`, `retrieve`, `memory_usage`")
def scirs2_store() -> None:
    store = ActivationStore(host="1MiB")
    store.put(0, torch.zeros(2, 3, 4))
    assert torch.equal(store.get(0), torch.zeros(2, 3, 4)) and store.stats().held_bytes == 96
    store.clear()
    assert store.stats().held_bytes == 0


@row("`CpuActivationStore::remove`, `retrieve` of an absent layer")
def scirs2_store_absent() -> None:
    store = ActivationStore(host="1MiB")
    assert not store.has(0)
    for absent in (store.get, store.remove):
        with pytest.raises(KeyError):
            absent(0)


# kizzasi-model


@row("`CheckpointConfig { checkpoint_every_n_layers, max_checkpoints, use_mixed_precision }`")
def kizzasi_config() -> None:
    checkpointer = ActivationCheckpointer(EveryN(2), max_checkpoints=2, codec="float16")
    x = torch.randn(4096)
    checkpointer.forward(x, range(8), layer)
    assert checkpointer.num_checkpoints == 2 and checkpointer.stored_bytes == 2 * (8192 + 4)
    with pytest.raises(CapacityError):
        checkpointer.save(7, x)
    small = ActivationCheckpointer(codec="float16")
    small.save(0, X / 3)
    assert torch.equal(small.get(0), X / 3)
    default = ActivationCheckpointer()
    assert (default.policy, default.max_checkpoints, default.codec) == (EveryN(4), None, None)


@row("`config()`")
def kizzasi_config_is_readable() -> None:
    checkpointer = ActivationCheckpointer(EveryN(3), max_checkpoints=10)
    assert (checkpointer.policy, checkpointer.max_checkpoints, checkpointer.codec) == (EveryN(3), 10, None)
    assert (checkpointer.budget, checkpointer.order, checkpointer.enabled) == (None, "auto", True)
    assert isinstance(checkpointer.store, ActivationStore)


@row("`save`, `get`, `clear`, `num_checkpoints`")
def kizzasi_by_hand() -> None:
    checkpointer = ActivationCheckpointer(EveryN(2), max_checkpoints=10)
    checkpointer.save(2, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert checkpointer.get(2).tolist() == [1, 2, 3, 4]
    with pytest.raises(KeyError):
        checkpointer.get(5)
    checkpointer.save(0, X)
    assert checkpointer.num_checkpoints == 2
    checkpointer.clear()
    assert checkpointer.num_checkpoints == checkpointer.saved_bytes == checkpointer.stored_bytes == 0


@row("`memory_stored_bytes`, `memory_saved_bytes`")
def kizzasi_bytes() -> None:
    checkpointer = ActivationCheckpointer(EveryN(3), max_checkpoints=10)
    checkpointer.forward(X, range(6), layer)
    assert (checkpointer.stored_bytes, checkpointer.saved_bytes, checkpointer.num_checkpoints) == (24, 48, 2)
    checkpointer.save(0, X + 1)  # again
    assert checkpointer.stored_bytes == 24


@row("`is_checkpoint_layer(i)`")
def kizzasi_is_checkpoint_layer() -> None:
    assert [ActivationCheckpointer(EveryN(3)).is_checkpoint_layer(i) for i in range(4)] == [True, False, False, True]
    assert not ActivationCheckpointer(EveryN(0)).is_checkpoint_layer(0)


@row("the method `checkpointed_forward(&x, &layers, f)`")
def kizzasi_forward() -> None:
    checkpointer, states = ActivationCheckpointer(EveryN(2)), states_of(X, 8)
    assert torch.equal(checkpointer.forward(X, range(8), layer), states[-1])
    half = checkpointer.forward(X, range(4), layer)
    checkpointer.forward(half, range(4, 8), layer)
    assert checkpointer.num_checkpoints == 4 and torch.equal(checkpointer.recompute(3, range(8), layer), states[3])
    checkpointer.forward(half.clone(), range(4, 8), layer)
    assert checkpointer.num_checkpoints == 2


@row("the method `recompute_from_checkpoint(i, &layers, f)`")
def kizzasi_recompute() -> None:
    checkpointer, states = ActivationCheckpointer(Segments((Segment(0, 1), Segment(3, 5)))), states_of(X, 6)
    checkpointer.forward(X, range(6), layer)
    for i in (2, 5, 0):  # kept itself, after a kept one, before the first
        assert torch.equal(checkpointer.recompute(i, range(6), layer), states[i])


@row("`Clone`")
def kizzasi_clone() -> None:
    checkpointer = ActivationCheckpointer(EveryN(2))
    checkpointer.forward(X, range(6), layer)
    clones = [copy.copy(checkpointer), copy.deepcopy(checkpointer)]
    checkpointer.clear()
    for clone in clones:
        assert torch.equal(clone.recompute(3, range(6), layer), states_of(X, 6)[3])


@row("`Array1<f32>`")
def kizzasi_arrays() -> None:
    checkpointer, x = ActivationCheckpointer(EveryN(2)), np.ones((2, 3))
    output = checkpointer.forward(x, range(6), layer)
    assert isinstance(output, np.ndarray) and np.array_equal(output, states_of(x, 6)[-1])
    assert np.array_equal(checkpointer.get(4), states_of(x, 6)[4])


# yscv-autograd


@row("`CheckpointConfig { segments")
def yscv_segments() -> None:
    policy = Segments((Segment(2, 4), Segment(7, 9)))
    assert [i for i in range(11) if policy.should_checkpoint(i)] == [2, 3, 4, 7, 8, 9]
    with pytest.raises(ValueError, match="not from 4 to 2"):
        Segment(4, 2)
    with pytest.raises(ValueError, match="overlap"):
        Segments((Segment(0, 3), Segment(2, 5)))


@row("`CheckpointConfig::uniform(num_nodes, num_segments)`")
def yscv_uniform() -> None:
    assert Uniform(2).segments(10) == [Segment(0, 4), Segment(5, 9)]
    assert Uniform(3).segments(10)[-1] == Segment(6, 9)
    assert Uniform(2).segments(0) == Uniform(0).segments(5) == Uniform(6).segments(5) == []


@row("`CheckpointConfig::default()`")
def yscv_default() -> None:
    assert plan_recomputation(5, Segments(())) == [False] * 5


@row("`should_checkpoint(node_id)`")
def yscv_should_checkpoint() -> None:
    assert Segments((Segment(1, 3),)).should_checkpoint(2)
    assert all(Uniform(1).should_checkpoint(i, 8) for i in range(8))
    assert [i for i in range(10) if not Uniform(2).should_checkpoint(i, 10)] == [4]


@row("`plan_recomputation(num_nodes, &config)`")
def yscv_plan() -> None:
    assert plan_recomputation(5, Segments((Segment(1, 3),))) == [False, True, True, True, False]
    assert plan_recomputation(8, Uniform(1)) == [True] * 8
