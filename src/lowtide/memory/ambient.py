"""What a function reads from around it without being passed it: random numbers and torch's global modes.

torch's checkpoint replays autocast and the default device itself. It keeps random states of the devices of positional
tensors only, and no generators; so all random states are kept here, and torch is told to keep none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from lowtide import _compat


class Ambient:
    """Random states of the CPU, the devices and the given generators, and torch's modes, as they were at one moment."""

    def __init__(
        self, devices: Iterable[torch.device], generators: Iterable[torch.Generator], *, preserve_rng_state: bool
    ) -> None:
        self._default_dtype = torch.get_default_dtype()
        self._random = _RandomStates.now(devices, generators) if preserve_rng_state else None

    @property
    def preserves_rng(self) -> bool:
        return self._random is not None

    def restore(self) -> Callable[[], None]:
        """Bring back what was around the forward; call the result to have all as it is now."""
        dtype = torch.get_default_dtype()
        random = None if self._random is None else self._random.again()
        outside_inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else None

        def undo() -> None:
            if random is not None:
                random.set()
            if dtype != self._default_dtype:
                torch.set_default_dtype(dtype)
            if outside_inference is not None:
                outside_inference.__exit__(None, None, None)

        if self._random is not None:
            self._random.set()
        if dtype != self._default_dtype:
            torch.set_default_dtype(self._default_dtype)
        if outside_inference is not None:
            outside_inference.__enter__()
        return undo


class _RandomStates:
    """States of generators at one moment."""

    def __init__(self, indices: Iterable[int], generators: Iterable[torch.Generator]) -> None:
        self._cpu = torch.get_rng_state()
        self._devices = tuple((index, _device_module().get_rng_state(index)) for index in indices)
        self._generators = tuple((generator, generator.get_state()) for generator in generators)

    @classmethod
    def now(cls, devices: Iterable[torch.device], generators: Iterable[torch.Generator]) -> _RandomStates:
        """The states that a call may draw from: of `devices`, of the current device, and of `generators`."""
        accelerator = _compat.accelerator()
        # Asking an accelerator that nothing has used yet would initialise it: seconds, and hundreds of MiB.
        if accelerator is None or not _device_module().is_initialized():
            return cls((), generators)
        indices = {device.index for device in devices if device.type == accelerator.type}
        return cls(sorted(indices | {_device_module().current_device()}), generators)

    def again(self) -> _RandomStates:
        """The states of the same generators now."""
        return _RandomStates([index for index, _ in self._devices], [generator for generator, _ in self._generators])

    def set(self) -> None:
        torch.set_rng_state(self._cpu)
        for index, state in self._devices:
            _device_module().set_rng_state(state, index)
        for generator, state in self._generators:
            generator.set_state(state)


@functools.cache
def _device_module() -> Any:
    return torch.get_device_module(_compat.accelerator())
