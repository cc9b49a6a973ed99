"""Parts that every replay uses: the replay depth of a thread, options, and the hooks that collect saved tensors.

`region` runs a replay inside `Replaying`, with the pack hook of a `Collector`. The collector stores the saved tensors
that the backward still needs, records the metadata by which the replay is checked, and stops the replay after the last
needed tensor by raising `Stop`. `checksum` is what `determinism_check="values"` compares.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide import _compat
from lowtide._compat.autograd import version_of_saved
from lowtide.store import codecs


class _Replays(threading.local):
    depth = 0


_replays = _Replays()


def is_recomputing() -> bool:
    """True while this thread replays a checkpointed region, and only then.

    >>> import lowtide
    >>> lowtide.is_recomputing()
    False
    """
    return _replays.depth > 0


def replay_depth() -> int:
    """How many replays this thread is in: one inside another where a replay asks for what another region saved."""
    return _replays.depth


class one_deeper:
    """A block that is a replay."""

    def __enter__(self) -> None:
        _replays.depth += 1

    def __exit__(self, *exception: object) -> None:
        _replays.depth -= 1


class Replaying:
    """A block that is a replay: with gradients, and `pack` gets what autograd saves."""

    __slots__ = ("_had_grad", "_pack")

    def __init__(self, pack: Callable[[Tensor], Tensor]) -> None:
        self._pack = pack

    def __enter__(self) -> None:
        self._had_grad = torch.is_grad_enabled()
        _compat.push_hooks(self._pack, _as_it_is)
        _compat.set_grad_enabled(True)
        _replays.depth += 1

    def __exit__(self, *exception: object) -> None:
        _replays.depth -= 1
        _compat.set_grad_enabled(self._had_grad)
        _compat.pop_hooks()


@_compat.never_compiled
def _as_it_is(packed: Tensor) -> Tensor:
    return packed


class ReplaysCounted:
    """A function whose second and later calls count as replays: for torch's own checkpoint."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._has_run = function, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._has_run:
            self._has_run = True
            return self._function(*args, **kwargs)
        with one_deeper():
            return self._function(*args, **kwargs)


_CHUNK = 1 << 20


def checksum(tensor: Tensor) -> Tensor:
    """A whole number (0-dim int64, on the tensor's device) that changes with any bit and with the order of elements.

    Sums bits times position-dependent odd weights, in integer arithmetic: equal bits give equal sums on every device,
    in any order of summation. Needs 8 MiB beside the tensor, whatever its size, and no synchronisation.
    """
    with torch.no_grad(), _compat.without_modes():
        values = tensor.detach()
        if values.layout is not torch.strided:
            values = values.to_dense()
        if values.is_complex():
            values = torch.view_as_real(values)
        raw = codecs.as_integers(values.contiguous().reshape(-1))
        total = torch.zeros((), dtype=torch.int64, device=raw.device)
        for start in range(0, raw.numel(), _CHUNK):
            chunk = raw[start : start + _CHUNK].to(torch.int64)
            total = total * 31 + (chunk * _weights(raw.device)[: chunk.numel()]).sum()
        return total


@functools.cache
def _weights(device: torch.device) -> Tensor:
    # Odd numbers scattered by Knuth's multiplicative hashing constant: a swap of two unequal elements shows.
    return torch.arange(1, 2 * _CHUNK, 2, dtype=torch.int64, device=device) * 2654435761


class Stop(BaseException):
    """Ends a replay that has all it needs. Not an `Exception`, which code in the region may catch."""


class Options(NamedTuple):
    """How a region is run. `determinism_check` is as in torch, and may be "values" too."""

    preserve_rng_state: bool = True
    determinism_check: str = "default"
    early_stop: bool = True

    def facts(self, tensor: Tensor) -> tuple[Any, ...]:
        """What must be the same of a saved tensor and of its recomputation."""
        if self.determinism_check == "none":
            return ()
        return facts_of(tensor) if self.determinism_check == "default" else (*facts_of(tensor), checksum(tensor))

    def collector(self, needed: list[bool], stop: tuple[int, int]) -> Collector:
        """What collects these saves of a replay with the least work."""
        kind = CollectorOfAll if all(needed) and self.determinism_check != "values" else Collector
        return kind(self, needed, stop)


DEFAULT_OPTIONS = Options()


class Collector:
    """The pack hook of one replay, `pack`: it keeps the saves that are needed."""

    __slots__ = (
        *("_metadata", "_sequence", "_options", "_stop_node", "is_stopped", "needed", "stop", "tensors", "versions"),
    )

    def __init__(self, options: Options, needed: list[bool], stop: tuple[int, int]) -> None:
        self._options, self.needed = options, needed
        self.stop, self._stop_node = stop
        self._sequence = 0
        self._metadata: list[Any] = []
        self.tensors: list[Tensor | None] = []
        self.versions: list[int] = []
        self.is_stopped = False

    def begin(self) -> None:
        self._sequence = _compat.sequence_number()

    @property
    def metadata(self) -> list[Any]:
        """Of each save so far: what must be as it was in the forward."""
        return self._metadata

    @_compat.never_compiled
    def pack(self, tensor: Tensor) -> Tensor:
        index = len(self.tensors)
        self._metadata.append(self._options.facts(tensor))
        # A tensor with its history would keep the replay's graph alive, and what hangs on it.
        saved = tensor if tensor.grad_fn is None else tensor.detach()
        self.tensors.append(saved if index < len(self.needed) and self.needed[index] else None)
        self.versions.append(version_of_saved(tensor))
        if index == self.stop:
            self._may_stop()
        return saved  # for a gradient that the region itself computes

    def _may_stop(self) -> None:
        # Regions inside save their inputs without gradients, and no op does: such a tensor is complete.
        is_input = not torch.is_grad_enabled()
        if is_input or _compat.sequence_number() - self._sequence - 1 == self._stop_node:
            self.is_stopped = True
            raise Stop


class CollectorOfAll(Collector):
    """Where every save is needed, as in most replays: it does the least for each."""

    __slots__ = ()

    @property
    def metadata(self) -> list[Any]:
        facts = facts_of if self._options.determinism_check == "default" else self._options.facts
        return list(map(facts, self.tensors))  # type: ignore[arg-type]

    @_compat.never_compiled
    def pack(self, tensor: Tensor) -> Tensor:
        saved = tensor if tensor.grad_fn is None else tensor.detach()
        index = len(self.tensors)
        self.tensors.append(saved)
        self.versions.append(version_of_saved(tensor))
        if index == self.stop:
            self._may_stop()
        return saved


# What is compared of a saved tensor and its recomputation: shape, dtype and device. One tuple for all tensors that are
# alike, so that a region holds references and no objects. The hooks look in here themselves, without a call.
METADATA: dict[Any, Any] = {}
_MAX_METADATA = 4096

facts_of = operator.attrgetter("shape", "dtype", "device")


def new_metadata(tensor: Tensor) -> Any:
    """For a tensor that was not seen before, or of a shape in symbols."""
    metadata = facts_of(tensor)
    if type(tensor) in _compat.PLAIN_TYPES and all(type(size) is int for size in tensor.shape):
        if len(METADATA) >= _MAX_METADATA:
            METADATA.clear()
        METADATA[metadata] = metadata
    return metadata
