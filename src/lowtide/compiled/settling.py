"""Decides, from measured peaks and times, which variants the next step runs, the same on all ranks.

After each step the session makes a `StepReport`. `SessionRanks` combines those of all ranks, and `settle_further`
sets the next choice of the step's `CallSequence`, or settles it: from then on, its steps are not measured any more.

- **Corrections.** Variants are chosen again with measured bytes in place of predictions, until a choice is within the
  budget and none is predicted to be faster: six measured steps at most. If none is within the budget by then, the
  choices with the smallest peaks are tried.
- **Trials.** On an accelerator the choice that holds is timed in turns with its alternatives: what torch's
  partitioner does alike in all calls, and the best choice with moves to host memory. One that is over the budget, or
  clearly slower, is dropped. An alternative replaces the choice only if it was faster in clearly more turns than it
  was slower. Single steps vary by a few per cent, so this takes many turns; they are steps of the training and cost
  little.
- **Larger steps.** A choice is known to hold for steps up to a certain `StepSize`: bytes of gradients kept from
  earlier backwards (gradient accumulation), and of inputs with symbolic shapes. A larger step is measured again from
  the start.
- **Ranks.** In the first steps, before each forward that follows a backward, every rank sends its report. Budgets are
  reduced by MIN, peaks by MAX, and times are the lowest rank's. If all ranks have called the same graphs, they take
  over what the lowest rank decides; ranks whose batches have other shapes run other graphs, and each decides for its
  own. A budget that does not hold is an error on all ranks, in the same forward, so that none waits in a collective.
  The exchange ends when all have settled, or after 200 steps. New kinds of steps that come later are planned by each
  rank on its own, and raise no error.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, replace
from math import inf
from statistics import median
from typing import Any

from torch import nn

from lowtide import _compat
from lowtide.compiled.call_sequences import CallSequence, OverBudget, StepSize
from lowtide.compiled.planned_graph import PlannedGraph
from lowtide.compiled.step_profile import StepProfile, largest_profile
from lowtide.compiled.variant_choice import WORTH_A_COMPILE, VariantChoice, VariantChooser
from lowtide.distributed.agreement import hash_of
from lowtide.distributed.ranks import ALONE, Ranks, is_in_job, ranks_among, ranks_of
from lowtide.units import format_bytes

logger = logging.getLogger("lowtide")

# Steps that could not be measured, or were smaller than expected, before predictions are taken for it: such as steps
# that ran under a profiler of the user's, or that compiled something each time.
_MOST_UNMEASURED = 20
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
# Steps after which ranks that have not settled, as with batches of ever new shapes, stop to wait for each other.
_MOST_EXCHANGES = 200
_ABOUT = "variants of a compiled step"


@dataclass(frozen=True)
class StepReport:
    """What one rank measured in the step that has ended, or the reports of all ranks combined.

    `calls` tells which graphs it called, in the same way on all ranks; None if Dynamo has dropped them. `is_settled`
    says that no sequence of calls is waiting for a decision. `peak_bytes` are None if the step was not measured, or
    `is_measured_anew`: the next one but one is measured in its place.
    """

    calls: str | None
    budget_bytes: int
    size: StepSize
    is_settled: bool = False
    peak_bytes: int | None = None
    profile: StepProfile | None = None
    is_measured_anew: bool = False
    over: OverBudget | None = None


def settle_further(
    sequence: CallSequence, chooser: VariantChooser, instances: list[PlannedGraph], step: StepReport
) -> None:
    """Set the next choice of a sequence, or settle it, after a step that has ended. `instances` are its graphs."""
    if sequence.over is None:
        sequence.expect(step.size, step.budget_bytes)
    if sequence.is_settled:
        return
    if step.is_measured_anew:
        sequence.num_unmeasured = 0
        return
    is_over = step.peak_bytes is not None and step.peak_bytes > step.budget_bytes
    if step.peak_bytes is None or not sequence.is_conclusive(step.size, is_over=is_over):
        sequence.num_over += is_over
        _leave_unmeasured(sequence, step.size)
        return
    before, sequence.num_unmeasured = sequence.choice, 0
    _Decision(sequence, chooser, instances, step.budget_bytes, step.peak_bytes, step.profile).make()
    logger.info(
        "compiled step: peak %s measured, %s predicted, within %s%s",
        format_bytes(step.peak_bytes),
        format_bytes(before.peak_bytes),
        format_bytes(step.budget_bytes),
        "" if sequence.choice.is_like(before) else "; choosing again",
    )


def _leave_unmeasured(sequence: CallSequence, size: StepSize) -> None:
    sequence.num_unmeasured += 1
    if sequence.num_unmeasured < _MOST_UNMEASURED:
        return
    if size != sequence.size:
        sequence.is_settled = True  # until a step comes that is not known to hold
        return
    if not sequence.choice.is_within and not sequence.held_sizes:
        sequence.over = OverBudget(sequence.choice.peak_bytes, "predicted")
    sequence.settle()


@dataclass(frozen=True)
class _Decision:
    """What a sequence runs next, after a step that ran its present choice was measured."""

    sequence: CallSequence
    chooser: VariantChooser
    instances: list[PlannedGraph]
    budget_bytes: int
    peak_bytes: int
    profile: StepProfile | None

    @property
    def _is_over(self) -> bool:
        return self.peak_bytes > self.budget_bytes

    def make(self) -> None:
        sequence, profile = self.sequence, self.profile
        sequence.measured.append((sequence.choice, self.peak_bytes))
        if profile is not None and profile.seconds is not None:
            steps = sequence.turns if profile.is_timed_only else sequence.profiled
            steps.append((sequence.choice, profile.seconds))
        if sequence.trials is None:
            self._correct()
        else:
            self._try_next(sequence.trials)

    def _learn(self) -> None:
        self.chooser.learn(self.instances, self.sequence.choice, self.peak_bytes, self.profile, is_over=self._is_over)

    def _correct(self) -> None:
        sequence, chooser, before = self.sequence, self.chooser, self.sequence.choice
        self._learn()
        now = chooser.choose(self.instances, self.budget_bytes, is_measured=True, has_run=sequence.has_run)
        is_worth_it = before.extra_s - now.extra_s >= WORTH_A_COMPILE * sum(graph.step_s for graph in self.instances)
        is_worth_it |= before.replays_indices and not now.replays_indices
        if not self._is_over and (sequence.held_sizes or not is_worth_it):
            now = before  # a faster choice may not hold for the sizes before this one
        is_last = len(sequence.measured) >= _MOST_CORRECTIONS
        held = [choice for choice, peak in sequence.measured if peak <= self.budget_bytes]
        if not held and (is_last or sequence.has_run(now)):
            others = chooser.last_resorts(self.instances)
            now = next((each for each in others if not sequence.has_run(each)), before)
        sequence.choice = now
        if not sequence.has_run(now) and not (is_last and held):
            return
        if not held:
            # The largest peak of each choice counts, which may have run in steps of several sizes.
            peaks = [(choice, max(sequence.peaks_of(choice))) for choice, _ in sequence.measured]
            sequence.choice, floor = min(peaks, key=lambda each: each[1])
            sequence.over, sequence.is_settled = OverBudget(floor + floor // _FLOOR_MARGIN, "measured"), True
            return
        sequence.choice = min(held, key=lambda choice: (choice.replays_indices, choice.extra_s))
        is_timed = sequence.seconds_of(sequence.choice) is not None and not sequence.choice.is_plain
        others = self._alternatives(sequence.choice) if is_timed else []
        if not others or sequence.held_sizes:
            sequence.settle()
        else:
            self._take_turns([sequence.choice, *others])

    def _alternatives(self, best: VariantChoice) -> list[VariantChoice]:
        """What to time beside the first choice that holds; nothing that was measured to be over the budget."""
        over = [choice for choice, peak in self.sequence.measured if peak > self.budget_bytes]
        return self.chooser.alternatives(self.instances, best, self.budget_bytes, over)

    def _try_next(self, trials: list[VariantChoice]) -> None:
        sequence = self.sequence
        if self._is_over:
            trials = [each for each in trials if not each.is_like(sequence.choice)]
            if not trials:  # it held before: correct it again
                sequence.trials, sequence.measured = None, sequence.measured[-1:]
                self._correct()
                return
            self._learn()
            listed = [*trials, *(choice for choice, _ in sequence.measured)]
            others = [each for each in self._alternatives(trials[0]) if not any(map(each.is_like, listed))]
            if others:
                trials += others
                sequence.turns = []  # turns are compared one by one
        self._take_turns(trials)

    def _take_turns(self, trials: list[VariantChoice]) -> None:
        """Run the candidate that was timed least next, or settle when it is known which is fastest.

        The first of the candidates is kept unless another is faster: those without moves come first.
        """
        sequence = self.sequence
        turns = [sequence.turns_of(choice) for choice in trials]
        best_s = min((median(found) for found in turns if len(found) > 1), default=inf)
        kept = [
            choice
            for choice, found in zip(trials, turns, strict=True)
            if len(found) < 2 or min(found) <= (1 + _CLEARLY_SLOWER) * best_s
        ]
        best = kept[0]
        for choice in kept[1:]:
            best = choice if sequence.lead(choice, best) >= _LEAD else best
        kept = [choice for choice in kept if choice is best or sequence.lead(best, choice) < _LEAD]
        sequence.trials = kept
        fewest = min(kept, key=lambda choice: len(sequence.turns_of(choice)))
        is_late = len(sequence.turns_of(fewest)) >= _MOST_TURNS or len(sequence.measured) >= _MOST_TRIALS
        if (len(kept) == 1 and sequence.has_run(best)) or is_late:
            sequence.choice = best
            sequence.settle()
        else:
            sequence.choice = fewest


class SessionRanks:
    """The ranks that decide with a session. `is_open` until all have settled; `over` if a rank's budget does not hold.

    They are the ranks of the `DistributedDataParallel` around the model, or those that hold its sharded parameters
    (FSDP2, tensor parallelism). Ranks with copies that are not connected decide alone.
    """

    def __init__(self) -> None:
        self._ranks, self._num_exchanges, self._has_looked = ALONE, 0, False
        self.is_open = True
        self.over: OverBudget | None = None
        self.budget_bytes: int | None = None  # the smallest of all ranks

    @property
    def is_alone(self) -> bool:
        return self._ranks.is_alone

    @property
    def is_known_alone(self) -> bool:
        """Whether no other ranks were found, and not because `find` was not called yet."""
        return self._has_looked and self._ranks.is_alone

    @property
    def is_waiting(self) -> bool:
        """Whether other ranks still wait for this one's reports."""
        return self.is_open and not self._ranks.is_alone

    def find(self, model: nn.Module | None) -> None:
        """Look for the ranks that share a model, which may be wrapped after it was compiled. Called in a forward."""
        if self._ranks.is_alone:
            self._ranks, self._has_looked = ranks_sharing(model), True

    def exchanged(self, own: StepReport) -> tuple[StepReport, bool]:
        """What all ranks know together, and whether they called the same graphs and decide together."""
        if not self.is_waiting:
            if not self.is_alone:
                self.over = own.over
            return own, False
        self._num_exchanges += 1
        reports = self._ranks.gathered(own, _ABOUT)
        floors = [each.over for each in reports if each.over is not None]
        self.over = max(floors, key=lambda each: each.floor_bytes, default=None)
        is_done = self.over is None and all(each.is_settled for each in reports)
        self.is_open = not is_done and self._num_exchanges < _MOST_EXCHANGES
        self.budget_bytes = min(each.budget_bytes for each in reports)
        is_agreed = own.calls is not None and len({each.calls for each in reports}) == 1
        return replace(_common(reports) if is_agreed else own, budget_bytes=self.budget_bytes), is_agreed

    def together(self, is_agreed: bool) -> contextlib.AbstractContextManager[None]:
        """Context manager around a decision that all ranks make: if one fails, all raise."""
        return self._ranks.together(_ABOUT) if is_agreed else contextlib.nullcontext()

    def of_first(self, sequence: CallSequence) -> CallSequence:
        """The lowest rank's sequence, with the graph numbers of this rank."""
        found = replace(self._ranks.first(sequence, _ABOUT), numbers=sequence.numbers)
        self.over = found.over or self.over
        return found


