"""Records, in one replay of a region, which of its saved tensors carry the op outputs that a plan retains.

A plan names ops by position, but a forward without a dispatch mode sees only what autograd saves. So `retained` runs
one full replay under `CaptureProfileMode`, which finds out at which save each of these outputs appears; the result is
a `CaptureProfile`. It leaves out outputs that a later replay could not return safely: those that are written to,
random ones if the generator is drawn from again before they are saved, and those of an op with several outputs of
which one is never saved. (Not the capture of a CUDA graph.)

`UnseenWrites` detects writes to op outputs that neither an op nor a version counter shows, as custom kernels make. It
compares checksums of the outputs in the first profile of a region.

Cost: for each combination of input shapes, one replay whose ops all go through a dispatch mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowtide import _compat
from lowtide.replay import environment
from lowtide.replay.arguments import CONSTANTS, tensors_in
from lowtide.replay.op_facts import facts_of
from lowtide.replay.recomputing import replay_depth

if TYPE_CHECKING:
    from lowtide.replay.retained import RetainedOps

_NUM_COLUMNS = 1024  # of the sums
Op = tuple[Any, int]  # the id of the op (with that of a weight that it casts), and how many times it has run


class UnseenWrites:
    """Detects writes to op outputs that neither an op nor a version counter shows, as by custom kernels.

    Compares sums of their bits when they are made, when they are saved, and at the end; in columns, so that swapped
    values show too. `recomputing.checksum` would need 8 MiB, which would show in the peak of a step.
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
        """Sum the present bits of these storages, to be compared by `ops`."""
        for storage in storages:
            if storage in self._made:
                op, reference, num_bytes, before = self._made[storage]
                if reference.is_alive():
                    self._seen.append((op, before, _sums_of(reference, num_bytes)))

    def ops(self) -> set[Op]:
        """Return the ops whose outputs have changed."""
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


Geometry = tuple[torch.Size, tuple[int, ...], int]  # shape, stride and offset
Build = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class RetainedPart:
    """One tensor of an op's output: its geometry as autograd saves it (`saved`) and as the op made it (`made`)."""

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
    """An op whose output is retained: its position, the save of each part, and the parts that are never saved."""

    position: int
    saves: dict[int, int]  # index of the save, by the number of the part
    others: tuple[Any, ...]  # all parts, None for those that are saved
    build: Build
    is_random: bool
    form: Any  # shapes and constants of the arguments; None if the saved tensors determine the output


@dataclass(frozen=True, slots=True)
class CaptureProfile:
    """Which ops a region runs and at which saves the outputs of some appear, recorded by a full replay."""

    kinds: list[Any]  # ids of the ops that ran, without casts of weights
    ops: dict[Op, RetainedOp]
    by_save: dict[int, RetainedPart]
    of_parameters: frozenset[int]  # saves of parameters: kept too, as it costs no memory and lets replays stop earlier


