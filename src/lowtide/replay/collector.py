"""The pack hook of a replay: it keeps the saves that are needed, and stops the replay after the last of them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from lowtide import _compat
from lowtide._compat import version_of_saved
from lowtide.memory.checksums import checksum


class Stop(BaseException):
    """Ends a replay that has all it needs. Not an `Exception`, which code in the region may catch."""


class Options(NamedTuple):
    """How a region is run. `determinism_check` is as in torch, and may be "values" too."""

    preserve_rng_state: bool = True
    determinism_check: str = "default"
    early_stop: bool = True

    @property
    def value_of(self) -> Callable[[Tensor], Any] | None:
        """What else must be the same of a saved tensor and its recomputation than its metadata, if anything."""
        return checksum if self.determinism_check == "values" else None


DEFAULT_OPTIONS = Options()


class Collector:
    """The pack hook of one replay: it keeps the saves that are needed."""

    __slots__ = (
        *("_all_needed", "_sequence", "_stop_node", "_value_of", "is_stopped", "metadata", "needed", "stop"),
        *("tensors", "versions"),
    )

    def __init__(self, options: Options, needed: list[bool], stop: tuple[int, int]) -> None:
        self._value_of = options.value_of
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
        try:
            metadata = METADATA[facts_of(tensor)]
        except (KeyError, TypeError):
            metadata = new_metadata(tensor)
        self.metadata.append(metadata if self._value_of is None else (*metadata, self._value_of(tensor)))
        # A tensor with its history would keep the replay's graph alive, and what hangs on it.
        saved = tensor if tensor.grad_fn is None else tensor.detach()
        is_needed = self._all_needed or (index < len(self.needed) and self.needed[index])
        self.tensors.append(saved if is_needed else None)
        self.versions.append(version_of_saved(tensor))
        if index == self.stop and _compat.sequence_number() - self._sequence - 1 == self._stop_node:
            self.is_stopped = True
            raise Stop
        return saved  # for a gradient that the region itself computes


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
