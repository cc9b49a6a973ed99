"""Records the calls of compiled graphs that make up a step, and finds the earlier step that it repeats.

Which variant a call runs depends on its position in the step, but a step is known only when it has ended. So each
call is matched with earlier steps: `StepCalls` records the calls of the present step and finds where it ends;
`KnownSequences` returns the earlier sequence of calls that the present one repeats so far. A `CallSequence` holds the
variants chosen for its calls and what was measured with them; `settling` chooses them.

- **Where a step ends.** A step is all calls until a backward begins, of one forward or of several. A forward that
  failed, or whose loss was deleted, does not count; neither do calls on which the loss does not depend.
- **Steps that begin alike.** Where layers are skipped at random, several sequences begin with the same calls, and
  which one the step will repeat is not known yet. The calls then run the variants of the longest of these sequences,
  which save least.

Cost: host time in every call of a compiled block. While all steps make the same calls and their choice is settled,
only the first and the last call of a step get a hook, and each of the others takes one comparison.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from torch import Tensor

from lowtide.compiled.step_profile import BACKWARD, BACKWARD_END, FORWARD_END, Mark
from lowtide.compiled.variant_choice import VariantChoice
from lowtide.units import format_apart

# Steps after which a sequence that did not come again no longer decides what shorter ones run. A step that came once
# makes others slower for that long; with a smaller number rare long steps exceed the budget.
_MOST_STEPS_AGO = 200
# Measured steps over the budget without a decision, after which smaller steps decide too. With fewer, the floor that an
# error names is that of a smaller step, such as the first backward of several; with more, batches of ever new lengths
# exceed the budget for longer before they are refused.
_MOST_OVER = 8
_MOST_SEQUENCES = 16  # remembered; the least recently used ones are planned again when they come back


class _Call:
    """A call of a step: the number of its graph, what it runs, and a reference to its hook while that is alive."""

    __slots__ = ("has_backward", "hook", "number", "run")

    def __init__(self, number: int, run: Any) -> None:
        self.number, self.run, self.has_backward = number, run, False
        self.hook: weakref.ref[_CallHook] | None = None


class _CallHook:
    """Hook before and after the autograd nodes of one call. It is freed with them, which tells when they are gone.

    It records the end of the call as well: compiled blocks run often, and every further object takes host time.
    """

    __slots__ = ("__weakref__", "_call", "_mark", "_num_left", "_step")

    def __init__(self, step: StepCalls, call: _Call, mark: Mark | None) -> None:
        self._step, self._call, self._mark, self._num_left = step, call, mark, 0

    def end(self, outputs: Any) -> None:
        """The graph has run, and has returned these outputs."""
        mark = self._mark
        if mark is not None:
            mark(FORWARD_END)
        nodes = {each.grad_fn for each in outputs if isinstance(each, Tensor) and each.grad_fn is not None}
        if not nodes:  # nothing that a loss could depend on
            if mark is not None:
                self._step.drop(None)
            return
        self._num_left = len(nodes)
        for node in nodes:
            node.register_prehook(self)
            if mark is not None:
                node.register_hook(self._after)
        self._step.add(self._call, self, is_measured=mark is not None)

    def __call__(self, gradients: Any) -> None:
        self._call.has_backward = True
        self._step.end()
        if self._mark is not None:
            self._mark(BACKWARD)

    def _after(self, *gradients: Any) -> None:
        self._num_left -= 1
        if self._mark is not None and self._num_left == 0:
            self._mark(BACKWARD_END)


def _is_alive(call: _Call) -> bool:
    return call.hook is not None and call.hook() is not None


class StepCalls:
    """The calls of one step. It `is_over` when a backward through one of them begins.

    A call whose autograd nodes were freed before that is not planned for, as nothing of the loss depends on it. When
    all were freed, the step begins anew; `on_dropped` is called then if the last one was measured.

    Lists grow call by call, and are made anew only after a call has lost its nodes.
    """

    def __init__(self, on_dropped: Callable[[], None]) -> None:
        self.is_over = False
        self._on_dropped = on_dropped
        self._calls: list[_Call] = []  # all of them
        self._alive: list[_Call] = []  # those that have ended, and whose nodes are alive, or were at the backward
        self._dead: list[object] = []  # hooks of calls that have lost their nodes since the last look

    def _look(self) -> None:
        if self.is_over:
            return
        if self._dead:
            self._dead.clear()
            self._alive = list(filter(_is_alive, self._alive))
        if not self._alive:
            self._calls = []

    @property
    def num_alive(self) -> int:
        """The number of calls whose autograd nodes are alive, or were when the backward began."""
        self._look()
        return len(self._alive)

    @property
    def num_begun(self) -> int:
        """The number of all calls, as of the last look at `num_alive` or `numbers`."""
        return len(self._calls)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Graph numbers of the calls whose autograd nodes are alive, or were when the backward began, in order."""
        self._look()
        return tuple([call.number for call in self._alive])

    @property
    def begun(self) -> tuple[int, ...]:
        """Graph numbers of all calls, in order, as of the last look at `num_alive` or `numbers`."""
        return tuple([call.number for call in self._calls])

    @property
    def positions(self) -> tuple[int | None, ...]:
        """For each of `begun` its position in `numbers`; None if it is not there."""
        positions = {id(call): position for position, call in enumerate(self._alive)}
        return tuple([positions.get(id(call)) for call in self._calls])

    @property
    def runs(self) -> tuple[Any, ...]:
        """What the calls of `numbers` have run."""
        return tuple([call.run for call in self._alive])

    def begin(self, number: int, run: Any, mark: Mark | None = None) -> Callable[[Any], None]:
        """Record a call. Call the returned function with the graph's outputs when it has run.

        `run` says what it runs, for `runs`. `mark` is called when the forward has ended, when the backward of the call
        begins, perhaps several times, and when it ends.
        """
        call = _Call(number, run)
        self._calls.append(call)
        return _CallHook(self, call, mark).end

    def next_like(self, begun: Sequence[int], number: int) -> int | None:
        """The position of the call of graph `number` that begins now, if it is the next of `begun`; else None.

        None for the first and the last call, which need hooks, and if the first call's autograd nodes were freed. Of
        the calls before, only their count is compared. Record the call by `repeat`.
        """
        calls = self._calls
        position = len(calls)
        if self.is_over or self._dead or not 0 < position < len(begun) - 1 or begun[position] != number:
            return None
        return position if self._alive and self._alive[0] is calls[0] else None

    def repeat(self, number: int, run: Any) -> None:
        """Record a call without a hook: it counts as alive as long as the first one is."""
        call = _Call(number, run)
        call.hook = self._calls[0].hook
        self._calls.append(call)
        self._alive.append(call)

    def add(self, call: _Call, hook: _CallHook, *, is_measured: bool) -> None:
        """A call has ended, and its autograd nodes hold its hook."""
        call.hook = weakref.ref(hook, self.drop if is_measured else self._dead.append)
        self._alive.append(call)

    def drop(self, hook: object) -> None:
        """A measured call has lost its autograd nodes, or has made none."""
        self._dead.append(hook)
        if not self.is_over and not any(map(_is_alive, self._alive)):
            self._on_dropped()

    def end(self) -> None:
        """The backward of a call begins. The first one frees the autograd nodes of the step."""
        if not self.is_over:
            self._look()
            self.is_over = True

    @property
    def may_have_failed(self) -> bool:
        """Whether the first calls had no backward so far, once the step is over.

        They may be of a forward that failed and whose error is still referenced, as in notebooks. Or their backward
        comes in a later step, the loss does not depend on them although they are alive, or the backward has failed.
        """
        return bool(self._alive) and not self._alive[0].has_backward


