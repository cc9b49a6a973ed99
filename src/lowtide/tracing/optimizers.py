"""What an optimizer will hold and need, found by running its step on tensors without bytes."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.tracing import _compat
from lowtide.tracing.recorder import Recorder
from lowtide.tracing.records import tensors_in

_META = torch.device("meta")


def optimizer_memory(optimizer: Any, block_bytes: int) -> tuple[int, int, list[str]]:
    """Bytes of an optimizer's state once every state exists, the most its step allocates on top, and what to note.

    State on the host (step counters, an offloaded optimizer) does not count. The optimizer itself is not touched.
    """
    if optimizer is None:
        return 0, 0, []
    try:
        state_bytes, workspace_bytes = _run_on_meta(optimizer, block_bytes)
    except Exception as error:  # an optimizer with kernels of its own
        present = _bytes_of(optimizer.state, block_bytes)
        note = (
            f"the states of {type(optimizer).__name__} could not be foretold ({type(error).__name__}: "
            f"{str(error)[:80]}); its present {present} bytes are counted. Trace after its first step."
        )
        return present, 0, [note]
    return state_bytes, workspace_bytes, []


def present_state_bytes(optimizer: Any, device: torch.device) -> int:
    """Bytes of the states that an optimizer (None: none) has on a device by now."""
    states = optimizer.state.values() if optimizer is not None else ()
    return sum(tensor.nbytes for state in states for tensor in tensors_in(state) if tensor.device == device)


def _run_on_meta(optimizer: Any, block_bytes: int) -> tuple[int, int]:
    made: dict[int, Tensor] = {}

    def on_meta(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        if item.numel() == 1 and item.device.type == "cpu":
            return item.clone()  # a step counter: its value is read
        if id(item) not in made:
            bare = torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=_META)
            made[id(item)] = nn.Parameter(bare, item.requires_grad) if isinstance(item, nn.Parameter) else bare
        return made[id(item)]

    uses_foreach = _compat.foreach_rule()
    twin = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    vars(twin).pop("step", None)  # a scheduler's wrapper, bound to the real one
    for name in [name for name in vars(twin) if name.endswith("_hooks")]:
        vars(twin)[name] = OrderedDict()
    twin.param_groups = []
    for group in optimizer.param_groups:
        parameters = [on_meta(parameter) for parameter in group["params"]]
        copied = {**group, "params": parameters}
        if "foreach" in group:
            copied["foreach"] = uses_foreach(group, group["params"])
        if "fused" in group:
            copied["fused"] = None if copied.get("foreach") else False
        if group.get("capturable"):
            copied["capturable"] = False
        twin.param_groups.append(copied)
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
    twin.state = defaultdict(dict)
    for parameter, state in optimizer.state.items():
        twin.state[on_meta(parameter)] = {name: on_meta(item) for name, item in state.items()}
    before = _bytes_of(twin.state, block_bytes)
    recorder = Recorder(_META, {}, block_bytes=block_bytes)
    with torch.no_grad(), _AnyNumber(), recorder:
        type(optimizer).step(twin)
    recorder.finish()
    after = _bytes_of(twin.state, block_bytes)
    return after, max(0, _most_live(recorder) - (after - before))


class _AnyNumber(_compat.DispatchMode):
    """Answers a step that asks its tensors for a number (a norm, to scale by): no size depends on which."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return 1.0 if _compat.gives_a_number(func) else func(*args, **(kwargs or {}))


def _bytes_of(states: Any, block_bytes: int) -> int:
    sizes: dict[int, int] = {}
    for state in states.values():
        for item in state.values() if isinstance(state, dict) else ():
            for tensor in item if isinstance(item, list | tuple) else [item]:
                if isinstance(tensor, Tensor) and tensor.device.type != "cpu":
                    for part in _compat.inner_tensors(tensor):
                        size = part.untyped_storage().nbytes()
                        sizes[_compat.storage_id(part)] = -(-size // block_bytes) * block_bytes
    return sum(sizes.values())


def _most_live(recorder: Recorder) -> int:
    """The most bytes that ops had made and Python still held at one time."""
    changes = [0] * (len(recorder.ops) + 2)
    for value in recorder.values:
        if value.born >= 0:
            changes[value.born] += value.bytes
            changes[max(value.dropped, value.born + 1)] -= value.bytes
    most = live = 0
    for change in changes:
        live += change
        most = max(most, live)
    return most
