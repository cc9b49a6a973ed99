"""Hugging Face's models as they are: the loss of `labels=` in parts, on real and on fake tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.plans import Split
from lowtide.split.lazy_logits import LazyLogits
from lowtide.split.split_forward import splitting

WORDS, LENGTH = 999, 24


def made(name: str) -> tuple[Any, list[str]]:
    """A small causal language model, and its MLPs."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    try:
        if name == "Llama":
            sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
            config = transformers.LlamaConfig(vocab_size=WORDS, use_cache=False, **sizes)
            return transformers.LlamaForCausalLM(config), [f"model.layers.{i}.mlp" for i in range(2)]
        if name == "Gemma2":
            sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
            more = {"num_key_value_heads": 2, "head_dim": 16, "final_logit_softcapping": 30.0}
            config = transformers.Gemma2Config(vocab_size=WORDS, use_cache=False, **sizes, **more)
            return transformers.Gemma2ForCausalLM(config), [f"model.layers.{i}.mlp" for i in range(2)]
        config = transformers.GPT2Config(
            vocab_size=WORDS, n_embd=32, n_layer=2, n_head=2, use_cache=False, bos_token_id=0, eos_token_id=0
        )
        config.loss_type = "ForCausalLM"
        return transformers.GPT2LMHeadModel(config), [f"transformer.h.{i}.mlp" for i in range(2)]
    except ImportError as error:  # of a package that transformers needs for this model
        pytest.skip(str(error))


def batch() -> Tensor:
    return torch.randint(0, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("more", [{}, {"num_items_in_batch": 31}], ids=["mean", "items"])
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GPT2"])
def test_loss_and_gradients(name: str, more: dict[str, int]) -> None:
    model, mlps = made(name)
    model.eval()  # no dropout; gradients all the same
    ids = batch()
    labels = ids.masked_fill(ids % 7 == 0, -100)

    def step(splits: list[Split]) -> tuple[Any, list[Tensor]]:
        model.zero_grad()
        with splitting(model, splits) as runners:
            out = model(input_ids=ids, labels=labels, **more)
            out.loss.backward()
            assert all(runner.num_calls == 1 and runner.num_whole == 0 for runner in runners)
        return out, [parameter.grad for parameter in model.parameters()]

    plain, expected = step([])
    out, found = step([Split("lm_head", 4), *(Split(path, 3, "tokens") for path in mlps)])
    assert torch.allclose(out.loss, plain.loss, rtol=1e-6)
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).abs().max()) <= 2e-6 * float(other.abs().max())
    assert isinstance(out.logits, LazyLogits) and not out.logits.is_computed
    assert torch.equal(out.logits.argmax(-1), plain.logits.argmax(-1))


def test_real_and_fake_traces_of_a_split_step_are_the_same() -> None:
    model, mlps = made("Llama")

    def loss_fn(ids: Tensor) -> Tensor:
        return model(input_ids=ids, labels=ids).loss  # type: ignore[no-any-return]

    with splitting(model, [Split("lm_head", 4), Split(mlps[0], 3, "tokens")]):
        real = lowtide.trace(model, loss_fn, batch(), mode="real")
        fake = lowtide.trace(model, loss_fn, batch(), mode="fake")
    assert real.fingerprint == fake.fingerprint
    assert real.plain_peak_bytes < lowtide.trace(model, loss_fn, batch()).plain_peak_bytes