class OpCountingMode(_compat.DispatchMode):
    """Counts the ops of a replay, to identify them by kind and number.

    Casts of weights are counted per weight: a weight that autocast had cast before the region began is cast once more
    in the replay. Ops of inner replays are not counted; index choices, which are copied and not run, are counted by
    `index_choices.counted_by`.
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
        """Count an op that is about to run; None for bookkeeping ops and for ops of inner replays."""
        kind: Any = id(func)  # ops live as long as torch and are slow to hash
        if kind in _compat.BOOKKEEPING_IDS or replay_depth() != self._depth:
            return None
        if _compat.is_cast_of_weight(func, args):
            kind = kind, id(args[0])
        self.num_ops += 1
        self._seen[kind] = count = self._seen.get(kind, 0) + 1
        return kind, count


class CaptureProfileMode(OpCountingMode):
    """Computes everything, and records at which saves the outputs of some ops appear."""

    def __init__(self, ops: RetainedOps, parameters: list[Tensor]) -> None:
        super().__init__()
        self._ops = ops
        self._parameter_storages = storages_in(parameters)
        self._of_parameters: set[int] = set()
        self._kinds: list[Any] = []
        self._made: dict[int, tuple[RetainedPart, _compat.StorageReference]] = {}  # parts of outputs, by storage
        # With the number of parts, and of random ops before it.
        self._retained: dict[Op, tuple[RetainedOp, int, int]] = {}
        self._by_save: dict[int, RetainedPart] = {}
        self._num_draws = 0
        self._states: dict[Op, environment.Environment] = {}  # after ops that draw random numbers
        self._unseen = UnseenWrites() if ops.written_unseen is None else None

    def count(self, func: Any, args: Any) -> Op | None:
        op = super().count(func, args)
        if op is not None and type(op[0]) is not tuple:
            self._kinds.append(op[0])
        return op

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op, position = self.count(func, args), self.num_ops - 1
        output = func(*args, **kwargs) if kwargs else func(*args)
        if op is None:
            return output
        facts = facts_of(func)
        self._num_draws += facts.may_draw
        if _compat.reveals_values(func, args, output):
            self._forget_ops(
                {op for op, (retained, num_parts, _) in self._retained.items() if len(retained.saves) < num_parts}
            )
        if facts.may_write:
            self._forget(storages_in(facts.written_tensors(args, kwargs or {})))
        elif position in self._ops.positions and type(op[0]) is not tuple and not _compat.gives_views(func):
            # (Casts of weights are not retained: autocast would cache them for other regions.)
            self._add(op, position, func, args, kwargs, output)
        return output

    def _add(self, op: Op, position: int, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        parts, build = _compat.flattened(output)
        tensors = {number: part for number, part in enumerate(parts) if isinstance(part, Tensor)}
        full = {number: part for number, part in tensors.items() if part.numel()}
        if not full or not all(map(_compat.is_plain, tensors.values())):
            return
        if any(isinstance(value, torch.Generator) for value in (kwargs or {}).values()):
            return
        facts = facts_of(func)
        if len(full) != len(parts) and (facts.is_foreign or facts.has_dynamic_shape):
            return  # its other outputs may differ each time
        for number, part in full.items():
            geometry, num_bytes = _geometry_of(part), part.untyped_storage().nbytes()
            made = RetainedPart(op, number, geometry, geometry, part.dtype, _compat.version_of(part), num_bytes)
            reference = _compat.StorageReference(part)
            self._made[reference.id] = made, reference
        if self._unseen is not None:
            self._unseen.made(op, list(full.values()))
        others = tuple(None if number in full else part for number, part in enumerate(parts))
        form = form_of(args), form_of(kwargs)
        self._retained[op] = RetainedOp(position, {}, others, build, facts.may_draw, form), len(full), self._num_draws
        if facts.may_draw:
            self._states[op] = environment.capture(part.device for part in full.values())

    def _forget(self, storages: set[int]) -> None:
        """Drop outputs in storages that an op writes: they are no longer what their ops made."""
        self._forget_ops({self._made[storage][0].op for storage in storages & self._made.keys()})

    def _forget_ops(self, ops: set[Op]) -> None:
        if not ops:
            return
        self._retained = {op: retained for op, retained in self._retained.items() if op not in ops}
        self._made = {storage: made for storage, made in self._made.items() if made[0].op not in ops}
        self._by_save = {index: part for index, part in self._by_save.items() if part.op not in ops}

    def saved(self, index: int, tensor: Tensor) -> None:
        if self._unseen is not None:
            self._unseen.look(storages_in(tensor))
        if not _compat.is_plain(tensor):
            return
        storage = _compat.storage_id(tensor)
        if storage in self._parameter_storages:
            self._of_parameters.add(index)
        part, _ = self._made.get(storage, (None, None))
        if part is None or tensor.dtype is not part.dtype or _compat.version_of(tensor) != part.version:
            return
        op, _, num_draws = self._retained[part.op]
        if tensor.is_conj() or tensor.is_neg():
            return
        # The forward captures random states when the output is saved: they must be those right after the op.
        if op.is_random and (num_draws != self._num_draws or not self._states[part.op].has_current_random_states()):
            return
        op.saves.setdefault(part.number, index)
        self._by_save[index] = replace(part, saved=_geometry_of(tensor))

    def profile(self) -> CaptureProfile:
        if self._unseen is not None:
            self._ops.written_unseen = self._unseen.ops()
        unseen = self._ops.written_unseen or ()
        whole = {
            op: retained
            for op, (retained, num_parts, _) in self._retained.items()
            if len(retained.saves) == num_parts and op not in unseen
        }
        by_save = {index: part for index, part in self._by_save.items() if part.op in whole}
        turned = {part.op for part in by_save.values() if part.saved != part.made}
        ops = {
            op: retained
            if op in turned or len(retained.saves) != len(retained.others)
            else replace(retained, form=None)
            for op, retained in whole.items()
        }
        return CaptureProfile(self._kinds, ops, by_save, frozenset(self._of_parameters))


def _geometry_of(tensor: Tensor) -> Geometry:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset())


def as_geometry(tensor: Tensor, present: Geometry, wanted: Geometry) -> Tensor:
    """Return the view `wanted` of the memory of a tensor that had the geometry `present` in the forward."""
    if present == wanted:
        return tensor
    shape, stride, offset = wanted
    return tensor.as_strided(shape, stride, int(tensor.storage_offset()) + offset - present[2])


def storages_in(values: Any) -> set[int]:
    return {storage for tensor in tensors_in(values) for storage in _compat.storages_of(tensor)}


def form_of(value: Any) -> Any:
    """Return what of an argument determines the shape of an output: everything but values of tensors."""
    kind = type(value)
    if kind in _compat.PLAIN_TYPES and value.layout is torch.strided:
        return value.shape, value.stride(), value.dtype, value.device
    if kind in (tuple, list):
        return tuple(map(form_of, value))
    if kind is dict:
        return tuple((name, form_of(each)) for name, each in value.items())
    return value if kind in CONSTANTS else object()  # equal to nothing: the op has to run
