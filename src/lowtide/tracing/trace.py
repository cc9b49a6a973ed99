"""From what a recorder saw to a `StepGraph`; and a loss for tracing a model without its own.

`trace`: one training step, watched as it runs, becomes a `StepGraph`.
"""

from __future__ import annotations

import contextlib
import functools
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lowtide import _compat
from lowtide._compat.fake_tensors import fakes_hidden_from_transformers
from lowtide._compat.profiler import cpu_peaks_within
from lowtide.errors import LowtideError, TraceError
from lowtide.graph.segments import with_even_times, with_structures
from lowtide.graph.step_graph import Call, Hardware, Op, Save, StepGraph, Value
from lowtide.replay.arguments import tensors_in
from lowtide.snapshot.restore import Restorer
from lowtide.tracing import step_checks as checks
from lowtide.tracing.devices import (
    CUBLAS_BYTES,
    ENGINE_COSTS,
    EngineCosts,
    block_bytes,
    engine_costs,
    free_bytes,
    link_bytes_per_s,
    named_device,
    present_device,
    trace_device,
    unknown_device,
)
from lowtide.tracing.fakes import Faker, Shadows
from lowtide.tracing.op_times import (
    PlainTimes,
    calibrated,
    clock_for,
    fit_to_total,
    matched,
    medians,
    predicted_host_s,
    predicted_s,
    profiled,
    time_step,
)
from lowtide.tracing.recorder import Recorder
from lowtide.tracing.step_checks import NOTE, CacheOff, one_at_a_time
from lowtide.tracing.untraced_memory import optimizer_memory, plain_optimizer, predict_workspaces
from lowtide.units import format_bytes


def build(recorder: Recorder, hardware: Hardware, *, notes: list[str], **facts: Any) -> StepGraph:
    """The graph of a finished recording."""
    values = [
        Value(v.bytes, v.kind, v.name, v.born, v.dropped, v.item_bytes or 0, v.row_length) for v in recorder.values
    ]
    ops = [
        Op(
            op.name,
            op.call,
            op.seconds,
            op.flops,
            op.inputs,
            op.outputs,
            op.mutates,
            op.workspace_bytes,
            op.flags,
            op.forward_op,
            op.host_s,
        )
        for op in recorder.ops
    ]
    saves = [Save(s.value, s.call, s.made, s.read, s.released, s.used, s.number) for s in recorder.saves]
    calls = [
        Call(c.path, c.kind, c.parent, c.first, c.end, c.inputs, c.outputs, changes=c.changes) for c in recorder.calls
    ]
    calls = with_structures(ops[: recorder.num_forward], calls, values, saves)
    return StepGraph(
        ops=tuple(with_even_times(ops, calls)),
        num_forward=recorder.num_forward,
        values=tuple(values),
        saves=tuple(saves),
        calls=tuple(calls),
        hardware=hardware,
        notes=(*dict.fromkeys(recorder.notes), *notes),
        **facts,
    )


def output_sum_loss(output: Any) -> Tensor:
    """Return the sum of a model's outputs that need a gradient, or of its scalar ones alone if there are any.

    Scalar outputs are losses that the model computed itself.
    """
    found = [tensor for tensor in tensors_in((output, getattr(output, "loss", None))) if tensor.requires_grad]
    found = list({id(tensor): tensor for tensor in found}.values())
    numbers = [tensor for tensor in found if tensor.ndim == 0]
    total = sum(tensor.sum() for tensor in numbers or found)
    if not isinstance(total, Tensor):
        raise LowtideError(f"the model gave {type(output).__name__}, with no tensor that needs a gradient in it")
    return total.real if total.is_complex() else total


Mode = Literal["auto", "real", "fake"]
_MARK = "lowtide::op"
_NUM_RECORDED, _NUM_TIMED = 3, 2  # the first recorded step is the warm-up, which the median ignores
_NUM_TIMED_ON_DEVICE = 5  # the median counts: Python's garbage collector is part of the host's time
_HOST_AHEAD = 0.8  # the share of a step's time within which a host that is ahead has issued all of it


