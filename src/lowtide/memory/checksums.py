"""Cheap fingerprints of a tensor's values, for `determinism_check="values"`."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lowtide import _compat

_CHUNK = 1 << 20
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> Tensor:
    """A whole number (0-dim int64, on the tensor's device) that changes with any bit and with the order of elements.

    Sums bits times position-dependent odd weights, in integer arithmetic: equal bits give equal sums on every device,
    in any order of summation. Needs 8 MiB beside the tensor, whatever its size, and no synchronisation.
    """
    with torch.no_grad(), _compat.without_modes():
        values = tensor.detach()
        if values.layout is not torch.strided:
            values = values.to_dense()
        if values.is_complex():
            values = torch.view_as_real(values)
        bits = values.contiguous().reshape(-1).view(_INTEGER_OF_SIZE[values.element_size()])
        total = torch.zeros((), dtype=torch.int64, device=bits.device)
        for start in range(0, bits.numel(), _CHUNK):
            chunk = bits[start : start + _CHUNK].to(torch.int64)
            total = total * 31 + (chunk * _weights(bits.device)[: chunk.numel()]).sum()
        return total


@functools.cache
def _weights(device: torch.device) -> Tensor:
    # Odd numbers scattered by Knuth's multiplicative hashing constant: a swap of two unequal elements shows.
    return torch.arange(1, 2 * _CHUNK, 2, dtype=torch.int64, device=device) * 2654435761
