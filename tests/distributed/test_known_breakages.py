"""What broke in other projects when parallelism met checkpoints: the same steps under lowtide.

Each test names the issue. Gradients are compared with the same parallelism without lowtide, and collectives counted.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import lowtide
from distributed.jobs import Net, batch, gradients, run_ranks, same, seeded, succeeded
from distributed.test_data_parallel import FAST, loss_of
from distributed.test_sharding import (
    TwoSumsNet,
    batch_for,
    collectives,
    local_gradients,
    one_mesh,
    prefetching,
    sharded,
    split,
    steps,
)
from lowtide import _compat
from lowtide.plans import Plan, Recompute

BLOCKS = Plan(regions=tuple(Recompute(f"blocks.{number}") for number in range(3)))
Make = Callable[[], nn.Module]


def seeded_net(kind: type[Net] = Net, **options: Any) -> Net:
    torch.manual_seed(0)
    return kind(**options)


def units_in_blocks() -> nn.Module:
    """Both Linears of each block are sharded on their own, inside of the sharded block."""
    model = seeded_net()
    for block in model.blocks:
        fully_shard(block.up, mesh=one_mesh())  # type: ignore[union-attr, arg-type]
        fully_shard(block.down, mesh=one_mesh())  # type: ignore[union-attr, arg-type]
    return sharded(one_mesh(), model)


def compared(make: Make, change: Callable[[nn.Module], Any], way: str = "fsdp") -> dict[str, Any]:
    """Steps of a model and of one that was changed: gradients, collectives, and what is left gathered."""
    plain, model = make(), make()
    expected = steps(plain, way)
    change(model)
    return {
        "same": all(map(same, expected, steps(model, way))),
        "collectives": (collectives(plain, way), collectives(model, way)),
        "left bytes": sum(
            tensor.untyped_storage().nbytes() for group in _compat.gathered_parameters(model) for tensor in group
        ),
    }


def saves_matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def selectively(function: Callable[..., Any], model: nn.Module) -> None:
    """Put a selective checkpoint around the forward of each block."""
    contexts = functools.partial(create_selective_checkpoint_contexts, saves_matmuls)
    for block in model.blocks:  # type: ignore[union-attr]
        block.forward = functools.partial(function, block.forward, use_reentrant=False, context_fn=contexts)


def selective_replays() -> dict[str, Any]:
    found = compared(units_in_blocks, functools.partial(selectively, lowtide.checkpoint))
    try:
        compared(units_in_blocks, functools.partial(selectively, checkpoint))
        found["torch"] = ""
    except RuntimeError as error:
        found["torch"] = str(error)
    return found


def retained_outputs() -> dict[str, Any]:
    """A plan that retains an output in each block; explicit prefetching changes which gathers run when."""

    def change(model: nn.Module) -> None:
        graph = lowtide.trace(model, loss_of(model), batch_for("fsdp"), mode="real")
        call = graph.calls[graph.calls_by_path["blocks.0"][0]]
        (gelu,) = (op - call.first for op in range(call.first, call.end) if "gelu" in graph.ops[op].name)
        lowtide.apply(model, Plan(regions=tuple(Recompute(f"blocks.{n}", keep_ops=(gelu,)) for n in range(3))))

    return compared(lambda: prefetching(sharded(one_mesh(), seeded_net())), change)


def prefetching_units() -> nn.Module:
    """Each sharded module in a block prefetches the next one, also that of the next block."""
    model = units_in_blocks()
    units = [unit for block in model.blocks for unit in (block.up, block.down)]  # type: ignore[union-attr]
    for unit, following in pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([unit])
    return model


def prefetched_units() -> dict[str, Any]:
    return compared(prefetching_units, lambda model: lowtide.apply(model, BLOCKS))


def nested_units() -> dict[str, Any]:
    found = compared(units_in_blocks, lambda model: lowtide.apply(model, BLOCKS))
    plain, model = units_in_blocks(), units_in_blocks()
    lowtide.apply(model, BLOCKS)
    both = []
    for each in (plain, model):
        with seeded():
            (loss_of(each)(batch(seed=0)) * loss_of(each)(batch(seed=1))).backward()
        both.append(local_gradients(each))
    return found | {"two forwards": same(*both)}


class Products(TorchDispatchMode):
    """Counts matrix products on plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(_compat.is_distributed_type, types)):
            return NotImplemented  # the op runs on the shards
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def last_linear() -> dict[str, Any]:
    def products(model: nn.Module) -> int:
        loss_of(model)(batch_for("tensor parallel")).backward()  # DTensor runs each op on fake tensors once
        loss = loss_of(model)(batch_for("tensor parallel"))
        with Products() as seen:
            loss.backward()
        return seen.counts["mm"] + seen.counts["addmm"]

    def make() -> nn.Module:
        return split(one_mesh(), seeded_net(TwoSumsNet))

    plain, model = make(), make()
    plan = Plan(regions=BLOCKS.regions, choosers=tuple(region.path for region in BLOCKS.regions))
    handle = lowtide.apply(model, plan)
    extra = products(model) - products(plain)
    found = compared(make, lambda model: lowtide.apply(model, plan), "tensor parallel")
    return {"products": extra, "replays": handle.stats().num_replays, **found}


