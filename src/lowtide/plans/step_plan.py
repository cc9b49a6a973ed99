"""`Plan`: what happens to the activations of one step, as frozen data. Also `Frontier`, plans for many budgets.

A plan names calls by module path and number, not by graph index, so that it can be saved and applied to a live model.
`Plan.calls`, `moves_by_value` and `forms` look the names up in a `StepGraph`, and raise `PlanError` if the graph has no
such call or the call cannot be recomputed in that way.

Two kinds of plans share the class. Eager plans have `regions` (`Recompute`: module calls or segments that are replayed)
and `moves` (values held on the host, on disk or compressed). Compiled plans have `keeps`, the forward ops whose outputs
are saved.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lowtide.errors import GraphError, PlanError
from lowtide.graph.codec_costs import CODEC_COSTS, LOSSLESS, EncodedForm, encoded_form
from lowtide.graph.segments import SegmentedGraph, has_gaps, members_of, segment_name, with_segments
from lowtide.graph.step_graph import UNKNOWN_HARDWARE, Forward, Hardware, Split, StepGraph
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lowtide.plans.plan_text import Trial
    from lowtide.reports.page import Report


def check_retained(graph: StepGraph, regions: dict[int, tuple[int, ...]]) -> None:
    """Raise `PlanError` if a region is to retain an output that it cannot retain."""
    owner = graph.innermost(regions)
    for call, kept in regions.items():
        if kept and isinstance(graph, SegmentedGraph) and has_gaps(graph.plain, graph.plain_members[call]):
            raise PlanError(
                f"{graph.calls[call].path} has keep_ops, and other ops run between its calls, which shifts the numbers "
                "of ops in its replay. Leave keep_ops empty for such a segment."
            )
        if kept and owner[graph.calls[call].parent] >= 0:
            raise PlanError(f"{graph.calls[call].path} has keep_ops and lies inside a region that is itself recomputed")
        if kept and graph.gathers_inside(call):
            raise PlanError(
                f"{graph.calls[call].path} has keep_ops and contains modules that FSDP shards. A replay may find their "
                "parameters gathered already, which shifts the numbers of ops. Leave keep_ops empty for such a region."
            )
    for call, ops in graph.retainable.missing(regions).items():
        path, first = graph.calls[call].path, graph.calls[call].first
        names = ", ".join(f"{op} ({graph.ops[first + op].name})" for op in ops[:5])
        raise PlanError(
            f"{path or 'the model'} is to retain the outputs of ops {names}, and autograd does not save all of them "
            "directly in it, so no saved-tensor hook receives them. Leave these ops out of keep_ops."
        )


def call_named(graph: StepGraph, path: str, nth: int) -> int:
    """Return the `nth` call of module `path`. Raises `PlanError`, with similar names, if there is none."""
    calls = graph.calls_by_path.get(path)
    if calls is None:
        near = [known for known in graph.calls_by_path if known.split(".")[-1] == path.split(".")[-1]][:3]
        hint = f" Calls with such a name: {', '.join(near)}." if near else ""
        raise PlanError(f"the step calls no module {path!r}.{hint} Was the plan made for another model?")
    if not 0 <= nth < len(calls):
        raise PlanError(f"{path!r} is called {len(calls)} times in the step; call {nth} is planned")
    return calls[nth]


ENGINES = ("eager", "compiled")
ACTIONS = ("keep", "recompute", "host", "disk", "compress")  # on a saved value, as rows of a plan name them
MOVE_TARGETS = ("device", "host", "disk")  # where moved values are held; on the device they are compressed


@dataclass(frozen=True, slots=True)
class Recompute:
    """A region: the `nth` call of module `path` is dropped and recomputed, or a segment that begins with it.

    For a segment, `more` are the following calls (path, nth) that are recomputed together with it: siblings in the
    order of the forward, without ops between them. Values passed between them are not held; the replay recomputes them.
    Regions may contain other regions, which may begin with the same call; outer ones come first.

    `keep_ops` are ops, counted from the region's first, whose outputs are retained instead of recomputed. All of their
    outputs must be saved for the backward directly in the region, and not in a region inside it.
    """

    path: str
    nth: int = 0
    keep_ops: tuple[int, ...] = ()
    more: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        """Its display name: `layers.3`, or `layers.3 ... layers.9`."""
        return segment_name([(self.path, self.nth), *self.more])

    @property
    def paths(self) -> tuple[str, ...]:
        """The modules of all its calls."""
        return (self.path, *(path for path, _ in self.more))


@dataclass(frozen=True, slots=True)
class Move:
    """A value that is held on the host, on disk, or compressed, from forward to backward.

    It is the value of the `save`-th save made directly in the `nth` call of `path`. A recomputed call holds its inputs
    and no saves: then it is the `save`-th input of that call, which may also be a call of a segment. With `op`, it is
    the first output of that op of a recomputed call, which must be among its `keep_ops`; a segment is named by its
    first call, and such an output cannot have a codec.

    `to` is "host", "disk" or "device"; `codec` is how the value is encoded there (`""`: not at all). A value that is
    saved several times leaves the device only if there is a move for each save.
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
            raise PlanError(
                f"a value of {self.path} stays on the device and has no codec: this move does nothing, leave it out"
            )
        if self.codec and self.codec not in (*CODEC_COSTS, LOSSLESS):
            raise PlanError(f"no codec is called {self.codec!r}: there are {', '.join((*CODEC_COSTS, LOSSLESS))}")
        if self.op is not None and (self.codec or self.save):
            raise PlanError(
                f"the move of the output of op {self.op} of {self.path} has save={self.save} and codec={self.codec!r}: "
                "a retained output is not a save and cannot be encoded. Leave both out."
            )

    @property
    def is_lossy(self) -> bool:
        """Whether the codec is lossy."""
        return self.codec in CODEC_COSTS


