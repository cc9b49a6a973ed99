"""Device memory outside of a model's compiled blocks, traced before the first training forward.

A budget covers the whole step, but in regional mode only the blocks are planned. The memory of everything else
(embedding, head, loss, gradients, optimizer state) decides how much they may save, and it differs from block to block.
`lowtide.compile` registers `ForwardHook`, a forward pre-hook. In the first training forward it traces the model's eager
step on fake tensors, simulates it with every block checkpointed, and reads off the bytes in use when each block's
forward and backward begins (`OtherMemory`). `VariantChooser` plans with these numbers. If the model cannot be traced,
it plans without. In later forwards the hook tells the session where a step begins.

Cost: one trace, about 0.03 s per block of a transformer.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lowtide import _compat
from lowtide.compiled.backend import ModelHook, without_warnings
from lowtide.compiled.session import Session
from lowtide.graph.step_graph import StepGraph
from lowtide.plans.step_plan import Plan, Recompute
from lowtide.simulator.timeline import PHASES, Timeline, simulate
from lowtide.solvers.shared_budget import OtherMemory
from lowtide.tracing.trace import output_sum_loss, trace_once

_FORWARD, _REPLAY = PHASES.index("forward"), PHASES.index("replay")


def other_memory_of(graph: StepGraph, paths: list[str]) -> OtherMemory | None:
    """Memory outside of the blocks at `paths`, block inputs included, for each of their calls in the step's order.

    None unless every block is called. The step is simulated with a checkpoint on each call, so that nothing saved
    inside of blocks is counted.
    """
    if not all(graph.calls_by_path.get(path) for path in paths):
        return None
    calls = [(graph.calls[call], nth) for path in paths for nth, call in enumerate(graph.calls_by_path[path])]
    calls.sort(key=lambda each: each[0].first)
    # Regions keep indices and reduced tensors for their replay; a compiled block that does counts them as saved.
    ops = tuple(replace(op, name="", flags=()) if op.is_kept else op for op in graph.ops)
    regions = tuple(Recompute(call.path, nth) for call, nth in calls)
    timeline = simulate(replace(graph, ops=ops), Plan(regions=regions))
    spans = [(call.first, call.end) for call, _ in calls]
    forward = [_start_bytes(timeline, _FORWARD, span) for span in spans]
    backward = [_start_bytes(timeline, _REPLAY, span) for span in spans]
    if None in forward or None in backward:
        return None
    inside = np.zeros(len(graph.ops) + 1, dtype=bool)
    for first, end in spans:
        inside[first:end] = True
    derived = np.array([op.forward_op for op in graph.ops] + [-1])
    is_inside = inside[timeline.ops] | (derived[timeline.ops] >= 0) & inside[derived[timeline.ops]]
    outside = np.where(is_inside, 0, timeline.total_bytes)
    starts = np.flatnonzero((timeline.phases == _FORWARD) & inside[timeline.ops])
    replays = np.flatnonzero(timeline.phases == _REPLAY)
    between = outside[starts[-1] : replays[0]] if len(replays) else outside[starts[-1] :]
    around = np.concatenate([outside[: starts[0]], outside[replays[-1] :]]) if len(replays) else outside[:0]
    return OtherMemory(
        tuple(size for size in forward if size is not None),
        int(between.max(initial=0)),
        tuple(size for size in backward if size is not None),
        int(around.max(initial=0)),
    )


def _start_bytes(timeline: Timeline, phase: int, span: tuple[int, int]) -> int | None:
    """Bytes in use right before a block's first op of a phase; None if it has none."""
    ops = timeline.ops
    events = np.flatnonzero((timeline.phases == phase) & (ops >= span[0]) & (ops < span[1]))
    if not len(events):
        return None
    first = int(events[0])
    made = sum(timeline.graph.values[value].bytes for value in timeline.graph.ops[int(ops[first])].outputs)
    workspace = timeline.graph.ops[int(ops[first])].workspace_bytes
    return int(timeline.total_bytes[first]) - made - workspace


logger = logging.getLogger("lowtide")


class ForwardHook(ModelHook):
    """A forward pre-hook that traces the model once, and tells the session when later training forwards begin.

    Warns if the first forward calls none of the blocks as modules.
    """

    def __init__(self, model: nn.Module, blocks: list[nn.Module], session: Session) -> None:
        self._session = session
        # Weakly: a model is freed though its handle, found by a weak key, refers to this object, and a block to it.
        self._blocks = [weakref.ref(block) for block in blocks]
        self._end = _ForwardEnd(session)
        # First, with the caller's arguments: hooks that change them run again in the trace.
        before = model.register_forward_pre_hook(self, with_kwargs=True, prepend=True)
        self._handles = [before, model.register_forward_hook(self._end, always_call=True)]

    def remove(self) -> None:
        """Remove the hook, and the one after the forward."""
        for handle in self._handles:
            handle.remove()

    @_compat.disable_dynamo  # inside of another torch.compile
    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if self._end.is_measured:  # the last forward was interrupted
            self._end.finish()
        if self._blocks:
            self._trace(model, args, kwargs)
            self._end.is_first = True
        else:
            self._end.is_measured = self._session.begin_forward(args, kwargs)

    def _trace(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        session, chooser = self._session, self._session.chooser
        # Hooks on all modules, and the stance, hold for all threads.
        with _compat.compile_lock(), session.watch.planning(), without_warnings():
            blocks = [block for block in (reference() for reference in self._blocks) if block is not None]
            self._blocks = []  # the trace calls the hook again
            chooser.surroundings, chooser.constant_bytes = _traced(model, blocks, args, kwargs, chooser.optimizer)
        session.has_called_module = False  # other than in the trace


class _ForwardEnd(ModelHook):
    """The hook after a forward that has returned or raised: nothing stays measured that has called no block."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.is_first = self.is_measured = False

    def finish(self) -> None:
        """A forward that was measured is over."""
        self.is_measured = False
        self._session.end_forward()

    @_compat.disable_dynamo
    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        if self.is_measured:
            self.finish()
        if self.is_first:
            self.is_first = False
            if output is not None and not self._session.has_called_module:  # None after an error
                self._session.warn_unplanned(_NONE_CALLED)


_NONE_CALLED = (
    "the first training forward called none of the compiled blocks as modules, so these run uncompiled and save "
    "whatever autograd saves: the memory budget does not apply. Code that calls block.forward(x) goes around what was "
    "compiled: call block(x) there, or compile the model as one graph (regional=False)"
)


def _traced(
    model: nn.Module, blocks: list[nn.Module], args: Any, kwargs: Any, optimizer: Any
) -> tuple[OtherMemory | None, int]:
    """Memory outside of the blocks, and bytes of tensors that are neither the model's nor inputs, from a fake trace.

    None and 0 if the model cannot be traced.
    """
    hooks = _compat.module_hooks(model)

    # An argument of the loss function, so that the trace restores the state that hooks change.
    def loss_fn(args: Any, kwargs: Any, hooks: Any = hooks) -> Tensor:
        return output_sum_loss(model(*args, **kwargs))

    names = {module: name for name, module in model.named_modules()}
    try:
        with torch.compiler.set_stance("force_eager"):
            graph = trace_once(model, loss_fn, args, kwargs, optimizer=optimizer)
        return other_memory_of(graph, [names[block] for block in blocks]), graph.static_bytes.get("constants", 0)
    except Exception as error:  # a model may fail on fake tensors: plan without
        what = (str(error).splitlines() or [type(error).__name__])[0]
        logger.info("the model could not be traced (%s): the first peaks are guesses", what)
        return None, 0
