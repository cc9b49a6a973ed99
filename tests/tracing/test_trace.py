"""`lowtide.trace`: graphs of many models, compared with measured peaks, times and saved tensors of the real step."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import UserDict, namedtuple
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide
from lowtide.plans import Plan, Recompute
from lowtide.simulator import simulate
from lowtide.tracing.devices import ENGINE_COSTS, present_device
from lowtide.tracing.model_blocks import find_regions
from sweeps import sweep

# A checkpoint keeps the state of the random generator, which no graph knows of.
RNG_STATE_BYTES = torch.get_rng_state().nbytes


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """What some kernels allocate depends on how many threads there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# On the CPU these take memory that depends on how oneDNN cuts them up: the less, the larger they are.
SCRATCH_USERS = {"lstm": 2, "hf_resnet": 3, "unet": 1}
LIKE_OTHERS = ["hf_bert", "hf_gpt2", "hf_llama", "hf_resnet", "hf_t5", "hf_vit", "gpt_tied", "lora"]
UNLIKE = [name for name in zoo.ZOO if name not in (*LIKE_OTHERS, "hf_mixtral")]  # whose fake trace differs
NAMES = sweep([*UNLIKE, *LIKE_OTHERS], keep=len(UNLIKE))


def make(name: str, scale: int = 1) -> zoo.Job:
    if name.startswith("hf_"):
        pytest.importorskip("transformers")
    return zoo.make(name, scale=scale)


def trace(job: zoo.Job, **options: Any) -> lowtide.StepGraph:
    return lowtide.trace(job.model, job.loss_fn, *job.batch, **options)


@functools.cache
def real_trace(name: str, scale: int = 1) -> tuple[zoo.Job, lowtide.StepGraph]:
    job = make(name, scale)
    return job, trace(job, mode="real")


def measured(job: zoo.Job) -> int:
    """Bytes that a step allocates at most, once whatever stays is there."""
    job.step()
    job.model.zero_grad()
    peak_bytes = lowtide.measure(job.step, device="cpu").peak_bytes
    job.model.zero_grad()
    return peak_bytes


def simulated(graph: lowtide.StepGraph, plan: Plan | None = None) -> int:
    """The peak as predicted by a trace: without memory from before the step."""
    there = sum(size for kind, size in graph.static_bytes.items() if kind != "gradients")
    return simulate(graph, plan).peak_bytes - there


@pytest.mark.parametrize("name", [*NAMES, "hf_mixtral"])
def test_real_trace_against_measured(name: str) -> None:
    job, graph = real_trace(name)
    assert graph.is_measured and graph.step_s > 0 and len(graph.ops) > graph.num_forward > 0
    assert simulated(graph) == pytest.approx(measured(job), rel=0.01)
    paths = [path for path in find_regions(job.model, job.blocks) if path in graph.calls_by_path]
    regions = [Recompute(path, nth) for path in paths for nth in range(len(graph.calls_by_path[path]))]
    with lowtide.apply(job.model, lowtide.RecomputeAll(), regions=job.blocks):
        with_blocks = measured(job)
    slack = 0.03 * with_blocks + len(regions) * RNG_STATE_BYTES
    assert simulated(graph, Plan(tuple(regions))) == pytest.approx(with_blocks, abs=slack)


@pytest.mark.parametrize("name", NAMES)
def test_fake_trace_against_real(name: str) -> None:
    job, real = real_trace(name, SCRATCH_USERS.get(name, 1))
    fake = trace(job, mode="fake")
    assert not fake.is_measured and fake.step_s > 0
    tolerance = 0.1 if name in SCRATCH_USERS else 0.0
    assert simulate(fake).peak_bytes == pytest.approx(simulate(real).peak_bytes, rel=tolerance)
    assert [op.name for op in fake.ops] == [op.name for op in real.ops]
    assert [call.path for call in fake.calls] == [call.path for call in real.calls]
    if name != "lstm":  # its saved workspace has a size that only the kernel knows
        assert fake.fingerprint == real.fingerprint
    assert fake.static_bytes == real.static_bytes


