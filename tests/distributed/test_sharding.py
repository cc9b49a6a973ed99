"""`fit` under FSDP2 and tensor parallelism: the same gradients, the same collectives, and gathers in the budget."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import gelu

import lowtide
from distributed.jobs import Net, batch, run_ranks, same, seeded, succeeded
from distributed.test_data_parallel import FAST, loss_of
from lowtide import _compat
from lowtide.api.measure import RealSteps, TracedStep
from lowtide.distributed.agreement import plan_hash
from lowtide.plans import Plan, Recompute
from sweeps import sweep


class TwoSums(nn.Module):
    """A block with an all-reduce in its middle and one at its end, if it is split over ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.mix, self.out = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(torch.tanh(self.mix(self.norm1(x))))
        return x + self.down(gelu(self.up(self.norm2(x))))


class TwoSumsNet(Net):
    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        self.blocks = nn.ModuleList(TwoSums(width) for _ in range(3))


SPLIT = {"mix": ColwiseParallel(), "out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}


def sharded(mesh: DeviceMesh, model: nn.Module, **options: Any) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def split(mesh: DeviceMesh, model: nn.Module) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh, dict(SPLIT))
    return model


def mixed() -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def prefetching(model: nn.Module) -> nn.Module:
    blocks = list(model.blocks)  # type: ignore[arg-type]
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])
    return model


def nested(mesh: DeviceMesh) -> nn.Module:
    model = Net(dropout=0.0)
    for block in model.blocks:
        fully_shard(block.down, mesh=mesh)  # type: ignore[union-attr]
    return sharded(mesh, model)


def one_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (distributed.get_world_size(),))


def both() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    return sharded(mesh["data"], split(mesh["model"], TwoSumsNet()))


WAYS: dict[str, Callable[[], nn.Module]] = {
    "fsdp": lambda: sharded(one_mesh(), Net()),
    "fsdp, mixed precision": lambda: sharded(one_mesh(), Net(), mp_policy=mixed()),
    "tensor parallel": lambda: split(one_mesh(), TwoSumsNet()),
    "fsdp, not resharded": lambda: sharded(one_mesh(), Net(), reshard_after_forward=False),
    "fsdp, prefetching": lambda: prefetching(sharded(one_mesh(), Net())),
    "fsdp, nested": lambda: nested(one_mesh()),
    "both": both,
}


def local_gradients(model: nn.Module) -> list[Tensor | None]:
    gradients = (parameter.grad for parameter in model.parameters())
    return [None if g is None else (g.to_local() if isinstance(g, DTensor) else g).detach().clone() for g in gradients]


def make(way: str) -> nn.Module:
    torch.manual_seed(0)
    return WAYS[way]()


def batch_for(way: str, seed: int = 0) -> Tensor:
    """Ranks that split a model get the same batch."""
    if way == "tensor parallel":
        return torch.randn(256, 16, generator=torch.Generator().manual_seed(seed))
    if way == "both":
        group = distributed.get_rank() // 2
        return torch.randn(256, 16, generator=torch.Generator().manual_seed(10 * seed + group))
    return batch(seed=seed)


def steps(model: nn.Module, way: str) -> list[list[Tensor | None]]:
    """Local gradients of two steps, the second accumulated into the first."""
    found = []
    model.zero_grad()
    for number in range(2):
        with seeded(number):
            loss_of(model)(batch_for(way, number)).backward()
        found.append(local_gradients(model))
    return found


def collectives(model: nn.Module, way: str) -> dict[str, int]:
    with CommDebugMode() as counted:
        loss_of(model)(batch_for(way)).backward()
    return {str(op): number for op, number in counted.get_comm_counts().items()}


def tight(model: nn.Module, way: str, optimizer: Any) -> tuple[int, int]:
    graph = lowtide.trace(model, loss_of(model), batch_for(way), optimizer=optimizer, mode="real")
    fixed = sum(graph.static_bytes.values())
    return int(fixed + 0.65 * (graph.plain_peak_bytes - fixed)), graph.plain_peak_bytes


def fitted(way: str) -> dict[str, Any]:
    model, plain = make(way), make(way)
    optimizer = torch.optim.AdamW(model.parameters())
    expected = steps(plain, way)
    budget, plain_peak = tight(model, way, optimizer)
    handle = lowtide.fit(model, loss_of(model), batch_for(way), budget=budget, optimizer=optimizer, **FAST)
    found = steps(model, way)
    graph = handle.plan.graph
    assert graph is not None
    model.zero_grad()
    real = RealSteps(TracedStep(model, loss_of(model), [(batch_for(way),)], optimizer, graph))
    more = [real.measured()[0] for _ in range(6)]
    return {
        "same": all(map(same, expected, found)),
        "more peaks": more,
        "hash": plan_hash(handle.plan),
        "peaks": (handle.plan.peak_bytes, handle.measured_peak_bytes, budget, plain_peak),
        "regions": [region.name for region in handle.plan.regions],
        "collectives": (collectives(plain, way), collectives(model, way)),
        "sharded again": all(isinstance(p, DTensor) for p in model.parameters()) == way.startswith(("fsdp", "both")),
        "state bytes": sum(map(_compat.local_bytes, state_after_step(optimizer))),
        "planned state bytes": handle.plan.graph.optimizer_state_bytes if handle.plan.graph else 0,
    }


