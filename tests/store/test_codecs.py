from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowtide.replay.recomputing import checksum
from lowtide.store import CODECS, codecs
from lowtide.store.codecs import find_codec

LOSSY = [name for name, codec in CODECS.items() if not codec.is_lossless]
# Bytes per value beside float32's 4, and the largest error as a share of the largest magnitude in a row or block.
BYTES_PER_VALUE = {"float16": 2, "bfloat16": 2, "float8_e4m3": 1, "float8_e5m2": 1, "int8": 1, "int4": 0.5}
MAX_ERROR = {
    "float16": 2**-11,
    "bfloat16": 2**-8,
    "float8_e4m3": 2**-4,
    "float8_e5m2": 2**-3,
    "int8": 0.004,
    "int4": 0.072,
}


def round_trip(name: str, flat: Tensor, row_length: int = 128) -> tuple[Tensor, int]:
    encoded = CODECS[name].encode(flat, row_length)
    assert encoded is not None
    decoded = CODECS[name].decode(encoded, encoded.parts)
    assert decoded.dtype == flat.dtype and decoded.shape == flat.shape
    return decoded, encoded.nbytes


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e6, 1e-8, 1e-30])
def test_bytes_shrink_and_errors_are_bounded(name: str, scale: float) -> None:
    flat = torch.randn(64 * 128) * scale
    decoded, nbytes = round_trip(name, flat)
    assert nbytes <= flat.numel() * BYTES_PER_VALUE[name] + flat.numel() // 128 * 4 + 4
    rows = flat.view(-1, 128)
    error = (decoded.view(-1, 128) - rows).abs().amax(1) / rows.abs().amax(1)
    assert error.max() <= MAX_ERROR[name]


@pytest.mark.parametrize("largest", [1e-38, 1e-8, 1.0, 40_000.0, 65_504.0, 1e6, 1e38])
def test_float16_keeps_eleven_bits_of_values_eight_orders_below_the_largest(largest: float) -> None:
    flat = torch.logspace(-8, 0, 4096) * largest
    flat = flat[flat > 1e-37] if largest > 1e-30 else flat.clamp(min=1e-38)
    decoded, _ = round_trip("float16", flat)
    assert ((decoded - flat) / flat).abs().max() <= 2**-10


def test_float16_leaves_what_float16_can_hold() -> None:
    for largest in (2**-20, 1.0, 3.0, 65_504.0):
        flat = (torch.rand(4096) * largest).half().float()
        flat[0] = largest
        assert torch.equal(round_trip("float16", flat)[0], flat)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("numel", [1024, 1031, 2000])
def test_nan_and_infinity_survive(name: str, numel: int) -> None:
    flat = torch.randn(numel) * 3
    flat[5], flat[6], flat[7], flat[numel - 1] = torch.nan, torch.inf, -torch.inf, torch.inf
    decoded, _ = round_trip(name, flat)
    assert torch.equal(torch.isnan(decoded), torch.isnan(flat))
    assert torch.equal(torch.isposinf(decoded), torch.isposinf(flat))
    assert torch.equal(torch.isneginf(decoded), torch.isneginf(flat))
    finite = torch.isfinite(flat)
    assert (decoded - flat)[finite].abs().max() <= 2.5 * MAX_ERROR[name] * flat[finite].abs().max()


@pytest.mark.parametrize("name", LOSSY)
def test_no_finite_value_becomes_infinite(name: str) -> None:
    flat = torch.full((2048,), torch.finfo(torch.float32).max / 2)
    flat[::2] = 1.0
    decoded, _ = round_trip(name, flat)
    assert torch.isfinite(decoded).all()


