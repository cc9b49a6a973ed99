"""The backends that Dynamo calls for each graph, and the session that a call of compiled code belongs to.

- **`backend`**, of `torch.compile(model, backend="lowtide", options={"budget": "12GiB"})`, is reached by the
  package's entry point. Dynamo calls it once for each graph; the graphs of one `torch.compile` call share a
  `Session`, found by the identity of the options dict, which Dynamo passes unchanged. Each graph becomes a
  `PlannedGraph`, which inductor compiles.
- **`shared_backend`**, of `lowtide.compile`, is one backend for all models that are compiled with the same options.
  Dynamo keeps compiled code per function and backend, and stops compiling a function after a few entries
  (`torch._dynamo.config.recompile_limit`); with one backend, equal blocks of all these models share an entry.
  `SessionCall` wraps the compiled call of a module and sets the session whose plan the shared code follows.

Code that Dynamo runs eagerly saves what autograd saves, whatever the budget. `SessionCall` notices a call in which no
compiled graph ran, and `LimitWatch` a function that Dynamo has stopped compiling; both warn once and say what to do.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lowtide import _compat
from lowtide.compiled.planned_graph import PlannedGraph
from lowtide.compiled.session import Session
from lowtide.compiled.variant_choice import VariantChooser
from lowtide.errors import LowtideError
from lowtide.tracing.untraced_memory import plain_optimizer
from lowtide.units import check_seconds

_OWN_OPTIONS = ("budget", "optimizer", "mode", "time_limit_s", "on_over")
_ARGUMENTS = (*_OWN_OPTIONS, "host", "split", "regional")  # of `lowtide.compile`, or of the backend
_CUDA_GRAPHS = "triton.cudagraphs"
# By id(options). A session keeps its options alive, and is itself kept alive by its graphs.
_by_options: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()


def backend(
    module: Any, inputs: list[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Any:
    """Compile one graph of Dynamo's with inductor, within the budget that its model's graphs share.

    `options` are `budget` (bytes, `"12GiB"`, `"80%"`), `optimizer`, `mode` (as in `torch.compile`), `time_limit_s` for
    solving, `on_over` ("raise" or "warn"), and inductor's own. An error in them is raised by the compiled graph's
    first call.
    """
    try:
        session, compiler = _session_of(options), inductor_compiler(options or {}, mode)
    except (LowtideError, TypeError, ValueError) as error:
        return functools.partial(_refuse, error)  # raised here, Dynamo would wrap it in its own exception
    return PlannedGraph(lambda: session, module, inputs, compiler)


def _session_of(options: Mapping[str, Any] | None) -> Session:
    if options is not None:
        _check_mapping(options)
    if not options or "budget" not in options:
        raise LowtideError(
            "the lowtide backend needs a budget: torch.compile(model, backend='lowtide', options={'budget': '12GiB'})"
        )
    session = _by_options.get(id(options))
    if session is None:
        check_options(options, own=_OWN_OPTIONS)
        time_limit_s = options.get("time_limit_s", 10.0)
        check_seconds(time_limit_s, "time_limit_s")
        chooser = VariantChooser(plain_optimizer(options.get("optimizer")), time_limit_s=time_limit_s)
        session = Session(options["budget"], chooser=chooser, on_over=options.get("on_over", "raise"))
        session.options = options
        _by_options[id(options)] = session
        watch_sessions(session)
    return session


def _check_mapping(options: object) -> None:
    if not isinstance(options, Mapping):
        raise TypeError(f"options is a dict of options by their names, not {options!r:.80}")


def check_options(options: Mapping[str, Any], *, own: tuple[str, ...]) -> None:
    """Raise for an option that is neither in `own` nor one of inductor's."""
    _check_mapping(options)
    arguments = [name for name in options if name in _ARGUMENTS and name not in own]
    if arguments:
        raise LowtideError(
            f"options has {', '.join(arguments)}, which only `lowtide.compile(model, ...)` takes, as an argument of "
            "its own: lowtide.compile(model, budget='12GiB', host='32GiB')"
        )
    unknown = [name for name in options if name not in own and not _compat.is_inductor_option(name)]
    if unknown:
        known = f"lowtide's are {', '.join(own)}; " if own else ""
        raise LowtideError(
            f"neither lowtide nor inductor has an option {', '.join(map(repr, unknown))}. {known}inductor's are in "
            "torch._inductor.list_options()"
        )


