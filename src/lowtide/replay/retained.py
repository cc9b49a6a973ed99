"""Op outputs that a region keeps, so that its replay takes them instead of computing them again.

Which outputs is given as positions of ops in the region. The forward sees no ops, only what autograd saves; so the
first replay (for inputs of some shapes) computes everything under a dispatch mode and learns at which save each of
those outputs appears: a `CaptureProfile`. From then on the forward keeps those saves, and the replay runs under a mode
that returns them when it comes to the ops that made them. Autograd builds its nodes as always.

A step may run otherwise than the one that was learned from, so every replay is checked:

- Ops are counted; once another op runs than in the profile, nothing is taken any more.
- The kept tensor must have the form that was learned, and after it was taken the replay must save that very tensor at
  the same place. Taken tensors carry a version number that autograd never reaches, so that they and their views are
  known again.
- Between the two no op may tell Python a value (`item`, `nonzero`, a copy to the host): a branch that a wrong value
  decided could save just that value, and the check would find nothing. (What Python reads from host memory without an
  op, as `tolist` does, goes unseen.)
- Random states go on from where the op left them: no number may be drawn between the op and its save, and no generator
  seeded.
- No op may write to a taken tensor.

If one of these fails, or if the replay saves other tensors than the forward did, what it collected is thrown away, it
runs once more computing everything, and the profile is learned anew. So it is where the forward already saves a tensor
of another form than was learned. After a few such failures the region keeps nothing. A kept save itself is always
right, as it is the tensor that autograd saved, unless it was written to since; then it is computed again.

Kernels launched by hand may write to an output where no op and no version tells of it, and would do so again to a
taken one. The learning replay looks for that by checksums; such outputs are never taken.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lowtide.memory.offload import KeptHere, KeptInStore
from lowtide.replay import _compat
from lowtide.replay.environment import RandomStates
from lowtide.replay.region import Collector, replay_depth
from lowtide.tracing.opfacts import OWN_NAMESPACES, facts_of
from lowtide.tracing.records import tensors_in

logger = logging.getLogger("lowtide")

_MAX_PROFILES = 16  # for inputs of different shapes
_MAX_MISTAKES = 3  # after which a region keeps no outputs
_NUM_COLUMNS = 1024  # of the sums by which unseen writes are found

Op = tuple[Any, int]  # the op, with the weight that it casts if it does; and how often it has run before
Geometry = tuple[torch.Size, tuple[int, ...], int]  # shape, stride and offset
Keep = Callable[[Tensor], KeptHere | KeptInStore]
Build = Callable[[list[Any]], Any]
_Fact = TypeVar("_Fact")


@dataclass(frozen=True, slots=True)
class RetainedPart:
    """A tensor of an op's output: as autograd saves it, and as the op made it."""

    op: Op
    number: int  # among the parts of the output
    saved: Geometry
    made: Geometry
    dtype: torch.dtype
    version: int
    storage_bytes: int

    def is_like(self, tensor: Tensor) -> bool:
        return (
            _compat.is_plain(tensor)
            and tensor.dtype is self.dtype
            and _geometry_of(tensor) == self.saved
            and not (tensor.is_conj() or tensor.is_neg())
        )


@dataclass(frozen=True, slots=True)
class RetainedOp:
    """An op whose output is kept: its position, where each part is saved, and the parts that are never saved."""

    position: int
    saves: dict[int, int]  # the save of a part, by the part's number
    others: tuple[Any, ...]  # all parts, None for those that are saved
    build: Build
    is_random: bool
    form: Any  # of the arguments, where the forms of the saved tensors do not tell those of all parts


@dataclass(frozen=True, slots=True)
class CaptureProfile:
    """What a replay that computed everything has taught."""

    kinds: list[Any]  # of the ops that ran, but for casts of weights
    ops: dict[Op, RetainedOp]
    by_save: dict[int, RetainedPart]
    of_parameters: frozenset[int]  # saves of parameters: kept as well, as they cost nothing and a replay stops earlier