@pytest.mark.parametrize("name", CODECS)
def test_chunks_leave_no_seams(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flat = torch.randn(10_007).relu()
    whole = round_trip(name, flat)
    monkeypatch.setattr("lowtide.store.codecs.CHUNK", 1000)
    pieces = round_trip(name, flat)
    assert torch.equal(whole[0], pieces[0]) and whole[1] == pieces[1]


@pytest.mark.parametrize("name", LOSSY)
def test_zeros_stay_zeros(name: str) -> None:
    decoded, _ = round_trip(name, torch.zeros(4096))
    assert torch.equal(decoded, torch.zeros(4096))


@pytest.mark.parametrize("name", [name for name in LOSSY if name.startswith(("int", "float8"))])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_floats_come_back_as_they_were_typed(name: str, dtype: torch.dtype) -> None:
    flat = torch.randn(4096).to(dtype)
    decoded, nbytes = round_trip(name, flat)
    assert decoded.dtype == dtype and nbytes < flat.nbytes
    assert (decoded - flat).abs().max() <= 2 * MAX_ERROR[name] * flat.abs().max()


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize(
    "flat",
    [torch.arange(4096), torch.ones(8192, dtype=torch.bool), torch.randn(16)],
    ids=["integers", "booleans", "too few"],
)
def test_what_does_not_fit_is_declined(name: str, flat: Tensor) -> None:
    assert CODECS[name].encode(flat, 128) is None


def test_sixteen_bits_of_sixteen_bits_are_declined() -> None:
    assert CODECS["float16"].encode(torch.randn(4096).bfloat16(), 128) is None


def exact(flat: Tensor) -> float:
    encoded = CODECS["lossless"].encode(flat, 128)
    assert encoded is not None
    decoded = CODECS["lossless"].decode(encoded, encoded.parts)
    assert decoded.dtype == flat.dtype
    assert torch.equal(codecs.as_bytes(decoded), codecs.as_bytes(flat))
    return encoded.nbytes / flat.nbytes


def test_lossless_is_exact_and_smaller() -> None:
    assert exact(torch.rand(8193) < 0.5) <= 0.126
    assert exact(torch.randint(0, 200, (4096,))) == 1 / 8
    assert exact(torch.randint(-100, 100, (4096,))) == 1 / 8
    assert exact(torch.randint(-30_000, 30_000, (4096,))) == 1 / 4
    assert exact(torch.randint(0, 2**31 - 1, (4096,))) == 1 / 2
    assert exact(torch.randn(8192).relu()) < 0.6
    sparse = torch.zeros(8192)
    sparse[:3] = torch.tensor([-0.0, torch.nan, torch.inf])
    assert exact(sparse) < 0.04
    assert exact(torch.randn(8192).relu().bfloat16()) < 0.63


def test_lossless_declines_what_would_not_shrink() -> None:
    assert CODECS["lossless"].encode(torch.randn(4096), 128) is None
    assert CODECS["lossless"].encode(torch.randint(-(2**62), 2**62, (4096,)), 128) is None


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_bits_round_trip(numel: int, seed: int) -> None:
    flags = torch.rand(numel, generator=torch.Generator().manual_seed(seed)) < 0.5
    packed = codecs.pack(flags)
    assert packed.numel() == -(-numel // 8)
    assert torch.equal(codecs.unpack(packed, numel), flags)


def test_unknown_codec_lists_the_known() -> None:
    assert find_codec(None) is find_codec("none") is None
    with pytest.raises(ValueError, match=r"unknown codec 'fp4'.*'int4'"):
        find_codec("fp4")


def test_checksums_see_every_bit_and_the_order() -> None:
    values = torch.randn(3, 1000)
    reference = checksum(values)
    assert checksum(values.clone()) == reference
    assert checksum(values.flip(1)) != reference
    changed = values.clone()
    changed[1, 7] = torch.nextafter(changed[1, 7], torch.tensor(torch.inf))
    assert checksum(changed) != reference
    for other in (torch.randn(5, dtype=torch.complex64), torch.ones(3, dtype=torch.bool), torch.eye(3).to_sparse()):
        assert checksum(other).dtype == torch.int64
