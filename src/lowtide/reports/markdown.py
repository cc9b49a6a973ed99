"""A report as Markdown, for a pull request: the verdict and its tables."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.plans.trials import HEAD
from lowtide.reports.facts import Facts
from lowtide.reports.tables import cost_rows, peak_rows
from lowtide.reports.wording import assumptions, duration, figures, percent, size, verdict

_ESCAPES = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", **{character: f"\\{character}" for character in "\\`*_[]|~#"}}
)


def to_markdown(facts: Facts) -> str:
    """The verdict, its numbers, the alternatives, what fills the peak, and what the plan costs."""
    others = [("this plan", facts.planned.peak_bytes, facts.slowdown)]
    step_s = facts.graph.step_s or 1.0
    others += [(other.name, other.peak_bytes, other.extra_s / step_s) for other in facts.alternatives]
    peak, costs = peak_rows(facts), cost_rows(facts)
    parts = [
        verdict(facts),
        table(["", "", "source", ""], [(f.name, f.number, f.source, f.beside) for f in figures(facts)]),
        "**Beside it** (predicted)",
        table(["", "peak", "slower"], [(name, size(peak), percent(slower)) for name, peak, slower in others], "lrr"),
        "**What fills the peak** (predicted)",
        table(
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
            table(HEAD, [trial.cells for trial in facts.candidates], "lrrrrl"),
        ]
    if costs:
        rows = [(row.what, str(row.num_calls or ""), size(row.bytes), duration(row.seconds)) for row in costs]
        total = "total", "", size(sum(row.bytes for row in costs)), duration(sum(row.seconds for row in costs))
        parts += ["**What the plan costs** (predicted)"]
        parts += [table(["what", "calls", "bytes not held", "seconds"], [*rows, total], "lrrr")]
    parts.append("\n".join(f"- {escaped(name)}: {escaped(text)}" for name, text in assumptions(facts)))
    return "\n\n".join(parts) + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], alignment: str = "") -> str:
    """A Markdown table; `alignment` has a letter per column, l or r."""
    rules = ["---:" if letter == "r" else "---" for letter in alignment.ljust(len(head), "l")]
    lines = [head, rules, *([escaped(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def escaped(text: str) -> str:
    """Text that Markdown shows as it is: names of modules may hold anything."""
    return " ".join(text.translate(_ESCAPES).split())
