"""`trace`: record one training step and return it as a `StepGraph`, the input of `lowtide.solve`.

A real trace runs the step on the device: three times under a `Recorder` (the first is the warm-up, the second also
measures what kernels allocate), a few times for its total time, and on CUDA once under torch's profiler. A fake trace
runs it on fake tensors, which allocate nothing, and predicts times and workspaces from FLOPs and bytes. Mode "auto"
makes a fake trace first, and a real one if a plain step fits in free memory.

`Restorer` restores everything that the steps changed. `_build` converts the recording to a graph. `output_sum_loss` is
a loss for tracing a model whose `loss_fn` is not at hand, as when a plan for larger inputs is needed.

Cost: a real trace takes as long as 5 to 26 plain steps, 64 at worst (bench/results/accuracy-cuda.md), and once per
machine the measurement of the engine's host costs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import platform
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lowtide import _compat
from lowtide.distributed import data_parallel
from lowtide.distributed.ranks import current, is_out_of_memory
from lowtide.errors import LowtideError, TraceError
from lowtide.graph.segments import with_even_times, with_structures
from lowtide.graph.step_graph import GATHERED, Call, Hardware, Op, Save, StepGraph, Value
from lowtide.replay.arguments import map_tensors, tensors_in
from lowtide.snapshot import Restorer, note_change
from lowtide.tracing import step_checks as checks
from lowtide.tracing.devices import (
    CUBLAS_BYTES,
    DEVICES,
    ENGINE_COSTS,
    EngineCosts,
    block_bytes,
    engine_costs,
    free_bytes,
    link_bytes_per_s,
    named_device,
    present_device,
    read_allocator,
    trace_device,
)
from lowtide.tracing.fakes import Faker, Shadows, uncache
from lowtide.tracing.host_speed import REFERENCE_S, probe_s
from lowtide.tracing.op_times import (
    PlainTimes,
    clock_for,
    predicted_host_s,
    predicted_s,
    profiled,
    set_seconds,
    time_step,
)
from lowtide.tracing.recorder import Recorder
from lowtide.tracing.step_checks import NOTE, CacheOff, one_at_a_time
from lowtide.tracing.trace_records import RawOp
from lowtide.tracing.untraced_memory import optimizer_memory, plain_optimizer, predict_workspaces, present_state_bytes
from lowtide.units import format_bytes


def output_sum_loss(output: Any) -> Tensor:
    """Return the sum of a model's outputs that need a gradient; of its scalar ones alone, its own losses, if any."""
    outputs = [tensor for tensor in tensors_in((output, getattr(output, "loss", None))) if tensor.requires_grad]
    outputs = list({id(tensor): tensor for tensor in outputs}.values())
    scalars = [tensor for tensor in outputs if tensor.ndim == 0]
    total = sum(tensor.sum() for tensor in scalars or outputs)
    if not isinstance(total, Tensor):
        raise LowtideError(f"the model returned {type(output).__name__}, with no tensor that requires a gradient")
    return total.real if total.is_complex() else total


Mode = Literal["auto", "real", "fake"]
_MARK = "lowtide::op"
_NUM_RECORDED = 3  # the first is the warm-up, which the median ignores
# Steps that are timed after each recording but the first, and on a device again after the profile. The fastest count:
# a host can run at half speed for seconds, while others use its cores, and such a moment is no basis for a plan.
_NUM_TIMED, _NUM_TIMED_ON_DEVICE = 1, 2
_NUM_FAKE = 2  # recordings on fake tensors, to see whether the step varies
# If the host has issued the whole step in less than this share of its time, the device is taken to be the limit.
_HOST_AHEAD = 0.8


class FakeTraceError(TraceError):
    """The step does not run on fake tensors; it may run on real ones."""


