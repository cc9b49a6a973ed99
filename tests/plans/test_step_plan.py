"""Plans as data: JSON, damaged files, invalid plans, `str()` and `explain`."""

from __future__ import annotations

import json
import pickle
from dataclasses import FrozenInstanceError, replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lowtide
from graphs import chain, random_graph, repeated_blocks
from lowtide import Plan, PlanError, StepGraph
from lowtide.graph import Hardware
from lowtide.plans import Move, Recompute, ValueRow
from lowtide.plans.plan_text import rows_of
from lowtide.simulator import simulate
from lowtide.solvers.eager_search import EagerSearch
from sweeps import sweep


@cache
def stack(num_layers: int) -> StepGraph:
    graph = repeated_blocks(3, num_blocks=num_layers)
    return replace(graph, step_s=sum(op.seconds for op in graph.ops), versions={"lowtide": lowtide.__version__})


@cache
def searched(num_layers: int) -> EagerSearch:
    return EagerSearch(stack(num_layers))


def solved(num_layers: int, share: float = 0.3) -> Plan:
    search = searched(num_layers)
    floor, plain = search.floor.peak_bytes, search.plain.peak_bytes
    plan = search.plan(int(floor + share * (plain - floor)))
    assert plan.regions
    return plan


FULL = Plan(
    regions=(Recompute("layers.0", 1, (0, 3)), Recompute("layers.1")),
    moves=(Move("layers.2", 0, 1, "host"), Move("layers.2", 0, 2, "disk"), Move("layers.0", 1, op=3)),
    in_flight_bytes=7,
    budget_bytes=100,
    peak_bytes=90,
    peak_path="layers.1",
    peak_phase="backward",
    plain_peak_bytes=200,
    step_s=2.0,
    extra_s=0.5,
    lower_bound_s=0.25,
    host_bytes=11,
    choosers=("layers.0.gate",),
    hardware=Hardware("test", 1000, link_bytes_per_s=2.0),
    fingerprint="abc",
    versions={"torch": "2"},
    rows=(
        ValueRow("layers.0.mlp", 1, "mm", 40, "recompute", 0.5, "layers.0"),
        ValueRow("layers.0.mlp", 1, "gelu", 8, "keep", 0.125, "layers.0"),
        ValueRow("layers.2", 0, "add", 20, "host", 0.25),
        ValueRow("layers.2", 0, "norm", 5, "disk", 0.25),
        ValueRow("", 0, "loss", 4, "keep", 0.0),
    ),
)


# JSON


