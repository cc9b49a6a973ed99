"""`StepGraph`: derived facts, JSON, and JSON that is damaged or malicious."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lowtide
from graphs import random_graph, repeated_blocks, seldom_saved, with_host_line
from lowtide import StepGraph
from lowtide.errors import GraphError
from lowtide.graph import Call, Hardware, Op, Value
from lowtide.graph.segments import with_even_times
from lowtide.plans import Plan, Recompute
from lowtide.simulator import simulate
from sweeps import sweep


def small() -> StepGraph:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    return lowtide.trace(
        model, lambda x: model(x).square().mean(), torch.randn(4, 8), optimizer=optimizer, mode="fake", device="H100"
    )


GRAPH = small()
TEXT = GRAPH.to_json()


# There and back.


@pytest.mark.parametrize("name", ["gpt_dropout", "unet", "tensor_subclass", "gpt_with_torch_checkpoint"])
@pytest.mark.parametrize("mode", ["real", "fake"])
def test_round_trip(name: str, mode: Any) -> None:
    job = zoo.make(name)
    graph = lowtide.trace(job.model, job.loss_fn, *job.batch, mode=mode)
    again = StepGraph.from_json(graph.to_json())
    assert again == graph and again.to_json() == graph.to_json() and str(again) == str(graph)
    assert again.fingerprint == graph.fingerprint
    assert simulate(again).peak_bytes == simulate(graph).peak_bytes


def test_names_of_all_kinds_survive() -> None:
    odd = 'päth."\\\n\u2028\x00'
    graph = replace(GRAPH, calls=(replace(GRAPH.calls[0], path=odd), *GRAPH.calls[1:]), notes=(odd,))
    assert StepGraph.from_json(graph.to_json()) == graph


def test_a_file_is_plain_json() -> None:
    content = json.loads(TEXT)
    assert content["format"] == "lowtide step graph" and content["version"] == 4
    assert content["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize("num_layers", sweep([20, 40, 100], keep=1))
def test_many_layers_stay_small(num_layers: int) -> None:
    job = zoo.gpt(num_layers, width=16, tokens=(1, 8))
    graph = lowtide.trace(job.model, job.loss_fn, *job.batch, mode="real")
    text = graph.to_json()
    assert len(gzip.compress(text.encode())) < num_layers << 13  # of the 5 MB that are allowed for a hundred
    assert StepGraph.from_json(text) == graph


def test_summary() -> None:
    lines = str(GRAPH).splitlines()
    backward = len(GRAPH.ops) - GRAPH.num_forward
    assert lines[0] == (
        f"StepGraph on H100: {GRAPH.num_forward} forward and {backward} backward ops, {len(GRAPH.calls)} module calls"
    )
    assert "predicted" in lines[1] and "limited by  the host" in lines[2] and "saved for the backward" in lines[3]
    assert any(line.split() == ["optimizer", "state", "1.9", "KiB"] for line in lines)
    assert any("note: traced with the CPU's kernels" in line for line in lines) or torch.accelerator.is_available()


def test_numbers_of_its_own() -> None:
    assert GRAPH.static_bytes["parameters"] == GRAPH.static_bytes["gradients"] == 4 * (8 * 16 + 3 * 16 + 16 * 4 + 4)
    assert GRAPH.static_bytes["buffers"] == 2 * 4 * 16 + 8
    assert GRAPH.calls_by_path == {"": (0,), **{str(index): (index + 1,) for index in range(5)}}
    assert [GRAPH.path_of(GRAPH.calls[index].first) for index in (1, 5)] == ["0", "4"]
    assert GRAPH.forward_s() == sum(op.seconds for op in GRAPH.ops[: GRAPH.num_forward]) < GRAPH.step_s


@pytest.mark.parametrize("seed", range(200))
def test_the_plain_peak_is_the_simulated_one(seed: int) -> None:
    graphs = [random_graph(seed), repeated_blocks(seed), seldom_saved(seed), with_host_line(seed, random_graph(seed))]
    for graph in graphs:
        assert graph.plain_peak_bytes == simulate(graph).peak_bytes


@pytest.mark.parametrize("seed", range(50))
def test_the_plain_peak_where_values_are_dropped_before_they_are_saved(seed: int) -> None:
    graph = random_graph(seed)
    values = tuple(replace(value, dropped=value.born + 1) for value in graph.values)
    early = replace(graph, values=values, optimizer_state_bytes=3, optimizer_workspace_bytes=seed, other_bytes=5)
    assert early.plain_peak_bytes == simulate(early).peak_bytes


@pytest.mark.parametrize("name", ["gpt_dropout", "gpt_tied", "unet", "lstm", "custom_function", "lora", "hf_llama"])
def test_the_plain_peak_of_models(name: str) -> None:
    job = zoo.make(name)
    graph = lowtide.trace(job.model, job.loss_fn, *job.batch, optimizer=torch.optim.Adam(job.model.parameters()))
    assert graph.plain_peak_bytes == simulate(graph).peak_bytes > 0


def test_the_plain_peak_of_no_ops() -> None:
    graph = StepGraph((), 0, (), (), (), Hardware("test"), optimizer_workspace_bytes=7, other_bytes=5)
    assert graph.plain_peak_bytes == simulate(graph).peak_bytes == 12


# Files that are no graphs.


def damaged(**parts: Any) -> str:
    return json.dumps({**json.loads(TEXT), **parts})


def without(*names: str) -> dict[str, Any]:
    return {name: item for name, item in json.loads(TEXT)["hardware"].items() if name not in names}


def column(part: str, name: str, index: int, item: Any) -> str:
    content = json.loads(TEXT)
    content[part][name][index] = item
    return json.dumps(content)


BAD_FILES = {
    "nothing": ("", "not JSON"),
    "not JSON": ("{", "not JSON"),
    "a list": ("[]", "has no format field"),
    "another file": ('{"format": "lowtide plan"}', "has no format field"),
    "deep nesting": ("[" * 100_000, "not JSON"),
    "deep objects": ('{"a":' * 100_000, "not JSON"),
    "huge number": (damaged(num_forward=1).replace('"num_forward": 1,', f'"num_forward": {"9" * 5000},'), "not JSON"),
    "version": (damaged(version=1), "has version 1, and this lowtide reads version 4"),
    "no version": (damaged(version=None), "has version None"),
    "text for number": (damaged(num_forward="3"), "num_forward is '3', not int"),
    "bool for number": (damaged(num_forward=True), "num_forward is True, not int"),
    "NaN": (damaged(step_s=float("nan")), "step_s is nan"),
    "infinity": (damaged(step_s=float("inf")), "step_s is inf"),
    "NaN in an op": (column("ops", "seconds", 0, float("nan")), "seconds is nan"),
    "negative seconds": (column("ops", "seconds", 0, -1.0), "seconds is -1.0"),
    "negative bytes": (column("values", "bytes", 0, -1), "value 0 has -1 bytes"),
    "odd elements": (column("values", "item_bytes", 0, 3), "value 0 has elements of 3 bytes"),
    "empty rows": (column("values", "row_length", 0, 0), "value 0 has rows of 0 elements"),
    "no blocks": (damaged(hardware={**json.loads(TEXT)["hardware"], "block_bytes": 0}), "rounded to 0 bytes"),
    "negative state": (damaged(optimizer_state_bytes=-1), "optimizer_state_bytes is -1, not int from 0"),
    "more bytes than there are": (column("values", "bytes", 0, 10**300), "bytes is 1000000.*, not int"),
    "unknown kind": (column("values", "kind", 0, 0), "unknown kind"),
    "unknown flag": (column("ops", "flags", 0, [0]), "unknown flags"),
    "unknown name": (column("ops", "name", 0, 10**6), "not an index of a name"),
    "negative name": (column("ops", "name", 0, -1), "not an index of a name"),
    "unknown input": (column("ops", "inputs", 0, [10**6]), "reads value 1000000 before"),
    "unknown output": (column("ops", "outputs", 0, [10**6]), "makes value 1000000"),
    "unknown call": (column("ops", "call", 0, 10**6), "call 1000000, which does not exist"),
    "call of another": (column("ops", "call", 0, 5), r"runs outside of its call \(4\)"),
    "parent after child": (column("calls", "parent", 1, 5), "parent that comes after"),
    "call too long": (column("calls", "end", 1, 10**6), "not a run of ops"),
    "no list": (column("ops", "inputs", 0, 1), "not a list"),
    "missing column": (damaged(saves={}), "columns of Save"),
    "short column": (damaged(values={**json.loads(TEXT)["values"], "born": []}), "differ in length"),
    "names that are no list": (damaged(names="abc"), "names is not a list"),
    "hardware": (damaged(hardware={"name": "H100", "__class__": "os.system"}), "hardware does not have the fields"),
    "hardware that lacks a field": (damaged(hardware=without("dispatch_s")), "hardware does not have the fields"),
    "hardware with a field too many": (damaged(hardware=without() | {"x_s": 1.0}), "hardware does not have the fields"),
    "hardware of fewer than no seconds": (damaged(hardware=without() | {"spare_s": -1.0}), "spare_s is -1.0"),
    "versions": (damaged(versions=["torch"]), "versions is .'torch'., not dict"),
}


@pytest.mark.parametrize("text, message", BAD_FILES.values(), ids=BAD_FILES)
def test_bad_files(text: str, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        StepGraph.from_json(text)


@pytest.mark.parametrize("part", json.loads(TEXT))
def test_missing_parts(part: str) -> None:
    content = json.loads(TEXT)
    del content[part]
    with pytest.raises(GraphError):
        StepGraph.from_json(json.dumps(content))


def test_not_text() -> None:
    for thing in (None, 1, b"\xff"):
        with pytest.raises(GraphError, match="not JSON"):
            StepGraph.from_json(thing)  # type: ignore[arg-type]


def test_graphs_that_cannot_have_run() -> None:
    hardware = Hardware("nothing")
    value = Value(4, "activation", "x", 0, 1)
    op = Op("make", -1, 0.0, 0, (), (0,))
    assert StepGraph((op,), 1, (value,), (), (), hardware).saved_bytes == 0
    with pytest.raises(GraphError, match="dropped before it is made"):
        StepGraph((op,), 1, (replace(value, dropped=0),), (), (), hardware)
    with pytest.raises(GraphError, match="made by no op"):
        StepGraph((replace(op, outputs=()),), 1, (value,), (), (), hardware)
    with pytest.raises(GraphError, match="makes a value twice"):
        StepGraph((replace(op, outputs=(0, 0)),), 1, (value,), (), (), hardware)
    with pytest.raises(GraphError, match="num_forward"):
        StepGraph((op,), 2, (value,), (), (), hardware)


def use(text: str) -> None:
    """A text is refused by name, or gives a graph that everything works with."""
    try:
        graph = StepGraph.from_json(text)
    except GraphError:
        return
    str(graph), graph.fingerprint, graph.static_bytes
    assert StepGraph.from_json(graph.to_json()) == graph
    str(simulate(graph))
    for path, calls in graph.calls_by_path.items():
        regions = (Recompute(path, nth) for nth, call in enumerate(calls) if call not in graph.unreplayable)
        simulate(graph, Plan(tuple(regions)))


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def changed(draw: st.DrawFn) -> str:
    """A file with one to three of its items replaced, mostly by others of the same type."""
    content = json.loads(TEXT)
    for _ in range(draw(st.integers(1, 3))):
        place: Any = content
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if not isinstance(place[key], dict | list) or not place[key] or draw(st.integers(0, 9)) == 0:
                old = place[key]
                near = st.integers(old - 2, old + 2) if type(old) is int else ANYTHING
                place[key] = draw(st.one_of(near, near, st.integers(-1, 40), ANYTHING))
                break
            place = place[key]
    return json.dumps(content)


@settings(max_examples=100, deadline=None)
@given(changed())
def test_any_change_is_refused_or_harmless(text: str) -> None:
    use(text)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(TEXT)), st.integers(0, 20), st.text(max_size=5))
def test_any_damage_is_refused_or_harmless(start: int, length: int, inserted: str) -> None:
    use(TEXT[:start] + inserted + TEXT[start + length :])


@given(st.text() | ANYTHING.map(json.dumps))
def test_any_text_is_refused(text: str) -> None:
    with pytest.raises(GraphError):
        StepGraph.from_json(text)


def test_calls_that_are_alike_take_equally_long() -> None:
    """Two layers of two ops, of which one is a call that another module makes too, and an op of its own between."""
    ops = [Op("aten.mul", -1, seconds, 0, (), ()) for seconds in (1.0, 2.0, 8.0, 5.0, 4.0, 12.0)]
    layers = [Call(path, "Layer", -1, first, first + 2, (), (), structure=1) for path, first in (("a", 0), ("b", 3))]
    places = ("a.x", 1), ("b.x", 4), ("c", 5)
    inner = [Call(path, "Inner", -1, first, first + 1, (), (), structure=2) for path, first in places]
    found = with_even_times(ops, [layers[0], inner[0], layers[1], inner[1], inner[2]])
    assert [op.seconds for op in found] == [3.0, 3.0, 8.0, 3.0, 3.0, 12.0]  # within layers first
    assert with_even_times(ops, []) == ops
