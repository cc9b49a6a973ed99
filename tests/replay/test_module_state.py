"""State that a forward changes: replays read what the forward read, and change nothing that stays."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import random
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import lowtide
from lowtide.policies import RecomputeAll
from lowtide.replay import module_state


class Stateful(nn.Module):
    """A block whose intermediates depend on what `change` does to the block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def change(self, h: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        h = self.change(self.first(x).tanh())
        return torch.sin(self.second(h.sin())) * h.cos()


class Counts(Stateful):
    """A dict whose `update` adds."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def change(self, h: Tensor) -> Tensor:
        self.counts["calls"] += 1
        return h * self.counts["calls"]


class Ordered(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.seen: OrderedDict[int, Tensor] = OrderedDict()

    def change(self, h: Tensor) -> Tensor:
        self.seen[len(self.seen)] = h.detach()
        self.seen.move_to_end(0)
        return h * sum(self.seen.values()) + next(iter(self.seen))


@dataclass(slots=True)
class Memory:
    calls: int = 0
    last: Tensor | None = None


class Slots(Stateful):
    """An object without a `__dict__`."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()

    def change(self, h: Tensor) -> Tensor:
        self.memory.calls += 1
        if self.memory.last is not None:
            h = h * self.memory.last
        self.memory.last = h.detach()
        return h * self.memory.calls


class SwapsModules(Stateful):
    def change(self, h: Tensor) -> Tensor:
        self.first, self.second = self.second, self.first
        return h


class AddsModule(Stateful):
    def change(self, h: Tensor) -> Tensor:
        if not hasattr(self, "third"):
            self.third = nn.Linear(8, 8)
        return self.third(h)


class RenamesAttribute(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.even = 1.0

    def change(self, h: Tensor) -> Tensor:
        here, there = ("even", "odd") if hasattr(self, "even") else ("odd", "even")
        value = getattr(self, here)
        delattr(self, here)
        setattr(self, there, value + 1)
        return h * value


class ModulesInObjects(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.box = SimpleNamespace(norm=nn.BatchNorm1d(8), more={"norms": [nn.BatchNorm1d(8)]})

    def change(self, h: Tensor) -> Tensor:
        more = self.box.more["norms"][0]
        return more(self.box.norm(h) * self.box.norm.running_mean) * more.running_mean

    def state(self) -> list[Tensor]:
        return [*self.box.norm.buffers(), *self.box.more["norms"][0].buffers()]


class NormEveryThird(Stateful):
    """Statistics that a kernel writes without a new version, from the third call on."""

    mean: Tensor
    variance: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))
        self.calls = 0

    def change(self, h: Tensor) -> Tensor:
        self.calls += 1
        return F.batch_norm(h, self.mean, self.variance, training=self.calls % 3 == 0) * self.mean


class NormInList(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.statistics = [torch.zeros(8), torch.ones(8)]

    def change(self, h: Tensor) -> Tensor:
        return F.batch_norm(h, self.statistics[0], self.statistics[1], training=True) * self.statistics[0]


class TogglesNorm(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8).eval()
        self.calls = 0

    def change(self, h: Tensor) -> Tensor:
        self.calls += 1
        self.norm.train(self.calls % 3 == 0)
        h = self.norm(h) * self.norm.running_mean
        self.norm.eval()
        return h


class Teacher(Stateful):
    """Frozen parameters that follow others."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.first).requires_grad_(False)

    def change(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, theirs in zip(self.teacher.parameters(), self.first.parameters(), strict=True):
                mine.lerp_(theirs, 0.3)
        return h * self.teacher(h)


def drawn() -> float:
    return random.random() + float(np.random.rand())


class DrawsFromPython(Stateful):
    """Numbers of Python's and numpy's own generators, drawn by a function that a method calls."""

    def change(self, h: Tensor) -> Tensor:
        return h * drawn()


def attributes_of(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key in ("counts", "seen", "memory", "even", "odd", "calls", "statistics"):
            if hasattr(module, key):
                found[f"{name}.{key}"] = copy.deepcopy(getattr(module, key))
        if isinstance(module, ModulesInObjects):
            found[f"{name}.box"] = [tensor.clone() for tensor in module.state()]
    return found


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


Runner = Callable[[nn.Module, Tensor], Tensor]


def records(make: type[Stateful], how: str) -> list[dict[str, Any]]:
    """Everything that there is after each of five steps."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    block = make()
    model = nn.Sequential(nn.Linear(8, 8), block)
    handle = lowtide.apply(model, lowtide.RecomputeAll(), regions="1") if how == "apply" else None
    found = []
    for _ in range(5):
        h = model[0](torch.randn(4, 8))
        if how == "checkpoint":
            loss = lowtide.checkpoint(block, h).square().mean()
        elif how == "closure":
            loss = lowtide.checkpoint(lambda h: block(h), h).square().mean()
        else:
            loss = block(h).square().mean()
        model.zero_grad()
        loss.backward()
        found.append(
            {
                "loss": loss.detach(),
                "gradients": {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
                "state": {name: value.clone() for name, value in model.state_dict().items()},
                "attributes": repr(attributes_of(model)),
                "random": (repr(random.getstate()), repr(np.random.get_state()), torch.get_rng_state()),
            }
        )
    if handle is not None:
        handle.remove()
    return found


@pytest.mark.parametrize("how", ["checkpoint", "closure", "apply"])
@pytest.mark.parametrize("make", Stateful.__subclasses__(), ids=lambda make: make.__name__)
def test_state_of_every_kind_is_that_of_the_plain_model(make: type[Stateful], how: str) -> None:
    for plain, checkpointed in zip(records(make, "plain"), records(make, how), strict=True):
        for key in ("loss", "gradients", "state"):
            assert_same(plain[key], checkpointed[key])
        assert plain["attributes"] == checkpointed["attributes"]
        assert plain["random"][:2] == checkpointed["random"][:2]
        assert_same(plain["random"][2], checkpointed["random"][2])


def test_modules_added_to_a_list_later_are_restored_too() -> None:
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms: list[nn.BatchNorm1d] = []

        def forward(self, x: Tensor) -> Tensor:
            for norm in self.norms:
                x = norm(x) * norm.running_mean
            return x.sin() * x

    def run(run_block: Runner) -> list[Tensor]:
        torch.manual_seed(0)
        block, found = Grows(), []
        for _ in range(3):
            x = torch.randn(4, 8, requires_grad=True)
            run_block(block, x).sum().backward()
            assert x.grad is not None
            found += [x.grad, *(buffer.clone() for norm in block.norms for buffer in norm.buffers())]
            block.norms.append(nn.BatchNorm1d(8))
        return found

    assert_same(run(lambda block, x: block(x)), run(lowtide.checkpoint))


def test_a_weight_that_the_forward_writes_is_refused_once_and_exact_from_then_on() -> None:
    class Decays(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.linear.weight.mul_(0.9)
            return self.linear(x).sin() * x

    torch.manual_seed(0)
    plain = Decays()
    checkpointed = copy.deepcopy(plain)
    x = torch.randn(4, 8, requires_grad=True)
    plain(x)
    with pytest.raises(lowtide.CheckpointError, match="parameter 'weight' of Linear"):
        lowtide.checkpoint(checkpointed, x).sum().backward()
    for _ in range(3):
        expected = torch.autograd.grad(plain(x).sum(), [x, *plain.parameters()])
        found = torch.autograd.grad(lowtide.checkpoint(checkpointed, x).sum(), [x, *checkpointed.parameters()])
        assert_same(expected, found)
        assert_same(plain.state_dict(), checkpointed.state_dict())


class Counting(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def change(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h * self.calls


@pytest.mark.usefixtures("unchanged_debug_logger")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # read by Dynamo, of an intermediate
@pytest.mark.parametrize("how", ["debug", "compiled", "compiled apply"])
def test_state_is_restored_where_the_replay_is_that_of_torch(how: str) -> None:
    """With `debug=True`, and where an attribute that is set breaks a compiled graph."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), Counting())
    model = copy.deepcopy(plain)

    def run(x: Tensor) -> Tensor:
        return lowtide.checkpoint(model[1], model[0](x), debug=how == "debug")

    if how == "compiled apply":
        lowtide.apply(model, lowtide.RecomputeAll(), regions="1")
        step: Any = torch.compile(model, backend="eager")
    else:
        step = torch.compile(run, backend="eager") if how == "compiled" else run
    for _ in range(3):
        x = torch.randn(4, 8)
        expected = torch.autograd.grad(plain(x).square().sum(), list(plain.parameters()))
        assert_same(expected, torch.autograd.grad(step(x).square().sum(), list(model.parameters())))
        assert_same(attributes_of(plain), attributes_of(model))


class _Energy(nn.Module):
    """Takes a gradient in its forward, and then writes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        energy = torch.tanh(self.linear(x)).square().sum()
        (gradient,) = torch.autograd.grad(energy, x, create_graph=True)
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return x - 0.1 * gradient + self.mean.clone()


def test_a_replay_in_the_middle_of_a_forward_undoes_what_the_forward_has_not_written_yet() -> None:
    model = nn.Sequential(nn.Linear(8, 8), _Energy(), nn.Linear(8, 8))
    plain = copy.deepcopy(model)
    x = torch.randn(4, 8)
    regions = tuple(map(lowtide.plans.Recompute, ("", "1")))
    with lowtide.apply(model, lowtide.Plan(regions=regions)):
        for _ in range(3):
            for each in (plain, model):
                each(x).square().sum().backward()
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer)
    for name, parameter in plain.named_parameters():
        assert torch.equal(model.get_parameter(name).grad, parameter.grad)


def test_a_replay_of_ones_own_checkpoint_in_the_middle_of_a_forward_has_the_same_regions() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), _Energy())

        def forward(self, x: Tensor) -> Tensor:
            return lowtide.checkpoint(self.inner, x)

    model = nn.Sequential(nn.Linear(8, 8), Checkpointed(), nn.Linear(8, 8))
    plain = copy.deepcopy(model)
    x = torch.randn(4, 8)
    paths = ("1.inner.0", "1.inner.1.linear", "2")
    with lowtide.apply(model, lowtide.Plan(regions=tuple(map(lowtide.plans.Recompute, paths)))):
        for each in (plain, model):
            each(x).square().sum().backward()
    for name, parameter in plain.named_parameters():
        assert torch.equal(model.get_parameter(name).grad, parameter.grad)


def _checkpointed(model: nn.Sequential, x: Tensor) -> None:
    for layer in model:
        x = lowtide.checkpoint(layer, x)
    x.sum().backward()


def _applied(policy: Any, model: nn.Sequential, x: Tensor) -> None:
    with lowtide.apply(model, policy, regions=["0", "1"]):
        model(x).sum().backward()


def _planned(model: nn.Sequential, x: Tensor) -> None:
    plan = lowtide.Plan(regions=(lowtide.plans.Recompute("0"), lowtide.plans.Recompute("1")))
    with lowtide.apply(model, plan):
        model(x).sum().backward()


@pytest.mark.parametrize(
    "step",
    [_checkpointed, functools.partial(_applied, lowtide.RecomputeAll()), _planned],
    ids=["call", "policy", "plan"],
)
def test_a_model_that_nobody_needs_is_freed(step: Callable[[nn.Sequential, Tensor], None]) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)))
    for _ in range(2):
        step(model, torch.randn(3, 4))
    attributes = set(vars(nn.Sequential()))
    assert set(vars(model[0])) == attributes  # what is remembered of a module is not among its attributes
    copies = copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))
    for each in copies:
        step(each, torch.randn(3, 4))
    remaining = [weakref.ref(parameter) for each in (model, *copies) for parameter in each.parameters()]
    del model, copies, each
    gc.collect()
    assert not [reference for reference in remaining if reference() is not None]


