"""Rows of the table of bench/eager.py: written to a page, read from it, and counted."""

from __future__ import annotations

import re
from dataclasses import dataclass

HEAD = "| budget | GiB | best of torch's | ms | + % | ours: ms | + % | predicted + % | GiB | holds | fit s | kept |"
NOISE = 2.0  # percent of the plain step by which two ways may differ and count as equal
PREDICTED_WITHIN = 5.0  # percent of the plain step


@dataclass(frozen=True)
class Row:
    """One budget: the fastest of torch's ways that hold it, and ours. `over` is percent above the plain step."""

    family: str
    budget: str
    budget_gib: float
    peer: str
    peer_ms: float
    peer_over: float
    ours_ms: float
    ours_over: float
    predicted: float | None  # percent; None where nothing was predicted
    ours_gib: float
    holds: bool
    fit: str = ""
    kept: str = ""

    def __str__(self) -> str:
        cells = [
            self.budget,
            gib(self.budget_gib),
            self.peer,
            *(f"{self.peer_ms:.1f}", f"{self.peer_over:+.1f}", f"{self.ours_ms:.1f}", f"{self.ours_over:+.1f}"),
            "" if self.predicted is None else f"{self.predicted:+.1f}",
            gib(self.ours_gib),
            "yes" if self.holds else "NO",
            self.fit,
            self.kept,
        ]
        return f"| {' | '.join(cells)} |"

    @property
    def behind(self) -> float:
        """Percent of the plain step that ours takes longer than torch's way."""
        return self.ours_over - self.peer_over

    @property
    def is_mispredicted(self) -> bool:
        return self.predicted is not None and abs(self.predicted - self.ours_over) > PREDICTED_WITHIN


def gib(size: float) -> str:
    return f"{size:.3f}" if size >= 1 else f"{size:.5f}"


def sections(page: str) -> dict[str, str]:
    """The part of a page on each family, without its summary."""
    parts = re.split(r"^## ", page.partition("\n## Summary")[0] + "\n", flags=re.MULTILINE)[1:]
    return {part.split(":")[0]: f"## {part.strip()}" for part in parts}


def read(page: str) -> list[Row]:
    """The rows on a page; lines that tell of a failure are none."""
    found = []
    for family, section in sections(page).items():
        lines = section.partition(HEAD)[2].splitlines()
        for line in lines:
            cells = [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]
            if len(cells) == HEAD.count("|") - 1 and cells[0].strip("-"):
                found.append(_parsed(family, cells))
    return found


def _parsed(family: str, cells: list[str]) -> Row:
    budget, budget_gib, peer, *numbers, predicted, ours_gib, holds, fit, kept = cells
    return Row(
        family,
        budget,
        float(budget_gib),
        peer,
        *map(float, numbers),
        predicted=float(predicted) if predicted else None,
        ours_gib=float(ours_gib),
        holds=holds == "yes",
        fit=fit,
        kept=kept,
    )


def summary(rows: list[Row], num_failed: int) -> str:
    """How many rows there are, and how many do not keep what is promised."""
    if not rows:
        return f"No rows, {num_failed} failed."
    slower = [row for row in rows if row.behind > NOISE]
    worst = max(rows, key=lambda row: row.behind)
    predicted = [row for row in rows if row.predicted is not None]
    missed = [row for row in predicted if row.is_mispredicted]
    over = [row for row in rows if not row.holds]
    return (
        f"{len(rows)} rows, {num_failed} failed. Slower than the best of torch's by more than {NOISE:.0f} % of the "
        f"plain step: {len(slower)}; the worst of all, {worst.family} at {worst.budget}: {worst.behind:+.1f} points. "
        f"Predicted more than {PREDICTED_WITHIN:.0f} points off: {len(missed)} of {len(predicted)}"
        f"{_named(missed)}. Budgets exceeded: {len(over)}{_named(over)}."
    )


def _named(rows: list[Row]) -> str:
    return f" ({'; '.join(f'{row.family} at {row.budget}' for row in rows)})" if rows else ""
