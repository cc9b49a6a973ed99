"""What tests of hosts share: a tiny Llama, token batches, and a measurement of whole epochs with optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import lowtide

WORDS = 48
OPTIONS: dict[str, Any] = {"tune_s": 0, "time_limit_s": 0.5}  # any plan that holds will do


def tiny_llama(num_layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        attention_dropout=0.1,
    )
    return LlamaForCausalLM(config)


def token_rows(num: int, length: int | Callable[[int], int] = 32) -> list[dict[str, Tensor]]:
    """Rows of random tokens with labels; `length` may be a function of the row's number."""
    generator = torch.Generator().manual_seed(1)
    lengths = [length(n) if callable(length) else length for n in range(num)]
    rows = [torch.randint(0, WORDS, (size,), generator=generator) for size in lengths]
    return [{"input_ids": row, "labels": row} for row in rows]


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same_weights(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def parameter_bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[Any], Tensor], batches: list[Any]
) -> tuple[list[float], int]:
    """The losses of a training loop without a host, and its peak with the model's own bytes."""

    def run() -> list[float]:
        torch.manual_seed(1)  # some models drop paths by chance
        losses = []
        for batch in batches:
            loss = loss_of(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    losses, peak = measured(run)
    return losses, peak + parameter_bytes(model)


def measured(function: Callable[[], Any]) -> tuple[Any, int]:
    """What `function` returns, and the peak of what it allocates on the CPU."""
    results: list[Any] = []
    peak = lowtide.measure(lambda: results.append(function()), device="cpu").peak_bytes
    return results[0], peak
