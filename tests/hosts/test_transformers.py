"""The callback for transformers' `Trainer`, run by the real one on a tiny model."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from hosts.training import OPTIONS, assert_same_weights, measured, parameter_bytes, tiny_llama, token_rows, weights
from lowtide.errors import LowtideError, UnitError
from sweeps import sweep

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("quick_fit")


class MeasuredTrainer(transformers.Trainer):
    """Notes the loss of every step, and the peak of an epoch: of all that comes after `on_train_begin`."""

    peak_bytes = 0
    wanted = True

    def _run_epoch(self, **kwargs: Any) -> None:
        if not self.wanted:
            return super()._run_epoch(**kwargs)
        _, peak = measured(lambda: super(MeasuredTrainer, self)._run_epoch(**kwargs))
        self.peak_bytes = max(self.peak_bytes, peak + parameter_bytes(self.model))

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        vars(self).setdefault("losses", []).append(loss)
        return loss


def trainer(
    folder: Path,
    *callbacks: Any,
    rows: Any = None,
    model: nn.Module | None = None,
    kind: type[MeasuredTrainer] = MeasuredTrainer,
    **options: Any,
) -> Any:
    arguments = transformers.TrainingArguments(
        str(folder),
        **{
            "per_device_train_batch_size": 8,
            "max_steps": 5,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "learning_rate": 1e-2,
            **options,
        },
    )
    rows = token_rows(48) if rows is None else rows
    model = tiny_llama() if model is None else model
    return kind(model, arguments, train_dataset=rows, eval_dataset=rows[:4], callbacks=list(callbacks))


def budget_for(plain: Any) -> lowtide.hosts.transformers.Budget:
    return lowtide.hosts.transformers.Budget(int(0.8 * plain.peak_bytes), **OPTIONS)


def assert_same_training(plain: Any, other: Any) -> None:
    assert [loss.item() for loss in plain.losses] == [loss.item() for loss in other.losses]
    assert_same_weights(weights(plain.model), weights(other.model))


def test_five_steps_save_evaluate_and_resume(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 2}
    plain = trainer(tmp_path / "plain", **options)
    plain.train()
    callback = budget_for(plain)
    fitted = trainer(tmp_path / "fitted", callback, **options)
    fitted.train()
    assert_same_training(plain, fitted)
    assert not callback.handle.plan.is_plain and callback.handle.stats().num_replays > 0
    assert fitted.peak_bytes <= callback.budget < plain.peak_bytes
    assert callback.handle.stats().replans == ()

    logged = [row for row in fitted.state.log_history if "loss" in row]
    assert logged[-1]["lowtide/peak_gib"] == pytest.approx(callback.handle.measured_peak_bytes / 2**30)
    assert all("lowtide/slowdown" in row for row in logged) and len(logged) == 5
    evaluated = [[row["eval_loss"] for row in each.state.log_history if "eval_loss" in row] for each in (plain, fitted)]
    assert evaluated[0] == evaluated[1] and len(evaluated[0]) == 3
    written = sorted(path.name for path in (tmp_path / "fitted" / "lowtide").iterdir())
    assert written == ["fit.json", "plan.json", "report.html"]

    # The plan is off again, and a resumed training reads it from the folder.
    assert "forward" not in vars(fitted.model) and fitted.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
    again = lowtide.hosts.transformers.Budget(callback.budget, **OPTIONS)
    resumed = trainer(tmp_path / "fitted", again, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "fitted" / "checkpoint-3"))
    assert [trial.name for trial in again.handle.candidates] == ["kept before"]
    assert_same_weights(weights(plain.model), weights(resumed.model))


def test_accumulation_label_smoothing_autocast_and_generation(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1, "bf16": True, "max_steps": 3}

    class Generates(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            model.eval()
            texts.append(model.generate(torch.ones(1, 2, dtype=torch.long), max_new_tokens=3, do_sample=False))
            model.train()

    texts: list[Tensor] = []
    plain = trainer(tmp_path, Generates(), **options)
    plain.train()
    callback = budget_for(plain)
    fitted = trainer(tmp_path, callback, Generates(), **options)
    fitted.train()
    assert_same_training(plain, fitted)
    assert fitted.peak_bytes <= callback.budget and callback.handle.stats().num_replays > 0
    assert len(texts) == 6 and all(torch.equal(one, other) for one, other in zip(texts[:3], texts[3:], strict=True))


@pytest.mark.slow  # TRL's tests take it over too
def test_gradient_checkpointing_is_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = trainer(tmp_path, max_steps=1)
    plain.train()
    fitted = trainer(tmp_path, budget_for(plain), max_steps=1, gradient_checkpointing=True)
    fitted.train()
    assert_same_training(plain, fitted)
    assert not any(getattr(module, "gradient_checkpointing", False) for module in fitted.model.modules())
    assert [record.getMessage() for record in caplog.records if "taken over" in record.getMessage()] != []


@pytest.mark.slow
def test_a_smaller_batch_is_found_for_the_budget(tmp_path: Path) -> None:
    """`auto_find_batch_size` enters the training again, with a new loader and the same callback."""
    with pytest.raises(lowtide.InfeasibleBudgetError) as raised:
        trainer(tmp_path, lowtide.hosts.transformers.Budget(1024, **OPTIONS), max_steps=1).train()
    callback = lowtide.hosts.transformers.Budget(int(0.99 * raised.value.floor_bytes), **OPTIONS)
    found = trainer(tmp_path, callback, max_steps=2, auto_find_batch_size=True)
    found.wanted = False
    found.train()
    assert 4 <= found._train_batch_size < 8 and "forward" not in vars(found.model)


def test_batches_that_grow_are_covered_by_a_probe_or_planned_for(tmp_path: Path) -> None:
    rows = token_rows(32, lambda number: 16 + 2 * (number // 2))

    def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        padded = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
        return {"input_ids": padded, "labels": padded, "attention_mask": (padded > 0).long()}

    def run(*callbacks: Any) -> Any:
        made = trainer(tmp_path, *callbacks, rows=rows, model=tiny_llama(), max_steps=4, per_device_train_batch_size=8)
        made.data_collator, made.wanted = collate, not callbacks
        made._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(rows)
        made.train()
        return made

    plain = run()
    probing = lowtide.hosts.transformers.Budget(int(0.9 * plain.peak_bytes), probe=8, **OPTIONS)
    assert_same_training(plain, run(probing))
    assert probing.handle.stats().replans == ()
    growing = lowtide.hosts.transformers.Budget(probing.budget, **OPTIONS)
    assert_same_training(plain, run(growing))
    replans = growing.handle.stats().replans
    assert 1 <= len(replans) <= 4 and all(replan.is_new for replan in replans)


def vision_model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    return transformers.ViTForImageClassification(transformers.ViTConfig(image_size=64, patch_size=8, **sizes))


def test_the_batches_of_an_update_count(tmp_path: Path) -> None:
    """The trainer reads all of them before the first is used, and holds those before until then."""
    generator = torch.Generator().manual_seed(1)
    rows = [{"pixel_values": torch.randn(3, 64, 64, generator=generator), "labels": n % 2} for n in range(144)]
    batch_bytes = 8 * 3 * 64 * 64 * 4

    def run(accumulation: int, *callbacks: Any) -> Any:
        options = {"max_steps": 2, "gradient_accumulation_steps": accumulation}
        made = trainer(tmp_path, *callbacks, rows=rows, model=vision_model(), **options)
        made.train()
        return made

    plain = run(2)
    callback = lowtide.hosts.transformers.Budget(int(0.9 * plain.peak_bytes), **OPTIONS)
    fitted = run(2, callback)
    assert_same_training(plain, fitted)
    assert callback.handle.plan.graph.static_bytes["batch"] > 3 * batch_bytes  # of this one, and of two read before
    assert fitted.peak_bytes <= callback.budget and callback.handle.stats().num_replays > 0
    callback.budget = 16 * batch_bytes
    with pytest.raises(lowtide.InfeasibleBudgetError, match=r"17 batches of 384(.|\n)*or make gradient_acc") as raised:
        run(8, callback)
    assert raised.value.floor_bytes > 17 * batch_bytes and callback.handle.is_removed


def test_a_plan_that_an_interrupted_training_left_is_replaced(tmp_path: Path) -> None:
    class Interrupts(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    plain = trainer(tmp_path, max_steps=1)
    plain.train()
    first, second, model = budget_for(plain), budget_for(plain), tiny_llama()
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, first, Interrupts(), model=model, max_steps=1).train()
    assert not first.handle.is_removed
    with pytest.raises(LowtideError, match="two of these callbacks in one trainer"):
        trainer(tmp_path, second, first, model=model, max_steps=1).train()
    trainer(tmp_path, second, model=model, max_steps=1).train()
    assert first.handle.is_removed and second.handle.stats().num_replays > 0
    assert "forward" not in vars(model)


def test_a_trainer_with_a_loader_of_its_own(tmp_path: Path) -> None:
    """accelerate does not know the loader, and has none to forget when the examples have been read."""
    own = trainer(tmp_path, lowtide.hosts.transformers.Budget("1GiB", **OPTIONS), max_steps=1)
    batch = {name: torch.stack([row[name] for row in token_rows(8)]) for name in ("input_ids", "labels")}
    own.get_train_dataloader = lambda: [batch]
    own.train()
    assert len(own.losses) == 1


def test_the_attributes_of_a_trainer_are_put_back() -> None:
    metrics = {"train": defaultdict(list, loss=[1.0]), "steps": 3}
    average, nested, args = torch.ones(2), [[1], [2]], SimpleNamespace(gradient_accumulation_steps=1)
    state = SimpleNamespace(log_history=[{"loss": 1.0}])
    own = SimpleNamespace(metrics=metrics, rows=nested, names=["a"], num=7, average=average, state=state, args=args)
    before = dict(vars(own))
    with lowtide.hosts.transformers._Step(own).unchanged_trainer():
        metrics["train"]["loss"].append(2.0)
        metrics["train"]["other"].append(2.0)
        del metrics["steps"]
        nested[0].append(3)
        own.rows, own.num, own.new = None, 8, torch.zeros(1)
        own.state.log_history.append({})
        del own.names
        average.mul_(2)
        own.average = own.average + 1
        own.log({"loss": 2.0})  # type: ignore[attr-defined]
    assert vars(own) == before and metrics == {"train": {"loss": [1.0]}, "steps": 3} and nested == [[1], [2]]
    assert own.average is average and torch.equal(average, torch.ones(2)) and state.log_history == [{"loss": 1.0}]
    assert own.metrics is metrics and isinstance(metrics["train"], defaultdict)


class AddsTwoForwards(MeasuredTrainer):
    """A training step of its own, with a loss that `compute_loss` does not have, and state that it starts with."""

    num_backwards = 1

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = model(**inputs).loss + model(**inputs).loss
        self.scale = loss.detach() if not hasattr(self, "scale") else 0.9 * self.scale + 0.1 * loss.detach()
        self.log({"scale": self.scale.item()})
        for _ in range(self.num_backwards):
            self.accelerator.backward(loss / self.scale, retain_graph=self.num_backwards > 1)
        vars(self).setdefault("losses", []).append(loss.detach())
        return loss.detach()


def test_a_training_step_of_the_users_own(tmp_path: Path) -> None:
    plain = trainer(tmp_path, kind=AddsTwoForwards)
    plain.train()
    callback = budget_for(plain)
    fitted = trainer(tmp_path, callback, kind=AddsTwoForwards)
    fitted.train()
    assert_same_training(plain, fitted)
    assert fitted.peak_bytes <= callback.budget < plain.peak_bytes and callback.handle.stats().num_replays > 0
    logged = [[row["scale"] for row in each.state.log_history if "scale" in row] for each in (plain, fitted)]
    assert logged[0] == logged[1] and len(logged[0]) == 5
    two = trainer(tmp_path, lowtide.hosts.transformers.Budget("1GiB", **OPTIONS), kind=AddsTwoForwards)
    two.num_backwards = 2
    with pytest.raises(LowtideError, match=r"training_step of AddsTwoForwards calls it 2 times: .* compute_loss"):
        two.train()


def test_a_wrong_largest_batch_is_named(tmp_path: Path) -> None:
    for wrong, message in {
        (lambda: None): r"largest= made None, which has no tensor",
        (lambda: {"input_idz": torch.zeros(8, 64)}): r"batch that largest= made: (.|\n)*as the data loader does",
    }.items():
        with pytest.raises(LowtideError, match=message):
            trainer(tmp_path, lowtide.hosts.transformers.Budget("1GiB", largest=wrong, **OPTIONS)).train()
    rows = [{"pixel_values": torch.zeros(3, 64, 64), "labels": 0} for _ in range(8)]
    callback = lowtide.hosts.transformers.Budget("1GiB", largest=8, **OPTIONS)
    with pytest.raises(LowtideError, match=r"fails on a batch lengthened to largest=8: .*\nlargest= is a length that"):
        trainer(tmp_path, callback, rows=rows, model=vision_model()).train()


def test_what_cannot_be_planned_for_is_refused_with_what_to_do(tmp_path: Path) -> None:
    callback = lowtide.hosts.transformers.Budget("1GiB")
    made = trainer(tmp_path, callback)
    made.args.torch_compile = True
    with pytest.raises(LowtideError, match="torch_compile=True: leave it off"):
        made.train()
    with pytest.raises(LowtideError, match=r"no Trainer does: .* lowtide\.fit\("):
        callback.on_train_begin(made.args, made.state, made.control)
    for wrong in ({"largest": True}, {"largest": -1}, {"probe": -1}, {"probe": True}, {"tune_s": -1}):
        with pytest.raises((TypeError, ValueError), match=f"{next(iter(wrong))} is a"):
            lowtide.hosts.transformers.Budget("1GiB", **wrong)
    with pytest.raises(UnitError, match="'lots' is not a number of bytes"):
        lowtide.hosts.transformers.Budget("1GiB", host="lots")
    with pytest.raises(ValueError, match="leave one of them out"):
        lowtide.hosts.transformers.Budget("1GiB", largest=dict, probe=3)


@pytest.mark.parametrize(
    "options", sweep([{}, {"label_smoothing_factor": 0.1}], keep=1), ids=["loss of the model", "of the trainer"]
)
def test_a_loss_in_parts(tmp_path: Path, options: dict[str, float]) -> None:
    def model() -> Any:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=2048, **sizes))

    plain = trainer(tmp_path, model=model(), max_steps=2, **options)
    plain.train()
    callback = lowtide.hosts.transformers.Budget(int(0.6 * plain.peak_bytes), split=True, **OPTIONS)
    fitted = trainer(tmp_path, callback, model=model(), max_steps=2, **options)
    fitted.train()
    (split,) = callback.handle.stats().splits
    assert split.path == "lm_head" and split.num_calls and not split.num_whole
    assert fitted.peak_bytes <= callback.budget < plain.peak_bytes
    assert torch.allclose(torch.stack(fitted.losses), torch.stack(plain.losses), rtol=1e-4)
