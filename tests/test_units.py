from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import UnitError
from lowtide.units import check_seconds, format_apart, format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (0, 0),
        (12, 12),
        ("12B", 12),
        ("1KiB", 1024),
        ("1kB", 1000),
        ("12GiB", 12 * 1024**3),
        ("12GB", 12 * 1000**3),
        ("1.5 MiB", 1536 * 1024),
        ("2tib", 2 * 1024**4),
    ],
)
def test_sizes(text: int | str, expected: int) -> None:
    assert parse_bytes(text) == expected


def test_a_share_needs_a_total() -> None:
    assert parse_bytes("80%", total_bytes=1000) == 800
    with pytest.raises(UnitError, match="the total it is a share of is not known"):
        parse_bytes("80%")
    with pytest.raises(UnitError, match="exceeds 100 %"):
        parse_bytes("120%", total_bytes=1000)


@pytest.mark.parametrize("text", [0.5, "0.5", "12 apples", "-3GiB", -3, "", "GiB", None, True, "1e9"])
def test_what_is_no_size_says_what_to_write(text: object) -> None:
    with pytest.raises(UnitError, match="Write whole bytes"):
        parse_bytes(text)  # type: ignore[arg-type]


@given(st.integers(0, 2**50))
def test_whole_bytes_are_themselves(size: int) -> None:
    assert parse_bytes(size) == parse_bytes(f"{size}B") == size


def test_formats() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 3 * 1024**3)] == ["0 B", "1023 B", "1.5 KiB", "3.0 GiB"]
    assert [format_seconds(s) for s in (2.0, 0.0042, 3e-6)] == ["2.0 s", "4.2 ms", "3.0 µs"]


@given(st.integers(0, 2**50), st.integers(1, 2**40))
def test_different_sizes_are_told_apart(size: int, difference: int) -> None:
    first, second = format_apart(size, size + difference)
    assert first != second
    assert format_apart(size, size) == (format_bytes(size),) * 2
    assert format_apart(3 * 1024**3, 4 * 1024**3) == ("3.0 GiB", "4.0 GiB"), "no more digits than it takes"


def test_seconds() -> None:
    check_seconds(0, "tune_s", may_be_0=True)
    with pytest.raises(ValueError, match=r"tune_s is a number of seconds, 0 or more, such as 10.0, not -1"):
        check_seconds(-1, "tune_s", may_be_0=True)
    with pytest.raises(ValueError, match="time_limit_s is a number of seconds, above 0"):
        check_seconds(0, "time_limit_s")
    with pytest.raises(TypeError, match="not '10s'"):
        check_seconds("10s", "tune_s")  # type: ignore[arg-type]
