"""Capture and restore random states and torch's modes around a replay.

A forward depends on state of the process and of its thread: the states of random generators, autocast, the default
dtype and the default device. They are captured in an `Environment` before each forward of a region and restored for its
replay; afterwards the values of the backward are set again. A generator that counts an offset (CUDA's) is captured as
seed and offset, others as the bytes of their state. Regions between which nothing was drawn share one `Environment`.
"""

from __future__ import annotations

import functools
import threading
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
    """torch's modes and the states of some generators at one moment. Never changed, so that regions can share one."""

    __slots__ = ("_generators", "_modes", "_states")

    def __init__(self, modes: Modes, generators: tuple[torch.Generator, ...], states: list[State]) -> None:
        self._modes, self._generators, self._states = modes, generators, states

    def follow(self, before: Environment) -> bool:
        """Set these random states while `before` is restored; the undo function of `before` undoes this too.

        Returns False, with nothing set, if modes or generators differ: then `restore` is needed.
        """
        if self._modes != before._modes or self._generators != before._generators:
            return False
        _set_states(self._generators, self._states)
        return True

    def set_random_states(self) -> bool:
        """Set the generators to these states. Returns False if that changed the seed of one of them."""
        seeds = self._seeds()
        _set_states(self._generators, self._states)
        return seeds == self._seeds()

    def _seeds(self) -> list[int]:
        pairs = zip(self._generators, self._states, strict=True)
        # While a CUDA graph is captured there are only whole states, and no other seed can be set.
        return [each.initial_seed() for each, state in pairs if each.device.type == "cpu" or type(state) is tuple]

    def has_current_random_states(self) -> bool:
        return self._states == list(map(_state_of, self._generators))

    def restore(self) -> Callable[[], None]:
        """Set the modes and random states of the forward; call the result to set the present ones again.

        This is also needed if the forward left the generators as they were: it may have drawn numbers inside of
        `torch.random.fork_rng`.
        """
        now, generators = modes_now(), self._generators
        has_modes = now != self._modes or torch.is_inference_mode_enabled()
        if not has_modes and not generators:
            return nothing
        states = list(map(_state_of, generators))
        if states != self._states:
            _set_states(generators, self._states)
        if not has_modes:
            return functools.partial(_set_states, generators, states)
        contexts = self._contexts(now)

        def undo() -> None:
            for context in reversed(contexts):
                context.__exit__(None, None, None)
            _set_states(generators, states)
            torch.set_default_dtype(now[0])

        torch.set_default_dtype(self._modes[0])
        for context in contexts:
            context.__enter__()
        return undo

    def _contexts(self, now: Modes) -> list[AbstractContextManager[Any]]:
        """Contexts to enter so that torch's modes are those of the forward."""
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


_last: Environment | None = None  # captured last; shared until something changes


def capture(
    devices: Iterable[torch.device], generators: Sequence[torch.Generator] = (), *, preserve_rng_state: bool = True
) -> Environment:
    """Return the present environment: the one that was captured last, if nothing has changed since.

    The states are those of the CPU, of the current accelerator, of the accelerators in `devices` and of `generators`;
    none if `preserve_rng_state` is False.
    """
    global _last
    modes = modes_now()
    drawn_from = _generators(devices, generators) if preserve_rng_state else ()
    states = [_state_of(generator) for generator in drawn_from]
    last = _last
    if last is not None and last._states == states and last._modes == modes and last._generators == drawn_from:
        return last
    found = Environment(modes, drawn_from, states)
    if not generators:  # these may be the user's, and would be kept alive
        _last = found
    return found


def modes_now() -> Modes:
    """Return torch's present modes."""
    autocast: Autocast = ()
    if _compat.is_any_autocast_enabled():
        accelerator = _compat.accelerator()
        kinds = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
        autocast = tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind))
    return torch.get_default_dtype(), _compat.default_device(), autocast


def _state_of(generator: torch.Generator) -> State:
    if generator is torch.default_generator or generator.device.type != "cuda":
        return _whole_state_of(generator)
    if torch.cuda.is_current_stream_capturing():
        # Whole states then count from the start of the graph, and setting one leads the kernels captured next to these
        # numbers (torch 2.11); offsets are refused.
        return _whole_state_of(generator)
    return generator.initial_seed(), generator.get_offset()


def _whole_state_of(generator: torch.Generator) -> bytes:
    if _compat.num_dispatch_modes():
        with _compat.without_modes():  # a fake tensor is no state
            return _whole_state_of(generator)
    state = generator.get_state()
    return _compat.memory_of(state.data_ptr(), state.nbytes).raw


_lock = threading.Lock()
_buffers: dict[int, tuple[bytearray, torch.Tensor]] = {}  # by size: a new tensor takes longer than setting a state


def _set_whole_state(generator: torch.Generator, state: bytes) -> None:
    if _compat.num_dispatch_modes():
        with _compat.without_modes():
            return _set_whole_state(generator, state)
    with _lock:
        if len(state) not in _buffers:
            buffer = bytearray(state)  # no tensor memory is allocated
            _buffers[len(state)] = buffer, torch.frombuffer(buffer, dtype=torch.uint8)
        buffer, tensor = _buffers[len(state)]
        buffer[:] = state
        generator.set_state(tensor)


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
    # (Reading the generators of an accelerator that is not in use would initialise it: seconds, hundreds of MiB.)
    if _compat.accelerator() is not None and _device_module().is_initialized():
        if _num_devices() == 1:
            found = _default_generators(frozenset({0}))
        else:
            indices = {device.index for device in devices if device.type != "cpu"}
            found = _default_generators(frozenset(indices | {torch.accelerator.current_device_index()}))
    return (*found, *generators) if generators else found


_CPU_GENERATOR = (torch.default_generator,)


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
