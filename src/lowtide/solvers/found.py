"""A plan that a search has come across."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.graph.segments import Span
from lowtide.solvers.chain import Regions
from lowtide.solvers.pressing import Codecs


@dataclass(frozen=True)
class Found:
    """A plan's decisions, and what they cost. `share` is how much of the link moves use, `codecs` what is encoded.

    With `spans`, calls of `regions` are those of the graph with these segments.
    """

    regions: Regions
    share: float
    codecs: Codecs
    peak_bytes: int
    extra_s: float
    spans: tuple[Span, ...] = ()

    @property
    def decisions(self) -> tuple[Regions, float, Codecs]:
        return self.regions, self.share, self.codecs


def faster(*candidates: Found | None) -> Found | None:
    """The fastest of those that there are; the smaller of two that are as fast."""
    found = [candidate for candidate in candidates if candidate is not None]
    return min(found, key=lambda candidate: (candidate.extra_s, candidate.peak_bytes), default=None)


def smaller(*candidates: Found | None) -> Found | None:
    """The one with the least peak of those that there are; the faster of two that are as small."""
    found = [candidate for candidate in candidates if candidate is not None]
    return min(found, key=lambda candidate: (candidate.peak_bytes, candidate.extra_s), default=None)