@one_at_a_time
def trace(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    *args: Any,
    optimizer: torch.optim.Optimizer | None = None,
    mode: Mode = "auto",
    device: torch.device | str | None = None,
) -> StepGraph:
    """One training step of `model` as data: `loss_fn(*args)` and its backward.

    - `mode="real"` runs real steps and measures them; afterwards parameters, gradients, buffers, random states, flags
      and hooks are restored, to the bit. `"fake"` runs on fake tensors: for a model on the meta device, a batch that
      does not fit, or a device that this machine does not have. `"auto"` is real if a plain step fits, else fake.
    - `device` is where the step will run: by default the model's own; a torch device, or a name such as `"H100"`.
    - `optimizer` adds the bytes of its state, including state that its first step will create. It is not stepped.

    Gradients that exist already are accumulated into; call `zero_grad()` first to trace a step that creates them.
    Raises `TraceError` if `loss_fn` does not return a scalar loss of this model, or if its ops vary between calls.

    >>> import torch, lowtide
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    >>> graph = lowtide.trace(model, lambda x: model(x).mean(), torch.randn(4, 8))
    >>> [call.path for call in graph.calls]
    ['', '0', '1', '2']
    """
    model = checks.arguments(model, loss_fn, mode)
    optimizer = plain_optimizer(optimizer, model)
    with CacheOff(model) as cache, _compat.random_tracker_restored():
        graph = _trace(step_on(device, model, loss_fn, args, optimizer), mode)
    return replace(graph, notes=(*graph.notes, NOTE)) if cache.was_on else graph


def _trace(step: _StepOnDevice, mode: Mode) -> StepGraph:
    is_elsewhere = step.is_foreign or step.is_on_meta
    if mode == "real" and is_elsewhere:
        raise TraceError(
            f"a real step needs the model on the device it is traced for; this one is on {step.model_device} "
            f"and the trace is for {step.hardware.name}. Use mode='fake', or move the model."
        )
    if mode == "real":
        return _trace_real(step)
    return _trace_fake(step) if mode == "fake" or is_elsewhere else _trace_auto(step)


@dataclass(frozen=True)
class _StepOnDevice:
    """The step to trace, the device that it is traced on, and the hardware that its times are for."""

    model: nn.Module
    loss_fn: Callable[..., Tensor]
    args: tuple[Any, ...]
    optimizer: Any
    device: torch.device  # of the tensors in the trace
    hardware: Hardware  # that times are predicted or measured for
    model_device: torch.device
    is_foreign: bool  # traced for another device than the model is on
    _optimizer_memory: list[tuple[int, int, list[str]]] = field(default_factory=list)  # one, once known

    @property
    def is_on_meta(self) -> bool:
        return self.model_device.type == "meta"

    def optimizer_memory(self) -> tuple[int, int, list[str]]:
        """Return `optimizer_memory`, worked out once for all graphs of a trace."""
        if not self._optimizer_memory:
            self._optimizer_memory.append(optimizer_memory(self.optimizer, self.device))
        state_bytes, workspace_bytes, notes = self._optimizer_memory[0]
        return state_bytes, workspace_bytes, list(notes)


def step_on(
    device: torch.device | str | None, model: nn.Module, loss_fn: Any, args: tuple[Any, ...], optimizer: Any
) -> _StepOnDevice:
    """The step, to be traced for a device; by default that of the model."""
    make = functools.partial(_StepOnDevice, model, loss_fn, args, optimizer)
    model_device = checks.device_of(model, args)
    here = _compat.accelerator()
    if device is None:
        target = (here or torch.device("cpu")) if model_device.type == "meta" else model_device
        target = trace_device(target)
        return make(target, present_device(target), model_device, False)
    hardware = named_device(device) if isinstance(device, str) else None
    if hardware is not None:
        return make(trace_device(here or torch.device("cpu")), hardware, model_device, True)
    try:
        target = trace_device(torch.device(device))
    except (RuntimeError, TypeError) as error:
        raise TraceError(
            f"{device!r} is neither a torch device nor in lowtide's table of devices: {', '.join(DEVICES)}. "
            "Add one with lowtide.tracing.devices.register_device(Hardware(...))."
        ) from error
    if target.type != "cpu" and (here is None or here.type != target.type):
        raise TraceError(
            f"this machine has no {target}. To trace for a device that is not here, give its name: device='H100'."
        )
    return make(target, present_device(target), model_device, target != model_device)


