"""Compiled graphs of one model that share one budget: what each of them runs, and whether the peak holds.

A step's graphs run one after the other; those of equal blocks are one graph that is called again and again. In the
first forward the session guesses what is to come (as many calls as the model has blocks), from then on it knows. When a
step went by with nothing compiled in it, its measured peak corrects what was predicted, and where that makes a
difference variants are chosen again.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from lowtide.engines.blockoffload import BlockOffload
from lowtide.engines.plannedgraphs import PlannedGraph
from lowtide.errors import InfeasibleBudgetError
from lowtide.graph import StepGraph
from lowtide.memory.store import ActivationStore
from lowtide.solvers.compiled import CompiledSearch
from lowtide.solvers.sharing import Shared, SharedBudget, Surroundings, Variant, variant_of
from lowtide.tracing.devices import block_bytes, link_bytes_per_s, present_device
from lowtide.tracing.optimizers import optimizer_memory
from lowtide.units import format_bytes, parse_bytes

logger = logging.getLogger("lowtide")

_MOST_CORRECTIONS = 6
_WORTH_A_COMPILE = 0.005  # of the step's time
_SHARES = (0.0, 0.25, 0.5, 0.75, 0.95)  # of the link
# Of a copy's time, by which the compute beside it takes longer: memory is shared. 0.6 ms per GiB moved were measured on
# an H200, whose copies take 2 x 20 ms.
_BESIDE_COPIES = 0.015


def _is_measurable(device: torch.device) -> bool:
    return device.type == "cuda"


@dataclass
class Choice:
    """What the instances of a step run, and what is predicted of it."""

    variants: list[Variant]
    moved: tuple[tuple[int, ...], ...]  # sizes, by instance
    peak_bytes: int
    extra_s: float
    lower_bound_s: float
    is_within: bool = True
    peak_key: Any = None  # the variant that runs at the peak; None where the peak is elsewhere


@dataclass
class Measurement:
    """A step's measured peak beside the predicted one."""

    measured_bytes: int
    predicted_bytes: int


