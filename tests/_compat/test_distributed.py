"""Canaries for `_compat/distributed.py`: what is read of process groups, meshes and sharded modules."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide import _compat
from lowtide.graph.step_graph import KEPT_IN_PLACE


@pytest.fixture
def alone() -> Iterator[None]:
    """A job of one process."""
    seconds = timedelta(seconds=17)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1, timeout=seconds)
    yield
    distributed.destroy_process_group()


def test_time_outs_of_groups(alone: None) -> None:
    assert _compat.group_timeout(distributed.group.WORLD) == timedelta(seconds=17), "options of backends have changed"


def test_gathered_parameters_of_fsdp(alone: None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert _compat.gathered_units(model) == [] and _compat.gathered_parameters(model) == []
    assert _compat.sharding_ranks(model) == set()
    fully_shard(model[0], mesh=init_device_mesh("cpu", (1,)))
    assert _compat.gathered_units(model) == [model[0]]
    found: list[set[int]] = []
    handle = model[1].register_forward_pre_hook(lambda *_: found.append(_compat.sharding_ranks(model)))
    model(torch.ones(2, 4)).sum().backward()
    handle.remove()
    assert found == [{0}] and _compat.sharding_ranks(model) == {0}, "FSDP keeps its sharded parameters elsewhere"
    (tensors,) = _compat.gathered_parameters(model)
    assert len(tensors) == 2 and not any(tensor.untyped_storage().nbytes() for tensor in tensors), (
        "not freed by resizing"
    )
    assert _compat.is_distributed_type(DTensor) and not _compat.is_distributed_type(torch.Tensor)
    (shard,) = _compat.inner_tensors(model[0].weight)
    assert type(shard) is torch.Tensor and _compat.local_bytes(model[0].weight) == 64, (
        "DTensor lists its parts otherwise"
    )


def test_the_data_parallel_wrapper_whose_forward_runs(alone: None) -> None:
    model = nn.Linear(2, 2)
    wrapper, found = nn.parallel.DistributedDataParallel(model), []
    model.register_forward_pre_hook(lambda *_: found.append(_compat.active_data_parallel()))
    wrapper(torch.ones(1, 2))
    model(torch.ones(1, 2))
    assert found == [wrapper, None], "DDP does not tell Dynamo of its forward in this way"


def test_collectives_that_write_to_an_argument(alone: None) -> None:
    """Replays return such a result without communication: each op returns a `Work` last, and writes to argument 0."""
    found: list[Any] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not str(func).startswith(KEPT_IN_PLACE):
                return func(*args, **(kwargs or {}))
            _compat.wait_for_collective(func(*args))
            found.append((func, args[0]))
            return _compat.finished_collective(func, args[0])

    x, y = torch.ones(2), torch.zeros(2)
    with Seen():
        distributed.all_reduce(x)
        distributed.all_to_all_single(y, x, async_op=True).wait()
        distributed.all_to_all([y], [x])
        distributed.reduce_scatter(y, [x])
    assert [str(func).split(".")[1] for func, _ in found] == [
        "allreduce_",
        "alltoall_base_",
        "alltoall_",
        "reduce_scatter_",
    ], "functions of torch.distributed call other ops"
    assert all(isinstance(written, list) or written is y for _, written in found) and torch.equal(y, x)
