"""The compiled engine: `torch.compile(model, backend="lowtide", options={"budget": ...})`, and `lowtide.compile`."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.engines import _compat
from lowtide.engines.plannedgraphs import PlannedGraph
from lowtide.engines.regions import find_regions
from lowtide.engines.sessions import Session
from lowtide.engines.surrounding import surroundings_of
from lowtide.errors import LowtideError
from lowtide.tracing.eager import trace
from lowtide.units import parse_bytes

logger = logging.getLogger("lowtide")

_OWN_OPTIONS = ("budget", "optimizer", "host", "mode", "time_limit_s")
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
_by_options: dict[int, tuple[Any, Session]] = {}


def backend(
    module: Any, inputs: list[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Any:
    """The Dynamo backend named "lowtide": inductor, with what the backward needs saved or recomputed within a budget.

    `options` are `budget` (bytes, `"12GiB"`, `"80%"`), `optimizer`, `mode` (as of `torch.compile`) and inductor's own.
    """
    if not options or "budget" not in options:
        raise LowtideError(
            "the lowtide backend needs a budget: torch.compile(model, backend='lowtide', options={'budget': '12GiB'})"
        )
    if id(options) not in _by_options:
        _check_options(options)
        session = Session(
            options["budget"],
            options.get("optimizer"),
            parse_bytes(options.get("host", 0)),
            time_limit_s=options.get("time_limit_s", 10.0),
        )
        _sessions.add(session)
        _by_options[id(options)] = options, session
    session = _by_options[id(options)][1]
    return _graph(session, _compiler(options, mode), module, inputs)


def compile(
    model: nn.Module,
    *,
    budget: int | str,
    optimizer: torch.optim.Optimizer | None = None,
    host: int | str = 0,
    regional: bool | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Compile a model in place, by inductor, so that a training step's peak stays within `budget` bytes.

    With `regional=True`, the default where blocks repeat, each repeated block is a graph of its own: compiled once for
    all of them, as fast as the whole and far sooner. The rest of the model then runs as it is, and up to `host` bytes
    of what blocks save may wait in host memory, copied out and in beside the compute. `mode`, `dynamic`,
    `fullgraph` and `options` are those of `torch.compile`.

    The first forward plans; a step later the measured peak is looked at (on an accelerator, where torch's peak
    statistics are reset for it), and where it is over the budget, or well under it, other variants are compiled.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"compile() works on an nn.Module, not {type(model).__name__}")
    parse_bytes(budget, total_bytes=1 << 40)  # what cannot be read is an error now, not in the first forward
    given = {"budget": budget, "optimizer": optimizer, "mode": mode, **(options or {})}
    _check_options(given)
    blocks = _blocks(model, regional)
    host_bytes = parse_bytes(host)
    if host_bytes and not torch.cuda.is_available():
        raise LowtideError(f"host={host!r} was given, and there is no accelerator here to move values from")
    if host_bytes and not blocks:
        raise LowtideError(
            "host= needs blocks that are compiled one by one (regional=True): what one whole graph saves is only "
            "handed out when its forward has ended, too late to be away at the peak"
        )
    session = Session(budget, optimizer, host_bytes, num_blocks=max(1, len(blocks)))
    _sessions.add(session)
    run = functools.partial(_graph, session, _compiler(given, mode, dynamic))
    for module in blocks or [model]:
        module.compile(backend=run, dynamic=dynamic, fullgraph=fullgraph)
    if blocks:
        _watch(model, session, blocks, optimizer)
    return model


def explain_compiled(model: nn.Module | None = None) -> str:
    """In words, what the compiled graphs of a model save and what that costs; of all models without one."""
    found = []
    for session in _sessions:
        known = {number for graph in session.graphs for number in graph.parameter_ids}
        if model is None or any(id(parameter) in known for parameter in model.parameters()):
            found.append(session.describe())
    return "\n".join(found) or "nothing compiled for training yet: run a step first"


def _blocks(model: nn.Module, regional: bool | None) -> list[nn.Module]:
    if regional is False:
        return []
    try:
        return list(find_regions(model, None).values())
    except ValueError:
        if regional:
            raise
        return []


def _check_options(options: Mapping[str, Any]) -> None:
    unknown = [name for name in options if name not in _OWN_OPTIONS and not _compat.is_inductor_option(name)]
    if unknown:
        raise LowtideError(
            f"neither lowtide nor inductor has an option {', '.join(map(repr, unknown))}. lowtide's are "
            f"{', '.join(_OWN_OPTIONS)}; inductor's are in torch._inductor.list_options()"
        )


def _compiler(options: Mapping[str, Any], mode: str | None = None, dynamic: bool | None = None) -> Callable[..., Any]:
    own = {name: value for name, value in options.items() if name not in _OWN_OPTIONS}
    patches = {**_compat.mode_options(mode or options.get("mode"), dynamic), **own}
    return lambda module, inputs, partition: _compat.compile_with_inductor(module, inputs, partition, patches)


def _graph(session: Session, compiler: Callable[..., Any], module: Any, inputs: list[Any]) -> Any:
    return PlannedGraph(session, module, inputs, compiler)


def _watch(model: nn.Module, session: Session, blocks: list[nn.Module], optimizer: Any) -> None:
    """Let the session know when a forward begins; before the first, see what surrounds the blocks."""
    state = {"is_tracing": False, "is_known": False}

    def before_forward(module: nn.Module, args: Any, kwargs: Any) -> None:
        if state["is_tracing"] or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if not state["is_known"]:
            state["is_known"] = state["is_tracing"] = True
            try:
                session.surroundings = _traced_surroundings(module, blocks, args, kwargs, optimizer)
            finally:
                state["is_tracing"] = False
        session.begin_forward()

    model.register_forward_pre_hook(before_forward, with_kwargs=True)


def _traced_surroundings(model: nn.Module, blocks: list[nn.Module], args: Any, kwargs: Any, optimizer: Any) -> Any:
    """What else is on the device while blocks run, from a trace on fake tensors; None where there is none to be had."""

    def loss_fn(args: Any, kwargs: Any) -> Tensor:
        return _as_loss(model(*args, **kwargs))

    try:
        with _uncompiled():
            graph = trace(model, loss_fn, args, kwargs, optimizer=optimizer, mode="fake")
        names = {module: name for name, module in model.named_modules()}
        return surroundings_of(graph, [names[block] for block in blocks])
    except (LowtideError, RuntimeError, TypeError, ValueError) as error:
        logger.info("the model could not be traced (%s): the first peaks are guesses", str(error).splitlines()[0])
        return None


def _as_loss(output: Any) -> Tensor:
    """The loss among a model's outputs, or something that has the gradients of all of them."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    from lowtide.tracing.records import tensors_in

    parts = [each.sum() for each in tensors_in(output) if each.is_floating_point() and each.requires_grad]
    if not parts:
        raise ValueError("the model's outputs need no gradients")
    return torch.stack([part.float() for part in parts]).sum()


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield
