"""A plan that a search has come across."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.solvers.chain import Regions


@dataclass(frozen=True)
class Found:
    """A plan's decisions, and what they cost. `share` is how much of the link its moves may use."""

    regions: Regions
    share: float
    peak_bytes: int
    extra_s: float
