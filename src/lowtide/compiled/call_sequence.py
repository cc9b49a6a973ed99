"""`CallSequence`: the calls of a step in order, the variants they run, and the steps that were measured with them.

A choice of variants is known to hold for steps up to a certain `StepSize`. Gradients that are kept from one backward to
the next (gradient accumulation) and longer batches in graphs with symbolic shapes make a step larger. When such a step
comes, the sequence is measured again with steps of that size, and only those count: a choice that holds on the first
part of an accumulated gradient may not hold on the second.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from lowtide.compiled.variant_choice import VariantChoice


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

    Calls on which the loss does not depend lose their autograd nodes before the backward, and are in `order` only.
    `over` says that no choice fits the budget. `measured` lists the choices that ran and their peaks, for steps of the
    present `size`. `profiled` and `turns` list their seconds on an accelerator: of steps that were measured call by
    call, which takes the host time, and of steps that were only timed. When corrections have ended, `trials` are run;
    `is_settled` ends both. `held_sizes` are those of steps at which the choice was measured to hold.
    """

    numbers: tuple[int, ...]
    choice: VariantChoice
    order: tuple[tuple[int, int | None], ...] = ()  # all calls: graph number, and position in `numbers` or None
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
        self.order = self.order or tuple((number, position) for position, number in enumerate(self.numbers))

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

    def begins_with(self, begun: tuple[int, ...]) -> bool:
        """Whether these are the graph numbers of the first calls in `order`."""
        return tuple(number for number, _ in self.order[: len(begun)]) == begun
