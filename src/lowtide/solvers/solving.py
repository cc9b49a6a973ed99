"""`solve`: the fastest plan that fits, and how much faster any plan could be."""

from __future__ import annotations

from lowtide.errors import PlanError
from lowtide.graph import StepGraph
from lowtide.plans import ENGINES, Plan
from lowtide.solvers.compiled import CompiledSearch
from lowtide.solvers.pressing import lossy_codecs
from lowtide.solvers.searching import Search
from lowtide.solvers.twolines import TwoLineSearch
from lowtide.units import parse_bytes


def solve(
    graph: StepGraph,
    budget: int | str,
    *,
    host: int | str = 0,
    disk: int | str = 0,
    lossy: str | tuple[str, ...] | None = None,
    engine: str = "eager",
    time_limit_s: float = 10.0,
    threads: int | None = None,
) -> Plan:
    """The fastest plan found whose simulated peak fits in `budget`, with a bound on how much faster any plan could be.

    `budget` covers the whole step, parameters and gradients included; `"80%"` is of the device the graph was traced
    for. `host` and `disk` are bytes that values may be moved to. A budget at or above the plain peak gives a plan that
    adds nothing. For `engine="compiled"` the plan says which single values a compiled step saves. The same graph and
    budget give the same plan everywhere: a search does so much work and no more, about what a core does in
    `time_limit_s`. Only where a machine takes three times as long does the clock cut it short: then the best so far.

    `lossy` is a codec, or several, that values may be written with where that is cheaper than to recompute or move
    them (`"int8"`, `"float8_e4m3"`, ...); **gradients are approximate then**. None compresses nothing.

    `threads` is the most that the search may use. Plans do not depend on it: today one is used.

    Raises `InfeasibleBudgetError`, naming the smallest budget that would do and what fills it.
    """
    if threads is not None and (type(threads) is not int or threads < 1):
        raise ValueError(f"threads is {threads!r}: it must be None, or a number of threads from 1 on")
    search = search_for(graph, engine, host, disk, time_limit_s, lossy)
    total = graph.hardware.memory_bytes or None
    return search.plan(parse_bytes(budget, total_bytes=total))


def search_for(
    graph: StepGraph,
    engine: str,
    host: int | str,
    disk: int | str,
    time_limit_s: float,
    lossy: str | tuple[str, ...] | None = None,
) -> Search | TwoLineSearch | CompiledSearch:
    """What finds plans for an engine."""
    if not isinstance(graph, StepGraph):
        raise TypeError(f"a StepGraph is needed, from lowtide.trace, not {type(graph).__name__}")
    if engine not in ENGINES:
        raise ValueError(f"engine is {engine!r}: it must be {' or '.join(map(repr, ENGINES))}")
    host_bytes, disk_bytes, codecs = parse_bytes(host), parse_bytes(disk), lossy_codecs(lossy)
    if engine == "eager" and graph.has_host_line:
        return TwoLineSearch(graph, host_bytes, disk_bytes, time_limit_s, codecs)
    if engine == "eager":
        return Search(graph, host_bytes, disk_bytes, time_limit_s, codecs)
    if codecs:
        raise PlanError("plans for the compiled engine compress no values: leave out lossy, or plan eagerly")
    if host_bytes or disk_bytes:
        raise PlanError("plans for the compiled engine move no values yet: leave out host and disk, or plan eagerly")
    return CompiledSearch(graph, time_limit_s)
