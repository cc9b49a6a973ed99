"""The calls of a graph that a plan names, and whether the plan can be carried out on them.

Plan: what happens to the activations of one step, as frozen data.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lowtide.errors import GraphError, PlanError
from lowtide.graph.codec_costs import CODEC_COSTS, LOSSLESS, EncodedForm, encoded_form
from lowtide.graph.segments import SegmentedGraph, has_gaps, members_of, segment_name, with_segments
from lowtide.graph.step_graph import UNKNOWN_HARDWARE, Hardware, StepGraph
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lowtide.plans.plan_text import Trial
    from lowtide.reports.report_text import Report


def segmented(graph: StepGraph, regions: Sequence[Recompute]) -> StepGraph:
    """`graph` with the segments among `regions` as calls. Raises `PlanError` where it has no such segment."""
    segments = [region for region in regions if region.more]
    if not segments or isinstance(graph, SegmentedGraph):
        return graph
    spans = []
    for region in segments:
        calls = [call_named(graph, path, nth) for path, nth in ((region.path, region.nth), *region.more)]
        if members_of(graph, (calls[0], calls[-1])) != calls:
            raise PlanError(
                f"{region.name} is no segment of this step: it takes {len(calls)} calls, one after the other and "
                "under one parent. Was the plan made for another model?"
            )
        spans.append((calls[0], calls[-1]))
    try:
        return with_segments(graph, spans)
    except GraphError as error:
        raise PlanError(f"{error}. Was the plan made for another model?") from error


def check_retained(graph: StepGraph, regions: dict[int, tuple[int, ...]]) -> None:
    """Raise `PlanError` where a region is to retain what it cannot."""
    owner = graph.innermost(regions)
    for call, kept in regions.items():
        if kept and isinstance(graph, SegmentedGraph) and has_gaps(graph.plain, graph.plain_members[call]):
            raise PlanError(
                f"{graph.calls[call].path} keeps ops, and other ops run between its calls: that shifts the numbers of "
                "ops in its replay. Leave keep_ops empty for such a segment."
            )
        if kept and owner[graph.calls[call].parent] >= 0:
            raise PlanError(f"{graph.calls[call].path} keeps ops inside a region that is itself recomputed")
    for call, ops in graph.retainable.missing(regions).items():
        path, first = graph.calls[call].path, graph.calls[call].first
        names = ", ".join(f"{op} ({graph.ops[first + op].name})" for op in ops[:5])
        raise PlanError(
            f"{path or 'the model'} is to retain the outputs of ops {names}, and autograd does not save all of them "
            "directly in it, so that no saved-tensor hook sees them. Leave these ops out of keep_ops."
        )


def call_named(graph: StepGraph, path: str, nth: int) -> int:
    calls = graph.calls_by_path.get(path)
    if calls is None:
        near = [known for known in graph.calls_by_path if known.split(".")[-1] == path.split(".")[-1]][:3]
        hint = f" Calls with such a name: {', '.join(near)}." if near else ""
        raise PlanError(f"the step calls no module {path!r}.{hint} Was the plan made for another model?")
    if not 0 <= nth < len(calls):
        raise PlanError(f"{path!r} is called {len(calls)} times in the step; call {nth} is planned")
    return calls[nth]


ENGINES = ("eager", "compiled")
MOVE_TARGETS = ("device", "host", "disk")  # where moved values are; on the device they are compressed


@dataclass(frozen=True, slots=True)
class Recompute:
    """One call of one module (its `nth`) whose activations are dropped and recomputed, or a segment: a run of calls.

    `more` are the calls after it, as path and nth, that are recomputed together with it, in the order of the forward:
    siblings, with no op between them. What lies between two of them is not held but made anew by the first replay.
    Regions may lie inside it, and one of them may begin with the same call; outer ones come first.

    `keep_ops` are ops, counted from the region's first, whose outputs are retained and not computed again. All that
    they make must be saved for the backward directly in the region, and not in a region inside it.
    """

    path: str
    nth: int = 0
    keep_ops: tuple[int, ...] = ()
    more: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        """What people call it: `layers.3`, or `layers.3 ... layers.9`."""
        return segment_name([(self.path, self.nth), *self.more])

    @property
    def paths(self) -> tuple[str, ...]:
        """The modules of all its calls."""
        return (self.path, *(path for path, _ in self.more))


@dataclass(frozen=True, slots=True)
class Move:
    """A value that is not held as it is: the one of the `save`-th save made directly in the `nth` call of `path`.

    Of a call that is recomputed its inputs are held and no saves, and so it is its `save`-th input; so it is for each
    call of a segment, of which the inputs are held that come from outside. The value goes `to`
    the host or disk, or stays on the device; `codec` names how it is written there (`""`: as it is). A value that is
    held in several places leaves the device if there is a move for each.

    With `op`, it is the first output of that op of a recomputed call, one of its `keep_ops`; it moves as it is. A
    segment goes by its first call here.
    """

    path: str
    nth: int = 0
    save: int = 0
    to: str = "host"
    codec: str = ""
    op: int | None = None

    def __post_init__(self) -> None:
        if self.to not in MOVE_TARGETS:
            raise PlanError(f"a value moves to {', '.join(map(repr, MOVE_TARGETS))}, not {self.to!r}")
        if self.to == "device" and not self.codec:
            raise PlanError(f"a value of {self.path} is to stay on the device as it is: that is no move")
        if self.codec and self.codec not in (*CODEC_COSTS, LOSSLESS):
            raise PlanError(f"no codec is called {self.codec!r}: there are {', '.join((*CODEC_COSTS, LOSSLESS))}")
        if self.op is not None and (self.codec or self.save):
            raise PlanError(
                f"the output of op {self.op} of {self.path} is to be moved as save {self.save}, with the codec "
                f"{self.codec!r}: an output that is held is no save, and moves as it is"
            )

    @property
    def is_lossy(self) -> bool:
        """Whether what comes back is not quite what left."""
        return self.codec in CODEC_COSTS


@dataclass(frozen=True, slots=True)
class PlannedModule:
    """A module that a plan is about, as it was: its class, its calls in a step, and its parameters if seen."""

    path: str
    kind: str
    num_calls: int = 1
    num_parameters: int = 0
    num_elements: int = 0


@dataclass(frozen=True, slots=True)
class ValueRow:
    """One saved value, for people: where it is saved, by which op it was made, and what becomes of it.

    `seconds` is what making it again takes (its own op). `region` is the recomputed module it lies in, if any. Where it
    is held by a `codec`, it takes `stored_bytes` instead, and `coding_s` to encode it and decode it once.
    """

    path: str
    nth: int
    op: str
    bytes: int
    action: str
    seconds: float
    region: str = ""
    codec: str = ""
    stored_bytes: int = 0
    coding_s: float = 0.0


@dataclass(frozen=True)
class Plan:
    """Which regions are recomputed, which values moved or compressed; everything else is kept. An empty plan keeps all.

    For the `engine` "compiled" it is the other way around: `keeps` are the forward ops whose outputs are saved, and
    whatever else the backward needs is recomputed, op by op. Without a budget and keeps such a plan is empty too.

    Made by `lowtide.solve`; frozen, and plain data: `to_json` and `from_json` go both ways. All its numbers but the
    measured ones are predicted. `peak_bytes` is the simulated peak and `plain_peak_bytes` that of the step without a
    plan; `extra_s` is what the plan adds to the step's `step_s`, and no plan adds less than `lower_bound_s`.
    `fingerprint` names the graph it was made for, and `graph` is that graph where it is at hand: what a report is drawn
    from. `modules` are those the plan is about, as they were, and `input_shapes` the shapes that the model was called
    with (the largest; empty where nobody looked). `choosers` are modules inside of regions whose own ops choose by
    their numbers, such as routers: what they choose in the forward is kept for the replays. `rows` say what becomes of
    each saved value.

    What `lowtide.fit` measured on real steps is in `measured_peak_bytes`, of the whole step, and in the seconds of
    steps under the plan and without it, `measured_step_s` and `measured_plain_s`; None where it was not measured.

    >>> import lowtide
    >>> lowtide.Plan(regions=(lowtide.plans.Recompute("layers.0"),)).regions[0].path
    'layers.0'
    """

    regions: tuple[Recompute, ...] = ()
    moves: tuple[Move, ...] = ()
    in_flight_bytes: int = 0
    engine: str = "eager"
    keeps: tuple[int, ...] = ()
    budget_bytes: int = 0
    peak_bytes: int = 0
    peak_path: str = ""
    peak_phase: str = ""
    plain_peak_bytes: int = 0
    step_s: float = 0.0
    extra_s: float = 0.0
    lower_bound_s: float = 0.0
    host_bytes: int = 0
    hardware: Hardware = UNKNOWN_HARDWARE
    fingerprint: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    choosers: tuple[str, ...] = ()
    modules: tuple[PlannedModule, ...] = ()
    input_shapes: tuple[tuple[int, ...], ...] = ()
    rows: tuple[ValueRow, ...] = ()
    measured_peak_bytes: int | None = field(default=None, compare=False)
    measured_step_s: float | None = field(default=None, compare=False)
    measured_plain_s: float | None = field(default=None, compare=False)
    graph: StepGraph | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise PlanError(f"a plan is for the engine {' or '.join(map(repr, ENGINES))}, not {self.engine!r}")
        if self.engine == "eager" and self.keeps:
            raise PlanError(f"an eager plan has regions; {len(self.keeps)} single ops are to be kept")
        if self.engine == "compiled" and (self.regions or self.moves):
            raise PlanError(
                f"a compiled plan has ops to keep; {len(self.regions)} regions and {len(self.moves)} moves are given"
            )
        held = {(region.path, region.nth, op) for region in self.regions for op in region.keep_ops}
        for move in self.moves:
            if move.op is not None and (move.path, move.nth, move.op) not in held:
                raise PlanError(
                    f"the output of op {move.op} in call {move.nth} of {move.path!r} is to be moved, and no region "
                    "holds it: the call has to be recomputed, with the op among its keep_ops"
                )

    @property
    def is_plain(self) -> bool:
        """Whether the plan asks for nothing, so that the step runs as it is."""
        if self.engine == "compiled":
            return not self.keeps and not self.budget_bytes
        return not self.regions and not self.moves

    @property
    def is_lossy(self) -> bool:
        """Whether values come back approximately, and gradients with them."""
        return any(move.is_lossy for move in self.moves)

    @property
    def gap(self) -> float:
        """How much faster, as a share of the step's time, a plan within the same budget could be at the very most."""
        return (self.extra_s - self.lower_bound_s) / self.step_s if self.step_s else 0.0

    @property
    def slowdown(self) -> float:
        """The step's time under the plan over its plain time, less one."""
        return self.extra_s / self.step_s if self.step_s else 0.0

    @property
    def measured_slowdown(self) -> float | None:
        """As `slowdown`, of steps that `lowtide.fit` ran with the plan and without it; None where it did not."""
        if self.measured_step_s is None or not self.measured_plain_s:
            return None
        return self.measured_step_s / self.measured_plain_s - 1

    def bytes_by_action(self) -> dict[str, int]:
        """Bytes of saved activations kept, recomputed, moved, and compressed on the device: as large as they were."""
        found = dict.fromkeys(("keep", "recompute", "host", "disk", "compress"), 0)
        for row in self.rows:
            found[row.action] = found.get(row.action, 0) + row.bytes
        return found

    def to_json(self, *, graph: bool = True) -> str:
        """The plan as text, with a version; `Plan.from_json` reads it. With `graph=False` its graph is left out."""
        from lowtide.plans.plan_json import write_plan

        return write_plan(self, graph)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that `to_json` wrote. Raises `PlanError` where the text is damaged; nothing in it can run."""
        from lowtide.plans.plan_json import read_plan

        return read_plan(text)

    def explain(self, path: str) -> str:
        """In words, what happens to each value saved in a module and below it, and why."""
        from lowtide.plans.plan_text import explain

        return explain(self, path)

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        measured_peak_bytes: int | None = None,
        measured_step_s: float | None = None,
        candidates: tuple[Trial, ...] = (),
        frontier: Frontier | None = None,
        time_limit_s: float = 5.0,
    ) -> Report:
        """Write a report to a file: a page that needs nothing else, or by its ending a picture, Markdown or a trace.

        `.html`, `.png` (with the extra `report`), `.md`, or `.json` for ui.perfetto.dev. All numbers are predicted but
        for what is given as measured. The trade-off curve of a page is `frontier`, from `lowtide.sweep`, or made in
        about `time_limit_s`. What is returned says in words what was done.
        """
        from lowtide.api.report import write_report

        return write_report(
            self,
            path,
            measured_peak_bytes=measured_peak_bytes,
            measured_step_s=measured_step_s,
            candidates=candidates,
            frontier=frontier,
            time_limit_s=time_limit_s,
        )

    def plot(self) -> Figure:
        """A matplotlib figure of memory over the step, with and without the plan (the extra `report`)."""
        from lowtide.reports.charts import plan_figure
        from lowtide.reports.report_facts import report_facts

        return plan_figure(report_facts(self))

    def __str__(self) -> str:
        from lowtide.plans.plan_text import summary

        return summary(self)

    def segmented(self, graph: StepGraph) -> StepGraph:
        """`graph` with the plan's segments as calls, which are numbered anew; `graph` itself if there are none.

        Raises `PlanError` where the graph has no such segment.
        """
        return segmented(graph, self.regions)

    def calls(self, graph: StepGraph) -> dict[int, Recompute]:
        """The recomputed calls, by their number in `segmented(graph)`: that of `graph`, if there are no segments.

        Raises `PlanError` where the graph has no such call.
        """
        graph = self.segmented(graph)
        numbers = {graph.names_of(call): call for call in range(len(graph.calls))}
        found: dict[int, Recompute] = {}
        for region in self.regions:
            call = numbers.get(((region.path, region.nth), *region.more), -1)
            if call < 0:  # raises, and says what there is
                call = call_named(graph, region.path, region.nth)
            if call in found:
                raise PlanError(f"{region.name} is recomputed twice")
            if call in graph.unreplayable:
                raise PlanError(f"{region.name} cannot be recomputed: {graph.unreplayable[call]}")
            length = graph.calls[call].end - graph.calls[call].first
            if any(not 0 <= op < length for op in region.keep_ops):
                raise PlanError(f"{region.name} has {length} ops; {region.keep_ops} are to be kept")
            found[call] = region
        if any(region.keep_ops for region in self.regions):
            check_retained(graph, {call: region.keep_ops for call, region in found.items()})
        return found

    def held_ops(self, graph: StepGraph) -> dict[int, tuple[int, ...]]:
        """The calls of `calls`, and for each the ops, counted from its first, whose outputs are kept."""
        return {call: region.keep_ops for call, region in self.calls(graph).items()}

    def kept_ops(self, graph: StepGraph) -> tuple[int, ...]:
        """The ops of a compiled plan whose outputs are saved. Raises `PlanError` where the graph has no such op."""
        if any(not 0 <= op < graph.num_forward for op in self.keeps):
            raise PlanError(
                f"the step has {graph.num_forward} forward ops; the plan keeps the output of op {max(self.keeps)}. "
                "Was the plan made for another model?"
            )
        return self.keeps

    def moves_by_value(self, graph: StepGraph) -> dict[int, Move]:
        """The move of each value of `graph` that has one."""
        if not self.moves:
            return {}
        graph = self.segmented(graph)
        regions = graph.innermost(self.calls(graph))
        found: dict[int, Move] = {}
        for move in self.moves:
            value = self._moved_value(graph, move, regions)
            other = found.setdefault(value, move)
            if (other.to, other.codec) != (move.to, move.codec):
                raise PlanError(f"a value saved in {other.path} and {move.path} is moved in two ways: one can be done")
        return found

    def moved_outputs(self, graph: StepGraph) -> dict[int, tuple[int, ...]]:
        """The values that the calls of `calls` hold elsewhere than on the device, in the order of their ops."""
        named = [move for move in self.moves if move.op is not None]
        graph = self.segmented(graph) if named else graph
        regions = self.calls(graph) if named else {}
        found: dict[int, set[int]] = {}
        for move in named:
            value = self._moved_value(graph, move, {})
            keepers = [c for c, region in regions.items() if move.op in region.keep_ops and _begins(region, move)]
            found.setdefault(keepers[0], set()).add(value)
        return {call: tuple(sorted(values, key=lambda v: graph.values[v].born)) for call, values in found.items()}

    @staticmethod
    def _moved_value(graph: StepGraph, move: Move, regions: dict[int, int]) -> int:
        """The value that a move names: one of a recomputed call's inputs, an output it holds, or that of a save."""
        call = call_named(graph, move.path, move.nth)
        if move.op is not None:
            outputs = graph.ops[graph.calls[call].first + move.op].outputs
            if not outputs:
                raise PlanError(f"op {move.op} of {move.path} is to be moved, and makes nothing of its own")
            return outputs[0]
        parent = graph.calls[call].parent
        if regions[call] == call or (regions[call] == parent >= 0 and graph.calls[parent].kind == "Segment"):
            inputs = graph.calls[call].inputs
            if not 0 <= move.save < len(inputs):
                raise PlanError(f"{move.path} has {len(inputs)} inputs; number {move.save} is to be moved")
            return inputs[move.save]
        index = graph.saves_by_number.get((call, move.save))
        if index is None:
            number = sum(place[0] == call for place in graph.save_numbers)
            raise PlanError(f"{move.path} makes {number} saves; number {move.save} is to be moved")
        return graph.saves[index].value

    def forms(self, graph: StepGraph) -> dict[int, EncodedForm]:
        """What codecs make of the values of `graph` that they are to write, less those that they decline."""
        coded = {value: move.codec for value, move in self.moves_by_value(graph).items() if move.is_lossy}
        if coded and not graph.hardware.memory_bytes_per_s:
            raise PlanError(
                f"the plan compresses values, and the speed of {graph.hardware.name}'s memory is not known: nobody can "
                "say what that costs. Trace for a device that is known."
            )
        found = {}
        for value, codec in coded.items():
            facts = graph.values[value]
            form = encoded_form(facts, codec, graph.hardware) if facts.kind == "activation" else None
            if form is not None:
                found[value] = form
        return found


