"""Compiled training under a budget against torch.compile's own ways to save memory: measured peaks and times.

    python bench/compiled.py [--device cuda] [--families gpt llama ...] [--seconds S] [--out FOLDER]
    python bench/compiled.py --depth 8 16 24 [--device cuda]

Every contestant compiles each block as a graph of its own (`block.compile()`), which is as fast as one whole graph and
compiles far sooner. Peers: torch.compile as it is; its `activation_memory_budget` at 0.9, 0.6, 0.3 and 0.05; torch's
checkpoint on each block, inside the compiled graph. Ours is `lowtide.compile` at the peak of each peer, without and
with host memory. All run in turns, and times are compared with the plain steps of the same round, as clock rates drift.
`--seconds` is the time for each family: cases that are not reached are listed, and a family that takes far longer is
stopped. The file is written after each family. On the CPU the families are tiny and the table shows only that the
script works.

`--depth` compares blocks compiled one by one (`regional=True`) with the model as one graph (`regional=False`),
both with the smallest peak that they reach: a GPT of so many layers, whose peak in regional mode grows with the depth.
The two are timed one after the other, so that times count only on a machine without other work.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import families
import torch
import zoo
from reporting import NUM_IN_A_ROW, RESULTS, Page, TooSlow, at_most, device_name, median_over, timed, versions
from sharing import TURN
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.compiled.compiled_handle import describe
from lowtide.tracing.model_blocks import find_regions

GIB = 2**30
FAMILIES = ("gpt", "llama", "qwen2", "vit", "convnext", "whisper", "t5", "mixtral")
FRACTIONS = (0.9, 0.6, 0.3, 0.05)
CHECKPOINT = "checkpoint per block"
DEAR = 0.02  # what a peer costs, of the plain step, from which ours is said as a share of it
HOST = 64 * GIB
_ROUNDS_SHARE = 0.25  # of the time that there is, for timing what has been compiled
_PEERS_SHARE = 0.35  # of the time that there is, after which no further peer is compiled: ours need as long
_MOST_STEPS = 100  # until ours has settled
_DEPTH_ROUNDS = 7  # of three steps each; the fastest counts


class Regional:
    """A way to compile the blocks of a job, which can be put on and taken off; its code stays compiled meanwhile."""

    def __init__(self, job: zoo.Job, fraction: float = 1.0, checkpointed: bool = False) -> None:
        self.job, self._checkpointed = job, checkpointed
        self._patch = {"activation_memory_budget": fraction}
        self.blocks = list(find_regions(job.model, job.blocks).values())

    def backend(self, module: Any, inputs: Any) -> Any:
        # A backend of its own for each contestant: Dynamo would serve one the code of another.
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx

        with config.patch(self._patch):
            return compile_fx(module, inputs)

    def __enter__(self) -> None:
        for block in self.blocks:
            if self._checkpointed:
                block.forward = _checkpointed(block)  # type: ignore[method-assign]
            block.compile(backend=self.backend)

    def __exit__(self, *exception: object) -> None:
        for block in self.blocks:
            block._compiled_call_impl = None
            block.__dict__.pop("forward", None)

    def settle(self, deadline: float) -> float:
        """Run steps until everything is compiled; seconds that took."""
        start = time.perf_counter()
        with self:
            for _ in range(2):
                step(self.job)
        return time.perf_counter() - start


class Ours(Regional):
    """`lowtide.compile`, likewise."""

    def __init__(self, job: zoo.Job, budget: int, host: int) -> None:
        super().__init__(job)
        lowtide.compile(job.model, budget=budget, host=host, regional=True)
        self.handle = lowtide.handle_of(job.model)
        self._modules = [module for module in job.model.modules() if module._compiled_call_impl is not None]
        self._calls = [module._compiled_call_impl for module in self._modules]

    def __enter__(self) -> None:
        self.handle.session.enable(True)  # compiling for the next budget has removed the handle
        for module, call in zip(self._modules, self._calls, strict=True):
            module._compiled_call_impl = call

    def __exit__(self, *exception: object) -> None:
        for module in self._modules:
            module._compiled_call_impl = None

    @property
    def is_settled(self) -> bool:
        """Whether the choice is final; False if there was no time left."""
        sequence = self.handle.session.current
        return sequence is not None and sequence.is_settled

    def settle(self, deadline: float) -> float:
        start = time.perf_counter()
        with self:
            for _ in range(_MOST_STEPS):
                step(self.job)
                if self.is_settled or now() > deadline:
                    break
            step(self.job)  # raises if no choice holds
        return time.perf_counter() - start


def _checkpointed(block: nn.Module) -> Callable[..., Any]:
    """The forward of a block inside of a checkpoint: a function of ours, so that Dynamo traces the checkpoint too."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(type(block).forward, block, *args, use_reentrant=False, **kwargs)

    return forward


def now() -> float:
    """Seconds, without those in which other benchmarks measured."""
    return time.monotonic() - TURN.waited_s


