"""`simulate(graph, plan)` and the `Timeline` it returns: live bytes at each op of a step, peak and seconds.

The solvers compare candidate plans by these numbers, and reports and error messages print them. `eager_events`,
`eager_intervals` and `compiled_intervals` compute them, as the package says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lowtide.errors import PlanError
from lowtide.graph.step_graph import StepGraph
from lowtide.graph.time_lines import StepLines
from lowtide.plans.step_plan import Plan
from lowtide.simulator.compiled_intervals import play_compiled
from lowtide.simulator.eager_events import EagerEvents
from lowtide.simulator.eager_intervals import EagerIntervals
from lowtide.simulator.lifetimes import Copy
from lowtide.units import format_bytes, format_seconds

KINDS = ("static", "kept", "transient", "gradients", "in flight")
PHASES = ("forward", "replay", "backward", "optimizer", "compression", "decompression")


@dataclass(frozen=True)
class Timeline:
    """The simulated step as a sequence of events: one per op that runs, replayed ops included, and a last one.

    Encoding and decoding a value are events too; `ops` names the op that the value is saved after or decoded for.
    `live_bytes[e]` are the bytes at event `e` for each of `lowtide.simulator.KINDS`; `ops[e]` is the op it runs (-1:
    the optimizer's step), `phases[e]` an index into `lowtide.simulator.PHASES`, `starts_s[e]` when it starts.

    `lines` are the two time lines: seconds in which the host issues ops and does the engine's work, seconds in which
    the device runs ops, and seconds of the step, which ends with the later of both. On the CPU there is only the
    device's line. `engine_s` are host seconds of the engine's own work.
    """

    graph: StepGraph
    plan: Plan
    live_bytes: np.ndarray
    ops: np.ndarray
    phases: np.ndarray
    starts_s: np.ndarray
    replayed_s: float
    lines: StepLines
    engine_s: float = 0.0
    stalled_s: float = 0.0
    host_bytes: int = 0
    copies: tuple[Copy, ...] = ()
    coded_s: float = 0.0

    @cached_property
    def total_bytes(self) -> np.ndarray:
        return self.live_bytes.sum(axis=1)

    @property
    def peak_event(self) -> int:
        return int(self.total_bytes.argmax())

    @property
    def peak_bytes(self) -> int:
        """The most bytes live at any event."""
        return int(self.total_bytes.max())

    @property
    def extra_s(self) -> float:
        """Seconds that the plan adds to the plain step: replays, waiting for copies, the host's work, and codecs.

        With two lines this is the difference of two simulated steps: work on the line that ends earlier adds nothing.
        """
        if self.has_two_lines:
            return max(0.0, self.lines.step_s - self.graph.lines.step_s)
        return self.replayed_s + self.stalled_s + self.engine_s + self.coded_s

    @property
    def has_two_lines(self) -> bool:
        """Whether host and device have a time line each: on accelerators, under the eager engine."""
        return self.graph.has_host_line and (self.plan.engine != "compiled" or self.plan.is_plain)

    @property
    def host_s(self) -> float:
        """Seconds that the host works; 0 where only the device's line is simulated."""
        return self.lines.host_s

    @property
    def device_s(self) -> float:
        """Seconds that the device works."""
        return self.lines.device_s

    @property
    def step_s(self) -> float:
        """Simulated seconds of the whole step."""
        return self.lines.step_s

    def limiting_s(self, op: int) -> float:
        """Return the seconds that recomputing a forward op takes on the line that limits the step."""
        if self.has_two_lines and self.lines.limit == "host":
            return self.graph.ops[op].host_s
        return self.recomputed_s(op)

    def recomputed_s(self, op: int) -> float:
        """Return the seconds that recomputing a forward op takes."""
        if self.plan.engine == "compiled":
            return float(self.graph.needs.seconds[op])
        return self.graph.ops[op].seconds

    @property
    def peak_path(self) -> str:
        """Path of the module that runs at the peak."""
        return self.graph.path_of(int(self.ops[self.peak_event]))

    @property
    def peak_phase(self) -> str:
        return PHASES[int(self.phases[self.peak_event])]

    @property
    def peak_by_kind(self) -> dict[str, int]:
        """Bytes at the peak by kind, in the order of `KINDS`."""
        return dict(zip(KINDS, map(int, self.live_bytes[self.peak_event]), strict=True))

    def live_at(self, event: int) -> dict[int, int]:
        """Return the bytes of each value (activation or gradient) that lives at an event; simulates the step again."""
        return self.live_at_each([event])[0]

    def live_at_each(self, events: Sequence[int], *, most: int | None = None) -> list[dict[int, int]]:
        """Return `live_at` of each of `events`, or its `most` largest values, with one simulation for all of them."""
        if self.plan.engine == "compiled" and not self.plan.is_plain:
            compiled = play_compiled(self.graph, self.plan.kept_ops(self.graph))
            return [compiled.live_at(event, most) for event in events]
        if not self.plan.moves:
            intervals = _eager_intervals(self.graph, self.plan)
            return [intervals.live_at(event, most) for event in events]
        step = EagerEvents(self.graph, self.plan, frozenset(events), most)
        step.play()
        return [step.snapshots.get(event, {}) for event in events]

    def __str__(self) -> str:
        name = self.graph.ops[op].name if (op := int(self.ops[self.peak_event])) >= 0 else "the optimizer's step"
        where = f" of {self.peak_path}" if self.peak_path else ""
        lines = [f"peak {format_bytes(self.peak_bytes)} predicted, in the {self.peak_phase}{where} ({name})"]
        lines += [f"  {kind:<10} {format_bytes(size)}" for kind, size in self.peak_by_kind.items() if size]
        coded = f", {format_seconds(self.coded_s)} in codecs" if self.coded_s else ""
        if self.has_two_lines:
            host, device = format_seconds(self.host_s), format_seconds(self.device_s)
            lines.append(
                f"  {format_seconds(self.step_s)}, limited by the {self.lines.limit} (host {host}, device {device})"
            )
        lines.append(
            f"  {format_seconds(self.replayed_s)} replayed, {format_seconds(self.stalled_s)} waited for copies{coded}"
        )
        return "\n".join(lines)


def simulate(graph: StepGraph, plan: Plan | None = None) -> Timeline:
    """Return the timeline of `graph`'s step under `plan` (None: the plain step).

    All numbers are predicted; docs/trace.md compares them with the peaks that the allocator reports.
    """
    if not isinstance(graph, StepGraph):
        raise TypeError(f"a StepGraph is needed, from lowtide.trace, not {type(graph).__name__}")
    plan = Plan() if plan is None else plan
    if not isinstance(plan, Plan):
        raise TypeError(f"a Plan is needed, not {type(plan).__name__}")
    if plan.splits and plan.splits != graph.splits:
        raise PlanError(
            f"the plan runs {len(plan.splits)} modules in parts, and this graph is of a step that does not: simulate "
            "it on plan.graph, the trace of the step with these parts"
        )
    if plan.engine == "compiled" and not plan.is_plain:
        return Timeline(graph, plan, **play_compiled(graph, plan.kept_ops(graph)).columns())
    if not plan.moves:
        return Timeline(graph, plan, **_eager_intervals(graph, plan).columns())
    step = EagerEvents(graph, plan)
    step.play()
    return Timeline(graph, plan, **step.columns())


def _eager_intervals(graph: StepGraph, plan: Plan) -> EagerIntervals:
    segmented = plan.segmented(graph)
    return EagerIntervals(segmented, plan.held_ops(segmented))
