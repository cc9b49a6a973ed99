"""`lowtide.measure`: peak memory and time of a call; and the traced and measured example steps of `fit`.

On an accelerator peaks come from the allocator's own counters, on the CPU from the allocation events of
torch.profiler.

`fit`, `plan` and `max_batch` begin with `trace_largest`, whose `TracedStep` has the examples and the graph of the one
with the highest peak. Of several examples, that one is found by traces on fake tensors where possible.

`RealSteps` runs the examples under the plan that is on the model, for `fit` and `max_batch`. Parameters, gradients,
buffers, module attributes and random states are restored after each, so that every plan is measured on the same step.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import _compat
from lowtide._compat.profiler import cpu_allocation_totals
from lowtide.distributed.agreement import with_common_costs
from lowtide.distributed.ranks import current
from lowtide.eager.handle import refuse_other_checkpointing
from lowtide.eager.replanning import Shapes, recorded_input_shapes, with_parameters
from lowtide.errors import TraceError
from lowtide.graph.step_graph import StepGraph
from lowtide.plans.step_plan import Plan
from lowtide.replay.arguments import tensors_in
from lowtide.simulator.timeline import simulate
from lowtide.snapshot import Restorer, noted_changes
from lowtide.tracing import step_checks as checks
from lowtide.tracing.step_checks import one_at_a_time
from lowtide.tracing.trace import trace
from lowtide.tracing.untraced_memory import present_state_bytes
from lowtide.units import format_bytes, format_seconds, parse_bytes

logger = logging.getLogger("lowtide")


@dataclass(frozen=True)
class Measured:
    """Memory and time of a call, as measured.

    `start_bytes` were allocated before the call (0 on the CPU, whose allocator keeps no count), `peak_bytes` is the
    highest number of bytes on top of that, and `left_bytes` are still allocated after it. `seconds` is the median of
    the runs; a run under the profiler counts only if it is the only one.
    """

    peak_bytes: int
    start_bytes: int
    left_bytes: int
    seconds: float
    device: str

    @property
    def total_peak_bytes(self) -> int:
        """The allocator's own peak: `start_bytes` and `peak_bytes`."""
        return self.start_bytes + self.peak_bytes

    @property
    def by_kind(self) -> dict[str, int]:
        """The peak in three parts: allocated before, still allocated after, and freed again."""
        left = max(0, self.left_bytes)
        return {"before": self.start_bytes, "left": left, "given back": self.peak_bytes - left}

    def __str__(self) -> str:
        kinds = ", ".join(f"{format_bytes(size)} {kind}" for kind, size in self.by_kind.items() if size)
        peak = f"peak {format_bytes(self.total_peak_bytes)} measured on {self.device}"
        return f"{peak} ({kinds}), {format_seconds(self.seconds)}"


@one_at_a_time
def measure(function: Callable[[], Any], *, device: torch.device | str | None = None, repeat: int = 1) -> Measured:
    """Call `function` `repeat` times; return its peak memory on `device` and its time.

    `device` defaults to the accelerator, or the CPU if there is none. On an accelerator the allocator's own counters
    are read. On the CPU the first call runs under torch.profiler, which slows it down: with `repeat` above 1 the other
    calls are timed without it.

    >>> import torch, lowtide
    >>> lowtide.measure(lambda: torch.ones(1000).exp(), device="cpu").peak_bytes
    8000
    """
    if not callable(function):
        raise TypeError(
            "measure takes a function to call, such as lambda: loss_fn(batch).backward(), "
            f"not {type(function).__name__}"
        )
    if repeat < 1:
        raise ValueError(f"repeat is a number of calls, 1 or more, not {repeat}")
    where = torch.device(device) if device is not None else (_compat.accelerator() or torch.device("cpu"))
    gc.collect()  # garbage that is collected during the call would count as memory that the call freed
    times: list[float] = []
    if where.type == "cpu":
        totals: list[int] = []
        profiled = seconds_of(lambda: totals.extend(cpu_allocation_totals(function)), where)
        times = [seconds_of(function, where) for _ in range(repeat - 1)] or [profiled]
        return Measured(max([0, *totals]), 0, totals[-1] if totals else 0, median(times), str(where))
    times = [seconds_of(function, where) for _ in range(repeat - 1)]
    torch.accelerator.synchronize(where)
    torch.accelerator.reset_peak_memory_stats(where)
    before = torch.accelerator.memory_allocated(where)
    times.append(seconds_of(function, where))
    peak = torch.accelerator.max_memory_allocated(where) - before
    return Measured(peak, before, torch.accelerator.memory_allocated(where) - before, median(times), str(where))


