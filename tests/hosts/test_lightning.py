"""The callback for Lightning, run by its real trainer on a small module."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lowtide
from hosts.training import OPTIONS, assert_same_weights, measured, parameter_bytes, weights
from lowtide.errors import LowtideError
from sweeps import sweep

lightning = pytest.importorskip("lightning")
DummyLogger = pytest.importorskip("lightning.pytorch.loggers.logger").DummyLogger

pytestmark = [
    pytest.mark.usefixtures("quick_fit"),
    pytest.mark.filterwarnings("ignore"),  # Lightning's advice on workers, loggers and checkpoints
]


class Module(lightning.LightningModule):
    """Blocks of which `training_step` calls the parts, not `forward`; it logs, and counts its steps in a buffer."""

    def __init__(self, calls_forward: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32)) for _ in range(6))
        )
        self.norm = nn.BatchNorm1d(32)
        self.calls_forward = calls_forward
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.norm(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (x,) = batch
        loss = (self(x) if self.calls_forward else self.blocks(self.norm(x))).square().mean()
        self.log("loss", loss, prog_bar=True)
        return {"loss": loss}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Measures(lightning.Callback):
    """Measures the epochs, from the first batch on, with a profiler of its own."""

    peak_bytes = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        loop = trainer.fit_loop
        advance = loop.advance

        def measuring() -> None:
            _, peak = measured(advance)
            self.peak_bytes = max(self.peak_bytes, peak + parameter_bytes(pl_module))

        loop.advance = measuring


def rows(num: int, size: int = 128) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(size, 32, generator=generator),) for _ in range(num)]


def run(folder: Path, module: Any, *callbacks: Any, batches: Any = None, resume: Any = None, **options: Any) -> Any:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(3)
    trainer = lightning.Trainer(
        **{
            "max_steps": 5,
            "accelerator": "cpu",
            "default_root_dir": folder,
            "callbacks": list(callbacks),
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            **options,
        }
    )
    loaders = [DataLoader(each, batch_size=None) for each in (rows(6) if batches is None else batches, rows(1))]
    trainer.fit(module, *loaders, ckpt_path=resume)
    return trainer


@pytest.mark.parametrize("precision", sweep(["32-true", "bf16-mixed"], keep=1))
def test_five_steps_save_and_resume(tmp_path: Path, precision: str) -> None:
    meter, options = Measures(), {"precision": precision, "accumulate_grad_batches": 2 if precision == "32-true" else 1}
    plain = Module()
    expected = run(tmp_path, plain, meter, **options)
    callback = lowtide.hosts.lightning.Budget(int(0.8 * meter.peak_bytes), **OPTIONS)
    ours, fitted = Measures(), Module()
    trainer = run(tmp_path, fitted, callback, ours, **options)
    assert plain.losses == fitted.losses and len(fitted.losses) >= 5
    assert_same_weights(weights(plain), weights(fitted))
    assert ours.peak_bytes <= callback.budget < meter.peak_bytes and callback.handle.stats().num_replays > 0
    own = {"lowtide/peak_gib", "lowtide/slowdown"}
    assert trainer.callback_metrics.keys() == expected.callback_metrics.keys() | own
    assert trainer.callback_metrics.get("val") == expected.callback_metrics.get("val")
    assert "forward" not in vars(fitted) and "log" not in vars(fitted)
    assert (tmp_path / "lowtide" / "plan.json").is_file()

    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    expected.save_checkpoint(tmp_path / "plain.ckpt")
    again = lowtide.hosts.lightning.Budget(callback.budget, **OPTIONS)
    modules = Module(), Module()
    run(tmp_path, modules[0], again, resume=tmp_path / "saved.ckpt", **{**options, "max_steps": 7})
    run(tmp_path, modules[1], resume=tmp_path / "plain.ckpt", **{**options, "max_steps": 7})
    assert_same_weights(weights(modules[0]), weights(modules[1]))
    assert [trial.name for trial in again.handle.candidates] == ["kept before"]


def test_larger_batches_are_planned_for_whatever_training_step_calls(tmp_path: Path) -> None:
    batches = [*rows(2, 32), *rows(3, 128)]
    meter, plain = Measures(), Module(calls_forward=False)
    run(tmp_path, plain, meter, batches=batches)
    callback, ours = lowtide.hosts.lightning.Budget(int(0.85 * meter.peak_bytes), **OPTIONS), Measures()
    fitted = Module(calls_forward=False)
    run(tmp_path, fitted, callback, ours, batches=batches)
    assert_same_weights(weights(plain), weights(fitted))
    assert len(callback.handle.stats().replans) == 1 and ours.peak_bytes <= callback.budget
    assert callback.handle.stats().num_replays > 0


class Decorated(Module):
    """A `training_step` behind a decorator, whose index has another name, and which writes to the logger itself."""

    def training_step(self, *args: Any) -> Any:
        batch, position = args
        loss = super().training_step(batch["first"], position)
        self.logger.log_metrics({"position": position})  # type: ignore[union-attr]
        return loss


class Records(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append(metrics)


def test_several_loaders_a_logger_and_a_step_of_any_signature(tmp_path: Path) -> None:
    def trained(*callbacks: Any) -> tuple[Decorated, list[Any]]:
        generators = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
        data = TensorDataset(torch.randn(384, 32, generator=generators[0]))
        loaders = {
            "first": DataLoader(data, batch_size=128, shuffle=True, generator=generators[1]),
            "second": DataLoader(rows(3, 4), batch_size=None),  # type: ignore[arg-type]
        }
        torch.manual_seed(3)
        module, records = Decorated(), Records()
        trainer = lightning.Trainer(
            max_steps=3,
            accelerator="cpu",
            default_root_dir=tmp_path,
            callbacks=list(callbacks),
            logger=records,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(module, loaders)
        return module, [row for row in records.rows if "position" in row]

    plain, expected = trained()
    fitted, written = trained(lowtide.hosts.lightning.Budget("1GiB", **OPTIONS))
    assert plain.losses == fitted.losses and len(plain.losses) == 3
    assert_same_weights(weights(plain), weights(fitted))
    assert written == expected and len(written) == 3


def test_what_cannot_be_planned_for_is_refused_with_what_to_do(tmp_path: Path) -> None:
    module = Module()
    module.automatic_optimization = False
    with pytest.raises(LowtideError, match=r"manual optimization, .* lowtide\.fit\(module"):
        run(tmp_path, module, lowtide.hosts.lightning.Budget("1GiB"))
