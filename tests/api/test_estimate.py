"""`lowtide.estimate`: will it fit? Answered without allocating, close to what a real step takes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

import lowtide
from lowtide.api.estimate import Estimate
from sweeps import sweep


def estimate(job: zoo.Job, **options: Any) -> Estimate:
    return lowtide.estimate(job.model, job.loss_fn, *job.batch, **options)


@pytest.mark.usefixtures("quick_search")
def test_against_a_real_step() -> None:
    job = zoo.make("gpt_dropout")
    optimizer = torch.optim.AdamW(job.model.parameters())
    guess = estimate(job, optimizer=optimizer)
    job.step()
    job.model.zero_grad()
    measured = lowtide.measure(job.step, device="cpu")
    there = guess.static_bytes - guess.graph.static_bytes["gradients"]
    assert guess.peak_bytes - there == pytest.approx(measured.peak_bytes, rel=0.01)
    job.model.zero_grad()
    own_bytes = sum(parameter.nbytes for parameter in job.model.parameters())
    counters = 4 * sum(1 for _ in job.model.parameters())
    assert guess.static_bytes == 4 * own_bytes + counters + job.batch[0].nbytes  # parameters, gradients, two moments
    assert guess.static_bytes < guess.floor_bytes < guess.peak_bytes


def test_the_floor_can_be_reached() -> None:
    job = zoo.make("gpt_dropout")
    guess = estimate(job)
    best = guess.peak_bytes
    for regions in ("layers.*", ["layers.*", "layers.*.attention", "layers.*.mlp"]):
        with lowtide.apply(job.model, lowtide.RecomputeAll(), regions=regions):
            job.step()
            job.model.zero_grad()
            peak_bytes = lowtide.measure(job.step, device="cpu").peak_bytes
            job.model.zero_grad()
        best = min(best, peak_bytes + guess.static_bytes - guess.graph.static_bytes["gradients"])
    assert best < guess.peak_bytes
    assert guess.floor_bytes <= 1.03 * best


@pytest.mark.usefixtures("quick_search")
def test_growth_per_sample() -> None:
    def job(samples: int) -> zoo.Job:
        torch.manual_seed(0)
        return zoo.gpt(1, tokens=(samples, 32))

    guess, larger = estimate(job(4)), estimate(job(12))
    assert guess.batch_size == 4 and guess.bytes_per_sample is not None
    assert guess.bytes_per_sample == pytest.approx((larger.peak_bytes - guess.peak_bytes) / 8, rel=0.01)
    peaks = []
    for samples in (4, 12):
        real = job(samples)
        real.step()
        real.model.zero_grad()
        peaks.append(lowtide.measure(real.step, device="cpu").peak_bytes + real.batch[0].nbytes)
    assert guess.bytes_per_sample == pytest.approx((peaks[1] - peaks[0]) / 8, rel=0.01)


def test_no_growth_without_a_batch_size() -> None:
    model = nn.Linear(8, 8)
    two_lengths = lowtide.estimate(model, lambda x, y: model(x).mean() + y.sum(), torch.randn(4, 8), torch.randn(3))
    assert two_lengths.batch_size is None and two_lengths.bytes_per_sample is None
    assert "per sample" not in str(two_lengths)
    rigid = lowtide.estimate(model, lambda x: model(x.view(4, 8)).mean(), torch.randn(4, 8))
    assert rigid.batch_size == 4 and rigid.bytes_per_sample is None
    scalar = lowtide.estimate(model, lambda scale: (model.weight * scale).sum(), torch.tensor(2.0))
    assert scalar.batch_size is None


def test_growth_of_batches_in_dicts() -> None:
    model = nn.Linear(64, 64)
    batch = {"x": torch.randn(4, 64), "y": torch.randn(4, 64)}
    guess = lowtide.estimate(model, lambda b: (model(b["x"]) - b["y"]).square().mean(), batch)
    assert guess.batch_size == 4 and guess.bytes_per_sample is not None
    assert guess.bytes_per_sample >= 3 * 4 * 64


class Wide(nn.Module):
    """Would need 100 GiB and more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1 << 14, 1 << 14) for _ in range(40))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


@pytest.mark.usefixtures("quick_search")
@pytest.mark.parametrize("device", sweep(["H100", None], keep=1))
def test_nothing_is_allocated(device: str | None) -> None:
    with torch.device("meta"):
        model = Wide()
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(1 << 16, 1 << 14)
    guesses: list[Estimate] = []

    def call() -> None:
        guesses.append(
            lowtide.estimate(model, lambda x: model(x).square().mean(), x, optimizer=optimizer, device=device)
        )

    assert lowtide.measure(call, device="cpu").peak_bytes < 1 << 16  # states of random generators
    (guess,) = guesses
    parameters = 40 * 4 * ((1 << 28) + (1 << 14))
    assert guess.graph.static_bytes["parameters"] == parameters > 40 << 30
    assert guess.static_bytes >= 4 * parameters > 160 << 30
    assert guess.peak_bytes > 3 * parameters + 40 * x.nbytes  # what is saved, and the gradients not yet
    assert all(parameter.is_meta and parameter.grad is None for parameter in model.parameters())
    assert not optimizer.state
    if device is not None:
        assert not guess.fits(80 << 30) and "80.0 GiB: a plain step does not fit" in str(guess)


@pytest.mark.usefixtures("quick_search")
def test_it_prints_as_a_table() -> None:
    job = zoo.make("gpt_dropout")
    guess = estimate(job, device="T4")
    text = str(guess)
    lines = text.splitlines()
    assert lines[0] == "predicted, nothing allocated"
    for row in ("plain step", "floor", "static", "parameters", "gradients", "batch", "step time", "per sample", "T4"):
        assert any(line.strip().startswith(row) for line in lines), row
    assert "16.0 GiB: a plain step fits" in text and "(batch of 4)" in text
    assert sum(size for _, size in guess.largest) <= guess.peak_bytes
    assert guess.largest[0][0] in [path for path, _ in job.model.named_modules()] or "outside" in guess.largest[0][0]
    assert [size for _, size in guess.largest] == sorted((size for _, size in guess.largest), reverse=True)
    assert guess.fits(guess.peak_bytes) and not guess.fits(guess.peak_bytes - 1)


def test_the_model_is_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    lowtide.estimate(model, lambda x: model(x).mean(), torch.randn(4, 8))
    lowtide.estimate(model, lambda x: model(x).mean(), torch.zeros(4, 8))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.set_rng_state(state)


def test_a_scripted_part_keeps_its_weights() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scripting is deprecated
        model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))), nn.Linear(8, 1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    lowtide.estimate(model, lambda x: model(x).mean(), torch.randn(4, 8))
    assert {type(value) for value in model.state_dict().values()} == {Tensor}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_which_line_limits_the_step() -> None:
    model = nn.Linear(8, 8)
    guess = lowtide.estimate(model, lambda x: model(x).mean(), torch.randn(4, 8), device="H100")
    assert "without a plan, limited by the host (host " in str(guess)
    guess = lowtide.estimate(model, lambda x: model(x).mean(), torch.randn(4, 8), device="cpu")
    assert "limited by" not in str(guess)


def test_what_trace_refuses() -> None:
    model = nn.Linear(8, 8)
    with pytest.raises(lowtide.TraceError, match="not a scalar"):
        lowtide.estimate(model, model, torch.randn(4, 8))
    with pytest.raises(lowtide.TraceError, match="H1000"):
        lowtide.estimate(model, lambda x: model(x).mean(), torch.randn(4, 8), device="H1000")
