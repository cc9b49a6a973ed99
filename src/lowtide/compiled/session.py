"""The compiled engine's state for one model: its graphs, the variant that each call runs, and the measured peak.

Dynamo compiles a model into one or more graphs; equal blocks share one graph, which a step calls once per block. All
graphs of a model have to stay within one budget together, so a `Session` plans them together: every `PlannedGraph`
calls `first_variant` when it is compiled and `next_run` whenever it runs, and gets back which variant to run. The
session is created by `lowtide.compile` or, with `torch.compile(backend="lowtide")`, by the backend.

In the first step the session assumes that there are as many calls as the model has blocks. From then on it knows the
order of calls (`call_sequences`), and plans for that. The peak of a step in which nothing was compiled is measured,
call by call (`step_profile`), and by what was measured the next choice is made, alike on all ranks (`settling`).

A step ends when its backward begins. The session acts on that in the next forward (`_end_step`). Once all steps have
made the same calls and their choice is settled, there is nothing more to decide, and `_end_step` returns at once.
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
from lowtide.compiled.call_sequences import CallSequence, KnownSequences, OverBudget, StepCalls, StepSize
from lowtide.compiled.planned_graph import BlockOffload, PlannedGraph
from lowtide.compiled.settling import SessionRanks, StepReport, name_of_calls, settle_further
from lowtide.compiled.step_profile import AllocatorMeter, CompileWatch, ProfilerMeter, StepMeasurement, StepMeter
from lowtide.compiled.variant_choice import VariantChoice, VariantChooser, replayed_indices_warning
from lowtide.errors import InfeasibleBudgetError
from lowtide.replay.arguments import tensors_in
from lowtide.replay.object_state import reachable
from lowtide.solvers.shared_budget import Variant
from lowtide.store.activation_store import ActivationStore
from lowtide.store.offload import end_of_forward
from lowtide.tracing.devices import present_device
from lowtide.units import check_bytes, counted, format_bytes, parse_bytes

logger = logging.getLogger("lowtide")

# Whether peaks on the CPU are measured in the first steps, under torch.profiler. Tests without kernels switch it off.
MEASURES_CPU = True

_NO_CONTEXT = contextlib.nullcontext()
_REGISTERED = ("_parameters", "_buffers", "_modules")  # attributes of modules


def tensor_bytes(*tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of memory that tensors take: what several share counts once, and of a large storage only their parts."""
    sizes: dict[int, tuple[int, int]] = {}  # by storage: its own bytes, and those of the tensors in it
    for each in {id(each): each for each in itertools.chain(*tensors)}.values():
        for part in () if nn.parameter.is_lazy(each) else _compat.parts_of(each):
            storage = _compat.storage_id(part)
            sizes[storage] = part.untyped_storage().nbytes(), sizes.get(storage, (0, 0))[1] + part.nbytes
    return sum(map(min, sizes.values()))


