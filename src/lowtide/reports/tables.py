"""The tables of a report. Totals are the literal sum of their rows, and rows left out are one row themselves."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from lowtide.reports.facts import Facts
from lowtide.reports.layers import OUTSIDE, counted, short_op
from lowtide.simulator import PHASES

ACTIONS = ("keep", "recompute", "host", "disk", "compress")


@dataclass(frozen=True)
class PeakRow:
    """Part of what lives at the peak."""

    what: str
    where: str
    bytes: int


@dataclass(frozen=True)
class CostRow:
    """Part of what a plan costs: the time it adds, and the bytes it need not hold for that."""

    what: str
    num_calls: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class LayerRow:
    """What becomes of the bytes that one layer saves for the backward."""

    layer: str
    bytes: dict[str, int]


def peak_rows(facts: Facts, *, most: int = 12) -> list[PeakRow]:
    """What fills the peak: static memory by kind, then live values, alike ones of all layers together."""
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
    found = [PeakRow(kind, "", size) for kind, size in static.items() if size]
    ranked = sorted(sizes, key=lambda key: -sizes[key])
    for key in ranked[:most]:
        what = key[0] if numbers[key] == 1 else f"{numbers[key]} x {key[0]}"
        found.append(PeakRow(what, key[1], sizes[key]))
    if rest := ranked[most:]:
        num_values = sum(numbers[key] for key in rest)
        found.append(PeakRow(counted(num_values, "smaller value"), "", sum(sizes[key] for key in rest)))

    op = int(planned.ops[event]) if event >= 0 else -1
    workspace = graph.ops[op].workspace_bytes if op >= 0 else graph.optimizer_workspace_bytes
    name = short_op(graph.ops[op].name) if op >= 0 else "the optimizer's step"
    if workspace:
        found.append(
            PeakRow(f"workspace of {name}", facts.layers.pattern_of(graph.path_of(op)) if op >= 0 else "", workspace)
        )
    held = planned.peak_bytes - sum(row.bytes for row in found)
    if held:
        found.append(PeakRow("held for replays: random states and buffers", "", held))
    return found


def cost_rows(facts: Facts) -> list[CostRow]:
    """What is recomputed, alike calls together, and what else the plan adds; seconds sum to what the plan costs."""
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
    found = [CostRow(name, len(calls.get(name, ())), freed[name], seconds[name]) for name in names]
    if planned.watched_s:
        found.append(CostRow("entering regions, and watching ops whose outputs are held", 0, 0, planned.watched_s))
    compressed = sum(row.bytes for row in plan.rows if row.codec)
    if compressed or planned.coded_s:
        found.append(CostRow("compressing and decompressing", 0, compressed, planned.coded_s))
    moved = sum(row.bytes for row in plan.rows if row.action in ("host", "disk") and not row.codec)
    if moved or planned.stalled_s:
        found.append(CostRow("waiting for copies", 0, moved, planned.stalled_s))
    beside_s = sum(row.seconds for row in found) - planned.extra_s
    if planned.has_two_lines and abs(beside_s) > 1e-9 * planned.step_s:
        what = f"of that, beside the {planned.lines.limit}'s line" if beside_s > 0 else "waiting of host and device"
        found.append(CostRow(what, 0, 0, -beside_s))
    return found


def layer_rows(facts: Facts) -> list[LayerRow]:
    """For each layer, in the order of the forward, bytes of saved values by what becomes of them."""
    found: dict[str, Counter[str]] = {}
    for row in facts.plan.rows:
        found.setdefault(facts.layers.layer_of(row.path), Counter())[row.action] += row.bytes
    return [LayerRow(layer, dict(sizes)) for layer, sizes in found.items()]


def actions_of(rows: list[LayerRow]) -> list[str]:
    """The actions that occur, the usual ones first; keeping and recomputing are always among them."""
    present = {action for row in rows for action in row.bytes} | {"keep", "recompute"}
    return [action for action in ACTIONS if action in present] + sorted(present - set(ACTIONS))
