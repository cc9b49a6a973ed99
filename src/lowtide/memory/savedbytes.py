"""What autograd saves in a block of code, in bytes of distinct storages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import _compat
from lowtide.memory.offload import KeptHere


class SavedBytes:
    """Counts storages saved inside the block, once each, without parameters, buffers and the block's inputs.

    Saved-tensor hooks hide tensors from hooks further out, so those are called from here.
    """

    def __init__(self, module: nn.Module, inputs: Iterable[Any], report: Callable[[int], None]) -> None:
        others = [*module.parameters(), *module.buffers(), *(value for value in inputs if isinstance(value, Tensor))]
        self._others = {_compat.storage_id(tensor) for tensor in others if _compat.is_plain(tensor)}
        self._report = report
        # References keep ids from being given to other storages: what a checkpoint drops is freed at once.
        self._sizes: dict[int, tuple[_compat.StorageReference, int]] = {}
        self._hooks: Any = None

    def __enter__(self) -> None:
        outer, others, sizes = _compat.current_hooks(), self._others, self._sizes

        @_compat.never_compiled
        def pack(tensor: Tensor) -> Any:
            if _compat.is_plain(tensor) and (storage := _compat.storage_id(tensor)) not in others:
                sizes[storage] = (_compat.StorageReference(tensor), tensor.untyped_storage().nbytes())
            return KeptHere(tensor) if outer is None else outer[0](tensor)

        @_compat.never_compiled
        def unpack(packed: Any) -> Tensor:
            return packed.restore() if outer is None else outer[1](packed)

        vars(pack)["passes_on_to"] = outer  # for those who look for hooks further out
        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        self._hooks.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._hooks.__exit__(*exception)
        if exception[0] is None:
            self._report(sum(size for _, size in self._sizes.values()))
        self._sizes.clear()