def step(job: zoo.Job) -> None:
    job.step()
    job.model.zero_grad(set_to_none=True)


def peak_of(contestant: Regional, device: str) -> int:
    job = contestant.job
    with contestant:
        step(job)
        if device == "cpu":
            held = sum(each.nbytes for each in (*job.model.parameters(), *job.model.buffers(), *job.batch))
            return held + lowtide.measure(lambda: step(job), device="cpu").peak_bytes
        torch.cuda.reset_peak_memory_stats()
        step(job)
        return torch.cuda.max_memory_allocated()


@dataclass(frozen=True)
class Found:
    """Median seconds, and by how much they are over those of the plain steps of the same round, in the median."""

    seconds: float
    over: float


def in_turns(contestants: list[Regional], options: argparse.Namespace, deadline: float) -> list[Found]:
    """Some steps of each contestant that has settled, then again, and so on: clocks drift. The first is plain."""
    times: list[list[float]] = [[] for _ in contestants]
    for number in range(options.rounds):
        if number and now() > deadline:
            break
        for found, contestant in zip(times, contestants, strict=True):
            with contestant:
                step(contestant.job)
                found.append(timed(functools.partial(step, contestant.job), options.device, NUM_IN_A_ROW))
    return [Found(statistics.median(found), median_over(found, times[0])) for found in times]


@dataclass(frozen=True)
class Peer:
    """One of torch's ways to compile the blocks, and its measurements."""

    label: str
    contestant: Regional
    peak_bytes: int
    settled_s: float


@dataclass(frozen=True)
class Target:
    """A budget for ours: the peak of a peer."""

    label: str
    budget: int
    peer: Peer
    host: int = 0


def compare(name: str, options: argparse.Namespace, page: Page) -> None:
    """The peers, then ours at their peaks, then all of them in turns. Waiting for other benchmarks counts for none."""
    start = now()
    with at_most(options.seconds):
        job = families.make(name, options.device)
        peers, alike = _peers(job, options.device, start + _PEERS_SHARE * options.seconds)
    TURN.take()
    page.add("", f"## {name}", "")
    with at_most(1.5 * options.seconds):
        _compare_ours(job, peers, alike, start, options, page)
    torch._dynamo.reset()


def _compare_ours(
    job: zoo.Job, peers: list[Peer], alike: list[str], start: float, options: argparse.Namespace, page: Page
) -> None:
    last_compile = start + (1 - _ROUNDS_SHARE) * options.seconds
    ours: list[tuple[Target, Ours, float]] = []
    for target in _targets(peers, options):
        if now() > last_compile:
            page.add(f"{target.label}, {target.budget / GIB:.3f} GiB: no time left", "")
            continue
        try:
            each = Ours(job, target.budget, target.host)
            settled_s = each.settle(last_compile)
        except lowtide.InfeasibleBudgetError as error:
            page.add(f"{target.label}, {target.budget / GIB:.3f} GiB: **refused** ({str(error).splitlines()[0]})", "")
            continue
        if options.explain:
            print(describe(each.handle.session), flush=True)
        if each.is_settled:
            ours.append((target, each, settled_s))
        else:  # its next steps would still compile
            peak = peak_of(each, options.device) / GIB
            page.add(f"{target.label}, {target.budget / GIB:.3f} GiB: not settled in {settled_s:.0f} s, {peak:.3f}", "")
    contestants = [*(peer.contestant for peer in peers), *(each for _, each, _ in ours)]
    found = in_turns(contestants, options, start + options.seconds)
    by_peer = dict(zip((peer.label for peer in peers), found, strict=False))
    page.add("| peer | ms | over plain | peak GiB | compile s |", "|" + "---|" * 5)
    for peer in peers:
        each = by_peer[peer.label]
        page.add(
            f"| {peer.label} | {1e3 * each.seconds:.1f} | {_over(each.over)} | {peer.peak_bytes / GIB:.3f} "
            f"| {peer.settled_s:.1f} |"
        )
    page.add("", *alike)
    page.add(
        "",
        "| lowtide.compile at the peak of | budget GiB | theirs | ours ms | ours | of theirs | peak GiB "
        "| settled s | compiling, planning |",
        "|" + "---|" * 9,
    )
    for (target, contestant, settled_s), each in zip(ours, found[len(peers) :], strict=True):
        theirs = by_peer[target.peer.label].over
        page.add(_row(target, theirs, each, peak_of(contestant, options.device), settled_s, contestant))


def _peers(job: zoo.Job, device: str, deadline: float) -> tuple[list[Peer], list[str]]:
    """Every peer, the plain one first; those that fail, or do what another did before, are only named."""
    contestants = {"torch.compile": Regional(job), CHECKPOINT: Regional(job, checkpointed=True)}
    contestants |= {f"activation_memory_budget {fraction}": Regional(job, fraction) for fraction in FRACTIONS}
    found: dict[int, Peer] = {}
    alike: list[str] = []
    for label, contestant in contestants.items():
        if len(found) > 1 and now() > deadline:
            alike.append(f"{label}: no time left.")
            continue
        try:
            settled_s, peak = contestant.settle(deadline), peak_of(contestant, device)
        except Exception as error:
            if not found:
                raise  # nothing to compare with
            traceback.print_exc()
            alike.append(f"{label}: **failed**, {_first_lines(error)}.")
            job.model.zero_grad(set_to_none=True)
            continue
        if peak in found:
            alike.append(f"{label} has the same peak as {found[peak].label}.")
        else:
            found[peak] = Peer(label, contestant, peak, settled_s)
    return list(found.values()), alike


