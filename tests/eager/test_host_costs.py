"""Measured host costs of the engine: measured once, cached in a file, and optional."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import lowtide
from lowtide.eager import host_costs
from lowtide.tracing import devices
from lowtide.tracing import trace as tracing
from lowtide.tracing.devices import EngineCosts, cache_folder, engine_costs
from lowtide.tracing.host_speed import REFERENCE_S
from lowtide.tracing.op_times import PlainTimes

CPU = torch.device("cpu")
COSTS = EngineCosts(1e-4, 1e-5, 2e-5, 3e-5, 4e-5)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """How often the engine was measured."""
    times: list[int] = []

    def measure(device: torch.device) -> EngineCosts:
        times.append(1)
        return COSTS

    monkeypatch.setattr(devices, "_measures", [measure])
    monkeypatch.setattr(devices, "_known", {})
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "not" / "there"))
    return times


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_known", {})


def test_once_for_all_processes(measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        assert engine_costs(CPU) == COSTS
        forget(monkeypatch)
    assert len(measured) == 1
    (path,) = cache_folder().iterdir()
    assert json.loads(path.read_text()) == COSTS._asdict()


@pytest.mark.parametrize(
    "content",
    [
        *("", "{}", "[1]", '{"region_s": "x"}'),
        json.dumps(COSTS._asdict() | {"save_s": -1}),
        json.dumps(COSTS._asdict() | {"region_s": 0, "save_s": 0}),
    ],
)
def test_a_damaged_file_is_measured_again(content: str, measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    engine_costs(CPU)
    (path,) = cache_folder().iterdir()
    path.write_text(content)
    forget(monkeypatch)
    assert engine_costs(CPU) == COSTS and len(measured) == 2


def test_a_disturbed_measurement_is_not_kept(measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    disturbed = COSTS._replace(region_s=0.0, save_s=0.0)
    monkeypatch.setattr(devices, "_measures", [lambda device: disturbed])
    assert engine_costs(CPU) == disturbed
    assert not cache_folder().exists()


def test_nothing_is_measured_under_a_profiler(measured: list[int]) -> None:
    with profile(activities=[ProfilerActivity.CPU]):
        assert engine_costs(CPU) == devices.ENGINE_COSTS and not measured
    assert engine_costs(CPU) == COSTS and len(measured) == 1


def test_other_processes_only_add_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that take a second longer now and then change no cost by as much as that."""
    bench = host_costs._EngineBench(CPU)
    steps, calls = bench._steps, []

    def disturbed(model: nn.Module, count: int) -> tuple[float, float]:
        calls.append(count)
        step_s, forward_s = steps(model, count)
        return (step_s + 1, forward_s + 1) if len(calls) % 7 < 4 else (step_s, forward_s)

    monkeypatch.setattr(bench, "_steps", disturbed)
    assert max(bench._in_turns(bench._small, [None, None, host_costs._recompute(bench._small)])) < 0.5


def test_without_a_folder_to_write_to(measured: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert engine_costs(CPU) == engine_costs(CPU) == COSTS
    assert len(measured) == 1  # in this process


def test_where_the_folder_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LOWTIDE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "lowtide"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "lowtide"


def test_measuring_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_costs, "_BLOCKS", 2)
    monkeypatch.setattr(host_costs, "_ROUNDS", 1)
    state = torch.get_rng_state()
    before = {id(each) for each in gc.get_objects() if issubclass(type(each), nn.Module | nn.Parameter)}
    with torch.no_grad():
        costs = host_costs.measure_engine_costs(CPU)
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(0.0 <= each < 1.0 for each in costs) and costs.move_s == 0.0
    # On a device they would count as memory of the step. A graph that nobody can reach may hold parameters alone.
    assert {id(each) for each in gc.get_objects() if issubclass(type(each), nn.Module | nn.Parameter)} <= before


def test_outputs_are_retained_while_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise what returning them costs would not be in it."""
    bench = host_costs._EngineBench(CPU)
    names, num_saves = bench._look_into(bench._large[0])
    gelu = names.index("gelu")
    assert [names[gelu - 3], names[gelu - 1]] == ["native_layer_norm", "addmm"] and num_saves > 10
    with host_costs.apply(bench._large, host_costs._recompute(bench._large, (gelu - 3, gelu - 1, gelu))) as handle:
        for _ in range(2):
            bench._steps(bench._large, 1)
        assert handle.stats().num_replays >= len(bench._large)


def test_costs_are_those_of_a_host_of_reference_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core that others slow down while costs are measured takes longer for the probe too."""

    def costs_on(slower: float) -> EngineCosts:
        def steps(bench: host_costs._EngineBench, model: nn.Module, count: int) -> tuple[float, float]:
            num_planned = sum("forward" in vars(child) for child in model.children())
            return slower * 1e-3 * (1 + num_planned), slower * 1e-4

        monkeypatch.setattr(host_costs._EngineBench, "_steps", steps)
        monkeypatch.setattr(host_costs, "probe_s", lambda: slower * REFERENCE_S)
        return host_costs.measure_engine_costs(CPU)

    assert costs_on(1.0).region_s > 0
    for slower in (0.5, 2.0):
        assert costs_on(slower) == pytest.approx(costs_on(1.0))


def test_a_trace_has_the_costs_of_its_own_host(measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """At the moment at which the host was fastest, as for the plain step."""
    moments = iter([(5.0, 2.0), (3.0, 4.0), (4.0, 1.0)])
    now = (0.0, 0.0)

    def time_step(*_: Any) -> PlainTimes:
        nonlocal now
        now = next(moments)
        return PlainTimes(now[0], now[0], now[0], now[0])

    monkeypatch.setattr(tracing, "time_step", time_step)
    monkeypatch.setattr(tracing, "probe_s", lambda: now[1] * REFERENCE_S)
    monkeypatch.setattr(tracing, "_NUM_RECORDED", 2)
    monkeypatch.setattr(tracing, "_NUM_TIMED", 3)
    model = nn.Linear(4, 4)
    graph = lowtide.trace(model, lambda x: model(x).sum(), torch.randn(2, 4), mode="real")
    hardware = graph.hardware
    assert graph.step_s == 6.0
    assert hardware.region_s == pytest.approx(4 * COSTS.region_s) and hardware.save_s == pytest.approx(4 * COSTS.save_s)
