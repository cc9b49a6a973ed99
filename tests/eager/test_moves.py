"""Moves of a plan on a live model: gradients are bit-equal, whichever values are moved and to which tier."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide
from lowtide.eager import moves as engine
from lowtide.plans import Move, Plan, Recompute
from lowtide.simulator import simulate
from lowtide.solvers.placement import OffloadSelector
from lowtide.store import transfer
from lowtide.store.storage_units import Unit
from lowtide.store.tiers import Prefetch
from stepping import RunsOf
from sweeps import sweep

NEVER = 1 << 40  # a save that no call makes: saves are counted, and nothing is moved


pytestmark = pytest.mark.usefixtures("one_thread")


class Gated(nn.Module):
    """Saves of its own between those of its children, views of one storage among them."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("scale", torch.full((32, width), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(self.norm(x)).chunk(2, dim=-1)
        hidden = F.silu(gate) * up
        (hidden.sigmoid() * 2).argmax()  # a graph that is gone before the backward
        with torch.no_grad():
            self.norm(hidden)
        hidden = nn.Softmax(dim=-1)(hidden) + F.dropout(hidden, 0.2, self.training)  # a module of no one
        return x + self.down(hidden) * self.scale


class Model(nn.Module):
    """A module that is called twice, one that is there under two names, a normalisation with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gated() for _ in range(2))
        self.again, self.same = nn.Sequential(Gated()), self.blocks[0]
        self.batch_norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.again(torch.tanh(self.batch_norm(x)))
        return self.same(self.again(x)) + torch.exp(-x.square())


def data() -> Tensor:
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()


def left_behind(model: nn.Module, steps: int = 2) -> list[Tensor]:
    """All that some steps leave: outputs, gradients, buffers and random state."""
    torch.manual_seed(2)
    x, found = data(), []
    for _ in range(steps):
        output = model(x)
        output.square().mean().backward()
        found.append(output.detach())
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert x.grad is not None
    return [*found, x.grad, *gradients, *model.buffers(), torch.get_rng_state()]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def traced(model: nn.Module) -> lowtide.StepGraph:
    return lowtide.trace(model, lambda x: model(x).square().mean(), data(), mode="real")


def all_positions(graph: lowtide.StepGraph) -> list[tuple[str, int, int]]:
    """What names each save of the model."""
    return [(graph.calls[call].path, graph.nths[call], number) for call, number in graph.save_numbers if call >= 0]


WAYS = [("host", ""), ("disk", ""), ("device", "lossless"), ("host", "lossless"), ("disk", "lossless")]


# Which values.


class Seen(dict[tuple[str, int], dict[int, int]]):
    """Bytes of the storages that the engine counted, by call and number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        counting, pack = engine.Moves.counting, engine.Counting.pack
        found_in: dict[Any, dict[int, int]] = {}

        def opened(moves: engine.Moves, path: str, nth: int) -> engine.Counting | None:
            found = counting(moves, path, nth)
            if found is not None:
                found_in[found] = self[path, nth] = {}
            return found

        def packed(counting: engine.Counting, tensor: Tensor) -> Any:
            storages = [part.untyped_storage() for part in engine._compat.parts_of(tensor)]
            sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
            found_in[counting].update(enumerate(sizes.values(), start=counting._num_saves))
            return pack(counting, tensor)

        monkeypatch.setattr(engine.Moves, "counting", opened)
        monkeypatch.setattr(engine.Counting, "pack", packed)


def assert_numbered_alike(graph: lowtide.StepGraph, seen: Seen) -> None:
    for save, (call, number) in zip(graph.saves, graph.save_numbers, strict=True):
        if call >= 0:
            name = graph.calls[call].path, graph.nths[call]
            assert seen[name][number] == graph.values[save.value].bytes, (name, number)


JOBS = ["gpt_dropout", "block_called_again", "gpt_autocast", "gpt_with_torch_checkpoint", "custom_function", "unet"]
JOBS += ["lstm", "tensor_subclass", "hf_mixtral"]


@pytest.mark.parametrize("name", JOBS)
def test_saves_are_numbered_as_the_trace_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.startswith("hf_"):
        pytest.importorskip("transformers")
    job = zoo.make(name)
    graph = lowtide.trace(job.model, job.loss_fn, *job.batch, mode="real")
    calls = [(call.path, nth) for call, nth in zip(graph.calls, graph.nths, strict=True) if "<" not in call.path]
    seen = Seen(monkeypatch)
    with lowtide.apply(job.model, Plan(moves=tuple(Move(path, nth, NEVER) for path, nth in calls))) as handle:
        job.loss_fn(*job.batch)
        assert handle.stats().moved_bytes == 0
    assert_numbered_alike(graph, seen)


def test_saves_that_go_before_the_backward_and_modules_of_no_one_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    graph = traced(model)
    numbers = [number for (call, number) in graph.save_numbers if graph.calls[call].path == "blocks.1"]
    assert numbers != list(range(len(numbers))), "the graph that is gone leaves a gap"
    assert any(call.path == "<Softmax>" for call in graph.calls)
    seen = Seen(monkeypatch)
    calls = {(path, nth) for path, nth, _ in all_positions(graph)}
    with lowtide.apply(model, Plan(moves=tuple(Move(path, nth, NEVER) for path, nth in calls))):
        model(data())
    assert_numbered_alike(graph, seen)