def test_what_is_known_of_a_module_outlives_optimizer_steps() -> None:
    """The replay after a step reads the new parameters, and refuses those changed since its own forward."""
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    x = torch.randn(3, 4, requires_grad=True)
    for _ in range(3):
        gradients = []
        for run in (block, functools.partial(lowtide.checkpoint, block)):
            optimizer.zero_grad()
            run(x).square().sum().backward()
            gradients.append([parameter.grad for parameter in block.parameters()])
        assert all(map(torch.equal, *gradients))
        optimizer.step()
    loss = lowtide.checkpoint(block, x).square().sum()
    optimizer.step()
    with pytest.raises(lowtide.CheckpointError, match="parameter 'weight' of Linear"):
        loss.backward()


def test_a_name_added_as_a_forward_is_removed_is_hidden_from_the_replay() -> None:
    """One name fewer and one more: their number tells nothing."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).sin() * getattr(self, "scale", 1.0)

    block, x = Block(), torch.randn(3, 4, requires_grad=True)
    block.forward = functools.partial(Block.forward, block)  # type: ignore[method-assign]
    (expected,) = torch.autograd.grad(block(x).sin().sum(), x)
    loss = lowtide.checkpoint(block, x).sin().sum()
    del block.forward
    block.scale = 2.0
    (found,) = torch.autograd.grad(loss, x)
    assert torch.equal(found, expected) and block.scale == 2.0


def test_a_call_of_a_batch_norm_copies_its_statistics_and_searches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The statistics change with every call; which tensors are copied is known from the calls before."""
    model = nn.Sequential(*(nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2)) for _ in range(2)))
    plain = copy.deepcopy(model)
    searched: list[Any] = []
    reachable = module_state.reachable
    monkeypatch.setattr(module_state, "reachable", lambda values: searched.append(0) or reachable(values))
    with lowtide.apply(model, RecomputeAll()):
        for step in range(5):
            x = torch.randn(3, 2, 4)
            model(x).square().sum().backward()
            plain(x).square().sum().backward()
            assert searched or step
            assert not (searched and step >= 3)
            searched.clear()
        for each in (model, plain):  # another tensor: nothing is taken for known
            each[0][1].running_mean = torch.ones(2)
        model(x).square().sum().backward()
        plain(x).square().sum().backward()
    assert searched
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name
    for (name, one), other in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(one, other), name


