"""Which values of a compiled step are never written to memory.

A compiler fuses runs of pointwise ops and reductions into one kernel; what passes between them stays in registers, and
has no bytes unless it is saved. Only ops with the flag "fused" are counted as such: graphs of compiled steps have it,
graphs of eager ones do not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from lowtide.graph import Op, Value


def inlined(ops: Sequence[Op], values: Sequence[Value], num_forward: int) -> tuple[list[bool], list[bool]]:
    """Values that have no bytes where they are made, and forward values that have none where they are made again.

    The first: every reader in the same direction is in the same run of fused ops. The second: every reader is fused, in
    the backward or in what is recomputed for it; whoever reads it there may compute it for itself.
    """
    alone = [index for index, op in enumerate(ops) if "fused" not in op.flags]
    readers: dict[int, list[int]] = {}
    for index, op in enumerate(ops):
        for value in op.inputs:
            readers.setdefault(value, []).append(index)
    made, again = [False] * len(values), [False] * len(values)
    for number, facts in enumerate(values):
        if facts.born < 0 or "fused" not in ops[facts.born].flags or facts.kind != "activation":
            continue
        is_forward = facts.born < num_forward
        if facts.dropped > (num_forward if is_forward else len(ops) - 1):
            continue  # handed out
        all_readers = readers.get(number, [])
        near = [index for index in all_readers if (index < num_forward) == is_forward]
        # No kernel of its own from the op that makes it to the last that reads it in this direction.
        made[number] = bool(near) and bisect_left(alone, near[-1] + 1) == bisect_left(alone, facts.born)
        again[number] = is_forward and all("fused" in ops[index].flags for index in all_readers)
    return made, again
