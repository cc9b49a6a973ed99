"""A module that treats every token alike, run over slices of its input; and the proof that a module does so.

**Slices** (`run_in_slices`): an MLP of a transformer needs several times the memory of its input, for all tokens at
once, in the forward and again in the backward, also where its block is recomputed. Over slices it needs that for one
slice only. The forward keeps the module's input; the backward runs the module again on each slice, with the random
numbers and autocast state of the forward, and adds up the gradients of the parameters (in float32 if these have 16
bits). The input is saved by an autograd node of its own, before the slices run. A replay of a block around the module
ends at the last tensor that it needs; if that is this input, the replay does not run the module at all.

**Proof** (`why_not_row_wise`): the module is called on the meta device, with a tensor whose next to last dimension, the
tokens, has a size that nothing else has. A dispatch mode follows the tensors that hold one row for each token. For each
op, the rows of a token in its output must depend on the rows of the same token alone, and on tensors that hold no
tokens: element-wise functions, products with a matrix, reductions and normalisations over other dimensions, views that
leave the tokens in front. Any other op ends the proof, so an unknown op is never taken for a harmless one.

Numbers that Python computes from shapes are no ops: `x / x.shape[1]`, or another formula for short sequences. So the
module also runs once on all tokens with gradients, as in the plain step, and once on those of a part without, as slices
do: it must call the same functions with the same numbers. `values_agree` compares slices with the whole on real values.

Cost of the proof: three runs of the module without memory or arithmetic, a few milliseconds each.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lowtide import _compat
from lowtide.errors import ChangedInPlaceError
from lowtide.replay.arguments import map_tensors, tensors_in
from lowtide.replay.environment import Environment, capture
from lowtide.replay.module_state import ModuleSnapshot, ModuleTree, snapshot_of
from lowtide.replay.op_facts import facts_of
from lowtide.split.chunked_loss import LOW_PRECISION, refuse_double_backward, row_ranges
from lowtide.split.row_chain import hidden_saves

Forward = Callable[..., Tensor]

_MOST_CHECKED_ROWS = 256
# Largest difference between a slice and the whole, over the largest value: products of matrices of other sizes round
# differently. A module that mixes tokens differs by orders of magnitude more.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}


def run_in_slices(module: nn.Module, forward: Forward, tokens: Tensor, num_parts: int) -> Tensor:
    """`forward(tokens)`, in up to `num_parts` slices along all dimensions but the last."""
    parameters = [each for each in module.parameters() if each.requires_grad]
    has_values = type(tokens) in _compat.PLAIN_TYPES and not tokens.is_meta
    parts = list(row_ranges(tokens.shape[:-1].numel(), num_parts))
    job = _SliceJob(forward, parts, snapshot_of(module) if has_values else None, tokens.detach())
    return _Slices.apply(job, _SavedInput.apply(job, tokens, *parameters))


def sliced(tokens: Tensor, start: int, end: int) -> Tensor:
    """Some tokens of a tensor, with as many dimensions: all dimensions before the last two have size 1."""
    return tokens.reshape(*(1,) * (tokens.dim() - 2), -1, tokens.shape[-1])[..., start:end, :]


@dataclass(eq=False)
class _SliceJob:
    """One call of a module: its input while the forward runs, its state and each slice's environment for the replay.

    `state` is None in a trace on fake tensors, where nothing can change between forward and backward.
    """

    forward: Forward
    parts: list[tuple[int, int]]
    state: ModuleSnapshot | None
    tokens: Tensor | None
    environments: list[Environment] = field(default_factory=list)
    gradient: Tensor | None = None  # of the output, from one node's backward to the other's

    def restore(self) -> Callable[[], None]:
        """Give the module the state that it had in the forward; call the result to give it the present one back."""
        if self.state is None:
            return lambda: None
        lost = self.state.lost()
        if lost:
            raise ChangedInPlaceError(
                f"{lost[0][0]} was changed in place between forward and backward of a module that split=True runs in "
                "slices, so its slices cannot be run again. Call backward() first."
            )
        return self.state.restore()


class _SavedInput(torch.autograd.Function):
    """Saves the input; its backward replays the slices."""

    @staticmethod
    def forward(ctx: Any, job: _SliceJob, tokens: Tensor, *parameters: Tensor) -> Tensor:
        ctx.job = job
        ctx.save_for_backward(tokens, *parameters)
        return tokens.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        refuse_double_backward("a module that split=True runs in slices")
        job: _SliceJob = ctx.job
        tokens, *parameters = ctx.saved_tensors  # raises if one was changed in place
        gradient, job.gradient = job.gradient, None
        assert gradient is not None
        needs = ctx.needs_input_grad[1:]
        for_tokens = torch.empty_like(tokens, memory_format=torch.contiguous_format) if needs[0] else None
        sums: list[Tensor | None] = [None] * len(parameters)
        undo_state = job.restore()
        try:
            for (start, end), environment in zip(job.parts, job.environments, strict=True):
                part = sliced(tokens, start, end).detach().requires_grad_(needs[0])
                undo = environment.restore()
                try:
                    with torch.enable_grad():
                        output = job.forward(part)
                finally:
                    undo()
                wanted = [part, *parameters] if needs[0] else parameters
                towards = sliced(gradient, start, end).view(output.shape)
                found = list(torch.autograd.grad(output, wanted, towards, allow_unused=True))
                del output, part, wanted, towards
                if for_tokens is not None:
                    own = found.pop(0)
                    where = sliced(for_tokens, start, end)
                    where.zero_() if own is None else where.copy_(own)
                    del own
                _add(sums, found, gradient)
                del found
        finally:
            undo_state()
        finished = [None if each is None else each.to(one.dtype) for each, one in zip(sums, parameters, strict=True)]
        return None, for_tokens, *finished


def _add(sums: list[Tensor | None], found: Sequence[Tensor | None], gradient: Tensor) -> None:
    """Add the gradients of one slice to `sums`, in place.

    Autograd may return one tensor for several parameters (`weight + delta`), or a view of the output's `gradient`:
    such a tensor is copied.
    """
    for index, each in enumerate(found):
        before = sums[index]
        if each is None:
            continue
        if before is not None:
            before += each
        elif each.dtype in LOW_PRECISION:
            sums[index] = each.float()
        else:
            others = (other for other in (gradient, *sums) if other is not None)
            taken = {storage for other in others for storage in _compat.storages_of(other)}
            sums[index] = each.contiguous() if taken.isdisjoint(_compat.storages_of(each)) else each.clone()


class _Slices(torch.autograd.Function):
    """Runs the slices; its backward passes the gradient of the output on to `_SavedInput`."""

    @staticmethod
    def forward(ctx: Any, job: _SliceJob, saved: Tensor) -> Tensor:
        ctx.job = job
        tokens, job.tokens = job.tokens, None
        assert tokens is not None
        whole: Tensor | None = None
        generators = () if job.state is None else job.state.generators()
        for start, end in job.parts:
            job.environments.append(capture([tokens.device], generators))
            part = job.forward(sliced(tokens, start, end))
            if whole is None:
                whole = part.new_empty(*tokens.shape[:-1], part.shape[-1])
            sliced(whole, start, end).copy_(part)
            del part
        assert whole is not None
        if job.state is not None:
            job.state = job.state.forward_done(runs_all=True)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.job.gradient = gradient
        return None, gradient.new_empty(0)


def values_agree(module: nn.Module, forward: Forward, tokens: Tensor, num_parts: int = 2) -> bool:
    """Whether the module gives the same for a few tokens together and in slices, up to rounding.

    The tokens are those of the first two of `num_parts` slices, which take no more memory together than the backward of
    one, or fewer. The module runs in evaluation mode for this, without dropout. Random states are as before.
    """
    parts = list(row_ranges(tokens.shape[:-1].numel(), num_parts))
    num_rows = min(_MOST_CHECKED_ROWS, parts[min(1, len(parts) - 1)][1])
    if num_rows < 2:
        return True
    some = sliced(tokens.detach(), 0, num_rows)
    last = parts[-1][1] - parts[-1][0]
    ranges = [*row_ranges(num_rows, 2), *([(0, last)] if last < num_rows else [])]
    modes = {each: each.training for each in module.modules()}
    states = capture([tokens.device])
    try:
        module.eval()
        with torch.no_grad(), _compat.without_modes(), _random_states_kept(module):
            whole = forward(some)
            scale = float(whole.abs().max()) or 1.0
            most = _TOLERANCES.get(whole.dtype, 1e-3) * scale
            for start, end in ranges:
                part, same = forward(sliced(some, start, end)), whole[..., start:end, :]
                if part.shape != same.shape or not float((part - same).abs().max()) <= most:
                    return False
        return True
    finally:
        states.set_random_states()
        for each, training in modes.items():
            each.training = training


_NUM_TOKENS = 1009  # a prime, so that no reshape can hide it in a product of other sizes

_SAME_SHAPE = {"clone", "detach", "alias", "_to_copy", "empty_like", "zeros_like", "ones_like", "native_dropout",
               "bernoulli", "bernoulli_", "fill_", "copy_", "lift_fresh", "dropout"}  # fmt: skip
_VIEWS = {"view", "_unsafe_view", "reshape", "_reshape_alias", "expand"}
# Reductions, and others along one dimension.
_ALONG_DIMS = {"_softmax", "_log_softmax", "slice", "select", "split", "split_with_sizes", "unbind", "chunk", "glu",
               "squeeze", "unsqueeze", "cumsum", "argmax", "argmin", "softmax", "log_softmax", "topk", "sort", "sum",
               "mean", "amax", "amin", "var", "var_mean", "std", "norm", "linalg_vector_norm", "logsumexp", "any",
               "all", "max", "min", "prod"}  # fmt: skip
# Functions that take sizes: these differ with the number of tokens.
_SIZED = {"view", "reshape", "expand", "unflatten", "broadcast_to", "zeros", "ones", "empty", "new_zeros", "new_ones",
          "new_empty"}  # fmt: skip
_NORMS = {"native_layer_norm", "_fused_rms_norm", "layer_norm", "rms_norm"}


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
        with _compat.without_modes(), _random_states_kept(self._bare.module), hidden_saves(), mode:
            return torch.func.functional_call(self._bare, self.state, (tokens,))

    @staticmethod
    def _empty(shape: Sequence[int], dtype: torch.dtype, needs_grad: bool) -> Tensor:
        with _compat.without_modes():
            return torch.empty(shape, dtype=dtype, device="meta", requires_grad=needs_grad)


@contextmanager
def _random_states_kept(module: nn.Module) -> Iterator[None]:
    """A context that undoes what `module` draws: a tensor without values may be given real random numbers."""
    state = ModuleTree(module).snapshot()
    generators = [torch.default_generator, *(() if state is None else state.generators())]
    states = [generator.get_state() for generator in generators]
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        for generator, before in zip(generators, states, strict=True):
            generator.set_state(before)
        random.setstate(python)
        np.random.set_state(numpy)


class _FunctionLog(TorchFunctionMode):
    """Lists the functions of torch that are called, and their arguments other than tensors and sizes of views."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, str]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        is_free = getattr(func, "__name__", "") in _SIZED or func is _compat.set_grad_enabled
        self.calls.append((func, "" if is_free else repr(map_tensors(lambda tensor: None, given))))
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


class _Follower(_compat.DispatchMode):
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
        # Sizes at the positions of the tokens, when the other tensors are broadcast.
        fronts = [([1] * (first.dim() - each.dim()) + list(each.shape))[:num] for each in others]
        spread = any(size != 1 for sizes in fronts for size in sizes)
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
    if len(given) == 1 and not others and name in _ALONG_DIMS:
        return _dim_problem(func, name, args, kwargs, first, num)
    return "is not known to treat every token alike"


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
    named = _compat.op_arguments(func, args, kwargs)
    dims = named.get("dim", named.get("dims"))
    if dims is None:
        return "reduces over the tokens"
    ndim = first.dim() + (name == "unsqueeze")
    chosen = [dims] if isinstance(dims, int) else list(dims)
    return "" if chosen and all(dim % ndim >= num for dim in chosen) else "works along the tokens"
