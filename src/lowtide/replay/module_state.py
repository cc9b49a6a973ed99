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
import itertools
import random
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lowtide import _compat
from lowtide.replay.code_facts import code_facts

_ALWAYS_COPIED_BYTES = 256 * 1024  # larger tensors are copied only if a forward is known to write them
_MAX_DEPTH = 4  # of containers in containers
_MAX_PARTS = 10_000  # of a container; longer ones are read as they are at the replay
_MAX_ATTRIBUTES = 100  # of an object; larger ones (a trainer, say) are read as they are too
_ABSENT: Any = object()
_LOST = -1  # no tensor has this version
_INTERNAL_NAMES = frozenset(vars(nn.Module())) - {"training"} | {"forward"}
_COUNTER = "num_batches_tracked"
# Written by kernels that do not count versions. Where there is a counter, its version tells of them.
_STATISTICS = frozenset({"running_mean", "running_var", _COUNTER})

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
    """The modules below a root (itself included), the names they have, and which tensors their forwards write."""

    def __init__(self, root: nn.Module, known: ModuleTree | None = None) -> None:
        self.modules = _all_modules(root)
        self._known = set(map(id, self.modules))
        self._children = _compat.child_ids(self.modules)
        self.slots: list[Slot] = []
        self._names: list[Names] = []
        for module in self.modules:
            parameters, buffers = _compat.module_tensors(module)
            if not isinstance(parameters, dict):  # a ScriptModule: what it holds cannot be bound from here
                continue
            attributes = vars(module)
            for names in (parameters, buffers, _compat.children(module), attributes):
                self._names.append(names)
                self.slots += [Slot(names, key, module) for key in names if key not in _INTERNAL_NAMES]
        self._pairs = [(slot.names, slot.key) for slot in self.slots]
        self._sizes = list(map(len, self._names))
        self.devices = {value.device for value in self.read() if isinstance(value, Tensor)}
        code = [code_facts(type(module)) for module in self.modules]
        self.hides_writes = any(each.hides_writes for each in code)
        self.outside = list({id(state): state for each in code for state in each.states}.values())
        self.last: Snapshot | None = None  # of the last call, if that left everything as it was
        # Whether a forward was seen to write a tensor, by its names, key and training flag.
        self._is_written: dict[tuple[int, str, bool], bool] = {} if known is None else known._is_written

    def is_current(self) -> bool:
        """Whether the modules below the root, and the names in them, are still the same."""
        return list(map(len, self._names)) == self._sizes and _compat.child_ids(self.modules) == self._children

    def covers(self, snapshot: Snapshot) -> bool:
        """Whether all names of a snapshot exist, and all modules that containers hold are known."""
        return snapshot is self.last or (
            id(_ABSENT) not in snapshot.ids and all(id(module) in self._known for module in snapshot.modules)
        )

    def read(self) -> list[Any]:
        """What all names are bound to now."""
        return [names.get(key, _ABSENT) for names, key in self._pairs]

    def new_slots(self, values: list[Any]) -> list[Slot]:
        """Names that have come to be since, given what `read` finds now."""
        if list(map(len, self._names)) == self._sizes and id(_ABSENT) not in map(id, values):
            return []
        known = {(id(names), key) for names, key in self._pairs}
        owners = {id(names): slot.owner for slot in self.slots for names in (slot.names,)}
        return [
            Slot(names, key, owners.get(id(names), self.modules[0]))
            for names in self._names
            for key in names
            if key not in _INTERNAL_NAMES and (id(names), key) not in known
        ]

    def snapshot(self) -> Snapshot:
        """What there is to read now: that of the last call if it is still true."""
        values = self.read()
        ids, last = list(map(id, values)), self.last
        if last is not None and ids == last.ids and last.still_holds():
            return last
        return Snapshot(self, values, ids)

    def is_copied(self, slot: Slot, tensor: Tensor) -> bool:
        """Whether a replay may need this tensor's value from before the forward."""
        if isinstance(tensor, nn.Parameter):  # not an activation's size, so copied only for a reason
            is_written = self.is_written(slot)
            is_candidate = is_written is None and not tensor.requires_grad and tensor.nbytes <= _ALWAYS_COPIED_BYTES
            return (is_written or is_candidate) and _compat.is_copyable(tensor)
        if not _is_copyable_state(tensor):
            return False
        return tensor.nbytes <= _ALWAYS_COPIED_BYTES or self.is_written(slot) is not False

    def is_written(self, slot: Slot) -> bool | None:
        """Whether forwards write the tensor of this name; None while no forward has run."""
        if slot.key in _STATISTICS:
            return slot.owner.training
        if slot.key == "weight" and getattr(slot.owner, "max_norm", None) is not None:
            return True  # an embedding that scales its rows before it reads them
        return self._is_written.get(_habit(slot))

    def may_hide_writes(self, slot: Slot | None, tensor: Tensor) -> bool:
        """Whether a forward may write a tensor without a new version: statistics of a norm, or nobody knows yet."""
        if isinstance(tensor, nn.Parameter):
            return False
        if slot is None:
            return self.hides_writes
        if slot.key in _STATISTICS and slot.names.get(_COUNTER) is not None:
            return slot.owner.training
        return self.hides_writes or self.is_written(slot) is not False

    def learn(self, slot: Slot, *, is_written: bool) -> None:
        self._is_written[_habit(slot)] = is_written


