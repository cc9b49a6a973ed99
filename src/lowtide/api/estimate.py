"""`lowtide.estimate` and `lowtide.estimate_parallel`: what a step will take, predicted without allocating memory.

`estimate` traces the step on fake tensors and simulates it. A second trace with twice the batch gives the bytes per
sample. If the step depends on values of tensors, which fake tensors do not have, real steps are traced instead and a
note says so.

`estimate_parallel` does this for one rank of a large job, on a machine with no accelerator, for each of several
layouts (the sizes of DDP, FSDP, tensor and context parallelism); with a budget, each step is also planned.
`fully_shard` and `parallelize_module` run as in the real job, on torch's "fake" process group, which has any number
of ranks and does not communicate. The trace therefore has rank 0's shards, gathers, reductions and activations. The
model is built on the meta device and then given fake tensors on the CPU, since fake tensors cannot be made on a
device that is not there.

Times are those of the named device. Functional collectives (tensor parallelism) take their bytes at
`network_bytes_per_s`; FSDP's are taken to overlap with compute and add no time. Pipelines are not simulated.
docs/distributed.md compares the predictions with real runs of 2 and 4 ranks.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lowtide import _compat
from lowtide.api.measure import TracedStep
from lowtide.api.split_search import SplitSearch
from lowtide.distributed.ranks import is_in_job
from lowtide.eager.replanning import Limits
from lowtide.errors import InfeasibleBudgetError, LowtideError, TraceError
from lowtide.graph.step_graph import Hardware, StepGraph
from lowtide.plans.step_plan import Plan
from lowtide.replay.arguments import map_tensors, tensors_in
from lowtide.simulator.timeline import Timeline, simulate
from lowtide.snapshot import Restorer
from lowtide.solvers.eager_search import EagerSearch
from lowtide.solvers.solve import solve
from lowtide.tracing import step_checks as checks
from lowtide.tracing import trace as tracing
from lowtide.tracing.fakes import Shadows
from lowtide.tracing.model_blocks import find_regions
from lowtide.tracing.op_times import predicted_s
from lowtide.tracing.recorder import Recorder
from lowtide.tracing.step_checks import one_at_a_time
from lowtide.tracing.trace import FakeTraceError, trace, trace_once
from lowtide.tracing.trace_records import RawOp
from lowtide.tracing.untraced_memory import plain_optimizer
from lowtide.units import format_bytes, format_seconds, parse_bytes


@dataclass(frozen=True)
class Estimate:
    """Predicted memory of a training step.

    `peak_bytes` is the peak of the plain step, `floor_bytes` the smallest peak of a plan that recomputes, and
    `static_bytes` are allocated during the whole step: parameters, gradients, optimizer state, buffers, batch.
    If `is_limited_by_optimizer`, the floor lies in the optimizer's step, in which gradients and optimizer state are
    allocated and activations are not: no plan lowers it, but a fused optimizer (no workspace) or one with less state.
    `bytes_per_sample` is how much each further sample adds to the plain peak, None if the tensors of the batch do not
    share a first dimension. `split_floor_bytes` is the smallest peak of a plan that also runs modules in parts, None if
    that was not asked for or nothing can be split. `largest` names the modules with most bytes at the peak. `graph` is
    the trace.
    """

    peak_bytes: int
    floor_bytes: int
    static_bytes: int
    bytes_per_sample: int | None
    batch_size: int | None
    largest: tuple[tuple[str, int], ...]
    graph: StepGraph
    split_floor_bytes: int | None = None
    is_limited_by_optimizer: bool = False

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks of the trace; one of them says why real steps were run, if they were."""
        return self.graph.notes

    def fits(self, budget_bytes: int) -> bool:
        """Whether a plain step fits into `budget_bytes`."""
        return self.peak_bytes <= budget_bytes

    def __str__(self) -> str:
        graph, device = self.graph, self.graph.hardware
        floor = "with everything recomputed that helps"
        if self.is_limited_by_optimizer:
            floor = "in the optimizer's step, which no plan changes"
            if workspace := graph.optimizer_workspace_bytes:
                floor += f" ({format_bytes(workspace)} of it are workspace: fused=True needs none)"
        limit, lines = "", graph.lines
        if graph.has_host_line:
            host, on_device = format_seconds(lines.host_s), format_seconds(lines.device_s)
            limit = f", limited by the {lines.limit} (host {host}, device {on_device})"
        rows = [("plain step", format_bytes(self.peak_bytes)), ("floor", f"{format_bytes(self.floor_bytes)} {floor}")]
        if self.split_floor_bytes is not None:
            rows.append(("floor, split", f"{format_bytes(self.split_floor_bytes)} with split=True"))
        rows.append(("static", format_bytes(self.static_bytes)))
        rows += [(f"  {kind}", format_bytes(size)) for kind, size in graph.static_bytes.items() if size]
        rows.append(("step time", f"{format_seconds(graph.step_s)} without a plan{limit}"))
        if self.bytes_per_sample is not None:
            rows.append(("per sample", f"{format_bytes(self.bytes_per_sample)} (batch of {self.batch_size})"))
        rows += [(f"at the peak: {name}", format_bytes(size)) for name, size in self.largest]
        if device.memory_bytes:
            verdict = "fits" if self.fits(device.memory_bytes) else "does not fit"
            rows.append((f"{device.name}", f"{format_bytes(device.memory_bytes)}: a plain step {verdict}"))
        width = max(len(name) for name, _ in rows)
        title = "predicted from real steps" if graph.is_measured else "predicted, nothing allocated"
        return "\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in rows)])


