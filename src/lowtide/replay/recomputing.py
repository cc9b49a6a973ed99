"""Whether this thread is in a replay."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowtide import _compat


class _Replays(threading.local):
    depth = 0


_replays = _Replays()


def is_recomputing() -> bool:
    """True while this thread replays a checkpointed region, and only then.

    >>> import lowtide
    >>> lowtide.is_recomputing()
    False
    """
    return _replays.depth > 0


def replay_depth() -> int:
    """How many replays this thread is in: one inside another where a replay asks for what another region saved."""
    return _replays.depth


class one_deeper:
    """A block that is a replay."""

    def __enter__(self) -> None:
        _replays.depth += 1

    def __exit__(self, *exception: object) -> None:
        _replays.depth -= 1


class Replaying:
    """A block that is a replay: with gradients, and `pack` gets what autograd saves."""

    __slots__ = ("_had_grad", "_pack")

    def __init__(self, pack: Callable[[Tensor], Tensor]) -> None:
        self._pack = pack

    def __enter__(self) -> None:
        self._had_grad = torch.is_grad_enabled()
        _compat.push_hooks(self._pack, _as_it_is)
        _compat.set_grad_enabled(True)
        _replays.depth += 1

    def __exit__(self, *exception: object) -> None:
        _replays.depth -= 1
        _compat.set_grad_enabled(self._had_grad)
        _compat.pop_hooks()


@_compat.never_compiled
def _as_it_is(packed: Tensor) -> Tensor:
    return packed


class ReplaysCounted:
    """A function whose second and later calls count as replays: for torch's own checkpoint."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._has_run = function, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._has_run:
            self._has_run = True
            return self._function(*args, **kwargs)
        with one_deeper():
            return self._function(*args, **kwargs)
