"""`solve(engine="compiled")`: the minimum cut against all subsets, the simulated step against the referee, budgets."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain as joined
from itertools import combinations, pairwise

import pytest
import torch
import zoo

import lowtide
from graphs import chain, random_graph, repeated_blocks
from lowtide.errors import InfeasibleBudgetError, PlanError
from lowtide.graph import StepGraph
from lowtide.graph.arrays import FUSED_SHARE, recompute_s
from lowtide.plans import Move, Plan, Recompute
from lowtide.simulator import PHASES, simulate
from lowtide.solvers.compiled_search import CompiledSearch, anchor_groups
from lowtide.solvers.min_cut import CutProblem
from sweeps import sweep

SEEDS = sweep(range(30), keep=8)
Key = tuple[float, int, int]


def spiced(seed: int, *, num_ops: int = 9) -> StepGraph:
    """A random step in which some ops are matrix products, and some cannot be recomputed."""
    graph, rng = random_graph(seed, num_ops=num_ops), random.Random(seed)
    ops = []
    for index, op in enumerate(graph.ops):
        flags = rng.choice((("random",), ("index",), ("collective",))) if rng.random() < 0.1 else ()
        is_forward = index < graph.num_forward
        ops.append(replace(op, flops=rng.choice((0, 1)), flags=flags) if is_forward else op)
    return replace(graph, ops=tuple(ops), step_s=sum(op.seconds for op in ops))


def compiled(keeps: tuple[int, ...]) -> Plan:
    return Plan(engine="compiled", keeps=keeps, budget_bytes=1 << 40)


def undecided(graph: StepGraph) -> list[int]:
    """The ops that may be saved or recomputed."""
    return list(graph.needs.derive(()).recomputed)


def subsets(items: list[int]) -> list[tuple[int, ...]]:
    return list(joined.from_iterable(combinations(items, size) for size in range(len(items) + 1)))


def budgets_of(graph: StepGraph, search: CompiledSearch, num: int = 7) -> list[int]:
    floor, plain = search.floor.peak_bytes, search.plain.peak_bytes
    return sorted({floor + (plain - floor) * step // (num - 1) for step in range(num)})


# A second opinion on what a compiled step holds. Times are keys: (position, 0, n) is the n-th recomputation before the
# op at that position, (position, 1, 0) the op itself; a life ends before a key.


def is_fixed(graph: StepGraph, index: int) -> bool:
    """Whether an op must not run again."""
    op = graph.ops[index]
    changed_later = {v for later in graph.ops[index + 1 :] for v in later.mutates}
    flagged = {"random", "index", "collective", "mutates", "opaque"} & set(op.flags)
    return bool(flagged or op.mutates or changed_later & {*op.outputs, *op.inputs})


def play(graph: StepGraph, keeps: tuple[int, ...]) -> tuple[list[tuple[str, int, int]], float]:
    """Phase, op and live bytes of each event, and the seconds of recomputation."""
    num, end, values = graph.num_forward, len(graph.ops), graph.values
    reads = [s for s in graph.saves if s.read >= 0 and values[s.value].born >= 0]

    def is_there(value: int) -> bool:
        """Whether the backward has it from the forward."""
        facts = values[value]
        return facts.born < 0 or facts.dropped > num or facts.born in keeps or is_fixed(graph, facts.born)

    again: dict[int, Key] = {}
    for position in range(num, end + 1):
        missing = [s.value for s in reads if s.read == position]
        wanted: set[int] = set()
        while missing:
            value = missing.pop()
            op = values[value].born
            if not is_there(value) and op not in again and op not in wanted:
                wanted.add(op)
                missing += graph.ops[op].inputs
        for number, op in enumerate(sorted(wanted)):
            again[op] = (position, 0, number)

    never: Key = (end + 1, 0, 0)
    lives: list[tuple[int, Key, Key]] = []
    for value, facts in enumerate(values):
        python_end = never if facts.dropped == end else (facts.dropped, 0, 0)
        uses = [(key[0], key[1], key[2] + 1) for op, key in again.items() if value in graph.ops[op].inputs]
        saved_ends, made_ends = list(uses), list(uses)
        for s in reads:
            if s.value == value:
                for ends, last in ((saved_ends, s.released), (made_ends, s.used if s.used >= 0 else s.released)):
                    ends.append((last, 1 if s.read == last else 0, 0))
        born = facts.born
        if born >= num or born < 0:
            lives.append((value, (born, 1, 0), python_end if born >= 0 else never))
        else:
            holds = saved_ends if is_there(value) else []
            lives.append((value, (born, 1, 0), max([python_end, *holds])))
            if born in again:
                key = again[born]
                lives.append((value, key, max([(key[0], key[1], key[2] + 1), *([] if is_there(value) else made_ends)])))

    events = [((op, 1, 0), "forward" if op < num else "backward", op) for op in range(end)]
    events += [(key, "replay", op) for op, key in again.items()]
    found = []
    for key, phase, op in [*sorted(events), ((end, 1, 0), "optimizer", -1)]:
        live = graph.optimizer_state_bytes + graph.other_bytes
        live += graph.ops[op].workspace_bytes if op >= 0 else graph.optimizer_workspace_bytes
        for value, start, before in lives:
            if start <= key < before and values[value].kind != "elsewhere":
                live += values[value].bytes
        found.append((phase, op, live))
    return found, sum(recompute_s(graph.ops[op]) for op in again)


@pytest.mark.parametrize("seed", sweep(range(150), keep=20))
def test_the_simulated_step_is_what_a_second_opinion_says(seed: int) -> None:
    graph, rng = spiced(seed, num_ops=14), random.Random(seed)
    for share in (0.0, 0.3, 0.7, 1.0):
        keeps = tuple(op for op in range(graph.num_forward) if rng.random() < share)
        timeline = simulate(graph, compiled(keeps))
        events, extra_s = play(graph, keeps)
        phases = [PHASES[phase] for phase in timeline.phases]
        assert list(zip(phases, timeline.ops.tolist(), timeline.total_bytes.tolist(), strict=True)) == events
        assert timeline.extra_s == extra_s
        assert (timeline.live_bytes >= 0).all() and (timeline.live_bytes[:, 4] == 0).all()
        event = rng.randrange(len(events))
        workspace = graph.ops[events[event][1]].workspace_bytes if events[event][1] >= 0 else 0
        workspace = workspace if events[event][1] >= 0 else graph.optimizer_workspace_bytes
        static = graph.optimizer_state_bytes + graph.other_bytes
        static += sum(v.bytes for v in graph.values if v.born < 0 and v.kind != "elsewhere")
        assert sum(timeline.live_at(event).values()) == events[event][2] - workspace - static


@pytest.mark.parametrize("seed", SEEDS)
def test_everything_saved_is_no_larger_than_the_plain_step(seed: int) -> None:
    graph = spiced(seed)
    full = simulate(graph, compiled(tuple(range(graph.num_forward))))
    assert full.extra_s == 0
    assert (full.total_bytes <= simulate(graph).total_bytes).all()
    assert simulate(graph, Plan(engine="compiled")).peak_bytes == simulate(graph).peak_bytes


# The cut.


def least_cost(graph: StepGraph, at: int, price: float) -> float:
    """The least seconds + price * bytes at a moment, over all sets of ops to recompute after it."""
    values, num = graph.values, graph.num_forward
    reads = [s for s in graph.saves if s.read >= 0 and values[s.value].born >= 0]
    in_use = {s.value for s in reads if s.read <= at < (s.used if s.used >= 0 else s.released)}

    def charge(value: int) -> int:
        facts = values[value]
        is_there = facts.born < 0 or facts.dropped > num or facts.dropped > at or value in in_use
        return 0 if is_there or facts.born > at or facts.kind != "activation" else facts.bytes

    free_to_choose = [op for op in range(num) if graph.ops[op].outputs and not is_fixed(graph, op)]
    best = float("inf")
    for recomputed in subsets(free_to_choose):
        needed = {s.value for s in reads if s.read > at}
        needed |= {value for op in recomputed for value in graph.ops[op].inputs}
        size = sum(charge(value) for value in needed if values[value].born not in recomputed)
        best = min(best, sum(recompute_s(graph.ops[op]) for op in recomputed) + price * size)
    return best


@pytest.mark.parametrize("seed", SEEDS)
def test_the_cut_is_the_best_of_all_subsets(seed: int) -> None:
    graph, rng = spiced(seed), random.Random(seed)
    for at in rng.sample(range(len(graph.ops)), min(3, len(graph.ops))):
        moment = CutProblem(graph, at)
        for price in (0.0, 0.001, 0.01, 0.03, 0.1, 0.5, 10.0):
            choice = moment.best(price)
            best = least_cost(graph, at, price)
            assert choice.seconds + price * choice.bytes == pytest.approx(best, rel=1e-7, abs=1e-12)
            assert choice.dual_s <= best * (1 + 1e-12)
            assert choice.dual_s == pytest.approx(best, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_corners_of_the_hull_are_convex(seed: int) -> None:
    graph = spiced(seed, num_ops=20)
    hull = CutProblem(graph, graph.num_forward - 1).hull
    slopes = []
    for before, after in pairwise(hull):
        assert after.seconds >= before.seconds
        if after.bytes < before.bytes:
            slopes.append((after.seconds - before.seconds) / (before.bytes - after.bytes))
    assert all(b >= a * (1 - 1e-6) for a, b in pairwise(slopes))


# Plans.


@pytest.mark.parametrize("seed", sweep(range(80), keep=10))
def test_no_plan_beats_the_bound_and_ours_fits(seed: int) -> None:
    graph = spiced(seed)
    search = CompiledSearch(graph)
    timelines = [simulate(graph, compiled(keeps)) for keeps in subsets(undecided(graph))]
    for budget in budgets_of(graph, search):
        plan = search.plan(budget)
        best_s = min(t.extra_s for t in timelines if t.peak_bytes <= budget)
        assert plan.lower_bound_s <= best_s * (1 + 1e-9)
        assert search.lower_bound_s(budget) <= best_s * (1 + 1e-9)
        assert plan.extra_s >= best_s * (1 - 1e-9)
        timeline = simulate(graph, plan)
        assert (timeline.peak_bytes, timeline.extra_s) == (plan.peak_bytes, plan.extra_s)
        assert plan.peak_bytes <= budget == plan.budget_bytes


@pytest.mark.parametrize("seed", sweep(range(60), keep=8))
def test_more_budget_is_never_slower_and_less_never_larger(seed: int) -> None:
    graph = repeated_blocks(seed, num_blocks=6) if seed % 2 else spiced(seed, num_ops=20)
    search = CompiledSearch(graph)
    plans = [search.plan(budget) for budget in budgets_of(graph, search, 25)]
    for small, large in pairwise(plans):
        assert small.extra_s >= large.extra_s
        assert small.peak_bytes <= large.peak_bytes
    assert plans == [
        CompiledSearch(graph).plan(plan.budget_bytes) for plan in plans
    ]  # in whatever order they are asked
    assert plans[-1].extra_s == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_budget_below_the_floor_is_refused_with_the_floor(seed: int) -> None:
    graph = spiced(seed)
    with pytest.raises(InfeasibleBudgetError, match="below this step's floor") as caught:
        lowtide.solve(graph, 1, engine="compiled")
    floor = caught.value.floor_bytes
    assert lowtide.solve(graph, floor, engine="compiled").peak_bytes == floor
    with pytest.raises(InfeasibleBudgetError):
        lowtide.solve(graph, floor - 1, engine="compiled")


@pytest.mark.parametrize("seed", SEEDS)
def test_what_cannot_be_recomputed_is_not(seed: int) -> None:
    graph = spiced(seed, num_ops=20)
    search = CompiledSearch(graph)
    for budget in budgets_of(graph, search):
        plan = search.plan(budget)
        timeline = simulate(graph, plan)
        again = [op for op, phase in zip(timeline.ops, timeline.phases, strict=True) if PHASES[phase] == "replay"]
        assert len(set(again)) == len(again)
        assert not any(is_fixed(graph, op) for op in again)
        fixed = {op for op in range(graph.num_forward) if is_fixed(graph, op)}
        needs = graph.needs
        assert fixed & set(needs.keeps_of(needs.derive(range(graph.num_forward)))) <= set(plan.keeps)


def without_calls(graph: StepGraph) -> StepGraph:
    ops = tuple(replace(op, call=-1) for op in graph.ops)
    return replace(graph, ops=ops, saves=tuple(replace(s, call=-1) for s in graph.saves), calls=())


@pytest.mark.parametrize("has_calls", [True, False])
def test_anchors_keep_recomputation_small(has_calls: bool) -> None:
    """A chain of n equal layers fits into about two square roots of n: without anchors it would all be held at once."""
    graph = chain([100] * 64) if has_calls else without_calls(chain([100] * 64))
    assert len(anchor_groups(graph)) >= 62
    assert simulate(graph).peak_bytes > 6000
    nothing_saved = simulate(graph, compiled(()))
    assert nothing_saved.peak_bytes > 6000
    assert CompiledSearch(graph).floor.peak_bytes <= 2100


def test_fused_ops_take_a_share_of_their_seconds() -> None:
    op = chain([1]).ops[0]
    assert recompute_s(replace(op, name="aten.gelu.default", seconds=1.0)) == FUSED_SHARE
    assert recompute_s(replace(op, seconds=1.0, flops=1)) == 1.0
    assert recompute_s(replace(op, seconds=1.0, flags=("custom",))) == 1.0
    assert recompute_s(replace(op, name="aten._scaled_dot_product_flash_attention.default", seconds=1.0)) == 1.0


def test_an_op_whose_input_is_changed_later_is_not_recomputed() -> None:
    graph = chain([10, 10, 10])
    assert graph.needs.recomputable == [True, True, True]
    ops = list(graph.ops)
    ops[2] = replace(ops[2], mutates=(1,))  # the first layer's output, which the second reads
    assert replace(graph, ops=tuple(ops)).needs.recomputable == [False, False, False]


# Plans as data.


def test_a_compiled_plan_goes_to_json_and_back() -> None:
    graph = replace(chain([100] * 8, seconds=0.5), step_s=8.0)
    plan = lowtide.solve(graph, 700, engine="compiled")
    assert plan.engine == "compiled" and plan.keeps and not plan.regions
    assert Plan.from_json(plan.to_json()) == plan
    assert sum(plan.bytes_by_action().values()) == sum(row.bytes for row in plan.rows) == 700
    with pytest.raises(PlanError, match="not in order"):
        Plan.from_json(replace(plan, keeps=(3, 1)).to_json())
    with pytest.raises(PlanError, match="keeps"):
        Plan.from_json(plan.to_json().replace('"keeps":[', '"keeps":[-1,'))


def test_a_compiled_plan_in_words() -> None:
    graph = replace(chain([100] * 8, seconds=0.5), step_s=8.0)
    plan = lowtide.solve(graph, 700, engine="compiled")
    assert "compiled engine" in str(plan) and "recomputed" in str(plan) and "layers.1" in str(plan)
    words = "\n".join(plan.explain(f"layers.{index}") for index in range(1, 8))
    assert "is not saved: it is recomputed right before it is needed" in words
    assert "nothing to do" in str(lowtide.solve(graph, "1GiB", engine="compiled"))
    assert "nothing to do" in str(Plan(engine="compiled"))


def test_engines_do_not_mix() -> None:
    with pytest.raises(PlanError, match="an eager plan has regions"):
        Plan(keeps=(1,))
    with pytest.raises(PlanError, match="a compiled plan has ops to keep"):
        Plan((Recompute("layers.0"),), engine="compiled")
    with pytest.raises(PlanError, match="1 moves"):
        Plan(moves=(Move("layers.0"),), engine="compiled")
    with pytest.raises(PlanError, match="'eager' or 'compiled', not 'jit'"):
        Plan(engine="jit")
    with pytest.raises(PlanError, match="another model"):
        simulate(chain([1, 1]), compiled((2,)))


def test_engines_that_do_not_exist_and_moves_that_do_not_either() -> None:
    graph = chain([100] * 4, link_bytes_per_s=8.0)
    for solver in (lambda **k: lowtide.solve(graph, 300, **k), lambda **k: lowtide.sweep(graph, [300], **k)):
        with pytest.raises(ValueError, match="'eager' or 'compiled'"):
            solver(engine="jit")
        with pytest.raises(PlanError, match="move no values yet"):
            solver(engine="compiled", host="1GiB")


def test_a_sweep_shows_what_people_know_under_the_same_engine() -> None:
    graph = replace(chain([100] * 8, seconds=0.5), step_s=8.0)
    frontier = lowtide.sweep(graph, engine="compiled")
    assert {plan.engine for plan in frontier.plans} == {"compiled"}
    names = [reference.name for reference in frontier.references]
    assert names[0] == "nothing" and "a checkpoint per block" in names
    for plan in frontier.plans:
        for reference in frontier.references:
            assert reference.peak_bytes > plan.budget_bytes or reference.extra_s >= plan.extra_s


def test_a_gpt_of_24_layers_at_ten_budgets() -> None:
    with torch.device("meta"):
        job = zoo.gpt(24, 2048, heads=16, vocabulary=8192, tokens=(8, 2048))
        job.model.to(torch.bfloat16)
    graph = lowtide.trace(job.model, job.loss_fn, *job.batch, device="H100")
    search = CompiledSearch(graph)
    floor, plain = search.floor.peak_bytes, search.plain.peak_bytes
    assert floor < plain / 2
    for step in range(10):
        budget = floor + (plain - floor) * step // 10
        plan = search.plan(budget)
        assert plan.peak_bytes <= budget
        assert plan.gap <= (0.02 if step else 0.03), f"{100 * plan.gap:.2f} % at {budget} bytes"
