"""What the code of modules can read from them, as a forward found it: parameters, buffers, attributes, flags.

A replay must find the modules as its forward found them, and leave them as it found them itself:

- A name that was bound to something else since (`self.memory = y`, `torch.func.functional_call`, `module.eval()`) is
  bound to the forward's value for the replay, whoever changed it.
- A list, dict, set, deque or other object held by an attribute gets the contents back that it had before the forward.
- Buffers, and other tensors without gradients in attributes, get their values from before the forward.
- A parameter changed in place has no copy to go back to, nor has a buffer over 256 KiB that a forward writes for the
  first time after forwards that left it alone. It is *lost*, and a replay that reads it is refused.

After the replay everything has its present value again, so that what a forward adds to a counter, to statistics or to
a list is added once.

Cost: one pass over the names of the modules per forward and per replay, about 50 ns each. What a call finds unchanged
it shares with the call before, copies included, so that modules which change nothing leave no object behind.
"""

from __future__ import annotations

import copy
import functools
import operator
import random
import types
import weakref
from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lowtide import _compat

_ALWAYS_COPIED_BYTES = 256 * 1024  # larger tensors are copied only if a forward is known to write them
_MAX_DEPTH = 4  # of containers in containers
_MAX_PARTS = 10_000  # of a container; longer ones are read as they are at the replay
_MAX_ATTRIBUTES = 100  # of an object; larger ones (a trainer, say) are read as they are too
_ABSENT: Any = object()
_LOST = -1  # no tensor has this version
_INTERNAL_NAMES = frozenset(vars(nn.Module())) - {"training"} | {"forward"}
# Written by kernels that do not count versions, also by a norm that the first forwards skip.
_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})

Names = dict[str, Any]  # the dict behind a module's parameters, buffers or attributes


class Slot(NamedTuple):
    """A name that code may read a value from."""

    names: Names
    key: str
    owner: nn.Module

    def describe(self, tensor: Tensor) -> str:
        kind = "attribute" if self.names is vars(self.owner) else "buffer"
        kind = "parameter" if isinstance(tensor, nn.Parameter) else kind
        return f"{kind} {self.key!r} of {type(self.owner).__name__}"


class ModuleTree:
    """The modules below a root (itself included), the names they have, and which tensors their forwards write.

    What the names are bound to is read for every call. So that is done by a few calls of C functions, over the dicts
    behind parameters, buffers, children and attributes. Of torch's own modules without children only parameters,
    buffers and the training flag are read: their other attributes say how they were made.
    """

    def __init__(self, root: nn.Module, known: ModuleTree | None = None) -> None:
        self.slots: list[Slot] = []
        self._dicts: list[Names] = []
        self._flagged: list[nn.Module] = []  # modules of which only the training flag is read
        flags: list[Slot] = []
        for module in _all_modules(root):
            parameters, buffers = _compat.module_tensors(module)
            if not isinstance(parameters, dict):  # a ScriptModule: what it holds cannot be bound from here
                continue
            if _is_plain_layer(module):
                dicts: list[Names] = [parameters, buffers]
                self._flagged.append(module)
                flags.append(Slot(vars(module), "training", module))
            else:
                dicts = [parameters, buffers, _compat.child_modules(module), vars(module)]
            self._dicts += dicts
            self.slots += [Slot(names, key, module) for names in dicts for key in names]
        self._keys = [slot.key for slot in self.slots]
        self.slots += flags
        self._sizes = list(map(len, self._dicts))
        values = self.read()
        self._modules = _ids_of_modules(values)
        self.devices = {value.device for value in values if isinstance(value, Tensor)}
        self.last: Snapshot | None = None  # of the last call
        self.calls: Any = None  # what calls of the root share: see `region`
        # Whether a forward was seen to write a tensor, by its names, key and training flag.
        self._is_written: dict[tuple[int, str, bool], bool] = {} if known is None else known._is_written

    def read(self) -> list[Any]:
        """What all names are bound to now, as long as no name has come or gone."""
        return [*chain.from_iterable(map(dict.values, self._dicts)), *map(_training, self._flagged)]

    def read_by_name(self) -> list[Any]:
        """The same, slowly and whatever has happened."""
        return [slot.names.get(slot.key, _ABSENT) for slot in self.slots]

    def has_same_names(self) -> bool:
        return list(map(len, self._dicts)) == self._sizes

    def new_slots(self) -> list[Slot]:
        """Names that have come to be since."""
        known = {(id(slot.names), slot.key) for slot in self.slots}
        owners = {id(slot.names): slot.owner for slot in self.slots}
        return [
            Slot(names, key, owners.get(id(names), self.slots[0].owner))
            for names in self._dicts
            for key in names
            if (id(names), key) not in known
        ]

    def snapshot(self) -> Snapshot | None:
        """What there is to read now: that of the last call if it is still true. None if the names are others now."""
        if not self.has_same_names():
            return None
        values, last = self.read(), self.last
        if last is not None and all(map(operator.is_, values, last.values)) and last.still_holds():
            return last
        if list(chain.from_iterable(self._dicts)) != self._keys or _ids_of_modules(values) != self._modules:
            return None
        return Snapshot(self, values)

    def is_copied(self, slot: Slot, tensor: Tensor) -> bool:
        """Whether a replay may need this tensor's value from before the forward."""
        if not _is_copyable_state(tensor):
            return False
        return tensor.nbytes <= _ALWAYS_COPIED_BYTES or self.is_written(slot) is not False

    def is_written(self, slot: Slot) -> bool | None:
        """Whether forwards write the tensor of this name; None while no forward has run."""
        if slot.key in _STATISTICS:
            return slot.owner.training
        return self._is_written.get(_habit(slot))

    def learn(self, slot: Slot, *, is_written: bool) -> None:
        self._is_written[_habit(slot)] = is_written