def test_a_tensor_of_several_storages_counts_as_several(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.weight = torch.eye(32).to_sparse(), nn.Parameter(torch.randn(16))

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(self.mix, x * self.weight).exp().sin()

    model = Mixes()
    graph = lowtide.trace(model, lambda x: model(x).square().mean(), data().detach(), mode="real")
    seen = Seen(monkeypatch)
    with lowtide.apply(model, Plan(moves=(Move("", 0, NEVER),))):
        model(data().detach())
    assert_numbered_alike(graph, seen)
    sizes = [graph.values[save.value].bytes for save in graph.saves]
    assert 32 * 2 * 8 in sizes and 32 * 4 in sizes, "indices and values"


def test_the_value_that_is_named_is_the_one_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    graph = traced(model)
    sizes = {position: graph.values[save.value] for position, save in zip(graph.save_numbers, graph.saves, strict=True)}
    for (call, number), value in sizes.items():
        if call >= 0 and value.kind == "activation" and value.bytes >= 1024:
            with lowtide.apply(model, Plan(moves=(Move(graph.calls[call].path, graph.nths[call], number),))) as handle:
                output = model(data())
                assert handle.stats().moved_bytes == handle.stats().stored_bytes == value.bytes
            del output


# Exact, whatever moves.


@pytest.mark.parametrize(("to", "codec"), WAYS)
def test_everything_moves_and_nothing_changes(to: str, codec: str) -> None:
    model = Model()
    expected = left_behind(copy.deepcopy(model))
    positions = all_positions(traced(model))
    with lowtide.apply(model, Plan(moves=tuple(Move(*position, to, codec) for position in positions))) as handle:
        assert_same(left_behind(model), expected)
        stats = handle.stats()
    assert stats.stored_bytes == 0
    assert (stats.moved_bytes > 0) == (to != "device")


@pytest.mark.parametrize("name", ["gpt_autocast", "lora", "tensor_subclass", "gpt_with_torch_checkpoint", "hf_mixtral"])
def test_everything_moves_in_models_of_many_kinds(name: str) -> None:
    if name.startswith("hf_"):
        pytest.importorskip("transformers")
    job = zoo.make(name)
    positions = all_positions(lowtide.trace(job.model, job.loss_fn, *job.batch, mode="real"))

    def step() -> list[Tensor]:
        job.model.zero_grad()
        torch.manual_seed(1)
        job.step()
        gradients = [parameter.grad.clone() for parameter in job.model.parameters() if parameter.grad is not None]
        return [*gradients, torch.get_rng_state()]

    expected = step()
    with lowtide.apply(job.model, Plan(moves=tuple(Move(*position) for position in positions))) as handle:
        assert_same(step(), expected)
        assert handle.stats().moved_bytes > 0 and handle.stats().stored_bytes == 0


def test_a_lossy_codec_on_the_device() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.randn(64, 64)
    model(x).square().mean().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    with lowtide.apply(model, Plan(moves=(Move("1", 0, 0, "device", "int8"), Move("2", 0, 0, "device", "int8")))) as h:
        loss = model(x).square().mean()
        stats = h.stats()
        assert stats.compressed_bytes == 64 * 64 * 4 and 0 < stats.compressed_to_bytes < 0.3 * stats.compressed_bytes
        assert stats.stored_bytes == stats.compressed_to_bytes and stats.moved_bytes == 0
        assert "compressed to" in str(stats)
        loss.backward()
    actual = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert torch.equal(actual[3], expected[3]) and not torch.equal(actual[2], expected[2])
    assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(actual, expected, strict=True))


@functools.cache
def plain() -> tuple[nn.Module, list[Tensor], list[tuple[str, int, int]]]:
    """A model, what its plain steps leave behind, and what names each of its saves."""
    torch.manual_seed(0)
    model = Model()
    return model, left_behind(copy.deepcopy(model)), all_positions(traced(model))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_whatever_a_plan_names_the_step_is_the_same(draw: st.DataObject) -> None:
    model, expected, named = plain()
    model = copy.deepcopy(model)
    paths = st.sampled_from(sorted({path for path, _ in model.named_modules()}))
    anywhere = st.sampled_from(named) | st.tuples(paths, st.integers(0, 2), st.integers(0, 12))
    ways = st.sampled_from([("host", ""), ("device", "lossless"), ("disk", "")])
    kept = draw.draw(st.lists(st.integers(0, 20), max_size=6))
    calls = draw.draw(st.sets(st.tuples(paths, st.integers(0, 1)), max_size=3))
    outputs = [Move(*call, to=draw.draw(st.sampled_from(["host", "disk"])), op=op) for call in calls for op in kept[1:]]
    plan = Plan(
        tuple(Recompute(*call, tuple(kept)) for call in calls),
        (*(Move(*position, *draw.draw(ways)) for position in draw.draw(st.sets(anywhere, max_size=30))), *outputs),
        draw.draw(st.sampled_from([0, 1, 4096])),
    )
    with lowtide.apply(model, plan) as handle:
        assert_same(left_behind(model), expected)
        assert handle.stats().stored_bytes == 0


