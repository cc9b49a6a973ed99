"""`to_html`: the report of a plan as one HTML page, with styles, script and data inline.

The template and the scripts are in `assets/`; tables are rendered here, charts are drawn in the browser from
`charts.chart_data`. To add a section, write a function that returns its HTML, pass it to the template in `to_html`, and
put its name into `assets/page.html`.

The page loads nothing from the network. Its content security policy allows only the script whose hash it names, so a
module name that was not escaped could still not run code.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from lowtide.plans.plan_text import HEAD, KEPT
from lowtide.reports.charts import chart_data, trace_json
from lowtide.reports.report_facts import ReportFacts
from lowtide.reports.report_text import (
    Figure,
    LayerRow,
    actions_of,
    assumptions,
    cost_rows,
    duration,
    figures,
    layer_rows,
    peak_rows,
    percent,
    size,
    to_markdown,
    verdict,
    verdict_parts,
)
from lowtide.units import counted, own_version

_SCRIPTS = ("draw.js", "memory.js", "other_charts.js", "main.js")
_MOST_LAYERS = 300  # in the table; the chart has them all
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


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


def to_html(facts: ReportFacts) -> str:
    """Return the whole page."""
    script = "(() => {\n" + '"use strict";\n' + "\n".join(_asset(name) for name in _SCRIPTS) + "\n})();"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    root = next((call.kind for call in facts.graph.calls if call.parent < 0), "step")
    head, rest = verdict_parts(facts)
    return Template(_asset("page.html")).substitute(
        script_hash=f"sha256-{digest}",
        version=escape(own_version()),
        title=escape(f"{root}: {verdict(facts)}"),
        style=_asset("report.css"),
        subtitle=escape(f"{root} on {facts.graph.hardware.name}, {facts.plan.engine} engine"),
        mood="good" if facts.fits else "bad",
        verdict=_unbroken(f"<b>{escape(head)}</b>{escape(rest)}"),
        figures="\n".join(_figure(figure) for figure in figures(facts)),
        memory_text=escape(_memory_text(facts)),
        curve_text=escape(_curve_text(facts)),
        alternatives=_alternatives(facts),
        candidates=_candidates(facts),
        layers_text=escape("Bytes of each layer by action; the table below has the numbers."),
        layers=_layers(facts),
        peak_hint=escape(_peak_hint(facts)),
        bars_text=escape("Both peaks by kind; the table below has the numbers of the one with the plan."),
        peak=_peak(facts),
        cost_hint=escape(_cost_hint(facts)),
        costs=_costs(facts),
        copies=_copies(facts),
        assumptions="\n".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in assumptions(facts)),
        files="\n".join(_files(facts)),
        data=script_json(chart_data(facts)),
        script=script,
    )


def script_json(content: Any) -> str:
    """Return JSON that is safe inside a script element: characters of tags are escaped."""
    text = json.dumps(content, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return files("lowtide.reports").joinpath("assets").joinpath(name).read_text(encoding="utf-8")


def _unbroken(text: str) -> str:
    """Return text without line breaks between a number and its unit."""
    return re.sub(r"(?<=\d) (?=%|[KMGT]iB|B\b)", "&nbsp;", text)


def _figure(figure: Figure) -> str:
    tag = f'<span class="tag {escape(figure.source)}">{escape(figure.source)}</span>'
    return (
        f'<div><dt>{escape(figure.name)} {tag}</dt><dd class="number">{escape(figure.number)}</dd>'
        f'<dd class="beside">{escape(figure.beside)}</dd></div>'
    )


# Tables.


def _table(head: Sequence[str], rows: Sequence[str]) -> str:
    """Return an HTML table. A heading that ends in `|` marks numbers; an empty one, except the first, marks bars."""
    cells = []
    for column, name in enumerate(head):
        kind = "n" if name.endswith("|") else "w" if name or not column else "b"
        cells.append(f'<th scope="col" class="{kind}">{escape(name.removesuffix("|"))}</th>')
    return f"<table><thead><tr>{''.join(cells)}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _row(*cells: str, kind: str = "") -> str:
    return f'<tr class="{kind}">{"".join(cells)}</tr>'


def _words(text: str, before: str = "") -> str:
    return f'<td class="w{" marked" if before else ""}">{before}{escape(text)}</td>'


def _number(text: str, bad: bool = False) -> str:
    return f'<td class="n{" bad" if bad else ""}">{escape(text)}</td>'


def _bar(share: float) -> str:
    return f'<td class="b"><i style="width:{100 * share:.1f}%"></i></td>'


def _alternatives(facts: ReportFacts) -> str:
    step_s = facts.graph.step_s or 1.0

    def row(name: str, mark: str, peak: int, slower: float, kind: str = "") -> str:
        over = 0 < facts.budget_bytes < peak
        return _row(_words(name, mark), _number(size(peak), bad=over), _number(percent(slower)), kind=kind)

    rows = [row("this plan", '<i class="letter dot">•</i>', facts.planned.peak_bytes, facts.slowdown, "here")]
    for index, other in enumerate(facts.alternatives):
        mark = f'<i class="letter">{_LETTERS[index % 26]}</i>'
        rows.append(row(other.name, mark, other.peak_bytes, other.extra_s / step_s))
    note = '<p class="hint" style="margin:8px 0 0">Peaks in colour are over the budget.</p>'
    is_over = any(0 < facts.budget_bytes < other.peak_bytes for other in facts.alternatives)
    return _table(["", "peak|", "slower|"], rows) + (note if is_over else "")


def _candidates(facts: ReportFacts) -> str:
    """Return the section on the candidates that `fit` ran, or nothing if there were none."""
    if not facts.candidates:
        return ""
    rows = []
    for trial in facts.candidates:
        name, *numbers, outcome = trial.cells
        kind = "here" if trial.outcome == KEPT else ""
        rows.append(_row(_words(name), *map(_number, numbers), _words(outcome), kind=kind))
    first, *heads, last = HEAD
    hint = "Plans that were considered for this budget, and what real steps with them measured, run in turns."
    return (
        '<section aria-labelledby="tried-h"><h2 id="tried-h">Candidates tried</h2>'
        f'<p class="hint">{hint}</p><div class="scroll">'
        f"{_table([first, *(f'{head}|' for head in heads), last], rows)}</div></section>"
    )


def _layers(facts: ReportFacts) -> str:
    rows = layer_rows(facts)
    actions = actions_of(rows)

    def line(name: str, some: Sequence[LayerRow], kind: str = "") -> str:
        sums = [sum(row.bytes.get(action, 0) for row in some) for action in actions]
        return _row(_words(name), *(_number(size(each)) for each in (*sums, sum(sums))), kind=kind)

    lines = [line(row.layer, [row]) for row in rows[:_MOST_LAYERS]]
    if rest := rows[_MOST_LAYERS:]:
        lines.append(line(counted(len(rest), "more layer"), rest))
    lines.append(line("total", rows, "total"))
    return _table(["layer", *(f"{action}|" for action in actions), "all|"], lines)


def _peak(facts: ReportFacts) -> str:
    rows = peak_rows(facts)
    most = max((row.bytes for row in rows), default=1)
    lines = [
        _row(_words(row.what), _words(row.where), _bar(row.bytes / most), _number(size(row.bytes))) for row in rows
    ]
    lines.append(
        _row(_words("total"), _words(""), _bar(0), _number(size(sum(row.bytes for row in rows))), kind="total")
    )
    return _table(["what", "where it was made", "", "bytes|"], lines)


def _costs(facts: ReportFacts) -> str:
    rows = cost_rows(facts)
    if not rows:
        return ""
    most, step_s = max(row.seconds for row in rows) or 1.0, facts.graph.step_s or 1.0
    lines = [
        _row(
            _words(f"{row.what}, {counted(row.num_calls, 'call')}" if row.num_calls else row.what),
            _number(size(row.bytes) if row.bytes else ""),
            _bar(row.seconds / most),
            _number(duration(row.seconds)),
            _number(percent(row.seconds / step_s)),
        )
        for row in rows
    ]
    seconds = sum(row.seconds for row in rows)
    held, added = _number(size(sum(row.bytes for row in rows))), _number(duration(seconds))
    total = _row(_words("total"), held, _bar(0), added, _number(percent(seconds / step_s)), kind="total")
    return _table(["what", "not held|", "", "added|", "of the step|"], [*lines, total])


def _copies(facts: ReportFacts) -> str:
    planned = facts.planned
    if not planned.copies:
        return '<p class="hint" style="margin:0">Nothing is moved off the device by this plan.</p>'
    rows = []
    for kind, name in (("out", "out, to the host or disk"), ("in", "back in"), ("stall", "waited for")):
        copies = [copy for copy in planned.copies if copy.kind == kind]
        moved = sum(facts.graph.values[copy.value].bytes for copy in copies)
        seconds = sum(copy.end_s - copy.start_s for copy in copies)
        rows.append(_row(_words(name), _number(str(len(copies))), _number(size(moved)), _number(duration(seconds))))
    hint = (
        f"Copies run beside the compute; at most {size(planned.host_bytes)} are on the host or disk at once. The lanes "
        "under the memory chart show when they run, and when the step waits for them."
    )
    table = _table(["", "copies|", "bytes|", "time|"], rows)
    return f'<p class="hint">{escape(hint)}</p><div class="scroll">{table}</div>'


# Sentences.


def _memory_text(facts: ReportFacts) -> str:
    kinds = ", ".join(f"{name} {size(part)}" for name, part in facts.planned.peak_by_kind.items() if part)
    peak = f"The peak of {size(facts.planned.peak_bytes)} is in the {facts.planned.peak_phase}: {kinds}."
    return (
        f"Memory over the step. {peak} "
        f"Without a plan it is {size(facts.plain.peak_bytes)}. Arrow keys move along the step, plus and minus zoom."
    )


def _curve_text(facts: ReportFacts) -> str:
    return (
        f"Slowdown against peak memory. This plan: {size(facts.planned.peak_bytes)}, {percent(facts.slowdown)} slower; "
        f"the smallest peak found is {size(facts.curve.floor_bytes)}. The table beside it has the alternatives."
    )


def _peak_hint(facts: ReportFacts) -> str:
    planned = facts.planned
    where = f" of {planned.peak_path}" if planned.peak_path else ""
    return (
        f"The peak of {size(planned.peak_bytes)} is in the {planned.peak_phase}{where}. Equal values of several "
        "layers are one row, with * for the number of the layer."
    )


def _cost_hint(facts: ReportFacts) -> str:
    if facts.plan.is_plain:
        return "Nothing: every activation is kept."
    return "Modules whose activations are dropped and recomputed in the backward, and other costs of the plan."


# Files.


def _files(facts: ReportFacts) -> list[str]:
    return [
        _packed("plan.json", facts.plan.to_json(), "the plan with its graph: lowtide.Plan.from_json reads it"),
        _packed("trace.json", trace_json(facts), "opens in ui.perfetto.dev or chrome://tracing"),
        _packed("report.md", to_markdown(facts), "the verdict and the tables as Markdown"),
    ]


def _packed(name: str, text: str, what: str) -> str:
    """Return a link to a compressed file inside the page; the page's script offers it decompressed."""
    packed = base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
    link = f'<a href="data:application/gzip;base64,{packed}" download="{name}.gz" data-name="{name}">{name}.gz</a>'
    return f"<li>{link}<span>{escape(what)}</span></li>"
