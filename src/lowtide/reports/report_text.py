"""What a report says: its numbers (`ReportFacts`), its tables and sentences, and the report as Markdown.

`report_facts` simulates the step with and without the plan; measurements, alternatives and the trade-off curve are
passed in. HTML, Markdown, traces and figures are all made from the result. `Layers` maps module paths to layers, so
that tables can group equal modules (`layers.*.mlp`).

`peak_rows`, `cost_rows` and `layer_rows` are the tables, as data for both HTML and Markdown. The total of a table is
the exact sum of its rows; rows beyond the limit are summed in one row. `verdict`, `figures` and `assumptions` are the
text. Numbers have three digits, enough to tell a peak from its budget, and each is marked as measured, predicted or
given. `to_markdown` puts everything together for a pull request.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from lowtide.errors import PlanError
from lowtide.graph.segments import all_blocks
from lowtide.graph.step_graph import StepGraph
from lowtide.plans.plan_text import HEAD, Trial, rows_of, split_texts
from lowtide.plans.step_plan import ACTIONS, Frontier, Plan, Reference
from lowtide.simulator.timeline import PHASES, Timeline, simulate
from lowtide.units import in_bytes_unit, in_seconds_unit, own_version

OUTSIDE = "outside of modules"


class Layers:
    """The layers of a step: its repeated blocks, and the model's outermost modules for everything else."""

    def __init__(self, graph: StepGraph) -> None:
        self._blocks = {graph.calls[call].path for call in all_blocks(graph)}

    def layer_of(self, path: str) -> str:
        """Return the block that a module is or lies in, else the outermost module around it."""
        block = self._block(path)
        return block if block is not None else path.split(".")[0] or OUTSIDE

    def pattern_of(self, path: str) -> str:
        """Return a module's path with `*` for the number of its block: `layers.*.mlp` for `layers.7.mlp`."""
        block = self._block(path)
        if block is None:
            return path or OUTSIDE
        opened = re.sub(r"\d+(?=[^\d]*$)", "*", block)
        return opened + path[len(block) :]

    def _block(self, path: str) -> str | None:
        parts = path.split(".")
        for length in range(len(parts), 0, -1):
            if (prefix := ".".join(parts[:length])) in self._blocks:
                return prefix
        return None


def short_op(name: str) -> str:
    """Return `addmm` for `aten.addmm.default`: torch's own namespaces and overload names are left out."""
    parts = name.split(".")
    if len(parts) >= 3 and parts[0] in ("aten", "prims"):
        return parts[1]
    return name


def counted(num: int, noun: str) -> str:
    """Return `1 call` or `2 calls`."""
    return f"{num} {noun}" if num == 1 else f"{num} {noun}s"


@dataclass(frozen=True)
class ReportFacts:
    """A plan, the timelines with and without it, the trade-off curve, and measurements (None: not measured)."""

    plan: Plan
    graph: StepGraph
    planned: Timeline
    plain: Timeline
    alternatives: tuple[Reference, ...]
    frontier: Frontier | None = None
    measured_peak_bytes: int | None = None
    measured_step_s: float | None = None
    notes: tuple[str, ...] = ()
    candidates: tuple[Trial, ...] = ()

    @cached_property
    def layers(self) -> Layers:
        return Layers(self.graph)

    @property
    def curve(self) -> Frontier:
        """The trade-off curve; without one, a frontier of the two simulated peaks only."""
        if self.frontier is not None:
            return self.frontier
        peaks = self.planned.peak_bytes, self.plain.peak_bytes
        return Frontier((), self.alternatives, self.graph.step_s, min(peaks), self.plain.peak_bytes)

    @property
    def budget_bytes(self) -> int:
        """The budget of the plan; 0 if it has none."""
        return self.plan.budget_bytes

    @property
    def slowdown(self) -> float:
        """The predicted slowdown, as a share of the plain step."""
        return self.planned.extra_s / self.graph.step_s if self.graph.step_s else 0.0

    @property
    def undivided(self) -> tuple[int, float, float]:
        """Peak and seconds of the plain step, and the predicted slowdown. With splits, all of the step not in parts."""
        plan = self.plan
        if self.graph.splits and plan.step_s:
            return plan.plain_peak_bytes, plan.step_s, plan.slowdown
        return self.plain.peak_bytes, self.graph.step_s, self.slowdown

    @property
    def measured_slowdown(self) -> float | None:
        """The measured slowdown; None unless both the plain and the planned step were measured."""
        if self.measured_step_s is None or not self.graph.is_measured or not self.graph.step_s:
            return None
        return self.measured_step_s / self.graph.step_s - 1

    @property
    def fits(self) -> bool:
        """Whether the measured peak, or else the predicted one, is within the budget."""
        peak = self.planned.peak_bytes if self.measured_peak_bytes is None else self.measured_peak_bytes
        return not self.budget_bytes or peak <= self.budget_bytes


