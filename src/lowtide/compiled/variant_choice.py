"""Chooses the variant that each call of a compiled step runs, so that the step's predicted peak fits the budget.

A `Session` calls `VariantChooser.choose` with the graphs that a step calls, in order. A step of one graph is solved op
by op (`solvers.compiled_search`). A step of several calls, such as one per block, shares the budget between them: each
call gets one of its graph's variants, and may move saved tensors to host memory (`solvers.shared_budget`).

Both need to know what else is in device memory meanwhile: parameters, the batch, optimizer state and, if a trace of the
model is there, everything outside of the compiled blocks. `record_error` adds the difference between a measured and a
predicted peak, by which later predictions are corrected.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

from lowtide.compiled.planned_graph import PlannedGraph
from lowtide.errors import InfeasibleBudgetError
from lowtide.plans.step_plan import Plan
from lowtide.simulator.timeline import simulate
from lowtide.solvers.candidate import with_predictions
from lowtide.solvers.compiled_search import CompiledSearch
from lowtide.solvers.shared_budget import OtherMemory, SharedBudget, SharedChoice, Variant, variant_of
from lowtide.tracing.devices import block_bytes, link_bytes_per_s
from lowtide.tracing.untraced_memory import optimizer_memory, present_state_bytes

_SHARES = (0.0, 0.25, 0.5, 0.75, 0.95)  # of the link's bandwidth; a choice is made for each, and the fastest is taken
# Share of a copy's time by which the kernels beside it get slower, as both use the device's memory bandwidth. Measured
# on an H200: 0.6 ms per GiB moved, of 2 x 20 ms that the copies take. Too small a value moves more than pays.
_BESIDE_COPIES = 0.015


@dataclass(frozen=True)
class VariantChoice:
    """The variant of every call of a step, the tensors that calls move to the host, and the predicted peak and times.

    `extra_s` and `lower_bound_s` are seconds over torch's own choice of saved tensors.
    """

    variants: list[Variant]
    moved: tuple[tuple[int, ...], ...]  # sizes in bytes, per call
    peak_bytes: int
    extra_s: float
    lower_bound_s: float
    is_within: bool = True
    in_flight_bytes: int = 0  # of the moved tensors, in each direction
    peak_key: Any = None  # (graph number, keeps) of the call at the peak; None if it is outside of calls

    def is_like(self, other: VariantChoice) -> bool:
        """Whether both run the same variants and move the same tensors."""
        return (self.variants, self.moved) == (other.variants, other.moved)


@dataclass
class VariantChooser:
    """Chooses variants for the calls of a step.

    `surroundings` is the memory outside of compiled blocks, from a trace, and `errors` are corrections from measured
    peaks.
    """

    given_optimizer: InitVar[Any] = None
    host_bytes: int = 0
    time_limit_s: float = 10.0
    surroundings: OtherMemory | None = None
    model_bytes: int | None = None  # parameters and buffers; None: sum those of the graphs
    errors: dict[Any, int] = field(default_factory=dict)  # measured minus predicted bytes, by `peak_key`
    _base_bytes: int | None = None
    _device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self, given_optimizer: Any) -> None:
        # Dynamo keeps compiled code, and this object with it, after the model is deleted: do not keep its parameters.
        self._optimizer = None if given_optimizer is None else weakref.ref(given_optimizer)

    @property
    def optimizer(self) -> Any:
        return None if self._optimizer is None else self._optimizer()

    def choose(self, instances: list[PlannedGraph], budget_bytes: int) -> VariantChoice:
        """The fastest choice found that fits; if none fits, the one with the smallest peak and `is_within=False`."""
        self._device = instances[0].device
        if len(instances) == 1:
            return self._single(instances[0], budget_bytes)
        return self._shared(instances, budget_bytes)

    def record_error(self, choice: VariantChoice, measured_bytes: int) -> None:
        """Correct later predictions by the peak measured in a step that ran `choice`."""
        self.errors[choice.peak_key] = self._error_of(choice.peak_key) + measured_bytes - choice.peak_bytes

    def _error_of(self, key: Any) -> int:
        """Bytes to add to a prediction: measured for this key, else the smallest correction of any key."""
        return self.errors.get(key, min(self.errors.values(), default=0))

    # One graph.

    def plan_of(self, graph: PlannedGraph, choice: VariantChoice, budget_bytes: int) -> Plan:
        """The plan, with its graph, for a step that is one call of `graph`: what reports are made of."""
        assert graph.step is not None
        step = replace(graph.step, other_bytes=self._base([graph]))
        keeps = choice.variants[0].keeps
        timeline = simulate(
            step, Plan(engine="compiled", keeps=graph.default if keeps is None else keeps, budget_bytes=1)
        )
        return with_predictions(step, timeline, simulate(step), budget_bytes, choice.lower_bound_s)

    def _single(self, graph: PlannedGraph, budget_bytes: int) -> VariantChoice:
        """The choice for a step that is one call of one graph."""
        assert graph.step is not None
        error = self._error_of(None)
        allowed = budget_bytes - error
        step = replace(graph.step, other_bytes=self._base([graph]))
        search = CompiledSearch(step, self.time_limit_s)
        default = search.cost(graph.default)
        if default.peak_bytes <= allowed:
            return VariantChoice([graph.variants[0]], ((),), default.peak_bytes + error, 0.0, 0.0)
        try:
            plan, is_within = search.plan(allowed), True
        except InfeasibleBudgetError:
            plan, is_within = search.plan(search.floor.peak_bytes), False
        variant = variant_of(step, plan.keeps, plan.keeps, default.extra_s)
        bound_s = min(max(0.0, plan.lower_bound_s - default.extra_s), variant.extra_s)
        return VariantChoice([variant], ((),), plan.peak_bytes + error, variant.extra_s, bound_s, is_within)

    # Several calls.

    def _shared(self, instances: list[PlannedGraph], budget_bytes: int) -> VariantChoice:
        around, error = self._around(instances), self._error_of(None)
        around = replace(
            around,
            between_bytes=around.between_bytes + error,
            elsewhere_bytes=around.elsewhere_bytes + error,
        )
        corrected = {graph: self._corrected(graph) for graph in dict.fromkeys(instances)}
        variants = [corrected[graph] for graph in instances]
        shares = _SHARES if self.host_bytes else (0.0,)
        link = self._link_bytes_per_s if self.host_bytes else 0.0
        byte_s = 2 * _BESIDE_COPIES / link if link else 0.0
        budgets = [SharedBudget(variants, around, self._quotas(instances, share), byte_s) for share in shares]
        fitting: list[tuple[SharedBudget, SharedChoice]] = []
        for shared in budgets:
            choice = shared.choose(budget_bytes)
            if choice is not None:
                fitting.append((shared, choice))
        if fitting:
            shared, best = min(fitting, key=lambda each: each[1].extra_s)
        else:
            shared, best = min(((each, each.floor) for each in budgets), key=lambda each: each[1].peak_bytes)
        chosen = [graph.variants[number] for graph, number in zip(instances, best.chosen, strict=True)]
        where = shared.peak(best.chosen)[1].index
        key = (instances[where].number, chosen[where].keeps) if where >= 0 else None
        whole_link = budgets[-1]  # the largest share of the link has the smallest bound
        return VariantChoice(
            chosen,
            best.moved,
            best.peak_bytes,
            best.extra_s,
            min(best.lower_bound_s, whole_link.lower_bound_s(max(budget_bytes, best.peak_bytes))),
            is_within=bool(fitting),
            in_flight_bytes=best.in_flight_bytes,
            peak_key=key,
        )

    def _corrected(self, graph: PlannedGraph) -> tuple[Variant, ...]:
        """A graph's variants with measured corrections added to their memory, which may become negative."""
        corrected = []
        for variant in graph.variants:
            error = self._error_of((graph.number, variant.keeps))
            forward, backward = variant.forward_bytes + error, variant.backward_bytes + error
            corrected.append(replace(variant, forward_bytes=forward, backward_bytes=backward))
        return tuple(corrected)

    def _around(self, instances: list[PlannedGraph]) -> OtherMemory:
        """Memory outside of the calls: as traced, else parameters, all gradients and the outputs of earlier calls."""
        if self.surroundings is not None and len(self.surroundings.forward_bytes) == len(instances):
            return self.surroundings
        base = self._base(instances) + _gradient_bytes(instances)
        given = [0, *accumulate(graph.handed_out_bytes for graph in instances)]
        forward, backward = (tuple(base + size for size in sizes) for sizes in (given[:-1], given[1:]))
        return OtherMemory(forward, base + given[-1], backward, base)

    def _quotas(self, instances: list[PlannedGraph], share: float) -> tuple[int, ...]:
        """Bytes that each call may move: what `share` of the link carries during the next call's forward."""
        if not share:
            return (0,) * len(instances)
        quotas = [int(share * self._link_bytes_per_s * graph.forward_s) for graph in instances[1:]]
        quotas.append(0)  # the backward starts with the last call
        shrink = min(1.0, self.host_bytes / max(sum(quotas), 1))
        return tuple(int(quota * shrink) for quota in quotas)

    @cached_property
    def _link_bytes_per_s(self) -> float:
        return link_bytes_per_s(self._device)

    # Memory at the start of a step.

    def _base(self, instances: list[PlannedGraph]) -> int:
        """Bytes allocated when the first call begins, plus optimizer state that is still to be allocated."""
        device = instances[0].device
        if device.type != "cuda":
            states, _, _ = optimizer_memory(self.optimizer, block_bytes(device))
            static = sum(graph.static_bytes for graph in dict.fromkeys(instances))
            return (static if self.model_bytes is None else self.model_bytes) + instances[0].batch_bytes + states
        if self._base_bytes is None:  # measured once, for the first step: later ones start with gradients
            states, _, _ = optimizer_memory(self.optimizer, block_bytes(device))
            present = present_state_bytes(self.optimizer, device)
            self._base_bytes = torch.cuda.memory_allocated(device) + max(0, states - present)
        return self._base_bytes


def _gradient_bytes(instances: Iterable[PlannedGraph]) -> int:
    steps = (graph.step for graph in dict.fromkeys(instances))
    return sum(value.bytes for step in steps if step is not None for value in step.values if value.kind == "gradient")
