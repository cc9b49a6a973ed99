"""Measures the host time that the eager engine adds per region, save, retained output and move, on a small model.

A step is often limited by the host, and the solver has to know what a plan adds there. `tracing.devices` calls
`measure_engine_costs` for a device whose costs are not cached yet (registered below, as `tracing` must not import
`eager`), and puts the result into traced graphs.

The model is a stack of transformer blocks, so that code and data are in the caches as in a training step. Its tensors
are small, so that the host is the slower of the two on an accelerator too. Steps with and without plans are timed in
turns. The costs are differences of such times, which one disturbed number could turn to zero; so the fastest step of
each counts, and not the median: other processes only ever add time.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide._compat.dispatch import OpNames
from lowtide.eager.handle import apply
from lowtide.plans.step_plan import Move, Plan, Recompute
from lowtide.tracing.devices import EngineCosts, register
from lowtide.tracing.host_speed import REFERENCE_S, probe_s

# As many blocks as a small language model has: with fewer, everything stays in the caches and the engine takes half as
# long per block. The tensors are small enough for the device to finish before the host.
_BLOCKS, _WIDTH, _TOKENS = 12, 64, 8
_ROUNDS, _IN_A_ROW = 5, 3


class _BenchBlock(nn.Module):
    """Attention and an MLP, as in most transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(1, _TOKENS, 4, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(_TOKENS, _WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class _Part(nn.Module):
    """A layer with few saves, to separate the cost of a region from that of its saves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layer(x))


def measure_engine_costs(device: torch.device) -> EngineCosts:
    """The engine's costs for steps on `device`, for a host on which `probe_s` returns `REFERENCE_S`.

    Random states stay as they are, and no memory is left allocated.
    """
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            return _EngineBench(device).costs()
    finally:
        gc.collect()  # planned models are in reference cycles, and would count as memory of the next trace


class _EngineBench:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._probe_s = math.inf  # the fastest while steps were timed
        self._large = nn.Sequential(*(_BenchBlock() for _ in range(_BLOCKS))).to(device, torch.float32)
        self._small = nn.Sequential(*(_Part() for _ in range(2 * _BLOCKS))).to(device, torch.float32)
        self._x = torch.randn(_TOKENS, _WIDTH, device=device, dtype=torch.float32)

    def costs(self) -> EngineCosts:
        names, num_saves = self._look_into(self._large[0])
        few_saves = self._look_into(self._small[0])[1]
        gelu = names.index("gelu")
        kept = (gelu - 3, gelu - 1, gelu)  # a norm, a product and an activation, all of which are saved
        one, some = _recompute(self._large, kept[1:2]), _recompute(self._large, kept)
        plain_s, forward_s, region_s, one_s, some_s = self._in_turns(
            self._large, [None, None, _recompute(self._large), one, some]
        )
        small_plain_s, small_forward_s, small_s = self._in_turns(self._small, [None, None, _recompute(self._small)])
        fee_s = (region_s - plain_s - forward_s) / len(self._large)
        small_fee_s = (small_s - small_plain_s - small_forward_s) / len(self._small)
        save_s = max(0.0, fee_s - small_fee_s) / max(1, num_saves - few_saves)
        op_s = forward_s / len(self._large) / len(names)
        gained_s = (one_s - some_s) / len(self._large) / (len(kept) - 1)  # per retained output
        dispatch_s = ((one_s - region_s) / len(self._large) + gained_s) / len(names)
        costs = EngineCosts(
            max(0.0, fee_s - num_saves * save_s),
            save_s,
            max(0.0, dispatch_s),
            max(0.0, op_s - gained_s),
            self._move_s(num_saves) if self._device.type == "cuda" else 0.0,
        )
        return costs.scaled(REFERENCE_S / self._probe_s)

    def _move_s(self, num_saves: int) -> float:
        """Seconds per value moved to the host and back, averaged over all saves; saved weights do not move."""
        saves = [(str(block), number) for block in range(len(self._large)) for number in range(num_saves)]
        plan = Plan(moves=tuple(Move(path, 0, number) for path, number in saves))
        plain_s, _, moved_s = self._in_turns(self._large, [None, None, plan])
        return max(0.0, moved_s - plain_s) / len(saves)

    def _look_into(self, block: nn.Module) -> tuple[list[str], int]:
        """The ops of a block's forward, by name, and how many tensors it saves."""
        numbers = count()
        x = self._x.clone().requires_grad_()
        # Autograd keeps the pack hook: one that held the tensors would keep the graph, and the block, alive for good.
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda _: next(numbers), lambda each: each)
        with hooks, OpNames() as ops:
            block(x)
        return ops.names, next(numbers)

    def _in_turns(self, model: nn.Module, plans: Sequence[Plan | None]) -> list[float]:
        """Seconds of a step under each plan, of the fastest steps. The second number is for the forward alone."""
        times: list[list[float]] = []
        for _ in range(_ROUNDS + 1):
            times.append([])
            for number, plan in enumerate(plans):
                context: AbstractContextManager[Any] = nullcontext() if plan is None else apply(model, plan)
                with context:
                    self._steps(model, 1)  # one-time work is not part of a step
                    times[-1].append(self._steps(model, _IN_A_ROW)[number == 1])
                self._probe_s = min(self._probe_s, probe_s())
        return [min(runs) for runs in zip(*times[1:], strict=True)]

    def _steps(self, model: nn.Module, count: int) -> tuple[float, float]:
        """Seconds of the fastest of `count` steps on the host, and of the fastest forward."""
        times: list[tuple[float, float]] = []
        clock = time.thread_time  # of this thread, which computes alone on the CPU; others take its core
        if self._device.type != "cpu":
            clock = time.perf_counter
            torch.accelerator.synchronize(self._device)
        for _ in range(count):
            start = clock()
            model.zero_grad(set_to_none=True)
            x = self._x.clone().requires_grad_()
            begin = clock()
            out = model(x)
            end = clock()
            out.sum().backward()
            times.append((clock() - start, end - begin))
        return min(step_s for step_s, _ in times), min(forward_s for _, forward_s in times)


def _recompute(model: nn.Module, kept: tuple[int, ...] = ()) -> Plan:
    return Plan(regions=tuple(Recompute(name, 0, kept) for name, _ in model.named_children()))


register(measure_engine_costs)
