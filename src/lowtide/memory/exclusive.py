"""One lock for whatever watches or changes the whole process.

Traces and measurements register hooks of all modules, start torch's profiler, of which a process has one, and put back
random states that all threads share. Two of them at once would record each other's ops, so calls from several threads
run one after the other.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_lock = threading.RLock()


def one_at_a_time(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which waits until no other thread is in any function decorated so. Calls may nest."""

    @functools.wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        with _lock:
            return function(*args, **kwargs)

    return alone
