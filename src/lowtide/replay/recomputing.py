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
    """Return the number of nested replays in this thread. A replay that needs the saves of an outer region nests."""
    return _replays.depth


class one_deeper:
    """A context that counts as a replay in this thread."""

    def __enter__(self) -> None:
        _replays.depth += 1

    def __exit__(self, *exception: object) -> None:
        _replays.depth -= 1


class Replaying:
    """A context for a replay: gradients are enabled, and `pack` receives every tensor that autograd saves."""

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
    """Wraps a function for torch's own checkpoint: its second and later calls count as replays."""

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
    """Return a 0-dim int64 tensor on the same device that depends on every bit and on the order of elements.

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
    """Raised to end a replay early. Not an `Exception`, which code in the region may catch."""


class StopAt(NamedTuple):
    """Where a replay may stop: after the save with this index, of the autograd node with this number; -1 for nowhere.

    `at_end`: nothing is left to compute after that save. Returning costs less than `Stop` does, which is raised in a
    hook and passes through some twenty frames of torch.
    """

    save: int
    node: int
    at_end: bool = False


NO_STOP = StopAt(-1, 0)


class Options(NamedTuple):
    """Options of a region. `determinism_check` is as in torch, with "values" in addition."""

    preserve_rng_state: bool = True
    determinism_check: str = "default"
    early_stop: bool = True

    def facts(self, tensor: Tensor) -> tuple[Any, ...]:
        """Return the metadata that a saved tensor and its recomputation must share."""
        if self.determinism_check == "none":
            return ()
        return facts_of(tensor) if self.determinism_check == "default" else (*facts_of(tensor), checksum(tensor))

    def collector(self, needed: list[bool], stop: StopAt) -> Collector:
        """Return the cheapest collector for these saves."""
        kind = CollectorOfAll if all(needed) and self.determinism_check != "values" else Collector
        return kind(self, needed, stop)


DEFAULT_OPTIONS = Options()


class Collector:
    """Collects the saved tensors of one replay through its pack hook `pack`; only needed ones are stored."""

    __slots__ = (
        *("_metadata", "_sequence", "_options", "_stop_at", "is_stopped", "needed", "stop", "tensors", "versions"),
    )

    def __init__(self, options: Options, needed: list[bool], stop: StopAt) -> None:
        self._options, self.needed = options, needed
        self.stop, self._stop_at = stop.save, stop
        self._sequence = 0
        self._metadata: list[Any] = []
        self.tensors: list[Tensor | None] = []
        self.versions: list[int] = []
        self.is_stopped = False

    def begin(self) -> None:
        self._sequence = _compat.sequence_number()

    @property
    def metadata(self) -> list[Any]:
        """The metadata of each save so far, to be compared with the forward's."""
        return self._metadata

    @_compat.never_compiled
    def pack(self, tensor: Tensor) -> Tensor:
        index = len(self.tensors)
        self._metadata.append(self._options.facts(tensor))
        # With its history, the tensor would keep the replay's graph alive. (`grad_fn` makes an object, `is_leaf` none.)
        saved = tensor if tensor.is_leaf else tensor.detach()
        self.tensors.append(saved if index < len(self.needed) and self.needed[index] else None)
        self.versions.append(version_of_saved(tensor))
        if index == self.stop:
            self._may_stop()
        return saved  # used if the region itself computes a gradient

    def _may_stop(self) -> None:
        # torch disables gradients around its calls of hooks. An inner region enables them to save its inputs: these
        # have been filled, and all of that region follows.
        is_input = torch.is_grad_enabled()
        _, node, at_end = self._stop_at
        if is_input or (not at_end and _compat.sequence_number() - self._sequence - 1 == node):
            self.is_stopped = True
            raise Stop


class CollectorOfAll(Collector):
    """A faster `Collector` for replays in which every save is needed, as in most."""

    __slots__ = ()

    @property
    def metadata(self) -> list[Any]:
        facts = facts_of if self._options.determinism_check == "default" else self._options.facts
        return list(map(facts, self.tensors))  # type: ignore[arg-type]

    @_compat.never_compiled
    def pack(self, tensor: Tensor) -> Tensor:
        saved = tensor if tensor.is_leaf else tensor.detach()
        index = len(self.tensors)
        self.tensors.append(saved)
        self.versions.append(version_of_saved(tensor))
        if index == self.stop:
            self._may_stop()
        return saved


# Shape, dtype and device of saved tensors, one tuple per combination: a region then holds references and no objects of
# its own. Hooks read this dict directly, which saves a call.
METADATA: dict[Any, Any] = {}
_MAX_METADATA = 4096

facts_of = operator.attrgetter("shape", "dtype", "device")


def new_metadata(tensor: Tensor) -> Any:
    """Return the metadata of a tensor that is not in `METADATA`, and add it unless its shape is symbolic."""
    metadata = facts_of(tensor)
    if type(tensor) in _compat.PLAIN_TYPES and all(type(size) is int for size in tensor.shape):
        if len(METADATA) >= _MAX_METADATA:
            METADATA.clear()
        METADATA[metadata] = metadata
    return metadata
