"""Canaries for `_compat/tensors.py`: kinds of tensors, storages, devices and generators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lowtide._compat import tensors


def test_kinds_of_tensors() -> None:
    x = torch.ones(2, 2)
    assert tensors.is_plain(x) and tensors.is_plain(nn.Parameter(x)) and not tensors.is_plain(x.to_sparse())
    assert tensors.is_copyable(x) and not tensors.is_copyable(x[:1].expand(2, 2))
    assert tensors.is_uninitialized(nn.LazyLinear(2).weight) and not tensors.is_sharded(x)
    assert tensors.has_values(x) and not tensors.has_values(x.to("meta"))
    assert tensors.is_own(x) and not tensors.is_own(x[1:]) and not tensors.is_own(torch._efficientzerotensor(2))


def test_storages_are_identified() -> None:
    x, y = torch.ones(4), torch.ones(4)
    assert tensors.storage_id(x) == tensors.storage_id(x[1:]) != tensors.storage_id(y), "UntypedStorage._cdata is no id"
    assert tensors.storages_of(x) == [tensors.storage_id(x)]


def test_views_are_known_without_grad_mode() -> None:
    with torch.no_grad():
        made = torch.ones(2, 3)
        assert tensors.is_view(made.t()) and not tensors.is_view(made), "Tensor._is_view means another thing"


def test_references_follow_the_storage() -> None:
    x = torch.ones(4)
    view, reference = x[1:], tensors.StorageReference(x)
    del x
    assert reference.is_alive(), "UntypedStorage._expired is True while a view is alive"
    assert torch.equal(reference.as_tensor(torch.float32, torch.Size([4]), (1,)), torch.ones(4))
    del view
    assert not reference.is_alive(), "UntypedStorage._weak_ref keeps storages alive: memory is not released"


def test_uses_are_counted() -> None:
    x = torch.ones(4)
    uses = tensors.StorageReference(x)
    assert uses.num_uses() == 1, "_storage_Use_Count counts otherwise: traces hold values for too long"
    view = x[1:]
    assert uses.num_uses() == 2, "_storage_Use_Count counts otherwise: traces hold values for too long"
    del x, view
    assert uses.num_uses() == 0


@pytest.mark.filterwarnings("ignore")  # sparse CSR is in beta
def test_parts_of_wrappers() -> None:
    x = torch.eye(2)
    assert tensors.parts_of(x) == (x,)
    assert len(tensors.parts_of(x.to_sparse())) == 2 and len(tensors.parts_of(x.to_sparse_csr())) == 3
    seen = []
    torch.func.vmap(lambda row: (seen.append(tensors.parts_of(row)), row)[1])(x)
    assert seen[0][0].shape == (2, 2), "functorch's get_unwrapped no longer returns the batch"


def test_modes_are_counted_and_hidden() -> None:
    from lowtide._compat.dispatch import OpNames

    assert tensors.num_dispatch_modes() == 0
    with OpNames():
        assert tensors.num_dispatch_modes() == 1, "_len_torch_dispatch_stack does not count modes"
        with tensors.disable_modes():
            assert tensors.num_dispatch_modes() == 0, "_disable_current_modes leaves modes in force"


def test_a_wrapper_tensor_has_a_shape_and_no_memory() -> None:
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError("not disabled")

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return torch.ones(())

    made = tensors.wrapper_tensor(Wrapper, (2, 3), torch.bfloat16, torch.device("cpu"))
    with tensors.without_torch_function():
        assert (made.shape, made.dtype) == ((2, 3), torch.bfloat16)
        assert float(made.sum()) == 1.0


def test_the_default_device_is_read() -> None:
    assert tensors.default_device() is None
    with torch.device("meta"):
        assert tensors.default_device() == torch.device("meta"), "`with torch.device()` is no DeviceContext any more"


def test_generators_are_identified() -> None:
    one, other = torch.Generator(), torch.Generator()
    assert tensors.generator_id(one) == tensors.generator_id(one) != tensors.generator_id(other), "_cdata is no id"


@pytest.mark.gpu
def test_the_accelerator_has_a_generator() -> None:
    assert tensors.accelerator() is not None
    assert isinstance(tensors.default_generator("cuda", 0), torch.Generator)
