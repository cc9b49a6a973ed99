"""Tensors, storages, devices and generators: kinds of tensors, the plain ones inside of subclasses, and identities.

Tracing, replays and the store count memory by storage: they need an identity that is not reused while they hold it,
a test whether a storage is still alive, and the number of tensors that share it. Replays restore the default device and
the generators' states.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lowtide._compat.internals import required

_MODES = "ops cannot be hidden from dispatch modes, as every trace and replay does"
num_dispatch_modes: Callable[[], int] = required("torch._C._len_torch_dispatch_stack", _MODES)  # of this thread
disable_modes = required("torch.utils._python_dispatch._disable_current_modes", _MODES)

_FUNCTORCH = "tensors of torch.func transforms cannot be recognised"
_is_functorch_tensor = required("torch._C._functorch.is_functorch_wrapped_tensor", _FUNCTORCH)
_unwrapped = required("torch._C._functorch.get_unwrapped", _FUNCTORCH)

_num_uses = required("torch._C._storage_Use_Count", "traces cannot count the tensors that share a storage")

_LIFETIMES = "storages cannot be observed without keeping them alive, as the store and retained outputs do"
_weak_ref = required(
    "torch.UntypedStorage._weak_ref",
    _LIFETIMES,
    also=tuple(f"torch.UntypedStorage.{name}" for name in ("_free_weak_ref", "_expired", "_new_with_weak_ptr")),
)
_free_weak_ref: Callable[[int], None] = required("torch.UntypedStorage._free_weak_ref", _LIFETIMES)

_LAZY_TYPES = (nn.UninitializedParameter, nn.UninitializedBuffer)

PLAIN_TYPES = (Tensor, nn.Parameter)


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is a strided `Tensor` or `Parameter`: not sparse, nested or of another subclass."""
    return type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided and not tensor.is_nested


def is_copyable(tensor: Tensor) -> bool:
    """Return whether a tensor can be overwritten by `copy_`: plain, and no two elements share memory as in `expand`."""
    return is_plain(tensor) and not any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def is_uninitialized(tensor: Tensor) -> bool:
    """Return whether this is a lazy module's parameter or buffer before its first forward."""
    return type(tensor) in _LAZY_TYPES  # isinstance() goes through a slow metaclass here


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this is a DTensor. Reads `sys.modules`; obsolete when importing torch.distributed is fast."""
    dtensor = sys.modules.get("torch.distributed.tensor")
    return dtensor is not None and isinstance(tensor, dtensor.DTensor)


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor's values can be read: not for fake, meta, functional and other wrapped tensors."""
    return type(tensor) in PLAIN_TYPES and not tensor.is_meta and num_dispatch_modes() == 0


class StorageReference:
    """A weak reference to a tensor's storage. No other storage gets the same `id` while the reference exists.

    Obsolete when `weakref.ref(tensor.untyped_storage())` follows the storage on every version of torch allowed.
    """

    __slots__ = ("id",)

    def __init__(self, tensor: Tensor) -> None:
        self.id: int = 0
        self.id = _weak_ref(tensor.untyped_storage())

    # A default argument, as module globals may be gone when Python ends.
    def __del__(self, free: Callable[[int], None] = _free_weak_ref) -> None:
        if self.id:
            free(self.id)

    def is_alive(self) -> bool:
        return not torch.UntypedStorage._expired(self.id)

    def num_uses(self) -> int:
        """Return how many tensors share the storage. Obsolete with a public use count."""
        return _num_uses(self.id) - _uses_by_python() if self.is_alive() else 0

    def as_tensor(self, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
        """Return a tensor at the beginning of the storage, which must be alive."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.id)
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, shape, stride)


def storage_id(tensor: Tensor) -> int:
    """Return a number that identifies a tensor's storage while that is alive. Relies on `UntypedStorage._cdata`."""
    return tensor.untyped_storage()._cdata


def is_view(tensor: Tensor) -> bool:
    """Return whether autograd knows a tensor as a view of another. Relies on `Tensor._is_view`."""
    return bool(tensor._is_view())


def is_own(tensor: Tensor) -> bool:
    """Return whether a plain tensor starts its storage and holds its values as they are.

    Lazily conjugated or negated, quantized and zero tensors do not. Relies on `Tensor._is_zerotensor`; obsolete with a
    public one.
    """
    return (
        is_plain(tensor)
        and tensor.storage_offset() == 0
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor._is_zerotensor())
    )


