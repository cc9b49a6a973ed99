"""What lossy codecs make of a value, for planning: bytes, seconds, and what they allocate on the way. No torch.

`lowtide.store.codecs` does the work; a test holds the bytes here against it. Sizes follow from the number of values
alone. Seconds are **predicted**: a codec is a chain of simple kernels, so its time is so many passes over its values in
float32 (float64 for float64) at the speed of the device's memory, and a launch for each kernel. The passes are fitted
to what bench/codecs.py measured: on an H200 for accelerators, and on a CPU (a busy one, so only roughly). Most kernels
reach only part of the memory's nominal speed, which makes the passes more than there are.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.graph.step_graph import Hardware, Value

MIN_BYTES = 4096  # smaller values are not worth a codec's launches
BLOCK = 128  # values with a scale of their own
LEAST_ROW = 16  # codecs that scale by row take at least so many values as one
CHUNK = 1 << 22  # values worked on at a time
LOSSLESS = "lossless"

_LAUNCH_S = 3e-6


@dataclass(frozen=True)
class CodecSpeed:
    """How fast a codec is in one direction: kernels per chunk, and passes over its values on an accelerator and a CPU.

    `wide_values` are held at once for each value of a chunk while it is worked on, in float32.
    """

    kernels: int
    passes: float
    cpu_passes: float
    wide_values: float


@dataclass(frozen=True)
class CodecCost:
    """A lossy codec as a plan sees it. `block` is how many values share a scale: 0 for a row, -1 for all."""

    name: str
    bits: int
    block: int
    encoding: CodecSpeed
    decoding: CodecSpeed

    def parts(self, numel: int, item_bytes: int, row_length: int) -> tuple[int, int] | None:
        """Bytes of the packed values and of their scales; None where the codec declines and the value stays as it is.

        `item_bytes` are those of one floating-point value, 0 for what is none.
        """
        if item_bytes <= max(1, self.bits // 8) or numel * item_bytes < MIN_BYTES:
            return None
        length = self.block_length(row_length)
        num_blocks = -(-numel // length) if length else 1
        packed = (num_blocks * length or numel) * self.bits // 8
        scales = num_blocks * _wide_bytes(item_bytes)
        return (packed, scales) if packed + scales < numel * item_bytes else None

    def block_length(self, row_length: int) -> int:
        """Values to a scale; what is left over at the end is filled up. 0 where all values share one."""
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
    """A value as one codec would hold it: bytes on the device, seconds both ways, and bytes allocated meanwhile."""

    codec: str
    bytes: int
    encode_s: float
    decode_s: float
    encode_bytes: int
    decode_bytes: int


def encoded_form(value: Value, codec: str, hardware: Hardware) -> EncodedForm | None:
    """What `codec` makes of a value, None where it declines: it is then held as it is.

    So it is too for `"lossless"`, whose bytes depend on what is in the value.
    """
    coding = CODEC_COSTS.get(codec)
    if coding is None or not value.item_bytes or not hardware.memory_bytes_per_s:
        return None
    numel = value.bytes // value.item_bytes
    parts = coding.parts(numel, value.item_bytes, value.row_length)
    if parts is None:
        return None
    length = coding.block_length(value.row_length) or 1
    size = sum(-(-part // hardware.block_bytes) * hardware.block_bytes for part in parts)
    chunk = max(1, CHUNK // length) * length
    at_once = min(chunk, -(-numel // length) * length)
    wide = _wide_bytes(value.item_bytes)

    def seconds(pace: CodecSpeed) -> float:
        passes = pace.cpu_passes if hardware.name == "cpu" else pace.passes
        launches = pace.kernels * -(-numel // chunk)
        return launches * _LAUNCH_S + passes * numel * wide / hardware.memory_bytes_per_s

    def working_bytes(pace: CodecSpeed) -> int:
        return int(pace.wide_values * at_once * wide)

    # At the end of encoding, chunks are joined: the encoded form is there twice.
    encode_bytes = max(working_bytes(coding.encoding), size if coding.block >= 0 else 0)
    return EncodedForm(
        codec, size, seconds(coding.encoding), seconds(coding.decoding), encode_bytes, working_bytes(coding.decoding)
    )


def _wide_bytes(item_bytes: int) -> int:
    """Of the float type that a codec works in."""
    return max(4, item_bytes)
