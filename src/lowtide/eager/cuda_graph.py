"""One training step, forward and backward, captured as a CUDA graph, and the checks that a graph still applies.

`CapturedStep` (`eager.captured_step`) makes a `CapturedGraph` for each form of batch. The step first runs eagerly a few
times, as one-time work must not be in the graph; then under capture; then once as a graph, to check that it draws as
many random numbers as the eager step. `Restorer` undoes each of these runs, so a cache that the step fills is filled
inside the graph, and not read from memory that was freed.

- **Guards.** A CUDA graph runs no Python and reads memory at fixed addresses. `StepGuards` and `batch_form` list what
  the captured Python depended on, and are compared before every run: a batch of another form, another `training` flag,
  dropout rate or variable of the loss function leads to another graph; a parameter that was moved or unfrozen is an
  error. Values inside other objects (fields of a config) and side effects of Python (prints, lists) are not checked.
- **Random numbers.** While a stream is capturing, the offset of a registered generator counts from the start of the
  graph and can be set back. Regions use that to draw the same numbers in a replay (`replay.environment`).
- **Gradients.** The graph's backward makes new gradients, in the graph's own memory. Accumulation is a second graph,
  captured while the first one's gradients exist, which adds to them in place. All graphs of a captured step share one
  memory pool, so running one may overwrite the gradients of another: `CapturedStep` copies those first.
"""

from __future__ import annotations

import dis
import functools
import gc
import linecache
import logging
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import lowtide
from lowtide import _compat
from lowtide._compat.autograd import leaves_of
from lowtide.errors import CaptureError
from lowtide.replay.arguments import map_tensors, tensors_in
from lowtide.replay.function_state import CapturedState
from lowtide.snapshot import ObjectSnapshot, Restorer, generator_states
from lowtide.units import format_bytes

logger = logging.getLogger("lowtide")

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def batch_form(item: Any) -> Any:
    """A hashable description of an argument: shape, strides, dtype and device of tensors, other values themselves."""
    if isinstance(item, Tensor):
        if not _compat.is_plain(item):
            raise CaptureError(f"a batch with a {type(item).__name__} cannot be captured: plain tensors can")
        return item.shape, item.stride(), item.dtype, item.device, item.requires_grad
    if isinstance(item, float | complex):
        return type(item), repr(item)  # 0.0 and -0.0 are equal
    if isinstance(item, (*_PLAIN, Enum)):
        return type(item), item
    if isinstance(item, tuple | list):
        return type(item), *map(batch_form, item)
    if isinstance(item, Mapping):
        return type(item), *((batch_form(key), batch_form(value)) for key, value in item.items())
    if is_dataclass(item) and not isinstance(item, type):
        return type(item), *(batch_form(getattr(item, field.name)) for field in fields(item))
    raise CaptureError(
        f"an argument of type {type(item).__name__} cannot be captured, as its changes cannot be detected: give "
        "tensors, numbers, text, and tuples, lists, dicts or dataclasses of these"
    )


