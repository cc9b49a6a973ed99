"""What a recorder writes down, before it is a graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.memory.units import stands_for_storage
from lowtide.tracing import _compat


class Layout(NamedTuple):
    """How a tensor lies in memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    bytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.nbytes)

    def is_contiguous(self, *order: int) -> bool:
        """Whether it is contiguous, or would be with its dimensions in another order."""
        dims = order or range(len(self.shape))
        return _is_dense([self.shape[dim] for dim in dims], [self.strides[dim] for dim in dims])


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


@dataclass(slots=True)
class RawOp:
    name: str
    packet: Any
    call: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    mutates: tuple[int, ...]
    flags: tuple[str, ...]
    flops: int
    moved_bytes: int  # read and written, views as large as they are
    dtype: torch.dtype | None
    forward_op: int
    workspace_bytes: int = 0
    has_dynamic_shape: bool = False
    seconds: float = 0.0
    host_s: float = 0.0
    layouts: tuple[Layout, ...] = ()  # of the tensors among its arguments


@dataclass(slots=True)
class RawValue:
    bytes: int
    kind: str
    name: str
    born: int
    uses: _compat.StorageUses | None
    dropped: int = -1
    num_aliases: int = 0
    item_bytes: int | None = None  # unknown until it is saved; 0: not for codecs
    row_length: int = 1
    is_settled: bool = False  # the same in every replay: integers, and what is made of nothing but those

    def note_saved(self, tensor: Tensor, *, is_plain: bool) -> None:
        """What a codec would find: numbers of one floating type, saved as their whole storage and not in parts."""
        is_dense = is_plain and tensor.layout is torch.strided and tensor.is_floating_point()
        fits = is_dense and not tensor.is_neg() and stands_for_storage(tensor)
        item_bytes = tensor.element_size() if fits else 0
        if self.item_bytes is None:
            self.item_bytes, self.row_length = item_bytes, max(1, int(tensor.shape[-1])) if tensor.dim() else 1
        elif self.item_bytes != item_bytes:
            self.item_bytes = 0


def settled_flags(op: RawOp, values: Sequence[RawValue]) -> tuple[str, ...]:
    """The flags of an op that has run, and whether what it makes is settled.

    Integers that ops make of floating-point numbers are choices: a replay could choose otherwise, so an engine keeps
    them, and they are settled too. An op that has settled inputs alone chooses nothing: it is not flagged "index".
    """
    is_settled = _NEVER_SETTLED.isdisjoint(op.flags) and all(values[value].is_settled for value in op.inputs)
    for value in op.outputs:
        values[value].is_settled = is_settled or ("index" in op.flags and values[value].is_settled)
    for value in op.mutates:
        values[value].is_settled &= is_settled
    dropped = {"view"} if op.outputs else set[str]()
    dropped |= {"index"} if is_settled else set()
    return tuple(flag for flag in op.flags if flag not in dropped)


_NEVER_SETTLED = frozenset({"random", "custom", "collective"})


@dataclass(slots=True)
class RawSave:
    value: int
    call: int
    made: int
    read: int = -1
    released: int = -1
    used: int = -1
    in_backward: bool = False
    number: int = -1


@dataclass(slots=True)
class RawCall:
    path: str
    kind: str
    parent: int
    first: int
    end: int = -1
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    num_saves: int = 0
    changes: str = ""  # the name of an argument that is changed while the forward runs


@dataclass
class Clock:
    """How op times are taken: `mark` before and after each op, `seconds` from the marks when the step is over."""

    mark: Callable[[], Any] = time.perf_counter
    seconds: Callable[[list[tuple[Any, Any]]], list[float]] = field(
        default=lambda marks: [after - before for before, after in marks]
    )
