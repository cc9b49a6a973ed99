"""Every variant of every graph gives the gradients of the same compile without a budget, to the bit, on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide
from compiled.test_backend import MLP, MODELS, Checkpointed, Stack, squared
from kernelless import PLENTY, Compiler, assert_equal, compiled_plainly, left_behind, looked_at, session_of
from lowtide import _compat
from sweeps import sweep

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # Dynamo's own
]


def variants_in_turn(model: nn.Module) -> Iterator[Any]:
    """Let the calls of a step run the first variants of their graphs, then the second, torch's own ways at the end."""
    session = session_of(model)
    session._end_step()
    sequence = session.current
    assert sequence is not None
    sequence.is_settled = True
    lists = [
        (*graph.variants, *graph.torch_ways.values(), *filter(None, [graph.replayed]))
        for graph in session.instances_of(sequence)
    ]
    for number in range(max(map(len, lists))):
        chosen = [variants[min(number, len(variants) - 1)] for variants in lists]
        sequence.choice = replace(sequence.choice, variants=chosen, moved=((),) * len(chosen))
        yield chosen


def assert_every_variant_is_exact(model: nn.Module) -> None:
    """Compile a model by lowtide, and compare a step of each variant with the same compile without."""
    start = copy.deepcopy(model.state_dict())
    expected = left_behind(compiled_plainly(copy.deepcopy(model), regional=True), squared)
    lowtide.compile(model, budget=PLENTY, regional=True)
    left_behind(model, squared)
    num_variants = 0
    for _ in variants_in_turn(model):
        num_variants += 1
        model.load_state_dict(start)
        assert_equal(expected, left_behind(model, squared))
    assert num_variants >= 3


