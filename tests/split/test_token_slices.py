"""Modules over slices of their tokens: gradients, random numbers, replays around them, and what is not token-wise."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.errors import LowtideError
from lowtide.plans import Split
from lowtide.split.split_forward import SplitForward, splitting
from lowtide.split.token_slices import run_in_slices, values_agree, why_not_row_wise
from sweeps import sweep

WIDTH = 16


class Gated(nn.Module):
    """A Llama-like MLP."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.dropout(self.down(F.silu(self.gate(x)) * self.up(x)))


def tokens(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    shape = shape or (3, 7, WIDTH)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()


def step(module: nn.Module, x: Tensor, num_parts: int) -> list[Tensor]:
    out = run_in_slices(module, module.forward, x, num_parts) if num_parts else module(x)
    weights = torch.linspace(0.5, 1.5, out.numel()).view(out.shape).to(out.dtype)
    wanted = [x, *module.parameters()]
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), wanted)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(3, 7, WIDTH), (20, WIDTH), (2, 2, 5, WIDTH)], ids=str)
def test_slices_are_as_close_to_float64_as_the_plain_module(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = Gated().to(dtype)
    plain, parts = step(module, tokens(*shape, dtype=dtype), 0), step(module, tokens(*shape, dtype=dtype), 4)
    exact = step(module.double(), tokens(*shape, dtype=dtype).detach().double().requires_grad_(), 0)
    for own, whole, true in zip(parts, plain, exact, strict=True):
        assert own.dtype == whole.dtype and own.shape == whole.shape
        most = float((whole.double() - true).abs().max())
        few_units = 4 * torch.finfo(dtype).eps * float(true.abs().max())
        assert float((own.double() - true).abs().max()) <= max(1.25 * most, few_units)


class SharedGradients(nn.Module):
    """Parameters of which several get the same gradient from autograd, or that of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.delta = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))
        self.shift = nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + self.delta) + self.shift


@pytest.mark.parametrize("num_parts", [3, 6], ids=["slices of two rows", "slices of one row"])
def test_gradients_that_share_memory_are_summed_apart(num_parts: int) -> None:
    torch.manual_seed(0)
    module, x, given = SharedGradients().double(), tokens(6, WIDTH, dtype=torch.float64), torch.randn(6, WIDTH).double()
    wanted, kept = [x, *module.parameters()], given.clone()
    whole = torch.autograd.grad(module(x), wanted, given)
    parts = torch.autograd.grad(run_in_slices(module, module.forward, x, num_parts), wanted, given)
    for own, plain in zip(parts, whole, strict=True):
        torch.testing.assert_close(own, plain)
    assert torch.equal(given, kept)


def test_the_backward_uses_the_dropout_masks_of_the_forward() -> None:
    module = Gated(dropout=0.5)
    x = tokens()
    out = run_in_slices(module, module.forward, x, 3)
    (gradient,) = torch.autograd.grad(out.sum(), module.down.bias)
    kept = (out != 0).sum((0, 1)) / (1 - 0.5)  # the bias is added to every output that dropout keeps
    assert torch.allclose(gradient, kept.to(gradient.dtype))
    state = torch.get_rng_state()
    out = run_in_slices(module, module.forward, x, 3)
    drawn = torch.get_rng_state()
    out.sum().backward()
    assert not torch.equal(drawn, state) and torch.equal(torch.get_rng_state(), drawn)


def test_autocast_of_the_forward_is_used_in_the_backward() -> None:
    module, x = Gated(), tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, plain = run_in_slices(module, module.forward, x, 3), module(x)
    assert out.dtype is torch.bfloat16
    wanted = list(module.parameters())
    pairs = zip(torch.autograd.grad(out.sum(), wanted), torch.autograd.grad(plain.sum(), wanted), strict=True)
    assert all(one.dtype == other.dtype and torch.allclose(one, other, rtol=0.05, atol=0.1) for one, other in pairs)


def test_a_recomputed_block_does_not_run_the_slices_again() -> None:
    """The block's replay ends when it has the module's input: each slice runs once forward and once backward."""
    module, x = Gated(), tokens()

    def block(x: Tensor) -> Tensor:
        return x + run_in_slices(module, module.forward, torch.sin(x), 3)

    plain = torch.autograd.grad(block(x).sum(), x)
    calls: list[int] = []
    module.norm.register_forward_hook(lambda *_: calls.append(1))
    found = torch.autograd.grad(lowtide.checkpoint(block, x).sum(), x)
    assert len(calls) == 6
    assert torch.equal(plain[0], found[0])


def test_a_second_backward_is_right_and_a_backward_with_history_is_refused() -> None:
    module, x = Gated(), tokens()
    out = run_in_slices(module, module.forward, x, 3).sum()
    (first,) = torch.autograd.grad(out, x, retain_graph=True)
    (second,) = torch.autograd.grad(out, x, retain_graph=True)
    assert torch.equal(first, second)
    with pytest.raises(LowtideError, match="create_graph"):
        torch.autograd.grad(out, x, create_graph=True)


def test_weights_that_changed_before_the_backward_are_refused() -> None:
    module, x = Gated(), tokens()
    out = run_in_slices(module, module.forward, x, 3).sum()
    with torch.no_grad():
        module.up.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_a_module_is_replayed_in_the_mode_of_its_forward() -> None:
    module, x = Gated(dropout=0.5), tokens()

    def gradient(*, is_switched: bool) -> Tensor:
        module.train()
        torch.manual_seed(0)
        out = run_in_slices(module, module.forward, x, 3).sum()
        module.train(not is_switched)
        (found,) = torch.autograd.grad(out, x)
        assert module.training != is_switched
        return found

    assert torch.equal(gradient(is_switched=True), gradient(is_switched=False))


def test_a_module_is_replayed_with_the_weights_of_a_functional_call() -> None:
    model, x = nn.Sequential(Gated()), tokens().detach()
    given = {name: (2 * each).detach().requires_grad_() for name, each in model.named_parameters()}
    plain = torch.autograd.grad(torch.func.functional_call(model, given, (x,)).square().sum(), list(given.values()))
    with splitting(model, [Split("0", 3, "tokens")]):
        out = torch.func.functional_call(model, given, (x,))
    found = torch.autograd.grad(out.square().sum(), list(given.values()))
    assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in zip(found, plain, strict=True))


class Convolved(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


class Lambda(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("total", torch.zeros(WIDTH))
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def moved(module: Lambda, x: Tensor) -> Tensor:
    module.total.copy_(x[..., 0, :].flatten(0, -2)[0])
    return x


def counted(module: Lambda, x: Tensor) -> Tensor:
    module.total += 1
    return x.sigmoid()


def remembered(module: Lambda, x: Tensor) -> Tensor:
    module.last = x.sigmoid()
    return x.sigmoid()


def listed(module: Lambda, x: Tensor) -> Tensor:
    module.seen.append(x.shape[-2])
    return x.sigmoid()


MIXING = {
    "counts its calls": Lambda(counted),
    "keeps its output": Lambda(remembered),
    "appends to a list": Lambda(listed),
    "attention": Attention(),
    "convolution": Convolved(WIDTH, WIDTH, 3, padding=1),
    "batch norm": nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(WIDTH)),
    "mean over tokens": Lambda(lambda m, x: x - x.mean(-2, keepdim=True)),
    "running sum": Lambda(lambda m, x: x.cumsum(-2)),
    "softmax over tokens": Lambda(lambda m, x: x.softmax(-2)),
    "flipped": Lambda(lambda m, x: x.flip(-2)),
    "the token before": Lambda(lambda m, x: F.pad(x, (0, 0, 1, 0))[..., :-1, :]),
    "positions": Lambda(lambda m, x: x + torch.arange(x.shape[-2], dtype=x.dtype, device=x.device)[:, None]),
    "tokens by tokens": Lambda(lambda m, x: (x @ x.transpose(-1, -2)) @ x),
    "writes a buffer": Lambda(moved),
    "the first token": Lambda(lambda m, x: x * x[..., :1, :]),
    "the norm of all": Lambda(lambda m, x: x / x.norm()),
    "two outputs": Lambda(lambda m, x: (x, x)),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_tokens_is_not_token_wise(name: str) -> None:
    module = MIXING[name]
    before = dict(vars(module))
    assert why_not_row_wise(module, module.forward, tokens().shape, torch.float32)
    assert dict(vars(module)) == before  # the proof leaves no tensor without values behind
    assert not getattr(module, "seen", None)


TOKEN_WISE = {
    "gated": Gated(dropout=0.1),
    "plain": nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH), nn.RMSNorm(WIDTH)),
    "halves": Lambda(lambda m, x: torch.cat([part.sigmoid() for part in x.chunk(2, -1)], -1)),
    "gated linear unit": Lambda(lambda m, x: F.glu(torch.cat([x, x], -1))),
    "heads": Lambda(lambda m, x: x.unflatten(-1, (4, 4)).softmax(-1).flatten(-2)),
    "rms": Lambda(lambda m, x: x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)),
}


@pytest.mark.parametrize("name", TOKEN_WISE)
def test_what_treats_tokens_alike_is_proven_to(name: str) -> None:
    module = TOKEN_WISE[name]
    assert why_not_row_wise(module, module.forward, tokens().shape, torch.float32) == ""
    assert values_agree(module, module.forward, tokens())


WITHOUT_OPS = {  # numbers for Python: no op tells them apart
    "divided by the number of tokens": lambda m, x: x / x.shape[-2],
    "another formula for few tokens": lambda m, x: x.sin() if x.shape[-2] > 8 else x.cos(),
    "another formula for one sequence": lambda m, x: x.sin() if len(x) == 1 else x.cos(),
    "another formula without gradients": lambda m, x: x.sin() if torch.is_grad_enabled() else x.cos(),
}


@pytest.mark.parametrize("name", WITHOUT_OPS)
def test_what_python_decides_by_shapes_and_gradients_is_found(name: str, caplog: pytest.LogCaptureFixture) -> None:
    module, x = Lambda(WITHOUT_OPS[name]), torch.randn(3, 40, WIDTH, requires_grad=True)
    runner = SplitForward(Split("mlp", 24, "tokens"))
    for _ in range(2):
        assert torch.equal(runner.run(module, module.forward, x), module(x))
    assert len(caplog.records) == 1 and "computes something else" in caplog.text


def test_what_the_proof_cannot_see_is_found_on_real_values() -> None:
    module, x = Lambda(lambda m, x: x * 2), tokens()
    forward = functools.partial(lambda module, x: x / x.shape[-2], module)
    assert why_not_row_wise(module, module.forward, x.shape, x.dtype) == ""
    assert not values_agree(module, forward, x) and values_agree(module, module.forward, x)


def test_the_check_on_real_values_takes_no_more_memory_than_a_step_in_slices() -> None:
    """Parts of few rows: all rows that are checked at once are as many as those of many parts."""
    module, x = (
        nn.Sequential(nn.Linear(WIDTH, 64 * WIDTH), nn.ReLU(), nn.Linear(64 * WIDTH, WIDTH)),
        tokens(1, 256, WIDTH),
    )
    runner = SplitForward(Split("mlp", 16, "tokens"))
    first, later = (
        lowtide.measure(lambda: runner.run(module, module.forward, x).sum().backward(), device="cpu").peak_bytes
        for _ in range(2)
    )
    assert first <= later + sum(2 * parameter.nbytes for parameter in module.parameters())


def test_checks_leave_modes_and_random_states_alone() -> None:
    module, x = Gated(dropout=0.5), tokens()
    module.dropout.eval()
    state = torch.get_rng_state()
    runner = SplitForward(Split("mlp", 3, "tokens"))
    runner.run(module, module.forward, x).sum().backward()
    assert module.training and not module.dropout.training
    assert torch.equal(torch.get_rng_state(), state)


def test_a_trace_sees_the_slices_and_not_the_whole() -> None:
    model = nn.Sequential(Gated())
    x = torch.randn(1, 512, WIDTH)
    with splitting(model, [Split("0", 8, "tokens")]):
        graphs = [lowtide.trace(model, lambda x: model(x).sum(), x, mode=mode) for mode in ("real", "fake")]
    plain = lowtide.trace(model, lambda x: model(x).sum(), x)
    for graph in graphs:
        assert graph.plain_peak_bytes < plain.plain_peak_bytes / 2
    assert graphs[0].fingerprint == graphs[1].fingerprint


@pytest.mark.parametrize("mode", sweep(["fake", "real"], keep=1))
def test_a_recomputed_block_drops_the_input_of_its_slices(mode: Any) -> None:
    """The slices' replay in the backward saves views of that input, which must not count as held from the forward."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.mlp = nn.Linear(WIDTH, WIDTH), Gated()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mlp(torch.sin(self.mix(x)))

    model = nn.Sequential(*(Block() for _ in range(4)))
    x = torch.randn(1, 512, WIDTH)
    with splitting(model, [Split(f"{i}.mlp", 8, "tokens") for i in range(4)]):
        graph = lowtide.trace(model, lambda x: model(x).sum(), x, mode=mode)
    for call in (graph.calls[graph.calls_by_path[f"{i}.mlp"][0]] for i in range(4)):
        (given,) = (value for value in call.inputs if graph.values[value].born >= 0)
        assert graph.values[given].dropped <= graph.num_forward
        assert all(save.used > save.read for save in graph.saves if save.value == given and save.call >= 0)


def test_the_proof_inside_of_a_checkpoint_is_not_seen_by_it() -> None:
    module = Gated()
    runner = SplitForward(Split("mlp", 3, "tokens"))
    found = []
    for forward in (module, functools.partial(runner.run, module, module.forward)):
        output = checkpoint(lambda x, forward=forward: forward(x).sin(), tokens(), use_reentrant=False)
        found.append(torch.autograd.grad(output.sum(), list(module.parameters())))
    assert runner.num_calls == 2
    torch.testing.assert_close(found[0], found[1])


class Drawing(nn.Module):
    """Draws real random numbers wherever its input is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.generator = nn.Linear(8, 8), torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand((), generator=self.generator) + random.random() + np.random.rand()
        result: Tensor = self.linear(x) * noise.item()
        return result


def test_the_proof_leaves_random_states_as_they_were() -> None:
    module = Drawing()
    before = module.generator.get_state(), random.getstate(), np.random.get_state()[2]
    why_not_row_wise(module, module.forward, tokens().shape, torch.float32)
    assert torch.equal(module.generator.get_state(), before[0])
    assert (random.getstate(), np.random.get_state()[2]) == before[1:]
