"""Fake tensors: tensors with shapes and devices but without memory, in which steps are traced without being run.

`tracing` makes them, runs ops on them (`FakeKernels`) and handles their errors; `store` and `replay` recognise them.
`fakes_hidden_from_transformers` patches transformers, which takes another code path for fake tensors than for real
ones. Modules are imported inside of functions, as fake tensors import much of torch.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide._compat.internals import optional, required
from lowtide._compat.tensors import PLAIN_TYPES, disable_modes, storage_id

_TRACE = "steps cannot be traced on fake tensors"


def fake_mode() -> Any:
    """Return a mode in which new tensors are fake and real inputs allowed. Obsolete with a public `FakeTensorMode`."""
    kind = required("torch._subclasses.fake_tensor.FakeTensorMode", _TRACE)
    return (_mode_of_largest_shapes(kind) if _largest_shapes.get() else kind)(allow_non_fake_inputs=True)


def allow_nested(mode: Any) -> None:
    """Let a fake mode take nested tensors that were in a step before. Relies on `FakeTensorMode.shape_env`.

    Such a tensor has a symbolic length, for which the mode needs an environment; other sizes stay numbers. Obsolete
    when `from_tensor` takes them without.
    """
    if mode.shape_env is None:
        mode.shape_env = required("torch.fx.experimental.symbolic_shapes.ShapeEnv", _TRACE)()
        mode.static_shapes = True


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
    if type(tensor) in PLAIN_TYPES:  # most are, and compiled blocks ask in every call
        return False
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
    """Run a block in which fake tensors do not log the errors that they raise. Relies on the name of their logger."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = was


@contextlib.contextmanager
def scripts_run_op_by_op() -> Iterator[None]:
    """Run a block in which this thread runs TorchScript's functions op by op.

    After a few runs TorchScript fuses ops into kernels of its own, which read the memory of their arguments. Fake
    tensors have none: on CUDA that is an illegal memory access, after which the process cannot use the device. Fused
    code is dropped before each call, and fused anew when the function runs outside of such a block. Obsolete when
    TorchScript runs fake tensors op by op itself.
    """
    kinds = [kind for kind in (optional(f"torch._C.{name}", None) for name in _SCRIPT_KINDS) if kind is not None]
    before = [kind.__call__ for kind in kinds]
    tracing_thread = threading.get_ident()

    def op_by_op(call: Any) -> Any:
        def run(function: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != tracing_thread:
                return call(function, *args, **kwargs)
            function._debug_flush_compilation_cache()
            with torch.jit.optimized_execution(False):
                return call(function, *args, **kwargs)

        return run

    for kind, call in zip(kinds, before, strict=True):
        kind.__call__ = op_by_op(call)
    try:
        yield
    finally:
        for kind, call in zip(kinds, before, strict=True):
            kind.__call__ = call


_SCRIPT_KINDS = ("ScriptFunction", "ScriptMethod")


def fake_errors() -> tuple[type[Exception], ...]:
    """Return what fake tensors raise for unknown values, shapes and ops. Obsolete with a public base class."""
    names = ("DataDependentOutput", "DynamicOutputShape", "UnsupportedOperator", "UnsupportedFakeTensor")
    paths = (f"torch._subclasses.fake_tensor.{name}Exception" for name in names)
    return tuple(error for error in (optional(path, None) for path in paths) if error is not None)


@contextlib.contextmanager
def without_fake_mode() -> Iterator[None]:
    """Run a block with real tensors in a compiler pass on fake ones. Obsolete when a backend may run ops."""
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


_grouped_mm = optional("torch.ops.aten._grouped_mm.default", None)
_dispatch_keys = required("torch._C._dispatch_key_set", _TRACE)
_plain_types = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)