def inductor_compiler(
    options: Mapping[str, Any], mode: str | None = None, dynamic: bool | None = None
) -> Callable[..., Any]:
    """A function that compiles a graph with inductor: `(module, inputs, partition) -> callable`."""
    inductors = {name: value for name, value in options.items() if name not in _OWN_OPTIONS}
    wanted = mode or options.get("mode")
    try:
        patches = {**_compat.mode_options(wanted, dynamic), **inductors}
    except (RuntimeError, TypeError) as error:  # an unknown mode, or an unhashable one
        raise ValueError(f"mode is one of torch.compile's, such as 'max-autotune', not {wanted!r:.80}") from error
    if patches.get(_CUDA_GRAPHS):
        if wanted == "reduce-overhead" or inductors.get(_CUDA_GRAPHS):
            raise LowtideError(
                "CUDA graphs (mode='reduce-overhead', options={'triton.cudagraphs': True}) keep the memory of a step "
                "in pools of their own, which no budget can be held in. Leave them out, or capture the whole step of "
                "an eager plan: lowtide.fit(...).capture(loss_fn, batch)"
            )
        patches[_CUDA_GRAPHS] = False  # part of mode="max-autotune"
    return lambda module, inputs, partition: _compat.compile_with_inductor(module, inputs, partition, patches)


def _refuse(error: Exception, *args: Any) -> Any:
    raise error.with_traceback(None)


# Calls of compiled modules.

SESSIONS: weakref.WeakKeyDictionary[Session, None] = weakref.WeakKeyDictionary()  # in the order of their making


class _Current(threading.local):
    session: Session | None = None
    is_quiet = False


_current = _Current()


