"""Canaries for `_compat/fake_tensors.py`: fake tensors are made, recognised and raise what tracing expects.

Outputs that `FakeKernels` makes from memory are those of torch's fake kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

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
    class Seen(dispatch.DispatchMode):
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
    uses = tensors.StorageReference(fake)
    before = uses.num_uses()
    held = fake_tensors.FakeAlias(fake)
    assert uses.num_uses() == before + 1, "the alias does not hold the storage"
    alias = held.detach()
    assert uses.num_uses() == before + 2 and fake_tensors.is_fake(alias) and not alias.requires_grad
    for name in ("shape", "dtype", "device"):
        assert getattr(alias, name) == getattr(fake, name)
    assert alias.stride() == fake.stride() and (alias + 1).device == fake.device


aten = torch.ops.aten


def facts(out: Any, given: list[Tensor]) -> Any:
    """All that can be told of an op's output."""
    if not isinstance(out, Tensor):
        return [facts(each, given) for each in out] if isinstance(out, list | tuple) else out
    sources = [tensors.storage_id(out) == tensors.storage_id(tensor) for tensor in given]
    size = out.untyped_storage().nbytes()
    return out.shape, out.stride(), out.storage_offset(), out.dtype, out.device, size, sources, out.requires_grad


class Counting(fake_tensors.FakeKernels):
    """Counts the ops that torch's fake kernels had to run."""

    def __init__(self) -> None:
        super().__init__()
        self.num_run = 0

    def run(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        counting = self

        class Seen(dispatch.DispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                counting.num_run += func is op
                return func(*args, **(kwargs or {}))

        with Seen():
            return self(op, args, kwargs)


CALLS: dict[str, tuple[Any, Callable[..., tuple[Any, ...]]]] = {
    "one output": (aten.mm.default, lambda x, y: (x, y.t())),
    "a view": (aten.select.int, lambda x, y: (x, 0, 1)),
    "views": (aten.split.Tensor, lambda x, y: (x, 2)),
    "a view that its schema does not declare": (aten._unsafe_view.default, lambda x, y: (x, [12])),
    "several outputs": (aten.native_layer_norm.default, lambda x, y: (x, [4], None, None, 1e-5)),
    "a list of tensors": (aten.cat.default, lambda x, y: ([x, y], 1)),
    "an output that is dropped": (
        aten.native_layer_norm_backward.default,
        lambda x, y: (x, y, [4], x[:, :1], y[:, :1], None, None, [True, False, False]),
    ),
    "strides of its own": (aten.empty_like.default, lambda x, y: (x.t(),)),
    "another dtype": (aten._to_copy.default, lambda x, y: (x,)),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_remembered_is_what_the_kernel_gives(name: str) -> None:
    op, arguments = CALLS[name]
    run = Counting()
    with fake_tensors.fake_mode():
        x, y = torch.ones(3, 4), torch.ones(3, 4, requires_grad=True)
        with torch._C._AutoDispatchBelowAutograd():
            for _ in range(2):
                args = arguments(x, y)
                given = [each for each in [*args, x, y] if isinstance(each, Tensor)]
                kwargs = {"dtype": torch.float64} if op is aten._to_copy.default else {}
                assert facts(run.run(op, *args, **kwargs), given) == facts(op(*args, **kwargs), given)
    assert run.num_run == 1, "the second call ran the kernel again"


def test_what_looks_different_is_not_taken_for_the_same() -> None:
    run = Counting()
    with fake_tensors.fake_mode():
        x = torch.ones(3, 4)
        assert run.run(aten.mul.Tensor, x.int(), x.int()).dtype == torch.int32
        assert run.run(aten.mul.Tensor, x, x.int()).dtype == torch.float32
        assert [run.run(aten.mul.Scalar, x.int(), number).dtype for number in (2, 2.0, True)] == [
            torch.int32,
            torch.float32,
            torch.int32,
        ]
        assert run.run(aten.clone.default, x.t()).stride() == (1, 4)
        assert run.run(aten.clone.default, x.t(), memory_format=torch.contiguous_format).stride() == (3, 1)
        assert run.run(aten.sum.dim_IntList, x, [0]).shape == (4,)
        assert run.run(aten.sum.dim_IntList, x, [0], True).shape == (1, 4)
        torch.set_default_dtype(torch.float64)
        try:
            assert run.run(aten.div.Tensor, x.int(), x.int()).dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        assert run.run(aten.div.Tensor, x.int(), x.int()).dtype == torch.float32


def test_what_depends_on_more_than_metadata_always_runs() -> None:
    run = Counting()
    with fake_tensors.fake_mode():
        x = torch.ones(3, 4)
        for _ in range(2):
            assert run.run(aten.add_.Tensor, x, 1) is x
        assert run.num_run == 2
        z = torch.ones(3, dtype=torch.complex64).conj()
        assert z.is_conj() and run.run(aten.clone.default, z).is_conj() == torch.clone(z).is_conj()
        for _ in range(2):
            run.run(aten.mul.Tensor, z, z)
            run.run(aten.randn.default, [3])
        assert run.num_run == 7
    assert not fake_tensors.is_fake(run.run(aten.neg.default, torch.ones(2)))


def test_tensors_of_another_mode_are_not_mixed_in() -> None:
    run = fake_tensors.FakeKernels()
    made = []
    for _ in range(2):
        with fake_tensors.fake_mode() as mode:
            out: Any = run(aten.neg.default, (torch.ones(2),), {})
            assert out.fake_mode is mode
            made.append(out + 1)


def test_little_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_tensors.FakeKernels, "_MOST", 2)
    run = fake_tensors.FakeKernels()
    with fake_tensors.fake_mode():
        for number in range(5):
            run(aten.neg.default, (torch.ones(number),), {})
    assert len(run._known) == 1


def test_grouped_mm_is_traced_in_float() -> None:
    op = torch.ops.aten._grouped_mm.default
    with fake_tensors.fake_mode():
        a, b = torch.ones(8, 16), torch.ones(2, 16, 32)
        out = fake_tensors.FakeKernels()(op, (a, b), {"offs": torch.ones(2, dtype=torch.int32)})
    assert out.shape == (8, 32), "_create_grouped_mm_output_tensor returns another shape"


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripts_run_op_by_op() -> None:
    def shifted(x: Tensor) -> Tensor:
        return torch.relu(x) + 1

    scripted = torch.jit.script(shifted)
    for _ in range(3):
        scripted(torch.ones(2))
    assert scripted.get_debug_state().execution_plans, "TorchScript has not optimised a function after three runs"
    with fake_tensors.fake_mode(), fake_tensors.scripts_run_op_by_op():
        assert fake_tensors.is_fake(scripted(torch.ones(2))), "ScriptFunction.__call__ cannot be replaced"
    with pytest.raises(RuntimeError):  # optimised code was dropped, and not made again
        scripted.get_debug_state()
    assert scripted(torch.ones(2)).tolist() == [2.0, 2.0]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_fused_scripts_do_not_read_fake_memory() -> None:
    def shifted(x: Tensor) -> Tensor:
        return torch.relu(x * 2) + 1

    scripted, x = torch.jit.script(shifted), torch.ones(1024, device="cuda")
    for _ in range(4):
        scripted(x)
    with fake_tensors.fake_mode() as mode, fake_tensors.scripts_run_op_by_op():
        for _ in range(4):
            scripted(mode.from_tensor(x))
    torch.cuda.synchronize()
    assert torch.equal(scripted(x), torch.full_like(x, 3.0))


def test_nested_tensors_that_were_in_a_step_can_be_fake() -> None:
    nested = torch.nested.nested_tensor([torch.ones(length, 4) for length in (2, 3)], layout=torch.jagged)
    torch.nn.Linear(4, 2)(nested).values().sum().backward()
    mode = fake_tensors.fake_mode()
    fake_tensors.allow_nested(mode)
    with mode:
        assert (mode.from_tensor(nested) * 2).values().shape == (5, 4)
        assert mode.from_tensor(torch.ones(3, 4)).shape == (3, 4)
