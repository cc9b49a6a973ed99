"""The compiled engine: `torch.compile(model, backend="lowtide", options={"budget": ...})`, and `lowtide.compile`."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lowtide.engines import _compat
from lowtide.engines.choosing import Chooser
from lowtide.engines.firstforward import FirstForward
from lowtide.engines.plannedgraphs import PlannedGraph
from lowtide.engines.regions import find_regions, is_block
from lowtide.engines.sessions import NOTHING_YET, Session
from lowtide.errors import LowtideError
from lowtide.tracing import checks
from lowtide.tracing.optimizers import plain_optimizer
from lowtide.units import check_bytes, check_seconds, parse_bytes

_OWN_OPTIONS = ("budget", "optimizer", "mode", "time_limit_s")
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
# By the identity of their options, which they hold: a session lives as long as one of its graphs.
_by_options: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()
_by_model: weakref.WeakKeyDictionary[nn.Module, _Put] = weakref.WeakKeyDictionary()


def backend(
    module: Any, inputs: list[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Any:
    """The Dynamo backend named "lowtide": inductor, with what the backward needs saved or recomputed within a budget.

    `options` are `budget` (bytes, `"12GiB"`, `"80%"`), `optimizer`, `mode` (as of `torch.compile`), `time_limit_s` for
    solving, and inductor's own.
    """
    try:
        session, compiler = _session_of(options), _compiler(options or {}, mode)
    except (LowtideError, TypeError, ValueError) as error:
        return functools.partial(_refuse, error)  # raised here, Dynamo would wrap it in an error of its own
    return _graph(session, compiler, module, inputs)


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
    A model that was compiled so before is compiled anew.
    """
    checks.module(model)
    check_bytes(budget)  # what cannot be read is an error now, not in the first forward
    _check_options({} if options is None else options, own=())
    optimizer = plain_optimizer(optimizer, model)
    blocks = _blocks(model, regional)
    host_bytes = _host_bytes(host, blocks)
    chooser = Chooser(optimizer, host_bytes, model_bytes=_tensor_bytes(model))
    session = Session(budget, chooser=chooser, num_blocks=max(1, len(blocks)))
    run = functools.partial(_graph, session, _compiler(options or {}, mode, dynamic))
    if model in _by_model:
        _by_model.pop(model).take_off()
    for module in blocks or [model]:
        _compat.compile_module(module, backend=run, dynamic=dynamic, fullgraph=fullgraph)
    first = FirstForward(chooser, blocks, session.watch).watch(model) if blocks else None
    _by_model[model] = _Put(session, blocks or [model], first)
    _sessions.add(session)
    return model


def explain_compiled(model: nn.Module | None = None) -> str:
    """In words, what the compiled graphs of a model save and what that costs; of all models without one."""
    found = sorted(_sessions, key=lambda session: session.number)
    if model is not None and model in _by_model:
        found = [_by_model[model].session]
    elif model is not None:
        parameters = list(model.parameters())
        found = [each for each in found if any(graph.has_run_with(parameters) for graph in each.graphs)]
    return "\n\n".join(session.describe() for session in found) or NOTHING_YET


class _Put:
    """What `compile` put on a model, without holding on to it."""

    def __init__(self, session: Session, modules: list[nn.Module], first: FirstForward | None) -> None:
        self.session = session
        self._compiled = [weakref.ref(module) for module in modules]
        self._first = first

    def take_off(self) -> None:
        for module in filter(None, (reference() for reference in self._compiled)):
            _compat.uncompile(module)
        if self._first is not None:
            self._first.remove()
        _sessions.discard(self.session)


def _session_of(options: Mapping[str, Any] | None) -> Session:
    if options is not None:
        _check_mapping(options)
    if not options or "budget" not in options:
        raise LowtideError(
            "the lowtide backend needs a budget: torch.compile(model, backend='lowtide', options={'budget': '12GiB'})"
        )
    session = _by_options.get(id(options))
    if session is None:
        check_bytes(options["budget"])
        _check_options(options, own=_OWN_OPTIONS)
        time_limit_s = options.get("time_limit_s", 10.0)
        check_seconds(time_limit_s, "time_limit_s")
        chooser = Chooser(plain_optimizer(options.get("optimizer")), time_limit_s=time_limit_s)
        session = Session(options["budget"], chooser=chooser)
        session.options = options
        _by_options[id(options)] = session
        _sessions.add(session)
    return session


def _check_mapping(options: object) -> None:
    if not isinstance(options, Mapping):
        raise TypeError(f"options is a dict of options by their names, not {options!r:.80}")


def _check_options(options: Mapping[str, Any], *, own: tuple[str, ...]) -> None:
    _check_mapping(options)
    if "host" in options or (not own and any(name in _OWN_OPTIONS for name in options)):
        names = ", ".join(name for name in options if name in (*_OWN_OPTIONS, "host"))
        raise LowtideError(
            f"options has {names}, which only `lowtide.compile(model, ...)` takes, as arguments of its own: "
            "lowtide.compile(model, budget='12GiB', host='32GiB')"
        )
    unknown = [name for name in options if name not in own and not _compat.is_inductor_option(name)]
    if unknown:
        known = f"lowtide's are {', '.join(own)}; " if own else ""
        raise LowtideError(
            f"neither lowtide nor inductor has an option {', '.join(map(repr, unknown))}. {known}inductor's are in "
            "torch._inductor.list_options()"
        )


def _blocks(model: nn.Module, regional: bool | None) -> list[nn.Module]:
    if regional is False:
        return []
    try:
        found = [module for module in find_regions(model, None).values() if is_block(module)]
    except ValueError:
        found = []
    if regional and not found:
        raise ValueError(
            f"regional=True compiles repeated blocks, and {type(model).__name__} has none. Leave it out, or compile "
            "the whole model with regional=False"
        )
    return found if regional or len(found) > 1 else []  # a single block is compiled with the rest of the model


def _host_bytes(host: int | str, blocks: list[nn.Module]) -> int:
    found = parse_bytes(host)
    if found and not torch.cuda.is_available():
        raise LowtideError(f"host={host!r} was given, and there is no accelerator here to move values from")
    if found and not blocks:
        raise LowtideError(
            "host= needs blocks that are compiled one by one (regional=True): what one whole graph saves is only "
            "handed out when its forward has ended, too late to be away at the peak"
        )
    return found


def _tensor_bytes(model: nn.Module) -> int:
    tensors = itertools.chain(model.parameters(), model.buffers())
    return sum(tensor.nbytes for tensor in {id(each): each for each in tensors}.values())


def _compiler(options: Mapping[str, Any], mode: str | None = None, dynamic: bool | None = None) -> Callable[..., Any]:
    inductors = {name: value for name, value in options.items() if name not in _OWN_OPTIONS}
    wanted = mode or options.get("mode")
    try:
        patches = {**_compat.mode_options(wanted, dynamic), **inductors}
    except (RuntimeError, TypeError) as error:  # a mode that torch does not know, or that no dict can have
        raise ValueError(f"mode is one of torch.compile's, such as 'max-autotune', not {wanted!r:.80}") from error
    return lambda module, inputs, partition: _compat.compile_with_inductor(module, inputs, partition, patches)


def _graph(session: Session, compiler: Callable[..., Any], module: Any, inputs: list[Any]) -> Any:
    return PlannedGraph(session, module, inputs, compiler)


def _refuse(error: Exception, *args: Any) -> Any:
    raise error.with_traceback(None)
