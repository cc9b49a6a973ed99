"""Compiled steps without kernels: every op runs as it is, split into graphs as inductor would get them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from joints import compile_without_kernels
from lowtide import _compat
from lowtide.api.compile import _by_model
from lowtide.compiled.call_sequences import KnownSequences
from lowtide.compiled.session import Session
from lowtide.tracing.model_blocks import find_regions

PLENTY = 1 << 50
COMPILED_MARKS = [
    pytest.mark.usefixtures("compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # Dynamo's own
]


@dataclass
class Split:
    """A partition that took place: the nodes that the forward hands to the backward, and the joint graph's tags."""

    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule
    saved: list[torch.fx.Node]

    @property
    def made(self) -> list[torch.fx.Node]:
        """What is saved and not simply there: neither an input nor a view of one."""
        return [node for node in self.saved if looked_at(node).op != "placeholder"]

    @property
    def saved_bytes(self) -> int:
        return sum(node.meta["val"].nbytes for node in self.made)


def looked_at(node: torch.fx.Node) -> torch.fx.Node:
    """What a view is a view of; other nodes are themselves."""
    while isinstance(node.target, torch._ops.OpOverload) and node.target.is_view:
        node = node.args[0]
    return node


@dataclass
class Compiler:
    """Stands in for inductor, and remembers what it was given to compile."""

    splits: list[Split] = field(default_factory=list)

    def __call__(self, module: Any, inputs: Any, partition: Callable[..., Any], options: dict[str, Any]) -> Any:
        def recorded_partition(joint: Any, joint_inputs: Any, **facts: Any) -> Any:
            forward, backward = partition(joint, joint_inputs, **facts)
            results = forward.graph.output_node().args[0][facts["num_fwd_outputs"] :]
            nodes = [node for node in results if isinstance(node, torch.fx.Node)]
            tensors = [node for node in nodes if isinstance(node.meta.get("val"), Tensor)]
            self.splits.append(Split(forward, backward, tensors))
            return forward, backward

        return compile_without_kernels(module, inputs, recorded_partition)


def compiled_plainly(model: nn.Module, *, regional: bool, dynamic: bool | None = None) -> nn.Module:
    """The same compile without lowtide."""

    def backend(module: Any, inputs: Any) -> Any:
        return compile_without_kernels(module, inputs, _compat.torch_partition)

    for module in find_regions(model, None).values() if regional else [model]:
        module.compile(backend=backend, dynamic=dynamic)
    return model


def session_of(model: nn.Module) -> Session:
    return _by_model[model].session


def left_behind(model: nn.Module, step: Callable[[nn.Module], Tensor]) -> dict[str, Any]:
    """Everything that a step changes: loss, gradients, buffers and random state."""
    model.zero_grad()
    torch.manual_seed(1)
    loss = step(model)
    loss.backward()
    found: dict[str, Any] = {"loss": loss.detach().clone(), "random state": torch.get_rng_state()}
    found |= {f"gradient of {n}": None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return found | {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}


def assert_equal(expected: dict[str, Any], actual: dict[str, Any]) -> None:
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        assert (value is None) == (actual[name] is None), name
        assert value is None or torch.equal(value, actual[name]), name


def floor_of(model: nn.Module) -> int:
    """The smallest budget that a model's compiled step is predicted to meet; it has run before."""
    session = session_of(model)
    session._end_step()
    instances = [session._graphs[number] for number in session.sequences.current.numbers]
    return session.chooser.choose(instances, 0).peak_bytes


def squeeze(model: nn.Module, budget: int) -> None:
    """Another budget for a compiled model, without tracing it again."""
    session = session_of(model)
    session._end_step()
    session.budget = budget
    plan_again(session)


def plan_again(session: Session) -> None:
    """Choose variants for the current sequence as if it were new, and forget all others."""
    sequence = session._planned(session.sequences.current.numbers)
    session.sequences = KnownSequences()
    session.sequences.keep(sequence)
    session._refuse_by_prediction(sequence)


def running(model: nn.Module) -> list[Any]:
    """The variants that the calls of a step run."""
    return session_of(model).sequences.current.choice.variants
