"""Parameters of which the default run takes a few, and `pytest -m slow` the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sweep(cases: Iterable[Any], keep: int) -> list[Any]:
    """`cases` as arguments of `parametrize`; those after the first `keep` are marked slow."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if number < keep else pytest.mark.slow)
        for number, case in enumerate(cases)
    ]
