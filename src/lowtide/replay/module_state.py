"""Capture and restore the state of modules for a replay: names, contents of attributes, and values of buffers.

A forward may read and change any attribute of its modules: running statistics, a counter, a list of activations.
A `ModuleSnapshot` is taken before each forward of a region and restored for its replay:

- A name that was rebound since (`self.memory = y`, `torch.func.functional_call`, `module.eval()`) is bound to the
  forward's value.
- A list, dict, set, deque or other object in an attribute gets the contents that it had before the forward.
- Buffers, and other tensors without gradients in attributes, get their values from before the forward.
- Parameters are not copied, nor are buffers over 256 KiB that forwards were seen not to write. If one of them was
  changed in place it is *lost*, and a replay that reads it is refused.

After the replay everything has its present value again, so that a forward's addition to a counter, to statistics or to
a list is made once.

Cost: one pass over the names of the modules per forward and per replay, about 50 ns per name. A `ModuleTree` holds the
names and lives with the module. A call that finds nothing changed shares the snapshot of the call before, copies
included, so that modules which change nothing leave no object behind.
"""

from __future__ import annotations

import copy
import functools
import itertools
import operator
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowtide import _compat
from lowtide._compat.modules import companion_of, set_companion
from lowtide.graph.arrays import ALWAYS_COPIED_BYTES
from lowtide.replay.arguments import LastCall
from lowtide.replay.object_state import ABSENT, Containers, code_facts, nothing, reachable

_LOST = -1  # a version that no tensor has
_COUNTER = "num_batches_tracked"
# Written by kernels that do not raise the version. Where there is a counter, its version shows such a write.
_STATISTICS = frozenset({"running_mean", "running_var", _COUNTER})

# Attributes that `nn.Module` sets itself, and `forward`, which engines patch.
_INTERNAL_NAMES = frozenset(vars(nn.Module())) - {"training"} | {"forward"}

Names = dict[str, Any]  # the dict behind a module's parameters, buffers, children or attributes


class Slot(NamedTuple):
    """A name that code may read a value from."""

    names: Names
    key: str
    owner: nn.Module

    @property
    def habit(self) -> tuple[int, str, bool]:
        """The key by which writes are recorded: a forward may write in training only."""
        return id(self.names), self.key, self.owner.training

    def describe(self, tensor: Tensor) -> str:
        kind = "attribute" if self.names is vars(self.owner) else "buffer"
        kind = "parameter" if isinstance(tensor, nn.Parameter) else kind
        return f"{kind} {self.key!r} of {type(self.owner).__name__}"