def test_a_list_that_is_emptied_between_the_steps() -> None:
    """It is as before the last call, and the small buffer beside it is copied again."""

    class Logged(Stateful):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(1))
            self.log: list[int] = []

        def change(self, h: Tensor) -> Tensor:
            self.log.append(len(self.log))
            return h * self.scale

    model = nn.Sequential(Logged())
    plain = copy.deepcopy(model)
    with lowtide.apply(model, RecomputeAll()):
        for _ in range(4):
            x = torch.randn(3, 8)
            for each in (model, plain):
                each(x).sum().backward()
                assert each[0].log == [0]
                each[0].log.clear()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("how", ["module", "function", "selective", "plan"])
def test_lazy_modules_are_made_once(how: str) -> None:
    """Their first forward draws their parameters: a replay would draw other dropout, and update statistics again."""

    def step(run: Callable[..., Tensor], block: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        x = torch.ones(8, 4).cumsum(0).sin().requires_grad_()
        for _ in range(2):
            run(block, x).sum().backward()
        return [x.grad, *block.state_dict().values(), *(each.grad for each in block.parameters())]

    def make() -> nn.Sequential:
        return nn.Sequential(
            nn.Sequential(nn.LazyLinear(8), nn.Dropout(0.5), nn.LazyBatchNorm1d(), nn.Tanh(), nn.Linear(8, 8))
        )

    def through(block: nn.Module, x: Tensor) -> Tensor:
        if how == "plan":
            return block(x)
        policy = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        function = functools.partial(lambda block, x: block(x), block) if how == "function" else block
        return lowtide.checkpoint(function, x, **({"context_fn": policy} if how == "selective" else {}))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that lazy modules are new
        torch.manual_seed(0)
        plain = make()
        torch.manual_seed(0)
        block = make()
    if how == "plan":
        lowtide.apply(block, RecomputeAll())
    expected = step(lambda block, x: block(x), plain)
    assert plain[0][2].num_batches_tracked == 2
    assert all(map(torch.equal, step(through, block), expected))