def _habit(slot: Slot) -> tuple[int, str, bool]:
    return id(slot.names), slot.key, slot.owner.training


class Snapshot:
    """What a tree's names were bound to at one moment, the contents of containers, and the values of small tensors."""

    __slots__ = (
        *("_contents", "_containers", "_copies", "_copied", "_copied_versions", "_is_volatile", "_may_hide_writes"),
        *("_generators", "_tree", "_values", "ids", "modules", "versions", "watched"),
    )

    def __init__(self, tree: ModuleTree, values: list[Any], ids: list[int]) -> None:
        self._tree, self._values, self.ids = tree, values, ids
        found = _reachable(values)
        self._containers, self._generators, loose = found.containers, found.generators, found.tensors
        self.modules = found.modules
        self._containers += tree.outside
        self._contents = list(map(contents_of, self._containers))
        copied: dict[int, tuple[Slot | None, Tensor]] = {}
        watched: dict[int, tuple[Slot | None, Tensor]] = {}  # has no copy: must not change until the replay
        for slot, value in zip(tree.slots, values, strict=True):
            if isinstance(value, Tensor) and not _compat.is_uninitialized(value):
                (copied if tree.is_copied(slot, value) else watched).setdefault(id(value), (slot, value))
        for value in loose:
            is_small = _is_copyable_state(value) and value.nbytes <= _ALWAYS_COPIED_BYTES
            (copied if is_small else watched).setdefault(id(value), (None, value))
        self._copied = list(copied.values())
        self._may_hide_writes = [tree.may_hide_writes(slot, tensor) for slot, tensor in self._copied]
        self._copies = _compat.clone_all([tensor for _, tensor in self._copied])
        self._copied_versions = _compat.versions_of([tensor for _, tensor in self._copied])
        self.watched = list(watched.values())
        self.versions = _compat.versions_of([tensor for _, tensor in self.watched])
        # Random states and arrays have no identity to compare.
        has_states = any(isinstance(each, _COPIED_STATE) for each in self._containers)
        self._is_volatile = has_states or any(self._may_hide_writes)

    def still_holds(self) -> bool:
        """Whether contents and values are still these, given that the names are."""
        return (
            not self._is_volatile
            and (not self._containers or all(map(_is_same, map(contents_of, self._containers), self._contents)))
            and (not self._copied or _versions(self._copied) == self._copied_versions)
            and _versions(self.watched) == self.versions
        )

    def forward_done(self, *, runs_all: bool) -> Snapshot:
        """This, with the versions that watched tensors must have in a replay. Notes what the forward wrote.

        `runs_all` tells that the forward surely runs the whole root, so that what it leaves alone can be relied on.
        """
        tree, state = self._tree, self
        if self._copied:
            self._learn_writes(runs_all)
            state = self._without_unwritten_parameters()
        versions = _versions(state.watched)
        if versions != state.versions:
            for index, (slot, _) in enumerate(state.watched):
                if versions[index] != state.versions[index]:
                    versions[index] = _LOST
                    if slot is not None:  # the next forward has a copy
                        tree.learn(slot, is_written=True)
            state = copy.copy(state)  # calls before this one may share it
            state.versions = versions
            tree.last = None
        else:
            is_same = list(map(id, tree.read())) == state.ids and state.still_holds()
            tree.last = state if is_same else None
        return state

    def _without_unwritten_parameters(self) -> Snapshot:
        """This, with parameters watched again that were copied in case the forward writes them, and were not."""
        versions = _versions(self._copied)
        is_dropped = [
            isinstance(tensor, nn.Parameter) and now == before
            for (_, tensor), now, before in zip(self._copied, versions, self._copied_versions, strict=True)
        ]
        if not any(is_dropped):
            return self
        state = copy.copy(self)
        state.watched = [*self.watched, *itertools.compress(self._copied, is_dropped)]
        state.versions = [*self.versions, *itertools.compress(versions, is_dropped)]
        is_kept = [not each for each in is_dropped]
        state._copied = list(itertools.compress(self._copied, is_kept))
        state._copies = list(itertools.compress(self._copies, is_kept))
        state._copied_versions = list(itertools.compress(self._copied_versions, is_kept))
        state._may_hide_writes = list(itertools.compress(self._may_hide_writes, is_kept))
        return state

    def _learn_writes(self, runs_all: bool) -> None:
        tree = self._tree
        for (slot, tensor), copied, version in zip(self._copied, self._copies, self._copied_versions, strict=True):
            if slot is None or tree.is_written(slot):
                continue
            if isinstance(tensor, nn.Parameter):
                if runs_all or _compat.version_of(tensor) != version:
                    tree.learn(slot, is_written=_compat.version_of(tensor) != version)
            elif _compat.version_of(tensor) != version:
                # A version tells of such writes, so a small tensor needs no copy in every call.
                if tensor.nbytes > _ALWAYS_COPIED_BYTES:
                    tree.learn(slot, is_written=True)
            elif runs_all and tree.is_written(slot) is None and _compat.has_values(tensor):
                tree.learn(slot, is_written=not torch.equal(copied, tensor))

    def devices(self) -> set[torch.device]:
        return self._tree.devices

    def generators(self) -> list[torch.Generator]:
        return self._generators

    def lost(self) -> list[tuple[str, Tensor]]:
        """Tensors changed in place since the forward, with no copy to go back to: what they are called, and they."""
        now = _versions(self.watched)
        if now == self.versions:
            return []
        return [
            ("a tensor in an attribute" if slot is None else slot.describe(tensor), tensor)
            for (slot, tensor), before, after in zip(self.watched, self.versions, now, strict=True)
            if before != after
        ]

    def restore(self) -> Callable[[], None]:
        """Put everything back to this; call the result to have all as it is now."""
        tree = self._tree
        present = tree.read()
        new_slots = tree.new_slots(present)
        new_values = [slot.names[slot.key] for slot in new_slots]
        contents = list(map(contents_of, self._containers))
        is_changed = [now != before for now, before in zip(_versions(self._copied), self._copied_versions, strict=True)]
        counted = {
            id(slot.names)
            for (slot, _), is_new in zip(self._copied, is_changed, strict=True)
            if is_new and slot is not None and slot.key == _COUNTER
        }
        changed = [
            index
            for index, (slot, _) in enumerate(self._copied)
            if is_changed[index]
            or self._may_hide_writes[index]
            or (slot is not None and slot.key in _STATISTICS and id(slot.names) in counted)
        ]
        tensors = [self._copied[index][1] for index in changed]
        values, versions = _compat.clone_all(tensors), _compat.versions_of(tensors)

        def undo() -> None:
            _compat.overwrite_all(tensors, values, versions)
            for slot in tree.new_slots(tree.read()):
                slot.names.pop(slot.key, None)
            for slot, value in zip(new_slots, new_values, strict=True):
                slot.names[slot.key] = value
            _bind(tree, present)
            fill(self._containers, contents)

        for slot in new_slots:
            slot.names.pop(slot.key, None)
        _bind(tree, self._values)
        fill(self._containers, self._contents)
        _compat.overwrite_all(
            tensors, [self._copies[index] for index in changed], [self._copied_versions[index] for index in changed]
        )
        return undo


