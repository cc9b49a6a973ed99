"""Calls of compiled modules: which session they run for, and a warning where they do not run under its plan.

Dynamo keeps compiled code per function and backend, and stops compiling a function after a few entries
(`torch._dynamo.config.recompile_limit`). All models that are compiled with the same options therefore share one backend
(`shared_backend`), and equal blocks of all of them share their code. Whose plan such code has to follow is known when
it is called: `SessionCall` wraps the compiled call of a module and sets the current session.

Code that Dynamo runs eagerly saves what autograd saves, whatever the budget. `SessionCall` notices a call in which no
compiled graph ran, and `LimitWatch` a function that Dynamo has stopped compiling; both warn once, with the cure.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch

from lowtide import _compat
from lowtide.compiled.planned_graph import PlannedGraph
from lowtide.compiled.session import Session

SESSIONS: weakref.WeakSet[Session] = weakref.WeakSet()


class _Current(threading.local):
    session: Session | None = None
    is_quiet = False


_current = _Current()


def current_session() -> Session | None:
    """The session of the compiled module that this thread calls; None outside of one."""
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
    """The compiled call of a module, given by its path and class, run for a session."""

    def __init__(self, session: Session, module: tuple[str, str], compiled: Callable[..., Any]) -> None:
        self._session, self._module, self._compiled = session, module, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session, before = self._session, _current.session
        num_graph_calls = session.num_graph_calls
        _current.session, session.calling = session, self._module
        try:
            with _compat.without_bucket_graphs():
                output = self._compiled(*args, **kwargs)
        finally:
            _current.session = before
        if session.num_graph_calls == num_graph_calls and torch.is_grad_enabled() and not _current.is_quiet:
            self._warn(args, kwargs, output)
        return output

    def _warn(self, args: Any, kwargs: Any, output: Any) -> None:
        taken, _ = _compat.flattened((args, kwargs))
        made, _ = _compat.flattened(output)
        known = {id(each) for each in taken}
        if any(isinstance(each, torch.Tensor) and each.grad_fn is not None and id(each) not in known for each in made):
            path, kind = self._module
            warn_unplanned(
                self._session,
                f"torch.compile ran {path or 'the model'} ({kind}) eagerly, without a compiled graph, so it saves "
                "whatever autograd saves: its memory budget does not apply. TORCH_LOGS=graph_breaks,recompiles says "
                "why; lowtide.compile(..., fullgraph=True) makes it an error",
            )


_backends: dict[Hashable, Callable[..., Any]] = {}


def shared_backend(
    compiler: Callable[..., Any], settings: tuple[Mapping[str, Any], str | None, bool | None]
) -> Callable[..., Any]:
    """The Dynamo backend of all models that are compiled with equal settings: inductor's options, mode and dynamic."""

    def backend(module: Any, inputs: list[Any]) -> Any:
        return PlannedGraph(current_session, module, inputs, compiler)

    options, *others = settings
    try:
        return _backends.setdefault((frozenset(options.items()), *others), backend)
    except TypeError:  # an option that cannot be hashed
        return backend


def watch_sessions(session: Session) -> None:
    """List a session in `SESSIONS` and warn from now on when Dynamo stops compiling code of a listed session."""
    SESSIONS.add(session)
    _limit_watch.attach()


def warn_unplanned(session: Session, message: str) -> None:
    """Warn, once per session."""
    if not session.has_warned_unplanned:
        session.has_warned_unplanned = True
        warnings.warn(message, stacklevel=3)


def _stopped_compiling(function: str, limit: str) -> None:
    for session in list(SESSIONS):
        running = _current.session
        if session is running or (running is None and any(function in graph.functions for graph in session.graphs)):
            warn_unplanned(
                session,
                f"torch.compile has reached torch._dynamo.config.{limit} for {function} and runs it eagerly from now "
                "on, so it saves whatever autograd saves: its memory budget does not apply. Raise "
                f"torch._dynamo.config.{limit}, or let shapes be symbolic (dynamic=True)",
            )


_limit_watch = _compat.LimitWatch(_stopped_compiling)
