"""Canaries for `_compat/fake_tensors.py`: fake tensors are made, recognised and raise what tracing expects."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from lowtide._compat import dispatch, fake_tensors, tensors


def test_fakes_are_made_and_left() -> None:
    with fake_tensors.fake_mode():
        fake = torch.ones(2) + 1
        with fake_tensors.without_fake_mode():
            real = torch.ones(2)
    assert fake_tensors.is_fake(fake), "FakeTensorMode makes other tensors"
    assert isinstance(fake, fake_tensors.fake_type())
    assert not fake_tensors.is_fake(real), "unset_fake_temporarily no longer makes real tensors"


def test_reading_values_raises_a_known_error() -> None:
    assert len(fake_tensors.fake_errors()) == 4, "an exception of torch._subclasses.fake_tensor is gone"
    with fake_tensors.quiet_fakes(), fake_tensors.fake_mode(), pytest.raises(fake_tensors.fake_errors()):
        torch.ones(2).sum().item()


def test_transformers_takes_fakes_for_real() -> None:
    pytest.importorskip("transformers.utils.import_utils")
    module = sys.modules["transformers.utils.import_utils"]
    if not hasattr(module, "is_fake_tensor"):
        pytest.skip("this version takes no other path for fake tensors")
    with fake_tensors.fake_mode():
        fake = torch.ones(2)
    with fake_tensors.fakes_hidden_from_transformers():
        assert not module.is_fake_tensor(fake)
    assert module.is_fake_tensor(fake)


def test_shapes_that_depend_on_values_have_a_bound() -> None:
    with fake_tensors.largest_shapes():
        mode = fake_tensors.fake_mode()
    with mode:
        x = torch.ones(2, 3, 4, requires_grad=True)
        chosen = x[torch.ones(2, 3) > 0]
        chosen.sum().backward()
    assert chosen.shape == (6, 4), "boolean indices are no longer looked up by nonzero"
    assert x.grad is not None and x.grad.shape == x.shape


def test_a_fake_answers_for_its_device_without_an_op() -> None:
    class Seen(dispatch.UnwrappedDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    with fake_tensors.fake_mode():
        fake = torch.ones(2)
        with Seen():
            own = fake.device
            asked = dispatch.DEVICE_QUERY(fake)
    assert seen == [dispatch.DEVICE_QUERY], "FakeTensor.device is an op now: recorders would ask themselves"
    assert own == asked == torch.device("cpu")


def test_an_alias_of_a_fake_is_made_without_an_op() -> None:
    with fake_tensors.fake_mode():
        fake = torch.ones(2, 3, dtype=torch.complex64).t().requires_grad_()
    assert fake_tensors.FakeAlias.is_possible(fake, fake_tensors.fake_type()), "FakeTensor has other attributes"
    uses = tensors.StorageUses(fake.untyped_storage())
    before = uses.count()
    held = fake_tensors.FakeAlias(fake)
    assert uses.count() == before + 1, "the alias does not hold the storage"
    alias = held.detach()
    assert uses.count() == before + 2 and fake_tensors.is_fake(alias) and not alias.requires_grad
    for name in ("shape", "dtype", "device"):
        assert getattr(alias, name) == getattr(fake, name)
    assert alias.stride() == fake.stride() and (alias + 1).device == fake.device
