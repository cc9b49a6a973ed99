"""Flat tensors by their bits."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NARROW = (torch.uint8, torch.int8, torch.int16, torch.int32)


def as_integers(flat: Tensor) -> Tensor:
    """The same bytes as whole numbers of the same size."""
    return flat.view(_INTEGER_OF_SIZE[flat.element_size()])


def as_bytes(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8)


def pack(flags: Tensor) -> Tensor:
    """Eight flags a byte; the last byte is filled with zeros."""
    eights = torch.nn.functional.pad(flags.view(torch.uint8), (0, -flags.numel() % 8)).view(-1, 8)
    packed = eights[:, 0].clone()
    for position in range(1, 8):
        packed |= eights[:, position] << position
    return packed


def unpack(packed: Tensor, numel: int) -> Tensor:
    """The first `numel` flags again."""
    eights = torch.empty(packed.numel(), 8, dtype=torch.bool, device=packed.device)
    for position in range(8):
        eights[:, position] = (packed >> position) & 1
    return eights.flatten()[:numel]


def narrowest(flat: Tensor) -> torch.dtype | None:
    """The smallest integer type that holds all values, if it is smaller than the present one."""
    low, high = (int(extreme) for extreme in torch.aminmax(flat))
    for dtype in _NARROW:
        info = torch.iinfo(dtype)
        if info.min <= low and high <= info.max:
            return dtype if dtype.itemsize < flat.element_size() else None
    return None