class RetainedOps:
    """The ops of one region whose outputs are kept, and what is known of them by the shapes of its inputs.

    `positions` are ops counted from the region's first.
    """

    hidden_from_replay = True

    def __init__(self, name: str, positions: Iterable[int]) -> None:
        self.positions = frozenset(positions)
        self._name = name
        self._profiles: dict[Any, CaptureProfile] = {}
        self._num_mistakes = 0
        self.written_unseen: set[Op] | None = None  # None until the first replay has looked for such outputs

    def call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], keeps: dict[int, Keep]
    ) -> RetainedCall | None:
        """What keeps the outputs of one call; None if none are kept. `keeps` says how, by op, for those that move."""
        if self._num_mistakes >= _MAX_MISTAKES:
            return None
        values = (*args, *kwargs.values()) if kwargs else args
        shapes = tuple(
            [(value.shape, value.dtype, value.requires_grad) for value in values if isinstance(value, Tensor)]
        )
        return RetainedCall(self, shapes, self._profiles.get(shapes), keeps, module)

    def learn(self, shapes: Any, profile: CaptureProfile) -> None:
        if len(self._profiles) >= _MAX_PROFILES:
            self._profiles.clear()
        self._profiles[shapes] = profile

    def forget(self, shapes: Any) -> None:
        """A replay found the profile to be wrong."""
        logger.debug("%s runs otherwise than before: its replay computes everything", self._name or "the model")
        self._num_mistakes += 1
        self._profiles.pop(shapes, None)


