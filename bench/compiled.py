"""Compiled training under a budget against what people use today: same model, same run, measured peaks and times.

    python bench/compiled.py [--out FOLDER] [--few] [models ...]

Every contestant compiles each block as a graph of its own (`block.compile()`), which is as fast as one whole graph and
compiles far sooner. Peers: torch.compile as it is; its `activation_memory_budget` at various values with both of its
runtime estimators; torch's checkpoint on each block, inside the compiled graph. Ours is `lowtide.compile` at each peer's
measured peak, and at budgets between the floor and the plain peak. Needs a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import zoo
from reporting import RESULTS, device_name, save, timed, versions
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.engines.regions import find_regions

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
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)


def on_gpu(job: zoo.Job) -> zoo.Job:
    job.model.to(device="cuda", dtype=torch.bfloat16).train()
    job.batch = tuple(
        item.to("cuda", torch.bfloat16 if item.is_floating_point() else item.dtype) for item in job.batch
    )
    return job


@contextlib.contextmanager
def regional(job: zoo.Job, fraction: float = 1.0, estimator: str = "flops", checkpointed: bool = False) -> Iterator[None]:
    """torch.compile on each block."""
    from torch._functorch import config

    blocks = list(find_regions(job.model, job.blocks).values())
    for block in blocks:
        if checkpointed:
            block.forward = functools.partial(checkpoint, type(block).forward, block, use_reentrant=False)  # type: ignore[method-assign]
        block.compile()
    try:
        with config.patch(activation_memory_budget=fraction, activation_memory_budget_runtime_estimator=estimator):
            yield
    finally:
        plain_again(job)


@contextlib.contextmanager
def ours(job: zoo.Job, budget: int, **options: Any) -> Iterator[None]:
    lowtide.compile(job.model, budget=budget, regional=True, **options)
    try:
        yield
    finally:
        plain_again(job)


def plain_again(job: zoo.Job) -> None:
    job.model._forward_pre_hooks.clear()
    for module in job.model.modules():
        module._compiled_call_impl = None
        module.__dict__.pop("forward", None)
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def measured(job: zoo.Job, rounds: int, settling: int = 3) -> tuple[float, int, float]:
    """Median seconds, the peak of the whole step, and seconds until the first steps were done."""

    def step() -> None:
        job.step()
        job.model.zero_grad(set_to_none=True)

    start = time.perf_counter()
    for _ in range(settling):
        step()
    torch.cuda.synchronize()
    compile_s = time.perf_counter() - start
    seconds = statistics.median(timed(step, "cuda") for _ in range(rounds))
    torch.cuda.reset_peak_memory_stats()
    step()
    return seconds, torch.cuda.max_memory_allocated(), compile_s


def compare(name: str, options: argparse.Namespace) -> list[str]:
    title, make = MODELS[name]
    job = on_gpu(make())
    flops, profile = (FLOPS_BUDGETS, PROFILE_BUDGETS) if not options.few else (FLOPS_BUDGETS[::3], PROFILE_BUDGETS[::2])
    peers: dict[str, Any] = {"torch.compile": regional(job)}
    peers |= {f"activation_memory_budget {f} (flops)": regional(job, f) for f in flops}
    peers |= {f"activation_memory_budget {f} (profile)": regional(job, f, "profile") for f in profile}
    peers["checkpoint per block"] = regional(job, checkpointed=True)
    found: dict[str, tuple[float, int, float]] = {}
    lines = ["", f"## {name}: {title}", "", "| peer | ms | over plain | peak GiB | compile s |", "|" + "---|" * 5]
    for peer, context in peers.items():
        with context:
            found[peer] = measured(job, options.rounds)
        seconds, peak, compile_s = found[peer]
        plain_s, plain_peak, _ = found["torch.compile"]
        lines.append(
            f"| {peer} | {1e3 * seconds:.1f} | {100 * (seconds / plain_s - 1):+.1f} % | {peak / GIB:.3f} | {compile_s:.1f} |"
        )
        print(lines[-1], flush=True)
    floor = found["checkpoint per block"][1]
    lines += ["", "| lowtide.compile | budget GiB | theirs | ours ms | over plain | peak GiB | compile s |", "|" + "---|" * 7]
    targets: list[tuple[str, int, float]] = []
    for peer, (seconds, peak, _) in sorted(found.items(), key=lambda item: -item[1][1]):
        is_best = all(s >= seconds or p > peak for s, p, _ in found.values())
        if peer != "torch.compile" and is_best:
            targets.append((f"at the peak of: {peer}", peak, seconds))
    targets += [
        (f"{int(100 * share)} % of the way from a checkpoint per block", int(floor + (plain_peak - floor) * share), 0.0)
        for share in SHARES
    ]
    targets += [("10 GiB", 10 * GIB, 0.0)] if name == "B" else []
    for label, budget, theirs_s in sorted(targets, key=lambda target: -target[1]):
        try:
            with ours(job, budget):
                seconds, peak, compile_s = measured(job, options.rounds, settling=6)
                story = lowtide.explain_compiled(job.model)
        except lowtide.InfeasibleBudgetError as error:
            lines.append(f"| {label} | {budget / GIB:.3f} | infeasible: {str(error).splitlines()[0]} |")
            print(lines[-1], flush=True)
            continue
        theirs = f"{100 * (theirs_s / plain_s - 1):+.1f} %" if theirs_s else ""
        over = "" if peak <= budget else " **over**"
        lines.append(
            f"| {label} | {budget / GIB:.3f} | {theirs} | {1e3 * seconds:.1f} | {100 * (seconds / plain_s - 1):+.1f} % "
            f"| {peak / GIB:.3f}{over} | {compile_s:.1f} |"
        )
        print(lines[-1], flush=True)
        if options.explain:
            print(story, flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--few", action="store_true")
    parser.add_argument("--explain", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.manual_seed(0)
    lines = [
        f"# Compiled training under a budget, {device_name('cuda')}",
        "",
        f"{versions()}, bf16, forward and backward. Budgets are peaks of the whole step; ours are measured too.",
    ]
    for name in options.names:
        lines += compare(name, options)
        gc.collect()
        torch.cuda.empty_cache()
        save(lines, options.out, "compiled-cuda.md")


if __name__ == "__main__":
    main()
