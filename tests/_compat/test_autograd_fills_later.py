"""Every op of torch's own database as the last op of a region: an early stop must not leave its saves unfilled.

A replay stops at the last saved tensor that is needed. Most ops save what they were given, or what they have just
made; an op that saves a tensor first and fills it then (`rrelu_with_noise`) must be let finish. Memory that torch
allocates without filling it is filled with NaN here, so that no recycled memory happens to hold the right values.
"""

from __future__ import annotations

import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import lowtide
from sweeps import sweep

SHARES = 8  # of the database; each is one test


@pytest.fixture
def unfilled_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def ops() -> list[Any]:
    """All of torch's ops with samples of their inputs."""
    # Imported by torch's test helpers, and not used by the database.
    stub = types.ModuleType("expecttest")
    stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules.setdefault("expecttest", stub)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    if sys.modules["expecttest"] is stub:
        del sys.modules["expecttest"]
    return [op for op in op_db if op.supports_autograd and torch.float32 in op.supported_dtypes("cpu")]


def gradients(op: Any, sample: Any, how: str) -> list[Tensor | None]:
    """Those of all inputs of a sample; the op is the last one in its region, and reads what the region computes."""
    leaves, structure = tree_flatten((sample.input, sample.args, sample.kwargs))
    leaves = [
        leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    ]
    inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]

    def region(*leaves: Any) -> Any:
        first, args, kwargs = tree_unflatten(leaves, structure)
        return op(first * 1 if isinstance(first, Tensor) else first, *args, **kwargs)

    torch.manual_seed(0)
    output = region(*leaves) if how == "plain" else lowtide.checkpoint(region, *leaves, early_stop=how == "early")
    outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not outputs or not inputs:
        return []
    torch.manual_seed(1)
    found = torch.autograd.grad(outputs, inputs, list(map(torch.randn_like, outputs)), allow_unused=True)
    return [each if each is None or each.layout is torch.strided else each.to_dense() for each in found]


def is_same(expected: list[Tensor | None], found: list[Tensor | None]) -> bool:
    return len(expected) == len(found) and all(
        one is other if one is None or other is None else torch.equal(one.nan_to_num(), other.nan_to_num())
        for one, other in zip(expected, found, strict=True)
    )


def wrong_ops(ops: list[Any], samples_per_op: int) -> tuple[list[str], int]:
    """Ops whose gradients are not the plain run's, and how many samples were compared."""
    wrong, num_compared = [], 0
    for op in ops:
        torch.manual_seed(0)
        # Not `op.sample_inputs`, which looks through the stack for each sample.
        samples = op.sample_inputs_func(op, "cpu", torch.float32, requires_grad=True)
        for sample in islice(samples, samples_per_op):
            try:
                expected = gradients(op, sample, "plain")
            except RuntimeError:  # no gradient of random numbers for this one
                continue
            for how in ("early", "full"):
                try:
                    is_right = is_same(expected, gradients(op, sample, how))
                except lowtide.CheckpointError as error:  # running statistics that instance_norm was given
                    is_right = "was changed by the region itself" in str(error)
                if not is_right:
                    wrong.append(f"{op.name} {op.variant_test_name} ({how})")
            num_compared += bool(expected)
    return wrong, num_compared


@pytest.mark.filterwarnings("ignore")  # those of the ops themselves
@pytest.mark.parametrize("share", sweep(range(SHARES), keep=1))
def test_an_early_stop_gives_the_gradients_of_a_full_replay(
    ops: list[Any], share: int, unfilled_memory_is_nan: None
) -> None:
    wrong, num_compared = wrong_ops(ops[share::SHARES], samples_per_op=3)
    assert not wrong
    assert num_compared > 1000 / SHARES


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_early_stop_is_right_for_all_samples(ops: list[Any], unfilled_memory_is_nan: None) -> None:
    wrong, _ = wrong_ops(ops, samples_per_op=1000)
    assert not wrong


def test_what_is_saved_before_it_is_filled_is_found(
    monkeypatch: pytest.MonkeyPatch, ops: list[Any], unfilled_memory_is_nan: None
) -> None:
    """The comparison sees an op that is stopped too early."""
    monkeypatch.setattr("lowtide._compat.autograd._FILLS_LATER", frozenset())
    wrong, _ = wrong_ops([op for op in ops if op.name == "nn.functional.rrelu"], samples_per_op=3)
    assert wrong and all("(early)" in each for each in wrong)