@dataclass(frozen=True)
class OverBudget:
    """The smallest peak of a step that does not fit its budget, and how it is known: "predicted" or "measured"."""

    floor_bytes: int
    how: str

    def message(self, budget_bytes: int, num_blocks: int, has_blocks: bool = False) -> str:
        """The text of the error: what the step needs, and what to do.

        It suggests one graph for a model that is compiled in blocks, and blocks for one graph, if the model has some.
        """
        given, needed = format_apart(budget_bytes, self.floor_bytes)
        smaller = "Raise the budget or make the batch smaller."
        if num_blocks > 1:
            smaller = (
                "Raise the budget, make the batch smaller, or compile the model as one graph (regional=False), which "
                "need not keep the input of every block."
            )
        elif has_blocks:
            smaller = (
                "Raise the budget, make the batch smaller, or compile the model's blocks one by one (regional=True), "
                "which recomputes each of them alone."
            )
        return f"budget {given} is below the {needed} ({self.how}) that this compiled step needs at least. {smaller}"


@dataclass(frozen=True)
class StepSize:
    """Bytes of gradients that are there when a step's first call begins, and of inputs whose shapes are symbolic."""

    gradient_bytes: int = 0
    input_bytes: int = 0

    def is_within(self, other: StepSize) -> bool:
        return self.gradient_bytes <= other.gradient_bytes and self.input_bytes <= other.input_bytes


