"""`func`: a checkpointing function for diffusers' models, which recomputes some of their blocks, not all.

    unet.enable_gradient_checkpointing(gradient_checkpointing_func=lowtide.hosts.diffusers.func(every=2))

diffusers calls the function once for each block, as `f(block, *args)`, and its own function recomputes every block.
This one recomputes the blocks that are asked for, with `lowtide.checkpoint`, and can hold their inputs in an
`ActivationStore`. For a budget in bytes use `lowtide.fit(unet, loss_fn, batch, budget=...)` instead, which decides for
each block by itself; it needs the model's own checkpointing off.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

import lowtide
from lowtide import ActivationStore


def func(
    every: int = 1,
    *,
    where: Callable[[nn.Module], bool] | None = None,
    store: ActivationStore | None = None,
) -> Callable[..., Any]:
    """Return a function for `enable_gradient_checkpointing(gradient_checkpointing_func=...)`.

    It recomputes each `every`-th block, in the order in which the blocks are first called; with `where`, of those for
    which `where(block)` is true. `store` holds the inputs of recomputed blocks until the backward.

    >>> import torch
    >>> f = func(every=2)
    >>> f(torch.nn.Linear(2, 2), torch.ones(1, 2)).shape
    torch.Size([1, 2])
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(f"every is a number of blocks, 1 or more, not {every!r:.80}")
    if not (where is None or callable(where)) or not isinstance(store, ActivationStore | None):
        raise TypeError(
            "where is a function of a block that returns whether to recompute it, and store an ActivationStore, not "
            f"where={where!r:.80} and store={store!r:.80}"
        )
    return _Checkpointing(every, where, store)


class _Checkpointing:
    """Called by diffusers in place of a block."""

    def __init__(self, every: int, where: Callable[[nn.Module], bool] | None, store: ActivationStore | None) -> None:
        self._every, self._where = every, where
        self._options: dict[str, Any] = {} if store is None else {"store": store}
        self._is_recomputed: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._num_blocks = 0

    def __call__(self, block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Some models pass the bound `block.__call__`, which is a new object each time.
        module = block if isinstance(block, nn.Module) else getattr(block, "__self__", block)
        if not self._decision(module):
            return block(*args, **kwargs)
        return lowtide.checkpoint(block, *args, **kwargs, **self._options)

    def _decision(self, block: Any) -> bool:
        if block not in self._is_recomputed:
            is_wanted = self._where is None or self._where(block)
            self._is_recomputed[block] = is_wanted and self._num_blocks % self._every == 0
            self._num_blocks += is_wanted
        return self._is_recomputed[block]
