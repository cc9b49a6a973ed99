"""Facts about ops, read from an op's schema and name: what it writes, whether it is random, a view, or a collective.

Traces store the flags. The dispatch modes of replays decide by them which outputs to keep, and look facts up for every
op that runs: by the op's id, as ops are slow to hash.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lowtide import _compat
from lowtide.graph.step_graph import KEPT_COLLECTIVES, KEPT_IN_PLACE
from lowtide.replay.arguments import tensors_in

_INDEX_OPS = frozenset(
    "topk sort argsort argmax argmin multinomial nonzero unique _unique2 unique_dim unique_consecutive kthvalue".split()
)
_INDEX_OVERLOADS = frozenset({"aten.max.dim", "aten.min.dim"})  # other overloads of these ops return values only
# They write running statistics in training, which their schemas do not declare.
_BATCH_NORMS = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})
_OWN_NAMESPACES = frozenset({"aten", "prim", "prims"})


@dataclass(frozen=True, slots=True)
class OpFacts:
    """Name and flags of an op, and the indices of the arguments that it writes, always or in training only."""

    name: str
    flags: tuple[str, ...]
    written: tuple[int, ...]
    written_in_training: tuple[int, ...]
    has_dynamic_shape: bool
    argument_names: tuple[str, ...]
    kept_as: str  # how replays get its output (`index_choices`): "index"; "start", "wait" or "in place"; "" for others
    is_foreign: bool  # not one of torch's own, so that its schema may be incomplete
    may_draw: bool  # draws random numbers, or may do so
    may_write: bool  # writes to arguments, always or in training

    def written_tensors(self, args: Any, kwargs: Any) -> list[Tensor]:
        """List the tensors that a call with these arguments writes to."""
        indices = self.written
        if self.written_in_training and self._argument(self.argument_names.index("training"), args, kwargs):
            indices = self.written_in_training
        return [tensor for index in indices for tensor in tensors_in(self._argument(index, args, kwargs))]

    def flags_of_call(self, args: Any, kwargs: Any) -> tuple[str, ...]:
        """Return the flags of a call with these arguments: attention is random only if its dropout is not 0."""
        if "random" not in self.flags or "dropout_p" not in self.argument_names:
            return self.flags
        if self._argument(self.argument_names.index("dropout_p"), args, kwargs):  # the default is 0
            return self.flags
        return tuple(flag for flag in self.flags if flag != "random")

    def _argument(self, index: int, args: Any, kwargs: Any) -> Any:
        return args[index] if index < len(args) else kwargs.get(self.argument_names[index])


UNFILLED = ("aten.empty", "aten.new_empty")  # beginnings of names of ops whose output is still to be filled

_known: dict[int, tuple[Any, OpFacts]] = {}  # by the id of the op, which is held so that the id stays its own


def facts_of(op: Any) -> OpFacts:
    """Return the facts of an op, read from its schema once."""
    known = _known.get(id(op))
    if known is None:
        _known[id(op)] = known = op, _read(op)
    return known[1]


def _read(op: Any) -> OpFacts:
    if not _compat.is_op_overload(op):  # a higher-order op, which calls functions
        return OpFacts(str(op), ("custom",), (), (), False, (), "", is_foreign=True, may_draw=True, may_write=False)
    namespace, name, written, is_random, is_view, is_dynamic = _compat.op_facts(op)
    base = name.split(".")[1]
    is_own = namespace in _OWN_NAMESPACES
    is_index = (is_own and base in _INDEX_OPS) or name in _INDEX_OVERLOADS
    is_in_place = name.startswith(KEPT_IN_PLACE)
    if is_in_place:  # their schemas declare no writes
        written = frozenset({0})
    flags = {
        "random": is_random,
        "collective": namespace in _compat.COLLECTIVE_NAMESPACES,
        "mutates": bool(written),
        "view": is_view,
        "index": is_index,
        "custom": not is_own and namespace not in _compat.COLLECTIVE_NAMESPACES,
    }
    ways = {
        "index": is_index,
        "start": name.startswith(KEPT_COLLECTIVES),
        "in place": is_in_place,
        "wait": name.startswith("_c10d_functional.wait_tensor"),
    }
    names = tuple(_compat.op_arguments(op, (), {}))
    is_batch_norm = is_own and base in _BATCH_NORMS
    return OpFacts(
        name=name,
        flags=tuple(flag for flag, holds in flags.items() if holds),
        written=tuple(sorted(written)),
        written_in_training=tuple(names.index(n) for n in ("running_mean", "running_var")) if is_batch_norm else (),
        has_dynamic_shape=is_dynamic,
        argument_names=names,
        kept_as=next((way for way, holds in ways.items() if holds), ""),
        is_foreign=not is_own,
        may_draw=is_random or not is_own,
        may_write=bool(written) or is_batch_norm,
    )
