"""Whether this thread is in a replay."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

_replays = threading.local()


def is_recomputing() -> bool:
    """True while this thread replays a checkpointed region, and only then.

    >>> import lowtide
    >>> lowtide.is_recomputing()
    False
    """
    return replay_depth() > 0


def replay_depth() -> int:
    """How many replays this thread is in: one inside another where a replay asks for what another region saved."""
    return getattr(_replays, "depth", 0)


class one_deeper:
    """A block that is a replay."""

    def __enter__(self) -> None:
        _replays.depth = replay_depth() + 1

    def __exit__(self, *exception: object) -> None:
        _replays.depth -= 1


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
