"""The forward of a region that holds outputs of ops: how it comes by them.

The first forward is watched: a dispatch mode sees every op and keeps the outputs of the planned ones. That takes the
host several microseconds an op, which is long where a GPU waits for it. But what is worth holding is nearly always
something that autograd saves, and of that torch's checkpoint is told anyway. So the watched forward also learns at
which save each held output is shown (a `Lesson`), and forwards like it keep those saves and need no mode.

A step may run otherwise than the one learned from. With another number of saves, or other forms, nothing is held and
the replay computes everything. That a held value is what the op makes shows in the replay at the latest: there too
it has to be what is saved at that place. If not, what the replay made is thrown away, it computes everything, and the
region is watched again. Rejected: to trust the plan's trace for the places, as dropout, autocast and hooks move them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lowtide.engines import _compat
from lowtide.engines.heldops import Build, Counting, Held, Op, is_random, kept, random_states
from lowtide.engines.moves import Keeping
from lowtide.engines.skippedops import Later, StandIn
from lowtide.memory.ambient import Ambient
from lowtide.memory.offload import KeptHere, KeptInStore
from lowtide.plans import Recompute
from lowtide.tracing.opfacts import facts_of

logger = logging.getLogger("lowtide")

_MOST_LESSONS = 16  # for inputs of different shapes
_MOST_MISTAKES = 3  # after which a region is always watched

Geometry = tuple[torch.Size, tuple[int, ...], int]  # shape, stride and offset
Shapes = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ShownPart:
    """A tensor of an op's output as it is shown to saved-tensor hooks, and how it was made."""

    op: Op
    number: int  # among the parts of the output
    saved: Geometry
    dtype: torch.dtype
    version: int
    made: Geometry

    def is_like(self, tensor: Tensor | None) -> bool:
        return tensor is not None and tensor.dtype is self.dtype and _geometry(tensor) == self.saved

    def of(self, tensor: Tensor) -> Tensor:
        """The output, from the tensor that was saved of it."""
        return tensor if self.saved == self.made else tensor.as_strided(*self.made)


@dataclass(frozen=True, slots=True)
class ShownOp:
    """An op whose output is held: its position, and the output's parts, but for tensors with something in them."""

    position: int
    parts: tuple[Any, ...]
    build: Build
    first: int  # of the parts that are tensors
    num_shown: int
    is_random: bool


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a watched forward has taught. `by_save` is None where not all that is held was shown."""

    stand_ins: dict[Op, StandIn]
    ops: dict[Op, ShownOp]
    by_save: dict[int, ShownPart] | None
    num_saves: int


class Lessons:
    """Those of one region, by the shapes of its inputs."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lessons: dict[Shapes, Lesson] = {}
        self._num_mistakes = 0

    def known(self, shapes: Shapes) -> Lesson | None:
        """A lesson that does for a forward without watching."""
        lesson = self._lessons.get(shapes)
        return lesson if lesson is not None and lesson.by_save is not None else None

    def remember(self, shapes: Shapes, lesson: Lesson) -> None:
        if self._num_mistakes < _MOST_MISTAKES:
            if len(self._lessons) >= _MOST_LESSONS:
                self._lessons.clear()
            self._lessons[shapes] = lesson

    def was_wrong(self, shapes: Shapes) -> None:
        logger.debug("%s runs otherwise than before: its replay computes everything", self._path or "the model")
        self._num_mistakes += 1
        self._lessons.pop(shapes, None)