def seconds_of(function: Callable[[], Any], device: torch.device, num: int = 1) -> float:
    """Seconds per call, of `num` calls in a row."""

    def synchronize() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    synchronize()
    start = perf_counter()
    for _ in range(num):
        function()
    synchronize()
    return (perf_counter() - start) / num


@dataclass(frozen=True, eq=False)
class TracedStep:
    """Steps `loss_fn(*example)` of `model`, and the `graph` of the example number `index`."""

    model: nn.Module
    loss_fn: Callable[..., Tensor]
    examples: Sequence[tuple[Any, ...]]
    optimizer: Any
    graph: StepGraph
    index: int = 0
    inputs: Sequence[Shapes] = ()  # that the model is called with in any of the examples, the largest last
    changed: Sequence[Tensor | torch.Generator] = ()  # written or drawn from by any of the examples, but for their own

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments of the step that was traced."""
        return self.examples[self.index]

    @property
    def largest_inputs(self) -> Shapes:
        return self.inputs[-1] if self.inputs else ()

    @cached_property
    def device(self) -> torch.device:
        return checks.device_of(self.model, self.examples[0])

    def budget_bytes(self, budget: int | str) -> int:
        """The budget in bytes; a share is one of the memory of the device that was traced on."""
        return parse_bytes(budget, total_bytes=self.graph.hardware.memory_bytes or None)

    def for_model(self, plan: Plan) -> Plan:
        """`plan` with the model's parameter counts and input shapes, by which `apply` recognises another model."""
        return replace(with_parameters(plan, self.model), input_shapes=self.largest_inputs)


def trace_largest(
    model: nn.Module, loss_fn: Callable[..., Tensor], examples: Sequence[tuple[Any, ...]], optimizer: Any, **how: Any
) -> TracedStep:
    """Trace the example with the highest peak; `how` are further options of `trace`."""
    checks.arguments(model, loss_fn, "auto")
    refuse_other_checkpointing(model)
    index, ranks = 0, current()
    with recorded_input_shapes(model) as inputs, noted_changes() as changed:
        if len(examples) > 1:
            peaks = [simulate(_trace_cheaply(model, loss_fn, each, optimizer)).peak_bytes for each in examples]
            index = ranks.first(peaks.index(max(peaks)), "largest example")
        graph = trace(model, loss_fn, *examples[index], optimizer=optimizer, **how)
    graph = with_common_costs(ranks, graph)
    own = set(map(id, tensors_in(examples)))  # not kept alive
    changed = [target for target in changed if id(target) not in own]
    return TracedStep(model, loss_fn, examples, optimizer, graph, index, inputs, changed)


def _trace_cheaply(model: nn.Module, loss_fn: Any, args: tuple[Any, ...], optimizer: Any) -> StepGraph:
    try:
        return trace(model, loss_fn, *args, optimizer=optimizer, mode="fake")
    except TraceError:  # the step depends on values of tensors, which fake tensors do not have
        return trace(model, loss_fn, *args, optimizer=optimizer)


# The second step under a plan is still up to 10 % slower than later ones where the host is the limit.
_NUM_UNTIMED = 2
_NUM_IN_A_ROW = 3  # steps timed together on an accelerator, as in training, where the host runs ahead of the device


def can_measure(device: torch.device) -> bool:
    """Whether peaks can be measured on `device` now; logs a warning if not."""
    if device.type != "cpu" or not _compat.profiler_is_active():
        return True
    logger.warning("the peak is predicted and not measured: a torch.profiler is active, and on the CPU it cannot nest")
    return False