@dataclass(frozen=True, slots=True)
class PlannedModule:
    """A module that a plan names, for checking a model: its class, calls per step, and parameters if known."""

    path: str
    kind: str
    num_calls: int = 1
    num_parameters: int = 0
    num_elements: int = 0


@dataclass(frozen=True, slots=True)
class ValueRow:
    """One saved value, for display: the module that saves it, the op that made it, its bytes, and its action.

    `seconds` is the time of that op. `region` is the recomputed module that it lies in, if any. A value with a `codec`
    takes `stored_bytes`, and `coding_s` to encode and decode it once.
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
    """Which regions are recomputed and which values are moved or compressed; everything else is kept.

    For the `engine` "compiled", `keeps` are the forward ops whose outputs are saved, and everything else that the
    backward needs is recomputed, op by op; a plan without `keeps` and budget keeps all.

    Made by `lowtide.solve`. Plain frozen data: `to_json` writes it, `from_json` reads it.

    - Predicted: `peak_bytes` and `plain_peak_bytes`, the simulated peaks with and without the plan; `step_s`, the time
      of the plain step; `extra_s`, what the plan adds to it; `lower_bound_s`, the least that any plan would add.
    - Measured by `lowtide.fit`, else None: `measured_peak_bytes` of the whole step, `measured_step_s` with the plan and
      `measured_plain_s` without it.
    - `fingerprint` identifies the graph that the plan was made for; `graph` is that graph, if available, from which
      reports are drawn. `modules` describe the modules that the plan names, and `input_shapes` are the largest shapes
      that the model was called with (empty if not recorded): both are checked when the plan is applied.
    - `splits` are modules that run a few rows at a time. Regions and moves then refer to the graph of the step that
      runs so; gradients may differ from the plain step's in the last bits.
    - `choosers` are modules inside regions with ops that compute indices from floating-point numbers, such as routers,
      or that reduce or exchange tensors between ranks; the results of the forward are kept for the replay.
    - `forwards` are the calls that the step makes itself, if these are not one call of the model: several, or calls of
      modules in it (`model.encoder(x)`). Calls of modules are counted through all of them.
    - `rows` list every saved value with its action.

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
    forwards: tuple[Forward, ...] = ()
    rows: tuple[ValueRow, ...] = ()
    splits: tuple[Split, ...] = ()
    measured_peak_bytes: int | None = field(default=None, compare=False)
    measured_step_s: float | None = field(default=None, compare=False)
    measured_plain_s: float | None = field(default=None, compare=False)
    graph: StepGraph | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise PlanError(f"a plan is for the engine {' or '.join(map(repr, ENGINES))}, not {self.engine!r}")
        if self.engine == "eager" and self.keeps:
            raise PlanError(
                f"an eager plan has regions, not keeps; {len(self.keeps)} keeps are given: leave them out, or give "
                "engine='compiled'"
            )
        if self.engine == "compiled" and (self.regions or self.moves or self.splits):
            raise PlanError(
                f"a compiled plan has ops to keep only; {len(self.regions)} regions, {len(self.moves)} moves and "
                f"{len(self.splits)} splits are given: leave them out, or give engine='eager'"
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
        """Whether the plan changes nothing: every activation is kept."""
        if self.engine == "compiled":
            return not self.keeps and not self.budget_bytes
        return not self.regions and not self.moves and not self.splits

    @property
    def is_lossy(self) -> bool:
        """Whether a value is encoded by a lossy codec, so that gradients are approximate."""
        return any(move.is_lossy for move in self.moves)

    @property
    def gap(self) -> float:
        """Upper bound on how much faster a plan within the same budget could be, as a share of the step's time."""
        return (self.extra_s - self.lower_bound_s) / self.step_s if self.step_s else 0.0

    @property
    def slowdown(self) -> float:
        """Predicted: the step's time with the plan over its plain time, minus 1."""
        return self.extra_s / self.step_s if self.step_s else 0.0

    @property
    def measured_slowdown(self) -> float | None:
        """Measured: as `slowdown`, from steps that `lowtide.fit` ran with and without the plan; None without those."""
        if self.measured_step_s is None or not self.measured_plain_s:
            return None
        return self.measured_step_s / self.measured_plain_s - 1

    def bytes_by_action(self) -> dict[str, int]:
        """Bytes of saved activations by action, in their size before compression."""
        sizes = dict.fromkeys(ACTIONS, 0)
        for row in self.rows:
            sizes[row.action] = sizes.get(row.action, 0) + row.bytes
        return sizes

    def to_json(self, *, graph: bool = True) -> str:
        """Return the plan as versioned JSON, which `Plan.from_json` reads; with `graph=False`, without its graph."""
        from lowtide.plans.plan_json import write_plan

        return write_plan(self, graph)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read a plan that `to_json` wrote. Raises `PlanError` if the text is damaged. No code in it is executed."""
        from lowtide.plans.plan_json import read_plan

        return read_plan(text)

    def explain(self, path: str) -> str:
        """Say what happens to each value saved in a module and below it, and why."""
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
        references: tuple[Reference, ...] = (),
        time_limit_s: float = 5.0,
    ) -> Report:
        """Write a report to a file; its suffix selects the format. Returns a summary of what was written.

        `.html` (one page without external files), `.png` (needs the extra `report`), `.md`, or `.json`, a trace for
        ui.perfetto.dev. The plan must have its graph, as plans of `lowtide.solve` do. All numbers are predicted except
        those given as measured; the `candidates` of `lowtide.fit` are a table. The trade-off curve of a page is
        `frontier`, from `lowtide.sweep`, or computed in about `time_limit_s`; it shows `references` beside the plan.
        """
        from lowtide.api.report import write_report

        return write_report(
            self,
            path,
            measured_peak_bytes=measured_peak_bytes,
            measured_step_s=measured_step_s,
            candidates=candidates,
            frontier=frontier,
            references=references,
            time_limit_s=time_limit_s,
        )

    def plot(self) -> Figure:
        """Return a matplotlib figure of memory over the step, with and without the plan (needs the extra `report`)."""
        from lowtide.api.report import report_facts
        from lowtide.reports.charts import plan_figure

        return plan_figure(report_facts(self))

    def __str__(self) -> str:
        from lowtide.plans.plan_text import summary

        return summary(self)

    def segmented(self, graph: StepGraph) -> StepGraph:
        """Return `graph` with the plan's segments inserted as calls (which renumbers calls), or `graph` if none.

        Raises `PlanError` if the graph has no such segment.
        """
        segments = [region for region in self.regions if region.more]
        if not segments or isinstance(graph, SegmentedGraph):
            return graph
        spans = []
        for region in segments:
            calls = [call_named(graph, path, nth) for path, nth in ((region.path, region.nth), *region.more)]
            if members_of(graph, (calls[0], calls[-1])) != calls:
                raise PlanError(
                    f"{region.name} is not a segment of this step: its {len(calls)} calls must follow each other under "
                    "one parent. Was the plan made for another model?"
                )
            spans.append((calls[0], calls[-1]))
        try:
            return with_segments(graph, spans)
        except GraphError as error:
            raise PlanError(f"{error}. Was the plan made for another model?") from error

    def calls(self, graph: StepGraph) -> dict[int, Recompute]:
        """Return the recomputed calls by their index in `segmented(graph)`.

        Raises `PlanError` if the graph has no such call, or it cannot be recomputed.
        """
        graph = self.segmented(graph)
        numbers = {graph.names_of(call): call for call in range(len(graph.calls))}
        planned: dict[int, Recompute] = {}
        for region in self.regions:
            call = numbers.get(((region.path, region.nth), *region.more), -1)
            if call < 0:  # raises an error with similar names
                call = call_named(graph, region.path, region.nth)
            if call in planned:
                raise PlanError(f"{region.name} is recomputed twice in the plan: list it once")
            if call in graph.unreplayable:
                raise PlanError(f"{region.name} cannot be recomputed: {graph.unreplayable[call]}")
            length = graph.calls[call].end - graph.calls[call].first
            if any(not 0 <= op < length for op in region.keep_ops):
                raise PlanError(
                    f"{region.name} has {length} ops, and its keep_ops are {region.keep_ops}: each is a number from 0 "
                    f"to {length - 1}"
                )
            planned[call] = region
        if any(region.keep_ops for region in self.regions):
            check_retained(graph, {call: region.keep_ops for call, region in planned.items()})
        return planned

    def held_ops(self, graph: StepGraph) -> dict[int, tuple[int, ...]]:
        """Return the calls of `calls` with their retained ops, counted from the first op of each."""
        return {call: region.keep_ops for call, region in self.calls(graph).items()}

    def kept_ops(self, graph: StepGraph) -> tuple[int, ...]:
        """Return the ops of a compiled plan whose outputs are saved. Raises `PlanError` if the graph has no such op."""
        if any(not 0 <= op < graph.num_forward for op in self.keeps):
            raise PlanError(
                f"the step has {graph.num_forward} forward ops; the plan keeps the output of op {max(self.keeps)}. "
                "Was the plan made for another model?"
            )
        return self.keeps

    def moves_by_value(self, graph: StepGraph) -> dict[int, Move]:
        """Return the move of each value of `graph` that has one. Raises `PlanError` for two different moves."""
        if not self.moves:
            return {}
        graph = self.segmented(graph)
        regions = graph.innermost(self.calls(graph))
        moves: dict[int, Move] = {}
        for move in self.moves:
            value = self._moved_value(graph, move, regions)
            other = moves.setdefault(value, move)
            if (other.to, other.codec) != (move.to, move.codec):
                raise PlanError(f"a value saved in {other.path} and {move.path} is moved in two ways: give one move")
        return moves

    def moved_outputs(self, graph: StepGraph) -> dict[int, tuple[int, ...]]:
        """Return the retained outputs that the calls of `calls` hold off the device, in the order of their ops."""
        named = [move for move in self.moves if move.op is not None]
        graph = self.segmented(graph) if named else graph
        regions = self.calls(graph) if named else {}
        moved: dict[int, set[int]] = {}
        for move in named:
            value = self._moved_value(graph, move, {})
            named_so = (c for c, region in regions.items() if (region.path, region.nth) == (move.path, move.nth))
            keeper = next(call for call in named_so if move.op in regions[call].keep_ops)
            moved.setdefault(keeper, set()).add(value)
        return {call: tuple(sorted(values, key=lambda v: graph.values[v].born)) for call, values in moved.items()}

    @staticmethod
    def _moved_value(graph: StepGraph, move: Move, regions: dict[int, int]) -> int:
        """Return the value that a move names: an input of a recomputed call, a retained output, or a saved value."""
        call = call_named(graph, move.path, move.nth)
        if move.op is not None:
            outputs = graph.ops[graph.calls[call].first + move.op].outputs
            if not outputs:
                raise PlanError(
                    f"the output of op {move.op} of {move.path} is to be moved, but it is no new value, only a view or "
                    "an input written in place: name the op that made the value"
                )
            return outputs[0]
        parent = graph.calls[call].parent
        if regions[call] == call or (regions[call] == parent >= 0 and graph.calls[parent].kind == "Segment"):
            inputs = graph.calls[call].inputs
            if not 0 <= move.save < len(inputs):
                raise PlanError(
                    f"{move.path} is recomputed and has {len(inputs)} inputs, numbered from 0; input {move.save} is to "
                    "be moved. Was the plan made for another model?"
                )
            return inputs[move.save]
        index = graph.saves_by_number.get((call, move.save))
        if index is None:
            number = sum(saver == call for saver, _ in graph.save_numbers)
            raise PlanError(
                f"{move.path} makes {number} saves, numbered from 0; save {move.save} is to be moved. Was the plan "
                "made for another model?"
            )
        return graph.saves[index].value

    def forms(self, graph: StepGraph) -> dict[int, EncodedForm]:
        """Return the encoded forms of the values of `graph` that have a lossy codec which does not decline them."""
        coded = {value: move.codec for value, move in self.moves_by_value(graph).items() if move.is_lossy}
        if coded and not graph.hardware.memory_bytes_per_s:
            raise PlanError(
                f"the plan compresses values, and the memory bandwidth of {graph.hardware.name} is unknown, so the "
                "cost cannot be predicted. Trace for a device in lowtide.tracing.devices.DEVICES."
            )
        forms = {}
        for value, codec in coded.items():
            facts = graph.values[value]
            form = encoded_form(facts, codec, graph.hardware) if facts.kind == "activation" else None
            if form is not None:
                forms[value] = form
        return forms


@dataclass(frozen=True)
class Reference:
    """A common practice (such as a checkpoint per block), simulated on the same graph for comparison."""

    name: str
    peak_bytes: int
    extra_s: float


@dataclass(frozen=True)
class Frontier:
    """Plans for budgets from the floor to the plain peak, and common practices for comparison. All predicted."""

    plans: tuple[Plan, ...]
    references: tuple[Reference, ...]
    step_s: float
    floor_bytes: int
    plain_peak_bytes: int

    def plot(self) -> Figure:
        """Return a matplotlib figure of slowdown over peak memory, with the references (needs the extra `report`)."""
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
