"""`Budget`: a callback for transformers' `Trainer`, and for the trainers of TRL that are built on it.

    Trainer(model, args, train_dataset=data, callbacks=[lowtide.hosts.transformers.Budget("20GiB")])

When training begins, the callback plans with `lowtide.fit`: from batches of the trainer's own data loader, with the
loss that its `training_step` passes to `accelerator.backward`, and with its optimizer. The plan counts the
optimizer's state before the first step allocates it, and with gradient accumulation also the gradients that later
backwards add to. When training ends, the plan is removed. Evaluation, prediction and `generate()` build no autograd
graph and run as without the callback.

`on_train_begin` runs once more if `auto_find_batch_size` starts over, or if `train()` is called again: the old plan
is removed first. The plan, the report and the file from which a resumed training reads the plan are in
`<output_dir>/lowtide`.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from lowtide.errors import InfeasibleBudgetError, LowtideError
from lowtide.hosts import planning

logger = logging.getLogger("lowtide")


class Budget(planning.BudgetCallback, transformers.TrainerCallback):
    """Trains within `budget` bytes of device memory: parameters, gradients, optimizer state and activations.

    `largest`, `probe`, `host` and the other options are those of `planning.BudgetOptions`. The metrics
    `lowtide/peak_gib` and `lowtide/slowdown` are logged with the losses.

    The model's own gradient checkpointing is switched off, as both at once would recompute everything twice.
    `torch_compile`, `activation_offloading`, DeepSpeed and `nn.DataParallel` are refused.
    """

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Remove the hook that TRL sets on the embeddings for its checkpointing: the next one would hide it."""
        if args.gradient_checkpointing and hasattr(model, "disable_input_require_grads"):
            model.disable_input_require_grads()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Plan for the training that begins. Raises `InfeasibleBudgetError` if no plan meets the budget."""
        trainer = _trainer_of(self)
        self._remove_all_plans(trainer.model)
        _refuse(trainer)
        _take_over_checkpointing(trainer.model)
        handler = trainer.callback_handler
        # First in the list, so that metrics added in `on_log` reach the callbacks that report them. It is a new list,
        # as the handler is going through the old one.
        handler.callbacks = [self, *(callback for callback in handler.callbacks if callback is not self)]
        try:
            self._plan(trainer)
        except InfeasibleBudgetError as error:
            if not args.auto_find_batch_size:
                raise
            # The trainer tries a smaller batch if the message of a RuntimeError has these words.
            raise RuntimeError(f"{error}\nauto_find_batch_size takes this for: CUDA out of memory.") from error

    def _plan(self, trainer: Any) -> None:
        args, folder = trainer.args, Path(trainer.args.output_dir) / planning.FOLDER
        trainer.model_wrapped.train()  # as every training step does
        if callable(getattr(trainer.optimizer, "train", None)):  # likewise: it may change weights, once
            trainer.optimizer.train()
        loaders = trainer.accelerator._dataloaders
        num_loaders = len(loaders)
        examples = self.examples.of(trainer.get_train_dataloader())
        del loaders[num_loaders:]  # the loader that was made for the examples, unless the user's trainer made its own
        step, num_batches = _Step(trainer), args.gradient_accumulation_steps
        batches = [step.prepared(batch) for batch in examples]
        with step.unchanged_trainer():
            self.fit(trainer.model, step, batches, trainer.optimizer, folder, args.world_size, num_batches)
        try:
            # Those of one update are held until those of the next have been read.
            planning.check_reading(self.handle, batches[0][0], 2 * num_batches)
        except InfeasibleBudgetError:
            self._remove_plan()
            raise
        planning.save(self.handle, folder if trainer.is_world_process_zero() else None, args.device)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add the metrics of the plan to those of training steps."""
        if self.handle is None or self.handle.is_removed or logs is None or "loss" not in logs:
            return
        own = planning.metrics(self.handle, args.device)
        logs.update(own)
        if state.log_history:  # a copy of the logs, made before this call
            state.log_history[-1].update(own)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the plan from the model."""
        self._remove_plan()


class _Step:
    """The loss of one training step, computed as the trainer does. `hidden_from_replay`: its trainer is not copied."""

    hidden_from_replay = True

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._before: list[tuple[Any, Any]] = []  # what the trainer's attributes contained, while planning

    def prepared(self, batch: Any) -> tuple[Any, ...]:
        """The arguments of a call: a batch, the number of items that the loss is divided by, and the batches ahead.

        The trainer reads all batches of an update before the first of them is used, and they are on the device.
        """
        trainer = self._trainer
        (batch,), num_items = trainer.get_batch_samples(iter([batch]), 1, trainer.args.device)
        batch = trainer._prepare_inputs(batch)
        return batch, num_items, *planning.held(batch, trainer.args.gradient_accumulation_steps - 1)

    def __call__(self, batch: Any, num_items: Tensor | int | None, *ahead: Any) -> Tensor:
        trainer, losses = self._trainer, []
        self._put_trainer_back()  # the step before may have run on fake tensors
        with planning.replaced(trainer.accelerator, backward=lambda loss, **_: losses.append(loss)):
            # A copy: trainers take the labels out of the batch, and add options to it.
            trainer.training_step(trainer.model_wrapped, dict(batch), num_items)
        if len(losses) != 1:
            raise LowtideError(
                f"Budget plans for one accelerator.backward(loss) in a training step, and training_step of "
                f"{type(trainer).__name__} calls it {len(losses)} times: compute the loss in compute_loss, or leave "
                "this callback out and call lowtide.fit(model, loss_fn, batch, budget=...) for the largest loss"
            )
        return losses[0]

    @contextmanager
    def unchanged_trainer(self) -> Iterator[None]:
        """A context after which the attributes of the trainer and its state, such as TRL's metrics, are as before.

        Numbers, tensors, and what dicts and lists contain are put back; `trainer.log` does nothing meanwhile.
        """
        trainer = self._trainer
        attributes, num_steps = vars(trainer), trainer.args.gradient_accumulation_steps
        data = {id(attributes.get(name)) for name in ("train_dataset", "eval_dataset")}
        # The trainer itself sets that number in each update.
        with planning.replaced(trainer, log=planning.do_nothing, current_gradient_accumulation_steps=num_steps):
            self._before = _contents([attributes, vars(trainer.state)], data)
            try:
                yield
            finally:
                self._put_trainer_back()
                self._before = []

    def _put_trainer_back(self) -> None:
        for container, content in self._before:
            _put_back(container, content)


def _contents(roots: list[Any], skipped: set[int]) -> list[tuple[Any, Any]]:
    """The dicts, lists and tensors in `roots` and in each other, each with what it contains."""
    found: dict[int, tuple[Any, Any]] = {}
    todo = list(roots)
    while todo:
        item = todo.pop()
        if id(item) in found or id(item) in skipped or not isinstance(item, dict | list | Tensor):
            continue
        if isinstance(item, Tensor):
            found[id(item)] = item, item.detach().to("cpu", copy=True)
            continue
        found[id(item)] = item, copy.copy(item)
        todo.extend(item.values() if isinstance(item, dict) else item)
    return list(found.values())


def _put_back(container: Any, content: Any) -> None:
    """Give a dict, list or tensor its content back, in place, as callbacks may refer to it."""
    if isinstance(container, dict):
        container.clear()
        container.update(content)
    elif isinstance(container, list):
        container[:] = content
    elif not torch.equal(container.detach().cpu(), content):
        container.detach().copy_(content)


def _trainer_of(callback: transformers.TrainerCallback) -> Any:
    """The trainer that is calling `callback`: it passes its model and loader on, and not itself, which has the loss."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, transformers.Trainer) and callback in caller.callback_handler.callbacks:
            return caller
        frame = frame.f_back
    raise LowtideError(
        "Budget plans when a transformers.Trainer calls it, and no Trainer does: for a loop of your own, call "
        "lowtide.fit(model, loss_fn, batch, budget=..., optimizer=...)"
    )