class RealSteps:
    """Runs example steps under the plan that is on the model at the time. After each, all state is as before."""

    def __init__(self, step: TracedStep) -> None:
        self._step, self.model, self.graph, self._device = step, step.model, step.graph, step.device

    def measured(self, *, is_timed: bool = True) -> tuple[int, float]:
        """The highest whole-step peak of all examples, and the seconds of the traced one (0 unless `is_timed`)."""
        traced = self._step.index
        found = [self._measured(each, is_timed=is_timed and n == traced) for n, each in enumerate(self._step.examples)]
        return max(peak_bytes for peak_bytes, _ in found), found[traced][1]

    def run(self) -> None:
        """Run each example once."""
        for example in self._step.examples:
            with self._unchanged(example) as step:
                step()

    def timed(self) -> float:
        """Seconds of a step, after steps that are not timed: under a new plan, regions learn from the first ones."""
        num_untimed, num = (1, 1) if self._device.type == "cpu" else (_NUM_UNTIMED, _NUM_IN_A_ROW)
        with self._unchanged(self._step.args) as step:
            for _ in range(num_untimed):
                step()
            return seconds_of(step, self._device, num)

    def _measured(self, example: tuple[Any, ...], *, is_timed: bool) -> tuple[int, float]:
        """The peak of a whole step, and if `is_timed` the seconds of another one after it (else 0)."""
        with self._unchanged(example) as step:
            if any(isinstance(each, nn.Parameter) and each.requires_grad for each in self._step.changed):
                self._step.loss_fn(*example)  # regions copy such weights once a forward was seen to write them
            # In the first step, regions that retain outputs capture where autograd saves them, which takes more memory.
            # On an accelerator that step also allocates the workspaces of libraries, which stay allocated.
            first = measure(step, device=self._device) if self._device.type == "cpu" else step()
            measured = measure(step, device=self._device)
            if first is not None and first.peak_bytes > measured.peak_bytes:
                measured = first
            seconds = seconds_of(step, self._device) if is_timed else 0.0
        return self._whole_peak(measured), seconds

    def _whole_peak(self, measured: Measured) -> int:
        """The measured peak with the bytes that it does not contain, such as optimizer states allocated only later."""
        graph = self.graph
        if self._device.type == "cpu":  # the profiler counts only what the step allocates
            gradients = {id(p): _compat.local_bytes(p.grad) for p in self.model.parameters() if p.grad is not None}
            peak = measured.peak_bytes + graph.bytes_before + sum(gradients.values())
        else:
            present = present_state_bytes(self._step.optimizer, self._device)
            peak = measured.total_peak_bytes + max(0, graph.optimizer_state_bytes - present)
        return max(peak, self._optimizer_peak)

    @cached_property
    def _optimizer_peak(self) -> int:
        """Bytes while the optimizer steps, if it has a workspace: as simulated, since no optimizer runs here."""
        return int(simulate(self.graph).total_bytes[-1]) if self.graph.optimizer_workspace_bytes else 0

    @contextlib.contextmanager
    def _unchanged(self, args: tuple[Any, ...]) -> Iterator[Callable[[], None]]:
        """Yields a function that runs one step; on exit all state is as before the block."""
        model, loss_fn = self.model, self._step.loss_fn
        restorer = Restorer(model, loss_fn, tensors_in(args), self._device, copies_on_host=True)
        changing: list[Tensor | torch.Generator] = [*model.buffers(), *tensors_in(args), *self._step.changed]
        for each in changing:
            restorer.before_write(each)

        def save_gradients(leaves: Iterable[Tensor]) -> None:
            for gradient in (leaf.grad for leaf in leaves if leaf.is_leaf):
                if gradient is not None:
                    restorer.before_write(gradient)

        num_runs = 0

        def step() -> None:
            nonlocal num_runs
            loss = loss_fn(*args)
            if num_runs == 0:
                others = _compat.leaves_of(loss)  # such as parameters of a second module that `loss_fn` uses
                restorer.add_leaves(others)
                save_gradients(others)
            num_runs += 1
            loss.backward()
            restorer.reset_gradients()

        try:
            save_gradients((*model.parameters(), *tensors_in(args)))
            yield step
        finally:
            restorer.restore()
