"""Runs a function on several ranks, gloo on the CPU, and models for it.

Processes come from a fork server that has imported once what they use, so that a job costs a fraction of a second.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import gelu

from lowtide.solvers import eager_search
from lowtide.tracing import devices
from lowtide.tracing import trace as tracing
from lowtide.tracing.host_speed import REFERENCE_S

GROUP_TIMEOUT_S = 60.0  # one rank plans while the others wait, on a machine that runs other tests too
PRELOADED = ["lowtide", "torch.profiler", "torch._subclasses", "torch.distributed.fsdp", "torch.distributed.pipelining"]
PRELOADED += ["torch.distributed.tensor.parallel", "torch._dynamo", "torch._inductor.compile_fx", "networkx", "pytest"]


FEWEST_STEPS = {"_NUM_RECORDED": 2, "_NUM_TIMED": 1, "_NUM_FAKE": 1}  # of a trace


@dataclass(frozen=True)
class Raised:
    """An exception that ended a rank."""

    kind: str
    text: str
    trace: str


def run_ranks(
    function: Callable[..., Any], *args: Any, world: int = 2, group_s: float = GROUP_TIMEOUT_S, limit_s: float = 120.0
) -> list[Any]:
    """What `function(*args)` returned on each rank, or the exception that it raised there; None if a rank died."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(function, args, rank, world, folder, group_s)) for rank in range(world)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + limit_s
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
        assert not hanging, f"ranks {hanging} did not end within {limit_s} s"
        return [_result(Path(folder, f"{rank}.pickle")) for rank in range(world)]


def succeeded(results: list[Any]) -> list[Any]:
    """The results, if no rank raised."""
    for rank, result in enumerate(results):
        assert result is not None, f"rank {rank} died"
        assert not isinstance(result, Raised), f"rank {rank}:\n{result.trace}"
    return results


def _result(path: Path) -> Any:
    return pickle.loads(path.read_bytes()) if path.exists() else None


def _rank(function: Any, args: Any, rank: int, world: int, folder: str, group_s: float) -> None:
    gc.freeze()  # spares each measurement's garbage collection a look at all that was imported
    torch.set_num_threads(1)
    torch.manual_seed(0)
    devices.register(lambda _: devices.ENGINE_COSTS)  # as measured once; measuring takes seconds
    eager_search.MOST_OPS = 0  # search as in a step of many ops: any plan will do
    vars(tracing).update(FEWEST_STEPS, probe_s=lambda: REFERENCE_S)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=group_s),
    )
    try:
        result = function(*args)
    except BaseException as error:
        result = Raised(type(error).__name__, str(error), traceback.format_exc())
    Path(folder, f"{rank}.part").write_bytes(pickle.dumps(result))
    os.rename(f"{folder}/{rank}.part", f"{folder}/{rank}.pickle")
    with contextlib.suppress(Exception):
        distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a group whose collective timed out must not be waited for


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Blocks and a head; activations are much larger than parameters for batches of a few hundred rows."""

    def __init__(self, width: int = 16, num_blocks: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(num_blocks))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def rank() -> int:
    return distributed.get_rank()


def batch(rows: int = 256, width: int = 16, seed: int = 0) -> Tensor:
    """A batch that differs between ranks."""
    generator = torch.Generator().manual_seed(100 * seed + rank())
    return torch.randn(rows, width, generator=generator)


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def same(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    return len(one) == len(other) and all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(one, other, strict=True)
    )


@contextlib.contextmanager
def seeded(seed: int = 1) -> Iterator[None]:
    torch.manual_seed(seed + rank())
    yield
