"""The one referee of what a plan costs, in bytes and in seconds."""

from lowtide.simulator.timeline import KINDS, PHASES, Timeline, simulate

__all__ = [
    "KINDS",
    "PHASES",
    "Timeline",
    "simulate",
]