_training = operator.attrgetter("training")


def _is_plain_layer(module: nn.Module) -> bool:
    """Whether a module is one of torch's own that binds no names in its forward: nothing hangs on it that might."""
    is_torchs = type(module).__module__.startswith("torch.nn.")
    return is_torchs and not _compat.child_modules(module) and not _compat.has_forward_hooks(module)


def _ids_of_modules(values: list[Any]) -> set[int]:
    return {id(value) for value in values if isinstance(value, nn.Module)}


def _habit(slot: Slot) -> tuple[int, str, bool]:
    return id(slot.names), slot.key, slot.owner.training


class Snapshot:
    """What a tree's names were bound to at one moment, the contents of containers, and the values of small tensors."""

    __slots__ = (
        *("_containers", "_copies", "_copied", "_copied_versions", "_is_volatile", "_may_hide_writes"),
        *("_generators", "_watched_tensors", "tree", "values", "versions", "watched"),
    )

    def __init__(self, tree: ModuleTree, values: list[Any]) -> None:
        self.tree, self.values = tree, values
        own = [value for slot, value in zip(tree.slots, values, strict=True) if slot.key not in _INTERNAL_NAMES]
        containers, self._generators, loose = _reachable(own)
        self._containers = Containers(containers) if containers else None
        copied: dict[int, tuple[Slot | None, Tensor]] = {}
        watched: dict[int, tuple[Slot | None, Tensor]] = {}  # has no copy: must not change until the replay
        for slot, value in zip(tree.slots, values, strict=True):
            if isinstance(value, Tensor) and not _compat.is_uninitialized(value):
                (copied if tree.is_copied(slot, value) else watched).setdefault(id(value), (slot, value))
        for value in loose:
            is_small = _is_copyable_state(value) and value.nbytes <= _ALWAYS_COPIED_BYTES
            (copied if is_small else watched).setdefault(id(value), (None, value))
        self._copied = list(copied.values())
        # Written without a new version, or nobody knows yet.
        self._may_hide_writes = [slot is not None and tree.is_written(slot) is not False for slot, _ in self._copied]
        self._copies = _compat.clone_all([tensor for _, tensor in self._copied])
        self._copied_versions = _compat.versions_of([tensor for _, tensor in self._copied])
        self.watched = [found for found in watched.values() if not found[1].is_inference()]
        self._watched_tensors = [tensor for _, tensor in self.watched]
        self.versions = self._versions()
        self._is_volatile = any(self._may_hide_writes)

    def still_holds(self) -> bool:
        """Whether contents and values are still these, given that the names are."""
        return (
            not self._is_volatile
            and (self._containers is None or self._containers.are_unchanged())
            and (not self._copied or _compat.versions_of([t for _, t in self._copied]) == self._copied_versions)
            and self._versions() == self.versions
        )

    def _versions(self) -> list[int]:
        return list(map(_compat.version_of_saved, self._watched_tensors))

    def forward_done(self, *, runs_all: bool) -> Snapshot:
        """This, with the versions that watched tensors must have in a replay. Notes what the forward wrote.

        `runs_all` tells that the forward surely runs the whole root, so that what it leaves alone can be relied on.
        """
        tree = self.tree
        if self._copied:
            self._learn_writes(runs_all)
        versions, state = self._versions(), self
        if versions != self.versions:
            for index, (slot, tensor) in enumerate(self.watched):
                # A forward may renorm its own weight (Embedding with max_norm); the replay makes the same of it.
                if versions[index] != self.versions[index] and not isinstance(tensor, nn.Parameter):
                    versions[index] = _LOST
                    if slot is not None:
                        tree.learn(slot, is_written=True)
            state = copy.copy(self)  # calls before this one may share it
            state.versions = versions
        tree.last = state if state is self else None
        return state

    def _learn_writes(self, runs_all: bool) -> None:
        tree = self.tree
        for (slot, tensor), copied, version in zip(self._copied, self._copies, self._copied_versions, strict=True):
            if slot is None or tree.is_written(slot):
                continue
            if _compat.version_of(tensor) != version:
                # A version tells of such writes, so a small tensor needs no copy in every call.
                if tensor.nbytes > _ALWAYS_COPIED_BYTES:
                    tree.learn(slot, is_written=True)
            elif runs_all and tree.is_written(slot) is None and _compat.has_values(tensor):
                with _compat.without_modes():
                    tree.learn(slot, is_written=not torch.equal(copied, tensor))

    def devices(self) -> set[torch.device]:
        return self.tree.devices

    def generators(self) -> list[torch.Generator]:
        return self._generators

    def lost(self) -> list[tuple[str, Tensor]]:
        """Tensors changed in place since the forward, with no copy to go back to: what they are called, and they."""
        now = self._versions()
        if now == self.versions:
            return []
        return [
            ("a tensor in an attribute" if slot is None else slot.describe(tensor), tensor)
            for (slot, tensor), before, after in zip(self.watched, self.versions, now, strict=True)
            if before != after
        ]

    def restore(self) -> Callable[[], None]:
        """Put everything back to this; call the result to have all as it is now."""
        undo_names = _bind(self.tree, self.values)
        undo_containers = _nothing if self._containers is None else self._containers.restore()
        undo_tensors = self._overwrite()

        def undo() -> None:
            undo_tensors()
            undo_names()
            undo_containers()

        return undo

    def _overwrite(self) -> Callable[[], None]:
        """Give tensors their values back, where they have been written since."""
        if not self._copied:
            return _nothing
        changed = [
            index
            for index, ((_, tensor), version) in enumerate(zip(self._copied, self._copied_versions, strict=True))
            if self._may_hide_writes[index] or _compat.version_of(tensor) != version
        ]
        tensors = [self._copied[index][1] for index in changed]
        values, versions = _compat.clone_all(tensors), _compat.versions_of(tensors)
        copies, copied_versions = [self._copies[i] for i in changed], [self._copied_versions[i] for i in changed]
        _compat.overwrite_all(tensors, copies, copied_versions)
        return functools.partial(_compat.overwrite_all, tensors, values, versions)


