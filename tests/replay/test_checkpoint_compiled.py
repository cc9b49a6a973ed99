"""Under torch.compile, `lowtide.checkpoint` is torch's checkpoint: it compiles whole and saves the same."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import lowtide
from lowtide import _compat
from sweeps import sweep

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


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("is_argument", [False, True])
def test_a_generator_of_its_own_breaks_the_graph_and_is_restored(is_argument: bool) -> None:
    torch._dynamo.reset()

    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.generator = nn.Linear(8, 8), torch.Generator().manual_seed(1)

        def forward(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
            y = self.linear(x)
            return y * torch.empty_like(y).bernoulli_(0.5, generator=generator or self.generator)

    def run(call: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        model, generator = Noise(), torch.Generator().manual_seed(2)
        x = torch.randn(4, 8)
        for _ in range(2):
            call(model, x, generator if is_argument else None).square().sum().backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        return [*gradients, generator.get_state(), model.generator.get_state()]

    compiled = torch.compile(lambda *args: lowtide.checkpoint(*args), backend="aot_eager")
    assert all(map(torch.equal, run(compiled), run(lambda model, *args: model(*args))))


def test_divergence_of_a_compiled_function_says_how_graphs_may_differ() -> None:
    torch._dynamo.reset()

    now = {"is_replay": False}  # torch 2.11 has no guard on attributes of a class that a function closes over

    def region(x: Tensor) -> Tensor:
        return x[:2].exp() if now["is_replay"] else x.exp()

    def message(function: Callable[[Tensor], Tensor]) -> str:
        now["is_replay"] = False
        output = lowtide.checkpoint(function, torch.randn(3, 4, requires_grad=True))
        now["is_replay"] = True
        with pytest.raises(lowtide.CheckpointError) as raised:
            output.sum().backward()
        return str(raised.value)

    assert "mark_dynamic" in message(torch.compile(region, backend="aot_eager"))
    assert "mark_dynamic" not in message(region)


@pytest.mark.parametrize("options", sweep([{"context_fn": save_matmuls}, {}, {"determinism_check": "values"}], keep=1))
def test_compiled_autograd_compiles_as_many_graphs_as_with_torchs(options: dict[str, Any]) -> None:
    def num_graphs(run: Any) -> int:
        torch._dynamo.reset()
        graphs: list[torch.fx.GraphModule] = []

        def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
            graphs.append(graph)
            return graph

        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with (
            torch.autograd.set_multithreading_enabled(False),
            torch._dynamo.compiled_autograd._enable(lambda graph: torch.compile(graph, backend=compiler, dynamic=True)),
        ):
            run(model, torch.randn(1, 4), use_reentrant=False, **options).sum().backward()
        return len(graphs)

    ours = num_graphs(lowtide.checkpoint)
    options.pop("determinism_check", None)  # of which torch has no "values"
    assert ours == num_graphs(torch_checkpoint.checkpoint) > 1


# Where `torch.utils.checkpoint.checkpoint` is another function than torch's.


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_it_compiles_in_torchs_place(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    monkeypatch.setattr(torch_checkpoint, "checkpoint", lowtide.checkpoint)
    step = torch.compile(
        lambda x: torch_checkpoint.checkpoint(model, x, use_reentrant=False).sin(), backend=backend, fullgraph=True
    )
    x = torch.randn(3, 4, requires_grad=True)
    (ours,) = torch.autograd.grad(step(x).sum(), x)
    (plain,) = torch.autograd.grad(model(x).sin().sum(), x)
    assert torch.equal(ours, plain)


def replaced_and_kept(torchs: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """As Unsloth does it, twice: torch's is on the module under another name."""
    monkeypatch.setattr(
        torch_checkpoint, "_old_checkpoint", lowtide._compat.disable_dynamo(lambda *_, **__: None), raising=False
    )
    monkeypatch.setattr(torch_checkpoint, "_unsloth_pristine_checkpoint", torchs, raising=False)
    return lowtide._compat.disable_dynamo(lambda *_, **__: None)


def wrapping(torchs: Callable[..., Any], _: pytest.MonkeyPatch) -> Callable[..., Any]:
    @functools.wraps(torchs)
    def replacement(*args: Any, **kwargs: Any) -> None: ...

    return replacement


def closing_over(torchs: Callable[..., Any], _: pytest.MonkeyPatch) -> Callable[..., Any]:
    if torchs is None:
        empty = 1  # a cell that is empty by then must not matter
    return lambda *args, **kwargs: (torchs(*args, **kwargs), empty)


def a_partial(torchs: Callable[..., Any], _: pytest.MonkeyPatch) -> Callable[..., Any]:
    return functools.partial(torchs, use_reentrant=True)


@pytest.mark.parametrize("replace", [replaced_and_kept, wrapping, closing_over, a_partial])
def test_torchs_own_is_found(replace: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torchs = torch_checkpoint.checkpoint
    assert _compat.find_torch_checkpoint() is torchs
    monkeypatch.setattr(torch_checkpoint, "checkpoint", replace(torchs, monkeypatch))
    assert _compat.find_torch_checkpoint() is torchs


def test_an_unknown_replacement_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(function: Callable[..., Any], *args: Any, **_: Any) -> Any:
        return function(*args)

    monkeypatch.setattr(torch_checkpoint, "checkpoint", unknown)
    assert _compat.find_torch_checkpoint() is unknown


def test_a_replacement_from_before_the_import() -> None:
    code = """
import torch, torch.utils.checkpoint as module
module._unsloth_pristine_checkpoint = module.checkpoint
def unsloth_checkpoint(*args, **kwargs): raise AssertionError("not torch's")
module.checkpoint = unsloth_checkpoint
import lowtide
x = torch.ones(3, requires_grad=True)
lowtide.checkpoint(torch.exp, x).sum().backward()
assert torch.equal(x.grad, x.exp())
"""
    subprocess.run([sys.executable, "-c", code], check=True)