class _Made(NamedTuple):
    """An output of an op: the metadata of a fake tensor, and the argument whose storage it shares (-1: none)."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int
    source: int


class FakeKernels:
    """Calls ops on fake tensors. An op whose arguments look like those of an earlier call returns what that did.

    A step repeats the same ops on the same shapes, block after block and recording after recording. Torch's cache of
    fake kernels takes about a quarter of a millisecond for an op that it has seen, close to half the time of a trace.

    Only the metadata of outputs is kept. Ops that write, that depend on values, that are not torch's own or that have
    arguments of other kinds always run. Relies on `FakeTensor`'s constructor and attributes; obsolete when a hit in the
    cache of `FakeTensorMode` is fast.
    """

    _MOST = 20_000  # calls to remember

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Any] = {}

    def __call__(self, op: Any, args: Any, kwargs: Any) -> Any:
        if op is _grouped_mm:
            return _fake_grouped_mm(*args, **kwargs)
        key: list[Any] = [op, torch.get_default_dtype(), *kwargs]
        given = _Given(fake_type())
        if not (_is_functional(op) and given.add(args, key) and given.add(kwargs.values(), key) and given.tensors):
            return op(*args, **kwargs)
        known = self._known.get(full := tuple(key))
        if known is not None:
            kind, parts = known
            outputs = [given.make(part) if type(part) is _Made else part for part in parts]
            return outputs[0] if kind is Tensor else kind(outputs)
        out = op(*args, **kwargs)
        if len(self._known) >= self._MOST:
            self._known.clear()
        kind, outputs = (Tensor, [out]) if isinstance(out, Tensor) else (type(out), out)
        if kind in (Tensor, tuple, list) and (parts := given.parts_of(outputs)) is not None:
            self._known[full] = kind, parts
        return out


@functools.cache
def _is_functional(op: Any) -> bool:
    """Whether an op is torch's own, writes to nothing, and gives what its arguments' metadata says."""
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
    return (
        isinstance(op, torch._ops.OpOverload)
        and op.namespace == "aten"
        and not op._schema.is_mutable
        and "lift" not in op._schema.name
        and tags.isdisjoint(op.tags)
    )


class _Given:
    """The fake tensors among the arguments of one call, and the tensors that its outputs are made of."""

    __slots__ = ("_fake", "mode", "tensors")

    def __init__(self, fake: Any) -> None:
        self._fake, self.mode, self.tensors = fake, None, list[Any]()

    def add(self, items: Any, key: list[Any]) -> bool:
        """Append the arguments' metadata to `key`; False if one is of a kind whose outputs are not remembered."""
        for item in items:
            kind = type(item)
            if kind is self._fake:
                if not self._is_plain(item):
                    return False
                key.append((item.shape, item.stride(), item.storage_offset(), item.dtype, item.fake_device))
                self.tensors.append(item)
            elif kind in _plain_types:
                key.append((kind, item))
            elif kind is list or kind is tuple:
                key.append(len(item))
                if not self.add(item, key):
                    return False
            else:
                return False
        return True

    def _is_plain(self, fake: Any) -> bool:
        if self.mode is None and fake.fake_mode.shape_env is None:
            self.mode = fake.fake_mode
        return (
            fake.fake_mode is self.mode
            and fake.constant is None
            and fake.real_tensor is None
            and fake.layout is torch.strided
            and not fake.dtype.is_complex  # such tensors may be conjugated lazily
            and not fake.is_neg()
            and not fake.is_inference()
        )

    def parts_of(self, outputs: Any) -> list[Any] | None:
        """What these outputs are made of; None if that is more than metadata."""
        storages = [storage_id(tensor) for tensor in self.tensors]
        parts: list[Any] = []
        new: set[int] = set()
        for each in outputs:
            if each is None or type(each) is int:
                parts.append(each)
                continue
            if type(each) is not self._fake or not self._is_plain(each):
                return None
            storage = storage_id(each)
            if storage in new or storages.count(storage) > 1:
                return None
            source = storages.index(storage) if storage in storages else -1
            if source < 0:
                new.add(storage)
            made = _Made(each.shape, each.stride(), each.dtype, each.fake_device, each.storage_offset(), source)
            again = self.make(made)
            if (
                _dispatch_keys(again) != _dispatch_keys(each)
                or again.untyped_storage().nbytes() != each.untyped_storage().nbytes()
                or (again.storage_offset(), again.requires_grad) != (made.offset, each.requires_grad)
            ):
                return None
            parts.append(made)
        return parts

    def make(self, made: _Made) -> Tensor:
        with _no_dispatch():
            if made.source < 0:
                tensor = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
            else:
                tensor = torch.empty(0, dtype=made.dtype, device="meta")
                tensor.set_(self.tensors[made.source].untyped_storage(), made.offset, made.shape, made.stride)
            return self._fake(self.mode, tensor, made.device)


def _fake_grouped_mm(a: Tensor, b: Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Tensor:
    """Return the output of `_grouped_mm` in any dtype. Obsolete when torch's fake takes more than bfloat16."""
    output = required("torch._meta_registrations._create_grouped_mm_output_tensor", _TRACE)
    return output(a, b, offs, out_dtype)