def _refuse(trainer: Any) -> None:
    """Raise, with what to do, if the trainer does something that a plan cannot be made for."""
    args, cure = trainer.args, ""
    if sum(isinstance(callback, Budget) for callback in trainer.callback_handler.callbacks) > 1:
        cure = "two of these callbacks in one trainer: leave all but one out (trainer.remove_callback)"
    elif args.torch_compile:
        cure = "torch_compile=True: leave it off, or train lowtide.compile(model, budget=...) without this callback"
    elif getattr(args, "activation_offloading", False):
        cure = (
            "activation_offloading=True moves activations a second time: set activation_offloading=False, and "
            'Budget(..., host="64GiB") to let the plan offload'
        )
    elif trainer.is_deepspeed_enabled:
        cure = "DeepSpeed: plan with lowtide.plan, and call lowtide.apply(model, plan) before the Trainer is made"
    elif isinstance(trainer.model_wrapped, nn.DataParallel):
        cure = (
            "nn.DataParallel, which copies the model for every step: start one process per device (torchrun or "
            "accelerate launch), or make one device visible (CUDA_VISIBLE_DEVICES=0)"
        )
    elif type(trainer)._prepare_inputs is not transformers.Trainer._prepare_inputs:
        cure = (
            f"{type(trainer).__name__}, which makes its batches itself while training: call lowtide.fit(model, "
            "loss_fn, batch, budget=...) with a batch of its largest size before"
        )
    elif any(getattr(config, "alora_invocation_tokens", None) for config in _adapters(trainer.model)):
        cure = (
            "aLoRA, whose hooks are gone when a region is recomputed in the backward: train a LoRA without "
            "alora_invocation_tokens, or leave this callback out"
        )
    if cure:
        raise LowtideError(f"Budget cannot plan for {cure}")


def _adapters(model: Any) -> list[Any]:
    """The configs of PEFT's adapters on a model."""
    configs = getattr(model, "peft_config", None)
    return list(configs.values()) if isinstance(configs, dict) else []


def _take_over_checkpointing(model: Any) -> None:
    """Switch the model's own gradient checkpointing off, and the hook by which it makes embeddings need gradients."""
    if not any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules()):
        return
    # The second name is that of transformers before 5.23.
    (getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable)()
    if hasattr(model, "disable_input_require_grads"):
        model.disable_input_require_grads()
    logger.warning(
        "gradient_checkpointing=True is taken over: the plan decides what is recomputed, and the model's own "
        "checkpointing is off while it trains. Set gradient_checkpointing=False to train without this message."
    )
