"""Under torch.compile, `lowtide.checkpoint` is torch's checkpoint: it compiles whole and saves the same."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import lowtide

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def save_matmuls() -> Any:
    return torch_checkpoint.create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


def compiled_step(run: Any, **options: Any) -> tuple[list[Tensor], list[tuple[int, ...]]]:
    """Gradients of a compiled region, and the shapes of what its forward graph hands to the backward."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.Tanh())
    saved: list[tuple[int, ...]] = []

    def forward_compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        outputs = graph.graph.output_node().args[0]
        saved.extend(tuple(node.meta["val"].shape) for node in outputs[1:])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=forward_compiler,
        bw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
    )

    @functools.partial(torch.compile, backend=backend, fullgraph=True)
    def step(x: Tensor) -> Tensor:
        return run(lambda x, scale: model(x) * scale, x * 2, scale=3.0, **options).sin()

    x = torch.randn(5, 4, requires_grad=True)
    step(x).sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())], saved


@pytest.mark.parametrize("options", [{}, {"context_fn": save_matmuls}, {"preserve_rng_state": False}], ids=" ".join)
def test_it_compiles_whole_and_saves_what_torchs_does(options: dict[str, Any]) -> None:
    ours, our_saved = compiled_step(lowtide.checkpoint, **options)
    theirs, their_saved = compiled_step(torch_checkpoint.checkpoint, use_reentrant=False, **options)
    assert all(map(torch.equal, ours, theirs))
    assert our_saved == their_saved


def test_a_compiled_module_inside_a_region() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(3, 4, requires_grad=True)
    (ours,) = torch.autograd.grad(lowtide.checkpoint(compiled, x).sum(), x)
    (plain,) = torch.autograd.grad(model(x).sum(), x)
    assert torch.equal(ours, plain)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo's own
def test_a_graph_break_inside_a_region() -> None:
    torch._dynamo.reset()
    model = nn.Linear(4, 4)

    def region(x: Tensor) -> Tensor:
        h = model(x).tanh()
        torch._dynamo.graph_break()
        return h.exp()

    step = torch.compile(lambda x: lowtide.checkpoint(region, x) * 2, backend="aot_eager")
    x = torch.randn(3, 4, requires_grad=True)
    (ours,) = torch.autograd.grad(step(x).sum(), x)
    (plain,) = torch.autograd.grad((region(x) * 2).sum(), x)
    assert torch.equal(ours, plain)