def test_a_kernel_without_a_fake_version() -> None:
    @torch.library.custom_op("lowtide_tests::without_a_fake_version", mutates_args=())
    def scaled(x: Tensor) -> Tensor:
        return 2 * x

    scaled.register_autograd(lambda ctx, gradient: 2 * gradient)
    model = nn.Linear(8, 8)
    step = (model, lambda x: scaled(model(x)).sum(), torch.randn(4, 8))
    with pytest.raises(lowtide.TraceError, match="mode='real'"):
        lowtide.trace(*step, mode="fake")
    assert lowtide.trace(*step).is_measured  # auto runs it


# What a graph holds.


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def trace_small(model: nn.Module, *batch: Any, **options: Any) -> lowtide.StepGraph:
    return lowtide.trace(model, lambda x: model(x).square().mean(), *batch, **options)


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_exact_numbers(mode: Any) -> None:
    model = Small()
    graph = trace_small(model, torch.randn(32, 8), mode=mode)
    assert graph.static_bytes == {
        "parameters": 4 * (8 * 16 + 16 + 16 * 4 + 4),
        "gradients": 4 * (8 * 16 + 16 + 16 * 4 + 4),
        "buffers": 0,
        "batch": 4 * 32 * 8,
        "optimizer state": 0,
        "other": 0,
    }
    assert graph.saved_bytes == 4 * 32 * (16 + 4)  # relu's output, and the output for its square
    products = [op for op in graph.ops if op.flops]
    assert [op.flops for op in products[:2]] == [2 * 32 * 8 * 16, 2 * 32 * 16 * 4]
    assert sum(op.flops for op in products) == 2 * 32 * (2 * 8 * 16 + 3 * 16 * 4)  # the input needs no gradient
    assert [call.path for call in graph.calls] == ["", "first", "second"]
    first, second = graph.calls[1:]
    assert graph.values[first.inputs[0]].kind == "batch"
    assert graph.values[second.outputs[0]].bytes == 4 * 32 * 4
    assert [call.parent for call in graph.calls] == [-1, 0, 0] and first.end <= second.first


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_positions(mode: Any) -> None:
    graph = trace(make("gpt_dropout"), mode=mode)
    readers = {save.read for save in graph.saves if save.read >= 0}
    assert readers and min(readers) >= graph.num_forward
    for save in graph.saves:
        value, call = graph.values[save.value], graph.calls[save.call]
        assert value.born < save.made <= graph.num_forward <= save.released
        assert save.call < 0 or call.first <= save.made <= call.end
    for value in graph.values:
        assert value.born < value.dropped
    for index, op in enumerate(graph.ops):
        assert all(graph.values[value].born == index for value in op.outputs)
        assert index < graph.num_forward or op.forward_op < graph.num_forward
    products = [op for op in graph.ops[graph.num_forward :] if op.name == "aten.mm.default"]
    assert products and all(
        graph.ops[op.forward_op].name in ("aten.addmm.default", "aten.mm.default") for op in products
    )


def test_views_are_the_same_value() -> None:
    model = nn.Linear(8, 8)
    graph = lowtide.trace(model, lambda x: model(x).view(-1).t().unsqueeze(0).sum(), torch.randn(4, 8))
    (made,) = [op.outputs for op in graph.ops[: graph.num_forward] if op.name == "aten.addmm.default"]
    views = [op for op in graph.ops[: graph.num_forward] if "view" in op.flags and op.inputs == made]
    assert [op.name for op in views] == ["aten.view.default", "aten.unsqueeze.default"] or len(views) >= 2
    assert all(not op.outputs for op in views)