class FakeTraceError(TraceError):
    """A step that does not run on fake tensors; it may on real ones."""


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

    - `mode="real"` runs five true steps and measures; parameters, gradients, buffers, random states, flags and hooks
      are then as they were, to the bit. `"fake"` runs on tensors without bytes: for a model on the meta device, a batch
      that would not fit, a device that is not here. `"auto"` is real where a plain step fits.
    - `device` is where the step will run: by default the model's own; a torch device, or a name such as `"H100"`.
    - `optimizer` adds its state, that of a first step to come included; its step is never taken.

    Gradients that are there already count as accumulated into; call `zero_grad()` first for a step that makes them.
    Raises `TraceError` where `loss_fn` gives no loss of this model, or another step each time.

    >>> import torch, lowtide
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    >>> graph = lowtide.trace(model, lambda x: model(x).mean(), torch.randn(4, 8))
    >>> [call.path for call in graph.calls]
    ['', '0', '1', '2']
    """
    checks.arguments(model, loss_fn, mode)
    optimizer = plain_optimizer(optimizer, model)
    with CacheOff(model) as cache:
        graph = _trace(model, loss_fn, args, optimizer, mode, _setting(model, args, device))
    return replace(graph, notes=(*graph.notes, NOTE)) if cache.was_on else graph


def _trace(model: Any, loss_fn: Any, args: Any, optimizer: Any, mode: Mode, setting: _Setting) -> StepGraph:
    if mode == "real":
        if setting.is_foreign or setting.is_on_meta:
            raise TraceError(
                f"a real step needs the model on the device it is traced for; this one is on {setting.found} "
                f"and the trace is for {setting.hardware.name}. Use mode='fake', or move the model."
            )
        return _trace_real(model, loss_fn, args, optimizer, setting)
    if mode == "fake" or setting.is_foreign or setting.is_on_meta:
        return _trace_fake(model, loss_fn, args, optimizer, setting)
    return _trace_auto(model, loss_fn, args, optimizer, setting)


@dataclass(frozen=True)
class _Setting:
    """Where the step is traced, and for what."""

    device: torch.device  # of the tensors in the trace
    hardware: Hardware  # what the times are for
    found: torch.device  # where the model is
    is_foreign: bool  # traced for another device than the model is on

    @property
    def is_on_meta(self) -> bool:
        return self.found.type == "meta"


def _setting(model: nn.Module, args: Any, device: torch.device | str | None) -> _Setting:
    found = checks.device_of(model, args)
    here = _compat.accelerator()
    if device is None:
        target = (here or torch.device("cpu")) if found.type == "meta" else found
        target = trace_device(target)
        return _Setting(target, present_device(target), found, False)
    hardware = named_device(device) if isinstance(device, str) else None
    if hardware is not None:
        return _Setting(trace_device(here or torch.device("cpu")), hardware, found, True)
    try:
        target = trace_device(torch.device(device))
    except (RuntimeError, TypeError) as error:
        raise unknown_device(device) from error
    if target.type != "cpu" and (here is None or here.type != target.type):
        raise TraceError(f"there is no {target} here. Name the device the step is for instead: device='H100'.")
    return _Setting(target, present_device(target), found, target != found)


def _trace_auto(model: Any, loss_fn: Any, args: Any, optimizer: Any, setting: _Setting) -> StepGraph:
    try:
        foretold = _trace_fake(model, loss_fn, args, optimizer, setting)
    except Exception:  # only a real run tells what the step does, or what is wrong with it
        return _trace_real(model, loss_fn, args, optimizer, setting)
    there = sum(size for kind, size in foretold.static_bytes.items() if kind != "gradients")
    needed = foretold.plain_peak_bytes - there + foretold.optimizer_state_bytes
    available = free_bytes(setting.device)
    if needed <= 0.95 * available:
        try:
            return _trace_real(model, loss_fn, args, optimizer, setting)
        except torch.OutOfMemoryError:
            available = free_bytes(setting.device)
    note = (
        f"traced on fake tensors: a plain step would need {format_bytes(needed)} more, and "
        f"{format_bytes(available)} are free"
    )
    return replace(foretold, notes=(*foretold.notes, note))


@one_at_a_time
def trace_once(model: nn.Module, loss_fn: Callable[..., Tensor], *args: Any, optimizer: Any = None) -> StepGraph:
    """As `trace` on fake tensors, in half the time: whether each step is alike is not looked at."""
    with CacheOff(model):
        return _trace_fake(model, loss_fn, args, optimizer, _setting(model, args, None), num_recorded=1)


def _trace_fake(
    model: Any, loss_fn: Any, args: Any, optimizer: Any, setting: _Setting, num_recorded: int = 2
) -> StepGraph:
    try:
        with fakes_hidden_from_transformers():
            recorders = _record_fake(model, loss_fn, args, setting, num_recorded)
    except _compat.fake_errors():
        recorders = _record_fake(model, loss_fn, args, setting, num_recorded, reports=True)
    recorder = checks.same_step(recorders)[-1]
    checks.nothing_kept(recorders)
    predict_workspaces(recorder)
    hardware = setting.hardware
    for index, op in enumerate(recorder.ops):
        op.seconds = predicted_s(op, hardware)
        op.host_s = predicted_host_s(op, hardware, in_backward=index >= recorder.num_forward)
    if hardware.name != "cpu":
        hardware = replace(hardware, **ENGINE_COSTS._asdict())
    return _finish(recorder, optimizer, setting, hardware, None, is_measured=False)


def _record_fake(
    model: Any, loss_fn: Any, args: Any, setting: _Setting, num_recorded: int, reports: bool = False
) -> list[Recorder]:
    """Recordings on fake tensors."""
    restorer = Restorer(model, loss_fn, tensors_in(args), setting.device)
    # A model on the meta device is nowhere yet: where it goes, its batch will go.
    faker = Faker(setting.device, moves_all=setting.is_foreign or setting.is_on_meta)
    recorders: list[Recorder] = []
    try:
        fake_args = faker.fake_all(args)
        with _eagerly(), _compat.quiet_fakes(), faker.in_place_of(model):
            while len(recorders) < num_recorded + checks.is_only_warming_up(recorders):
                shadows = Shadows()
                for real, fake in faker.made():
                    shadows.know(fake, real)
                recorder = Recorder(
                    setting.device,
                    checks.names_of(model),
                    before_write=restorer.before_write,  # of tensors that are not the model's, hence not fake
                    shadows=shadows,
                    block_bytes=block_bytes(setting.device),
                )
                _record(recorder, model, loss_fn, fake_args, restorer)
                recorders.append(recorder)
                restorer.reset_gradients()
                for tensor in [*model.parameters(), *tensors_in(fake_args)]:
                    if tensor.is_leaf:
                        tensor.grad = faker.gradient_before(tensor)
    except (TraceError, KeyboardInterrupt):
        raise
    except Exception as error:
        if isinstance(error, _compat.fake_errors()) and not reports:
            raise
        raise FakeTraceError(
            f"the step cannot be traced on fake tensors: {type(error).__name__}: {str(error)[:300]}\n"
            "Where it runs on real ones, what it does depends on numbers in its tensors, or on a kernel without a fake "
            "version: `trace` with mode='real', `plan` and `fit` run real steps."
        ) from error
    finally:
        restorer.restore()
    return recorders


def _trace_real(model: Any, loss_fn: Any, args: Any, optimizer: Any, setting: _Setting) -> StepGraph:
    restorer = Restorer(model, loss_fn, tensors_in(args), setting.device)
    device = setting.device
    can_profile = device.type == "cpu" and not _compat.profiler_is_active()
    recorders: list[Recorder] = []
    times: list[PlainTimes] = []
    profile: list[dict[str, Any]] = []
    try:
        with _eagerly():
            while len(recorders) < _NUM_RECORDED + checks.is_only_warming_up(recorders):
                measures = len(recorders) == 1  # what ops allocate inside
                recorder = Recorder(
                    device,
                    checks.names_of(model),
                    clock_for(device),
                    restorer.before_write,
                    meter=_compat.allocator_meter(device) if measures else None,
                    mark=_MARK if measures and can_profile else None,
                    block_bytes=block_bytes(device),
                )

                def record(recorder: Recorder = recorder) -> None:
                    _record(recorder, model, loss_fn, args, restorer)

                if measures and can_profile:
                    recorder.add_workspaces(cpu_peaks_within(record, _MARK))
                else:
                    record()
                recorders.append(recorder)
                restorer.reset_gradients()
            for _ in range(_NUM_TIMED if device.type == "cpu" else _NUM_TIMED_ON_DEVICE):
                times.append(time_step(loss_fn, args, device))
                restorer.reset_gradients()
            if device.type == "cuda" and not _compat.profiler_is_active():
                profile = profiled(lambda: loss_fn(*args).backward(), device)
                restorer.reset_gradients()
    finally:
        restorer.restore()
    recorder = recorders[1]  # by now every cache and workspace that stays is there
    if device.type == "cpu" and not can_profile:
        predict_workspaces(recorder)
        recorder.notes.append("what kernels allocate inside is predicted: a torch.profiler is active, and cannot nest")
    hardware = replace(setting.hardware, link_bytes_per_s=link_bytes_per_s(device), **engine_costs(device)._asdict())
    names = [op.name for op in recorder.ops]
    alike = [each for each in checks.same_step(recorders) if [op.name for op in each.ops] == names]
    if device.type == "cpu":
        plain = PlainTimes(*map(min, zip(*times, strict=True)))
    else:
        plain = sorted(times, key=lambda each: each.step_s)[len(times) // 2]
    both_lines = matched(profile, names)
    if both_lines is not None:
        host, seconds = calibrated(both_lines, recorder.num_forward, plain)
        for op, op_s, host_s, is_sync in zip(recorder.ops, seconds, host, both_lines.is_sync, strict=True):
            op.seconds, op.host_s = op_s, host_s
            op.flags = (*op.flags, "sync") if is_sync else op.flags
    else:
        medians_s, cut = medians([[op.seconds for op in each.ops] for each in alike]), recorder.num_forward
        fitted = fit_to_total(medians_s[:cut], plain.forward_s, device=device)
        fitted += fit_to_total(medians_s[cut:], plain.backward_s, device=device)
        for op, op_s in zip(recorder.ops, fitted, strict=True):
            op.seconds = op_s
        if device.type != "cpu":
            hardware = _without_host_line(recorder, hardware, plain)
    return _finish(recorder, optimizer, setting, hardware, plain.step_s, is_measured=True)


def _without_host_line(recorder: Recorder, hardware: Hardware, plain: PlainTimes) -> Hardware:
    """Where host and device could not be told apart: the engine's work counts in full, or if the host is ahead, not."""
    recorder.notes.append("host and device are one time line: the ops of the step were not found in a profile of it")
    is_ahead = plain.forward_host_s + plain.backward_host_s < _HOST_AHEAD * plain.step_s
    return replace(hardware, **EngineCosts()._asdict()) if is_ahead else hardware


