"""The compiled engine's state for one model: its graphs, the variant that each call runs, and the measured peak.

Dynamo compiles a model into one or more graphs; equal blocks share one graph, which a step calls once per block. All
graphs of a model have to stay within one budget together, so a `Session` plans them together: every `PlannedGraph`
calls `first_variant` when it is compiled and `next_run` whenever it runs, and gets back which variant to run. The
session is created by `lowtide.compile` or, with `torch.compile(backend="lowtide")`, by the backend.

- **First step.** The session assumes that the step has as many calls as the model has blocks.
- **Later steps.** The order of a step's calls is known: a `CallSequence`. Batches of several shapes have one each.
- **Correction.** On an accelerator, the peak of a step in which nothing was compiled is compared with the prediction.
  If the peak is over the budget, or low enough for a faster choice, variants are chosen again with the difference taken
  into account, at most six times per sequence. Without an accelerator, peaks are predictions.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from lowtide import _compat
from lowtide.compiled.planned_graph import BlockOffload, PlannedGraph, StepCalls
from lowtide.compiled.variant_choice import VariantChoice, VariantChooser
from lowtide.errors import InfeasibleBudgetError
from lowtide.plans.step_plan import Plan
from lowtide.solvers.shared_budget import Variant
from lowtide.store.activation_store import ActivationStore
from lowtide.store.offload import end_of_forward
from lowtide.store.storage_units import StoreStats
from lowtide.tracing.devices import present_device
from lowtide.units import format_bytes, format_seconds, parse_bytes


class CompileWatch:
    """Seconds that compiling and planning have taken so far. Printed by `explain_compiled`."""

    def __init__(self) -> None:
        self.compiling_s = self.planning_s = 0.0  # compiling_s does not include planning_s

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Context manager around code that compiles. Planning inside it counts as planning."""
        start, planned_s = time.perf_counter(), self.planning_s
        try:
            yield
        finally:
            self.compiling_s += time.perf_counter() - start - (self.planning_s - planned_s)

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Context manager around code that plans."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.planning_s += time.perf_counter() - start

    def __str__(self) -> str:
        return f"{format_seconds(self.compiling_s)} of compiling, {format_seconds(self.planning_s)} of planning"


class PeakMeter(Protocol):
    """Measures the peak of allocated bytes since the last `reset()`."""

    def peak_bytes(self) -> int: ...
    def reset(self) -> None: ...


