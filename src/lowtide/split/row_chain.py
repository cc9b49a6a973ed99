"""`RowChain`: what loss code does to logits, recorded so that it can run on any few rows of them.

A chain is a small expression. Its leaves are calls of output layers (`HeadCall`) and tensors that hold one row for each
row of the logits; its nodes are torch functions that treat every row alike. `rows` evaluates it for the logits of some
rows, under the autocast state in which each function was called.
"""

from __future__ import annotations

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
from lowtide.split.row_layout import RowLayout, StridedMap


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
    return saved_tensors_hooks(_same, _same)


def _same(value: Any) -> Any:
    return value
