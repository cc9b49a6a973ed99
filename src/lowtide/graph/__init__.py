"""A training step as data: ops, values, saved tensors, module calls, and the hardware that its times are for.

`lowtide.trace` makes a `StepGraph`, solvers and the simulator read it. The other modules of this package derive tables
from it (`arrays`), its two time lines, its segments, its JSON, and what codecs would cost. Nothing here imports torch.
"""

from lowtide.graph.step_graph import UNKNOWN_HARDWARE, Call, Hardware, Op, Save, StepGraph, Value

__all__ = [
    "UNKNOWN_HARDWARE",
    "Call",
    "Hardware",
    "Op",
    "Save",
    "StepGraph",
    "Value",
]
