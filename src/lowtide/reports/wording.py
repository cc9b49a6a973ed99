"""Numbers and the verdict, as a report says them. Three digits: enough to tell a peak from its budget."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.reports.facts import Facts
from lowtide.units import in_bytes_unit, in_seconds_unit, own_version

PREDICTED, MEASURED = "predicted", "measured"


@dataclass(frozen=True)
class Figure:
    """One number of the summary: what it is, how it was come by, and what to compare it with."""

    name: str
    number: str
    source: str
    beside: str = ""


def size(num_bytes: float) -> str:
    """Bytes in the largest binary unit that leaves at least 1: `1536` is `1.50 KiB`."""
    number, unit = in_bytes_unit(num_bytes)
    return f"{number:.0f} B" if unit == "B" else f"{_three(number)} {unit}"


def duration(seconds: float) -> str:
    """Seconds in the unit that reads best: `0.0042` is `4.20 ms`."""
    number, unit = in_seconds_unit(seconds)
    return f"{_three(number)} {unit}" if seconds else "0 s"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _three(number: float) -> str:
    return f"{number:.2f}" if abs(number) < 9.995 else f"{number:.1f}" if abs(number) < 99.95 else f"{number:.0f}"


def verdict(facts: Facts) -> str:
    """The report in one line."""
    return "".join(verdict_parts(facts))


def verdict_parts(facts: Facts) -> tuple[str, str]:
    """Whether it fits, and the rest of the line."""
    plan, peak = facts.plan, size(facts.planned.peak_bytes)
    if not facts.budget_bytes:
        head = "No budget given"
    elif not facts.fits:
        head = f"Over the budget of {size(facts.budget_bytes)}"
    else:
        head = f"Fits in {size(facts.budget_bytes)}"
    saved = 1 - facts.planned.peak_bytes / facts.plain.peak_bytes if facts.plain.peak_bytes else 0.0
    less = f", {percent(abs(saved))} {'less' if saved >= 0 else 'more'} than the plain step"
    if plan.is_plain:
        head, less = f"{head} as it is: nothing to do", ""
    if facts.measured_peak_bytes is None:
        rest = f": peak {peak} predicted{less}"
    else:
        rest = f": peak {size(facts.measured_peak_bytes)} measured (predicted: {peak}{less})"
    if plan.is_plain:
        return head, f"{rest}."
    slower = f"{percent(facts.slowdown)} slower predicted"
    if facts.measured_slowdown is not None:
        slower = f"{percent(facts.measured_slowdown)} slower measured (predicted: {percent(facts.slowdown)})"
    gap = f", at most {percent(plan.gap)} of a step from the fastest plan there can be" if facts.budget_bytes else ""
    return head, f"{rest}; {slower}{gap}."


def figures(facts: Facts) -> list[Figure]:
    """The numbers of the verdict one by one, each with its source."""
    plan, graph = facts.plan, facts.graph
    plain = f"{size(facts.plain.peak_bytes)} without a plan"
    predicted = size(facts.planned.peak_bytes)
    if facts.measured_peak_bytes is None:
        found = [Figure("Peak", predicted, PREDICTED, plain)]
    else:
        found = [Figure("Peak", size(facts.measured_peak_bytes), MEASURED, f"predicted: {predicted}, and {plain}")]
    if facts.budget_bytes:
        used, source = facts.planned.peak_bytes, PREDICTED
        if facts.measured_peak_bytes is not None:
            used, source = facts.measured_peak_bytes, MEASURED
        beside = f"{percent(used / facts.budget_bytes)} of it used, {source}"
        found.append(Figure("Budget", size(facts.budget_bytes), "given", beside))
    step = f"{duration(graph.step_s)} {MEASURED if graph.is_measured else PREDICTED}"
    if facts.measured_slowdown is not None and facts.measured_step_s is not None:
        beside = f"{duration(facts.measured_step_s)} after {step}; {percent(facts.slowdown)} predicted"
        found.append(Figure("Slower", percent(facts.measured_slowdown), MEASURED, beside))
    else:
        beside = f"{duration(facts.planned.extra_s)} on top of {step}"
        if facts.measured_step_s is not None:
            beside += f"; the planned step took {duration(facts.measured_step_s)}, measured"
        found.append(Figure("Slower", percent(facts.slowdown), PREDICTED, beside))
    if facts.budget_bytes:
        bound = f"no plan adds less than {duration(plan.lower_bound_s)}"
        found.append(Figure("Gap to the bound", percent(plan.gap), PREDICTED, bound))
    return found


def assumptions(facts: Facts) -> list[tuple[str, str]]:
    """What the numbers rest on."""
    graph, hardware = facts.graph, facts.graph.hardware
    found = [
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
    if hardware.link_bytes_per_s and facts.planned.copies:
        found.append(("Copies", "one engine each way beside the compute, at the full bandwidth of the link."))
    found += [("Note", note) for note in (*graph.notes, *facts.notes)]
    versions = {"lowtide": own_version(), **graph.versions}
    found.append(("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())))
    found.append(("Graph", graph.fingerprint))
    return found


def _hardware(facts: Facts) -> str:
    hardware = facts.graph.hardware
    parts = [hardware.name]
    if hardware.memory_bytes:
        parts.append(f"{size(hardware.memory_bytes)} of memory")
    if hardware.link_bytes_per_s:
        parts.append(f"{hardware.link_bytes_per_s / 1e9:.1f} GB/s to the host, each way")
    return ", ".join(parts)
