"""Which choice of variants a step runs next, by what was measured so far.

A `CallSequence` holds the calls of a step in order, the variants they run, and the steps that were measured with them;
`settle_further` sets its next choice after each of them.

- **Corrections.** Variants are chosen again with measured bytes in place of predictions, until a choice holds and none
  is predicted to be faster: six measured steps at most. If none holds by then, the choices that save least are tried.
- **Trials.** On an accelerator the choice that holds is then timed beside its alternatives, such as the one that also
  moves tensors to host memory, in turns: clocks drift. One that is over the budget, or clearly slower, is dropped. An
  alternative replaces the choice only if it was faster in clearly more turns than it was slower, so that alternatives
  never make a step slower. Single steps are off by a few per cent and some are disturbed, so turns go on while it is
  open which is faster. They cost little: they are steps of the training.
- **Larger steps.** A choice is known to hold for steps up to a certain `StepSize`. Gradients that are kept from one
  backward to the next (gradient accumulation) and longer batches in graphs with symbolic shapes make a step larger.
  When such a step comes, the sequence is measured again with steps of that size, and only those count: a choice that
  holds on the first part of an accumulated gradient may not hold on the second.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from statistics import median

from lowtide.compiled.planned_graph import PlannedGraph
from lowtide.compiled.step_profile import StepProfile
from lowtide.compiled.variant_choice import WORTH_A_COMPILE, VariantChoice, VariantChooser

# Measured steps per sequence before the best choice so far is kept. A larger number costs a compile per correction.
_MOST_CORRECTIONS = 6
# A candidate is faster if it was so in this many more turns than it was slower. With steps that vary by 1.5 %, of which
# one in ten is disturbed, candidates that were slower by 2 % won one simulated trial in 200; by medians of three steps
# 14 to 31 (`tests/compiled/test_settling.py` has this clock). A larger lead takes more turns.
_LEAD = 5
# A floor is named by this part of it higher than the smallest peak that was measured, so that it is accepted as a
# budget: on the CPU the peaks of one choice differ by a few small gradients from step to step, 0.1 % at most as seen.
_FLOOR_MARGIN = 512
_MOST_TURNS = 16  # after which the first of the candidates is kept, unless another is ahead
_MOST_TRIALS = 80  # measured steps in all, likewise
# A candidate whose fastest step is slower than the median of another's by this share is not timed further.
_CLEARLY_SLOWER = 0.05


@dataclass(frozen=True)
class OverBudget:
    """The smallest peak of a step that does not fit its budget, and how it is known: "predicted" or "measured"."""

    floor_bytes: int
    how: str


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

    Calls on which the loss does not depend lose their autograd nodes before the backward, and are in `begun` only.
    `over` says that no choice fits the budget. `measured` lists the choices that ran and their peaks, for steps of the
    present `size`. `profiled` and `turns` list their seconds on an accelerator: of steps that were measured call by
    call, which takes the host time, and of steps that were only timed. When corrections have ended, `trials` are run;
    `is_settled` ends both. `held_sizes` are those of steps at which the choice was measured to hold.
    """

    numbers: tuple[int, ...]
    choice: VariantChoice
    begun: tuple[int, ...] = ()  # graph numbers of all calls
    positions: tuple[int | None, ...] = ()  # of these in `numbers`, or None
    last_step: int = 0  # number of the last step that made these calls
    over: OverBudget | None = None
    is_settled: bool = False
    num_unmeasured: int = 0
    measured: list[tuple[VariantChoice, int]] = field(default_factory=list)
    profiled: list[tuple[VariantChoice, float]] = field(default_factory=list)
    turns: list[tuple[VariantChoice, float]] = field(default_factory=list)
    trials: list[VariantChoice] | None = None  # choices still to be timed; None before corrections have ended
    size: StepSize | None = None
    held_sizes: list[StepSize] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begun = self.begun or self.numbers
        self.positions = self.positions or tuple(range(len(self.numbers)))

    def expect(self, size: StepSize) -> None:
        """Measure anew from here on if a step of this size is larger than those measured."""
        if any(size.is_within(each) for each in self.held_sizes):
            return
        if self.is_settled or self.size is None or (size != self.size and self.size.is_within(size)):
            self.size, self.is_settled, self.trials, self.num_unmeasured = size, False, None, 0
            self.measured, self.profiled, self.turns = [], [], []

    def settle(self) -> None:
        """Keep the present choice for steps up to the present size."""
        assert self.size is not None
        size, self.is_settled = self.size, True
        self.held_sizes = [each for each in self.held_sizes if not each.is_within(size)] + [size]

    @property
    def peaks(self) -> list[int]:
        """Measured peaks of the present choice, in bytes."""
        return [peak for choice, peak in self.measured if choice.is_like(self.choice)]

    @property
    def is_timed_only(self) -> bool:
        """Whether the next step is timed, and not measured call by call: its choice was measured before."""
        return self.trials is not None and bool(self.peaks)

    def turns_of(self, choice: VariantChoice) -> list[float]:
        """Seconds of the steps under a choice that were only timed."""
        return [seconds for each, seconds in self.turns if each.is_like(choice)]

    def seconds_of(self, choice: VariantChoice) -> float | None:
        """Median measured seconds of forward and backward under a choice; None if it was not timed."""
        found = self.turns_of(choice) or [seconds for each, seconds in self.profiled if each.is_like(choice)]
        return median(found) if found else None


