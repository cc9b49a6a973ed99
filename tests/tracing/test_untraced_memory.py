"""Predicted optimizer memory; and optimizers, wrapped or not, are only read."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.tracing.untraced_memory import optimizer_memory
from sweeps import sweep


class Wrapper(torch.optim.Optimizer):
    """What accelerate's AcceleratedOptimizer is: a subclass that has no groups and states of its own."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    def step(self, closure: Any = None) -> Any:
        self.optimizer.step(closure)


class Around:
    """A wrapper that is no optimizer at all."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


class Lookahead(torch.optim.Optimizer):
    """Steps another optimizer inside, and keeps records in all kinds of attributes."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.slow = [p.detach().clone() for group in inner.param_groups for p in group["params"]]
        self.norms: deque[Any] = deque(maxlen=4)
        self.num_steps = {"all": 0}

    def step(self, closure: Any = None) -> Any:
        self.inner.step()
        self.num_steps["all"] += 1
        self.norms.append(self.slow[0].norm())
        for slow, fast in zip(self.slow, (p for group in self.param_groups for p in group["params"]), strict=True):
            slow.lerp_(fast, 0.5)


class Several(torch.optim.Optimizer):
    """Steps optimizers in a list, which no copy of its attributes reaches."""

    def __init__(self, inner: list[torch.optim.Optimizer]) -> None:
        super().__init__([p for each in inner for group in each.param_groups for p in group["params"]], {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        for each in self.inner:
            each.step()


WRAPPERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "plain": lambda optimizer: optimizer,
    "properties": Wrapper,
    "twice": lambda optimizer: Wrapper(Wrapper(optimizer)),
    "around": Around,
    "lookahead": Lookahead,
    "list": lambda optimizer: Several([optimizer]),
}


def make() -> tuple[nn.Sequential, Any, Tensor]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)]
    model = nn.Sequential(*blocks)
    return model, lambda x: model(x).square().mean(), torch.randn(64, 16)


def contents(optimizer: Any) -> Any:
    """All that an optimizer holds, deep copied, with its wrappers and inner optimizers."""
    if isinstance(optimizer, Wrapper | Around):
        return contents(optimizer.optimizer)
    held = {name: item for name, item in vars(optimizer).items() if not name.startswith("_")}
    inner = held.pop("inner", None)
    held["state"] = list(held["state"].values())
    inner = inner if isinstance(inner, list) else [] if inner is None else [inner]
    return copy.deepcopy(held), [contents(each) for each in inner]


def is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.device == b.device and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(is_equal, a, b))
    return bool(a == b)


@pytest.mark.usefixtures("quick_fit")
@pytest.mark.parametrize("has_stepped", sweep([True, False], keep=1))
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_optimizers_are_only_read(wrapper: str, has_stepped: bool) -> None:
    model, loss_fn, x = make()
    inner = torch.optim.AdamW(model.parameters())
    optimizer = WRAPPERS[wrapper](inner)
    groups = inner.param_groups
    loss_fn(x).backward()
    if has_stepped:
        inner.step()
    before, weights = contents(optimizer), copy.deepcopy(model.state_dict())
    lowtide.trace(model, loss_fn, x, optimizer=optimizer)
    guess = lowtide.estimate(model, loss_fn, x, optimizer=optimizer)
    lowtide.plan(model, loss_fn, x, budget=guess.peak_bytes, optimizer=optimizer)
    budget = (guess.peak_bytes + guess.floor_bytes) // 2
    lowtide.fit(model, loss_fn, x, budget=budget, optimizer=optimizer, tune_s=0).remove()
    assert inner.param_groups is groups
    assert is_equal(before, contents(optimizer))
    assert is_equal(weights, model.state_dict())


