"""What a lazy tensor of logits records: `RowLayout`, the rows that it has, and `RowChain`, what was done to them.

Loss code reshapes logits before it reduces them: `logits[..., :-1, :].contiguous().view(-1, vocab)`. The lazy tensor of
`lazy_logits` must follow that without computing anything. A layout therefore holds two tensors on the meta device,
which have strides and no memory: `rows`, as if every element held the number of its row, and `cols`, the number of its
column. A view of the logits is applied to both, and their strides tell what became of rows and columns. A view that
mixes rows with columns, or that repeats rows, has no layout; the lazy tensor is then computed in full. After
`contiguous()` or a `reshape` that copies, the elements are numbered anew, and the new numbers are those of rows of the
layout before.

A chain is a small expression. Its leaves are calls of output layers (`HeadCall`) and tensors that hold one row for each
row of the logits; its nodes are torch functions that treat every row alike. `rows` evaluates it for the logits of some
rows, under the autocast state in which each function was called.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

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
    """A function of some rows. `aligned_with` is the layout of its aligned tensors; None if it has none."""

    __slots__ = ("_args", "_autocast", "_function", "_kwargs", "_versions", "aligned_with", "head", "heads", "tensors")

    def __init__(
        self,
        function: Callable[..., Tensor] | None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        head: HeadCall | None = None,
        aligned_with: RowLayout | None = None,
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
        layouts = [chain.aligned_with for chain in inner if chain.aligned_with is not None]
        self.aligned_with: RowLayout | None = layouts[0] if layouts else aligned_with

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
        other = known[id(self)] = RowChain(self._function, args, kwargs, head=head, aligned_with=self.aligned_with)
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


class RowLayout:
    """The rows and columns of a lazy tensor of some shape. Immutable.

    `before` is the layout whose rows `rows` are the numbers of; None: they are those of the head's output.
    """

    __slots__ = ("_before", "_cols", "_rows", "vocab_dim")

    def __init__(self, rows: Tensor, cols: Tensor, before: RowLayout | None, vocab_dim: int) -> None:
        self._rows, self._cols, self._before, self.vocab_dim = rows, cols, before, vocab_dim

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

    def has_rows_of(self, other: RowLayout) -> bool:
        """Whether both have the same rows, in the same order. A tensor that is aligned with one is with the other."""
        if self is other:
            return True
        with _compat.without_modes():
            one, two = (torch.as_tensor(each.positions(torch.device("cpu"))) for each in (self, other))
            return self.num_rows == other.num_rows and torch.equal(one, two)

    def changed(self, view: Callable[[Tensor], Tensor]) -> tuple[RowLayout, slice] | None:
        """The layout after a view, and the columns that it selects; None if there is no layout for it."""
        with _compat.without_modes():
            try:
                rows, cols = view(self._rows), view(self._cols)
            except RuntimeError:  # torch would have to copy, or the view does not exist: the real op will raise
                return None
        return _separated(rows, cols, self._before)

    def compacted(self) -> RowLayout:
        """The layout after `contiguous()`: the same shape, with rows numbered anew."""
        fresh = RowLayout.of(self.shape, self.vocab_dim)
        return RowLayout(fresh._rows, fresh._cols, self, self.vocab_dim)

    def reshaped(self, view: Callable[[Tensor], Tensor]) -> tuple[RowLayout, slice] | None:
        """As `changed`, for an op that copies where no view exists."""
        return self.changed(view) or self.compacted().changed(view)

    def positions(self, device: torch.device) -> int | Tensor:
        """Where the rows of this layout are among those of the head's output: the first if they follow each other."""
        before = 0 if self._before is None else self._before.positions(device)
        with _compat.without_modes():
            rows = self._rows.select(self.vocab_dim, 0)
        first = int(rows.storage_offset())
        if isinstance(before, int):
            if rows.is_contiguous():
                return before + first
            before = torch.arange(before, before + rows.untyped_storage().nbytes(), device=device)
        return before.as_strided(rows.shape, rows.stride(), first).flatten().contiguous()

    def matrix_of(self, tensor: Tensor) -> Tensor | None:
        """A tensor of this shape as a matrix of rows, in order; None if that takes a copy."""
        try:
            return tensor.movedim(self.vocab_dim, -1).view(-1, tensor.shape[self.vocab_dim])
        except RuntimeError:
            return None

    def tensor_of(self, matrix: Tensor) -> Tensor:
        """The inverse of `matrix_of`: a matrix with one row per row of this layout, in the layout's shape."""
        return matrix.view(*self.row_shape, matrix.shape[-1]).movedim(-1, self.vocab_dim)


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
    return RowLayout(rows, cols, None, vocab_dim)


def _separated(rows: Tensor, cols: Tensor, before: RowLayout | None) -> tuple[RowLayout, slice] | None:
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
    return RowLayout(rows, fresh._cols, before, vocab_dim), slice(start, start + (size - 1) * step + 1, step)