@dataclass(eq=False)
class Session:
    """One budget, and the compiled graphs that keep it. `num_blocks` is how many calls the first forward expects."""

    budget: int | str
    optimizer: Any = None
    host_bytes: int = 0
    num_blocks: int = 1
    surroundings: Surroundings | None = None
    time_limit_s: float = 10.0
    graphs: list[PlannedGraph] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._instances: list[PlannedGraph] = []  # as planned for
        self._called: list[PlannedGraph] = []  # in the forward under way
        self._choice: Choice | None = None
        self._error: InfeasibleBudgetError | None = None
        self._base_bytes: int | None = None
        self._errors: dict[Any, int] = {}  # measured less predicted, by the variant that runs at the peak
        self._is_clean = self._is_settled = False
        self._store: ActivationStore | None = None

    # What graphs ask.

    def first_variant(self, graph: PlannedGraph) -> Variant:
        """What a graph that is being compiled for the first time shall run."""
        self.graphs.append(graph)
        left = max(1, self.num_blocks - len(self._called))
        self._plan([*self._called, *[graph] * left])
        return self._current.variants[len(self._called)]

    def next_run(self, graph: PlannedGraph) -> tuple[Variant, contextlib.AbstractContextManager[Any]]:
        """What a graph that is called now shall run, and in what context."""
        if self._error is not None:
            raise self._error
        if graph is self.graphs[0] and self.num_blocks == 1:
            self.begin_forward()
        position = len(self._called)
        self._called.append(graph)
        if position >= len(self._instances) or self._instances[position] is not graph:
            return graph.variants[-1], contextlib.nullcontext()  # more calls than planned for: the smallest
        return self._current.variants[position], self._moving(self._current.moved[position])

    def _moving(self, moved: tuple[int, ...]) -> contextlib.AbstractContextManager[Any]:
        if not moved or not torch.is_grad_enabled():
            return contextlib.nullcontext()
        if self._store is None:
            in_flight = 2 * max(map(sum, self._current.moved))
            self._store = ActivationStore(host=self.host_bytes, in_flight=in_flight)
        return BlockOffload(self._store, moved)

    def is_compiling(self) -> None:
        """Peaks that are measured while something compiles are no step's."""
        self._is_clean = False

    # Steps.

    def begin_forward(self) -> None:
        """A forward begins: what the last one did is known now."""
        called, self._called = self._called, []
        if not called or not torch.is_grad_enabled():
            return
        if [graph.number for graph in called] != [graph.number for graph in self._instances]:
            self._plan(called)
            self._is_clean = False
        device = called[0].device
        if self._is_settled or not _is_measurable(device):
            return
        if self._is_clean:
            self._judge(torch.cuda.max_memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)
        self._is_clean = True

    def _judge(self, measured: int) -> None:
        before = self._current
        self.measurements.append(Measurement(measured, before.peak_bytes))
        self._errors[before.peak_key] = self._error_of(before.peak_key) + measured - before.peak_bytes
        self._plan(self._instances)
        step_s = sum(graph.step.step_s for graph in self._instances if graph.step is not None)
        gain_s = before.extra_s - self._current.extra_s
        if measured <= self.budget_bytes and gain_s < _WORTH_A_COMPILE * step_s:
            self._choice = replace(before, peak_bytes=measured)  # good as it is
        now = self._current
        is_same = (now.variants, now.moved) == (before.variants, before.moved)
        self._is_settled = is_same or len(self.measurements) >= _MOST_CORRECTIONS
        logger.info(
            "compiled step: peak %s measured, %s predicted, within %s%s",
            format_bytes(measured),
            format_bytes(before.peak_bytes),
            format_bytes(self.budget_bytes),
            "" if is_same else "; choosing again",
        )
        if measured > self.budget_bytes and self._is_settled:
            self._error = self._infeasible(measured, "measured")

    def _infeasible(self, floor: int, how: str) -> InfeasibleBudgetError:
        lower = ", or compile with regional=False, which can go lower" if self.num_blocks > 1 else ""
        return InfeasibleBudgetError(
            f"budget {format_bytes(self.budget_bytes)} is below the {format_bytes(floor)} ({how}) that this compiled "
            f"step needs at least. Raise the budget, make the batch smaller{lower}.",
            floor,
        )

    # Plans.

    @property
    def _current(self) -> Choice:
        assert self._choice is not None
        return self._choice

    @property
    def budget_bytes(self) -> int:
        device = self.graphs[0].device if self.graphs else torch.device("cpu")
        return parse_bytes(self.budget, total_bytes=present_device(device).memory_bytes or None)

    def _plan(self, instances: list[PlannedGraph]) -> None:
        self._instances = instances
        choice = self._single(instances[0]) if len(instances) == 1 else self._shared(instances)
        self._choice = choice
        if not choice.is_within and not _is_measurable(instances[0].device):
            self._error = self._infeasible(choice.peak_bytes, "predicted")

    def _error_of(self, key: Any) -> int:
        """By how much a prediction is off: as measured, or for what was not, the least that was."""
        return self._errors.get(key, min(self._errors.values(), default=0))

    def _corrected(self, graph: PlannedGraph) -> tuple[Variant, ...]:
        """A graph's variants with what was measured of them."""
        found = []
        for variant in graph.variants:
            error = self._error_of((graph.number, variant.keeps))
            backward = max(0, variant.backward_bytes + error)
            found.append(replace(variant, forward_bytes=variant.forward_bytes + error, backward_bytes=backward))
        return tuple(found)

    def _shared(self, instances: list[PlannedGraph]) -> Choice:
        allowed = self.budget_bytes
        around = self.surroundings
        if around is None or len(around.forward_bytes) != len(instances):
            around = Surroundings.flat(len(instances), self._base(instances) + self._gradient_bytes(instances))
        error = self._error_of(None)
        around = replace(
            around,
            between_bytes=around.between_bytes + error,
            elsewhere_bytes=around.elsewhere_bytes + error,
        )
        corrected = {graph: self._corrected(graph) for graph in dict.fromkeys(instances)}
        variants = [corrected[graph] for graph in instances]
        found: list[tuple[float, SharedBudget, Shared]] = []
        for share in _SHARES if self.host_bytes else (0.0,):
            shared = SharedBudget(variants, around, self._quotas(instances, share))
            best = shared.choose(allowed)
            if best is not None:
                found.append((best.extra_s + self._moving_s(best.moved), shared, best))
        if found:
            _, shared, best = min(found, key=lambda each: each[0])
        else:
            shared = SharedBudget(variants, around, self._quotas(instances, _SHARES[-1] if self.host_bytes else 0.0))
            best = shared.floor
        chosen = [graph.variants[number] for graph, number in zip(instances, best.chosen, strict=True)]
        extra_s = best.extra_s + self._moving_s(best.moved)
        where = shared.peak(best.chosen)[1]
        key = (instances[where].number, chosen[where].keeps) if where >= 0 else None
        return Choice(chosen, best.moved, best.peak_bytes, extra_s, best.lower_bound_s, bool(found), key)

    def _quotas(self, instances: list[PlannedGraph], share: float) -> tuple[int, ...]:
        """Bytes that each instance may move: what `share` of the link carries while it runs its forward."""
        if not share:
            return (0,) * len(instances)
        quotas = [int(share * self._link_bytes_per_s * graph.forward_s) for graph in instances]
        quotas[-1] = 0  # needed again at once
        shrink = min(1.0, self.host_bytes / max(sum(quotas), 1))
        return tuple(int(quota * shrink) for quota in quotas)

    def _moving_s(self, moved: tuple[tuple[int, ...], ...]) -> float:
        num_bytes = sum(map(sum, moved))
        return _BESIDE_COPIES * 2 * num_bytes / self._link_bytes_per_s if num_bytes else 0.0

    @cached_property
    def _link_bytes_per_s(self) -> float:
        return link_bytes_per_s(self.graphs[0].device)

    def _single(self, graph: PlannedGraph) -> Choice:
        """The step of one whole graph, as `solve` sees it."""
        error = self._error_of(None)
        allowed = self.budget_bytes - error
        step = self.whole_step(graph)
        search = CompiledSearch(step, self.time_limit_s)
        default = search.cost(graph.default)
        if default.peak_bytes <= allowed:
            return Choice([graph.variants[0]], ((),), default.peak_bytes + error, 0.0, 0.0)
        try:
            plan, is_within = search.plan(allowed), True
        except InfeasibleBudgetError:
            plan, is_within = search.plan(search.floor.peak_bytes), False
        variant = variant_of(step, plan.keeps, plan.keeps, default.extra_s)
        bound_s = min(max(0.0, plan.lower_bound_s - default.extra_s), variant.extra_s)
        return Choice([variant], ((),), plan.peak_bytes + error, variant.extra_s, bound_s, is_within)

    def whole_step(self, graph: PlannedGraph) -> StepGraph:
        """A graph's step with everything else that is on the device."""
        assert graph.step is not None
        return replace(graph.step, other_bytes=self._base([graph]))

    def _base(self, instances: list[PlannedGraph]) -> int:
        """Bytes that are there when the first graph begins, with what an optimizer is still going to allocate."""
        if self._base_bytes is None:
            device = instances[0].device
            states, _, _ = optimizer_memory(self.optimizer, block_bytes(device))
            if device.type == "cuda":
                present = sum(
                    item.nbytes
                    for state in getattr(self.optimizer, "state", {}).values()
                    for item in state.values()
                    if isinstance(item, torch.Tensor) and item.device == device
                )
                self._base_bytes = torch.cuda.memory_allocated(device) + max(0, states - present)
            else:
                self._base_bytes = sum(graph.static_bytes() for graph in dict.fromkeys(instances)) + states
        return self._base_bytes

    def _gradient_bytes(self, instances: list[PlannedGraph]) -> int:
        steps = (graph.step for graph in dict.fromkeys(instances))
        return sum(
            value.bytes for step in steps if step is not None for value in step.values if value.kind == "gradient"
        )

    # For people.

    def describe(self) -> str:
        """What each graph runs, in words."""
        if self._choice is None or not self._instances:
            return "nothing compiled for training yet: run a step first"
        step_s = sum(graph.step.step_s for graph in self._instances if graph.step is not None)
        lines = [
            f"{len(self._instances)} calls of {len(self.graphs)} compiled graphs within "
            f"{format_bytes(self.budget_bytes)}",
            f"  peak    {format_bytes(self._choice.peak_bytes)} predicted"
            + (f", {format_bytes(self.measurements[-1].measured_bytes)} measured" if self.measurements else ""),
            f"  slower  {100 * self._choice.extra_s / max(step_s, 1e-12):.1f} % predicted, at least "
            f"{100 * self._choice.lower_bound_s / max(step_s, 1e-12):.1f} % with any choice",
        ]
        if any(self._choice.moved):
            lines.append(f"  moved   {format_bytes(sum(map(sum, self._choice.moved)))} to the host and back")
        runs: list[tuple[PlannedGraph, Variant, int]] = []
        for graph, variant in zip(self._instances, self._choice.variants, strict=True):
            if runs and runs[-1][:2] == (graph, variant):
                runs[-1] = (graph, variant, runs[-1][2] + 1)
            else:
                runs.append((graph, variant, 1))
        for graph, variant, count in runs:
            assert graph.step is not None
            what = "as torch decides" if variant.keeps is None else f"{len(variant.keeps)} ops' outputs saved"
            lines.append(
                f"  {count} x graph {self.graphs.index(graph)}: {format_bytes(variant.saved_bytes)} saved each, {what}"
            )
        return "\n".join(lines)
