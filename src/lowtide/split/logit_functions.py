"""Handlers of the torch functions that keep logits lazy (`lazy_logits`) or reduce them in parts, by function name.

Four kinds: views and slices change the layout; functions of single elements and functions along the vocabulary give
another lazy tensor; functions that reduce a row to a number give a real tensor, computed in parts; losses that sum over
all rows give a real number, computed in parts together with its gradients. A handler returns `NotImplemented` for
arguments that it has no rule for: the logits are then computed in full.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide import _compat
from lowtide.split.chunked_loss import per_row, total
from lowtide.split.lazy_logits import HANDLERS, Handler, LazyLogits, lazies_in
from lowtide.split.row_chain import AlignedRows, RowChain, RowLayout, aligned

_VIEWS = "view unsqueeze squeeze transpose permute movedim swapaxes swapdims moveaxis narrow select __getitem__".split()
_RESHAPES = "reshape flatten unflatten".split()
_POINTWISE = (
    "float double half bfloat16 neg negative abs exp exp2 expm1 log log1p sqrt rsqrt square tanh sigmoid relu softplus "
    "logsigmoid gelu silu erf sin cos sign reciprocal clamp clamp_min clamp_max nan_to_num clone "
    "add sub subtract mul multiply div divide true_divide pow rsub __rsub__ __rdiv__ __rtruediv__ __rpow__ "
    "where masked_fill maximum minimum xlogy"
).split()


def _handles(*names: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


# Views.


@_handles(*_VIEWS, *_RESHAPES)
def _view(func: Any, args: Any, kwargs: Any) -> Any:
    lazy, *rest = args
    if not _is_lazy_alone(lazy, (rest, kwargs)):
        return NotImplemented
    if any(isinstance(item, torch.dtype) for item in (*rest, *kwargs.values())):  # another view of the same bytes
        return NotImplemented
    return _changed(lazy, func, tuple(rest), kwargs, copies=func.__name__ in _RESHAPES)


@_handles("view_as", "reshape_as")
def _view_as(func: Any, args: Any, kwargs: Any) -> Any:
    lazy, other = args
    if not isinstance(lazy, LazyLogits):
        return NotImplemented
    return getattr(lazy, func.__name__.removesuffix("_as"))(other.shape)


@_handles("contiguous")
def _contiguous(func: Any, args: Any, kwargs: Any) -> Any:
    lazy = args[0]
    if len(args) > 1 or kwargs.get("memory_format", torch.contiguous_format) is not torch.contiguous_format:
        return NotImplemented
    return LazyLogits(lazy.chain, lazy.row_layout.compacted(), lazy.probe, (func, args, kwargs))


@_handles("unbind", "__iter__")
def _unbind(func: Any, args: Any, kwargs: Any) -> Any:
    lazy, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if lazy.row_layout.vocab_dim == dim % lazy.dim():
        return NotImplemented
    parts = tuple(lazy.select(dim, index) for index in range(lazy.shape[dim]))
    return iter(parts) if func.__name__ == "__iter__" else parts


@_handles("split", "chunk", "tensor_split")
def _split(func: Any, args: Any, kwargs: Any) -> Any:
    lazy, dim = args[0], kwargs.get("dim", args[2] if len(args) > 2 else 0)
    if not isinstance(lazy, LazyLogits) or not isinstance(dim, int):
        return NotImplemented
    with _compat.without_torch_function(), _compat.without_modes():
        indices = torch.empty(lazy.shape, dtype=torch.int8, device="meta")
        sizes = [part.shape[dim] for part in func(indices, *args[1:], **kwargs)]
    starts = itertools.accumulate(sizes, initial=0)
    return tuple(lazy.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=False))


@_handles("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
def _new(func: Any, args: Any, kwargs: Any) -> Any:
    lazy, *rest = args
    return func(lazy.probe, *rest, **kwargs) if _is_lazy_alone(lazy, (rest, kwargs)) else NotImplemented


def _changed(lazy: LazyLogits, func: Any, rest: tuple[Any, ...], kwargs: dict[str, Any], *, copies: bool) -> Any:
    layout = lazy.row_layout
    change = layout.reshaped if copies else layout.changed
    with _compat.without_torch_function():
        found = change(lambda tensor: func(tensor, *rest, **kwargs))
    if found is None:
        return NotImplemented
    changed, columns = found
    chain, probe = lazy.chain, lazy.probe
    if chain.aligned_with is not None and not chain.aligned_with.has_rows_of(changed):
        return NotImplemented  # tensors in the chain have one row for each row of the layout before
    if (columns.start, columns.stop, columns.step) != (0, layout.vocab_size, 1):
        chain = RowChain(lambda matrix, columns: matrix[:, columns], (chain, columns))
        probe = probe[:, columns]
    return LazyLogits(chain, changed, probe, (func, (lazy, *rest), kwargs))


# Functions of single elements, and of rows with as many elements as before.


@_handles(*_POINTWISE)
def _pointwise(func: Any, args: Any, kwargs: Any) -> Any:
    return _applied(func, args, kwargs, (func, args, kwargs))


@_handles("to", "type")
def _cast(func: Any, args: Any, kwargs: Any) -> Any:
    lazy, *rest = args
    device, dtype = lazy.probe.device, None
    for item in (*rest, *(kwargs[name] for name in ("device", "dtype", "other") if name in kwargs)):
        if isinstance(item, torch.dtype):
            dtype = item
        elif isinstance(item, Tensor) and not isinstance(item, LazyLogits):
            device, dtype = item.device, item.dtype
        elif isinstance(item, torch.device | str) and func.__name__ == "to":
            device = torch.device(item)
        elif not isinstance(item, bool):
            return NotImplemented
    here = lazy.probe.device
    if device.type != here.type or device.index not in (None, here.index) or kwargs.get("memory_format") is not None:
        return NotImplemented
    if dtype is None or dtype == lazy.probe.dtype:
        return lazy if func.__name__ == "to" else NotImplemented
    return _applied(functools.partial(Tensor.to, dtype=dtype), (lazy,), {}, (func, args, kwargs))


@_handles("detach")
def _detach(func: Any, args: Any, kwargs: Any) -> Any:
    lazy = args[0]
    return LazyLogits(lazy.chain.detached(), lazy.row_layout, lazy.probe, (func, args, kwargs))


@_handles("softmax", "log_softmax")
def _softmax(func: Any, args: Any, kwargs: Any) -> Any:
    lazy, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else None)
    others = args[2:]  # `_stacklevel` of torch.nn.functional
    if not isinstance(lazy, LazyLogits) or not _is_vocab(lazy, dim) or not all(isinstance(n, int) for n in others):
        return NotImplemented
    row_function = torch.softmax if func.__name__ == "softmax" else torch.log_softmax
    return _applied(
        functools.partial(row_function, dim=-1, dtype=kwargs.get("dtype")), (lazy,), {}, (func, args, kwargs)
    )


def _applied(function: Any, args: Any, kwargs: Any, call: Any) -> Any:
    """A lazy tensor of the same layout: `function` of each row. `call` is what the plain step calls."""
    found = _in_chain((args, kwargs))
    if found is None:
        return NotImplemented
    layout, (args, kwargs), has_rows = found
    chain = RowChain(function, args, kwargs, aligned_with=layout if has_rows else None)
    probe = _probe(chain)
    if not isinstance(probe, Tensor):  # of `where` with one argument
        return NotImplemented
    return LazyLogits(chain, layout, probe, call)


def _in_chain(tree: Any) -> tuple[RowLayout, Any, bool] | None:
    """The arguments of a row-wise function with lazy tensors as chains, their layout, and whether rows are aligned.

    None if the tensors among them do not fit together.
    """
    lazies = lazies_in(tree)
    layout = lazies[0].row_layout
    for other in lazies[1:]:
        if other.row_layout.vocab_dim != layout.vocab_dim or not _is_like(other, layout):
            return None
    if len({head.num_rows for lazy in lazies for head in lazy.chain.heads}) > 1:
        return None
    has_rows, fits = False, True

    def swap(item: Any) -> Any:
        nonlocal has_rows, fits
        if isinstance(item, LazyLogits):
            return item.chain
        if not isinstance(item, Tensor):
            fits = fits and not isinstance(item, list | tuple | dict)
            return item
        part = aligned(item, layout)
        fits = fits and part is not None
        has_rows = has_rows or isinstance(part, AlignedRows)
        return part

    args, kwargs = tree
    swapped = [swap(item) for item in args], {name: swap(item) for name, item in kwargs.items()}
    return (layout, swapped, has_rows) if fits else None


def _probe(chain: RowChain) -> Tensor:
    """What the chain gives for no rows: it has the right type and number of columns."""
    with torch.no_grad(), _compat.without_torch_function():
        return chain.rows([head.weight.detach().new_empty((0, head.weight.shape[0]), dtype=head.dtype)
                           for head in chain.heads], 0, 0)  # fmt: skip


def _named(names: str, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names."""
    return {**dict(zip(names.split(), args, strict=False)), **kwargs}


