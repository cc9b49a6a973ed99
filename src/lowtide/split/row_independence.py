"""Proves that a module treats every token alike: `why_not_row_wise` runs it on meta tensors and follows the tokens.

The module is called with a tensor whose next to last dimension, the tokens, has a size that nothing else has. A
dispatch mode follows the tensors that hold one row for each token. For each op, the rows of a token in its output must
depend on the rows of the same token alone, and on tensors that hold no tokens: element-wise functions, products with a
matrix, reductions and normalisations over other dimensions, views that leave the tokens in front. Any other op ends the
proof, so an unknown op is never taken for a harmless one.

Numbers that Python computes from shapes are no ops: `x / x.shape[1]`, or another formula for short sequences. So the
module also runs once on all tokens with gradients, as in the plain step, and once on those of a part without, as slices
do: it must call the same functions with the same numbers.

Cost: three runs of the module without memory or arithmetic, a few milliseconds each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lowtide import _compat
from lowtide.replay.arguments import map_tensors, tensors_in
from lowtide.replay.module_state import ModuleTree
from lowtide.replay.op_facts import facts_of
from lowtide.split.row_chain import hidden_saves

_NUM_TOKENS = 1009  # a prime, so that no reshape can hide it in a product of other sizes

_SAME_SHAPE = {"clone", "detach", "alias", "_to_copy", "empty_like", "zeros_like", "ones_like", "native_dropout",
               "bernoulli", "bernoulli_", "fill_", "copy_", "lift_fresh", "dropout"}  # fmt: skip
_VIEWS = {"view", "_unsafe_view", "reshape", "_reshape_alias", "expand"}
_ALONG_ONE = {"_softmax", "_log_softmax", "slice", "select", "split", "split_with_sizes", "unbind", "chunk", "glu",
              "squeeze", "unsqueeze", "cumsum", "argmax", "argmin", "softmax", "log_softmax", "topk",
              "sort"}  # fmt: skip
_REDUCTIONS = {"sum", "mean", "amax", "amin", "var", "var_mean", "std", "norm", "linalg_vector_norm", "logsumexp",
               "any", "all", "max", "min", "prod"}  # fmt: skip
# Functions that take sizes: these differ with the number of tokens.
_SIZED = {"view", "reshape", "expand", "unflatten", "broadcast_to", "zeros", "ones", "empty", "new_zeros", "new_ones",
          "new_empty"}  # fmt: skip
_NORMS = {"native_layer_norm", "_fused_rms_norm", "layer_norm", "rms_norm"}


_NO_TENSOR: Any = None  # in place of tensors among arguments that are compared


class _NotRowWise(Exception):
    """Why the proof ended."""


def why_not_row_wise(
    module: nn.Module,
    forward: Callable[..., Any],
    shape: Sequence[int],
    dtype: torch.dtype,
    num_part_rows: int = _NUM_TOKENS,
) -> str:
    """Why `forward` may mix tokens, or cannot be followed; empty if it is proven that it treats every token alike.

    `shape` is that of all tokens; `num_part_rows` is how many of them a part has.
    """
    run = _MetaRun(module, forward, tuple(shape), dtype)
    if any(_NUM_TOKENS in tensor.shape for tensor in run.state.values()):
        return f"a parameter has a dimension of {_NUM_TOKENS}, which the proof uses for the tokens"
    tokens, whole, part = run.tokens(_NUM_TOKENS), _FunctionLog(), _FunctionLog()
    follower = _Follower(tokens, run.state.values())
    try:
        with torch.no_grad():
            output = run(tokens, follower)
            run(run.tokens(num_part_rows), part)
        with torch.enable_grad():
            run(run.tokens(None), whole)
    except _NotRowWise as found:
        return str(found)
    except Exception as error:  # the module's own code does not run on meta tensors
        return f"it does not run on tensors without values: {type(error).__name__}: {str(error)[:100]}"
    if not isinstance(output, Tensor) or not follower.has_rows(output):
        return "its output is not one tensor with a row for each token"
    if output.shape[:-1] != tokens.shape[:-1]:
        return f"its output has the shape {tuple(output.shape)} for an input of {tuple(tokens.shape)}"
    if whole.calls != part.calls:
        return "it computes something else for another number of tokens, or without gradients"
    return ""


class _MetaRun:
    """Runs a module on tensors without values, in place of its parameters and buffers too."""

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self._bare, self._shape, self._dtype = _Bare(module, forward), shape, dtype
        tensors = (*module.named_parameters(), *module.named_buffers())
        self.state = {
            f"module.{name}": self._empty(each.shape, each.dtype, each.requires_grad) for name, each in tensors
        }

    def tokens(self, num_rows: int | None) -> Tensor:
        """An input of so many rows; None is for the shape of the plain step, with gradients."""
        shape = (*(1,) * (len(self._shape) - 2), num_rows, self._shape[-1]) if num_rows is not None else self._shape
        return self._empty(shape, self._dtype, num_rows is None).clone()  # no leaf: it may be changed in place

    def __call__(self, tokens: Tensor, mode: AbstractContextManager[Any]) -> Any:
        # Saves are hidden: a region around must not count them.
        with _compat.without_modes(), torch.random.fork_rng(devices=[]), hidden_saves(), mode:
            return torch.func.functional_call(self._bare, self.state, (tokens,))

    @staticmethod
    def _empty(shape: Sequence[int], dtype: torch.dtype, needs_grad: bool) -> Tensor:
        with _compat.without_modes():
            return torch.empty(shape, dtype=dtype, device="meta", requires_grad=needs_grad)


class _FunctionLog(TorchFunctionMode):
    """Lists the functions of torch that are called, and their arguments other than tensors and sizes of views."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, str]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        is_free = getattr(func, "__name__", "") in _SIZED or func is _compat.set_grad_enabled
        self.calls.append((func, "" if is_free else repr(map_tensors(lambda tensor: _NO_TENSOR, given))))
        return func(*given[0], **given[1])


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
