"""Plans: frozen data that say which activations of a step are recomputed, retained, moved or compressed.

Solvers make a `Plan`, the simulator predicts its cost, and the engines carry it out. It can be saved as JSON and
printed (`plan_text`). Nothing here imports torch.
"""

from lowtide.graph.step_graph import Split
from lowtide.plans.plan_text import Trial
from lowtide.plans.step_plan import Frontier, Move, Plan, PlannedModule, Recompute, ValueRow

__all__ = [
    "Frontier",
    "Move",
    "Plan",
    "PlannedModule",
    "Recompute",
    "Split",
    "Trial",
    "ValueRow",
]
