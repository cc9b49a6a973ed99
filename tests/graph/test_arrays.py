"""`Retainable`: which op outputs regions can retain, and what that costs the host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide import Plan, PlanError, StepGraph
from lowtide.graph import Call, Hardware, Op, Save, Value
from lowtide.plans import Recompute
from lowtide.simulator import simulate
from lowtide.simulator.eager_events import EagerEvents
from referee import replay


def nested() -> StepGraph:
    """A block with a module inside, and a head. The head saves what the block makes before its own op has run."""
    kinds = ("batch", *("activation",) * 8)
    born = (-1, 0, 1, 1, 2, 3, 4, 5, 6)
    sizes = (1, 10, 20, 0, 30, 40, 1, 1, 1)
    dropped = (7, 2, 3, 2, 4, 5, 6, 7, 7)
    values = [Value(*each) for each in zip(sizes, kinds, "xabncdefg", born, dropped, strict=True)]
    ops = [
        Op("a", 2, 1.0, 0, (0,), (1,)),
        Op("b", 2, 1.0, 0, (1,), (2, 3)),  # value 3 has no bytes, and nobody saves it
        Op("c", 1, 1.0, 0, (2,), (4,)),
        Op("d", 3, 1.0, 0, (4,), (5,)),
        Op("d_backward", 3, 1.0, 0, (5, 4), (6,), forward_op=3),
        Op("c_backward", 1, 1.0, 0, (6, 2), (7,), forward_op=2),
        Op("b_backward", 2, 1.0, 0, (7, 1), (8,), forward_op=1),
    ]
    saves = [Save(1, 2, 2, 6, 7), Save(2, 1, 3, 5, 6), Save(4, 3, 3, 4, 5)]
    calls = [
        Call("", "Model", -1, 0, 4, (0,), (5,)),
        Call("block", "Block", 0, 0, 3, (0,), (4,)),
        Call("block.inner", "Inner", 1, 0, 2, (0,), (2,)),
        Call("head", "Head", 0, 3, 4, (4,), (5,)),
    ]
    hardware = Hardware("test", dispatch_s=1 / 8, region_s=1 / 64, spare_s=1 / 4)
    return StepGraph(tuple(ops), 4, tuple(values), tuple(saves), tuple(calls), hardware)


def test_the_innermost_call_in_which_all_that_an_op_makes_is_saved() -> None:
    graph = nested()
    # The first op's output is saved in the inner module, the second's in the block around it, the third's in the head
    # alone, at the position at which the block ends. The head's output is not saved.
    assert graph.retainable.depths.tolist() == [2, 1, 0, -1]


@pytest.mark.parametrize(
    ("regions", "missing"),
    [
        ({1: (0, 1, 2)}, {1: [2]}),
        ({2: (0, 1)}, {2: [1]}),
        ({0: (0, 1, 2, 3)}, {0: [3]}),
        ({1: (0, 1), 2: ()}, {1: [0]}),  # the hooks of the region inside come first
        ({0: (0, 1, 2), 1: ()}, {0: [0, 1]}),
        ({0: (2,), 3: ()}, {0: [2]}),
    ],
)
def test_what_is_retained_must_be_saved_directly_in_the_region(
    regions: dict[int, tuple[int, ...]], missing: dict[int, list[int]]
) -> None:
    graph = nested()
    assert graph.retainable.missing(regions) == missing
    plan = Plan(tuple(Recompute(graph.calls[call].path, keep_ops=kept) for call, kept in regions.items()))
    with pytest.raises(PlanError, match=f"retain the outputs of ops {next(iter(missing.values()))[0]} "):
        simulate(graph, plan)


def test_an_op_that_makes_nothing_cannot_be_retained() -> None:
    graph = nested()
    ops = (*graph.ops[:2], replace(graph.ops[2], outputs=()), *graph.ops[3:])
    values = (*graph.values[:4], replace(graph.values[4], born=-1), *graph.values[5:])
    graph = replace(graph, ops=ops, values=values)
    assert graph.retainable.depths[2] == -1 and graph.retainable.missing({0: (2,)}) == {0: [2]}


def test_an_op_is_retainable_if_all_its_outputs_are_saved() -> None:
    graph = nested()
    values = list(graph.values)
    values[3] = replace(values[3], bytes=1)
    assert replace(graph, values=tuple(values)).retainable.depths.tolist() == [2, -1, 0, -1]


@pytest.mark.parametrize(
    ("regions", "num_replayed", "num_substituted"),
    [
        ({"block": ()}, 0, 0),
        ({"block": (0,)}, 3, 1),
        ({"block": (1,)}, 2, 1),  # it is replayed up to the save of what the first op makes
        ({"block": (0, 1)}, 0, 0),
        ({"block.inner": (0,)}, 0, 0),
        ({"block": (1,), "block.inner": ()}, 0, 0),  # that of the region inside is
        ({"block": (0,), "head": ()}, 3, 1),
    ],
)
def test_what_retaining_costs(regions: dict[str, tuple[int, ...]], num_replayed: int, num_substituted: int) -> None:
    graph = nested()
    plan = Plan(tuple(Recompute(path, keep_ops=kept) for path, kept in regions.items()))
    expected_s = num_replayed / 8 + num_substituted / 4 + len(regions) / 64
    told, played = simulate(graph, plan), EagerEvents(graph, plan)
    assert told.engine_s == expected_s
    assert played.columns()["engine_s"] == expected_s
    assert replay(graph, plan).engine_s == expected_s
    assert told.extra_s == told.replayed_s + expected_s


def test_the_replay_of_a_region_enters_those_inside_it_once_more() -> None:
    graph = nested()
    plan = Plan((Recompute(""), Recompute("block"), Recompute("block.inner")))
    expected_s = (3 + 3 / 2) / 64  # the replay of the model enters both others, that of the block the inner one
    assert simulate(graph, plan).engine_s == EagerEvents(graph, plan).columns()["engine_s"] == expected_s
    assert replay(graph, plan).engine_s == expected_s
