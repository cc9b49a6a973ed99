"""Captured steps under plans against eager ones: `python bench/capture.py`, on a CUDA device.

The plain eager step, torch's checkpoint on every second block, and plans of lowtide's that recompute every second block
and every block, captured. The ways take turns within one run, three steps in a row each. Peaks are those of
`torch.cuda.max_memory_allocated()` for eager steps, and `step.peak_bytes` for captured ones, which counts all of the
graph's memory pool. Writes bench/results/capture-cuda.md.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator
from typing import Any

import families
import torch
from reporting import NUM_IN_A_ROW, Page, device_name, free, options_of, versions
from ways import Way, checkpointed, in_turns, peak_of, step, switched_on
from zoo import Job

import lowtide
from lowtide.plans import Plan, Recompute
from lowtide.tracing.model_blocks import find_regions

# Whether each family runs at the batch at which the host is the limit.
FAMILIES = {"convnext": False, "whisper": False, "gpt": True, "llama": True, "bert": True, "vit": False}


def captured(job: Job, every: int) -> tuple[Any, Any]:
    """A handle and a captured step, with every n-th block recomputed; none for 0."""
    names = list(find_regions(job.model, job.blocks))[::every] if every else []
    handle = lowtide.apply(job.model, Plan(regions=tuple(map(Recompute, names))))
    try:
        return handle, handle.capture(job.loss_fn, *job.batch, ignore_host_draws=True)
    except BaseException:
        handle.remove()
        raise


CAPTURED = {"captured, no plan": 0, "captured, every second": 2, "captured, every block": 1}


def rows_of(name: str, rounds: int) -> Iterator[str]:
    job = families.make(name, "cuda", small_batch=FAMILIES[name])
    rows = measured(name, job, rounds)
    yield from rows
    if any("random numbers" in row for row in rows):
        for path, module in job.model.named_modules():
            if isinstance(module, torch.nn.Dropout) and ".attention." in path:
                module.p = 0.0
        yield from measured(f"{name}, no dropout in attention", job, rounds)


def measured(name: str, job: Job, rounds: int) -> list[str]:
    run = functools.partial(step, job)
    eager = {"plain": Way(run), "torch, every second": Way(run, functools.partial(checkpointed, job, every=2))}
    peaks = {way: peak_of(job, "cuda", each.context) for way, each in eager.items()}
    times: dict[str, list[float]] = {}
    notes = []
    # Each graph keeps its memory, so one is held at a time; its rounds alternate with those of the eager ways.
    for way, every in CAPTURED.items():
        try:
            handle, graph = captured(job, every)
        except lowtide.LowtideError as error:
            notes.append(f"| {name}, {way}: {' '.join(str(error).split())[:300]} |")
            continue
        peaks[way] = graph.peak_bytes
        ways = dict(eager)
        if every != 2:
            del ways["torch, every second"]  # it takes turns with the plan of the same blocks
        ways[way] = Way(functools.partial(graph, *job.batch), functools.partial(switched_on, handle))
        with handle.disabled():  # the patched modules run plainly in the eager turns
            for each, seconds in in_turns(ways, "cuda", rounds).items():
                times.setdefault(each, []).extend(seconds)
        graph.release()
        handle.remove()
        del ways, graph, handle
        free("cuda")
    if not times:
        times = in_turns({"plain": eager["plain"]}, "cuda", rounds)
    cells = [
        f"{1e3 * statistics.median(times[way]):.1f} / {peaks[way] / 2**30:.2f}" if way in times else "-"
        for way in ("plain", "torch, every second", *CAPTURED)
    ]
    return [f"| {name}, batch {job.batch[0].shape[0]} | {' | '.join(cells)} |", *notes]


def main() -> None:
    options = options_of(__doc__, FAMILIES, rounds=6).parse_args()
    page = Page(
        options.out,
        "capture-cuda.md",
        f"# Captured steps, {device_name('cuda')}",
        "",
        f"{versions()}. Milliseconds of a step, forward and backward in bf16, and GiB at its peak. Eager ways: the "
        "plain step and torch's checkpoint on every second block, by the allocator's peak. Captured: `handle.capture` "
        "under a plan that recomputes no block, every second or every block, by `step.peak_bytes`, which counts the "
        f"whole memory pool of the graph. In turns, {NUM_IN_A_ROW} steps in a row, {options.rounds} rounds, medians.",
        "",
        "| family | plain | torch, every second | captured, no plan | captured, every second | captured, every block |",
        "|" + "---|" * 6,
    )
    page.add_cases(options, functools.partial(rows_of, rounds=options.rounds))


if __name__ == "__main__":
    main()
