"""Which values the solver moves: inputs and retained outputs of regions, in all layers, as much as the link carries."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
import zoo
from torch import Tensor, nn

import lowtide
from lowtide import Plan, StepGraph
from lowtide.graph.time_lines import line_of
from lowtide.simulator import simulate
from lowtide.solvers.baselines import recomputes
from lowtide.solvers.eager_search import EagerSearch
from lowtide.solvers.interpolation import HullPath
from lowtide.solvers.placement import LinkLoads, OffloadSelector
from referee import replay

GIB = 1 << 30


@cache
def gpt() -> StepGraph:
    """A step whose memory is short while the loss is computed, and hardly elsewhere; with a fast link."""
    with torch.device("meta"):
        job = zoo.gpt(8, 2048, 16, 32000, (8, 2048))
        job.model.to(torch.bfloat16)
    graph = lowtide.trace(job.model, job.loss_fn, *job.batch, device="H200")
    return replace(graph, hardware=replace(graph.hardware, link_bytes_per_s=150e9))


def blocks_of(graph: StepGraph) -> list[int]:
    return [call for call, facts in enumerate(graph.calls) if facts.kind == "Block"]


@cache
def loads() -> LinkLoads:
    return EagerSearch(gpt(), GIB)._loads


class Doubling(nn.Module):
    """A block that saves a wider copy of its input, and not the input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x.double()).tanh().float()


def test_inputs_of_regions_move_though_nothing_saves_them() -> None:
    model = nn.Sequential(nn.Linear(64, 64), *(Doubling() for _ in range(4)))
    x = torch.randn(512, 64)

    def step() -> list[Tensor]:
        model.zero_grad()
        model(x).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    graph = lowtide.trace(model, lambda x: model(x).sum(), x, mode="real")
    graph = replace(graph, hardware=replace(graph.hardware, link_bytes_per_s=1e15))
    calls = [graph.calls_by_path[str(number)][0] for number in range(1, 5)]
    plan = OffloadSelector(graph, GIB).plan(dict.fromkeys(calls, ()), 1.0)
    inputs = {graph.calls[call].inputs[0] for call in calls}
    assert not inputs & {save.value for save in graph.saves}
    assert inputs <= set(plan.moves_by_value(graph))
    expected = step()
    with lowtide.apply(model, plan) as handle:
        assert all(map(torch.equal, step(), expected))
        assert handle.stats().moved_bytes >= 4 * x.nbytes


def test_a_link_lags_behind_no_more_than_it_should() -> None:
    graph = gpt()
    copies = simulate(graph, OffloadSelector(graph, 64 * GIB).plan({}, 1.0)).copies
    forward_s = sum(op.seconds for op in graph.ops[: graph.num_forward])
    born_s = {}
    clock = 0.0
    for op in graph.ops[: graph.num_forward]:
        clock += op.seconds
        born_s |= dict.fromkeys(op.outputs, clock)
    lags = [copy.start_s - born_s[copy.value] for copy in copies if copy.kind == "out"]
    longest = max(copy.end_s - copy.start_s for copy in copies)
    assert 0 < max(lags) <= forward_s / 16 + longest
    assert max(copy.end_s for copy in copies if copy.kind == "out") > 0.8 * forward_s


def test_a_replay_finds_all_that_its_region_holds() -> None:
    """As much may be on its way as a region holds elsewhere; with less, each replay would wait."""
    graph = gpt()
    number = next(number for number in range(257) if max(map(len, loads().regions(number).values())) <= 4)
    plan = OffloadSelector(graph, 64 * GIB).plan(loads().regions(number), 1.0)
    assert any(len(values) > 1 for values in plan.moved_outputs(graph).values())
    waits_s = [simulate(graph, replace(plan, in_flight_bytes=size)).stalled_s for size in (1, plan.in_flight_bytes)]
    assert waits_s[1] < 0.2 * waits_s[0]


