"""A moment at which memory is short: what is best for it, and what no plan can get around."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lowtide.eagerlives import EagerLives
from lowtide.graph import StepGraph
from lowtide.graph.segments import runs
from lowtide.simulator import Timeline
from lowtide.solvers.pressing import Press
from lowtide.solvers.pricing import Hull, Pricing, hull


@dataclass(frozen=True)
class Moment:
    """The best choices for a moment from everything held to as little as can be.

    `bound` is the hull of all plans, those with codecs and segments too; `hull` has none with these.
    """

    pricing: Pricing
    hull: Hull
    bound: Hull

    def least_s(self, budget: int, movable_bytes: int, offset_s: float = 0.0) -> float:
        """Seconds that every plan adds that holds at most `budget` bytes at the moment, with this much room elsewhere.

        Elsewhere is at most what the link has carried by then. Where the pricing is of one line of two, that works
        `offset_s` less than the plain step takes (a number below 0), and so much of what a plan adds does not show.
        """
        graph, at = self.pricing.graph, self.pricing.at
        plain_s = float(graph.arrays.clock[at])
        allowed = budget - self.pricing.base_bytes

        def least_s(extra_s: float) -> float:
            """With so much time lost before the moment, in which the link carries on."""
            carried = graph.hardware.link_bytes_per_s * (plain_s + extra_s)
            return self.bound.least_s(allowed + min(movable_bytes, carried)) + offset_s

        if not movable_bytes or at < graph.num_forward:
            return max(0.0, least_s(0.0))
        low, high = 0.0, max(0.0, least_s(0.0))
        for _ in range(50):  # the least loss that is enough to bring itself about
            middle = (low + high) / 2
            low, high = (low, middle) if least_s(middle) <= middle else (middle, high)
        return low


def moment_at(graph: StepGraph, plain: Timeline, op: int, press: Press | None) -> Moment:
    """The moment at which op `op` of the plain step `plain` runs."""
    pricing = Pricing(graph, plain, op)
    found, has_runs = hull(pricing), bool(runs(graph))
    if press is None and not has_runs:
        return Moment(pricing, found, found)
    return Moment(pricing, found, hull(Pricing(graph, plain, op, press=press, bounds_segments=has_runs)))


def peak_op(timeline: Timeline | EagerLives, phase: int) -> int:
    """The op at which a phase of a step peaks, -1 if it has none."""
    events = np.flatnonzero(timeline.phases == phase)
    return int(timeline.ops[events[timeline.total_bytes[events].argmax()]]) if len(events) else -1
