"""Joint graphs as steps: exact values, saves and calls of small models; what is fused, against a second opinion."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from graphs import random_graph
from joints import HARDWARE, joint_of, moved_bytes
from lowtide._compat.fx_graphs import clean_path
from lowtide.graph import StepGraph
from lowtide.graph.arrays import inlined
from lowtide.tracing.joint_graph import joint_step
from sweeps import sweep

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def forward_names(graph: StepGraph) -> list[str]:
    return [op.name.split(".")[1] for op in graph.ops[: graph.num_forward]]


def made(graph: StepGraph) -> list[tuple[int, str, int, int]]:
    """Bytes, kind, birth and end of what the graph makes."""
    return [(v.bytes, v.kind, v.born, v.dropped) for v in graph.values if v.born >= 0]


def recomputable(graph: StepGraph) -> dict[str, bool]:
    return dict(zip(forward_names(graph), graph.needs.recomputable, strict=True))


def test_a_small_model_exactly() -> None:
    step = joint_of(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)), torch.randn(3, 4))
    graph = step.graph
    assert forward_names(graph) == ["addmm", "gelu", "addmm"]
    assert made(graph) == [
        (96, "activation", 0, 2),
        (96, "activation", 1, 3),
        (24, "activation", 2, 9),  # handed out
        (96, "activation", 3, 7),
        (64, "gradient", 4, 9),
        (8, "gradient", 5, 9),
        (96, "activation", 6, 9),
        (128, "gradient", 7, 9),
        (32, "gradient", 8, 9),
    ]
    assert all(v.kind == "elsewhere" for v in graph.values if v.born < 0)
    first = next(index for index, value in enumerate(graph.values) if value.born >= 0)
    # The first product is read by gelu's backward (op 6), gelu by the gradient of the second weight (op 4).
    assert [(s.value - first, s.made, s.read, s.released) for s in graph.saves] == [(0, 1, 6, 7), (1, 2, 4, 5)]
    assert [(c.path, c.kind, c.first, c.end) for c in graph.calls] == [
        ("", "Sequential", 0, 3),
        ("0", "Linear", 0, 1),
        ("1", "GELU", 1, 2),
        ("2", "Linear", 2, 3),
    ]
    assert [op.flops for op in graph.ops] == [192, 0, 96, 96, 96, 0, 0, 192, 0]
    assert [node.name for node in step.nodes] == ["addmm", "gelu", "addmm_1"]
    assert step.makers == {"addmm": 0, "gelu": 1, "addmm_1": 2}
    # A product reads its inputs and writes its output; a fused op likewise, as its neighbours are kernels of their own.
    assert [op.seconds for op in graph.ops[:3]] == [48 + 128 + 32 + 96, 96 + 96, 96 + 64 + 8 + 24]


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.dropout = nn.Linear(4, 12), dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.reshape(2, 3, 2, 2).transpose(1, 2) for part in self.qkv(x).split(4, -1))
        return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)


def test_views_are_the_values_they_look_at() -> None:
    step = joint_of(Attention(), torch.randn(2, 3, 4))
    graph = step.graph
    assert len(forward_names(graph)) == 2
    assert [value[0] for value in made(graph)[:3]] == [288, 96, 48]  # the product; attention, and its log-sum-exp
    product = graph.ops[0].outputs[0]
    assert graph.ops[1].inputs == (product,), "queries, keys and values are one value"
    assert {step.makers[name] for name in ("split", "getitem", "transpose", "transpose_2")} == {0}
    assert {"split", "transpose"} <= {view.name for view in step.views}
    assert step.makers["getitem_3"] == step.makers["getitem_4"] == 1
    assert {part.name for part in step.parts[1]} == {"getitem_3", "getitem_4"}


class Rotated(nn.Module):
    """Its backward has the conjugate of a number, `aten._conj(1j)`: a view by its schema, which makes a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * 1j, n=8).sin()


def test_a_view_of_a_number_is_an_op() -> None:
    graph = joint_of(Rotated(), torch.randn(4, 8, requires_grad=True)).graph
    names = [op.name for op in graph.ops]
    assert any("conj" in name for name in names) and "sin" in forward_names(graph)


def test_attention_that_draws_nothing_can_be_recomputed() -> None:
    assert all(recomputable(joint_of(Attention(), torch.randn(2, 3, 4)).graph).values())


class Spiced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        values, _ = self.linear(x).topk(2, -1)
        return F.dropout(values.exp(), 0.5)


def test_random_ops_and_those_that_make_indices_are_not_recomputed() -> None:
    graph = joint_of(Spiced(), torch.randn(3, 4)).graph
    flags = {op.name.split(".")[1]: op.flags for op in graph.ops[: graph.num_forward]}
    assert "index" in flags["topk"] and "random" in flags["native_dropout"]
    assert recomputable(graph) == {"addmm": True, "topk": False, "exp": True, "native_dropout": False}


def test_what_reads_a_buffer_that_the_forward_changes_is_not_recomputed() -> None:
    """Again, it would read the changed one."""
    graph = joint_of(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(3, 4)).graph
    found = recomputable(graph)
    assert not found["_native_batch_norm_legit_functional"] and found["addmm"]
    index = forward_names(graph).index("_native_batch_norm_legit_functional")
    assert len(graph.ops[index].mutates) == 2, "running mean and variance"