# Inputs of recomputed calls.


def test_inputs_of_regions_move() -> None:
    model = nn.Sequential(*(Gated() for _ in range(3)))
    expected = left_behind(copy.deepcopy(model))
    regions = tuple(Recompute(str(index)) for index in range(3))
    with lowtide.apply(model, Plan(regions, tuple(Move(str(index)) for index in range(1, 3)))) as handle:
        output = model(data())
        assert handle.stats().stored_bytes == 2 * 32 * 16 * 4
        del output
        assert handle.stats().stored_bytes == 0
        for parameter in model.parameters():
            parameter.grad = None
        assert_same(left_behind(model), expected)


# Outputs that recomputed calls retain, from the second step on. Of a `Gated` the ops are: norm 0, t 1, addmm 2, two of
# chunk 3 (views), silu 4, mul 5, and so on.


def held_elsewhere(paths: str, ops: range | tuple[int, ...], to: str = "host") -> Plan:
    """All outputs of some ops of single modules, held and moved."""
    return Plan(
        tuple(Recompute(path, keep_ops=tuple(ops)) for path in paths),
        tuple(Move(path, to=to, op=op) for path in paths for op in ops),
    )


@pytest.mark.parametrize("to", ["host", "disk"])
def test_outputs_of_regions_move_and_are_not_made_again(to: str) -> None:
    model = nn.Sequential(*(Gated() for _ in range(3)))
    reference = copy.deepcopy(model)
    with lowtide.apply(model, held_elsewhere("012", (2,), to)) as handle:
        model(data()).sum().backward()
        assert handle.stats().moved_bytes == 0
        model.zero_grad()
        output = model(data())
        assert handle.stats().stored_bytes == 3 * 32 * 32 * 4
        with RunsOf(torch.ops.aten.addmm.default) as products:
            output.sum().backward()
        assert products.count == 3, "of six, the second of each module"
        assert handle.stats().stored_bytes == 0
        model.zero_grad()
        both(model, reference, lambda model: model(data()).square().mean().backward())


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("ops", [(2, 5), (4, 7), tuple(range(40))], ids=["products", "gates", "all"])
def test_whichever_outputs_move_the_step_is_the_same(ops: tuple[int, ...], precision: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Gated(), nn.Sequential(Gated(), nn.Dropout(0.5)), Gated())
    reference = copy.deepcopy(model)

    def step(model: nn.Module) -> None:
        with torch.autocast("cpu", precision, enabled=precision is not None):
            loss = model(data()).float().square().mean() + model(data().flip(0)).float().square().mean()
        loss.backward(retain_graph=True)
        loss.backward()  # from outputs that are gone by now

    nested = held_elsewhere("12", ops)
    with lowtide.apply(model, replace(nested, regions=(*nested.regions, Recompute("1.0")))) as handle:
        for _ in range(2):
            both(model, reference, step)
            assert handle.stats().stored_bytes == 0
        assert handle.stats().moved_bytes > 0


@pytest.mark.parametrize("to", ["host", "disk"])
@pytest.mark.parametrize(("activation", "products"), [(torch.relu_, 1), (nn.functional.gelu, 0)])
def test_an_output_that_is_written_to_is_made_again(activation: Any, products: int, to: str) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return activation(self.linear(x)).sin() * 2

    model = nn.Sequential(Writes(), nn.Linear(16, 16))
    reference = copy.deepcopy(model)
    with lowtide.apply(model, held_elsewhere("0", (1,), to)) as handle:
        for _ in range(2):
            both(model, reference, lambda model: model(data()).square().mean().backward())
        output = model(data())
        with RunsOf(torch.ops.aten.addmm.default) as ran:
            output.sum().backward()
        assert ran.count == products
        assert (handle.stats().moved_bytes > 0) == (products == 0)
        assert handle.stats().stored_bytes == 0


