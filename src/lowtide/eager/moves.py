"""Moves the values that a plan names to host memory or disk, or compresses them, from forward to backward.

A plan names a value by where it is held: the number of a save, among those that one call of a module makes itself; an
input of a recomputed call; or an op output that a recomputed call retains. `Moves` holds these for one plan on one
model, with an `ActivationStore` for each destination. The handle runs a call with moved saves inside `Counting`,
saved-tensor hooks that count the saves. They are popped while a patched module inside that call runs (`set_aside`),
so that its saves are neither counted nor slowed down.

If other ops run than planned, another value is moved; it comes back unchanged like any other. Inside saved-tensor
hooks of other code, such as a checkpoint or an offload around the model, nothing is moved.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lowtide import _compat
from lowtide.errors import CapacityError, PlanError
from lowtide.plans.step_plan import Move, Plan
from lowtide.replay.arguments import tensors_in
from lowtide.replay.recomputing import Hooks
from lowtide.split.lazy_logits import first_in_backward
from lowtide.store import transfer
from lowtide.store.activation_store import ActivationStore
from lowtide.store.codecs import find_codec
from lowtide.store.offload import KeptHere, KeptInStore, ModuleTensors, end_of_forward, restore
from lowtide.store.storage_units import is_left_alone
from lowtide.units import format_bytes

_LEAST_BYTES = 1024  # an entry of a store takes about as much host memory itself
_MOST = "90%"  # of host memory or free disk: the stores' limit. What a plan needs was checked when it was made

Numbered = dict[int, Move]  # moves of one call, by save or input
Keeping = Callable[[Tensor], KeptHere | KeptInStore]


class Moves:
    """The moves of a plan on a model: the stores, and the moved values of each call."""

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        tiers = {move.to for move in plan.moves}
        if "host" in tiers and plan.host_bytes > transfer.host_bytes():
            raise PlanError(
                f"the plan moves {format_bytes(plan.host_bytes)} to host memory, and this machine has "
                f"{format_bytes(transfer.host_bytes())}: plan with a smaller host="
            )
        in_flight = plan.in_flight_bytes or None
        budgets: dict[str, dict[str, Any]] = {"host": {"host": _MOST}, "disk": {"disk": _MOST}, "device": {}}
        self.stores = {tier: ActivationStore(in_flight=in_flight, **budgets[tier]) for tier in sorted(tiers)}
        self._by_call: dict[tuple[str, int], Numbered] = {}
        self._outputs: dict[tuple[str, int], Numbered] = {}
        for move in plan.moves:
            find_codec(move.codec or None)  # raises for an unknown codec now, not in a forward
            if move.op is None:
                self._by_call.setdefault((move.path, move.nth), {})[move.save] = move
            else:
                self._outputs.setdefault((move.path, move.nth), {})[move.op] = move
        self._module_tensors = ModuleTensors()
        self._kept: set[str] = set()  # paths of modules whose saves are never moved
        for path, module in model.named_modules():
            self._module_tensors.look(module)
            if isinstance(module, nn.RReLU):  # it saves its noise before it draws it: a copy would hold nothing
                self._kept.add(path)
        self._open = _Open()
        self._is_full = False

    def counted(self, path: str, nth: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of one call, under hooks that count its saves if some of them are moved."""
        return functools.partial(self._run_counted, path, nth, forward) if (path, nth) in self._by_call else forward

    def _run_counted(self, path: str, nth: int, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        with self.counting(path, nth) or nullcontext():
            return forward(*args, **kwargs)

    def counting(self, path: str, nth: int) -> Counting | None:
        """Hooks that count the saves of one call and move those named; None for a call without moves."""
        moves = self._by_call.get((path, nth)) if path not in self._kept else None
        return Counting(self, moves) if moves and _compat.no_hooks_in_force() else None

    def hooks_for_inputs(self, path: str, nth: int, args: Any, kwargs: Any) -> Hooks | None:
        """Saved-tensor hooks for the inputs of a recomputed call; None if none of them is moved."""
        moves = self._by_call.get((path, nth))
        if not moves or not _compat.no_hooks_in_force():
            return None
        storages: dict[int, None] = {}
        for tensor in tensors_in((args, kwargs)):
            storages.update(dict.fromkeys(_compat.storages_of(tensor)))
        chosen = {storage: moves[number] for number, storage in enumerate(storages) if number in moves}
        return (functools.partial(_pack_input, self, chosen), restore) if chosen else None

    def keeping_outputs(self, path: str, nth: int) -> dict[int, Keeping]:
        """Functions that store retained op outputs of a recomputed call, by op; other outputs stay on the device."""
        moves = self._outputs.get((path, nth))
        if not moves or not _compat.no_hooks_in_force():
            return {}
        return {op: functools.partial(self.keep, move=move) for op, move in moves.items()}

    def set_aside(self) -> Counting | None:
        """Suspend counting for the current call while a module inside it runs. Pass the result to `resume`."""
        counting, self._open.counting = self._open.counting, None
        if counting is not None:
            counting.pause()
        return counting

    def resume(self, counting: Counting | None) -> None:
        self._open.counting = counting
        if counting is not None:
            counting.go_on()

    def keep(self, tensor: Tensor, move: Move) -> KeptHere | KeptInStore:
        """Move a tensor, and return what autograd keeps for it. Kept as it is if it cannot be moved or has no room."""
        if not is_left_alone(tensor) and tensor.nbytes >= _LEAST_BYTES and tensor not in self._module_tensors:
            try:
                return KeptInStore(tensor, self.stores[move.to], move.codec or None)
            except CapacityError as error:
                self._warn_once(error)
        return KeptHere(tensor)

    def end_of_forward(self, output: Any) -> None:
        """Call after the model's forward: values are fetched back from the host once the backward reaches `output`."""
        if "host" in self.stores:
            outputs = (source for tensor in tensors_in(output) for source in first_in_backward(tensor))
            end_of_forward(self.stores["host"], outputs)

    def _warn_once(self, error: CapacityError) -> None:
        if not self._is_full:
            self._is_full = True
            warnings.warn(f"values that the plan moves stay on the device: {error}", stacklevel=2)


def counted_paths(plan: Plan, model: nn.Module) -> list[str]:
    """Paths of modules to patch: those with moves and, where saves are counted, all modules inside them."""
    regions = {(region.path, region.nth) for region in plan.regions}
    paths_of = {module: path for path, module in model.named_modules()}
    paths: list[str] = []
    for path, nth in dict.fromkeys((move.path, move.nth) for move in plan.moves):
        inside = () if (path, nth) in regions else model.get_submodule(path).modules()
        paths += [path, *(paths_of[module] for module in inside)]
    return list(dict.fromkeys(paths))


class Counting:
    """Context manager around a call's own code: saved-tensor hooks that count its saves."""

    def __init__(self, moves: Moves, numbered: Numbered) -> None:
        self._moves, self._numbered = moves, numbered
        self._num_saves = 0
        self._is_on = False
        self._hooks: saved_tensors_hooks | None = None

    def __enter__(self) -> None:
        # Only while entered: the hooks refer to this object, which is a reference cycle.
        self._hooks = saved_tensors_hooks(functools.partial(_pack, self), restore)
        self._moves.resume(self)

    def __exit__(self, *exception: object) -> None:
        self._moves.set_aside()
        self._hooks = None

    def pause(self) -> None:
        """Pop the hooks, unless other hooks were pushed since: those see the saves then."""
        assert self._hooks is not None
        self._is_on = not _compat.hooks_are_in_force(self._hooks)
        if not self._is_on:
            self._hooks.__exit__()

    def go_on(self) -> None:
        assert self._hooks is not None
        if not self._is_on:
            self._hooks.__enter__()
            self._is_on = True

    def pack(self, tensor: Tensor) -> KeptHere | KeptInStore:
        move = self._numbered.get(self._num_saves)
        self._num_saves += len(_compat.storages_of(tensor))
        return KeptHere(tensor) if move is None else self._moves.keep(tensor, move)


class _Open(threading.local):
    """The hooks that count now, per thread."""

    counting: Counting | None = None


@_compat.disable_dynamo
def _pack(counting: Counting, tensor: Tensor) -> KeptHere | KeptInStore:
    return counting.pack(tensor)


@_compat.disable_dynamo
def _pack_input(moves: Moves, chosen: Numbered, tensor: Tensor) -> KeptHere | KeptInStore:
    storages = _compat.storages_of(tensor)
    move = chosen.get(storages[0]) if len(storages) == 1 else None
    return KeptHere(tensor) if move is None else moves.keep(tensor, move)
