"""What a lazy tensor of logits records: `RowLayout`, the rows that it has, and `RowChain`, what was done to them.

Loss code reshapes logits before it reduces them: `logits[..., :-1, :].contiguous().view(-1, vocab)`. The lazy tensor of
`lazy_logits` must follow that without computing anything. A layout therefore holds two tensors on the meta device,
which have strides and no memory: `rows`, as if every element held the number of its row, and `cols`, the number of its
column. A view of the logits is applied to both, and their strides tell what became of rows and columns. A view that
mixes rows with columns, or that repeats rows, has no layout; the lazy tensor is then computed in full. After
`contiguous()` or a `reshape` that copies, the elements are numbered anew, and the numbering so far becomes one of the
`maps` from new row numbers to old ones.

A chain is a small expression. Its leaves are calls of output layers (`HeadCall`) and tensors that hold one row for each
row of the logits; its nodes are torch functions that treat every row alike. `rows` evaluates it for the logits of some
rows, under the autocast state in which each function was called.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lowtide import _compat
from lowtide.errors import ChangedInPlaceError
from lowtide.replay.environment import Autocast, modes_now
from lowtide.split.chunked_loss import HeadCall


class AlignedRows:
    """A matrix with one row for each row of the logits, in the order of the layout that it was used with."""

    __slots__ = ("matrix",)

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix


class RowChain:
    """A function of some rows. `order` is the order of rows that its aligned tensors have; None if it has none."""

    __slots__ = ("_args", "_autocast", "_function", "_kwargs", "_versions", "head", "heads", "order", "tensors")

    def __init__(
        self,
        function: Callable[..., Tensor] | None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        head: HeadCall | None = None,
        order: tuple[StridedMap, ...] | None = None,
    ) -> None:
        self._function, self._args, self._kwargs, self.head = function, args, kwargs or {}, head
        self._autocast: Autocast = modes_now()[2]
        given = [*args, *self._kwargs.values(), *getattr(function, "keywords", {}).values()]
        inner = [each for each in given if isinstance(each, RowChain)]
        self.tensors: list[Tensor] = [each for chain in inner for each in chain.tensors]
        self._versions: list[int] = [each for chain in inner for each in chain._versions]
        own = [each.matrix if isinstance(each, AlignedRows) else each for each in given]
        own = [each for each in own if isinstance(each, Tensor)]
        self.tensors += own
        self._versions += _compat.versions_of(own)
        heads = [head] if head is not None else [each for chain in inner for each in chain.heads]
        self.heads: list[HeadCall] = list(dict.fromkeys(heads))
        orders = [chain.order for chain in inner if chain.order is not None]
        self.order: tuple[StridedMap, ...] | None = orders[0] if orders else order

    def check_unchanged(self) -> None:
        """Raise if a tensor of the chain was changed in place since it was used: the results would be others."""
        if _compat.versions_of(self.tensors) != self._versions:
            raise ChangedInPlaceError(
                "a tensor that is combined with split logits (a mask, a temperature, labels) was changed in place "
                "after that, and before the loss or its backward computed them. Change a copy of it, or fit without "
                "split=True."
            )

    def rows(self, logits: Sequence[Tensor], start: int, end: int) -> Tensor:
        """Evaluate for rows `start` to `end`, of which `logits` has one matrix per head."""
        self.check_unchanged()
        return self._evaluated(dict(zip(self.heads, logits, strict=True)), start, end, {})

    def _evaluated(self, logits: dict[HeadCall, Tensor], start: int, end: int, known: dict[int, Tensor]) -> Tensor:
        if id(self) in known:
            return known[id(self)]
        if self.head is not None:
            return logits[self.head]

        def value(item: Any) -> Any:
            if isinstance(item, RowChain):
                return item._evaluated(logits, start, end, known)
            return item.matrix[start:end] if isinstance(item, AlignedRows) else item

        assert self._function is not None
        args, kwargs = [value(item) for item in self._args], {name: value(item) for name, item in self._kwargs.items()}
        with autocast_as(self._autocast):
            found = known[id(self)] = self._function(*args, **kwargs)
        return found

    def detached(self) -> RowChain:
        """The same chain, with heads that need no gradients."""
        return self._detached({}, {})

    def _detached(self, heads: dict[HeadCall, HeadCall], known: dict[int, RowChain]) -> RowChain:
        if id(self) in known:
            return known[id(self)]

        def swap(item: Any) -> Any:
            return item._detached(heads, known) if isinstance(item, RowChain) else item

        head = None if self.head is None else heads.setdefault(self.head, self.head.detached())
        args, kwargs = [swap(item) for item in self._args], {name: swap(item) for name, item in self._kwargs.items()}
        other = known[id(self)] = RowChain(self._function, args, kwargs, head=head, order=self.order)
        other._autocast = self._autocast
        return other


def aligned(tensor: Tensor, layout: RowLayout) -> AlignedRows | Tensor | None:
    """A tensor that is combined with logits of this layout, as an argument of a chain; None if that is not possible.

    It may be a number, have the shape of the logits, or be broadcast to it from one value per column or per row.
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        return None  # its gradient would have to be summed over the rows
    if tensor.dim() == 0:
        return tensor
    if tuple(tensor.shape) == layout.shape:
        matrix = layout.matrix_of(tensor)
        return None if matrix is None else AlignedRows(matrix)
    if layout.vocab_dim != len(layout.shape) - 1 or tensor.dim() > len(layout.shape):
        return None
    if tensor.numel() == tensor.shape[-1] == layout.vocab_size:
        return tensor.reshape(-1)
    if tensor.shape[-1] != 1:
        return None  # a value for each word and some rows: it would have to be copied for the others
    try:
        return AlignedRows(tensor.expand(*layout.row_shape, 1).reshape(-1, 1))
    except RuntimeError:  # it does not fit: the real op will raise
        return None


def autocast_as(wanted: Autocast) -> AbstractContextManager[Any]:
    """A context with this autocast state."""
    now = dict(modes_now()[2])
    if now == dict(wanted):
        return nullcontext()
    stack = ExitStack()
    for kind, dtype in wanted:
        stack.enter_context(torch.autocast(kind, dtype=dtype))
    for kind in now.keys() - dict(wanted).keys():
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def hidden_saves() -> AbstractContextManager[Any]:
    """A context whose saved tensors are not seen by hooks around it, such as those of a checkpoint."""
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


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
