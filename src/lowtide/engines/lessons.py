"""What a watched forward of a region teaches about later ones: see `shownops`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide.engines import _compat
from lowtide.engines.heldops import Build, Op
from lowtide.engines.skippedops import StandIn

logger = logging.getLogger("lowtide")

_MOST_LESSONS = 16  # for inputs of different shapes
_MOST_MISTAKES = 3  # after which a region is always watched

Geometry = tuple[torch.Size, tuple[int, ...], int]  # shape, stride and offset
Shapes = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ShownPart:
    """A tensor of an op's output as it is shown to saved-tensor hooks, and how it was made."""

    op: Op
    number: int  # among the parts of the output
    saved: Geometry
    dtype: torch.dtype
    version: int
    made: Geometry
    storage_bytes: int

    def is_like(self, tensor: Tensor | None) -> bool:
        return (
            tensor is not None
            and _compat.is_plain(tensor)
            and tensor.dtype is self.dtype
            and geometry_of(tensor) == self.saved
            and not (tensor.is_conj() or tensor.is_neg())
        )

    def of(self, tensor: Tensor) -> Tensor:
        """The output, from the tensor that was saved of it."""
        return tensor if self.saved == self.made else tensor.as_strided(*self.made)


@dataclass(frozen=True, slots=True)
class ShownOp:
    """An op whose output is held: its position, and the output's parts, but for tensors with something in them."""

    position: int
    parts: tuple[Any, ...]
    build: Build
    first: int  # of the parts that are tensors
    num_shown: int
    is_random: bool
    of: Any  # the form of the op's arguments


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a watched forward has taught."""

    kinds: list[Any]  # of the ops that ran, but for casts of weights
    stand_ins: dict[Op, StandIn]
    ops: dict[Op, ShownOp]
    by_save: dict[int, ShownPart]
    is_complete: bool  # whether all that is held was shown
    num_saves: int


class Lessons:
    """Those of one region, by the shapes of its inputs."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lessons: dict[Shapes, Lesson] = {}
        self._num_mistakes = 0
        self.written: set[Op] | None = None  # whose outputs are written to unseen; None before the first forward

    def known(self, shapes: Shapes) -> Lesson | None:
        """A lesson that does for a forward without watching."""
        lesson = self._lessons.get(shapes)
        return lesson if lesson is not None and lesson.is_complete else None

    def remember(self, shapes: Shapes, lesson: Lesson) -> None:
        if self._num_mistakes < _MOST_MISTAKES:
            if len(self._lessons) >= _MOST_LESSONS:
                self._lessons.clear()
            self._lessons[shapes] = lesson

    def was_wrong(self, shapes: Shapes) -> None:
        logger.debug("%s runs otherwise than before: its replay computes everything", self._path or "the model")
        self._num_mistakes += 1
        self._lessons.pop(shapes, None)


def geometry_of(tensor: Tensor) -> Geometry:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset())


def shapes_of_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shapes:
    """What tells one batch of a region from another of other size. Forms of what is held are compared anyway."""
    values = (*args, *kwargs.values()) if kwargs else args
    return tuple((value.shape, value.dtype) for value in values if isinstance(value, Tensor))