_trees: weakref.WeakKeyDictionary[nn.Module, ModuleTree] = weakref.WeakKeyDictionary()


def snapshot_of(root: nn.Module) -> Snapshot:
    """What the modules from `root` on hold now."""
    tree = _trees.get(root)
    if tree is not None and tree.is_current():
        snapshot = tree.snapshot()
        if tree.covers(snapshot):
            return snapshot
    _trees[root] = tree = ModuleTree(root, tree)
    return tree.snapshot()


def _all_modules(root: nn.Module) -> list[nn.Module]:
    """`root` and all below it, also those in containers and objects that an attribute holds."""
    found = _compat.submodules(root)
    known = set(map(id, found))
    for module in found:  # grows while it is walked
        held = [value for key, value in vars(module).items() if key not in _INTERNAL_NAMES]
        for part in _reachable(held).modules:
            more = [each for each in _compat.submodules(part) if id(each) not in known]
            known.update(map(id, more))
            found += more
    return found


def _versions(tensors: list[tuple[Slot | None, Tensor]]) -> list[int]:
    return _compat.versions_of([tensor for _, tensor in tensors])


def _is_copyable_state(tensor: Tensor) -> bool:
    return not tensor.requires_grad and not isinstance(tensor, nn.Parameter) and _compat.is_copyable(tensor)


