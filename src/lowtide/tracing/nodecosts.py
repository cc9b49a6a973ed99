"""Seconds per node of a joint graph: kernels of their own measured where there is a device, the rest foretold.

Matrix products, convolutions and attention run alone, on numbers like those of a step, once per shape and process.
Pointwise ops are fused with their neighbours, so timing them alone would say nothing: bytes and bandwidth do.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lowtide.graph import Hardware
from lowtide.tracing import _compat
from lowtide.tracing.devices import MEMORY_EFFICIENCY
from lowtide.tracing.joint import NodeFacts
from lowtide.tracing.records import RawOp
from lowtide.tracing.timing import clock_for, predicted_s

_ROUNDS = 5
_measured: dict[tuple[str, ...], float | None] = {}


def node_costs(hardware: Hardware, device: torch.device) -> Callable[[NodeFacts], float]:
    """Seconds of a node on a device."""

    def seconds(facts: NodeFacts) -> float:
        if "fused" in facts.flags:
            return facts.moved_bytes / (hardware.memory_bytes_per_s * MEMORY_EFFICIENCY)
        if device.type != "cpu" and not {"random", "opaque", "collective"} & set(facts.flags):
            found = _measured_s(facts, device)
            if found is not None:
                return found
        return predicted_s(_as_op(facts), hardware)

    return seconds


def _as_op(facts: NodeFacts) -> RawOp:
    name = str(facts.node.target)
    return RawOp(name, None, -1, (), (), (), facts.flags, facts.flops, facts.moved_bytes, facts.dtype, forward_op=-1)


def _measured_s(facts: NodeFacts, device: torch.device) -> float | None:
    """A node's seconds, or None where it cannot run on its own, for lack of memory say."""
    parts = (facts.node.target, device, *_compat.node_arguments(facts.node, _described))
    key = tuple(map(str, parts))
    if key not in _measured:
        try:
            with _compat.real_world(), torch.random.fork_rng([device], device_type=device.type), torch.no_grad():
                _measured[key] = _run(facts, device)
        except (RuntimeError, TypeError, ValueError):  # the first also for lack of memory, or of a kernel
            _measured[key] = None
    return _measured[key]


def _run(facts: NodeFacts, device: torch.device) -> float:
    args, kwargs = _compat.node_arguments(facts.node, lambda value: _filled(value, device))
    target: Any = facts.node.target
    clock = clock_for(device)
    target(*args, **kwargs)
    marks = []
    for _ in range(_ROUNDS):
        before = clock.mark()
        target(*args, **kwargs)
        marks.append((before, clock.mark()))
    return median(clock.seconds(marks))


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(map(_compat.hint, value.shape)), tuple(map(_compat.hint, value.stride()))
    return _compat.hint(value)


def _filled(value: Any, device: torch.device) -> Any:
    """A tensor of a node's shape: numbers around zero, or indices of the first entry."""
    if not isinstance(value, Tensor):
        return _compat.hint(value)
    if value.device.type == "cpu":
        device = value.device
    shape, strides = list(map(_compat.hint, value.shape)), list(map(_compat.hint, value.stride()))
    made = torch.empty_strided(shape, strides, dtype=value.dtype, device=device)
    return made.normal_() if value.is_floating_point() else made.zero_()
