"""`SessionRanks`: how the ranks that train a compiled model come to the same variants.

Ranks measure different peaks and times, and a budget that one rank cannot meet must not leave the others waiting in a
collective. In the first steps of a session, after each backward and before the next forward, every rank therefore sends
a `StepReport`. Budgets are reduced by MIN, peaks by MAX, and times are the lowest rank's. If all ranks have called the
same graphs, they take over what the lowest rank then decides. Ranks whose batches have other shapes run other graphs:
each of them decides for its own. A budget that does not hold is an error on all ranks, in the same forward.

When all ranks have settled on a choice, the exchange ends and costs nothing any more. Steps of a new kind that come
later are planned by each rank on its own, since the others may not have them, and raise no error.

Which ranks belong together follows from the model: those of the `DistributedDataParallel` around it, or those that hold
its sharded parameters (FSDP2, tensor parallelism). Ranks with copies that are not connected decide alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from lowtide import _compat
from lowtide.compiled.settling import CallSequence, OverBudget, StepSize
from lowtide.compiled.step_profile import StepProfile, largest_profile
from lowtide.compiled.variant_choice import VariantChoice
from lowtide.distributed.agreement import hash_of
from lowtide.distributed.ranks import ALONE, Ranks, is_in_job, ranks_among, ranks_of

if TYPE_CHECKING:
    from lowtide.compiled.planned_graph import PlannedGraph

# Steps after which ranks that have not settled, as with batches of ever new shapes, stop to wait for each other.
_MOST_EXCHANGES = 200
_ABOUT = "variants of a compiled step"


@dataclass(frozen=True)
class StepReport:
    """What a rank knows of the step that has ended, or what all ranks know together.

    `calls` tells which graphs it called, in the same way on all ranks; None if Dynamo has dropped them. `is_clean` says
    that the step could be measured, `is_settled` that no sequence of calls is waiting for a decision.
    """

    calls: str | None
    budget_bytes: int
    size: StepSize
    is_clean: bool = False
    is_settled: bool = False
    peak_bytes: int | None = None
    profile: StepProfile | None = None
    over: OverBudget | None = None


class SessionRanks:
    """The ranks that decide with a session. `is_open` until all have settled."""

    def __init__(self) -> None:
        self._ranks, self._num_exchanges, self._has_looked = ALONE, 0, False
        self.is_open = True

    @property
    def is_alone(self) -> bool:
        return self._ranks.is_alone

    @property
    def is_known_alone(self) -> bool:
        """Whether no other ranks were found, and not because `find` was not called yet."""
        return self._has_looked and self._ranks.is_alone

    def find(self, model: nn.Module | None) -> None:
        """Look for the ranks that share a model, which may be wrapped after it was compiled. Called in a forward."""
        if self._ranks.is_alone:
            self._ranks, self._has_looked = ranks_sharing(model), True

    def exchanged(self, own: StepReport) -> tuple[StepReport, bool]:
        """What all ranks know together, and whether they called the same graphs and decide together."""
        if self._ranks.is_alone or not self.is_open:
            return own, False
        self._num_exchanges += 1
        reports = self._ranks.gathered(own, _ABOUT)
        floors = [each.over for each in reports if each.over is not None]
        over = max(floors, key=lambda each: each.floor_bytes, default=None)
        is_done = over is None and all(each.is_settled for each in reports)
        self.is_open = not is_done and self._num_exchanges < _MOST_EXCHANGES
        budget_bytes = min(each.budget_bytes for each in reports)
        is_agreed = own.calls is not None and len({each.calls for each in reports}) == 1
        if not is_agreed:
            return replace(own, over=over, budget_bytes=budget_bytes), False
        return replace(_common(reports), over=over, budget_bytes=budget_bytes), True

    def together(self, is_agreed: bool) -> contextlib.AbstractContextManager[None]:
        """Context manager around a decision that all ranks make: if one fails, all raise."""
        return self._ranks.together(_ABOUT) if is_agreed else contextlib.nullcontext()

    def of_first(self, sequence: CallSequence) -> CallSequence:
        """The lowest rank's sequence, with the graph numbers of this rank."""
        return _renumbered(self._ranks.first(sequence, _ABOUT), sequence.numbers)


def _common(reports: list[StepReport]) -> StepReport:
    peaks = [each.peak_bytes for each in reports if each.peak_bytes is not None]
    profiles = [each.profile for each in reports if each.profile is not None]
    size = StepSize(max(each.size.gradient_bytes for each in reports), max(each.size.input_bytes for each in reports))
    return replace(
        reports[0],
        size=size,
        is_clean=all(each.is_clean for each in reports),
        peak_bytes=max(peaks) if len(peaks) == len(reports) else None,
        profile=largest_profile(profiles) if len(profiles) == len(reports) else None,
    )


def _renumbered(sequence: CallSequence, numbers: tuple[int, ...]) -> CallSequence:
    """A sequence of another rank with the numbers that its graphs have here."""
    here = dict(zip(sequence.numbers, numbers, strict=True))

    def as_here(choice: VariantChoice) -> VariantChoice:
        if choice.peak_key is None:
            return choice
        number, key = choice.peak_key
        return replace(choice, peak_key=(here[number], key))

    return replace(
        sequence,
        numbers=numbers,
        choice=as_here(sequence.choice),
        measured=[(as_here(choice), peak) for choice, peak in sequence.measured],
        profiled=[(as_here(choice), seconds) for choice, seconds in sequence.profiled],
        turns=[(as_here(choice), seconds) for choice, seconds in sequence.turns],
        trials=None if sequence.trials is None else list(map(as_here, sequence.trials)),
    )


def name_of_calls(instances: Iterable[PlannedGraph]) -> str:
    """A hash of the graphs that a step called, equal on all ranks that ran the same code on the same shapes."""
    instances = list(instances)
    graphs = {graph: index for index, graph in enumerate(dict.fromkeys(instances))}
    return hash_of([[graphs[graph] for graph in instances], [graph.identity for graph in graphs]])


def ranks_sharing(model: nn.Module | None) -> Ranks:
    """The ranks that train a model together; alone if it is neither inside DDP nor sharded."""
    if not is_in_job():  # asked in every step: the model's parameters are not looked at
        return ALONE
    wrapper: Any = _compat.active_data_parallel()
    if wrapper is not None:
        return ranks_of(wrapper.process_group)
    members = set() if model is None else _compat.sharding_ranks(model)
    return ranks_among(members) if len(members) > 1 else ALONE