class RetainedCall:
    """The kept outputs of one call of a region."""

    __slots__ = (
        "_asked",
        "_is_done",
        "_keeps",
        "_mode",
        "_module",
        "_of_parameters",
        "_ops",
        "_profile",
        "_random",
        "_replayed",
        "_shapes",
        "_values",
        "_whole",
    )

    def __init__(
        self,
        ops: RetainedOps,
        shapes: Any,
        profile: CaptureProfile | None,
        keeps: dict[int, Keep],
        module: nn.Module,
    ) -> None:
        self._ops, self._shapes, self._profile, self._keeps, self._module = ops, shapes, profile, keeps, module
        self._of_parameters = frozenset() if profile is None else profile.of_parameters
        self._values: dict[int, KeptHere | KeptInStore] = {}  # by save
        self._whole: dict[int, RetainedPart] = {}  # saves that are kept as their op made them
        self._random: dict[Op, RandomStates] = {}  # after ops that draw random numbers
        self._asked: set[int] = set()  # saves that autograd has asked for before there was a replay
        self._is_done = False
        self._replayed = False
        self._mode: _Learning | _Taking | None = None

    # The forward.

    def saved(self, index: int, tensor: Tensor) -> None:
        """Autograd saves a tensor."""
        if self._profile is None:
            return
        if index in self._profile.of_parameters:
            self._values[index] = KeptHere(tensor)
            return
        part = self._profile.by_save.get(index)
        if part is None:
            return
        is_it = part.is_like(tensor) and tensor.untyped_storage().nbytes() == part.storage_bytes
        if not is_it or _compat.version_of(tensor) != part.version:
            self._forget()  # the forward runs otherwise; what is kept so far are saves all the same
            return
        op = self._profile.ops[part.op]
        if op.is_random and part.op not in self._random:
            self._random[part.op] = RandomStates([tensor.device])
        keep = self._keeps.get(op.position) if part.number == min(op.saves) else None
        if keep is None:
            self._values[index] = KeptHere(tensor)
        else:  # a view alone would leave the rest behind (the queries of a product that makes keys and values too)
            self._values[index] = keep(_as(tensor, part.saved, part.made))
            self._whole[index] = part

    def forward_done(self, num_saves: int) -> None:
        self._is_done = True
        if self._profile is not None and any(index >= num_saves for index in self._profile.by_save):
            self._forget()

    def _forget(self) -> None:
        self._ops.forget(self._shapes)
        self._profile = None

    # The backward.

    def take(self, index: int) -> Tensor | None:
        """A kept save; None for one that is not kept."""
        kept = self._values.get(index)
        if kept is None:
            return None
        if not kept.is_intact and index not in self._of_parameters:
            del self._values[index]  # it is computed again; a parameter is not
            self._asked.discard(index)
            return None
        if self._replayed:
            del self._values[index]
        else:
            self._asked.add(index)  # a replay needs it once more
        part = self._whole.get(index)
        return kept.restore() if part is None else _as(kept.restore(), part.made, part.saved)

    def begin_replay(self, needed: list[bool]) -> bool:
        """Tell which saves the replay need not collect, as they are kept; and whether it has to run to its end."""
        is_whole = all(needed)
        for index in list(self._values):
            needed[index] = False
        if self._profile is not None and not self._values.keys() >= self._profile.by_save.keys():
            # A replay before this one has used them up, or they were written to.
            self._profile, self._replayed = None, True
        return self._is_learning and not (is_whole and not self._values)

    @property
    def _is_learning(self) -> bool:
        return self._profile is None and not self._replayed

    def replay_mode(self, collector: Collector) -> Any:
        """What sees the ops of a replay: to learn if nothing is known, else to take outputs; None for neither."""
        if self._profile is not None:
            self._mode = _Taking(self, self._profile, collector)
        elif self._is_learning:
            self._mode = _Learning(self._ops, self._module)
        return self._mode

    def saved_again(self, index: int, tensor: Tensor) -> None:
        """The replay saves a tensor."""
        if self._mode is not None:
            self._mode.saved(index, tensor)

    def value(self, index: int) -> KeptHere | KeptInStore:
        return self._values[index]

    def fetch(self, index: int, part: RetainedPart) -> Tensor:
        """A kept output as its op made it, for the replay. From a store, it is here until autograd asks for it."""
        kept = self._values[index]
        tensor = kept.restore()
        if isinstance(kept, KeptInStore):
            self._values[index] = KeptHere(tensor)
        return tensor if index in self._whole else _as(tensor, part.saved, part.made)

    def random_states(self, op: Op) -> RandomStates | None:
        return self._random.get(op)

    def replay_done(self, *, saves_agree: bool) -> bool:
        """Whether all that the replay took was what its ops make. `saves_agree`: with what the forward saved."""
        mode, self._mode = self._mode, None
        if isinstance(mode, _Learning):
            if saves_agree:
                self._ops.learn(self._shapes, mode.profile())
        elif mode is not None and not (mode.was_right() and (saves_agree or not mode.taken)):
            return False
        self._end()
        return True

    def may_have_caused(self, error: Exception) -> bool:
        """Whether a replay may have failed because of what it took."""
        if isinstance(error, _GivenUp):
            return True
        taking = isinstance(self._mode, _Taking) and bool(self._mode.taken)
        return taking and not isinstance(error, torch.OutOfMemoryError)

    def give_up(self) -> None:
        """Take nothing in a replay any more."""
        self._forget()
        self._mode = None
        self._end()

    def _end(self) -> None:
        self._replayed = True
        for index in self._asked:
            del self._values[index]
        self._asked.clear()
        self._random.clear()


class _GivenUp(Exception):
    """Ends a replay that is run once more."""


class _Counting(_compat.DispatchMode):
    """Counts the ops of a replay, so that they are known again.

    Casts of weights are counted by weight: a weight that autocast had cast before the forward came to the region is
    cast once more in the replay. Ops of replays that begin inside this one are none of the region's.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[Any, int] = {}
        self.num_ops = 0
        self._depth = 0

    def __enter__(self) -> Any:
        self._depth = replay_depth()
        return super().__enter__()

    def count(self, func: Any, args: Any) -> Op | None:
        """The op that is about to run; None for one that computes nothing, or is none of the region's."""
        kind: Any = id(func)  # an op lives as long as torch does, and takes long to hash
        if kind in _BOOKKEEPING or replay_depth() != self._depth:
            return None
        if _compat.is_cast_of_weight(func, args):
            kind = kind, id(args[0])
        self.num_ops += 1
        self._seen[kind] = count = self._seen.get(kind, 0) + 1
        return kind, count


