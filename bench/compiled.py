"""Compiled training under a budget against what people use today: same model, same run, measured peaks and times.

    python bench/compiled.py [--out FOLDER] [--few] [models ...]

Every contestant compiles each block as a graph of its own (`block.compile()`), which is as fast as one whole graph and
compiles far sooner. Peers: torch.compile as it is; its `activation_memory_budget` at various values with both of its
runtime estimators; torch's checkpoint on each block, inside the compiled graph. Ours is `lowtide.compile` at the peak
that was measured of each peer, without and with host memory, and at budgets between the floor and the plain peak. Plain
steps are timed between those of each contestant, and it is their ratio that counts: clocks drift. Needs a GPU.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Callable
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


def measured(contestant: Regional, plain: Regional, rounds: int, settling: int = 3) -> tuple[float, float, int, float]:
    """Median seconds of a contestant and of plain steps between its own, its peak, and seconds until it had settled."""
    job = contestant.job
    start = time.perf_counter()
    with contestant:
        for _ in range(settling):
            step(job)
        torch.cuda.synchronize()
    settled_s = time.perf_counter() - start
    theirs, ours = [], []
    for _ in range(rounds):
        with plain:
            step(job)
            theirs.append(timed(lambda: step(job), "cuda"))
        with contestant:
            step(job)
            ours.append(timed(lambda: step(job), "cuda"))
    with contestant:
        step(job)
        torch.cuda.reset_peak_memory_stats()
        step(job)
        peak = torch.cuda.max_memory_allocated()
    return statistics.median(ours), statistics.median(theirs), peak, settled_s


def compare(name: str, options: argparse.Namespace) -> list[str]:
    title, make = MODELS[name]
    job = on_gpu(make())
    flops, profile = (FLOPS_BUDGETS, PROFILE_BUDGETS) if not options.few else (FLOPS_BUDGETS[::3], (0.5,))
    plain = Regional(job)
    peers = {"torch.compile": plain}
    peers |= {f"activation_memory_budget {f} (flops)": Regional(job, f) for f in flops}
    peers |= {f"activation_memory_budget {f} (profile)": Regional(job, f, "profile") for f in profile}
    peers["checkpoint per block"] = Regional(job, checkpointed=True)
    found: dict[str, tuple[float, int]] = {}  # time over plain, and peak
    lines = ["", f"## {name}: {title}", "", "| peer | ms | over plain | peak GiB | compile s |", "|" + "---|" * 5]
    for peer, contestant in peers.items():
        seconds, plain_s, peak, compile_s = measured(contestant, plain, options.rounds)
        found[peer] = seconds / plain_s - 1, peak
        lines.append(f"| {peer} | {1e3 * seconds:.1f} | {_over(found[peer][0])} | {peak / GIB:.3f} | {compile_s:.1f} |")
        print(lines[-1], flush=True)
    floor, plain_peak = found["checkpoint per block"][1], found["torch.compile"][1]
    targets: list[tuple[str, int, float | None]] = []
    for peer, (over, peak) in found.items():
        is_best = all(o >= over or p > peak for o, p in found.values())
        if peer != "torch.compile" and (is_best or peer == "checkpoint per block"):
            targets.append((f"at the peak of: {peer}", peak, over))
    targets += [
        (
            f"{int(100 * share)} % of the way from a checkpoint per block",
            int(floor + (plain_peak - floor) * share),
            None,
        )
        for share in (SHARES[1::2] if options.few else SHARES)
    ]
    targets += [("10 GiB", 10 * GIB, None)] if name == "B" else []
    targets.sort(key=lambda target: -target[1])
    lines += ["", "| lowtide.compile | budget GiB | theirs | ours ms | ours | peak GiB | settled s |", "|" + "---|" * 7]
    hosts = [(target, 0) for target in targets]
    moving = ("of: checkpoint",) if options.few else ("of: ",)
    hosts += [((f"{label}, host", *rest), 64 * GIB) for label, *rest in targets if any(m in label for m in moving)]  # type: ignore[misc]
    for (label, budget, over), host in hosts:
        lines.append(_ours(job, plain, label, budget, over, host, options))
        print(lines[-1], flush=True)
    torch._dynamo.reset()
    return lines


def _over(share: float) -> str:
    return f"{100 * share:+.1f} %"


def _ours(
    job: zoo.Job, plain: Regional, label: str, budget: int, theirs: float | None, host: int, options: argparse.Namespace
) -> str:
    try:
        seconds, plain_s, peak, settled_s = measured(Ours(job, budget, host), plain, options.rounds, settling=9)
    except lowtide.InfeasibleBudgetError as error:
        return f"| {label} | {budget / GIB:.3f} | infeasible: {str(error).splitlines()[0]} |"
    if options.explain:
        print(lowtide.explain_compiled(job.model).split("\n\n")[-1], flush=True)
    over = "" if peak <= budget else " **over**"
    return (
        f"| {label} | {budget / GIB:.3f} | {'' if theirs is None else _over(theirs)} | {1e3 * seconds:.1f} "
        f"| {_over(seconds / plain_s - 1)} | {peak / GIB:.3f}{over} | {settled_s:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--few", action="store_true")
    parser.add_argument("--explain", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1024
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
