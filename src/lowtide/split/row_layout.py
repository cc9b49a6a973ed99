"""`RowLayout`: which row of the head's output each element of a lazy tensor comes from.

Loss code reshapes logits before it reduces them: `logits[..., :-1, :].contiguous().view(-1, vocab)`. The lazy tensor of
`lazy_logits` must follow that without computing anything. A layout therefore holds two tensors on the meta device,
which have strides and no memory: `rows`, as if every element held the number of its row, and `cols`, the number of its
column. A view of the logits is applied to both, and their strides tell what became of rows and columns. A view that
mixes rows with columns, or that repeats rows, has no layout; the lazy tensor is then computed in full.

After `contiguous()` or a `reshape` that copies, the elements are numbered anew, and the numbering so far becomes one of
the `maps` from new row numbers to old ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide import _compat


class StridedMap(NamedTuple):
    """Maps position `i` of a grid of `sizes`, in row-major order, to a number: `offset` plus index times `strides`."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int) -> StridedMap:
        """The map with as few dimensions as possible, so that equal maps are equal tuples."""
        merged: list[tuple[int, int]] = []
        for size, stride in zip(sizes, strides, strict=True):
            if size == 1:
                continue
            if merged and merged[-1][1] == stride * size:
                merged[-1] = merged[-1][0] * size, stride
            else:
                merged.append((size, stride))
        merged = merged or [(1, 1)]
        return cls(tuple(size for size, _ in merged), tuple(stride for _, stride in merged), offset)

    @property
    def is_range(self) -> bool:
        """Whether the numbers follow each other."""
        return self.strides == (1,)

    @property
    def end(self) -> int:
        """One more than the largest number."""
        return self.offset + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True)) + 1


class RowLayout:
    """The rows and columns of a lazy tensor of some shape. Immutable."""

    __slots__ = ("_cols", "_maps", "_rows", "vocab_dim")

    def __init__(self, rows: Tensor, cols: Tensor, maps: tuple[StridedMap, ...], vocab_dim: int) -> None:
        self._rows, self._cols, self._maps, self.vocab_dim = rows, cols, maps, vocab_dim

    @classmethod
    def of(cls, shape: tuple[int, ...], vocab_dim: int = -1) -> RowLayout:
        """The layout of a contiguous tensor whose rows lie along `vocab_dim`."""
        return _contiguous(tuple(shape), vocab_dim % len(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._rows.shape)

    @property
    def vocab_size(self) -> int:
        return self._rows.shape[self.vocab_dim]

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape without the vocabulary dimension."""
        return tuple(size for dim, size in enumerate(self._rows.shape) if dim != self.vocab_dim)

    @property
    def num_rows(self) -> int:
        return math.prod(self.row_shape)

    @property
    def order(self) -> tuple[StridedMap, ...]:
        """Identifies which rows there are, in which order. Tensors that are aligned with one layout fit all such."""
        return _composed(self._maps, self._map())

    def changed(self, view: Callable[[Tensor], Tensor]) -> tuple[RowLayout, slice] | None:
        """The layout after a view, and the columns that it selects; None if there is no layout for it."""
        with _compat.without_modes():
            try:
                rows, cols = view(self._rows), view(self._cols)
            except RuntimeError:  # torch would have to copy, or the view does not exist: the real op will raise
                return None
        return _separated(rows, cols, self._maps)

    def compacted(self) -> RowLayout:
        """The layout after `contiguous()`: the same shape, with rows numbered anew."""
        fresh = RowLayout.of(self.shape, self.vocab_dim)
        return RowLayout(fresh._rows, fresh._cols, self.order, self.vocab_dim)

    def reshaped(self, view: Callable[[Tensor], Tensor]) -> tuple[RowLayout, slice] | None:
        """As `changed`, for an op that copies where no view exists."""
        return self.changed(view) or self.compacted().changed(view)

    def positions(self, device: torch.device) -> int | Tensor:
        """Where the rows of this layout are among those of the head's output: the first if they follow each other."""
        maps = self.order
        if all(each.is_range for each in maps):
            return sum(each.offset for each in maps)
        numbers = torch.arange(maps[0].end, device=device)
        for each in maps:
            numbers = numbers.as_strided(*each).reshape(-1)
        return numbers

    def covers(self, num_rows: int) -> bool:
        """Whether all rows of the head's output are in this layout."""
        return self.num_rows == num_rows

    def matrix_of(self, tensor: Tensor) -> Tensor | None:
        """A tensor of this shape as a matrix of rows, in order; None if that takes a copy."""
        try:
            return tensor.movedim(self.vocab_dim, -1).view(-1, tensor.shape[self.vocab_dim])
        except RuntimeError:
            return None

    def tensor_of(self, matrix: Tensor) -> Tensor:
        """The inverse of `matrix_of`: a matrix with one row per row of this layout, in the layout's shape."""
        return matrix.view(*self.row_shape, matrix.shape[-1]).movedim(-1, self.vocab_dim)

    def _map(self) -> StridedMap:
        dims = [dim for dim in range(self._rows.dim()) if dim != self.vocab_dim]
        return StridedMap.of(
            tuple(self._rows.shape[dim] for dim in dims),
            tuple(self._rows.stride(dim) for dim in dims),
            int(self._rows.storage_offset()),
        )


def _composed(maps: tuple[StridedMap, ...], last: StridedMap) -> tuple[StridedMap, ...]:
    """The maps with `last` after them, which is merged with the one before if that is a range, or left out if it is the
    identity."""
    if not maps:
        return (last,)
    before = maps[-1]
    if before.is_range:
        return (*maps[:-1], last._replace(offset=last.offset + before.offset))
    return maps if last == ((math.prod(before.sizes),), (1,), 0) else (*maps, last)


@functools.lru_cache(maxsize=64)
def _contiguous(shape: tuple[int, ...], vocab_dim: int) -> RowLayout:
    strides, below = [0] * len(shape), 1
    for dim in reversed(range(len(shape))):
        if dim != vocab_dim:
            strides[dim] = below
            below *= shape[dim]
    with _compat.without_modes():
        rows = torch.empty(below, dtype=torch.int8, device="meta").as_strided(shape, strides)
        cols = torch.empty(shape[vocab_dim], dtype=torch.int8, device="meta")
        cols = cols.as_strided(shape, [int(dim == vocab_dim) for dim in range(len(shape))])
    return RowLayout(rows, cols, (), vocab_dim)


def _separated(rows: Tensor, cols: Tensor, maps: tuple[StridedMap, ...]) -> tuple[RowLayout, slice] | None:
    """The layout of a view and its columns, if one dimension has the columns and the others have distinct rows."""
    with_cols = [dim for dim in range(cols.dim()) if cols.stride(dim) and cols.shape[dim] > 1]
    if len(with_cols) != 1 or min(cols.shape) == 0:
        return None
    (vocab_dim,) = with_cols
    if rows.stride(vocab_dim) != 0:
        return None
    others = [dim for dim in range(rows.dim()) if dim != vocab_dim and rows.shape[dim] > 1]
    if any(rows.stride(dim) == 0 for dim in others):
        return None
    step, size, start = cols.stride(vocab_dim), cols.shape[vocab_dim], int(cols.storage_offset())
    fresh = RowLayout.of(tuple(cols.shape), vocab_dim)
    return RowLayout(rows, fresh._cols, maps, vocab_dim), slice(start, start + (size - 1) * step + 1, step)
