"""Proves that a module treats every token alike: `why_not_row_wise` runs it on meta tensors and follows the tokens.

The module is called with a tensor whose next to last dimension, the tokens, has a size that nothing else has. A
dispatch mode follows the tensors that hold one row for each token. For each op, the rows of a token in its output must
depend on the rows of the same token alone, and on tensors that hold no tokens: element-wise functions, products with a
matrix, reductions and normalisations over other dimensions, views that leave the tokens in front. Any other op ends the
proof, so an unknown op is never taken for a harmless one.

Cost: one run of the module without memory or arithmetic, a few milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import _compat
from lowtide.replay.arguments import tensors_in
from lowtide.replay.module_state import ModuleTree
from lowtide.replay.op_facts import facts_of

_NUM_TOKENS = 1009  # a prime, so that no reshape can hide it in a product of other sizes

_SAME_SHAPE = {"clone", "detach", "alias", "_to_copy", "empty_like", "zeros_like", "ones_like", "native_dropout",
               "bernoulli", "bernoulli_", "fill_", "copy_", "lift_fresh", "dropout"}  # fmt: skip
_VIEWS = {"view", "_unsafe_view", "reshape", "_reshape_alias", "expand"}
_ALONG_ONE = {"_softmax", "_log_softmax", "slice", "select", "split", "split_with_sizes", "unbind", "chunk", "glu",
              "squeeze", "unsqueeze", "cumsum", "argmax", "argmin", "softmax", "log_softmax", "topk",
              "sort"}  # fmt: skip
_REDUCTIONS = {"sum", "mean", "amax", "amin", "var", "var_mean", "std", "norm", "linalg_vector_norm", "logsumexp",
               "any", "all", "max", "min", "prod"}  # fmt: skip
_NORMS = {"native_layer_norm", "_fused_rms_norm", "layer_norm", "rms_norm"}


class _NotRowWise(Exception):
    """Why the proof ended."""


def why_not_row_wise(module: nn.Module, forward: Callable[..., Any], width: int, dtype: torch.dtype, ndim: int) -> str:
    """Why `forward` may mix tokens, or cannot be followed; empty if it is proven that it treats every token alike."""
    with _compat.without_modes():
        tokens = torch.empty(*(1,) * (ndim - 2), _NUM_TOKENS, width, dtype=dtype, device="meta")
        slots = {
            f"module.{name}": torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
        }
    if any(_NUM_TOKENS in tensor.shape for tensor in slots.values()):
        return f"a parameter has a dimension of {_NUM_TOKENS}, which the proof uses for the tokens"
    follower = _Follower(tokens, slots.values())
    try:
        with torch.no_grad(), _compat.without_modes(), torch.random.fork_rng(devices=[]), follower:
            output = torch.func.functional_call(_Bare(module, forward), slots, (tokens,))
    except _NotRowWise as found:
        return str(found)
    except Exception as error:  # the module's own code does not run on meta tensors
        return f"it does not run on tensors without values: {type(error).__name__}: {str(error)[:100]}"
    if not isinstance(output, Tensor) or not follower.has_rows(output):
        return "its output is not one tensor with a row for each token"
    if output.shape[:-1] != tokens.shape[:-1]:
        return f"its output has the shape {tuple(output.shape)} for an input of {tuple(tokens.shape)}"
    return ""


class _Bare(nn.Module):
    """A module that calls `forward`; `functional_call` replaces the tensors of `module` meanwhile."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self._function = module, forward
        self.training = module.training

    def forward(self, tokens: Tensor) -> Any:
        state = ModuleTree(self.module).snapshot()
        assert state is not None
        try:
            output = self._function(tokens)
            if not state.binds_same_objects():
                raise _NotRowWise("it changes its attributes: slices would change them more often, and to other values")
            return output
        finally:
            state.restore(is_done=False)  # its attributes hold no tensors without values then


