"""Linear layer and loss, a few rows at a time: the logits of all rows never exist at once.

The rows of a loss do not need each other. `total` computes a sum over rows chunk by chunk, and the gradients of a
chunk's logits right after them, before the next chunk: `loss.backward()` then only scales the gradients of the hidden
states and of the weight, which are far smaller than the logits. This needs a loss that is linear in the rows' values,
with factors that are known in the forward. `per_row` gives the values of the rows themselves: the backward then
computes each chunk's logits again. `total` also does that for float16 logits, as their gradients would underflow before
`GradScaler`'s factor is known.

Weight gradients are sums over chunks. They are accumulated in float32 where the weight, or autocast, has a type of 16
bits, as a sum in that type would lose a bit or two per doubling of the number of chunks.

A backward releases the gradients that it returns: a second backward through the same loss raises, and so does one with
`create_graph=True`. (Keeping hidden states for it would take as much memory as their gradient.)
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide import _compat
from lowtide.errors import LowtideError

if TYPE_CHECKING:
    from lowtide.split.row_chain import RowLayout

LOW_PRECISION = (torch.bfloat16, torch.float16)
# Rows of a chunk are rounded up to a multiple of this, above 8 times as many: matrix kernels prefer aligned sizes.
_ALIGNED_ROWS = 64

# From the logits of some rows and the numbers of these rows, one value (or several columns of values) for each row.
RowFunction = Callable[[Sequence[Tensor], int, int], Tensor]


def row_ranges(num_rows: int, num_parts: int) -> Iterator[tuple[int, int]]:
    """The first row and the end of each part; at most `num_parts`, none of them empty."""
    size = max(1, -(-num_rows // num_parts))
    if size >= 8 * _ALIGNED_ROWS:
        size = -(-size // _ALIGNED_ROWS) * _ALIGNED_ROWS
    for start in range(0, num_rows, size):
        yield start, min(start + size, num_rows)


class HeadCall:
    """One call of a linear layer whose output is not computed yet: input, weight and bias as they were."""

    def __init__(self, linear: nn.Linear, hidden: Tensor, num_parts: int, note: Callable[[str], None]) -> None:
        self.hidden, self.weight, self.bias = hidden, linear.weight, linear.bias
        self.num_parts, self.note = num_parts, note
        self.members: list[weakref.ref[Any]] = []  # lazy tensors made of this output
        self.dtype = _compute_dtype(hidden)
        self.needs_grad = torch.is_grad_enabled() and any(each.requires_grad for each in self.tensors)
        self.has_loss = False  # whether a loss in parts was computed, which has no gradient of the logits
        self._versions = _compat.versions_of(self.tensors)

    @property
    def tensors(self) -> list[Tensor]:
        return [each for each in (self.hidden, self.weight, self.bias) if each is not None]

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.hidden.shape[:-1], self.weight.shape[0])

    @property
    def num_rows(self) -> int:
        return self.hidden.shape[:-1].numel()

    @property
    def part_rows(self) -> int:
        """How many rows a part has at most."""
        return next(end for _, end in row_ranges(self.num_rows, self.num_parts))

    def detached(self) -> HeadCall:
        """The same call without gradients."""
        other = copy.copy(self)
        other.needs_grad = False
        return other

    def check_unchanged(self) -> None:
        """Raise if an input was changed in place since the call, as the logits would be those of other values."""
        if self.weight.numel() and not _compat.is_fake(self.weight) and not self.weight.untyped_storage().nbytes():
            raise LowtideError(
                "the weight of the split output layer was freed before its loss was computed, as FSDP does after the "
                "forward of a module with reshard_after_forward=True. Leave that layer to the outermost fully_shard, "
                "or fit without split=True."
            )
        if _compat.versions_of(self.tensors) != self._versions:
            raise LowtideError(
                "the input, weight or bias of the split output layer was changed in place before its loss was "
                "computed. Compute the loss first, or fit without split=True."
            )

    def whole(self) -> Tensor:
        """The output for all rows, with its autograd history."""
        self.check_unchanged()
        with torch.set_grad_enabled(self.needs_grad), _autocast_off(self.hidden):
            bias = None if self.bias is None else self.bias.to(self.dtype)
            return F.linear(self.hidden.to(self.dtype), self.weight.to(self.dtype), bias)


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """The type that a linear layer computes in: autocast leaves float64 alone."""
    kind = hidden.device.type
    if hidden.dtype is not torch.float64 and _compat.is_any_autocast_enabled() and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return hidden.dtype


def _autocast_off(tensor: Tensor) -> AbstractContextManager[Any]:
    if not _compat.is_any_autocast_enabled():
        return nullcontext()
    return torch.autocast(tensor.device.type, enabled=False)


def total(heads: Sequence[HeadCall], layout: RowLayout, rows: RowFunction, divisor: Tensor | float) -> Tensor:
    """The sum of `rows` over all rows of `layout`, divided by `divisor`; a float32 (or float64) number."""
    if any(head.needs_grad and head.dtype is torch.float16 for head in heads):
        return per_row(heads, layout, rows).sum(dtype=_sum_dtype(heads)) / divisor
    return _Total.apply(_Job(heads, layout, rows, divisor), *_inputs(heads))


def per_row(heads: Sequence[HeadCall], layout: RowLayout, rows: RowFunction) -> Tensor:
    """The values of `rows` for all rows of `layout`, one after the other. The backward computes the logits again."""
    return _PerRow.apply(_Job(heads, layout, rows, 1.0), *_inputs(heads))


def _inputs(heads: Sequence[HeadCall]) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    for head in heads:
        tensors = (head.hidden, head.weight, head.bias)
        needs_grad = head.needs_grad and torch.is_grad_enabled()
        head.has_loss = head.has_loss or needs_grad
        found += tensors if needs_grad else [None if each is None else each.detach() for each in tensors]
    return found


def _sum_dtype(heads: Sequence[HeadCall]) -> torch.dtype:
    return torch.float64 if any(head.dtype is torch.float64 for head in heads) else torch.float32


class _Job:
    """What a chunked function computes: passed through autograd as one argument."""

    def __init__(
        self, heads: Sequence[HeadCall], layout: RowLayout, rows: RowFunction, divisor: Tensor | float
    ) -> None:
        self.heads, self.layout, self.rows, self.divisor = list(heads), layout, rows, divisor
        self.sum_dtype = _sum_dtype(heads)
        for head in heads:
            head.check_unchanged()

    def parts(self) -> list[tuple[int, int]]:
        size = min(head.part_rows for head in self.heads)
        return list(row_ranges(self.layout.num_rows, -(-self.layout.num_rows // size)))

    def passes(self, inputs: Sequence[Tensor | None], needs: Sequence[bool]) -> list[_HeadPass]:
        """One pass over the rows for each head, which has three of the inputs each."""
        own = [slice(3 * number, 3 * number + 3) for number in range(len(self.heads))]
        return [
            _HeadPass(inputs[at], head.dtype, self.layout, needs[at]) for at, head in zip(own, self.heads, strict=True)
        ]


class _HeadPass:
    """One pass over the rows of a head: logits of a part, and the gradients of all parts so far.

    `tensors` are its hidden states, weight and bias; `needs` says which of them need a gradient.
    """

    def __init__(
        self, tensors: Sequence[Tensor | None], dtype: torch.dtype, layout: RowLayout, needs: Sequence[bool]
    ) -> None:
        hidden, weight, bias = tensors
        assert hidden is not None and weight is not None
        self._shape, self._where, self._dtype = hidden.shape, layout.positions(hidden.device), dtype
        self._dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        self._rows: Tensor = hidden.detach().reshape(-1, hidden.shape[-1])
        self._weight: Tensor = weight.detach().to(dtype)
        self._bias = None if bias is None else bias.detach().to(dtype)
        self._sums: list[Tensor | None] = [None, None, None]  # gradients of hidden states, weight and bias
        self._is_first, self.needs_grad = True, any(needs)
        sum_dtype = torch.float32 if dtype in LOW_PRECISION else dtype
        if needs[0]:
            make = torch.empty_like if layout.num_rows == len(self._rows) else torch.zeros_like
            self._sums[0] = make(self._rows, memory_format=torch.contiguous_format)
        if needs[1]:
            self._sums[1] = torch.empty_like(weight, dtype=sum_dtype, memory_format=torch.contiguous_format)
        if needs[2] and bias is not None:
            self._sums[2] = torch.zeros_like(bias, dtype=sum_dtype)

    def logits(self, start: int, end: int) -> Tensor:
        """The logits of some rows."""
        return F.linear(self._part(start, end), self._weight, self._bias)

    def _part(self, start: int, end: int) -> Tensor:
        """The hidden states of some rows, as a view if possible."""
        where = self._where
        if isinstance(where, int):
            return self._rows[where + start : where + end].to(self._dtype)
        return self._rows.index_select(0, where[start:end]).to(self._dtype)

    def add(self, gradient: Tensor, start: int, end: int) -> None:
        """Take in the gradient of some rows' logits."""
        for_hidden, for_weight, for_bias = self._sums
        if for_hidden is not None:
            where, for_part = self._where, (gradient @ self._weight).to(for_hidden.dtype)
            if isinstance(where, int):
                for_hidden[where + start : where + end] = for_part
            else:
                for_hidden.index_copy_(0, where[start:end], for_part)
        if for_weight is not None:
            _add_product(for_weight, gradient.t(), self._part(start, end), self._is_first)
            self._is_first = False
        if for_bias is not None:
            for_bias += gradient.sum(0, dtype=for_bias.dtype)

    def gradients(self, factor: Tensor | None = None) -> list[Tensor | None]:
        """The gradients of hidden states, weight and bias, times `factor`, in the types of these tensors."""
        found: list[Tensor | None] = []
        for index, dtype in enumerate(self._dtypes):
            sums, self._sums[index] = self._sums[index], None  # so that a copy in another type is not held beside it
            if sums is not None:
                sums = (sums if factor is None else sums.mul_(factor)).to(dtype)
            found.append(sums)
        if found[0] is not None:
            found[0] = found[0].view(self._shape)
        return found

    def release(self) -> None:
        """Drop all but the gradients."""
        self._rows = self._weight = torch.empty(0)
        self._bias, self._where = None, 0


