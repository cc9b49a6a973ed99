"""What a policy or plan on a live model did so far."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.units import format_bytes


@dataclass(frozen=True)
class RegionStats:
    """One layer: what its last measured forward saved for the backward, and what became of it."""

    name: str
    recomputed: bool
    saved_bytes: int
    num_replays: int


@dataclass(frozen=True)
class AppliedStats:
    """What an applied policy or plan did so far. Bytes are measured; of layers, in the first forward of each shape.

    `stored_bytes` are in stores now. So far `moved_bytes` went to host memory or disk, `compressed_bytes` were written
    as `compressed_to_bytes`, and compute stood still for copies for `waited_s`.
    """

    regions: tuple[RegionStats, ...]
    stored_bytes: int
    moved_bytes: int = 0
    compressed_bytes: int = 0
    compressed_to_bytes: int = 0
    waited_s: float = 0.0
    segments: tuple[tuple[str, ...], ...] = ()  # names of layers that are recomputed together, from one input

    @property
    def num_regions(self) -> int:
        return len(self.regions)

    @property
    def num_recomputed(self) -> int:
        return sum(region.recomputed for region in self.regions)

    @property
    def kept_bytes(self) -> int:
        return sum(region.saved_bytes for region in self.regions if not region.recomputed)

    @property
    def recomputed_bytes(self) -> int:
        return sum(region.saved_bytes for region in self.regions if region.recomputed)

    @property
    def num_replays(self) -> int:
        return sum(region.num_replays for region in self.regions)

    def __str__(self) -> str:
        moved = f", {format_bytes(self.moved_bytes)} moved so far" if self.moved_bytes else ""
        if self.compressed_bytes:
            moved += f", {format_bytes(self.compressed_bytes)} compressed to {format_bytes(self.compressed_to_bytes)}"
        return (
            f"{self.num_regions} regions, {self.num_recomputed} recomputed: {format_bytes(self.kept_bytes)} kept, "
            f"{format_bytes(self.recomputed_bytes)} recomputed, {format_bytes(self.stored_bytes)} stored; "
            f"{self.num_replays} replays{moved}"
        )