@pytest.mark.parametrize("plan", [Plan(), FULL, Plan(engine="compiled", keeps=(1, 4))], ids=["empty", "full", "keeps"])
def test_json_goes_both_ways(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()


def test_json_of_solved_plans() -> None:
    for plan in (solved(4), solved(12)):
        again = Plan.from_json(plan.to_json())
        assert again == plan and str(again) == str(plan)
        assert simulate(stack(4), Plan.from_json(solved(4).to_json())).peak_bytes == solved(4).peak_bytes


MOVE = {"path": "a", "nth": 0, "save": 0, "to": "host", "codec": "", "op": None}


def damaged(**changes: Any) -> str:
    return json.dumps(json.loads(FULL.to_json()) | changes)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("null", "has no format field"),
        ("[]", "has no format field"),
        ("{}", "has no format field"),
        (chain([1]).to_json(), "has no format field"),
        (damaged(format="lowtide step graph"), "has no format field"),
        (damaged(version=1), "has version 1, and this lowtide reads version 5"),
        (damaged(version="5"), "has version '5'"),
        (damaged(colour="blue"), "'colour' missing or unknown"),
        (damaged(regions=None), "regions is not a list"),
        (damaged(regions=[{"path": "a"}]), "does not have the fields"),
        (damaged(regions=[{"path": "a", "nth": 0, "keep_ops": [-1], "more": []}]), "keep_ops is -1"),
        (damaged(regions=[{"path": "a", "nth": 0, "keep_ops": "0", "more": []}]), "keep_ops is not a list"),
        (damaged(regions=[{"path": 3, "nth": 0, "keep_ops": [], "more": []}]), "path is 3"),
        (damaged(moves=[], regions=2 * [{"path": "a", "nth": 0, "keep_ops": [], "more": []}]), "recomputed twice"),
        (damaged(moves=[MOVE | {"to": "cloud"}]), "not .cloud."),
        (damaged(moves=[MOVE | {"nth": True}]), "nth is True"),
        (damaged(moves=[MOVE | {"op": -1}]), "op is -1"),
        (damaged(moves=[MOVE | {"op": 1, "codec": "int8"}]), "cannot be encoded"),
        (damaged(moves=[MOVE | {"to": "device"}]), "this move does nothing"),
        (damaged(peak_bytes=-1), "peak_bytes is -1"),
        (damaged(peak_bytes=1.5), "peak_bytes is 1.5"),
        (damaged(peak_bytes=101), "peak of 101 bytes is above its budget of 100"),
        (damaged(peak_bytes=10**400), "peak_bytes is 1000"),
        (damaged(extra_s=0.1), "lower bound is above its cost"),
        (damaged(extra_s=float("nan")), "extra_s is nan"),
        (damaged(extra_s=float("inf")), "extra_s is inf"),
        (damaged(step_s="1"), "step_s is '1'"),
        (damaged(versions=[]), "versions"),
        (damaged(versions={"torch": 2}), "versions"),
        (damaged(hardware=None), "hardware does not have the fields"),
        (damaged(rows=[[]]), "rows does not have the fields of a ValueRow"),
        (damaged(engine="magic"), "'magic'"),
        (damaged(keeps=[1]), "has regions, not keeps"),
    ],
)
def test_damaged_files(text: str, problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        Plan.from_json(text)


@pytest.mark.parametrize("name", sorted(set(json.loads(FULL.to_json())) - {"format", "version"}))
def test_missing_fields(name: str) -> None:
    content = json.loads(FULL.to_json())
    del content[name]
    with pytest.raises(PlanError, match=f"'{name}' missing or unknown"):
        Plan.from_json(json.dumps(content))


def test_a_plan_over_its_budget_by_prediction_may_hold_as_measured() -> None:
    over = replace(FULL, graph=None, peak_bytes=FULL.budget_bytes + 1)
    with pytest.raises(PlanError, match="above its budget"):
        Plan.from_json(over.to_json())
    with pytest.raises(PlanError, match="above its budget"):
        Plan.from_json(replace(over, measured_peak_bytes=FULL.budget_bytes + 1).to_json())
    held = replace(over, measured_peak_bytes=FULL.budget_bytes, measured_step_s=1.5, measured_plain_s=1.0)
    back = Plan.from_json(held.to_json())
    assert (back.measured_peak_bytes, back.measured_slowdown) == (FULL.budget_bytes, 0.5)
    assert "measured   peak 100 B, step 1.5 s, 1.0 s plain (+50.0 %)" in str(back)


@pytest.mark.parametrize("text", [None, 3, b"\xff", [], object()])
def test_what_is_no_text(text: Any) -> None:
    with pytest.raises(PlanError):
        Plan.from_json(text)


def assert_read_or_refused(text: str) -> None:
    """And what is read can be shown."""
    try:
        plan = Plan.from_json(text)
    except PlanError:
        return
    assert Plan.from_json(plan.to_json()) == plan
    assert str(plan) and plan.bytes_by_action() and plan.gap >= 0
    if plan.rows:
        plan.explain("")


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from([10**30, 10**400]) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(data=st.data(), thing=_ANYTHING)
@settings(max_examples=100, deadline=None)
def test_any_content_is_read_or_refused(data: st.DataObject, thing: Any) -> None:
    content: Any = json.loads(FULL.to_json())
    place, key = content, data.draw(st.sampled_from(sorted(content)))
    while isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    place[key] = thing
    assert_read_or_refused(json.dumps(content))


@given(start=st.integers(0, 2000), length=st.integers(0, 5), instead=st.text(alphabet='{}[]",:-0e9nul\\', max_size=4))
@settings(max_examples=100, deadline=None)
def test_any_slip_of_the_pen_is_read_or_refused(start: int, length: int, instead: str) -> None:
    text = FULL.to_json()
    start %= len(text)
    assert_read_or_refused(text[:start] + instead + text[start + length :])


# Data


def test_plans_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        FULL.extra_s = 0.0  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        FULL.regions[0].path = "x"  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        FULL.rows[0].bytes = 0  # type: ignore[misc]


def test_shares_of_the_step() -> None:
    assert FULL.slowdown == 0.25 and FULL.gap == 0.125
    assert Plan().slowdown == Plan().gap == 0
    assert FULL.bytes_by_action() == {"keep": 12, "recompute": 40, "host": 20, "disk": 5, "compress": 0}


@pytest.mark.parametrize("first", sweep(range(0, 60, 15), keep=1))
def test_rows_are_all_that_is_saved(first: int) -> None:
    """Each activation once, whatever becomes of it."""
    for seed in range(first, first + 15):
        graph = random_graph(seed, num_ops=30)
        search = EagerSearch(graph)
        for budget in (search.floor.peak_bytes, search.plain.peak_bytes):
            plan = search.plan(budget)
            assert sum(plan.bytes_by_action().values()) == graph.saved_bytes
            assert set(plan.bytes_by_action()) == {"keep", "recompute", "host", "disk", "compress"}
        assert plan.bytes_by_action()["keep"] == graph.saved_bytes, "nothing was to be done"


def test_rows_of_moves() -> None:
    graph = chain([10, 20, 30], link_bytes_per_s=100.0)
    plan = Plan((Recompute("layers.2"),), (Move("layers.1"),))
    assert [(row.path, row.bytes, row.action) for row in rows_of(graph, plan)] == [
        ("layers.1", 10, "host"),
        ("layers.2", 20, "keep"),  # the region's input
    ]


def test_rows_of_outputs_that_are_held_elsewhere() -> None:
    graph, regions = chain([10, 20, 30], link_bytes_per_s=100.0), (Recompute("", keep_ops=(0, 1)),)
    plan = Plan(regions, (Move("", op=1, to="disk"),))
    assert [(row.bytes, row.action) for row in rows_of(graph, plan)] == [(10, "keep"), (20, "disk")]
    assert plan.moved_outputs(graph) == {0: (2,)}


@pytest.mark.parametrize("more", [{"codec": "lossless"}, {"save": 2}, {"codec": "int8", "to": "device"}])
def test_an_output_that_is_held_moves_as_it_is(more: Any) -> None:
    with pytest.raises(PlanError, match=r"op 1 of a has save=.*is not a save and cannot be encoded"):
        Move("a", op=1, **more)


@pytest.mark.parametrize("move", [Move("a", op=1), Move("a", op=-1), Move("a", 1, op=0), Move("b", op=0)])
def test_an_output_that_moves_is_held_by_a_region(move: Move) -> None:
    with pytest.raises(PlanError, match=rf"op {move.op} in call {move.nth} of '{move.path}' .*no region holds it"):
        Plan((Recompute("a", keep_ops=(0,)),), (move,))
    damaged = Plan((Recompute("a", keep_ops=(0,)),), (Move("a", op=0),)).to_json()
    with pytest.raises(PlanError, match=r"damaged plan: the output of op 0 .*no region holds it"):
        Plan.from_json(damaged.replace('"keep_ops":[0]', '"keep_ops":[3]'))


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        (Plan((Recompute("blocks.9.mlp"),)), r"no module 'blocks\.9\.mlp'.*blocks\.0\.mlp.*another model"),
        (Plan((Recompute("blocks.0", nth=1),)), "called 1 times in the step; call 1 is planned"),
        (Plan((Recompute("blocks.0"), Recompute("blocks.0"))), "recomputed twice"),
        (Plan((Recompute("blocks.0", keep_ops=(99,)),)), "ops"),
    ],
)
def test_plans_for_another_step(plan: Plan, problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        plan.calls(stack(4))


# Words


def test_an_empty_plan_in_words() -> None:
    assert str(Plan()) == "Plan: nothing to do, every activation is kept"
    plan = lowtide.solve(chain([10, 20, 30]), 100)
    assert str(plan) == "Plan: nothing to do, every activation is kept; peak 81 B within 100 B (predicted)"


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_a_plan_of_a_hundred_layers_fits_a_screen(share: float, quick_search: None) -> None:
    plan = solved(100, share)
    lines = str(plan).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 200
    assert "predicted" in lines[0]
    for word in ("budget", "peak", "step", "gap", "without a plan", "slower"):
        assert word in str(plan)
    assert len(plan.regions) < 5 or any(" ... " in line and "each" in line for line in lines), "not grouped"


def test_layers_that_are_treated_alike_share_a_line() -> None:
    rows = tuple(ValueRow(f"layers.{n}.mlp", 0, "mm", 2048, "recompute", 0.5, f"layers.{n}") for n in range(100))
    plan = Plan(tuple(Recompute(f"layers.{n}") for n in range(100)), rows=rows)
    assert "layers.0 ... layers.99 (100): 2.0 KiB recomputed each" in str(plan)


def test_the_full_plan_in_words() -> None:
    text = str(FULL)
    assert "peak       90 B, 200 B without a plan; in the backward of layers.1" in text
    assert "2.0 s + 500.0 ms (25.0 % slower); at least 250.0 ms with any plan, a gap of 12.5 %" in text
    assert "40 B recomputed" in text and "20 B moved to host memory" in text and "5 B moved to disk" in text


def test_explain_a_module() -> None:
    text = FULL.explain("layers.0")
    assert "layers.0 is recomputed in the backward, but for the outputs of 2 ops." in text
    assert "layers.0.mlp: 40 B made by mm is dropped and recomputed with layers.0 (500.0 ms for its own op)." in text
    assert "layers.0.mlp: 8 B made by gelu is kept" in text
    assert "layers.2" not in text


def test_explain_part_of_a_module() -> None:
    text = FULL.explain("layers.0.mlp")
    assert len(text.splitlines()) == 2 and "recomputed with layers.0" in text


def test_explain_what_is_moved_and_kept() -> None:
    text = FULL.explain("layers.2")
    assert "20 B made by add is moved to host memory" in text and "5 B made by norm is moved to disk" in text
    assert "outside of modules: 4 B made by loss is kept: there is room for it" in FULL.explain("")


@pytest.mark.parametrize("path", ["layers.7", "layer", "layers.0.ml", "encoder.mlp"])
def test_explain_an_unknown_module(path: str) -> None:
    with pytest.raises(PlanError, match=r"has no value saved in .*layers\."):
        FULL.explain(path)


def test_explain_every_module_of_a_solved_plan() -> None:
    plan = solved(4)
    for path in {row.path for row in plan.rows} | {region.path for region in plan.regions}:
        assert plan.explain(path)


def test_a_plan_carries_its_graph() -> None:
    plan = solved(4)
    assert plan.graph == stack(4)
    again = Plan.from_json(plan.to_json())
    assert again.graph == plan.graph and again == plan
    bare = Plan.from_json(plan.to_json(graph=False))
    assert bare.graph is None and bare == plan
    assert pickle.loads(pickle.dumps(plan)).graph == plan.graph
    assert "StepGraph" not in repr(plan)


def test_the_graph_of_another_step_is_refused() -> None:
    content = json.loads(solved(4).to_json())
    content["graph"] = json.loads(chain([1, 2]).to_json())
    with pytest.raises(PlanError, match="comes with"):
        Plan.from_json(json.dumps(content))
    content["graph"] = json.loads(stack(4).to_json()) | {"num_forward": 10**6}
    with pytest.raises(PlanError, match="damaged plan: this graph is not a valid step"):
        Plan.from_json(json.dumps(content))
    content["graph"] = 3
    with pytest.raises(PlanError, match="damaged plan: not a lowtide step graph"):
        Plan.from_json(json.dumps(content))
