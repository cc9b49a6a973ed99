"""A training step as data: ops, values, saves, module calls."""

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