@one_at_a_time
def estimate(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    *args: Any,
    optimizer: torch.optim.Optimizer | None = None,
    device: torch.device | str | None = None,
    split: bool = False,
) -> Estimate:
    """Predict whether a step fits: its peak, its floor and what fills them. Nothing is allocated on the device.

    Takes what `lowtide.trace` takes; `device` may name one that this machine does not have (`"H100"`). If the step
    depends on values of tensors, real steps run on the model's own device instead, and `notes` of the result say so.
    `split=True` also predicts the floor of plans that run modules in parts, which takes some traces more.

    >>> import torch, lowtide
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    >>> guess = lowtide.estimate(model, lambda x: model(x).square().mean(), torch.randn(32, 64))
    >>> guess.floor_bytes <= guess.peak_bytes
    True
    """
    model = checks.module(model)
    how = {"optimizer": optimizer, "device": device}
    graph = _traced(model, loss_fn, args, **how)
    plain = simulate(graph)
    floor = EagerSearch(graph).floor
    lengths = {tensor.shape[0] for tensor in tensors_in(args) if tensor.ndim}
    batch_size = lengths.pop() if len(lengths) == 1 else None
    split_floor: int | None = None
    if split:
        step = TracedStep(model, loss_fn, [args], optimizer, graph)
        split_floor = SplitSearch(step, Limits(split=True), device).floor_bytes or None
    return Estimate(
        peak_bytes=plain.peak_bytes,
        floor_bytes=floor.peak_bytes,
        static_bytes=sum(graph.static_bytes.values()),
        bytes_per_sample=_growth(model, loss_fn, args, batch_size, plain.peak_bytes, **how),
        batch_size=batch_size,
        largest=tuple(largest_at_peak(plain)),
        graph=graph,
        split_floor_bytes=split_floor,
        is_limited_by_optimizer=floor.peak_phase == "optimizer",
    )


def _traced(model: Any, loss_fn: Any, args: Any, **how: Any) -> StepGraph:
    """A trace on fake tensors; if that is not possible, of real steps, with a note in the graph."""
    try:
        return trace(model, loss_fn, *args, mode="fake", **how)
    except FakeTraceError as error:
        why = str(error).splitlines()[0]
        try:
            graph = trace(model, loss_fn, *args, mode="real", **how)
        except (TraceError, torch.OutOfMemoryError) as other:
            because = str(other).splitlines()[0].partition(". ")[0]
            raise TraceError(f"{why}; real steps cannot be run instead: {because}") from error
    return replace(graph, notes=(*graph.notes, f"real steps were run and memory was allocated: {why}"))