def test_all_layers_are_loaded_alike() -> None:
    graph, held = gpt(), []
    blocks, largest = blocks_of(graph), 256 << 20

    def outputs_of(call: int, ops: tuple[int, ...]) -> list[int]:
        return [graph.ops[graph.calls[call].first + op].outputs[0] for op in ops]

    for number in range(0, 257, 16):
        regions = loads().regions(number)
        sizes = [sum(graph.values[value].bytes for value in outputs_of(call, regions[call])) for call in blocks]
        assert abs(sum(sizes[:4]) - sum(sizes[4:])) <= largest
        held.append(sum(sizes))
    assert held == sorted(held, reverse=True) and held[0] > 20 * held[-2] > 0
    assert not any(ops for ops in loads().regions(256).values())


def test_what_is_held_is_slowest_to_make_for_its_size() -> None:
    graph = gpt()
    call = blocks_of(graph)[3]
    first = graph.calls[call].first
    regions = [loads().regions(number)[call] for number in range(0, 256, 8)]
    held = next(ops for ops in reversed(regions) if ops)

    def worth(op: int) -> float:
        return graph.ops[first + op].seconds / graph.values[graph.ops[first + op].outputs[0]].bytes

    assert min(map(worth, held)) >= max(worth(op) for op in regions[0] if op not in held)


def test_outputs_that_cost_more_to_watch_than_to_make_are_not_held() -> None:
    slow = replace(line_of(gpt(), 0.0), hardware=replace(gpt().hardware, dispatch_s=1.0))  # with one time line
    search = EagerSearch(slow, GIB)
    assert not any(ops for number in (0, 100, 255) for ops in search._loads.regions(number).values())


def test_outputs_that_are_not_saved_in_a_block_are_not_held() -> None:
    call = blocks_of(gpt())[3]
    calls = gpt().calls[call]
    held = EagerSearch(gpt(), GIB)._loads.regions(0)[call]  # all that it may
    unsaved = [op for op in range(calls.first, calls.end) if gpt().retainable.depths[op] < 1]
    assert len(held) > 3 and any(gpt().ops[op].flops for op in unsaved)
    assert not any(op - calls.first in held for op in unsaved)


@pytest.mark.slow  # a search over eight large layers
def test_at_the_peak_of_a_checkpoint_per_block_the_link_saves_much(quick_search: None) -> None:
    """Of what is recomputed; and values of every layer move."""
    graph = gpt()
    by_hand = simulate(graph, Plan(recomputes(graph, dict.fromkeys(blocks_of(graph), ()))))
    plan = lowtide.solve(graph, by_hand.peak_bytes, host=64 * GIB)
    assert plan.extra_s < 0.6 * by_hand.extra_s
    assert plan.moved_outputs(graph)
    paths = {graph.calls[call].path for call in blocks_of(graph)}
    assert {path for path in paths if any(f"{move.path}.".startswith(f"{path}.") for move in plan.moves)} == paths
    refereed = replay(graph, plan)
    assert refereed.peak_bytes == plan.peak_bytes
    assert refereed.extra_s == pytest.approx(plan.extra_s)


def test_without_host_memory_nothing_is_loaded() -> None:
    search = EagerSearch(gpt())
    assert not any(isinstance(chain, LinkLoads) for chain, _, _ in search._all_paths())
    assert any(isinstance(chain, LinkLoads) for chain, _, _ in EagerSearch(gpt(), GIB)._all_paths())


def test_layers_change_in_an_even_spread() -> None:
    """With so many layers changed, none of the changed ones are next to each other while others are left between."""
    search = EagerSearch(gpt(), GIB)
    chain, spread = (search._path(0.0, True, False, is_spread) for is_spread in (False, True))
    assert len(chain) == len(spread)
    last = len(chain) - 1
    assert chain.regions(0) == spread.regions(0) and chain.regions(last) == spread.regions(last)
    ordered, even = (_changing_halfway(each) for each in (chain, spread))
    assert ordered == list(range(len(ordered))) and len(even) == len(ordered) > 2
    assert even[:2] != ordered[:2] and all(b - a >= 2 for a, b in pairwise(even))


def _changing_halfway(chain: HullPath) -> list[int]:
    """Which of the units of the chain's longest leg have changed half way through it, counted along the forward."""
    leg = max(chain._hull_steps, key=lambda leg: len(leg.units))
    units = sorted(leg.units)
    return sorted(units.index(unit) for unit in leg.units[: len(units) // 2])
