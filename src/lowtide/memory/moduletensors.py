"""Which storages belong to modules.

Parameters are told by their class; a buffer is a tensor like any other, and so is `buffer.t()`. While a context is
open, every module that is called is looked at once, and its parameters' and buffers' storages are noted.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from lowtide import _compat
from lowtide.errors import StoreError


class ModuleTensors:
    """`tensor in module_tensors`: whether its storage belongs to a module called since `watch()`."""

    def __init__(self) -> None:
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._storages: dict[int, _compat.StorageReference] = {}
        self._hook: Any = None

    def watch(self) -> None:
        self._hook = register_module_forward_pre_hook(lambda module, args: _look(self, module))

    def stop(self) -> None:
        self._hook.remove()

    def __contains__(self, tensor: Tensor) -> bool:
        return _compat.storage_id(tensor) in self._storages

    def look(self, module: nn.Module) -> None:
        """Note the storages of a module's own parameters and buffers."""
        if module in self._seen:
            return
        self._seen.add(module)
        for tensors in _compat.module_tensors(module):
            for tensor in tensors.values():
                if tensor is not None and _compat.is_plain(tensor):
                    reference = _compat.StorageReference(tensor)  # holds the id, so that no activation gets it
                    self._storages[reference.id] = reference


@_compat.disable_dynamo
def _look(module_tensors: ModuleTensors, module: nn.Module) -> None:
    if isinstance(module, nn.RReLU) and module.inplace and module.training:
        # On a view autograd wraps its node, and what is saved cannot be told from that of other in-place ops.
        raise StoreError(
            "nn.RReLU(inplace=True) saves its noise before it draws it, so a copy in a store would hold nothing. "
            "Use inplace=False in lowtide.checkpoint, or run it outside of lowtide.offload."
        )
    module_tensors.look(module)
