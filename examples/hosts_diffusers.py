"""A UNet of diffusers: some of its blocks recomputed, and then a budget: `python examples/hosts_diffusers.py`."""

import torch
from diffusers import UNet2DConditionModel

import lowtide

torch.manual_seed(0)
unet = UNet2DConditionModel(
    sample_size=16,
    block_out_channels=(16, 32),
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    layers_per_block=1,
    cross_attention_dim=8,
    attention_head_dim=4,
    norm_num_groups=4,
)
optimizer = torch.optim.AdamW(unet.parameters())
batch = {
    "sample": torch.randn(4, 4, 16, 16),
    "timestep": torch.randint(0, 1000, (4,)),
    "encoder_hidden_states": torch.randn(4, 6, 8),
}
noise = torch.randn(4, 4, 16, 16)


def loss_fn(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.mse_loss(unet(**batch).sample, noise)


# Every second block, in place of all of them.
unet.enable_gradient_checkpointing(gradient_checkpointing_func=lowtide.hosts.diffusers.func(every=2))
loss_fn(batch).backward()
optimizer.step()
optimizer.zero_grad()

# A budget in bytes: the plan decides what is recomputed.
unet.disable_gradient_checkpointing()
handle = lowtide.fit(unet, loss_fn, batch, budget="8MiB", optimizer=optimizer, tune_s=0, time_limit_s=1)
loss_fn(batch).backward()
optimizer.step()
print(handle.stats())
