"""Example batches: which are chosen, and that reading them leaves the data loader and random states alone."""

from __future__ import annotations

import random
import sys
from collections import namedtuple
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

import lowtide
from lowtide.errors import LowtideError
from lowtide.hosts.planning import Examples, accumulating, largest_of, lengthened, mapped, tensors_of


def shuffled(generator: torch.Generator | None = None) -> DataLoader[Any]:
    rows = torch.arange(24).reshape(12, 2)
    return DataLoader(rows, batch_size=4, shuffle=True, generator=generator)  # type: ignore[arg-type]


@pytest.mark.parametrize("generator", [None, torch.Generator().manual_seed(3)], ids=["global", "own"])
def test_the_examples_are_the_batches_that_training_will_see(generator: torch.Generator | None) -> None:
    loader = shuffled(generator)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    (example,) = Examples().of(loader)
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])
    assert torch.equal(next(iter(loader)), example)


class Noisy(Dataset[Any]):
    """A data set that draws from generators of its own, in attributes and inside of a transform."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(1)
        self.transforms = [{"first": SimpleNamespace(random=random.Random(2), old=np.random.RandomState(3))}]

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> list[float]:
        inner = self.transforms[0]["first"]
        return [self.rng.random(), inner.random.random(), inner.old.rand()]


def test_random_generators_of_a_data_set_are_put_back() -> None:
    expected = [torch.stack(batch) for batch in DataLoader(Noisy(), batch_size=4)]
    loader = DataLoader(Noisy(), batch_size=4)
    Examples(probe=2).of(loader)
    assert all(torch.equal(torch.stack(batch), other) for batch, other in zip(loader, expected, strict=True))


@pytest.mark.parametrize("is_iterated", [False, True])
def test_persistent_workers_are_left_to_the_training(is_iterated: bool) -> None:
    """Hosts may have the iterator of the training already, which a second one would reset."""

    def batches(probe: int) -> list[Tensor]:
        torch.manual_seed(0)
        rows: Any = torch.arange(12)
        loader: Any = DataLoader(rows, batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)
        iterator = iter(loader) if is_iterated else None
        if probe:
            Examples(probe=probe).of(loader)
        return list(loader if iterator is None else iterator)

    assert all(torch.equal(one, other) for one, other in zip(batches(0), batches(2), strict=True))


def test_the_largest_batches_are_probed() -> None:
    batches = [{"ids": torch.zeros(shape)} for shape in ((4, 8), (4, 20), (6, 16), (2, 20))]
    chosen = Examples(probe=4).of(batches)
    assert [tuple(batch["ids"].shape) for batch in chosen] == [(6, 16), (4, 20)]
    assert largest_of(batches[:1]) == batches[:1]
    assert Examples(probe=1).of(batches) == batches[:1]


def test_the_largest_batch_is_given_by_a_length_or_made() -> None:
    batch = {"ids": torch.tensor([[1, 2, 3]]), "mask": torch.ones(1, 3), "scale": torch.ones(1), "kind": "text"}
    (longer,) = Examples(largest=7).of([batch])
    assert longer["ids"].tolist() == [[1, 2, 3, 1, 2, 3, 1]] and longer["mask"].shape == (1, 7)
    assert longer["scale"].shape == (1,) and longer["kind"] == "text"
    assert lengthened(batch, 2) is batch
    made = torch.zeros(3)
    assert Examples(largest=lambda: made).of(iter([])) == [made]
    with pytest.raises(LowtideError, match="no tensor of the batch has a second dimension"):
        lengthened(torch.zeros(4), 9)


def test_data_that_can_be_read_only_once_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __init__(self) -> None:
            self.items = iter(range(8))

        def __iter__(self) -> Iterator[int]:
            return self.items

    with pytest.raises(LowtideError, match=r"can be read only once, .* give largest="):
        Examples().of(DataLoader(Stream(), batch_size=2))
    with pytest.raises(LowtideError, match="gave no batch to plan for"):
        Examples().of([])


def test_nested_batches_keep_their_containers() -> None:
    Pair = namedtuple("Pair", "left right")
    batch = Pair([torch.ones(2), 3], {"x": (torch.zeros(1),)})
    doubled = mapped(lambda tensor: tensor * 2, batch)
    assert type(doubled) is Pair and doubled.left[0].tolist() == [2.0, 2.0] and doubled.left[1] == 3
    assert len(tensors_of(batch)) == 2


def test_accumulated_gradients_are_there_for_the_plan_only() -> None:
    model = torch.nn.Linear(2, 2)
    model.bias.grad = torch.ones(2)
    with accumulating(model, 4):
        assert torch.equal(model.weight.grad, torch.zeros(2, 2)) and model.bias.grad.sum() == 2  # type: ignore[arg-type]
    assert model.weight.grad is None and model.bias.grad.sum() == 2
    with accumulating(model, 1):
        assert model.weight.grad is None


def test_a_host_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match=r"lowtide.hosts has accelerate, .* not 'keras'"):
        lowtide.hosts.keras  # noqa: B018


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lowtide.hosts.transformers", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(vars(lowtide.hosts), "transformers", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"needs transformers, .*: pip install transformers"):
        lowtide.hosts.transformers  # noqa: B018