def _trace_auto(step: _StepOnDevice) -> StepGraph:
    ranks, predicted = current(), None

    def fits(graph: StepGraph) -> bool:
        return _needed_bytes(graph) <= 0.95 * free_bytes(step.device)

    with contextlib.suppress(Exception):  # the step may run on real tensors only; else the real trace raises
        # If a plain step fits, the real trace checks that the step does not vary.
        predicted = _trace_fake(step, fits if ranks.is_alone else False)
    if ranks.any(predicted is None, "trace on fake tensors") or predicted is None:
        return _trace_real(step)
    if ranks.all(fits(predicted), "whether a plain step fits"):
        try:
            with ranks.together("trace of a plain step"):
                return _trace_real(step)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
    note = (
        f"traced on fake tensors: a plain step would need {format_bytes(_needed_bytes(predicted))} more, and "
        f"{format_bytes(free_bytes(step.device))} are free"
    )
    return replace(predicted, notes=(*predicted.notes, note))


def _needed_bytes(graph: StepGraph) -> int:
    """Bytes that a plain step allocates on top of what exists before it; the optimizer may have no state yet."""
    return graph.plain_peak_bytes - graph.bytes_before + graph.optimizer_state_bytes


@one_at_a_time
def trace_once(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    *args: Any,
    optimizer: Any = None,
    device: torch.device | str | None = None,
) -> StepGraph:
    """`trace` on fake tensors in half the time: the step is recorded once, so varying steps are not detected."""
    with CacheOff(model), _compat.random_tracker_restored():
        return _trace_fake(step_on(device, model, loss_fn, args, optimizer), is_enough=True)


def _trace_fake(step: _StepOnDevice, is_enough: Callable[[StepGraph], bool] | bool = False) -> StepGraph:
    """Trace on fake tensors. A step is recorded twice, to see whether it varies, unless the first graph `is_enough`."""
    if _compat.gathered_units(step.model):
        raise FakeTraceError(
            "a model under fully_shard cannot be traced on fake tensors, which its gathers do not accept: use "
            "mode='real', or trace the model before fully_shard is called"
        )
    unseen_bytes = data_parallel.bucket_bytes(data_parallel.wrappers_of(step.model))
    step.optimizer_memory()  # while the model's parameters are real

    def graph_of(recorder: Recorder) -> StepGraph:
        return predicted_graph(recorder, step, unseen_bytes)

    def can_stop(recorder: Recorder) -> bool:
        return is_enough if isinstance(is_enough, bool) else is_enough(graph_of(recorder))

    try:
        with _compat.fakes_hidden_from_transformers():
            recorders = _record_fake(step, can_stop)
    except _compat.fake_errors():
        recorders = _record_fake(step, can_stop, reports=True)
    recorder = checks.same_step(recorders)[-1]
    checks.nothing_kept(recorders)
    return graph_of(recorder)


def predicted_graph(
    recorder: Recorder,
    step: _StepOnDevice,
    unseen_bytes: int,
    seconds_of: Callable[[RawOp, Hardware], float] = predicted_s,
) -> StepGraph:
    """The graph of a recording on fake tensors, with predicted times and workspaces."""
    predict_workspaces(recorder)
    hardware = step.hardware
    for index, op in enumerate(recorder.ops):
        op.seconds = seconds_of(op, hardware)
        op.host_s = predicted_host_s(op, hardware, in_backward=index >= recorder.num_forward)
    if hardware.name != "cpu":
        hardware = replace(hardware, **ENGINE_COSTS._asdict())
    return _build(recorder, step, hardware, None, is_measured=False, unseen_bytes=unseen_bytes)


