"""Fake traces leave no fake tensors in caches, where real steps would find them."""

from __future__ import annotations

import functools
import gc
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide

_by_width: dict[int, Any] = {}
_tables: list[Tensor] = []
_table: Tensor | None = None


def _made(width: int) -> Tensor:
    return torch.arange(float(width)).cos()


@functools.lru_cache(maxsize=4)
def _cached(width: int) -> dict[str, list[Tensor]]:
    return {"cos": [_made(width), _made(width)]}


class _Of:
    """State of a class and of an object that no module refers to."""

    table: Tensor | None = None

    @functools.cached_property
    def cosines(self) -> Tensor:
        return _made(8)


_of = _Of()


def _nonlocal() -> Callable[[], Tensor]:
    table: Tensor | None = None

    def made() -> Tensor:
        nonlocal table
        if table is None:
            table = _made(8)
        return table

    return made


_kept = _nonlocal()


def _from_dict() -> Tensor:
    if 8 not in _by_width:
        _by_width[8] = (_made(8), "of 8")
    return _by_width[8][0]


def _from_list() -> Tensor:
    if not _tables:
        _tables.append(_made(8))
    return _tables[0]


def _from_variable() -> Tensor:
    global _table
    if _table is None:
        _table = _made(8)
    return _table


def _from_class() -> Tensor:
    if _Of.table is None:
        _Of.table = _made(8)
    return _Of.table


CACHES: dict[str, Callable[[], Tensor]] = {
    "lru_cache": lambda: _cached(8)["cos"][0],
    "dict": _from_dict,
    "list": _from_list,
    "variable": _from_variable,
    "class": _from_class,
    "property": lambda: _of.cosines,
    "closure": _kept,
}


class Scaled(nn.Linear):
    def __init__(self, cache: Callable[[], Tensor]) -> None:
        super().__init__(8, 8)
        self.table_of = cache

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.table_of()


@pytest.mark.parametrize("name", CACHES)
def test_tables_that_a_fake_trace_has_cached_are_made_again(name: str) -> None:
    def table_of() -> Tensor:
        return CACHES[name]()

    model, x = Scaled(table_of), torch.randn(2, 8)
    gc.freeze()  # caches are found all the same
    graph = lowtide.trace(model, lambda x: model(x).square().mean(), x, mode="fake")
    assert not any("still referenced" in note for note in graph.notes)
    assert torch.equal(model(x), nn.functional.linear(x, model.weight, model.bias) * _made(8))


def test_a_trace_that_fails_leaves_no_fakes_in_caches() -> None:
    class Failing(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            if super().forward(x).sum().item() > 0:
                return x
            return super().forward(x)

    model, x = Failing(lambda: _cached(8)["cos"][1]), torch.randn(2, 8)
    _cached.cache_clear()
    with pytest.raises(lowtide.TraceError, match="fake tensors"):
        lowtide.trace(model, lambda x: model(x).sum(), x, mode="fake")
    assert torch.equal(_cached(8)["cos"][1], _made(8))


def test_locals_of_a_step_that_failed_are_cleared_and_those_of_an_error_before_it_are_not() -> None:
    def failing(given: list[int]) -> None:
        raise ValueError(str(given))

    def loss_fn(x: Tensor) -> Tensor:
        y = model(x)
        return y[y > 0].sum()  # of as many values as there are

    model = nn.Linear(8, 8)
    try:
        failing([1])
    except ValueError as error:
        with pytest.raises(lowtide.TraceError) as raised:
            lowtide.trace(model, loss_fn, torch.randn(4, 8), mode="fake")
        (frame,) = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code is failing.__code__]
        assert frame.f_locals == {"given": [1]}
    cause = raised.value.__cause__
    assert cause is not None
    (frame,) = [frame for frame, _ in traceback.walk_tb(cause.__traceback__) if frame.f_code is loss_fn.__code__]
    assert "y" not in frame.f_locals
