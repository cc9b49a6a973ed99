"""What a run of layers found around it: random states, torch's modes, modules, and what their function closes over.

One of these is taken where a replay may start. Layers that follow one another then find in a replay what they found in
the forward, since the replay changes it in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

from torch import Tensor

from lowtide.replay import divergence
from lowtide.replay._compat import ReadGuard
from lowtide.replay.environment import Environment
from lowtide.replay.function_state import FunctionState
from lowtide.replay.recomputing import one_deeper


class Captured:
    """What `function` finds around it now, when it is about to be called with `x`."""

    __slots__ = ("_environment", "_function", "_is_done", "_state")

    def __init__(self, function: Callable[..., Any], x: Any) -> None:
        self._function = function
        self._state = FunctionState(function)
        devices = [x.device] if isinstance(x, Tensor) else []
        self._environment = Environment(
            chain(self._state.devices(), devices), self._state.generators(), preserve_rng_state=True
        )
        self._is_done = False

    def done(self) -> None:
        """The run is over: note what it wrote."""
        if not self._is_done:
            self._state = self._state.forward_done(runs_all=False)
            self._is_done = True

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A block that is a replay of the run. Afterwards everything is as it was before the block."""
        lost = self._state.lost()
        # More is in reach than the layers use: refuse only if they read it.
        guard = ReadGuard([tensor for _, tensor in lost], self._refuse) if lost else nullcontext()
        undo_state = self._state.restore(is_done=self._is_done)
        try:
            undo_environment = self._environment.restore()
            try:
                with one_deeper(), guard:
                    yield
            finally:
                undo_environment()
        finally:
            undo_state()

    def _refuse(self, tensor: Tensor) -> None:
        names = [name for name, each in self._state.lost() if each is tensor]
        raise divergence.mutated_state(self._function, names[0])
