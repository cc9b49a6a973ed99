"""`lowtide.compile(split=True)`: the uncompiled output layer and loss in parts, between compiled blocks."""

from __future__ import annotations

import copy
import pickle
import types

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from kernelless import COMPILED_MARKS, PLENTY
from lowtide.errors import LowtideError
from lowtide.split.lazy_logits import LazyLogits
from lowtide.split.split_forward import num_parts

WORDS, WIDTH = 503, 16

pytestmark = COMPILED_MARKS


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch() -> Tensor:
    return torch.randint(0, WORDS, (1, 128), generator=torch.Generator().manual_seed(0))


def step(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    loss = F.cross_entropy(model(batch()).float()[:, :-1].flatten(0, 1), batch()[:, 1:].flatten())
    loss.backward()
    return [loss.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]


def test_the_loss_runs_in_parts_between_compiled_blocks() -> None:
    torch.manual_seed(0)
    model = Model()
    plain = step(model)
    lowtide.compile(model, budget="2MiB", split=True)
    handle = lowtide.handle_of(model)
    for _ in range(2):
        for one, other in zip(step(model), plain, strict=True):
            assert torch.allclose(one, other, atol=1e-6)
    head = handle.split_head
    assert head is not None and head.path == "head" and head.num_calls >= 2
    assert isinstance(model(batch()), LazyLogits)
    handle.enabled = False
    assert type(model(batch())) is Tensor
    handle.enabled = True
    copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert torch.allclose(copied(batch()).argmax(-1), model(batch()).argmax(-1))
    assert type(loaded(batch())) is Tensor
    handle.remove()
    assert "forward" not in vars(model.head) and type(model(batch())) is Tensor


def test_a_forward_around_the_patch_stays_when_the_plan_is_removed() -> None:
    model, calls = Model(), []
    lowtide.compile(model, budget="2MiB", split=True)
    patched = model.head.forward

    def around(self: nn.Module, x: Tensor) -> Tensor:
        calls.append(x.shape)
        return patched(x)

    model.head.forward = types.MethodType(around, model.head)
    lowtide.handle_of(model).remove()
    assert type(model(batch())) is Tensor and len(calls) == 1


def test_a_budget_that_needs_no_split_gets_none() -> None:
    model = Model()
    lowtide.compile(model, budget=PLENTY, split=True)
    assert type(model(batch())) is Tensor
    lowtide.handle_of(model).remove()


def test_a_whole_graph_is_refused() -> None:
    with pytest.raises(LowtideError, match="linear_cross_entropy"):
        lowtide.compile(Model(), budget=PLENTY, split=True, regional=False)
    with pytest.raises(TypeError, match="split is True or False"):
        lowtide.compile(Model(), budget=PLENTY, split=4)  # type: ignore[arg-type]


def test_numbers_of_parts() -> None:
    assert num_parts(16384, 128256, 24 << 30) == 32
    assert num_parts(100, 10**9, 1) == 4  # never fewer than 16 rows in a part
    assert num_parts(1, 10, 1 << 30) == 1