class Checkpointed(Net):
    """Checkpoints written in the model's code."""

    function: Any = None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.function is None else self.function(block, x, use_reentrant=False)
        return self.head(x)  # type: ignore[no-any-return]


def compiled_data_parallel() -> bool:
    """Buckets are smaller than the model, so that Dynamo's DDPOptimizer has to cut the graph."""

    def run(function: Any) -> list[list[Tensor | None]]:
        torch._dynamo.reset()
        inner = seeded_net(Checkpointed, width=192, dropout=0.0)
        inner.function = function
        model = torch.compile(DistributedDataParallel(inner, bucket_cap_mb=1), backend="aot_eager")
        found = []
        for seed in range(3):
            inner.zero_grad()
            loss_of(model)(batch(32, 192, seed)).backward()  # type: ignore[arg-type]
            found.append(gradients(inner))
        return found

    return all(map(same, run(None), run(lowtide.checkpoint)))


class SideOutput(Net):
    """Returns a second output, which the loss does not use."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        output = super().forward(x)
        return output, self.head.weight.sum() * output.exp()


def unused_outputs() -> dict[str, Any]:
    def make() -> DistributedDataParallel:
        return DistributedDataParallel(seeded_net(SideOutput), static_graph=True)

    def run(model: nn.Module) -> list[list[Tensor | None]]:
        found = []
        for seed in range(3):
            model.zero_grad()
            with seeded(seed):
                model(batch(seed=seed))[0].square().mean().backward()
            found.append(gradients(model))
        return found

    expected, model = run(make()), make()

    def loss_fn(x: Tensor) -> Tensor:
        return model(x)[0].square().mean()  # type: ignore[no-any-return]

    graph = lowtide.trace(model, loss_fn, batch(), mode="fake")
    fixed = sum(graph.static_bytes.values())
    budget = int(fixed + 0.6 * (graph.plain_peak_bytes - fixed))
    handle = lowtide.fit(model, loss_fn, batch(), budget=budget, **FAST)
    return {"same": all(map(same, expected, run(model))), "replays": handle.stats().num_replays}


SCENARIOS = [
    selective_replays,
    retained_outputs,
    prefetched_units,
    nested_units,
    last_linear,
    unused_outputs,
]


def all_scenarios() -> dict[str, Any]:
    return {scenario.__name__: scenario() for scenario in SCENARIOS}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return succeeded(run_ranks(all_scenarios))


def check(found: list[dict[str, Any]], name: str) -> None:
    for each in (results[name] for results in found):
        assert each["same"] and each["left bytes"] == 0
        assert each["collectives"][0] == each["collectives"][1]


def test_gathers_do_not_enter_selective_replays(found: list[dict[str, Any]]) -> None:
    """torchtitan #3427, pytorch #185178: a gather inside of a selective checkpoint shifts the ops that it counts.

    The same step with torch's own checkpoint shows whether this is still needed.
    """
    check(found, "selective_replays")
    assert all("not found in storage" in each["selective_replays"]["torch"] for each in found)


def test_no_gather_is_repeated_under_forward_prefetch(found: list[dict[str, Any]]) -> None:
    """With `set_modules_to_forward_prefetch` on blocks that retain outputs, and on modules inside of blocks."""
    check(found, "retained_outputs")
    check(found, "prefetched_units")


def test_sharded_modules_inside_a_sharded_block_are_gathered_once(found: list[dict[str, Any]]) -> None:
    """pytorch #175406: a replay of a block gathers the modules in it, which their backward must not repeat.

    pytorch #187437: nor may it find them sharded when there were two forwards before the backward.
    """
    check(found, "nested_units")
    assert all(each["nested_units"]["two forwards"] for each in found)


def test_the_last_linear_of_a_block_is_not_replayed(found: list[dict[str, Any]]) -> None:
    """torchtitan #2763: of the four Linears of a block under tensor parallelism, a replay needs the first three."""
    check(found, "last_linear")
    for each in (results["last_linear"] for results in found):
        assert each["replays"] == 6 and each["products"] == 3 * 3


def test_static_graph_with_unused_outputs(found: list[dict[str, Any]]) -> None:
    for each in (results["unused_outputs"] for results in found):
        assert each["same"] and each["replays"]


@pytest.mark.slow
def test_compiled_data_parallel_with_checkpoints() -> None:
    """pytorch #104674: DDP and torch.compile around a model with checkpoints."""
    assert succeeded(run_ranks(compiled_data_parallel)) == [True, True]
