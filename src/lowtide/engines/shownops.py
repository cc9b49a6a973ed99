"""The forward of a region that holds outputs of ops: how it comes by them.

The first forward is watched: a dispatch mode sees every op and keeps the outputs of the planned ones. That takes the
host several microseconds an op, which is long where a GPU waits for it. But what is worth holding is nearly always
something that autograd saves, and of that torch's checkpoint is told anyway. So the watched forward also learns at
which save each held output is shown (a `Lesson`), and forwards like it keep those saves and need no mode.

A step may run otherwise than the one learned from. With another number of saves, or other forms, nothing is held and
the replay computes everything. That a held value is what the op makes shows in the replay at the latest: there too
it has to be what is saved at that place. If not, what the replay made is thrown away, it computes everything, and the
region is watched again. Rejected: to trust the plan's trace for the places, as dropout, autocast and hooks move them.

Kernels launched by hand may write to an output where no op and no version tells of it; the replay would let them do so
to what it took, once more. The very first forward of a region looks for that (`unseenwrites`), and such outputs are
never held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowtide.engines import _compat
from lowtide.engines.heldops import (
    Build,
    Counting,
    Held,
    Op,
    is_foreign,
    is_random,
    kept,
    random_states,
    writes,
    writes_statistics,
)
from lowtide.engines.lessons import Lesson, Lessons, Shapes, ShownOp, ShownPart, geometry_of
from lowtide.engines.moves import Keeping
from lowtide.engines.skippedops import Later, StandIn, form_of, storages_in
from lowtide.engines.unseenwrites import UnseenWrites
from lowtide.memory.ambient import Ambient
from lowtide.memory.offload import KeptHere, KeptInStore
from lowtide.plans import Recompute
from lowtide.tracing.opfacts import facts_of


class Call:
    """One call of a region: what its forward holds for the replay, and what the replay took of it."""

    def __init__(self, lessons: Lessons, shapes: Shapes, known: Lesson | None) -> None:
        self.lessons, self._shapes = lessons, shapes
        self._known = known  # what is held is found by its places then
        self.num_saved_again: Callable[[], int] = int
        self.held: dict[Op, Held] = {}
        self.later = _NONE_PUT_OFF
        self.taken: dict[Op, dict[int, _compat.StorageReference]] = {}  # parts that were taken, by number
        self.drawn: list[int] = []  # at which saves the random states were taken that replays go on from
        self._lesson: Lesson | None = None
        self._is_wrong = self._is_astray = False
        self._num_held = 0
        self._kinds: Iterator[Any] = iter(())

    @property
    def is_shown(self) -> bool:
        """Whether what is held was found by its place. Then it may be anything: an input of the region, say."""
        return self._known is not None

    def learned(self, lesson: Lesson) -> None:
        """A watched forward is over."""
        self._lesson, self._num_held = lesson, len(self.held)
        self.lessons.remember(self._shapes, lesson)

    def shown(self, lesson: Lesson, num_saves: int) -> None:
        """A forward that was not watched is over."""
        self._lesson, self._num_held = lesson, len(self.held)
        if num_saves != lesson.num_saves or len(self.held) != len(lesson.ops):
            self._was_wrong()

    def begin_replay(self) -> dict[Op, StandIn]:
        """What stands for outputs in this replay: nothing where ops that read it are to be computed."""
        self.later = Later()
        self.taken.clear()
        self.drawn.clear()
        lesson = self._known or self._lesson
        self._is_wrong, self._is_astray = False, lesson is None
        self._kinds = iter(() if lesson is None else lesson.kinds)
        if self._lesson is None or len(self.held) != self._num_held:
            return {}
        return self._lesson.stand_ins if all(each.is_intact for each in self.held.values()) else {}

    def goes_on(self, op: Op) -> bool:
        """A replay has come to an op. Whether it runs the same ones as the forward, so that their numbers tell them."""
        if not self._is_astray and type(op[0]) is not tuple:
            self._is_astray = next(self._kinds, None) != op[0]
        return not self._is_astray

    def fits(self, op: Op, args: Any, kwargs: Any) -> bool:
        """Whether an op makes something of the form that was learned, where what was saved does not tell."""
        of = None if self._known is None else self._known.ops[op].of
        return of is None or of == (form_of(args), form_of(kwargs))

    def took(self, op: Op, parts: Sequence[Any]) -> None:
        """A replay has taken what is held of an op."""
        self.taken[op] = {
            number: _compat.StorageReference(part)
            for number, part in enumerate(parts)
            if isinstance(part, Tensor) and _compat.is_plain(part)
        }
        if self._known is not None and self._known.ops[op].is_random:
            self.drawn.append(min(at for at, part in self._known.by_save.items() if part.op == op))

    def draws(self) -> None:
        """A replay draws numbers. If its forward did so before a state was taken, it goes on from a wrong one."""
        if self.num_saved_again() <= max(self.drawn):
            self._give_up()

    def writes(self, tensors: Sequence[Tensor]) -> None:
        """A replay writes to tensors. If its forward did so to one that it held, that is not what the op made.

        Nor may it: what was saved in its place may be a weight.
        """
        storages = storages_in(tensors)
        if any(each.id in storages for parts in self.taken.values() for each in parts.values()):
            self._give_up()

    def _give_up(self) -> None:
        self._is_wrong = True
        raise _GivenUp

    def failed(self, error: BaseException) -> bool:
        """A replay has failed. Whether that may be because of what it took."""
        self._is_wrong = isinstance(error, Exception) and not isinstance(error, torch.OutOfMemoryError)
        self._is_wrong &= bool(self.taken)
        self.later.clear()
        return self._is_wrong

    def saved_again(self, tensors: Sequence[Tensor | None]) -> bool:
        """A replay is over. Whether all that it took was what its ops make."""
        lesson = self._known or self._lesson
        if not self._is_wrong and lesson is not None:
            taken = ((at, part) for at, part in lesson.by_save.items() if part.op in self.taken)
            self._is_wrong = not all(self._is_right(part, tensors[at : at + 1]) for at, part in taken)
        self.taken.clear()
        for tensor in tensors:
            if tensor is not None and _compat.is_marked(tensor):
                _compat.set_version(tensor, 0)
        if self._is_wrong:
            self.later.clear()
            self._was_wrong()
            return False
        self.later.compute_all()
        self.later.clear()
        if self._is_astray and self._lesson is not None:
            self._was_wrong()
        return True

    def _is_right(self, part: ShownPart, saved: Sequence[Tensor | None]) -> bool:
        (tensor,) = saved or (None,)
        if tensor is None:  # nobody asks for it; what a watched forward holds is what its op made
            return not self.is_shown
        if not part.is_like(tensor) or _compat.storage_id(tensor) != self.taken[part.op][part.number].id:
            return False
        return not self.is_shown or _compat.is_marked(tensor)  # not so if it was there before, like what was held

    def _was_wrong(self) -> None:
        self.held.clear()
        self._lesson = None  # replays skip nothing then
        self.lessons.was_wrong(self._shapes)


_NONE_PUT_OFF = Later()  # before there is a replay


class _GivenUp(Exception):
    """Ends a replay that is run once more."""


class _Told:
    """What a region does with a context that wants to see what is saved."""

    _call: Call

    def begin(self, num_saved_again: Callable[[], int]) -> None:
        self._call.num_saved_again = num_saved_again

    def failed(self, error: BaseException) -> bool:
        return self._call.failed(error)

    def saved_again(self, tensors: Sequence[Tensor | None]) -> bool:
        return self._call.saved_again(tensors)


class Watched(_Told, Counting):
    """Sees every op of a forward: keeps the outputs of planned ones, and learns."""

    def __init__(self, call: Call, region: Recompute, elsewhere: dict[int, Keeping]) -> None:
        super().__init__()
        self._call, self._elsewhere = call, elsewhere
        self._positions, self._skipped = frozenset(region.keep_ops), frozenset[int]()
        self._storages: dict[Op, list[_compat.StorageReference]] = {}
        self._statistics: dict[int, Op] = {}  # storages that held norms wrote to
        self._learner = _Learner()
        self._checks = UnseenWrites() if call.lessons.written is None else None
        self._num_drawn = 0
        self._is_told = False

    def begin_watch(self) -> Watched:
        self._is_told = True
        return self

    def saved(self, tensor: Tensor) -> None:
        self._learner.saved(tensor, self._num_drawn)
        if self._checks is not None:
            self._checks.look(_compat.storages_of(tensor))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if error is None and self._checks is not None:
            self._call.lessons.written = self._checks.ops()
            for op in self._call.lessons.written:
                self._call.held.pop(op, None)
        self._checks = None
        if error is None and self._is_told:
            self._call.learned(self._learner.lesson(self._call.held))
        self._learner = _Learner()  # it refers to what is held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op, position = self._counted(func, args), self._num_seen - 1
        if self._statistics and not writes_statistics(func):
            self._forget_norms((args, kwargs))
        output = func(*args, **kwargs) if kwargs else func(*args)
        if op is not None:
            self._num_drawn += is_random(func)
            if type(op[0]) is not tuple:
                self._learner.kinds.append(op[0])
        if writes(func):
            self._forget(func, args, kwargs)
        if op is None or _compat.writes(func):
            return output
        if position in self._positions and not _compat.gives_views(func):
            if op not in (self._call.lessons.written or ()):
                self._hold(op, position, func, args, output, kwargs)
        elif position in self._skipped:
            stand_in = StandIn.of(func, args, kwargs, output)
            if stand_in is not None:
                self._learner.stand_ins[op] = stand_in
        return output

    def _hold(self, op: Op, position: int, func: Any, args: Any, output: Any, kwargs: Any) -> None:
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
        self._call.held[op] = Held(tuple(held), build, random, keep is not None)
        self._storages[op] = [reference for tensor in tensors for reference in _compat.storage_references(tensor)]
        if self._checks is not None:
            self._checks.made(op, tensors)
        if writes_statistics(func):
            written = facts_of(func).written_tensors(args, kwargs or {})
            self._statistics.update(dict.fromkeys(storages_in(written), op))
        # What else an op gives than tensors with something in them is as it was learned: not so for ops of one's own.
        is_full = all(isinstance(part, Tensor) and part.numel() for part in parts)
        if not generators and (is_full or not is_foreign(func)):
            drawn = self._num_drawn if random is not None else None
            self._learner.held(op, position, parts, build, drawn, (form_of(args), form_of(kwargs)))

    def _forget(self, func: Any, args: Any, kwargs: Any) -> None:
        """Let go of what was written to. Not all writes show in versions: those through `.data`, or to new tensors."""
        storages = storages_in(facts_of(func).written_tensors(args, kwargs or {}))
        for op, references in self._storages.items():
            if any(reference.id in storages for reference in references):
                self._call.held.pop(op, None)

    def _forget_norms(self, values: Any) -> None:
        """Let go of the outputs of norms whose statistics are read, which a replay would not have written."""
        for storage in storages_in(values) & self._statistics.keys():
            self._call.held.pop(self._statistics[storage], None)


class _Learner:
    """Finds out at which saves the outputs of held ops are shown."""

    def __init__(self) -> None:
        self.kinds: list[Any] = []
        self.stand_ins: dict[Op, StandIn] = {}
        self._ops: dict[Op, ShownOp] = {}
        self._drawn: dict[Op, int] = {}  # how many random ops had run when one had
        self._wanted: dict[int, tuple[ShownPart, _compat.StorageReference]] = {}  # as they were made, by storage
        self._by_save: dict[int, ShownPart] = {}
        self._num_saves = 0

    def held(self, op: Op, position: int, parts: list[Any], build: Build, drawn: int | None, of: Any) -> None:
        """An output is held; `drawn`, for one of a random op, is how many of them have run."""
        tensors = [number for number, part in enumerate(parts) if isinstance(part, Tensor)]
        full = [number for number in tensors if parts[number].numel()]
        if not full or not all(_compat.is_plain(parts[number]) for number in tensors):
            return
        for number in full:
            made, geometry = parts[number], geometry_of(parts[number])
            num_bytes = made.untyped_storage().nbytes()
            part = ShownPart(op, number, geometry, made.dtype, _compat.version_of(made), geometry, num_bytes)
            reference = _compat.StorageReference(made)
            self._wanted[reference.id] = part, reference
        others = tuple(None if number in full else part for number, part in enumerate(parts))
        self._ops[op] = ShownOp(position, others, build, tensors[0], len(full), drawn is not None, of)
        if drawn is not None:
            self._drawn[op] = drawn

    def saved(self, tensor: Tensor, num_drawn: int) -> None:
        at, self._num_saves = self._num_saves, self._num_saves + 1
        if not self._wanted or not _compat.is_plain(tensor):
            return
        part, _ = self._wanted.get(_compat.storage_id(tensor), _NO_PART)
        if part is None or tensor.dtype is not part.dtype or _compat.version_of(tensor) != part.version:
            return
        if tensor.is_conj() or tensor.is_neg():
            return
        # Random states are taken where the first part is shown: nothing may have drawn numbers since.
        if self._drawn.get(part.op, num_drawn) == num_drawn:
            self._drawn.pop(part.op, None)
            del self._wanted[_compat.storage_id(tensor)]
            self._by_save[at] = replace(part, saved=geometry_of(tensor))

    def lesson(self, held: dict[Op, Held]) -> Lesson:
        num_shown = Counter(part.op for part in self._by_save.values())
        is_shown = self._ops.keys() == held.keys() and all(
            num_shown[op] == shown.num_shown for op, shown in self._ops.items()
        )
        turned = {part.op for part in self._by_save.values() if part.saved != part.made}
        ops = {op: shown if op in turned else replace(shown, of=None) for op, shown in self._ops.items()}
        return Lesson(self.kinds, self.stand_ins, ops, self._by_save, is_shown, self._num_saves)


_NO_PART: tuple[None, None] = (None, None)


class Shown(_Told):
    """Keeps what a forward like one before shows of the outputs that are to be held. Sees no op."""

    def __init__(self, call: Call, lesson: Lesson, elsewhere: dict[int, Keeping]) -> None:
        self._call, self._lesson, self._elsewhere = call, lesson, elsewhere
        self._by_save = lesson.by_save
        self._num_saves = 0
        self._is_other = False
        self._parts: dict[Op, dict[int, KeptHere | KeptInStore]] = {}
        self._random: dict[Op, Ambient] = {}
        self._storages: dict[int, _compat.StorageReference | None] = {}  # kept ones, so that none is for two outputs

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._parts.clear()
        self._random.clear()
        self._storages.clear()
        if error is None:
            self._call.shown(self._lesson, self._num_saves)

    def begin_watch(self) -> Shown:
        return self

    def saved(self, tensor: Tensor) -> None:  # once per saved tensor: nothing here may take long
        part = self._by_save.get(self._num_saves)
        self._num_saves += 1
        if part is not None and not self._is_other:
            self._keep(part, tensor)

    def _keep(self, part: ShownPart, tensor: Tensor) -> None:
        is_it = part.is_like(tensor) and tensor.untyped_storage().nbytes() == part.storage_bytes
        storage = _compat.storage_id(tensor) if is_it else -1
        if not is_it or _compat.version_of(tensor) != part.version or storage in self._storages:
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
        self._storages[storage] = None if keep is None else _compat.StorageReference(tensor)  # that may not live on
        if len(parts) == shown.num_shown:
            whole = tuple(parts.get(number, other) for number, other in enumerate(shown.parts))
            is_elsewhere = shown.position in self._elsewhere
            self._call.held[part.op] = Held(whole, shown.build, self._random.get(part.op), is_elsewhere)
