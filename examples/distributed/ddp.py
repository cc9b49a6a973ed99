"""Train under DistributedDataParallel within a budget: `torchrun --nproc-per-node 2 examples/distributed/ddp.py`."""

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import lowtide

distributed.init_process_group("gloo")  # "nccl" on GPUs
torch.manual_seed(0)
blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]
model = DistributedDataParallel(nn.Sequential(*blocks, nn.Linear(64, 4)))
optimizer = torch.optim.AdamW(model.parameters())


def loss_fn(x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


batch = torch.randn(512, 64)
graph = lowtide.trace(model, loss_fn, batch, optimizer=optimizer)
budget = int(0.7 * graph.plain_peak_bytes)  # on a GPU: "20GiB"
handle = lowtide.fit(model, loss_fn, batch, budget=budget, optimizer=optimizer, tune_s=1)

for _ in range(3):
    optimizer.zero_grad()
    loss_fn(torch.randn(512, 64)).backward()
    optimizer.step()
if distributed.get_rank() == 0:
    print(handle)
distributed.destroy_process_group()
