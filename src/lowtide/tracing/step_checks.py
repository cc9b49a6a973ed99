"""Checks before and after a trace; a process-wide lock; and `use_cache` of Hugging Face models switched off.

**Checks** raise `TypeError`, `ValueError` or `TraceError` with what was found and what to do: the model is on several
devices, `loss_fn` returns no scalar, no parameter gets a gradient, the ops vary between steps. `trace`, `fit` and
`max_batch` call them.

**Lock** (`one_at_a_time`): traces and measurements register global module hooks, start torch's profiler, of which a
process can have one, and restore random states shared by all threads. Two at once would record each other's ops, so
calls from several threads wait for each other.

**`CacheOff`**: with `config.use_cache` at its default, each layer of a Hugging Face model appends to a key/value
cache in every forward. Such a layer cannot be recomputed, as it would append again. Training does not use the cache,
and Hugging Face's own gradient checkpointing switches it off; lowtide sets the same switch while a model is traced or
has a plan. `use_cache=True` passed to the model, as `generate()` does, overrides the switch; layers that then append
to a cache are left out of plans (`StepGraph.unreplayable`).

`old_objects_frozen` lets the garbage collections of `fit` skip objects that existed before it.
"""

from __future__ import annotations

import functools
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from lowtide import _compat
from lowtide.distributed import data_parallel
from lowtide.errors import TraceError
from lowtide.replay.arguments import tensors_in
from lowtide.tracing.recorder import Recorder


def module(model: object) -> nn.Module:
    """Return the model inside of wrappers (DDP, torch.compile's). `TypeError` for one that runs no Python code."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is an nn.Module, not {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(f"model is a {type(model).__name__}, which runs no Python: give the nn.Module it was made from")
    data_parallel.remember(model)
    return _compat.unwrapped(model)


def arguments(model: object, loss_fn: object, mode: object) -> nn.Module:
    """Raise unless these are valid arguments of `trace`. Returns the model without wrappers, as `module` does."""
    checked = module(model)
    if not callable(loss_fn):
        raise TypeError(f"loss_fn is a function of the batch that returns the loss, not {type(loss_fn).__name__}")
    if mode not in ("auto", "real", "fake"):
        raise ValueError(f"mode is 'auto', 'real' or 'fake', not {mode!r}")
    if _compat.flat_parameter_wrappers(checked):
        raise TraceError(
            "the model is wrapped in FullyShardedDataParallel (FSDP1), which replaces parameters by parts of flat ones "
            "in every step, and cannot be traced. Use torch.distributed.fsdp.fully_shard (FSDP2)."
        )
    lazy = [name for name, parameter in _named_tensors(checked) if _compat.is_uninitialized(parameter)]
    if lazy:
        raise TraceError(f"{lazy[0]} is not initialised yet: run the model once before tracing it")
    return checked


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def device_of(model: nn.Module, args: Any) -> torch.device:
    """Return the model's device (without tensors, the batch's). Raises `TraceError` for several accelerators."""
    devices = {parameter.device for _, parameter in _named_tensors(model) if parameter.numel() > 1}
    accelerated = {device for device in devices if device.type != "cpu"}
    if len(accelerated) > 1:
        raise TraceError(
            f"the model is on several devices ({', '.join(sorted(map(str, accelerated)))}). "
            "A trace is of one device: trace each stage on its own."
        )
    if accelerated:
        return accelerated.pop()
    if devices:
        return devices.pop()
    return next((tensor.device for tensor in tensors_in(args)), torch.device("cpu"))


def names_of(model: nn.Module) -> dict[nn.Module, str]:
    """Return the path of each module of a model."""
    return {module: name for name, module in model.named_modules()}


def loss(loss_fn: Any, args: Any, model: nn.Module) -> Tensor:
    """Return `loss_fn(*args)`, with errors that say so where it fails for a known reason, or is no loss."""
    try:
        result = loss_fn(*args)
    except (RuntimeError, ValueError) as error:
        text = str(error)
        if "don't yet support saved tensor hooks" in text:
            raise TraceError(
                "the step uses torch.func.grad, vjp, jacrev or hessian. torch allows no saved-tensor hooks around "
                "them, and lowtide needs these: use torch.autograd.grad(..., create_graph=True) in the step"
            ) from error
        if "device" not in text or isinstance(error, _compat.fake_errors()):
            raise
        batch = sorted({str(tensor.device) for tensor in tensors_in(args)})
        model_devices = sorted({str(tensor.device) for _, tensor in _named_tensors(model)})
        if set(batch) <= set(model_devices):
            raise
        raise TraceError(
            f"the batch is on {', '.join(batch)} and the model on {', '.join(model_devices)}: "
            f"move the batch to the model's device, or let loss_fn do so. ({text.splitlines()[0][:200]})"
        ) from error
    if not isinstance(result, Tensor):
        hint = " (of a Hugging Face model, return `.loss`)" if hasattr(result, "loss") else ""
        raise TraceError(f"loss_fn returned {type(result).__name__}, not a tensor: let it return the loss{hint}")
    if result.numel() != 1:
        raise TraceError(
            f"loss_fn returned a tensor of shape {tuple(result.shape)}, not a scalar: reduce it, say by `.mean()`"
        )
    if not result.requires_grad:
        raise TraceError(
            "the loss needs no gradient: is it computed under no_grad, detached, or are all parameters frozen?"
        )
    return result


def backward(loss: Tensor) -> None:
    """Run the backward; if `loss_fn` has done so already, raise an error that says so."""
    try:
        loss.backward()
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise TraceError(
            "the backward of this loss has run already, or that of a part of it: let loss_fn only compute and return "
            "the loss, without backward()"
        ) from error


def touched(names: Collection[str]) -> None:
    """Raise if no parameter got a gradient; `names` are those that did."""
    if not names:
        raise TraceError(
            "no parameter of the model got a gradient: loss_fn computes its loss from something else. "
            "Let it use the model given to trace, not a copy or a wrapper of it."
        )


def same_step(recorders: list[Recorder]) -> list[Recorder]:
    """Return the recordings, without the first if it differs (it built caches). Raises if the others differ.

    Only forward ops are compared: whether the backward copies a gradient depends on reference counts.
    """
    repeated = recorders[1:] if is_only_warming_up(recorders) else recorders
    for other in repeated[1:]:
        difference = _difference(repeated[0], other)
        if difference is not None:
            raise TraceError(
                f"the step varies between runs: {difference}. A plan is made for one step: disable what varies "
                "(layer drop, random depth or length, caches that grow) while planning."
            )
    return repeated


def is_only_warming_up(recorders: list[Recorder]) -> bool:
    """Whether the first step differs from the second: it may have built caches, so one more recording is needed."""
    return len(recorders) > 1 and _difference(recorders[0], recorders[1]) is not None


def _difference(first: Recorder, other: Recorder) -> str | None:
    """Describe the first difference of two forwards, or None. Sizes that depend on values in tensors may differ."""
    depends_on_data = False
    pairs = zip(first.ops[: first.num_forward], other.ops[: other.num_forward], strict=False)
    for number, (a, b) in enumerate(pairs):
        where, now = (recorder.path_of(op.call) or "the model" for recorder, op in ((first, a), (other, b)))
        if a.name != b.name or where != now:
            return f"op {number} was {a.name} in {where} and is now {b.name} in {now}"
        depends_on_data = depends_on_data or a.has_dynamic_shape
        if a.moved_bytes != b.moved_bytes and not depends_on_data:
            return f"op {number}, {a.name} in {where}, worked on {a.moved_bytes} bytes and now on {b.moved_bytes}"
    if first.num_forward != other.num_forward:
        return f"it had {first.num_forward} forward ops, and then {other.num_forward}"
    return None


def nothing_kept(recorders: list[Recorder]) -> None:
    """Add a note for each op whose fake output is still referenced after the trace, and could be taken for real."""
    if not any(recorder.survivors() for recorder in recorders):
        return
    gc.collect()  # most are in reference cycles of autograd
    for op in dict.fromkeys(op for recorder in recorders for op in recorder.survivors()):
        recorders[-1].notes.append(
            f"a fake tensor that {op} returned in the trace is still referenced outside of the model, and has no "
            "values: empty the list or cache that holds it, or use mode='real'"
        )


P = ParamSpec("P")
R = TypeVar("R")

_lock = threading.RLock()


def one_at_a_time(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate `function` to wait while another thread is in a function decorated so. Calls may nest."""

    @functools.wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        with _lock:
            return function(*args, **kwargs)

    return alone


