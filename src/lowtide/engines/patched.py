"""A module whose forward is ours: how it is called, and what was seen of it."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lowtide.errors import LowtideError
from lowtide.replay import choices


class Turn:
    """A block in which only one thread may run a region; another one is refused.

    A replay puts the region's buffers back to what its forward found, for as long as it takes: another thread's
    forward of the same region would read those, and lose what it writes. To let it wait is not enough, as torch looks
    at the buffers' versions once more when the replay is over.
    """

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, threading.RLock()

    @staticmethod
    def for_module(name: str, module: nn.Module) -> Turn | None:
        """None for a module without buffers, which threads may run as they like."""
        return Turn(name) if next(iter(module.buffers()), None) is not None else None

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise LowtideError(
                f"two threads run {self._name or 'the model'} at once, which has buffers and is recomputed: a replay "
                "in one would change them for the other. Give each thread a copy of the model, or run them in turn."
            )

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    def during(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self:
            return call(*args, **kwargs)


class PatchedModule:
    """A module under a policy or a plan: how it is called, and what was seen of it."""

    hidden_from_replay = True

    def __init__(self, name: str, module: nn.Module, *, recomputed: bool = False) -> None:
        self.name, self.module, self.recomputed = name, module, recomputed
        self.own_forward = vars(module).get("forward")  # someone else's patch, kept and put back
        self.inner_paths: tuple[str, ...] = ()  # of patched modules inside it
        self.chooses = self.has_choosers = False  # its own ops do, or those of modules inside it: for plans
        self.turn: Turn | None = None
        self.saved_bytes = self.num_replays = 0
        self.measured_shape: Any = None
        self.replay = self._replay  # bound once: what waits for the backward refers to it
        self.replay_in_segment = self._replay_in_segment

    def plain_forward(self, module: nn.Module) -> Callable[..., Any]:
        """The forward that this patch stands in front of, for the module or its copy."""
        if torch.compiler.is_compiling():  # Dynamo makes no bound methods
            return self.own_forward or functools.partial(type(module).forward, module)
        forward = self.own_forward or types.MethodType(type(module).forward, module)
        return functools.partial(choices.choosing, forward) if self.chooses else forward

    def _replay(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.num_replays += 1
        return self.plain_forward(module)(*args, **kwargs)

    def _replay_in_segment(self, run: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.replay(module, *args, **kwargs)


def set_inner_paths(regions: Sequence[PatchedModule]) -> None:
    """Tell each patched module which of the others lie inside of it."""
    for region in regions:
        prefix = f"{region.name}." if region.name else ""
        region.inner_paths = tuple(
            each.name for each in regions if each.name.startswith(prefix) and each.name not in ("", region.name)
        )