def _record_fake(step: _StepOnDevice, can_stop: Callable[[Recorder], bool], reports: bool = False) -> list[Recorder]:
    """Record the step twice, or once if `can_stop` accepts that; `reports`: raise errors of fakes as our own."""
    model, args = step.model, step.args
    restorer = Restorer(model, step.loss_fn, tensors_in(args), step.device)
    wrappers = data_parallel.wrappers_of(model)
    # A batch for a model on the meta device will be moved to where the model goes.
    faker = Faker(step.device, moves_all=step.is_foreign or step.is_on_meta)
    recorders: list[Recorder] = []
    handled = sys.exc_info()[1]

    def before_write(target: Tensor | torch.Generator) -> None:
        restorer.before_write(target)  # copies no fakes, so nothing of the model
        real = faker.real_of(target) if isinstance(target, Tensor) else None
        if real is not None:
            note_change(real)

    try:
        fake_args = map_tensors(faker.fake, args)
        for parameter in data_parallel.gradients_in_buckets(wrappers):
            faker.add_gradient(parameter)
        with _eagerly(), _compat.quiet_fakes(), data_parallel.bypassed(wrappers), faker.in_place_of(model):
            while len(recorders) < _NUM_FAKE + checks.is_only_warming_up(recorders):
                shadows = Shadows()
                for real, fake in faker.made():
                    shadows.add(fake, real)
                recorder = Recorder(
                    step.device,
                    checks.names_of(model),
                    before_write=before_write,
                    shadows=shadows,
                    block_bytes=block_bytes(step.device),
                )
                recorders.append(recorder)
                record(recorder, model, step.loss_fn, fake_args, restorer)
                restorer.reset_gradients()
                for tensor in [*model.parameters(), *tensors_in(fake_args)]:
                    if tensor.is_leaf:
                        tensor.grad = faker.gradient_before(tensor)
                if len(recorders) == 1 and can_stop(recorder):
                    break
    except Exception as error:
        _clear_locals(error, handled)
        if isinstance(error, TraceError) or (isinstance(error, _compat.fake_errors()) and not reports):
            raise
        raise FakeTraceError(
            f"the step cannot be traced on fake tensors: {type(error).__name__}: {str(error)[:300]}\n"
            "If it runs on real ones, its ops depend on values in its tensors, or a kernel has no fake version "
            "(`register_fake`): use `trace` with mode='real', `plan` or `fit`, which run real steps."
        ) from error
    finally:
        restorer.restore()
        if any(recorder.survivors() for recorder in recorders):
            gc.collect()  # most are in reference cycles of autograd
        if any(recorder.survivors() for recorder in recorders):
            uncache(faker)
    return recorders


def _clear_locals(error: BaseException | None, before: BaseException | None) -> None:
    """Clear the local variables of the functions that an error has ended, in which the step's fake tensors live on.

    `before` is the error that was being handled when the step began, if any: its functions are not the step's.
    """
    while error is not None and error is not before:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _trace_real(step: _StepOnDevice) -> StepGraph:
    model, loss_fn, args, device = step.model, step.loss_fn, step.args, step.device
    restorer = Restorer(model, loss_fn, tensors_in(args), device)
    can_profile = device.type == "cpu" and not _compat.profiler_is_active()
    recorders: list[Recorder] = []
    times: list[PlainTimes] = []
    probes_s: list[float] = []
    profile: list[dict[str, Any]] = []

    def time_steps() -> None:
        for _ in range(_NUM_TIMED if device.type == "cpu" else _NUM_TIMED_ON_DEVICE):
            times.append(time_step(loss_fn, args, device))
            probes_s.append(probe_s())
            restorer.reset_gradients()

    try:
        with _eagerly():
            _settle(model, loss_fn, args, restorer)
            while len(recorders) < _NUM_RECORDED + _is_warming_up(recorders):
                measures = len(recorders) == 1  # what ops allocate inside
                recorder = Recorder(
                    device,
                    checks.names_of(model),
                    clock_for(device),
                    restorer.before_write,
                    meter=functools.partial(read_allocator, device) if measures and device.type == "cuda" else None,
                    mark=_MARK if measures and can_profile else None,
                    block_bytes=block_bytes(device),
                )

                def run(recorder: Recorder = recorder) -> None:
                    record(recorder, model, loss_fn, args, restorer)

                if measures and can_profile:
                    recorder.add_workspaces(_compat.cpu_peaks_within(run, _MARK))
                else:
                    run()
                recorders.append(recorder)
                restorer.reset_gradients()
                if len(recorders) > 1:
                    time_steps()
            if device.type == "cuda" and not _compat.profiler_is_active():
                profile = profiled(lambda: loss_fn(*args).backward(), device)
                restorer.reset_gradients()
                time_steps()
    finally:
        restorer.restore()
    recorder = recorders[1]  # after the warm-up, so that persistent caches and workspaces exist
    if device.type == "cpu" and not can_profile:
        predict_workspaces(recorder)
        recorder.notes.append("workspaces of kernels are predicted, not measured: another torch.profiler is active")
    probe = min(zip(times, probes_s, strict=True), key=lambda pair: pair[0].host_s)[1]  # of the moment that counts
    engine = engine_costs(device).scaled(probe / REFERENCE_S)
    hardware = replace(step.hardware, link_bytes_per_s=link_bytes_per_s(device), **engine._asdict())
    names = [op.name for op in recorder.ops]
    alike = [each.ops for each in checks.same_step(recorders) if [op.name for op in each.ops] == names]
    plain = PlainTimes(*map(min, zip(*times, strict=True)))
    has_both_lines = set_seconds(recorder.ops, alike, profile, recorder.num_forward, plain, device)
    if not has_both_lines and device.type != "cpu":
        hardware = _without_host_line(recorder, hardware, plain)
    return _build(recorder, step, hardware, plain.step_s, is_measured=True)


