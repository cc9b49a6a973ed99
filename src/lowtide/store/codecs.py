"""The codecs of `ActivationStore`: encode activations in fewer bytes, lossily or losslessly.

`ActivationStore` encodes values with the codec that it, or `put`, was given; plans with `lossy=` name one per value. A
codec encodes a flat tensor into parts and decodes it again. It declines tensors that it cannot shrink (integers for a
lossy codec, small tensors), which are then stored as they are.

NaN and infinity survive every codec. Float formats represent them where they can. Blockwise integers and e4m3 cannot: a
block with such a value gets a negative scale, and in it the outermost codes mean infinity and NaN, at the cost of one
quantisation step. No value has to be read on the host, so lossy codecs do not synchronise an accelerator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide.graph.codec_costs import CHUNK, CODEC_COSTS, MIN_BYTES

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NARROW = (torch.uint8, torch.int8, torch.int16, torch.int32)


def as_integers(flat: Tensor) -> Tensor:
    """The same bytes as integers of the same size."""
    return flat.view(_INTEGER_OF_SIZE[flat.element_size()])


def as_bytes(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8)


def pack(flags: Tensor) -> Tensor:
    """Booleans as bits, eight to a byte; the last byte is padded with zeros."""
    eights = torch.nn.functional.pad(flags.view(torch.uint8), (0, -flags.numel() % 8)).view(-1, 8)
    packed = eights[:, 0].clone()
    for position in range(1, 8):
        packed |= eights[:, position] << position
    return packed


def unpack(packed: Tensor, numel: int) -> Tensor:
    """The first `numel` booleans of `pack`'s result."""
    eights = torch.empty(packed.numel(), 8, dtype=torch.bool, device=packed.device)
    for position in range(8):
        eights[:, position] = (packed >> position) & 1
    return eights.flatten()[:numel]


def narrowest(flat: Tensor) -> torch.dtype | None:
    """The smallest integer dtype that holds all values; None if it is no smaller than the tensor's."""
    low, high = (int(extreme) for extreme in torch.aminmax(flat))
    for dtype in _NARROW:
        info = torch.iinfo(dtype)
        if info.min <= low and high <= info.max:
            return dtype if dtype.itemsize < flat.element_size() else None
    return None


@dataclass(frozen=True)
class Encoded:
    """An encoded flat tensor: contiguous parts, and what decoding needs besides them."""

    codec: Codec
    parts: tuple[Tensor, ...]
    dtype: torch.dtype
    numel: int
    info: Any = None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class Codec(ABC):
    """Encodes flat tensors in fewer bytes, and decodes them."""

    name: str
    is_lossless = False

    def encode(self, flat: Tensor, row_length: int) -> Encoded | None:
        """The encoded tensor; None if this codec cannot make it smaller.

        `row_length` is the length of the tensor's last dimension, for codecs that scale by row.
        """
        if flat.nbytes < MIN_BYTES or not self._takes(flat):
            return None
        with torch.no_grad():
            encoded = self._encode(flat, row_length)
        return encoded if encoded is not None and encoded.nbytes < flat.nbytes else None

    def decode(self, encoded: Encoded, parts: tuple[Tensor, ...]) -> Tensor:
        """The flat tensor, from `parts`: those of `encoded`, or copies on another device."""
        with torch.no_grad():
            return self._decode(encoded, parts)

    @abstractmethod
    def _takes(self, flat: Tensor) -> bool: ...

    @abstractmethod
    def _encode(self, flat: Tensor, row_length: int) -> Encoded | None: ...

    @abstractmethod
    def _decode(self, encoded: Encoded, parts: tuple[Tensor, ...]) -> Tensor: ...