def report_facts(
    plan: Plan,
    *,
    alternatives: tuple[Reference, ...] = (),
    frontier: Frontier | None = None,
    measured_peak_bytes: int | None = None,
    measured_step_s: float | None = None,
    notes: tuple[str, ...] = (),
    candidates: tuple[Trial, ...] = (),
) -> ReportFacts:
    """Simulate the step with and without the plan, and combine that with what is given."""
    graph = graph_of(plan)
    if not plan.rows:  # written by the user, not made by a solver
        plan = replace(plan, rows=rows_of(graph, plan))
    return ReportFacts(
        plan,
        graph,
        simulate(graph, plan),
        simulate(graph),
        alternatives,
        frontier,
        measured_peak_bytes,
        measured_step_s,
        notes,
        candidates,
    )


def graph_of(plan: Plan) -> StepGraph:
    """Return the graph that a plan was made for. Raises `PlanError` if the plan comes without it or with another."""
    if not isinstance(plan, Plan):
        raise TypeError(f"a Plan is needed, not {type(plan).__name__}")
    graph = plan.graph
    if graph is None:
        raise PlanError(
            "this plan comes without the graph it was made for, which a report needs. Plans made by lowtide.solve have "
            "one, and so has a plan file unless it was written with graph=False; dataclasses.replace(plan, "
            "graph=graph) adds one."
        )
    if plan.fingerprint and plan.fingerprint != graph.fingerprint:
        raise PlanError(f"this plan was made for the graph {plan.fingerprint!r} and comes with {graph.fingerprint!r}")
    return graph


@dataclass(frozen=True)
class PeakRow:
    """A group of bytes that are live at the peak."""

    what: str
    where: str
    bytes: int


@dataclass(frozen=True)
class CostRow:
    """A part of a plan's cost: the time it adds, and the bytes that it frees."""

    what: str
    num_calls: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class LayerRow:
    """Bytes that one layer saves for the backward, by action."""

    layer: str
    bytes: dict[str, int]


def peak_rows(facts: ReportFacts, *, most: int = 12) -> list[PeakRow]:
    """Return what is live at the peak: static memory by kind, then values, with equal ones of all layers in one row."""
    graph, planned = facts.graph, facts.planned
    event = planned.peak_event
    static: Counter[str] = Counter()
    for value in graph.values:
        if value.born < 0 and value.kind != "elsewhere":
            static[value.kind if value.kind == "batch" else f"{value.kind}s"] += value.bytes
    static["optimizer state"] += graph.optimizer_state_bytes
    static["other allocations"] += graph.other_bytes

    sizes: Counter[tuple[str, str]] = Counter()
    numbers: Counter[tuple[str, str]] = Counter()
    for index, size in planned.live_at(event).items():
        value = graph.values[index]
        if value.kind == "gradient":
            static["gradients"] += size
        elif size:
            key = short_op(graph.ops[value.born].name), facts.layers.pattern_of(graph.path_of(value.born))
            sizes[key] += size
            numbers[key] += 1
    rows = [PeakRow(kind, "", size) for kind, size in static.items() if size]
    ranked = sorted(sizes, key=lambda key: -sizes[key])
    for key in ranked[:most]:
        what = key[0] if numbers[key] == 1 else f"{numbers[key]} x {key[0]}"
        rows.append(PeakRow(what, key[1], sizes[key]))
    if rest := ranked[most:]:
        num_values = sum(numbers[key] for key in rest)
        rows.append(PeakRow(counted(num_values, "smaller value"), "", sum(sizes[key] for key in rest)))

    op = int(planned.ops[event]) if event >= 0 else -1
    workspace = graph.ops[op].workspace_bytes if op >= 0 else graph.optimizer_workspace_bytes
    name = short_op(graph.ops[op].name) if op >= 0 else "the optimizer's step"
    if workspace:
        rows.append(
            PeakRow(f"workspace of {name}", facts.layers.pattern_of(graph.path_of(op)) if op >= 0 else "", workspace)
        )
    held = planned.peak_bytes - sum(row.bytes for row in rows)
    if held:
        rows.append(PeakRow("held for replays: random states and buffers", "", held))
    return rows


