"""Ops whose outputs saved-tensor hooks are shown, and what it costs to watch those of regions that hold outputs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide import Plan, StepGraph, simulate
from lowtide.eagerstep import EagerStep
from lowtide.graph import Call, Hardware, Op, Save, Value
from lowtide.plans import Recompute
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
    hardware = Hardware("test", dispatch_s=1 / 8, region_s=1 / 64, forward_dispatch_factor=4.0)
    return StepGraph(tuple(ops), 4, tuple(values), tuple(saves), tuple(calls), hardware)


def test_the_innermost_call_in_which_all_that_an_op_makes_is_saved() -> None:
    graph = nested()
    model, block, inner = 0, 1, 2
    # The first op's output is saved in the inner module, the second's around it, the third's by the head alone, though
    # at the moment at which the block ends; and what the head makes by nobody.
    assert graph.shown.depths.tolist() == [2, 1, 0, -1]
    assert graph.shown.are_all(inner, (0,)) and not graph.shown.are_all(inner, (0, 1))
    assert graph.shown.are_all(block, (0, 1)) and not graph.shown.are_all(block, (2,))
    assert graph.shown.are_all(model, (0, 1, 2)) and not graph.shown.are_all(model, (3,))


def test_an_op_is_shown_if_all_its_outputs_are() -> None:
    graph = nested()
    values = list(graph.values)
    values[3] = replace(values[3], bytes=1)
    assert replace(graph, values=tuple(values)).shown.depths.tolist() == [2, -1, 0, -1]


@pytest.mark.parametrize(
    ("regions", "num_forward", "num_replayed"),
    [
        ({"block": ()}, 0, 0),
        ({"block": (0,)}, 0, 3),
        ({"block": (0, 1)}, 0, 3),
        ({"block": (2,)}, 3, 3),
        ({"block": (0, 2)}, 3, 3),
        ({"block.inner": (0,)}, 0, 2),
        ({"block.inner": (1,)}, 2, 2),
        ({"block.inner": (0,), "head": (0,)}, 1, 2),  # the head is replayed up to its save, before its op
        ({"block": (0,), "block.inner": ()}, 3, 3),  # hooks of the region inside come first
        ({"head": ()}, 0, 0),
    ],
)
def test_what_is_watched(regions: dict[str, tuple[int, ...]], num_forward: int, num_replayed: int) -> None:
    graph = nested()
    plan = Plan(tuple(Recompute(path, keep_ops=kept) for path, kept in regions.items()))
    expected_s = num_forward * 4 / 8 + num_replayed / 8 + len(regions) / 64
    told, played = simulate(graph, plan), EagerStep(graph, plan)
    assert told.watched_s == expected_s
    assert played.columns()["watched_s"] == expected_s
    assert replay(graph, plan).watched_s == expected_s
    assert told.extra_s == told.replayed_s + expected_s
