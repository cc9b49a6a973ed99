"""The compiled engine: graphs split as planned, gradients equal to those of the same compile without lowtide."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide
from kernelless import (
    COMPILED_MARKS,
    PLENTY,
    Compiler,
    assert_equal,
    compiled_plainly,
    floor_of,
    left_behind,
    looked_at,
    running,
    session_of,
    squeeze,
)
from lowtide.graph.segments import all_blocks
from lowtide.solvers import shared_budget
from lowtide.solvers.compiled_search import anchor_groups, compiled_references
from sweeps import sweep

pytestmark = COMPILED_MARKS


class MLP(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, dim=-1))
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)


class Routed(nn.Module):
    """Each row goes to the better of its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4), nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        weight, index = self.router(x).softmax(-1).topk(2, dim=-1)
        chosen = self.experts[index]
        return x + (torch.einsum("tkij,tj->tki", chosen, x).tanh() * weight.unsqueeze(-1)).sum(1)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.norm(self.linear(x)).relu())


class Checkpointed(nn.Module):
    def __init__(self, checkpoint: Any) -> None:
        super().__init__()
        self.inner, self.outer, self.checkpoint = MLP(dropout=0.5), MLP(), checkpoint

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.checkpoint(self.inner, x, use_reentrant=False))


class Broken(nn.Module):
    """Dynamo makes two graphs of each block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MLP(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


class Stopping(Stack):
    """Dynamo makes a graph of each block: its graphs end in the loop over them."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return x


class Tied(Stack):
    def __init__(self) -> None:
        super().__init__(MLP(), MLP(), MLP())
        self.blocks[2].up.weight = self.blocks[0].up.weight  # in two blocks
        self.head = self.blocks[1].norm.weight  # in a block and outside

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.head


