"""Candidates that `fit` has tried, as rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.units import format_bytes

KEPT = "kept"
HEAD = ("candidate", "peak predicted", "peak measured", "slower predicted", "slower measured", "outcome")


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate: what was predicted of it, what real steps measured (None: nothing), and what became of it.

    Peaks are of the whole step. Slowdowns are over the plain step; a measured one is None where the plain step did not
    run. `outcome` is "kept", or says why the candidate was not.
    """

    name: str
    num_regions: int
    num_moves: int
    predicted_peak_bytes: int
    predicted_slowdown: float
    measured_peak_bytes: int | None = None
    measured_step_s: float | None = None
    measured_slowdown: float | None = None
    outcome: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """The columns of `HEAD`, as text."""
        peak, slower = self.measured_peak_bytes, self.measured_slowdown
        return (
            self.name,
            format_bytes(self.predicted_peak_bytes),
            "" if peak is None else format_bytes(peak),
            f"{100 * self.predicted_slowdown:.1f} %",
            "" if slower is None else f"{100 * slower:.1f} %",
            self.outcome,
        )


def table(trials: Sequence[Trial]) -> str:
    """The trials as lines of text, in columns."""
    rows = [HEAD, *(trial.cells for trial in trials)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *numbers, outcome in rows:
        cells = [name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=False))]
        lines.append("  ".join([*cells, outcome]))
    return "\n".join(lines)
