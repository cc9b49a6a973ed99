"""`trace_simulated`: the step of one rank of a job that this machine cannot run, as a `StepGraph`.

A process group of torch's "fake" backend has any number of ranks and does not communicate; fake tensors have no
memory. Under both, `fully_shard` and `parallelize_module` run as in the real job, and the step of rank 0 is recorded:
its shards, gathers, reductions and activations. The model is built on the meta device, parallelised there, and then
given fake tensors on the CPU, since a machine without the device cannot make fake tensors on it.

Times are those of the named device. Collectives between the ops of a forward (tensor parallelism) take their bytes at
`network_bytes_per_s`; those of FSDP run beside the compute and take no time of their own.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lowtide import _compat
from lowtide.distributed.ranks import is_in_job
from lowtide.errors import TraceError
from lowtide.graph.step_graph import Hardware, StepGraph
from lowtide.replay.arguments import map_tensors, tensors_in
from lowtide.snapshot.restore import Restorer
from lowtide.tracing import step_checks as checks
from lowtide.tracing import trace as tracing
from lowtide.tracing.fakes import Shadows
from lowtide.tracing.op_times import predicted_s
from lowtide.tracing.recorder import Recorder
from lowtide.tracing.trace_records import RawOp

_CPU = torch.device("cpu")


@contextlib.contextmanager
def simulated_job(layout: dict[str, int]) -> Iterator[DeviceMesh]:
    """A job of as many ranks as the layout has, of which this process is the first; yields its mesh.

    Raises `TraceError` inside a real job.
    """
    if is_in_job():
        raise TraceError("a job cannot be simulated inside of one: torch.distributed is initialised in this process")
    with _compat.fake_process_group(math.prod(layout.values())):
        yield init_device_mesh("cpu", tuple(layout.values()), mesh_dim_names=tuple(layout))


def trace_simulated(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    args: tuple[Any, ...],
    *,
    optimizer: torch.optim.Optimizer | None,
    device: str | None,
    network_bytes_per_s: float,
    unseen_bytes: int,
) -> StepGraph:
    """The step of a model on the meta device, inside of `simulated_job`. The model is of no use afterwards.

    `unseen_bytes` are held on the device beside what the step uses, such as DDP's buckets.
    """
    checks.arguments(model, loss_fn, "fake")
    with _compat.fake_mode(), _compat.quiet_fakes(), torch.device(_CPU):
        model.to_empty(device=_CPU)
        args = map_tensors(_on_cpu, args)
        setting = tracing.setting_of(model, args, device)
        restorer = Restorer(model, loss_fn, tensors_in(args), setting.device)
        try:
            for _ in range(2):  # the first makes FSDP allocate what it keeps
                recorder = Recorder(setting.device, checks.names_of(model), shadows=Shadows())
                tracing.record(recorder, model, loss_fn, args, restorer)
                restorer.reset_gradients()
        finally:
            restorer.restore()

        def seconds_of(op: RawOp, hardware: Hardware) -> float:
            if "collective" not in op.flags:
                return predicted_s(op, hardware)
            return op.moved_bytes / network_bytes_per_s if op.name.startswith("_c10d_functional") else 0.0

        return tracing.predicted_graph(recorder, optimizer, setting, unseen_bytes, seconds_of)


def _on_cpu(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_CPU)
    return made.requires_grad_(tensor.requires_grad)