class Twice(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class Mixed(nn.Module):
    """Blocks of two structures, several inputs by position and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(MLP() for _ in range(3))
        self.decoder = nn.ModuleList(Crossed() for _ in range(3))

    def forward(self, x: Tensor, *, scale: float = 2.0) -> Tensor:
        memory = x
        for block in self.encoder:
            memory = block(memory)
        for block in self.decoder:
            x = block(x, memory=memory, scale=scale)
        return x


class Crossed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.mix = MLP(dropout=0.1), nn.Bilinear(8, 8, 8)

    def forward(self, x: Tensor, *, memory: Tensor, scale: float) -> Tensor:
        return self.inner(x) + scale * self.mix(x, memory)


def frozen() -> nn.Module:
    model = Stack(MLP(), MLP(), MLP())
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    model.blocks[1].up.weight.requires_grad_(False)
    return model


def rows(num: int = 64) -> Tensor:
    return torch.randn(num, 8, generator=torch.Generator().manual_seed(3))


def squared(model: nn.Module) -> Tensor:
    """Of a batch that needs a gradient, so that the first block needs no graph of its own."""
    return model(rows().requires_grad_()).square().mean()


def squared_of_data(model: nn.Module) -> Tensor:
    """Of a batch that needs no gradient."""
    return model(rows()).square().mean()


def autocast(model: nn.Module) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(rows()).float().square().mean()


MODELS = {
    "mlp": lambda: Stack(MLP(), MLP(), MLP()),
    "dropout": lambda: Stack(*(MLP(dropout=0.5) for _ in range(3))),
    "attention": lambda: Stack(Attention(), Attention(), Attention()),
    "routed": lambda: Stack(Routed(), Routed()),
    "batch norm": lambda: Stack(Normed(), Normed(), Normed()),
    "tied": Tied,
    "called twice": lambda: Twice(MLP(dropout=0.2), MLP(dropout=0.2)),
    "two structures": Mixed,
    "frozen": frozen,
    "torch's checkpoint inside": lambda: Stack(Checkpointed(torch_checkpoint), Checkpointed(torch_checkpoint)),
    "lowtide's checkpoint inside": lambda: Stack(Checkpointed(lowtide.checkpoint), Checkpointed(lowtide.checkpoint)),
    "graph breaks": lambda: Stack(Broken(), Broken()),
}


FAST = [("dropout", True), ("graph breaks", True), ("dropout", False)]
ALL = [(name, True) for name in MODELS]
ALL += [(name, False) for name in ("dropout", "batch norm", "torch's checkpoint inside", "graph breaks")]
CASES = [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in ALL]


@pytest.mark.parametrize("name, regional", CASES)
def test_a_step_at_the_floor_leaves_behind_what_the_fastest_does(name: str, regional: bool) -> None:
    model = lowtide.compile(MODELS[name](), budget=PLENTY, regional=regional)
    start = copy.deepcopy(model.state_dict())
    expected = left_behind(model, squared)
    assert all(variant.keeps is None for variant in running(model))
    left_behind(model, squared)
    squeeze(model, floor_of(model))
    for _ in range(2):
        model.load_state_dict(start)
        assert_equal(expected, left_behind(model, squared))
    assert any(variant.keeps is not None for variant in running(model)), "nothing was recomputed"


@pytest.mark.parametrize("step, regional", sweep([(autocast, True), (squared, False)], keep=1))
def test_with_plenty_torchs_own_partition_is_untouched(step: Any, regional: bool, compiler: Compiler) -> None:
    model = Stack(MLP(dropout=0.5), MLP(dropout=0.5), MLP(dropout=0.5))
    plain = compiled_plainly(copy.deepcopy(model), regional=regional)
    ours = lowtide.compile(model, budget=PLENTY, regional=regional)
    expected = left_behind(plain, step)
    for _ in range(2):
        assert_equal(expected, left_behind(ours, step))
    for split in compiler.splits:
        assert not any("recompute" in node.meta for node in split.forward.graph.nodes)
    largest = max(split.saved_bytes for split in compiler.splits)
    squeeze(ours, floor_of(ours))
    assert_equal(expected, left_behind(ours, step))
    assert compiler.splits[-1].saved_bytes < largest


@pytest.mark.parametrize("regional", sweep([True, False], keep=1), ids=["regional", "whole"])
def test_what_crosses_is_what_was_planned(regional: bool, compiler: Compiler) -> None:
    """At several budgets; nothing else is handed from the forward to the backward, and views never are."""
    model = lowtide.compile(Stack(*(MLP() for _ in range(3)), Attention()), budget=PLENTY, regional=regional)
    for _ in range(2):
        squared(model).backward()
    floor, plain = floor_of(model), session_of(model).sequences.current.choice.peak_bytes
    seen = set()
    for share in (0.0, 0.3, 0.6, 0.9):
        squeeze(model, int(floor + share * (plain - floor)))
        before = len(compiler.splits)
        squared(model).backward()
        fresh = compiler.splits[before:]
        planned = [variant for variant in dict.fromkeys(running(model)) if variant.keeps is not None]
        for split in fresh:
            assert split.saved_bytes in {variant.saved_bytes for variant in planned}
            assert all(looked_at(node) is node for node in split.made), "a view was saved"
            assert len(set(split.made)) == len(split.made)
        seen |= {variant.saved_bytes for variant in planned}
    assert len(seen) > 2, "the same at all budgets"


def test_planning_splits_no_graph_a_second_time(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's partitioner is asked for its choices; only the one that runs becomes a forward and a backward."""
    extract, num_splits = torch._functorch.partitioners._extract_fwd_bwd_modules, []

    def counted(*args: Any, **facts: Any) -> Any:
        num_splits.append(1)
        return extract(*args, **facts)

    monkeypatch.setattr(torch._functorch.partitioners, "_extract_fwd_bwd_modules", counted)
    for budget in (PLENTY, 40_000):
        model = lowtide.compile(Stack(*(MLP() for _ in range(3))), budget=budget, regional=False)
        squared(model).backward()
        assert session_of(model).graphs[0].torch_ways
    assert len(num_splits) == len(compiler.splits) == 2
    assert compiler.splits[1].saved_bytes < compiler.splits[0].saved_bytes


def test_the_saved_nodes_by_name(compiler: Compiler) -> None:
    """One small block exactly: at the floor, only what cannot be had again."""
    model = lowtide.compile(Stack(*(MLP(dropout=0.5) for _ in range(3))), budget=PLENTY, regional=True)
    for _ in range(2):
        squared(model).backward()
    squeeze(model, floor_of(model))
    squared(model).backward()
    saved = min((split.made for split in compiler.splits), key=len)
    assert len(saved) == 1
    assert str(saved[0].args[0].target) == "aten.native_dropout.default" and saved[0].meta["val"].dtype == torch.bool


def squared_twice(model: nn.Module) -> Tensor:
    return squared(model) + model(rows() * 2).square().mean()


@pytest.mark.parametrize("step", sweep([squared_twice, squared], keep=1))
def test_what_blocks_save_waits_in_host_memory(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `host=`, which only an accelerator has a link for. Nothing is left there, whatever becomes of a step."""
    monkeypatch.setattr(shared_budget, "SMALLEST_MOVED", 64)
    torch.manual_seed(0)
    model = Stack(*(MLP(dropout=0.1) for _ in range(4)))
    reference = compiled_plainly(copy.deepcopy(model), regional=True)
    lowtide.compile(model, budget=PLENTY, regional=True)
    session = session_of(model)
    session.chooser.host_bytes = PLENTY
    session.chooser.__dict__["_link_bytes_per_s"] = 1e15
    expected = left_behind(reference, step)
    assert_equal(expected, left_behind(model, step))
    floor, most = floor_of(model), session.sequences.current.choice.peak_bytes
    squeeze(model, (floor + most) // 2)
    assert any(session.sequences.current.choice.moved) and not session.sequences.current.choice.moved[-1]
    loss = step(model)
    store = session.store
    assert store is not None and store.stats().held_bytes == sum(map(sum, session.sequences.current.choice.moved))
    del loss
    assert len(store) == 0
    handle = model.blocks[3].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(model)
    handle.remove()
    for _ in range(2):
        assert_equal(expected, left_behind(model, step))
        assert len(store) == 0 and store.stats().moved_up_bytes > 0


def test_blocks_of_a_whole_graph_are_found() -> None:
    """The compiled model is no call of its own graph: blocks directly below it have no parent."""

    class TwoStacks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.ModuleList(MLP() for _ in range(3))
            self.second = nn.ModuleList(Normed() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in (*self.first, *self.second):
                x = block(x)
            return x

    for model, paths in (
        (Stack(*(MLP() for _ in range(4))), [f"blocks.{number}" for number in range(4)]),
        (TwoStacks(), [f"{name}.{number}" for name in ("first", "second") for number in range(3)]),
    ):
        lowtide.compile(model, budget=PLENTY, regional=False)
        squared(model).backward()
        (planned,) = session_of(model).graphs
        assert planned.torch_ways, "torch's own ways are asked for in small graphs, however slow the machine"
        graph = planned.step
        assert [graph.calls[call].path for call in all_blocks(graph)] == paths
        assert len(anchor_groups(graph)) == len(paths) - 1, "the input of each block but the first"
        needs, keeps = graph.needs, compiled_references(graph)["a checkpoint per block"].keeps
        free = [op for op in keeps if needs.recomputable[op] and not needs.is_rerun[op]]
        assert len(free) == len(paths) - 1
