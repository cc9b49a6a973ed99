"""`handle_of`: the handles of apply, fit and compile, found on a model or inside a wrapper."""

from __future__ import annotations

import copy
import gc
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide
from compiled.test_backend import MLP, Stack, rows, squared, squared_of_data
from kernelless import PLENTY, assert_equal, compiled_plainly, floor_of, left_behind, squeeze
from lowtide.api.compile import handle_of
from lowtide.compiled import backend
from lowtide.compiled.compiled_handle import NOTHING_YET, CompiledHandle
from lowtide.eager.plan_handle import AppliedPlan
from sweeps import sweep

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # Dynamo's own
]
NO_HANDLE = "there is no handle on this Stack: call lowtide.fit, lowtide.apply or lowtide.compile"


def stack() -> Stack:
    return Stack(MLP(), MLP(), MLP())


def compiled_handle(model: nn.Module) -> CompiledHandle:
    handle = handle_of(model)
    assert isinstance(handle, CompiledHandle)
    return handle


# Eager.


def test_of_a_policy_on_the_model_and_inside_wrappers() -> None:
    model = stack()
    handle = lowtide.apply(model, lowtide.RecomputeAll())
    assert handle_of(model) is handle
    assert handle_of(nn.Sequential(model)) is handle
    assert handle_of(torch.compile(model)) is handle  # type: ignore[arg-type]
    assert handle_of(copy.deepcopy(model)) is handle
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert handle_of(nn.parallel.DistributedDataParallel(model)) is handle
    finally:
        torch.distributed.destroy_process_group()
    handle.remove()
    with pytest.raises(lowtide.LowtideError, match=NO_HANDLE):
        handle_of(model)


def test_of_fit() -> None:
    model = stack()
    handle = lowtide.fit(model, squared, model, budget="1GiB")
    assert handle_of(model) is handle and isinstance(handle, AppliedPlan)
    handle.remove()
    with pytest.raises(lowtide.LowtideError, match=NO_HANDLE):
        handle_of(model)


def test_of_a_plan_that_keeps_everything() -> None:
    """No forward is patched then, and nothing else refers to the handle."""
    model = stack()
    before = set(vars(model))
    lowtide.apply(model, lowtide.Plan())
    gc.collect()
    handle = handle_of(model)
    assert isinstance(handle, AppliedPlan) and handle.plan == lowtide.Plan()
    assert handle_of(copy.deepcopy(model)) is handle
    with pytest.raises(lowtide.LowtideError, match=NO_HANDLE):
        handle_of(pickle.loads(pickle.dumps(model)))
    squared(model).backward()
    later = lowtide.apply(model, lowtide.RecomputeAll())
    assert handle_of(model) is later
    handle.remove()
    assert handle_of(model) is later
    later.remove()
    assert set(vars(model)) == before


def test_several_handles_are_told_apart() -> None:
    first, second = stack(), stack()
    handles = lowtide.apply(first, lowtide.EveryN(2)), lowtide.apply(second, lowtide.RecomputeAll())
    with pytest.raises(lowtide.LowtideError, match=r"2 handles on this ModuleList, the first ones found at 0\.blocks"):
        handle_of(nn.ModuleList([first, second]))
    assert (handle_of(first), handle_of(second)) == handles
    with pytest.raises(TypeError, match=r"nn.Module, not function"):
        handle_of(squared)  # type: ignore[arg-type]


# Compiled.


@pytest.mark.usefixtures("compiler")
def test_a_model_has_one_budget_at_a_time() -> None:
    model = lowtide.compile(stack(), budget=PLENTY)
    refused = r"lowtide.compile has compiled blocks.0 within a budget of its own already.*handle_of\(model\).remove"
    with pytest.raises(lowtide.LowtideError, match=refused):
        lowtide.fit(model, squared, model, budget="1GiB")
    with pytest.raises(lowtide.LowtideError, match=refused):
        lowtide.apply(model, lowtide.Plan())
    handle_of(model).remove()
    lowtide.apply(model, lowtide.Plan())
    with pytest.raises(lowtide.LowtideError, match=r"has put a plan on the model already: lowtide\.handle_of"):
        lowtide.compile(model, budget=PLENTY)
    handle_of(model).remove()
    lowtide.compile(model, budget=PLENTY)


