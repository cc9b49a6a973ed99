"""Devices: the default device, the current accelerator, random generators, and the caching allocator's counters.

Replays restore the default device and the generators' states; tracing reads the allocator around every op; captured
steps look for ops that synchronise. Each docstring ends with the change of torch that would make it obsolete.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from lowtide._compat.dispatch import PlainDispatchMode
from lowtide._compat.internals import required

_DEFAULT = "replays cannot restore the default device of their forward"
_num_function_modes = required("torch._C._len_torch_function_stack", _DEFAULT)


def default_device() -> torch.device | None:
    """Return the device of `torch.set_default_device` or `with torch.device(...)` if one is in force in this thread.

    Obsolete when `torch.get_default_device` distinguishes a device that was set, and is as fast.
    """
    if not _num_function_modes():
        return None
    function_modes = required("torch.overrides._get_current_function_mode_stack", _DEFAULT)
    context = required("torch.utils._device.DeviceContext", _DEFAULT)
    return next((mode.device for mode in reversed(function_modes()) if isinstance(mode, context)), None)


def default_generator(kind: str, index: int) -> torch.Generator:
    """Return the generator that ops on a device draw from by default.

    Obsolete when every device module has `default_generators`.
    """
    module = torch.get_device_module(kind)
    generators = getattr(module, "default_generators", None)
    return generators[index] if generators else module._get_default_mps_generator()


@functools.cache
def accelerator() -> torch.device | None:
    """Return the accelerator of this process, if torch was built for one and finds it. Public API, cached."""
    return torch.accelerator.current_accelerator(check_available=True)


def generator_id(generator: torch.Generator) -> int:
    """Return a number that identifies a generator: dispatch modes get a new Python object for it in each call.

    Relies on `Generator._cdata`; obsolete when generators compare equal.
    """
    return generator._cdata


class SynchronizingOps(PlainDispatchMode):
    """A dispatch mode that lists the ops that make the host wait for the device: `(op, where())` in `found`.

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
    """Return a function that reads the bytes allocated now and their peak since it was last called.

    None on the CPU, whose allocator has no counters. Obsolete when `torch.accelerator.memory_allocated` is as fast.
    """
    if device.type != "cuda":
        return None

    allocator = "the memory of an op cannot be measured on the device"
    stats = required("torch._C._cuda_memoryStats", allocator)
    reset_peak = required("torch._C._cuda_resetPeakMemoryStats", allocator)

    def read() -> tuple[int, int]:
        counted = stats(device.index)["allocated_bytes"]["all"]
        reset_peak(device.index)
        return counted["current"], counted["peak"]

    return read