def current_session() -> Session:
    """The session of the compiled module that this thread calls. Compiled code is reached by `SessionCall` only."""
    assert _current.session is not None
    return _current.session


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Context manager in which compiled modules may run eagerly, as in a trace."""
    before, _current.is_quiet = _current.is_quiet, True
    try:
        yield
    finally:
        _current.is_quiet = before


class SessionCall:
    """The compiled call of a module, given by its path and class, run for a session. Dynamo begins in `function`."""

    def __init__(self, session: Session, module: tuple[str, str], function: str, compiled: Callable[..., Any]) -> None:
        self._session, self._module, self._function, self._compiled = session, module, function, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session, before = self._session, _current.session
        if not session.has_called_module:
            session.before_first_call()
        num_graph_calls = session.num_graph_calls
        _current.session, session.calling, session.has_called_module = session, self._module, True
        try:
            with _compat.without_bucket_graphs():
                output = self._compiled(*args, **kwargs)
        finally:
            _current.session = before
        num_graphs = session.num_graph_calls - num_graph_calls
        if num_graphs != 1 and torch.is_grad_enabled() and not _current.is_quiet:
            if num_graphs == 0:
                self._warn(args, kwargs, output)
            elif session.breaks is None:
                session.note_breaks(self._module, num_graphs)
        return output

    def _warn(self, args: Any, kwargs: Any, output: Any) -> None:
        taken, _ = _compat.flattened((args, kwargs))
        made, _ = _compat.flattened(output)
        known = {id(each) for each in taken}
        if any(isinstance(each, torch.Tensor) and each.grad_fn is not None and id(each) not in known for each in made):
            path, kind = self._module
            limit = _stopped.get(self._function)
            self._session.warn_unplanned(
                f"torch.compile ran {path or 'the model'} ({kind}) eagerly, without a compiled graph, so it saves "
                "whatever autograd saves: its memory budget does not apply. TORCH_LOGS=graph_breaks,recompiles says "
                "why; lowtide.compile(..., fullgraph=True) makes it an error"
                if limit is None
                else _limit_message(self._function, limit),
            )


class ModelHook:
    """A hook on a compiled model. Copies of the model, which are not compiled, have a hook that does nothing."""

    def __deepcopy__(self, memo: Any) -> Any:
        return _idle

    def __reduce__(self) -> Any:
        return getattr, (_idle, "__call__")


def _idle(*args: Any) -> None:
    """The hook of a copied or unpickled model."""


class BypassWatch(ModelHook):
    """Warns if a model that was compiled as one graph runs without being called: `model.forward(x)`, `model.encode(x)`.

    These go around what was compiled. Forward hooks on the modules in it notice one that runs before any call of the
    model. They are gone when the model is compiled.
    """

    def __init__(self, model: nn.Module, session: Session) -> None:
        self._session = session
        self._hooks = [module.register_forward_hook(self) for module in model.modules() if module is not model]
        session.before_first_call = self.remove

    def remove(self) -> None:
        """Remove the hooks."""
        while self._hooks:
            self._hooks.pop().remove()

    @_compat.disable_dynamo
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        is_saving = any(isinstance(each, torch.Tensor) and each.requires_grad for each in _compat.flattened(output)[0])
        if self._hooks and is_saving and not _current.is_quiet:
            self.remove()
            self._session.warn_unplanned(
                "parts of a model that was compiled as one graph ran without a call of the model: model.forward(x) or "
                "another of its methods runs uncompiled and saves whatever autograd saves, so the memory budget does "
                "not apply. Call model(x)"
            )


_backends: dict[Hashable, Callable[..., Any]] = {}


def shared_backend(options: Mapping[str, Any], mode: str | None, dynamic: bool | None) -> Callable[..., Any]:
    """The Dynamo backend of all models that are compiled with equal settings. `options` are inductor's."""
    compiler = inductor_compiler(options, mode, dynamic)

    def backend(module: Any, inputs: list[Any]) -> Any:
        graph = PlannedGraph(current_session, module, inputs, compiler)
        for function in graph.functions:  # compiled again, after torch.compiler.reset()
            _stopped.pop(function, None)
        return graph

    try:
        return _backends.setdefault((frozenset(options.items()), mode, dynamic), backend)
    except TypeError:  # an option that cannot be hashed
        return backend


def watch_sessions(session: Session) -> None:
    """List a session in `SESSIONS` and warn from now on when Dynamo stops compiling code of a listed session."""
    SESSIONS[session] = None
    _limit_watch.attach()


_stopped: dict[str, str] = {}  # functions that Dynamo runs eagerly, and the limit that each has reached


def _stopped_compiling(function: str, limit: str) -> None:
    _stopped[function] = limit
    running, message = _current.session, _limit_message(function, limit)
    if running is not None:
        running.warn_unplanned(message)
        return
    known = [each for each in list(SESSIONS) if any(function in graph.functions for graph in each.graphs)]
    if len(known) == 1:
        known[0].warn_unplanned(message)
    elif known:  # one model of several, or one that `backend` was never called for: the code of the others stays
        warnings.warn(message, stacklevel=3)


def _limit_message(function: str, limit: str) -> str:
    return (
        f"torch.compile has reached torch._dynamo.config.{limit} for {function} and runs it eagerly from now on, so it "
        "saves whatever autograd saves: its memory budget does not apply. Call torch.compiler.reset(), without which "
        f"it is not compiled again, and raise torch._dynamo.config.{limit} or let shapes be symbolic (dynamic=True)"
    )


_limit_watch = _compat.LimitWatch(_stopped_compiling)
