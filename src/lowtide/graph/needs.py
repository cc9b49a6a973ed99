"""What the backward needs of the forward, where each op can be recomputed by itself.

That is how a compiled step works: a set of forward ops has its outputs **saved**; everything else that the backward
reads is recomputed from saved and static values. Which ops run again follows from which are saved. Views are nothing of
their own here: they make no values, and a value is a storage.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from lowtide.graph.fusing import inlined

if TYPE_CHECKING:
    from lowtide.graph import Op, StepGraph

# What recomputing a pointwise op or a reduction takes, as a share of its own seconds in eager mode. There it reads and
# writes memory once each, which is all its time. Compiled, a chain of k such ops becomes part of the kernel that wants
# its result and only its input is read, at 1 / 2k of the time. Chains between two matrix products have one op to four,
# so 1/2 to 1/8: this is the middle.
FUSED_SHARE = 0.25

_NEVER_AGAIN = ("random", "collective", "index", "mutates", "opaque")
_UNFUSED = ("custom", "opaque", "collective", "index")
_PRODUCTS = ("attention", "convolution")  # kernels of their own, also where nobody counted their FLOPs


def recompute_s(op: Op) -> float:
    """Seconds that recomputing an op takes in compiled code: all of its own, or its share where it will be fused.

    An op with the flag "fused" was timed as part of what it is fused with.
    """
    return op.seconds if "fused" in op.flags or is_own_kernel(op.name, op.flops, op.flags) else FUSED_SHARE * op.seconds


def is_own_kernel(name: str, flops: int, flags: tuple[str, ...]) -> bool:
    """Whether an op is a kernel by itself in compiled code too."""
    return bool(flops) or any(flag in flags for flag in _UNFUSED) or any(product in name for product in _PRODUCTS)


@dataclass(frozen=True)
class Derived:
    """What follows from a choice of ops to save: the values saved, and the ops recomputed, both ascending."""

    saved: tuple[int, ...]
    recomputed: tuple[int, ...]


class Facts:
    """What playing a compiled step needs of a graph, as arrays: of values `made` in the step, and of all ops.

    `sizes` is indexed by value, and so are `has_bytes` and `has_bytes_again`: whether a value that is not saved is
    written to memory at all, where it is made and where it is recomputed. `seconds` and `workspaces` are indexed by op,
    with an entry for the optimizer's step at the end.
    """

    def __init__(self, graph: StepGraph) -> None:
        made = [index for index, value in enumerate(graph.values) if value.born >= 0]
        values = [graph.values[index] for index in made]
        self.made = np.array(made, dtype=np.int64)
        self.born = np.array([value.born for value in values], dtype=np.int64)
        self.dropped = np.array([value.dropped for value in values], dtype=np.int64)
        self.is_free = self.dropped > graph.num_forward
        self.is_gradient = np.array([value.kind == "gradient" for value in values], dtype=bool)
        self.sizes = np.array([0 if v.kind == "elsewhere" else v.bytes for v in graph.values], dtype=np.int64)
        arrays = graph.arrays
        self.seconds, self.workspaces = arrays.seconds, arrays.workspaces
        self.static_bytes, self.static_gradient_bytes = arrays.static_bytes, arrays.static_gradient_bytes
        made_inline, again_inline = inlined(graph.ops, graph.values, graph.num_forward)
        self.has_bytes = ~np.array(made_inline, dtype=bool)
        self.has_bytes_again = ~np.array(again_inline, dtype=bool)


class Needs:
    """Facts of a graph for compiled steps. `graph.needs` is the one to use.

    - `is_free[v]`: value `v` is there in the backward whatever is saved: static, or Python holds it when that begins.
    - `recomputable[o]`: forward op `o` gives the same again, from inputs that are still what they were.
    - `seconds[o]`: what recomputing it takes.
    - `reads[o]`: the values that it reads, but for static ones; `inputs[o]`: those of them that are not free.
    - `value_of`, `read_at`, `released_at`, `used_at`: each read of a value by the backward itself, one entry a save.
    """

    def __init__(self, graph: StepGraph) -> None:
        self._graph = graph
        num = self.num_forward = graph.num_forward
        self.is_free = [value.born < 0 or value.dropped > num for value in graph.values]
        last_change: dict[int, int] = {}
        for index, op in enumerate(graph.ops):
            last_change.update(dict.fromkeys(op.mutates, index))
        self.recomputable = [
            bool(op.outputs)
            and not op.mutates
            and not any(flag in op.flags for flag in _NEVER_AGAIN)
            and not any(value in last_change for value in op.outputs)
            and not any(last_change.get(value, -1) > index for value in op.inputs)
            for index, op in enumerate(graph.ops[:num])
        ]
        self.seconds = [recompute_s(op) for op in graph.ops[:num]]
        self.reads = [tuple({v: None for v in op.inputs if graph.values[v].born >= 0}) for op in graph.ops[:num]]
        self.inputs = [tuple(value for value in reads if not self.is_free[value]) for reads in self.reads]
        outputs = ((index, graph.ops[index].outputs) for index in range(num - 1, -1, -1))
        self._makers = [(index, made) for index, made in outputs if made]
        reads = [save for save in graph.saves if save.read >= 0 and graph.values[save.value].born >= 0]
        self.value_of = np.array([save.value for save in reads], dtype=np.int64)
        self.read_at = np.array([save.read for save in reads], dtype=np.int64)
        self.released_at = np.array([save.released for save in reads], dtype=np.int64)
        ends = [save.released if save.used < 0 else save.used for save in reads]
        self.used_at = np.array(ends, dtype=np.int64)

    @cached_property
    def facts(self) -> Facts:
        return Facts(self._graph)

    def derive(self, keeps: Container[int]) -> Derived:
        """What is saved and recomputed if the outputs of the ops in `keeps` are saved, as far as anything needs them.

        Ops that cannot be recomputed count as kept.
        """
        needed = [False] * len(self.is_free)
        for value in self.value_of.tolist():
            needed[value] = not self.is_free[value]
        saved: list[int] = []
        recomputed: list[int] = []
        for index, outputs in self._makers:  # from the last
            for value in outputs:
                if needed[value]:
                    break
            else:
                continue
            if index in keeps or not self.recomputable[index]:
                saved += [value for value in outputs if needed[value]]
            else:
                recomputed.append(index)
                for value in self.inputs[index]:
                    needed[value] = True
        return Derived(tuple(sorted(saved)), tuple(reversed(recomputed)))

    def seconds_of(self, derived: Derived) -> float:
        """What recomputing takes, the same in whatever order it is summed."""
        return math.fsum(self.seconds[op] for op in derived.recomputed)

    def keeps_of(self, derived: Derived) -> tuple[int, ...]:
        """The ops that make what is saved."""
        return tuple(sorted({self._graph.values[value].born for value in derived.saved}))
