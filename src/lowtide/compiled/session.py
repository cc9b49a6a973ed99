"""How long compiling takes, and how much of that is planning.

How a step's peak is measured where that can be done while it runs.

Compiled graphs of one model that share one budget: what each of them runs, and whether the peak holds.

A step calls graphs one after the other; those of equal blocks are one graph that is called again and again. In the
first step the session guesses what is to come (as many calls as the model has blocks); from then on it knows the
**course** that a step takes, one of several where batches have several shapes. When a step went by with nothing
compiled in it, its measured peak corrects what was predicted, and where that makes a difference variants are chosen
again.
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
from lowtide.solvers.shared_budget import Variant
from lowtide.store.activation_store import ActivationStore
from lowtide.store.offload import end_of_forward
from lowtide.tracing.devices import present_device
from lowtide.units import format_bytes, format_seconds, parse_bytes


class CompileWatch:
    """Seconds spent so far."""

    def __init__(self) -> None:
        self.compiling_s = self.planning_s = 0.0  # the first without the second

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """A block that compiles, and may plan in between."""
        start, planned_s = time.perf_counter(), self.planning_s
        try:
            yield
        finally:
            self.compiling_s += time.perf_counter() - start - (self.planning_s - planned_s)

    @contextmanager
    def planning(self) -> Iterator[None]:
        """A block that plans."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.planning_s += time.perf_counter() - start

    def __str__(self) -> str:
        return f"{format_seconds(self.compiling_s)} of compiling, {format_seconds(self.planning_s)} of planning"


class PeakMeter(Protocol):
    """Says the most bytes that were allocated since it was last reset."""

    def peak_bytes(self) -> int: ...
    def reset(self) -> None: ...


