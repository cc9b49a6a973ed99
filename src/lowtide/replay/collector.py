"""The pack hook of a replay: it keeps the saves that are needed, and stops the replay after the last of them."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
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
