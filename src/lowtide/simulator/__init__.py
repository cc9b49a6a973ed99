"""Simulation of a training step under a plan: live bytes at every op, seconds of the step. Imports no torch.

`simulate(graph, plan)` returns a `Timeline`. All other packages take the costs of a plan from here.
"""

from lowtide.simulator.timeline import KINDS, PHASES, Timeline, simulate

__all__ = [
    "KINDS",
    "PHASES",
    "Timeline",
    "simulate",
]