class ModuleTree:
    """The modules from a root on, the names that they bind, and which tensors their forwards write.

    Every call reads what the names are bound to, in a few calls of C functions over the dicts behind parameters,
    buffers, children and attributes. Attributes that `nn.Module` sets itself are not read. Of torch's own modules
    without children, only parameters, buffers and, if their code uses it, the training flag are read: their other
    attributes are constant.

    A tree is attached to its root (`set_companion`). They refer to each other, and Python's garbage collector frees
    both together. A dictionary of trees, even with weak keys, would keep all modules alive.
    """

    def __init__(self, root: nn.Module, known: ModuleTree | None = None) -> None:
        self.root = weakref.ref(root)
        self.slots: list[Slot] = []
        self._dicts: list[Names] = []
        modules = _all_modules(root)
        for module in modules:
            parameters, buffers = _compat.module_tensors(module)
            if not isinstance(parameters, dict):  # a ScriptModule, whose names cannot be bound
                continue
            if _is_plain_layer(module):
                dicts: list[Names] = [names for names in (parameters, buffers) if names]
                if code_facts(type(module)).reads_training:
                    self.slots.append(Slot(vars(module), "training", module))
            else:
                dicts = [parameters, buffers, _compat.child_modules(module), vars(module)]
            self._dicts += dicts
            self.slots += [Slot(names, key, module) for names in dicts for key in names if key not in _TORCHS_OWN]
        self._slot_names, self._slot_keys = [slot.names for slot in self.slots], [slot.key for slot in self.slots]
        self._keys, self._sizes = self._read_keys(), list(map(len, self._dicts))
        values = self.read()
        self._children = _ids_of_modules(values)
        self._known_modules = set(map(id, modules))
        code = [code_facts(type(module)) for module in modules]
        self.hides_writes = any(each.hides_writes for each in code)
        self.outside = list({id(state): state for each in code for state in each.states}.values())
        self.devices = {value.device for value in values if isinstance(value, Tensor)}
        self.last: ModuleSnapshot | None = None  # of the last call
        self.last_call = LastCall()  # of the root, as a region
        # Whether a forward was seen to write a tensor, by `Slot.habit`.
        self.writes: dict[tuple[int, str, bool], bool] = {} if known is None else known.writes

    def __deepcopy__(self, memo: Any) -> None:
        """Return None: a copy of the module has other dicts and needs a tree of its own."""

    def __reduce__(self) -> Any:
        return type(None), ()  # not pickled with the module

    def read(self) -> list[Any]:
        """Return the values that all names are bound to now."""
        return list(map(dict.get, self._slot_names, self._slot_keys, repeat(ABSENT)))

    def are_bound_to(self, values: list[Any]) -> bool:
        """Return whether the names are bound to these values and no names were added."""
        try:
            now = map(operator.getitem, self._slot_names, self._slot_keys)
            return all(map(operator.is_, now, values)) and list(map(len, self._dicts)) == self._sizes
        except KeyError:  # a name is gone
            return False

    def _read_keys(self) -> list[str]:
        return list(chain.from_iterable(self._dicts))

    def _new_slots(self) -> list[Slot]:
        """List the names that were added since the tree was made."""
        known = {(id(slot.names), slot.key) for slot in self.slots}
        owners = {id(slot.names): slot.owner for slot in self.slots}
        return [
            Slot(names, key, owners.get(id(names), self.slots[0].owner))
            for names in self._dicts
            for key in names
            if (id(names), key) not in known and key not in _INTERNAL_NAMES
        ]

    def snapshot(self) -> ModuleSnapshot | None:
        """Return a snapshot of the present state, that of the last call if nothing changed; None if names changed."""
        last = self.last
        if last is not None and self.are_bound_to(last.parts.values):
            if last.holds_same_contents():
                return last.as_of_now()
            if last.parts.are_current():
                return ModuleSnapshot.of(last.parts)
        values = self.read()
        if self._read_keys() != self._keys or _ids_of_modules(values) != self._children:
            return None
        parts = StateParts(self, values)
        return ModuleSnapshot.of(parts) if parts.modules <= self._known_modules else None

    def is_copied(self, slot: Slot, tensor: Tensor) -> bool:
        """Return whether a snapshot copies this tensor, as a replay may need its value from before the forward."""
        if isinstance(tensor, nn.Parameter):  # may be large: copied only if a forward writes it or may write it
            is_written = self.is_written(slot)
            is_candidate = is_written is None and not tensor.requires_grad and tensor.nbytes <= ALWAYS_COPIED_BYTES
            return (is_written or is_candidate) and _compat.is_copyable(tensor)
        if not is_copyable_state(tensor):
            return False
        return tensor.nbytes <= ALWAYS_COPIED_BYTES or self.is_written(slot) is not False

    def is_written(self, slot: Slot) -> bool | None:
        """Return whether forwards write the tensor of this name; None before the first forward."""
        if slot.key in _STATISTICS:
            return slot.owner.training
        if slot.key == "weight" and getattr(slot.owner, "max_norm", None) is not None:
            return True  # an embedding that scales its rows before it reads them
        return self.writes.get(slot.habit)

    def may_hide_writes(self, slot: Slot | None, tensor: Tensor) -> bool:
        """Return whether a forward may write a tensor without a new version: norms do, and first forwards may."""
        if isinstance(tensor, nn.Parameter):
            return False
        if slot is None:
            return self.hides_writes
        if slot.key in _STATISTICS and slot.names.get(_COUNTER) is not None:
            return slot.owner.training
        return self.hides_writes or self.is_written(slot) is not False

    def bind(self, values: list[Any]) -> Callable[[], None]:
        """Bind all names to `values`; call the result to bind them to their present values again."""
        if self.are_bound_to(values):
            return functools.partial(self._bind_if_changed, values)
        self.last = None  # it would keep values alive that nothing else holds
        new_slots = self._new_slots()
        present, new_values = self.read(), [slot.names.pop(slot.key) for slot in new_slots]
        self._bind_each(values)

        def undo() -> None:
            self._bind_each(present)
            for slot, value in zip(new_slots, new_values, strict=True):
                slot.names[slot.key] = value

        return undo

    def _bind_if_changed(self, values: list[Any]) -> None:
        if not self.are_bound_to(values):
            self._bind_each(values)

    def _bind_each(self, values: list[Any]) -> None:
        for slot in self._new_slots():
            del slot.names[slot.key]
        for slot, value in zip(self.slots, values, strict=True):
            live = slot.names.get(slot.key, ABSENT)
            if live is value or slot.key in _INTERNAL_NAMES:
                continue
            if any(isinstance(each, Tensor) and _compat.is_sharded(each) for each in (live, value)):
                continue  # FSDP2 swaps sharded and whole parameters itself in every forward
            if value is ABSENT:
                slot.names.pop(slot.key, None)
            else:
                slot.names[slot.key] = value


