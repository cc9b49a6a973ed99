"""Capture and restore random states and torch's modes around a replay.

A forward depends on state of the process and of its thread: the states of random generators, autocast, the default
dtype and the default device. `region` captures them in an `Environment` before each forward and restores them for the
replay; afterwards the values of the backward are set again. A generator that counts an offset (CUDA's) is captured as
seed and offset, others as the bytes of their state. If the forward drew no random numbers, no states are kept.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from lowtide import _compat
from lowtide.replay.object_state import nothing

Autocast = tuple[tuple[str, torch.dtype], ...]  # the device types for which autocast is on, and to which dtype
Modes = tuple[torch.dtype, torch.device | None, Autocast]  # default dtype, default device
State = bytes | tuple[int, int]  # of a generator: all of it, or seed and offset


class Environment:
    """torch's modes and, unless `preserve_rng_state` is False, random states, as they are when this is made.

    The states are those of the CPU, of the current accelerator, of the accelerators in `devices` and of `generators`.
    """

    __slots__ = ("_generators", "_modes", "_states")

    def __init__(
        self, devices: Iterable[torch.device], generators: Sequence[torch.Generator], *, preserve_rng_state: bool
    ) -> None:
        self._modes = modes_now()
        self._generators = _generators(devices, generators) if preserve_rng_state else ()
        self._states: list[State] | None = list(map(_state_of, self._generators))

    def drew(self) -> bool:
        """Return whether random numbers were drawn since this object was made; if not, drop the captured states.

        A replay of code that drew no random numbers in the forward draws none either, and needs no states.
        """
        if self._states == list(map(_state_of, self._generators)):
            self._states = None
        return self._states is not None

    def is_current(self, devices: Iterable[torch.device], generators: Sequence[torch.Generator]) -> bool:
        """Return whether an `Environment` that is made now, with these arguments, would be the same."""
        return (
            modes_now() == self._modes
            and _generators(devices, generators) == self._generators
            and self._states == list(map(_state_of, self._generators))
        )

    def restore(self, *, is_watched: bool = False) -> Callable[[], None]:
        """Bring back what was around the forward; call the result to have all as it is now.

        A replay that `is_watched` by a dispatch mode may run other kernels, which draw where the forward's do not.
        """
        generators, now = self._generators if is_watched or self._states is not None else (), modes_now()
        has_modes = now != self._modes or torch.is_inference_mode_enabled()
        if not has_modes and not generators:
            return nothing
        states = list(map(_state_of, generators))
        dtype, contexts = now[0], self._contexts(now) if has_modes else ()

        def undo() -> None:
            for context in reversed(contexts):
                context.__exit__(None, None, None)
            _set_states(generators, states)
            if has_modes:
                torch.set_default_dtype(dtype)

        if self._states is not None:
            _set_states(generators, self._states)
        if has_modes:
            torch.set_default_dtype(self._modes[0])
        for context in contexts:
            context.__enter__()
        return undo

    def _contexts(self, now: Modes) -> list[AbstractContextManager[Any]]:
        """What brings back the forward's modes."""
        _, device, autocast = self._modes
        found: list[AbstractContextManager[Any]] = []
        if torch.is_inference_mode_enabled():
            found.append(torch.inference_mode(False))
        if now[2] != autocast:
            found += [torch.autocast(kind, dtype=dtype) for kind, dtype in autocast]
            kinds = dict(autocast)
            found += [torch.autocast(kind, enabled=False) for kind, _ in now[2] if kind not in kinds]
        if now[1] != device:
            found.append(device or torch.device("cpu"))
        return found


def modes_now() -> Modes:
    """torch's modes as they are."""
    autocast = _NO_AUTOCAST
    if _compat.is_any_autocast_enabled():
        kinds = _device_types()
        autocast = tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind))
    return torch.get_default_dtype(), _compat.default_device(), autocast


_NO_AUTOCAST: Autocast = ()


@functools.cache
def _device_types() -> tuple[str, ...]:
    accelerator = _compat.accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


class RandomStates:
    """The states at one moment of the generators that an op on some devices may draw from."""

    __slots__ = ("_generators", "_states")

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._generators = _generators(devices, ())
        self._states = list(map(_state_of, self._generators))

    def set(self) -> bool:
        """Let the generators go on from here. False if that is after another seed than they have now."""
        seeds = self._seeds()
        _set_states(self._generators, self._states)
        return seeds == self._seeds()

    def _seeds(self) -> list[int]:
        pairs = zip(self._generators, self._states, strict=True)
        # While a CUDA graph is captured there are only whole states, and no other seed can be set.
        return [each.initial_seed() for each, state in pairs if each.device.type == "cpu" or type(state) is tuple]

    def are_current(self) -> bool:
        return self._states == list(map(_state_of, self._generators))


def _state_of(generator: torch.Generator) -> State:
    if generator is torch.default_generator or generator.device.type != "cuda":
        return _whole_state_of(generator)
    if torch.cuda.is_current_stream_capturing():
        # Whole states then count from the start of the graph, and setting one leads the kernels captured next to these
        # numbers (torch 2.11); offsets are refused.
        return _whole_state_of(generator)
    return generator.initial_seed(), generator.get_offset()


def _whole_state_of(generator: torch.Generator) -> bytes:
    with _compat.without_modes():  # a fake tensor is no state
        state = generator.get_state()
        return ctypes.string_at(state.data_ptr(), state.nbytes)  # half the time of a copy by numpy


def _set_whole_state(generator: torch.Generator, state: bytes) -> None:
    with _compat.without_modes():
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))  # allocates no tensor memory


def _set_states(generators: Sequence[torch.Generator], states: Sequence[State]) -> None:
    for generator, state in zip(generators, states, strict=True):
        if isinstance(state, bytes):
            _set_whole_state(generator, state)
            continue
        seed, offset = state
        if generator.initial_seed() != seed:
            generator.manual_seed(seed)
        generator.set_offset(offset)


def _generators(devices: Iterable[torch.device], generators: Sequence[torch.Generator]) -> tuple[torch.Generator, ...]:
    found: tuple[torch.Generator, ...] = _CPU_GENERATOR
    if _compat.accelerator() is not None and _is_initialized():
        if _num_devices() == 1:
            found = _default_generators(frozenset({0}))
        else:
            indices = {device.index for device in devices if device.type != "cpu"}
            found = _default_generators(frozenset(indices | {_compat.current_device_index()}))
    return (*found, *generators) if generators else found


_CPU_GENERATOR = (torch.default_generator,)


def _is_initialized() -> bool:
    """Asking an accelerator that nothing has used yet would initialise it: seconds, and hundreds of MiB."""
    return _device_module().is_initialized()


@functools.cache
def _num_devices() -> int:
    return torch.accelerator.device_count()


@functools.cache
def _default_generators(indices: frozenset[int]) -> tuple[torch.Generator, ...]:
    """The CPU's and those of the accelerators with these indices."""
    accelerator = _compat.accelerator()
    assert accelerator is not None
    return (*_CPU_GENERATOR, *(_compat.default_generator(accelerator.type, index) for index in sorted(indices)))


@functools.cache
def _device_module() -> Any:
    return torch.get_device_module(_compat.accelerator())
