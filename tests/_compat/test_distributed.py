"""Canaries for `_compat/distributed.py`: what is read of process groups, meshes and sharded modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide import _compat
from lowtide._compat.distributed import _groups_of
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
    assert _compat.stays_gathered(model[0], model), (
        "FSDP frees the parameters of the outermost module, or does not say so"
    )
    (tensors,) = _compat.gathered_parameters(model)
    assert len(tensors) == 2 and not any(tensor.untyped_storage().nbytes() for tensor in tensors), (
        "not freed by resizing"
    )
    assert _compat.is_distributed_type(DTensor) and not _compat.is_distributed_type(torch.Tensor)
    (shard,) = _compat.parts_of(model[0].weight)
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


COLLECTIVES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "allreduce_": lambda x, y: distributed.all_reduce(y.copy_(x)),
    "alltoall_base_": lambda x, y: distributed.all_to_all_single(y, x, async_op=True).wait(),
    "alltoall_": lambda x, y: distributed.all_to_all([y], [x]),
    "reduce_scatter_": lambda x, y: distributed.reduce_scatter(y, [x]),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_that_write_to_an_argument(name: str, alone: None) -> None:
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
        try:
            COLLECTIVES[name](x, y)
        except RuntimeError as error:
            if "does not support" not in str(error):
                raise
            pytest.skip(str(error))  # in torch 2.11
    ((func, written),) = found
    assert str(func).split(".")[1] == name, "this function of torch.distributed calls another op"
    assert (isinstance(written, list) or written is y) and torch.equal(y, x)


def test_what_fsdp_gathers_with(alone: None) -> None:
    """Selective checkpoints leave out ops inside these methods: all that FSDP runs in the forward of a module."""
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    seen: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with _compat.without_gathers((Seen(),))[0]:
        model(torch.ones(2, 4))
    assert any("addmm" in name for name in seen), "modes do not look up __torch_dispatch__ on the instance any more"
    assert not any(name.startswith(("fsdp", "c10d", "profiler")) for name in seen), "FSDP gathers in other methods"


def test_the_hook_of_fsdp_before_a_backward(alone: None) -> None:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    assert _compat.is_before_backward_of_fsdp(model._get_fsdp_state()._pre_backward), (  # type: ignore[operator]
        "FSDPState has other attributes: a split output layer cannot be sharded"
    )
    assert not _compat.is_before_backward_of_fsdp(print)


def test_the_random_tracker_of_dtensors() -> None:
    from torch.distributed.tensor import _random

    assert _compat.random_tracker() is _random._rng_tracker
    tracker = object.__new__(_random.OffsetBasedRNGTracker)
    assert callable(tracker._get_device_state) and callable(tracker._set_device_state), "it has other methods"
    with _compat.random_tracker_restored():
        _random._rng_tracker = tracker
        assert _compat.random_tracker() is tracker
    assert _random._rng_tracker is None


def test_prefetches_of_fsdp(alone: None) -> None:
    """A module gathers the next one ahead in each forward, and not when the backward of that one is over."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup, TrainingState

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in (*model, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    model[0].set_modules_to_forward_prefetch([model[1]])  # type: ignore[operator]
    _compat.keep_prefetches_useful()
    (group,) = _groups_of(model[1]._get_fsdp_state())  # type: ignore[union-attr, operator]
    for _ in range(2):
        output = model(torch.ones(2, 4))
        assert group._training_state is TrainingState.IDLE, "prefetches of later forwards would be left out"
        output.sum().backward()
    assert group._training_state is TrainingState.IDLE, "prefetches of later forwards would be left out"
    group._training_state = TrainingState.POST_BACKWARD
    FSDPParamGroup._prefetch_unshard(group, "forward")
    assert group._all_gather_result is None and not group.is_unsharded
    group._training_state = TrainingState.IDLE
    FSDPParamGroup._prefetch_unshard(group, "forward")
    assert group._all_gather_result is not None or group.is_unsharded, "prefetches are made elsewhere"


def test_schedules_of_pipelines(alone: None) -> None:
    stage = PipelineStage(nn.Linear(2, 2), 0, 1, torch.device("cpu"))
    single, several = Schedule1F1B(stage, 2, loss_fn=torch.sum), ScheduleInterleaved1F1B([stage], 2, loss_fn=torch.sum)
    assert _compat.pipeline_stages(single) == _compat.pipeline_stages(several) == [stage], (
        "schedules keep stages elsewhere"
    )
    kinds = [kind for _, kind in _compat.pipeline_actions(several)]
    assert kinds == ["F", "B", "F", "B"], "the actions of schedules have other names"


def test_a_job_without_other_ranks() -> None:
    with _compat.fake_process_group(4):
        distributed.all_reduce(torch.ones(2))
        assert distributed.get_world_size() == 4, "the fake process group has other ranks"