_TORCHS_OWN = _INTERNAL_NAMES - {"forward"}  # an added or removed `forward` must not hide that another name has gone


def _is_plain_layer(module: nn.Module) -> bool:
    """Return whether a module is one of torch's own, without children and hooks: its forward binds no names."""
    is_torchs = type(module).__module__.startswith("torch.nn.")
    return is_torchs and not _compat.child_modules(module) and not _compat.has_forward_hooks(module)


def _ids_of_modules(values: list[Any]) -> set[int]:
    return {id(value) for value in values if isinstance(value, nn.Module)}


class StateParts:
    """What a snapshot of a tree consists of: values of names, containers, tensors that are copied and that are not.

    Shared by the snapshots of calls between which none of this changed, such as those of a BatchNorm.
    """

    def __init__(self, tree: ModuleTree, values: list[Any]) -> None:
        self.tree, self.values = tree, values
        state = reachable(
            value for slot, value in zip(tree.slots, values, strict=True) if slot.key not in _INTERNAL_NAMES
        )
        self.generators, self.modules = state.generators, set(map(id, state.modules))
        containers = [*state.containers, *tree.outside]
        self.containers = Containers(containers) if containers else None
        copied: dict[int, tuple[Slot | None, Tensor]] = {}
        uncopied: dict[int, tuple[Slot | None, Tensor]] = {}  # must not change until the replay
        self.is_lazy = any(map(_compat.is_uninitialized, values))
        for slot, value in zip(tree.slots, values, strict=True):
            if isinstance(value, Tensor) and not _compat.is_uninitialized(value):
                (copied if tree.is_copied(slot, value) else uncopied).setdefault(id(value), (slot, value))
        for value in state.tensors:
            is_small = is_copyable_state(value) and value.nbytes <= ALWAYS_COPIED_BYTES
            (copied if is_small else uncopied).setdefault(id(value), (None, value))
        self._known_writes = dict(tree.writes)
        self._divide(list(copied.values()), [each for each in uncopied.values() if not each[1].is_inference()])
        others = [
            (slot, value) for slot, value in (*self.copied, *self.uncopied) if not isinstance(value, nn.Parameter)
        ]
        self.holds_others = bool(others)
        self.is_rebound = any(slot is None or not _is_plain_layer(slot.owner) for slot, _ in others)  # by a forward
        # Bound for one forward, as by `functional_call`.
        self.is_passing = any(s is not None and _compat.module_tensors(s.owner)[0] is s.names for s, _ in others)

    def _divide(self, copied: list[tuple[Slot | None, Tensor]], uncopied: list[tuple[Slot | None, Tensor]]) -> None:
        self.copied, self.copied_tensors = copied, [tensor for _, tensor in copied]
        self.uncopied, self.tracked = uncopied, [tensor for _, tensor in uncopied]
        self.may_hide_writes = [self.tree.may_hide_writes(slot, tensor) for slot, tensor in copied]
        self.is_volatile, self.always_overwritten = any(self.may_hide_writes), all(self.may_hide_writes)
        # Statistics are known to be written in training, and only there.
        self.is_learning = any(slot is not None and slot.key not in _STATISTICS for slot, _ in copied)

    def without_copies_of(self, is_dropped: list[bool]) -> StateParts:
        """Return these parts, with the copied tensors that are marked in `is_dropped` listed as not copied."""
        parts = copy.copy(self)
        kept = list(itertools.compress(self.copied, (not each for each in is_dropped)))
        parts._divide(kept, [*self.uncopied, *itertools.compress(self.copied, is_dropped)])
        return parts

    def has_same_containers(self) -> bool:
        return self.containers is None or self.containers.are_unchanged()

    def are_current(self) -> bool:
        """Return whether the same tensors are to be copied now, if the names are bound as before."""
        return self.has_same_containers() and self.tree.writes == self._known_writes


