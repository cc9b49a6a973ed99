"""Eager training under a budget against what people use today: same model, same run, measured peaks and times.

    python bench/eager.py [--device cuda] [--out FOLDER] [models ...]

Peers: nothing; torch's checkpoint on each block and on every second; torch's selective checkpointing that keeps all
matrix products, and every other one (as torchtitan does); Hugging Face's own `gradient_checkpointing` where it is one
of theirs; on a GPU, everything offloaded by torch's `save_on_cpu`. Ours is `lowtide.fit` at each peer's measured peak,
and at budgets between the floor and the plain peak; on a GPU also with host memory.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import zoo
from reporting import NUM_IN_A_ROW, RESULTS, Page, device_name, median_over, timed, versions
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import lowtide
from lowtide.engines.regions import find_regions

PRODUCTS = ("mm", "addmm", "bmm", "attention", "convolution", "linear")
SHARES = (0.5, 0.3, 0.7, 0.1, 0.9)
HOST = 64 << 30


def gpt_large(device: str) -> zoo.Job:
    if device == "cpu":
        return zoo.gpt(8, 256, 8, 512, (8, 128))
    return zoo.gpt(16, 2048, 16, 32000, (8, 2048))


def llama(device: str) -> zoo.Job:
    import transformers

    size = (256, 688, 8, 1000, 4, 128) if device == "cpu" else (2048, 5632, 16, 32000, 8, 2048)
    width, hidden, layers, vocabulary, batch, length = size
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=width // 128 if width > 512 else 4,
        num_key_value_heads=width // 128 if width > 512 else 4,
        vocab_size=vocabulary,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(vocabulary, (batch, length))
    return zoo.Job(model, lambda ids: model(input_ids=ids, labels=ids).loss, (ids,), "model.layers.*")


MODELS: dict[str, Callable[[str], zoo.Job]] = {"gpt": gpt_large, "hf_llama": llama}


def selective(every: int) -> Callable[[], Any]:
    """torch's selective checkpointing that keeps every `every`-th matrix product."""

    def contexts() -> Any:
        seen = {False: 0, True: 0}

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if not any(word in str(op) for word in PRODUCTS):
                return CheckpointPolicy.PREFER_RECOMPUTE
            seen[context.is_recompute] += 1
            keeps = seen[context.is_recompute] % every == 0
            return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return contexts


@contextlib.contextmanager
def torch_checkpoints(job: zoo.Job, step: int = 1, context_fn: Any = None) -> Iterator[None]:
    """torch's own checkpoint on every `step`-th block."""
    blocks = list(find_regions(job.model, job.blocks).values())[::step]
    before = [vars(block).pop("forward", None) for block in blocks]  # ours, which is switched off
    options = {} if context_fn is None else {"context_fn": context_fn}
    for block in blocks:
        block.forward = functools.partial(checkpoint, type(block).forward, block, use_reentrant=False, **options)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for block, forward in zip(blocks, before, strict=True):
            del block.forward
            if forward is not None:
                block.forward = forward  # type: ignore[method-assign]


@contextlib.contextmanager
def hugging_face(job: zoo.Job) -> Iterator[None]:
    model: Any = job.model
    model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()


def peers(job: zoo.Job) -> dict[str, Any]:
    found = {
        "nothing": contextlib.nullcontext,
        "torch checkpoint per block": functools.partial(torch_checkpoints, job),
        "torch checkpoint, every second block": functools.partial(torch_checkpoints, job, 2),
        "torch selective, all products kept": functools.partial(torch_checkpoints, job, 1, selective(1)),
        "torch selective, every other product": functools.partial(torch_checkpoints, job, 1, selective(2)),
    }
    if hasattr(job.model, "gradient_checkpointing_enable"):
        found["Hugging Face gradient_checkpointing"] = functools.partial(hugging_face, job)
    if next(job.model.parameters()).is_cuda:
        found["torch save_on_cpu, everything"] = functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=True)
    return found


@dataclass(frozen=True)
class Timed:
    """Median seconds under something, and by how much longer that takes than the plain steps right before it."""

    seconds: float
    over: float

    def __str__(self) -> str:
        return f"{1e3 * self.seconds:.1f} | {100 * self.over:+.1f} %"


def in_turns(job: zoo.Job, device: str, rounds: int, *unders: Callable[[], Any]) -> list[Timed]:
    """Plain steps, then some under each context, and so on: what is compared runs in the same minute.

    On a GPU several steps follow one another, as in a training loop: the host need not wait for the device.
    """

    def step() -> None:
        job.step()
        job.model.zero_grad(set_to_none=True)

    repeat = NUM_IN_A_ROW if device == "cuda" else 1
    contexts = [contextlib.nullcontext, *unders]
    times: list[list[float]] = [[] for _ in contexts]
    for context in contexts:
        with context():
            step()
    for _ in range(rounds):
        for found, context in zip(times, contexts, strict=True):
            with context():
                found.append(timed(step, device, repeat))
    return [Timed(statistics.median(found), median_over(found, times[0])) for found in times]


def peak_of(job: zoo.Job, device: str, under: Callable[[], Any]) -> int:
    with under():
        job.step()
        job.model.zero_grad(set_to_none=True)
        peak = lowtide.measure(job.step, device=device).total_peak_bytes
    job.model.zero_grad(set_to_none=True)
    return peak


@contextlib.contextmanager
def switched_on(handle: lowtide.Applied) -> Iterator[None]:
    handle.enabled = True
    try:
        yield
    finally:
        handle.enabled = False


@dataclass(frozen=True)
class Target:
    """A budget for ours: the peak of a peer, or a share of the way from the floor to the plain peak."""

    label: str
    budget: int
    peer: str = ""
    host: int = 0


