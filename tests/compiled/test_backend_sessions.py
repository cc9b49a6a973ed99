"""Budgets are never silently ignored: shared code, outer compiles, DDP, recompile limits, and after errors."""

from __future__ import annotations

import copy
import gc
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lowtide
from compiled.test_backend import MLP, Mixed, Stack, Stopping, rows, squared, squared_of_data
from kernelless import (
    COMPILED_MARKS,
    PLENTY,
    Compiler,
    assert_equal,
    compiled_plainly,
    floor_of,
    left_behind,
    plan_again,
    running,
    session_of,
    squeeze,
)
from lowtide import _compat
from lowtide._compat.internals import optional
from lowtide.api.compile import explain_compiled
from lowtide.compiled import backend, other_memory
from lowtide.compiled.compiled_handle import describe
from sweeps import sweep

pytestmark = COMPILED_MARKS


def stack() -> Stack:
    return Stack(MLP(), MLP(), MLP())


def refused(model: nn.Module) -> int:
    """Steps until the budget is refused; the floor that the error names."""
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        for _ in range(3):
            squared(model).backward()
    return caught.value.floor_bytes


# Errors.


def test_after_an_infeasible_budget_the_model_runs_plainly_and_is_freed() -> None:
    model = lowtide.compile(stack(), budget=1)
    refused(model)
    assert all(block._compiled_call_impl is None for block in model.blocks)
    with pytest.raises(lowtide.LowtideError, match="no handle"):
        lowtide.handle_of(model)
    model.zero_grad()
    plain = copy.deepcopy(model)
    assert_equal(left_behind(plain, squared), left_behind(model, squared))
    gone = [weakref.ref(each) for each in (model, *model.parameters())]
    del model, plain
    gc.collect()
    assert not any(reference() is not None for reference in gone)


@pytest.mark.parametrize(
    "make, regional", sweep([(Mixed, True), (stack, False), (stack, True), (Mixed, False)], keep=2)
)
def test_the_floor_of_the_error_is_a_budget_that_fits(make: Callable[[], nn.Module], regional: bool) -> None:
    floor = refused(lowtide.compile(make(), budget=1, regional=regional))
    again = lowtide.compile(make(), budget=floor, regional=regional)
    for _ in range(3):
        squared(again).backward()
    assert refused(lowtide.compile(make(), budget=floor - 1, regional=regional)) == floor


def test_graph_breaks_raise_no_floor_from_a_part() -> None:
    floor = refused(lowtide.compile(Stopping(MLP(), MLP(), MLP()), budget=1, regional=False))
    again = lowtide.compile(Stopping(MLP(), MLP(), MLP()), budget=floor, regional=False)
    for _ in range(3):
        squared(again).backward()


def test_over_the_budget_with_a_warning() -> None:
    model = lowtide.compile(stack(), budget=1, on_over="warn")
    expected = left_behind(compiled_plainly(copy.deepcopy(model), regional=True), squared)
    with pytest.warns(UserWarning, match=r"budget 1 B is below .*on_over='warn'") as caught:
        for _ in range(4):
            assert_equal(expected, left_behind(model, squared))
    assert len(caught) == 1
    assert running(model)[-1].keeps is not None
    with pytest.raises(ValueError, match="on_over is 'raise' or 'warn', not 'log'"):
        lowtide.compile(model, budget=1, on_over="log")  # type: ignore[arg-type]


# Shared code.


def test_twelve_models_compile_once(compiler: Compiler) -> None:
    models = [lowtide.compile(stack(), budget=PLENTY) for _ in range(12)]
    for model in models:
        for _ in range(2):
            squared_of_data(model).backward()
        assert explain_compiled(model).startswith("3 calls of 2 compiled graphs")
    assert len(compiler.splits) == 2, "blocks whose input needs a gradient, and the first"
    squeeze(models[0], floor_of(models[0]))
    squared_of_data(models[0]).backward()
    squared_of_data(models[1]).backward()
    assert any(variant.keeps is not None for variant in running(models[0]))
    assert all(variant.keeps is None for variant in running(models[1])), "each by its own plan"


def test_other_options_are_other_code(compiler: Compiler) -> None:
    for options in ({}, {"max_autotune": False}, {"max_autotune": False}):
        squared(lowtide.compile(stack(), budget=PLENTY, options=options)).backward()
    assert len(compiler.splits) == 2


def test_the_recompile_limit_is_said_once() -> None:
    model = lowtide.compile(stack(), budget=PLENTY, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2), pytest.warns(UserWarning) as caught:
        for num in (8, 9, 10, 11):
            model(rows(num)).sum().backward()
    assert len(caught) == 1
    assert "recompile_limit for 'forward'" in str(caught[0].message) and "dynamic=True" in str(caught[0].message)


