"""Cheap fingerprints of a tensor's values, for `determinism_check="values"`."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lowtide import _compat
from lowtide.memory import bits

_CHUNK = 1 << 20


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
        raw = bits.as_integers(values.contiguous().reshape(-1))
        total = torch.zeros((), dtype=torch.int64, device=raw.device)
        for start in range(0, raw.numel(), _CHUNK):
            chunk = raw[start : start + _CHUNK].to(torch.int64)
            total = total * 31 + (chunk * _weights(raw.device)[: chunk.numel()]).sum()
        return total


@functools.cache
def _weights(device: torch.device) -> Tensor:
    # Odd numbers scattered by Knuth's multiplicative hashing constant: a swap of two unequal elements shows.
    return torch.arange(1, 2 * _CHUNK, 2, dtype=torch.int64, device=device) * 2654435761