def cost_rows(facts: ReportFacts) -> list[CostRow]:
    """Return what is recomputed, equal calls in one row, and other costs; seconds sum to the plan's cost."""
    plan, planned = facts.plan, facts.planned
    graph = plan.segmented(facts.graph)
    calls: dict[str, set[int]] = {}
    seconds: defaultdict[str, float] = defaultdict(float)
    freed: Counter[str] = Counter()
    compiled = plan.engine == "compiled"
    owner = graph.outermost(plan.calls(graph))
    for op in planned.ops[planned.phases == PHASES.index("replay")].tolist():
        region = graph.ops[op].call if compiled else owner[graph.ops[op].call]
        path = graph.calls[region].path if region >= 0 else ""
        name = facts.layers.pattern_of(facts.layers.layer_of(path) if compiled else path)
        calls.setdefault(name, set()).add(region)
        seconds[name] += planned.limiting_s(op)
    for row in plan.rows:
        if row.action == "recompute":
            path = facts.layers.layer_of(row.path) if compiled else row.region
            freed[facts.layers.pattern_of("" if path == OUTSIDE else path)] += row.bytes
    names = sorted({*seconds, *freed}, key=lambda name: -seconds[name])
    rows = [CostRow(name, len(calls.get(name, ())), freed[name], seconds[name]) for name in names]
    if planned.engine_s:
        rows.append(CostRow("entering regions, and replays that retain outputs", 0, 0, planned.engine_s))
    compressed = sum(row.bytes for row in plan.rows if row.codec)
    if compressed or planned.coded_s:
        rows.append(CostRow("compressing and decompressing", 0, compressed, planned.coded_s))
    moved = sum(row.bytes for row in plan.rows if row.action in ("host", "disk") and not row.codec)
    if moved or planned.stalled_s:
        rows.append(CostRow("waiting for copies", 0, moved, planned.stalled_s))
    beside_s = sum(row.seconds for row in rows) - planned.extra_s
    if planned.has_two_lines and abs(beside_s) > 1e-9 * planned.step_s:
        what = f"of that, beside the {planned.lines.limit}'s line" if beside_s > 0 else "waiting of host and device"
        rows.append(CostRow(what, 0, 0, -beside_s))
    return rows


def layer_rows(facts: ReportFacts) -> list[LayerRow]:
    """Return for each layer, in the order of the forward, the bytes of saved values by action."""
    layers: dict[str, Counter[str]] = {}
    for row in facts.plan.rows:
        layers.setdefault(facts.layers.layer_of(row.path), Counter())[row.action] += row.bytes
    return [LayerRow(layer, dict(sizes)) for layer, sizes in layers.items()]


def actions_of(rows: list[LayerRow]) -> list[str]:
    """Return the actions that occur, in the order of `ACTIONS`; always including keep and recompute."""
    present = {action for row in rows for action in row.bytes} | {"keep", "recompute"}
    return [action for action in ACTIONS if action in present] + sorted(present - set(ACTIONS))


PREDICTED, MEASURED = "predicted", "measured"


@dataclass(frozen=True)
class Figure:
    """One number of the summary, with its source (measured, predicted, given) and a number to compare it with."""

    name: str
    number: str
    source: str
    beside: str = ""


def size(num_bytes: float) -> str:
    """Format bytes in the largest binary unit that gives at least 1: `1536` is `1.50 KiB`."""
    number, unit = in_bytes_unit(num_bytes)
    return f"{number:.0f} B" if unit == "B" else f"{_three(number)} {unit}"