def test_the_recompile_limit_is_said_for_later_models_too() -> None:
    """Dynamo says it once: a later compile of the same code runs eagerly from its first step on, until a reset."""
    with torch._dynamo.config.patch(recompile_limit=1):
        for size in (20, 21, 22):
            model = lowtide.compile(stack(), budget=PLENTY, options={"max_fusion_size": size})
            if size == 20:
                squared(model).backward()
                continue
            with pytest.warns(UserWarning, match=r"recompile_limit for 'forward'.*Call torch.compiler.reset\(\)"):
                squared(model).backward()
    squared(model).backward()
    assert not session_of(model).graphs, "a limit that is raised afterwards changes nothing"
    torch.compiler.reset()
    squared(model).backward()
    assert session_of(model).graphs


def test_blocks_of_torchs_own_classes_do_not_reach_the_limit_together(compiler: Compiler) -> None:
    """They begin in a function of lowtide's, whose entries Dynamo counts."""
    kinds = [nn.ReLU, nn.Tanh, nn.SiLU]
    models = [Stack(*(nn.Sequential(nn.Linear(8, 8), each()) for _ in range(2))) for each in (*kinds, *kinds)]
    with torch._dynamo.config.patch(recompile_limit=1):
        for model in models:
            lowtide.compile(model, budget=PLENTY, regional=True)
            for _ in range(2):
                squared(model).backward()
            assert explain_compiled(model).startswith("2 calls of 1 compiled graph ")
    assert len(compiler.splits) == len(kinds), "equal blocks share their code"


def test_the_recompile_limit_of_the_backend_is_said() -> None:
    def step(budget: int) -> None:
        model = torch.compile(Stack(MLP()), backend=backend.backend, options={"budget": budget})
        squared(model).backward()
        sessions.append(model)

    sessions: list[Any] = []
    with torch._dynamo.config.patch(recompile_limit=2), pytest.warns(UserWarning, match="recompile_limit") as caught:
        for extra in range(3):
            step(PLENTY + extra)
    assert len(caught) == 1
    assert not any("recompile_limit" in str(lowtide.handle_of(model)) for model in sessions[:2]), "theirs stay compiled"


def test_graph_breaks_inside_of_blocks_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    class Breaking(MLP):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            torch._dynamo.graph_break()
            return super().forward(x)

    model = lowtide.compile(Stack(Breaking(), Breaking()), budget=PLENTY)
    for _ in range(3):
        squared(model).backward()
    (said,) = [record.message for record in caplog.records if record.name == "lowtide"]
    assert "blocks.0 (Breaking) runs as 2 compiled graphs" in said and "TORCH_LOGS=graph_breaks" in said
    lowtide.compile(model, budget=1)
    with pytest.raises(lowtide.InfeasibleBudgetError, match="between them, which runs eagerly"):
        for _ in range(14):
            squared(model).backward()


def test_saved_tensor_hooks_around_whole_steps_are_said_once() -> None:
    """Also if they begin later; those around some steps, or some blocks of a step, leave a budget that holds."""

    class Partly(Stack):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.save_on_cpu():
                x = self.blocks[0](x)
            return self.blocks[1](x)

    partly, model = (lowtide.compile(each, budget=PLENTY) for each in (Partly(MLP(), MLP()), stack()))
    for each in (partly, model) * 4:
        squared(each).backward()
    with torch.autograd.graph.save_on_cpu():
        squared(model).backward()
    squared(model).backward()
    with (
        pytest.warns(UserWarning, match="inside of saved-tensor hooks.*budget does not apply") as caught,
        torch.autograd.graph.save_on_cpu(),
    ):
        for _ in range(3):
            squared(model).backward()
    assert len(caught) == 1 and str(caught[0].message) in str(lowtide.handle_of(model))