class Rewrites(nn.Module):
    """Writes to what ops gave in ways that autograd's versions do not tell to whoever looks below it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(16, 16, bias=False), way

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x[None])[0] * 2
        if self.way == "view":
            hidden[:, :12].mul_(2)
        elif self.way == "data":
            hidden.data.mul_(2)
        elif self.way == "new":
            hidden = hidden * torch.rand_like(hidden).add_(1)
        elif self.way == "inference":
            with torch.inference_mode():
                scale = hidden * 2
                scale.add_(1)
            hidden = hidden * scale.clone()
        elif self.way == "product":
            hidden = self.linear(x[None]).relu_()[0]
        return hidden.sin() * hidden


@pytest.mark.parametrize("to", ["device", "host", "disk"])
@pytest.mark.parametrize("way", ["view", "data", "new", "inference", "product"])
def test_outputs_written_to_through_other_tensors_are_made_again(way: str, to: str) -> None:
    model = nn.Sequential(Rewrites(way), nn.ReLU(inplace=True), nn.Linear(16, 16))
    reference = copy.deepcopy(model)
    for op in range(12):
        plan = held_elsewhere("0", (op,), "host" if to == "device" else to)
        with lowtide.apply(model, replace(plan, moves=()) if to == "device" else plan):
            for _ in range(2):
                both(model, reference, lambda model: model(data()).square().mean().backward())


class WritesOutside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.first, self.second = nn.Linear(16, 16), Halves(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden, sines = self.first(self.linear(x))
        hidden.mul_(3)
        return self.second(hidden) * sines.sum()


class Halves(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x * 2
        return hidden, (hidden[:, :12] + 1).sin() * 2


def test_views_are_not_held() -> None:
    """What they are views of may be written to later, outside of the region."""
    model = WritesOutside()
    reference = copy.deepcopy(model)
    for op in range(4):
        with lowtide.apply(model, Plan((Recompute("first", keep_ops=(op,)),))):
            for _ in range(2):
                both(model, reference, lambda model: model(data()).square().mean().backward())


def test_an_output_of_several_tensors_moves_its_first() -> None:
    class Drops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            hidden, mask = torch.native_dropout(x, 0.5, True)
            return hidden * hidden * mask.sum() + torch.rand_like(x)

    model = nn.Sequential(nn.Linear(16, 16), Drops(), nn.Linear(16, 16))
    reference = copy.deepcopy(model)
    with lowtide.apply(model, held_elsewhere("1", (0,))) as handle:
        both(model, reference, lambda model: model(data()).square().mean().backward())
        output = model(data())
        assert handle.stats().stored_bytes == 32 * 16 * 4
        del output
        assert handle.stats().stored_bytes == 0, "the graph has died"
        both(model, reference, lambda model: model(data()).square().mean().backward())


class Sparse(nn.Module):
    """Of its ops, the first makes a sparse tensor; of its saves, the first is that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("links", torch.eye(32).to_sparse(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.links * 2, self.linear(x)).sin() * x


@pytest.mark.parametrize("plan", [held_elsewhere("0", range(6)), Plan(moves=tuple(Move("0", 0, n) for n in range(6)))])
def test_sparse_values_stay(plan: Plan) -> None:
    model = nn.Sequential(Sparse(), nn.Linear(16, 16))
    reference = copy.deepcopy(model)
    with lowtide.apply(model, plan) as handle:
        for _ in range(2):
            both(model, reference, lambda model: model(data()).square().mean().backward())
        assert handle.stats().moved_bytes > 0


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception_no_output_is_left(where: str) -> None:
    model = nn.Sequential(nn.Sequential(Gated(), Breaks()), Gated())
    reference = copy.deepcopy(model)
    with lowtide.apply(model, held_elsewhere("01", (2, 4, 5))) as handle:
        both(model, reference, lambda model: model(data()).square().mean().backward())
        model[0][1].breaks = where
        with contextlib.suppress(KeyError):
            model(data()).sum().backward()
            raise AssertionError("nothing broke")
        gc.collect()
        assert handle.stats().moved_bytes > 0
        assert handle.stats().stored_bytes == 0
        model[0][1].breaks = None
        both(model, reference, lambda model: model(data()).square().mean().backward())


def test_outputs_of_regions_leave_memory() -> None:
    model, alive = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.GELU()), nn.Linear(64, 64)), []
    model[0][0].register_forward_hook(
        lambda module, args, output: alive.append(weakref.ref(output.untyped_storage()))  # type: ignore[func-returns-value]
    )
    for moves, is_there in (((), True), ((Move("0", to="disk", op=1),), False)):
        with lowtide.apply(model, Plan((Recompute("0", keep_ops=(1,)),), moves)):
            model(torch.randn(64, 64)).sum().backward()
            alive.clear()
            output = model(torch.randn(64, 64))
            assert (alive[0]() is not None) == is_there
            output.sum().backward()
            alive.clear()


def test_outputs_of_regions_are_asked_for_when_the_backward_gets_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Gated(), Gated())
    with lowtide.apply(model, held_elsewhere("01", (2, 5))) as handle:
        model(data()).sum().backward()
        (store,) = handle._stores()
        asked: list[list[int]] = []
        own = store._tiers.fetch_before

        def fetch_before(put_before: int) -> None:
            asked.append([entry.unit.put_at for entry in store._entries.values() if entry.unit.put_at < put_before])
            own(put_before)

        monkeypatch.setattr(store._tiers, "fetch_before", fetch_before)
        model(data()).sum().backward()
    assert len(asked) == 1 and len(asked[0]) == 4


def test_where_others_have_hooks_outputs_stay() -> None:
    model = nn.Sequential(Gated(), Gated())
    reference = copy.deepcopy(model)

    def step(model: nn.Module) -> None:
        with torch.autograd.graph.save_on_cpu():
            loss = model(data()).square().mean()
        loss.backward()

    with lowtide.apply(model, held_elsewhere("01", (2, 5))) as handle:
        for _ in range(2):
            both(model, reference, step)
        assert handle.stats().moved_bytes == 0


class TwoInputs(nn.Module):
    def forward(self, first: Tensor, *, others: dict[str, Tensor]) -> Tensor:
        return (first * others["second"]).exp() + first.t().t() * others["view"]


