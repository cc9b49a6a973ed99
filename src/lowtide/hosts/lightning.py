"""`Budget`: a callback for Lightning's `Trainer`.

    lightning.Trainer(callbacks=[lowtide.hosts.lightning.Budget("20GiB")])

When training starts, the callback plans with `lowtide.fit`: from batches of the training data loader, with the module's
`training_step` and the precision of the trainer, and with the optimizer from `configure_optimizers`. Calls of
`self.log` in `training_step`, and loggers, do nothing while the callback plans.

Each batch is looked at before its step (`handle.cover`), so a batch that is larger than those planned for gets a plan,
also if `training_step` calls parts of the module and not its `forward`. Validation runs as without the callback.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from lowtide.errors import LowtideError
from lowtide.hosts import planning

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.loggers.logger import DummyLogger
    from lightning.pytorch.utilities import CombinedLoader
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
except ModuleNotFoundError as error:  # the package of the same classes with the older name
    if error.name is None or not error.name.startswith("lightning"):
        raise
    from pytorch_lightning import Callback
    from pytorch_lightning.loggers.logger import DummyLogger
    from pytorch_lightning.utilities import CombinedLoader
    from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature


class LightningBudget(planning.BudgetCallback, Callback):
    """Trains within `budget` bytes of device memory: parameters, gradients, optimizer state and activations.

    `largest`, `probe`, `host` and the other options are those of `planning.BudgetOptions`. `lowtide/peak_gib` and
    `lowtide/slowdown` are logged. The plan, its report and the file from which a resumed training reads the plan are in
    `<default_root_dir>/lowtide`. Manual optimization is refused, as its `training_step` contains the backwards.
    """

    _step: _TrainingStep | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Plan for the training that starts. Raises `InfeasibleBudgetError` if no plan meets the budget."""
        self._remove_all_plans(pl_module)
        _refuse(trainer, pl_module)
        self._step = _TrainingStep(trainer, pl_module)
        loaders = trainer.train_dataloader
        if isinstance(loaders, dict | list | tuple) or isinstance(loaders, CombinedLoader):
            combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "min_size")
            loaders = _Batches(combined)
        batches = [self._step.prepared(batch) for batch in self.examples.of(loaders)]
        folder = Path(trainer.default_root_dir) / planning.FOLDER
        # Lightning clears gradients between forward and backward, so those of the step before are there in a forward.
        with self._step.without_logging():
            self.fit(pl_module, self._step, batches, trainer.optimizers[0], folder, trainer.world_size, num_backwards=2)
        planning.save(self.handle, folder if trainer.is_global_zero else None, trainer.strategy.root_device)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Plan for the batch, if it is larger than any before."""
        if self._step is not None:
            with self._step.without_logging():
                self.handle.cover(self._step, batch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the metrics of the plan."""
        if self.handle is not None:
            pl_module.log_dict(planning.metrics(self.handle, trainer.strategy.root_device))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Remove the plan from the module."""
        self._remove_plan()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Remove the plan from the module."""
        self._remove_plan()

    def _remove_plan(self) -> None:
        self._step = None
        super()._remove_plan()


Budget = LightningBudget


class _Batches:
    """The batches of a `CombinedLoader`, without the numbers that it returns with them."""

    def __init__(self, loader: Any) -> None:
        self._loader = copy.copy(loader)
        self._loader.flattened = [planning.fresh(each) for each in loader.flattened]

    def __iter__(self) -> Iterator[Any]:
        return (batch for batch, _, _ in self._loader)


class _TrainingStep:
    """The loss of one training step, computed as the trainer does. `hidden_from_replay`: its trainer is not copied."""

    hidden_from_replay = True

    def __init__(self, trainer: Any, module: Any) -> None:
        self._trainer, self._module = trainer, module

    def prepared(self, batch: Any) -> tuple[Any]:
        """The argument of a call: a batch as the training loop passes it to `training_step`."""
        strategy, module = self._trainer.strategy, self._module
        batch = module._on_before_batch_transfer(self._trainer.precision_plugin.convert_input(batch), dataloader_idx=0)
        return (strategy.batch_to_device(batch, dataloader_idx=0),)

    def __call__(self, batch: Any) -> Tensor:
        inputs = (
            (batch, 0) if is_param_in_hook_signature(self._module.training_step, "batch_idx", min_args=2) else (batch,)
        )
        output = self._trainer.strategy.training_step(*inputs)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is None:
            raise LowtideError(
                "training_step returned no loss for the first batch: a plan needs a step with a backward"
            )
        return loss / self._trainer.accumulate_grad_batches

    @contextmanager
    def without_logging(self) -> Iterator[None]:
        """A context in which `self.log`, `self.log_dict` and the loggers of the trainer do nothing."""
        loggers = self._trainer.loggers
        self._trainer.loggers = [DummyLogger() for _ in loggers]
        try:
            with planning.replaced(self._module, log=planning.do_nothing, log_dict=planning.do_nothing):
                yield
        finally:
            self._trainer.loggers = loggers


def _refuse(trainer: Any, module: Any) -> None:
    """Raise, with what to do, if the trainer does something that a plan cannot be made for."""
    if sum(isinstance(callback, LightningBudget) for callback in trainer.callbacks) > 1:
        raise LowtideError("Budget cannot plan for two of these callbacks in one trainer: leave all but one out")
    if not module.automatic_optimization:
        raise LowtideError(
            "Budget cannot plan for manual optimization, whose training_step contains the backwards: call "
            "lowtide.fit(module, loss_fn, batch, budget=..., optimizer=...) for the part that computes the loss"
        )
    name = type(trainer.strategy).__name__
    if "DeepSpeed" in name or "FSDP" in name or "ModelParallel" in name:
        raise LowtideError(
            f"Budget cannot plan for {name}, which shards the module before training starts: make a plan with "
            "lowtide.plan, and call lowtide.apply(module, plan) in configure_model"
        )