def duration(seconds: float) -> str:
    """Format seconds in s, ms or µs: `0.0042` is `4.20 ms`."""
    number, unit = in_seconds_unit(seconds)
    return f"{_three(number)} {unit}" if seconds else "0 s"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _three(number: float) -> str:
    return f"{number:.2f}" if abs(number) < 9.995 else f"{number:.1f}" if abs(number) < 99.95 else f"{number:.0f}"


def verdict(facts: ReportFacts) -> str:
    """Return the report in one line."""
    return "".join(verdict_parts(facts))


def verdict_parts(facts: ReportFacts) -> tuple[str, str]:
    """Return whether the plan fits, and the rest of the line."""
    plan, peak = facts.plan, size(facts.planned.peak_bytes)
    if not facts.budget_bytes:
        head = "No budget given"
    elif not facts.fits:
        head = f"Over the budget of {size(facts.budget_bytes)}"
    else:
        head = f"Fits in {size(facts.budget_bytes)}"
    plain_bytes, _, slowdown = facts.undivided
    saved = 1 - facts.planned.peak_bytes / plain_bytes if plain_bytes else 0.0
    less = f", {percent(abs(saved))} {'less' if saved >= 0 else 'more'} than the plain step"
    if plan.is_plain:
        head, less = f"{head} as it is: nothing to do", ""
    if facts.measured_peak_bytes is None:
        rest = f": peak {peak} predicted{less}"
    else:
        rest = f": peak {size(facts.measured_peak_bytes)} measured (predicted: {peak}{less})"
    if plan.is_plain:
        return head, f"{rest}."
    slower = f"{percent(slowdown)} slower predicted"
    if facts.measured_slowdown is not None:
        slower = f"{percent(facts.measured_slowdown)} slower measured (predicted: {percent(slowdown)})"
    gap = f", at most {percent(plan.gap)} of a step from the fastest plan there can be" if facts.budget_bytes else ""
    return head, f"{rest}; {slower}{gap}."


def figures(facts: ReportFacts) -> list[Figure]:
    """Return the numbers of the verdict, each with its source."""
    plan, graph = facts.plan, facts.graph
    plain_bytes, plain_s, slowdown = facts.undivided
    plain = f"{size(plain_bytes)} without a plan"
    predicted = size(facts.planned.peak_bytes)
    if facts.measured_peak_bytes is None:
        all_figures = [Figure("Peak", predicted, PREDICTED, plain)]
    else:
        all_figures = [
            Figure("Peak", size(facts.measured_peak_bytes), MEASURED, f"predicted: {predicted}, and {plain}")
        ]
    if facts.budget_bytes:
        used, source = facts.planned.peak_bytes, PREDICTED
        if facts.measured_peak_bytes is not None:
            used, source = facts.measured_peak_bytes, MEASURED
        beside = f"{percent(used / facts.budget_bytes)} of it used, {source}"
        all_figures.append(Figure("Budget", size(facts.budget_bytes), "given", beside))
    step = f"{duration(plain_s)} {MEASURED if graph.is_measured else PREDICTED}"
    if facts.measured_slowdown is not None and facts.measured_step_s is not None:
        beside = f"{duration(facts.measured_step_s)} after {step}; {percent(slowdown)} predicted"
        all_figures.append(Figure("Slower", percent(facts.measured_slowdown), MEASURED, beside))
    else:
        beside = f"{duration(slowdown * plain_s)} on top of {step}"
        if facts.measured_step_s is not None:
            beside += f"; the planned step took {duration(facts.measured_step_s)}, measured"
        all_figures.append(Figure("Slower", percent(slowdown), PREDICTED, beside))
    if facts.budget_bytes:
        bound = f"no plan adds less than {duration(plan.lower_bound_s)}"
        all_figures.append(Figure("Gap to the bound", percent(plan.gap), PREDICTED, bound))
    return all_figures


