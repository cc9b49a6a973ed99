"""What an optimizer will hold and need, found by running its step on tensors without bytes."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from lowtide.errors import LowtideError
from lowtide.replay.arguments import map_tensors, tensors_in
from lowtide.tracing import _compat
from lowtide.tracing.recorder import Recorder
from lowtide.tracing.snapshots import Snapshot

_META = torch.device("meta")
_MOST_WRAPPERS = 8  # around one optimizer


def plain_optimizer(optimizer: Any, model: nn.Module | None = None) -> torch.optim.Optimizer | None:
    """The `torch.optim.Optimizer` that holds the state: `optimizer` itself, or what a wrapper keeps as `.optimizer`.

    A wrapper, such as accelerate's, is no optimizer, or one whose `param_groups` or `state` are properties. Raises for
    anything else, and with a `model` for an optimizer that has none of its parameters.
    """
    if optimizer is None:
        return None
    found = optimizer
    for _ in range(_MOST_WRAPPERS):
        if not _is_plain(found):
            found = getattr(found, "optimizer", None)
    if not _is_plain(found):
        raise TypeError(
            "optimizer is a torch.optim.Optimizer, or a wrapper with one as its `.optimizer`, not "
            f"{optimizer!r:.80} of type {type(optimizer).__name__}"
        )
    if model is not None and not _updates(found, model):
        raise ValueError(
            f"this {type(found).__name__} has no parameter of the {type(model).__name__} given with it: make it from "
            "model.parameters() of this very model, not of a copy"
        )
    return found


def _is_plain(optimizer: Any) -> TypeGuard[torch.optim.Optimizer]:
    """Whether this is an optimizer that holds its parameter groups and states itself."""
    return isinstance(optimizer, torch.optim.Optimizer) and all(
        name in vars(optimizer) and not hasattr(type(optimizer), name) for name in ("param_groups", "state")
    )


def _updates(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    """Whether an optimizer has a parameter of the model, or one over the same memory (a twin's, a flat one)."""

    def memory_of(parameters: Iterable[Tensor]) -> set[int]:
        return {_compat.storage_id(part) for parameter in parameters for part in _compat.inner_tensors(parameter)}

    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return not given or not memory_of(given).isdisjoint(memory_of(model.parameters()))


def optimizer_memory(optimizer: Any, block_bytes: int) -> tuple[int, int, list[str]]:
    """Bytes of an optimizer's state once every state exists, the most its step allocates on top, and what to note.

    State on the host (step counters, an offloaded optimizer) does not count. The optimizer itself is only read.
    """
    optimizer = plain_optimizer(optimizer)
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
    plain = plain_optimizer(optimizer)
    states = plain.state.values() if plain is not None else ()
    return sum(tensor.nbytes for state in states for tensor in tensors_in(state) if tensor.device == device)


def _run_on_meta(optimizer: torch.optim.Optimizer, block_bytes: int) -> tuple[int, int]:
    snapshot, twins = Snapshot([vars(optimizer)]), _MetaTwins()
    try:
        twin = twins.of(optimizer)
        before = _bytes_of(twin.state, block_bytes)
        recorder = Recorder(_META, {}, before_write=twins.before_write, block_bytes=block_bytes)
        with torch.no_grad(), _AnyNumber(), recorder:
            type(optimizer).step(twin)
    finally:
        twins.restore()
        snapshot.restore()  # objects and queues in attributes are shared by the twin
    recorder.finish()
    after = _bytes_of(twin.state, block_bytes)
    return after, max(0, _most_live(recorder) - (after - before))


class _MetaTwins:
    """Optimizers as they are, with tensors on the meta device: the step of a twin reaches nothing of the original."""

    def __init__(self) -> None:
        self._tensors: dict[int, Tensor] = {}
        self._numbers: list[tuple[Tensor, Tensor]] = []
        self._uses_foreach = _compat.foreach_rule()

    def of(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        twin = object.__new__(type(optimizer))
        own = vars(twin)
        for name, item in vars(optimizer).items():
            if _compat.holds_hooks(name):
                own[name] = OrderedDict()
            elif name == "state":
                own[name] = defaultdict(dict)
            elif isinstance(item, torch.optim.Optimizer):  # one that this one steps, as Lookahead does
                own[name] = self.of(item)
            elif name not in ("step", "param_groups"):  # a scheduler's `step` is bound to the original
                own[name] = map_tensors(self._on_meta, item)
        own["param_groups"] = [self._group(group) for group in optimizer.param_groups]
        for parameter, state in optimizer.state.items():
            twin.state[self._on_meta(parameter)] = map_tensors(self._on_meta, state)
        return twin

    def _group(self, group: dict[str, Any]) -> dict[str, Any]:
        copied: dict[str, Any] = map_tensors(self._on_meta, group)
        if "foreach" in group:
            copied["foreach"] = self._uses_foreach(group, group["params"])
        if "fused" in group:
            copied["fused"] = None if copied.get("foreach") else False
        if group.get("capturable"):
            copied["capturable"] = False
        for parameter in copied["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        return copied

    def before_write(self, target: Tensor | torch.Generator) -> None:
        """An op is about to write to something that was there before the step: put back a number, refuse the rest."""
        if not isinstance(target, Tensor) or (not target.is_meta and target.numel() > 1):
            raise LowtideError("its step writes to something that is not in its param_groups, state or attributes")
        if not target.is_meta:
            with _compat.without_modes():
                self._numbers.append((target, target.detach().clone()))

    def restore(self) -> None:
        """Put back numbers of the original, such as step counters of an optimizer that it keeps in a list."""
        for target, number in reversed(self._numbers):
            target.copy_(number)

    def _on_meta(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._tensors:
            if tensor.numel() == 1 and tensor.device.type == "cpu":
                self._tensors[id(tensor)] = tensor.clone()  # a step counter: its value is read
            else:
                bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)
                is_parameter = isinstance(tensor, nn.Parameter)
                self._tensors[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if is_parameter else bare
        return self._tensors[id(tensor)]


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
