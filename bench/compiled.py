"""Compiled training under a budget against what people use today: same model, same run, measured peaks and times.

    python bench/compiled.py [--out FOLDER] [--few] [--budgets N] [models ...]

Every contestant compiles each block as a graph of its own (`block.compile()`), which is as fast as one whole graph and
compiles far sooner. Peers: torch.compile as it is; its `activation_memory_budget` at various values with both of its
runtime estimators; torch's checkpoint on each block, inside the compiled graph. Ours is `lowtide.compile` at the peak
of each peer, with and without host memory, and at budgets between the floor and the plain peak, ten in all. Plain
steps, all peers and all of ours run in turns, and it is the ratio to the plain steps of the same round that counts:
clocks drift. Needs a GPU, to itself.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import zoo
from reporting import NUM_IN_A_ROW, RESULTS, Page, device_name, median_over, timed, versions
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.api.compile import explain_compiled
from lowtide.tracing.model_blocks import find_regions

GIB = 2**30


class Blocks(nn.Module):
    """A stack of transformer blocks on hidden states."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(zoo.Block(width, heads, 0.0) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def stack(layers: int, width: int, tokens: int) -> zoo.Job:
    model = Blocks(layers, width, width // 128)
    return zoo.Job(model, model, (torch.randn(tokens // 2048, 2048, width),), "layers.*")


def llama() -> zoo.Job:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
        max_position_embeddings=8192,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(32000, (1, 8192))
    return zoo.Job(model, lambda ids: model(input_ids=ids, labels=ids).loss, (ids,), "model.layers.*")


def vit() -> zoo.Job:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, num_labels=1000
    )
    model = transformers.ViTForImageClassification(config)
    images, labels = torch.randn(128, 3, 224, 224), torch.randint(1000, (128,))
    return zoo.Job(
        model,
        lambda images, labels: model(pixel_values=images, labels=labels).loss,
        (images, labels),
        list(find_regions(model, None)),
    )


MODELS: dict[str, tuple[str, Callable[[], zoo.Job]]] = {
    "A": ("16 blocks of width 2048, 16k tokens", lambda: stack(16, 2048, 16384)),
    "B": ("8 blocks of width 4096, 8k tokens", lambda: stack(8, 4096, 8192)),
    "C": ("Hugging Face Llama, 16 layers of width 2048, 8k context", llama),
    "D": ("Hugging Face ViT-L, 128 images", vit),
}
FLOPS_BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
PROFILE_BUDGETS = (0.9, 0.7, 0.5, 0.3, 0.1)
SHARES = (0.5, 0.1, 0.9, 0.3, 0.7, 0.2, 0.8, 0.4, 0.6)
NUM_BUDGETS = 10
DEAR = 0.02  # what a peer costs, of the plain step, from which ours is said as a share of it
HOST = 64 * GIB
_ROUNDS_SHARE = 0.3  # of the time that there is, for timing what has been compiled


def on_gpu(make: Callable[[], zoo.Job]) -> zoo.Job:
    with torch.device("cuda"):
        job = make()
    job.model.to(device="cuda", dtype=torch.bfloat16).train()
    job.batch = tuple(item.to("cuda", torch.bfloat16 if item.is_floating_point() else item.dtype) for item in job.batch)
    return job


class Regional:
    """A way to compile the blocks of a job, which can be put on and taken off; its code stays compiled meanwhile."""

    def __init__(
        self, job: zoo.Job, fraction: float = 1.0, estimator: str = "flops", checkpointed: bool = False
    ) -> None:
        self.job, self._checkpointed = job, checkpointed
        self._patch = {"activation_memory_budget": fraction, "activation_memory_budget_runtime_estimator": estimator}
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
                run = functools.partial(checkpoint, type(block).forward, block, use_reentrant=False)
                block.forward = run  # type: ignore[method-assign]
            block.compile(backend=self.backend)

    def __exit__(self, *exception: object) -> None:
        for block in self.blocks:
            block._compiled_call_impl = None
            block.__dict__.pop("forward", None)


class Ours(Regional):
    """`lowtide.compile`, likewise."""

    def __init__(self, job: zoo.Job, budget: int, host: int) -> None:
        super().__init__(job)
        lowtide.compile(job.model, budget=budget, host=host, regional=True)
        self._compiled = [block._compiled_call_impl for block in self.blocks]
        (self._hook,) = job.model._forward_pre_hooks.items()
        with_kwargs = job.model._forward_pre_hooks_with_kwargs
        self._flags = dict(with_kwargs)
        self.__exit__()

    def __enter__(self) -> None:
        for block, compiled in zip(self.blocks, self._compiled, strict=True):
            block._compiled_call_impl = compiled
        self.job.model._forward_pre_hooks[self._hook[0]] = self._hook[1]
        self.job.model._forward_pre_hooks_with_kwargs.update(self._flags)

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self.job.model._forward_pre_hooks.clear()


def step(job: zoo.Job) -> None:
    job.step()
    job.model.zero_grad(set_to_none=True)


@dataclass(frozen=True)
class Found:
    """Median seconds, and by how much they are over those of the plain steps of the same round, in the median."""

    seconds: float
    over: float


def settle(contestant: Regional, num_steps: int) -> float:
    """Steps until everything is compiled; seconds that took."""
    start = time.perf_counter()
    with contestant:
        for _ in range(num_steps):
            step(contestant.job)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_of(contestant: Regional) -> int:
    with contestant:
        step(contestant.job)
        torch.cuda.reset_peak_memory_stats()
        step(contestant.job)
        return torch.cuda.max_memory_allocated()


def in_turns(contestants: list[Regional], rounds: int, deadline: float) -> list[Found]:
    """Some steps of each contestant that has settled, then again, and so on: clocks drift. The first is plain."""
    times: list[list[float]] = [[] for _ in contestants]
    for number in range(rounds):
        if number and time.monotonic() > deadline:
            break
        for found, contestant in zip(times, contestants, strict=True):
            with contestant:
                step(contestant.job)
                found.append(timed(functools.partial(step, contestant.job), "cuda", NUM_IN_A_ROW))
    return [Found(statistics.median(found), median_over(found, times[0])) for found in times]


@dataclass(frozen=True)
class Peer:
    """A way to compile that people have, and what came of it."""

    label: str
    contestant: Regional
    peak_bytes: int
    settled_s: float


@dataclass(frozen=True)
class Target:
    """A budget for ours: the peak of a peer, or one between."""

    label: str
    budget: int
    peer: Peer | None = None
    host: int = 0


def compare(name: str, options: argparse.Namespace, page: Page) -> None:
    title, make = MODELS[name]
    start = time.monotonic()
    job = on_gpu(make)
    page.add("", f"## {name}: {title}", "")
    if options.cold:
        settle(Ours(job, int(options.cold * GIB), 0), 8)
        page.add(f"From nothing, with {options.cold} GiB: {_took(explain_compiled(job.model))}")
        return
    peers, alike = _peers(job, options.few)
    ours: list[tuple[Target, Ours, str]] = []
    for target in _targets(name, peers, options.budgets):
        if time.monotonic() > start + (1 - _ROUNDS_SHARE) * options.seconds:
            page.add(f"{target.label}, {target.budget / GIB:.3f} GiB: no time left", "")
            continue
        try:
            each = Ours(job, target.budget, target.host)
            settle(each, 8)
        except lowtide.InfeasibleBudgetError as error:
            page.add(f"{target.label}, {target.budget / GIB:.3f} GiB: {str(error).splitlines()[0]}", "")
            continue
        explained = explain_compiled(job.model)
        if options.explain:
            print(explained, flush=True)
        ours.append((target, each, _took(explained)))
    found = in_turns(
        [*(peer.contestant for peer in peers), *(each for _, each, _ in ours)], options.rounds, start + options.seconds
    )
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
        "| lowtide.compile | budget GiB | theirs | ours ms | ours | of theirs | peak GiB | compiling, planning |",
        "|" + "---|" * 8,
    )
    for (target, contestant, took), each in zip(ours, found[len(peers) :], strict=True):
        theirs = None if target.peer is None else by_peer[target.peer.label].over
        page.add(_row(target, theirs, each, peak_of(contestant), took))
    torch._dynamo.reset()


def _took(explained: str) -> str:
    """What compiling and planning took, in words."""
    (took,) = (line.split("took")[1].strip() for line in explained.splitlines() if line.startswith("  took"))
    return took


def _peers(job: zoo.Job, few: bool) -> tuple[list[Peer], list[str]]:
    """Every peer, the plain one first; those that do what another did before are only named."""
    flops, profile = (FLOPS_BUDGETS, PROFILE_BUDGETS) if not few else (FLOPS_BUDGETS[::3], (0.5,))
    contestants = {"torch.compile": Regional(job), "checkpoint per block": Regional(job, checkpointed=True)}
    contestants |= {f"activation_memory_budget {f} (flops)": Regional(job, f) for f in flops}
    contestants |= {f"activation_memory_budget {f} (profile)": Regional(job, f, "profile") for f in profile}
    found: dict[int, Peer] = {}
    alike: list[str] = []
    for label, contestant in contestants.items():
        settled_s, peak = settle(contestant, 2), peak_of(contestant)
        if peak in found:
            alike.append(f"{label} has the same peak as {found[peak].label}.")
        else:
            found[peak] = Peer(label, contestant, peak, settled_s)
    return list(found.values()), alike


def _targets(name: str, peers: list[Peer], num_budgets: int) -> list[Target]:
    """The peaks of peers, and as many budgets between as to make `num_budgets`, from large to small; then the peaks of
    peers with host memory, where it helps most first.
    """
    top, floor = peers[0].peak_bytes, peers[1].peak_bytes
    at_peers = [Target(f"at the peak of: {peer.label}", peer.peak_bytes, peer) for peer in peers[1:]]
    between = [Target("10 GiB", 10 * GIB)] if name == "B" else []
    between += [
        Target(f"{int(100 * share)} % of the way from a checkpoint per block", int(floor + (top - floor) * share))
        for share in SHARES
    ]
    targets = [*at_peers, *between][: max(num_budgets, len(at_peers))]
    with_host = [replace(target, label=f"{target.label}, host", host=HOST) for target in at_peers]
    return [*sorted(targets, key=lambda target: -target.budget), *sorted(with_host, key=lambda target: target.budget)]


def _over(share: float) -> str:
    return f"{100 * share:+.1f} %"


def _row(target: Target, theirs: float | None, ours: Found, peak: int, took: str) -> str:
    """A row of the table of ours."""
    share = "" if theirs is None or theirs < DEAR else f"{100 * ours.over / theirs:.0f} %"
    return (
        f"| {target.label} | {target.budget / GIB:.3f} | {'' if theirs is None else _over(theirs)} "
        f"| {1e3 * ours.seconds:.1f} | {_over(ours.over)} | {share} "
        f"| {peak / GIB:.3f}{'' if peak <= target.budget else ' **over**'} | {took} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--few", action="store_true", help="fewer values of peers")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="for each model; what comes late is left out"
    )
    parser.add_argument("--budgets", type=int, default=NUM_BUDGETS, help="how many, with those of peers")
    parser.add_argument("--explain", action="store_true")
    parser.add_argument(
        "--cold",
        type=float,
        help="only compile for so many GiB, and tell what that took (TORCHINDUCTOR_FORCE_DISABLE_CACHES=1: all of it)",
    )
    parser.add_argument("--suffix", default="", help="of the name of the file with results")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1024
    page = Page(
        options.out,
        f"compiled-cuda{options.suffix}.md",
        f"# Compiled training under a budget, {device_name('cuda')}",
        "",
        f"{versions()}, bf16, forward and backward. Budgets are peaks of the whole step; ours are measured too.",
    )
    for name in options.names:
        compare(name, options, page)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
