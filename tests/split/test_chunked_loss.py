"""A loss in parts against float64: no further from it than the plain step, for every way that losses treat logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.errors import LowtideError
from lowtide.plans import Split
from lowtide.split.chunked_loss import row_ranges
from lowtide.split.lazy_logits import LazyLogits
from lowtide.split.split_forward import splitting

BATCH, LENGTH, WIDTH, WORDS = 3, 13, 32, 97
PATH = "head"

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of logits, labels, weights of words, other logits


class Model(nn.Module):
    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def shifted(z: Tensor, y: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(z.float()[..., :-1, :].contiguous().view(-1, WORDS), y[..., 1:].contiguous().view(-1))


def plain_mean(z: Tensor, y: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(z.view(-1, WORDS), y.view(-1))


LOSSES: dict[str, Loss] = {
    "mean": plain_mean,
    "shifted": shifted,
    "sum over a count": lambda z, y, w, t: F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="sum") / 31,
    "smoothed, weighted, classes second": lambda z, y, w, t: F.cross_entropy(
        z.transpose(1, 2), y, weight=w, label_smoothing=0.1
    ),
    "softcapped": lambda z, y, w, t: plain_mean(torch.tanh(z / 30.0) * 30.0, y, w, t),
    "z-loss": lambda z, y, w, t: plain_mean(z, y, w, t) + 1e-2 * torch.logsumexp(z, (-1,)).square().mean(),
    "distilled": lambda z, y, w, t: (
        F.kl_div(F.log_softmax(z / 2, dim=-1), F.softmax(t / 2, dim=-1), reduction="batchmean") * 4
    ),
    "distilled by hand": lambda z, y, w, t: (t.softmax(-1) * (t.log_softmax(-1) - z.log_softmax(-1))).sum(-1).mean(),
    "gathered": lambda z, y, w, t: (
        -(z.log_softmax(-1).gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1) * (y != -100)).sum() / 31
    ),
    "mean of all": lambda z, y, w, t: (z.softmax(-1) * t).mean(),
    "probabilities": lambda z, y, w, t: F.cross_entropy(z.view(-1, WORDS), t.softmax(-1).view(-1, WORDS)),
    "per token": lambda z, y, w, t: F.cross_entropy(z.view(-1, WORDS), y.view(-1), reduction="none").mean(),
    "negative log-likelihood": lambda z, y, w, t: F.nll_loss(F.log_softmax(z, -1).view(-1, WORDS), y.view(-1)),
    "sequence by sequence": lambda z, y, w, t: torch.stack(
        [F.cross_entropy(one.float(), labels) for one, labels in zip(z, y, strict=True)]
    ).mean(),
    "blocks of tokens": lambda z, y, w, t: (
        sum(
            F.cross_entropy(one.flatten(0, 1), labels.flatten(), reduction="sum")
            for one, labels in zip(z.split(5, 1), y.split(5, 1), strict=True)
        )
        / 31
    ),
    "a temperature for each sequence, and a bias": lambda z, y, w, t: plain_mean(
        z / t[:, :1, :1].exp() + w[None, None], y, w, t
    ),
    "every second token but the first": lambda z, y, w, t: F.cross_entropy(
        z.view(-1, WORDS)[1::2].contiguous()[1:], y.view(-1)[3::2]
    ),
    "some words": lambda z, y, w, t: F.cross_entropy(z[..., 1:90].reshape(-1, 89), y.clamp(max=88).view(-1)),
}


def data(dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator)
    labels[0, 3:6] = -100
    given = (
        torch.randn(BATCH, LENGTH, WIDTH, generator=generator),
        labels,
        torch.rand(WORDS, generator=generator),
        torch.randn(BATCH, LENGTH, WORDS, generator=generator),
    )
    return tuple(each.to(dtype) if each.is_floating_point() else each for each in given)


def step(model: Model, loss: Loss, given: tuple[Tensor, ...], num_parts: int) -> list[Tensor]:
    """The loss and all gradients, of the input too."""
    x = given[0].clone().requires_grad_()
    model.zero_grad()
    with splitting(model, [Split(PATH, num_parts)] if num_parts else []):
        value = loss(model(x), *given[1:])
    value.backward()
    return [value.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]  # type: ignore[list-item]


def distances(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """The largest difference of each tensor from the exact one, over the exact one's largest value."""
    pairs = zip(found, exact, strict=True)
    return [float((one.double() - other).abs().max() / other.abs().max()) for one, other in pairs]


