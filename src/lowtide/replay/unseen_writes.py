"""Writes to op outputs that no op and no version counter tells of, as by kernels launched by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.replay import _compat

_NUM_COLUMNS = 1024  # of the sums
Op = tuple[Any, int]  # the op, with the weight that it casts if it does; and how often it has run before


class UnseenWrites:
    """Finds writes to op outputs that no op and no version counter tells of, as by kernels launched by hand.

    By sums of their bits as they are made, when they are saved, and at the end; in columns, so that values that change
    places show too. Not by `memory.checksums`, which needs memory of its own and would show in the peak of a step.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[Op, _compat.StorageReference, int, Tensor]] = {}  # by storage: its bytes, its sums
        self._seen: list[tuple[Op, Tensor, Tensor]] = []

    def made(self, op: Op, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if _compat.is_own(tensor) and tensor.numel() and not tensor.is_meta:
                reference, num_bytes = _compat.StorageReference(tensor), tensor.untyped_storage().nbytes()
                self._made[reference.id] = op, reference, num_bytes, _sums_of(reference, num_bytes)

    def look(self, storages: Iterable[int]) -> None:
        """Compare what is in these storages now."""
        for storage in storages:
            if storage in self._made:
                op, reference, num_bytes, before = self._made[storage]
                if reference.is_alive():
                    self._seen.append((op, before, _sums_of(reference, num_bytes)))

    def ops(self) -> set[Op]:
        """The ops whose outputs have changed."""
        self.look(list(self._made))
        return {op for op, before, now in self._seen if not torch.equal(before, now)}


def _sums_of(storage: _compat.StorageReference, num_bytes: int) -> Tensor:
    with _compat.bare_kernels():
        dtype = torch.int32 if num_bytes % torch.int32.itemsize == 0 else torch.uint8
        num_items = num_bytes // dtype.itemsize
        raw = storage.as_tensor(dtype, torch.Size([num_items]), (1,))
        num_columns = min(_NUM_COLUMNS, num_items)
        end = num_items - num_items % num_columns
        return raw[:end].view(-1, num_columns).sum(dim=0, dtype=torch.int64) + raw[end:].sum(dtype=torch.int64)