def test_blocks_that_are_not_called_as_modules_are_said_once() -> None:
    class Around(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block.forward(x)
            return x

    model = lowtide.compile(Around(MLP(), MLP()), budget=1)
    with pytest.warns(UserWarning, match=r"called none of the compiled blocks.*call block\(x\)") as caught:
        for _ in range(4):
            squared(model).backward()
    assert len(caught) == 1 and str(lowtide.handle_of(model)) == str(caught[0].message)
    lowtide.handle_of(model).remove()
    assert not model._forward_pre_hooks and not model._forward_hooks


def test_a_model_that_is_not_called_itself_is_said_once() -> None:
    class Encoder(Stack):
        def encode(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

        forward = encode

    def made() -> Any:
        return lowtide.compile(Encoder(MLP(), MLP()), budget=PLENTY, regional=False)

    model, x = made(), torch.randn(4, 8)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        model.encode(x)  # saves nothing
    with pytest.warns(UserWarning, match=r"without a call of the model.*Call model\(x\)") as caught:
        for _ in range(3):
            model.encode(x).sum().backward()
    assert len(caught) == 1 and str(lowtide.handle_of(model)) == str(caught[0].message)
    copied.encode(x).sum().backward()  # not compiled, so nothing is said
    called, removed = made(), made()
    called(x).sum().backward()
    called.encode(x).sum().backward()  # beside the step, such as for a metric
    lowtide.handle_of(removed).remove()
    assert not any(module._forward_hooks for each in (model, called, removed) for module in each.modules())


def test_a_module_that_runs_eagerly_is_said_once() -> None:
    model = lowtide.compile(stack(), budget=PLENTY)
    said = r"ran blocks.0 \(MLP\) eagerly.*fullgraph=True"
    with torch.compiler.set_stance("force_eager"), pytest.warns(UserWarning, match=said) as caught:
        for _ in range(2):
            squared(model).backward()
    assert len(caught) == 1
    assert str(lowtide.handle_of(model)) == str(caught[0].message), "not that no step was run yet"
    for _ in range(2):
        squared(model).backward()
    assert str(caught[0].message) in str(lowtide.handle_of(model)).splitlines()[-1]


@pytest.mark.skipif(not optional("torch.compiler._compile_session_context", None), reason="torch 2.13 has the flag")
def test_a_variant_is_compiled_as_dynamo_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise compiled code that another thread runs meanwhile raises: "using FX to symbolically trace"."""
    compiler, flags = Compiler(), []

    def flagged(*args: Any) -> Any:
        flags.append(torch.compiler.is_compiling())
        return compiler(*args)

    monkeypatch.setattr(_compat, "compile_with_inductor", flagged)
    model = lowtide.compile(stack(), budget=PLENTY)
    for _ in range(2):
        squared(model).backward()
    first = len(flags)
    squeeze(model, floor_of(model))
    squared(model).backward()
    assert len(flags) > first, "no other variant was compiled"
    assert all(flags) and not torch.compiler.is_compiling()


# Other compilers around it.


@pytest.mark.parametrize("is_first", sweep([True, False], keep=1), ids=["torch.compile last", "torch.compile first"])
def test_inside_another_compile(is_first: bool) -> None:
    class Headed(Stack):
        def __init__(self) -> None:
            super().__init__(MLP(), MLP(), MLP())
            self.head = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(super().forward(x.sin())).cos()

    model = Headed()
    expected = left_behind(compiled_plainly(copy.deepcopy(model), regional=True), squared)
    if is_first:
        outer = torch.compile(lowtide.compile(model, budget=PLENTY), backend="aot_eager")
    else:
        outer = lowtide.compile(torch.compile(model, backend="aot_eager"), budget=PLENTY)
    for _ in range(2):
        squared(outer).backward()
    assert explain_compiled(outer).startswith("3 calls of 1 compiled graph ")
    assert session_of(model).chooser.surroundings is not None
    squeeze(model, floor_of(model))
    actual = left_behind(model, lambda _: squared(outer))
    for name, value in expected.items():
        assert torch.allclose(value.float(), actual[name].float(), atol=1e-6), name
    assert any(variant.keeps is not None for variant in running(model))


@pytest.fixture
def _group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def wide(model: nn.Module) -> Tensor:
    return model(torch.randn(8, 256, generator=torch.Generator().manual_seed(3))).square().mean()


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("num_buckets", sweep([3, 1], keep=1))
def test_a_model_inside_data_parallel(num_buckets: int) -> None:
    model = Stack(MLP(256), MLP(256), MLP(256))
    expected = left_behind(compiled_plainly(copy.deepcopy(model), regional=True), wide)
    parallel = DistributedDataParallel(model, bucket_cap_mb=25 if num_buckets == 1 else 1)
    lowtide.compile(parallel, budget=PLENTY)
    for _ in range(2):
        assert_equal(expected, left_behind(model, lambda _: wide(parallel)))
    assert explain_compiled(parallel).startswith("3 calls of 2 compiled graphs")
    squeeze(model, floor_of(model))
    assert_equal(expected, left_behind(model, lambda _: wide(parallel)))
    assert any(variant.keeps is not None for variant in running(model))
    assert session_of(model).chooser.surroundings is not None and lowtide.handle_of(parallel) is lowtide.handle_of(
        model
    )


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("num_buckets", sweep([3, 1], keep=1))
@pytest.mark.filterwarnings("ignore")  # what Dynamo has to say on DDP's forward
def test_the_backend_on_data_parallel(num_buckets: int) -> None:
    model = Stack(MLP(256), MLP(256), MLP(256))
    expected = left_behind(copy.deepcopy(model), wide)
    parallel = DistributedDataParallel(model, bucket_cap_mb=25 if num_buckets == 1 else 1)
    options = {"budget": PLENTY}
    compiled_model = torch.compile(parallel, backend=backend.backend, options=options)
    for _ in range(2):
        wide(compiled_model).backward()
    session = backend._by_options[id(options)]
    session._end_step()
    assert session.current is not None and len(session.current.numbers) >= num_buckets
    instances = [session._graphs[number] for number in session.current.numbers]
    session.budget = session.chooser.choose(instances, 0).peak_bytes
    plan_again(session)
    actual = left_behind(model, lambda _: wide(compiled_model))
    for name, value in expected.items():
        assert torch.allclose(value.float(), actual[name].float(), atol=1e-6), name
    assert any(variant.keeps is not None for variant in session.current.choice.variants)
    assert explain_compiled(parallel) == describe(session)


# Threads.


def test_first_forwards_are_traced_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace sets hooks on all modules and keeps Dynamo from compiling, in all threads."""
    trace, is_tracing, overlaps = other_memory.trace_once, threading.Event(), []
    models = [stack(), stack()]
    expected = [left_behind(compiled_plainly(copy.deepcopy(model), regional=True), squared) for model in models]

    def slow_trace(*args: Any, **kwargs: Any) -> Any:
        overlaps.append(is_tracing.is_set())
        is_tracing.set()
        time.sleep(0.3)  # the other thread gets here, if nothing stops it
        found = trace(*args, **kwargs)
        is_tracing.clear()
        return found

    monkeypatch.setattr(other_memory, "trace_once", slow_trace)
    firsts = [lowtide.handle_of(lowtide.compile(model, budget=PLENTY))._hook for model in models]
    calls = [(first, (model, (rows(),), {})) for first, model in zip(firsts, models, strict=True)]
    threads = [threading.Thread(target=first, args=args) for first, args in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlaps == [False, False]
    for model, values in zip(models, expected, strict=True):
        assert session_of(model).chooser.surroundings is not None
        assert_equal(values, left_behind(model, squared))
        assert explain_compiled(model).startswith("3 calls of 1 compiled graph "), "Dynamo compiles again"


def test_settled_models_that_share_code_train_in_turns_and_in_threads() -> None:
    models = [lowtide.compile(stack(), budget=PLENTY) for _ in range(2)]
    plain = [compiled_plainly(copy.deepcopy(model), regional=True) for model in models]
    expected = [gradients_of(model) for model in plain]
    for model in models:
        for _ in range(2):
            gradients_of(model)
    squeeze(models[0], floor_of(models[0]))
    chosen = [running(model) for model in models]
    assert chosen[0] != chosen[1]
    for _ in range(25):
        for model, values in zip(models, expected, strict=True):
            assert_equal(values, gradients_of(model))
    assert all(session_of(model).current.is_settled for model in models)
    ran: list[list[Any]] = [[], []]

    def train(number: int) -> None:
        for _ in range(10):
            ran[number].append(gradients_of(models[number]))

    threads = [threading.Thread(target=train, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, model in enumerate(models):
        assert len(ran[number]) == 10
        for values in ran[number]:
            assert_equal(expected[number], values)
        assert running(model) == chosen[number] and len(session_of(model).sequences.by_numbers) == 1


def test_evaluation_between_settled_steps_changes_nothing() -> None:
    """Dropout compiles another graph for it."""
    model = lowtide.compile(Stack(*(MLP(dropout=0.2) for _ in range(3))), budget=PLENTY)
    for _ in range(2):
        squared(model).backward()
    squeeze(model, floor_of(model))
    for _ in range(22):
        expected = left_behind(model, squared)
    session, chosen = session_of(model), running(model)
    assert session.current.is_settled and any(variant.keeps is not None for variant in chosen)
    for _ in range(2):
        model.eval()
        with torch.no_grad():
            squared(model)
        squared(model)  # without a backward
        model.train()
        assert_equal(expected, left_behind(model, squared))
        assert running(model) == chosen and session.current.is_settled
    assert len(session.sequences.by_numbers) == 1 and len(session.graphs) == 2


def gradients_of(model: nn.Module) -> dict[str, Any]:
    model.zero_grad()
    squared(model).backward()
    return {name: each.grad.clone() for name, each in model.named_parameters()}


# Arguments.


def test_numbers_that_differ_from_block_to_block() -> None:
    class Scaled(MLP):
        def forward(self, x: Tensor, scale: float) -> Tensor:
            return super().forward(x) * scale

    class Scales(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for index, block in enumerate(self.blocks):
                x = block(x, 1.0 + index)
            return x

    model = Scales(*(Scaled() for _ in range(4)))
    expected = left_behind(compiled_plainly(copy.deepcopy(model), regional=True), squared)
    lowtide.compile(model, budget=PLENTY)
    for _ in range(2):
        assert_equal(expected, left_behind(model, squared))
    squeeze(model, floor_of(model))
    with warnings.catch_warnings():
        assert_equal(expected, left_behind(model, squared))
    assert any(variant.keeps is not None for variant in running(model))
