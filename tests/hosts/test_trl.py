"""The callback for transformers' `Trainer` in the trainers of TRL, with padded and packed batches, and with LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from hosts.training import OPTIONS, WORDS, assert_same_weights, measured, parameter_bytes, tiny_llama, weights
from lowtide.errors import LowtideError
from sweeps import sweep

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.usefixtures("quick_fit"), pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL computes the loss in tiles of a size that would be all there is to a tiny model's memory."""
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 32)


def tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<pad>": 0, "<eos>": 1, **{f"w{n}": n for n in range(2, WORDS)}}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def text(length: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " ".join(f"w{n}" for n in torch.randint(2, WORDS, (length,), generator=generator).tolist())


def lora(model: nn.Module) -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )


def measuring(kind: type) -> type:
    """A subclass of a trainer that measures the epoch and notes the losses."""

    class Measuring(kind):  # type: ignore[misc, valid-type]
        peak_bytes = 0

        def _run_epoch(self, **kwargs: Any) -> None:
            _, peak = measured(lambda: super(Measuring, self)._run_epoch(**kwargs))
            self.peak_bytes = peak + parameter_bytes(self.model)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            vars(self).setdefault("losses", []).append(loss.item())
            return loss

    return Measuring


COMMON = {
    "max_steps": 4,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "learning_rate": 1e-2,
    "dataloader_drop_last": True,
}


def sft(folder: Path, *callbacks: Any, model: nn.Module | None = None, **options: Any) -> Any:
    lengths = [8 + 2 * (n // 4) for n in range(32)]  # batches grow
    rows = datasets.Dataset.from_dict({"text": [text(length, n) for n, length in enumerate(lengths)]})
    made = measuring(trl.SFTTrainer)(
        model=tiny_llama() if model is None else model,
        args=trl.SFTConfig(
            str(folder),
            **{**COMMON, "per_device_train_batch_size": 8, "max_length": 32, "shuffle_dataset": False, **options},
        ),
        train_dataset=rows,
        processing_class=tokenizer(),
        callbacks=list(callbacks),
    )
    made._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(made.train_dataset)
    return made


def assert_same_training(plain: Any, fitted: Any) -> None:
    assert plain.losses == fitted.losses
    assert_same_weights(weights(plain.model), weights(fitted.model))
    ours = ("lowtide", "runtime", "per_second", "flos")
    for one, other in zip(plain.state.log_history, fitted.state.log_history, strict=True):
        assert {key: value for key, value in other.items() if not any(word in key for word in ours)} == {
            key: value for key, value in one.items() if not any(word in key for word in ours)
        }


@pytest.mark.parametrize("packing", sweep([False, True], keep=1))
def test_sft(tmp_path: Path, packing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL sets a bound forward on the model and switches gradient checkpointing on; its batches grow."""
    if not packing:  # as on a GPU, where only valid tokens are scored: shapes depend on values
        monkeypatch.setattr("trl.trainer.utils._use_triton", lambda device: True)
    options = {"packing": packing, "packing_strategy": "wrapped", "max_steps": 2 if packing else 4}
    plain = sft(tmp_path, gradient_checkpointing=False, **options)
    plain.train()
    callback = lowtide.hosts.transformers.Budget(int(0.85 * plain.peak_bytes), **OPTIONS)
    fitted = sft(tmp_path, callback, **options)
    assert fitted.args.gradient_checkpointing
    fitted.train()
    assert_same_training(plain, fitted)
    assert fitted.peak_bytes <= callback.budget and callback.handle.stats().num_replays > 0
    assert all(replan.is_new for replan in callback.handle.stats().replans)


def test_sft_with_lora_and_a_frozen_base(tmp_path: Path) -> None:
    """Without `enable_input_require_grads`: TRL calls it for its own checkpointing, and the callback undoes it."""
    plain = sft(tmp_path, model=lora(tiny_llama()), gradient_checkpointing=False, max_steps=3)
    plain.train()
    callback = lowtide.hosts.transformers.Budget(int(0.85 * plain.peak_bytes), probe=3, **OPTIONS)
    fitted = sft(tmp_path, callback, model=lora(tiny_llama()), max_steps=3)
    fitted.train()
    assert_same_training(plain, fitted)
    assert fitted.peak_bytes <= callback.budget and callback.handle.stats().num_replays > 0
    assert not fitted.model.get_input_embeddings()._forward_hooks


def dpo(folder: Path, *callbacks: Any, **options: Any) -> Any:
    rows = [{"prompt": text(4, n), "chosen": text(12, n + 50), "rejected": text(9, n + 90)} for n in range(16)]
    return measuring(trl.DPOTrainer)(
        model=lora(tiny_llama()),
        args=trl.DPOConfig(str(folder), **{**COMMON, "per_device_train_batch_size": 4, **options}),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
        callbacks=list(callbacks),
    )


@pytest.mark.slow  # test_sft trains with the same callback
def test_dpo_with_lora(tmp_path: Path) -> None:
    """The reference is the same model with its adapters off, in the same step, without gradients."""
    plain = dpo(tmp_path, gradient_checkpointing=False)
    plain.train()
    callback = lowtide.hosts.transformers.Budget(int(0.9 * plain.peak_bytes), **OPTIONS)
    fitted = dpo(tmp_path, callback, gradient_checkpointing=False)
    fitted.train()
    assert_same_training(plain, fitted)
    assert fitted.peak_bytes <= callback.budget and callback.handle.stats().num_replays > 0


def test_activation_offloading_is_refused(tmp_path: Path) -> None:
    made = sft(tmp_path, lowtide.hosts.transformers.Budget("1GiB"), gradient_checkpointing=False)
    made.args.activation_offloading = True
    with pytest.raises(LowtideError, match=r"set activation_offloading=False, and Budget\(..., host="):
        made.train()


def test_alora_is_refused(tmp_path: Path) -> None:
    """Its hooks pass offsets to the adapters during the forward only, and a replay runs later."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[5, 6])
    made = sft(
        tmp_path,
        lowtide.hosts.transformers.Budget("1GiB"),
        model=peft.get_peft_model(tiny_llama(), config),
        gradient_checkpointing=False,
    )
    with pytest.raises(LowtideError, match="train a LoRA without alora_invocation_tokens"):
        made.train()
