"""The compiled engine on a GPU: measured peaks hold, gradients are the plain compile's, moved values come back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import zoo
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import lowtide
from compiled.test_backend import MLP, Stack
from kernelless import PLENTY, session_of, squeeze
from lowtide.api.compile import explain_compiled
from lowtide.tracing.devices import link_bytes_per_s, present_device
from lowtide.tracing.joint_graph import node_costs
from lowtide.tracing.trace_records import RawOp

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # whatever inductor has to say


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.cuda.empty_cache()


def step(model: nn.Module, batch: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    model(batch).float().square().mean().backward()


def peak_bytes(model: nn.Module, batch: Tensor) -> int:
    """Of a step after another one."""
    step(model, batch)
    torch.cuda.reset_peak_memory_stats()
    step(model, batch)
    return torch.cuda.max_memory_allocated()


def gradients(model: nn.Module) -> list[Tensor]:
    """On the CPU: what is kept to compare with shall not be part of a peak."""
    return [parameter.grad.float().cpu() for parameter in model.parameters()]


def test_budgets_hold_and_gradients_are_close_to_the_plain_compile() -> None:
    model = Stack(*(zoo.Block(512, 8, 0.0) for _ in range(6))).to("cuda", torch.bfloat16)
    batch = torch.randn(8, 512, 512, device="cuda", dtype=torch.bfloat16)
    lowtide.compile(model, budget=PLENTY)
    for _ in range(4):
        step(model, batch)
    plain, expected = peak_bytes(model, batch), gradients(model)
    model.zero_grad(set_to_none=True)
    static = torch.cuda.memory_allocated() + sum(p.nbytes for p in model.parameters())
    peaks = []
    for share in (0.8, 0.6, 0.45):
        budget = int(static + share * (plain - static))
        squeeze(model, budget)
        for _ in range(10):
            step(model, batch)
        peaks.append(peak_bytes(model, batch))
        assert peaks[-1] <= budget < plain
        assert "measured" in explain_compiled(model)
        for ours, theirs in zip(gradients(model), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05 * theirs.abs().max().item())
    assert peaks == sorted(peaks, reverse=True)


def test_moved_values_come_back_as_they_were() -> None:
    model = Stack(*(MLP(1024) for _ in range(8))).to("cuda", torch.bfloat16)
    batch = torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16)
    lowtide.compile(model, budget=PLENTY, host="4GiB")
    for _ in range(4):
        step(model, batch)
    here, expected = peak_bytes(model, batch), gradients(model)
    sequence = session_of(model).sequences.current
    assert sequence is not None and not any(sequence.choice.moved)
    # The largest of what each block saves, but for the last, which is needed again at once.
    moved = tuple(variant.movable[:1] for variant in sequence.choice.variants[:-1])
    assert all(moved)
    sequence.choice = replace(sequence.choice, moved=(*moved, ()))
    for _ in range(3):
        step(model, batch)
    assert all(map(torch.equal, gradients(model), expected))
    assert peak_bytes(model, batch) < here - sum(map(sum, moved)) // 3
    assert "to the host and back" in explain_compiled(model)


def test_an_infeasible_budget_is_measured_first() -> None:
    model = Stack(*(MLP(256) for _ in range(3))).to("cuda", torch.bfloat16)
    batch = torch.randn(1024, 256, device="cuda", dtype=torch.bfloat16)
    lowtide.compile(model, budget="1MiB")
    with pytest.raises(lowtide.InfeasibleBudgetError, match="measured") as caught:
        for _ in range(10):
            step(model, batch)
    assert caught.value.floor_bytes > 1 << 20


def test_ops_are_timed_without_a_trace() -> None:
    """Random states are as they were; what does not fit into memory is foretold."""

    def product(width: int) -> tuple[fx.Node, RawOp]:
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(width, width, device="meta")
        node = graph.call_function(torch.ops.aten.mm.default, (x, x))
        node.meta["val"] = torch.empty(width, width, device="meta")
        return node, RawOp("", -1, (), (), (), (), 2 * width**3, 12 * width**2, torch.float32, forward_op=-1)

    device = torch.device("cuda", torch.cuda.current_device())
    seconds = node_costs(present_device(device), device)
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    assert 0 < seconds(*product(64)) < 1
    assert seconds(*product(1 << 19)) > 1
    assert torch.equal(states[0], torch.get_rng_state()) and torch.equal(states[1], torch.cuda.get_rng_state())


def test_the_link_is_measured_amid_fake_tensors() -> None:
    """A plan is made while a graph compiles, where copies of fake tensors take no time."""
    device = torch.device("cuda", torch.cuda.current_device())
    outside = link_bytes_per_s(device)
    with FakeTensorMode():
        assert link_bytes_per_s(device) == pytest.approx(outside, rel=0.5)
