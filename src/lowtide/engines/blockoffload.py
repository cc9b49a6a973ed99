"""What a compiled block saves, moved to host memory while the next blocks run.

A compiled graph hands everything it saves to autograd at once, when its forward ends; saved-tensor hooks see it there,
and the copies run beside the blocks that follow. In the backward the store brings back what the block before needs
while a block runs. So each block may give away what the link carries during the next block's forward, and no more.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from lowtide import _compat
from lowtide.errors import CapacityError
from lowtide.memory.offload import KeptHere, KeptInStore, restore
from lowtide.memory.store import ActivationStore
from lowtide.memory.units import is_left_alone


class BlockOffload(torch.autograd.graph.saved_tensors_hooks):
    """Hooks around one call of a compiled block: of what it saves, tensors of the sizes `moved` go to `store`."""

    def __init__(self, store: ActivationStore, moved: tuple[int, ...]) -> None:
        left = Counter(moved)

        @_compat.disable_dynamo
        def pack(tensor: Tensor) -> Any:
            if not left[tensor.nbytes] or is_left_alone(tensor) or (tensor.is_leaf and tensor.requires_grad):
                return KeptHere(tensor)
            try:
                kept = KeptInStore(tensor, store)
            except CapacityError:  # several forwards wait for their backward
                return KeptHere(tensor)
            left[tensor.nbytes] -= 1
            return kept

        super().__init__(pack, restore)
