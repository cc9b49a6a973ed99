"""`lowtide.estimate` of models whose steps fake tensors do not simply run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.api.estimate import Estimate
from lowtide.simulator import simulate
from sweeps import sweep

Job = tuple[nn.Module, Callable[..., Tensor], tuple[Tensor, ...]]


def mixtral() -> Job:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    model = transformers.MixtralForCausalLM(config)
    ids = torch.randint(0, 64, (2, 16))
    return model, lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss, (ids,)


def t5() -> Job:
    """Asks how many different numbers of end tokens its samples have."""
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=16,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        num_labels=2,
        decoder_start_token_id=0,
    )
    model = transformers.T5ForSequenceClassification(config)
    ids = torch.randint(2, 64, (2, 16))
    ids[:, -1] = config.eos_token_id
    return model, lambda ids, labels: model(input_ids=ids, labels=labels).loss, (ids, torch.tensor([0, 1]))


def whisper() -> Job:
    """Draws a random number for each layer, to skip it or not."""
    transformers = pytest.importorskip("transformers")
    config = transformers.WhisperConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_mel_bins=8,
        max_source_positions=32,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        classifier_proj_size=16,
        num_labels=2,
    )
    model = transformers.WhisperForAudioClassification(config)
    labels = torch.tensor([0, 1])
    return model, lambda x, labels: model(input_features=x, labels=labels).loss, (torch.randn(2, 8, 64), labels)


@pytest.mark.parametrize("make", sweep([whisper, t5, mixtral], keep=1))
@pytest.mark.usefixtures("one_thread", "quick_search")
def test_estimates_are_near_a_real_step(make: Callable[[], Job]) -> None:
    model, loss_fn, batch = make()
    state = torch.get_rng_state()
    guess = lowtide.estimate(model, loss_fn, *batch)
    assert torch.equal(torch.get_rng_state(), state)
    real = lowtide.trace(model, loss_fn, *batch, mode="real")
    assert guess.peak_bytes == pytest.approx(simulate(real).peak_bytes, rel=0.02)
    assert guess.floor_bytes <= guess.peak_bytes
    fell_back = make is t5
    assert any("real steps were run" in note and "unique_consecutive" in note for note in guess.notes) == fell_back
    assert guess.graph.is_measured == fell_back
    assert str(guess).startswith("predicted from real steps" if fell_back else "predicted, nothing allocated")


class Experts(nn.Module):
    """A product for each group of rows, by torch's kernel for that."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 32, 16))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return nn.functional.grouped_mm(x, self.weight, offs=ends)


@pytest.mark.skipif(not hasattr(nn.functional, "grouped_mm"), reason="this torch has no grouped_mm")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products(dtype: torch.dtype) -> None:
    model, x = Experts().to(dtype), torch.randn(64, 32, dtype=dtype)
    ends = torch.tensor([16, 32, 48, 64], dtype=torch.int32)

    def loss_fn(x: Tensor, ends: Tensor) -> Tensor:
        return model(x, ends).square().mean()

    graphs = [lowtide.trace(model, loss_fn, x, ends, mode=mode) for mode in ("fake", "real")]  # type: ignore[arg-type]
    fake, real = ([(op.name, [graph.values[v].bytes for v in op.outputs]) for op in graph.ops] for graph in graphs)
    assert fake == real
    assert sum("grouped_mm" in name for name, _ in fake) == 2  # the input needs no gradient


class Unique(nn.Linear):
    """How much it does depends on numbers that it computes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[: len(x.round().unique())]


def test_where_real_steps_cannot_run() -> None:
    def estimate(where: str, device: str | None = None) -> Estimate:
        model = Unique(8, 8).to(where)
        return lowtide.estimate(model, lambda x: model(x).mean(), torch.randn(4, 8, device=where), device=device)

    assert "real steps were run" in estimate("cpu").notes[-1]
    for where, device, found in [("cpu", "H100", "on cpu and the trace is for H100"), ("meta", None, "on meta")]:
        with pytest.raises(lowtide.TraceError, match=rf"real steps cannot be run instead: .* one is {found}") as raised:
            estimate(where, device)
        assert "\n" not in str(raised.value) and "mode=" not in str(raised.value)


def test_an_error_of_the_step_itself_is_what_is_raised() -> None:
    model = nn.Linear(8, 8)

    def loss_fn(x: Tensor) -> Tensor:
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        lowtide.estimate(model, loss_fn, torch.randn(2, 8))