@dataclass
class CallSequence:
    """The graph numbers of a step's calls, in order, and the variants chosen for them.

    Calls on which the loss does not depend are in `begun` only. `over` says that no choice fits the budget. `measured`
    lists the choices that ran and their peaks, for steps of the present `size`. `profiled` and `turns` list their
    seconds on an accelerator: of steps that were measured call by call, which takes the host time, and of steps that
    were only timed. When corrections have ended, `trials` are run; `is_settled` ends both. `held_sizes` are those of
    steps at which the choice was measured to hold.
    """

    numbers: tuple[int, ...]
    choice: VariantChoice
    begun: tuple[int, ...] = ()  # graph numbers of all calls
    positions: tuple[int | None, ...] = ()  # of these in `numbers`, or None
    last_step: int = 0  # number of the last step that made these calls
    over: OverBudget | None = None
    is_settled: bool = False
    num_unmeasured: int = 0
    num_over: int = 0  # measured steps over the budget that led to no decision, since it last settled
    measured: list[tuple[VariantChoice, int]] = field(default_factory=list)
    profiled: list[tuple[VariantChoice, float]] = field(default_factory=list)
    turns: list[tuple[VariantChoice, float]] = field(default_factory=list)
    trials: list[VariantChoice] | None = None  # choices still to be timed; None before corrections have ended
    size: StepSize | None = None
    held_sizes: list[StepSize] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begun = self.begun or self.numbers
        self.positions = self.positions or tuple(range(len(self.numbers)))

    @property
    def graph_indices(self) -> list[int]:
        """The graph of each call, numbered from 0 in the order of their first calls."""
        indices = {number: index for index, number in enumerate(dict.fromkeys(self.numbers))}
        return [indices[number] for number in self.numbers]

    def holds(self, size: StepSize) -> bool:
        """Whether the present choice was measured to hold for steps of this size."""
        return any(size.is_within(each) for each in self.held_sizes)

    def expect(self, size: StepSize, budget_bytes: int) -> None:
        """Measure anew from here on if a step of this size is larger than those measured.

        Then measurements over `budget_bytes` count as steps without a decision (`num_over`).
        """
        if self.holds(size):
            return
        is_larger = self.size is not None and self.size.is_within(size)
        if self.is_settled or self.size is None or (is_larger and size != self.size):
            over = [each for each in self.measured if each[1] > budget_bytes]
            self.num_over += len(over)
            self.measured = over if is_larger and self.is_irregular else []
            self.size, self.is_settled, self.trials, self.num_unmeasured = size, False, None, 0
            self.profiled, self.turns = [], []

    @property
    def is_irregular(self) -> bool:
        """Whether steps of one size do not come often enough to measure all choices at that size.

        A choice that was over the budget in a smaller step then counts as measured: in a larger one it is over it too.
        """
        return self.num_over >= _MOST_OVER

    def is_conclusive(self, size: StepSize, *, is_over: bool) -> bool:
        """Whether a measured step of this size says how much the present choice takes."""
        return size == self.size or (
            is_over and self.is_irregular and self.size is not None and size.is_within(self.size)
        )

    def settle(self) -> None:
        """Keep the present choice for steps up to the present size."""
        assert self.size is not None
        size, self.is_settled, self.num_over = self.size, True, 0
        self.held_sizes = [each for each in self.held_sizes if not each.is_within(size)] + [size]

    @property
    def peaks(self) -> list[int]:
        """Measured peaks of the present choice, in bytes."""
        return self.peaks_of(self.choice)

    def peaks_of(self, choice: VariantChoice) -> list[int]:
        """Measured peaks of a choice, in bytes."""
        return [peak for each, peak in self.measured if each.is_like(choice)]

    @property
    def is_timed_only(self) -> bool:
        """Whether the next step is timed, and not measured call by call: its choice was measured before."""
        return self.trials is not None and bool(self.peaks)

    def has_run(self, choice: VariantChoice) -> bool:
        """Whether a measured step of the present size ran a choice."""
        return any(each.is_like(choice) for each, _ in self.measured)

    def turns_of(self, choice: VariantChoice) -> list[float]:
        """Seconds of the steps under a choice that were only timed."""
        return [seconds for each, seconds in self.turns if each.is_like(choice)]

    def seconds_of(self, choice: VariantChoice) -> float | None:
        """Median measured seconds of forward and backward under a choice; None if it was not timed."""
        found = self.turns_of(choice) or [seconds for each, seconds in self.profiled if each.is_like(choice)]
        return median(found) if found else None

    def lead(self, one: VariantChoice, other: VariantChoice) -> int:
        """In how many more turns `one` was faster than `other` than it was slower."""
        pairs = zip(self.turns_of(one), self.turns_of(other), strict=False)
        return sum((ours < theirs) - (ours > theirs) for ours, theirs in pairs)