def _targets(peers: list[Peer], options: argparse.Namespace) -> list[Target]:
    """The peaks of peers, that of a checkpoint per block first, then the same with host memory."""
    targets = [Target(peer.label, peer.peak_bytes, peer) for peer in peers[1:]]
    if options.device == "cpu" or options.no_host:
        return targets
    return [*targets, *(replace(target, label=f"{target.label}, host", host=HOST) for target in targets)]


def _first_lines(error: BaseException) -> str:
    """The class of an error and what it says, without the trace that Dynamo adds."""
    said = [line for line in str(error).splitlines() if line.strip()][:2]
    return " ".join([f"{type(error).__name__}:", *said]).strip()


def _over(share: float) -> str:
    return f"{100 * share:+.1f} %"


def _row(target: Target, theirs: float, ours: Found, peak: int, settled_s: float, contestant: Ours) -> str:
    """A row of the table of ours."""
    share = "" if theirs < DEAR else f"{100 * ours.over / theirs:.0f} %"
    behind = " **behind**" if ours.over > theirs + DEAR else ""
    return (
        f"| {target.label} | {target.budget / GIB:.3f} | {_over(theirs)} | {1e3 * ours.seconds:.1f} "
        f"| {_over(ours.over)}{behind} | {share} | {peak / GIB:.3f}{'' if peak <= target.budget else ' **over**'} "
        f"| {settled_s:.1f} | {contestant.handle.session.watch} |"
    )


def compare_depths(options: argparse.Namespace, page: Page) -> None:
    """A row for each depth and each way to compile: the smallest peak, and by how much the step is slower with it."""
    page.add(
        "",
        "| layers | compiled | plain peak MiB | smallest peak MiB | of plain | over plain | compile s | planning s |",
        "|" + "---|" * 8,
    )
    for layers in options.depth:
        for regional in (True, False):
            name = "blocks" if regional else "one graph"
            with page.rows_of(f"{layers} | {name}", options.seconds):
                page.add(f"| {layers} | {name} | {_depth_row(layers, regional, options.device)} |")
            torch._dynamo.reset()


def _depth_row(layers: int, regional: bool, device: str) -> str:
    size = (1024, 16, (4, 2048)) if device == "cuda" else (64, 4, (4, 256))
    torch.manual_seed(0)
    width, heads, tokens = size
    job = zoo.gpt(layers, width, heads, tokens=tokens)
    job.model.to(device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32).train()
    job.batch = tuple(item.to(device) for item in job.batch)
    found = []
    for budget in (1 << 50, 1):
        lowtide.compile(job.model, budget=budget, regional=regional, on_over="warn")
        handle = lowtide.handle_of(job.model)
        for _ in range(_MOST_STEPS):
            step(job)
            if handle.session.current is not None and handle.session.current.is_settled:
                break
        step(job)
        times = [timed(functools.partial(step, job), device, NUM_IN_A_ROW) for _ in range(_DEPTH_ROUNDS)]
        found.append((handle.measured_peak_bytes or 0, min(times), handle.stats()))
    (plain, plain_s, _), (least, least_s, stats) = found
    return (
        f"{plain / 2**20:.1f} | {least / 2**20:.1f} | {100 * least / plain:.0f} % | {_over(least_s / plain_s - 1)} "
        f"| {stats.compiling_s:.1f} | {stats.planning_s:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(families.FAMILIES))
    parser.add_argument("--depth", type=int, nargs="+", help="compare blocks with whole graphs of so many layers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3600.0, help="for each family")
    parser.add_argument("--no-host", action="store_true", help="leave out budgets with host memory")
    parser.add_argument("--explain", action="store_true", help="print what ours saves in each call")
    parser.add_argument("--suffix", default="", help="of the name of the file with results")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1024
    page = Page(
        options.out,
        f"compiled-{'depth-' if options.depth else ''}{options.device}{options.suffix}.md",
        f"# Compiled training under a budget, {device_name(options.device)}",
        "",
        f"{versions()}, forward and backward. Budgets are peaks of the whole step; ours are measured too.",
    )
    if options.depth:
        compare_depths(options, page)
        return
    for name in options.families:
        try:
            compare(name, options, page)
        except (Exception, TooSlow) as error:  # the other families shall still be measured
            traceback.print_exc()
            page.add(f"{name}: **failed**, {_first_lines(error)}", "")
            torch._dynamo.reset()
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
        TURN.give()


if __name__ == "__main__":
    main()
