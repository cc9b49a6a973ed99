"""One process with NCCL on one GPU: `fit` under DDP and FSDP2, and dropout on DTensors. Several GPUs are not tested."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import lowtide
from distributed.jobs import Net

pytestmark = pytest.mark.gpu


@pytest.fixture
def nccl() -> Iterator[None]:
    torch.cuda.set_device(0)
    distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def made(way: str) -> nn.Module:
    torch.manual_seed(0)
    model = Net(width=256, num_blocks=4).cuda()
    if way == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cuda", (1,))
    for block in model.blocks:
        if way == "fsdp":
            fully_shard(block, mesh=mesh)
        else:
            up = ColwiseParallel(use_local_output=False)  # the dropout inside is on a DTensor
            parallelize_module(block, mesh, {"up": up, "down": RowwiseParallel(use_local_output=True)})
    return fully_shard(model, mesh=mesh) if way == "fsdp" else model


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    model(x).square().mean().backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [(each.to_local() if isinstance(each, DTensor) else each).clone() for each in found]


@pytest.mark.parametrize("way", ["ddp", "fsdp", "tensor parallel"])
def test_one_rank_on_a_gpu(nccl: None, way: str) -> None:
    x = torch.randn(8192, 256, device="cuda")
    expected = gradients(made(way), x)
    model = made(way)

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).square().mean()

    plain = lowtide.fit(model, loss_fn, x, budget="60GiB", tune_s=0)
    assert plain.plan.is_plain and plain.measured_peak_bytes is not None
    plain.remove()
    budget = int(0.7 * plain.measured_peak_bytes)
    handle = lowtide.fit(model, loss_fn, x, budget=budget, tune_s=0)
    assert handle.measured_peak_bytes is not None and handle.measured_peak_bytes <= budget and handle.plan.regions
    found = gradients(model, x)
    assert len(expected) == len(found) and all(map(torch.equal, expected, found))
