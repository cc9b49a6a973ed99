"""Joint graphs of small models, as Dynamo and AOTAutograd make them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from lowtide import _compat
from lowtide.graph import Hardware
from lowtide.tracing.joint_graph import JointStep, joint_step
from lowtide.tracing.trace_records import RawOp

HARDWARE = Hardware("test", memory_bytes_per_s=1.0)


def compile_without_kernels(module: Any, inputs: Any, partition: Callable[..., Any]) -> Any:
    """Compile one of Dynamo's graphs like `_compat.compile_with_inductor`, but run every op by its eager kernel."""
    from torch._dynamo.backends.common import aot_autograd

    def run(graph: Any, _: Any) -> Any:
        def boxed(args: list[Any]) -> Any:  # frees arguments and values after their last use, as inductor's code does
            return torch.fx.Interpreter(graph).boxed_run(args)

        boxed._boxed_call = True
        return boxed

    return aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=partition)(module, inputs)


def joint_of(model: nn.Module, *args: Any, dynamic: bool | None = None, **kwargs: Any) -> JointStep:
    """The first joint graph of a model's step. A node's seconds are the bytes that it moves."""
    torch._dynamo.reset()
    found: list[JointStep] = []

    def partition(joint: Any, inputs: Any, **facts: Any) -> Any:
        found.append(joint_step(joint.graph, HARDWARE, moved_bytes, lambda position: statics[position]))
        return _compat.torch_partition(joint, inputs, **facts)

    def backend(module: Any, inputs: Any) -> Any:
        statics[:] = _compat.static_inputs(module)
        return compile_without_kernels(module, inputs, partition)

    statics: list[bool] = []
    torch.compile(model, backend=backend, dynamic=dynamic)(*args, **kwargs)
    return found[0]


def moved_bytes(node: fx.Node, op: RawOp) -> float:
    return float(op.moved_bytes)