def largest_at_peak(timeline: Timeline) -> list[tuple[str, int]]:
    """The modules whose activations and gradients take most of the peak."""
    graph, sizes = timeline.graph, Counter[str]()
    for value, size in timeline.live_at(timeline.peak_event).items():
        born = graph.values[value].born
        path = graph.path_of(born)
        sizes[path or "outside of modules"] += size
    return sizes.most_common(5)


def _growth(
    model: Any, loss_fn: Any, args: Any, batch_size: int | None, peak_bytes: int, *, optimizer: Any, device: Any
) -> int | None:
    """The bytes that one more sample adds to the peak, from a trace with twice the batch."""
    if not batch_size or any(tensor.is_nested for tensor in tensors_in(args)):
        return None

    def doubled(tensor: Tensor) -> Tensor:
        if not tensor.ndim:
            return tensor
        return torch.empty((2 * batch_size, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")

    try:
        optimizer = plain_optimizer(optimizer, model)
        larger = trace_once(model, loss_fn, *map_tensors(doubled, args), optimizer=optimizer, device=device)
    except (LowtideError, RuntimeError, ValueError, TypeError, IndexError):
        return None  # the step takes batches of this size only, or no fake tensors
    return max(0, simulate(larger).peak_bytes - peak_bytes) // batch_size


# One rank of a job.

_CPU = torch.device("cpu")
DIMENSIONS = ("ddp", "fsdp", "tp", "cp")  # names of mesh dimensions; the last two need a `make` that takes the mesh


@dataclass(frozen=True)
class RankEstimate:
    """Predicted memory and time of one rank of a job. `layout` has the size of each dimension of its mesh.

    `peak_bytes` is the peak of the plain step, `floor_bytes` the smallest peak of any plan, `static_bytes` what is
    allocated during the whole step. `plan` is the plan for the budget, None without a budget or if none holds it.
    """

    layout: dict[str, int]
    peak_bytes: int
    floor_bytes: int
    static_bytes: int
    graph: StepGraph
    plan: Plan | None = None

    @property
    def name(self) -> str:
        """The layout as it is written for `--parallel`."""
        return ",".join(f"{name}={size}" for name, size in self.layout.items())


@dataclass(frozen=True)
class ParallelEstimate:
    """One row per layout. `budget_bytes` is the budget that plans were made for, None without one."""

    world: int
    rows: tuple[RankEstimate, ...]
    budget_bytes: int | None = None

    @property
    def best(self) -> RankEstimate | None:
        """The layout whose planned step is predicted to be fastest per rank; None if no plan holds the budget."""
        planned = [row for row in self.rows if row.plan is not None]
        return min(planned, key=lambda row: row.graph.step_s + row.plan.extra_s, default=None)  # type: ignore[union-attr]

    def __str__(self) -> str:
        head = ["layout", "static", "plain peak", "floor", "plain step"]
        if self.budget_bytes is not None:
            head += [f"peak in {format_bytes(self.budget_bytes)}", "slower by"]
        table = [head, *(self._cells(row) for row in self.rows)]
        widths = [max(len(cells[column]) for cells in table) for column in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) for cells in table]
        title = f"{self.world} ranks, per rank; everything predicted, nothing allocated"
        return "\n".join([title, *(line.rstrip() for line in lines)])

    def _cells(self, row: RankEstimate) -> list[str]:
        sizes = (row.static_bytes, row.peak_bytes, row.floor_bytes)
        cells = [row.name, *map(format_bytes, sizes), format_seconds(row.graph.step_s)]
        if self.budget_bytes is None:
            return cells
        if row.plan is None:
            return [*cells, "does not fit", "-"]
        return [*cells, format_bytes(row.plan.peak_bytes), f"{100 * row.plan.slowdown:.1f} %"]


@one_at_a_time
def estimate_parallel(
    make: Callable[..., Any],
    *,
    world: int,
    parallel: str | Mapping[str, int] | Iterable[str | Mapping[str, int]] | None = None,
    budget: int | str | None = None,
    device: str | None = None,
    network_bytes_per_s: float = 200e9,
    time_limit_s: float = 10.0,
) -> ParallelEstimate:
    """Predict memory and time of one rank of a job of `world` ranks, for one or several layouts. Nothing is allocated.

    - `make(mesh)` builds the model, parallelises it over the dimensions of the mesh (`parallelize_module`,
      `fully_shard`) and returns `(model, loss_fn, args)` or `(model, loss_fn, args, optimizer)`. It is called on the
      meta device. A `make` without parameters returns the plain model: its repeated blocks are then sharded by FSDP.
    - `parallel` is a layout such as `"fsdp=8,tp=8"`, or several. What is missing to `world` is data parallelism
      (`ddp`). By default: FSDP over all ranks, and over fewer of them with copies.
    - `device` names the hardware (`"H100"`). Without `budget`, no plans are made.

    >>> import torch, lowtide
    >>> def make():
    ...     model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    ...     return model, lambda x: model(x).square().mean(), torch.randn(32, 64)
    >>> small = lowtide.estimate_parallel(make, world=64, parallel="fsdp=64").rows[0]
    >>> small.graph.static_bytes["parameters"] * 64 == 4 * (64 * 64 + 64) * 4
    True
    """
    takes_mesh = bool(inspect.signature(make).parameters)
    budget_bytes = None if budget is None else parse_bytes(budget)
    rows = []
    for layout in _layouts(world, parallel, takes_mesh):
        with _simulated_job(layout) as mesh:
            with torch.device("meta"):
                model, loss_fn, args, optimizer = _parts(make(mesh) if takes_mesh else make())
                if not takes_mesh:
                    _shard(model, optimizer, mesh, layout)
            buckets = 0
            if layout.get("ddp", 1) > 1 and "fsdp" not in layout:
                buckets = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
            graph = _trace_simulated(model, loss_fn, args, optimizer, device, network_bytes_per_s, buckets)
        plan = None
        if budget_bytes is not None:
            with contextlib.suppress(InfeasibleBudgetError):
                plan = solve(graph, budget_bytes, time_limit_s=time_limit_s)
        floor, static_bytes = EagerSearch(graph).floor, sum(graph.static_bytes.values())
        rows.append(RankEstimate(layout, graph.plain_peak_bytes, floor.peak_bytes, static_bytes, graph, plan))
    return ParallelEstimate(world, tuple(rows), budget_bytes)


@contextlib.contextmanager
def _simulated_job(layout: dict[str, int]) -> Iterator[DeviceMesh]:
    """A job of as many ranks as the layout has, of which this process is the first; yields its mesh.

    Raises `TraceError` inside a real job.
    """
    if is_in_job():
        raise TraceError(
            "a job cannot be simulated inside of one, and torch.distributed is initialised in this process: call "
            "estimate_parallel in a process of its own"
        )
    with _compat.fake_process_group(math.prod(layout.values())):
        yield init_device_mesh("cpu", tuple(layout.values()), mesh_dim_names=tuple(layout))


def _trace_simulated(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    args: tuple[Any, ...],
    optimizer: torch.optim.Optimizer | None,
    device: str | None,
    network_bytes_per_s: float,
    unseen_bytes: int,
) -> StepGraph:
    """The step of a model on the meta device, inside of `_simulated_job`. The model is of no use afterwards.

    `unseen_bytes` are held on the device beside what the step uses, such as DDP's buckets.
    """
    checks.arguments(model, loss_fn, "fake")
    with _compat.fake_mode(), _compat.quiet_fakes(), torch.device(_CPU):
        model.to_empty(device=_CPU)
        args = map_tensors(_on_cpu, args)
        step = tracing.step_on(device, model, loss_fn, args, optimizer)
        restorer = Restorer(model, loss_fn, tensors_in(args), step.device)
        try:
            for _ in range(2):  # the first makes FSDP allocate what it keeps
                recorder = Recorder(step.device, checks.names_of(model), shadows=Shadows())
                tracing.record(recorder, model, loss_fn, args, restorer)
                restorer.reset_gradients()
        finally:
            restorer.restore()

        def seconds_of(op: RawOp, hardware: Hardware) -> float:
            if "collective" not in op.flags:
                return predicted_s(op, hardware)
            return op.moved_bytes / network_bytes_per_s if op.name.startswith("_c10d_functional") else 0.0

        return tracing.predicted_graph(recorder, step, unseen_bytes, seconds_of)


def _on_cpu(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_CPU)
    return made.requires_grad_(tensor.requires_grad)


def _parts(made: Any) -> tuple[nn.Module, Any, tuple[Any, ...], Any]:
    if isinstance(made, Mapping):
        made = (made["model"], made["loss_fn"], made["batch"], made.get("optimizer"))
    if not isinstance(made, tuple | list) or len(made) not in (3, 4):
        raise TypeError("make() returns (model, loss_fn, args) or (model, loss_fn, args, optimizer)")
    model, loss_fn, args, optimizer = (*made, None)[:4]
    return model, loss_fn, args if isinstance(args, tuple) else (args,), optimizer


def _layouts(world: int, parallel: Any, takes_mesh: bool) -> list[dict[str, int]]:
    if world < 1:
        raise ValueError(f"world is a number of ranks, 1 or more, not {world}")
    if parallel is None:
        sizes = sorted({size for size in (8, 64, world) if world % size == 0})
        return [_layout(world, {"fsdp": size}, takes_mesh) for size in sizes]
    given = [parallel] if isinstance(parallel, str | Mapping) else list(parallel)
    return [_layout(world, each, takes_mesh) for each in given]


def _layout(world: int, given: str | Mapping[str, int], takes_mesh: bool) -> dict[str, int]:
    """The sizes of the mesh's dimensions, the outermost first. Raises `ValueError` if they do not make up the world."""
    sizes = dict(given) if isinstance(given, Mapping) else _parsed(given)
    for name in sizes:
        if name == "pp":
            raise ValueError("pipelines are not simulated: plan each stage with lowtide.fit_pipeline")
        if name not in DIMENSIONS:
            raise ValueError(f"a dimension is called {', '.join(DIMENSIONS)}, not {name!r}")
        if name in ("tp", "cp") and not takes_mesh:
            raise ValueError(
                f"{name} needs a make(mesh) that parallelises the model itself, by parallelize_module(model, "
                f"mesh[{name!r}], ...): which layers are split, and how, is not known otherwise"
            )
    total = math.prod(sizes.values())
    if total < 1 or world % total:
        raise ValueError(f"{given} makes {total} ranks, which does not divide the world of {world}")
    if total < world:
        sizes["ddp"] = sizes.get("ddp", 1) * (world // total)
    return {name: sizes[name] for name in DIMENSIONS if name in sizes}


def _parsed(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if not size.isdigit() or name in sizes:
            raise ValueError(f"a layout is written as in 'fsdp=8,tp=8', not {text!r}")
        sizes[name] = int(size)
    return sizes


def _shard(model: nn.Module, optimizer: Any, mesh: Any, layout: dict[str, int]) -> None:
    """Shard a plain model by FSDP: each of its repeated blocks, and the rest. The optimizer gets the new parameters."""
    if "fsdp" not in layout:
        return
    from torch.distributed.fsdp import fully_shard

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    part = mesh["ddp", "fsdp"] if "ddp" in layout else mesh["fsdp"]
    try:
        blocks = list(find_regions(model, None).values())
    except ValueError:  # no repeated blocks
        blocks = []
    for block in blocks:
        fully_shard(block, mesh=part)
    fully_shard(model, mesh=part)
    sharded = dict(model.named_parameters())
    for group in optimizer.param_groups if optimizer is not None else ():
        group["params"] = [sharded[names[id(each)]] if id(each) in names else each for each in group["params"]]