_trees: weakref.WeakKeyDictionary[nn.Module, ModuleTree] = weakref.WeakKeyDictionary()


def snapshot_of(root: nn.Module) -> Snapshot:
    """What the modules from `root` on hold now."""
    tree = _trees.get(root)
    snapshot = None if tree is None else tree.snapshot()
    if snapshot is None:
        _trees[root] = tree = ModuleTree(root, tree)
        snapshot = tree.snapshot()
        assert snapshot is not None
    return snapshot


def _all_modules(root: nn.Module) -> list[nn.Module]:
    """`root` and all below it, also those that an attribute holds in a plain list or dict."""
    found = _compat.submodules(root)
    known = set(map(id, found))
    for module in found:  # grows while it is walked
        for value in vars(module).values():
            if isinstance(value, list | tuple | dict) and value:
                for part in value.values() if isinstance(value, dict) else value:
                    if isinstance(part, nn.Module) and id(part) not in known:
                        more = [each for each in _compat.submodules(part) if id(each) not in known]
                        known.update(map(id, more))
                        found += more
    return found


def _is_copyable_state(tensor: Tensor) -> bool:
    return not tensor.requires_grad and not isinstance(tensor, nn.Parameter) and _compat.is_copyable(tensor)


def _nothing() -> None:
    """For the common case that there is nothing to put back."""


