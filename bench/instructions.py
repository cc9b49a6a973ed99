"""Instructions that the host executes more than in the plain step, where every block is recomputed.

`python bench/instructions.py` starts itself under callgrind, which counts instructions, so that other processes on the
machine do not matter. Models are so small that the host is nearly all there is. The ways are torch's checkpoint on
every block, a plan that recomputes the same blocks, torch's checkpoint around all of them, and a plan with one segment
of all of them. Prints the rows of the tables in bench/results/replay-cpu.md. Needs valgrind and gcc.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from families import FAMILIES, Size
from torch import Tensor, nn
from ways import TORCH, checkpointed, step
from zoo import Job

import lowtide
from lowtide.plans import Plan, Recompute
from replay import planned

NUM_WARM, NUM_STEPS = 4, 2
_DIR = "LOWTIDE_CALLGRIND_DIR"

# Callgrind counts between the two calls, and writes what it counted to a file that carries the name.
_COUNTER = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void end(const char *name) { CALLGRIND_DUMP_STATS_AT(name); CALLGRIND_STOP_INSTRUMENTATION; }
"""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.dropout(nn.functional.gelu(self.first(x))))


def chain(size: Size) -> Job:
    """A chain of blocks, each called with one tensor."""
    model = nn.Sequential(*(Block(size.width) for _ in range(size.layers)))
    return Job(model, lambda x: model(x).square().mean(), (torch.randn(size.batch, size.width),), "*")


SIZES = {
    "chain": Size(12, 16, 4, 1),
    "gpt": Size(3, 32, 1, 8, words=64),
    "llama": Size(3, 32, 1, 8, words=64),
    "bert": Size(3, 32, 1, 8, words=64),
    "mixtral": Size(3, 64, 1, 8, words=64),
    "vit": Size(3, 32, 1, 32),
    "convnext": Size(3, 4, 1, 32),
}


def make(name: str) -> Job:
    torch.manual_seed(0)
    job = (chain if name == "chain" else FAMILIES[name].make)(SIZES[name])
    job.model.train()
    return job


@contextlib.contextmanager
def in_one_segment(job: Job) -> Iterator[None]:
    first, *others = lowtide.tracing.model_blocks.find_regions(job.model, job.blocks)
    plan = Plan(regions=(Recompute(first, more=tuple((path, 0) for path in others)),))
    with lowtide.apply(job.model, plan):
        yield


@contextlib.contextmanager
def in_one_checkpoint(job: Job) -> Iterator[None]:
    """torch's checkpoint around all blocks, where they are the model."""
    model = job.model
    model.forward = functools.partial(TORCH, type(model).forward.__get__(model))  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.forward


WAYS: dict[str, Callable[[Job], Any]] = {
    "plain": lambda job: contextlib.nullcontext(),
    "torch": checkpointed,
    "plan": planned,
    "segment": in_one_segment,
    "around": in_one_checkpoint,
}


def count(names: list[str], ways: list[str]) -> None:
    """Run the steps. Under callgrind each leaves a file."""
    gc.disable()
    torch.set_num_threads(1)
    counter = ctypes.PyDLL(f"{os.environ[_DIR]}/counter.so") if _DIR in os.environ else None
    for name in names:
        job = make(name)
        for way in ways:
            if way in ("segment", "around") and name != "chain":
                continue
            with WAYS[way](job):
                for _ in range(NUM_WARM):
                    step(job)
                if counter is not None:
                    counter.begin()
                for _ in range(NUM_STEPS):
                    step(job)
                if counter is not None:
                    counter.end(f"{name} {way}".encode())


def counted(names: list[str], ways: list[str], directory: str) -> dict[str, dict[str, float]]:
    """Millions of instructions of a step, by model and way."""
    source = Path(directory, "counter.c")
    source.write_text(_COUNTER)
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", f"{directory}/counter.so", source], check=True)
    command = [
        *("valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={directory}/out"),
        *(sys.executable, __file__, "--inside", "--models", *names, "--ways", *ways),
    ]
    environment = {**os.environ, _DIR: directory, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    subprocess.run(command, env=environment, check=True, stderr=subprocess.DEVNULL)
    found: dict[str, dict[str, float]] = {}
    for path in Path(directory).glob("out.*"):
        text = path.read_text()
        label = re.search(r"^desc: Trigger: Client Request: (\S+) (\S+)$", text, re.MULTILINE)
        total = re.search(r"^(?:totals|summary): (\d+)", text, re.MULTILINE)
        if label is not None and total is not None:
            found.setdefault(label[1], {})[label[2]] = int(total[1]) / NUM_STEPS / 1e6
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(SIZES))
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--keep", help="directory to leave callgrind's files in")
    parser.add_argument("--inside", action="store_true", help="run the steps in this process")
    options = parser.parse_args()
    if options.inside:
        count(options.models, options.ways)
        return
    with tempfile.TemporaryDirectory() as directory:
        found = counted(options.models, options.ways, options.keep or directory)
    for name in options.models:
        plain = found[name].pop("plain")
        torchs = found[name].get("torch", 0) - plain
        print(f"| {name} | {plain:.2f} |", end="")
        for way, number in found[name].items():
            print(f" {way} +{number - plain:.2f} ({(number - plain) / torchs if torchs > 0 else 0:.3f}) |", end="")
        print(flush=True)


if __name__ == "__main__":
    main()