class KnownSequences:
    """The sequences that steps have made, and `current`: that of the last step, or of this one as far as it has run."""

    def __init__(self) -> None:
        self.current: CallSequence | None = None
        self.by_numbers: dict[tuple[int, ...], CallSequence] = {}  # the most recently used last
        self._last_calls: StepCalls | None = None  # of the step before
        self._num_steps = 0
        self._only: CallSequence | None = None  # the sequence, if all steps so far made the same calls
        self._repeats_only = False  # whether the present step does so far

    def find(self, calls: StepCalls, number: int) -> tuple[CallSequence | None, int | None]:
        """The known sequence that begins with the calls of this step and one of graph `number`; that one's position.

        The sequence is None if there is none; the position is None if the loss will not use the call. Of several the
        longest.
        """
        num_begun, sequence = calls.num_begun, self._only
        if sequence is not None and (self._repeats_only or not num_begun):
            self._repeats_only = num_begun < len(sequence.begun) and sequence.begun[num_begun] == number
            if self._repeats_only:
                self.current = sequence
                return sequence, sequence.positions[num_begun]
        alive, begun = (*calls.numbers, number), (*calls.begun, number)
        known = [*self.by_numbers.values(), *filter(None, [self.current])]
        known.sort(key=lambda each: (len(each.numbers), each is self.current), reverse=True)
        for sequence in known:
            if sequence.begun[: len(begun)] == begun:
                self.current = sequence
                return sequence, sequence.positions[len(begun) - 1]
        for sequence in known:
            if sequence.numbers[: len(alive)] == alive:
                self.current = sequence
                return sequence, len(alive) - 1
        return None, len(alive) - 1

    def repeated(self, calls: StepCalls) -> CallSequence | None:
        """The sequence that all steps have made, if this one has made the same calls and the loss uses all of them."""
        only, num_calls = self._only, calls.num_alive
        if only is None or not self._repeats_only:
            return None
        is_same = num_calls == calls.num_begun == len(only.numbers) == len(only.begun)
        return only if is_same else None

    def longer_than(self, calls: StepCalls) -> CallSequence | None:
        """The longest known sequence whose choice begins with what the calls of a step have run; None without one."""
        numbers, runs = calls.numbers, calls.runs
        num = len(numbers)
        known = [each for each in self.by_numbers.values() if len(each.numbers) > num and each.numbers[:num] == numbers]
        known = [each for each in known if each.choice.runs[:num] == runs]
        return max(known, key=lambda each: len(each.numbers), default=None)

    def keep(self, sequence: CallSequence) -> None:
        """Remember the sequence of a step that has ended, as the most recently used one."""
        self._num_steps += 1
        sequence.last_step, self.current = self._num_steps, sequence
        self.by_numbers.pop(sequence.numbers, None)
        self.by_numbers[sequence.numbers] = sequence
        self._only = sequence if len(self.by_numbers) == 1 else None

    def forget_failed(self, calls: StepCalls) -> None:
        """Forget the sequence of the step before the one that has ended if it began with calls of a failed forward.

        These have had no backward by now either, and the step that has ended made other calls.
        """
        before, self._last_calls = self._last_calls, calls
        if before is not None and before.may_have_failed and before.numbers != calls.numbers:
            if self.by_numbers.pop(before.numbers, None) is self.current:
                self.current = None
            self._only = None

    def forget(self, graphs: Container[int]) -> None:
        """Forget sequences of other graphs than these, which Dynamo has dropped, the oldest ones, and rare ones.

        A long sequence that has not come for a while is forgotten with the shorter ones that ran what is chosen for it:
        those are planned and measured anew.
        """
        self._only = None
        alive = [each for each in self.by_numbers.values() if all(number in graphs for number in each.numbers)]
        self.by_numbers = {each.numbers: each for each in alive[-_MOST_SEQUENCES:]}
        for numbers, sequence in list(self.by_numbers.items()):
            shorter = [each for each in self.by_numbers if len(each) < len(numbers) and numbers[: len(each)] == each]
            if shorter and self._num_steps - sequence.last_step >= _MOST_STEPS_AGO:
                for each in (*shorter, numbers):
                    self.by_numbers.pop(each, None)
                self.current = None
