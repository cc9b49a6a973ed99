"""The lazy tensor: what it knows without values, and that everything else sees the values of the plain step."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowtide.errors import ChangedInPlaceError, LowtideError
from lowtide.plans import Split
from lowtide.split.lazy_logits import LazyLogits
from lowtide.split.split_forward import splitting


@pytest.fixture
def head() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 11)


HIDDEN = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


def lazy_output(head: nn.Linear, hidden: Tensor = HIDDEN) -> Any:
    with splitting(nn.Sequential(head), [Split("0", 3)]):
        return head(hidden)


def test_shapes_and_types_are_known_without_values(head: nn.Linear) -> None:
    logits = lazy_output(head)
    assert isinstance(logits, LazyLogits) and isinstance(logits, Tensor)
    assert (logits.shape, logits.dtype, logits.device.type, logits.ndim) == ((2, 5, 11), torch.float32, "cpu", 3)
    assert logits.size(-1) == 11 and len(logits) == 2 and logits.numel() == 110 and logits.requires_grad
    assert "not computed" in repr(logits)
    assert logits.double().dtype is torch.float64 and logits[:, :-1].shape == (2, 4, 11)
    assert logits.to(torch.bfloat16).view(10, 11).dtype is torch.bfloat16
    assert logits.new_zeros(3).dtype is torch.float32 and logits.new_tensor([1.0]).shape == (1,)
    assert [each.shape for each in logits] == [(5, 11)] * 2 and [len(each) for each in logits.split(2, 1)] == [2] * 3
    assert [each.shape[1] for each in torch.chunk(logits, 3, dim=1)] == [2, 2, 1]
    assert not logits.is_computed


READS = {
    "argmax": lambda z: z.argmax(-1),
    "mask": lambda z: z[torch.tensor([[True, False, True, True, False]] * 2)],
    "rows by their numbers": lambda z: z[torch.tensor([1, 0])],
    "words by their numbers": lambda z: z[:, :, [2, 1]],
    "a new dimension": lambda z: z[True],
    "some rows, each with a factor of its own": lambda z: (z * HIDDEN[..., :1])[:, 1:],
    "a learned factor": lambda z: (z * torch.ones((), requires_grad=True)).detach(),
    "places that are not zero": lambda z: torch.where(z)[1],
    "sum over tokens": lambda z: z.sum(1),
    "gathered over tokens": lambda z: z.gather(1, torch.tensor([[[4] * 11]] * 2)),
    "bytes": lambda z: z.view(torch.int8),
    "bytes by name": lambda z: z.view(dtype=torch.int8),
    "numpy": lambda z: torch.from_numpy(z.detach().numpy()),
    "topk": lambda z: z.topk(2).values,
    "stack": lambda z: torch.stack([z, z]),
    "mixed dimensions": lambda z: z.view(2, 55),
    "softmax over tokens": lambda z: z.softmax(1),
    "copy": lambda z: copy.deepcopy(z.detach()),
    "einsum": lambda z: torch.einsum("btv,btv->bt", z, z),
    "std": lambda z: z.std(),
}


@pytest.mark.parametrize("name", READS)
def test_anything_else_sees_the_plain_values(name: str, head: nn.Linear) -> None:
    logits = lazy_output(head)
    found = READS[name](logits)
    assert type(found) is Tensor
    assert torch.equal(found, READS[name](head(HIDDEN)))
    assert logits.is_computed or name in ("numpy", "copy")


def test_gradients_flow_through_computed_logits(head: nn.Linear) -> None:
    found = torch.autograd.grad(lazy_output(head).std(), list(head.parameters()))
    assert all(map(torch.equal, found, torch.autograd.grad(head(HIDDEN).std(), list(head.parameters()))))


def test_what_is_changed_in_place_is_seen_by_views_and_not_by_copies(head: nn.Linear) -> None:
    def changed(logits: Tensor) -> list[Tensor]:
        view, copied = logits[:, 1:], logits * 1.0
        logits.div_(2)
        logits[0] = 0.0
        return [logits + 0, view + 0, copied + 0]

    assert all(map(torch.equal, changed(lazy_output(head)), changed(head(HIDDEN))))


def test_autograd_functions_of_others_get_values_and_give_gradients(head: nn.Linear) -> None:
    class Squares(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Tensor) -> Tensor:
            ctx.save_for_backward(logits)
            return (logits * logits).sum()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return 2 * gradient * ctx.saved_tensors[0]

    hidden = HIDDEN.clone().requires_grad_()
    wanted = [hidden, *head.parameters()]
    found = torch.autograd.grad(Squares.apply(lazy_output(head, hidden).float() / 3), wanted)
    plain = torch.autograd.grad(Squares.apply(head(hidden).float() / 3), wanted)
    assert all(torch.allclose(one, other, rtol=1e-5) for one, other in zip(found, plain, strict=True))


def test_reading_the_logits_is_logged_once(head: nn.Linear, caplog: pytest.LogCaptureFixture) -> None:
    with splitting(nn.Sequential(head), [Split("0", 3)]) as (runner,):
        for read in (torch.argmax, torch.argmax, torch.std):
            read(head(HIDDEN), -1)
    assert runner.num_whole == 3
    assert [record.getMessage() for record in caplog.records] == [
        "0 is not run in parts: its output is computed in full, as argmax reads it: that step takes the memory of the "
        "whole output"
    ]


def test_a_loss_and_logits_returned_beside_it_hold_no_cycle(head: nn.Linear) -> None:
    hidden = HIDDEN.clone().requires_grad_()
    reference = weakref.ref(hidden)
    logits = lazy_output(head, hidden)
    loss = F.cross_entropy(logits.view(-1, 11), torch.zeros(10, dtype=torch.long))
    gc.disable()
    try:
        loss.backward()
        del loss, logits, hidden
        assert reference() is None
    finally:
        gc.enable()


def test_without_gradients_the_layer_runs_as_it_is(head: nn.Linear) -> None:
    with torch.no_grad(), splitting(nn.Sequential(head), [Split("0", 3)]):
        assert type(head(HIDDEN)) is Tensor


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_layer_with_backward_hooks_runs_as_it_is(
    kind: str, head: nn.Linear, caplog: pytest.LogCaptureFixture
) -> None:
    hidden = HIDDEN.clone().requires_grad_()

    def gradient(num_parts: int) -> Tensor:
        with splitting(nn.Sequential(head), [Split("0", num_parts)]):
            (found,) = torch.autograd.grad(head(hidden).square().sum(), hidden)
        return found

    plain = gradient(1)
    handle = getattr(head, kind)(lambda module, gradients, *rest: (2 * gradients[0],))  # exact in any kernel
    assert torch.equal(gradient(3), 2 * plain)
    assert "a backward hook is registered on it" in caplog.text
    handle.remove()


def test_gradients_of_logits_are_given_before_a_loss_and_refused_after(head: nn.Linear) -> None:
    def loss_of(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.view(-1, 11), torch.zeros(10, dtype=torch.long))

    logits, plain = lazy_output(head), head(HIDDEN)
    for each in (logits, plain):
        each.retain_grad()
        loss_of(each).backward()
    assert torch.equal(logits.grad, plain.grad)
    for ask in (
        lambda logits, loss: logits.register_hook(print),
        lambda logits, loss: logits.retain_grad(),
        lambda logits, loss: torch.autograd.grad(loss, logits),
    ):
        logits = lazy_output(head)
        loss = loss_of(logits)
        with pytest.raises(LowtideError, match="computed in parts"):
            ask(logits, loss)  # type: ignore[no-untyped-call]


def test_a_metric_without_gradients_computes_none(head: nn.Linear) -> None:
    """Of logits that need a gradient: the loss under no_grad has none and takes no memory for one."""
    logits = lazy_output(head)
    with torch.no_grad():
        metric = F.cross_entropy(logits.view(-1, 11), torch.zeros(10, dtype=torch.long))
    assert not metric.requires_grad and not logits.chain.heads[0].has_loss and not logits.is_computed
    assert torch.allclose(metric, F.cross_entropy(head(HIDDEN).view(-1, 11), torch.zeros(10, dtype=torch.long)))


CHANGED = {
    "added, before the loss": (torch.Tensor.add, lambda z: F.cross_entropy(z.flatten(0, 1), LABELS.flatten()), False),
    "added, before the logits are read": (torch.Tensor.add, lambda z: z.flip(1).sum(), False),
    "multiplied, before the backward": (torch.Tensor.mul, lambda z: z.sum(-1).square().sum(), True),
}
LABELS = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", CHANGED)
def test_other_tensors_that_changed_before_they_were_used_are_refused(name: str, head: nn.Linear) -> None:
    combine, loss, is_later = CHANGED[name]
    other = torch.rand(11)
    logits = combine(lazy_output(head), other)
    value = loss(logits) if is_later else None
    other.zero_()
    with pytest.raises(ChangedInPlaceError, match="changed in place"):
        loss(logits) if value is None else value.backward()


def test_labels_that_changed_before_a_backward_that_needs_them_are_refused(head: nn.Linear) -> None:
    labels, weight = LABELS.clone().flatten(), torch.rand(11)
    for changed in (labels, weight):
        losses = F.cross_entropy(lazy_output(head).flatten(0, 1), labels, weight, reduction="none")
        changed.zero_()
        with pytest.raises(ChangedInPlaceError, match="changed in place"):
            losses.sum().backward()


@pytest.mark.parametrize("name", ["flip", "tanh, flip", "cross-entropy"])
def test_a_checkpoint_that_is_given_lazy_logits(name: str, head: nn.Linear) -> None:
    def loss(logits: Tensor) -> Tensor:
        if name == "cross-entropy":
            return F.cross_entropy(logits.flatten(0, 1), LABELS.flatten())
        return (logits.tanh() if name.startswith("tanh") else logits).flip(1).square().sum()

    found = []
    for make in (head, lambda hidden: lazy_output(head, hidden)):
        head.zero_grad()
        checkpoint(loss, make(HIDDEN) / 2, use_reentrant=False).backward()
        found.append([parameter.grad for parameter in head.parameters()])
    torch.testing.assert_close(found[0], found[1])


def test_a_backward_hook_of_a_module_around_the_layer_gets_the_gradient_of_the_logits(head: nn.Linear) -> None:
    model, seen = nn.Sequential(head), []
    handle = model.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0].clone()))
    for splits in ([], [Split("0", 3)]):
        with splitting(model, splits):
            logits = model(HIDDEN.clone().requires_grad_())
            F.cross_entropy(logits.flatten(0, 1), LABELS.flatten()).backward()
        seen.append(head.weight.grad.clone())  # type: ignore[union-attr]
        head.zero_grad()
    handle.remove()
    plain, plain_weight, split, split_weight = seen
    assert torch.equal(plain, split) and torch.equal(plain_weight, split_weight)
