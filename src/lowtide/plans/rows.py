"""What becomes of each saved value under a plan, as rows for people."""

from __future__ import annotations

from dataclasses import replace

from lowtide.graph import StepGraph
from lowtide.plans import Plan, Row


def rows_of(graph: StepGraph, plan: Plan) -> tuple[Row, ...]:
    """One row per saved activation, where it is first saved, in the order of the forward."""
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
        row = Row(path, graph.nths[first] if first >= 0 else 0, facts.name, facts.bytes, action, seconds, region)
        if form is not None:
            coding_s = form.encode_s + form.decode_s
            row = replace(row, codec=form.codec, stored_bytes=form.bytes, coding_s=coding_s)
        rows.append(row)
    return tuple(rows)


def _compiled_rows(graph: StepGraph, plan: Plan) -> tuple[Row, ...]:
    """Values that the backward reads, and those saved to recompute others from."""
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
            rows.append(Row(path, graph.nths[call] if call >= 0 else 0, facts.name, facts.bytes, action, seconds))
    return tuple(rows)