@pytest.mark.usefixtures("compiler")
def test_of_a_policy_inside_of_a_compiled_model() -> None:
    """Its regions are the user's own; the compiled model has the budget."""
    model = stack()
    policy = lowtide.apply(model, lowtide.EveryN(2))
    lowtide.compile(model, budget=PLENTY)
    squared(model).backward()
    handle = compiled_handle(model)
    other = stack()
    lowtide.apply(other, lowtide.EveryN(2))
    with pytest.raises(lowtide.LowtideError, match="2 handles on this ModuleList, the first ones found at 0, 1"):
        handle_of(nn.ModuleList([model, other]))
    handle.remove()
    assert handle_of(model) is policy


@pytest.mark.usefixtures("compiler")
def test_of_a_model_that_the_backend_compiles_for_another_budget() -> None:
    """Dynamo keeps the code of the first compile, and may run it again."""
    model = stack()
    first, second = (
        torch.compile(model, backend=backend.backend, options={"budget": PLENTY + extra}) for extra in (0, 1)
    )
    squared(first).backward()
    with pytest.raises(lowtide.LowtideError, match=NO_HANDLE.replace("Stack", "OptimizedModule")):
        handle_of(second)
    squared(second).backward()
    for number, each in enumerate((first, second)):
        handle = handle_of(each)
        assert isinstance(handle, CompiledHandle) and handle.session.budget == PLENTY + number
        assert handle_of(nn.Sequential(each)) is handle
    with pytest.raises(lowtide.LowtideError, match=r"2 handles on this Stack.*or with what torch.compile returned"):
        handle_of(model)


@pytest.mark.usefixtures("compiler")
def test_before_the_first_step(tmp_path: Path) -> None:
    model = lowtide.compile(stack(), budget=PLENTY)
    handle = compiled_handle(model)
    assert handle_of(nn.Sequential(model)) is handle
    assert (handle.plan, handle.measured_peak_bytes, handle.measured_slowdown) == (None, None, None)
    assert handle.enabled
    assert handle.stats().calls == () and str(handle) == lowtide.api.compile.explain_compiled(model) == NOTHING_YET
    with pytest.raises(lowtide.LowtideError, match="no report: nothing compiled for training yet: run a step first"):
        handle.report(tmp_path / "report.html")


@pytest.mark.usefixtures("compiler")
def test_several_graphs(tmp_path: Path) -> None:
    model = lowtide.compile(stack(), budget=PLENTY)
    handle = compiled_handle(model)
    for _ in range(2):
        squared_of_data(model).backward()
    squeeze(model, floor_of(model))
    assert str(handle) == lowtide.api.compile.explain_compiled(model)
    stats = handle.stats()
    assert [call.graph for call in stats.calls] == [0, 1, 1] and stats.num_graphs == 2
    assert any(call.num_kept_ops is not None for call in stats.calls)
    assert str(stats).startswith("3 calls of 2 compiled graphs: ") and stats.peak_bytes > stats.saved_bytes > 0
    plan = handle.plan
    assert plan is not None and plan.engine == "compiled" and plan.peak_bytes == stats.peak_bytes
    assert plan.graph is not None and {call.path for call in plan.graph.calls if call.kind == "MLP"} == {
        f"blocks.{index}" for index in range(3)
    }
    assert sum(plan.graph.values[save.value].bytes for save in plan.graph.saves) >= stats.saved_bytes
    page = handle.report(tmp_path / "report.html", time_limit_s=0.1).path.read_text()
    assert "activation_memory_budget" in page and "a checkpoint per block" in page and "blocks.*" in page
    assert handle.report(tmp_path / "report.json").num_bytes > 1000
    report = handle.report(tmp_path / "report.md")
    assert report.verdict == str(handle).splitlines()[0]
    text = report.path.read_text()
    assert str(handle) in text and sum(line.startswith(("| 0 |", "| 1 |", "| 2 |")) for line in text.splitlines()) == 3