def state_after_step(optimizer: Any) -> list[Tensor]:
    optimizer.step()
    return [tensor for state in optimizer.state.values() for tensor in state.values()]


MIXED = "fsdp, mixed precision"


@pytest.mark.parametrize("way", sweep([MIXED, *(way for way in WAYS if way not in (MIXED, "both"))], keep=1))
def test_gradients_and_collectives_are_those_of_the_plain_step(way: str) -> None:
    check(settled_results(way), way)


@pytest.mark.slow
def test_two_dimensions_on_four_ranks() -> None:
    check(settled_results("both", world=4, group_s=30), "both")


def settled_results(way: str, **options: Any) -> list[dict[str, Any]]:
    """In one run of eight nearly all steps of a rank hold one more tensor of gloo's: then another run is made."""
    for _ in range(3):
        results = succeeded(run_ranks(fitted, way, **options))
        if all(difference(each) <= 0.01 * each["peaks"][0] for each in results):
            break
    return results


def difference(result: dict[str, Any]) -> int:
    """By how much the predicted peak differs from what two steps agree on."""
    predicted, measured, *_ = result["peaks"]
    return sorted(abs(predicted - peak) for peak in [measured, *result["more peaks"]])[1]


def check(results: list[dict[str, Any]], way: str) -> None:
    assert len({each["hash"] for each in results}) == 1
    for each in results:
        predicted, measured, budget, plain_peak = each["peaks"]
        assert each["same"] and each["regions"] and each["sharded again"]
        assert measured <= budget < plain_peak
        # In many steps gloo's threads hold tensors of a collective a little longer, or allocate one that the profiler
        # does not see. They disturb steps by different amounts: what several steps agree on is the step's own peak.
        assert difference(each) <= 0.01 * predicted
        assert each["collectives"][0] == each["collectives"][1]  # a replay communicates nothing
        if way.startswith("fsdp"):
            assert each["state bytes"] == each["planned state bytes"]


def planned_before(way: str) -> dict[str, Any]:
    """A plan made for the bare model is applied before its modules are sharded."""
    torch.manual_seed(0)
    bare = Net() if way == "fsdp" else TwoSumsNet()
    plan = Plan(regions=(Recompute("blocks.0"), Recompute("blocks.2")))
    handle = lowtide.apply(bare, plan)
    model = sharded(one_mesh(), bare) if way == "fsdp" else split(one_mesh(), bare)
    expected = steps(make(way), way)
    return {"same": all(map(same, expected, steps(model, way))), "replays": handle.stats().num_replays}


@pytest.mark.parametrize("way", sweep(["fsdp", "tensor parallel"], keep=1))
def test_a_plan_applied_before_sharding(way: str) -> None:
    for each in succeeded(run_ranks(planned_before, way)):
        assert each["same"] and each["replays"] == 4


def flat() -> tuple[str, str]:
    model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), use_orig_params=True)
    try:
        lowtide.fit(model, loss_of(model), batch(), budget="1GiB", **FAST)
    except lowtide.TraceError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_the_older_fsdp_is_refused() -> None:
    for kind, text in succeeded(run_ranks(flat)):
        assert kind == "TraceError" and "Use torch.distributed.fsdp.fully_shard" in text


def refused() -> list[str]:
    """Errors for blocks with a sharded module in each: recomputed as a segment, and with retained outputs."""
    model = Net()
    for block in model.blocks:
        fully_shard(block.down, mesh=one_mesh())  # type: ignore[union-attr, arg-type]
    fully_shard(model, mesh=one_mesh())
    graph = lowtide.trace(model, loss_of(model), batch(), mode="real")
    reasons = []
    for region in (Recompute("blocks.0", more=(("blocks.1", 0),)), Recompute("blocks.0", keep_ops=(3,))):
        try:
            lowtide.apply(model, Plan(regions=(region,), graph=graph))
        except lowtide.PlanError as error:
            reasons.append(str(error))
    return reasons


def test_what_is_refused_around_sharded_modules() -> None:
    for segment, retained in succeeded(run_ranks(refused)):
        assert "it spans modules that FSDP shards" in segment
        assert retained.startswith("blocks.0 has keep_ops and contains modules that FSDP shards")