def test_in_graph_writes_to_inputs_count_too() -> None:
    """As inductor has them: `copy_` to the input at the graph's end."""

    def run(primals_1: Tensor, primals_2: Tensor, tangents_1: Tensor) -> tuple[Tensor, ...]:
        old = torch.ops.aten.mul.Tensor(primals_1, 2)
        out = torch.ops.aten.mul.Tensor(primals_2, old)
        new = torch.ops.aten.add.Tensor(primals_1, 1)
        gradient = torch.ops.aten.mul.Tensor(tangents_1, old)
        torch.ops.aten.copy_.default(primals_1, new)
        return out, None, gradient

    joint = fx.symbolic_trace(run)
    for node in joint.graph.nodes:
        node.meta["val"] = torch.empty(3, device="meta") if node.op != "output" else None
    graph = joint_step(joint.graph, HARDWARE, moved_bytes).graph
    assert graph.needs.recomputable[0] is False and graph.needs.recomputable[1] is True


def test_opaque_and_collective_ops() -> None:
    def run(primals_1: Tensor, tangents_1: Tensor) -> tuple[Tensor, ...]:
        there = torch.ops._c10d_functional.all_reduce.default(primals_1, "sum", "0")
        waited = torch.ops._c10d_functional.wait_tensor.default(there)
        mine = opaque(waited)
        return mine, torch.ops.aten.mul.Tensor(tangents_1, mine)

    joint = fx.symbolic_trace(run)
    for node in joint.graph.nodes:
        node.meta["val"] = torch.empty(3, device="meta") if node.op != "output" else None
    graph = joint_step(joint.graph, HARDWARE, moved_bytes).graph
    assert "collective" in graph.ops[0].flags
    assert graph.ops[-2].flags == ("opaque",)
    assert not any(graph.needs.recomputable)


@fx.wrap
def opaque(x: Tensor) -> Tensor:
    return x


def test_symbolic_sizes_count_as_what_they_were() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    dynamic = joint_of(model, torch.randn(3, 4), dynamic=True).graph
    assert made(dynamic) == made(joint_of(model, torch.randn(3, 4)).graph)
    assert [op.flops for op in dynamic.ops] == [192, 0, 96, 96, 96, 0, 0, 192, 0]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.named = nn.ModuleDict({"head": nn.Linear(4, 4)})

    def forward(self, x: Tensor) -> Tensor:
        x = x.exp()
        for block in self.blocks:
            x = block(x)
        return self.named["head"](x)


def test_paths_are_those_of_named_modules_and_equal_blocks_have_equal_structures() -> None:
    model = Stack()
    graph = joint_of(model, torch.randn(3, 4, requires_grad=True)).graph
    assert {call.path for call in graph.calls} <= {name for name, _ in model.named_modules()}
    blocks = {call.path: call for call in graph.calls if call.kind == "Block"}
    assert list(blocks) == ["blocks.0", "blocks.1", "blocks.2"]
    assert len({call.structure for call in blocks.values()}) == 1
    assert all(len(call.inputs) == 1 for call in blocks.values())
    assert len({call.structure for call in graph.calls if call.kind == "Linear"}) > 1


@pytest.mark.parametrize(
    "path, expected",
    [
        ("L['self']", ""),
        ('L["self"].a.b', "a.b"),
        ("L['self']._modules['layers']._modules['0'].attn", "layers.0.attn"),
        ("L['self'].layers[11].mlp", "layers.11.mlp"),
        ("L['self'].named['head']", "named.head"),
        ("L['mod'].x", "x"),
    ],
)
def test_paths_are_cleaned(path: str, expected: str) -> None:
    assert clean_path(path) == expected


def test_a_forward_only_graph_has_no_backward() -> None:
    def run(primals_1: Tensor) -> tuple[Tensor, ...]:
        return (torch.ops.aten.exp.default(primals_1),)

    joint = fx.symbolic_trace(run)
    for node in joint.graph.nodes:
        node.meta["val"] = torch.empty(3, device="meta") if node.op != "output" else None
    graph = joint_step(joint.graph, HARDWARE, moved_bytes).graph
    assert graph.num_forward == len(graph.ops) == 1 and not graph.saves


# Fusing.


def fused(seed: int) -> StepGraph:
    graph, rng = random_graph(seed, num_ops=10), random.Random(seed)
    ops = tuple(replace(op, flags=("fused",) if rng.random() < 0.7 else ()) for op in graph.ops)
    return replace(graph, ops=ops)


@pytest.mark.parametrize("seed", sweep(range(40), keep=10))
def test_what_stays_in_registers_by_a_second_opinion(seed: int) -> None:
    graph = fused(seed)
    num, ops = graph.num_forward, graph.ops
    made_inline, again_inline = inlined(ops, graph.values, num)
    for number, value in enumerate(graph.values):
        readers = [index for index, op in enumerate(ops) if number in op.inputs]
        is_forward = value.born < num
        same_way = [index for index in readers if (index < num) == is_forward]
        is_ours = value.born >= 0 and "fused" in ops[value.born].flags and value.kind == "activation"
        is_ours = is_ours and value.dropped <= (num if is_forward else len(ops) - 1)
        run = range(value.born, max(same_way, default=-1) + 1)
        assert made_inline[number] == (is_ours and bool(same_way) and all("fused" in ops[i].flags for i in run))
        assert again_inline[number] == (is_ours and is_forward and all("fused" in ops[i].flags for i in readers))


def test_fused_values_have_no_bytes_until_they_are_saved() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).exp().tanh().sigmoid()

    graph = joint_of(Chain(), torch.randn(3, 4)).graph
    assert forward_names(graph) == ["mm", "exp", "tanh", "sigmoid"]
    has_bytes, _ = graph.needs.has_bytes
    by_maker = {v.born: bool(has) for v, has in zip(graph.values, has_bytes, strict=True) if 0 <= v.born < 4}
    assert by_maker == {0: True, 1: False, 2: False, 3: True}  # the last is handed out
    # The chain reads 48 bytes and writes 48; what lies between costs nothing.
    assert [op.seconds for op in graph.ops[1:4]] == [48.0, 0.0, 48.0]
