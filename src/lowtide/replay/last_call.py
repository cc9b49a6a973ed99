"""What the calls of a module have in common, mostly: shared, so that fewer objects wait for the backward."""

from __future__ import annotations

from typing import Any

from lowtide.replay.arguments import Arguments


class LastCall:
    """Of the last call of a module as a region."""

    __slots__ = ("arguments", "draws", "input_versions", "metadata", "requires_grad")

    def __init__(self) -> None:
        self.arguments = Arguments()
        self.draws = False  # random numbers
        self.input_versions: list[int] = []
        self.requires_grad: list[bool] = []
        self.metadata: list[Any] = []


def same(last: list[Any], now: list[Any]) -> list[Any]:
    """One list for both if they are equal."""
    return last if last == now else now
