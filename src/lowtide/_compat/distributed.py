"""`torch.distributed`: process groups, results of collectives, FSDP2's gathers, DTensor's random states, pipelines.

Traces and replays have to know when FSDP2 gathers and frees parameters, and to repeat collectives without
communicating; `estimate_parallel` runs on a process group without other ranks.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lowtide._compat.dispatch import TorchDispatchMode
from lowtide._compat.internals import required

_LONGEST = timedelta(minutes=30)  # torch's own default for gloo


def group_timeout(group: Any) -> timedelta:
    """Return after how long a collective of a process group gives up; the longest, if its backends differ.

    Relies on `ProcessGroup._device_types`, `_get_backend` and `_timeout` of a backend's options; obsolete with a public
    way to read a group's time-out.
    """
    timeouts = []
    for device in getattr(group, "_device_types", ()):
        try:
            timeouts.append(group._get_backend(torch.device(device)).options._timeout)
        except (AttributeError, RuntimeError):  # a backend without options, or for a device that is not there
            continue
    return max(timeouts, default=_LONGEST)


def is_distributed_type(kind: type) -> bool:
    """Return whether a class is torch.distributed's (DTensor, results of collectives), by its module's name."""
    return kind.__module__.startswith("torch.distributed")


def wait_for_collective(output: Any) -> None:
    """Wait until a `c10d` op has written; on an accelerator, its stream waits. Relies on `Work.unbox`."""
    work = output[-1] if isinstance(output, tuple | list) else output
    torch.distributed.distributed_c10d.Work.unbox(work).wait()


def finished_collective(func: Any, written: Any) -> Any:
    """Return what a `c10d` op returns for `written`, without running it. Relies on `FakeWork` and `Work.boxed`."""
    fake = required("torch._C._distributed_c10d.FakeWork", "results of collectives cannot be kept for replays")
    work = torch.distributed.distributed_c10d.Work.boxed(fake())
    return (written, work) if len(func._schema.returns) > 1 else work


def gathered_units(model: nn.Module) -> list[Any]:
    """List the modules that `fully_shard` (FSDP2) has changed. Reads `sys.modules`; obsolete when imports are fast."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def flat_parameter_wrappers(model: nn.Module) -> list[nn.Module]:
    """List the modules of a model that are wrapped in `FullyShardedDataParallel` (FSDP1). Obsolete with FSDP1."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [m for m in model.modules() if isinstance(m, fsdp.FullyShardedDataParallel)]


def gathered_parameters(model: nn.Module) -> list[list[Tensor]]:
    """List, for each group of parameters that FSDP2 gathers at once, the tensors that are allocated for it.

    There are none before the first forward. Relies on `FSDPModule._get_fsdp_state`, `_fsdp_param_groups` and the
    `all_gather_outputs` of their parameters; obsolete when FSDP frees tensors and does not resize their storages.
    """
    groups = _gathered_groups(model)
    return [[tensor for each in group.fsdp_params for tensor in each.all_gather_outputs] for group in groups]


def without_gathers(contexts: Any) -> Any:
    """Return the two contexts of a selective checkpoint, changed so that they do not see how FSDP2 gathers parameters.

    A replay gathers where the forward did not, or the other way round, and torch's modes count ops: they raise "not
    found in storage" or return the output of another op (torchtitan #3427). Marks the methods of FSDP that gather and
    free parameters; obsolete with a release of torch that has pytorch #185178 or #196862.
    """
    if sys.modules.get("torch.distributed.fsdp") is None:
        return contexts
    needed = "gathers of FSDP would enter selective checkpoints"
    group = required(f"{_GROUPS}.FSDPParamGroup", needed)
    state = required("torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState", needed)
    for kind, names in ((group, _GATHERING), (state, ("_root_pre_forward",))):
        for name in names:
            if not hasattr(method := getattr(kind, name), "is_marked"):
                setattr(kind, name, _marked(method))
    for mode in contexts:
        if isinstance(mode, TorchDispatchMode):
            vars(mode)["__torch_dispatch__"] = MethodType(_unless_gathering, mode)
    return contexts


_GATHERING = ("pre_forward", "post_forward", "unshard", "wait_for_unshard")


def keep_prefetches_useful() -> None:
    """Have FSDP2 gather no parameters ahead of time for a module whose backward is over.

    In the replay of a block, the modules inside prefetch as in the forward: also the first of the next block, which was
    done before. It would be gathered for nothing. Replaces `FSDPParamGroup._prefetch_unshard` once FSDP is imported;
    obsolete when FSDP does not prefetch in replays.
    """
    global _prefetches_are_limited
    if _prefetches_are_limited or "torch.distributed.fsdp" not in sys.modules:
        return
    _prefetches_are_limited = True
    group = required(f"{_GROUPS}.FSDPParamGroup", "replays would repeat gathers under explicit prefetching")
    plain = group._prefetch_unshard

    @functools.wraps(plain)
    def prefetch(target: Any, pass_type: str) -> None:
        if pass_type != "forward" or target._training_state.name != "POST_BACKWARD":
            plain(target, pass_type)

    group._prefetch_unshard = staticmethod(prefetch)


_prefetches_are_limited = False
_GROUPS = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


class _Gathering(threading.local):
    """Whether the current thread is inside a method of FSDP that gathers or frees parameters."""

    is_now = False


_gathering = _Gathering()


def _marked(method: Any) -> Any:
    @functools.wraps(method)
    def marked(*args: Any, **kwargs: Any) -> Any:
        before, _gathering.is_now = _gathering.is_now, True
        try:
            return method(*args, **kwargs)
        finally:
            _gathering.is_now = before

    marked.is_marked = True  # type: ignore[attr-defined]
    return marked


def _unless_gathering(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    return (
        func(*args, **kwargs) if _gathering.is_now else type(mode).__torch_dispatch__(mode, func, types, args, kwargs)
    )


def sharding_ranks(model: nn.Module) -> set[int]:
    """Return the ranks among which FSDP2 or tensor parallelism has sharded parameters of a model, with all copies.

    Relies on `device_mesh` of DTensors, and on the sharded parameters of FSDP's groups, as those of a module are
    replaced while they are gathered; obsolete when FSDP2 tells its mesh.
    """
    sharded = [each.sharded_param for group in _gathered_groups(model) for each in group.fsdp_params]
    meshes = [getattr(each, "device_mesh", None) for each in (*sharded, *model.parameters())]
    return {rank for mesh in dict.fromkeys(meshes) if mesh is not None for rank in mesh.mesh.flatten().tolist()}


def _gathered_groups(model: nn.Module) -> list[Any]:
    """The groups of parameters that FSDP2 gathers at once, for all units of a model."""
    groups = [group for unit in gathered_units(model) for group in _groups_of(unit._get_fsdp_state())]
    return list({id(group): group for group in groups}.values())


def _groups_of(state: Any) -> list[Any]:
    """The groups of parameters that an `FSDPState` gathers at once."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # torch 2.11


