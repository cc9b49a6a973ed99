"""Ways to run a step, compared within one run: torch's checkpointing, times in turns, peaks, and the limiting line."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from quiet import QUIET
from reporting import NUM_IN_A_ROW, free, median_over, timed
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from zoo import Job

import lowtide
from lowtide.tracing.model_blocks import find_regions

TORCH = functools.partial(checkpoint, use_reentrant=False)
CLOCKS = {"cuda": time.perf_counter, "cpu": time.thread_time}  # of the thread, so that other processes do not count
PRODUCTS = ("mm", "addmm", "bmm", "attention", "convolution", "linear")


@dataclass(frozen=True)
class Way:
    """A step, and the context that it runs in."""

    step: Callable[[], Any]
    context: Callable[[], Any] = contextlib.nullcontext


def step(job: Job) -> None:
    """Forward and backward, with fresh gradients."""
    job.model.zero_grad(set_to_none=True)
    job.step()


def checkpointed(job: Job, *, every: int = 1, function: Callable[..., Any] = TORCH) -> Any:
    """A context with a checkpoint function around every n-th block. A plan on the model must be switched off."""
    return wrapped(list(find_regions(job.model, job.blocks).values())[::every], function)


@contextlib.contextmanager
def wrapped(blocks: list[nn.Module], function: Callable[..., Any]) -> Iterator[None]:
    """A context in which `function` is called with the forward of each block, and its arguments."""
    before = [vars(block).pop("forward", None) for block in blocks]  # of a plan
    for block in blocks:
        block.forward = functools.partial(function, type(block).forward.__get__(block))  # type: ignore[method-assign]
    try:
        yield
    finally:
        for block, forward in zip(blocks, before, strict=True):
            del block.forward
            if forward is not None:
                block.forward = forward  # type: ignore[method-assign]


def selective(every: int) -> Callable[..., Any]:
    """torch's checkpoint that keeps every n-th matrix product of a block, as torchtitan does."""

    def contexts() -> Any:
        num_seen = {False: 0, True: 0}

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if not any(word in str(op) for word in PRODUCTS):
                return CheckpointPolicy.PREFER_RECOMPUTE
            num_seen[context.is_recompute] += 1
            is_kept = num_seen[context.is_recompute] % every == 0
            return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return functools.partial(TORCH, context_fn=contexts)


@contextlib.contextmanager
def switched_on(handle: Any) -> Iterator[None]:
    """A plan that is switched off otherwise.

    The peaks of other ways are forgotten: the handle would take them for its own, and warn that its budget is exceeded.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    handle.enabled = True
    try:
        yield
    finally:
        handle.enabled = False


def in_turns(
    ways: Mapping[str, Way],
    device: str,
    rounds: int,
    *,
    num_warm: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    is_over: Callable[[], bool] = lambda: False,
) -> dict[str, list[float]]:
    """Seconds of a step in each way, one number for each round. Ways take turns, with several steps in a row each.

    On a GPU each turn is on a core at full speed (`quiet`). No round but the first begins when `is_over()`.
    """

    def measured(way: Way, num_untimed: int) -> float:
        for _ in range(num_untimed):
            way.step()
        return timed(way.step, device, NUM_IN_A_ROW, clock)

    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        if turn and is_over():
            break
        for name, way in ways.items():
            num_untimed = num_warm if turn else num_warm + 1  # what is done once is none of the step's
            run = functools.partial(measured, way, num_untimed)
            with way.context():
                times[name].append(QUIET.turn(run) if device == "cuda" else run())
    return times


def cost_of(times: Mapping[str, list[float]], way: str, plain: str = "plain") -> tuple[float, float]:
    """Milliseconds of a step, and percent above the plain steps of the same round; both in the median."""
    return 1e3 * statistics.median(times[way]), 100 * median_over(times[way], times[plain])


def peak_of(job: Job, device: str, context: Callable[[], Any] = contextlib.nullcontext) -> int:
    """The measured peak of the whole step in a context, in bytes. Gradients are none before and after."""
    free(device)
    with context():
        step(job)
        job.model.zero_grad(set_to_none=True)
        peak = lowtide.measure(job.step, device=device).total_peak_bytes
    job.model.zero_grad(set_to_none=True)
    if device == "cuda":
        return peak
    tensors = [*job.model.parameters(), *job.model.buffers(), *job.batch]  # made before, so no profiler sees them
    return peak + sum(tensor.nbytes for tensor in tensors)


def host_and_device_s(job: Job, device: str) -> tuple[float, float]:
    """Seconds until the last launch of a plain step, and of its kernels; zeros on the CPU."""
    if device != "cuda":
        return 0.0, 0.0

    def issue_s() -> float:
        for _ in range(3):
            step(job)
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(job)
        seconds = time.perf_counter() - start
        torch.cuda.synchronize()
        return seconds

    host_s = QUIET.turn(issue_s)
    return host_s, kernel_s(functools.partial(step, job))


def kernel_s(run: Callable[[], Any]) -> float:
    """Seconds of the kernels of a step on a GPU: what a busy host does not change."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e6