@dataclass(eq=False, slots=True)
class ModuleSnapshot:
    """The values that a tree's names are bound to, the contents of containers, and copies of small tensors."""

    parts: StateParts
    versions: list[int]
    copies: list[_compat.Values]
    copied_versions: list[int]

    @classmethod
    def of(cls, parts: StateParts) -> ModuleSnapshot:
        """Take a snapshot: copies and versions as they are now."""
        tensors = parts.copied_tensors
        copies = _compat.clone_all(tensors) if tensors else []
        return cls(parts, _versions(parts.tracked), copies, _compat.versions_of(tensors))

    @property
    def tree(self) -> ModuleTree:
        return self.parts.tree

    @property
    def is_lazy(self) -> bool:
        """Whether there are parameters or buffers that the first forward will make, as in `nn.LazyLinear`."""
        return self.parts.is_lazy

    def holds_same_contents(self) -> bool:
        """Return whether containers and copied tensors have the same contents, if the names are bound as before."""
        parts = self.parts
        return (
            not parts.is_volatile
            and len(self.copies) == len(parts.copied)  # else they were dropped, for the next call to make new ones
            and parts.has_same_containers()
            and (not parts.copied or _compat.versions_of(parts.copied_tensors) == self.copied_versions)
        )

    def binds_same_objects(self) -> bool:
        """Return whether all names are bound as before, and containers have the same contents."""
        return self.tree.are_bound_to(self.parts.values) and self.parts.has_same_containers()

    def as_of_now(self) -> ModuleSnapshot:
        """Return this with the present versions of tensors that have no copy: optimizer steps change parameters."""
        versions = _versions(self.parts.tracked)
        return self if versions == self.versions else self._with_versions(versions)

    def _with_versions(self, versions: list[int]) -> ModuleSnapshot:
        return ModuleSnapshot(self.parts, versions, self.copies, self.copied_versions)

    def forward_done(self, *, runs_all: bool) -> ModuleSnapshot:
        """Record what the forward wrote; return this with the versions that tensors must have in a replay.

        `runs_all`: the forward surely ran the whole root, so that tensors it left alone are known not to be written.
        """
        state = self
        if self.parts.is_learning:
            self._learn_writes(runs_all)
            state = self._without_unwritten_parameters()
        parts, tree = state.parts, state.parts.tree
        versions = _versions(parts.tracked)
        if versions == state.versions:
            tree.last = state._for_next_call()
            return state
        for index, (slot, _) in enumerate(parts.uncopied):
            if versions[index] != state.versions[index]:
                versions[index] = _LOST
                if slot is not None:  # the next forward has a copy
                    tree.writes[slot.habit] = True
        tree.last = None
        return state._with_versions(versions)

    def _for_next_call(self) -> ModuleSnapshot | None:
        """Return what the next call may share; nothing that keeps tensors alive."""
        parts = self.parts
        if not parts.holds_others:
            return self
        if parts.is_passing or (parts.is_rebound and not parts.tree.are_bound_to(parts.values)):
            return None
        return self if self.holds_same_contents() else ModuleSnapshot(parts, self.versions, [], [])

    def _without_unwritten_parameters(self) -> ModuleSnapshot:
        """Return this without the copies of parameters that the forward might have written and did not write."""
        parts, before = self.parts, self.copied_versions
        versions = _compat.versions_of(parts.copied_tensors)
        is_dropped = [
            isinstance(tensor, nn.Parameter) and now == then
            for tensor, now, then in zip(parts.copied_tensors, versions, before, strict=True)
        ]
        if not any(is_dropped):
            return self
        is_kept = [not each for each in is_dropped]
        return ModuleSnapshot(
            parts.without_copies_of(is_dropped),
            [*self.versions, *itertools.compress(versions, is_dropped)],
            list(itertools.compress(self.copies, is_kept)),
            list(itertools.compress(before, is_kept)),
        )

    def _learn_writes(self, runs_all: bool) -> None:
        tree = self.tree
        for (slot, tensor), copied, version in zip(self.parts.copied, self.copies, self.copied_versions, strict=True):
            if slot is None or tree.is_written(slot):
                continue
            is_changed = _compat.version_of(tensor) != version
            if isinstance(tensor, nn.Parameter):
                if runs_all or is_changed:
                    tree.writes[slot.habit] = is_changed
            elif is_changed:
                # The version shows such writes, so a small tensor needs no copy in every call.
                if tensor.nbytes > ALWAYS_COPIED_BYTES:
                    tree.writes[slot.habit] = True
            elif runs_all and tree.is_written(slot) is None and _compat.has_values(tensor):
                with _compat.without_modes():
                    tree.writes[slot.habit] = not torch.equal(_compat.as_tensor(copied), tensor)

    def devices(self) -> set[torch.device]:
        return self.tree.devices

    def generators(self) -> list[torch.Generator]:
        return self.parts.generators

    def lost(self) -> list[tuple[str, Tensor]]:
        """List tensors that were changed in place since the forward and have no copy, each after its description."""
        now = _versions(self.parts.tracked)
        if now == self.versions:
            return []
        return [
            ("a tensor in an attribute" if slot is None else slot.describe(tensor), tensor)
            for (slot, tensor), before, after in zip(self.parts.uncopied, self.versions, now, strict=True)
            if before != after
        ]

    def restore(self, *, is_done: bool = True) -> Callable[[], None]:
        """Restore this state; call the result to restore the present state.

        `is_done`: the forward has ended, so that a replay writes only what the forward has written.
        """
        parts = self.parts
        undo_names = parts.tree.bind(parts.values)
        if parts.containers is None and not parts.copied:
            return undo_names
        undo_containers = nothing if parts.containers is None else parts.containers.restore()
        undo_tensors = self._overwrite(is_done)

        def undo() -> None:
            undo_tensors()
            undo_names()
            undo_containers()

        return undo

    def _overwrite(self, is_done: bool) -> Callable[[], None]:
        """Restore the values of tensors that were written since."""
        tensors, copies, versions = self.parts.copied_tensors, self.copies, self.copied_versions
        if is_done and not self.parts.always_overwritten:
            changed = self._changed()
            tensors, copies = [tensors[index] for index in changed], [copies[index] for index in changed]
            versions = [versions[index] for index in changed]
        if not tensors:
            return nothing
        return functools.partial(_compat.overwrite_all, tensors, *_compat.exchange_all(tensors, copies, versions))

    def _changed(self) -> list[int]:
        """Return the indices of copied tensors that the forward wrote, or may have written."""
        parts = self.parts
        now = _compat.versions_of(parts.copied_tensors)
        is_changed = [one != other for one, other in zip(now, self.copied_versions, strict=True)]
        counted = {
            id(slot.names)
            for (slot, _), is_new in zip(parts.copied, is_changed, strict=True)
            if is_new and slot is not None and slot.key == _COUNTER
        }
        return [
            index
            for index, (slot, _) in enumerate(parts.copied)
            if is_changed[index]
            or parts.may_hide_writes[index]
            or (slot is not None and slot.key in _STATISTICS and id(slot.names) in counted)
        ]


