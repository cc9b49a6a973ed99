"""`with_costs_of`: a predicted graph with the measured costs of another graph of the same model.

A step whose modules run in parts (`split=True`) has nearly all ops of the plain step, and some others. Measuring it
takes as long as measuring the plain step did, for each number of parts that is tried. Instead, ops that both graphs
have get their seconds and workspaces from the measured one, by the call they belong to, their name and sizes. Each
other op gets the seconds per FLOP, or per byte, of measured ops with its name. An op with a new name gets the seconds
per FLOP of all measured ops, or without FLOPs its predicted seconds times measured over predicted seconds of all common
ops.

What this misses: kernels that are slower per row for few rows. `fit` runs such plans for real before it keeps one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from lowtide.graph.step_graph import Op, StepGraph

_Key = tuple[object, ...]


def with_costs_of(predicted: StepGraph, measured: StepGraph) -> StepGraph:
    """`predicted` with seconds, workspaces, hardware and other memory from `measured`, for ops and in proportion."""
    known = dict(zip(_keys(measured), measured.ops, strict=True))
    matches = [known.get(key) for key in _keys(predicted)]
    pairs = [(op, match) for op, match in zip(predicted.ops, matches, strict=True) if match is not None]
    predicted_s = sum(op.seconds for op, _ in pairs)
    scale = sum(match.seconds for _, match in pairs) / predicted_s if predicted_s else 1.0
    rates = _Rates(measured)
    ops = tuple(
        rates.applied(op, _moved_bytes(predicted, op), scale)
        if match is None
        else replace(op, seconds=match.seconds, host_s=match.host_s, workspace_bytes=match.workspace_bytes)
        for op, match in zip(predicted.ops, matches, strict=True)
    )
    graph = replace(predicted, ops=ops, hardware=measured.hardware, other_bytes=measured.other_bytes)
    simulated_s = measured.lines.step_s
    factor = measured.step_s / simulated_s if simulated_s else 1.0
    return replace(graph, step_s=factor * graph.lines.step_s, is_measured=False)


class _Rates:
    """Seconds of measured ops by their name: for each FLOP or byte on the device, and for each op on the host."""

    def __init__(self, graph: StepGraph) -> None:
        self._flops, self._bytes, self._seconds = Counter[str](), Counter[str](), dict[str, float]()
        self._numbers, self._host_s = Counter[str](), dict[str, float]()
        for op in graph.ops:
            self._flops[op.name] += op.flops
            self._bytes[op.name] += _moved_bytes(graph, op)
            self._seconds[op.name] = self._seconds.get(op.name, 0.0) + op.seconds
            self._host_s[op.name] = self._host_s.get(op.name, 0.0) + op.host_s
            self._numbers[op.name] += 1
        with_flops = [op for op in graph.ops if op.flops]
        num_flops = sum(op.flops for op in with_flops)
        self._s_per_flop = sum(op.seconds for op in with_flops) / num_flops if num_flops else 0.0
        self._mean_host_s = sum(self._host_s.values()) / max(1, len(graph.ops))

    def applied(self, op: Op, moved_bytes: int, scale: float) -> Op:
        """An op that was not measured, with seconds like those that were; `scale` is for new names."""
        name = op.name
        host_s = self._host_s[name] / self._numbers[name] if self._numbers[name] else self._mean_host_s
        if op.flops and self._flops[name]:
            seconds = op.flops * self._seconds[name] / self._flops[name]
        elif op.flops and self._s_per_flop:
            seconds = op.flops * self._s_per_flop
        elif not op.flops and self._bytes[name]:
            seconds = moved_bytes * self._seconds[name] / self._bytes[name]
        else:
            seconds = op.seconds * scale
        return replace(op, seconds=seconds, host_s=host_s)


def _moved_bytes(graph: StepGraph, op: Op) -> int:
    return sum(graph.values[value].bytes for value in (*op.inputs, *op.outputs, *op.mutates))


def _keys(graph: StepGraph) -> Iterable[_Key]:
    """For each op what identifies it in another graph: its call, or that of its forward op, its name and sizes."""
    seen = Counter[_Key]()
    for index, op in enumerate(graph.ops):
        own = op.call if index < graph.num_forward or op.forward_op < 0 else graph.ops[op.forward_op].call
        call = (graph.calls[own].path, graph.nths[own]) if own >= 0 else ("", -1)
        sizes = tuple(graph.values[value].bytes for value in op.outputs)
        key: _Key = (index < graph.num_forward, *call, op.name, op.flops, sizes, _moved_bytes(graph, op))
        yield (*key, seen[key])
        seen[key] += 1
