"""Compiled training under a budget against torch.compile's own ways to save memory: measured peaks and times.

    python bench/compiled.py [gpt llama ...] [--device cuda] [--limit-s S] [--out FOLDER]
    python bench/compiled.py --depth 8 16 24 [--device cuda]

Every contestant compiles each block as a graph of its own (`block.compile()`), which is as fast as one whole graph and
compiles far sooner. Peers: torch.compile as it is; its `activation_memory_budget` at 0.9, 0.6, 0.3 and 0.05; torch's
checkpoint on each block, inside the compiled graph. Ours is `lowtide.compile` at the peak of each peer, without and
with host memory. All run in turns, and times are compared with the plain steps of the same round, as clock rates drift.
"On the device" are the kernels of one profiled step, which a busy host does not disturb.
Budgets of a family that are not reached within `--limit-s` are listed, and a family that takes far longer is stopped.
On the CPU the families are tiny and the table shows only that the script works.

`--depth` compares blocks compiled one by one (`regional=True`) with the model as one graph (`regional=False`),
both with the smallest peak that they reach: a GPT of so many layers, whose peak in regional mode grows with the depth.
The two are timed one after the other, so that times count only on a machine without other work.
"""

from __future__ import annotations

import argparse
import functools
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import families
import torch
import zoo
from quiet import QUIET
from reporting import NUM_IN_A_ROW, Page, TooSlow, at_most, device_name, free, options_of, timed, versions
from sharing import TURN, compiling_without_turn
from torch import nn
from torch.utils.checkpoint import checkpoint
from ways import Way, cost_of, in_turns, kernel_s, peak_of, step

import lowtide
from lowtide.compiled.compiled_handle import describe
from lowtide.tracing.model_blocks import find_regions

GIB = 2**30
FAMILIES = ("gpt", "llama", "qwen2", "vit", "convnext", "whisper", "t5", "mixtral")
FRACTIONS = (0.9, 0.6, 0.3, 0.05)
PLAIN, CHECKPOINT = "torch.compile", "checkpoint per block"
DEAR = 2.0  # percent of the plain step that a peer costs from which ours is said as a share of it
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

    def way(self) -> Way:
        return Way(functools.partial(step, self.job), lambda: self)

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
        start = TURN.now()
        with self, compiling_without_turn():
            for _ in range(_MOST_STEPS):
                with QUIET.pinned():
                    step(self.job)
                if self.is_settled or TURN.now() > deadline:
                    break
            step(self.job)  # raises if no choice holds
        return TURN.now() - start