@pytest.mark.parametrize(("number", "stored"), [(0, 32 * 16 * 4), (1, 64 * 16 * 4), (2, 0)])
def test_inputs_of_regions_count_once_a_storage(number: int, stored: int) -> None:
    region, leaf = TwoInputs(), data()
    model = nn.ModuleDict({"region": region})

    def step() -> tuple[Tensor, Tensor]:
        leaf.grad = None
        large = torch.cat([leaf, leaf]).tanh()
        return leaf * 1, region(leaf * 2, others={"second": large[:32], "view": large[32:]})

    step()[1].sum().backward()
    expected = leaf.grad
    with lowtide.apply(model, Plan((Recompute("region"),), (Move("region", 0, number),))) as handle:
        _, output = step()
        assert handle.stats().stored_bytes == stored
        output.sum().backward()
    assert torch.equal(leaf.grad, expected)  # type: ignore[arg-type]


def test_values_leave_memory() -> None:
    """On the CPU only the disk is elsewhere: what is moved there is gone when Python lets go of it."""
    model = nn.Sequential(nn.Linear(64, 64), Gated(64), nn.Linear(64, 64))
    model[1].scale.resize_(64, 64).fill_(0.5)
    alive: list[weakref.ref[Tensor]] = []
    model[1].register_forward_pre_hook(lambda module, args: alive.append(weakref.ref(args[0].untyped_storage())))
    for plan in (
        Plan((Recompute("1"),), (Move("1", 0, 0, "disk"),)),
        Plan(moves=tuple(Move("1.norm", 0, number, "disk") for number in range(5))),
    ):
        with lowtide.apply(model, plan) as handle:
            output = model(torch.randn(64, 64))
            assert handle.stats().stored_bytes == 64 * 64 * 4
            assert alive.pop()() is None
            output.sum().backward()


def step_of(job: zoo.Job) -> list[Tensor]:
    """Gradients of one step, with the same random numbers each time."""
    job.model.zero_grad()
    torch.manual_seed(1)
    job.step()
    return [parameter.grad.clone() for parameter in job.model.parameters() if parameter.grad is not None]


@pytest.mark.usefixtures("quick_search")
@pytest.mark.parametrize("name", sweep(["gpt_dropout", "block_called_again"], keep=1))
def test_solved_plans_run_exactly_and_peak_as_predicted(name: str) -> None:
    """With a disk as fast as memory, all that is simulated happens on the CPU too, but for fetching ahead."""
    job = zoo.make(name)
    graph = lowtide.trace(job.model, job.loss_fn, *job.batch, mode="real")
    fast = replace(graph.hardware, link_bytes_per_s=1e15)
    graph = replace(graph, hardware=fast)
    frontier = lowtide.sweep(graph, [])
    there = sum(size for kind, size in graph.static_bytes.items() if kind != "gradients")

    step = functools.partial(step_of, job)
    expected = step()
    for share in (0.3, 0.7):
        budget = int(frontier.floor_bytes + share * (frontier.plain_peak_bytes - frontier.floor_bytes))
        plan = lowtide.solve(graph, budget, host="1GiB")
        assert plan.moves
        plan = replace(plan, moves=tuple(replace(move, to="disk") for move in plan.moves))
        with lowtide.apply(job.model, plan):
            assert_same(step(), expected)
            job.model.zero_grad()
            measured = there + lowtide.measure(job.step, device="cpu").peak_bytes
        in_flight = int(simulate(graph, plan).live_bytes[:, 4].max())
        assert plan.peak_bytes - in_flight <= measured * 1.02
        assert measured <= plan.peak_bytes * 1.04


