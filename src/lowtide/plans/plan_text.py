"""A plan as text: the summary that `print(plan)` shows, `plan.explain(path)`, and the table of candidates of `fit`.

`rows_of` lists every saved activation with its action (keep, recompute, host, disk, compress). Solvers store these rows
in the plan; summary and explanations are made from them, and so need no graph.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from lowtide.errors import PlanError
from lowtide.graph.step_graph import Split, StepGraph
from lowtide.plans.step_plan import Plan, ValueRow
from lowtide.units import format_bytes, format_seconds


def rows_of(graph: StepGraph, plan: Plan) -> tuple[ValueRow, ...]:
    """Return one row per saved activation, at its first save, in the order of the forward."""
    if plan.engine == "compiled":
        return _compiled_rows(graph, plan)
    graph = plan.segmented(graph)
    regions, moves = plan.calls(graph), plan.moves_by_value(graph)
    forms = plan.forms(graph)
    owner = graph.outermost(regions)
    kept_ops = {graph.calls[call].first + op for call, region in regions.items() for op in region.keep_ops}
    held = {value for call in regions if owner[call] == call for value in graph.calls[call].inputs}
    saved: dict[int, list[int]] = {}
    for save in sorted(graph.saves, key=lambda save: save.made):
        if graph.values[save.value].kind == "activation":
            saved.setdefault(save.value, []).append(save.call)
    rows = []
    for value, savers in saved.items():
        facts, first = graph.values[value], savers[0]
        outside = any(owner[saver] < 0 for saver in savers)
        move, form = moves.get(value), forms.get(value)
        if move is not None and (form is not None or move.to != "device"):
            action = "compress" if move.to == "device" else move.to
        elif outside or value in held or facts.born in kept_ops:
            action = "keep"
        else:
            action = "recompute"
        path = graph.calls[first].path if first >= 0 else ""
        region = graph.calls[owner[first]].path if owner[first] >= 0 else ""
        seconds = graph.ops[facts.born].seconds if facts.born >= 0 else 0.0
        row = ValueRow(path, graph.nths[first] if first >= 0 else 0, facts.name, facts.bytes, action, seconds, region)
        if form is not None:
            coding_s = form.encode_s + form.decode_s
            row = replace(row, codec=form.codec, stored_bytes=form.bytes, coding_s=coding_s)
        rows.append(row)
    return tuple(rows)


def _compiled_rows(graph: StepGraph, plan: Plan) -> tuple[ValueRow, ...]:
    """Return rows for values that the backward reads and for values saved to recompute others from."""
    needs = graph.needs
    derived = needs.derive(range(graph.num_forward) if plan.is_plain else frozenset(plan.kept_ops(graph)))
    again = set(derived.recomputed)
    saver: dict[int, int] = {}
    for save in sorted(graph.saves, key=lambda save: save.made):
        if save.read >= 0:
            saver.setdefault(save.value, save.call)
    for value in derived.saved:
        saver.setdefault(value, graph.ops[graph.values[value].born].call)
    rows = []
    for value in sorted(saver, key=lambda value: (graph.values[value].born, value)):
        facts, call = graph.values[value], saver[value]
        if facts.kind == "activation" and facts.born >= 0:
            action = "recompute" if facts.born in again and not needs.is_free[value] else "keep"
            path = graph.calls[call].path if call >= 0 else ""
            seconds = needs.seconds[facts.born]
            rows.append(ValueRow(path, graph.nths[call] if call >= 0 else 0, facts.name, facts.bytes, action, seconds))
    return tuple(rows)


_MOST_LINES = 18
_VERBS = {
    "keep": "kept",
    "recompute": "recomputed",
    "host": "moved to host memory",
    "disk": "moved to disk",
    "compress": "compressed",
}


def summary(plan: Plan) -> str:
    """Return budget, peaks, slowdown and gap, and a table in which layers with equal actions are one line."""
    recomputes = any(row.action == "recompute" for row in plan.rows)
    if plan.is_plain or (plan.engine == "compiled" and plan.rows and not recomputes):
        head = "Plan: nothing to do, every activation is kept"
        if plan.budget_bytes:
            head += f"; peak {format_bytes(plan.peak_bytes)} within {format_bytes(plan.budget_bytes)} (predicted)"
        if plan.measured_peak_bytes is not None:
            head += f", {format_bytes(plan.measured_peak_bytes)} measured"
        return head
    engine = " for the compiled engine" if plan.engine == "compiled" else ""
    source = "all numbers predicted" if plan.measured_peak_bytes is None else "predicted, but for the measured line"
    lines = [f"Plan{engine} ({source})"]
    if plan.step_s:
        lines += [
            f"  budget     {format_bytes(plan.budget_bytes)}",
            f"  peak       {format_bytes(plan.peak_bytes)}, {format_bytes(plan.plain_peak_bytes)} without a plan; "
            f"in the {plan.peak_phase}{' of ' + plan.peak_path if plan.peak_path else ''}",
            f"  step       {format_seconds(plan.step_s)} + {format_seconds(plan.extra_s)} ({100 * plan.slowdown:.1f} % "
            f"slower); at least {format_seconds(plan.lower_bound_s)} with any plan, a gap of {100 * plan.gap:.1f} %",
        ]
    if plan.measured_peak_bytes is not None:
        lines.append(f"  measured   {_measured(plan)}")
    sizes = {action: size for action, size in plan.bytes_by_action().items() if size}
    if sizes:
        lines.append("  saved      " + ", ".join(f"{format_bytes(s)} {_verb(a)}" for a, s in sizes.items()))
    if plan.is_lossy:
        lines.append(f"  lossy      {_lossy(plan)}")
    lines += [f"  split      {text}" for text in split_texts(plan.splits)]
    lines += _table(plan)
    return "\n".join(lines)


def split_texts(splits: Sequence[Split]) -> list[str]:
    """Return a sentence on each group of modules that run in the same number of parts."""
    groups: dict[tuple[str, int, str], list[str]] = {}
    for split in splits:
        groups.setdefault((split.kind, split.num_parts, re.sub(r"\d+", "#", split.path)), []).append(split.path)
    texts = []
    for (kind, num_parts, _), paths in groups.items():
        name = paths[0] if len(paths) == 1 else f"{paths[0]} ... {paths[-1]} ({len(paths)})"
        what = f"{name} and the loss" if kind == "loss" else name
        each = " each" if len(paths) > 1 else ""
        texts.append(f"{what} in {num_parts} parts{each}: gradients may differ in the last bits")
    return texts


def explain(plan: Plan, path: str) -> str:
    """Explain what happens to the values saved in module `path` and below it. Raises `PlanError` if there are none."""
    rows = [row for row in plan.rows if not path or _is_in(row.path, path)]
    inside = [region for region in plan.regions if any(_is_in(each, path) for each in region.paths)]
    parts = [split for split in plan.splits if _is_in(split.path, path)]
    if not rows and not inside and not parts:
        known = sorted({row.path for row in plan.rows})
        near = [name for name in known if name.split(".")[-1] == path.split(".")[-1]][:5] or known[:5]
        raise PlanError(f"the plan has no value saved in {path!r}. It has values saved in: {', '.join(near)}")
    lines = []
    for region in inside:
        held = f", but for the outputs of {len(region.keep_ops)} ops" if region.keep_ops else ""
        lines.append(f"{region.name} is recomputed in the backward{' as one' if region.more else ''}{held}.")
    lines += [f"{split.path} runs in {split.num_parts} parts, one after the other." for split in parts]
    lines += [f"{row.path or 'outside of modules'}: {_reason(row)}" for row in rows]
    return "\n".join(lines)


def _is_in(path: str, outer: str) -> bool:
    return path == outer or path.startswith(f"{outer}.")


def _verb(action: str) -> str:
    return _VERBS.get(action, action)


def _measured(plan: Plan) -> str:
    text = f"peak {format_bytes(plan.measured_peak_bytes or 0)}"
    if plan.measured_step_s is not None:
        text += f", step {format_seconds(plan.measured_step_s)}"
    if plan.measured_slowdown is not None:
        text += f", {format_seconds(plan.measured_plain_s or 0)} plain ({100 * plan.measured_slowdown:+.1f} %)"
    return text


def _lossy(plan: Plan) -> str:
    codecs = sorted({move.codec for move in plan.moves if move.is_lossy})
    coded = [row for row in plan.rows if row.codec]
    sizes = f" {format_bytes(sum(r.bytes for r in coded))} become {format_bytes(sum(r.stored_bytes for r in coded))}:"
    return f"by {', '.join(codecs)}{sizes if coded else ':'} gradients are approximate"


def _reason(row: ValueRow) -> str:
    what = f"{format_bytes(row.bytes)} made by {row.op}"
    if row.action == "recompute" and not row.region:
        own = f"{format_seconds(row.seconds)} for its own op"
        return f"{what} is not saved: it is recomputed right before it is needed, from saved values ({own})."
    if row.action == "recompute":
        return f"{what} is dropped and recomputed with {row.region} ({format_seconds(row.seconds)} for its own op)."
    if row.action == "keep" and row.region:
        return f"{what} is kept: {row.region} is replayed from it, or recomputing it costs too much for its size."
    if row.action == "keep":
        return (
            f"{what} is kept: there is room for it, and recomputing would cost {format_seconds(row.seconds)} or more."
        )
    coding = (
        f"{row.codec} reduces it to {format_bytes(row.stored_bytes)}, in {format_seconds(row.coding_s)} both ways; "
        "gradients are approximate"
    )
    if row.action == "compress":
        return f"{what} is compressed on the device: {coding}."
    end = f", compressed: {coding}." if row.codec else "."
    return f"{what} is {_verb(row.action)}: its copy runs beside the compute{end}"


def _table(plan: Plan) -> list[str]:
    """Return a line per module with the actions on its values; neighbours with equal actions share a line."""
    per_module: dict[str, Counter[str]] = {}
    for row in plan.rows:
        if row.action != "keep" or row.region or plan.engine == "compiled":
            name = _block(row.path) if plan.engine == "compiled" else row.region or row.path
            per_module.setdefault(name, Counter())[row.action] += row.bytes
    for region in plan.regions:
        per_module.setdefault(region.name, Counter())
    kept_ops = {region.name: len(region.keep_ops) for region in plan.regions}

    def key(path: str) -> tuple[object, ...]:
        return re.sub(r"\d+", "#", path), tuple(sorted(per_module[path].items())), kept_ops.get(path, 0)

    lines = []
    ordered = sorted(per_module, key=lambda path: (re.sub(r"\d+", "#", path), _numbers(path)))
    for (_, sizes, ops), group in groupby(ordered, key=key):
        paths = list(group)
        link = " to " if " ... " in paths[0] else " ... "
        name = paths[0] or "outside of modules" if len(paths) == 1 else f"{paths[0]}{link}{paths[-1]} ({len(paths)})"
        parts = [f"{format_bytes(size)} {_verb(action)}" for action, size in sizes]  # type: ignore[attr-defined]
        parts += [f"{ops} ops held"] if ops else []
        lines.append(f"  {name}: {', '.join(parts) or 'recomputed'}{' each' if len(paths) > 1 else ''}")
    if len(lines) > _MOST_LINES:
        lines = [*lines[: _MOST_LINES - 1], f"  ... and {len(lines) - _MOST_LINES + 1} lines more"]
    return lines


def _block(path: str) -> str:
    """Return the block that a module belongs to: its path up to the first number."""
    match = re.match(r"(?:[^.]*\.)*?\d+(?=\.|$)", path)
    return match.group() if match else path


def _numbers(path: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path)]


KEPT = "kept"
HEAD = ("candidate", "peak predicted", "peak measured", "slower predicted", "slower measured", "outcome")


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate of `fit`: predicted and measured peak and slowdown (None: not measured), and the outcome.

    Peaks are of the whole step. Slowdowns are relative to the plain step; the measured one is None if the plain step
    did not run. `outcome` is "kept", or says why the candidate was not kept.
    """

    name: str
    num_regions: int
    num_moves: int
    predicted_peak_bytes: int
    predicted_slowdown: float
    measured_peak_bytes: int | None = None
    measured_step_s: float | None = None
    measured_slowdown: float | None = None
    outcome: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of the columns of `HEAD`."""
        peak, slower = self.measured_peak_bytes, self.measured_slowdown
        return (
            self.name,
            format_bytes(self.predicted_peak_bytes),
            "" if peak is None else format_bytes(peak),
            f"{100 * self.predicted_slowdown:.1f} %",
            "" if slower is None else f"{100 * slower:.1f} %",
            self.outcome,
        )


def trials_table(trials: Sequence[Trial]) -> str:
    """Format the trials as a text table."""
    rows = [HEAD, *(trial.cells for trial in trials)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *numbers, outcome in rows:
        cells = [name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=False))]
        lines.append("  ".join([*cells, outcome]))
    return "\n".join(lines)
