"""Steps of a session without compiling: graphs that have variants only, and meters that invent peaks and times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lowtide.compiled.session import Session
from lowtide.compiled.step_profile import CallProfile, StepMeter, StepProfile
from lowtide.compiled.variant_choice import VariantChoice, VariantChooser
from lowtide.solvers.shared_budget import Variant

BASE = 100


VARIANTS = (
    Variant(None, 40, (), 0, 0, 0.0),
    Variant((0, 1), 30, (), 0, 0, 1.0),
    Variant((0,), 20, (), 0, 0, 3.0),
    Variant((), 10, (), 0, 0, 9.0),
)


class FakeGraph:
    """What a session sees of a compiled graph."""

    def __init__(self, number: int) -> None:
        self.number, self.variants, self.device, self.step = number, VARIANTS, torch.device("cpu"), None
        self.step_s, self.handed_out_bytes, self.static_bytes, self.batch_bytes = 10.0, 0, 0, 0
        self.forward_s, self.torch_ways, self.replayed = 1.0, {}, None
        self.has_collectives, self.identity = False, f"graph {number}"

    def is_compiled(self, variant: Variant) -> bool:
        return False


class VariantsOnly(VariantChooser):
    """One call is chosen for as several are: there is no step to solve."""

    def _single(self, graph: FakeGraph, budget_bytes: int) -> VariantChoice:
        return self._shared([graph], budget_bytes)


class FakeMeter(StepMeter):
    """Measures whole steps, not their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.measured, self.num_resets = 0, 0

    def peak_bytes(self) -> int:
        return self.measured

    def profile(self) -> None:
        return None

    def reset(self) -> None:
        self.num_resets += 1


def spoil(session: Session) -> None:
    """Compile something in the present step."""
    with session.compiling():
        pass


class Steps:
    """Steps of three calls of one graph; `measured` makes a peak of the variants that ran."""

    def __init__(self, budget: int, measured: Callable[[list[Variant]], int] | None, num_blocks: int = 3) -> None:
        self.meter = FakeMeter()
        self.session = Session(
            budget,
            chooser=VariantsOnly(model_bytes=BASE),
            num_blocks=num_blocks,
            meter_of=lambda device: self.meter if measured is not None else None,
        )
        self.graph, self._measured = FakeGraph(7), measured
        self.session.first_variant(self.graph)
        spoil(self.session)

    def run(
        self,
        num_calls: int = 3,
        *,
        graph: FakeGraph | None = None,
        has_backward: bool = True,
        input_bytes: int = 0,
        unused: int = -1,
    ) -> list[Variant]:
        x = self.forward(num_calls, graph or self.graph, input_bytes, unused)
        if has_backward:
            x.backward()
        if self._measured is not None:
            self.meter.measured = self._measured(self.ran)
        return self.ran

    def forward(self, num_calls: int, graph: FakeGraph, input_bytes: int = 0, unused: int = -1) -> Tensor:
        """The loss depends on all calls but the one at position `unused`."""
        x = torch.ones(1, requires_grad=True)
        self.ran = []
        for position in range(num_calls):
            variant = None if input_bytes else self.session.repeated_variant(graph)  # as in `PlannedGraph`
            run = self.session.next_run(graph, input_bytes) if variant is None else None
            self.ran.append(variant or run.variant)
            output = x * 2
            if run is not None:
                run.end((output,))
            x = x if position == unused else output
            del output
        return x


def saved(ran: list[Variant]) -> int:
    return sum(variant.saved_bytes for variant in ran)


def linked(host_bytes: int, link_bytes_per_s: float) -> VariantsOnly:
    """A chooser that knows of a link, which the CPU has none of."""
    chooser = VariantsOnly(model_bytes=BASE, host_bytes=host_bytes)
    chooser.__dict__["_link_bytes_per_s"] = link_bytes_per_s
    return chooser


class TimedMeter(StepMeter):
    """Measures peaks as predicted, and the seconds that `seconds` gives for each variant and moved byte.

    Every step takes `more_bytes` more than predicted, one with moves also `moving_bytes`; a call `errors` by what its
    variant keeps.
    """

    def __init__(
        self,
        seconds: Callable[[Variant], float],
        moved_byte_s: float = 0.0,
        *,
        more_bytes: int = 0,
        moving_bytes: int = 0,
        errors: Mapping[Any, int] | None = None,
    ) -> None:
        super().__init__()
        self.session: Session | None = None
        self._seconds, self._moved_byte_s = seconds, moved_byte_s
        self._more_bytes, self._moving_bytes, self._errors = more_bytes, moving_bytes, errors or {}

    def reset(self) -> None:
        pass

    def peak_bytes(self) -> int:
        return self._whole_profile().peak_bytes

    def profile(self) -> StepProfile:
        profile = self._whole_profile()
        return StepProfile((), 0, 0, profile.seconds, is_timed_only=True) if self.times_only else profile

    def _whole_profile(self) -> StepProfile:
        choice, calls = self.session.sequences.current.choice, []
        held = BASE + self._more_bytes + (self._moving_bytes if any(choice.moved) else 0)
        for variant, moved in zip(choice.variants, choice.moved, strict=True):
            after = held + variant.saved_bytes + self._errors.get(variant.keeps, 0)
            calls.append(CallProfile(held, after, after, after, self._seconds(variant)))
            held += variant.saved_bytes - sum(moved)
        seconds = sum(map(self._seconds, choice.variants)) + self._moved_byte_s * sum(map(sum, choice.moved))
        return StepProfile(tuple(calls), held, BASE, seconds)


def settled(session: Session, graph: FakeGraph) -> VariantChoice:
    session.first_variant(graph)
    spoil(session)
    for _ in range(90):
        if session.current is not None and session.current.is_settled:
            break
        x = torch.ones(1, requires_grad=True)
        for _ in range(3):
            run = session.next_run(graph)
            x = x * 2
            run.end((x,))
        x.backward()
    assert session.current is not None and session.current.is_settled
    return session.current.choice