@torch.library.custom_op("lowtide_tests::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2


@double.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


double.register_autograd(lambda ctx, gradient: gradient * 2)


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_flags(mode: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))

    def loss_fn(x: Tensor) -> Tensor:
        y = double(model(x))
        return y.gather(1, y.topk(2).indices).sum() + y.flatten().sum()

    graph = lowtide.trace(model, loss_fn, torch.randn(16, 8), mode=mode)
    flags: dict[str, set[str]] = {}
    for op in graph.ops:
        flags.setdefault(op.name.split(".")[1], set()).update(op.flags)
    assert flags["topk"] == {"index"}
    assert flags["double"] == {"custom"}
    assert flags["bernoulli_"] == {"random", "mutates"}
    assert flags["add_"] == {"mutates"}  # num_batches_tracked
    assert flags["native_batch_norm"] == {"mutates"}  # running statistics, which its schema does not own up to
    assert flags["addmm"] == set()
    (norm,) = [op for op in graph.ops if op.name == "aten.native_batch_norm.default"]
    assert [graph.values[value].name for value in norm.mutates] == ["1.running_mean", "1.running_var"]
    assert any("custom kernel" in note for note in graph.notes)


def test_batch_norm_in_evaluation_mutates_nothing() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()
    assert not any("mutates" in op.flags for op in trace_small(model, torch.randn(16, 8)).ops)


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_modules_called_again_and_tied_weights(mode: Any) -> None:
    graph = trace(make("block_called_again"), mode=mode)
    calls = [graph.calls[index] for index in graph.calls_by_path["block"]]
    assert len(calls) == 4 and len({call.structure for call in calls[1:]}) == 1  # no gradient for the first one's input
    assert all(before.end == after.first for before, after in itertools.pairwise(calls))
    peaks = [simulate(graph, Plan((Recompute("block", nth),))).peak_bytes for nth in range(4)]
    plain = simulate(graph).peak_bytes
    assert max(peaks[:3]) < plain
    assert peaks[3] == plain  # the last one is replayed at once
    tied = make("gpt_tied")
    graph = trace(tied, mode=mode)
    own_bytes = sum(parameter.nbytes for parameter in tied.model.parameters())
    assert graph.static_bytes["parameters"] == graph.static_bytes["gradients"] == own_bytes


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_repeated_layers_are_one_structure(mode: Any) -> None:
    graph = trace(zoo.gpt(12, width=16, tokens=(2, 8)), mode=mode)
    layers = [graph.calls[graph.calls_by_path[f"layers.{index}"][0]] for index in range(12)]
    assert len({call.structure for call in layers}) == 1
    assert "12 x Block (as layers.0)" in str(graph)
    for ops in zip(*(graph.ops[call.first : call.end] for call in layers), strict=True):
        assert len({op.seconds for op in ops}) == 1  # what they seem to differ in is noise


def test_frozen_weights() -> None:
    job = make("lora")
    graph = trace(job, mode="fake")
    trained = sum(parameter.nbytes for parameter in job.model.parameters() if parameter.requires_grad)
    everything = sum(parameter.nbytes for parameter in job.model.parameters())
    assert graph.static_bytes["gradients"] == trained < graph.static_bytes["parameters"] == everything


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_gradients_that_are_there_are_added_to(mode: Any) -> None:
    model, x = Small(), torch.randn(32, 8)
    fresh = trace_small(model, x, mode=mode)
    model(x).sum().backward()
    again = trace_small(model, x, mode=mode)
    assert again.static_bytes == fresh.static_bytes
    names = [[op.name for op in graph.ops if op.name == "aten.add_.Tensor"] for graph in (fresh, again)]
    assert len(names[1]) == len(names[0]) + 4
    assert all(value.born == -1 for value in again.values if value.kind == "gradient")


# Steps of all kinds.


