"""Decisions as data: what is recomputed, compressed and moved."""

from lowtide.plans.plan_text import Trial
from lowtide.plans.step_plan import Frontier, Move, Plan, PlannedModule, Recompute, ValueRow

__all__ = [
    "Frontier",
    "Move",
    "Plan",
    "PlannedModule",
    "Recompute",
    "Trial",
    "ValueRow",
]
