"""A compiled plan as tags on a joint graph, which torch's own partitioner carries out."""

from __future__ import annotations

from collections.abc import Container

from torch.utils.checkpoint import CheckpointPolicy

from lowtide.engines import _compat
from lowtide.tracing.joint import JointStep


def tag(step: JointStep, keeps: Container[int]) -> None:
    """Mark each forward node as saved or recomputed. A user's own checkpoint regions keep their marks.

    Views are never saved: those of a value that is, are made again from it.
    """
    recomputable = step.graph.needs.recomputable
    for index, (node, parts) in enumerate(zip(step.nodes, step.parts, strict=True)):
        is_saved = index in keeps or not recomputable[index]
        for each in (node, *parts):
            _compat.set_tag(each, CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.MUST_RECOMPUTE)
    for view in step.views:
        _compat.set_tag(view, CheckpointPolicy.MUST_RECOMPUTE)