def _checkpointed(block: nn.Module) -> Callable[..., Any]:
    """The forward of a block inside of a checkpoint: a function of ours, so that Dynamo traces the checkpoint too."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(type(block).forward, block, *args, use_reentrant=False, **kwargs)

    return forward


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
    start = TURN.now()
    with at_most(options.limit_s):
        job = families.make(name, options.device)
        peers, alike = _peers(job, options.device, start + _PEERS_SHARE * options.limit_s)
    TURN.take()
    page.add("", f"## {name}", "")
    with at_most(1.5 * options.limit_s):
        _compare_ours(job, peers, alike, start, options, page)
    torch._dynamo.reset()


def _compare_ours(
    job: zoo.Job, peers: list[Peer], alike: list[str], start: float, options: argparse.Namespace, page: Page
) -> None:
    last_compile = start + (1 - _ROUNDS_SHARE) * options.limit_s
    # Again: what the other peers have left allocated since, such as constants, counts for ours as well.
    peers = [replace(each, peak_bytes=peak_of(job, options.device, each.contestant.way().context)) for each in peers]
    ours: list[tuple[Target, Ours, float]] = []
    for target in _targets(peers, options):
        if TURN.now() > last_compile:
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
            peak = peak_of(job, options.device, each.way().context) / GIB
            page.add(f"{target.label}, {target.budget / GIB:.3f} GiB: not settled in {settled_s:.0f} s, {peak:.3f}", "")
    ways = {peer.label: peer.contestant.way() for peer in peers}
    ways |= {f"ours, {target.label}": each.way() for target, each, _ in ours}
    times = in_turns(ways, options.device, options.rounds, is_over=lambda: TURN.now() > start + options.limit_s)
    kernels = _over_plain_on_the_device(ways) if options.device == "cuda" else dict.fromkeys(ways, "")
    page.add("| peer | ms | over plain | on the device | peak GiB | compile s |", "|" + "---|" * 6)
    for peer in peers:
        ms, over = cost_of(times, peer.label, PLAIN)
        cells = f"{ms:.1f} | {over:+.1f} % | {kernels[peer.label]}"
        page.add(f"| {peer.label} | {cells} | {peer.peak_bytes / GIB:.3f} | {peer.settled_s:.1f} |")
    page.add("", *alike)
    page.add(
        "",
        "| lowtide.compile at the peak of | budget GiB | theirs | ours ms | ours | of theirs "
        "| on the device: theirs, ours | peak GiB | settled s | compiling, planning |",
        "|" + "---|" * 10,
    )
    for target, contestant, settled_s in ours:
        _, theirs = cost_of(times, target.peer.label, PLAIN)
        name = f"ours, {target.label}"
        peak_bytes = peak_of(job, options.device, contestant.way().context)
        on_device = f"{kernels[target.peer.label]}, {kernels[name]}"
        page.add(_row(target, theirs, *cost_of(times, name, PLAIN), on_device, peak_bytes, settled_s, contestant))
    page.add("", f"{len(ours)} of ours{QUIET}.")


def _peers(job: zoo.Job, device: str, deadline: float) -> tuple[list[Peer], list[str]]:
    """Every peer, the plain one first; those that fail, or do what another did before, are only named."""
    contestants = {PLAIN: Regional(job), CHECKPOINT: Regional(job, checkpointed=True)}
    contestants |= {f"activation_memory_budget {fraction}": Regional(job, fraction) for fraction in FRACTIONS}
    found: dict[int, Peer] = {}
    alike: list[str] = []
    for label, contestant in contestants.items():
        if len(found) > 1 and TURN.now() > deadline:
            alike.append(f"{label}: no time left.")
            continue
        try:
            settled_s, peak = contestant.settle(deadline), peak_of(job, device, contestant.way().context)
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


def _over_plain_on_the_device(ways: dict[str, Way]) -> dict[str, str]:
    """By how much the kernels of a step take longer than those of the plain step, which no busy host disturbs."""
    seconds = {}
    for name, way in ways.items():
        with way.context():
            for _ in range(2):
                way.step()
            seconds[name] = kernel_s(way.step)
    return {name: f"{100 * (each / seconds[PLAIN] - 1):+.1f} %" for name, each in seconds.items()}


def _row(
    target: Target,
    theirs: float,
    ms: float,
    ours: float,
    on_device: str,
    peak: int,
    settled_s: float,
    contestant: Ours,
) -> str:
    """A row of the table of ours. `theirs` and `ours` are percent above the plain step."""
    share = "" if theirs < DEAR else f"{100 * ours / theirs:.0f} %"
    behind = " **behind**" if ours > theirs + DEAR else ""
    return (
        f"| {target.label} | {target.budget / GIB:.3f} | {theirs:+.1f} % | {ms:.1f} "
        f"| {ours:+.1f} %{behind} | {share} | {on_device} "
        f"| {peak / GIB:.3f}{'' if peak <= target.budget else ' **over**'} "
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
            with page.rows_of(f"{layers} | {name}", options.limit_s):
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
        f"{plain / 2**20:.1f} | {least / 2**20:.1f} | {100 * least / plain:.0f} % "
        f"| {100 * (least_s / plain_s - 1):+.1f} % | {stats.compiling_s:.1f} | {stats.planning_s:.1f}"
    )


def main() -> None:
    parser = options_of(__doc__, families.FAMILIES, rounds=5, limit_s=3600.0)
    parser.set_defaults(cases=list(FAMILIES))
    parser.add_argument("--depth", type=int, nargs="+", help="compare blocks with whole graphs of so many layers")
    parser.add_argument("--no-host", action="store_true", help="leave out budgets with host memory")
    parser.add_argument("--explain", action="store_true", help="print what ours saves in each call")
    parser.add_argument("--suffix", default="", help="of the name of the file with results")
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
    for name in options.cases:
        try:
            compare(name, options, page)
        except (Exception, TooSlow) as error:  # the other families shall still be measured
            traceback.print_exc()
            page.add(f"{name}: **failed**, {_first_lines(error)}", "")
            torch._dynamo.reset()
        free(options.device)
        TURN.give()


if __name__ == "__main__":
    main()