def _versions(tensors: list[Tensor]) -> list[int]:
    return list(map(_compat.version_of_saved, tensors))


def snapshot_of(root: nn.Module) -> ModuleSnapshot:
    """Return a snapshot of `root` and of all modules below it."""
    tree = companion_of(root)
    if tree is not None and tree.root() is not root:  # a shallow copy of a module shares its companion
        tree = None
    snapshot = None if tree is None else tree.snapshot()
    if snapshot is None:
        tree = ModuleTree(root, tree)
        set_companion(root, tree)
        snapshot = tree.snapshot()
        assert snapshot is not None
    return snapshot


def free_shared_copies(root: nn.Module) -> None:
    """Free the copies of buffers that the next call of a region would share."""
    tree = companion_of(root)
    if tree is not None:
        tree.last = None


def _all_modules(root: nn.Module) -> list[nn.Module]:
    """List `root` and all modules below it, also those in containers and objects of attributes."""
    modules = _compat.submodules(root)
    known = set(map(id, modules))
    for module in modules:  # grows
        held = (value for key, value in vars(module).items() if key not in _INTERNAL_NAMES)
        for part in reachable(held).modules:
            more = [each for each in _compat.submodules(part) if id(each) not in known]
            known.update(map(id, more))
            modules += more
    return modules


def is_copyable_state(tensor: Tensor) -> bool:
    return not tensor.requires_grad and not isinstance(tensor, nn.Parameter) and _compat.is_copyable(tensor)
