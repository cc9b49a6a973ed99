"""Where a replay ends: after its last save, by an exception if anything is left to compute."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import lowtide


class Ending(nn.Module):
    """A linear layer and some function of its output; `num_ends` counts how often the forward ran to its end."""

    def __init__(self, end: nn.Module) -> None:
        super().__init__()
        self.first, self.end = nn.Linear(8, 8), end
        self.log = Log()

    def forward(self, x: Tensor) -> Tensor:
        y = self.end(self.first(x))
        self.log.num_ends += 1
        return y


class Log:
    hidden_from_replay = True  # not restored after the replay, so that it counts replays too
    num_ends = 0


def num_ends(layer: Ending, x: Tensor) -> int:
    lowtide.checkpoint(layer, x).sum().backward()
    return layer.log.num_ends


@pytest.mark.parametrize("end", [nn.ReLU(), nn.LayerNorm(8), nn.Softmax(-1)], ids=str)
def test_a_replay_returns_where_its_last_op_saves_results(end: nn.Module) -> None:
    assert num_ends(Ending(end), torch.randn(2, 8, requires_grad=True)) == 2


class Squared(nn.Module):
    """Squares its input in place, so that autograd saves a clone of it, and reshapes it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.pow_(2).flatten(0)


ENDS = [nn.Linear(8, 8), nn.GELU(), nn.Sequential(nn.ReLU(), nn.Flatten(0)), nn.SiLU(inplace=True), Squared()]


@pytest.mark.parametrize("end", ENDS, ids=str)
def test_a_replay_stops_where_an_op_is_left(end: nn.Module) -> None:
    assert num_ends(Ending(end), torch.randn(2, 8, requires_grad=True)) == 1


def test_a_region_whose_last_part_is_another_region_does_not_run_that() -> None:
    inner = Ending(nn.ReLU())
    outer = Ending(nn.Identity())
    x = torch.randn(2, 8, requires_grad=True)
    lowtide.checkpoint(lambda x: lowtide.checkpoint(inner, outer(x)), x).sum().backward()
    assert inner.log.num_ends == 2  # its forward and its own replay, none in the outer one's
    assert outer.log.num_ends == 2


class TwoEnds(nn.Module):
    """Two outputs; the op of the second draws its noise after it has saved the tensor for it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y.sin(), nn.functional.rrelu(y, 0.1, 0.9, training=True)


def gradients_of_two_ends(is_checkpointed: bool) -> list[Tensor]:
    torch.manual_seed(0)
    layer, x = TwoEnds(), torch.randn(4, 8, requires_grad=True)
    first, second = lowtide.checkpoint(layer, x) if is_checkpointed else layer(x)
    return [
        *torch.autograd.grad(first.sum(), x, retain_graph=True),
        *torch.autograd.grad(second.sum(), x),
    ]


def test_a_replay_for_the_first_of_two_outputs_does_not_stop_before_the_second_is_filled() -> None:
    plain, ours = gradients_of_two_ends(False), gradients_of_two_ends(True)
    assert all(map(torch.equal, plain, ours))


def test_a_replay_stops_inside_of_torchscript() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scripting is deprecated
        layer = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)))
    x = torch.randn(2, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    (found,) = torch.autograd.grad(lowtide.checkpoint(layer, x).sum(), x)
    assert torch.equal(found, expected)