class Call:
    """One call of a region: what its forward holds for the replay, and what the replay took of it."""

    def __init__(self, lessons: Lessons, shapes: Shapes) -> None:
        self._lessons, self._shapes = lessons, shapes
        self.held: dict[Op, Held] = {}
        self.later = Later()
        self.taken: dict[Op, dict[int, _compat.StorageReference]] = {}  # parts that were taken, by number
        self._lesson: Lesson | None = None
        self.is_shown = False  # whether what is held was found by its place among what is saved
        self.is_wrong = False
        self._num_held = 0

    def learned(self, lesson: Lesson) -> None:
        """A watched forward is over."""
        self._lesson, self._num_held = lesson, len(self.held)
        self._lessons.remember(self._shapes, lesson)

    def shown(self, lesson: Lesson, num_saves: int) -> None:
        """A forward that was not watched is over."""
        self._lesson, self._num_held, self.is_shown = lesson, len(self.held), True
        if num_saves != lesson.num_saves or len(self.held) != len(lesson.ops):
            self._was_wrong()

    def begin_replay(self) -> dict[Op, StandIn]:
        """What stands for outputs in this replay: nothing where ops that read it are to be computed."""
        self.later.clear()
        self.taken.clear()
        self.is_wrong = False
        if self._lesson is None or len(self.held) != self._num_held:
            return {}
        return self._lesson.stand_ins if all(each.is_intact for each in self.held.values()) else {}

    def took(self, op: Op, parts: Sequence[Any]) -> None:
        """A replay has taken what is held of an op."""
        self.taken[op] = {
            number: _compat.StorageReference(part) for number, part in enumerate(parts) if isinstance(part, Tensor)
        }

    def wrote(self, tensors: Sequence[Tensor]) -> None:
        """A replay writes to tensors. If its forward did so to one that it held, that is not what the op made."""
        storages = {storage for tensor in tensors for storage in _compat.storages_of(tensor)}
        self.is_wrong |= any(each.id in storages for parts in self.taken.values() for each in parts.values())

    def saved_again(self, tensors: Sequence[Tensor | None]) -> bool:
        """A replay is over. Whether all that it took was what its ops make."""
        self.later.compute_all()
        self.later.clear()
        if not self.is_shown or not self.taken:
            return True
        assert self._lesson is not None and self._lesson.by_save is not None
        for at, part in self._lesson.by_save.items():
            if part.op in self.taken and not self.is_wrong:
                tensor = tensors[at] if at < len(tensors) else None
                is_it = part.is_like(tensor) and _compat.storage_id(tensor) == self.taken[part.op][part.number].id  # type: ignore[arg-type]
                self.is_wrong = not is_it
        if self.is_wrong:
            self._was_wrong()
            return False
        return True

    def _was_wrong(self) -> None:
        self.held.clear()
        self._lesson = None  # replays skip nothing then
        self._lessons.was_wrong(self._shapes)


class Watched(Counting):
    """Sees every op of a forward: keeps the outputs of planned ones, and learns."""

    def __init__(self, call: Call, region: Recompute, elsewhere: dict[int, Keeping]) -> None:
        super().__init__()
        self._call, self._elsewhere = call, elsewhere
        self._positions, self._skipped = frozenset(region.keep_ops), frozenset(region.skip_ops)
        self._storages: dict[Op, list[_compat.StorageReference]] = {}
        self._learner = _Learner()
        self._is_told = False

    # What a region does with a context that wants to see what is saved.

    def begin_watch(self) -> Watched:
        self._is_told = True
        return self

    def saved(self, tensor: Tensor) -> None:
        self._learner.saved(tensor, self._num_seen)

    def saved_again(self, tensors: Sequence[Tensor | None]) -> bool:
        return self._call.saved_again(tensors)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if error is None and self._is_told:
            self._call.learned(self._learner.lesson(self._call.held))
        self._learner = _Learner()  # it refers to what is held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op, position = self._counted(func, args), self._num_seen - 1
        output = func(*args, **kwargs) if kwargs else func(*args)
        if _compat.writes(func):
            self._forget(func, args, kwargs)
        elif op is None:
            return output
        elif position in self._positions and not _compat.gives_views(func):
            self._hold(op, position, func, output, kwargs)
        elif position in self._skipped:
            stand_in = StandIn.of(func, args, kwargs, output)
            if stand_in is not None:
                self._learner.stand_ins[op] = stand_in
        return output

    def _hold(self, op: Op, position: int, func: Any, output: Any, kwargs: Any) -> None:
        parts, build = _compat.taken_apart(output)
        tensors = [part for part in parts if isinstance(part, Tensor)]
        keep = self._elsewhere.get(position)
        generators = [value for value in (kwargs or {}).values() if isinstance(value, torch.Generator)]
        random = None
        held: list[Any] = []
        with _compat.without_modes():
            if is_random(func):
                random = random_states(tensors, generators)
            for part in parts:
                is_tensor = isinstance(part, Tensor)
                held.append(kept(part, keep if part is tensors[0] else None) if is_tensor else part)
        self._call.held[op] = Held(held, build, random, keep is not None)
        self._storages[op] = [reference for tensor in tensors for reference in _compat.storage_references(tensor)]
        if not generators:
            self._learner.held(op, position, parts, build, self._num_seen if random is not None else None)

    def _forget(self, func: Any, args: Any, kwargs: Any) -> None:
        """Let go of what was written to. Not all writes show in versions: those through `.data`, or to new tensors."""
        written = facts_of(func).written_tensors(args, kwargs or {})
        storages = {storage for tensor in written for storage in _compat.storages_of(tensor)}
        for op, references in self._storages.items():
            if any(reference.id in storages for reference in references):
                self._call.held.pop(op, None)


