"""Inputs that vary: which plan a forward of the model goes by.

A plan holds for the inputs it was made for and for smaller ones. What is larger is planned for when it is first seen,
rounded up in those dimensions that have grown, so that each bucket of shapes is planned for once.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowtide.engines import _compat
from lowtide.engines.runs import Decisions
from lowtide.graph import StepGraph
from lowtide.plans import Plan
from lowtide.replay.arguments import tensors_in
from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.engines.planned import AppliedPlan
    from lowtide.engines.replanning import Planner

logger = logging.getLogger("lowtide")

Shapes = tuple[tuple[int, ...], ...]

_MOST_PLANS = 16
_MOST_REMEMBERED = 4096


@dataclass(frozen=True)
class Planned:
    """A plan, the inputs of the model that it holds for, and the arguments of `loss_fn`; its graph where there is one.

    `inputs` is empty where nobody knows.
    """

    plan: Plan
    decisions: Decisions
    inputs: tuple[Shapes, ...] = ()
    arguments: tuple[Shapes, ...] = ()
    graph: StepGraph | None = None


@dataclass(frozen=True)
class Replan:
    """Inputs that were larger than any plan was made for. `is_new` is False where the old plan stayed in force."""

    seen: Shapes
    planned_for: Shapes
    is_new: bool
    seconds: float


class ShapePlans:
    """The plans of a handle, by the inputs they are for."""

    hidden_from_replay = True

    def __init__(self, handle: AppliedPlan, first: Planned) -> None:
        self.planner: Planner | None = None  # who plans again; None: nobody
        self.replans: list[Replan] = []
        self._handle = handle
        self._planned = [first]
        self._chosen: dict[Shapes, Planned] = {}
        self._lock = threading.RLock()
        self._has_warned = False

    @property
    def all(self) -> list[Planned]:
        return list(self._planned)

    def become(self, planned: list[Planned]) -> None:
        """Other plans in place of those there are. Forwards that have begun go on by theirs."""
        with self._lock:
            self._planned = planned
            self._chosen.clear()

    def decisions_for(self, args: Any, kwargs: dict[str, Any]) -> Decisions:
        """The decisions for a forward of the model with these inputs; never an error."""
        if not self._planned[0].inputs:
            return self._handle.decisions  # nobody knows what they are for
        seen = shapes_of((args, kwargs))
        found = self._chosen.get(seen)
        if found is None:
            with self._lock:
                found = self._choose(seen, args, kwargs)
        self._handle.plan = found.plan
        return found.decisions

    def for_arguments(self, seen: Shapes) -> Planned | None:
        """The plan made for such arguments of `loss_fn`, or for larger ones."""
        return _smallest([p for p in self._planned if any(covers(shapes, seen) for shapes in p.arguments)])

    def largest(self) -> Planned:
        return max(self._planned, key=_elements)

    def add(self, planned: Planned, seen: Shapes, before: Shapes, target: Shapes, seconds: float) -> None:
        """One more plan, for up to `target`. A warning says that what was `seen` is larger than there was `before`."""
        with self._lock:
            self._planned.append(planned)
            self._chosen.clear()
        plan, budget_bytes = planned.plan, self.planner.budget_bytes if self.planner is not None else 0
        self.replans.append(Replan(seen, target, True, seconds))
        logger.warning(
            "inputs of %s are larger than the plan is for (%s): planned again, for up to %s, in %s; peak %s predicted, "
            "%s %s; %.1f %% slower predicted",
            in_words(seen),
            in_words(before),
            in_words(target),
            format_seconds(seconds),
            format_bytes(plan.peak_bytes),
            "within" if plan.peak_bytes <= budget_bytes else "the least there is, and more than",
            format_bytes(budget_bytes),
            100 * plan.slowdown,
        )

    def _choose(self, seen: Shapes, args: Any, kwargs: dict[str, Any]) -> Planned:
        found = _smallest([p for p in self._planned if any(covers(shapes, seen) for shapes in p.inputs)])
        if found is None:
            if self.planner is None:
                self._warn_once(seen)
                found = self.largest()
            elif is_traced((args, kwargs)):
                return self.largest()  # a trace, a transform, a capture: not the moment to plan
            else:
                found = self._plan_again(self.planner, seen, args, kwargs)
        if len(self._chosen) >= _MOST_REMEMBERED:
            self._chosen.clear()
        self._chosen[seen] = found
        return found

    def _plan_again(self, planner: Planner, seen: Shapes, args: Any, kwargs: dict[str, Any]) -> Planned:
        largest, start = self.largest(), time.perf_counter()
        if len(self._planned) >= _MOST_PLANS:
            return self._stay(largest, seen, f"there are {_MOST_PLANS} plans already", start)
        target = rounded_up(seen, largest.inputs[-1])
        try:
            plan, graph, target = planner.for_inputs(target, seen, args, kwargs)
            planned = Planned(plan, self._handle.take_in(plan), (target,), (), graph)
        except Exception as error:  # whatever it is, the user's forward has to go on
            return self._stay(largest, seen, f"{type(error).__name__}: {str(error).splitlines()[0][:200]}", start)
        self.add(planned, seen, largest.inputs[-1], target, time.perf_counter() - start)
        return planned

    def _stay(self, largest: Planned, seen: Shapes, why: str, start: float) -> Planned:
        logger.warning(
            "inputs of %s are larger than the plan is for (%s), and could not be planned for (%s): the plan stays in "
            "force, and its peak may not hold",
            in_words(seen),
            in_words(largest.inputs[-1]),
            why,
        )
        self.replans.append(Replan(seen, seen, False, time.perf_counter() - start))
        same = replace(largest, inputs=(seen,), arguments=())
        self._planned.append(same)
        return same

    def _warn_once(self, seen: Shapes) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "inputs of %s are larger than those the plan was made for (%s): its peak of %s may not hold. "
                "lowtide.fit plans again for larger inputs",
                in_words(seen),
                in_words(self._planned[0].inputs[-1]),
                format_bytes(self._planned[0].plan.peak_bytes),
            )


def shapes_of(tree: Any) -> Shapes:
    """The shapes of the tensors in nested arguments, in order."""
    return tuple(tuple(tensor.shape) for tensor in tensors_in(tree))


def num_elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)


def covers(planned: Shapes, seen: Shapes) -> bool:
    """Whether the same tensors came, none of them larger in any dimension.

    >>> covers(((8, 128),), ((4, 128),)), covers(((8, 128),), ((4, 256),))
    (True, False)
    """
    return len(planned) == len(seen) and all(
        len(a) == len(b) and all(have >= size for have, size in zip(a, b, strict=True))
        for a, b in zip(planned, seen, strict=True)
    )


def rounded_up(seen: Shapes, planned: Shapes) -> Shapes:
    """`seen`, with each dimension that has outgrown `planned` rounded up to a power of two or one and a half of one.

    >>> rounded_up(((8, 200),), ((16, 128),))
    ((8, 256),)
    """
    if [len(shape) for shape in seen] != [len(shape) for shape in planned]:
        return seen
    return tuple(
        tuple(_bucket(size) if size > have else size for size, have in zip(shape, known, strict=True))
        for shape, known in zip(seen, planned, strict=True)
    )


def _bucket(size: int) -> int:
    power = 1 << (size - 1).bit_length()
    return power * 3 // 4 if size <= power * 3 // 4 else power


def in_words(shapes: Shapes) -> str:
    """
    >>> in_words(((8, 128), ()))
    '8 x 128, a number'
    """
    shown = [" x ".join(map(str, shape)) or "a number" for shape in shapes[:3]]
    return ", ".join([*shown, "..."] if len(shapes) > 3 else shown) or "unknown shapes"


@contextmanager
def watched_inputs(model: nn.Module) -> Iterator[list[Shapes]]:
    """The shapes that the model is called with inside the block, each once."""
    seen: list[Shapes] = []

    def look(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        shapes = shapes_of((args, kwargs))
        if shapes not in seen:
            seen.append(shapes)

    hook = model.register_forward_pre_hook(look, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()
        seen.sort(key=num_elements)


def is_traced(inputs: Any) -> bool:
    """Whether a trace, a torch.func transform or a CUDA graph capture is running, rather than a step."""
    if _compat.under_functorch() or _compat.num_dispatch_modes() > 0:
        return True
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return True
    return any(type(tensor) not in _compat.PLAIN_TYPES or tensor.is_meta for tensor in tensors_in(inputs))


def _elements(planned: Planned) -> int:
    return max(map(num_elements, planned.inputs), default=0)


def _smallest(planned: list[Planned]) -> Planned | None:
    return min(planned, key=_elements, default=None)


def remembered(tensor: Tensor) -> Tensor:
    """What is kept of a tensor to make one like it later: shape and type, and whole numbers on the host."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta:
        return torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
    return tensor.detach().to("cpu", copy=True)


def recalled(kept: Tensor, device: torch.device) -> Tensor:
    """A tensor like the one that was remembered. Random states are as before."""
    if not kept.is_meta:
        return kept.to(device, copy=True)
    if device.type == "meta":
        return kept
    generator = torch.Generator(device).manual_seed(0)
    made = torch.randn(kept.shape, dtype=kept.dtype, device=device, generator=generator)
    return made.requires_grad_(kept.requires_grad)
