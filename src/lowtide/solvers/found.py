"""A plan that a search has come across."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.solvers.chain import Regions
from lowtide.solvers.pressing import Codecs


@dataclass(frozen=True)
class Found:
    """A plan's decisions, and what they cost: `share` of the link for its moves, and values in `codecs`."""

    regions: Regions
    share: float
    peak_bytes: int
    extra_s: float
    codecs: Codecs = ()
