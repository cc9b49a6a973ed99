"""`measure`: what a call really takes.

Real steps of a model, measured and timed, of which nothing remains.

Parameters, gradients, buffers, module attributes and random states are put back after each call, so that a step can run
under one plan after another.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import _compat
from lowtide._compat.profiler import cpu_allocation_totals
from lowtide.graph.step_graph import StepGraph
from lowtide.replay.arguments import tensors_in
from lowtide.snapshot.restore import Restorer
from lowtide.tracing import step_checks as checks
from lowtide.tracing.step_checks import one_at_a_time
from lowtide.tracing.untraced_memory import present_state_bytes
from lowtide.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Measured:
    """What a call took. All numbers are measured.

    `start_bytes` were allocated before it (0 on the CPU, whose allocator keeps no count), `peak_bytes` is the most on
    top of that at one time, `left_bytes` what of it is still allocated. `seconds` is the median of all runs but that
    under the profiler, where there was another.
    """

    peak_bytes: int
    start_bytes: int
    left_bytes: int
    seconds: float
    device: str

    @property
    def total_peak_bytes(self) -> int:
        """The allocator's own peak: what was there, and the most on top of it."""
        return self.start_bytes + self.peak_bytes

    @property
    def by_kind(self) -> dict[str, int]:
        """The peak by what became of it: there before, left behind, and given back."""
        left = max(0, self.left_bytes)
        return {"before": self.start_bytes, "left": left, "given back": self.peak_bytes - left}

    def __str__(self) -> str:
        kinds = ", ".join(f"{format_bytes(size)} {kind}" for kind, size in self.by_kind.items() if size)
        peak = f"peak {format_bytes(self.total_peak_bytes)} measured on {self.device}"
        return f"{peak} ({kinds}), {format_seconds(self.seconds)}"


@one_at_a_time
def measure(function: Callable[[], Any], *, device: torch.device | str | None = None, repeat: int = 1) -> Measured:
    """Call `function` and say what it allocated at most on `device` (default: the accelerator, else the CPU), and when.

    On an accelerator the allocator's own counters tell; on the CPU torch.profiler's events, which slow the call down:
    ask for `repeat` more than 1 to have it timed without. `function` is called `repeat` times.

    >>> import torch, lowtide
    >>> lowtide.measure(lambda: torch.ones(1000).exp(), device="cpu").peak_bytes
    8000
    """
    if repeat < 1:
        raise ValueError(f"repeat is a number of calls, 1 or more, not {repeat}")
    where = torch.device(device) if device is not None else (_compat.accelerator() or torch.device("cpu"))
    gc.collect()  # rubbish collected during the call would count as memory it gave back
    times: list[float] = []
    if where.type == "cpu":
        totals: list[int] = []
        profiled = _timed(lambda: totals.extend(cpu_allocation_totals(function)), where)
        times = [_timed(function, where) for _ in range(repeat - 1)] or [profiled]
        return Measured(max([0, *totals]), 0, totals[-1] if totals else 0, median(times), str(where))
    times = [_timed(function, where) for _ in range(repeat - 1)]
    torch.accelerator.synchronize(where)
    torch.accelerator.reset_peak_memory_stats(where)
    before = torch.accelerator.memory_allocated(where)
    times.append(_timed(function, where))
    peak = torch.accelerator.max_memory_allocated(where) - before
    return Measured(peak, before, torch.accelerator.memory_allocated(where) - before, median(times), str(where))


