"""Predicted cost of the lossy codecs, for plans that compress: encoded bytes, seconds, and temporary memory.

`lowtide.store.codecs` implements the codecs; this module describes them without torch, so that solvers and simulator
can use them (`encoded_form`). A test compares the bytes of both.

Sizes follow from the number of elements. Seconds are predicted: a codec is a chain of memory-bound kernels, so its time
is a number of passes over its elements in float32 (float64 for float64) at the device's memory bandwidth, plus a launch
per kernel. The numbers of passes were fitted to measurements (bench/codecs.py) on an H200, used for all accelerators,
and roughly on a busy CPU. They exceed the true number of passes, since kernels do not reach the nominal bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.graph.step_graph import Hardware, Value
from lowtide.units import in_blocks

MIN_BYTES = 4096  # smaller values are not worth a codec's launches
BLOCK = 128  # elements that share a scale
LEAST_ROW = 16  # codecs that scale by row treat shorter rows as rows of this length
CHUNK = 1 << 22  # elements encoded at a time
LOSSLESS = "lossless"

_LAUNCH_S = 3e-6


@dataclass(frozen=True)
class CodecSpeed:
    """Speed of a codec in one direction: kernels per chunk, and passes over its elements on an accelerator and a CPU.

    `wide_values` is the temporary memory in float32 elements per element of a chunk.
    """

    kernels: int
    passes: float
    cpu_passes: float
    wide_values: float


@dataclass(frozen=True)
class CodecCost:
    """Size and speed of a lossy codec. `block` is the number of elements per scale: 0 for a row, -1 for all."""

    name: str
    bits: int
    block: int
    encoding: CodecSpeed
    decoding: CodecSpeed

    def parts(self, numel: int, item_bytes: int, row_length: int) -> tuple[int, int] | None:
        """Return the bytes of the packed elements and of their scales; None if the codec leaves the value as it is.

        `item_bytes` is the size of one floating-point element, 0 for other dtypes.
        """
        if item_bytes <= max(1, self.bits // 8) or numel * item_bytes < MIN_BYTES:
            return None
        length = self.block_length(row_length)
        num_blocks = -(-numel // length) if length else 1
        packed = (num_blocks * length or numel) * self.bits // 8
        scales = num_blocks * _wide_bytes(item_bytes)
        return (packed, scales) if packed + scales < numel * item_bytes else None

    def block_length(self, row_length: int) -> int:
        """Return the number of elements per scale, 0 if all share one. The last block is padded."""
        return max(self.block, 0) or (max(row_length, LEAST_ROW) if self.block == 0 else 0)


_FLOAT = CodecSpeed(9, 28.0, 8.0, 1.75), CodecSpeed(9, 18.0, 7.0, 3.5)
_FLOAT8 = CodecSpeed(33, 135.0, 19.0, 4.2), CodecSpeed(17, 66.0, 15.0, 4.5)

CODEC_COSTS: dict[str, CodecCost] = {
    coding.name: coding
    for coding in (
        CodecCost("float16", 16, -1, *_FLOAT),
        CodecCost("bfloat16", 16, -1, *_FLOAT),
        CodecCost("float8_e4m3", 8, 0, *_FLOAT8),
        CodecCost("float8_e5m2", 8, 0, *_FLOAT8),
        CodecCost("int8", 8, BLOCK, CodecSpeed(37, 145.0, 19.0, 4.2), CodecSpeed(20, 75.0, 20.0, 4.5)),
        CodecCost("int4", 4, BLOCK, CodecSpeed(41, 180.0, 21.0, 4.2), CodecSpeed(25, 106.0, 20.0, 4.5)),
    )
}


@dataclass(frozen=True)
class EncodedForm:
    """A value encoded by a codec: bytes on the device, seconds and temporary bytes of encoding and decoding."""

    codec: str
    bytes: int
    encode_s: float
    decode_s: float
    encode_bytes: int
    decode_bytes: int


def encoded_form(value: Value, codec: str, hardware: Hardware) -> EncodedForm | None:
    """Return the encoded form of a value, or None if the codec leaves it as it is.

    None also for "lossless", whose size depends on the content of the value.
    """
    coding = CODEC_COSTS.get(codec)
    if coding is None or not value.item_bytes or not hardware.memory_bytes_per_s:
        return None
    numel = value.bytes // value.item_bytes
    parts = coding.parts(numel, value.item_bytes, value.row_length)
    if parts is None:
        return None
    length = coding.block_length(value.row_length) or 1
    size = sum(in_blocks(part, hardware.block_bytes) for part in parts)
    chunk = max(1, CHUNK // length) * length
    at_once = min(chunk, -(-numel // length) * length)
    wide = _wide_bytes(value.item_bytes)

    def seconds(pace: CodecSpeed) -> float:
        passes = pace.cpu_passes if hardware.name == "cpu" else pace.passes
        launches = pace.kernels * -(-numel // chunk)
        return launches * _LAUNCH_S + passes * numel * wide / hardware.memory_bytes_per_s

    def working_bytes(pace: CodecSpeed) -> int:
        return int(pace.wide_values * at_once * wide)

    # At the end of encoding, chunks are concatenated: the encoded form is allocated twice.
    encode_bytes = max(working_bytes(coding.encoding), size if coding.block >= 0 else 0)
    return EncodedForm(
        codec, size, seconds(coding.encoding), seconds(coding.decoding), encode_bytes, working_bytes(coding.decoding)
    )


def _wide_bytes(item_bytes: int) -> int:
    """Return the element size of the float dtype that a codec computes in."""
    return max(4, item_bytes)