def targets_of(peaks: dict[str, int], floor: int, device: str) -> list[Target]:
    """What tells most, first."""
    targets: list[Target] = []
    for peer, peak in list(peaks.items())[1:]:
        if "save_on_cpu" not in peer and peak not in [target.budget for target in targets]:
            targets.append(Target(f"at the peak of: {peer}", peak, peer))
    top = peaks["nothing"]
    between = [
        Target(f"{int(100 * share)} % of the way from floor", int(floor + (top - floor) * share)) for share in SHARES
    ]
    if device != "cuda":
        return targets + between
    offloaded = [Target(f"at the peak of: {peer}", peak, peer) for peer, peak in peaks.items() if "on_cpu" in peer]
    with_host = [
        replace(each, label=f"{each.label}, with host memory", host=HOST)
        for each in (targets[0], *offloaded, *between[:2])
    ]
    return [targets[0], with_host[0], between[0], *targets[:0:-1], *with_host[1:], *between[1:]]


def row(job: zoo.Job, target: Target, peer: Callable[[], Any] | None, device: str, rounds: int, there: int) -> str:
    """A row of the table: `fit` at one budget, beside the peer with that peak."""
    start = f"| {target.label} | {target.budget / 2**30:.3f} "
    try:
        handle = lowtide.fit(job.model, job.loss_fn, *job.batch, budget=target.budget, host=target.host)
    except lowtide.InfeasibleBudgetError as error:
        return f"{start}| infeasible: {str(error).splitlines()[0]} |"
    handle.enabled = False
    ours = functools.partial(switched_on, handle)
    rounds = 1 if "save_on_cpu" in target.peer else rounds  # it takes many times as long as the others
    found = in_turns(job, device, rounds, *([] if peer is None else [peer]), ours)
    peak = peak_of(job, device, ours) + there
    handle.remove()
    plan, theirs = handle.plan, " | " if peer is None else str(found[1])
    predicted = f"{100 * plan.slowdown:+.1f} % | {100 * plan.gap:.2f} %"
    return f"{start}| {theirs} | {found[-1]} | {predicted} | {peak / 2**30:.3f} | {tuned(handle)} |"


def tuned(handle: Any) -> str:
    """What `fit` itself measured, and the candidates that it tried: measured slowdowns, the kept one in bold."""
    slowdown = handle.measured_slowdown
    shown = []
    for trial in handle.candidates:
        measured = trial.measured_slowdown
        text = f"{trial.name} {trial.outcome if measured is None else f'{100 * measured:+.1f} %'}"
        if trial.measured_peak_bytes is not None and trial.measured_peak_bytes > handle.plan.budget_bytes:
            text += " (over)"
        shown.append(f"**{text}**" if trial.outcome == "kept" else text)
    return f"{'' if slowdown is None else f'{100 * slowdown:+.1f} %'} | {'; '.join(shown)}"


def made(name: str, device: str) -> zoo.Job:
    with torch.device(device):
        job = MODELS[name](device)
    job.model.to(dtype=torch.bfloat16 if device == "cuda" else torch.float32).train()
    return job


def compare(name: str, device: str, rounds: int, num_rows: int | None, page: Page) -> None:
    job = made(name, device)
    tensors = [*job.model.parameters(), *job.model.buffers(), *job.batch]
    there = 0 if device == "cuda" else sum(tensor.nbytes for tensor in tensors)
    contexts = peers(job)
    peaks = {peer: peak_of(job, device, context) + there for peer, context in contexts.items()}
    floor = lowtide.sweep(lowtide.trace(job.model, job.loss_fn, *job.batch, mode="real"), []).floor_bytes
    (plain,) = in_turns(job, device, rounds)
    page.add("", f"## {name}: plain {1e3 * plain.seconds:.1f} ms, {peaks['nothing'] / 2**30:.3f} GiB", "")
    heads = "theirs ms | theirs + | ours ms | ours + | ours predicted + | gap | ours GiB | fit measured + | candidates"
    page.add(f"| | budget GiB | {heads} |")
    page.add("|" + "---|" * 11)
    for target in targets_of(peaks, floor, device)[:num_rows]:
        page.add(row(job, target, contexts.get(target.peer), device, rounds, there))


def overhead(device: str, rounds: int) -> str:
    """What the engine costs when it has nothing to do but to be there: a plan on a model, switched off and on."""
    job = made("gpt", device)
    names: dict[str, nn.Module] = find_regions(job.model, job.blocks)
    plan = lowtide.Plan(regions=tuple(lowtide.plans.Recompute(name) for name in names))

    @contextlib.contextmanager
    def patched() -> Iterator[None]:
        with lowtide.apply(job.model, plan) as handle, handle.disabled():
            yield

    ratios = [1 + in_turns(job, device, rounds, patched)[-1].over for _ in range(3)]
    return f"Every block patched and kept: {statistics.median(ratios):.3f} of the plain step's time (median of three)."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(MODELS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--rows", type=int, help="of each table, those that tell most first; all of them by default")
    parser.add_argument("--suffix", default="", help="of the name of the file with results")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.manual_seed(0)
    page = Page(
        options.out,
        f"eager-{options.device}{options.suffix}.md",
        f"# Eager training under a budget, {device_name(options.device)}",
        "",
        f"{versions()}. Plain steps, theirs and ours run in turns; `+` is over the plain steps right before, in the "
        "median. Budgets are peaks of the whole step; ours are measured too.",
    )
    if "gpt" in options.names:
        page.add("", overhead(options.device, options.rounds))
    for name in options.names:
        compare(name, options.device, options.rounds, options.rows, page)


if __name__ == "__main__":
    main()
