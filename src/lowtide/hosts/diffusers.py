"""`func`: a checkpointing function for diffusers' models, which recomputes some of their blocks, not all.

    unet.enable_gradient_checkpointing(gradient_checkpointing_func=lowtide.hosts.diffusers.func(every=2))

diffusers calls the function once for each block, as `f(block, *args)`, and its own function recomputes every block.
This one recomputes the blocks that are asked for, with `lowtide.checkpoint`, and can hold their inputs in an
`ActivationStore`. For a budget in bytes use `lowtide.fit(unet, loss_fn, batch, budget=...)` instead, which decides for
each block by itself; it needs the model's own checkpointing off.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

import lowtide
from lowtide import ActivationStore


def func(
    every: int = 1, *, where: Callable[[nn.Module], bool] | None = None, store: ActivationStore | None = None
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
    is_recomputed: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
    numbers = itertools.count()
    options: dict[str, Any] = {} if store is None else {"store": store}

    def run(block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Some models pass the bound `block.__call__`, which is a new object each time.
        module: Any = block if isinstance(block, nn.Module) else getattr(block, "__self__", block)
        if module not in is_recomputed:
            is_recomputed[module] = (where is None or bool(where(module))) and next(numbers) % every == 0
        if not is_recomputed[module]:
            return block(*args, **kwargs)
        return lowtide.checkpoint(block, *args, **kwargs, **options)

    return run
