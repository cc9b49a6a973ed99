"""Models of many kinds, trained inside budgets: the same training to the last bit, and a measured peak that holds."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import lowtide
from sweeps import sweep

pytestmark = pytest.mark.usefixtures("one_thread")

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA is first used, for deterministic products

SHARES = (0.9, 0.7, 0.5, 0.3)  # of the way from the floor to the plain peak
TRANSFORMERS = ["gpt_dropout", "gpt_tied", "lora", "hf_llama", "hf_gpt2", "hf_bert", "hf_t5", "hf_vit", "hf_mixtral"]


def make(name: str, **options: Any) -> zoo.Job:
    if name.startswith("hf_"):
        pytest.importorskip("transformers")
    return zoo.make(name, **options)


def random_states(device: str) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device == "cuda" else [])]


def copied(tensor: Tensor) -> Tensor:
    """On the CPU: what is kept to compare with shall not be part of a peak."""
    return tensor.detach().to("cpu", copy=True)


def train(job: zoo.Job, num_steps: int, device: str) -> tuple[list[Tensor], list[int]]:
    """Everything that steps of training leave behind; and the peaks measured in the first step and the last."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(job.model.parameters(), lr=0.01)
    left: list[Tensor] = []
    peaks: list[int] = []

    def step() -> None:
        loss = job.loss_fn(*job.batch)
        loss.backward()
        left.append(loss.detach().cpu())

    for number in range(num_steps):
        optimizer.zero_grad()
        if number in (0, num_steps - 1):
            peaks.append(lowtide.measure(step, device=device).total_peak_bytes)
        else:
            step()
        left += [copied(parameter.grad) for parameter in job.model.parameters() if parameter.grad is not None]
        optimizer.step()
    optimizer.zero_grad()
    left += [copied(buffer) for buffer in job.model.buffers()]
    return [*left, *random_states(device)], peaks


def check(job: zoo.Job, num_steps: int, shares: tuple[float, ...], device: str = "cpu") -> None:
    weights = copy.deepcopy(job.model.state_dict())
    expected, _ = train(job, num_steps, device)
    job.model.load_state_dict(weights)
    if device == "cuda":
        again, _ = train(job, num_steps, device)
        job.model.load_state_dict(weights)
        if not all(torch.equal(a, b) for a, b in zip(expected, again, strict=True)):
            pytest.skip("the plain step has kernels that are not deterministic here")
        del again
    graph = lowtide.trace(job.model, job.loss_fn, *job.batch, mode="real")
    frontier = lowtide.sweep(graph, [])
    low, high = frontier.floor_bytes, frontier.plain_peak_bytes
    # On the CPU only what a step allocates is measured.
    there = sum(size for kind, size in graph.static_bytes.items() if kind != "gradients") if device == "cpu" else 0
    if low == high:  # a model that checkpoints itself, with nothing left to decide
        shares, high = (0.0,), (low := int(1.02 * low))
    for share in shares:
        budget = int(low + share * (high - low))
        handle = lowtide.fit(job.model, job.loss_fn, *job.batch, budget=budget)
        actual, peaks = train(job, num_steps, device)
        assert handle.measured_peak_bytes is not None and handle.measured_peak_bytes <= budget
        assert len(actual) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)), share
        assert all(there + peak <= budget for peak in peaks), (share, budget, [there + peak for peak in peaks])
        handle.remove()
        job.model.load_state_dict(weights)


@pytest.mark.parametrize("name", sweep(["lstm", "custom_function", "unet"], keep=1))
def test_a_few_steps(name: str) -> None:
    check(make(name), 3, (0.6,))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(zoo.ZOO))
def test_twenty_steps(name: str) -> None:
    check(make(name), 20, SHARES)


@pytest.mark.gpu
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_twenty_steps_of_transformers_in_bfloat16(name: str) -> None:
    # Strict: with warnings alone, attention's backward is not deterministic.
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):  # those that can be
            check(make(name, device="cuda", dtype=torch.bfloat16, scale=8), 20, SHARES, "cuda")
    finally:
        torch.use_deterministic_algorithms(False)
