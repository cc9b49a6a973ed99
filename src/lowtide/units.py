"""Bytes and seconds: read what people write, write what people read. And the version of lowtide."""

from __future__ import annotations

import re

from lowtide.errors import UnitError

_BYTES_PER_UNIT = {"b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _BYTES_PER_UNIT[f"{_letter}b"] = 1000**_power
    _BYTES_PER_UNIT[f"{_letter}ib"] = 1024**_power

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+|%)\s*", re.IGNORECASE)
_ADVICE = 'Write whole bytes (12884901888) or a number with a unit ("12GiB", "12GB", "512MiB", "80%").'


def parse_bytes(size: int | str, *, total_bytes: int | None = None) -> int:
    """The number of bytes that `size` means.

    `"80%"` is a share of `total_bytes` and an error where no total is known. A bare fraction (`0.5`) is an error
    rather than a guess between bytes, GiB and a share.

    >>> parse_bytes("1.5KiB")
    1536
    """
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise UnitError(f"{size} bytes is negative. {_ADVICE}")
        return size
    if not isinstance(size, str):
        raise UnitError(f"{size!r} is not a number of bytes. {_ADVICE}")
    match = _SIZE.fullmatch(size)
    if match is None:
        raise UnitError(f"{size!r} is not a number of bytes. {_ADVICE}")
    number, unit = float(match[1]), match[2].lower()
    if unit == "%":
        if total_bytes is None:
            raise UnitError(f"{size!r} is a share, and there is nothing here to take it of. {_ADVICE}")
        if number > 100:
            raise UnitError(f"{size!r} is more than all there is. {_ADVICE}")
        return int(total_bytes * number / 100)
    if unit not in _BYTES_PER_UNIT:
        raise UnitError(f"{size!r} has the unknown unit {match[2]!r}. {_ADVICE}")
    return int(number * _BYTES_PER_UNIT[unit])


def check_bytes(size: int | str) -> None:
    """Raise unless `size` can be read, whatever a share (`"80%"`) will be of."""
    parse_bytes(size, total_bytes=1 << 40)


def check_seconds(seconds: float, name: str) -> None:
    """Raise unless the option of that name is a number of seconds.

    >>> check_seconds(10, "time_limit_s")
    """
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not seconds > 0:
        error = ValueError if is_number else TypeError
        raise error(f"{name} is a number of seconds, above 0, such as 10.0, not {seconds!r:.80}")


def format_bytes(num_bytes: float) -> str:
    """`num_bytes` in the largest binary unit that leaves at least 1: `1536` is `1.5 KiB`."""
    number, unit = in_bytes_unit(num_bytes)
    return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"


def in_bytes_unit(num_bytes: float) -> tuple[float, str]:
    """A number and the largest binary unit that leaves at least 1 of it."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(num_bytes) >= 1024**power:
            return num_bytes / 1024**power, unit
    return num_bytes, "B"


def format_seconds(seconds: float) -> str:
    """`seconds` in the unit that reads best: `0.0042` is `4.2 ms`."""
    number, unit = in_seconds_unit(seconds)
    return f"{number:.1f} {unit}"


def in_seconds_unit(seconds: float) -> tuple[float, str]:
    """A number and the largest unit, down to microseconds, that leaves at least 1 of it."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if abs(seconds) >= scale:
            return seconds / scale, unit
    return seconds / 1e-6, "µs"


def own_version() -> str:
    """Return the version of lowtide, for files and reports."""
    from lowtide import __version__  # when called: `lowtide` imports this module

    return __version__
