"""The private torch API that tracing needs, one small function each, with what would make it obsolete.

Libraries that take another path when they see fake tensors, asked to take the one of a plain step.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def fake_mode() -> Any:
    """Tensors that have shapes and devices and no bytes. Obsolete when `torch.compiler` or `torch.utils` exports it."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: Tensor) -> bool:
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    return fake is not None and isinstance(tensor, fake.FakeTensor)


def fake_type() -> type:
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """A block in which fake tensors raise and do not also log; their logger has no public name."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = was


def fake_kernel(op: Any) -> Callable[..., Any]:
    """What runs an op on fake tensors: the op itself, or a kernel for what torch's fake version of it refuses."""
    return _fake_grouped_mm if op is torch.ops.aten._grouped_mm.default else op


def _fake_grouped_mm(a: Tensor, b: Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Tensor:
    """`_grouped_mm` in any dtype that its kernels take. torch 2.13's fake version takes bfloat16 alone."""
    from torch._meta_registrations import _create_grouped_mm_output_tensor

    return _create_grouped_mm_output_tensor(a, b, offs, out_dtype)


def fake_errors() -> tuple[type[Exception], ...]:
    """What fake tensors raise where only real numbers would tell: sizes or branches that depend on data."""
    from torch._subclasses import fake_tensor

    return (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedOperatorException,
        fake_tensor.UnsupportedFakeTensorException,
    )


@contextlib.contextmanager
def without_fake_mode() -> Iterator[None]:
    """A block in which tensors are real, in the middle of a compiler's pass over fake ones.

    Obsolete when `torch.compiler` lets a backend run an op.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.utils._python_dispatch import _disable_current_modes

    with unset_fake_temporarily(), _disable_current_modes():
        yield


@contextlib.contextmanager
def fakes_hidden_from_transformers() -> Iterator[None]:
    """A block in which transformers does not notice that its tensors are fake.

    It would build attention masks and repeat keys that a plain step does without, so that the step traced would be
    larger than the one that runs. Where it then asks for numbers there are none, and the trace is made the other way.
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