def attribute_bytes(model: nn.Module, *known: Iterable[torch.Tensor]) -> int:
    """Bytes that attributes of modules hold on the CPU, in containers too, beside the memory of `known` tensors."""
    attributes = [
        {name: value for name, value in vars(module).items() if name not in _REGISTERED} for module in model.modules()
    ]
    on_cpu = [each for each in reachable(attributes).tensors if each.device.type == "cpu"]
    tensors = list(itertools.chain(*known))
    return tensor_bytes(tensors, on_cpu) - tensor_bytes(tensors)


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
        meter_of: Callable[[torch.device], StepMeter | None] | None = None,
    ) -> None:
        check_bytes(budget)  # now, not in the first forward
        if on_over not in ("raise", "warn"):
            raise ValueError(f"on_over is 'raise' or 'warn', not {on_over!r:.80}")
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
        self.has_called_module = False
        self.before_first_call: Callable[[], None] = lambda: None  # of a module
        self.called_modules: dict[int, tuple[str, str]] = {}  # likewise of the calls of the last steps, by position
        self.store: ActivationStore | None = None  # of what calls move to host memory, if any ever did
        self.unplanned: str | None = None  # the warning that some code runs without the budget
        self.model: weakref.ref[nn.Module] | None = None  # if known, for the bytes of its gradients
        # Dynamo owns the graphs and drops them when their code is evicted: only live graphs are planned.
        self._graphs: weakref.WeakValueDictionary[int, PlannedGraph] = weakref.WeakValueDictionary()
        self._seen: dict[int, weakref.ref[nn.Parameter]] = {}  # by id; without those that are gone
        self.sequences = KnownSequences()
        self._measurement = StepMeasurement()
        self._calls = StepCalls(self._measurement.drop)  # of the present step, or of one that is over
        self._hooked_calls = StepCalls(lambda: None)  # likewise of calls inside of saved-tensor hooks
        self._has_planned_call = False  # since the last step with such calls began
        self._routine: CallSequence | None = None  # the sequence of all steps, while nothing is left to decide
        self._size = StepSize()  # of the present step, as far as it has run
        self._measured_anew: list[tuple[Any, ...]] = []  # what was measured without the cached blocks of earlier steps
        self.breaks: str | None = None  # which code runs eagerly between graphs of one module
        self.has_blocks = False  # whether a model that is one graph could be compiled block by block
        self.bucket_bytes = 0  # of the model's `DistributedDataParallel`, where there is one
        self._beginning: tuple[nn.Module, Any] | None = None  # the model and its inputs, where a forward of it begins
        self._meter_of = meter_of or functools.cache(self._meter_on)
        self._ranks = SessionRanks()
        self._warned: set[str] = set()

    # Called by the model's forward hook.

    def begin_forward(self, args: Any, kwargs: Any) -> bool:
        """A training forward of the model begins. Returns whether it is measured from here on.

        On the CPU it is, so that what runs before the first compiled call is a part of the step. An accelerator's
        allocator sees all anyway.
        """
        if not self.enabled or not self._calls.is_over or _compat.is_replayed():
            return False
        if self._routine is not None and self.sequences.repeated(self._calls) is self._routine:
            return False
        meter, model = self._meter, None if self.model is None else self.model()
        if meter is None or meter.sees_all or model is None:
            return False
        self._beginning = model, (args, kwargs)
        try:
            self._end_step()
        finally:
            self._beginning = None
        return self._measurement.meter is not None

    def end_forward(self) -> None:
        """A forward that is measured has returned or raised."""
        if not self._calls.num_begun:
            self._measurement.cancel()

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
        self.sequences.current = self._planned((*called, *[graph.number] * left))
        return self.sequences.current.choice.variants[len(called)]

    def repeated_variant(self, graph: PlannedGraph) -> Variant | None:
        """What a call runs that repeats those of settled steps, in the middle of them; None for any other call."""
        sequence = self._routine
        position = None if sequence is None else self._calls.next_like(sequence.begun, graph.number)
        if sequence is None or position is None or _compat.is_replayed():
            return None
        run = sequence.choice.runs[position]
        self._calls.repeat(graph.number, run)
        return run[0]

    def next_run(self, graph: PlannedGraph, input_bytes: int = 0) -> GraphRun:
        """How to run the call of `graph` that begins now; `input_bytes` are those of inputs with symbolic shapes."""
        if graph.number not in self._graphs:  # compiled for another model
            with self.watch.planning():
                self.first_variant(graph)
        if not self.enabled:
            return GraphRun(graph.variants[0])
        if _compat.is_replayed():
            return self._hooked_run(graph)
        self._has_planned_call = True
        if self._calls.is_over:
            self._end_step()
        if not self._calls.num_alive:
            if self._measurement.was_dropped and self.sequences.current is not None:
                self._watch_next(self.sequences.current)
            self._size = StepSize(self._gradient_bytes())
        if input_bytes:
            self._size = replace(self._size, input_bytes=self._size.input_bytes + input_bytes)
        sequence, position = self.sequences.find(self._calls, graph.number)
        mark = None
        if position is not None:
            self.called_modules[position] = self.calling
            if self._measurement.meter is not None:
                is_timed_only = position == 0 and sequence is not None and sequence.is_timed_only
                mark = self._measurement.marker(position, self.calling, is_timed_only)
        if sequence is None or position is None:
            # An unknown order of calls, or one that the loss does not use: the smallest variant.
            variant = graph.variants[-1]
            return GraphRun(variant, _NO_CONTEXT, self._calls.begin(graph.number, (variant, ()), mark))
        over = self._ranks.over or sequence.over
        if over is not None and not (self._ranks.over is None and self._ranks.is_waiting):
            self._refuse(over)  # if ranks are still to be told, they raise together in the next step
        choice = sequence.choice
        variant, moved = run = choice.runs[position]
        end = self._calls.begin(graph.number, run, mark)
        if not choice.moves_any:
            return GraphRun(variant, _NO_CONTEXT, end)
        store, is_last = self._store_for(choice), position == len(choice.variants) - 1

        def end_all(outputs: Any) -> None:
            end(outputs)
            if is_last:
                end_of_forward(store, (each for each in outputs if isinstance(each, torch.Tensor)))

        return GraphRun(variant, BlockOffload(store, moved) if moved else _NO_CONTEXT, end_all)

    def _hooked_run(self, graph: PlannedGraph) -> GraphRun:
        """How to run a call inside of saved-tensor hooks, such as a checkpoint's, or of a backward: as torch chooses.

        A checkpoint around the block drops its saved tensors, and compares those of the forward with those of the
        replay: both must run the same variant. Warns once if the other calls of a step did so too.
        """
        is_next_step = self._hooked_calls.is_over
        if not self._has_planned_call and (is_next_step or _compat.is_in_backward()):
            self.warn_unplanned(
                "all compiled calls of a step ran inside of saved-tensor hooks: of a checkpoint around them "
                "(gradient checkpointing), of save_on_cpu or of lowtide.offload. These decide what is held until the "
                "backward, so calls save what torch's own partitioner chooses: the memory budget does not apply. "
                "Switch the hooks off, such as by model.gradient_checkpointing_disable()"
            )
        if is_next_step:
            self._hooked_calls, self._has_planned_call = StepCalls(lambda: None), False
        return GraphRun(graph.variants[0], _NO_CONTEXT, self._hooked_calls.begin(graph.number, None))

    def _store_for(self, choice: VariantChoice) -> ActivationStore:
        """The store that all sequences share, so that pinned host memory is allocated and counted once."""
        if self.store is None:
            self.store = ActivationStore(host=self.chooser.host_bytes)
        self.store.allow_in_flight(choice.in_flight_bytes)
        return self.store

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Context manager around code that compiles, which allocates memory that the step does not need."""
        self._routine = None
        self._measurement.cancel()
        with self.watch.compiling():
            yield
        self._measurement.cancel()

    def enable(self, enabled: bool) -> None:
        """Switch the plan on or off. The current step is not measured."""
        self.enabled, self._routine = enabled, None
        self._measurement.cancel()

    # Parameters that graphs run with.

    def see(self, parameters: list[nn.Parameter]) -> None:
        """Remember the parameters that a graph runs with, for `has_run_with` and for the bytes of their gradients."""
        seen = self._seen
        for each in parameters:
            if id(each) not in seen:
                break
        else:
            return
        for each in parameters:  # taken out when it is freed: another one may get its id
            seen[id(each)] = weakref.ref(each, functools.partial(seen.pop, id(each)))
        alive = (reference() for reference in list(seen.values()))
        self.chooser.seen_bytes = sum(_compat.local_bytes(each) for each in alive if each is not None)

    def has_run_with(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether one of these parameters was ever an input of a graph."""
        return any(id(each) in self._seen for each in parameters)

    def _gradients(self, model: nn.Module | None = None) -> list[torch.Tensor]:
        """The gradients of a model's parameters, or of all that graphs have seen."""
        known = [each() for each in list(self._seen.values())] if model is None else model.parameters()
        gradients = [each.grad for each in known if each is not None]
        return [each for each in gradients if each is not None]

    def _gradient_bytes(self) -> int:
        """Bytes of the gradients of all parameters that graphs have seen."""
        return sum(map(_compat.local_bytes, self._gradients()))

    # Between steps.

    def _end_step(self) -> None:
        """Once the last step's backward has begun: record its calls, and decide by its peak what it runs next."""
        if not self._calls.is_over:
            return
        self._routine = None
        self._ranks.find(None if self.model is None else self.model())
        calls, self._calls = self._calls, StepCalls(self._measurement.drop)
        self.sequences.forget_failed(calls)
        sequences, numbers, repeated = self.sequences, calls.numbers, self.sequences.repeated(calls)
        if repeated is not None and self._is_routine(repeated):
            sequences.keep(repeated)
            self._routine = None if repeated.choice.moves_any else repeated
            return
        sequences.forget(self._graphs)
        if not numbers or not self._is_alive(numbers):
            sequences.current = None
        elif sequences.current is None or sequences.current.numbers != numbers:
            sequences.current = sequences.by_numbers.get(numbers) or self._planned(numbers)
        sequence = sequences.current
        is_new = numbers not in sequences.by_numbers
        if sequence is None or sequence.choice.runs != calls.runs or (is_new and calls.may_have_failed):
            # A step that began like another one has run some of its variants: it says nothing about the present choice.
            self._settle_longer(calls)
            self._measurement.cancel()
        own = self._report()
        if sequence is not None and own.is_measured_anew:
            self._allocate_anew(sequence)
        step, is_agreed = self._ranks.exchanged(own)
        if sequence is None:
            return
        with self._ranks.together(is_agreed):
            if is_new:
                if is_agreed:
                    sequence.choice = self._chosen(self.instances_of(sequence))
                self._refuse_by_prediction(sequence)
            if is_agreed or not self._needs_agreement(numbers):
                with self.watch.planning():
                    settle_further(sequence, self.chooser, self.instances_of(sequence), step)
            elif not self._ranks.is_open:
                sequence.is_settled = True
        if is_agreed:
            sequence = self._ranks.of_first(sequence)
        sequence.begun, sequence.positions = calls.begun, calls.positions
        sequences.keep(sequence)
        self._watch_next(sequence, allocates_anew=own.is_measured_anew)
        self._warn_of_replayed_indices(sequence)
        self._warn_of_unseen_backward()

    def _settle_longer(self, calls: StepCalls) -> None:
        """Correct the sequence that a shorter step has begun, if that step was over the budget: the longer one is too.

        It may be long until the longer one comes again, and shorter ones are over the budget meanwhile.
        """
        longer, (peak_bytes, _) = self.sequences.longer_than(calls), self._measurement.result(self.budget_bytes)
        if longer is None or not self._ranks.is_alone or peak_bytes is None or peak_bytes <= self.budget_bytes:
            return
        if longer.is_settled:  # it held: more is in memory now, such as new blocks in place of some that were compiled
            self.sequences.by_numbers.pop(longer.numbers, None)
        elif self._is_alive(longer.numbers):
            at_least = max(peak_bytes, longer.choice.peak_bytes)
            step = StepReport(None, self.budget_bytes, self._size, peak_bytes=at_least)
            with self.watch.planning():
                settle_further(longer, self.chooser, self.instances_of(longer), step)

    def _is_routine(self, sequence: CallSequence) -> bool:
        """Whether a step of the only known sequence leaves nothing to decide."""
        is_decided = sequence.is_settled and sequence.over is None and self._ranks.over is None
        return is_decided and not self._ranks.is_waiting and sequence.holds(self._size)

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

    def _report(self) -> StepReport:
        """What this rank knows of the step that has ended."""
        sequence, known = self.sequences.current, self.sequences.by_numbers.values()
        is_known = sequence is not None and sequence.numbers in self.sequences.by_numbers
        peak_bytes, profile = self._measurement.result(self.budget_bytes)
        is_anew = sequence is not None and peak_bytes is not None and self._may_be_cached(sequence, peak_bytes)
        if is_anew:
            peak_bytes = profile = None
        calls = None
        if sequence is not None and not self._ranks.is_alone:
            calls = name_of_calls(sequence, self.instances_of(sequence))
        return StepReport(
            calls=calls,
            budget_bytes=self.budget_bytes,
            size=self._size,
            is_settled=is_known and (self._meter is None or all(each.is_settled for each in known)),
            peak_bytes=peak_bytes,
            profile=profile,
            is_measured_anew=is_anew,
            over=next((each.over for each in known if each.over is not None), None),
        )

    def _may_be_cached(self, sequence: CallSequence, peak_bytes: int) -> bool:
        """Whether a step was over the budget, perhaps only as its tensors got larger cached blocks of earlier steps."""
        requested_bytes = None if self._measurement.meter is None else self._measurement.meter.requested_bytes
        if requested_bytes is None or not requested_bytes <= self.budget_bytes < peak_bytes:
            return False
        return not sequence.is_settled and (sequence.numbers, sequence.choice.runs) not in self._measured_anew

    def _allocate_anew(self, sequence: CallSequence) -> None:
        """Free cached blocks, once for each choice. The next step allocates all anew, and the one after is measured."""
        known = (each for each in self._measured_anew if self._is_alive(each[0]))
        self._measured_anew = [*known, (sequence.numbers, sequence.choice.runs)]
        if self._measurement.meter is not None:
            self._measurement.meter.free_cached_blocks()

    def _watch_next(self, sequence: CallSequence, *, allocates_anew: bool = False) -> None:
        """Measure the next step, unless all sequences are settled or it allocates its memory anew."""
        is_settled = all(each.is_settled for each in self.sequences.by_numbers.values())
        is_measured = not is_settled and not allocates_anew and sequence.over is None
        self._measurement.begin(self._meter if is_measured else None)

    # Meters.

    @property
    def _meter(self) -> StepMeter | None:
        return self._meter_of(self._device)

    def _meter_on(self, device: torch.device) -> StepMeter | None:
        if device.type == "cuda":
            return AllocatorMeter(device)
        return ProfilerMeter(self._start_bytes) if MEASURES_CPU else None

    def _start_bytes(self) -> int:
        """Bytes on the CPU when a step begins."""
        assert self.sequences.current is not None
        gradients = self._gradients(None if self.model is None else self.model())
        gradient_bytes = sum(map(_compat.local_bytes, gradients))
        if self._beginning is None:
            return self.chooser.start_bytes(self.instances_of(self.sequences.current)) + gradient_bytes
        model, arguments = self._beginning
        registered = [*model.parameters(), *model.buffers()]
        self.chooser.model_bytes = tensor_bytes(registered) + self.bucket_bytes
        inputs: list[torch.Tensor] = []
        with contextlib.suppress(Exception):  # objects that refer to each other, or make values when asked for them
            inputs = list(tensors_in(arguments))
        kept_bytes = 0
        with contextlib.suppress(Exception):
            kept_bytes = attribute_bytes(model, registered, inputs, gradients)
        # Attributes that the first forward has read are among the constants of its trace.
        held = self.chooser.model_bytes + max(kept_bytes, self.chooser.constant_bytes)
        return held + self.chooser.state_bytes(model) + tensor_bytes(inputs) + gradient_bytes

    # Budgets that do not hold.

    def _refuse_by_prediction(self, sequence: CallSequence) -> None:
        """Without a meter, a predicted peak over the budget is an error."""
        if self._meter is None and not sequence.choice.is_within:
            sequence.over = OverBudget(sequence.choice.peak_bytes, "predicted")

    def _refuse(self, over: OverBudget) -> None:
        """Raise, or warn once that the budget does not hold. The error is made anew: a traceback keeps its frames."""
        message = over.message(self.budget_bytes, self.num_blocks, self.has_blocks)
        message += f" {self.breaks}" if self.breaks else ""
        if self.on_over == "raise" and (self._ranks.is_alone or self._ranks.is_open):
            self.release()
            raise InfeasibleBudgetError(message, over.floor_bytes)
        why = "on_over='warn'" if self.on_over == "warn" else "other ranks, which have settled, cannot be told"
        self._warn_once("budget", f"{message} The step goes on with that peak ({why}).")

    def warn_unplanned(self, message: str) -> None:
        """Warn, once per session, that code runs without the budget. The handle prints the message too."""
        if self.unplanned is None:
            self.unplanned = message
            warnings.warn(message, stacklevel=3)

    def note_breaks(self, module: tuple[str, str], num_graphs: int) -> None:
        """Log, once per session, that a module runs as several graphs. The error of a budget that fails says so too."""
        path, kind = module
        self.breaks = (
            f"{path or 'The model'} ({kind}) runs as {counted(num_graphs, 'compiled graph')} with Python code between "
            "them, which runs eagerly and saves whatever autograd saves. TORCH_LOGS=graph_breaks says where and why."
        )
        logger.warning("%s The memory of that code is measured, and graphs are planned around it.", self.breaks)

    def _warn_of_replayed_indices(self, sequence: CallSequence) -> None:
        """Warn once, when a choice that computes indices again is kept."""
        is_kept = sequence.choice.replays_indices and (sequence.is_settled or self._meter is None)
        if is_kept and sequence.over is None:
            instances = self.instances_of(sequence)
            self._warn_once("indices", replayed_indices_warning(instances, sequence.choice, self.budget_bytes))

    def _warn_of_unseen_backward(self) -> None:
        """Warn once, when a step ran a backward that its meter does not see."""
        if self._measurement.unseen_backward is None:
            return
        path, kind = self._measurement.unseen_backward
        self._warn_once(
            "backward",
            f"a backward ran through {path or 'the model'}{kind and f' ({kind})'} after the first backward of its step "
            "had returned. On the CPU only the first one is measured: the peak of such steps is predicted, as if they "
            f"had one, and may exceed the budget of {format_bytes(self.budget_bytes)}. Run one backward after each "
            "forward: add losses up, (first + second).backward(), or run the forward again for the second.",
        )

    def _warn_once(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(message, stacklevel=3)

    # Read by the handle.

    @property
    def graphs(self) -> list[PlannedGraph]:
        """The graphs that have a backward, in the order in which they were compiled."""
        return [self._graphs[number] for number in sorted(self._graphs)]

    @property
    def current(self) -> CallSequence | None:
        """The sequence of the last step; None before the first step, or when Dynamo has dropped its graphs."""
        sequence = self.sequences.current
        return sequence if sequence is not None and self._is_alive(sequence.numbers) else None

    def _is_alive(self, numbers: tuple[int, ...]) -> bool:
        return all(number in self._graphs for number in numbers)

    def instances_of(self, sequence: CallSequence) -> list[PlannedGraph]:
        """The graph of each call."""
        return [self._graphs[number] for number in sequence.numbers]

    @property
    def _device(self) -> torch.device:
        return next((graph.device for graph in self.graphs), torch.device("cpu"))

    @property
    def budget_bytes(self) -> int:
        """The budget, and on several ranks the smallest of theirs."""
        own = parse_bytes(self.budget, total_bytes=present_device(self._device).memory_bytes or None)
        return own if self._ranks.budget_bytes is None else min(own, self._ranks.budget_bytes)