@dataclass(frozen=True)
class MeasuredStep:
    """A step that ran a choice of variants of `instances`: its peak, and its times if it was profiled."""

    instances: list[PlannedGraph]
    budget_bytes: int
    peak_bytes: int
    profile: StepProfile | None

    @property
    def is_over(self) -> bool:
        return self.peak_bytes > self.budget_bytes


def settle_further(sequence: CallSequence, chooser: VariantChooser, step: MeasuredStep) -> None:
    """Set the next choice of a sequence, or settle it, after a step that ran its present choice."""
    sequence.measured.append((sequence.choice, step.peak_bytes))
    if step.profile is not None and step.profile.seconds is not None:
        steps = sequence.turns if step.profile.is_timed_only else sequence.profiled
        steps.append((sequence.choice, step.profile.seconds))
    if sequence.trials is None:
        _correct(sequence, chooser, step)
    else:
        _try_next(sequence, chooser, step)


def _correct(sequence: CallSequence, chooser: VariantChooser, step: MeasuredStep) -> None:
    before = sequence.choice
    chooser.learn(step.instances, before, step.peak_bytes, step.profile, is_over=step.is_over)
    now = chooser.choose(step.instances, step.budget_bytes, is_measured=True)
    is_worth_it = before.extra_s - now.extra_s >= WORTH_A_COMPILE * sum(graph.step_s for graph in step.instances)
    is_worth_it |= before.replays_indices and not now.replays_indices
    if not step.is_over and (sequence.held_sizes or not is_worth_it):
        now = before  # a faster choice may not hold for the sizes before this one
    is_last = len(sequence.measured) >= _MOST_CORRECTIONS
    held = [choice for choice, peak in sequence.measured if peak <= step.budget_bytes]
    if not held and (is_last or _has_run(sequence, now)):
        others = chooser.last_resorts(step.instances)
        now = next((each for each in others if not _has_run(sequence, each)), before)
    sequence.choice = now
    if not _has_run(sequence, now) and not (is_last and held):
        return
    if not held:
        sequence.choice, floor = min(sequence.measured, key=lambda each: each[1])
        sequence.over, sequence.is_settled = OverBudget(floor + floor // _FLOOR_MARGIN, "measured"), True
        return
    sequence.choice = min(held, key=lambda choice: (choice.replays_indices, choice.extra_s))
    is_timed = sequence.seconds_of(sequence.choice) is not None and sequence.choice.extra_s > 0
    others = _alternatives(sequence, chooser, step) if is_timed else []
    if not others or sequence.held_sizes:
        sequence.settle()
    else:
        sequence.trials = [sequence.choice, *others]
        _take_turns(sequence)


def _alternatives(sequence: CallSequence, chooser: VariantChooser, step: MeasuredStep) -> list[VariantChoice]:
    """What to time beside the first choice that holds; nothing that was measured to be over the budget."""
    over = [choice for choice, peak in sequence.measured if peak > step.budget_bytes]
    best = sequence.choice if sequence.trials is None else sequence.trials[0]
    return chooser.alternatives(step.instances, best, step.budget_bytes, over)


def _try_next(sequence: CallSequence, chooser: VariantChooser, step: MeasuredStep) -> None:
    assert sequence.trials is not None
    ran = sequence.choice
    if step.is_over:
        sequence.trials = [each for each in sequence.trials if not each.is_like(ran)]
        if not sequence.trials:  # it held before: correct it again
            sequence.trials, sequence.measured = None, sequence.measured[-1:]
            _correct(sequence, chooser, step)
            return
        chooser.learn(step.instances, ran, step.peak_bytes, step.profile, is_over=True)
        listed = [*sequence.trials, *(choice for choice, _ in sequence.measured)]
        others = [each for each in _alternatives(sequence, chooser, step) if not any(map(each.is_like, listed))]
        if others:
            sequence.trials += others
            sequence.turns = []  # turns are compared one by one
    _take_turns(sequence)


def _take_turns(sequence: CallSequence) -> None:
    """Run the candidate that was timed least next, or settle when it is known which is fastest.

    The first of the candidates is kept unless another is faster: those without moves come first.
    """
    assert sequence.trials
    turns = [sequence.turns_of(choice) for choice in sequence.trials]
    best_s = min((median(found) for found in turns if len(found) > 1), default=inf)
    kept = [
        choice
        for choice, found in zip(sequence.trials, turns, strict=True)
        if len(found) < 2 or min(found) <= (1 + _CLEARLY_SLOWER) * best_s
    ]
    best = kept[0]
    for choice in kept[1:]:
        best = choice if _lead(sequence, choice, best) >= _LEAD else best
    kept = [choice for choice in kept if choice is best or _lead(sequence, best, choice) < _LEAD]
    sequence.trials = kept
    fewest = min(kept, key=lambda choice: len(sequence.turns_of(choice)))
    is_late = len(sequence.turns_of(fewest)) >= _MOST_TURNS or len(sequence.measured) >= _MOST_TRIALS
    sequence.choice = best if len(kept) == 1 or is_late else fewest
    if len(kept) == 1 or is_late:
        sequence.settle()


def _lead(sequence: CallSequence, one: VariantChoice, other: VariantChoice) -> int:
    """In how many more turns `one` was faster than `other` than it was slower."""
    pairs = zip(sequence.turns_of(one), sequence.turns_of(other), strict=False)
    return sum((ours < theirs) - (ours > theirs) for ours, theirs in pairs)


def _has_run(sequence: CallSequence, choice: VariantChoice) -> bool:
    return any(each.is_like(choice) for each, _ in sequence.measured)