def _timed(function: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    start = time.perf_counter()
    function()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - start


logger = logging.getLogger("lowtide")

_NUM_IN_A_ROW = 3  # timed as one on an accelerator, where the host runs ahead of the device from step to step


class RealSteps:
    """The steps that `fit` was given, to be run under whatever plan is on the model.

    `index` is the example that plans are made for, `graph` its trace. `generators` are those that any example draws
    from, beside torch's default ones.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor],
        examples: list[tuple[Any, ...]],
        index: int,
        graph: StepGraph,
        optimizer: Any,
        generators: Iterable[torch.Generator],
    ) -> None:
        self.model, self.graph = model, graph
        self.device = checks.device_of(model, examples[0])
        self._loss_fn, self._examples, self._index = loss_fn, examples, index
        self._optimizer, self._generators = optimizer, list(generators)

    def measured(self) -> tuple[int, float]:
        """The highest peak of the examples, of the whole step, and the seconds of the one that plans are made for."""
        peaks, seconds = [], 0.0
        for index, example in enumerate(self._examples):
            is_timed = index == self._index
            measured, own_s = _measured_step(
                self.model, self._loss_fn, example, self.device, self._generators, is_timed=is_timed
            )
            peaks.append(_whole_peak(measured, self.graph, self.model, self._optimizer, self.device))
            seconds = own_s if is_timed else seconds
        return max(peaks), seconds

    def run(self) -> None:
        """Each example once."""
        for example in self._examples:
            with _unchanged(self.model, self._loss_fn, example, self.device, self._generators) as step:
                step()

    def timed(self) -> float:
        """Seconds of a step, after one that is not counted."""
        example = self._examples[self._index]
        with _unchanged(self.model, self._loss_fn, example, self.device, self._generators) as step:
            step()
            num = 1 if self.device.type == "cpu" else _NUM_IN_A_ROW
            return seconds_of(step, self.device, num)


def seconds_of(step: Callable[[], None], device: torch.device, num: int = 1) -> float:
    """Seconds of one of `num` steps in a row."""
    _synchronize(device)
    start = perf_counter()
    for _ in range(num):
        step()
    _synchronize(device)
    return (perf_counter() - start) / num


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def can_measure(device: torch.device) -> bool:
    """Whether peaks can be measured here and now; a warning says so where not."""
    if device.type != "cpu" or not _compat.profiler_is_active():
        return True
    logger.warning("the peak is predicted and not measured: a torch.profiler is active, and on the CPU it cannot nest")
    return False


def measured_peak(
    model: nn.Module, loss_fn: Any, args: Any, graph: StepGraph, optimizer: Any, generators: Iterable[torch.Generator]
) -> int:
    """The measured peak of the whole step as the model is now; nothing is left of it. `generators` are put back."""
    device = checks.device_of(model, args)
    measured, _ = _measured_step(model, loss_fn, args, device, generators, is_timed=False)
    return _whole_peak(measured, graph, model, optimizer, device)


def _measured_step(
    model: nn.Module,
    loss_fn: Any,
    args: Any,
    device: torch.device,
    generators: Iterable[torch.Generator],
    *,
    is_timed: bool,
) -> tuple[Measured, float]:
    """What a step takes as the model is now, and if `is_timed` the seconds of another one after it."""
    with _unchanged(model, loss_fn, args, device, generators) as step:
        # In a first step regions that retain outputs learn where these are saved. On an accelerator its peak is that of
        # libraries' workspaces too, which stay.
        first = measure(step, device=device) if device.type == "cpu" else step()
        measured = measure(step, device=device)
        if first is not None and first.peak_bytes > measured.peak_bytes:
            measured = first
        return measured, seconds_of(step, device) if is_timed else 0.0


@contextlib.contextmanager
def _unchanged(
    model: nn.Module, loss_fn: Any, args: Any, device: torch.device, generators: Iterable[torch.Generator]
) -> Iterator[Callable[[], None]]:
    """A step to be called in the block; nothing is left of it afterwards."""
    restorer = Restorer(model, loss_fn, tensors_in(args), device, copies_on_host=True)
    for tensor in (*model.buffers(), *tensors_in(args)):
        restorer.before_write(tensor)
    for generator in generators:
        restorer.before_write(generator)
    gradients: dict[int, tuple[Tensor, Tensor]] = {}  # with copies on the host, where they are not measured

    def put_aside(leaves: Iterable[Tensor]) -> None:
        for gradient in (leaf.grad for leaf in leaves if leaf.is_leaf):
            if gradient is not None and id(gradient) not in gradients:
                gradients[id(gradient)] = gradient, gradient.detach().to("cpu", copy=True)

    num_runs = 0

    def step() -> None:
        nonlocal num_runs
        loss = loss_fn(*args)
        if num_runs == 0:
            others = _compat.leaves_of(loss)  # such as parameters of a module that only `loss_fn` knows
            restorer.add_leaves(others)
            put_aside(others)
        num_runs += 1
        loss.backward()
        restorer.reset_gradients()

    try:
        put_aside((*model.parameters(), *tensors_in(args)))
        yield step
    finally:
        restorer.restore()
        with torch.no_grad():
            for gradient, copy in gradients.values():
                gradient.copy_(copy)


def _whole_peak(measured: Measured, graph: StepGraph, model: nn.Module, optimizer: Any, device: torch.device) -> int:
    """The measured peak of the whole step, with what was not there yet: optimizer states of a first step to come."""
    if device.type == "cpu":  # only what the step allocates is counted there
        there = sum(size for kind, size in graph.static_bytes.items() if kind != "gradients")
        gradients = {id(p): p.grad.nbytes for p in model.parameters() if p.grad is not None}
        return measured.peak_bytes + there + sum(gradients.values())
    present = present_state_bytes(optimizer, device)
    return measured.total_peak_bytes + max(0, graph.optimizer_state_bytes - present)
