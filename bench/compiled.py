"""Compiled training under a budget against what people use today: same model, same run, measured peaks and times.

    python bench/compiled.py [--out FOLDER] [--few] [--budgets N] [models ...]

Every contestant compiles each block as a graph of its own (`block.compile()`), which is as fast as one whole graph and
compiles far sooner. Peers: torch.compile as it is; its `activation_memory_budget` at various values with both of its
runtime estimators; torch's checkpoint on each block, inside the compiled graph. Ours is `lowtide.compile` at the peak
of each peer that no other beats, with host memory too where that peer costs anything, and at budgets between the floor
and the plain peak, ten in all. Plain steps are timed between those of each contestant, and it is their ratio that
counts: clocks drift. Needs a GPU, to itself.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import zoo
from reporting import NUM_IN_A_ROW, RESULTS, Page, device_name, median_over, timed, versions
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
SHARES = (0.5, 0.1, 0.9, 0.3, 0.7, 0.2, 0.8, 0.4, 0.6)
NUM_BUDGETS = 10
DEAR = 0.03  # what a peer costs, of the plain step, from which host memory is tried too


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
    """Median seconds, and by how much they are over those of the plain steps right before; the peak; seconds until
    everything was compiled.
    """

    seconds: float
    over: float
    peak_bytes: int
    settled_s: float


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


def measured(contestant: Regional, plain: Regional, options: argparse.Namespace, settled_s: float) -> Found:
    """A contestant that has settled."""
    job = contestant.job
    theirs, ours = [], []
    for _ in range(options.rounds):
        with plain:
            theirs.append(timed(lambda: step(job), "cuda", NUM_IN_A_ROW))
        with contestant:
            ours.append(timed(lambda: step(job), "cuda", NUM_IN_A_ROW))
    return Found(statistics.median(ours), median_over(ours, theirs), peak_of(contestant), settled_s)


def compare(name: str, options: argparse.Namespace, page: Page) -> None:
    title, make = MODELS[name]
    job = on_gpu(make)
    plain = Regional(job)
    found = _peers(job, plain, options, page, f"{name}: {title}")
    floor, top = found["checkpoint per block"].peak_bytes, found["torch.compile"].peak_bytes
    targets: list[tuple[str, int, float | None]] = []
    for peer, each in found.items():
        is_beaten = any(o.over < each.over and o.peak_bytes <= each.peak_bytes for o in found.values())
        if peer == "checkpoint per block" or not (is_beaten or peer == "torch.compile"):
            targets.append((f"at the peak of: {peer}", each.peak_bytes, each.over))
    with_host = [target for target in targets if (target[2] or 0) >= DEAR]
    targets += [("10 GiB", 10 * GIB, None)] if name == "B" else []
    between = [(f"{int(100 * share)} % of the way from a checkpoint per block", share) for share in SHARES]
    targets += [(label, int(floor + (top - floor) * share), None) for label, share in between]
    targets = sorted(targets[: options.budgets], key=lambda target: -target[1])
    page.add(
        "",
        "| lowtide.compile | budget GiB | theirs | ours ms | ours | of theirs | peak GiB | compiling, planning |",
        "|" + "---|" * 8,
    )
    for label, budget, over in targets:
        page.add(_ours(job, plain, label, budget, over, 0, options))
    for label, budget, over in with_host:
        page.add(_ours(job, plain, f"{label}, host", budget, over, 64 * GIB, options))
    torch._dynamo.reset()


def _peers(job: zoo.Job, plain: Regional, options: argparse.Namespace, page: Page, title: str) -> dict[str, Found]:
    """Every peer measured; those that do what another did before only once."""
    flops, profile = (FLOPS_BUDGETS, PROFILE_BUDGETS) if not options.few else (FLOPS_BUDGETS[::3], (0.5,))
    peers = {"torch.compile": plain, "checkpoint per block": Regional(job, checkpointed=True)}
    peers |= {f"activation_memory_budget {f} (flops)": Regional(job, f) for f in flops}
    peers |= {f"activation_memory_budget {f} (profile)": Regional(job, f, "profile") for f in profile}
    found: dict[str, Found] = {}
    page.add("", f"## {title}", "", "| peer | ms | over plain | peak GiB | compile s |", "|" + "---|" * 5)
    for peer, contestant in peers.items():
        settled_s, peak = settle(contestant, 2), peak_of(contestant)
        same = next((other for other, each in found.items() if each.peak_bytes == peak), None)
        if same is not None:
            page.add(f"| {peer} | as {same.removeprefix('activation_memory_budget ')} | | {peak / GIB:.3f} | |")
            continue
        each = found[peer] = measured(contestant, plain, options, settled_s)
        page.add(f"| {peer} | {1e3 * each.seconds:.1f} | {_over(each.over)} | {peak / GIB:.3f} | {settled_s:.1f} |")
    return found


def _over(share: float) -> str:
    return f"{100 * share:+.1f} %"


def _ours(
    job: zoo.Job, plain: Regional, label: str, budget: int, theirs: float | None, host: int, options: argparse.Namespace
) -> str:
    try:
        ours = Ours(job, budget, host)
        found = measured(ours, plain, options, settle(ours, 8))
    except lowtide.InfeasibleBudgetError as error:
        return f"| {label} | {budget / GIB:.3f} | infeasible: {str(error).splitlines()[0]} |"
    explained = lowtide.explain_compiled(job.model)
    if options.explain:
        print(explained, flush=True)
    (took,) = (line.split("took")[1].strip() for line in explained.splitlines() if line.startswith("  took"))
    peak = found.peak_bytes
    return (
        f"| {label} | {budget / GIB:.3f} | {'' if theirs is None else _over(theirs)} | {1e3 * found.seconds:.1f} "
        f"| {_over(found.over)} | {'' if theirs is None else f'{100 * found.over / theirs:.0f} %'} "
        f"| {peak / GIB:.3f}{'' if peak <= budget else ' **over**'} | {took} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--few", action="store_true", help="fewer values of peers")
    parser.add_argument("--budgets", type=int, default=NUM_BUDGETS, help="how many, with those of peers")
    parser.add_argument("--explain", action="store_true")
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