def storages_of(tensor: Tensor) -> list[int]:
    """List the ids of the storages that hold a tensor's bytes: several for a wrapper of several tensors."""
    return list(dict.fromkeys(storage_id(part) for part in parts_of(tensor)))


def local_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor that this process holds: of a DTensor, those of its shard. Obsolete likewise."""
    return sum(part.nbytes for part in parts_of(tensor))


def parts_of(tensor: Tensor) -> Sequence[Tensor]:
    """Return the plain tensors that hold a tensor's bytes: itself, or those inside a wrapper subclass, at any depth.

    Relies on `__tensor_flatten__`, on the parts of sparse layouts and on functorch's wrappers; obsolete with a public
    function that lists them.
    """
    if type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided and not _is_functorch_tensor(tensor):
        return (tensor,)  # the usual case
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        held = (getattr(tensor, name) for name in names)  # a DTensor lists its mesh too
        return [inner for part in held if isinstance(part, Tensor) for inner in parts_of(part)]
    if tensor.layout is not torch.strided:
        parts = {
            torch.sparse_coo: ("_indices", "_values"),
            torch.sparse_csr: ("crow_indices", "col_indices", "values"),
        }.get(tensor.layout, ())
        with disable_modes():
            return [part for name in parts for part in parts_of(getattr(tensor, name)())]
    while _is_functorch_tensor(tensor):
        tensor = _unwrapped(tensor)
    return (tensor,)


@functools.cache
def _uses_by_python() -> int:
    """Return what a storage's Python object adds to its use count, which differs between versions of torch."""
    with disable_modes():
        tensor = torch.empty(1)
        return _num_uses(StorageReference(tensor).id) - 1


_LAZY = "no tensor can stand for logits that are not computed yet, as split=True needs"
_make_wrapper = required("torch.Tensor._make_wrapper_subclass", _LAZY)
without_torch_function = required("torch._C.DisableTorchFunctionSubclass", _LAZY)


def wrapper_tensor(kind: type[Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of a subclass with this shape and no memory. Obsolete with a public `_make_wrapper_subclass`."""
    return _make_wrapper(kind, tuple(shape), dtype=dtype, device=device)


# Devices and generators.

_DEFAULT = "replays cannot restore the default device of their forward"
_num_function_modes = required("torch._C._len_torch_function_stack", _DEFAULT)
_function_modes = required("torch.overrides._get_current_function_mode_stack", _DEFAULT)
_DeviceContext = required("torch.utils._device.DeviceContext", _DEFAULT)


def default_device() -> torch.device | None:
    """Return the device of `torch.set_default_device` or `with torch.device(...)` if one is in force in this thread.

    Obsolete when `torch.get_default_device` distinguishes a device that was set, and is as fast.
    """
    if not _num_function_modes():
        return None
    return next((mode.device for mode in reversed(_function_modes()) if isinstance(mode, _DeviceContext)), None)


def default_generator(kind: str, index: int) -> torch.Generator:
    """Return a device's default generator. Obsolete when every device module has `default_generators`."""
    module = torch.get_device_module(kind)
    generators = getattr(module, "default_generators", None)
    return generators[index] if generators else module._get_default_mps_generator()


@functools.cache
def accelerator() -> torch.device | None:
    """Return the accelerator of this process, if torch was built for one and finds it. Public API, cached."""
    return torch.accelerator.current_accelerator(check_available=True)


def generator_id(generator: torch.Generator) -> int:
    """Return a number for a generator: modes get a new object for it in each call. Relies on `Generator._cdata`."""
    return generator._cdata