@pytest.mark.usefixtures("quick_search")
def test_solved_plans_name_every_place_of_a_value() -> None:
    job = zoo.make("gpt_dropout")
    graph = lowtide.trace(job.model, job.loss_fn, *job.batch, mode="real")
    graph = replace(graph, hardware=replace(graph.hardware, link_bytes_per_s=1e15))
    frontier = lowtide.sweep(graph, [])
    plan = lowtide.solve(graph, (frontier.floor_bytes + frontier.plain_peak_bytes) // 2, host="1GiB")
    named = {(move.path, move.nth, move.save) for move in plan.moves}
    regions = plan.calls(graph)
    owner = graph.innermost(regions)
    moved = set(plan.moves_by_value(graph))
    assert moved and len(named) == len(plan.moves) > len(moved)
    for save, (call, number) in zip(graph.saves, graph.save_numbers, strict=True):
        if save.value in moved and owner[save.call] < 0:
            assert (graph.calls[call].path, graph.nths[call], number) in named
    for call in regions:
        for number, value in enumerate(graph.calls[call].inputs):
            if value in moved and owner[graph.calls[call].parent] < 0:
                assert (graph.calls[call].path, graph.nths[call], number) in named


def test_the_solver_moves_outputs_that_regions_hold() -> None:
    """Named wherever they are held, so that they leave; and the step is the same."""
    job = zoo.make("gpt_dropout")
    graph = lowtide.trace(job.model, job.loss_fn, *job.batch, mode="real")
    graph = replace(graph, hardware=replace(graph.hardware, link_bytes_per_s=1e15))
    blocks = [call for call, facts in enumerate(graph.calls) if facts.kind == "Block"]
    regions: dict[int, tuple[int, ...]] = {}
    for call in blocks:
        made = enumerate(graph.ops[graph.calls[call].first : graph.calls[call].end])
        regions[call] = tuple(n for n, op in made if any(graph.values[v].bytes >= 1 << 16 for v in op.outputs))
    missing = graph.retainable.missing(regions)
    regions = {call: tuple(n for n in ops if n not in missing.get(call, ())) for call, ops in regions.items()}
    plan = OffloadSelector(graph, 1 << 30).plan(regions, 1.0)
    moved, outputs = plan.moves_by_value(graph), plan.moved_outputs(graph)
    assert set(outputs) == set(blocks)
    firsts = {c: {graph.ops[graph.calls[c].first + n].outputs[0] for n in ops} for c, ops in regions.items()}
    for call in blocks:
        assert set(outputs[call]) == {v for v in firsts[call] if graph.values[v].bytes >= 1 << 16 and v in moved}
        assert len(outputs[call]) > 5
        at_once = {*outputs[call], *graph.calls[call].inputs} & set(moved)
        assert sum(graph.values[value].bytes for value in at_once) <= plan.in_flight_bytes
    held = simulate(graph, Plan(plan.regions))
    assert simulate(graph, plan).peak_bytes < held.peak_bytes
    assert simulate(graph, plan).replayed_s == held.replayed_s

    step = functools.partial(step_of, job)
    expected = step()
    with lowtide.apply(job.model, plan) as handle:
        for _ in range(2):
            assert_same(step(), expected)
        assert handle.stats().moved_bytes > 0


# Lives of values.


@pytest.fixture
def moved() -> Any:
    """A model whose activations all move, and its plain reference."""
    model = nn.Sequential(Gated(), nn.Sequential(Gated(), Gated()))
    reference = copy.deepcopy(model)
    moves = tuple(Move(*position) for position in all_positions(traced(model)))
    with lowtide.apply(model, Plan((Recompute("1.1"),), (*moves, Move("1.1")))) as handle:
        yield model, reference, handle


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def both(model: nn.Module, reference: nn.Module, step: Any) -> None:
    results = []
    for each in (model, reference):
        torch.manual_seed(3)
        each.zero_grad()
        step(each)
        results.append([*gradients_of(each), torch.get_rng_state()])
    assert results[0][:-1]
    assert_same(*results)


def test_several_forwards_before_a_backward(moved: Any) -> None:
    model, reference, handle = moved

    def step(model: nn.Module) -> None:
        losses = [model(data() * factor).square().mean() for factor in (1.0, 0.5, 2.0)]
        model.eval()(data()).sum().backward()
        with torch.no_grad():
            model.train()(data())
        for loss in (losses[1], losses[0], losses[2]):
            loss.backward()

    both(model, reference, step)
    assert handle.stats().stored_bytes == 0


def test_a_second_backward_through_the_same_graph(moved: Any) -> None:
    def step(model: nn.Module) -> None:
        loss = model(data()).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()

    both(*moved[:2], step)


def test_gradients_of_gradients() -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)), torch.randn(32, 16, requires_grad=True)

    def penalty() -> list[Tensor]:
        model.zero_grad()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return [gradient.clone() for gradient in gradients_of(model)]

    expected = penalty()
    with lowtide.apply(model, Plan(moves=(Move("0"), Move("1"), Move("2")))) as handle:
        assert_same(penalty(), expected)
        assert handle.stats().moved_bytes > 0


def test_a_forward_without_backward_leaves_nothing(moved: Any) -> None:
    model, _, handle = moved
    output = model(data())
    assert handle.stats().stored_bytes > 0
    del output
    assert handle.stats().stored_bytes == 0
    with torch.no_grad():
        model(data())
    assert handle.stats().stored_bytes == 0


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.breaks: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.breaks == "forward":
            raise KeyError("forward")
        return _Breaking.apply(x, self.breaks == "backward")


class _Breaking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, breaks: bool) -> Tensor:
        ctx.breaks = breaks
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if ctx.breaks:
            raise KeyError("backward")
        return gradients[0], None


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception_the_next_step_is_right(where: str) -> None:
    model = nn.Sequential(Gated(), nn.Sequential(Gated(), Breaks()), Gated())
    reference = copy.deepcopy(model)
    positions = all_positions(traced(model))
    with lowtide.apply(model, Plan(moves=tuple(Move(*position) for position in positions))) as handle:
        model[1][1].breaks = where
        with contextlib.suppress(KeyError):
            model(data()).sum().backward()
            raise AssertionError("nothing broke")
        gc.collect()
        assert handle.stats().stored_bytes == 0
        assert engine._compat.no_hooks_in_force(), "no hooks are left"
        model[1][1].breaks = None
        both(model, reference, lambda model: model(data()).square().mean().backward())


