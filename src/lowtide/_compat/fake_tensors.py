"""Fake tensors: tensors with shapes and devices but without memory, in which steps are traced without being run.

`tracing` makes them, runs ops on them and handles their errors; `store` and `replay` recognise them. The last function
patches transformers, which takes another code path for fake tensors than for real ones. Modules are imported inside of
functions, as fake tensors import much of torch. Each docstring ends with the change that would make it obsolete.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from lowtide._compat.internals import optional, required
from lowtide._compat.tensors import disable_modes

_TRACE = "steps cannot be traced on fake tensors"


def fake_mode() -> Any:
    """Return a mode in which new tensors are fake and real inputs are allowed.

    Obsolete when `torch.compiler` or `torch.utils` exports `FakeTensorMode`.
    """
    kind = required("torch._subclasses.fake_tensor.FakeTensorMode", _TRACE)
    return (_mode_of_largest_shapes(kind) if _largest_shapes.get() else kind)(allow_non_fake_inputs=True)


_largest_shapes: ContextVar[bool] = ContextVar("fake tensors take all elements to be nonzero", default=False)


@contextlib.contextmanager
def largest_shapes() -> Iterator[None]:
    """Run a block in whose fake modes all elements count as nonzero, so that `x[mask]` has its largest shape.

    Otherwise a fake tensor raises, as the shape depends on values. Obsolete when fake tensors offer such a bound.
    """
    token = _largest_shapes.set(True)
    try:
        yield
    finally:
        _largest_shapes.reset(token)


@functools.cache
def _mode_of_largest_shapes(kind: Any) -> Any:
    nonzero = torch.ops.aten.nonzero.default

    class ModeOfLargestShapes(kind):  # type: ignore[misc, valid-type]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is not nonzero:
                return super().__torch_dispatch__(func, types, args, kwargs)
            with self:
                return torch.empty((args[0].numel(), args[0].ndim), dtype=torch.int64, device=args[0].device)

    return ModeOfLargestShapes


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor is fake; none is before torch's module of them was imported. Obsolete likewise."""
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    return fake is not None and isinstance(tensor, fake.FakeTensor)


@functools.cache
def fake_type() -> type[Tensor]:
    """Return the class of fake tensors. Obsolete likewise."""
    return required("torch._subclasses.fake_tensor.FakeTensor", _TRACE)


_no_dispatch = required("torch._C._DisableTorchDispatch", _TRACE)


class FakeAlias:
    """Holds the storage of a fake tensor, and makes aliases of the tensor, without running an op.

    `detach` of a fake tensor takes a tenth of a millisecond, and a trace needs two for each saved tensor. Relies on the
    constructor of `FakeTensor`; obsolete when `detach` is fast.
    """

    __slots__ = ("_device", "_held", "_kind", "_mode")

    def __init__(self, fake: Any) -> None:
        self._kind, self._mode, self._device = type(fake), fake.fake_mode, fake.fake_device
        with _no_dispatch():
            self._held = fake.detach()

    @staticmethod
    def is_possible(tensor: Any, kind: type) -> bool:
        """Whether a tensor is of the fake type `kind` and has no value that an alias would have to carry over."""
        return type(tensor) is kind and tensor.constant is None and tensor.real_tensor is None

    def detach(self) -> Tensor:
        with _no_dispatch():
            return self._kind(self._mode, self._held.detach(), self._device)


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """Run a block in which fake tensors raise their errors without logging them as well.

    Relies on the name of their logger; obsolete when they only raise.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = was


def fake_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that fake tensors raise where a size or a branch depends on values, or an op is unknown.

    Obsolete when these have a public base class.
    """
    names = ("DataDependentOutput", "DynamicOutputShape", "UnsupportedOperator", "UnsupportedFakeTensor")
    paths = (f"torch._subclasses.fake_tensor.{name}Exception" for name in names)
    return tuple(error for error in (optional(path, None) for path in paths) if error is not None)


@contextlib.contextmanager
def without_fake_mode() -> Iterator[None]:
    """Run a block in which new tensors are real, inside of a compiler pass that works on fake ones.

    Obsolete when `torch.compiler` lets a backend run an op.
    """
    unset_fake = required(
        "torch._subclasses.fake_tensor.unset_fake_temporarily", "ops cannot be timed in a compiler pass"
    )
    with unset_fake(), disable_modes():
        yield


@contextlib.contextmanager
def fakes_hidden_from_transformers() -> Iterator[None]:
    """Run a block in which transformers treats fake tensors like real ones.

    For fake tensors it builds attention masks and repeats keys where a real step does not, so that the trace would be
    larger than the step. Code that then reads values fails, and the caller traces again without this patch. Obsolete
    when transformers takes the same path for both.
    """
    module = sys.modules.get("transformers.utils.import_utils")
    original = getattr(module, "is_fake_tensor", None)
    if module is None or original is None:
        yield
        return
    module.is_fake_tensor = lambda tensor: False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.is_fake_tensor = original  # type: ignore[attr-defined]