class _Learning(_Counting):
    """Computes everything, and finds out at which saves the outputs of some ops appear."""

    def __init__(self, ops: RetainedOps, module: nn.Module) -> None:
        super().__init__()
        self._ops = ops
        self._parameters = storages_in(list(module.parameters()))
        self._of_parameters: set[int] = set()
        self._kinds: list[Any] = []
        self._made: dict[int, tuple[RetainedPart, _compat.StorageReference]] = {}  # parts as they are made, by storage
        self._found: dict[Op, tuple[RetainedOp, int, int]] = {}  # with numbers of parts to be saved and of draws
        self._by_save: dict[int, RetainedPart] = {}
        self._num_draws = 0
        self._states: dict[Op, RandomStates] = {}  # after ops that draw random numbers
        self._unseen = UnseenWrites() if ops.written_unseen is None else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op, position = self.count(func, args), self.num_ops - 1
        output = func(*args, **kwargs) if kwargs else func(*args)
        if op is None:
            return output
        if type(op[0]) is not tuple:
            self._kinds.append(op[0])
        self._num_draws += _is_random(func)
        if _compat.tells_values(func, args, output):
            self._forget_ops({op for op, (found, num_parts, _) in self._found.items() if len(found.saves) < num_parts})
        if _may_write(func):
            self._forget(storages_in(facts_of(func).written_tensors(args, kwargs or {})))
        elif position in self._ops.positions and type(op[0]) is not tuple and not _compat.gives_views(func):
            # (A cast of a weight is not taken: autocast would remember it for other regions.)
            self._add(op, position, func, args, kwargs, output)
        return output

    def _add(self, op: Op, position: int, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        parts, build = _compat.taken_apart(output)
        tensors = {number: part for number, part in enumerate(parts) if isinstance(part, Tensor)}
        full = {number: part for number, part in tensors.items() if part.numel()}
        if not full or not all(map(_compat.is_plain, tensors.values())):
            return
        if any(isinstance(value, torch.Generator) for value in (kwargs or {}).values()):
            return
        if len(full) != len(parts) and (_is_foreign(func) or _compat.has_dynamic_shape(func)):
            return  # what else it gives may be another thing each time
        for number, part in full.items():
            geometry, num_bytes = _geometry_of(part), part.untyped_storage().nbytes()
            made = RetainedPart(op, number, geometry, geometry, part.dtype, _compat.version_of(part), num_bytes)
            reference = _compat.StorageReference(part)
            self._made[reference.id] = made, reference
        if self._unseen is not None:
            self._unseen.made(op, list(full.values()))
        others = tuple(None if number in full else part for number, part in enumerate(parts))
        form = _form_of(args), _form_of(kwargs)
        self._found[op] = RetainedOp(position, {}, others, build, _is_random(func), form), len(full), self._num_draws
        if _is_random(func):
            self._states[op] = RandomStates([part.device for part in full.values()])

    def _forget(self, storages: set[int]) -> None:
        """An output that is written to later is not what its op made."""
        self._forget_ops({self._made[storage][0].op for storage in storages & self._made.keys()})

    def _forget_ops(self, ops: set[Op]) -> None:
        if not ops:
            return
        self._found = {op: found for op, found in self._found.items() if op not in ops}
        self._made = {storage: made for storage, made in self._made.items() if made[0].op not in ops}
        self._by_save = {index: part for index, part in self._by_save.items() if part.op not in ops}

    def saved(self, index: int, tensor: Tensor) -> None:
        if self._unseen is not None:
            self._unseen.look(storages_in(tensor))
        if not _compat.is_plain(tensor):
            return
        storage = _compat.storage_id(tensor)
        if storage in self._parameters:
            self._of_parameters.add(index)
        part, _ = self._made.get(storage, (None, None))
        if part is None or tensor.dtype is not part.dtype or _compat.version_of(tensor) != part.version:
            return
        op, _, num_draws = self._found[part.op]
        if tensor.is_conj() or tensor.is_neg():
            return
        # Random states are captured where the output is saved: they must still be what the op has left.
        if op.is_random and (num_draws != self._num_draws or not self._states[part.op].are_current()):
            return
        op.saves.setdefault(part.number, index)
        self._by_save[index] = replace(part, saved=_geometry_of(tensor))

    def profile(self) -> CaptureProfile:
        if self._unseen is not None:
            self._ops.written_unseen = self._unseen.ops()
        unseen = self._ops.written_unseen or ()
        whole = {
            op: found
            for op, (found, num_parts, _) in self._found.items()
            if len(found.saves) == num_parts and op not in unseen
        }
        by_save = {index: part for index, part in self._by_save.items() if part.op in whole}
        turned = {part.op for part in by_save.values() if part.saved != part.made}
        ops = {
            op: found if op in turned or len(found.saves) != len(found.others) else replace(found, form=None)
            for op, found in whole.items()
        }
        return CaptureProfile(self._kinds, ops, by_save, frozenset(self._of_parameters))


class _Taking(_Counting):
    """Returns kept outputs in place of the ops that made them, each once."""

    def __init__(self, call: RetainedCall, profile: CaptureProfile, collector: Collector) -> None:
        super().__init__()
        self._call, self._profile, self._collector = call, profile, collector
        self._kinds = iter(profile.kinds)
        self._is_astray = self._is_wrong = False
        self._unconfirmed: set[int] = set()  # saves of taken outputs that the replay has not come to yet
        self.taken: dict[Op, dict[int, _compat.StorageReference]] = {}  # parts by number
        self._last_state = -1  # the last save at which a random state was captured that the replay went on from

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op = self.count(func, args)
        if op is not None:
            if not self._is_astray and type(op[0]) is not tuple:
                self._is_astray = next(self._kinds, None) != op[0]
            found = None if self._is_astray else self._profile.ops.get(op)
            if found is not None and self._may_take(op, found, args, kwargs):
                return self._take(op, found)
            if _is_random(func) and len(self._collector.metadata) <= self._last_state:
                self._give_up()  # the forward drew numbers before the state was captured
        if self.taken and _may_write(func):
            storages = storages_in(facts_of(func).written_tensors(args, kwargs or {}))
            if any(each.id in storages for parts in self.taken.values() for each in parts.values()):
                self._give_up()  # the tensor kept in the forward has been written to, or is another
        output = func(*args, **kwargs) if kwargs else func(*args)
        if self._unconfirmed and _compat.tells_values(func, args, output):
            self._give_up()
        if self.taken:
            _compat.pass_mark_on(func, args, output)
        return output

    def _may_take(self, op: Op, found: RetainedOp, args: Any, kwargs: Any) -> bool:
        # What is saved after the replay has stopped would not be checked.
        stop = self._collector.stop
        if op in self.taken or (stop >= 0 and max(found.saves.values()) > stop):
            return False
        if min(found.saves.values()) < len(self._collector.metadata):
            self._give_up()  # what is kept was saved before there was this op
        if found.form is not None and found.form != (_form_of(args), _form_of(kwargs)):
            return False
        return all(self._call.value(index).is_intact for index in found.saves.values())

    def _take(self, op: Op, found: RetainedOp) -> Any:
        parts = list(found.others)
        with _compat.without_modes():
            random = self._call.random_states(op)
            if random is not None:
                if not random.set():
                    self._give_up()  # the forward has seeded a generator before the state was captured
                self._last_state = max(self._last_state, min(found.saves.values()))
            for number, index in found.saves.items():
                parts[number] = _compat.marked(self._call.fetch(index, self._profile.by_save[index]))
        self.taken[op] = {number: _compat.StorageReference(parts[number]) for number in found.saves}
        self._unconfirmed.update(found.saves.values())
        return found.build(parts)

    def _give_up(self) -> None:
        self._is_wrong = True
        raise _GivenUp

    def saved(self, index: int, tensor: Tensor) -> None:
        part = self._profile.by_save.get(index)
        if part is not None and part.op in self.taken and not self._is_wrong:
            # The mark tells it from a tensor that was there before, such as an input of the region.
            is_it = part.is_like(tensor) and _compat.storage_id(tensor) == self.taken[part.op][part.number].id
            self._is_wrong = not (is_it and _compat.is_marked(tensor))
            self._unconfirmed.discard(index)

    def was_right(self) -> bool:
        for index, tensor in enumerate(self._collector.tensors):
            if tensor is not None and _compat.is_marked(tensor):
                _compat.set_version(tensor, 0)
                self._collector.versions[index] = 0
        return not (self._is_wrong or self._unconfirmed)


class UnseenWrites:
    """Finds writes to op outputs that no op and no version counter tells of, as by kernels launched by hand.

    By sums of their bits as they are made, when they are saved, and at the end; in columns, so that values that change
    places show too. Not by `memory.checksums`, which needs memory of its own and would show in the peak of a step.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[Op, _compat.StorageReference, int, Tensor]] = {}  # by storage: its bytes, its sums
        self._seen: list[tuple[Op, Tensor, Tensor]] = []

    def made(self, op: Op, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if _compat.is_own(tensor) and tensor.numel() and not tensor.is_meta:
                reference, num_bytes = _compat.StorageReference(tensor), tensor.untyped_storage().nbytes()
                self._made[reference.id] = op, reference, num_bytes, _sums_of(reference, num_bytes)

    def look(self, storages: Iterable[int]) -> None:
        """Compare what is in these storages now."""
        for storage in storages:
            if storage in self._made:
                op, reference, num_bytes, before = self._made[storage]
                if reference.is_alive():
                    self._seen.append((op, before, _sums_of(reference, num_bytes)))

    def ops(self) -> set[Op]:
        """The ops whose outputs have changed."""
        self.look(list(self._made))
        return {op for op, before, now in self._seen if not torch.equal(before, now)}


def _sums_of(storage: _compat.StorageReference, num_bytes: int) -> Tensor:
    with _compat.bare_kernels():
        dtype = torch.int32 if num_bytes % torch.int32.itemsize == 0 else torch.uint8
        num_items = num_bytes // dtype.itemsize
        raw = storage.as_tensor(dtype, torch.Size([num_items]), (1,))
        num_columns = min(_NUM_COLUMNS, num_items)
        end = num_items - num_items % num_columns
        return raw[:end].view(-1, num_columns).sum(dim=0, dtype=torch.int64) + raw[end:].sum(dtype=torch.int64)


def _asked_once(find: Callable[[Any], _Fact]) -> Callable[[Any], _Fact]:
    """A fact about ops, found once for each and kept by its id: ops live as long as torch does, and hash slowly."""
    known: dict[int, _Fact] = {}

    @functools.wraps(find)
    def ask(func: Any) -> _Fact:
        fact = known.get(id(func))
        if fact is None:
            known[id(func)] = fact = find(func)
        return fact

    return ask


def _is_foreign(func: Any) -> bool:
    """Whether an op is not one of torch's own, and may do more than it says."""
    return getattr(func, "namespace", None) not in OWN_NAMESPACES


@_asked_once
def _is_random(func: Any) -> bool:
    """Whether an op draws random numbers, or may do so."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) or _is_foreign(func)


@_asked_once
def _may_write(func: Any) -> bool:
    """Whether an op may write to arguments: also a norm to its statistics, which its schema does not say."""
    if not _compat.is_op_with_schema(func):
        return False
    return _compat.writes(func) or bool(facts_of(func).written_in_training)


_BOOKKEEPING = frozenset(map(id, _compat.BOOKKEEPING_OPS))


def _geometry_of(tensor: Tensor) -> Geometry:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset())


def _as(tensor: Tensor, present: Geometry, wanted: Geometry) -> Tensor:
    """Another view of the memory of a tensor that had the geometry `present` in the forward."""
    if present == wanted:
        return tensor
    shape, stride, offset = wanted
    return tensor.as_strided(shape, stride, int(tensor.storage_offset()) + offset - present[2])


def storages_in(values: Any) -> set[int]:
    return {storage for tensor in tensors_in(values) for storage in _compat.storages_of(tensor)}


def _form_of(value: Any) -> Any:
    """What of an argument decides on the form of an output: all but the numbers in tensors."""
    kind = type(value)
    if kind in _compat.PLAIN_TYPES and value.layout is torch.strided:
        return value.shape, value.stride(), value.dtype, value.device
    if kind in (tuple, list):
        return tuple(map(_form_of, value))
    if kind is dict:
        return tuple((name, _form_of(each)) for name, each in value.items())
    return value if kind in _CONSTANTS else object()  # equal to no other: the op has to run


_CONSTANTS = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
)