def test_switched_off_removed_and_copied(moved: Any) -> None:
    model, reference, handle = moved

    def step(model: nn.Module) -> None:
        model(data()).square().mean().backward()

    with handle.disabled():
        both(model, reference, step)
        assert handle.stats().moved_bytes == 0
    copied = copy.deepcopy(model)
    both(copied, reference, step)
    assert handle.stats().moved_bytes > 0
    for each in (model, reference):
        torch.manual_seed(3)
        each.zero_grad()
    torch.manual_seed(3)
    loss = model(data()).square().mean()
    handle.remove()
    assert handle.stats().stored_bytes > 0
    assert all("forward" not in vars(module) for module in model.modules())
    loss.backward()
    torch.manual_seed(3)
    step(reference)
    assert_same(gradients_of(model), gradients_of(reference))
    assert handle.stats().stored_bytes == 0


def test_whoever_has_hooks_around_the_model_decides(moved: Any) -> None:
    model, reference, handle = moved

    def checkpointed(model: nn.Module) -> None:
        lowtide.checkpoint(model, data()).square().mean().backward()

    def torch_checkpointed(model: nn.Module) -> None:
        torch.utils.checkpoint.checkpoint(model, data(), use_reentrant=False).square().mean().backward()

    def offloaded(model: nn.Module) -> None:
        with lowtide.offload(host="1GiB", min_bytes=0):
            loss = model(data()).square().mean()
        loss.backward()

    for step in (checkpointed, torch_checkpointed, offloaded):
        both(model, reference, step)
    assert handle.stats().moved_bytes == 0


def test_a_reentrant_checkpoint_around_the_model_runs_its_replay_as_planned(moved: Any) -> None:
    def step(model: nn.Module) -> None:
        torch.utils.checkpoint.checkpoint(model, data(), use_reentrant=True).square().mean().backward()

    both(*moved[:2], step)


def test_hooks_that_a_module_puts_on_itself_see_what_they_should() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.packed = Gated(), 0

        def forward(self, x: Tensor) -> Tensor:
            x = x.exp()
            with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda packed: packed[0]):
                x = self.inner(x.sin())
            return x.cos()

        def pack(self, tensor: Tensor) -> tuple[Tensor]:
            self.packed += 1
            return (tensor.detach(),)

    model = Own()
    reference = copy.deepcopy(model)
    moves = [Move("", 0, number) for number in range(2)]
    moves += [Move("inner", 0, number) for number in range(9)] + [Move("inner.both")]
    with lowtide.apply(model, Plan(moves=tuple(moves))) as handle:
        both(model, reference, lambda model: model(data()).square().mean().backward())
        assert handle.stats().moved_bytes == 2 * 32 * 16 * 4, "exp saves its output, cos its input"
    assert model.packed == reference.packed > 0


def test_functional_transforms_run_plainly(moved: Any) -> None:
    model = moved[0].eval()
    parameters, x = dict(model.named_parameters()), data()

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    found = torch.func.grad(loss)(parameters)
    model(data()).square().mean().backward()
    assert all(torch.allclose(found[name], parameter.grad) for name, parameter in parameters.items())


def test_where_hooks_are_forbidden_nothing_moves() -> None:
    model = Gated()
    with lowtide.apply(model, Plan(moves=(Move("both"), Move("")))) as handle:
        with torch.autograd.graph.disable_saved_tensors_hooks("not now"):
            model(data()).sum().backward()
        assert handle.stats().moved_bytes == 0


@pytest.mark.parametrize("to", ["host", "disk"])
def test_a_value_changed_in_place_raises(to: str) -> None:
    class Changes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            hidden = x * 2
            output = hidden.sin()
            hidden.add_(1)
            return output

    model = Changes()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(data()).sum().backward()
    with lowtide.apply(model, Plan(moves=(Move("", 0, 0, to),))):
        with pytest.raises(lowtide.errors.ChangedInPlaceError, match="modified by an inplace operation"):
            model(data()).sum().backward()