def _is_lazy_alone(lazy: Any, rest: Any) -> bool:
    return isinstance(lazy, LazyLogits) and not lazies_in(rest)


def _is_like(lazy: LazyLogits, layout: RowLayout) -> bool:
    return lazy.row_layout.shape == layout.shape and lazy.row_layout.has_rows_of(layout)


def _is_vocab(lazy: LazyLogits, dim: Any) -> bool:
    if isinstance(dim, list | tuple) and len(dim) == 1:
        (dim,) = dim
    return type(dim) is int and dim % len(lazy.row_layout.shape) == lazy.row_layout.vocab_dim


# Functions that reduce each row.


@_handles("logsumexp", "sum", "mean")
def _reduce(func: Any, args: Any, kwargs: Any) -> Any:
    lazy, options = args[0], _named("dim keepdim", args[1:], kwargs)
    if not _is_lazy_alone(lazy, options) or options.keys() - {"dim", "keepdim", "dtype"} or len(args) > 3:
        return NotImplemented
    dim, name = options.get("dim"), func.__name__
    if dim is None:
        return NotImplemented if name == "logsumexp" else _sum_of_all(lazy, name, options.get("dtype"))
    if not _is_vocab(lazy, dim):
        return NotImplemented
    row_function = getattr(torch, name)
    keywords = {"dtype": options["dtype"]} if options.get("dtype") is not None else {}
    chain = RowChain(functools.partial(row_function, dim=-1, **keywords), (lazy.chain,))
    found = _row_values(lazy.row_layout, chain).view(lazy.row_layout.row_shape)
    return found.unsqueeze(lazy.row_layout.vocab_dim) if options.get("keepdim") else found