def _record(recorder: Recorder, model: nn.Module, loss_fn: Any, args: Any, restorer: Restorer) -> None:
    for name, parameter in model.named_parameters(remove_duplicate=True):
        recorder.know(parameter, "parameter", name)
        if parameter.grad is not None:
            recorder.know(parameter.grad, "gradient", name)
    for name, buffer in model.named_buffers(remove_duplicate=True):
        recorder.know(buffer, "buffer", name)
    for number, tensor in enumerate(tensors_in(args)):
        recorder.know(tensor, "batch", f"batch[{number}]")
    touched: set[str] = set()
    with contextlib.ExitStack() as stack:
        for name, parameter in model.named_parameters(remove_duplicate=True):
            if parameter.requires_grad and parameter.is_leaf:
                # Otherwise every op of the backward would look at every gradient made before it.
                hook = functools.partial(_note_gradient, recorder, touched, name)
                stack.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
        stack.enter_context(recorder.recording())
        loss = checks.run(loss_fn, args, model)
        checks.loss(loss)
        recorder.begin_backward()
        restorer.add_leaves(_compat.leaves_of(loss))
        loss.backward()
        checks.touched(touched)
        recorder.finish()


def _note_gradient(recorder: Recorder, touched: set[str], name: str, parameter: Tensor) -> None:
    touched.add(name)
    if parameter.grad is not None:
        recorder.note_gradient(parameter.grad, name)