def _begins(region: Recompute, move: Move) -> bool:
    return (region.path, region.nth) == (move.path, move.nth)


@dataclass(frozen=True)
class Reference:
    """Something people use today, as simulated on the same graph."""

    name: str
    peak_bytes: int
    extra_s: float


@dataclass(frozen=True)
class Frontier:
    """Plans from the smallest budget to the plain peak, and where the usual alternatives stand. All predicted."""

    plans: tuple[Plan, ...]
    references: tuple[Reference, ...]
    step_s: float
    floor_bytes: int
    plain_peak_bytes: int

    def plot(self) -> Figure:
        """A matplotlib figure of slowdown against peak memory, with the alternatives (the extra `report`)."""
        from lowtide.reports.charts import frontier_figure

        return frontier_figure(self)

    def __str__(self) -> str:
        lines = [f"{'budget':>12}  {'peak':>12}  {'slower':>8}  {'gap':>6}   (predicted)"]
        for plan in self.plans:
            lines.append(
                f"{format_bytes(plan.budget_bytes):>12}  {format_bytes(plan.peak_bytes):>12}  "
                f"{100 * plan.slowdown:>6.1f} %  {100 * plan.gap:>4.1f} %"
            )
        for reference in self.references:
            slower = 100 * reference.extra_s / self.step_s if self.step_s else 0.0
            lines.append(
                f"{'':>12}  {format_bytes(reference.peak_bytes):>12}  {slower:>6.1f} %          {reference.name}"
            )
        return "\n".join(lines)