@_handles("gather")
def _gather(func: Any, args: Any, kwargs: Any) -> Any:
    options = _named("input dim index", args, kwargs)
    lazy, dim, index = options.get("input"), options.get("dim"), options.get("index")
    if not isinstance(lazy, LazyLogits) or not isinstance(index, Tensor) or isinstance(index, LazyLogits):
        return NotImplemented
    layout = lazy.row_layout
    if not _is_vocab(lazy, dim) or index.dim() != len(layout.shape):
        return NotImplemented
    index = index.movedim(layout.vocab_dim, -1)
    if tuple(index.shape[:-1]) != layout.row_shape or options.keys() - {"input", "dim", "index"}:
        return NotImplemented
    rows = AlignedRows(index.reshape(-1, index.shape[-1]))
    chain = RowChain(torch.gather, (lazy.chain, -1, rows), aligned_with=layout)
    return layout.tensor_of(_row_values(layout, chain).view(-1, index.shape[-1]))


def _row_values(layout: RowLayout, chain: RowChain) -> Tensor:
    return per_row(chain.heads, layout, chain.rows)


# Losses.


def _sum_of_all(lazy: LazyLogits, name: str, dtype: torch.dtype | None) -> Tensor:
    layout = lazy.row_layout
    divisor = 1.0 if name == "sum" else float(layout.num_rows * layout.vocab_size)
    return _loss(layout, RowChain(_row_sums, (lazy.chain,)), divisor, dtype or lazy.probe.dtype)