def _add_product(sums: Tensor, one: Tensor, other: Tensor, is_first: bool) -> None:
    """Add a matrix product to `sums`, or write it there if it is the first. It is not rounded to 16 bits in between."""
    beta = 0 if is_first else 1
    if sums.dtype == one.dtype:
        sums.addmm_(one, other, beta=beta)
    elif sums.device.type != "cuda":
        sums.addmm_(one.to(sums.dtype), other.to(sums.dtype), beta=beta)
    else:
        try:
            torch.addmm(sums, one, other, beta=beta, out_dtype=sums.dtype, out=sums)
        except (RuntimeError, TypeError):  # no such kernel on this device
            product = one @ other
            sums.copy_(product) if is_first else sums.add_(product)


class _Total(torch.autograd.Function):
    """The sum over rows, with gradients computed in the forward."""

    @staticmethod
    def forward(ctx: Any, job: _Job, *inputs: Tensor | None) -> Tensor:
        needs = ctx.needs_input_grad[1:]
        total = torch.zeros((), dtype=job.sum_dtype, device=job.heads[0].hidden.device)
        with _autocast_off(job.heads[0].hidden):
            passes = job.passes(inputs, needs)
            for start, end in job.parts():
                total += _run_part(job, passes, start, end)
        for one in passes:
            one.release()
        ctx.passes = passes
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        refuse_double_backward("a loss that split=True computes in parts")
        passes, ctx.passes = ctx.passes, None
        if passes is None:
            raise LowtideError(
                "a second backward through a loss that split=True computes in parts: its gradients were handed out by "
                "the first and are not kept. Call backward() once, on the sum of what you need, or fit without split."
            )
        return None, *(each for one in passes for each in one.gradients(gradient))


