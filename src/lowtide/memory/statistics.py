"""What a store holds and what it took, as plain numbers whose totals are the sums of their rows."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from lowtide.units import format_bytes, format_seconds

_SHOWN_ENTRIES = 20


@dataclass(frozen=True)
class EntryStats:
    """One value. A storage of several views counts its bytes with the oldest of them."""

    key: Hashable
    nbytes: int
    age: int  # operations of the store since it was put
    cost: float | None
    tier: str


@dataclass(frozen=True)
class StoreStats:
    """A store at one moment. `print` it. Values of `compressed_bytes` were written as `compressed_to_bytes` so far.

    `num_created`, `num_evicted` and `num_spilled` count since the store was made: `num_created` every `put`, also one
    that replaces a value; `clear` leaves them as they are.
    """

    entries: tuple[EntryStats, ...]
    held_bytes_by_tier: Mapping[str, int]
    peak_bytes_by_tier: Mapping[str, int]
    budget_bytes_by_tier: Mapping[str, float]
    num_created: int
    num_evicted: int
    num_spilled: int
    compressed_bytes: int
    compressed_to_bytes: int
    moved_down_bytes: int
    moved_up_bytes: int
    in_flight_bytes: int
    locked_bytes: int
    waited_s: float

    @property
    def held_bytes(self) -> int:
        """In all tiers."""
        return sum(self.held_bytes_by_tier.values())

    @property
    def num_held(self) -> int:
        return len(self.entries)

    @property
    def num_in_memory(self) -> int:
        """Held on the device or the host."""
        return sum(entry.tier != "disk" for entry in self.entries)

    @property
    def num_held_by_tier(self) -> Mapping[str, int]:
        return {tier: sum(entry.tier == tier for entry in self.entries) for tier in self.held_bytes_by_tier}

    @property
    def budget_bytes(self) -> float:
        """Of all tiers."""
        return sum(self.budget_bytes_by_tier.values())

    @property
    def utilization_by_tier(self) -> Mapping[str, float]:
        """Held bytes as a share of each tier's budget; 0 without a limit."""
        return {tier: held / self.budget_bytes_by_tier[tier] for tier, held in self.held_bytes_by_tier.items()}

    @property
    def utilization(self) -> float:
        """Held bytes of the first tier, which values are put into, as a share of its budget; 0 without a limit."""
        return next(iter(self.utilization_by_tier.values()))

    def __str__(self) -> str:
        lines = [
            f"{self.num_held} values, {format_bytes(self.held_bytes)} held; "
            f"{self.num_created} created, {self.num_evicted} evicted, {self.num_spilled} spilled",
            f"moved down {format_bytes(self.moved_down_bytes)}, up {format_bytes(self.moved_up_bytes)}; "
            f"{format_bytes(self.in_flight_bytes)} in flight, {format_bytes(self.locked_bytes)} locked; "
            f"waited {format_seconds(self.waited_s)}",
            f"{'tier':<8}{'values':>8}{'held':>12}{'peak':>12}{'budget':>12}{'used':>6}",
        ]
        for tier, held in self.held_bytes_by_tier.items():
            budget = self.budget_bytes_by_tier[tier]
            shown = "no limit" if budget == float("inf") else format_bytes(budget)
            lines.append(
                f"{tier:<8}{self.num_held_by_tier[tier]:>8}{format_bytes(held):>12}"
                f"{format_bytes(self.peak_bytes_by_tier[tier]):>12}{shown:>12}{self.utilization_by_tier[tier]:>6.0%}"
            )
        for entry in self.entries[:_SHOWN_ENTRIES]:
            cost = "" if entry.cost is None else f", cost {entry.cost:g}"
            lines.append(f"  {entry.key!r}: {format_bytes(entry.nbytes)} on {entry.tier}, age {entry.age}{cost}")
        if self.num_held > _SHOWN_ENTRIES:
            lines.append(f"  and {self.num_held - _SHOWN_ENTRIES} more")
        return "\n".join(lines)
