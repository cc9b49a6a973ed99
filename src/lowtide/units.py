"""Parse and format bytes, seconds and counts, as in `budget="12GiB"` and in reports; and lowtide's version."""

from __future__ import annotations

import re

from lowtide.errors import UnitError

_BYTES_PER_UNIT = {"b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _BYTES_PER_UNIT[f"{_letter}b"] = 1000**_power
    _BYTES_PER_UNIT[f"{_letter}ib"] = 1024**_power

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+|%)\s*", re.IGNORECASE)
_ADVICE = 'Write whole bytes (12884901888) or a number with a unit ("12GiB", "12GB", "512MiB", "80%").'
_ADVICE_WITHOUT_SHARES = _ADVICE.replace(', "80%"', "")


def parse_bytes(size: int | str, *, total_bytes: int | None = None) -> int:
    """Return the number of bytes that `size` means.

    `"80%"` is a share of `total_bytes`, and an error if no total is given. A bare fraction (`0.5`) is an error, since
    it could mean bytes, GiB or a share.

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
            raise UnitError(
                f"{size!r} is a share, and the total it is a share of is not known here. {_ADVICE_WITHOUT_SHARES}"
            )
        if number > 100:
            raise UnitError(f"{size!r} exceeds 100 %. {_ADVICE}")
        return int(total_bytes * number / 100)
    if unit not in _BYTES_PER_UNIT:
        raise UnitError(f"{size!r} has the unknown unit {match[2]!r}. {_ADVICE}")
    return int(number * _BYTES_PER_UNIT[unit])


def check_bytes(size: int | str) -> None:
    """Raise `UnitError` if `size` cannot be read; a share (`"80%"`) is accepted without its total."""
    parse_bytes(size, total_bytes=1 << 40)


def check_seconds(seconds: float, name: str, *, may_be_0: bool = False) -> None:
    """Raise unless `seconds`, the value of the option `name`, is a number above 0, or 0 if `may_be_0`.

    >>> check_seconds(10, "time_limit_s")
    """
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not (seconds > 0 or (may_be_0 and seconds == 0)):
        error = ValueError if is_number else TypeError
        allowed = "0 or more" if may_be_0 else "above 0"
        raise error(f"{name} is a number of seconds, {allowed}, such as 10.0, not {seconds!r:.80}")


def in_blocks(num_bytes: int, block_bytes: int) -> int:
    """Round up to whole blocks of an allocator."""
    return -(-num_bytes // block_bytes) * block_bytes


def format_bytes(num_bytes: float) -> str:
    """Format bytes in the largest binary unit that gives at least 1: `1536` is `1.5 KiB`."""
    number, unit = in_bytes_unit(num_bytes)
    return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"


def format_apart(first: float, second: float) -> tuple[str, str]:
    """Format two different numbers of bytes with as many digits as it takes to tell them apart.

    >>> format_apart(4_695_000_000, 4_698_000_000)
    ('4.37 GiB', '4.38 GiB')
    """
    texts, digits = (format_bytes(first), format_bytes(second)), 1
    while texts[0] == texts[1] and first != second and digits < 15:
        digits += 1
        (one, unit), (other, other_unit) = in_bytes_unit(first), in_bytes_unit(second)
        texts = f"{one:.{digits}f} {unit}", f"{other:.{digits}f} {other_unit}"
    return texts


def in_bytes_unit(num_bytes: float) -> tuple[float, str]:
    """Return a number and its unit: the largest binary unit that gives at least 1."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(num_bytes) >= 1024**power:
            return num_bytes / 1024**power, unit
    return num_bytes, "B"


def format_seconds(seconds: float) -> str:
    """Format seconds in s, ms or µs: `0.0042` is `4.2 ms`."""
    number, unit = in_seconds_unit(seconds)
    return f"{number:.1f} {unit}"


def in_seconds_unit(seconds: float) -> tuple[float, str]:
    """Return a number and its unit: the largest of s, ms and µs that gives at least 1."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if abs(seconds) >= scale:
            return seconds / scale, unit
    return seconds / 1e-6, "µs"


def counted(num: int, noun: str) -> str:
    """Return `1 call` or `2 calls`."""
    return f"{num} {noun}" if num == 1 else f"{num} {noun}s"


def own_version() -> str:
    """Return the version of lowtide, for files and reports."""
    from lowtide import __version__  # not at import: `lowtide` imports this module

    return __version__
