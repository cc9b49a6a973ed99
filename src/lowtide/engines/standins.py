"""Stand-ins for equal blocks in a trace that is only about what surrounds them.

Blocks that are alike give tensors of the same shapes. So one of each kind is traced as it is, and the others by what
they take and give: outputs in the forward, gradients in the backward, with nothing in between. That is most of the time
of such a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.engines import _compat

_Facts = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, bool]


@contextmanager
def stand_ins(blocks: Iterable[nn.Module]) -> Iterator[None]:
    """A block in which, of modules that are alike, only the first that is called runs as it is."""
    known: dict[Hashable, _Given | None] = {}
    patched = [block for block in blocks if "forward" not in vars(block)]
    for block in patched:
        block.forward = _StandIn(block, block.forward, known)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for block in patched:
            del block.forward


class _StandIn:
    """In place of a block's forward."""

    def __init__(self, block: nn.Module, forward: Callable[..., Any], known: dict[Hashable, _Given | None]) -> None:
        self._block, self._forward, self._known = block, forward, known

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given, _ = _compat.taken_apart((args, kwargs))
        taken = [each for each in given if isinstance(each, Tensor)]
        parameters = [each for each in self._block.parameters() if each.requires_grad]
        kind = type(self._block), tuple(map(_facts, parameters)), tuple(map(_described, given))
        spec = self._known.get(kind)
        if spec is not None:
            return spec.build(_Block.apply(spec, *(each for each in (*taken, *parameters) if each.requires_grad)))
        output = self._forward(*args, **kwargs)
        if kind not in self._known:
            self._known[kind] = _Given.of(output, (*taken, *parameters))
        return output


def _facts(tensor: Tensor) -> _Facts:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _described(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return _facts(value)
    is_plain = isinstance(value, bool | int | float | str | None)
    found: Hashable = value if is_plain else type(value).__qualname__
    return found


@dataclass(frozen=True)
class _Given:
    """What a block gives: tensors of its own, and whatever else, in this order."""

    parts: list[Any]  # facts in place of tensors
    put_together: Callable[[list[Any]], Any]

    @staticmethod
    def of(output: Any, taken: Iterable[Tensor]) -> _Given | None:
        """None where it gives what it was given, or one tensor twice: then what it holds is not its own."""
        parts, put_together = _compat.taken_apart(output)
        tensors = [part for part in parts if isinstance(part, Tensor)]
        storages = [storage for tensor in tensors for storage in _compat.storages_of(tensor)]
        of_others = {storage for tensor in taken for storage in _compat.storages_of(tensor)}
        is_plain = all(isinstance(part, Tensor | bool | int | float | str | None) for part in parts)
        if len(set(storages)) != len(tensors) or not of_others.isdisjoint(storages) or not is_plain:
            return None
        if not any(tensor.requires_grad for tensor in tensors):
            return None
        return _Given([_facts(part) if isinstance(part, Tensor) else part for part in parts], put_together)

    @property
    def tensors(self) -> list[_Facts]:
        return [part for part in self.parts if isinstance(part, tuple)]

    def build(self, made: tuple[Tensor, ...]) -> Any:
        tensors = iter(made)
        return self.put_together([next(tensors) if isinstance(part, tuple) else part for part in self.parts])


class _Block(torch.autograd.Function):
    """All of a block as one op each way."""

    @staticmethod
    def forward(ctx: Any, given: _Given, *taken: Tensor) -> tuple[Tensor, ...]:
        made = tuple(
            torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for shape, strides, dtype, device, _ in given.tensors
        )
        ctx.mark_non_differentiable(*(t for t, facts in zip(made, given.tensors, strict=True) if not facts[-1]))
        ctx.set_materialize_grads(False)  # what nobody differentiates makes no gradient
        ctx.save_for_backward(*taken)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(torch.empty_like(tensor) for tensor in ctx.saved_tensors)