@pytest.mark.usefixtures("compiler")
@pytest.mark.filterwarnings("ignore:within .* there is no room for the indices")
@pytest.mark.parametrize("name", sweep(["dropout", "batch norm", "attention", "routed"], keep=1))
def test_every_variant_has_the_same_gradients(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    assert_every_variant_is_exact(model)
    assert any(graph.torch_ways for graph in session_of(model).graphs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # whatever inductor has to say
def test_inductors_kernels_give_the_same_gradients() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Stack(MLP(16), MLP(16))
    lowtide.compile(model, budget=PLENTY, regional=True)
    batch = torch.randn(64, 16)

    def loss(model: nn.Module) -> torch.Tensor:
        return model(batch).square().mean()

    left_behind(model, loss)
    expected = left_behind(model, loss)
    for _ in variants_in_turn(model):
        assert_equal(expected, left_behind(model, loss))
    torch._dynamo.reset()


@pytest.mark.usefixtures("compiler")
def test_checkpoints_of_the_users_are_counted(compiler: Compiler) -> None:
    """What a region of the user's recomputes is not planned to be saved, and plans say what is saved."""
    model = lowtide.compile(Stack(Checkpointed(torch_checkpoint), Checkpointed(torch_checkpoint)), budget=PLENTY)
    for _ in range(2):
        squared(model).backward()
    for chosen in variants_in_turn(model):
        before = len(compiler.splits)
        squared(model).backward()
        for split in compiler.splits[before:]:
            values = [
                node.meta["val"] for node in split.made if node.meta["val"].dtype is not torch.uint8
            ]  # random states
            saved = sum(int(_compat.hint(value.numel())) * value.element_size() for value in values)
            assert saved in {variant.saved_bytes for variant in chosen}


@pytest.mark.usefixtures("compiler")
@pytest.mark.filterwarnings("ignore")  # other names of collectives
def test_collectives_run_once_but_for_gathered_weights(compiler: Compiler) -> None:
    """In the smallest variant too: a sum over ranks is saved, a whole weight is gathered again."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        group = torch.distributed.group.WORLD

        class Sharded(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(8, 8))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                whole = functional.all_gather_tensor_autograd(self.weight, 0, group)
                product = functional.all_reduce(x.detach().exp(), "sum", group)
                return x + (x @ whole).tanh() * (product * x).sin()

        model = Stack(Sharded(), Sharded(), Sharded())
        expected = left_behind(copy.deepcopy(model), squared)
        lowtide.compile(model, budget=PLENTY, regional=True)
        for _ in range(2):
            squared(model).backward()
        for chosen in variants_in_turn(model):
            if all(variant.fraction is None for variant in chosen):
                last = chosen
        session_of(model).current.choice = replace(session_of(model).current.choice, variants=last)
        for name, value in left_behind(model, squared).items():
            assert torch.allclose(value.float(), expected[name].float(), atol=1e-6), name
        split = min(compiler.splits, key=lambda each: each.saved_bytes)
        names = [str(node.target) for node in split.backward.graph.nodes]
        assert sum("all_gather_into_tensor" in name for name in names) == 1
        assert not any("all_reduce" in name for name in names)
        assert not any("all_gather" in str(node) or tuple(node.meta["val"].shape) == (8, 8) for node in split.made)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("compiler")
def test_the_smallest_variant_is_what_torch_makes_of_a_checkpoint(compiler: Compiler) -> None:
    """Node by node, and nothing else is saved: a budget may be the very peak of torch's compiled checkpoint."""
    model = lowtide.compile(Stack(MLP(), MLP()), budget=PLENTY)
    squared(model).backward()
    for _ in variants_in_turn(model):
        squared(model).backward()
    ours = min(compiler.splits, key=lambda each: each.saved_bytes)
    torch._dynamo.reset()
    compiler.splits.clear()
    model = Stack(MLP(), MLP())
    for block in model.blocks:
        block.forward = lambda x, block=block: torch_checkpoint(MLP.forward, block, x, use_reentrant=False)
        block.compile(backend=lambda module, inputs: compiler(module, inputs, _compat.torch_partition, {}))
    squared(model).backward()
    theirs = compiler.splits[0]
    assert called(ours.backward) == called(theirs.backward)
    assert all(node.op == "placeholder" for node in (*ours.saved, *theirs.saved)), "inputs, and no views of them"


def called(graph: torch.fx.GraphModule) -> list[tuple[str, tuple[int, ...] | None]]:
    """What a graph calls, in order, and the shapes of results."""
    values = [(str(node.target), node.meta.get("val")) for node in graph.graph.nodes if node.op == "call_function"]
    return [(name, tuple(value.shape) if isinstance(value, torch.Tensor) else None) for name, value in values]


@pytest.mark.usefixtures("compiler")
def test_a_slice_of_a_wide_input_does_not_hold_the_whole(compiler: Compiler) -> None:
    """Where a small value was computed of it, that is saved; only the smallest variant keeps the input, as it must."""

    class OfSlice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x[:, :8].sin() @ self.up).sin() @ self.down

    class Wide(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x).repeat(1, 32)
            return x

    model, wide = lowtide.compile(Wide(OfSlice(), OfSlice()), budget=PLENTY), torch.randn(16, 256, requires_grad=True)
    model(wide).sum().backward()
    num_checked = 0
    for chosen in variants_in_turn(model):
        before = len(compiler.splits)
        model(wide).sum().backward()
        for split in compiler.splits[before:]:
            holds_input = any(tuple(looked_at(node).meta["val"].shape) == (16, 256) for node in split.saved)
            if 0 in (chosen[0].keeps or ()):  # the sine of the slice
                num_checked += 1
                assert not holds_input
    assert num_checked


@pytest.mark.usefixtures("compiler")
def test_sizes_that_are_read_from_tensors() -> None:
    """Torch's partitioner runs `item` for its FLOPs, which makes a size that no graph returns."""

    class Sliced(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("size", torch.tensor(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            size = self.size.item()
            torch._check(size >= 1)
            torch._check(size <= 8)
            part = x[:, :size]
            return super().forward(x * (part.sin() * part.cos()).sum(1, keepdim=True).tanh())

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert_every_variant_is_exact(Stack(Sliced(), Sliced()))


@pytest.mark.usefixtures("compiler")
def test_floats_that_change_and_must_be_constants() -> None:
    """AOTAutograd asks Dynamo to trace again when it finds one. Other variants are compiled outside of Dynamo."""

    class Clamped(MLP):
        def forward(self, x: torch.Tensor, most: float) -> torch.Tensor:
            return super().forward(x.sin().clamp(max=most) * most)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.most = nn.ModuleList([Clamped(), Clamped()]), 0.5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x, self.most)
            return x

    model = Model()
    plain = compiled_plainly(copy.deepcopy(model), regional=True)
    lowtide.compile(model, budget=PLENTY, regional=True)
    for most in (0.5, 0.25, 0.75):
        model.most = plain.most = most
        expected = left_behind(plain, squared)
        assert_equal(expected, left_behind(model, squared))
    for _ in variants_in_turn(model):
        assert_equal(expected, left_behind(model, squared))