class _Float(Codec):
    """A cast to a narrower float, scaled by a power of two that brings the largest magnitude near 2**15.

    Without the scale, float16 would flush magnitudes below 6e-8 to zero. A power of two leaves mantissas unchanged.
    """

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self._dtype = name, dtype

    def _takes(self, flat: Tensor) -> bool:
        return flat.is_floating_point() and flat.element_size() > self._dtype.itemsize

    def _encode(self, flat: Tensor, row_length: int) -> Encoded:
        chunks = flat.split(CHUNK)
        amax = torch.stack([_finite_magnitudes(chunk).amax() for chunk in chunks]).amax()
        scale = self._scale(amax)
        narrow = torch.empty_like(flat, dtype=self._dtype)
        for target, chunk in zip(narrow.split(CHUNK), chunks, strict=True):
            torch.div(chunk, scale, out=target)
        return Encoded(self, (narrow, scale), flat.dtype, flat.numel())

    def _scale(self, amax: Tensor) -> Tensor:
        power = (amax / 2**15) / torch.frexp(amax).mantissa  # by division, which is exact here
        power = torch.where(amax > torch.finfo(self._dtype).max, power, power.clamp(max=1.0))
        return torch.where(amax > 0, power.clamp(min=torch.finfo(amax.dtype).tiny), 1.0)

    def _decode(self, encoded: Encoded, parts: tuple[Tensor, ...]) -> Tensor:
        values = torch.empty_like(parts[0], dtype=encoded.dtype)
        for target, narrow in zip(values.split(CHUNK), parts[0].split(CHUNK), strict=True):
            target.copy_(_bounded(narrow.to(encoded.dtype).mul_(parts[1]), torch.isinf(narrow)))
        return values