class AllocatorMeter:
    """torch's own statistics of a device's allocator, which it resets."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


def meter_of(device: torch.device) -> PeakMeter | None:
    """None on the CPU, where only a profiler knows peaks."""
    return AllocatorMeter(device) if device.type == "cuda" else None


logger = logging.getLogger("lowtide")

_MOST_CORRECTIONS = 6
_MOST_SEQUENCES = 16
_WORTH_A_COMPILE = 0.005  # of the step's time
_numbers = itertools.count()


@dataclass
class CallSequence:
    """Graphs in the order in which a step calls them, by their numbers, and what they run."""

    numbers: tuple[int, ...]
    choice: VariantChoice
    error: InfeasibleBudgetError | None = None
    is_settled: bool = False
    measured: list[tuple[VariantChoice, int]] = field(default_factory=list)

    def begins_with(self, numbers: tuple[int, ...]) -> bool:
        return self.numbers[: len(numbers)] == numbers


@dataclass
class GraphRun:
    """How a graph shall run this time; `end` is called with what it gave."""

    variant: Variant
    context: contextlib.AbstractContextManager[Any] = field(default_factory=contextlib.nullcontext)
    end: Callable[[Any], None] = lambda outputs: None


class Session:
    """One budget, and the compiled graphs that keep it. `num_blocks` is how many calls the first step expects.

    Steps of one session are to run one after the other, not in several threads at once.
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
        self.options: Any = None  # what a backend was given
        self.budget = budget
        self.chooser = chooser or VariantChooser()
        self.num_blocks = num_blocks
        self.watch = CompileWatch()
        self._meter_of = meter_of
        # Dynamo holds graphs as long as it may call them. What it has let go of is not planned for any more.
        self._graphs: weakref.WeakValueDictionary[int, PlannedGraph] = weakref.WeakValueDictionary()
        self._calls = StepCalls()
        self._sequences: dict[tuple[int, ...], CallSequence] = {}
        self._sequence: CallSequence | None = None
        self._is_clean = False
        self._store: ActivationStore | None = None

    @property
    def graphs(self) -> list[PlannedGraph]:
        """Those that train, in the order in which they were compiled."""
        return [self._graphs[number] for number in sorted(self._graphs)]

    # What graphs ask.

    def first_variant(self, graph: PlannedGraph) -> Variant:
        """What a graph that is being compiled for the first time shall run."""
        self._graphs[graph.number] = graph
        if _compat.is_replayed():
            return graph.variants[0]
        self._end_step()
        called = self._calls.numbers
        left = max(1, self.num_blocks - len(called))
        self._sequence = self._planned((*called, *[graph.number] * left))
        if self._meter is None:  # the rest is a guess, and no reason to refuse
            self._sequence.error = self._known((*called, graph.number)).error
        return self._sequence.choice.variants[len(called)]

    def next_run(self, graph: PlannedGraph) -> GraphRun:
        """What a graph that is called now shall run, and in what context."""
        if _compat.is_replayed():
            # A checkpoint around the block decides what lives. It compares what is saved now with what is saved when it
            # replays, so both run the same.
            return GraphRun(graph.variants[0])
        self._end_step()
        called = self._calls.numbers
        course = self._sequence_of((*called, graph.number))
        if course is None:  # calls that were not foreseen: the smallest, until the step is known
            return GraphRun(graph.variants[-1], end=self._calls.begin(graph.number))
        if course.error is not None:
            raise course.error.with_traceback(None)
        choice, position = course.choice, len(called)
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
        """The one store of all courses: the host memory that it locks is locked once, and counted once."""
        if self._store is None:
            self._store = ActivationStore(host=self.chooser.host_bytes)
        self._store.allow_in_flight(choice.in_flight_bytes)
        return self._store

    def is_compiling(self) -> None:
        """Peaks that are measured while something compiles are no step's."""
        self._is_clean = False

    # Courses.

    def _sequence_of(self, numbers: tuple[int, ...]) -> CallSequence | None:
        """The course that a step is on which has called these graphs."""
        if self._sequence is not None and self._sequence.begins_with(numbers):
            return self._sequence
        for course in reversed(self._sequences.values()):
            if course.begins_with(numbers):
                self._is_clean &= len(numbers) == 1  # else it began as another
                self._sequence = course
                return course
        return None

    def _planned(self, numbers: tuple[int, ...]) -> CallSequence:
        """A course with what it shall run."""
        instances = [self._graphs[number] for number in numbers]
        return CallSequence(numbers, self.chooser.choose(instances, self.budget_bytes))

    def _known(self, numbers: tuple[int, ...]) -> CallSequence:
        """Likewise, of calls that a step makes; an error if the prediction is too large and nothing can be measured."""
        course = self._planned(numbers)
        if not course.choice.is_within and self._meter is None:
            course.error = self._infeasible(course.choice.peak_bytes, "predicted")
        return course

    def _end_step(self) -> None:
        """If the last step's backward has begun: what it called is known now, and its peak."""
        if not self._calls.is_over:
            return
        called = self._calls.take()
        alive = {numbers: course for numbers, course in self._sequences.items() if self._is_alive(numbers)}
        self._sequences = dict(list(alive.items())[-_MOST_SEQUENCES:])
        if not called or not self._is_alive(called):
            self._sequence, self._is_clean = None, False
            return
        if self._sequence is None or self._sequence.numbers != called:
            self._sequence = self._sequences.get(called) or self._known(called)
            self._is_clean = False
        elif called not in self._sequences:  # guessed right
            self._sequence.error = self._known(called).error if self._meter is None else None
        self._sequences.pop(called, None)
        self._sequences[called] = self._sequence  # the last one seen, last
        self._measure(self._sequence)

    def _is_alive(self, numbers: tuple[int, ...]) -> bool:
        return all(number in self._graphs for number in numbers)

    # Measuring.

    @property
    def _meter(self) -> PeakMeter | None:
        return self._meter_of(self._device)

    def _measure(self, course: CallSequence) -> None:
        meter = self._meter
        if meter is None or all(each.is_settled for each in self._sequences.values()):
            self._is_clean = False
            return
        if self._is_clean and not course.is_settled:
            self._judge(course, meter.peak_bytes())
        meter.reset()
        self._is_clean = True

    def _judge(self, course: CallSequence, measured: int) -> None:
        before, budget = course.choice, self.budget_bytes
        course.measured.append((before, measured))
        self.chooser.record_error(before, measured)
        instances = [self._graphs[number] for number in course.numbers]
        with self.watch.planning():
            now = self.chooser.choose(instances, budget)
        step_s = sum(graph.step_s for graph in instances)
        if measured <= budget and before.extra_s - now.extra_s < _WORTH_A_COMPILE * step_s:
            now = before  # good as it is
        course.is_settled = now.is_like(before) or len(course.measured) >= _MOST_CORRECTIONS
        if course.is_settled:
            held = [choice for choice, peak in course.measured if peak <= budget]
            if held:
                now = min(held, key=lambda choice: choice.extra_s)
            else:
                course.error = self._infeasible(min(peak for _, peak in course.measured), "measured")
        course.choice = now
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

    # Facts.

    @property
    def _device(self) -> torch.device:
        return next((graph.device for graph in self.graphs), torch.device("cpu"))

    @property
    def budget_bytes(self) -> int:
        return parse_bytes(self.budget, total_bytes=present_device(self._device).memory_bytes or None)

    def describe(self) -> str:
        """What each graph runs, in words."""
        course = self._sequence
        if course is None or not self._is_alive(course.numbers):
            return ALL_REPLAYED if self._graphs else NOTHING_YET
        choice, instances = course.choice, [self._graphs[number] for number in course.numbers]
        step_s = max(sum(graph.step_s for graph in instances), 1e-12)
        peaks = [peak for measured, peak in course.measured if measured.is_like(choice)]
        num_graphs = len(set(course.numbers))
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
        names = {number: index for index, number in enumerate(dict.fromkeys(course.numbers))}
        calls = zip(course.numbers, choice.variants, strict=True)
        for (number, variant), run in itertools.groupby(calls):
            what = "as torch decides" if variant.keeps is None else f"{_count(len(variant.keeps), 'op')} kept"
            lines.append(
                f"  {len(list(run))} x graph {names[number]}: {format_bytes(variant.saved_bytes)} saved each, {what}"
            )
        return "\n".join(lines)


ALL_REPLAYED = "all calls of compiled graphs were inside of checkpoints, which decide what lives: no plan is needed"
NOTHING_YET = "nothing compiled for training yet: run a step first"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")
