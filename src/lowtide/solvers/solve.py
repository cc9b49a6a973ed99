"""Entry points of the solvers: `solve` (one budget), `sweep` (many budgets) and `shortlist` (several plans for `fit`).

`solve` returns the fastest plan found whose simulated peak fits, with a bound on how much faster any plan could be.
`sweep` solves many budgets with one search and adds the plans that users would write themselves.

`shortlist` returns up to eight different plans for one budget, which `fit` runs and times, because predictions can be
wrong: the host's time for a region, a retained output or a copy by several times, peaks by a few per cent. The list
has the fastest plan of the search; the fastest without offload; the fastest on a host that is busy now and then;
checkpoints that users would write with torch; the fastest without nested regions and retained outputs; and faster plans
that exceed the budget in simulation, by a few per cent (torch's checkpoints by up to 25 % if no plan fits).

Cost of `shortlist`: one search, or with `host=` two with half of `time_limit_s` each; about a third of a search for
the plan with 2 % more memory; and some thirty simulations.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from lowtide.errors import InfeasibleBudgetError, PlanError
from lowtide.graph.segments import block_levels, every_kth
from lowtide.graph.step_graph import StepGraph
from lowtide.plans.step_plan import ENGINES, Frontier, Plan, Reference
from lowtide.simulator.timeline import simulate
from lowtide.solvers.baselines import reference_plans, reference_regions
from lowtide.solvers.candidate import Candidate, Regions, faster, smaller, with_predictions
from lowtide.solvers.compiled_search import CompiledSearch, compiled_references
from lowtide.solvers.compression import lossy_codecs
from lowtide.solvers.eager_search import EagerSearch, TwoLineSearch
from lowtide.units import parse_bytes


def solve(
    graph: StepGraph,
    budget: int | str,
    *,
    host: int | str = 0,
    lossy: str | tuple[str, ...] | None = None,
    engine: str = "eager",
    time_limit_s: float = 10.0,
) -> Plan:
    """The fastest plan found whose simulated peak fits in `budget`, with a bound on how much faster any plan could be.

    `budget` covers the whole step, parameters and gradients included; `"80%"` is of the device the graph was traced
    for. `host` is the number of bytes of host memory that values may be moved to. A budget at or above the plain peak
    gives a plan that adds nothing. For `engine="compiled"` the plan says which single values a compiled step saves.

    The same graph and budget give the same plan on every machine: the search counts its work and stops after about as
    much as one core does in `time_limit_s`. CPU time stops it only on a machine that needs three times as much;
    the result is then the best plan so far.

    `lossy` is a codec, or several, that values may be written with where that is cheaper than to recompute or move
    them (`"int8"`, `"float8_e4m3"`, ...); **gradients are approximate then**. None compresses nothing.

    Raises `InfeasibleBudgetError`, naming the smallest budget that would do and what fills it.
    """
    search = search_for(graph, engine, host, time_limit_s, lossy)
    total = graph.hardware.memory_bytes or None
    return search.plan(parse_bytes(budget, total_bytes=total))


def search_for(
    graph: StepGraph,
    engine: str,
    host: int | str,
    time_limit_s: float,
    lossy: str | tuple[str, ...] | None = None,
) -> EagerSearch | TwoLineSearch | CompiledSearch:
    """The search for an engine. Raises for options that the engine or the graph does not support."""
    if not isinstance(graph, StepGraph):
        raise TypeError(f"a StepGraph is needed, from lowtide.trace, not {type(graph).__name__}")
    if engine not in ENGINES:
        raise ValueError(f"engine is {engine!r}: it must be {' or '.join(map(repr, ENGINES))}")
    host_bytes, codecs = parse_bytes(host), lossy_codecs(lossy)
    if engine == "eager":
        return _eager_search(graph, host_bytes, time_limit_s, codecs)
    if codecs:
        raise PlanError("plans for the compiled engine compress no values: leave out lossy, or plan eagerly")
    if host_bytes:
        raise PlanError("plans for the compiled engine move no values yet: leave out host, or plan eagerly")
    return CompiledSearch(graph, time_limit_s)


def _eager_search(
    graph: StepGraph, host_bytes: int, time_limit_s: float, codecs: tuple[str, ...]
) -> EagerSearch | TwoLineSearch:
    return (TwoLineSearch if graph.has_host_line else EagerSearch)(graph, host_bytes, time_limit_s, codecs)


_NUM_BUDGETS = 16


def sweep(
    graph: StepGraph,
    budgets: Sequence[int | str] | None = None,
    *,
    host: int | str = 0,
    lossy: str | tuple[str, ...] | None = None,
    engine: str = "eager",
    time_limit_s: float = 60.0,
) -> Frontier:
    """Plans for many budgets (default: sixteen from the floor to the plain peak), from one search.

    Budgets below the floor are left out. `Frontier` also has the alternatives, simulated on the same graph: no plan, a
    checkpoint per block, every second block, and selective checkpointing that keeps all matrix products.
    """
    search = search_for(graph, engine, host, time_limit_s, lossy)
    floor, plain = search.floor.peak_bytes, search.plain.peak_bytes
    if budgets is None:
        steps = range(_NUM_BUDGETS)
        wanted = sorted({floor + (plain - floor) * step // (_NUM_BUDGETS - 1) for step in steps})
    else:
        total = graph.hardware.memory_bytes or None
        wanted = sorted(parse_bytes(budget, total_bytes=total) for budget in budgets)
    plans = []
    for budget in wanted:
        try:
            plans.append(search.plan(budget))
        except InfeasibleBudgetError:
            continue
    return Frontier(tuple(plans), alternatives(graph, engine), graph.step_s, floor, plain)


def alternatives(graph: StepGraph, engine: str) -> tuple[Reference, ...]:
    """The plans that users would write with torch's checkpoint, with their simulated costs on this graph."""
    known = compiled_references(graph) if engine == "compiled" else reference_plans(graph)
    timelines = {name: simulate(graph, plan) for name, plan in known.items()}
    return tuple(Reference(name, t.peak_bytes, t.extra_s) for name, t in timelines.items())