def _bind(tree: ModuleTree, values: list[Any]) -> None:
    """Bind all names to `values`, where they are bound to something else."""
    for slot, value, live in zip(tree.slots, values, tree.read(), strict=True):
        if live is value or _is_swapped_by_sharding(live, value):
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
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType),
    *(str, bytes, int, float, complex, bool, type(None), tuple, frozenset, torch.Generator),
)


class _Reachable(NamedTuple):
    """What some values lead to, each once."""

    containers: list[Any]  # and objects
    generators: list[torch.Generator]
    tensors: list[Tensor]  # in containers
    modules: list[nn.Module]  # in containers


def _reachable(values: list[Any]) -> _Reachable:
    containers: dict[int, Any] = {}
    generators: dict[int, torch.Generator] = {}
    tensors: dict[int, Tensor] = {}
    modules: dict[int, nn.Module] = {}

    def look(value: Any, depth: int) -> None:
        if isinstance(value, torch.Generator):
            generators[id(value)] = value
        elif isinstance(value, tuple) and depth <= _MAX_DEPTH:
            for part in value:
                look(part, depth + 1)
        elif isinstance(value, Tensor):
            if depth:
                tensors[id(value)] = value
        elif isinstance(value, nn.Module):
            if depth:
                modules[id(value)] = value
        elif not isinstance(value, _INERT) and id(value) not in containers and depth <= _MAX_DEPTH:
            if _is_container(value):
                containers[id(value)] = value
                for part in _parts(value):
                    look(part, depth + 1)

    for value in values:
        look(value, 0)
    found = (containers, generators, tensors, modules)
    return _Reachable(*(list(each.values()) for each in found))  # type: ignore[arg-type]


