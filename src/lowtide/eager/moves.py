"""The moves of a plan: values saved in chosen places live in stores until the backward asks for them.

A place is a save's number among those made directly in one call of one module, or an input of a recomputed call, or an
output that such a call holds.
Saved-tensor hooks count, and they are in force only while a module that has moves runs its own code: a module called
from there sets them aside until it returns, so that what it saves costs nothing and is not counted. Where other ops run
than planned, another value is moved, and comes back as it was like any other.

Whoever else has saved-tensor hooks in force, a checkpoint or an offload around the model, decides about what is saved
inside it, and nothing is moved there.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lowtide import _compat
from lowtide.errors import CapacityError, PlanError
from lowtide.plans.step_plan import Move, Plan
from lowtide.replay.arguments import tensors_in
from lowtide.replay.region import Hooks
from lowtide.store import transfer
from lowtide.store.activation_store import ActivationStore
from lowtide.store.codecs import find_codec
from lowtide.store.offload import KeptHere, KeptInStore, ModuleTensors, end_of_forward, restore
from lowtide.store.storage_units import is_left_alone
from lowtide.units import format_bytes

_LEAST_BYTES = 1024  # what stands for a value in a store takes as much
_MOST = "90%"  # of host memory, and of what is free on the disk: a plan says what it needs, not what it may have

Numbered = dict[int, Move]  # moves of one call, by save or input
Keeping = Callable[[Tensor], KeptHere | KeptInStore]


class Moves:
    """The moves of a plan on a model: where values go, and which those are."""

    hidden_from_replay = True

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        places = {move.to for move in plan.moves}
        if "host" in places and plan.host_bytes > transfer.host_bytes():
            raise PlanError(
                f"the plan moves {format_bytes(plan.host_bytes)} to host memory, and this machine has "
                f"{format_bytes(transfer.host_bytes())}: plan with a smaller host="
            )
        in_flight = plan.in_flight_bytes or None
        budgets: dict[str, dict[str, Any]] = {"host": {"host": _MOST}, "disk": {"disk": _MOST}, "device": {}}
        self.stores = {place: ActivationStore(in_flight=in_flight, **budgets[place]) for place in sorted(places)}
        self._by_call: dict[tuple[str, int], Numbered] = {}
        self._outputs: dict[tuple[str, int], Numbered] = {}
        for move in plan.moves:
            find_codec(move.codec or None)  # refuses an unknown one now rather than in a forward
            if move.op is None:
                self._by_call.setdefault((move.path, move.nth), {})[move.save] = move
            else:
                self._outputs.setdefault((move.path, move.nth), {})[move.op] = move
        self._module_tensors = ModuleTensors()
        for module in model.modules():
            self._module_tensors.look(module)
        self._open = _Open()
        self._is_full = False

    def counting(self, path: str, nth: int) -> Counting | None:
        """What counts the saves of one call and moves those chosen; None for a call without moves."""
        moves = self._by_call.get((path, nth))
        return Counting(self, moves) if moves and _compat.no_hooks_in_force() else None

    def hooks_for_inputs(self, path: str, nth: int, args: Any, kwargs: Any) -> Hooks | None:
        """What holds the inputs of a recomputed call, some of them moved; None where none is."""
        moves = self._by_call.get((path, nth))
        if not moves or not _compat.no_hooks_in_force():
            return None
        storages: dict[int, None] = {}
        for tensor in tensors_in((args, kwargs)):
            storages.update(dict.fromkeys(_compat.storages_of(tensor)))
        chosen = {storage: moves[number] for number, storage in enumerate(storages) if number in moves}
        return (functools.partial(_pack_input, self, chosen), restore) if chosen else None

    def keeping_outputs(self, path: str, nth: int) -> dict[int, Keeping]:
        """What keeps the first outputs of ops of a recomputed call, by op; none for those that the device holds."""
        moves = self._outputs.get((path, nth))
        if not moves or not _compat.no_hooks_in_force():
            return {}
        return {op: functools.partial(self.keep, move=move) for op, move in moves.items()}

    def set_aside(self) -> Counting | None:
        """Stop counting saves for the call that runs, as another begins inside it; `resume` goes on."""
        counting, self._open.counting = self._open.counting, None
        if counting is not None:
            counting.pause()
        return counting

    def resume(self, counting: Counting | None) -> None:
        self._open.counting = counting
        if counting is not None:
            counting.go_on()

    def keep(self, tensor: Tensor, move: Move) -> KeptHere | KeptInStore:
        """What autograd keeps for a tensor that is to be moved: itself where it is none to be moved, or has no room."""
        if not is_left_alone(tensor) and tensor.nbytes >= _LEAST_BYTES and tensor not in self._module_tensors:
            try:
                return KeptInStore(tensor, self.stores[move.to], move.codec or None)
            except CapacityError as error:
                self._warn_once(error)
        return KeptHere(tensor)

    def end_of_forward(self, output: Any) -> None:
        """The model's forward is over. When the backward gets to its output, values start on their way back."""
        if "host" in self.stores:
            end_of_forward(self.stores["host"], tensors_in(output))

    def _warn_once(self, error: CapacityError) -> None:
        if not self._is_full:
            self._is_full = True
            warnings.warn(f"values stay on the device that were to be moved: {error}", stacklevel=2)


def counted_paths(plan: Plan, model: nn.Module) -> list[str]:
    """Modules of which something is moved. Where saves are counted, all inside too: what those save is not counted."""
    regions = {(region.path, region.nth) for region in plan.regions}
    paths_of = {module: path for path, module in model.named_modules()}
    found: list[str] = []
    for path, nth in dict.fromkeys((move.path, move.nth) for move in plan.moves):
        inside = () if (path, nth) in regions else model.get_submodule(path).modules()
        found += [path, *(paths_of[module] for module in inside)]
    return list(dict.fromkeys(found))


class Counting:
    """Hooks that count the saves of one call. Enter it around the call's own code."""

    def __init__(self, moves: Moves, numbered: Numbered) -> None:
        self._moves, self._numbered = moves, numbered
        self._num_saves = 0
        self._is_on = False
        self._hooks: saved_tensors_hooks | None = None

    def __enter__(self) -> None:
        # Not before, and gone at the end: hooks that refer to this object are a cycle.
        self._hooks = saved_tensors_hooks(functools.partial(_pack, self), restore)
        self._moves.resume(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._moves.set_aside()
        self._hooks = None

    def pause(self) -> None:
        """Take the hooks off, unless others are in force by now: then those see what is saved."""
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
        self._num_saves += _compat.num_storages(tensor)
        return KeptHere(tensor) if move is None else self._moves.keep(tensor, move)


class _Open(threading.local):
    """The call whose saves are counted at this moment, in this thread."""

    counting: Counting | None = None


@_compat.disable_dynamo
def _pack(counting: Counting, tensor: Tensor) -> KeptHere | KeptInStore:
    return counting.pack(tensor)


@_compat.disable_dynamo
def _pack_input(moves: Moves, chosen: Numbered, tensor: Tensor) -> KeptHere | KeptInStore:
    storages = _compat.storages_of(tensor)
    move = chosen.get(storages[0]) if len(storages) == 1 else None
    return KeptHere(tensor) if move is None else moves.keep(tensor, move)
