"""Run a step and keep everything it leaves behind, to compare with another run to the last bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide

Runner = Callable[..., Any]


def plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    for option in ("preserve_rng_state", "determinism_check", "use_reentrant", "early_stop", "debug", "store"):
        kwargs.pop(option, None)
    return function(*args, **kwargs)


@dataclass
class Outcome:
    """Everything a step changes."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    rng_state: Tensor


def run_step(step: Callable[[Runner, nn.Module, Any], Tensor], model: nn.Module, inputs: Any, run: Runner) -> Outcome:
    """Run `step` on copies of model and inputs; `step` calls its region through `run` and returns the output."""
    model, inputs = copy.deepcopy((model, inputs))
    torch.manual_seed(1)
    output = step(run, model, inputs)
    output.sum().backward()
    leaves = {f"input {i}": t for i, t in enumerate(inputs if isinstance(inputs, list | tuple) else [inputs])}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    gradients |= {name: leaf.grad for name, leaf in leaves.items() if isinstance(leaf, Tensor)}
    return Outcome([output.detach()], gradients, dict(model.named_buffers()), torch.get_rng_state())


def assert_same(a: Outcome, b: Outcome) -> None:
    assert a.gradients.keys() == b.gradients.keys()
    assert a.buffers.keys() == b.buffers.keys()
    for name, expected in a.gradients.items():
        actual = b.gradients[name]
        assert (expected is None) == (actual is None), f"gradient of {name}"
        assert expected is None or torch.equal(expected, actual), f"gradient of {name}"
    for name, expected in a.buffers.items():
        assert torch.equal(expected, b.buffers[name]), f"buffer {name}"
    for expected, actual in zip(a.outputs, b.outputs, strict=True):
        assert torch.equal(expected, actual), "output"
    assert torch.equal(a.rng_state, b.rng_state), "random state"


def assert_exact(step: Callable[[Runner, nn.Module, Any], Tensor], model: nn.Module, inputs: Any) -> None:
    """The step through `lowtide.checkpoint` leaves behind what the plain step does."""
    assert_same(run_step(step, model, inputs, plainly), run_step(step, model, inputs, lowtide.checkpoint))


class RunsOf(TorchDispatchMode):
    """Counts how often an op runs."""

    def __init__(self, op: Any) -> None:
        super().__init__()
        self.count, self._op = 0, op

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is self._op
        return func(*args, **(kwargs or {}))
