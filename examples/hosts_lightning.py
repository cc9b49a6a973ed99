"""Lightning's Trainer within a budget: `python examples/hosts_lightning.py`."""

import tempfile

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lowtide


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8))
        self.blocks = nn.Sequential(*blocks, nn.Linear(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self(inputs), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


data = TensorDataset(torch.randn(1024, 64), torch.randn(1024, 1))
budget = lowtide.hosts.lightning.Budget("7MiB", tune_s=0, time_limit_s=1)
with tempfile.TemporaryDirectory() as folder:
    trainer = lightning.Trainer(
        max_epochs=1,
        callbacks=[budget],
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), DataLoader(data, batch_size=256, shuffle=True))
print(budget.handle.stats())