# How far a plan may exceed the budget in simulation and still be tried: simulated peaks are within 4 % of measured ones
# in the tests. A larger number costs real steps, a smaller one misses plans that fit.
NEARLY = 0.05
# The same for torch's checkpoints if no plan fits: a budget that one of them holds must not be infeasible because its
# peak is predicted badly. On an Informer, a chain with values that only Python held, it was predicted 6.3 % too high.
_NEARLY_IF_NONE_FITS = 0.25
_SEARCHED_NEARLY = 0.02  # the same for the search's own plans, which use the whole budget they are given
_NOTICEABLE = 0.02  # of the step: a plan over the budget must be faster by more than timing noise
_MOST = 8  # plans on the list

SEARCHED, UNMOVED, SIMPLE = "fastest that fits", "fastest without moves", "fastest with simple regions"
STEADY = "fastest on a busy host"
LARGER, SMALLEST, REMEMBERED = "fastest for 2 % more memory", "smallest peak", "kept before"


@dataclass(frozen=True)
class ShortlistedPlan:
    """A plan with predictions, and the name of its origin.

    `is_essential` plans are never cut from the list, because guarantees depend on them: the search's own plan, the one
    without offload, the one for a busy host, and the best that torch's own checkpoint can do.
    """

    name: str
    plan: Plan
    is_essential: bool = False


