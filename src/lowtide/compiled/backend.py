"""The Dynamo backend "lowtide": inductor, with saved and recomputed values chosen within a memory budget.

`torch.compile(model, backend="lowtide", options={"budget": "12GiB"})` reaches `backend` by the package's entry point.
Dynamo calls it once for each graph; the graphs of one `torch.compile` call share a `Session`, found by the identity of
the options dict, which Dynamo passes unchanged. Each graph becomes a `PlannedGraph`, which inductor compiles.
`lowtide.compile` (`api.compile`) has a session for each model, and a backend that models share (`session_calls`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from lowtide import _compat
from lowtide.compiled.planned_graph import PlannedGraph
from lowtide.compiled.session import Session
from lowtide.compiled.session_calls import watch_sessions
from lowtide.compiled.variant_choice import VariantChooser
from lowtide.errors import LowtideError
from lowtide.tracing.untraced_memory import plain_optimizer
from lowtide.units import check_bytes, check_seconds

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
        check_bytes(options["budget"])
        check_options(options, own=_OWN_OPTIONS)
        time_limit_s = options.get("time_limit_s", 10.0)
        check_seconds(time_limit_s, "time_limit_s")
        chooser = VariantChooser(plain_optimizer(options.get("optimizer")), time_limit_s=time_limit_s)
        on_over = options.get("on_over", "raise")
        check_on_over(on_over)
        session = Session(options["budget"], chooser=chooser, on_over=on_over)
        session.options = options
        _by_options[id(options)] = session
        watch_sessions(session)
    return session


def check_on_over(on_over: object) -> None:
    """Raise unless `on_over` says what happens when a step is over its budget."""
    if on_over not in ("raise", "warn"):
        raise ValueError(f"on_over is 'raise' or 'warn', not {on_over!r:.80}")


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