def assumptions(facts: ReportFacts) -> list[tuple[str, str]]:
    """Return what the numbers depend on: hardware, engine, notes of the trace, versions, graph."""
    graph, hardware = facts.graph, facts.graph.hardware
    entries = [
        (
            "Peaks",
            "are bytes of live tensors and workspaces at every op; the allocator's fragmentation is not modelled.",
        ),
        (
            "Times",
            f"the plain step takes {duration(graph.step_s)} ({MEASURED if graph.is_measured else PREDICTED}); what the "
            "plan adds to it is predicted from the ops that run again and the copies that are waited for.",
        ),
        ("Hardware", _hardware(facts)),
        ("Engine", f"{facts.plan.engine}; {len(graph.ops)} ops, {len(graph.calls)} module calls"),
    ]
    entries += [
        ("Split", f"{text}. Alternatives and curves are compared with the step in parts.")
        for text in split_texts(graph.splits)
    ]
    if hardware.link_bytes_per_s and facts.planned.copies:
        entries.append(("Copies", "one engine each way beside the compute, at the full bandwidth of the link."))
    entries += [("Note", note) for note in (*graph.notes, *facts.notes)]
    versions = {"lowtide": own_version(), **graph.versions}
    entries.append(("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())))
    entries.append(("Graph", graph.fingerprint))
    return entries


def _hardware(facts: ReportFacts) -> str:
    hardware = facts.graph.hardware
    parts = [hardware.name]
    if hardware.memory_bytes:
        parts.append(f"{size(hardware.memory_bytes)} of memory")
    if hardware.link_bytes_per_s:
        parts.append(f"{hardware.link_bytes_per_s / 1e9:.1f} GB/s to the host, each way")
    return ", ".join(parts)


_ESCAPES = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", **{character: f"\\{character}" for character in "\\`*_[]|~#"}}
)


def to_markdown(facts: ReportFacts) -> str:
    """Return the report as Markdown: verdict, figures, alternatives, peak, candidates, costs and assumptions."""
    others = [("this plan", facts.planned.peak_bytes, facts.slowdown)]
    step_s = facts.graph.step_s or 1.0
    others += [(other.name, other.peak_bytes, other.extra_s / step_s) for other in facts.alternatives]
    peak, costs = peak_rows(facts), cost_rows(facts)
    parts = [
        verdict(facts),
        markdown_table(["", "", "source", ""], [(f.name, f.number, f.source, f.beside) for f in figures(facts)]),
        "**Alternatives** (predicted)",
        markdown_table(
            ["", "peak", "slower"], [(name, size(peak), percent(slower)) for name, peak, slower in others], "lrr"
        ),
        "**What fills the peak** (predicted)",
        markdown_table(
            ["what", "where", "bytes"],
            [
                *((row.what, row.where, size(row.bytes)) for row in peak),
                ("total", "", size(sum(row.bytes for row in peak))),
            ],
            "llr",
        ),
    ]
    if facts.candidates:
        parts += [
            "**Candidates tried** (as marked)",
            markdown_table(HEAD, [trial.cells for trial in facts.candidates], "lrrrrl"),
        ]
    if costs:
        rows = [(row.what, str(row.num_calls or ""), size(row.bytes), duration(row.seconds)) for row in costs]
        total = "total", "", size(sum(row.bytes for row in costs)), duration(sum(row.seconds for row in costs))
        parts += ["**What the plan costs** (predicted)"]
        parts += [markdown_table(["what", "calls", "bytes not held", "seconds"], [*rows, total], "lrrr")]
    parts.append("\n".join(f"- {escaped(name)}: {escaped(text)}" for name, text in assumptions(facts)))
    return "\n\n".join(parts) + "\n"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], alignment: str = "") -> str:
    """Return a Markdown table; `alignment` has a letter per column, l or r."""
    rules = ["---:" if letter == "r" else "---" for letter in alignment.ljust(len(head), "l")]
    lines = [head, rules, *([escaped(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def escaped(text: str) -> str:
    """Return text with Markdown's special characters escaped; module names may contain any."""
    return " ".join(text.translate(_ESCAPES).split())


@dataclass(frozen=True)
class Report:
    """A report that was written: its path, size, the time it took, its verdict and notes."""

    path: Path
    num_bytes: int
    seconds: float
    verdict: str
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.path} ({size(self.num_bytes)}, made in {self.seconds:.1f} s)", f"  {self.verdict}"]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])