def _row_sums(matrix: Tensor) -> Tensor:
    return matrix.sum(-1, dtype=matrix.dtype if matrix.dtype is torch.float64 else torch.float32)


def _loss(layout: RowLayout, chain: RowChain, divisor: Tensor | float, dtype: torch.dtype) -> Tensor:
    return total(chain.heads, layout, chain.rows, divisor).to(dtype)


@_handles("cross_entropy", "nll_loss")
def _class_loss(func: Any, args: Any, kwargs: Any) -> Any:
    names = "input target weight size_average ignore_index reduce reduction label_smoothing"  # the last not of nll_loss
    options, function = _named(names, args, kwargs), getattr(F, func.__name__)
    lazy, target, weight = options.pop("input"), options.pop("target"), options.pop("weight", None)
    reduction, ignored = options.pop("reduction", "mean"), options.pop("ignore_index", -100)
    smoothing = {"label_smoothing": options.pop("label_smoothing")} if "label_smoothing" in options else {}
    if any(value is not None for value in options.values()) or not isinstance(lazy, LazyLogits):
        return NotImplemented
    layout = lazy.row_layout
    if layout.vocab_dim != min(1, len(layout.shape) - 1) or reduction not in ("none", "mean", "sum"):
        return NotImplemented
    target, has_classes = _target_rows(target, layout)
    if target is None or (weight is not None and weight.requires_grad):
        return NotImplemented
    loss = functools.partial(function, weight=weight, ignore_index=ignored, reduction="none", **smoothing)
    chain = RowChain(loss, (lazy.chain, target), aligned_with=layout)
    if reduction == "none":
        return _row_values(layout, chain).view(layout.row_shape)
    divisor: Tensor | float = 1.0
    if reduction == "mean":
        divisor = _weight_of_all(target.matrix, weight, ignored) if has_classes else float(layout.num_rows)
    return _loss(layout, chain, divisor, _probe(chain).dtype)


def _target_rows(target: Any, layout: RowLayout) -> tuple[Any, bool]:
    """A target as an argument of a chain (None if there is no rule for it), and whether it has classes' numbers."""
    if isinstance(target, LazyLogits):
        return (target.chain if _is_like(target, layout) else None), False
    if not isinstance(target, Tensor):
        return None, False
    if not target.is_floating_point() and tuple(target.shape) == layout.row_shape:
        return AlignedRows(target.reshape(-1)), True
    part = aligned(target, layout) if tuple(target.shape) == layout.shape else None
    return part, False


def _weight_of_all(target: Tensor, weight: Tensor | None, ignored: int) -> Tensor:
    """What `cross_entropy` divides by with reduction="mean": the number of targets, or the sum of their weights."""
    is_counted = target != ignored
    if weight is None:
        return is_counted.sum()
    return (weight[torch.where(is_counted, target, 0)] * is_counted).sum()


@_handles("kl_div")
def _kl_div(func: Any, args: Any, kwargs: Any) -> Any:
    options = _named("input target size_average reduce reduction log_target", args, kwargs)
    reduction, log_target = options.pop("reduction", "mean"), options.pop("log_target", False)
    pair = options.pop("input"), options.pop("target")
    if any(value is not None for value in options.values()) or reduction not in ("none", "mean", "sum", "batchmean"):
        return NotImplemented
    loss = functools.partial(F.kl_div, reduction="none", log_target=log_target)
    if reduction == "none":
        return _applied(loss, pair, {}, (func, args, kwargs))
    found = _in_chain((pair, {}))
    if found is None:
        return NotImplemented
    layout, (pair, _), has_rows = found
    chain = RowChain(loss, pair, aligned_with=layout if has_rows else None)
    sizes = {"sum": 1, "batchmean": layout.shape[0], "mean": layout.num_rows * layout.vocab_size}
    return _loss(layout, RowChain(_row_sums, (chain,)), float(sizes[reduction]), _probe(chain).dtype)
