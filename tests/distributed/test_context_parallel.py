"""`fit` under torch's `context_parallel`: ring attention, whose ops differ between ranks.

torch has ring attention for kernels that exist on CUDA only. Here one of them is written for the CPU.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.nn import functional

import lowtide
from distributed.jobs import Block, Net, Raised, gradients, run_ranks, same, succeeded
from distributed.test_data_parallel import FAST
from distributed.test_sharding import one_mesh
from lowtide.distributed.agreement import plan_of_first
from lowtide.distributed.ranks import ranks_of
from lowtide.graph.step_graph import StepGraph
from lowtide.plans import Plan, Recompute
from sweeps import sweep

aten = torch.ops.aten


def scores(query: Tensor, key: Tensor, is_causal: bool) -> Tensor:
    found = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    return found.masked_fill(torch.ones(found.shape[-2:], dtype=torch.bool).triu(1), -math.inf) if is_causal else found


def forward_kernel(q: Tensor, k: Tensor, v: Tensor, bias: Any, lse: bool, p: float = 0, causal: bool = False, **_: Any):  # type: ignore[no-untyped-def]
    found = scores(q, k, causal)
    sums = found.logsumexp(-1)
    zero = torch.zeros((), dtype=torch.int64)
    return (found - sums[..., None]).exp() @ v, sums, zero, zero.clone()


def backward_kernel(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, _: Any, out: Tensor, lse: Tensor, *more: Any, **__: Any
):  # type: ignore[no-untyped-def]
    weights = (scores(q, k, more[4] if len(more) > 4 else False) - lse[..., None]).exp()
    inner = weights * (g @ v.transpose(-1, -2) - (g * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    return inner @ k, inner.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ g, None


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
    return aten._scaled_dot_product_efficient_attention(query, key, value, None, True, 0.0, is_causal)[0]  # type: ignore[no-any-return]


KERNELS: list[Any] = []


def use_kernels() -> None:
    """Have attention on the CPU run CUDA's op, for the rest of the process."""
    KERNELS.append(library := torch.library.Library("aten", "IMPL"))
    library.impl("_scaled_dot_product_efficient_attention", forward_kernel, "CPU")
    library.impl("_scaled_dot_product_efficient_attention_backward", backward_kernel, "CPU")
    functional.scaled_dot_product_attention = scaled_dot_product_attention  # type: ignore[assignment]


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = Block(width, dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        parts = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.mlp(x + self.out(mixed.transpose(1, 2).flatten(-2)))  # type: ignore[no-any-return]


class AttentionNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(16) for _ in range(3))


def made() -> AttentionNet:
    torch.manual_seed(0)
    return AttentionNet()


def tokens(seed: int) -> Tensor:
    return torch.randn(4, 64, 16, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, seed: int) -> list[Tensor | None]:
    """Gradients of one step, as torch's documentation has it: forward and backward inside of the context."""
    model.zero_grad()
    x = tokens(seed)
    with context_parallel(one_mesh(), buffers=[x], buffer_seq_dims=[1]):
        model(x).square().mean().backward()
    return gradients(model)


def collectives(model: nn.Module, op: str) -> int:
    with CommDebugMode() as counted:
        step(model, 0)
    return sum(number for each, number in counted.get_comm_counts().items() if op in str(each))


def retaining(graph: StepGraph) -> Plan:
    """Recompute the first block, but for the output of the first Linear of its MLP."""
    first = graph.calls[graph.calls_by_path["blocks.0"][0]].first
    (at,) = (
        number
        for number, op in enumerate(graph.ops[: graph.num_forward])
        if "addmm" in op.name and graph.calls[op.call].path == "blocks.0.mlp.up"
    )
    return Plan(regions=(Recompute("blocks.0", keep_ops=(at - first,)),), choosers=("blocks.0",), graph=graph)


def fitted(rotation: str) -> dict[str, Any]:
    use_kernels()
    set_rotate_method(rotation)
    plain, model, whole = made(), made(), made()
    whole(tokens(0)).square().mean().backward()
    expected = [step(plain, seed) for seed in range(2)]
    x = tokens(0)
    with context_parallel(one_mesh(), buffers=[x], buffer_seq_dims=[1]):

        def loss_fn(x: Tensor) -> Tensor:
            return model(x).square().mean()

        graph = lowtide.trace(model, loss_fn, x, mode="real")
        fixed = sum(graph.static_bytes.values())
        budget = int(fixed + 0.7 * (graph.plain_peak_bytes - fixed))
        handle = lowtide.fit(model, loss_fn, x, budget=budget, **FAST)
    fits = [same(each, step(model, seed)) for seed, each in enumerate(expected)]
    handle.remove()
    plan = plan_of_first(ranks_of(), graph, lambda: retaining(graph))
    retained = lowtide.apply(model, plan)
    first = [gradient for gradient in expected[0] if gradient is not None]
    for gradient in (firsts := [gradient.clone() for gradient in first]):
        distributed.all_reduce(gradient)
    return {
        "same": [*fits, same(expected[0], step(model, 0))],
        "is parallel": all(
            torch.allclose(mine / 2, full.grad, atol=1e-6)  # type: ignore[arg-type]
            for mine, full in zip(firsts, whole.parameters(), strict=True)
        ),
        "regions": [region.name for region in handle.plan.regions],
        "positions": plan.regions[0].keep_ops,
        "replays": retained.stats().num_replays,
        "peaks": (handle.measured_peak_bytes, budget, graph.plain_peak_bytes),
        "exchanges": [collectives(each, "all_to_all") for each in (plain, model)],
        "num_ops": graph.num_forward,
    }


@pytest.mark.parametrize("rotation", sweep(["alltoall", "allgather"], keep=1))
def test_ring_attention(rotation: str) -> None:
    """TRL #4314: replays run in the context of their forward, and compute what it computed."""
    results = succeeded(run_ranks(fitted, rotation))
    assert results[0]["num_ops"] != results[1]["num_ops"]  # ranks run different ops, and still have one plan
    assert results[0]["regions"] == results[1]["regions"]
    for each in results:
        measured, budget, plain = each["peaks"]
        assert each["is parallel"] and each["same"] == [True] * 3 and measured <= budget < plain
        assert each["replays"] and each["exchanges"][0] == each["exchanges"][1]
    assert results[0]["positions"] != results[1]["positions"]


def context_left_before_backward() -> None:
    use_kernels()
    model = made()
    lowtide.apply(model, Plan(regions=(Recompute("blocks.1"),)))
    x = tokens(0)
    with context_parallel(one_mesh(), buffers=[x], buffer_seq_dims=[1], no_restore_buffers={x}):
        loss = model(x).square().mean()
    loss.backward()


def test_a_context_left_before_the_backward_is_an_error() -> None:
    """TRL #4314: without its context, a replay would compute attention over the tokens of one rank.

    torch's own gradients are wrong there too, without any replay, so the context is not entered again by lowtide.
    """
    for each in run_ranks(context_left_before_backward):
        assert isinstance(each, Raised) and each.kind == "CheckpointError" and "region: blocks.1" in each.text
