"""Which choice of variants a step runs next, by what was measured so far: `settle_further`.

- **Corrections.** Variants are chosen again with measured bytes in place of predictions, until a choice holds and none
  is predicted to be faster: six measured steps at most. If none holds, the choices that save least are tried.
- **Trials.** On an accelerator the choice that holds is then timed beside its alternatives, such as the one that also
  moves tensors to host memory, in turns: clocks drift. One that is over the budget, or clearly slower, is dropped. The
  fastest that holds is kept, so that alternatives never make a step slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from statistics import median

from lowtide.compiled.call_sequence import CallSequence, OverBudget
from lowtide.compiled.planned_graph import PlannedGraph
from lowtide.compiled.step_profile import StepProfile
from lowtide.compiled.variant_choice import WORTH_A_COMPILE, VariantChoice, VariantChooser

# Measured steps per sequence before the best choice so far is kept. A larger number costs a compile per correction.
_MOST_CORRECTIONS = 6
# Steps for which each candidate is timed; their median counts. A single step is off by a few per cent.
_TIMED_STEPS = 3
_MOST_TRIALS = 20  # measured steps in all, after which the best so far is kept
# A candidate whose fastest step is slower than the median of another's by this share is not timed further. One that
# moves tensors is kept only if it is faster by the second share: medians of three steps are off by about a per cent.
_CLEARLY_SLOWER, _CLEARLY_FASTER = 0.05, 0.01


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
        sequence.timed.append((sequence.choice, step.profile.seconds))
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
    if not is_last and any(now.is_like(choice) for choice, peak in sequence.measured if peak > step.budget_bytes):
        others = chooser.last_resorts(step.instances)
        now = next((each for each in others if not _has_run(sequence, each)), now)
    sequence.choice = now
    if not is_last and not _has_run(sequence, now):
        return
    held = [choice for choice, peak in sequence.measured if peak <= step.budget_bytes]
    if not held:
        sequence.choice, floor = min(sequence.measured, key=lambda each: each[1])
        sequence.over, sequence.is_settled = OverBudget(floor, "measured"), True
        return
    sequence.choice = min(held, key=lambda choice: (choice.replays_indices, choice.extra_s))
    is_timed = sequence.seconds_of(sequence.choice) is not None and sequence.choice.extra_s > 0
    others = chooser.alternatives(step.instances, sequence.choice, step.budget_bytes) if is_timed else []
    if not others or sequence.held_sizes:
        sequence.settle()
    else:
        sequence.trials = [sequence.choice, *others]
        _take_turns(sequence)


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
        if len(sequence.measured) < _MOST_TRIALS:  # the same with a smaller peak
            again = chooser.alternatives(step.instances, sequence.trials[0], step.budget_bytes)
            sequence.trials += [each for each in again if not _has_run(sequence, each)]
    _take_turns(sequence)


def _take_turns(sequence: CallSequence) -> None:
    """Run the candidate that was timed least next, or settle with the fastest when all were timed often enough."""
    assert sequence.trials
    is_late = len(sequence.measured) >= _MOST_TRIALS
    times = [[seconds for each, seconds in sequence.timed if each.is_like(choice)] for choice in sequence.trials]
    best_s = min((median(found) for found in times if len(found) > 1), default=inf)
    kept = [
        (choice, found)
        for choice, found in zip(sequence.trials, times, strict=True)
        if (found or not is_late) and (len(found) < 2 or min(found) <= (1 + _CLEARLY_SLOWER) * best_s)
    ]
    sequence.trials = [choice for choice, _ in kept]
    sequence.choice, found = min(kept, key=lambda each: len(each[1]))
    if len(kept) > 1 and len(found) < _TIMED_STEPS and not is_late:
        return
    sequence.choice, _ = min(kept, key=lambda each: median(each[1]) * (1 + _CLEARLY_FASTER * any(each[0].moved)))
    sequence.settle()


def _has_run(sequence: CallSequence, choice: VariantChoice) -> bool:
    return any(each.is_like(choice) for each, _ in sequence.measured)
