"""What is known of an op by its name and schema."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lowtide.replay import _compat
from lowtide.replay.arguments import tensors_in

_INDEX_OPS = frozenset(
    "topk sort argsort argmax argmin multinomial nonzero unique _unique2 unique_dim unique_consecutive kthvalue".split()
)
_INDEX_OVERLOADS = frozenset({"aten.max.dim", "aten.min.dim"})  # of ops that else give values alone
# They write their running statistics in training, which their schemas do not say.
_BATCH_NORMS = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})
OWN_NAMESPACES = frozenset({"aten", "prim", "prims"})


@dataclass(frozen=True, slots=True)
class OpFacts:
    """Name and flags of an op, and which of its arguments it writes to, all of them or in training only."""

    name: str
    flags: tuple[str, ...]
    written: tuple[int, ...]
    written_in_training: tuple[int, ...]
    has_dynamic_shape: bool
    argument_names: tuple[str, ...]

    def written_tensors(self, args: Any, kwargs: Any) -> list[Tensor]:
        """The tensors that a call with these arguments writes to."""
        indices = self.written
        if self.written_in_training and self._argument(self.argument_names.index("training"), args, kwargs):
            indices = self.written_in_training
        return [tensor for index in indices for tensor in tensors_in(self._argument(index, args, kwargs))]

    def flags_of_call(self, args: Any, kwargs: Any) -> tuple[str, ...]:
        """The flags of a call with these arguments: attention draws random numbers only if it has a dropout."""
        if "random" not in self.flags or "dropout_p" not in self.argument_names:
            return self.flags
        if self._argument(self.argument_names.index("dropout_p"), args, kwargs):  # by default it is 0
            return self.flags
        return tuple(flag for flag in self.flags if flag != "random")

    def _argument(self, index: int, args: Any, kwargs: Any) -> Any:
        return args[index] if index < len(args) else kwargs.get(self.argument_names[index])


@functools.cache
def facts_of(func: Any) -> OpFacts:
    """The facts of an op."""
    namespace, name, written, is_random, is_view = _compat.op_facts(func)
    base = name.split(".")[1]
    is_own = namespace in OWN_NAMESPACES
    flags = {
        "random": is_random,
        "collective": namespace in _compat.COLLECTIVE_NAMESPACES,
        "mutates": bool(written),
        "view": is_view,
        "index": (is_own and base in _INDEX_OPS) or name in _INDEX_OVERLOADS,
        "custom": not is_own and namespace not in _compat.COLLECTIVE_NAMESPACES,
    }
    names = tuple(_compat.op_argument_names(func))
    is_batch_norm = is_own and base in _BATCH_NORMS
    return OpFacts(
        name=name,
        flags=tuple(flag for flag, holds in flags.items() if holds),
        written=tuple(sorted(written)),
        written_in_training=tuple(names.index(n) for n in ("running_mean", "running_var")) if is_batch_norm else (),
        has_dynamic_shape=_compat.has_dynamic_shape(func),
        argument_names=names,
    )
