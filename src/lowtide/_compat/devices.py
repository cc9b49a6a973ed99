"""Devices, generators and allocators."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def default_device() -> torch.device | None:
    """The device of `torch.set_default_device` or `with torch.device(...)`, if one is in force in this thread.

    Obsolete when `torch.get_default_device` tells a device that was set from none, and takes no microseconds.
    """
    if not torch._C._len_torch_function_stack():
        return None
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext

    modes = reversed(_get_current_function_mode_stack())
    return next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)


def current_device_index() -> int:
    """The index of the current accelerator, which is initialised. Obsolete when torch's own takes no microseconds."""
    return torch._C._accelerator_getDeviceIndex()


def default_generator(kind: str, index: int) -> torch.Generator:
    """The generator that ops on a device draw from. Obsolete when every device module has `default_generators`."""
    module = torch.get_device_module(kind)
    generators = getattr(module, "default_generators", None)
    return generators[index] if generators else module._get_default_mps_generator()


@functools.cache
def accelerator() -> torch.device | None:
    """The accelerator of this process, if torch was built for one and finds it."""
    return torch.accelerator.current_accelerator(check_available=True)


def generator_id(generator: torch.Generator) -> int:
    """The same number for every Python object of one generator: a dispatch mode is given another one each time."""
    return generator._cdata


class SynchronizingOps(TorchDispatchMode):
    """Notes the ops that make the host wait for the device: `(op, where())` for each.

    Obsolete when torch's sync debug mode names the op.
    """

    def __init__(self, where: Callable[[], Any]) -> None:
        super().__init__()
        self.found: list[tuple[str, Any]] = []
        self._where = where

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = torch.cuda.get_sync_debug_mode()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that this is a prototype
                torch.cuda.set_sync_debug_mode("error")
            return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            self.found.append((str(func), self._where()))
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return func(*args, **(kwargs or {}))


def allocator_meter(device: torch.device) -> Callable[[], tuple[int, int]] | None:
    """Reads bytes allocated now and the most since it was last read; None on the CPU, whose allocator does not count.

    Obsolete when `torch.accelerator.memory_allocated` is as quick.
    """
    if device.type != "cuda":
        return None

    def read() -> tuple[int, int]:
        counted = torch._C._cuda_memoryStats(device.index)["allocated_bytes"]["all"]
        torch._C._cuda_resetPeakMemoryStats(device.index)
        return counted["current"], counted["peak"]

    return read