class _Learner:
    """Finds out at which saves the outputs of held ops are shown."""

    def __init__(self) -> None:
        self.stand_ins: dict[Op, StandIn] = {}
        self._ops: dict[Op, ShownOp] = {}
        self._drawn: dict[Op, int] = {}  # how many ops had run when a random one had
        self._wanted: dict[int, tuple[ShownPart, _compat.StorageReference]] = {}  # as they were made, by storage
        self._by_save: dict[int, ShownPart] = {}
        self._num_saves = 0

    def held(self, op: Op, position: int, parts: list[Any], build: Build, drawn: int | None) -> None:
        """An output is held; `drawn`, for one of a random op, is how many ops have run."""
        tensors = [number for number, part in enumerate(parts) if isinstance(part, Tensor)]
        full = [number for number in tensors if parts[number].numel()]
        if not full or not all(_compat.is_plain(parts[number]) for number in tensors):
            return
        for number in full:
            made, geometry = parts[number], _geometry(parts[number])
            part = ShownPart(op, number, geometry, made.dtype, _compat.version_of(made), geometry)
            reference = _compat.StorageReference(made)
            self._wanted[reference.id] = part, reference
        others = tuple(None if number in full else part for number, part in enumerate(parts))
        self._ops[op] = ShownOp(position, others, build, tensors[0], len(full), drawn is not None)
        if drawn is not None:
            self._drawn[op] = drawn

    def saved(self, tensor: Tensor, num_ops: int) -> None:
        at, self._num_saves = self._num_saves, self._num_saves + 1
        if not self._wanted or not _compat.is_plain(tensor):
            return
        part, _ = self._wanted.get(_compat.storage_id(tensor), _NO_PART)
        if part is None or tensor.dtype is not part.dtype or _compat.version_of(tensor) != part.version:
            return
        # Random states are taken where the first part is shown: nothing may have drawn numbers since.
        if self._drawn.pop(part.op, num_ops) == num_ops:
            del self._wanted[_compat.storage_id(tensor)]
            self._by_save[at] = replace(part, saved=_geometry(tensor))

    def lesson(self, held: dict[Op, Held]) -> Lesson:
        num_shown = Counter(part.op for part in self._by_save.values())
        is_shown = self._ops.keys() == held.keys() and all(
            num_shown[op] == shown.num_shown for op, shown in self._ops.items()
        )
        return Lesson(self.stand_ins, self._ops, self._by_save if is_shown else None, self._num_saves)


_NO_PART: tuple[None, None] = (None, None)


class Shown:
    """Keeps what a forward like one before shows of the outputs that are to be held. Sees no op."""

    def __init__(self, call: Call, lesson: Lesson, elsewhere: dict[int, Keeping]) -> None:
        assert lesson.by_save is not None
        self._call, self._lesson, self._elsewhere = call, lesson, elsewhere
        self._by_save = lesson.by_save
        self._num_saves = 0
        self._is_other = False
        self._parts: dict[Op, dict[int, KeptHere | KeptInStore]] = {}
        self._random: dict[Op, Ambient] = {}

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._parts.clear()
        self._random.clear()
        if error is None:
            self._call.shown(self._lesson, self._num_saves)

    def begin_watch(self) -> Shown:
        return self

    def saved_again(self, tensors: Sequence[Tensor | None]) -> bool:
        return self._call.saved_again(tensors)

    def saved(self, tensor: Tensor) -> None:  # once per saved tensor: nothing here may cost a microsecond
        part = self._by_save.get(self._num_saves)
        self._num_saves += 1
        if part is not None and not self._is_other:
            self._keep(part, tensor)

    def _keep(self, part: ShownPart, tensor: Tensor) -> None:
        if not part.is_like(tensor) or _compat.version_of(tensor) != part.version:
            self._is_other = True
            self._parts.clear()
            self._call.held.clear()
            return
        shown = self._lesson.ops[part.op]
        parts = self._parts.setdefault(part.op, {})
        if shown.is_random and not parts:
            self._random[part.op] = random_states([tensor], ())
        keep = self._elsewhere.get(shown.position) if part.number == shown.first else None
        parts[part.number] = kept(part.of(tensor), keep)
        if len(parts) == shown.num_shown:
            whole = [parts.get(number, other) for number, other in enumerate(shown.parts)]
            is_elsewhere = shown.position in self._elsewhere
            self._call.held[part.op] = Held(whole, shown.build, self._random.get(part.op), is_elsewhere)


def _geometry(tensor: Tensor) -> Geometry:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset())


def shapes_of_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shapes:
    """What tells one batch of a region from another of other size. Forms of what is held are compared anyway."""
    values = (*args, *kwargs.values()) if kwargs else args
    return tuple((value.shape, value.dtype) for value in values if isinstance(value, Tensor))