class Pair(nn.Module):
    """Takes its batch from what it is given, wherever it lies in there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.linear(x) + y).square().mean()


Row = namedtuple("Row", ["x", "y"])


@dataclasses.dataclass(frozen=True)
class Record:
    x: Tensor
    y: Tensor


X, Y = torch.randn(4, 8), torch.randn(4, 8)
BATCHES = {
    "dict": ({"x": X, "y": Y, "size": X.shape, "none": None}, lambda b: (b["x"], b["y"])),
    "mapping": (UserDict(x=X, y=Y), lambda b: (b["x"], b["y"])),
    "nested": ({"inputs": [X, {"target": (Y,)}]}, lambda b: (b["inputs"][0], b["inputs"][1]["target"][0])),
    "named tuple": (Row(X, Y), lambda b: (b.x, b.y)),
    "dataclass": (Record(X, Y), lambda b: (b.x, b.y)),
}


@pytest.mark.parametrize("mode", ["real", "fake", "on meta"])
@pytest.mark.parametrize("batch, parts", BATCHES.values(), ids=BATCHES)
def test_batches(mode: Any, batch: Any, parts: Any) -> None:
    model = Pair()
    if mode == "on meta":
        model, mode = model.to("meta"), "auto"
    graph = lowtide.trace(model, lambda b: model(*parts(b)), batch, mode=mode)
    assert graph.static_bytes["batch"] == 2 * 4 * 4 * 8
    batch_values = [value for value in graph.values if value.kind == "batch"]
    assert [value.name for value in batch_values] == ["batch[0]", "batch[1]"]


def test_batch_of_a_tokenizer() -> None:
    transformers = pytest.importorskip("transformers")
    job = make("hf_gpt2")
    ids = job.batch[0]
    batch = transformers.BatchEncoding({"input_ids": ids, "labels": ids.clone()})
    for mode in ("real", "fake"):
        graph = lowtide.trace(job.model, lambda b: job.model(**b).loss, batch, mode=mode)  # type: ignore[arg-type]
        assert graph.static_bytes["batch"] == 2 * ids.nbytes


def test_meta_model() -> None:
    real, meta = make("gpt_dropout"), make("gpt_dropout")
    meta.model.to("meta")
    graph = trace(meta)
    assert not graph.is_measured and graph.fingerprint == trace(real, mode="fake").fingerprint
    assert all(parameter.is_meta for parameter in meta.model.parameters())
    with pytest.raises(lowtide.TraceError, match="mode='fake'"):
        trace(meta, mode="real")


def test_a_device_that_is_not_here() -> None:
    job = make("gpt_dropout")
    graph = trace(job, device="h100")
    assert graph.hardware.name == "H100" and not graph.is_measured
    assert graph.lines.device_s < trace(job, device="T4").lines.device_s
    assert "on H100" in str(graph) and "predicted" in str(graph)
    with pytest.raises(lowtide.TraceError, match="mode='fake'"):
        trace(job, device="H100", mode="real")
    with pytest.raises(lowtide.TraceError, match="H100"):
        trace(job, device="H1000")


def test_the_cpus_memory_is_what_its_container_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: f"{1 << 20}\n" if path.name == "memory.max" else "")
    assert present_device(torch.device("cpu")).memory_bytes == 1 << 20


def test_devices_can_be_added() -> None:
    from lowtide.tracing import devices

    slow = lowtide.graph.Hardware("Abacus", 1 << 30, 1e9, 1e9, 1e9)
    devices.register_device(slow)
    try:
        hardware = trace(make("custom_function"), device="abacus").hardware
        assert hardware == replace(slow, **ENGINE_COSTS._asdict())  # the engine runs on a host, as everywhere
    finally:
        del devices.DEVICES["Abacus"]


def penalised(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return gradient.square().mean() + model(x).mean()


def corrected(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).tanh().sum(), x)
    return model(x + gradient @ torch.ones(8, 8)).mean()


def discarding(model: nn.Module, x: Tensor) -> Tensor:
    model(x).tanh().exp()
    return model(x).tanh().mean()


def checkpointed(model: nn.Module, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(model, x.requires_grad_(), use_reentrant=True).mean()


def vectorised(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.vmap(model)(x).mean()


def masked(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    return y[y.detach() > 0].sum()


@pytest.mark.parametrize("loss", [penalised, corrected, discarding, checkpointed, vectorised, masked])
def test_unusual_steps(loss: Any) -> None:
    model, x = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)), torch.randn(64, 8)
    graph = lowtide.trace(model, lambda x: loss(model, x), x)
    assert lowtide.StepGraph.from_json(graph.to_json()) == graph
    peak_bytes = measured(zoo.Job(model, lambda x: loss(model, x), (x,), "*"))
    assert simulated(graph) == pytest.approx(peak_bytes, abs=0.01 * peak_bytes + RNG_STATE_BYTES)


def test_sparse_gradients() -> None:
    model = nn.Sequential(nn.Embedding(1000, 4, sparse=True), nn.Linear(4, 2))
    graph = trace_small(model, torch.randint(1000, (3, 5)))
    # Rows that were read, and their numbers: far less than the table.
    assert graph.static_bytes["gradients"] <= 15 * (4 * 4 + 8) + 4 * (4 * 2 + 2) < 4 * 4 * 1000


def test_caches_filled_by_the_first_step() -> None:
    class Rotary(nn.Linear):
        cache: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.cache is None:
                self.cache = torch.arange(8.0).exp()
            return super().forward(x) * self.cache

    for mode in ("real", "fake"):
        model = Rotary(8, 8)
        graph = trace_small(model, torch.randn(4, 8), mode=mode)
        assert not any("arange" in op.name for op in graph.ops) and graph.static_bytes["constants"] == 32
        assert model.cache is None


def test_a_second_model_in_the_loss() -> None:
    student, teacher, x = Small(), Small(), torch.randn(4, 8)
    real, fake = (
        lowtide.trace(student, lambda x: F.mse_loss(student(x), teacher(x)), x, mode=mode)  # type: ignore[arg-type]
        for mode in ("real", "fake")
    )
    assert [op.name for op in real.ops] == [op.name for op in fake.ops]
    assert real.static_bytes["constants"] == sum(parameter.nbytes for parameter in teacher.parameters())


def test_fingerprints() -> None:
    model, x = Small(), torch.randn(4, 8)
    graph = trace_small(model, x)
    assert graph.fingerprint == trace_small(model, x.clone()).fingerprint
    assert graph.fingerprint == trace_small(model, x, mode="fake").fingerprint
    assert graph.fingerprint != trace_small(model, torch.randn(5, 8)).fingerprint
    wider = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    assert graph.fingerprint != trace_small(wider, x).fingerprint


# Optimizers.

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p),
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw one by one": lambda p: torch.optim.AdamW(p, foreach=False),
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "groups": lambda p: torch.optim.AdamW([{"params": [q], "lr": 0.1} for q in p]),
}


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all states, step counters included: on the CPU they are on the model's device too."""
    tensors = [item for state in optimizer.state.values() for item in state.values()]
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("has_state", [False, True])
def test_optimizer_state(make_optimizer: Any, has_state: bool) -> None:
    model, x = Small(), torch.randn(4, 8)
    model.first.bias.requires_grad_(False)
    optimizer = make_optimizer(list(model.parameters()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        scheduler.step()
        model.zero_grad()

    if has_state:
        step()
    before = (optimizer.state_dict(), state_bytes(optimizer), scheduler.state_dict())
    graph = trace_small(model, x, optimizer=optimizer)
    after = (optimizer.state_dict(), state_bytes(optimizer), scheduler.state_dict())
    assert str(before) == str(after)
    step()
    assert graph.static_bytes["optimizer state"] == state_bytes(optimizer)
    assert not graph.notes


def test_optimizer_workspace() -> None:
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8))), torch.randn(4, 8)
    optimizers = [torch.optim.AdamW(model.parameters(), foreach=foreach) for foreach in (True, False)]
    graphs = [trace_small(model, x, optimizer=optimizer) for optimizer in optimizers]
    at_once, one_by_one = (graph.optimizer_workspace_bytes for graph in graphs)
    assert at_once == sum(parameter.nbytes for parameter in model.parameters()) > one_by_one > 0


def test_optimizer_that_cannot_be_predicted() -> None:
    model = Small()
    graph = trace_small(model, torch.randn(4, 8), optimizer=torch.optim.LBFGS(model.parameters()))
    assert graph.static_bytes["optimizer state"] == 0
    assert any("LBFGS could not be predicted" in note for note in graph.notes)