def is_split(model: Model, loss: Loss, given: tuple[Tensor, ...]) -> bool:
    with splitting(model, [Split(PATH, 4)]) as (runner,):
        loss(model(given[0]), *given[1:])
    return runner.num_calls == 1 and runner.num_whole == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_parts_are_as_close_to_float64_as_the_plain_step(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    model, loss = Model(bias=True).to(dtype), LOSSES[name]
    assert is_split(model, loss, data(dtype))
    plain, parts = step(model, loss, data(dtype), 0), step(model, loss, data(dtype), 4)
    assert [each.dtype for each in parts] == [each.dtype for each in plain]
    exact = step(
        model.double(), loss, tuple(each.double() if each.is_floating_point() else each for each in data(dtype)), 0
    )
    few_units = 4 * torch.finfo(dtype).eps
    for own, of_plain in zip(distances(parts, exact), distances(plain, exact), strict=True):
        assert own <= max(1.25 * of_plain, few_units), (own, of_plain)


def test_one_part_is_the_plain_step_to_the_bit() -> None:
    model = Model()
    plain, one = step(model, shifted, data(), 0), step(model, shifted, data(), 1)
    assert all(map(torch.equal, plain, one))


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both but the bias"])
def test_only_what_needs_a_gradient_gets_one(frozen: str) -> None:
    model = Model(bias=True)
    if frozen != "weight":
        model.body.requires_grad_(False)
    if frozen != "hidden":
        model.head.weight.requires_grad_(False)
    x, labels, *rest = data()

    def gradients(num_parts: int) -> list[Tensor | None]:
        model.zero_grad()
        with splitting(model, [Split(PATH, num_parts)]):
            shifted(model(x), labels, *rest).backward()
        return [parameter.grad for parameter in model.parameters()]

    for one, other in zip(gradients(4), gradients(1), strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.allclose(one, other, atol=1e-6)


def test_autocast_of_the_model_and_of_the_loss_are_kept_apart() -> None:
    model, given = Model(), data()

    def gradients(num_parts: int) -> list[Tensor]:
        model.zero_grad()
        with splitting(model, [Split(PATH, num_parts)]):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(given[0])
            assert logits.dtype is torch.bfloat16
            loss = shifted(logits, *given[1:])
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in model.parameters())]  # type: ignore[list-item]

    for one, other in zip(gradients(4), gradients(1), strict=True):
        assert one.dtype == other.dtype and torch.allclose(one, other, rtol=0.02, atol=2e-4)


def test_small_gradients_in_float16_do_not_underflow_before_the_scaler_is_known() -> None:
    model, given = Model().half(), data(torch.float16)

    def scaled(z: Tensor, *rest: Tensor) -> Tensor:
        return (z * 1e-4).mean() * 2.0**14  # the gradient of the mean alone is below float16's smallest number

    plain, parts = step(model, scaled, given, 0), step(model, scaled, given, 4)
    assert float(plain[1].abs().max()) > 0
    assert max(distances(parts, [each.double() for each in plain])) < 0.01


def test_gradients_are_accumulated_and_scaled() -> None:
    model, given = Model(), data()

    def gradients(num_parts: int) -> Tensor:
        model.zero_grad()
        for factor in (0.5, 3.0):
            with splitting(model, [Split(PATH, num_parts)]):
                (factor * shifted(model(given[0]), *given[1:])).backward()
        assert model.head.weight.grad is not None
        return model.head.weight.grad

    assert torch.allclose(gradients(4), gradients(1), atol=1e-6)


def test_tied_weights_get_both_gradients() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(torch.tanh(self.embed(tokens)))

    model, labels = Tied(), data()[1]

    def gradient(num_parts: int) -> Tensor:
        model.zero_grad()
        with splitting(model, [Split(PATH, num_parts)]):
            shifted(model(labels.clamp(min=0)), *data()[1:]).backward()
        assert model.embed.weight.grad is not None
        return model.embed.weight.grad

    assert torch.allclose(gradient(4), gradient(1), atol=1e-6)


def test_a_second_backward_and_a_backward_with_history_are_refused() -> None:
    model, given = Model(), data()
    with splitting(model, [Split(PATH, 4)]):
        loss = shifted(model(given[0]), *given[1:])
        loss.backward(retain_graph=True)
        with pytest.raises(LowtideError, match="a second backward"):
            loss.backward()
        loss = shifted(model(given[0]), *given[1:])
        with pytest.raises(LowtideError, match="create_graph"):
            torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        rows = torch.logsumexp(model(given[0]), -1).mean()
        with pytest.raises(LowtideError, match="create_graph"):
            torch.autograd.grad(rows, list(model.parameters()), create_graph=True)


def test_hidden_states_that_changed_before_the_loss_are_refused() -> None:
    model, given = Model(), data()
    with splitting(model, [Split(PATH, 4)]):
        hidden = torch.tanh(model.body(given[0]))
        logits = model.head(hidden)
        hidden.mul_(2)
        with pytest.raises(LowtideError, match="changed in place"):
            shifted(logits, *given[1:])


def test_two_models_logits_are_compared_in_parts() -> None:
    model, teacher, given = Model(), Model(), data()

    def loss(num_parts: int) -> list[Tensor]:
        model.zero_grad()
        with splitting(model, [Split(PATH, num_parts)]), splitting(teacher, [Split(PATH, num_parts)]):
            other = teacher(given[0]).detach().log_softmax(-1)
            value = F.kl_div(model(given[0]).log_softmax(-1), other, reduction="batchmean", log_target=True)
            assert num_parts == 1 or (isinstance(other, LazyLogits) and not other.is_computed)
        value.backward()
        return [value.detach(), *(parameter.grad for parameter in model.parameters())]  # type: ignore[list-item]

    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(loss(4), loss(1), strict=True))


def test_parts_cover_all_rows_once() -> None:
    for num_rows, num_parts in ((39, 4), (5, 8), (4096, 3), (1, 1)):
        parts = list(row_ranges(num_rows, num_parts))
        assert [row for start, end in parts for row in range(start, end)] == list(range(num_rows))
        assert len(parts) <= num_parts and all(start < end for start, end in parts)
