"""`simulate` against an independent referee on random steps and plans, and against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from graphs import chain, drawing, random_graph, random_plan, repeated_blocks, with_floats
from lowtide import Plan, PlanError, StepGraph
from lowtide.graph import Hardware, Op, Save, Value
from lowtide.graph.codec_costs import EncodedForm, encoded_form
from lowtide.plans import Move, Recompute
from lowtide.simulator import KINDS, PHASES, Timeline, simulate
from lowtide.simulator.eager_events import EagerEvents
from referee import replay
from sweeps import sweep

CASES = 400  # of each kind: enough to have met every rule many times over


@cache
def step(seed: int) -> StepGraph:
    return repeated_blocks(seed) if seed % 4 == 0 else random_graph(seed)


def workspace_bytes(timeline: Timeline, event: int) -> int:
    op = int(timeline.ops[event])
    return timeline.graph.ops[op].workspace_bytes if op >= 0 else timeline.graph.optimizer_workspace_bytes


# Against the referee


@pytest.mark.parametrize("batch", sweep(range(8), keep=1))
def test_agrees_with_the_referee(batch: int) -> None:
    for seed in range(batch * CASES // 4, (batch + 1) * CASES // 4):
        graph = step(seed)
        hardware = replace(graph.hardware, dispatch_s=1 / 8, region_s=1 / 4, spare_s=0.5)
        graph = replace(graph, hardware=hardware)
        for nth in range(3):
            plan = random_plan(7 * seed + nth, graph)
            told, expected = simulate(graph, plan), replay(graph, plan)
            assert told.total_bytes.tolist() == expected.events, f"graph {seed}, {plan}"
            assert told.peak_bytes == expected.peak_bytes
            expected_s = expected.extra_s + expected.engine_s
            assert math.isclose(told.extra_s, expected_s, abs_tol=1e-9), f"graph {seed}, {plan}"
            assert told.host_bytes == expected.host_bytes, f"graph {seed}, {plan}"


@pytest.mark.parametrize("batch", sweep(range(4), keep=1))
def test_agrees_with_the_referee_on_codecs(batch: int) -> None:
    for seed in range(batch * CASES // 4, (batch + 1) * CASES // 4):
        graph = with_floats(seed, step(seed))
        for nth in range(3):
            assert_refereed(graph, random_plan(7 * seed + nth, graph))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 10**9))
@example(60945, 28458)  # a region retains a value on the device that a save outside of it, never read, has moved
def test_agrees_with_the_referee_on_any_codecs(seed: int, plan_seed: int) -> None:
    graph = with_floats(seed, step(seed))
    assert_refereed(graph, random_plan(plan_seed, graph))


def assert_refereed(graph: StepGraph, plan: Plan) -> None:
    told, expected = simulate(graph, plan), replay(graph, plan)
    assert told.total_bytes.tolist() == expected.events, plan
    assert math.isclose(told.extra_s, expected.extra_s, abs_tol=1e-9), plan
    assert told.host_bytes == expected.host_bytes, plan
    assert (told.live_bytes >= 0).all()
    assert told.live_bytes[-1].tolist() == simulate(graph).live_bytes[-1].tolist(), "something is left over"


def test_the_random_codecs_exercise_the_rules() -> None:
    seen = dict.fromkeys(("encoded", "on the host", "decoded twice", "declined", "input of a region", "lossless"), 0)
    for seed in range(CASES):
        graph = with_floats(seed, step(seed))
        plan = random_plan(7 * seed, graph)
        timeline, forms, moves = simulate(graph, plan), plan.forms(graph), plan.moves_by_value(graph)
        phases = [PHASES[phase] for phase in timeline.phases]
        inputs = {value for call in plan.calls(graph) for value in graph.calls[call].inputs}
        seen["encoded"] += "compression" in phases
        seen["on the host"] += any(moves[value].to == "host" for value in forms) and timeline.host_bytes > 0
        seen["decoded twice"] += phases.count("decompression") > phases.count("compression")
        seen["declined"] += any(move.is_lossy for value, move in moves.items() if value not in forms)
        seen["input of a region"] += bool(inputs & set(forms)) and "decompression" in phases
        seen["lossless"] += any(move.codec == "lossless" for move in moves.values())
    assert all(count >= CASES // 40 for count in seen.values()), seen


@pytest.mark.parametrize("batch", sweep(range(4), keep=1))
def test_lives_as_intervals_are_those_played_op_by_op(batch: int) -> None:
    """Without moves nothing is played op by op. Both ways give the same books, to the byte and the last bit."""
    for seed in range(batch * CASES // 4, (batch + 1) * CASES // 4):
        graph = step(seed)
        calls, hardware = graph.calls, graph.hardware
        if seed % 3 == 1:
            hardware = replace(hardware, dispatch_s=0.1, region_s=1 / 4, spare_s=0.3)
            graph = drawing(graph, seed, share=0.2)
        if seed % 5 < 2:  # regions that are not given what they read
            calls = tuple(replace(call, inputs=call.inputs[1 : 1 + index % 2]) for index, call in enumerate(calls))
        graph = replace(graph, calls=calls, hardware=hardware)
        for nth in range(3):
            plan = replace(random_plan(7 * seed + nth, graph), moves=())
            told = simulate(graph, plan)
            event = (31 * seed) % len(told.ops)
            played = EagerEvents(graph, plan, [event])
            played.play()
            for name, column in played.columns().items():
                assert np.array_equal(getattr(told, name), column), f"{name}, graph {seed}, {plan}"
            assert told.live_at(event) == played.snapshots[event]
            if seed % 5 >= 2:
                assert told.total_bytes.tolist() == replay(graph, plan).events, f"graph {seed}, {plan}"


def test_the_random_cases_exercise_the_rules() -> None:
    """Or else agreeing on them would mean little."""
    kinds = "nested", "retains", "around others", "ends early", "not replayed"
    seen = dict.fromkeys((*kinds, "stalls", "in flight", "host", "unread", "second call", "away"), 0)
    for seed in range(CASES):
        graph = step(seed)
        plan = random_plan(7 * seed, graph)
        timeline = simulate(graph, plan)
        calls = plan.calls(graph)
        seen["nested"] += any(graph.calls[call].parent in calls for call in calls)
        kept = {call: region.keep_ops for call, region in calls.items() if region.keep_ops}
        seen["retains"] += bool(kept)
        seen["around others"] += any(graph.arrays.has_inside(call, calls) for call in kept)
        retaining = EagerEvents(graph, plan)
        dropping = EagerEvents(graph, Plan(tuple(replace(region, keep_ops=()) for region in plan.regions)))
        retaining.play()
        dropping.play()
        seen["ends early"] += retaining.stops != dropping.stops
        seen["not replayed"] += set(retaining.scopes) < set(dropping.scopes)
        seen["stalls"] += timeline.stalled_s > 0
        seen["in flight"] += bool(timeline.live_bytes[:, KINDS.index("in flight")].any())
        seen["host"] += timeline.host_bytes > 0
        seen["unread"] += any(save.read < 0 for save in graph.saves)
        outputs = {value for values in plan.moved_outputs(graph).values() for value in values}
        seen["away"] += any(copy.kind == "in" and copy.value in outputs for copy in timeline.copies)
        seen["second call"] += any(region.nth > 0 for region in plan.regions)
    assert seen.pop("not replayed") >= 5  # every save of a region is retained
    assert all(count >= CASES // 20 for count in seen.values()), seen


def test_books_of_every_kind_balance() -> None:
    for seed in range(CASES):
        graph = step(seed)
        plain, timeline = simulate(graph), simulate(graph, random_plan(seed, graph))
        assert (timeline.live_bytes >= 0).all()
        assert plain.extra_s == 0 and plain.host_bytes == 0
        assert len(plain.ops) == len(graph.ops) + 1
        assert timeline.live_bytes[-1].tolist() == plain.live_bytes[-1].tolist(), "something is left over"


def test_books_balance_where_a_region_reads_what_it_was_not_given() -> None:
    for seed in range(CASES):
        graph = step(seed)
        graph = replace(graph, calls=tuple(replace(call, inputs=()) for call in graph.calls))
        timeline = simulate(graph, random_plan(seed, graph))
        assert (timeline.live_bytes >= 0).all()
        assert timeline.live_bytes[-1].tolist() == simulate(graph).live_bytes[-1].tolist()


# Worked out by hand. A batch of 1 byte, layers whose outputs y0, y1, y2 have 10, 20 and 30; each saves its input.


def test_plain_chain() -> None:
    timeline = simulate(chain([10, 20, 30]))
    assert timeline.total_bytes.tolist() == [
        1 + 10,  # y0
        1 + 10 + 20,  # y0, y1
        1 + 10 + 20 + 30,  # y0 and y1 saved, y2
        1 + 10 + 20 + 30 + 20,  # y2's backward makes dy1
        1 + 10 + 20 + 10,  # y0, dy1, dy0
        1 + 10,  # dy0
        1 + 10,
    ]
    assert timeline.peak_bytes == 81
    assert timeline.peak_path == "layers.2"
    assert timeline.peak_phase == "backward"
    assert timeline.peak_by_kind == {"static": 1, "kept": 30, "transient": 50, "gradients": 0, "in flight": 0}


def test_chain_with_one_region() -> None:
    """Layer 1 is given y0 and saves it; the replay makes y1 once more, for nobody."""
    timeline = simulate(chain([10, 20, 30], seconds=2.0), Plan((Recompute("layers.1"),)))
    assert timeline.total_bytes.tolist() == [11, 31, 61, 81, 1 + 10 + 20 + 20, 41, 11, 11]
    assert [PHASES[p] for p in timeline.phases] == ["forward"] * 3 + ["backward", "replay"] + ["backward"] * 2 + [
        "optimizer"
    ]
    assert timeline.ops.tolist() == [0, 1, 2, 3, 1, 4, 5, -1]
    assert timeline.starts_s.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    assert timeline.extra_s == timeline.replayed_s == 2.0


def test_chain_recomputed_as_a_whole() -> None:
    """Nothing is saved but the batch; the replay makes y0, y1 and y2, for layer 2 saves y1 when its op has run."""
    timeline = simulate(chain([10, 20, 30]), Plan((Recompute(""),)))
    assert timeline.total_bytes.tolist() == [
        11,
        31,
        1 + 20 + 30,  # y0 is not saved
        1 + 30 + 10,  # replay, beside y2
        1 + 30 + 10 + 20,
        1 + 30 + 10 + 20 + 30,
        1 + 30 + 10 + 20 + 20,  # the new y2 is gone
        41,
        11,
        11,
    ]
    assert timeline.extra_s == 3.0


def test_chain_with_a_retained_output() -> None:
    """As above, with y1 retained: its save needs no replay, so that comes later, and ends at the save of y0."""
    timeline = simulate(chain([10, 20, 30]), Plan((Recompute("", keep_ops=(1,)),)))
    assert timeline.ops.tolist() == [0, 1, 2, 3, 0, 4, 5, -1]
    assert timeline.total_bytes.tolist() == [
        11,
        31,
        1 + 20 + 30,
        1 + 20 + 30 + 20,  # y2's backward makes dy1
        1 + 20 + 20 + 10,  # the replay makes y0; y1 is there for it to the end
        1 + 10 + 20 + 10,
        11,
        11,
    ]
    assert timeline.extra_s == 1.0


def test_chain_with_every_save_retained() -> None:
    """The batch is no output: the replay ends before its first op."""
    timeline = simulate(chain([10, 20, 30]), Plan((Recompute("", keep_ops=(0, 1)),)))
    assert timeline.ops.tolist() == [0, 1, 2, 3, 4, 5, -1]
    assert timeline.extra_s == 0.0


def test_chain_with_a_region_in_a_region() -> None:
    """The outer replay stops where layer 2 saves y1; layer 1 is replayed when its own save is read."""
    timeline = simulate(chain([10, 20, 30]), Plan((Recompute(""), Recompute("layers.1"))))
    assert timeline.ops.tolist() == [0, 1, 2, 0, 1, 2, 3, 1, 4, 5, -1]
    assert timeline.total_bytes.tolist() == [11, 31, 51, 41, 61, 91, 81, 1 + 10 + 20 + 20, 41, 11, 11]
    assert timeline.extra_s == 4.0


@pytest.mark.parametrize("paths", list(permutations(("", "layers.0", "layers.1"))))
def test_regions_around_a_region_without_saves_of_their_own(paths: tuple[str, ...]) -> None:
    """Each inside the one before, in any order of the plan; only the save of layer 1 is theirs.

    It needs y0: layer 0 is replayed up to the entry of layer 1, and the model up to that of layer 0, which is nothing.
    """
    graph = chain([10, 20, 30])
    model, outer, inner, last = graph.calls
    calls = (model, replace(outer, end=3), replace(inner, parent=1), replace(last, parent=1))
    saves = tuple(save if index == 1 else replace(save, call=-1) for index, save in enumerate(graph.saves))
    timeline = simulate(replace(graph, calls=calls, saves=saves), Plan(tuple(Recompute(path) for path in paths)))
    assert timeline.ops.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, -1]
    assert timeline.total_bytes.tolist() == [11, 31, 51, 71, 1 + 20 + 10, 1 + 20 + 10 + 20, 41, 11, 11]


def test_a_region_without_saves_is_not_there() -> None:
    graph = replace(chain([10, 20, 30]), saves=())
    timeline = simulate(graph, Plan((Recompute(""),)))
    assert timeline.total_bytes.tolist() == simulate(graph).total_bytes.tolist()
    assert timeline.extra_s == 0


def test_moves_are_free_where_the_link_is_fast() -> None:
    """y0 (10 bytes) is saved at 2 s and out 1/8 s later; it is asked for again when the backward begins, at 3 s."""
    graph = chain([10, 20, 30], link_bytes_per_s=80.0)
    timeline = simulate(graph, Plan(moves=(Move("layers.1"),)))
    assert timeline.total_bytes.tolist() == [11, 31, 61, 81, 41, 11, 11]
    assert timeline.live_bytes[2].tolist() == [1, 10, 50, 0, 0]
    assert timeline.live_bytes[3].tolist() == [1, 20, 50, 0, 10]  # in flight
    assert timeline.extra_s == 0
    assert timeline.host_bytes == 10


def test_a_read_waits_for_its_copy() -> None:
    """Four layers of 1 s, y0 (8 bytes) is saved at 2 s, the backward begins at 4 s and reads y0 at 6 s."""
    plan = Plan(moves=(Move("layers.1"),))
    fast = simulate(chain([8, 1, 1, 1], link_bytes_per_s=4.0), plan)  # out at 4 s, back at 6 s
    assert fast.stalled_s == 0
    assert fast.live_bytes[:, KINDS.index("in flight")].tolist() == [0, 0, 0, 0, 8, 8, 0, 0, 0]
    assert fast.total_bytes.tolist() == simulate(fast.graph).total_bytes.tolist()
    slow = simulate(chain([8, 1, 1, 1], link_bytes_per_s=2.0), plan)  # out at 6 s: still there when it is read
    assert slow.stalled_s == 0
    ops = list(slow.graph.ops)
    ops[3] = replace(ops[3], seconds=3.0)  # now the backward begins at 6 s; back at 10 s, read at 8 s
    assert simulate(replace(slow.graph, ops=tuple(ops)), plan).stalled_s == 2.0


def test_a_moved_value_does_not_count_while_it_is_away() -> None:
    """y0 and y1 are moved and one may be in flight: y0 is away from op 3 until y1 is read."""
    graph = chain([8, 8, 8, 8], link_bytes_per_s=64.0)
    plan = Plan(moves=(Move("layers.1"), Move("layers.2")), in_flight_bytes=8)
    timeline = simulate(graph, plan)
    plain = simulate(graph)
    assert (plain.total_bytes - timeline.total_bytes).tolist() == [0, 0, 0, 8, 8, 0, 0, 0, 0]
    assert timeline.host_bytes == 16
    assert timeline.extra_s == 0


def test_a_retained_output_moves() -> None:
    """y1 (20 bytes) is saved at 3 s and out at 4 s; the backward begins at 5 s with the replay, that waits for it."""
    graph, region = chain([10, 20, 30, 40, 50], link_bytes_per_s=20.0), (Recompute("", keep_ops=(1,)),)
    held, moved = simulate(graph, Plan(region)), simulate(graph, Plan(region, (Move("", op=1),)))
    assert held.total_bytes.tolist()[4:6] == [1 + 20 + 40 + 50, 1 + 20 + 50 + 10]
    assert (held.total_bytes - moved.total_bytes).tolist() == [0, 0, 0, 0, 20, *[0] * 10]
    assert [(copy.kind, copy.start_s, copy.end_s) for copy in moved.copies] == [
        ("out", 3.0, 4.0),
        ("in", 5.0, 6.0),
        ("stall", 5.0, 6.0),
    ]
    assert (moved.replayed_s, moved.stalled_s, moved.host_bytes) == (held.replayed_s, 1.0, 20)


def test_an_output_that_is_saved_elsewhere_too_leaves_if_all_let_go() -> None:
    """Layer 0 retains y0, and layer 1 saves it too: a move for one of the two does not free it."""
    graph, region = chain([8, 8, 8, 8], link_bytes_per_s=64.0), (Recompute("layers.0", keep_ops=(0,)),)
    graph = replace(graph, saves=(*graph.saves, Save(graph.saves[1].value, 1, made=1, read=7, released=8)))
    plain = simulate(graph, Plan(region))
    saves, both = (Move("layers.1"),), (Move("layers.1"), Move("layers.0", op=0))
    assert simulate(graph, Plan(region, saves)).total_bytes.tolist() == plain.total_bytes.tolist()
    assert (plain.total_bytes - simulate(graph, Plan(region, both)).total_bytes).tolist() == [0, 0, 8, 8, *[0] * 5]


def test_an_output_retained_on_the_device_is_not_fetched() -> None:
    """Layer 1 moves y0 and never reads it; layer 0 retains y0 on the device, and autograd reads that."""
    graph, region = chain([8, 8, 8, 8], link_bytes_per_s=64.0), (Recompute("layers.0", keep_ops=(0,)),)
    unread, y0 = replace(graph.saves[1], read=-1), graph.saves[1].value
    retained = Save(y0, graph.saves[0].call, made=1, read=7, released=8)
    ops = [replace(op, inputs=op.inputs[:1]) if index == 6 else op for index, op in enumerate(graph.ops)]
    graph = replace(graph, ops=tuple(ops), saves=(graph.saves[0], unread, *graph.saves[2:], retained))
    timeline = simulate(graph, Plan(region, (Move("layers.1"),)))
    assert [copy.kind for copy in timeline.copies] == ["out"]
    assert timeline.total_bytes.tolist() == replay(graph, Plan(region, (Move("layers.1"),))).events


# Compressed: a batch of 1 byte, and layers whose outputs y0, y1, y2 are floats of 8, 16 and 8 KiB. y0, the input of
# layer 1, becomes 2048 codes and 16 scales of 4 bytes.


def floats(**options: Any) -> StepGraph:
    graph = chain([8192, 16384, 8192], **options)
    values = tuple(replace(value, item_bytes=4, row_length=64) for value in graph.values)
    return replace(graph, values=values, hardware=replace(graph.hardware, memory_bytes_per_s=2.0**24))


def form_of_y0(graph: StepGraph) -> EncodedForm:
    y0 = next(value for value in graph.values if value.name == "y0")
    form = encoded_form(y0, "int8", graph.hardware)
    assert form is not None and form.bytes == 2112
    return form


COMPRESS = Plan(moves=(Move("layers.1", to="device", codec="int8"),))


def test_a_compressed_value() -> None:
    graph = floats()
    form, timeline = form_of_y0(graph), simulate(graph, COMPRESS)
    assert [PHASES[phase] for phase in timeline.phases] == [
        *("forward", "forward", "compression", "forward"),
        *("backward", "decompression", "backward", "backward", "optimizer"),
    ]
    assert timeline.ops.tolist() == [0, 1, 1, 2, 3, 4, 4, 5, -1]
    assert timeline.total_bytes.tolist() == [
        1 + 8192,
        1 + 8192 + 16384,
        1 + 8192 + 16384 + 2112 + form.encode_bytes,  # Python holds y0 while it is encoded
        1 + 2112 + 16384 + 8192,
        1 + 2112 + 16384 + 8192 + 16384,  # the backward of layer 2 does not ask for y0
        1 + 2112 + 16384 + 8192 + form.decode_bytes,
        1 + 2112 + 16384 + 8192 + 8192,  # autograd lets go of the encoded form after its reader
        1 + 8192,
        1 + 8192,
    ]
    assert timeline.extra_s == timeline.coded_s == form.encode_s + form.decode_s
    assert timeline.starts_s[3] == 2 + form.encode_s, "it takes the compute's own time"
    assert timeline.host_bytes == 0
    assert timeline.live_bytes[3].tolist() == [1, 2112, 16384 + 8192, 0, 0]
    assert sum(timeline.live_at(5).values()) == 2112 + 16384 + 8192
    assert "in codecs" in str(timeline)


def test_a_compressed_value_that_moves() -> None:
    """Only its encoded bytes cross the link, and they come back ahead of the read."""
    graph = floats(link_bytes_per_s=2.0**14)
    form, timeline = form_of_y0(graph), simulate(graph, Plan(moves=(Move("layers.1", to="host", codec="int8"),)))
    assert timeline.host_bytes == form.bytes
    copied_s = {copy.kind: copy.end_s - copy.start_s for copy in timeline.copies}
    assert copied_s["out"] == copied_s["in"] == form.bytes / 2**14
    assert timeline.total_bytes[3] == 1 + 2112 + 16384 + 8192, "still on its way out"
    assert timeline.live_bytes[:, KINDS.index("in flight")].tolist() == [0, 0, 0, 0, 2112, 0, 0, 0, 0]
    assert timeline.extra_s == timeline.coded_s


def test_a_value_is_encoded_once_and_decoded_for_each_reader() -> None:
    graph = floats()
    first = next(save for save in graph.saves if graph.values[save.value].name == "y0")
    again = replace(first, call=graph.saves[2].call, made=3, read=3, released=4)
    values = tuple(replace(value, dropped=3) if value.name == "y0" else value for value in graph.values)
    graph = replace(graph, values=values, saves=(*graph.saves, again))
    form, timeline = form_of_y0(graph), simulate(graph, COMPRESS)
    assert timeline.coded_s == pytest.approx(form.encode_s + 2 * form.decode_s)
    assert timeline.ops.tolist() == [0, 1, 1, 2, 3, 3, 4, 4, 5, -1]
    assert timeline.total_bytes[5] == 1 + 2112 + 16384 + 8192 + 8192 + 16384  # y1, y2, the decoded y0 and dy1
    assert timeline.total_bytes[6] == 1 + 2112 + 16384 + 8192 + form.decode_bytes, "the first reader's is gone"


def test_a_region_is_replayed_from_its_compressed_input() -> None:
    graph = floats()
    plan = replace(COMPRESS, regions=(Recompute("layers.1"),))
    form, timeline = form_of_y0(graph), simulate(graph, plan)
    assert timeline.ops.tolist() == [0, 0, 1, 2, 3, 1, 1, 4, 5, -1]  # encoded after op 0, decoded for op 1
    assert timeline.total_bytes[1] == 1 + 8192 + 2112 + form.encode_bytes
    assert timeline.total_bytes[3] == 1 + 2112 + 16384 + 8192
    assert timeline.total_bytes[5] == 1 + 2112 + 16384 + 8192 + form.decode_bytes
    assert timeline.total_bytes[6] == 1 + 2112 + 16384 + 8192 + 16384  # the replay makes y1 once more
    assert timeline.total_bytes[7] == 1 + 2112 + 16384 + 8192 + 8192
    assert timeline.replayed_s == 1.0 and timeline.coded_s == form.encode_s + form.decode_s


@pytest.mark.parametrize("codec", ["int8", "lossless"])
@pytest.mark.parametrize("link", [0.0, 2.0**14])
def test_what_a_codec_declines_is_treated_as_it_is(codec: str, link: float) -> None:
    graph = floats(link_bytes_per_s=link)
    if codec == "int8":
        graph = replace(graph, values=tuple(replace(value, item_bytes=0) for value in graph.values))
    to = "host" if link else "device"
    told = simulate(graph, Plan(moves=(Move("layers.1", to=to, codec=codec),)))
    expected = simulate(graph, Plan(moves=(Move("layers.1"),))) if link else simulate(graph)
    assert told.total_bytes.tolist() == expected.total_bytes.tolist() and told.extra_s == expected.extra_s


def test_codecs_where_the_speed_of_memory_is_not_known() -> None:
    with pytest.raises(PlanError, match="memory bandwidth of test is unknown"):
        simulate(chain([8192, 8192]), Plan(moves=(Move("layers.1", to="device", codec="int8"),)))


def test_a_value_cannot_be_moved_in_two_ways() -> None:
    moves = (Move("layers.1"), Move("layers.1", to="device", codec="int8"))
    with pytest.raises(PlanError, match=r"saved in layers\.1 and layers\.1 is moved in two ways"):
        simulate(floats(), Plan(moves=moves))


def test_a_save_that_is_never_read_is_not_replayed_for() -> None:
    graph = chain([10, 20, 30])
    graph = replace(graph, saves=tuple(replace(save, read=-1) for save in graph.saves))
    ops = tuple(replace(op, inputs=op.inputs[:1]) if i >= 3 else op for i, op in enumerate(graph.ops))
    timeline = simulate(replace(graph, ops=ops), Plan((Recompute("layers.1"),)))
    assert timeline.total_bytes.tolist() == simulate(graph).total_bytes.tolist()
    assert timeline.extra_s == 0


def test_what_came_back_ends_where_its_reader_is_done() -> None:
    """y1 is read at 3 and done with at 4; autograd lets go at 5, and so it stays where it was never dropped."""
    graph = chain([10, 20, 30], link_bytes_per_s=1000.0)
    saves = (*graph.saves[:2], replace(graph.saves[2], used=4, released=5))
    graph = replace(graph, saves=saves)
    assert simulate(graph).total_bytes.tolist() == [11, 31, 61, 81, 41 + 20, 11, 11]
    assert simulate(graph, Plan(moves=(Move("layers.2"),))).total_bytes.tolist() == [11, 31, 61, 81, 41, 11, 11]
    replayed = simulate(graph, Plan((Recompute("layers.2"),)))
    # The region's input, y1 too, is held until autograd lets go of the last save, for another replay might come.
    assert replayed.total_bytes.tolist() == [11, 31, 61, 1 + 10 + 20 + 30 + 30, 81, 41 + 20, 11, 11]


def test_gradients_stay() -> None:
    timeline = simulate(chain([10, 20, 30], gradient_bytes=7))
    assert timeline.live_bytes[:, KINDS.index("gradients")].tolist() == [0, 0, 0, 7, 14, 21, 21]
    assert timeline.total_bytes[-1] == 1 + 10 + 21


def test_static_memory_and_the_optimizer() -> None:
    values = (
        Value(100, "parameter", "w", -1, 1),
        Value(50, "gradient", "dw", -1, 1),
        Value(10**9, "elsewhere", "on another device", -1, 1),
        Value(4, "activation", "y", 0, 1),
    )
    op = Op("mm", -1, 1.0, 0, (0,), (3,), workspace_bytes=6)
    graph = StepGraph((op,), 1, values, (), (), Hardware("test"), 1000, 3000, 20_000)
    timeline = simulate(graph)
    assert timeline.total_bytes.tolist() == [21_160, 24_154]
    assert timeline.peak_phase == "optimizer" and timeline.peak_path == ""
    assert timeline.peak_by_kind == {"static": 21_100, "kept": 0, "transient": 3004, "gradients": 50, "in flight": 0}


def test_an_empty_step() -> None:
    timeline = simulate(StepGraph((), 0, (), (), (), Hardware("test"), other_bytes=5))
    assert timeline.total_bytes.tolist() == [5]
    assert timeline.peak_bytes == 5 and timeline.extra_s == 0


# What a Timeline says


def without_buffers(graph: StepGraph) -> StepGraph:
    kinds = ["constant" if value.kind == "buffer" else value.kind for value in graph.values]
    return replace(graph, values=tuple(replace(v, kind=kind) for v, kind in zip(graph.values, kinds, strict=True)))


def test_the_peak_is_the_sum_of_its_parts() -> None:
    for seed in range(CASES):
        graph = without_buffers(step(seed))  # whose copies in regions are no values
        timeline = simulate(graph, random_plan(seed, graph))
        event = timeline.peak_event
        assert sum(timeline.peak_by_kind.values()) == timeline.peak_bytes == timeline.total_bytes[event]
        op = int(timeline.ops[event])
        assert timeline.peak_path == (graph.path_of(op) if op >= 0 else "")
        known = sum(v.bytes for v in graph.values if v.born < 0 and v.kind != "elsewhere")
        known += graph.optimizer_state_bytes + graph.other_bytes
        live = sum(timeline.live_at(event).values())
        assert live + known == timeline.peak_bytes - workspace_bytes(timeline, event)


def test_what_lives_at_many_events_is_what_lives_at_each() -> None:
    for seed in range(20):
        graph = step(seed)
        timeline = simulate(graph, random_plan(seed, graph))
        events = list(range(len(timeline.ops)))[::3]
        each = timeline.live_at_each(events)
        assert each == [timeline.live_at(event) for event in events]
        for all_of_it, largest in zip(each, timeline.live_at_each(events, most=2), strict=True):
            assert len(largest) <= 2
            left_out = [size for value, size in all_of_it.items() if value not in largest]
            assert max(left_out, default=0) <= min(largest.values(), default=0)


def test_copies_are_told_one_by_one() -> None:
    num_copies = 0
    for seed in range(CASES):
        graph = step(seed)
        plan = random_plan(seed, graph)
        timeline, forms = simulate(graph, plan), plan.forms(graph)
        stalled_s = 0.0
        for copy in timeline.copies:
            assert copy.end_s >= copy.start_s >= 0
            size = forms[copy.value].bytes if copy.value in forms else graph.values[copy.value].bytes
            seconds = copy.end_s - copy.start_s
            assert copy.kind == "stall" or seconds == pytest.approx(size / graph.hardware.link_bytes_per_s)
            stalled_s += seconds if copy.kind == "stall" else 0.0
        num_copies += len(timeline.copies)
        assert stalled_s == pytest.approx(timeline.stalled_s)
    assert num_copies > CASES


def test_a_timeline_reads_well() -> None:
    text = str(simulate(chain([10, 20, 30]), Plan((Recompute("layers.1"),))))
    assert text.splitlines()[0] == "peak 81 B predicted, in the backward of layers.2 (mm_backward)"
    assert "1.0 s replayed" in text


# Refusals


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        (Plan((Recompute("layers.7"),)), "calls no module 'layers.7'"),
        (Plan((Recompute("layers"),)), "calls no module 'layers'"),
        (Plan((Recompute("layers.1", nth=1),)), "is called 1 times"),
        (Plan((Recompute("layers.1", nth=-1),)), "is called 1 times"),
        (Plan((Recompute("layers.1"), Recompute("layers.1"))), "recomputed twice"),
        (Plan((Recompute("layers.1", keep_ops=(1,)),)), "has 1 ops"),
        (
            Plan((Recompute("layers.1", keep_ops=(0,)),)),
            "layers.1 is to retain the outputs of ops 0 .mm., and autograd does not",
        ),
        (Plan((Recompute("", keep_ops=(0,)), Recompute("layers.1"))), "the model is to retain .* directly in it"),
        (Plan((Recompute(""), Recompute("layers.1", keep_ops=(0,)))), "inside a region that is itself recomputed"),
        (Plan(moves=(Move("layers.7"),)), "calls no module 'layers.7'"),
        (Plan(moves=(Move("layers.1", save=1),)), "makes 1 saves"),
        (Plan(moves=(Move("layers.1"),)), "no link"),
        (Plan((Recompute("", keep_ops=(1,)),), (Move("", op=1),)), "no link"),
    ],
)
def test_plans_for_another_step(plan: Plan, problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        simulate(chain([10, 20, 30]), plan)


def test_wrong_types() -> None:
    with pytest.raises(TypeError, match="StepGraph"):
        simulate("graph")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Plan"):
        simulate(chain([1]), "plan")  # type: ignore[arg-type]


@pytest.mark.parametrize("num_layers", sweep([10_000, 50_000], keep=1))
def test_many_thousand_ops(num_layers: int) -> None:
    """Each op is looked at once per time it runs: a simulator that rescans what lives would not come back."""
    graph = chain([8] * num_layers, link_bytes_per_s=2.0)
    regions = tuple(Recompute(f"layers.{index}") for index in range(0, num_layers, 2))
    moves = tuple(Move(f"layers.{index}") for index in range(1, num_layers, 2))
    timeline = simulate(graph, Plan(regions, moves))
    assert len(timeline.ops) == 2 * num_layers + num_layers // 2 + 1
    assert timeline.replayed_s == num_layers // 2
    assert timeline.host_bytes == 8 * num_layers // 2
