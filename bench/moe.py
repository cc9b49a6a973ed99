"""Mixtures of experts: the floor, and a plan at the peak of torch's checkpoint on every block, against that in turns.

    python bench/moe.py                # the family `mixtral`, with the kernels that transformers chooses
    python bench/moe.py grouped_mm     # or these

Prints the peaks as the allocator saw them, the floor that `fit` names, and times of forward and backward in turns.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable

import families
import torch
from torch.utils.checkpoint import checkpoint
from zoo import Job

import lowtide
from lowtide.units import format_bytes

_TURNS = 15


def main(experts: str | None) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    job = families.make("mixtral", device)
    if experts is not None:
        job.model.config._experts_implementation = experts
    print(f"mixtral on {device}, {job.model.config._experts_implementation} experts, torch {torch.__version__}")

    def step() -> None:
        job.loss_fn(*job.batch).backward()

    def peak_of() -> int:
        return _peak_of(step, job.model.zero_grad, 0 if device == "cuda" else static)

    static = sum(tensor.nbytes for tensor in (*job.model.parameters(), *job.batch))  # a CPU's meter sees them not
    peaks = {"plain": peak_of()}
    _checkpointed(job, on=True)
    peaks["torch's checkpoint"] = peak_of()
    _checkpointed(job, on=False)
    job.model.zero_grad()
    try:
        lowtide.fit(job.model, job.loss_fn, *job.batch, budget="1MiB")
    except lowtide.InfeasibleBudgetError as error:
        print(error)
        print(f"floor {format_bytes(error.floor_bytes)}")
    budget = peaks["torch's checkpoint"]
    handle = lowtide.fit(job.model, job.loss_fn, *job.batch, budget=budget)
    peaks["lowtide"] = peak_of()
    print("\n".join(f"{name}: {format_bytes(peak)}" for name, peak in peaks.items()))
    print(f"{len(handle.plan.regions)} regions, {len(handle.plan.choosers)} routers inside; held: "
          f"{peaks['lowtide'] <= budget}")  # fmt: skip
    switches = {
        "plain": lambda: None,
        "torch's checkpoint": functools.partial(_checkpointed, job, on=True),
        "lowtide": functools.partial(setattr, handle, "enabled", True),
    }
    times: dict[str, list[float]] = {name: [] for name in switches}
    for _ in range(_TURNS):
        for name, switch in switches.items():
            _checkpointed(job, on=False)
            handle.enabled = False
            switch()
            job.model.zero_grad()
            times[name].append(_timed(step))
    for name, each in times.items():
        print(f"{name}: {1e3 * statistics.median(each):.1f} ms (lowest {1e3 * min(each):.1f})")


def _peak_of(step: Callable[[], None], zero_grad: Callable[[], None], static: int) -> int:
    """The most bytes allocated in a step: of the second, as the first makes caches."""
    step()
    zero_grad()
    if not torch.cuda.is_available():
        return lowtide.measure(step).peak_bytes + static
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated()


def _checkpointed(job: Job, *, on: bool) -> None:
    for layer in job.model.model.layers:
        forward = type(layer).forward.__get__(layer)
        if on:
            layer.__dict__["_before"] = layer.__dict__.get("forward")
            layer.forward = functools.partial(checkpoint, forward, use_reentrant=False)
        elif "_before" in layer.__dict__:
            before = layer.__dict__.pop("_before")
            if before is None:
                del layer.forward
            else:
                layer.forward = before


def _timed(step: Callable[[], None]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main(*(sys.argv[1:] or [None]))
