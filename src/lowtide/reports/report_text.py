"""What a report says: its tables and sentences, and the report as Markdown.

`peak_rows`, `cost_rows` and `layer_rows` are the tables, as data for both HTML and Markdown. The total of a table is
the exact sum of its rows; rows beyond the limit are summed in one row. `verdict`, `figures` and `assumptions` are the
text. Numbers have three digits, enough to tell a peak from its budget, and each is marked as measured, predicted or
given. `to_markdown` puts everything together for a pull request.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.plans.plan_text import HEAD, split_texts
from lowtide.plans.step_plan import ACTIONS
from lowtide.reports.report_facts import OUTSIDE, ReportFacts
from lowtide.simulator.timeline import PHASES
from lowtide.units import counted, in_bytes_unit, in_seconds_unit, own_version


def short_op(name: str) -> str:
    """Return `addmm` for `aten.addmm.default`: torch's own namespaces and overload names are left out."""
    parts = name.split(".")
    if len(parts) >= 3 and parts[0] in ("aten", "prims"):
        return parts[1]
    return name


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

    op = int(planned.ops[event])
    workspace = graph.ops[op].workspace_bytes if op >= 0 else graph.optimizer_workspace_bytes
    name = short_op(graph.ops[op].name) if op >= 0 else "the optimizer's step"
    if workspace:
        where = facts.layers.pattern_of(graph.path_of(op)) if op >= 0 else ""
        rows.append(PeakRow(f"workspace of {name}", where, workspace))
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
    plan, peak, budget = facts.plan, size(facts.planned.peak_bytes), size(facts.budget_bytes)
    head = f"Fits in {budget}" if facts.fits else f"Over the budget of {budget}"
    if not facts.budget_bytes:
        head = "No budget given"
    plain_bytes, _, slowdown = facts.undivided
    saved = 1 - facts.planned.peak_bytes / plain_bytes if plain_bytes else 0.0
    less = f", {percent(abs(saved))} {'less' if saved >= 0 else 'more'} than the plain step"
    if plan.is_plain:
        head, less = f"{head} as it is, nothing to do", ""
    if facts.measured_peak_bytes is None:
        rest = f": peak {peak} predicted{less}"
    else:
        rest = f": peak {size(facts.measured_peak_bytes)} measured (predicted: {peak}{less})"
    if plan.is_plain:
        return head, f"{rest}."
    slower = f"{percent(slowdown)} slower predicted"
    if (measured := facts.measured_slowdown) is not None:
        way = "slower" if measured >= 0 else "faster"
        slower = f"{percent(abs(measured))} {way} measured (predicted: {percent(slowdown)} slower)"
    gap = f", at most {percent(plan.gap)} of a step from the fastest plan there can be" if facts.budget_bytes else ""
    return head, f"{rest}; {slower}{gap}."


def figures(facts: ReportFacts) -> list[Figure]:
    """Return the numbers of the verdict, each with its source."""
    plan, graph = facts.plan, facts.graph
    plain_bytes, plain_s, slowdown = facts.undivided
    plain = f"{size(plain_bytes)} without a plan"
    peak_bytes, source, beside = facts.planned.peak_bytes, PREDICTED, plain
    if facts.measured_peak_bytes is not None:
        beside = f"predicted: {size(peak_bytes)}, and {plain}"
        peak_bytes, source = facts.measured_peak_bytes, MEASURED
    all_figures = [Figure("Peak", size(peak_bytes), source, beside)]
    if facts.budget_bytes:
        beside = f"{percent(peak_bytes / facts.budget_bytes)} of it used, {source}"
        all_figures.append(Figure("Budget", size(facts.budget_bytes), "given", beside))
    step = f"{duration(plain_s)} {MEASURED if graph.is_measured else PREDICTED}"
    if (measured := facts.measured_slowdown) is not None and facts.measured_step_s is not None:
        beside = f"{duration(facts.measured_step_s)} after {step}; {percent(slowdown)} slower predicted"
        name = "Slower" if measured >= 0 else "Faster"
        all_figures.append(Figure(name, percent(abs(measured)), MEASURED, beside))
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
    parts = [hardware.name]
    if hardware.memory_bytes:
        parts.append(f"{size(hardware.memory_bytes)} of memory")
    if hardware.link_bytes_per_s:
        parts.append(f"{hardware.link_bytes_per_s / 1e9:.1f} GB/s to the host, each way")
    peaks = "are bytes of live tensors and workspaces at every op; the allocator's fragmentation is not modelled."
    times = (
        f"the plain step takes {duration(graph.step_s)} ({MEASURED if graph.is_measured else PREDICTED}); what the "
        "plan adds to it is predicted from the ops that run again and the copies that are waited for."
    )
    entries = [
        ("Peaks", peaks),
        ("Times", times),
        ("Hardware", ", ".join(parts)),
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
