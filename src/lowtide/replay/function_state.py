"""Capture and restore everything that a function reads without being passed it.

`lowtide.checkpoint` takes any callable. `CapturedState` finds what it reads from the function object alone: modules,
the owner of a bound method, the parts of a partial, closure cells, defaults, and the globals that its code names, up to
4 steps deep. (Recording every op of every forward would find more, and cost more than many regions save.)
`FunctionState` captures the values before the forward and restores them for replays:

- Modules are restored by `module_state`.
- A closed-over tensor is copied if it is at most 256 KiB and requires no gradient. A replay that reads another one
  after it was changed in place is refused.
- Random states of Python and numpy, and small arrays, are copied.
- A variable that was rebound after the forward, such as a loop variable that a lambda closes over, is bound to the
  forward's value for the replay. A variable that the forward itself rebinds is not: such variables count calls.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowtide import _compat
from lowtide._compat.modules import WHOLE_MODULE_METHODS
from lowtide.graph.arrays import ALWAYS_COPIED_BYTES
from lowtide.replay.module_state import is_copyable_state, snapshot_of
from lowtide.replay.object_state import ABSENT, Containers, is_plain_state, nothing, states_drawn_by, variables_of

_MAX_DEPTH = 4
_MAX_OBJECTS = 500


def module_of(function: Callable[..., Any]) -> nn.Module | None:
    """Return the module that a function runs and nothing else: the function itself, or the owner of its forward."""
    if isinstance(function, nn.Module):
        return function
    if isinstance(function, types.MethodType) and isinstance(function.__self__, nn.Module):
        method = function.__func__
        is_whole = getattr(method, "__name__", "") in WHOLE_MODULE_METHODS
        return function.__self__ if is_whole and getattr(method, "__closure__", None) is None else None
    return None


class Variable(NamedTuple):
    """A variable that a function reads, and its value: a closure cell, or a name in a namespace."""

    place: types.CellType | dict[str, Any]
    name: str  # empty for a cell
    value: Any

    def read(self) -> Any:
        """Return the present value."""
        if isinstance(self.place, dict):
            return self.place.get(self.name, ABSENT)
        try:
            return self.place.cell_contents
        except ValueError:
            return ABSENT

    def bind(self, value: Any) -> None:
        if isinstance(self.place, dict):
            if value is ABSENT:
                self.place.pop(self.name, None)
            else:
                self.place[self.name] = value
        elif value is ABSENT:
            del self.place.cell_contents
        else:
            self.place.cell_contents = value


class CapturedState:
    """Modules, tensors, generators and variables that a function reads."""

    def __init__(self, function: Callable[..., Any], arguments: Iterable[Any] = ()) -> None:
        self.modules: dict[nn.Module, bool] = {}  # and whether the function surely runs all of each
        self.tensors: list[Tensor] = []
        self.generators: list[torch.Generator] = []
        self.states: list[Any] = []  # random states and arrays
        self.variables: list[Variable] = []
        self._seen: set[int] = set()
        self._add(function, 0, True)
        for argument in arguments:
            self._seen = set()
            self._add(argument, 1, False)

    def _add(self, value: Any, depth: int, whole: bool) -> None:
        if isinstance(value, nn.Module):
            self.modules[value] = whole or self.modules.get(value, False)
        elif isinstance(value, Tensor):
            self.tensors.append(value)
        elif isinstance(value, torch.Generator):
            self.generators.append(value)
        elif is_plain_state(value):
            self.states.append(value)
        elif isinstance(value, _SKIPPED) or id(value) in self._seen or _is_hidden(value):
            return
        elif depth <= _MAX_DEPTH and len(self._seen) < _MAX_OBJECTS:
            self._seen.add(id(value))
            self._open(value, depth + 1, whole)

    def _open(self, value: Any, depth: int, whole: bool) -> None:
        if isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._add(part, depth, whole)
        elif isinstance(value, types.MethodType):
            if _is_hidden(value.__self__):
                return
            self._add(value.__self__, depth, whole and value.__func__.__name__ in WHOLE_MODULE_METHODS)
            self._add(value.__func__, depth, False)
        elif isinstance(value, types.FunctionType):
            self._open_function(value, depth)
        elif isinstance(value, dict | list | tuple | set | frozenset):
            for part in list(value.values() if isinstance(value, dict) else value):
                self._add(part, depth, False)
        elif hasattr(value, "__wrapped__"):  # functools.lru_cache and other decorators
            self._add(value.__wrapped__, depth, False)
        else:
            if callable(value):
                self._add(vars(type(value)).get("__call__"), depth, False)
            for part in list(getattr(value, "__dict__", {}).values()):
                self._add(part, depth, False)

    def _open_function(self, function: types.FunctionType, depth: int) -> None:
        variables = variables_of(function)
        self.states += states_drawn_by(function, variables)
        for place, name, value in variables:
            if not (name and isinstance(value, _SKIPPED)):
                self.variables.append(Variable(place, name, value))
                self._add(value, depth, False)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._add(default, depth, False)


def _is_hidden(value: Any) -> bool:
    """Return whether this is an engine's object that users or modules hold: it leads to the whole model."""
    return getattr(type(value), "hidden_from_replay", False)


