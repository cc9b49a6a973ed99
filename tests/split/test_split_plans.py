"""Plans with splits and regions together, written by hand and applied."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.errors import PlanError
from lowtide.plans import Plan, Recompute, Split

WORDS, WIDTH = 101, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x) + self.mix(x).cumsum(1) / 10)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(ids)))


SPLITS = (Split("head", 3), *(Split(f"blocks.{number}.mlp", 4, "tokens") for number in range(3)))
REGIONS: dict[str, tuple[Recompute, ...]] = {
    "none": (),
    "blocks": tuple(Recompute(f"blocks.{number}") for number in range(3)),
    "the split modules": tuple(Recompute(f"blocks.{number}.mlp") for number in range(3)),
    "a segment": (Recompute("blocks.0", more=(("blocks.1", 0), ("blocks.2", 0))),),
    "a segment that ends with one": (Recompute("blocks.1.mix", more=(("blocks.1.mlp", 0),)),),
    "nested": (Recompute("blocks"), Recompute("blocks.1"), Recompute("blocks.1.mlp")),
}


def step(model: Model, ids: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    state = torch.get_rng_state()
    return [loss.detach(), state, *(each.grad.clone() for each in model.parameters() if each.grad is not None)]


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def batch() -> Tensor:
    return torch.randint(0, WORDS, (2, 20), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", REGIONS)
def test_recomputing_around_and_in_splits_changes_nothing(name: str, model: Model) -> None:
    """Regions are exact: the same splits with and without them give equal gradients, with the same dropout masks."""
    with lowtide.apply(model, Plan(splits=SPLITS)):
        expected = step(model, batch())
    with lowtide.apply(model, Plan(regions=REGIONS[name], splits=SPLITS)) as handle:
        assert all(map(torch.equal, step(model, batch()), expected))
        assert {split.path: split.num_whole for split in handle.stats().splits} == {each.path: 0 for each in SPLITS}
    model.eval()
    plain = step(model, batch())
    with lowtide.apply(model, Plan(regions=REGIONS[name], splits=SPLITS)):
        for one, other in zip(step(model, batch()), plain, strict=True):
            assert torch.allclose(one.double(), other.double(), atol=1e-6)


def test_a_switch_between_forward_and_backward_changes_nothing(model: Model) -> None:
    model.eval()
    ids = batch()
    expected = step(model, ids)[2:]
    with lowtide.apply(model, Plan(regions=REGIONS["blocks"], splits=SPLITS)) as handle:
        model.zero_grad()
        loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        handle.enabled = False
        loss.backward()
    found = [each.grad for each in model.parameters()]
    assert all(
        torch.allclose(one, other, atol=1e-6) for one, other in zip(found, expected, strict=True) if one is not None
    )


def test_copies_and_evaluation(model: Model) -> None:
    with lowtide.apply(model, Plan(splits=SPLITS)):
        copied = copy.deepcopy(model)
        assert type(copied(batch())).__name__ == "LazyLogits"
        with torch.no_grad():
            assert type(model(batch())) is Tensor
    assert type(model(batch())) is Tensor


def test_an_exception_in_a_slice_leaves_the_model_usable(model: Model) -> None:
    model.eval()
    with lowtide.apply(model, Plan(regions=REGIONS["blocks"], splits=SPLITS)):
        expected = step(model, batch())
        down = model.blocks[1].mlp[3]
        hook = down.register_forward_pre_hook(lambda *args: 1 / 0)  # type: ignore[union-attr, operator]
        with pytest.raises(ZeroDivisionError):
            step(model, batch())
        hook.remove()
        assert all(map(torch.equal, step(model, batch()), expected))


def test_heads_that_cannot_be_split_are_refused(model: Model) -> None:
    with pytest.raises(PlanError, match="not a plain"):
        lowtide.apply(model, Plan(splits=(Split("embed", 4),)))
    with pytest.raises(PlanError, match="no such module"):
        lowtide.apply(model, Plan(splits=(Split("tail", 4),)))