@pytest.mark.parametrize("wrapper", ["properties", "twice", "around"])
def test_a_wrapped_optimizer_counts_as_what_it_wraps(wrapper: str) -> None:
    model, loss_fn, x = make()
    optimizer = torch.optim.AdamW(model.parameters())
    plain = lowtide.trace(model, loss_fn, x, optimizer=optimizer, mode="fake")
    wrapped = lowtide.trace(model, loss_fn, x, optimizer=WRAPPERS[wrapper](optimizer), mode="fake")
    assert wrapped.optimizer_state_bytes == plain.optimizer_state_bytes > 2 * sum(p.nbytes for p in model.parameters())
    assert wrapped.optimizer_workspace_bytes == plain.optimizer_workspace_bytes
    assert wrapped.notes == plain.notes


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}, {"foreach": False}], ids=str)
def test_predicted_state_is_what_the_first_step_makes(options: dict[str, bool]) -> None:
    model, loss_fn, x = make()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    sizes = [p.nbytes for p in model.parameters()]
    graph = lowtide.trace(model, loss_fn, x, optimizer=optimizer, mode="fake")
    on_cuda, _, _ = optimizer_memory(optimizer, torch.device("cuda"))
    loss_fn(x).backward()
    if "capturable" not in options:  # which takes a step on an accelerator only
        optimizer.step()
        held = [tensor for state in optimizer.state.values() for tensor in state.values()]
        assert graph.optimizer_state_bytes == sum(tensor.nbytes for tensor in held)
    assert graph.optimizer_state_bytes == sum(2 * size + 4 for size in sizes)  # two moments, a counter of steps
    counters = 512 * len(sizes) if options.keys() & {"fused", "capturable"} else 0  # else they are on the host
    assert on_cuda == sum(2 * -(-size // 512) * 512 for size in sizes) + counters


def test_state_that_cannot_be_predicted_counts_as_it_is() -> None:
    model, loss_fn, x = make()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    optimizer.step(lambda: (optimizer.zero_grad(), loss := loss_fn(x), loss.backward())[1])
    (state,) = optimizer.state.values()
    flat = sum(p.nbytes for p in model.parameters())
    assert len(state["old_dirs"]) > 0
    graph = lowtide.trace(model, loss_fn, x, optimizer=optimizer, mode="fake")
    assert graph.optimizer_state_bytes >= 2 * len(state["old_dirs"]) * flat


def test_a_step_that_reaches_real_tensors_is_noted() -> None:
    model, loss_fn, x = make()
    loss_fn(x).backward()
    graph = lowtide.trace(model, loss_fn, x, optimizer=Several([torch.optim.AdamW(model.parameters())]), mode="fake")
    assert any("could not be predicted" in note for note in graph.notes)


@pytest.mark.parametrize(
    ("optimizer", "error", "message"),
    [
        ("adam", TypeError, "optimizer is a torch.optim.Optimizer.*not 'adam' of type str"),
        (5, TypeError, "not 5 of type int"),
        (Around(None), TypeError, "of type Around"),
        (torch.optim.AdamW, TypeError, "of type type"),
        (torch.optim.AdamW([nn.Parameter(torch.ones(3))]), ValueError, "AdamW has no parameter of the Sequential"),
    ],
    ids=["str", "int", "empty wrapper", "class", "another model's"],
)
@pytest.mark.parametrize("verb", ["trace", "estimate", "plan", "fit", "max_batch", "compile"])
def test_other_things_are_refused_in_one_line(verb: str, optimizer: Any, error: Any, message: str) -> None:
    model, loss_fn, x = make()
    options = {"budget": "1GiB"} if verb in ("plan", "fit", "max_batch", "compile") else {}
    arguments: dict[str, tuple[Any, ...]] = {"compile": (model,), "max_batch": (model, loss_fn, lambda n: x[:n])}
    with pytest.raises(error, match=message) as raised:
        getattr(lowtide, verb)(*arguments.get(verb, (model, loss_fn, x)), optimizer=optimizer, **options)
    assert "\n" not in str(raised.value)
