"""Writes to outputs of ops that no op and no version counter tells of, as by kernels launched by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from lowtide.engines import _compat
from lowtide.engines.heldops import Op
from lowtide.memory.checksums import checksum


class UnseenWrites:
    """Finds them by checksums: of outputs as they are made, when they are saved, and at the end."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Op, _compat.StorageReference, Tensor, Tensor]] = {}  # by storage: form and checksum
        self._seen: list[tuple[Op, Tensor, Tensor]] = []

    def made(self, op: Op, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if _compat.is_own(tensor) and tensor.numel():
                reference = _compat.StorageReference(tensor)
                with _compat.bare_kernels():
                    self._made[reference.id] = op, reference, tensor.to("meta"), checksum(tensor)

    def look(self, storages: Iterable[int]) -> None:
        """Compare what is in these storages now."""
        for storage in storages:
            if storage not in self._made:
                continue
            op, reference, form, before = self._made[storage]
            if reference.is_alive():
                with _compat.bare_kernels():
                    now = reference.as_tensor(form.dtype, form.shape, form.stride())
                    self._seen.append((op, before, checksum(now)))

    def ops(self) -> set[Op]:
        """The ops whose outputs have changed."""
        self.look(list(self._made))
        return {op for op, before, now in self._seen if int(before) != int(now)}