def _bind(tree: ModuleTree, values: list[Any]) -> Callable[[], None]:
    """Bind all names to `values`, where they are bound to something else; call the result to have them as they are."""
    if tree.has_same_names() and all(map(operator.is_, tree.read(), values)):
        return functools.partial(_bind_if_changed, tree, values)
    tree.last = None  # it would keep values alive that nothing else holds
    new_slots = [slot for slot in tree.new_slots() if slot.key not in _INTERNAL_NAMES]
    present, new_values = tree.read_by_name(), [slot.names.pop(slot.key) for slot in new_slots]
    _bind_each(tree, values)

    def undo() -> None:
        _bind_each(tree, present)
        for slot, value in zip(new_slots, new_values, strict=True):
            slot.names[slot.key] = value

    return undo


def _bind_if_changed(tree: ModuleTree, values: list[Any]) -> None:
    if not (tree.has_same_names() and all(map(operator.is_, tree.read(), values))):
        _bind_each(tree, values)


def _bind_each(tree: ModuleTree, values: list[Any]) -> None:
    for slot in tree.new_slots():
        if slot.key not in _INTERNAL_NAMES:
            del slot.names[slot.key]
    for slot, value in zip(tree.slots, values, strict=True):
        live = slot.names.get(slot.key, _ABSENT)
        if live is value or slot.key in _INTERNAL_NAMES or _is_swapped_by_sharding(live, value):
            continue
        if value is _ABSENT:
            slot.names.pop(slot.key, None)
        else:
            slot.names[slot.key] = value


def _is_swapped_by_sharding(live: Any, recorded: Any) -> bool:
    """FSDP2 exchanges sharded and whole parameters around every forward; a replay leaves that to it."""
    return any(isinstance(each, Tensor) and _compat.is_sharded(each) for each in (live, recorded))


# Containers: objects that change without a name being bound.

_COPIED_STATE = (random.Random, np.random.Generator, np.random.RandomState, np.ndarray, bytearray)
_INERT = (
    *(nn.Module, Tensor, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType),
    *(str, bytes, int, float, complex, bool, type(None), tuple, frozenset, torch.Generator),
)


def _reachable(values: list[Any]) -> tuple[list[Any], list[torch.Generator], list[Tensor]]:
    """Containers and objects that some values hold, each once; the generators and the tensors in them."""
    containers: dict[int, Any] = {}
    generators: dict[int, torch.Generator] = {}
    tensors: dict[int, Tensor] = {}

    def look(value: Any, depth: int) -> None:
        if isinstance(value, torch.Generator):
            generators[id(value)] = value
        elif isinstance(value, tuple) and depth <= _MAX_DEPTH:
            for part in value:
                look(part, depth + 1)
        elif isinstance(value, Tensor):
            if depth:
                tensors[id(value)] = value
        elif not isinstance(value, _INERT) and id(value) not in containers and depth <= _MAX_DEPTH:
            if _is_container(value):
                containers[id(value)] = value
                for part in _parts(value):
                    look(part, depth + 1)

    for value in values:
        look(value, 0)
    return list(containers.values()), list(generators.values()), list(tensors.values())


