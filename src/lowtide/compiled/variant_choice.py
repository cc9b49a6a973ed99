"""What the calls of a step shall run for a budget: single graphs solved as a step, several as instances that share."""

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
from lowtide.solvers.compiled_search import CompiledSearch
from lowtide.solvers.shared_budget import OtherMemory, SharedBudget, SharedChoice, Variant, variant_of
from lowtide.tracing.devices import block_bytes, link_bytes_per_s
from lowtide.tracing.untraced_memory import optimizer_memory, present_state_bytes

_SHARES = (0.0, 0.25, 0.5, 0.75, 0.95)  # of the link
# Of a copy's time, by which the compute beside it takes longer: memory is shared. 0.6 ms per GiB moved were measured on
# an H200, whose copies take 2 x 20 ms.
_BESIDE_COPIES = 0.015


@dataclass(frozen=True)
class VariantChoice:
    """What the instances of a step run, and what is predicted of it."""

    variants: list[Variant]
    moved: tuple[tuple[int, ...], ...]  # sizes, by instance
    peak_bytes: int
    extra_s: float
    lower_bound_s: float
    is_within: bool = True
    in_flight_bytes: int = 0  # of what is moved, each way
    peak_key: Any = None  # the variant that runs at the peak; None where the peak is elsewhere

    def is_like(self, other: VariantChoice) -> bool:
        """Whether the same runs."""
        return (self.variants, self.moved) == (other.variants, other.moved)


@dataclass
class VariantChooser:
    """Chooses variants, with what is known of everything else in the step and of how far off predictions were."""

    given_optimizer: InitVar[Any] = None
    host_bytes: int = 0
    time_limit_s: float = 10.0
    surroundings: OtherMemory | None = None
    model_bytes: int | None = None  # parameters and buffers; None where only graphs know them
    errors: dict[Any, int] = field(default_factory=dict)  # measured less predicted, by the variant at the peak
    _base_bytes: int | None = None
    _device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self, given_optimizer: Any) -> None:
        # Dynamo keeps code, and so this, when a model is long gone; its parameters shall not stay with it.
        self._optimizer = None if given_optimizer is None else weakref.ref(given_optimizer)

    @property
    def optimizer(self) -> Any:
        return None if self._optimizer is None else self._optimizer()

    def choose(self, instances: list[PlannedGraph], budget_bytes: int) -> VariantChoice:
        """The fastest choice found that fits; where none does, that with the smallest peak."""
        self._device = instances[0].device
        if len(instances) == 1:
            return self._single(instances[0], budget_bytes)
        return self._shared(instances, budget_bytes)

    def record_error(self, choice: VariantChoice, measured_bytes: int) -> None:
        """A step that ran a choice had this peak."""
        self.errors[choice.peak_key] = self._error_of(choice.peak_key) + measured_bytes - choice.peak_bytes

    def _error_of(self, key: Any) -> int:
        """By how much a prediction is off: as measured, or for what was not, the least that was."""
        return self.errors.get(key, min(self.errors.values(), default=0))

    # One graph.

    def _single(self, graph: PlannedGraph, budget_bytes: int) -> VariantChoice:
        """The step of one whole graph, as `solve` sees it."""
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

    # Several.

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
        found: list[tuple[SharedBudget, SharedChoice]] = []
        for shared in budgets:
            choice = shared.choose(budget_bytes)
            if choice is not None:
                found.append((shared, choice))
        if found:
            shared, best = min(found, key=lambda each: each[1].extra_s)
        else:
            shared, best = min(((each, each.floor) for each in budgets), key=lambda each: each[1].peak_bytes)
        chosen = [graph.variants[number] for graph, number in zip(instances, best.chosen, strict=True)]
        where = shared.peak(best.chosen)[1].index
        key = (instances[where].number, chosen[where].keeps) if where >= 0 else None
        whole_link = budgets[-1]  # no share of it allows for less
        return VariantChoice(
            chosen,
            best.moved,
            best.peak_bytes,
            best.extra_s,
            min(best.lower_bound_s, whole_link.lower_bound_s(max(budget_bytes, best.peak_bytes))),
            is_within=bool(found),
            in_flight_bytes=best.in_flight_bytes,
            peak_key=key,
        )

    def _corrected(self, graph: PlannedGraph) -> tuple[Variant, ...]:
        """A graph's variants with what was measured of them, of all that was there: what is left may be negative."""
        found = []
        for variant in graph.variants:
            error = self._error_of((graph.number, variant.keeps))
            forward, backward = variant.forward_bytes + error, variant.backward_bytes + error
            found.append(replace(variant, forward_bytes=forward, backward_bytes=backward))
        return tuple(found)

    def _around(self, instances: list[PlannedGraph]) -> OtherMemory:
        """As traced; else what is there at all times, with all gradients, and what graphs hand to one another."""
        if self.surroundings is not None and len(self.surroundings.forward_bytes) == len(instances):
            return self.surroundings
        base = self._base(instances) + _gradient_bytes(instances)
        given = [0, *accumulate(graph.handed_out_bytes for graph in instances)]
        forward, backward = (tuple(base + size for size in sizes) for sizes in (given[:-1], given[1:]))
        return OtherMemory(forward, base + given[-1], backward, base)

    def _quotas(self, instances: list[PlannedGraph], share: float) -> tuple[int, ...]:
        """Bytes that `share` of the link carries while the instance after each one runs its forward."""
        if not share:
            return (0,) * len(instances)
        quotas = [int(share * self._link_bytes_per_s * graph.forward_s) for graph in instances[1:]]
        quotas.append(0)  # needed again at once
        shrink = min(1.0, self.host_bytes / max(sum(quotas), 1))
        return tuple(int(quota * shrink) for quota in quotas)

    @cached_property
    def _link_bytes_per_s(self) -> float:
        return link_bytes_per_s(self._device)

    # What is there anyway.

    def _base(self, instances: list[PlannedGraph]) -> int:
        """Bytes that are there when the first graph begins, with what an optimizer is still going to allocate."""
        device = instances[0].device
        if device.type != "cuda":
            states, _, _ = optimizer_memory(self.optimizer, block_bytes(device))
            static = sum(graph.static_bytes for graph in dict.fromkeys(instances))
            return (static if self.model_bytes is None else self.model_bytes) + instances[0].batch_bytes + states
        if self._base_bytes is None:  # as found when the first step was planned: later ones begin with more
            states, _, _ = optimizer_memory(self.optimizer, block_bytes(device))
            present = present_state_bytes(self.optimizer, device)
            self._base_bytes = torch.cuda.memory_allocated(device) + max(0, states - present)
        return self._base_bytes


def _gradient_bytes(instances: Iterable[PlannedGraph]) -> int:
    steps = (graph.step for graph in dict.fromkeys(instances))
    return sum(value.bytes for step in steps if step is not None for value in step.values if value.kind == "gradient")
