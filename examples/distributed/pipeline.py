"""A plan for each stage of a pipeline: `torchrun --nproc-per-node 2 examples/distributed/pipeline.py`."""

import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import lowtide

distributed.init_process_group("gloo")  # "nccl" on GPUs
rank, world = distributed.get_rank(), distributed.get_world_size()
torch.manual_seed(rank)
blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
module = nn.Sequential(*blocks)
stage = PipelineStage(module, rank, world, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW(module.parameters())


def step() -> None:
    if rank == 0:
        schedule.step(torch.randn(1024, 64))
    elif rank == world - 1:
        schedule.step(target=torch.randn(1024, 64), losses=[])
    else:
        schedule.step()


whole = lowtide.fit_pipeline(schedule, step, budget="1GiB", optimizer=optimizer)
whole.remove()
budget = int(0.85 * whole.measured_peak_bytes)  # each rank may have its own; on a GPU: "20GiB"
handle = lowtide.fit_pipeline(schedule, step, budget=budget, optimizer=optimizer)
for _ in range(3):
    optimizer.zero_grad()
    step()
    optimizer.step()
regions = {number: len(each.plan.regions) for number, each in handle.handles.items()}
print(f"rank {rank}: {handle.in_flight} microbatches in flight, {regions} regions, {handle.measured_peak_bytes} bytes")
distributed.destroy_process_group()