class _PartLogits(torch.autograd.Function):
    """The logits of some rows; their gradient is added to that of the pass.

    A leaf tensor would do, and would hold the logits until the backward is over. `anchor` is an empty tensor that needs
    a gradient, so that this node has something to be differentiated by.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, one: _HeadPass, start: int, end: int) -> Tensor:
        ctx.part = one, start, end
        return one.logits(start, end)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        one, start, end = ctx.part
        one.add(gradient, start, end)
        return gradient.new_empty(0), None, None, None


def _values(job: _Job, passes: list[_HeadPass], start: int, end: int) -> tuple[Tensor, Tensor]:
    """What the job's rows function gives for some rows, and the anchor that adds up the gradients of their logits.

    The logits are freed as soon as nothing needs them.
    """
    needs_grad = any(one.needs_grad for one in passes)
    anchor = torch.empty(0, device=job.heads[0].hidden.device, requires_grad=needs_grad)
    with torch.set_grad_enabled(needs_grad):
        logits = [
            _PartLogits.apply(anchor, one, start, end) if one.needs_grad else one.logits(start, end) for one in passes
        ]
        return job.rows(logits, start, end), anchor


def _run_part(job: _Job, passes: list[_HeadPass], start: int, end: int) -> Tensor:
    """The sum over some rows; the gradients of their logits are added to those of the passes."""
    values, anchor = _values(job, passes, start, end)
    with torch.set_grad_enabled(anchor.requires_grad):
        part = values.sum(dtype=job.sum_dtype) / job.divisor
    if part.requires_grad:
        torch.autograd.grad(part, anchor)
    return part.detach()


class _PerRow(torch.autograd.Function):
    """The values of all rows; the backward computes the logits again, part by part."""

    @staticmethod
    def forward(ctx: Any, job: _Job, *inputs: Tensor | None) -> Tensor:
        ctx.job = job
        ctx.save_for_backward(*inputs)
        with _autocast_off(job.heads[0].hidden):
            passes = job.passes(inputs, [False] * len(inputs))
            found = [job.rows([one.logits(*part) for one in passes], *part) for part in job.parts()]
        return found[0] if len(found) == 1 else torch.cat(found)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        refuse_double_backward("a loss that split=True computes in parts")
        job, inputs = ctx.job, ctx.saved_tensors
        with _autocast_off(job.heads[0].hidden):
            passes = job.passes(inputs, ctx.needs_input_grad[1:])
            for start, end in job.parts():
                values, anchor = _values(job, passes, start, end)
                torch.autograd.grad(values, anchor, gradient[start:end])
                del values
            return None, *(each for one in passes for each in one.gradients())


def refuse_double_backward(what: str) -> None:
    if torch.is_grad_enabled():
        raise LowtideError(
            f"backward(create_graph=True) through {what}: its gradients have no history. Fit without split=True to "
            "differentiate twice."
        )
