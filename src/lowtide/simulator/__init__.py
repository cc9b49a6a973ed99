"""Simulation of a training step under a plan: live bytes at every op, seconds of the step. Imports no torch.

`simulate(graph, plan)` returns a `Timeline`. All other packages take the costs of a plan from here.

An eager step is computed in two ways, by the same rules. When a copy to the host ends depends on everything that ran
before, so plans that move or encode values are run event by event (`eager_events`, with the state in `lifetimes`).
Without moves the graph and the regions alone say when each value begins and ends, so all lifetimes are computed at once
as intervals (`eager_intervals`), about 25 times as fast, which the searches need. Both give the same bytes and seconds
for plans without moves: tests/simulator compares them, and both with tests/referee.py. What both derive from the
regions alone is in `planned_regions`. A compiled step has no regions and has intervals of its own
(`compiled_intervals`).
"""

from lowtide.simulator.timeline import KINDS, PHASES, Timeline, simulate

__all__ = [
    "KINDS",
    "PHASES",
    "Timeline",
    "simulate",
]
