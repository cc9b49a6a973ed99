"""Tensor parallelism and FSDP2 on a 2 x 2 mesh: `torchrun --nproc-per-node 4 examples/distributed/tp_fsdp2.py`."""

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lowtide


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


distributed.init_process_group("gloo")  # "nccl" on GPUs, with device "cuda" below
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
torch.manual_seed(0)
model = nn.Sequential(*(Block(64) for _ in range(6)), nn.Linear(64, 4))
for block in model[:-1]:
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh["fsdp"])
fully_shard(model, mesh=mesh["fsdp"])
optimizer = torch.optim.AdamW(model.parameters())


def loss_fn(x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


torch.manual_seed(mesh.get_local_rank("fsdp"))  # ranks that split the model get the same batch
batch = torch.randn(512, 64)
graph = lowtide.trace(model, loss_fn, batch, optimizer=optimizer, mode="real")
budget = int(0.75 * graph.plain_peak_bytes)
handle = lowtide.fit(model, loss_fn, batch, budget=budget, optimizer=optimizer, tune_s=0)

for _ in range(3):
    optimizer.zero_grad()
    loss_fn(batch).backward()
    optimizer.step()
if distributed.get_rank() == 0:
    print(handle)
distributed.destroy_process_group()
