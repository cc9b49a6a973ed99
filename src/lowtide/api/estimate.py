"""`lowtide.estimate`: peak, floor and largest parts of a training step, predicted without allocating memory.

The step is traced on fake tensors and simulated. A second trace with twice the batch gives the bytes per sample. If the
step depends on values of tensors, which fake tensors do not have, real steps are traced instead and a note says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.api.split_search import SplitSearch
from lowtide.eager.replanning import Limits
from lowtide.errors import LowtideError, TraceError
from lowtide.graph.step_graph import StepGraph
from lowtide.replay.arguments import map_tensors, tensors_in
from lowtide.simulator.timeline import Timeline, simulate
from lowtide.solvers.eager_search import EagerSearch
from lowtide.tracing import step_checks as checks
from lowtide.tracing.step_checks import one_at_a_time
from lowtide.tracing.trace import FakeTraceError, trace, trace_once
from lowtide.tracing.untraced_memory import plain_optimizer
from lowtide.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Estimate:
    """Predicted memory of a training step.

    `peak_bytes` is the peak of the plain step, `floor_bytes` the smallest peak of a plan that recomputes, and
    `static_bytes` are allocated during the whole step: parameters, gradients, optimizer state, buffers, batch.
    If `is_limited_by_optimizer`, the floor lies in the optimizer's step, in which gradients and optimizer state are
    allocated and activations are not: no plan lowers it, but a fused optimizer (no workspace) or one with less state.
    `bytes_per_sample` is how much each further sample adds to the plain peak, None if the tensors of the batch do not
    share a first dimension. `split_floor_bytes` is the smallest peak of a plan that also runs modules in parts, None if
    that was not asked for or nothing can be split. `largest` names the modules with most bytes at the peak. `graph` is
    the trace.
    """

    peak_bytes: int
    floor_bytes: int
    static_bytes: int
    bytes_per_sample: int | None
    batch_size: int | None
    largest: tuple[tuple[str, int], ...]
    graph: StepGraph
    split_floor_bytes: int | None = None
    is_limited_by_optimizer: bool = False

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks of the trace; one of them says why real steps were run, if they were."""
        return self.graph.notes

    def fits(self, budget_bytes: int) -> bool:
        """Whether a plain step fits into `budget_bytes`."""
        return self.peak_bytes <= budget_bytes

    def _floor_text(self) -> str:
        if not self.is_limited_by_optimizer:
            return "with everything recomputed that helps"
        workspace = self.graph.optimizer_workspace_bytes
        return "in the optimizer's step, which no plan changes" + (
            f" ({format_bytes(workspace)} of it are workspace: fused=True needs none)" if workspace else ""
        )

    def _limit_text(self) -> str:
        if not self.graph.has_host_line:
            return ""
        lines = self.graph.lines
        host, device = format_seconds(lines.host_s), format_seconds(lines.device_s)
        return f", limited by the {lines.limit} (host {host}, device {device})"

    def __str__(self) -> str:
        device = self.graph.hardware
        rows = [
            ("plain step", format_bytes(self.peak_bytes)),
            ("floor", f"{format_bytes(self.floor_bytes)} {self._floor_text()}"),
            *self._split_row(),
            ("static", format_bytes(self.static_bytes)),
            *((f"  {kind}", format_bytes(size)) for kind, size in self.graph.static_bytes.items() if size),
            ("step time", f"{format_seconds(self.graph.step_s)} without a plan{self._limit_text()}"),
        ]
        if self.bytes_per_sample is not None:
            rows.append(("per sample", f"{format_bytes(self.bytes_per_sample)} (batch of {self.batch_size})"))
        rows += [(f"at the peak: {name}", format_bytes(size)) for name, size in self.largest]
        if device.memory_bytes:
            verdict = "fits" if self.fits(device.memory_bytes) else "does not fit"
            rows.append((f"{device.name}", f"{format_bytes(device.memory_bytes)}: a plain step {verdict}"))
        width = max(len(name) for name, _ in rows)
        title = "predicted from real steps" if self.graph.is_measured else "predicted, nothing allocated"
        return "\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in rows)])

    def _split_row(self) -> list[tuple[str, str]]:
        floor = self.split_floor_bytes
        return [] if floor is None else [("floor, split", f"{format_bytes(floor)} with split=True")]


