"""`lowtide.compile` in use: training loops, copies, other shapes and budgets, errors, and what stays after deletion."""

from __future__ import annotations

import copy
import gc
import importlib.metadata
import io
import pickle
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide
from compiled.test_backend import MLP, Broken, Normed, Stack, rows, squared, squared_of_data
from kernelless import (
    COMPILED_MARKS,
    PLENTY,
    Compiler,
    assert_equal,
    compiled_plainly,
    floor_of,
    left_behind,
    running,
    session_of,
    squeeze,
)
from lowtide import _compat
from lowtide.api.compile import explain_compiled
from lowtide.compiled import backend
from lowtide.compiled.other_memory import ForwardHook
from lowtide.errors import UnitError
from sweeps import sweep

pytestmark = COMPILED_MARKS


def stack() -> Stack:
    return Stack(MLP(dropout=0.2), MLP(dropout=0.2), MLP(dropout=0.2))


def tight(model: nn.Module, **options: Any) -> nn.Module:
    """Compiled, at the floor."""
    lowtide.compile(model, budget=PLENTY, **options)
    for _ in range(2):
        squared(model).backward()
    squeeze(model, floor_of(model))
    model.zero_grad()
    return model


# Loops.


def test_accumulation_evaluation_and_several_forwards_per_backward() -> None:
    model = stack()
    plain = compiled_plainly(copy.deepcopy(model), regional=True)
    ours = tight(model)
    squeeze(ours, floor_of(ours) * 5 // 4)  # two forwards wait for one backward

    def loop(model: nn.Module) -> Tensor:
        for _ in range(2):
            squared(model).backward()
        model.eval()
        with torch.no_grad():
            squared(model)
        model.train()
        return squared(model) + 2 * squared(model)

    expected = left_behind(plain, loop)
    for _ in range(2):
        assert_equal(expected, left_behind(ours, loop))
    squared(ours).backward()
    assert {len(numbers) for numbers in session_of(ours).sequences.by_numbers} == {3, 6}


@pytest.mark.parametrize("use_reentrant", sweep([False, True], keep=1))
def test_a_checkpoint_around_compiled_blocks(use_reentrant: bool) -> None:
    class Outer(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            for index, block in enumerate(self.blocks):
                x = torch_checkpoint(block, x, use_reentrant=use_reentrant) if index == 1 else block(x)
            return x

    model = Outer(MLP(), MLP(), MLP())
    expected = left_behind(copy.deepcopy(model), squared)
    ours = tight(model)
    for _ in range(2):
        actual = left_behind(ours, squared)
        for name, value in expected.items():
            assert torch.allclose(value.float(), actual[name].float(), atol=1e-6), name
    assert len(session_of(ours).sequences.current.numbers) == 2


@pytest.mark.parametrize("use_reentrant", sweep([False, True], keep=1))
def test_checkpoints_around_all_blocks(use_reentrant: bool) -> None:
    class Outer(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            for block in self.blocks:
                x = torch_checkpoint(block, x, use_reentrant=use_reentrant)
            return x

    model = lowtide.compile(Outer(MLP(), MLP()), budget=1)
    with pytest.warns(UserWarning, match=r"inside of saved-tensor hooks.*gradient_checkpointing_disable") as caught:
        for _ in range(3):
            squared(model).backward()
    assert len(caught) == 1 and explain_compiled(model) == str(caught[0].message)


def test_exceptions_leave_the_next_step_as_it_was() -> None:
    model = stack()
    plain = compiled_plainly(copy.deepcopy(model), regional=True)
    ours = tight(model)
    expected = left_behind(plain, squared)
    fails = True

    def fail(*_: Any) -> None:
        if fails:
            raise KeyError("mine")

    hook = ours.blocks[2].register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="mine"):
        squared(ours)
    hook.remove()
    loss = squared(ours)
    loss.register_hook(fail)
    with pytest.raises(KeyError, match="mine"):
        loss.backward()
    fails = False
    del loss
    for _ in range(2):
        assert_equal(expected, left_behind(ours, squared))
    assert len(session_of(ours).sequences.current.numbers) == 3


def test_inside_data_parallel() -> None:
    """Blocks compiled in place, the model wrapped later: its hooks and buckets see the same gradients."""
    model = Stack(MLP(), MLP(), MLP())
    expected = left_behind(compiled_plainly(copy.deepcopy(model), regional=True), squared)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(tight(model))
        for _ in range(2):
            assert_equal(expected, left_behind(model, lambda _: squared(parallel)))
        assert any(variant.keeps is not None for variant in running(model))
        # After a barrier no earlier collective is left, whose release takes the GIL: torch destroys a group with the
        # GIL held, and waits for the thread that releases them.
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


# Graphs that come and go.


def test_graph_breaks_share_one_budget(compiler: Compiler) -> None:
    model = Stack(Broken(), Broken())
    lowtide.compile(model, budget=PLENTY, regional=False)
    for _ in range(2):
        squared(model).backward()
    session = session_of(model)
    session._end_step()
    sequence = session.sequences.current
    assert len(sequence.numbers) > 1
    floor, plain = floor_of(model), sequence.choice.peak_bytes
    squeeze(model, (floor + plain) // 2)
    choice = session.sequences.current.choice
    assert choice.peak_bytes <= (floor + plain) // 2 < plain
    held = sum(variant.saved_bytes for variant in choice.variants)
    assert held < sum(session._graphs[number].variants[0].saved_bytes for number in sequence.numbers)
    expected = left_behind(compiled_plainly(copy.deepcopy(model), regional=False), squared)
    assert_equal(expected, left_behind(model, squared))


@pytest.mark.parametrize("dynamic", [True, pytest.param(None, marks=pytest.mark.slow)])
def test_other_shapes(dynamic: bool | None) -> None:
    model = Stack(MLP(), MLP(), MLP())
    eager = copy.deepcopy(model)
    ours = tight(model, dynamic=dynamic)
    for num in (64, 48, 64, 20, 48):
        expected = left_behind(eager, lambda model, num=num: model(rows(num)).square().mean())
        actual = left_behind(ours, lambda model, num=num: model(rows(num)).square().mean())
        for name, value in expected.items():
            assert torch.allclose(value.float(), actual[name].float(), atol=1e-6), (num, name)
    if dynamic:
        assert len(session_of(ours).graphs) <= 2, "one graph for all sizes, one where the input needs no gradient"


def test_another_budget_is_another_graph(compiler: Compiler) -> None:
    model = stack()
    lowtide.compile(model, budget=PLENTY)
    for _ in range(2):
        squared(model).backward()
    floor, saved = floor_of(model), compiler.splits[-1].saved_bytes
    model.zero_grad()
    lowtide.compile(model, budget=floor)
    assert session_of(model).graphs == []
    before = len(compiler.splits)
    for _ in range(2):
        squared(model).backward()
    assert len(compiler.splits) > before, "served from a cache"
    assert min(split.saved_bytes for split in compiler.splits[before:]) < saved
    assert sum(isinstance(hook, ForwardHook) for hook in model._forward_pre_hooks.values()) == 1
    assert f"within {lowtide.units.format_bytes(floor)}" in explain_compiled(model)


def test_copies_of_a_compiled_model_can_be_fitted() -> None:
    model = lowtide.compile(stack(), budget=PLENTY)
    squared(model).backward()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied.zero_grad()
        lowtide.fit(copied, squared, copied, budget="1GiB", verify=False).remove()
    with pytest.raises(lowtide.LowtideError, match="has compiled blocks"):
        lowtide.fit(model, lambda: squared(model), budget="1GiB")


def test_blocks_that_were_compiled_before_are_so_again_after_remove() -> None:
    model = stack()
    for block in model.blocks:
        block.compile(backend="eager")
    before = [block._compiled_call_impl for block in model.blocks]
    for _ in range(2):
        lowtide.compile(model, budget=PLENTY)
    lowtide.handle_of(model).remove()
    assert [block._compiled_call_impl for block in model.blocks] == before
    lowtide.compile(model, budget=PLENTY)
    alive = weakref.ref(model.blocks[0])
    del model, block, before
    gc.collect()
    assert alive() is None


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_parameters_have_no_bytes_yet() -> None:
    model = Stack(*(nn.Sequential(nn.LazyLinear(8), nn.ReLU()) for _ in range(3)))
    lowtide.compile(model, budget=PLENTY)
    for _ in range(3):
        squared(model).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_model_with_one_block_that_is_called_again_is_told_of_its_blocks() -> None:
    class Shared(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(4):
                x = super().forward(x)
            return x

    model = lowtide.compile(Shared(MLP()), budget=1)
    with pytest.raises(lowtide.InfeasibleBudgetError, match="regional=True"):
        for _ in range(14):
            model.zero_grad()
            squared(model).backward()
    model = lowtide.compile(stack(), budget=1)
    with pytest.raises(lowtide.InfeasibleBudgetError, match="regional=False"):
        for _ in range(14):
            model.zero_grad()
            squared(model).backward()


def test_regional_then_whole() -> None:
    model = lowtide.compile(stack(), budget=PLENTY)
    squared(model).backward()
    lowtide.compile(model, budget=PLENTY, regional=False)
    assert all(block._compiled_call_impl is None for block in model.blocks)
    squared(model).backward()
    assert len(session_of(model).graphs) == 1


def test_layers_of_torchs_own_are_compiled() -> None:
    """Dynamo begins no graph in torch's own code: `Module.compile` alone would do nothing."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    expected = left_behind(copy.deepcopy(model), squared)
    ours = tight(model)
    assert len(session_of(ours).sequences.current.numbers) == 2 and len(session_of(ours).graphs) == 1
    assert any(variant.keeps is not None for variant in running(ours))
    actual = left_behind(ours, squared)
    assert all(torch.allclose(value.float(), actual[name].float(), atol=1e-6) for name, value in expected.items())


def test_single_kernels_are_no_blocks(compiler: Compiler) -> None:
    model = lowtide.compile(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)), budget=PLENTY)
    squared(model).backward()
    assert len(compiler.splits) == 1
    with pytest.raises(ValueError, match="Sequential has none"):
        lowtide.compile(model, budget=PLENTY, regional=True)


def test_two_models_are_two_sessions() -> None:
    first, second = tight(Stack(MLP(), MLP(), MLP())), lowtide.compile(Stack(MLP(), MLP(), MLP()), budget=PLENTY)
    for _ in range(2):
        squared(first).backward()
        squared(second).backward()
    assert all(variant.keeps is None for variant in running(second))
    assert any(variant.keeps is not None for variant in running(first))
    assert explain_compiled(first) != explain_compiled(second)
    assert explain_compiled(first) in explain_compiled()


def test_blocks_that_another_model_takes_over_are_said_once() -> None:
    first = lowtide.compile(Stack(MLP(), MLP(), MLP()), budget="1GiB")
    for _ in range(2):
        squared(first).backward()
    handle = lowtide.handle_of(first)
    with pytest.warns(UserWarning, match="2 modules of a model that was compiled within 1GiB") as caught:
        second = lowtide.compile(Stack(*first.blocks[:2], MLP()), budget="2GiB")
        for _ in range(2):
            squared(second).backward()
            squared(first).backward()
    assert len(caught) == 1
    assert str(caught[0].message) in str(handle)
    assert str(lowtide.handle_of(second)).startswith("3 calls of 1 compiled graph within 2.0 GiB")
    handle.remove()
    assert [block._compiled_call_impl is None for block in second.blocks] == [False] * 3
    assert first.blocks[2]._compiled_call_impl is None


def test_nothing_of_a_deleted_model_stays() -> None:
    model, batch = stack(), rows().requires_grad_()
    optimizer = torch.optim.AdamW(model.parameters())
    lowtide.compile(model, budget=PLENTY, optimizer=optimizer)
    for _ in range(2):
        model(batch).sum().backward()
        optimizer.step()
    session = weakref.ref(session_of(model))
    gone = [weakref.ref(each) for each in (model, batch, optimizer, *model.parameters())]
    del model, batch, optimizer
    gc.collect()
    assert not any(reference() is not None for reference in gone)
    torch.compiler.reset()
    gc.collect()
    assert session() is None


def test_a_model_that_its_blocks_refer_to_is_freed_before_its_first_step() -> None:
    model = stack()
    vars(model.blocks[0])["parent"] = model
    lowtide.compile(model, budget=PLENTY)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_options_do_not_live_forever() -> None:
    options = {"budget": PLENTY}
    model = torch.compile(Stack(MLP(), MLP()), backend=backend.backend, options=options)
    squared(model).backward()
    session = weakref.ref(backend._by_options[id(options)])
    del model
    torch.compiler.reset()
    gc.collect()
    assert session() is None and id(options) not in backend._by_options


# What the model looks like.


@pytest.mark.parametrize("has_run", [False, True])
def test_copies_pickles_and_names_are_as_before(has_run: bool) -> None:
    model = stack()
    names = list(model.state_dict()), [name for name, _ in model.named_modules()], type(model)
    lowtide.compile(model, budget=PLENTY)
    if has_run:
        squared(model).backward()
        assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 1
    assert (list(model.state_dict()), [name for name, _ in model.named_modules()], type(model)) == names
    written = io.BytesIO()
    torch.save(model, written)
    written.seek(0)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(written, weights_only=False)):
        assert not any(isinstance(hook, ForwardHook) for hook in copied._forward_pre_hooks.values())
        assert_equal(left_behind(copy.deepcopy(copied), squared), left_behind(copied, squared))
    assert len(session_of(model).graphs) == (1 if has_run else 0), "a copy is not compiled"


def test_the_first_forward_leaves_the_model_as_it_was() -> None:
    """It is traced on tensors without bytes: no buffer, counter, random state or list of a hook's may show that."""

    class Counting(Stack):
        def __init__(self) -> None:
            super().__init__(Normed(), Normed(), Normed())
            self.num_calls, self.seen = 0, []

        def forward(self, x: Tensor) -> Tensor:
            self.num_calls += 1
            self.seen.append(x.shape)
            return super().forward(x)

    model = Counting()
    plain = compiled_plainly(copy.deepcopy(model), regional=True)
    calls: list[int] = []
    lowtide.compile(model, budget=PLENTY)
    model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.register_forward_hook(lambda module, args, output: calls.append(len(calls)))
    plain.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    assert_equal(left_behind(plain, squared), left_behind(model, squared))
    assert (model.num_calls, len(model.seen), calls) == (1, 1, [0])
    assert session_of(model).chooser.surroundings is not None


# Errors.


@pytest.mark.parametrize("budget", ["12 apples", 0.5, -1, None, "120%"])
def test_budgets_that_cannot_be_read(budget: Any) -> None:
    with pytest.raises(UnitError):
        lowtide.compile(stack(), budget=budget)


def test_other_bad_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"nn.Module, not function"):
        lowtide.compile(lambda x: x, budget=1)  # type: ignore[arg-type]
    with pytest.raises(lowtide.LowtideError, match=r"'max_fusion'.*list_options"):
        lowtide.compile(stack(), budget=1, options={"max_fusion": 1})
    with pytest.raises(lowtide.LowtideError, match=r"budget.*lowtide.compile"):
        lowtide.compile(stack(), budget=1, options={"budget": 2})
    with pytest.raises(ValueError, match=r"mode is one of torch.compile's, such as 'max-autotune', not 'fastest'"):
        lowtide.compile(stack(), budget=1, mode="fastest")
    for name in ("regional", "dynamic", "fullgraph", "split"):
        with pytest.raises(TypeError, match=f"{name} is True or False, not 'yes'"):
            lowtide.compile(stack(), budget=1, **{name: "yes"})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="options is a dict of options by their names, not 3"):
        lowtide.compile(stack(), budget=1, options=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model is a RecursiveScriptModule"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scripting is deprecated
        lowtide.compile(torch.jit.script(stack()), budget=1)
    with pytest.raises(ValueError, match="regional=True compiles repeated blocks, and Linear has none"):
        lowtide.compile(nn.Linear(2, 2), budget=1, regional=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(lowtide.LowtideError, match=r"host='1GiB'.*no accelerator"):
        lowtide.compile(stack(), budget=1, host="1GiB")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(lowtide.LowtideError, match="regional=True"):
        lowtide.compile(stack(), budget=1, host="1GiB", regional=False)


def test_cuda_graphs_are_refused_and_left_out_of_autotuning(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(_compat, "compile_with_inductor", lambda *args: given.append(args[-1]) or (lambda *a: a))
    for options in ({"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}):
        with pytest.raises(lowtide.LowtideError, match="keep the memory of a step in pools of their own"):
            lowtide.compile(stack(), budget=1, **options)
    for options in ({"mode": "reduce-overhead"}, {"triton.cudagraphs": True}):
        model = torch.compile(stack(), backend=backend.backend, options={"budget": 1, **options})
        with pytest.raises(lowtide.LowtideError, match="keep the memory of a step in pools of their own"):
            squared(model)
    backend.inductor_compiler({}, "max-autotune")(None, None, None)
    assert given[-1]["max_autotune"] and not given[-1]["triton.cudagraphs"]


@pytest.mark.parametrize("regional", sweep([True, False], keep=1))
def test_an_infeasible_budget_names_the_floor(regional: bool) -> None:
    model = lowtide.compile(stack(), budget=PLENTY, regional=regional)
    for _ in range(2):
        squared(model).backward()
    floor = floor_of(model)
    model.zero_grad()
    lowtide.compile(model, budget=floor - 1, regional=regional)
    with pytest.raises(lowtide.InfeasibleBudgetError, match="make the batch smaller") as caught:
        for _ in range(2):  # blocks of a model are known to be all there is when a step has run
            squared(model).backward()
    assert caught.value.floor_bytes == floor
    assert ("regional=False" in str(caught.value)) == regional
    with torch.no_grad():
        squared(model)
    model(rows(8)).square().mean().backward()  # a smaller batch fits


# The backend by its name.


@pytest.mark.parametrize(
    "options, message",
    [
        (None, "needs a budget"),
        ({"budget": "12 apples"}, "12 apples"),
        ({"budget": 1, "fusion": 2}, "'fusion'"),
        ({"budget": 1, "host": "1GiB"}, r"options has host, .*lowtide.compile\(model, budget='12GiB', host='32GiB'\)"),
        ({"budget": 1, "regional": False}, r"options has regional, which only `lowtide.compile\(model, ...\)` takes"),
        (3, "options is a dict of options by their names, not 3"),
        ([("budget", 1)], "options is a dict"),
        ({"budget": 1, "optimizer": 5}, "optimizer is a torch.optim.Optimizer.* not 5 of type int"),
        ({"budget": 1, "mode": "fastest"}, "mode is one of torch.compile's, such as 'max-autotune', not 'fastest'"),
        ({"budget": 1, "mode": ["default"]}, "mode is one of torch.compile's"),
        ({"budget": 1, "time_limit_s": "a"}, "time_limit_s is a number of seconds, above 0, .* not 'a'"),
        ({"budget": 1, "time_limit_s": -1}, "time_limit_s is a number of seconds, above 0, .* not -1"),
    ],
)
def test_the_backends_errors_are_our_own(options: Any, message: str) -> None:
    model = torch.compile(nn.Linear(2, 2), backend=backend.backend, options=options)
    with pytest.raises((lowtide.LowtideError, TypeError, ValueError), match=message) as caught:
        model(torch.randn(2, 2))
    assert "\n" not in str(caught.value)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point as an installed package has it."""
    if any(point.name == "lowtide" for point in importlib.metadata.entry_points(group="torch_dynamo_backends")):
        return
    folder = tmp_path / "lowtide-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: lowtide\nVersion: 0\n")
    (folder / "entry_points.txt").write_text("[torch_dynamo_backends]\nlowtide = lowtide.compiled.backend:backend\n")
    monkeypatch.syspath_prepend(tmp_path)
    from torch._dynamo.backends import registry

    monkeypatch.setattr(registry, "_BACKENDS", dict(registry._BACKENDS))
    registry._discover_entrypoint_backends.cache_clear()
    registry._lazy_import.cache_clear()


@pytest.mark.usefixtures("installed")
def test_the_backend_by_its_name() -> None:
    model = Stack(MLP(), MLP(), MLP())
    expected = left_behind(compiled_plainly(copy.deepcopy(model), regional=False), squared)
    assert explain_compiled(model) == "nothing compiled for training yet: run a step first"
    options = {"budget": PLENTY}
    compiled_model = torch.compile(model, backend="lowtide", options=options)

    def step(_: nn.Module) -> Tensor:
        return squared(compiled_model)

    for _ in range(2):
        assert_equal(expected, left_behind(model, step))
    session = backend._by_options[id(options)]
    session._end_step()
    floor = session.chooser.choose(session.graphs, 0).peak_bytes
    assert "1 call of 1 compiled graph within 1024.0 TiB" in explain_compiled(model)
    smaller = torch.compile(model, backend="lowtide", options={"budget": floor})
    for _ in range(2):
        assert_equal(expected, left_behind(model, lambda _: squared(smaller)))
    text = explain_compiled(model)
    assert "as torch decides" in text and "kept" in text, "both compiled models share their parameters"


# In words.


def test_explanations() -> None:
    model = stack()
    assert explain_compiled(model) == "nothing compiled for training yet: run a step first"
    lowtide.compile(model, budget="1GiB")
    assert explain_compiled(model) == "nothing compiled for training yet: run a step first"
    for _ in range(2):
        squared_of_data(model).backward()
    lines = explain_compiled(model).splitlines()
    assert lines[0] == "3 calls of 2 compiled graphs within 1.0 GiB"
    assert lines[1].startswith("  peak    ") and lines[1].endswith(" KiB predicted")
    assert lines[2] == "  slower  0.0 % predicted, at least 0.0 % with any choice"
    assert lines[3].startswith("  took    ") and lines[3].endswith(" of planning")
    assert [line.split(":")[0] for line in lines[4:]] == ["  1 x graph 0", "  2 x graph 1"]
    assert all(line.endswith("saved each, as torch decides") for line in lines[4:])
    squeeze(model, floor_of(model))
    assert "1 op kept" in explain_compiled(model)
