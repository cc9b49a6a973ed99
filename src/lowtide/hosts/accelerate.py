"""`prepare`: accelerate's `Accelerator.prepare`, followed by a plan for the prepared model.

    model, optimizer, loader = lowtide.hosts.accelerate.prepare(accelerator, model, optimizer, loader, budget="20GiB")

The plan is made last, so that it counts what `prepare` adds: the autocast around the model's forward, the outputs in
float32, the wrapper of several processes. The training loop stays as it is, and so does `accelerator.unwrap_model`.
`lowtide.fit` can also be called by itself, before or after `accelerator.prepare`; before it, the plan is for the
model's own precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn

from lowtide.errors import LowtideError
from lowtide.hosts import planning

Loss = Callable[[nn.Module, Any], Tensor]


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable[Any],
    *others: Any,
    budget: int | str,
    loss_fn: Loss | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Return what `accelerator.prepare(model, optimizer, loader, *others)` does, with a plan on the model.

    `loss_fn(model, batch)` computes the loss as the training loop does; by default it is `model(**batch).loss`, or
    `["loss"]` of what the model returns. `options` (`largest`, `probe`, `host` and others) are those of
    `planning.BudgetOptions`. `lowtide.handle_of(model)` is the handle. If the accelerator has a project folder, the
    plan and its report are written to `lowtide` in it, and a later call reads the plan from there.
    """
    planned = planning.BudgetOptions(budget, **options)
    if not isinstance(model, nn.Module) or not callable(loss_fn or _own_loss):
        raise TypeError(
            "prepare() takes the accelerator, a model, its optimizer and a data loader, in this order, and loss_fn=, a "
            f"function of the model and a batch, not a model of type {type(model).__name__} and loss_fn={loss_fn!r:.80}"
        )
    _refuse(accelerator)
    prepared = accelerator.prepare(model, optimizer, loader, *others)
    model, optimizer, loader = prepared[:3]
    step = _LossOf(model, loss_fn or _own_loss)
    found = [send_to_device(batch, accelerator.device) for batch in planned.examples.of(loader)]
    batches = [(batch, *planning.held(batch, 0)) for batch in found]
    folder = None if accelerator.project_dir is None else Path(accelerator.project_dir) / planning.FOLDER
    was_training = model.training
    model.train()
    try:
        num_processes, num_backwards = accelerator.num_processes, accelerator.gradient_accumulation_steps
        handle = planned.fit(model, step, batches, optimizer, folder, num_processes, num_backwards)
    finally:
        model.train(was_training)
    planning.save(handle, folder if accelerator.is_main_process else None, accelerator.device)
    return prepared


class _LossOf:
    """`loss_fn` of the prepared model. `hidden_from_replay`: what it refers to is not copied before a step."""

    hidden_from_replay = True

    def __init__(self, model: nn.Module, loss_fn: Loss) -> None:
        self._model, self._loss_fn = model, loss_fn

    def __call__(self, batch: Any, *ahead: Any) -> Tensor:
        return self._loss_fn(self._model, batch)


def _own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that a model computes itself, as those of transformers do."""
    output = model(**batch) if isinstance(batch, Mapping) else None
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None:
        raise LowtideError(
            f"{type(model).__name__} takes no {type(batch).__name__} as keywords, or returns no loss for it: give "
            "loss_fn=, a function of the model and a batch that returns the loss"
        )
    return loss


def _refuse(accelerator: Accelerator) -> None:
    """Raise, with what to do, if the accelerator does something that a plan cannot be made for."""
    kind, dynamo = accelerator.distributed_type.value, accelerator.state.dynamo_plugin
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
        raise LowtideError(
            f"prepare() cannot plan for {kind}: make a plan with lowtide.plan, and call lowtide.apply(model, plan) "
            "before accelerator.prepare"
        )
    if dynamo is not None and dynamo.backend.value.lower() != "no":
        raise LowtideError(
            "prepare() plans for steps that run eagerly, and this accelerator compiles the model: leave its dynamo "
            "options out, or prepare lowtide.compile(model, budget=...) with accelerator.prepare"
        )
