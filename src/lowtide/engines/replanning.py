"""Plans made while training: for larger inputs, or for less memory.

Both come from traces on fake tensors, which allocate nothing on the device. A forward of the model shows its inputs but
not the batch they were made from, so `loss_fn` cannot be traced there. What is traced instead is a twin of the model,
with module objects of its own so that the live one is not touched, and a loss that adds up its outputs; what the true
loss takes beside the model is taken from the first trace, in proportion to the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.engines import _compat
from lowtide.engines.eager import plain_forward_of
from lowtide.engines.matching import with_parameters
from lowtide.engines.shapes import Shapes, num_elements, watched_inputs
from lowtide.errors import InfeasibleBudgetError, LowtideError
from lowtide.graph import StepGraph
from lowtide.plans import Plan
from lowtide.replay.arguments import map_tensors
from lowtide.solvers.candidates import Candidate, candidates
from lowtide.solvers.pressing import lossy_codecs
from lowtide.solvers.solving import solve
from lowtide.tracing.building import output_sum_loss
from lowtide.tracing.eager import trace
from lowtide.units import check_seconds, parse_bytes


@dataclass(frozen=True)
class Limits:
    """What plans may use beside the device, and for how long one is searched for."""

    host: int | str = 0
    disk: int | str = 0
    lossy: Any = None
    time_limit_s: float = 10.0

    def __post_init__(self) -> None:
        # What cannot be read is an error now, before anything is traced.
        parse_bytes(self.host)
        parse_bytes(self.disk)
        lossy_codecs(self.lossy)
        check_seconds(self.time_limit_s, "time_limit_s")

    def solve(self, graph: StepGraph, budget: int | str) -> Plan:
        limit_s = self.time_limit_s
        return solve(graph, budget, host=self.host, disk=self.disk, lossy=self.lossy, time_limit_s=limit_s)

    def candidates(self, graph: StepGraph, budget_bytes: int) -> tuple[list[Candidate], InfeasibleBudgetError | None]:
        """See `lowtide.solvers.candidates`."""
        limit_s = self.time_limit_s
        return candidates(graph, budget_bytes, host=self.host, disk=self.disk, lossy=self.lossy, time_limit_s=limit_s)

    def tightest(self, graph: StepGraph) -> Plan:
        """The plan of the smallest peak."""
        return self.solve_or_tightest(graph, 1)

    def solve_or_tightest(self, graph: StepGraph, budget_bytes: int) -> Plan:
        try:
            return self.solve(graph, budget_bytes)
        except InfeasibleBudgetError as error:
            return self.solve(graph, error.floor_bytes)


class Planner:
    """Makes further plans for a model that has one.

    `correction_bytes` is by how much the measured peak was above the predicted one, `base` the graph of the first plan
    and `base_inputs` what the model was called with in it.
    """

    def __init__(
        self,
        model: nn.Module,
        base: StepGraph,
        base_inputs: Shapes,
        *,
        budget_bytes: int,
        limits: Limits,
        correction_bytes: int,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.limits = limits
        self._model, self._optimizer = model, optimizer
        self._correction_bytes = correction_bytes
        self._outside_bytes, self._base_elements = _bytes_outside(base), max(1, num_elements(base_inputs))

    def for_inputs(
        self, target: Shapes, seen: Shapes, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Plan, StepGraph, Shapes]:
        """A plan for the model called with tensors of `target` shapes; of those `seen`, where those do not go.

        Gives the plan, its graph, and the shapes it is for.
        """
        inputs = map_tensors(lambda t: t.detach().requires_grad_(t.requires_grad), (args, kwargs))
        graph, target = _first_that_works(target, seen, inputs, lambda inputs: self._trace_twin(*inputs))
        beside = self._outside_bytes * num_elements(target) // self._base_elements
        graph = replace(graph, other_bytes=graph.other_bytes + self._correction_bytes + beside)
        return *self._plan(graph, target), target

    def for_arguments(
        self, target: Shapes, seen: Shapes, loss_fn: Callable[..., Tensor], args: tuple[Any, ...]
    ) -> tuple[Plan, StepGraph, Shapes, list[Shapes]]:
        """A plan for `loss_fn(*args)`, with tensors of `target` shapes if those go; the model must run plainly.

        Gives the plan, its graph, the shapes of the arguments it is for, and those that the model is called with.
        """

        def traced(args: Any) -> tuple[StepGraph, list[Shapes]]:
            with watched_inputs(self._model) as inputs:
                graph = trace(self._model, loss_fn, *args, optimizer=self._optimizer, mode="fake")
            return graph, inputs

        (graph, inputs), target = _first_that_works(target, seen, args, traced)
        graph = replace(graph, other_bytes=graph.other_bytes + self._correction_bytes)
        return *self._plan(graph, inputs[-1] if inputs else ()), target, inputs

    def _plan(self, graph: StepGraph, inputs: Shapes) -> tuple[Plan, StepGraph]:
        plan = self.limits.solve_or_tightest(graph, self.budget_bytes)
        return replace(with_parameters(plan, self._model), input_shapes=inputs), graph

    def _trace_twin(self, args: Any, kwargs: dict[str, Any]) -> StepGraph:
        twin = twin_of(self._model)

        def stand_in(args: Any, kwargs: dict[str, Any]) -> Tensor:
            with _uncached_autocast(next(twin.parameters()).device.type):
                return output_sum_loss(twin(*args, **kwargs))

        return trace(twin, stand_in, args, kwargs, optimizer=self._optimizer, mode="fake")


def twin_of(model: nn.Module) -> nn.Module:
    """The model with module objects of its own, without plans on them, over the same memory.

    Whatever a trace puts into its slots, the model does not see; nor are the model's gradients and hooks touched.
    """
    tensors: dict[int, Tensor] = {}
    for module in _compat.submodules(model):
        for slots in _compat.module_tensors(module):
            for tensor in slots.values():
                if tensor is not None and type(tensor) in _compat.PLAIN_TYPES:
                    tensors[id(tensor)] = _alias(tensor)
    twins: dict[nn.Module, nn.Module] = {}
    twin = _compat.bare_twin(model, twins, tensors)
    for module, other in twins.items():
        forward = plain_forward_of(module)
        if forward is not None:
            raise LowtideError(f"{type(module).__name__} has a forward of its own, bound to it")
        vars(other).pop("forward", None)
    return twin


def _alias(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return tensor.data  # not detach(): that would share its version counter, which a trace puts back
    alias = nn.Parameter(tensor.data, requires_grad=tensor.requires_grad)
    if tensor.grad is not None:
        alias.grad = tensor.grad.data  # so that the trace knows of it, and accumulates
    return alias


def _first_that_works(target: Shapes, seen: Shapes, args: Any, traced: Callable[[Any], Any]) -> tuple[Any, Shapes]:
    """A trace of arguments in the `target` shapes; of those they have, where the step does not take others."""
    if target != seen:
        shapes = iter(target)

        def enlarged(tensor: Tensor) -> Tensor:
            shape = next(shapes)
            if shape == tuple(tensor.shape):
                return tensor
            return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)

        try:
            return traced(map_tensors(enlarged, args)), target
        except Exception:  # a table of positions that ends, say
            pass
    return traced(args), seen


def _uncached_autocast(kind: str) -> Any:
    """Autocast as it is here, but with casts that nobody remembers: the cache is the forward's around us."""
    if not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), cache_enabled=False)


def _bytes_outside(graph: StepGraph) -> int:
    """Bytes made outside of the model's forward and its backward, by the loss: all of them, a little more than live."""

    def is_outside(op: int) -> bool:
        if op >= graph.num_forward:
            op = graph.ops[op].forward_op
            if op < 0:
                return False
        call = graph.ops[op].call
        while call >= 0 and graph.calls[call].parent >= 0:
            call = graph.calls[call].parent
        return call < 0 or graph.calls[call].path != ""

    made = (value for value in graph.values if value.kind == "activation" and value.born >= 0)
    return sum(value.bytes for value in made if is_outside(value.born))
