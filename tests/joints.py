"""Joint graphs of small models, as Dynamo and AOTAutograd make them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lowtide import _compat
from lowtide.graph import Hardware
from lowtide.tracing.joint_graph import JointStep, NodeFacts, joint_step

HARDWARE = Hardware("test", memory_bytes_per_s=1.0)


def joint_of(model: nn.Module, *args: Any, dynamic: bool | None = None, **kwargs: Any) -> JointStep:
    """The first joint graph of a model's step. A node's seconds are the bytes that it moves."""
    torch._dynamo.reset()
    found: list[JointStep] = []

    def partition(joint: Any, inputs: Any, **facts: Any) -> Any:
        found.append(joint_step(joint.graph, HARDWARE, moved_bytes, lambda position: statics[position]))
        return _compat.torch_partition(joint, inputs, **facts)

    def backend(module: Any, inputs: Any) -> Any:
        statics[:] = _compat.static_inputs(module)
        return _compat.compile_without_kernels(module, inputs, partition, {})

    statics: list[bool] = []
    torch.compile(model, backend=backend, dynamic=dynamic)(*args, **kwargs)
    return found[0]


def moved_bytes(facts: NodeFacts) -> float:
    return float(facts.moved_bytes)