def test_parameters_buffers_and_small_values_stay() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))
            self.register_buffer("table", torch.randn(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            x = x @ self.weight.to(torch.float64).t()
            return (x * self.table[:8]) * x.mean()

    model = Reads()
    with lowtide.apply(model, Plan(moves=tuple(Move("", 0, number) for number in range(12)))) as handle:
        leaf = torch.randn(8, 64, dtype=torch.float64, requires_grad=True)
        loss = model(leaf)
        held = handle._stores()[0].stats()
        sizes = [entry.nbytes for entry in held.entries if entry.nbytes]
        assert sizes == [8 * 64 * 8] * 2, "the input, and the product with the table"
        loss.sum().backward()


def test_under_the_compiler_nothing_moves(moved: Any) -> None:
    model, reference, handle = moved
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    both(compiled, reference, lambda model: model(data()).square().mean().backward())
    assert handle.stats().moved_bytes == 0
    both(model, reference, lambda model: model(data()).square().mean().backward())
    assert handle.stats().moved_bytes > 0


def test_a_step_of_other_shapes_is_exact(moved: Any) -> None:
    model, reference, _ = moved
    for module in [*model.modules(), *reference.modules()]:
        if isinstance(module, Gated):
            module.scale = torch.full((1, 16), 0.5)

    def step(model: nn.Module) -> None:
        for rows in (1, 7, 100):
            model(torch.randn(rows, 16)).square().mean().backward()

    both(model, reference, step)


# On the way back.


class Link:
    """Where units are fetched from; it notes which were, and has so much room for them."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.fetched: list[str] = []

    def bring(self, unit: Any) -> Any:
        self.fetched.append(unit.source)
        return SimpleNamespace(wait=lambda: ())

    def prefetch_limit(self) -> float:
        return self.limit


@pytest.mark.parametrize(
    ("limit", "first", "then"),
    [(0, "", ""), (1, "d", "c"), (59, "d", "c"), (60, "d", "cb"), (99, "dc", "ba"), (100, "dcb", "a")],
)
def test_values_are_fetched_in_the_order_of_the_backward_within_what_may_be_in_flight(
    limit: int, first: str, then: str
) -> None:
    """Of 20, 30, 30 and 40 bytes, put in this order, then one of another graph."""
    link, arrivals, mover = Link(limit), Prefetch(), SimpleNamespace(is_asynchronous=True)
    units: list[Any] = [
        Unit(name, *[None] * 4, mover, None, size, size, "host", size, put_at=10 + number, num_entries=1)  # type: ignore[arg-type]
        for number, (name, size) in enumerate(zip("abcde", (20, 30, 30, 40, 5), strict=True))
    ]
    for unit in units:
        arrivals.add(unit)
    arrivals.fetch_before(14, link)
    assert "".join(link.fetched) == first, "e was put later"
    arrivals.receive(units[3], link)
    link.fetched.clear()
    arrivals.fetch_before(units[3].put_at, link)
    assert "".join(link.fetched) == then


def test_values_are_asked_for_when_the_backward_gets_to_the_model(moved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, handle = moved
    (store,) = handle._stores()
    events: list[str] = []
    for name in ("fetch_before", "get"):
        own = getattr(store, name)
        monkeypatch.setattr(store, name, lambda *args, own=own, name=name: [events.append(name), own(*args)][1])
    output = model(data())
    last_put = max(entry.unit.put_at for entry in store._entries.values())
    assert store._tiers.clock > last_put, "the time from which values come back"
    assert not events
    output.square().mean().backward()
    assert events[0] == "fetch_before" and events.count("fetch_before") == 1 and events.count("get") > 10


def test_what_may_be_in_flight_goes_by_the_largest_value() -> None:
    with lowtide.ActivationStore(host="1MiB", in_flight=None) as store:
        store.put("small", torch.zeros(10))
        store.put("large", torch.zeros(100))
        assert store._tiers.prefetch_limit() == 2 * 400
    with lowtide.ActivationStore(host="1MiB", in_flight="1KiB") as store:
        assert store._tiers.prefetch_limit() == 1024


# Refusals, and hooks only where they are needed.


def test_only_modules_with_moves_are_patched() -> None:
    model = nn.Sequential(Gated(), Gated(), Gated())
    with lowtide.apply(model, Plan((Recompute("2"),), (Move("0.both"), Move("1"), Move("2")))) as handle:
        patched = {name for name, module in model.named_modules() if "forward" in vars(module)}
        assert patched == {"", "0.both", "1", "1.both", "1.down", "1.norm", "2"}
        assert [region.name for region in handle.stats().regions] == ["2"]
    assert all("forward" not in vars(module) for module in model.modules())


def test_more_than_the_host_has_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    plan = Plan(moves=(Move("0"),), host_bytes=2 * transfer.host_bytes())
    with pytest.raises(lowtide.PlanError, match=r"this machine has .* plan with a smaller host="):
        lowtide.apply(model, plan)
    lowtide.apply(model, replace(plan, moves=(Move("0", to="disk"),))).remove()


@pytest.mark.parametrize(
    ("path", "codec", "problem"),
    [("layers.3", "", "values of 'layers.3', and this model has no such module"), ("0", "zip", "codec .*'zip'")],
)
def test_moves_that_cannot_be(path: str, codec: str, problem: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=problem):
        lowtide.apply(model, Plan(moves=(Move(path, codec=codec),)))
    assert "forward" not in vars(model)


def test_values_for_which_there_is_no_room_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "host_bytes", lambda: 5000)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    reference = copy.deepcopy(model)
    with lowtide.apply(model, Plan(moves=tuple(Move(str(index)) for index in range(4)))) as handle:
        with pytest.warns(UserWarning, match="values that the plan moves stay on the device: no room"):
            output = model(data())
        assert handle.stats().stored_bytes == 2 * 32 * 16 * 4
        del output
        monkeypatch.setattr(engine.Moves, "_warn_once", lambda *_: None)
        both(model, reference, lambda model: model(data()).square().mean().backward())


@pytest.mark.parametrize("inplace", [False, True])
def test_noise_that_rrelu_saves_before_it_draws_it_is_not_moved(inplace: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.RReLU(inplace=inplace))
    x = torch.randn(4, 8, 64)  # of three dimensions, so that the in-place op changes a view

    def gradients() -> list[Tensor]:
        torch.manual_seed(1)
        return list(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))

    expected = gradients()
    moves = tuple(Move(path, 0, save) for path, save in (("0", 0), ("1", 0), ("1", 1)))
    with lowtide.apply(model, Plan(moves=moves)) as handle:
        found = gradients()
        assert handle.stats().moved_bytes > 0
    assert all(map(torch.equal, found, expected))