# `gc.freeze()` in a process that has imported torch freezes more than 100,000 objects; Python 3.12 itself freezes 375.
_FEWEST_FROZEN_BY_USER = 10_000


@contextmanager
def old_objects_frozen() -> Iterator[None]:
    """Context manager inside of which garbage collections skip the objects that existed before it.

    `fit` collects garbage before each measurement. A full collection takes 0.2 to 0.35 s in a process that has imported
    transformers, and frozen objects take no time. A user who has frozen objects already keeps them so.
    """
    if gc.get_freeze_count() >= _FEWEST_FROZEN_BY_USER:
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


logger = logging.getLogger("lowtide")

NOTE = "use_cache is off in this step, as in training under a plan: layers that append to a cache cannot be recomputed"

_logged: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class CacheOff:
    """Sets `use_cache` to False in the configs of a model and its submodules, until `restore()`."""

    def __init__(self, model: nn.Module) -> None:
        configs = {id(config): config for config in (getattr(module, "config", None) for module in model.modules())}
        self._configs: list[Any] = [c for c in configs.values() if getattr(c, "use_cache", None) is True]
        self.was_on = bool(self._configs)
        for config in self._configs:
            config.use_cache = False

    def say_once(self, model: nn.Module) -> None:
        """Log that the cache is off, once per model."""
        if self.was_on and model not in _logged:
            _logged.add(model)
            logger.warning(
                "%s: use_cache is switched off until handle.remove(), as by Hugging Face's gradient checkpointing: "
                "layers that append to a cache cannot be recomputed. Pass use_cache=True to the model to keep it on.",
                type(model).__name__,
            )

    def restore(self) -> None:
        """Set `use_cache` back to True in the configs that had it."""
        for config in self._configs:
            config.use_cache = True
        self._configs = []

    def __enter__(self) -> CacheOff:
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()
