"""`TracedStep`: the example steps that a user gave, with the trace of the one that needs the most memory.

`fit`, `plan`, `max_batch` and `estimate` begin with it; searching for splits, measuring real steps and applying a plan
go on from it. With several examples, all are first traced on fake tensors where possible, and only the one with the
highest peak is traced for the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.distributed.agreement import with_common_costs
from lowtide.distributed.ranks import current
from lowtide.eager.handle import refuse_other_checkpointing
from lowtide.eager.replanning import Shapes, recorded_input_shapes, with_parameters
from lowtide.errors import TraceError
from lowtide.graph.step_graph import StepGraph
from lowtide.plans.step_plan import Plan
from lowtide.replay.arguments import tensors_in
from lowtide.simulator.timeline import simulate
from lowtide.snapshot import noted_changes
from lowtide.tracing import step_checks as checks
from lowtide.tracing.trace import trace
from lowtide.units import parse_bytes


@dataclass(frozen=True, eq=False)
class TracedStep:
    """Steps `loss_fn(*example)` of `model`, and the `graph` of the example number `index`."""

    model: nn.Module
    loss_fn: Callable[..., Tensor]
    examples: Sequence[tuple[Any, ...]]
    optimizer: Any
    graph: StepGraph
    index: int = 0
    inputs: Sequence[Shapes] = ()  # that the model is called with in any of the examples, the largest last
    changed: Sequence[Tensor | torch.Generator] = ()  # written or drawn from by any of the examples, but for their own

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments of the step that was traced."""
        return self.examples[self.index]

    @property
    def largest_inputs(self) -> Shapes:
        return self.inputs[-1] if self.inputs else ()

    @cached_property
    def device(self) -> torch.device:
        return checks.device_of(self.model, self.examples[0])

    def budget_bytes(self, budget: int | str) -> int:
        """The budget in bytes; a share is one of the memory of the device that was traced on."""
        return parse_bytes(budget, total_bytes=self.graph.hardware.memory_bytes or None)

    def for_model(self, plan: Plan) -> Plan:
        """`plan` with the model's parameter counts and input shapes, by which `apply` recognises another model."""
        return replace(with_parameters(plan, self.model), input_shapes=self.largest_inputs)


def trace_largest(
    model: nn.Module, loss_fn: Callable[..., Tensor], examples: Sequence[tuple[Any, ...]], optimizer: Any, **how: Any
) -> TracedStep:
    """Trace the example with the highest peak; `how` are further options of `trace`."""
    checks.arguments(model, loss_fn, "auto")
    refuse_other_checkpointing(model)
    index, ranks = 0, current()
    with recorded_input_shapes(model) as inputs, noted_changes() as changed:
        if len(examples) > 1:
            peaks = [simulate(_trace_cheaply(model, loss_fn, each, optimizer)).peak_bytes for each in examples]
            index = ranks.first(peaks.index(max(peaks)), "largest example")
        graph = trace(model, loss_fn, *examples[index], optimizer=optimizer, **how)
    graph = with_common_costs(ranks, graph)
    own = set(map(id, tensors_in(examples)))  # not kept alive
    changed = [target for target in changed if id(target) not in own]
    return TracedStep(model, loss_fn, examples, optimizer, graph, index, inputs, changed)


def _trace_cheaply(model: nn.Module, loss_fn: Any, args: tuple[Any, ...], optimizer: Any) -> StepGraph:
    try:
        return trace(model, loss_fn, *args, optimizer=optimizer, mode="fake")
    except TraceError:  # the step depends on values of tensors, which fake tensors do not have
        return trace(model, loss_fn, *args, optimizer=optimizer)