def _finish(
    recorder: Recorder,
    optimizer: Any,
    setting: _Setting,
    hardware: Hardware,
    step_s: float | None,
    *,
    is_measured: bool,
) -> StepGraph:
    """The graph of a recording; without `step_s`, its step takes what both time lines come to."""
    state_bytes, workspace_bytes, notes = optimizer_memory(optimizer, recorder.block_bytes)
    if setting.is_foreign and setting.device.type == "cpu":
        notes.append(f"traced with the CPU's kernels, as there is no accelerator here; times are for {hardware.name}")
    graph = build(
        recorder,
        replace(hardware, block_bytes=recorder.block_bytes),
        optimizer_state_bytes=state_bytes,
        optimizer_workspace_bytes=workspace_bytes,
        other_bytes=_other_bytes(recorder, optimizer, setting, is_measured),
        step_s=step_s or 0.0,
        is_measured=is_measured,
        notes=notes,
        versions={"torch": torch.__version__, "python": platform.python_version()},
    )
    return replace(graph, step_s=graph.lines.step_s) if step_s is None else graph


def _other_bytes(recorder: Recorder, optimizer: Any, setting: _Setting, is_measured: bool) -> int:
    """What the process holds on the device besides this step: workspaces of libraries, other models."""
    if setting.hardware.name == "cpu":
        return 0
    if setting.is_foreign or setting.is_on_meta or setting.device.type != "cuda":
        return CUBLAS_BYTES
    known = sum(value.bytes for value in recorder.values if value.born < 0)
    if optimizer is not None:
        known += sum(
            part.untyped_storage().nbytes()
            for state in optimizer.state.values()
            for tensor in tensors_in(state)
            for part in _compat.inner_tensors(tensor)
            if part.device == setting.device
        )
    found = torch.accelerator.memory_allocated(setting.device) - known
    return max(0, found) if is_measured else max(CUBLAS_BYTES, found)  # before the first step cuBLAS holds nothing yet


@contextlib.contextmanager
def _eagerly() -> Iterator[None]:
    """A block in which compiled modules run as they were written; nothing to do where no one imported the compiler."""
    if not _compat.compiler_is_imported():
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