def shortlist(
    graph: StepGraph,
    budget: int,
    *,
    host: int | str = 0,
    lossy: str | tuple[str, ...] | None = None,
    time_limit_s: float = 10.0,
) -> tuple[list[ShortlistedPlan], InfeasibleBudgetError | None]:
    """Plans for `budget` bytes, the fastest predicted first; only the plain step if it fits.

    The searches share `time_limit_s`: with `host` there are two, one without moves. Some plans exceed the budget by up
    to 5 % in simulation, torch's checkpoints by up to 25 % if none fits: the second result is then the error that
    `solve` would raise.
    """
    host_bytes, codecs = parse_bytes(host), lossy_codecs(lossy)
    if host_bytes:
        time_limit_s /= 2
    search = unmoved = _eager_search(graph, host_bytes, time_limit_s, codecs)
    found: list[ShortlistedPlan] = []
    error: InfeasibleBudgetError | None = None
    try:
        found.append(ShortlistedPlan(SEARCHED, search.plan(budget), is_essential=True))
    except InfeasibleBudgetError as raised:
        error = raised
    if found and found[0].plan.is_plain:
        return found, None
    if host_bytes:
        unmoved = _eager_search(graph, 0, time_limit_s, codecs)
        if not found or any(move.to != "device" for move in found[0].plan.moves):
            with contextlib.suppress(InfeasibleBudgetError):
                found.append(ShortlistedPlan(UNMOVED, unmoved.plan(budget), is_essential=True))
    found += _steady(search, budget, found[0].plan) if error is None else []
    found += _torch_checkpoints(unmoved.limiting, budget, NEARLY if error is None else _NEARLY_IF_NONE_FITS)
    found += _nearly(search, budget, found[0].plan if error is None else None)
    found += _simple(unmoved.limiting, budget)
    if host_bytes:  # the bounds of a search without moves do not hold for plans with moves
        bound_s = search.lower_bound_s(budget)
        found = [
            replace(each, plan=replace(each.plan, lower_bound_s=min(bound_s, each.plan.lower_bound_s)))
            for each in found
        ]
    different: dict[object, ShortlistedPlan] = {}
    for candidate in found:
        different.setdefault((candidate.plan.regions, candidate.plan.moves), candidate)
    ranked = sorted(different.values(), key=lambda each: (not each.is_essential, each.plan.extra_s))[:_MOST]
    return sorted(ranked, key=lambda each: each.plan.extra_s), error


def _steady(search: EagerSearch | TwoLineSearch, budget: int, fastest: Plan) -> list[ShortlistedPlan]:
    """Where there are two lines, the plan that is fastest on a busy host, if `fastest` is noticeably slower there."""
    if not isinstance(search, TwoLineSearch):
        return []
    fastest_s = fastest.extra_s + simulate(search.graph, fastest).lines.busy_host_s
    most_s = (fastest_s - _NOTICEABLE * search.graph.step_s) / (1 + _NOTICEABLE)  # less by that share of its step
    plan = search.steadiest(budget, most_s)
    return [] if plan is None else [ShortlistedPlan(STEADY, plan, is_essential=True)]


def _nearly(search: EagerSearch | TwoLineSearch, budget: int, fastest: Plan | None) -> list[ShortlistedPlan]:
    """The plan for a little more memory, if it is noticeably faster; the smallest plan, if none fits."""
    if fastest is None:
        if search.floor.peak_bytes > (1 + NEARLY) * budget:
            return []
        return [ShortlistedPlan(SMALLEST, with_predictions(search.floor, budget, 0.0))]
    plan = search.plan(int((1 + _SEARCHED_NEARLY) * budget))
    if fastest.extra_s - plan.extra_s < _NOTICEABLE * (search.graph.step_s + fastest.extra_s):
        return []
    bound_s = min(search.lower_bound_s(budget), plan.extra_s)
    return [ShortlistedPlan(LARGER, replace(plan, budget_bytes=budget, lower_bound_s=bound_s))]


def _simple(search: EagerSearch, budget: int) -> list[ShortlistedPlan]:
    """Of the simulated candidates that fit, the fastest without nested regions and retained outputs."""
    fitting = (each for each in search.candidates.values() if each.peak_bytes <= budget)
    best = faster(*(each for each in fitting if _is_simple(search.graph, each)))
    return [] if best is None else [ShortlistedPlan(SIMPLE, _plan_of(search, best, budget))]


