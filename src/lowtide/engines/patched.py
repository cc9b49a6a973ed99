"""A module whose forward is ours: how it is called, the regions it lies in, and what was seen of it."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from lowtide.replay import choices
from lowtide.replay.segment import OpenSegment


class Level(NamedTuple):
    """A region that a layer's call belongs to: the layer alone, or a `segment` by its number."""

    segment: int | None = None
    is_first: bool = True  # of the segment's calls


class Joining(NamedTuple):
    """What calls are joined to in one forward, or in one replay: segments by their numbers.

    `within` are those that the present call is a part of: a layer inside it belongs to them already. `checkpoint` is
    the innermost checkpoint that is known of. In one further in, of the user's own, layers are joined to nothing: its
    replays know nothing of this.
    """

    opens: dict[int, OpenSegment]
    within: frozenset[int] = frozenset()
    checkpoint: Any = None


class JoiningNow(threading.local):
    """What a thread is in."""

    def __init__(self) -> None:
        self.joining = Joining({})


class PatchedModule:
    """A layer under a policy: how it is called, and what was seen of it."""

    hidden_from_replay = True

    def __init__(self, name: str, module: nn.Module, levels: tuple[Level, ...] = ()) -> None:
        self.name, self.module, self.recomputed = name, module, bool(levels)
        self.levels = levels  # the outermost first
        self.own_forward = vars(module).get("forward")  # someone else's patch, kept and put back
        self.inner_paths: tuple[str, ...] = ()  # of patched modules inside it, for plans
        self.chooses = self.has_choosers = False  # its own ops do, or those of modules inside it: for plans
        self.saved_bytes = self.num_replays = 0
        self.measured_shape: Any = None
        self.replay = self._replay  # bound once: what waits for the backward refers to it

    def plain_forward(self, module: nn.Module) -> Callable[..., Any]:
        """The forward that this patch stands in front of, for the module or its copy."""
        if torch.compiler.is_compiling():  # Dynamo makes no bound methods
            return self.own_forward or functools.partial(type(module).forward, module)
        forward = self.own_forward or types.MethodType(type(module).forward, module)
        return functools.partial(choices.choosing, forward) if self.chooses else forward

    def _replay(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.num_replays += 1
        return self.plain_forward(module)(*args, **kwargs)