class StepGuards:
    """The modules and variables that a step reads, as far as the model and the loss function refer to them."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any]) -> None:
        state = CapturedState(loss_fn)
        self._roots = roots = (model, *state.modules)
        self.modules = self._all_modules()
        self._names = {module: name for root in reversed(roots) for name, module in root.named_modules()}
        self._slots = [slots for module in self.modules for slots in _compat.module_tensors(module)]
        self._attributes = [
            (vars(module), [name for name, value in vars(module).items() if isinstance(value, (*_PLAIN, Tensor))])
            for module in self.modules
        ]
        read = {"", *_global_names(loss_fn)}  # cells have no names
        self._variables = [each._replace(value=None) for each in state.variables if each.name in read]
        own = (value for module in self.modules for value in vars(module).values())
        self.generators = [
            each
            for each in (*state.generators, *own)
            if isinstance(each, torch.Generator) and each.device.type == "cuda"
        ]
        # The graph reads memory that it does not own: keep alive what attributes and variables refer to now.
        contents = [each.value for each in state.variables if not each.name]
        self._held = ObjectSnapshot([*map(vars, self.modules), contents])
        self.tensors = self._tensors()

    def values(self) -> tuple[Any, ...]:
        """Python values that the step may read: numbers and strings by value, other objects by identity."""
        values = [_value(attributes.get(name)) for attributes, names in self._attributes for name in names]
        values += [_value(variable.read()) for variable in self._variables]
        return tuple(values)

    def numbers(self) -> dict[str, Any]:
        """Numbers and strings in attributes of modules, by name."""
        return {
            f"{self._names.get(module) or type(module).__name__}.{name}": attributes.get(name)
            for module, (attributes, names) in zip(self.modules, self._attributes, strict=True)
            for name in names
            if isinstance(attributes.get(name), bool | int | float | str)
        }

    @property
    def parameters(self) -> list[Tensor]:
        return [tensor for slots in self._slots[::2] for tensor in slots.values() if tensor is not None]

    @property
    def buffers(self) -> list[Tensor]:
        return [tensor for slots in self._slots[1::2] for tensor in slots.values() if tensor is not None]

    def _all_modules(self) -> list[nn.Module]:
        return list({part: None for root in self._roots for part in _compat.submodules(root)})

    def _tensors(self) -> list[tuple[int, int, bool]]:
        return [
            (id(tensor), tensor.data_ptr(), tensor.requires_grad)
            for slots in self._slots
            for tensor in slots.values()
            if tensor is not None
        ]

    def what_moved(self) -> str | None:
        """Describe a module, parameter or buffer that was replaced, moved, frozen or unfrozen since; else None."""
        if self._all_modules() != self.modules:
            return "modules were added or replaced"
        return self._first_changed() if self._tensors() != self.tensors else None

    def _first_changed(self) -> str:
        now, then = self._tensors(), self.tensors
        if len(now) != len(then):
            return "parameters or buffers were added or removed"
        position = next(index for index, pair in enumerate(zip(now, then, strict=True)) if pair[0] != pair[1])
        name = [name for slots in self._slots for name, tensor in slots.items() if tensor is not None][position]
        modules = [m for m in self.modules for s in _compat.module_tensors(m) for t in s.values() if t is not None]
        path = f"{self._names.get(modules[position], '')}.{name}".lstrip(".")
        if now[position][:2] == then[position][:2]:
            return f"{path} became {'trainable' if now[position][2] else 'frozen'}"
        return f"{path} was replaced or moved"


def _value(item: Any) -> Any:
    return item if isinstance(item, _PLAIN) else (id(item), item.data_ptr()) if isinstance(item, Tensor) else id(item)


def _global_names(function: Any) -> Iterator[str]:
    """Names of globals that a function and its inner functions read."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    codes: list[types.CodeType] = [] if code is None else [code]
    for each in codes:  # grows while it is walked
        yield from (i.argval for i in dis.get_instructions(each) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
        codes += [constant for constant in each.co_consts if isinstance(constant, types.CodeType)]


def changed_value(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """Describe the first attribute whose value differs; None if all are equal."""
    for name, value in before.items():
        if name in after and (type(after[name]) is not type(value) or after[name] != value):
            return f"{name} from {value!r} to {after[name]!r}"
    return None


class NumbersFilledIn(TorchFunctionMode):
    """Makes tensors of single numbers on an accelerator by a kernel: `torch.tensor(0.0, device=x.device)`.

    torch makes them on the host and copies them, which a stream cannot capture. The mode belongs to its thread, so it
    does not reach replays in the backward of an accelerator. `has_filled` says whether there were any.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_filled = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and len(args) == 1 and isinstance(args[0], bool | int | float):
            device = options.get("device") or _compat.default_device() or "cpu"
            if torch.device(device).type != "cpu" and not options.pop("pin_memory", False):
                self.has_filled = True
                return torch.full((), args[0], **{**options, "device": device})
        return func(*args, **options)


_NUM_WARM_UPS = 3  # as torch recommends; in the first, regions find out which saves carry retained outputs
# Differences of a forward's bytes that are no other path: small tensors that a library caches in its first step.
_SAME_PATH_BYTES, _SAME_PATH_SHARE = 1 << 20, 0.005
_SHIFT = 4 << 20  # added to generator offsets in warm-ups, to detect a step that sets an offset itself


class CapturedGraph:
    """A captured step for batches of one form. `run` copies a batch in, runs the graph and sets `.grad`.

    The graph's memory is in `pool`. `fill` is called before the capture, on its stream, and may put segments into it.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        args: tuple[Any, ...],
        pool: Any,
        fill: Callable[[], None] | None,
        *,
        ignore_host_draws: bool,
    ) -> None:
        self.facts = StepGuards(model, loss_fn)
        self._model, self._loss_fn, self._pool = model, loss_fn, pool
        self._device = next(tensor.device for tensor in tensors_in(args))
        self._args = map_tensors(lambda tensor: tensor.detach().clone(), args)
        self._inputs = list(tensors_in(self._args))
        self._generators = [torch.cuda.default_generators[self._device.index or 0], *self.facts.generators]
        self._ignore_host_draws = ignore_host_draws
        # In the first warm-up; then only if it found numbers, as guards of compiled modules depend on modes.
        self._forward_mode: NumbersFilledIn | None = NumbersFilledIn()
        self._forward_bytes = 0  # that the last forward held at its end
        self.leaves: dict[int, Tensor] = {id(leaf): leaf for leaf in self.facts.parameters if leaf.requires_grad}
        self.gradients: dict[int, Tensor] = {}  # by the ids of leaves
        self.planned: Any = None  # what the handle says of the plan that this was captured under
        self._fresh = self._captured(fill, adds=False)
        self.adding: _Graph | None = None  # adds to gradients

    def prepare_to_add(self) -> None:
        """Capture the graph that adds to gradients."""
        self.adding = self._captured(None, adds=True)

    def run(self, args: tuple[Any, ...], *, adds: bool) -> Tensor:
        """Run the graph on a batch and return a copy of the loss. With `adds`, gradients are accumulated."""
        graph = self.adding if adds else self._fresh
        assert graph is not None
        with torch.no_grad():
            for own, given in zip(self._inputs, tensors_in(args), strict=True):
                own.copy_(given, non_blocking=True)
            if adds:
                self._take_over()
        graph.graph.replay()
        for key, leaf in self.leaves.items():
            gradient = self.gradients.get(key, leaf.grad if adds else None)
            if leaf.grad is not gradient:
                leaf.grad = gradient
        return graph.loss.clone()

    def _take_over(self) -> None:
        """Copy the present gradients to the tensors that the graph accumulates into."""
        for key, gradient in self.gradients.items():
            present = self.leaves[key].grad
            if present is None:
                gradient.zero_()
            elif present is not gradient:
                gradient.copy_(present)

    # Capturing.

    def _captured(self, fill: Callable[[], None] | None, *, adds: bool) -> _Graph:
        with torch.cuda.device(self._device):
            draws = self._warm_up()
            return self._capture(draws, self._forward_bytes, fill, adds)

    def _warm_up(self) -> list[int]:
        """Run the step eagerly. Returns by how much one step advances each generator's offset."""
        with self._nothing_left():
            numbers, drawn = self.facts.numbers(), generator_states(None)
            versions = _compat.versions_of(self._inputs)
            weights = _compat.versions_of(self.facts.parameters)
            stream, current = capture_stream(self._device.index), torch.cuda.current_stream()
            for generator in self._generators:
                generator.set_offset(generator.get_offset() + _SHIFT)
            stream.wait_stream(current)
            try:
                with torch.cuda.stream(stream):
                    for number in range(_NUM_WARM_UPS):
                        before = self._positions()
                        self._step(is_first=number == 0)
                        draws = _distances(before, self._positions())
                        self._clear_gradients()
                        if number == 0:
                            self._refuse_what_python_does(numbers, drawn, versions, weights)
            finally:
                current.wait_stream(stream)  # buffers are restored on the current stream
            return draws

    def _capture(self, draws: list[int], eager_bytes: int, fill: Callable[[], None] | None, adds: bool) -> _Graph:
        graph, stream = torch.cuda.CUDAGraph(), capture_stream(self._device.index)
        self._register(graph)
        with self._nothing_left(), self._gradients_kept() if adds else nullcontext():
            for key, gradient in self.gradients.items() if adds else ():
                self.leaves[key].grad = gradient
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            failure: BaseException | None = None
            loss: Tensor | None = None
            with torch.cuda.stream(stream):
                if fill is not None:
                    fill()
                torch.clear_autocast_cache()  # a weight cast before the capture would not be cast again
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    loss = self._step()
                except BaseException as error:
                    failure = error
                finally:
                    torch.clear_autocast_cache()
                    failure = _end(graph, failure)
            if failure is not None:
                traceback.clear_frames(failure.__traceback__)  # the frames hold tensors in the graph's memory
                loss = None
                self._clear_gradients()
                _compat.give_up_pool(stream.device.index, self._pool)
                self._mend(stream)
                refusal = self._refusal(failure)
                raise refusal from (None if refusal is failure else failure)
            assert loss is not None
            self._warn_of_another_path(eager_bytes)
            if not adds:
                self.gradients = {k: leaf.grad for k, leaf in self.leaves.items() if leaf.grad is not None}
            before = self._positions()
            graph.replay()
            torch.cuda.synchronize()
            if _distances(before, self._positions()) != draws:
                raise CaptureError(_OTHER_DRAWS)
        return _Graph(graph, loss)

    @contextmanager
    def _gradients_kept(self) -> Iterator[None]:
        """Context manager that restores the graph's gradients, around a trial run that accumulates into them."""
        kept = {key: gradient.cpu() for key, gradient in self.gradients.items()}
        try:
            yield
        finally:
            with torch.no_grad():
                for key, copy in kept.items():
                    self.gradients[key].copy_(copy)

    def _register(self, graph: torch.cuda.CUDAGraph) -> None:
        for generator in self._generators:
            graph.register_generator_state(generator)

    def _positions(self) -> list[tuple[int, int]]:
        """Seeds and offsets of the generators."""
        return [(generator.initial_seed(), generator.get_offset()) for generator in self._generators]

    def _mend(self, stream: torch.cuda.Stream) -> None:
        """Run a small capture that succeeds: after a failed one, torch leaves generators in capture mode."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        self._register(graph)
        with torch.cuda.stream(stream):
            scratch = torch.zeros(1, device=stream.device)
            graph.capture_begin(capture_error_mode="thread_local")
            scratch.zero_()
            graph.capture_end()
        graph.reset()
        torch.cuda.empty_cache()

    def _step(self, *, is_first: bool = False) -> Tensor:
        before = _requested_bytes(self._device)
        with self._forward_mode or nullcontext():
            loss = self._loss_fn(*self._args)
        if self._forward_mode is not None and not self._forward_mode.has_filled:
            self._forward_mode = None
        self._forward_bytes = _requested_bytes(self._device) - before
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss_fn returned {type(loss).__name__}, not a tensor: let it return the loss")
        if is_first:  # parameters of modules that only `loss_fn` refers to
            for leaf in leaves_of(loss):
                if id(leaf) not in self.leaves:
                    self.leaves[id(leaf)] = leaf
                    self._restorer.add_leaves([leaf])
                    leaf.grad = None
        loss.backward()
        return loss.detach()

    @contextmanager
    def _nothing_left(self) -> Iterator[None]:
        """Context manager that clears gradients, and restores everything that the step changes inside it."""
        self._restorer = Restorer(self._model, self._loss_fn, self._inputs, self._device)
        self._restorer.add_leaves(self.leaves.values())
        for buffer in self.facts.buffers:
            self._restorer.before_write(buffer)
        for generator in self._generators:
            self._restorer.before_write(generator)
        self._clear_gradients()
        try:
            yield
        finally:
            self._restorer.restore()
            del self._restorer

    def _clear_gradients(self) -> None:
        for leaf in self.leaves.values():
            leaf.grad = None

    def _refuse_what_python_does(self, numbers: Any, drawn: Any, versions: Any, weights: Any) -> None:
        """Raise if the first eager step did something in Python that a graph would not repeat."""
        changed = changed_value(numbers, self.facts.numbers())
        if changed is not None:
            raise CaptureError(
                f"the step changes {changed} in Python, and a captured graph runs no Python. If that happens in a "
                "first step only, run one before the capture; otherwise keep it in a buffer on the device"
            )
        moved = self.facts.what_moved()
        if moved is not None:
            raise CaptureError(f"{moved} by the step itself: let it write to the tensor that is there, in place")
        if _compat.versions_of(self._inputs) != versions:
            raise CaptureError("the step writes to its batch in place: let it write to a copy")
        if _compat.versions_of(self.facts.parameters) != weights:
            raise CaptureError("the step writes to parameters itself: a captured step may not (max_norm, an optimizer)")
        if not self._ignore_host_draws and (source := _drawn_on_host(drawn, generator_states(None))) is not None:
            raise CaptureError(
                f"the step draws random numbers on the host ({source}), which a graph would freeze. Draw them on the "
                "device; or, where they decide nothing (Whisper's layerdrop of 0), capture with ignore_host_draws=True"
            )

    def _warn_of_another_path(self, eager_bytes: int) -> None:
        """Warn if the captured forward left more or fewer bytes for the backward than the eager one."""
        more = self._forward_bytes - eager_bytes
        if abs(more) > max(_SAME_PATH_BYTES, _SAME_PATH_SHARE * eager_bytes):
            logger.warning(
                "the captured step takes another path than the eager one: its forward holds %s %s. Some libraries ask "
                "whether a stream is capturing: Hugging Face's decoders make an attention mask then, with which "
                "attention is slower. See docs/cuda-graphs.md",
                format_bytes(abs(more)),
                "more" if more > 0 else "less",
            )

    def _refusal(self, failure: BaseException) -> BaseException:
        """The exception to raise for a failed capture, with the user's line that caused it."""
        if isinstance(failure, CaptureError | torch.OutOfMemoryError) or "captur" not in str(failure):
            return failure
        where = _user_line(list(traceback.walk_tb(failure.__traceback__)))
        op = next((op for op, line in self._synchronizing_ops() if where is not None and line == where), None)
        said = str(failure).splitlines()[0]
        if where is None:
            return CaptureError(f"the step cannot be captured: {said}. Everything is as before.")
        file, line = where
        code = linecache.getline(file, line).strip()
        what = (
            f"{op}, which makes the host wait for the device"
            if op
            else "something that a stream cannot capture: most likely the host waits for the device"
        )
        return CaptureError(
            f"the step cannot be captured: {os.path.basename(file)}:{line} runs {what}\n    {code}\n({file}:{line}; "
            f"torch says: {said}). Keep the value on the device, or move that line out of the loss function. "
            "Everything is as before."
        )

    def _synchronizing_ops(self) -> list[tuple[str, tuple[str, int] | None]]:
        """The ops of an eager step that make the host wait, and the lines that call them."""
        ops = _compat.SynchronizingOps(lambda: _present_line(sys._getframe()))
        try:
            with ops:
                self._step()
        except Exception:  # the line is known anyway
            pass
        finally:
            self._clear_gradients()
        return ops.found


def _requested_bytes(device: torch.device) -> int:
    """Bytes of live tensors on the device, without what the allocator rounds them up by."""
    return int(torch.cuda.memory_stats(device)["requested_bytes.all.current"])


class _Graph(NamedTuple):
    """A CUDA graph, and the tensor that it writes the loss to."""

    graph: torch.cuda.CUDAGraph
    loss: Tensor


@functools.cache
def capture_stream(index: int) -> torch.cuda.Stream:
    """The stream for all captures on a device. One only, as cuBLAS allocates a workspace for each stream."""
    return torch.cuda.Stream(index)


def _end(graph: torch.cuda.CUDAGraph, failure: BaseException | None) -> BaseException | None:
    """End a capture. Returns the first error, or None."""
    try:
        graph.capture_end()
    except RuntimeError as error:  # raised after any failure inside the capture
        return failure or error
    return failure


def _distances(before: list[tuple[int, int]], after: list[tuple[int, int]]) -> list[int]:
    """By how much each generator's offset advanced; -1 for one that was seeded again, which a graph cannot do."""
    return [end - start if seed == now else -1 for (seed, start), (now, end) in zip(before, after, strict=True)]


_OTHER_DRAWS = (
    "the step draws other random numbers while it is captured than eagerly. Either it seeds a generator itself: seed "
    "before the step. Or it runs other kernels while a stream is capturing, as attention of some Hugging Face models "
    "does: try without dropout in the attention"
)
_LIBRARIES = tuple(os.path.dirname(package.__file__ or "") + os.sep for package in (torch, lowtide))


def _user_line(frames: list[tuple[types.FrameType, int]]) -> tuple[str, int] | None:
    """File and line of the innermost frame outside of torch and lowtide. The last frame is the innermost."""
    for frame, line in reversed(frames):
        if not frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
            return frame.f_code.co_filename, line
    return None


def _present_line(frame: types.FrameType) -> tuple[str, int] | None:
    """The user's line that has led to a frame. (`walk_stack(None)` leaves out the nearest frames.)"""
    return _user_line(list(traceback.walk_stack(frame))[::-1])


def _drawn_on_host(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """The host generator that was drawn from; None if none was."""
    if not torch.equal(before["torch"], after["torch"]):
        return "torch's CPU generator"
    if before["random"] != after["random"]:
        return "Python's random"
    if str(before["numpy"]) != str(after["numpy"]):
        return "numpy"
    return None