class _Blockwise(Codec):
    """Blocks of values as small numbers times a scale per block."""

    _largest: float  # of the small numbers; in a block with a negative scale it means infinity

    def _takes(self, flat: Tensor) -> bool:
        return flat.is_floating_point() and flat.element_size() > 1

    def _encode(self, flat: Tensor, row_length: int) -> Encoded:
        length = CODEC_COSTS[self.name].block_length(row_length)
        # In chunks: the float32 intermediates of a whole tensor would take several times the bytes saved.
        pairs = [self._encode_chunk(chunk, length) for chunk in flat.split(max(1, CHUNK // length) * length)]
        packed, scales = (torch.cat(column) for column in zip(*pairs, strict=True))
        return Encoded(self, (packed, scales), flat.dtype, flat.numel(), length)

    def _encode_chunk(self, flat: Tensor, length: int) -> tuple[Tensor, Tensor]:
        blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % length)).view(-1, length)
        marked = ~torch.isfinite(blocks).all(1, keepdim=True)
        limit = torch.where(marked, self._largest_finite_marked(), self._largest)
        amax = _finite_magnitudes(blocks).amax(1, keepdim=True)
        scale = torch.where(amax > 0, (amax / limit).clamp(min=torch.finfo(torch.float32).tiny), 1.0)
        small = (blocks / scale).clamp_(-limit, limit)  # clamping keeps NaN
        small = torch.where(torch.isinf(blocks), blocks.sign() * self._largest, small)
        return self._pack(small), torch.where(marked, -scale, scale).squeeze(1)

    def _decode(self, encoded: Encoded, parts: tuple[Tensor, ...]) -> Tensor:
        values = torch.empty(encoded.numel, dtype=encoded.dtype, device=parts[0].device)
        blocks_per_chunk = max(1, CHUNK // encoded.info)
        per_block = parts[0].numel() // parts[1].numel()
        chunks = values.split(blocks_per_chunk * encoded.info)
        packed = parts[0].view(-1, per_block).split(blocks_per_chunk)
        for target, small, scale in zip(chunks, packed, parts[1].split(blocks_per_chunk), strict=True):
            target.copy_(self._decode_chunk(small, scale.unsqueeze(1), encoded.info).flatten()[: target.numel()])
        return values

    def _decode_chunk(self, packed: Tensor, scale: Tensor, length: int) -> Tensor:
        small = self._unpack(packed, length)
        infinite = (scale < 0) & (small.abs() == self._largest)
        values = torch.where(infinite, small.sign() * torch.inf, small * scale.abs())
        return _bounded(values, infinite)

    @abstractmethod
    def _largest_finite_marked(self) -> float: ...

    @abstractmethod
    def _pack(self, small: Tensor) -> Tensor:
        """Convert blocks of numbers of magnitude up to `_largest`, or NaN, to the stored dtype."""

    @abstractmethod
    def _unpack(self, packed: Tensor, length: int) -> Tensor:
        """The blocks of `_pack` as float32, with NaN where there was NaN."""


class _Float8(_Blockwise):
    """Eight-bit floats, one scale per row. e4m3 has no infinity and e5m2 has; both are scaled to their range."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self._dtype = name, dtype
        self._largest = torch.finfo(dtype).max

    def _largest_finite_marked(self) -> float:
        return self._largest * 0.875  # the next smaller number of both formats, or just under it

    def _pack(self, small: Tensor) -> Tensor:
        return small.to(self._dtype)

    def _unpack(self, packed: Tensor, length: int) -> Tensor:
        return packed.float()


class _Int8(_Blockwise):
    name, _largest, _nan = "int8", 127.0, -128

    def _largest_finite_marked(self) -> float:
        return self._largest - 1

    def _pack(self, small: Tensor) -> Tensor:
        return torch.where(torch.isnan(small), float(self._nan), small.round()).to(torch.int8)

    def _unpack(self, packed: Tensor, length: int) -> Tensor:
        return torch.where(packed == self._nan, torch.nan, packed.float())


class _Int4(_Int8):
    """Two numbers a byte."""

    name, _largest, _nan = "int4", 7.0, -8

    def _pack(self, small: Tensor) -> Tensor:
        nibbles = (super()._pack(small) + 8).to(torch.uint8).view(-1, 2)
        return (nibbles[:, 0] | (nibbles[:, 1] << 4)).view(small.shape[0], -1)

    def _unpack(self, packed: Tensor, length: int) -> Tensor:
        nibbles = torch.stack((packed & 15, packed >> 4), 2).view(-1, length)
        return super()._unpack(nibbles.to(torch.int8) - 8, length)


class _Lossless(Codec):
    """Bit-exact: bools as bits, integers in the fewest bytes their range needs, mostly-zero tensors as bits and values.

    The choice depends on the values: on an accelerator, integers and floats cost one synchronisation per tensor.
    """

    name, is_lossless = "lossless", True
    _INTEGERS = (torch.int64, torch.int32, torch.int16)
    # Encode only if the result is at most this share of the bytes, as both directions take a pass over them.
    _WORTH = 0.75

    def _takes(self, flat: Tensor) -> bool:
        return flat.dtype == torch.bool or flat.dtype in self._INTEGERS or flat.is_floating_point()

    def _encode(self, flat: Tensor, row_length: int) -> Encoded | None:
        if flat.dtype == torch.bool:
            return Encoded(self, (pack(flat),), flat.dtype, flat.numel(), "bits")
        if flat.dtype in self._INTEGERS:
            narrow = narrowest(flat)
            if narrow is not None:
                return Encoded(self, (flat.to(narrow),), flat.dtype, flat.numel(), "narrow")
        return self._encode_zeros(flat)

    def _encode_zeros(self, flat: Tensor) -> Encoded | None:
        raw = as_integers(flat)  # compare bits: -0.0 is not zero, and NaN keeps its payload
        present = raw != 0
        num_present = int(torch.count_nonzero(present))
        if flat.numel() // 8 + num_present * flat.element_size() > self._WORTH * flat.nbytes:
            return None
        return Encoded(self, (pack(present), raw[present]), flat.dtype, flat.numel(), "zeros")

    def _decode(self, encoded: Encoded, parts: tuple[Tensor, ...]) -> Tensor:
        if encoded.info == "bits":
            return unpack(parts[0], encoded.numel)
        if encoded.info == "narrow":
            return parts[0].to(encoded.dtype)
        raw = torch.zeros(encoded.numel, dtype=parts[1].dtype, device=parts[1].device)
        raw[unpack(parts[0], encoded.numel)] = parts[1]
        return raw.view(encoded.dtype)


def _bounded(values: Tensor, infinite: Tensor) -> Tensor:
    """The values, with infinities that come from rounding replaced by the largest finite number."""
    largest = torch.finfo(values.dtype).max
    return torch.where(torch.isinf(values) & ~infinite, values.sign() * largest, values)


def _finite_magnitudes(values: Tensor) -> Tensor:
    """Magnitudes in float32 (float64 for float64), with 0 for NaN and infinity."""
    wide = values if values.dtype == torch.float64 else values.float()
    return torch.where(torch.isfinite(wide), wide, 0).abs()


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        _Float("float16", torch.float16),
        _Float("bfloat16", torch.bfloat16),
        _Float8("float8_e4m3", torch.float8_e4m3fn),
        _Float8("float8_e5m2", torch.float8_e5m2),
        _Int8(),
        _Int4(),
        _Lossless(),
    )
}

LOSSY_CODECS = tuple(name for name, codec in CODECS.items() if not codec.is_lossless)


def find_codec(name: str | None) -> Codec | None:
    """The codec with this name; None for None and `"none"`."""
    if name is None or name == "none":
        return None
    if not isinstance(name, str) or name not in CODECS:
        raise ValueError(f"unknown codec {name!r}: use None, {', '.join(map(repr, CODECS))}")
    return CODECS[name]
