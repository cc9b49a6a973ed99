"""Which layer a module belongs to, and what it is called in all layers that are alike."""

from __future__ import annotations

import re

from lowtide.graph import StepGraph
from lowtide.solvers.references import all_blocks

OUTSIDE = "outside of modules"


class Layers:
    """The layers of a step: its repeated blocks, and what is beside them by the model's outermost modules."""

    def __init__(self, graph: StepGraph) -> None:
        self._blocks = {graph.calls[call].path for call in all_blocks(graph)}

    def layer_of(self, path: str) -> str:
        """The block that a module is or lies in, else the outermost module around it."""
        block = self._block(path)
        return block if block is not None else path.split(".")[0] or OUTSIDE

    def pattern_of(self, path: str) -> str:
        """A module's path with the number of its block left open: `layers.*.mlp` for `layers.7.mlp`."""
        block = self._block(path)
        if block is None:
            return path or OUTSIDE
        opened = re.sub(r"\d+(?=[^\d]*$)", "*", block)
        return opened + path[len(block) :]

    def _block(self, path: str) -> str | None:
        parts = path.split(".")
        for length in range(len(parts), 0, -1):
            if (prefix := ".".join(parts[:length])) in self._blocks:
                return prefix
        return None


def short_op(name: str) -> str:
    """`addmm` for `aten.addmm.default`: the namespace goes if it is torch's own, and so does the overload."""
    parts = name.split(".")
    if len(parts) >= 3 and parts[0] in ("aten", "prims"):
        return parts[1]
    return name


def counted(num: int, noun: str) -> str:
    return f"{num} {noun}" if num == 1 else f"{num} {noun}s"
