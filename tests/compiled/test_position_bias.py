"""Hugging Face's T5: blocks return a position bias that later blocks take, in encoder and decoder."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lowtide
from kernelless import (
    COMPILED_MARKS,
    PLENTY,
    assert_equal,
    compiled_plainly,
    floor_of,
    left_behind,
    running,
    session_of,
    squeeze,
)

transformers = pytest.importorskip("transformers")
pytestmark = COMPILED_MARKS


def t5() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config).train()


def loss(model: nn.Module) -> Tensor:
    tokens = torch.arange(2 * 24).reshape(2, 24) % 64
    return model(input_ids=tokens, labels=tokens[:, :8].contiguous(), use_cache=False).loss


@pytest.mark.slow
def test_gradients_are_those_of_the_same_compile_without_a_budget() -> None:
    expected = left_behind(compiled_plainly(t5(), regional=True), loss)
    model = lowtide.compile(t5(), budget=PLENTY)
    for _ in range(2):
        assert_equal(expected, left_behind(model, loss))
    session = session_of(model)
    session._end_step()
    plain_bytes, floor_bytes = session.current.choice.peak_bytes, floor_of(model)
    assert len(session.current.numbers) == 4
    for budget in (max(plain_bytes // 2, floor_bytes), floor_bytes):
        squeeze(model, budget)
        assert_equal(expected, left_behind(model, loss))
        assert session.current.choice.peak_bytes <= budget
    assert any(variant.keeps is not None for variant in running(model))