def _common(reports: list[StepReport]) -> StepReport:
    """The report of ranks that called the same graphs. Not measured unless all have."""
    peaks = [each.peak_bytes for each in reports if each.peak_bytes is not None]
    profiles = [each.profile for each in reports if each.profile is not None]
    size = StepSize(max(each.size.gradient_bytes for each in reports), max(each.size.input_bytes for each in reports))
    return replace(
        reports[0],
        size=size,
        peak_bytes=max(peaks) if len(peaks) == len(reports) else None,
        profile=largest_profile(profiles) if len(profiles) == len(reports) else None,
        is_measured_anew=any(each.is_measured_anew for each in reports),
    )


def name_of_calls(sequence: CallSequence, instances: list[PlannedGraph]) -> str:
    """A hash of the graphs that a step called, equal on all ranks that ran the same code on the same shapes."""
    return hash_of([sequence.graph_indices, [graph.identity for graph in dict.fromkeys(instances)]])


def ranks_sharing(model: nn.Module | None) -> Ranks:
    """The ranks that train a model together; alone if it is neither inside DDP nor sharded."""
    if not is_in_job():  # asked in every step: the model's parameters are not looked at
        return ALONE
    wrapper: Any = _compat.active_data_parallel()
    if wrapper is not None:
        return ranks_of(wrapper.process_group)
    members = set() if model is None else _compat.sharding_ranks(model)
    return ranks_among(members) if len(members) > 1 else ALONE