def stays_gathered(module: nn.Module, model: nn.Module) -> bool:
    """Return whether FSDP2 shards the parameters of a module itself, and does not free them after its forward.

    Known after the first forward. Relies on `_reshard_after_forward` of groups and `_module_info` of their parameters;
    obsolete when `FSDPModule` tells both.
    """
    held = {
        (id(info.module), info.param_name)
        for group in _gathered_groups(model)
        if not group._reshard_after_forward
        for info in (each._module_info for each in group.fsdp_params)
    }
    return all((id(module), name) in held for name, _ in module.named_parameters(recurse=False))


def is_before_backward_of_fsdp(hook: Any) -> bool:
    """Return whether a tensor hook is FSDP2's gather before a backward. Relies on `FSDPState._pre_backward`."""
    owner = getattr(hook, "__self__", None)
    is_state = hasattr(owner, "_fsdp_param_groups") or hasattr(owner, "_fsdp_param_group")  # torch 2.11
    return is_state and getattr(hook, "__name__", "") == "_pre_backward"


def random_tracker() -> Any:
    """Return what gives each rank its part of a random tensor; None before its first use. Relies on `_rng_tracker`."""
    return getattr(sys.modules.get("torch.distributed.tensor._random"), "_rng_tracker", None)


def random_state_of(tracker: Any) -> Tensor:
    """Return a host copy of the state that DTensor draws from. Relies on `_get_device_state`; obsolete likewise."""
    return tracker._get_device_state().cpu()  # type: ignore[no-any-return]


def set_random_state_of(tracker: Any, state: Tensor) -> None:
    """Set the random state that DTensor draws from. Relies on `_set_device_state`; obsolete likewise."""
    tracker._set_device_state(state)


@contextlib.contextmanager
def random_tracker_restored() -> Iterator[None]:
    """A context after which there is no `random_tracker` if there was none before.

    One that is made while fake tensors are traced does not give all ranks the same random state, as DTensor does
    otherwise. Obsolete when it is made together with the first DTensor.
    """
    before = random_tracker()
    try:
        yield
    finally:
        if before is None and random_tracker() is not None:
            sys.modules["torch.distributed.tensor._random"]._rng_tracker = None  # type: ignore[attr-defined]


@contextlib.contextmanager
def fake_process_group(world: int) -> Iterator[None]:
    """Be rank 0 of `world` ranks that do not exist: collectives return at once. Relies on torch's `FakeStore`."""
    store = required("torch.testing._internal.distributed.fake_pg.FakeStore", "jobs cannot be simulated")
    torch.distributed.init_process_group("fake", store=store(), rank=0, world_size=world)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def pipeline_stages(schedule: Any) -> list[Any]:
    """List the stages of a pipeline schedule that this rank runs. Relies on `_stage` and `_stages` of schedules."""
    return list(getattr(schedule, "_stages", ())) or [schedule._stage]


def pipeline_actions(schedule: Any) -> list[tuple[int, str]]:
    """List this rank's passes in a step: a stage's number, and "F", "B", "I" or "W". Relies on `pipeline_order`."""
    order = schedule.pipeline_order
    if order is None:
        return []
    rank = schedule.rank if hasattr(schedule, "rank") else schedule._stage.group_rank
    actions = [action for action in order[rank] if action is not None]
    parts = [part for action in actions for part in (action.sub_actions or (action,))]
    kinds = ((part.stage_index, part.computation_type.value) for part in parts)
    return [(stage, kind) for stage, kind in kinds if kind in ("F", "B", "I", "W")]
