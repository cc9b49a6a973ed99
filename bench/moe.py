"""Mixtures of experts: the floor, and a plan at the peak of torch's checkpoint on every block, against that in turns.

    python bench/moe.py                # the family `mixtral`, with the kernels that transformers chooses
    python bench/moe.py grouped_mm     # or these

Prints the peaks as the allocator saw them, the floor that `fit` names, and times of forward and backward in turns.
"""

from __future__ import annotations

import functools
import statistics
import sys

import families
import torch
from ways import Way, checkpointed, in_turns, peak_of, step, switched_on

import lowtide
from lowtide.units import format_bytes

_TURNS = 15


def main(experts: str | None) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    job = families.make("mixtral", device)
    if experts is not None:
        job.model.config._experts_implementation = experts
    print(f"mixtral on {device}, {job.model.config._experts_implementation} experts, torch {torch.__version__}")

    torchs = functools.partial(checkpointed, job)
    peaks = {"plain": peak_of(job, device), "torch's checkpoint": peak_of(job, device, torchs)}
    try:
        lowtide.fit(job.model, job.loss_fn, *job.batch, budget="1MiB")
    except lowtide.InfeasibleBudgetError as error:
        print(error)
        print(f"floor {format_bytes(error.floor_bytes)}")
    budget = peaks["torch's checkpoint"]
    handle = lowtide.fit(job.model, job.loss_fn, *job.batch, budget=budget)
    peaks["lowtide"] = peak_of(job, device)
    print("\n".join(f"{name}: {format_bytes(peak)}" for name, peak in peaks.items()))
    print(f"{len(handle.plan.regions)} regions, {len(handle.plan.choosers)} routers inside; held: "
          f"{peaks['lowtide'] <= budget}")  # fmt: skip
    handle.enabled = False
    run = functools.partial(step, job)
    ours = functools.partial(switched_on, handle)
    ways = {"plain": Way(run), "torch's checkpoint": Way(run, torchs), "lowtide": Way(run, ours)}
    times = in_turns(ways, device, _TURNS)
    for name, each in times.items():
        print(f"{name}: {1e3 * statistics.median(each):.1f} ms (lowest {1e3 * min(each):.1f})")


if __name__ == "__main__":
    main(*(sys.argv[1:] or [None]))