def _torch_checkpoints(search: EagerSearch, budget: int, nearly: float) -> list[ShortlistedPlan]:
    """What users can write with torch's checkpoint: the fastest that fit, and faster ones that nearly fit.

    Checkpoints on blocks, chains in equal parts, and selective checkpoints are ranked separately, because their
    costs on the host differ. `nearly` is the share by which they may exceed the budget.
    """
    plans = {name: search.cost(regions, 0.0) for name, regions in _checkpoints(search, budget) if regions}
    in_parts = {} if search.segmenting is None else search.segmenting.equal_parts()
    in_parts = {name: search.judged(each) for name, each in in_parts.items()}
    selective = {name: each for name, each in plans.items() if name.startswith("selective")}
    of_blocks = {name: each for name, each in plans.items() if name not in selective}
    plans |= in_parts
    chosen: dict[str, bool] = {}
    for of_kind in (of_blocks, in_parts, selective):
        fitting = faster(*(each for each in of_kind.values() if each.peak_bytes <= budget))
        limit_s = fitting.extra_s - _NOTICEABLE * search.graph.step_s if fitting is not None else float("inf")
        near = [each for each in of_kind.values() if budget < each.peak_bytes <= (1 + nearly) * budget]
        near = [each for each in near if each.extra_s < limit_s]
        wanted = [fitting, smaller(*near), faster(*near)]
        names = [name for name, each in of_kind.items() if any(each is one for one in wanted)]
        chosen |= dict.fromkeys(names, of_kind is not selective)
    found = [
        ShortlistedPlan(name, _plan_of(search, plans[name], budget), is_essential)
        for name, is_essential in chosen.items()
    ]
    if search.plain.peak_bytes <= (1 + nearly) * budget:
        found.append(ShortlistedPlan("nothing", with_predictions(search.plain, budget, 0.0), is_essential=True))
    return found


def _checkpoints(search: EagerSearch, budget: int) -> Iterator[tuple[str, Regions]]:
    """Names and regions of checkpoints on blocks, and of selective checkpoints."""
    if not search.critical_points:
        return
    graph, levels = search.graph, block_levels(search.graph)
    for kind, blocks in zip(("block", "stage", "outer stage"), reversed(levels), strict=False):
        yield f"a checkpoint per {kind}", _tidied(search, blocks)
        for step, nth in ((2, "second"), (3, "third"), (4, "fourth")):
            yield f"every {nth} {kind}", _tidied(search, every_kth(graph, blocks, step))
    every = levels[-1] if levels else []
    for limit in (budget, int((1 + NEARLY) * budget)):
        for name, part in (("first", lambda n: every[:n]), ("last", lambda n: every[len(every) - n :])):
            # The fewest blocks that fit: peaks fall with the number of recomputed blocks.
            number = bisect_left(
                range(len(every) + 1), -limit, key=lambda n: -search.cost(_tidied(search, part(n)), 0.0).peak_bytes
            )
            if number <= len(every):
                yield f"the {name} {number} blocks", _tidied(search, part(number))
    for name, held in reference_regions(graph).items():
        if name.startswith("selective"):
            yield name, search.nesting.without_redundant(held)
            halved = {call: ops[1::2] for call, ops in held.items()}
            yield "selective, every other matmul kept", search.nesting.without_redundant(halved)


def _tidied(search: EagerSearch, calls: list[int]) -> Regions:
    return search.nesting.without_redundant(dict.fromkeys(calls, ()))


def _is_simple(graph: StepGraph, candidate: Candidate) -> bool:
    if candidate.share or candidate.codecs or not candidate.regions or any(candidate.regions.values()):
        return False
    calls = [graph.calls[call] for call in sorted(candidate.regions)]
    return all(one.end <= other.first for one, other in pairwise(calls))


def _plan_of(search: EagerSearch, candidate: Candidate, budget: int) -> Plan:
    return with_predictions(search.timeline_of(candidate), budget, search.lower_bound_s(budget))
