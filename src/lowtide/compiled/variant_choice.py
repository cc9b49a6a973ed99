"""Chooses the variant that each call of a compiled step runs, so that the step's predicted peak fits the budget.

A `Session` calls `VariantChooser.choose` with the graphs that a step calls, in order. A step of one graph is solved
op by op (`solvers.compiled_search`). A step of several calls, such as one per block, shares the budget between them:
each call gets one of its graph's variants, and may move saved tensors to host memory (`solvers.shared_budget`).

Both need to know what else is in device memory meanwhile: parameters, the batch, optimizer state and, if the model
could be traced, everything outside of the compiled blocks. `learn` replaces these predictions by what was measured.

Where steps are measured, moves are used only if no choice without them fits, and ops that make indices (`topk`,
`sort`) are recomputed only if nothing else fits. `alternatives` lists choices that may turn out faster, for the
session to time: what torch's partitioner does under `activation_memory_budget`, and the best choice with moves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from statistics import median
from typing import Any

import torch
from torch import nn

from lowtide.compiled.planned_graph import PlannedGraph
from lowtide.compiled.step_profile import StepProfile
from lowtide.errors import InfeasibleBudgetError
from lowtide.solvers.compiled_search import CompiledSearch
from lowtide.solvers.shared_budget import OtherMemory, SharedBudget, Variant, variant_of
from lowtide.tracing.devices import link_bytes_per_s
from lowtide.tracing.untraced_memory import optimizer_memory, present_state_bytes, state_bytes_of
from lowtide.units import counted, format_bytes

_SHARES = (0.0, 0.25, 0.5, 0.75, 0.95)  # of the link's bandwidth; a choice is made for each, and the fastest is taken
# Share of a copy's time by which the kernels beside it get slower, as both use the device's memory bandwidth. Measured
# on an H200: 0.6 ms per GiB moved, of 2 x 20 ms that the copies take. Too small a value moves more than pays.
_BESIDE_COPIES = 0.015
# A choice without moves, and with saved indices, is measured before others are considered if its predicted peak is over
# the budget by up to this share: predictions are off by a few per cent. A larger share risks running out of memory.
_NEARLY_WITHIN = 0.05
# What torch's partitioner does is tried if its predicted peak is over the budget by up to this share: a budget may be
# the very peak that it was measured at. A larger share lets more steps exceed the budget that are then not kept.
_PERHAPS_WITHIN = 0.01
# What torch's partitioner does is not timed if it is predicted to add more than this multiple of what ours adds, and
# this share of the step. Predictions were off by a factor of up to 1.4. A smaller margin may leave out what is faster.
_CANNOT_WIN = 1.5, 0.05
# Of what a variant is predicted to add, at least this share counts, whatever was measured. Where the host limits a
# step, all variants of a call are measured to take as long: budgets would be left unused, and a faster host would wait
# for the device. Too large a share overrules measurements where predictions are too high.
_LEAST_OF_PREDICTED = 0.25
# A faster choice is compiled only if it saves this share of the step's time.
WORTH_A_COMPILE = 0.005


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
    peak_call: int = -1  # the call at the peak; -1: it is outside of calls

    @cached_property
    def runs(self) -> tuple[tuple[Variant, tuple[int, ...]], ...]:
        """The variant of each call and the sizes of what it moves."""
        return tuple(zip(self.variants, self.moved, strict=True))

    @cached_property
    def is_plain(self) -> bool:
        """Whether all calls save what torch's own partitioner does, and move nothing."""
        return not self.moves_any and all(variant.keeps is None for variant in self.variants)

    @cached_property
    def moves_any(self) -> bool:
        """Whether a call moves tensors to the host."""
        return any(self.moved)

    @property
    def replays_indices(self) -> bool:
        """Whether a call recomputes ops that make indices."""
        return any(variant.replays_indices for variant in self.variants)

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
    constant_bytes: int = 0  # of other tensors that the model reads, such as attributes, as traced
    seen_bytes: int = 0  # parameters that graphs were called with: equal blocks share a graph
    # Measured minus predicted bytes, by graph and variant of the call at the peak, or None: of choices without moves,
    # and of those with.
    errors: tuple[dict[Any, int], dict[Any, int]] = field(default_factory=lambda: ({}, {}))
    _measured_around: dict[tuple[int, ...], OtherMemory] = field(default_factory=dict)
    _transients: dict[int, dict[Any, tuple[int, int]]] = field(default_factory=dict)  # measured, by graph and variant
    _seconds: dict[tuple[int, Any], list[float]] = field(default_factory=dict)  # measured, by graph and variant
    _assumes_largest: bool = False
    _base_bytes: int | None = None
    _device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self, given_optimizer: Any) -> None:
        # Dynamo keeps compiled code, and this object with it, after the model is deleted: do not keep its parameters.
        self._optimizer = None if given_optimizer is None else weakref.ref(given_optimizer)

    @property
    def optimizer(self) -> Any:
        return None if self._optimizer is None else self._optimizer()

    def choose(
        self,
        instances: list[PlannedGraph],
        budget_bytes: int,
        *,
        is_measured: bool = False,
        has_run: Callable[[VariantChoice], bool] | None = None,
    ) -> VariantChoice:
        """The fastest choice found that fits; if none fits, the one with the smallest peak and `is_within=False`.

        With `is_measured` the choice is run and measured. It then has no moves if one without fits, or is nearly within
        the budget and was not measured; `alternatives` has the one with moves. `has_run` tells which were measured; by
        default all, once any choice for these calls was.
        """
        self._device = instances[0].device
        if len(instances) == 1:
            return self._single(instances[0], budget_bytes)
        plain = self._shared(instances, budget_bytes)
        is_new = not (self._has_measured(instances) if has_run is None else has_run(plain))
        if is_measured and is_new and plain.peak_bytes <= (1 + _NEARLY_WITHIN) * budget_bytes:
            return plain
        found = [plain]
        if self.host_bytes > 0 and not (is_measured and plain.is_within):
            found.append(self._shared(instances, budget_bytes, _SHARES))
        if not any(each.is_within for each in found) and any(graph.replayed is not None for graph in instances):
            found.append(self._replaying(instances, budget_bytes, plain))
        fitting = [each for each in found if each.is_within]
        if fitting:
            return min(fitting, key=lambda each: each.extra_s)
        return min(found, key=lambda each: each.peak_bytes)

    def learn(
        self,
        instances: list[PlannedGraph],
        choice: VariantChoice,
        measured_bytes: int,
        profile: StepProfile | None = None,
        *,
        is_over: bool = False,
    ) -> None:
        """Correct later predictions by a step that ran `choice`: call by call, or else by its peak alone.

        While a step is over the budget, the largest known error is assumed of what was not measured yet.
        """
        self._assumes_largest = is_over
        self._learn_seconds(instances, choice, profile)
        has_moves = choice.moves_any
        if profile is None or len(instances) == 1 or len(profile.calls) != len(instances) or has_moves:
            at = choice.peak_call
            key = None if at < 0 else (instances[at].number, choice.variants[at].key)
            self.errors[has_moves][key] = self._error_of(key, has_moves) + measured_bytes - choice.peak_bytes
            return
        for errors in self.errors:
            errors.clear()
        held, forward, backward = 0, [], []
        for graph, variant, call in zip(instances, choice.variants, profile.calls, strict=True):
            forward.append(call.forward_start_bytes - held)
            held += variant.saved_bytes
            backward.append(call.backward_start_bytes - held)
            needs = (
                call.forward_peak_bytes - call.forward_start_bytes - variant.saved_bytes,
                call.backward_peak_bytes - call.backward_start_bytes,
            )
            known = self._transients.setdefault(graph.number, {}).get(variant.key, needs)
            self._transients[graph.number][variant.key] = (max(needs[0], known[0]), max(needs[1], known[1]))
        numbers = tuple(graph.number for graph in instances)
        self._measured_around[numbers] = OtherMemory(
            tuple(forward), profile.between_bytes - held, tuple(backward), profile.elsewhere_bytes
        )

    def _learn_seconds(self, instances: list[PlannedGraph], choice: VariantChoice, profile: StepProfile | None) -> None:
        if profile is None or choice.moves_any:  # copies slow down the calls beside them
            return
        for graph, variant, call in zip(instances, choice.variants, profile.calls, strict=False):
            if call.seconds is not None:
                self._seconds.setdefault((graph.number, variant.key), []).append(call.seconds)

    def seconds_of(self, graph: PlannedGraph, variant: Variant) -> float | None:
        """Measured seconds of a call that runs a variant, in the median; None if none was timed."""
        found = self._seconds.get((graph.number, variant.key))
        return median(found) if found else None

    def _error_of(self, key: Any, has_moves: bool = False) -> int:
        """Bytes to add to a prediction: measured for this key, else the smallest (or largest) error of any key.

        Errors of choices with moves say nothing about those without.
        """
        errors = self.errors[True] if has_moves and self.errors[True] else self.errors[False]
        other = max if self._assumes_largest else min
        return errors.get(key, other(errors.values(), default=0))

    def _has_measured(self, instances: list[PlannedGraph]) -> bool:
        return tuple(graph.number for graph in instances) in self._measured_around or any(self.errors)

    def alternatives(
        self,
        instances: list[PlannedGraph],
        choice: VariantChoice,
        budget_bytes: int,
        over: Sequence[VariantChoice] = (),
    ) -> list[VariantChoice]:
        """Other choices that may be faster than their predictions say, to be timed beside `choice`. `over` did not fit.

        What torch's partitioner does with the largest `activation_memory_budget` that fits, in all calls alike, and the
        best choice with moves to the host, or without if `choice` has some.
        """
        step_s = sum(graph.step_s for graph in instances)
        most_s = max(_CANNOT_WIN[0] * choice.extra_s, choice.extra_s + _CANNOT_WIN[1] * step_s)
        of_torch = [each for each in self._torch_choices(instances) if not any(map(each.is_like, over))]
        fitting = [each for each in of_torch if each.peak_bytes <= (1 + _PERHAPS_WITHIN) * budget_bytes][:1]
        found = [each for each in fitting if each.extra_s <= most_s]
        if choice.moves_any:
            without = self._shared(instances, budget_bytes)
            found += [without] if without.is_within else []
        elif self.host_bytes > 0 and len(instances) > 1:
            moving = self._shared(instances, budget_bytes, _SHARES)
            is_worth_it = choice.extra_s - moving.extra_s >= WORTH_A_COMPILE * step_s
            found += [moving] if moving.is_within and moving.moves_any and is_worth_it else []
        return [each for each in found if not any(map(each.is_like, (choice, *over)))]

    def smallest(self, instances: list[PlannedGraph]) -> VariantChoice:
        """The choice in which every call saves least, except that indices are saved."""
        return self._uniform([graph.variants[-1] for graph in instances], instances)

    def last_resorts(self, instances: list[PlannedGraph]) -> list[VariantChoice]:
        """Choices to try where none is known to fit: of torch's partitioner the one with the smallest predicted peak.

        Of several calls also those that save least, whatever their predicted peaks: as torch's does, and as ours.
        """
        of_torch = self._torch_choices(instances)
        smallest = sorted(of_torch, key=lambda choice: choice.peak_bytes)[:1]
        if len(instances) == 1:
            return smallest
        least = [graph.replayed or graph.variants[-1] for graph in instances]
        return [*smallest, *of_torch[-1:], self.smallest(instances), self._uniform(least, instances)]

    def _torch_choices(self, instances: list[PlannedGraph]) -> list[VariantChoice]:
        """The choices of torch's partitioner at each fraction, from large to small."""
        fractions = sorted({fraction for graph in instances for fraction in graph.torch_ways}, reverse=True)
        return [self._uniform([torch_way(graph, each) for graph in instances], instances) for each in fractions]

    def _uniform(self, variants: list[Variant], instances: list[PlannedGraph]) -> VariantChoice:
        """The choice of these variants, one per call."""
        if len(instances) == 1:
            assert instances[0].step is not None
            step = replace(instances[0].step, other_bytes=self._base(instances))
            cost = CompiledSearch(step, self.time_limit_s).cost(variants[0].keeps or instances[0].default)
            peak_bytes, peak_call = cost.peak_bytes + self._error_of(None), -1
        else:
            corrected = [(self._as_measured(graph, each),) for graph, each in zip(instances, variants, strict=True)]
            shared = SharedBudget(corrected, self._around_with_error(instances))
            peak_bytes, position = shared.peak([0] * len(instances))
            peak_call = position.index
        extra_s = sum(variant.extra_s for variant in variants)
        return VariantChoice(variants, ((),) * len(variants), peak_bytes, extra_s, 0.0, peak_call=peak_call)

    # One graph.

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
        ways = [(search.cost(way.keeps or ()).peak_bytes, way) for way in graph.torch_ways.values()]
        fitting = [(peak, way) for peak, way in ways if peak <= allowed]
        variant = variant_of(step, plan.keeps, plan.keeps, default.extra_s)
        peak_bytes, way = min(fitting, key=lambda each: each[1].extra_s, default=(0, variant))
        if way.extra_s < variant.extra_s:
            return VariantChoice([way], ((),), peak_bytes + error, way.extra_s, 0.0)
        bound_s = min(max(0.0, plan.lower_bound_s - default.extra_s), variant.extra_s)
        return VariantChoice([variant], ((),), plan.peak_bytes + error, variant.extra_s, bound_s, is_within)

    # Several calls.

    def _around_with_error(self, instances: list[PlannedGraph], has_moves: bool = False) -> OtherMemory:
        around, error = self._around(instances), self._error_of(None, has_moves)
        between, elsewhere = around.between_bytes + error, around.elsewhere_bytes + error
        return replace(around, between_bytes=between, elsewhere_bytes=elsewhere)

    def _shared(
        self,
        instances: list[PlannedGraph],
        budget_bytes: int,
        shares: tuple[float, ...] = (0.0,),
        options: list[tuple[Variant, ...]] | None = None,
    ) -> VariantChoice:
        """The fastest choice that fits, with one of these shares of the link; else that with the smallest peak.

        `options` are the variants that each call may run; None: those of its graph.
        """
        has_moves = any(shares)
        given = [graph.variants for graph in instances] if options is None else options
        calls = list(zip(instances, given, strict=True))
        corrected = {  # equal calls must have the same tuple
            (graph, variants): tuple(self._as_measured(graph, each, has_moves) for each in variants)
            for graph, variants in dict.fromkeys(calls)
        }
        around = self._around_with_error(instances, has_moves)
        byte_s = 2 * _BESIDE_COPIES / self._link_bytes_per_s if has_moves else 0.0
        variants = [corrected[call] for call in calls]
        budgets = [SharedBudget(variants, around, self._quotas(instances, share), byte_s) for share in shares]
        choices = [(shared, shared.choose(budget_bytes)) for shared in budgets]
        fitting = [(shared, choice) for shared, choice in choices if choice is not None]
        if fitting:
            shared, best = min(fitting, key=lambda each: each[1].extra_s)
            # As few calls as possible recompute indices, whatever is compiled for it.
            worth_s = WORTH_A_COMPILE * sum(graph.step_s for graph in instances) if options is None else 0.0
            best = shared.with_fewer_variants(
                best, budget_bytes, worth_s, lambda index, number: instances[index].is_compiled(given[index][number])
            )
        else:
            shared, best = min(((each, each.floor) for each in budgets), key=lambda each: each[1].peak_bytes)
        chosen = [each[number] for each, number in zip(given, best.chosen, strict=True)]
        whole_link = replace(budgets[-1], quotas=self._quotas(instances, _SHARES[-1] if self.host_bytes else 0.0))
        return VariantChoice(
            chosen,
            best.moved,
            best.peak_bytes,
            best.extra_s,
            min(best.lower_bound_s, whole_link.lower_bound_s(max(budget_bytes, best.peak_bytes))),
            is_within=bool(fitting),
            in_flight_bytes=best.in_flight_bytes,
            peak_call=shared.peak(best.chosen)[1].index,
        )

    def _replaying(self, instances: list[PlannedGraph], budget_bytes: int, floor: VariantChoice) -> VariantChoice:
        """The choice `floor`, with indices recomputed in as many calls as it takes to fit."""
        return self._shared(
            instances,
            budget_bytes,
            options=[
                (variant,) if graph.replayed is None else (variant, graph.replayed)
                for graph, variant in zip(instances, floor.variants, strict=True)
            ],
        )

    def _as_measured(self, graph: PlannedGraph, variant: Variant, has_moves: bool = False) -> Variant:
        """A variant with measured numbers in place of predictions; bytes may become negative.

        One that has not run yet gets the error of the one that ran and whose saved bytes are nearest.
        """
        error = self._error_of((graph.number, variant.key), has_moves)
        forward, backward = variant.forward_bytes + error, variant.backward_bytes + error
        ran = self._transients.get(graph.number, {})
        known = (*graph.variants, *graph.torch_ways.values(), *filter(None, [graph.replayed]))
        seen = [each for each in known if each.key in ran]
        if seen:
            near = min(seen, key=lambda each: (abs(each.saved_bytes - variant.saved_bytes), each.key != variant.key))
            forward += ran[near.key][0] - near.forward_bytes
            backward += ran[near.key][1] - near.backward_bytes
        own_s, fastest_s = self.seconds_of(graph, variant), self.seconds_of(graph, graph.variants[0])
        extra_s = variant.extra_s
        if own_s is not None and fastest_s is not None:
            extra_s = max(own_s - fastest_s, _LEAST_OF_PREDICTED * extra_s)
        return replace(variant, forward_bytes=forward, backward_bytes=backward, extra_s=extra_s)

    def start_bytes(self, instances: list[PlannedGraph]) -> int:
        """Bytes in use when the first call of a step begins, without gradients of earlier steps."""
        traced = self._traced(instances)
        return self._base(instances) if traced is None or len(instances) == 1 else traced.forward_bytes[0]

    def state_bytes(self, model: nn.Module) -> int:
        """Bytes of the optimizer's state: all that it will have, or what optimizers that were not given have now."""
        device = torch.device("cpu")
        expected, _, _ = optimizer_memory(self.optimizer, device)
        return max(expected, state_bytes_of(model, device, self.optimizer))

    def _traced(self, instances: list[PlannedGraph]) -> OtherMemory | None:
        """Memory outside of calls, if it was traced for this number of them."""
        traced = self.surroundings
        return traced if traced is not None and len(traced.forward_bytes) == len(instances) else None

    def _around(self, instances: list[PlannedGraph]) -> OtherMemory:
        """Memory outside of calls: as measured, as traced, or parameters, gradients and outputs of earlier calls."""
        known = self._measured_around.get(tuple(graph.number for graph in instances), self._traced(instances))
        if known is not None:
            return known
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
        if self._base_bytes is not None:
            return self._base_bytes
        device = instances[0].device
        states, _, _ = optimizer_memory(self.optimizer, device)
        if device.type != "cuda":
            static = max(self.seen_bytes, sum(graph.static_bytes for graph in dict.fromkeys(instances)))
            return (static if self.model_bytes is None else self.model_bytes) + instances[0].batch_bytes + states
        # Measured once, for the first step: later ones start with gradients.
        present = present_state_bytes(self.optimizer, device)
        self._base_bytes = torch.cuda.memory_allocated(device) + max(0, states - present)
        return self._base_bytes


def torch_way(graph: PlannedGraph, fraction: float) -> Variant:
    """What torch's partitioner does with a graph at a fraction: equal choices are listed at the largest one."""
    larger = [each for each in graph.torch_ways if each >= fraction]
    return graph.torch_ways[min(larger)] if larger else graph.variants[0]


def _gradient_bytes(instances: Iterable[PlannedGraph]) -> int:
    steps = (graph.step for graph in dict.fromkeys(instances))
    return sum(value.bytes for step in steps if step is not None for value in step.values if value.kind == "gradient")


def replayed_indices_warning(instances: list[PlannedGraph], choice: VariantChoice, budget_bytes: int) -> str:
    """What a choice that computes indices again means, and how many more bytes would save them."""
    pairs = zip(instances, choice.variants, strict=True)
    missing = [graph.variants[-1].saved_bytes - each.saved_bytes for graph, each in pairs if each.replays_indices]
    return (
        f"within {format_bytes(budget_bytes)} there is no room for the indices (topk, sort) of "
        f"{counted(len(missing), 'compiled call')}, so they are computed again in the backward, as torch's "
        "checkpoint does. Where scores are equal but for rounding, a token may then be routed differently. Raise "
        f"the budget by {format_bytes(sum(missing))} to save them."
    )
