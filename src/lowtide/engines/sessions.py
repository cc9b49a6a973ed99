"""Compiled graphs of one model that share one budget: what each of them runs, and whether the peak holds.

A step's graphs run one after the other; those of equal blocks are one graph that is called again and again. In the
first forward the session guesses what is to come (as many calls as the model has blocks), from then on it knows. When a
step went by with nothing compiled in it, its measured peak corrects what was predicted, and where that makes a
difference variants are chosen again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lowtide.engines.plannedgraphs import PlannedGraph
from lowtide.errors import InfeasibleBudgetError
from lowtide.graph import StepGraph
from lowtide.solvers.compiled import CompiledSearch
from lowtide.solvers.sharing import SharedBudget, Surroundings, Variant, variant_of
from lowtide.tracing.devices import block_bytes, present_device
from lowtide.tracing.optimizers import optimizer_memory
from lowtide.units import format_bytes, parse_bytes

logger = logging.getLogger("lowtide")

_MOST_CORRECTIONS = 4
_WORTH_A_COMPILE = 0.005  # of the step's time


@dataclass
class Choice:
    """What the instances of a step run, and what is predicted of it."""

    variants: list[Variant]
    peak_bytes: int
    extra_s: float
    lower_bound_s: float
    is_within: bool = True


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
        self._correction_bytes = 0
        self._is_clean = self._is_settled = False

    # What graphs ask.

    def first_variant(self, graph: PlannedGraph) -> Variant:
        """What a graph that is being compiled for the first time shall run."""
        self.graphs.append(graph)
        left = max(1, self.num_blocks - len(self._called))
        self._plan([*self._called, *[graph] * left])
        assert self._choice is not None
        return self._choice.variants[len(self._called)]

    def next_variant(self, graph: PlannedGraph) -> Variant:
        """What a graph that is called now shall run."""
        if self._error is not None:
            raise self._error
        if graph is self.graphs[0] and self.num_blocks == 1:
            self.begin_forward()
        position = len(self._called)
        self._called.append(graph)
        assert self._choice is not None
        if position < len(self._instances) and self._instances[position] is graph:
            return self._choice.variants[position]
        return graph.variants[-1]  # more calls than planned for: the smallest

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
        if self._is_settled or device.type != "cuda":
            return
        if self._is_clean:
            self._judge(torch.cuda.max_memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)
        self._is_clean = True

    def _judge(self, measured: int) -> None:
        choice = self._choice
        assert choice is not None
        self.measurements.append(Measurement(measured, choice.peak_bytes))
        self._correction_bytes += measured - choice.peak_bytes
        before = choice.variants
        self._plan(self._instances)
        now = self._choice
        assert now is not None
        step_s = sum(graph.step.step_s for graph in self._instances if graph.step is not None)
        gain_s = choice.extra_s - now.extra_s
        if measured <= self.budget_bytes and gain_s < _WORTH_A_COMPILE * step_s:
            self._choice = replace(choice, peak_bytes=measured)  # good as it is
        self._is_settled = self._choice.variants == before or len(self.measurements) >= _MOST_CORRECTIONS
        allowed = format_bytes(self.budget_bytes)
        logger.info(
            "compiled step: peak %s measured, %s predicted, within %s%s",
            format_bytes(measured),
            format_bytes(choice.peak_bytes),
            allowed,
            "" if self._choice.variants == before else "; choosing again",
        )
        if not now.is_within and measured > self.budget_bytes:
            logger.warning("compiled step: %s measured, and no variant holds %s", format_bytes(measured), allowed)

    # Plans.

    @property
    def budget_bytes(self) -> int:
        device = self.graphs[0].device if self.graphs else torch.device("cpu")
        return parse_bytes(self.budget, total_bytes=present_device(device).memory_bytes or None)

    def _plan(self, instances: list[PlannedGraph]) -> None:
        self._instances = instances
        allowed = self.budget_bytes - self._correction_bytes
        if len(instances) == 1:
            choice = self._single(instances[0], allowed)
        else:
            choice = self._shared(instances, allowed)
        self._choice = replace(choice, peak_bytes=choice.peak_bytes + self._correction_bytes)
        if not choice.is_within and not self.measurements and self._error is None:
            self._error = InfeasibleBudgetError(
                f"budget {format_bytes(self.budget_bytes)} is below the {format_bytes(choice.peak_bytes)} that this "
                "compiled step needs at least. Raise the budget, make the batch smaller, or compile without "
                "regional=True, which can go lower.",
                choice.peak_bytes,
            )

    def _shared(self, instances: list[PlannedGraph], allowed: int) -> Choice:
        around = self.surroundings
        if around is None or len(around.forward_bytes) != len(instances):
            around = Surroundings.flat(len(instances), self._base(instances) + self._gradient_bytes(instances))
        shared = SharedBudget([graph.variants for graph in instances], around)
        found = shared.choose(allowed)
        best = found if found is not None else shared.floor
        variants = [graph.variants[number] for graph, number in zip(instances, best.chosen, strict=True)]
        return Choice(variants, best.peak_bytes, best.extra_s, best.lower_bound_s, found is not None)

    def _single(self, graph: PlannedGraph, allowed: int) -> Choice:
        """The step of one whole graph, as `solve` sees it."""
        step = self.whole_step(graph)
        search = CompiledSearch(step, self.time_limit_s)
        default = search.cost(graph.default)
        if default.peak_bytes <= allowed:
            return Choice([graph.variants[0]], default.peak_bytes, 0.0, 0.0)
        try:
            plan, is_within = search.plan(allowed), True
        except InfeasibleBudgetError:
            plan, is_within = search.plan(search.floor.peak_bytes), False
        variant = variant_of(step, plan.keeps, plan.keeps, default.extra_s)
        bound_s = min(max(0.0, plan.lower_bound_s - default.extra_s), variant.extra_s)
        return Choice([variant], plan.peak_bytes, variant.extra_s, bound_s, is_within)

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
