"""What a function reads from around it without being passed it: random numbers and torch's modes.

The replay of a region draws the forward's random numbers, under the forward's autocast, default dtype and default
device; afterwards everything is as the backward had it. A generator that counts an offset (CUDA's) is captured as two
numbers, others as a copy of their state.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from lowtide import _compat

Autocast = tuple[tuple[str, torch.dtype], ...]  # the device types for which autocast is on, and to which dtype


class Environment:
    """torch's modes and random states at one moment. `capture` makes one."""

    __slots__ = ("_autocast", "_default_device", "_default_dtype", "_generators", "_states")

    def __init__(self, generators: tuple[torch.Generator, ...]) -> None:
        self._default_dtype = torch.get_default_dtype()
        self._default_device = _compat.default_device()
        self._autocast = _autocast()
        self._generators = generators
        self._states = _states_of(generators)

    @property
    def has_random_states(self) -> bool:
        return bool(self._generators)

    def is_like(self, other: Environment) -> bool:
        return (
            self._generators == other._generators
            and self._states == other._states
            and self._default_dtype is other._default_dtype
            and self._default_device == other._default_device
            and self._autocast == other._autocast
        )

    def restore(self) -> Callable[[], None]:
        """Bring back what was around the forward; call the result to have all as it is now."""
        dtype = torch.get_default_dtype()
        states = _states_of(self._generators)
        contexts = self._contexts()

        def undo() -> None:
            for context in reversed(contexts):
                context.__exit__(None, None, None)
            _set_states(self._generators, states)
            if dtype != self._default_dtype:
                torch.set_default_dtype(dtype)

        _set_states(self._generators, self._states)
        if dtype != self._default_dtype:
            torch.set_default_dtype(self._default_dtype)
        for context in contexts:
            context.__enter__()
        return undo

    def _contexts(self) -> list[AbstractContextManager[Any]]:
        """What differs from the forward's modes; nothing, mostly."""
        found: list[AbstractContextManager[Any]] = []
        if torch.is_inference_mode_enabled():
            found.append(torch.inference_mode(False))
        now = _autocast()
        if now != self._autocast:
            found += [torch.autocast(kind, dtype=dtype) for kind, dtype in self._autocast]
            kinds = dict(self._autocast)
            found += [torch.autocast(kind, enabled=False) for kind, _ in now if kind not in kinds]
        if _compat.default_device() != self._default_device:
            found.append(self._default_device or torch.device("cpu"))
        return found


class _Last(threading.local):
    """What was captured last in this thread. Regions that draw no random numbers share it."""

    environment: Environment | None = None


_last = _Last()


def capture(
    devices: Iterable[torch.device], generators: Iterable[torch.Generator], *, preserve_rng_state: bool
) -> Environment:
    """torch's modes and, unless `preserve_rng_state` is False, random states, as they are now.

    The states are those of the CPU, of the current accelerator, of the accelerators in `devices` and of `generators`.
    """
    captured = Environment(_generators(devices, generators) if preserve_rng_state else ())
    last = _last.environment
    if last is not None and captured.is_like(last):
        return last
    _last.environment = captured
    return captured


def _autocast() -> Autocast:
    accelerator = _compat.accelerator()
    kinds = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind))


class RandomStates:
    """The states at one moment of the generators that an op on some devices may draw from."""

    __slots__ = ("_generators", "_states")

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._generators = _generators(devices, ())
        self._states = _states_of(self._generators)

    def set(self) -> bool:
        """Let the generators go on from here. False if that is after another seed than they have now."""
        seeds = self._seeds()
        _set_states(self._generators, self._states)
        return seeds == self._seeds()

    def _seeds(self) -> list[int]:
        pairs = zip(self._generators, self._states, strict=True)
        # While a CUDA graph is captured there are only whole states, and nobody may ask for a seed.
        return [each.initial_seed() for each, state in pairs if each.device.type == "cpu" or type(state) is tuple]

    def are_current(self) -> bool:
        return _states_of(self._generators) == self._states


# Bytes and numbers, which Python's garbage collector does not track: a copy of a state, or seed and offset.
State = bytes | tuple[int, int]


def _states_of(generators: tuple[torch.Generator, ...]) -> tuple[State, ...]:
    return tuple([_state_of(generator) for generator in generators])


def _state_of(generator: torch.Generator) -> State:
    if generator.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        return generator.initial_seed(), generator.get_offset()
    with _compat.without_modes():  # a fake tensor has no bytes
        return generator.get_state().numpy().tobytes()


def _set_states(generators: tuple[torch.Generator, ...], states: tuple[State, ...]) -> None:
    for generator, state in zip(generators, states, strict=True):
        if isinstance(state, bytes):
            with _compat.without_modes():
                generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
            continue
        seed, offset = state
        if generator.initial_seed() != seed:
            generator.manual_seed(seed)
        generator.set_offset(offset)


def _generators(devices: Iterable[torch.device], generators: Iterable[torch.Generator]) -> tuple[torch.Generator, ...]:
    accelerator = _compat.accelerator()
    # Asking an accelerator that nothing has used yet would initialise it: seconds, and hundreds of MiB.
    if accelerator is None or not _device_module().is_initialized():
        return (*_CPU_GENERATOR, *generators) if generators else _CPU_GENERATOR
    indices = {device.index for device in devices if device.type == accelerator.type}
    indices.add(_device_module().current_device())
    return (*_default_generators(frozenset(indices)), *generators)


_CPU_GENERATOR = (torch.default_generator,)


@functools.cache
def _default_generators(indices: frozenset[int]) -> tuple[torch.Generator, ...]:
    """The CPU's and those of the accelerators with these indices."""
    accelerator = _compat.accelerator()
    assert accelerator is not None
    return (*_CPU_GENERATOR, *(_compat.default_generator(accelerator.type, index) for index in sorted(indices)))


@functools.cache
def _device_module() -> Any:
    return torch.get_device_module(_compat.accelerator())