class AllocatorMeter:
    """Peak from the CUDA allocator's statistics. `reset()` resets `torch.cuda.max_memory_allocated`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


def meter_of(device: torch.device) -> PeakMeter | None:
    """The meter for a device; None on the CPU, where a peak can only be measured under a profiler."""
    return AllocatorMeter(device) if device.type == "cuda" else None


logger = logging.getLogger("lowtide")

# Measured steps per sequence before the best choice so far is kept. A larger number costs a compile per correction.
_MOST_CORRECTIONS = 6
_MOST_SEQUENCES = 16  # remembered; the least recently used ones are planned again when they come back
# A faster choice is compiled only if it saves this share of the step's time.
_WORTH_A_COMPILE = 0.005
_numbers = itertools.count()


@dataclass
class CallSequence:
    """The graph numbers of a step's calls, in order, and the variants chosen for them.

    `measured` lists the choices that ran and their peaks. `is_settled` ends the corrections.
    """

    numbers: tuple[int, ...]
    choice: VariantChoice
    error: InfeasibleBudgetError | None = None
    is_settled: bool = False
    measured: list[tuple[VariantChoice, int]] = field(default_factory=list)

    @property
    def peaks(self) -> list[int]:
        """Measured peaks of the present choice, in bytes."""
        return [peak for choice, peak in self.measured if choice.is_like(self.choice)]

    def begins_with(self, numbers: tuple[int, ...]) -> bool:
        return self.numbers[: len(numbers)] == numbers


@dataclass
class GraphRun:
    """How to run one call of a graph: the variant, a context around it, and `end`, to be called with the outputs."""

    variant: Variant
    context: contextlib.AbstractContextManager[Any] = field(default_factory=contextlib.nullcontext)
    end: Callable[[Any], None] = lambda outputs: None


class Session:
    """The compiled graphs of one model, planned together for one budget.

    `num_blocks` is the number of calls that is assumed in the first step. While `enabled` is False every graph runs
    the variant that torch's own partitioner chose, and nothing is measured. Run the steps of a session one after the
    other, not in several threads at once.
    """

    def __init__(
        self,
        budget: int | str,
        *,
        chooser: VariantChooser | None = None,
        num_blocks: int = 1,
        meter_of: Callable[[torch.device], PeakMeter | None] = meter_of,
    ) -> None:
        self.number = next(_numbers)
        self.options: Any = None  # those of torch.compile, kept alive as the key of this session
        self.budget = budget
        self.chooser = chooser or VariantChooser()
        self.num_blocks = num_blocks
        self.watch = CompileWatch()
        self.enabled = True
        self._meter_of = meter_of
        # Dynamo owns the graphs and drops them when their code is evicted: only live graphs are planned.
        self._graphs: weakref.WeakValueDictionary[int, PlannedGraph] = weakref.WeakValueDictionary()
        self._calls = StepCalls()
        self._sequences: dict[tuple[int, ...], CallSequence] = {}
        self._sequence: CallSequence | None = None
        self._is_clean = False
        self._store: ActivationStore | None = None

    @property
    def graphs(self) -> list[PlannedGraph]:
        """The graphs that have a backward, in the order in which they were compiled."""
        return [self._graphs[number] for number in sorted(self._graphs)]

    # Called by PlannedGraph.

    def first_variant(self, graph: PlannedGraph) -> Variant:
        """The variant to compile first, for a new graph."""
        self._graphs[graph.number] = graph
        if _compat.is_replayed() or not self.enabled:
            return graph.variants[0]
        self._end_step()
        called = self._calls.numbers
        left = max(1, self.num_blocks - len(called))
        self._sequence = self._planned((*called, *[graph.number] * left))
        if self._meter is None:  # calls after this one are assumed: raise only if those made so far do not fit
            self._sequence.error = self._known((*called, graph.number)).error
        return self._sequence.choice.variants[len(called)]

    def next_run(self, graph: PlannedGraph) -> GraphRun:
        """How to run the call of `graph` that begins now."""
        if not self.enabled or _compat.is_replayed():
            # A checkpoint around the block drops its saved tensors, and compares those of the forward with those of the
            # replay: both must run the same variant.
            return GraphRun(graph.variants[0])
        self._end_step()
        called = self._calls.numbers
        sequence = self._sequence_of((*called, graph.number))
        if sequence is None:  # an unknown order of calls: the smallest variant, until the step has ended
            return GraphRun(graph.variants[-1], end=self._calls.begin(graph.number))
        if sequence.error is not None:
            raise sequence.error.with_traceback(None)
        choice, position = sequence.choice, len(called)
        variant, end = choice.variants[position], self._calls.begin(graph.number)
        if not any(choice.moved):
            return GraphRun(variant, end=end)
        store, is_last = self._store_for(choice), position == len(choice.variants) - 1

        def end_all(outputs: Any) -> None:
            end(outputs)
            if is_last:
                end_of_forward(store, (each for each in outputs if isinstance(each, torch.Tensor)))

        moved = choice.moved[position]
        return GraphRun(variant, BlockOffload(store, moved) if moved else contextlib.nullcontext(), end_all)

    def _store_for(self, choice: VariantChoice) -> ActivationStore:
        """The store that all sequences share, so that pinned host memory is allocated and counted once."""
        if self._store is None:
            self._store = ActivationStore(host=self.chooser.host_bytes)
        self._store.allow_in_flight(choice.in_flight_bytes)
        return self._store

    def is_compiling(self) -> None:
        """Ignore the peak of the current step: compiling allocates memory that the step does not need."""
        self._is_clean = False

    def enable(self, enabled: bool) -> None:
        """Switch the plan on or off. The current step is not measured."""
        self.enabled, self._is_clean = enabled, False

    @property
    def current(self) -> CallSequence | None:
        """The sequence of the last step; None before the first step, or when Dynamo has dropped its graphs."""
        sequence = self._sequence
        return sequence if sequence is not None and self._is_alive(sequence.numbers) else None

    # Call sequences.

    def _sequence_of(self, numbers: tuple[int, ...]) -> CallSequence | None:
        """A known sequence that begins with these calls, the current one first."""
        if self._sequence is not None and self._sequence.begins_with(numbers):
            return self._sequence
        for sequence in reversed(self._sequences.values()):
            if sequence.begins_with(numbers):
                self._is_clean &= len(numbers) == 1  # it began with other variants: no measurement
                self._sequence = sequence
                return sequence
        return None

    def _planned(self, numbers: tuple[int, ...]) -> CallSequence:
        """A sequence of these calls, with variants chosen for it."""
        instances = [self._graphs[number] for number in numbers]
        return CallSequence(numbers, self.chooser.choose(instances, self.budget_bytes))

    def _known(self, numbers: tuple[int, ...]) -> CallSequence:
        """As `_planned`, for calls that were made. Without a meter, a predicted peak over the budget is an error."""
        sequence = self._planned(numbers)
        if not sequence.choice.is_within and self._meter is None:
            sequence.error = self._infeasible(sequence.choice.peak_bytes, "predicted")
        return sequence

    def _end_step(self) -> None:
        """Once the last step's backward has begun: record its sequence of calls, and measure its peak."""
        if not self._calls.is_over:
            return
        called = self._calls.take()
        alive = {numbers: sequence for numbers, sequence in self._sequences.items() if self._is_alive(numbers)}
        self._sequences = dict(list(alive.items())[-_MOST_SEQUENCES:])
        if not called or not self._is_alive(called):
            self._sequence, self._is_clean = None, False
            return
        if self._sequence is None or self._sequence.numbers != called:
            self._sequence = self._sequences.get(called) or self._known(called)
            self._is_clean = False
        elif called not in self._sequences:  # the assumption was right
            self._sequence.error = self._known(called).error if self._meter is None else None
        self._sequences.pop(called, None)
        self._sequences[called] = self._sequence  # moved to the end: the most recently used
        self._measure(self._sequence)

    def _is_alive(self, numbers: tuple[int, ...]) -> bool:
        return all(number in self._graphs for number in numbers)

    # Measuring.

    @property
    def _meter(self) -> PeakMeter | None:
        return self._meter_of(self._device)

    def _measure(self, sequence: CallSequence) -> None:
        meter = self._meter
        if meter is None or all(each.is_settled for each in self._sequences.values()):
            self._is_clean = False
            return
        if self._is_clean and not sequence.is_settled:
            self._judge(sequence, meter.peak_bytes())
        meter.reset()
        self._is_clean = True

    def _judge(self, sequence: CallSequence, measured: int) -> None:
        before, budget = sequence.choice, self.budget_bytes
        sequence.measured.append((before, measured))
        self.chooser.record_error(before, measured)
        instances = [self._graphs[number] for number in sequence.numbers]
        with self.watch.planning():
            now = self.chooser.choose(instances, budget)
        step_s = sum(graph.step_s for graph in instances)
        if measured <= budget and before.extra_s - now.extra_s < _WORTH_A_COMPILE * step_s:
            now = before  # not worth another compile
        sequence.is_settled = now.is_like(before) or len(sequence.measured) >= _MOST_CORRECTIONS
        if sequence.is_settled:
            held = [choice for choice, peak in sequence.measured if peak <= budget]
            if held:
                now = min(held, key=lambda choice: choice.extra_s)
            else:
                sequence.error = self._infeasible(min(peak for _, peak in sequence.measured), "measured")
        sequence.choice = now
        logger.info(
            "compiled step: peak %s measured, %s predicted, within %s%s",
            format_bytes(measured),
            format_bytes(before.peak_bytes),
            format_bytes(budget),
            "" if now.is_like(before) else "; choosing again",
        )

    def _infeasible(self, floor: int, how: str) -> InfeasibleBudgetError:
        lower = ", or compile with regional=False, which can go lower" if self.num_blocks > 1 else ""
        return InfeasibleBudgetError(
            f"budget {format_bytes(self.budget_bytes)} is below the {format_bytes(floor)} ({how}) that this compiled "
            f"step needs at least. Raise the budget{', ' if lower else ' or '}make the batch smaller{lower}.",
            floor,
        )

    # For people.

    @property
    def _device(self) -> torch.device:
        return next((graph.device for graph in self.graphs), torch.device("cpu"))

    @property
    def budget_bytes(self) -> int:
        return parse_bytes(self.budget, total_bytes=present_device(self._device).memory_bytes or None)

    def plan_of(self, sequence: CallSequence) -> Plan:
        """The plan of a sequence that is one call."""
        (number,) = sequence.numbers
        return self.chooser.plan_of(self._graphs[number], sequence.choice, self.budget_bytes)

    def store_stats(self) -> StoreStats | None:
        """Bytes moved to host memory and held there; None if no call ever moved any."""
        return None if self._store is None else self._store.stats()

    def describe(self) -> str:
        """The budget, the peak, the slowdown and the variant of every call, as text."""
        sequence = self.current
        if sequence is None:
            return ALL_REPLAYED if self._graphs else NOTHING_YET
        choice, instances = sequence.choice, [self._graphs[number] for number in sequence.numbers]
        step_s = max(sum(graph.step_s for graph in instances), 1e-12)
        peaks = sequence.peaks
        num_graphs = len(set(sequence.numbers))
        lines = [
            f"{_count(len(instances), 'call')} of {_count(num_graphs, 'compiled graph')} within "
            f"{format_bytes(self.budget_bytes)}",
            f"  peak    {format_bytes(choice.peak_bytes)} predicted"
            + (f", {format_bytes(peaks[-1])} measured" if peaks else ""),
            f"  slower  {100 * choice.extra_s / step_s:.1f} % predicted, at least "
            f"{100 * choice.lower_bound_s / step_s:.1f} % with any choice",
        ]
        lines.append(f"  took    {self.watch}")
        if any(choice.moved):
            lines.append(f"  moved   {format_bytes(sum(map(sum, choice.moved)))} to the host and back")
        names = {number: index for index, number in enumerate(dict.fromkeys(sequence.numbers))}
        calls = zip(sequence.numbers, choice.variants, strict=True)
        for (number, variant), run in itertools.groupby(calls):
            what = "as torch decides" if variant.keeps is None else f"{_count(len(variant.keeps), 'op')} kept"
            lines.append(
                f"  {len(list(run))} x graph {names[number]}: {format_bytes(variant.saved_bytes)} saved each, {what}"
            )
        return "\n".join(lines)


ALL_REPLAYED = "all calls of compiled graphs were inside of checkpoints, which drop what graphs save: no plan is needed"
NOTHING_YET = "nothing compiled for training yet: run a step first"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")