def _settle(model: nn.Module, loss_fn: Any, args: Any, restorer: Restorer) -> None:
    """Run the steps after which DDP's own ops stay the same, without a dispatch mode.

    In its first step with `static_graph`, DDP counts the hooks that run, and in a recorded step these are others.
    """
    num_steps = data_parallel.num_warm_up_steps(data_parallel.wrappers_of(model))
    if num_steps:
        gradients = [tensor.grad for tensor in (*model.parameters(), *tensors_in(args)) if tensor.is_leaf]
        for tensor in (*model.buffers(), *tensors_in(args), *(grad for grad in gradients if grad is not None)):
            restorer.before_write(tensor)
    for _ in range(num_steps):
        loss = checks.loss(loss_fn, args, model)
        restorer.add_leaves(_compat.leaves_of(loss))
        checks.backward(loss)
        restorer.reset_gradients()


def _is_warming_up(recorders: list[Recorder]) -> bool:
    """Whether the first recording differs from the second, on any rank: all must run as many steps."""
    if len(recorders) < _NUM_RECORDED:
        return False
    return current().any(checks.is_only_warming_up(recorders), "whether the first step differs")


def _without_host_line(recorder: Recorder, hardware: Hardware, plain: PlainTimes) -> Hardware:
    """The hardware of a graph with one time line: the engine's host costs count, unless the device is the limit."""
    recorder.notes.append("host and device are one time line: the step's ops do not match the profiler's trace")
    is_ahead = plain.host_s < _HOST_AHEAD * plain.step_s
    return replace(hardware, **EngineCosts()._asdict()) if is_ahead else hardware


def record(recorder: Recorder, model: nn.Module, loss_fn: Any, args: Any, restorer: Restorer) -> None:
    """Run one step under a recorder. `restorer` learns of leaves that are not the model's."""
    for name, parameter in model.named_parameters(remove_duplicate=True):
        recorder.add_existing(parameter, "parameter", name)
        if parameter.grad is not None:
            recorder.add_existing(parameter.grad, "gradient", name)
    for name, buffer in model.named_buffers(remove_duplicate=True):
        recorder.add_existing(buffer, "buffer", name)
    for number, tensor in enumerate(tensors_in(args)):
        recorder.add_existing(tensor, "batch", f"batch[{number}]")
    touched: dict[str, Tensor] = {}
    with contextlib.ExitStack() as stack:
        for name, parameter in model.named_parameters(remove_duplicate=True):
            if parameter.requires_grad and parameter.is_leaf:
                # A finished gradient is not polled any more; else polling would be quadratic in the parameters.
                hook = functools.partial(_note_gradient, recorder, touched, name)
                stack.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
        for number, gathered in enumerate(_compat.gathered_parameters(model)):
            recorder.watch_gathered(gathered, f"{GATHERED} {number}")
        stack.enter_context(recorder.recording())
        loss = checks.loss(loss_fn, args, model)
        recorder.begin_backward()
        restorer.add_leaves(_compat.leaves_of(loss))
        checks.backward(loss)
        _note_last_gradient(recorder, touched)
        _note_sharded_gradients(recorder, touched, model)
        checks.touched(touched)
        recorder.finish()