class _Follower(_compat.PlainDispatchMode):
    """Follows the tensors that hold one row for each token; raises `_NotRowWise` at the first op without a rule."""

    def __init__(self, tokens: Tensor, state: Iterable[Tensor]) -> None:
        super().__init__()
        self._state = set(map(id, state))  # parameters and buffers
        self._with_rows: dict[int, Tensor] = {id(tokens): tokens}  # the tensors are held so that ids stay unique

    def has_rows(self, tensor: Tensor) -> bool:
        return id(tensor) in self._with_rows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        written = facts_of(func).written_tensors(args, kwargs)
        if any(id(tensor) in self._state for tensor in written):
            raise _NotRowWise(f"{facts_of(func).name} writes to a parameter or buffer")
        given = [tensor for tensor in tensors_in((args, kwargs)) if self.has_rows(tensor)]
        if not given:
            return out
        name = facts_of(func).name.split(".")[1]
        others = [tensor for tensor in tensors_in((args, kwargs)) if not self.has_rows(tensor)]
        made = list(tensors_in(out))
        if all(self.has_rows(tensor) for tensor in written):
            problem = _problem(func, name, args, kwargs, given, others, made)
        else:
            problem = "writes to a tensor that holds no tokens"
        if problem:
            raise _NotRowWise(f"{name} {problem}")
        for tensor in made:
            self._with_rows[id(tensor)] = tensor
        return out


def _row_dims(tensor: Tensor) -> int | None:
    """How many leading dimensions the tokens take; None if the tokens are not in front."""
    for count in range(1, tensor.dim() + 1):
        if math.prod(tensor.shape[:count]) == _NUM_TOKENS:
            return count
    return None


def _problem(
    func: Any,
    name: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    given: list[Tensor],
    others: list[Tensor],
    made: list[Tensor],
) -> str:
    """Why an op may mix tokens; empty if it does not."""
    dims = {_row_dims(tensor) for tensor in given}
    if len(dims) > 1 or None in dims or any(_row_dims(tensor) not in dims for tensor in made):
        if name not in _VIEWS or any(_row_dims(tensor) is None for tensor in (*given, *made)):
            return "moves the tokens to another dimension"
    (first, *_) = given
    num = _row_dims(first)
    assert num is not None
    if torch.Tag.pointwise in func.tags or name in _SAME_SHAPE:
        if any(tensor.dim() != made[0].dim() for tensor in given if made):
            return "broadcasts the tokens"
        spread = [each for each in others if any(size != 1 for size in _front(each, first.dim(), num))]
        return "reads a tensor with a value for each position" if spread else ""
    if name in _VIEWS:
        return ""
    if name in ("mm", "addmm", "bmm"):
        return _product_problem(name, args, first, num)
    if name in _NORMS:
        shape = args[1]
        return "" if len(shape) <= first.dim() - num and len(given) == 1 else "normalises over the tokens"
    if name == "cat":
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        return "" if not others and dim % first.dim() >= num else "joins tokens"
    if name in ("transpose", "permute", "t"):
        if name == "permute":
            kept = [dim % first.dim() for dim in args[1]][:num] == list(range(num))
        else:
            kept = name == "transpose" and min(dim % first.dim() for dim in args[1:3]) >= num
        return "" if kept else "moves the tokens to another dimension"
    if len(given) > 1 or others:
        return "is not known to treat every token alike"
    if name in _ALONG_ONE or name in _REDUCTIONS:
        return _dim_problem(func, name, args, kwargs, first, num)
    return "is not known to treat every token alike"


def _front(tensor: Tensor, ndim: int, num: int) -> list[int]:
    """The sizes of a tensor at the positions of the tokens, when it is broadcast to `ndim` dimensions."""
    padded = [1] * (ndim - tensor.dim()) + list(tensor.shape)
    return padded[:num]


def _product_problem(name: str, args: Sequence[Any], first: Tensor, num: int) -> str:
    left = args[1] if name == "addmm" else args[0]
    if left is not first:
        return "multiplies tokens with each other"
    if name == "addmm":
        return "" if args[0].dim() == 1 or args[0].shape[0] == 1 else "adds a tensor with a value for each position"
    if name == "bmm":
        return "" if left.shape[0] == 1 and num == 2 else "multiplies each batch by another matrix"
    return ""


def _dim_problem(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], first: Tensor, num: int) -> str:
    """For an op along some dimensions: whether these leave the tokens alone."""
    defaults = _compat.op_defaults(func)
    named = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
    dims = named.get("dim", named.get("dims"))
    if dims is None:
        return "reduces over the tokens"
    ndim = first.dim() + (name == "unsqueeze")
    chosen = [dims] if isinstance(dims, int) else list(dims)
    return "" if chosen and all(dim % ndim >= num for dim in chosen) else "works along the tokens"