def _is_container(value: Any) -> bool:
    if isinstance(value, list | dict | set | deque):
        return len(value) <= _MAX_PARTS
    if isinstance(value, _COPIED_STATE):
        return getattr(value, "nbytes", 0) <= _ALWAYS_COPIED_BYTES
    kind = type(value)
    if kind.__module__.partition(".")[0] in ("torch", "numpy") or getattr(kind, "hidden_from_replay", False):
        return False
    return 0 < len(getattr(value, "__dict__", ())) <= _MAX_ATTRIBUTES


def _parts(container: Any) -> Any:
    """What a container holds, to look into."""
    if isinstance(container, _COPIED_STATE):
        return ()
    return container if isinstance(container, _SEQUENCES) else _names(container).values()


_SEQUENCES = (list, deque, set)


def _names(container: Any) -> dict[Any, Any]:
    return container if isinstance(container, dict) else vars(container)


class Containers:
    """Some containers and objects, and what they hold at one moment.

    Whether they still hold it is asked for every call, so that is done by a few calls of C functions.
    """

    def __init__(self, containers: list[Any]) -> None:
        self._containers = containers
        self._states = [each for each in containers if isinstance(each, _COPIED_STATE)]  # without parts to compare
        self._sequences = [each for each in containers if isinstance(each, _SEQUENCES)]
        self._dicts = [_names(each) for each in containers if not isinstance(each, (*_COPIED_STATE, *_SEQUENCES))]
        self._parts, self._sizes = self._read(), self._lengths()
        self._contents = self._copy()

    def _read(self) -> list[Any]:
        """All parts of all containers, and the keys of dicts."""
        flatten = chain.from_iterable
        return list(chain(flatten(self._dicts), flatten(map(dict.values, self._dicts)), flatten(self._sequences)))

    def _lengths(self) -> list[int]:
        return [*map(len, self._dicts), *map(len, self._sequences)]

    def _copy(self) -> list[Any]:
        return [*map(_state_copy, self._states), *map(tuple, self._sequences), *map(dict, self._dicts)]

    def are_unchanged(self) -> bool:
        if self._states or self._lengths() != self._sizes:
            return False
        return all(map(operator.is_, self._read(), self._parts))

    def restore(self) -> Callable[[], None]:
        """Give all containers what they held; call the result to have them as they are now."""
        if self.are_unchanged():
            return self._restore_if_changed
        present = self._copy()
        self._fill(self._contents)
        return functools.partial(self._fill, present)

    def _restore_if_changed(self) -> None:
        if not self.are_unchanged():
            self._fill(self._contents)

    def _fill(self, contents: list[Any]) -> None:
        containers = (*self._states, *self._sequences, *self._dicts)
        for container, wanted in zip(containers, contents, strict=True):
            if isinstance(container, _COPIED_STATE):
                _set_copied_state(container, wanted)
            elif isinstance(container, list):
                container[:] = wanted
            else:
                container.clear()
                (container.extend if isinstance(container, deque) else container.update)(wanted)


def _state_copy(container: Any) -> Any:
    if isinstance(container, random.Random):
        return container.getstate()
    if isinstance(container, np.random.Generator):
        return container.bit_generator.state
    return container.get_state() if isinstance(container, np.random.RandomState) else container.copy()


def _set_copied_state(container: Any, state: Any) -> None:
    if isinstance(container, random.Random):
        container.setstate(state)
    elif isinstance(container, np.random.Generator):
        container.bit_generator.state = state
    elif isinstance(container, np.random.RandomState):
        container.set_state(state)
    elif isinstance(container, np.ndarray):
        container[...] = state
    else:
        container[:] = state
