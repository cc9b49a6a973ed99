"""A module that treats every token alike, run over slices of its input; the backward replays one slice at a time.

An MLP of a transformer needs several times the memory of its input, for all tokens at once, in the forward and again in
the backward, also where its block is recomputed. Over slices it needs that for one slice only. The forward keeps the
module's input; the backward runs the module again on each slice, with the random numbers and autocast state of the
forward, and adds up the gradients of the parameters (in float32 if these have 16 bits).

The input is saved by an autograd node of its own, before the slices run. A replay of a block around the module ends at
the last tensor that it needs; if that is this input, the replay does not run the module at all.

`row_independence` proves that a module treats every token alike. `values_agree` checks it on real values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import _compat
from lowtide.errors import ChangedInPlaceError, LowtideError
from lowtide.replay.environment import Environment, RandomStates, capture
from lowtide.replay.module_state import ModuleSnapshot, snapshot_of
from lowtide.split.chunked_loss import LOW_PRECISION, row_ranges

Forward = Callable[..., Tensor]

_MOST_CHECKED_ROWS = 256
# Largest difference between a slice and the whole, over the largest value: products of matrices of other sizes round
# differently. A module that mixes tokens differs by orders of magnitude more.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}


def run_in_slices(module: nn.Module, forward: Forward, tokens: Tensor, num_parts: int) -> Tensor:
    """`forward(tokens)`, in up to `num_parts` slices along all dimensions but the last."""
    parameters = [each for each in module.parameters() if each.requires_grad]
    has_values = type(tokens) in _compat.PLAIN_TYPES and not tokens.is_meta
    job = _SliceJob(forward, tokens, parameters, num_parts, snapshot_of(module) if has_values else None)
    return _Slices.apply(job, _SavedInput.apply(job, tokens, *parameters))


def sliced(tokens: Tensor, start: int, end: int) -> Tensor:
    """Some tokens of a tensor, with as many dimensions: all dimensions before the last two have size 1."""
    return tokens.reshape(*(1,) * (tokens.dim() - 2), -1, tokens.shape[-1])[..., start:end, :]


class _SliceJob:
    """One call of a module: its input while the forward runs, its state and each slice's environment for the replay.

    `state` is None in a trace on fake tensors, where nothing can change between forward and backward.
    """

    def __init__(
        self,
        forward: Forward,
        tokens: Tensor,
        parameters: list[nn.Parameter],
        num_parts: int,
        state: ModuleSnapshot | None,
    ) -> None:
        self.forward, self.parameters, self.state = forward, parameters, state
        self.parts = list(row_ranges(tokens.shape[:-1].numel(), num_parts))
        self.tokens: Tensor | None = tokens.detach()
        self.environments: list[Environment] = []
        self.gradient: Tensor | None = None  # of the output, from one node's backward to the other's

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
        if torch.is_grad_enabled():
            raise LowtideError(
                "backward(create_graph=True) through a module that split=True runs in slices: its gradients have no "
                "history. Fit without split=True to differentiate twice."
            )
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
    states = RandomStates([tokens.device])
    try:
        module.eval()
        with torch.no_grad(), _compat.without_modes():
            whole = forward(some)
            scale = float(whole.abs().max()) or 1.0
            most = _TOLERANCES.get(whole.dtype, 1e-3) * scale
            for start, end in ranges:
                part, same = forward(sliced(some, start, end)), whole[..., start:end, :]
                if part.shape != same.shape or not float((part - same).abs().max()) <= most:
                    return False
        return True
    finally:
        states.set()
        for each, training in modes.items():
            each.training = training