@one_at_a_time
def estimate(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    *args: Any,
    optimizer: torch.optim.Optimizer | None = None,
    device: torch.device | str | None = None,
    split: bool = False,
) -> Estimate:
    """Predict whether a step fits: its peak, its floor and what fills them. Nothing is allocated on the device.

    Takes what `lowtide.trace` takes; `device` may name one that this machine does not have (`"H100"`). If the step
    depends on values of tensors, real steps run on the model's own device instead, and `notes` of the result say so.
    `split=True` also predicts the floor of plans that run modules in parts, which takes some traces more.

    >>> import torch, lowtide
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    >>> guess = lowtide.estimate(model, lambda x: model(x).square().mean(), torch.randn(32, 64))
    >>> guess.floor_bytes <= guess.peak_bytes
    True
    """
    model = checks.module(model)
    graph = _traced(model, loss_fn, args, optimizer, device)
    plain = simulate(graph)
    floor = EagerSearch(graph).floor
    batch_size = _batch_size(args)
    return Estimate(
        peak_bytes=plain.peak_bytes,
        floor_bytes=floor.peak_bytes,
        static_bytes=sum(graph.static_bytes.values()),
        bytes_per_sample=_growth(model, loss_fn, args, optimizer, device, batch_size, plain.peak_bytes),
        batch_size=batch_size,
        largest=tuple(largest_at_peak(plain)),
        graph=graph,
        split_floor_bytes=_split_floor(model, loss_fn, args, optimizer, graph, device) if split else None,
        is_limited_by_optimizer=floor.peak_phase == "optimizer",
    )


def _split_floor(model: Any, loss_fn: Any, args: Any, optimizer: Any, graph: StepGraph, device: Any) -> int | None:
    search = SplitSearch(model, loss_fn, args, optimizer, graph, Limits(split=True), device)
    return search.floor_bytes or None


def _traced(model: Any, loss_fn: Any, args: Any, optimizer: Any, device: Any) -> StepGraph:
    """A trace on fake tensors; if that is not possible, of real steps, with a note in the graph."""
    try:
        return trace(model, loss_fn, *args, optimizer=optimizer, mode="fake", device=device)
    except FakeTraceError as error:
        why = str(error).splitlines()[0]
        try:
            graph = trace(model, loss_fn, *args, optimizer=optimizer, mode="real", device=device)
        except (TraceError, torch.OutOfMemoryError) as other:
            because = str(other).splitlines()[0].partition(". ")[0]
            raise TraceError(f"{why}; real steps cannot be run instead: {because}") from error
    return replace(graph, notes=(*graph.notes, f"real steps were run and memory was allocated: {why}"))


def largest_at_peak(timeline: Timeline) -> list[tuple[str, int]]:
    """The modules whose activations and gradients take most of the peak."""
    graph, sizes = timeline.graph, Counter[str]()
    for value, size in timeline.live_at(timeline.peak_event).items():
        born = graph.values[value].born
        path = graph.path_of(born) if born >= 0 else ""
        sizes[path or "outside of modules"] += size
    return sizes.most_common(5)


def _batch_size(args: Any) -> int | None:
    """The length that the batch's tensors share in their first dimension."""
    lengths = Counter(tensor.shape[0] for tensor in tensors_in(args) if tensor.ndim)
    if not lengths or len(lengths) > 1:
        return None
    return next(iter(lengths))


def _growth(
    model: Any, loss_fn: Any, args: Any, optimizer: Any, device: Any, batch_size: int | None, peak_bytes: int
) -> int | None:
    """The bytes that one more sample adds to the peak, from a trace with twice the batch."""
    if not batch_size:
        return None

    def doubled(tensor: Tensor) -> Tensor:
        if not tensor.ndim:
            return tensor
        return torch.empty((2 * batch_size, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")

    try:
        optimizer = plain_optimizer(optimizer, model)
        larger = trace_once(model, loss_fn, *map_tensors(doubled, args), optimizer=optimizer, device=device)
    except (LowtideError, RuntimeError, ValueError, TypeError, IndexError):
        return None  # the step takes batches of this size only, or no fake tensors
    return max(0, simulate(larger).peak_bytes - peak_bytes) // batch_size
