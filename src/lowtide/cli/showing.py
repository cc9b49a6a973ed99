"""Results in two forms: what a person reads, and the same as data. Predicted numbers say that they are."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

import lowtide
from lowtide.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from lowtide.cli.benching import Comparison
    from lowtide.cli.doctor import Finding

Shown = tuple[RenderableType, dict[str, Any]]

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def estimate(guess: lowtide.Estimate, budget: int | str | None) -> Shown:
    hardware = guess.graph.hardware
    data = {
        "predicted": True,
        "peak_bytes": guess.peak_bytes,
        "floor_bytes": guess.floor_bytes,
        "static_bytes": guess.graph.static_bytes,
        "bytes_per_sample": guess.bytes_per_sample,
        "batch_size": guess.batch_size,
        "largest_at_peak": dict(guess.largest),
        "step_s": guess.graph.step_s,
        "device": hardware.name,
        "device_bytes": hardware.memory_bytes,
        "notes": list(guess.graph.notes),
    }
    text = "\n".join([str(guess), *(f"Note: {note}" for note in guess.graph.notes)])
    if budget is None:
        return text, data
    allowed = parse_bytes(budget, total_bytes=hardware.memory_bytes or None)
    verdict = "plain" if guess.fits(allowed) else "with a plan" if guess.floor_bytes <= allowed else "no"
    data |= {"budget_bytes": allowed, "fits": verdict}
    said = {
        "plain": "fits as it is",
        "with a plan": "fits with a plan: lowtide plan",
        "no": "is too small for recomputing alone: smaller batches, or lowtide plan --host",
    }
    return f"{text}\nA budget of {format_bytes(allowed)} {said[verdict]}", data


def plan(found: lowtide.Plan, output: Path | None) -> Shown:
    graph = found.graph
    return str(found), {
        "predicted": True,
        "is_plain": found.is_plain,
        "engine": found.engine,
        "budget_bytes": found.budget_bytes,
        "peak_bytes": found.peak_bytes,
        "peak_path": found.peak_path,
        "peak_phase": found.peak_phase,
        "plain_peak_bytes": found.plain_peak_bytes,
        "step_s": found.step_s,
        "is_step_measured": graph is not None and graph.is_measured,
        "extra_s": found.extra_s,
        "slowdown": found.slowdown,
        "lower_bound_s": found.lower_bound_s,
        "gap": found.gap,
        "num_regions": len(found.regions),
        "num_moves": len(found.moves),
        "bytes_by_action": found.bytes_by_action(),
        "device": found.hardware.name,
        "fingerprint": found.fingerprint,
        "notes": [] if graph is None else list(graph.notes),
        "output": None if output is None else str(output),
    }


def sweep(frontier: lowtide.Frontier, png: Path | None) -> Shown:
    names = ("budget_bytes", "peak_bytes", "extra_s", "slowdown", "gap")
    return str(frontier), {
        "predicted": True,
        "floor_bytes": frontier.floor_bytes,
        "plain_peak_bytes": frontier.plain_peak_bytes,
        "step_s": frontier.step_s,
        "plans": [{name: getattr(found, name) for name in names} for found in frontier.plans],
        "references": [asdict(reference) for reference in frontier.references],
        "png": None if png is None else str(png),
    }


def explanation(found: lowtide.Plan, module: str) -> Shown:
    def is_inside(path: str) -> bool:
        return path == module or path.startswith(f"{module}.")

    text = found.explain(module)
    return text, {
        "module": module,
        "text": text,
        "regions": [asdict(region) for region in found.regions if any(map(is_inside, region.paths))],
        "values": [asdict(row) for row in found.rows if is_inside(row.path)],
    }


def comparison(found: Comparison) -> Shown:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("measured")
    for heading in ("peak", "step", "slower", "gradient difference"):
        table.add_column(heading, justify="right", no_wrap=True)
    rows = []
    for row in found.rows:
        slower = found.slowdown(row)
        apart = row.gradient_difference
        is_odd = apart is not None and not math.isfinite(apart)  # which JSON has no number for
        rows.append({**asdict(row), "gradient_difference": str(apart) if is_odd else apart, "slowdown": slower})
        if row.problem or row.peak_bytes is None or row.step_s is None:
            table.add_row(row.name, row.problem, "", "", "")
            continue
        shown = "" if slower is None else f"{100 * slower:+.1f} %"
        difference = f"{apart:g}"
        table.add_row(row.name, format_bytes(row.peak_bytes), format_seconds(row.step_s), shown, difference)
    verdict = Text(f"budget {format_bytes(found.budget_bytes)}: ", style="bold")
    verdict.append(
        "held, with the same gradients" if found.holds else "did not hold", "green" if found.holds else "red"
    )
    data = {
        "holds": found.holds,
        "budget_bytes": found.budget_bytes,
        "rows": rows,
        "predicted_slowdown": found.plan.slowdown,
    }
    return Group(table, verdict), data


def findings(found: list[Finding]) -> Shown:
    table = Table(box=None, show_header=False, pad_edge=False)
    group = ""
    for finding in found:
        if finding.group != group:
            table.add_row(Text(finding.group, style="bold"))
            group = finding.group
        mark = {"ok": "", "note": "note: ", "problem": "problem: "}[finding.status]
        table.add_row(Text(f"  {finding.name}"), Text(mark, _STYLES[finding.status]) + Text(finding.text))
    problems = sum(finding.status == "problem" for finding in found)
    verdict = Text(f"{problems} problem{'s' * (problems != 1)} found", style=_STYLES["problem" if problems else "ok"])
    data = {"num_problems": problems, "findings": [finding.as_json() for finding in found]}
    return Group(table, verdict), data
