"""The pack hook of a replay: it keeps the saves that are needed, and stops the replay after the last of them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from lowtide import _compat
from lowtide.memory.checksums import checksum


class Stop(BaseException):
    """Ends a replay that has all it needs. Not an `Exception`, which code in the region may catch."""


class Options(NamedTuple):
    """How a region is run. `determinism_check` is as in torch, and may be "values" too."""

    preserve_rng_state: bool = True
    determinism_check: str = "default"
    early_stop: bool = True

    @property
    def metadata_of(self) -> Callable[[Tensor], Any]:
        """What must be the same of a saved tensor and its recomputation."""
        return metadata_and_value_of if self.determinism_check == "values" else metadata_of


DEFAULT_OPTIONS = Options()


class Collector:
    """The pack hook of one replay: it keeps the saves that are needed."""

    __slots__ = (
        *("_all_needed", "_metadata_of", "_sequence", "_stop_node", "is_stopped", "metadata", "needed", "stop"),
        *("tensors", "versions"),
    )

    def __init__(self, options: Options, needed: list[bool], stop: tuple[int, int]) -> None:
        self._metadata_of = options.metadata_of
        self.needed, self._all_needed = needed, all(needed)
        self.stop, self._stop_node = stop
        self._sequence = 0
        self.metadata: list[Any] = []
        self.tensors: list[Tensor | None] = []
        self.versions: list[int] = []
        self.is_stopped = False

    def begin(self) -> None:
        self._sequence = _compat.sequence_number()

    @_compat.never_compiled
    def pack(self, tensor: Tensor) -> Tensor:
        index = len(self.metadata)
        self.metadata.append(self._metadata_of(tensor))
        # Detached: a tensor with its history would keep the replay's graph alive, and what hangs on it.
        saved = tensor.detach()
        is_needed = self._all_needed or (index < len(self.needed) and self.needed[index])
        self.tensors.append(saved if is_needed else None)
        self.versions.append(_compat.version_of_saved(tensor))
        if index == self.stop and _compat.sequence_number() - self._sequence - 1 == self._stop_node:
            self.is_stopped = True
            raise Stop
        return saved  # for a gradient that the region itself computes


# What is compared of a saved tensor and its recomputation. One tuple for all tensors that are alike, so that a region
# holds references and no objects.
_METADATA: dict[Any, Any] = {}
_MAX_METADATA = 4096


_facts_of = operator.attrgetter("shape", "dtype", "device")


@_compat.never_compiled
def metadata_of(tensor: Tensor) -> Any:
    """Shape, dtype and device."""
    try:
        return _METADATA[_facts_of(tensor)]
    except (KeyError, TypeError):  # not seen before, or of a shape in symbols
        return _new_metadata(tensor)


@_compat.never_compiled
def metadata_and_value_of(tensor: Tensor) -> Any:
    """The same with a checksum."""
    return (*metadata_of(tensor), checksum(tensor))


def _new_metadata(tensor: Tensor) -> Any:
    metadata = _facts_of(tensor)
    if type(tensor) in _compat.PLAIN_TYPES and all(type(size) is int for size in tensor.shape):
        if len(_METADATA) >= _MAX_METADATA:
            _METADATA.clear()
        _METADATA[metadata] = metadata
    return metadata
