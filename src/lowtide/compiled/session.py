"""The compiled engine's state for one model: its graphs, the variant that each call runs, and the measured peak.

Dynamo compiles a model into one or more graphs; equal blocks share one graph, which a step calls once per block. All
graphs of a model have to stay within one budget together, so a `Session` plans them together: every `PlannedGraph`
calls `first_variant` when it is compiled and `next_run` whenever it runs, and gets back which variant to run. The
session is created by `lowtide.compile` or, with `torch.compile(backend="lowtide")`, by the backend.

- **First step.** The session assumes that the step has as many calls as the model has blocks.
- **Later steps.** The order of a step's calls is known: a `CallSequence`. Batches of several shapes have one each.
- **Correction.** The peak of a step in which nothing was compiled is measured, call by call (`step_profile`). If it is
  over the budget, or low enough for a faster choice, variants are chosen again with what was measured in place of
  predictions, and then timed beside alternatives (`settling`).
- **Larger steps.** A choice that holds was measured for steps of a certain size: the bytes of gradients that are there
  when the forward begins, and of inputs whose shapes are symbolic. When a larger step comes, such as the second one of
  an accumulated gradient, the next of that size is measured and corrected likewise.
- **Ranks.** All ranks that train the model come to the same choices, which are the lowest rank's (`session_ranks`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from lowtide import _compat
from lowtide.compiled.planned_graph import BlockOffload, Mark, PlannedGraph, StepCalls
from lowtide.compiled.session_ranks import SessionRanks, StepReport, name_of_calls
from lowtide.compiled.settling import CallSequence, MeasuredStep, OverBudget, StepSize, settle_further
from lowtide.compiled.step_profile import (
    FORWARD,
    AllocatorMeter,
    CompileWatch,
    PeakMeter,
    ProfilerMeter,
    StepMeter,
    StepProfile,
)
from lowtide.compiled.variant_choice import VariantChoice, VariantChooser
from lowtide.errors import InfeasibleBudgetError
from lowtide.solvers.shared_budget import Variant
from lowtide.store.activation_store import ActivationStore
from lowtide.store.offload import end_of_forward
from lowtide.store.storage_units import StoreStats
from lowtide.tracing.devices import present_device
from lowtide.units import format_apart, format_bytes, parse_bytes

# Whether peaks on the CPU are measured in the first steps, under torch.profiler. Tests without kernels switch it off.
MEASURES_CPU = True

logger = logging.getLogger("lowtide")

_MOST_UNMEASURED = 20  # steps that could not be measured, before predictions are taken for it
# Steps after which a sequence that did not come again no longer decides what shorter ones run. A step that came once
# makes others slower for that long; with a smaller number rare long steps exceed the budget.
_MOST_STEPS_AGO = 200
_MOST_SEQUENCES = 16  # remembered; the least recently used ones are planned again when they come back
_numbers = itertools.count()


_NO_CONTEXT = contextlib.nullcontext()


class GraphRun(NamedTuple):
    """How to run one call of a graph: the variant, a context around it, and `end`, to be called with the outputs."""

    variant: Variant
    context: contextlib.AbstractContextManager[Any] = _NO_CONTEXT
    end: Callable[[Any], None] = lambda outputs: None


class Session:
    """The compiled graphs of one model, planned together for one budget.

    `num_blocks` is the number of calls that is assumed in the first step. A step that does not fit the budget raises
    `InfeasibleBudgetError` after `release()` was called, or with `on_over="warn"` warns once and runs the choice with
    the smallest peak. While `enabled` is False every graph runs the variant that torch's own partitioner chose, and
    nothing is measured. Run the steps of a session one after the other, not in several threads at once.
    """

    def __init__(
        self,
        budget: int | str,
        *,
        chooser: VariantChooser | None = None,
        num_blocks: int = 1,
        on_over: str = "raise",
        meter_of: Callable[[torch.device], PeakMeter | None] | None = None,
    ) -> None:
        self.number = next(_numbers)
        self.options: Any = None  # those of torch.compile, kept alive as the key of this session
        self.handle: Any = None  # of a model compiled by the backend, made when it is asked for
        self.budget = budget
        self.chooser = chooser or VariantChooser()
        self.num_blocks = num_blocks
        self.watch = CompileWatch()
        self.enabled = True
        self.on_over = on_over
        self.release: Callable[[], None] = lambda: None
        self.num_graph_calls = 0  # also of graphs without a backward
        self.calling = ("", "")  # path and class of the module that runs now
        self._called_modules: dict[int, tuple[str, str]] = {}  # likewise of the calls of the last steps, by position
        self._seen: dict[int, weakref.ref[nn.Parameter]] = {}  # by id; without those that are gone
        self.unplanned: str | None = None  # the warning that some code runs without the budget
        self._has_warned = self._has_warned_of_indices = False
        self.model: weakref.ref[nn.Module] | None = None  # if known, for the bytes of its gradients
        self._meter_of = meter_of or functools.cache(self._meter_on)
        self._marking: StepMeter | None = None  # records the present step
        # Dynamo owns the graphs and drops them when their code is evicted: only live graphs are planned.
        self._graphs: weakref.WeakValueDictionary[int, PlannedGraph] = weakref.WeakValueDictionary()
        self._calls = StepCalls()
        self._calls.on_dropped = self._drop
        self._sequences: dict[tuple[int, ...], CallSequence] = {}
        self._sequence: CallSequence | None = None
        self._only: CallSequence | None = None  # the sequence, if all steps so far made the same calls
        self._num_followed = -1  # calls of this step that are those of `_only`
        self._num_steps = 0
        self._is_clean = self._has_dropped = False
        self._size = StepSize()  # of the present step, as far as it has run
        self._store: ActivationStore | None = None
        self._ranks = SessionRanks()
        self._over: OverBudget | None = None  # on some rank
        self._common_budget_bytes: int | None = None  # the smallest of all ranks

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
        traced = self.chooser.surroundings
        left = max(1, (self.num_blocks if traced is None else len(traced.forward_bytes)) - len(called))
        # Calls after this one are assumed: the step may need more than this, so nothing is refused yet.
        self._sequence = self._planned((*called, *[graph.number] * left))
        return self._sequence.choice.variants[len(called)]

    def next_run(self, graph: PlannedGraph, input_bytes: int = 0) -> GraphRun:
        """How to run the call of `graph` that begins now; `input_bytes` are those of inputs with symbolic shapes."""
        if graph.number not in self._graphs:  # compiled for another model
            with self.watch.planning():
                self.first_variant(graph)
        if not self.enabled or _compat.is_replayed():
            # A checkpoint around the block drops its saved tensors, and compares those of the forward with those of the
            # replay: both must run the same variant.
            return GraphRun(graph.variants[0])
        if self._calls.is_over:
            self._end_step()
        if not self._calls.num_alive:
            if self._has_dropped and self._sequence is not None:
                self._watch_next(self._sequence)
            self._size = StepSize(self._gradient_bytes())
        if input_bytes:
            self._size = replace(self._size, input_bytes=self._size.input_bytes + input_bytes)
        sequence, position = self._found(graph.number)
        if position is not None:
            self._called_modules[position] = self.calling
        if sequence is None or position is None:
            # An unknown order of calls, or one that the loss does not use: the smallest variant.
            mark = None if position is None else self._marker(position)
            end = self._calls.begin(graph.number, (graph.variants[-1], ()), mark)
            return GraphRun(graph.variants[-1], end=end)
        over = self._over or sequence.over
        if over is not None and (self._over is not None or self._ranks.is_alone or not self._ranks.is_open):
            self._refuse(over)  # if ranks are still to be told, they raise together in the next step
        choice = sequence.choice
        variant, moved = run = choice.runs[position]
        end = self._calls.begin(graph.number, run, None if self._marking is None else self._marker(position))
        if not choice.moves_any:
            return GraphRun(variant, _NO_CONTEXT, end)
        store, is_last = self._store_for(choice), position == len(choice.variants) - 1

        def end_all(outputs: Any) -> None:
            end(outputs)
            if is_last:
                end_of_forward(store, (each for each in outputs if isinstance(each, torch.Tensor)))

        return GraphRun(variant, BlockOffload(store, moved) if moved else _NO_CONTEXT, end_all)

    def _store_for(self, choice: VariantChoice) -> ActivationStore:
        """The store that all sequences share, so that pinned host memory is allocated and counted once."""
        if self._store is None:
            self._store = ActivationStore(host=self.chooser.host_bytes)
        self._store.allow_in_flight(choice.in_flight_bytes)
        return self._store

    def is_compiling(self) -> None:
        """Ignore the peak of the current step: compiling allocates memory that the step does not need."""
        self._is_clean = False
        self._stop_marking()

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Context manager around code that compiles."""
        self.is_compiling()
        with self.watch.compiling():
            yield
        self.is_compiling()

    def see(self, parameters: tuple[nn.Parameter, ...]) -> None:
        """Remember the parameters that a graph runs with, for `has_run_with`."""
        seen = self._seen
        if not seen.keys() >= set(map(id, parameters)):
            for each in parameters:  # taken out when it is freed: another one may get its id
                seen[id(each)] = weakref.ref(each, functools.partial(seen.pop, id(each)))

    def has_run_with(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether one of these parameters was ever an input of a graph."""
        return any(id(each) in self._seen for each in parameters)

    def enable(self, enabled: bool) -> None:
        """Switch the plan on or off. The current step is not measured."""
        self.enabled, self._is_clean = enabled, False
        self._stop_marking()

    @property
    def current(self) -> CallSequence | None:
        """The sequence of the last step; None before the first step, or when Dynamo has dropped its graphs."""
        sequence = self._sequence
        return sequence if sequence is not None and self._is_alive(sequence.numbers) else None

    # Call sequences.

    def _found(self, number: int) -> tuple[CallSequence | None, int | None]:
        """The known sequence that begins with the calls of this step and one of graph `number`; that one's position.

        The sequence is None if there is none; the position is None if the loss will not use the call. Of several the
        longest: how many calls will follow is not known yet, as where layers are skipped at random, and what is chosen
        for a longer step saves less.
        """
        num_begun, sequence = self._calls.num_begun, self._only
        if sequence is not None and num_begun in (0, self._num_followed):
            # All steps so far were alike, and so is this one up to here: compare no more than this call.
            if num_begun < len(sequence.begun) and sequence.begun[num_begun] == number:
                self._sequence, self._num_followed = sequence, num_begun + 1
                return sequence, sequence.positions[num_begun]
        self._num_followed = -1
        alive, begun = (*self._calls.numbers, number), (*self._calls.begun, number)
        known = [*self._sequences.values(), *filter(None, [self._sequence])]
        known.sort(key=lambda each: (len(each.numbers), each is self._sequence), reverse=True)
        for sequence in known:
            if sequence.begun[: len(begun)] == begun:
                self._sequence = sequence
                return sequence, sequence.positions[len(begun) - 1]
        for sequence in known:
            if sequence.numbers[: len(alive)] == alive:
                self._sequence = sequence
                return sequence, len(alive) - 1
        return None, len(alive) - 1

    def _forget_rare(self) -> None:
        """Forget a long sequence that has not come for a while, and the shorter ones that ran what is chosen for it.

        Those are planned and measured anew.
        """
        for numbers, sequence in list(self._sequences.items()):
            shorter = [each for each in self._sequences if len(each) < len(numbers) and numbers[: len(each)] == each]
            if shorter and sequence.last_step < self._num_steps - _MOST_STEPS_AGO:
                for each in (*shorter, numbers):
                    self._sequences.pop(each, None)
                self._sequence = None

    def _planned(self, numbers: tuple[int, ...]) -> CallSequence:
        """A sequence of these calls, with variants chosen for it, by this rank alone."""
        instances = [self._graphs[number] for number in numbers]
        if self._needs_agreement(numbers):
            return CallSequence(numbers, self.chooser.smallest(instances))
        return CallSequence(numbers, self._chosen(instances))

    def _chosen(self, instances: list[PlannedGraph]) -> VariantChoice:
        return self.chooser.choose(instances, self.budget_bytes, is_measured=self._meter is not None)

    def _needs_agreement(self, numbers: tuple[int, ...]) -> bool:
        """Whether ranks may wait forever if they run different variants.

        Partitions may order the collectives in a graph differently. A rank alone runs the smallest variant of such a
        graph, which depends on nothing that is measured.
        """
        return not self._ranks.is_known_alone and any(self._graphs[number].has_collectives for number in numbers)

    def _refuse_by_prediction(self, sequence: CallSequence) -> None:
        """Without a meter, a predicted peak over the budget is an error."""
        if self._meter is None and not sequence.choice.is_within:
            sequence.over = OverBudget(sequence.choice.peak_bytes, "predicted")

    def _end_step(self) -> None:
        """Once the last step's backward has begun: record its sequence of calls, and measure its peak."""
        if not self._calls.is_over:
            return
        self._num_steps += 1
        self._ranks.find(None if self.model is None else self.model())
        if self._is_routine():
            assert self._only is not None
            self._only.last_step = self._num_steps
            self._calls.clear()
            return
        self._only = None
        called, begun = self._calls.numbers, self._calls.begun
        positions, ran = self._calls.take()
        alive = {numbers: sequence for numbers, sequence in self._sequences.items() if self._is_alive(numbers)}
        self._sequences = dict(list(alive.items())[-_MOST_SEQUENCES:])
        self._forget_rare()
        if not called or not self._is_alive(called):
            self._sequence = None
        elif self._sequence is None or self._sequence.numbers != called:
            self._sequence = self._sequences.get(called) or self._planned(called)
        # A step that began like another one has run some of its variants: it says nothing about the present choice.
        self._is_clean &= self._sequence is not None and ran == self._sequence.choice.runs
        step, is_agreed = self._ranks.exchanged(self._report())
        if not self._ranks.is_alone:
            self._over, self._common_budget_bytes = step.over, step.budget_bytes
        sequence = self._sequence
        if sequence is None:
            return
        with self._ranks.together(is_agreed):
            if called not in self._sequences:
                if is_agreed:
                    sequence.choice = self._chosen(self.instances_of(sequence))
                self._refuse_by_prediction(sequence)
            if is_agreed or not self._needs_agreement(called):
                self._judge_step(sequence, step)
            elif not self._ranks.is_open:
                sequence.is_settled = True
        if is_agreed:
            self._sequence = sequence = self._ranks.of_first(sequence)
            self._over = sequence.over or self._over
        sequence.begun, sequence.positions, sequence.last_step = begun, positions, self._num_steps
        self._sequences.pop(called, None)
        self._sequences[called] = sequence  # moved to the end: the most recently used
        self._only = sequence if len(self._sequences) == 1 else None
        self._watch_next(sequence)
        self._warn_of_replayed_indices(sequence)

    def _is_routine(self) -> bool:
        """Whether the step that has ended was like all steps before, and leaves nothing to decide."""
        sequence = self._only
        return (
            sequence is not None
            and self._num_followed == self._calls.num_begun == self._calls.num_alive
            and self._num_followed == len(sequence.begun) == len(sequence.numbers)
            and sequence.is_settled
            and sequence.over is None
            and self._over is None
            and self._marking is None
            and (self._ranks.is_alone or not self._ranks.is_open)
            and any(self._size.is_within(each) for each in sequence.held_sizes)
        )

    def _report(self) -> StepReport:
        """What this rank knows of the step that has ended."""
        sequence, meter = self._sequence, self._meter
        calls = peak_bytes = profile = None
        if sequence is not None and not self._ranks.is_alone:
            calls = name_of_calls(self.instances_of(sequence))
        if meter is not None and self._is_clean:
            peak_bytes, profile = meter.peak_bytes(), meter.profile() if isinstance(meter, StepMeter) else None
        all_known = sequence is not None and sequence.numbers in self._sequences
        return StepReport(
            calls=calls,
            budget_bytes=self.budget_bytes,
            size=self._size,
            is_clean=self._is_clean,
            is_settled=all_known and (meter is None or all(each.is_settled for each in self._sequences.values())),
            peak_bytes=peak_bytes,
            profile=profile,
            over=next((each.over for each in self._sequences.values() if each.over is not None), None),
        )

    def _is_alive(self, numbers: tuple[int, ...]) -> bool:
        return all(number in self._graphs for number in numbers)

    # Measuring.

    @property
    def _meter(self) -> PeakMeter | None:
        return self._meter_of(self._device)

    def _meter_on(self, device: torch.device) -> PeakMeter | None:
        if device.type == "cuda":
            return AllocatorMeter(device)
        return ProfilerMeter(self._start_bytes) if MEASURES_CPU else None

    def _start_bytes(self) -> int:
        """Bytes on the CPU when a step begins."""
        assert self._sequence is not None
        model = None if self.model is None else self.model()
        known = self._seen_parameters if model is None else model.parameters()
        gradients = (each.grad for each in known if each is not None and each.grad is not None)
        return self.chooser.start_bytes(self.instances_of(self._sequence)) + sum(each.nbytes for each in gradients)

    def _gradient_bytes(self) -> int:
        """Bytes of the gradients of all parameters that graphs have seen."""
        return sum(each.grad.nbytes for each in self._seen_parameters if each is not None and each.grad is not None)

    @property
    def _seen_parameters(self) -> Iterable[nn.Parameter | None]:
        return [reference() for reference in list(self._seen.values())]

    def _judge_step(self, sequence: CallSequence, step: StepReport) -> None:
        """Decide by a step that has ended, if it was measured, which choice its sequence runs next."""
        if sequence.over is None:
            sequence.expect(step.size)
        if sequence.is_settled:
            return
        if not step.is_clean or step.peak_bytes is None or step.size != sequence.size:
            self._leave_unmeasured(sequence, step.size)
            return
        sequence.num_unmeasured = 0
        self._judge(sequence, step.peak_bytes, step.profile)

    def _watch_next(self, sequence: CallSequence) -> None:
        """Measure the next step, unless all sequences are settled."""
        self._marking, meter = None, self._meter
        self._is_clean = self._has_dropped = False
        if meter is None or sequence.over is not None or all(each.is_settled for each in self._sequences.values()):
            return
        meter.reset()
        self._is_clean = True
        self._marking = meter if isinstance(meter, StepMeter) else None

    def _leave_unmeasured(self, sequence: CallSequence, size: StepSize) -> None:
        """Stop measuring after some steps that could not be measured, or that were smaller than expected.

        Such as steps that a profiler of the user's watched, or that compiled something each time.
        """
        sequence.num_unmeasured += 1
        if sequence.num_unmeasured < _MOST_UNMEASURED:
            return
        if size != sequence.size:
            sequence.is_settled = True  # until a step comes that is not known to hold
            return
        if not sequence.choice.is_within and not sequence.held_sizes:
            sequence.over = OverBudget(sequence.choice.peak_bytes, "predicted")
        sequence.settle()

    def _marker(self, position: int) -> Mark | None:
        """Marks the begin of a call's forward; returns what marks the other points of the call. None: not measured."""
        meter = self._marking
        if meter is None:
            return None
        if position == 0:
            meter.times_only = self._sequence is not None and self._sequence.is_timed_only
        meter.mark(FORWARD, position)
        return lambda kind: meter.mark(kind, position) if meter is self._marking else None

    def _stop_marking(self) -> None:
        """The present step cannot be measured."""
        if self._marking is not None:
            self._marking.cancel()
            self._marking, self._is_clean = None, False

    def _drop(self) -> None:
        """All calls have lost their autograd nodes: the step begins anew with the next call.

        A profiler must not stay active meanwhile. While some are left, as where a model computes what the loss does not
        use, the step is measured: its peak, not call by call.
        """
        self._stop_marking()
        self._has_dropped = True

    def _judge(self, sequence: CallSequence, measured: int, profile: StepProfile | None) -> None:
        """Decide by a measured step which choice the sequence runs next."""
        before, budget = sequence.choice, self.budget_bytes
        with self.watch.planning():
            settle_further(sequence, self.chooser, MeasuredStep(self.instances_of(sequence), budget, measured, profile))
        logger.info(
            "compiled step: peak %s measured, %s predicted, within %s%s",
            format_bytes(measured),
            format_bytes(before.peak_bytes),
            format_bytes(budget),
            "" if sequence.choice.is_like(before) else "; choosing again",
        )

    def _warn_of_replayed_indices(self, sequence: CallSequence) -> None:
        """Warn once, when a choice that computes indices again is kept."""
        is_kept = sequence.choice.replays_indices and (sequence.is_settled or self._meter is None)
        if not is_kept or sequence.over is not None or self._has_warned_of_indices:
            return
        self._has_warned_of_indices = True
        pairs = zip(self.instances_of(sequence), sequence.choice.variants, strict=True)
        missing = [graph.variants[-1].saved_bytes - each.saved_bytes for graph, each in pairs if each.replays_indices]
        warnings.warn(
            f"within {format_bytes(self.budget_bytes)} there is no room for the indices (topk, sort) of "
            f"{count_of(len(missing), 'compiled call')}, so they are computed again in the backward, as torch's "
            "checkpoint does. Where scores are equal but for rounding, a token may then be routed differently. Raise "
            f"the budget by {format_bytes(sum(missing))} to save them.",
            stacklevel=2,
        )

    def _refuse(self, over: OverBudget) -> None:
        """Raise, or warn once that the budget does not hold. The error is made anew: a traceback keeps its frames."""
        whole = ", or compile the model as one graph (regional=False), which need not keep the input of every block"
        given, needed = format_apart(self.budget_bytes, over.floor_bytes)
        message = (
            f"budget {given} is below the {needed} ({over.how}) that "
            f"this compiled step needs at least. Raise the budget{', ' if self.num_blocks > 1 else ' or '}make the "
            f"batch smaller{whole if self.num_blocks > 1 else ''}."
        )
        if self.on_over == "raise" and (self._ranks.is_alone or self._ranks.is_open):
            self.release()
            raise InfeasibleBudgetError(message, over.floor_bytes)
        if not self._has_warned:
            self._has_warned = True
            why = "on_over='warn'" if self.on_over == "warn" else "other ranks, which have settled, cannot be told"
            warnings.warn(f"{message} The step goes on with that peak ({why}).", stacklevel=2)

    # For people.

    @property
    def _device(self) -> torch.device:
        return next((graph.device for graph in self.graphs), torch.device("cpu"))

    @property
    def budget_bytes(self) -> int:
        own = parse_bytes(self.budget, total_bytes=present_device(self._device).memory_bytes or None)
        return own if self._common_budget_bytes is None else min(own, self._common_budget_bytes)

    def modules_of(self, sequence: CallSequence) -> list[tuple[str, str]]:
        """Path and class of the module that each call runs."""
        modules = [self._called_modules.get(position, ("", "")) for position in range(len(sequence.numbers))]
        names = list(dict.fromkeys(sequence.numbers))
        for position, number in enumerate(sequence.numbers):
            if not modules[position][0]:  # a part of the model between graph breaks
                modules[position] = f"graph {names.index(number)}", "Graph"
        return modules

    def instances_of(self, sequence: CallSequence) -> list[PlannedGraph]:
        """The graph of each call."""
        return [self._graphs[number] for number in sequence.numbers]

    def slowdown_of(self, sequence: CallSequence) -> float | None:
        """Measured seconds of a step over those with torch's own choices in all calls, as a share; None if unknown.

        Known on an accelerator when every graph of the step has run torch's choice in some call.
        """
        step_s = sequence.seconds_of(sequence.choice)
        if step_s is None:
            return None
        plain_s = step_s
        for graph, variant in zip(self.instances_of(sequence), sequence.choice.variants, strict=True):
            own_s, fastest_s = (self.chooser.seconds_of(graph, each) for each in (variant, graph.variants[0]))
            if own_s is None or fastest_s is None:
                return None
            plain_s -= own_s - fastest_s
        return step_s / plain_s - 1 if plain_s > 0 else None

    def store_stats(self) -> StoreStats | None:
        """Bytes moved to host memory and held there; None if no call ever moved any."""
        return None if self._store is None else self._store.stats()


def count_of(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")