def _note_gradient(recorder: Recorder, touched: dict[str, Tensor], name: str, parameter: Tensor) -> None:
    """Hook of a parameter that got its gradient: note the gradient of the parameter before it.

    DDP replaces a gradient by a view of its bucket after this hook, so a gradient is noted one hook later.
    """
    _note_last_gradient(recorder, touched)
    touched.pop(name, None)
    touched[name] = parameter


def _note_last_gradient(recorder: Recorder, touched: dict[str, Tensor]) -> None:
    if touched:
        name, parameter = next(reversed(touched.items()))
        if parameter.grad is not None:
            recorder.note_gradient(parameter.grad, name)


def _note_sharded_gradients(recorder: Recorder, touched: dict[str, Tensor], model: nn.Module) -> None:
    """Note the gradients of parameters that FSDP has set itself, without running hooks."""
    for name, parameter in model.named_parameters():
        if name not in touched and parameter.grad is not None and _compat.is_sharded(parameter):
            touched[name] = parameter
            recorder.note_gradient(parameter.grad, name)


def _build(
    recorder: Recorder,
    step: _StepOnDevice,
    hardware: Hardware,
    step_s: float | None,
    *,
    is_measured: bool,
    unseen_bytes: int = 0,
) -> StepGraph:
    """Convert a finished recording to a graph; without a measured `step_s`, both time lines predict it.

    `unseen_bytes` are on the device during the whole step, in tensors that no op of the trace used.
    """
    ops, values, saves = _frozen(Op, recorder.ops), _frozen(Value, recorder.values), _frozen(Save, recorder.saves)
    calls = with_structures(ops[: recorder.num_forward], _frozen(Call, recorder.calls), values, saves)
    state_bytes, workspace_bytes, notes = step.optimizer_memory()
    if step.is_foreign and step.device.type == "cpu":
        notes.append(f"traced with the CPU's kernels, without an accelerator; times are for {hardware.name}")
    graph = StepGraph(
        ops=tuple(with_even_times(ops, calls)),
        num_forward=recorder.num_forward,
        values=tuple(values),
        saves=tuple(saves),
        calls=tuple(calls),
        hardware=replace(hardware, block_bytes=recorder.block_bytes),
        optimizer_state_bytes=state_bytes,
        optimizer_workspace_bytes=workspace_bytes,
        other_bytes=_other_bytes(recorder, step, is_measured) + unseen_bytes,
        step_s=step_s or 0.0,
        is_measured=is_measured,
        notes=(*dict.fromkeys(recorder.notes), *notes),
        versions={"torch": torch.__version__, "python": platform.python_version()},
    )
    return replace(graph, step_s=graph.lines.step_s) if step_s is None else graph


def _frozen(record: type[Any], raws: Sequence[Any]) -> list[Any]:
    """Convert records of a recording to those of a graph, which have some of the same fields."""
    names = [field.name for field in fields(record) if field.name != "structure"]
    return [record(**{name: getattr(raw, name) for name in names}) for raw in raws]


def _other_bytes(recorder: Recorder, step: _StepOnDevice, is_measured: bool) -> int:
    """Bytes that the process holds on the device beside this step: workspaces of libraries, other models."""
    if step.hardware.name == "cpu":
        return 0
    if step.is_foreign or step.is_on_meta or step.device.type != "cuda":
        return CUBLAS_BYTES
    known = sum(value.bytes for value in recorder.values if value.born < 0)
    known += present_state_bytes(step.optimizer, step.device)
    others = torch.accelerator.memory_allocated(step.device) - known
    # Without a real step, cuBLAS may not have allocated its workspace yet.
    return max(0, others) if is_measured else max(CUBLAS_BYTES, others)


@contextlib.contextmanager
def _eagerly() -> Iterator[None]:
    """A context in which compiled modules run eagerly. Does nothing if torch's compiler was never imported."""
    if not _compat.compiler_is_imported():
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
