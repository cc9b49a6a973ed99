"""Ops that a replay leaves out: which those are, and what to hold at a price when they count."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lowtide
from graphs import random_graph, repeated_blocks, seldom_saved
from lowtide import StepGraph, simulate
from lowtide.eagerstep import EagerStep
from lowtide.errors import PlanError
from lowtide.plans import Plan, Recompute
from lowtide.solvers.pricing import Pricing, keepable
from lowtide.solvers.references import recomputes
from referee import replay

SEEDS = range(300)


class Rotated(nn.Module):
    """A query that is projected, rotated and then used by an op that saves it."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8, bias=False)
        self.register_buffer("cos", torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        query = self.project(x)
        turned = torch.cat([-query[..., 4:], query[..., :4]], dim=-1)
        return (query * self.cos + turned).exp().sin()


def rotated() -> tuple[StepGraph, int, dict[str, list[int]]]:
    """A step with such a call, its number, and its ops by name, counted from its first."""
    model = nn.Sequential(nn.Linear(8, 8), Rotated(), nn.Linear(8, 1))
    x = torch.randn(4, 2, 8)
    graph = lowtide.trace(model, lambda x: model(x).sum(), x, mode="real")
    call = graph.calls_by_path["1"][0]
    first, end = graph.calls[call].first, graph.calls[call].end
    by_name: dict[str, list[int]] = {}
    for op in range(first, end):
        by_name.setdefault(graph.ops[op].name.split(".")[1], []).append(op - first)
    return graph, call, by_name


def test_what_was_computed_for_held_outputs_alone() -> None:
    graph, call, ops = rotated()
    (added,) = ops["add"]
    expected = sorted([*ops["mm"], *ops["neg"], *ops["cat"], *ops["mul"]])
    assert list(graph.unneeded.of(call, (added,))) == expected
    # The projection is read by both: to hold one of them spares nothing, the rotation goes with the other.
    assert graph.unneeded.of(call, tuple(ops["mul"])) == ()
    assert list(graph.unneeded.of(call, tuple(ops["cat"]))) == ops["neg"]
    assert list(graph.unneeded.of(call, (*ops["mul"], *ops["cat"]))) == sorted([*ops["mm"], *ops["neg"]])
    assert graph.unneeded.of(call, ()) == ()


def test_what_is_left_out_takes_little_time_and_its_room_and_what_it_reads_stays() -> None:
    graph, call, ops = rotated()
    graph = replace(graph, ops=tuple(replace(op, seconds=1.0 if op.outputs else 0.0) for op in graph.ops))
    graph = replace(graph, hardware=replace(graph.hardware, spare_s=1 / 8))
    held = Plan(regions=(Recompute("1", keep_ops=tuple(ops["add"])),))
    skipping = Plan(regions=recomputes(graph, {call: tuple(ops["add"])}))
    assert skipping.regions[0].skip_ops == graph.unneeded.of(call, tuple(ops["add"]))
    plain, less = simulate(graph, held), simulate(graph, skipping)
    spared_s = 4 * (1 - 1 / 8)  # the product, the sign, the pieces joined, the cosines
    assert less.replayed_s == plain.replayed_s - spared_s
    # The pieces are joined for nobody, should nobody ask; until they are let go, the half that was negated stays.
    more = less.total_bytes - plain.total_bytes
    first, half_bytes = graph.calls[call].first, 4 * 2 * 4 * 4
    longer = [op - first for op, phase in zip(less.ops[more > 0], less.phases[more > 0], strict=True) if phase == 1]
    assert longer == [*ops["mul"], *ops["exp"]] and more[more != 0].tolist() == [half_bytes] * 2
    assert replay(graph, skipping).extra_s == less.replayed_s


def test_a_chain_that_is_left_out_keeps_what_its_first_op_reads() -> None:
    graph, call, ops = rotated()
    first, end = graph.calls[call].first, graph.calls[call].end
    projected, negated, joined = (graph.ops[first + ops[name][0]].outputs[0] for name in ("mm", "neg", "cat"))
    values = list(graph.values)
    values[projected] = replace(values[projected], dropped=first + ops["mul"][0] + 1)
    graph = replace(graph, values=tuple(values))
    left_out = graph.unneeded.of(call, tuple(ops["add"]))
    until = graph.values[joined].dropped
    assert graph.unneeded.lasting(call, left_out, end) == {projected: until, negated: until}
    # An op that a replay does not come to is not remembered.
    assert graph.unneeded.lasting(call, left_out, first + ops["cat"][0]) == {}


def test_what_is_needed_cannot_be_left_out() -> None:
    graph, _, ops = rotated()
    plan = Plan(regions=(Recompute("1", keep_ops=tuple(ops["mul"]), skip_ops=tuple(ops["mm"])),))
    with pytest.raises(PlanError, match=r"1 is to skip ops \[\d+\], and what they make is needed"):
        simulate(graph, plan)


@pytest.mark.parametrize("flag", ["random", "collective", "custom", "opaque", "index"])
def test_ops_that_do_more_than_to_make_their_outputs_run(flag: str) -> None:
    graph, call, ops = rotated()
    at = graph.calls[call].first + ops["mm"][0]
    changed = replace(graph.ops[at], flags=(flag,))
    graph = replace(graph, ops=(*graph.ops[:at], changed, *graph.ops[at + 1 :]))
    assert ops["mm"][0] not in graph.unneeded.of(call, tuple(ops["add"]))


def test_memory_that_no_one_fills_leaves_out_nothing() -> None:
    """It is filled by kernels that no trace sees, which may read anything."""
    graph, call, ops = rotated()
    at = graph.calls[call].end - 1
    changed = replace(graph.ops[at], name="aten.empty_like.default")
    assert graph.unneeded.of(call, tuple(ops["add"]))
    graph = replace(graph, ops=(*graph.ops[:at], changed, *graph.ops[at + 1 :]))
    assert not graph.unneeded.of(call, tuple(ops["add"]))


class Numbers(nn.Module):
    """Has Python read numbers from what is computed for that alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        scale = x.detach().abs().amax(dim=(0, 1))
        return self.linear(x).exp() * scale.tolist()[0]


def test_what_no_op_reads_is_for_python() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Numbers())
    graph = lowtide.trace(model, lambda x: model(x).sum(), torch.randn(4, 2, 8), mode="real")
    call = graph.calls_by_path["1"][0]
    names = [op.name.split(".")[1] for op in graph.ops[graph.calls[call].first : graph.calls[call].end]]
    assert {"abs", "amax"} <= set(names)
    assert graph.unneeded.of(call, (names.index("addmm"),)) == ()


def some_held(graph: StepGraph, rng: random.Random) -> dict[int, tuple[int, ...]]:
    """Calls of which none is inside another, each with outputs to hold."""
    may_keep, found = keepable(graph)[0], dict[int, tuple[int, ...]]()
    for index, call in enumerate(graph.calls):
        is_inside = any(outer < index < graph.arrays.after[outer] for outer in found)
        if call.path and call.end > call.first and not is_inside and rng.random() < 0.7:
            ops = [op - call.first for op in range(call.first, call.end) if may_keep[op]]
            found[index] = tuple(sorted(rng.sample(ops, rng.randint(0, len(ops)))))
    return found


def leaving_out(seed: int) -> tuple[StepGraph, Plan]:
    """A random step, and a plan of which the replays may leave out something."""
    if seed % 2:
        graph = seldom_saved(seed, num_ops=12)
    else:
        graph = random_graph(seed, num_ops=24) if seed % 4 else repeated_blocks(seed)
    return graph, Plan(regions=recomputes(graph, some_held(graph, random.Random(seed))))


@pytest.mark.parametrize("seed", SEEDS)
def test_no_garbage_is_read(seed: int) -> None:
    graph, plan = leaving_out(seed)
    found, verdict = simulate(graph, plan), replay(graph, plan)
    assert found.total_bytes.tolist() == verdict.events
    assert found.extra_s == pytest.approx(verdict.extra_s, abs=1e-9)
    played = EagerStep(graph, plan)
    played.play()
    for name, column in played.columns().items():
        assert np.array_equal(getattr(found, name), column), name


def test_random_steps_leave_something_out() -> None:
    """Else the test above would say nothing. And some keep what is read by that longer than they would."""
    num_skipped = num_lasting = 0
    for graph, plan in map(leaving_out, SEEDS):
        num_skipped += sum(len(region.skip_ops) for region in plan.regions)
        running = Plan(regions=tuple(replace(region, skip_ops=()) for region in plan.regions))
        num_lasting += simulate(graph, plan).total_bytes.tolist() != simulate(graph, running).total_bytes.tolist()
    assert num_skipped >= 60 and num_lasting >= 10, (num_skipped, num_lasting)


def least_by_brute_force(pricing: Pricing, call: int, price: float, may: list[int]) -> float:
    """The least seconds and price of bytes of a region over all sets of outputs to hold, of ops that it may hold."""
    graph, facts = pricing.graph, pricing.graph.calls[call]
    stop, held = pricing._stop[call], pricing._held[pricing._depth[call]]
    must = [op - facts.first for op in range(facts.first, facts.end) if pricing.must_keep[op]]
    costs = []
    for size in range(len(may) + 1):
        for chosen in combinations(may, size):
            kept = tuple(sorted((*must, *chosen)))
            spared = {*kept, *graph.unneeded.of(call, kept)}
            run = (op for op in range(facts.first, stop) if op - facts.first not in spared)
            seconds = sum(graph.ops[op].seconds for op in run)
            replayed = (op for op in spared if op in kept or facts.first + op < stop)
            seconds += sum(min(graph.ops[facts.first + op].seconds, graph.hardware.spare_s) for op in replayed)
            costs.append(seconds + price * sum(held[facts.first + op] for op in kept))
    return min(costs)


def test_the_best_to_hold_at_a_price() -> None:
    """Of any outputs; and of those that hooks are shown, where a region may hold others too and watching costs."""
    looked_at = [0, 0]
    for seed in range(90):
        kinds = repeated_blocks, random_graph, lambda seed: seldom_saved(seed, num_ops=6)
        graph = kinds[seed % 3](seed)
        hardware = replace(graph.hardware, dispatch_s=1 / 16, forward_dispatch_factor=(1.0, 4.0, 8.0)[seed // 3 % 3])
        hardware = replace(hardware, spare_s=(0.0, 0.1, 0.5)[seed // 9 % 3])
        graph = replace(graph, hardware=hardware)
        plain = simulate(graph)
        pricing = Pricing(graph, plain, int(plain.ops[plain.peak_event]))
        for way, holds in enumerate(pricing.ways):
            for price, call in product((0.0, 0.01, 0.03, 0.1, 0.3), holds.cuts.calls):
                first, may = graph.calls[call].first, pricing.keepable_in(call)
                may = [op - first for op in may if not pricing.must_keep[op]]
                if way == 1:
                    may = [op for op in may if graph.shown.are_all(call, (op,))]
                if len(may) <= 8:
                    looked_at[way] += 1
                    inner_s = holds.costs(price)[call] - holds.fees_s[call]
                    best = least_by_brute_force(pricing, call, price, may)
                    assert inner_s == pytest.approx(best, rel=1e-6, abs=1e-9)
    assert min(looked_at) > 50, looked_at


def test_what_is_held_is_what_is_priced() -> None:
    """Of two ways to hold outputs, each names the ops that come to its price; the second only those that are shown."""
    num_unlike = 0
    for seed in range(120):
        graph = seldom_saved(seed // 2)
        ops = list(graph.ops)
        for op in random.Random(seed // 2).sample(range(graph.num_forward), 3 * (seed % 2)):  # which have to be held
            ops[op] = replace(ops[op], flags=("index",))
        hardware = replace(graph.hardware, dispatch_s=1 / 16, forward_dispatch_factor=(1.0, 4.0, 8.0)[seed // 2 % 3])
        hardware = replace(hardware, spare_s=(0.0, 0.1, 0.5)[seed // 6 % 3])
        graph = replace(graph, ops=tuple(ops), hardware=hardware)
        plain = simulate(graph)
        pricing = Pricing(graph, plain, int(plain.ops[plain.peak_event]))
        for way, holds in enumerate(pricing.ways):
            for price, call in product((0.01, 0.03, 0.1), np.flatnonzero(holds.fees_s < np.inf).tolist()):
                facts, kept = graph.calls[call], tuple(holds.kept(call, price))
                spared = {*kept, *graph.unneeded.of(call, kept)}
                run = [op for op in range(facts.first, pricing._stop[call]) if op - facts.first not in spared]
                held = pricing._held[pricing._depth[call]]
                paid = price * sum(held[facts.first + op] for op in kept) + sum(graph.ops[op].seconds for op in run)
                replayed = (op for op in spared if op in kept or facts.first + op < pricing._stop[call])
                paid += sum(min(graph.ops[facts.first + op].seconds, hardware.spare_s) for op in replayed)
                assert holds.costs(price)[call] - holds.fees_s[call] == pytest.approx(paid, rel=1e-6, abs=1e-9)
                assert way == 0 or graph.shown.are_all(call, kept)
                watching_s = pricing.watching_s(call, kept) - graph.shown.sparing_s(call, kept)
                assert way == 0 or not kept or holds.fees_s[call] == pytest.approx(watching_s)
                num_unlike += way == 1 and list(kept) != pricing.ways[0].kept(call, price)
    assert num_unlike > 20, num_unlike
