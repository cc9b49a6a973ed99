"""What recomputing every block costs, over the plain step: `python bench/replay.py`.

Torch's checkpoint, `lowtide.checkpoint` (also with its check of replays switched off) and a plan of lowtide's, each
with every block recomputed and nothing else. The ways take turns within one run, three steps in a row each, once with
Python's garbage collector as users have it and once frozen. On the CPU the seconds are those of the one thread that
computes, so that other processes do not count. Writes bench/results/replay-<device>.md.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import families
import torch
from reporting import NUM_IN_A_ROW, Page, device_name, options_of, versions
from ways import CLOCKS, Way, checkpointed, host_and_device_s, in_turns, step
from zoo import Job

import lowtide
from lowtide.plans import Plan, Recompute
from lowtide.tracing.model_blocks import find_regions

HOST_LIMITED = 1.1  # host time over device time from which a step counts as limited by the host


@contextlib.contextmanager
def planned(job: Job, *, enabled: bool = True) -> Iterator[None]:
    regions = tuple(Recompute(name) for name in find_regions(job.model, job.blocks))
    with lowtide.apply(job.model, Plan(regions=regions)) as handle:
        handle.enabled = enabled
        yield


def ways_of(job: Job) -> dict[str, Way]:
    contexts: dict[str, Callable[[], Any]] = {
        "plain": contextlib.nullcontext,
        "torch": lambda: checkpointed(job),
        "drop-in": lambda: checkpointed(job, function=lowtide.checkpoint),
        "unchecked": lambda: checkpointed(
            job, function=functools.partial(lowtide.checkpoint, determinism_check="none")
        ),
        "plan": lambda: planned(job),
        "off": lambda: planned(job, enabled=False),
    }
    return {name: Way(functools.partial(step, job), context) for name, context in contexts.items()}


def seconds_of(job: Job, device: str, rounds: int) -> dict[str, float]:
    """Seconds of a step under each way: by how much it takes longer than the plain steps before it, in the median."""
    times = in_turns(ways_of(job), device, rounds, num_warm=2, clock=CLOCKS[device])
    plain = statistics.median(times["plain"])
    return {
        name: plain + statistics.median(ours - before for ours, before in zip(own, times["plain"], strict=True))
        for name, own in times.items()
    }


def waiting_objects(job: Job, way: Way) -> int:
    """Objects that Python's collector tracks between forward and backward."""
    with way.context():
        for _ in range(2):
            step(job)
        gc.collect()
        before = len(gc.get_objects())
        gc.disable()
        loss = job.loss_fn(*job.batch)
        found = len(gc.get_objects()) - before
        gc.enable()
        loss.backward()
    return found


def full_collections(job: Job, way: Way, steps: int) -> float:
    """Full garbage collections per 100 steps."""
    with way.context():
        step(job)
        gc.collect()
        before = gc.get_stats()[2]["collections"]
        for _ in range(steps):
            step(job)
        return 100 * (gc.get_stats()[2]["collections"] - before) / steps


def rows_of(name: str, device: str, small_batch: bool, rounds: int) -> Iterator[str]:
    job = families.make(name, device, small_batch=small_batch)
    host_s, device_s = host_and_device_s(job, device)
    ways = ways_of(job)
    objects = {each: waiting_objects(job, ways[each]) for each in ("plain", "torch", "plan")}
    collections = {each: full_collections(job, ways[each], 50) for each in ("plain", "torch", "plan")}
    limit = "host" if host_s > HOST_LIMITED * device_s else "both" if host_s > device_s / HOST_LIMITED else "device"
    limit = limit if device == "cuda" else "-"
    # Where the device is the limit, the collector makes no difference to the step.
    for frozen in (True,) if limit == "device" else (False, True):
        if frozen:
            gc.collect()
            gc.freeze()
        seconds = seconds_of(job, device, rounds)
        gc.unfreeze()
        added = {each: seconds[each] - seconds["plain"] for each in seconds}
        ratios = " | ".join(f"{added[each] / added['torch']:.2f}" for each in ("drop-in", "unchecked", "plan"))
        yield (
            f"| {name}, batch {job.batch[0].shape[0]} | {limit} | {'frozen' if frozen else 'running'} "
            f"| {1e3 * seconds['plain']:.1f} | {1e3 * added['torch']:+.1f} | {1e3 * added['drop-in']:+.1f} "
            f"| {1e3 * added['plan']:+.1f} | {ratios} | {seconds['drop-in'] / seconds['torch']:.2f} "
            f"| {seconds['off'] / seconds['plain']:.3f} "
            f"| {objects['plain']} / {objects['torch']} / {objects['plan']} "
            f"| {collections['plain']:.0f} / {collections['torch']:.0f} / {collections['plan']:.0f} |"
        )


def main() -> None:
    parser = options_of(__doc__, families.FAMILIES, rounds=8)
    parser.add_argument("--small", action="store_true", help="only the batches that the host limits")
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    page = Page(
        options.out,
        f"replay-{options.device}.md",
        f"# Recomputing every block, {device_name(options.device)}",
        "",
        f"{versions()}. Milliseconds added to the plain step by torch's checkpoint on every block, by "
        '`lowtide.checkpoint` in its place (drop-in; unchecked with `determinism_check="none"`), and by a lowtide plan '
        f"that recomputes the same blocks. In turns, {NUM_IN_A_ROW} steps in a row, {options.rounds} rounds, medians "
        "of differences to the plain steps before.",
        "",
        "| family | limit | collector | plain ms | torch | drop-in | plan "
        "| drop-in / torch | unchecked / torch | plan / torch "
        "| whole step: drop-in / torch | switched off / plain | objects: plain / torch / plan "
        "| full collections per 100 steps: plain / torch / plan |",
        "|" + "---|" * 14,
    )
    for small_batch in (True,) if options.small else (False, True):
        given = {"device": options.device, "small_batch": small_batch, "rounds": options.rounds}
        page.add_cases(options, functools.partial(rows_of, **given))


if __name__ == "__main__":
    main()