_SKIPPED = (
    *(types.ModuleType, types.BuiltinFunctionType, type, str, bytes),
    *(torch.dtype, torch.device, torch.Size),
)


class FunctionState:
    """The state that a function reads, from just before its forward to its last replay."""

    # fmt: off
    __slots__ = (
        "_copied", "_copied_versions", "_copies", "_generators", "_runs_all", "_snapshots", "_states", "_tracked",
        "_tracked_versions", "_variables",
    )
    # fmt: on

    def __init__(self, function: Callable[..., Any], arguments: Iterable[Any] = ()) -> None:
        captured = CapturedState(function, arguments)
        self._snapshots = list(map(snapshot_of, captured.modules))
        self._runs_all = list(captured.modules.values())
        self._generators, self._variables = captured.generators, captured.variables
        copied: dict[int, Tensor] = {}
        self._tracked: list[Tensor] = []
        for tensor in captured.tensors:
            if is_copyable_state(tensor) and tensor.nbytes <= ALWAYS_COPIED_BYTES:
                copied[id(tensor)] = tensor
            else:
                self._tracked.append(tensor)
        self._copied = list(copied.values())
        self._copies, self._copied_versions = _compat.clone_all(self._copied), _compat.versions_of(self._copied)
        self._tracked_versions: list[int] | None = None  # None before the forward is done
        states = list({id(state): state for state in captured.states}.values())
        self._states = Containers(states) if states else None

    @property
    def is_lazy(self) -> bool:
        """Whether there are parameters or buffers that the first forward will make, as in `nn.LazyLinear`."""
        return any(snapshot.is_lazy for snapshot in self._snapshots)

    def devices(self) -> set[torch.device]:
        return {tensor.device for tensor in self._tracked}.union(*(each.devices() for each in self._snapshots))

    def generators(self) -> list[torch.Generator]:
        return [*self._generators, *(generator for each in self._snapshots for generator in each.generators())]

    def forward_done(self, *, runs_all: bool) -> FunctionState:
        """Record what the forward wrote and rebound; return self. `runs_all`: whether it surely ran whole modules."""
        pairs = zip(self._snapshots, self._runs_all, strict=True)
        self._snapshots = [snapshot.forward_done(runs_all=runs_all and is_whole) for snapshot, is_whole in pairs]
        self._tracked_versions = _compat.versions_of(self._tracked)
        self._variables = [each for each in self._variables if each.read() is each.value]
        return self

    def lost(self) -> list[tuple[str, Tensor]]:
        """List tensors that were changed in place since the forward and have no copy, each after its description."""
        lost = [each for snapshot in self._snapshots for each in snapshot.lost()]
        if self._tracked_versions is not None:
            for tensor, version in zip(self._tracked, self._tracked_versions, strict=True):
                if _compat.version_of(tensor) != version:
                    lost.append((f"a tensor of shape {tuple(tensor.shape)} that the function closes over", tensor))
        return lost

    def restore(self, *, is_done: bool = True) -> Callable[[], None]:
        """Restore what the forward read; call the result to restore the present state."""
        rebound = [(each, live) for each in self._variables if (live := each.read()) is not each.value]
        undo_modules = [snapshot.restore(is_done=is_done) for snapshot in self._snapshots]
        for variable, _ in rebound:
            variable.bind(variable.value)
        present = _compat.exchange_all(self._copied, self._copies, self._copied_versions)
        undo_states = nothing if self._states is None else self._states.restore()

        def undo() -> None:
            undo_states()
            _compat.overwrite_all(self._copied, *present)
            for variable, live in rebound:
                variable.bind(live)
            for undo_module in reversed(undo_modules):
                undo_module()

        return undo