@pytest.mark.usefixtures("compiler")
def test_one_graph_has_a_plan_and_all_reports(tmp_path: Path) -> None:
    model = lowtide.compile(stack(), budget=PLENTY, regional=False)
    for _ in range(2):
        squared(model).backward()
    squeeze(model, floor_of(model))
    handle = compiled_handle(model)
    plan = handle.plan
    assert plan is not None and plan.engine == "compiled" and plan.keeps
    assert plan.peak_bytes == handle.stats().peak_bytes == plan.budget_bytes < plan.plain_peak_bytes
    assert handle.report(tmp_path / "report.html", time_limit_s=0.1).num_bytes > 1000
    assert handle.report(tmp_path / "report.md").path.exists()


@pytest.mark.usefixtures("compiler")
def test_of_the_backend(tmp_path: Path) -> None:
    model = stack()
    compiled_model = torch.compile(model, backend=backend.backend, options={"budget": PLENTY})
    with pytest.raises(lowtide.LowtideError, match="after its first training forward"):
        handle_of(compiled_model)
    for _ in range(2):
        squared(compiled_model).backward()
    handle = compiled_handle(compiled_model)
    assert handle is handle_of(model) and handle.plan is not None
    assert str(handle) == lowtide.api.compile.explain_compiled(model)
    assert handle.report(tmp_path / "report.html", time_limit_s=0.1).num_bytes > 1000
    handle.remove()
    squared(compiled_model).backward()
    with pytest.raises(lowtide.LowtideError, match="no handle"):
        handle_of(model)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("regional", sweep([True, False], keep=1))
def test_switched_off_the_graphs_run_as_torch_decides(regional: bool) -> None:
    model = stack()
    plain = compiled_plainly(copy.deepcopy(model), regional=regional)
    lowtide.compile(model, budget=PLENTY, regional=regional)
    for _ in range(2):
        squared(model).backward()
    squeeze(model, floor_of(model))
    handle = compiled_handle(model)
    expected = left_behind(plain, squared)
    for enabled in (False, True, False):
        handle.enabled = enabled
        assert handle.enabled is enabled
        assert_equal(expected, left_behind(model, squared))
    handle.session.budget = 1
    assert_equal(expected, left_behind(model, squared))  # a budget that nothing can meet does not matter now


@pytest.mark.usefixtures("compiler")
def test_switched_off_before_the_first_step() -> None:
    model = lowtide.compile(stack(), budget=1)
    handle = compiled_handle(model)
    handle.enabled = False
    squared(model).backward()
    assert handle.stats().calls == ()
    handle.enabled = True
    with pytest.raises(lowtide.InfeasibleBudgetError):
        for _ in range(2):
            squared(model).backward()


@pytest.mark.usefixtures("compiler")
def test_removed() -> None:
    model = stack()
    expected = left_behind(copy.deepcopy(model), squared)
    lowtide.compile(model, budget=PLENTY)
    handle = compiled_handle(model)
    squared(model).backward()
    loss = squared(model)
    handle.remove()
    handle.remove()
    loss.backward()
    assert not handle.enabled and str(handle) == "removed: the model runs uncompiled"
    assert lowtide.api.compile.explain_compiled(model) == NOTHING_YET
    with pytest.raises(lowtide.LowtideError, match=NO_HANDLE):
        handle_of(model)
    with pytest.raises(lowtide.LowtideError, match="was removed"):
        handle.enabled = True
    assert_equal(expected, left_behind(model, squared))
    assert compiled_handle(lowtide.compile(model, budget=PLENTY)) is not handle
    model(rows()).sum().backward()