def _is_container(value: Any) -> bool:
    if isinstance(value, list | dict | set | deque):
        return len(value) <= _MAX_PARTS
    if isinstance(value, _COPIED_STATE):
        return getattr(value, "nbytes", 0) <= _ALWAYS_COPIED_BYTES
    kind = type(value)
    if kind.__module__.partition(".")[0] in ("torch", "numpy") or getattr(kind, "hidden_from_replay", False):
        return False
    return 0 < len(_attributes(value)) <= _MAX_ATTRIBUTES


def _parts(container: Any) -> Iterator[Any]:
    if isinstance(container, _COPIED_STATE):
        return iter(())
    contents = contents_of(container)
    return iter(contents if isinstance(container, _SEQUENCES) else contents[1])


_SEQUENCES = (list, deque, set)


def contents_of(container: Any) -> Any:
    """What a container holds, not to be changed with it. Compare with `_is_same`."""
    if isinstance(container, _SEQUENCES):
        return tuple(container)
    if isinstance(container, random.Random):
        return container.getstate()
    if isinstance(container, np.random.Generator):
        return container.bit_generator.state
    if isinstance(container, np.random.RandomState):
        return container.get_state()
    if isinstance(container, np.ndarray | bytearray):
        return container.copy()
    names = container if isinstance(container, dict) else _attributes(container)
    return tuple(names), tuple(names.values())


def _attributes(value: Any) -> Names:
    """What an object holds by name, in its `__dict__` and in its slots."""
    attributes: Names = getattr(value, "__dict__", _NO_NAMES)
    slots = _slots(type(value))
    if not slots:
        return attributes
    return {**attributes, **{name: getattr(value, name) for name in slots if hasattr(value, name)}}


_NO_NAMES: Names = {}


_slot_names: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()


def _slots(kind: type) -> tuple[str, ...]:
    names = _slot_names.get(kind)
    if names is None:
        members = [item for base in kind.__mro__ if "__slots__" in vars(base) for item in vars(base).items()]
        names = tuple(name for name, member in members if isinstance(member, types.MemberDescriptorType))
        _slot_names[kind] = names
    return names


def _is_same(one: Any, other: Any) -> bool:
    """Whether two contents are the same objects."""
    if len(one) == 2 and isinstance(one[0], tuple) and len(other) == 2 and isinstance(other[0], tuple):
        one, other = (*one[0], *one[1]), (*other[0], *other[1])
    return len(one) == len(other) and list(map(id, one)) == list(map(id, other))


def fill(containers: list[Any], contents: list[Any]) -> None:
    """Give containers these contents, where they have others."""
    for container, wanted in zip(containers, contents, strict=True):
        if isinstance(container, _COPIED_STATE):
            _set_copied_state(container, wanted)
        elif not _is_same(contents_of(container), wanted):
            _set_contents(container, wanted)


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


def _set_contents(container: Any, contents: Any) -> None:
    """Through the methods of the base class: those of a subclass may do something else (`Counter.update` adds)."""
    if isinstance(container, list):
        list.__setitem__(container, slice(None), contents)
    elif isinstance(container, deque):
        deque.clear(container)
        deque.extend(container, contents)
    elif isinstance(container, set):
        set.clear(container)
        set.update(container, contents)
    elif isinstance(container, dict):
        kind: Any = OrderedDict if isinstance(container, OrderedDict) else dict  # which has an order of its own
        kind.clear(container)
        for key, value in zip(*contents, strict=True):
            kind.__setitem__(container, key, value)
    else:
        wanted, slots = dict(zip(*contents, strict=True)), _slots(type(container))
        for name in slots:
            if name in wanted:
                object.__setattr__(container, name, wanted.pop(name))
            elif hasattr(container, name):
                object.__delattr__(container, name)
        if hasattr(container, "__dict__"):
            vars(container).clear()
            vars(container).update(wanted)
