"""`torch.compile`: Dynamo and inductor, for the compiled engine.

It compiles one of Dynamo's graphs with a given partitioner (`compile_with_inductor`), also again later
(`TracingContext`), compiles a module in place (`compile_module`), and reports functions that Dynamo has stopped
compiling (`LimitWatch`). For the eager engine, `never_compiled` and `disable_dynamo` keep Dynamo out of hooks. The
compiler is imported inside functions, as that takes longer than importing all of lowtide.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
import sys
import types
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import nn

from lowtide._compat.internals import optional, required

_COMPILE = "torch.compile cannot run with lowtide's plans"


def compile_with_inductor(
    module: Any, inputs: Any, partition: Callable[..., Any], options: dict[str, Any]
) -> Callable[..., Any]:
    """Compile one of Dynamo's graphs with inductor, with `partition` as the partitioner of its joint graph.

    The backward is compiled with the forward: by default AOTAutograd compiles it in the first backward, inside of the
    user's step. AOTAutograd's cache is switched off, as its key does not contain the plan. Inductor's cache of kernels
    stays on: its key contains the graphs that the partitioner returned, and these differ where plans do.
    Obsolete when `torch.compile` takes a partitioner.
    """
    functorch_config = required("torch._functorch.config", _COMPILE)
    compile_fx = required("torch._inductor.compile_fx.compile_fx", _COMPILE)
    patches = {**options, "custom_partitioner_fn": _as_partitioner(partition)}
    with functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True):
        return cast(Callable[..., Any], compile_fx(module, inputs, config_patches=patches))


def _as_partitioner(partition: Callable[..., Any]) -> Any:
    """Wrap a partitioner in the class that inductor's option takes. Obsolete likewise."""
    base: Any = required("torch._inductor.custom_graph_pass.CustomPartitionerFn", _COMPILE)

    class Partitioner(base):  # type: ignore[valid-type, misc]
        """Calls `partition`. All of them have one key in inductor's cache."""

        def __call__(self, gm: Any, joint_inputs: Any, **facts: Any) -> Any:
            return partition(gm, joint_inputs, **facts)

        def uuid(self) -> Any:
            return "lowtide"  # constant: its decisions show in the graphs, which are part of the key

        def __reduce__(self) -> Any:  # inductor pickles its options for the key
            return str, ("lowtide",)

    return Partitioner()


# An entry of this dict makes Dynamo call a module's `__call__` rather than inline its `forward`. The key is no hook's.
_CALLED_BY_DYNAMO = "_forward_pre_hooks_with_kwargs", "lowtide.compile"


def compile_module(
    module: nn.Module,
    enter: Callable[[str, Callable[..., Any]], Callable[..., Any]] = lambda function, call: call,
    **options: Any,
) -> None:
    """Call `module.compile()` so that it also works for classes of torch's own and inside of another `torch.compile`.

    `enter` wraps the compiled call, and is also given the name of the function in which Dynamo begins, as in
    `traced_functions`. The result runs outside of any other compiled code: where an outer `torch.compile` meets the
    module, its graph ends, and continues after it. Dynamo does not begin a graph in torch's own code, such as
    nn.Sequential, and would inline the forward of a compiled module into an outer graph. Obsolete when `Module.compile`
    adds a frame of its own, as `torch.compile(module)` does, and has an option for outer graphs.
    """
    call: Callable[..., Any] = module._call_impl
    code = getattr(module.forward, "__code__", None)
    if type(module).forward.__module__.startswith("torch.nn."):
        call = _with_frame(call, module)
        code = call.__code__
    reason = "lowtide.compile compiles this module within a memory budget, as a graph of its own"
    compiled = enter("" if code is None else _function_name(code), torch.compile(call, **options))

    def run(*args: Any, **kwargs: Any) -> Any:  # `disable` would look through the compiled function itself
        return compiled(*args, **kwargs)

    disabled, before = torch.compiler.disable(run, reason=reason), module._compiled_call_impl
    # What `Module.compile()` has made of it before; kept there, as it is neither copied nor pickled.
    setattr(disabled, _BEFORE, getattr(before, _BEFORE, before))
    module._compiled_call_impl = disabled
    attribute, key = _CALLED_BY_DYNAMO
    getattr(module, attribute)[key] = False


_frames: dict[str, types.CodeType] = {}


def _with_frame(inner: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """A Python function that calls `inner`, in which Dynamo begins a graph.

    Dynamo counts its entries per code object, so modules of other structures have code objects of their own: they
    would reach `recompile_limit` together.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    structure = repr(module)
    if structure not in _frames:
        _frames[structure] = call.__code__.replace(co_name=f"{type(module).__name__}_{len(_frames)}")
    return types.FunctionType(_frames[structure], call.__globals__, call.__name__, None, call.__closure__)


_BEFORE = "_lowtide_before"


def uncompile(module: nn.Module) -> None:
    """Undo `compile_module`. Obsolete when `nn.Module` has a method for it."""
    module._compiled_call_impl = getattr(module._compiled_call_impl, _BEFORE, None)
    attribute, key = _CALLED_BY_DYNAMO
    getattr(module, attribute).pop(key, None)


def is_compiled_module(module: nn.Module) -> bool:
    """Return whether `compile_module` has compiled this module, and not the one it is a copy of. Obsolete likewise."""
    attribute, key = _CALLED_BY_DYNAMO
    return key in getattr(module, attribute) and module._compiled_call_impl is not None


def backend_options(module: nn.Module) -> Any:
    """Return the `options` that `torch.compile(model, options=...)` was given, of what it returned; None elsewhere.

    Relies on `dynamo_ctx` of `OptimizedModule` and on the chain of `_torchdynamo_orig_backend`, which torch's
    convert_frame.py describes. Obsolete when what `torch.compile` returns names its options.
    """
    inner: Any = getattr(vars(module).get("dynamo_ctx"), "callback", None)
    while hasattr(inner, "_torchdynamo_orig_backend"):
        inner = inner._torchdynamo_orig_backend
    return getattr(inner, "kwargs", {}).get("options")


def active_data_parallel() -> Any:
    """Return the `DistributedDataParallel` whose forward runs now, or None. Relies on `_get_active_ddp_module`."""
    active = getattr(nn.parallel.DistributedDataParallel, "_get_active_ddp_module", None)
    return None if active is None else active()


_NO_CONTEXT = contextlib.nullcontext()


def without_bucket_graphs() -> contextlib.AbstractContextManager[Any]:
    """Context manager in which Dynamo does not split graphs at the buckets of the `DistributedDataParallel` around it.

    A compiled block is smaller than the model anyway, and DDP's buckets are reduced while earlier blocks run. Obsolete
    when `torch.compile` has an option for it.
    """
    if active_data_parallel() is None:
        return _NO_CONTEXT
    return cast(Any, required("torch._dynamo.config", _COMPILE).patch(optimize_ddp=False))


class LimitWatch(logging.Handler):
    """Calls `report(function, limit)` when Dynamo stops compiling a function and runs it eagerly from then on.

    `function` is its name and file, as in `traced_functions`. Relies on the logger and the message of torch's
    convert_frame.py. Obsolete when torch has a callback for it.
    """

    _LOGGER = "torch._dynamo.convert_frame"
    _MESSAGE = re.compile(r"hit config\.(\w+).*?function: ('.*?' \(.*?\))\n", re.DOTALL)

    def __init__(self, report: Callable[[str, str], None]) -> None:
        super().__init__(logging.WARNING)
        self._report = report

    def attach(self) -> None:
        """Start to watch; has no effect when called again."""
        logging.getLogger(self._LOGGER).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        found = self._MESSAGE.search(record.getMessage())
        if found is not None:
            limit, function = found.groups()
            self._report(function, limit)


def traced_functions() -> set[str]:
    """Return the functions, as `'name' (file:line)`, traced for the graph being compiled. Relies on `traced_code`."""
    context = required("torch._guards.TracingContext", _COMPILE).try_get()
    codes = getattr(context, "traced_code", None) or ()
    return set(map(_function_name, codes))


def _function_name(code: types.CodeType) -> str:
    return f"'{code.co_name}' ({code.co_filename}:{code.co_firstlineno})"


class TracingContext:
    """Dynamo's state while it compiles a graph, re-entered to compile the same graph again later.

    Every use gets a copy: the backward is compiled later and reads the state of its own forward. Without its reference
    to DDP's buckets, which are counted for the first compile only. Inside, `torch.compiler.is_compiling()` is true, as
    in Dynamo's own compiles: compiled code that another thread calls meanwhile would take fx's global flag for a trace
    of itself, and raise, as it does before torch 2.13. Obsolete when a backend can recompile its graph through public
    API.
    """

    def __init__(self) -> None:
        self._context = required("torch._guards.TracingContext", _COMPILE).try_get()

    def __enter__(self) -> None:
        self._entered = contextlib.ExitStack()
        self._entered.enter_context(optional("torch.compiler._compile_session_context", contextlib.nullcontext)())
        if self._context is not None and required("torch._guards.TracingContext", _COMPILE).try_get() is None:
            again = copy.copy(self._context)
            again.ddp_optimizer_ctx, again.fakify_first_call = None, False
            self._entered.enter_context(required("torch._guards.tracing", _COMPILE)(again))

    def __exit__(self, *exception: Any) -> None:
        self._entered.__exit__(*exception)


def compile_lock() -> contextlib.AbstractContextManager[Any]:
    """Return the lock that Dynamo holds while it compiles; a thread may take it again.

    Compiling the same graph again, and running a model under hooks on all modules, must not overlap with it. Obsolete
    when a backend can recompile its graph through public API.
    """
    return cast(contextlib.AbstractContextManager[Any], required("torch._dynamo.convert_frame.compile_lock", _COMPILE))


_MOST_RESTARTS = 3  # each because torch has found further floats that are constants by now


def compiled_again(compile_graph: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Compile one of Dynamo's graphs again, outside of Dynamo, which is asked to start over if a float became constant.

    torch notes which floats these are and leaves them alone the next time, until Dynamo's compile ends. Obsolete when a
    backend can recompile its graph through public API.
    """
    restart = optional("torch._dynamo.exc.TensorifyScalarRestartAnalysis", None)
    noted = optional("torch._dynamo.symbolic_convert.TensorifyState", None)
    if restart is None or noted is None:
        return compile_graph()
    is_own = noted.empty()
    try:
        for _ in range(_MOST_RESTARTS):
            with contextlib.suppress(restart):
                return compile_graph()
        return compile_graph()
    finally:
        if is_own:
            noted.clear()


def mode_options(mode: str | None, dynamic: bool | None) -> dict[str, Any]:
    """Return inductor's options for one of `torch.compile`'s modes. Relies on `list_mode_options`, which docs name."""
    if mode in (None, "default"):
        return {}
    return dict(required("torch._inductor.list_mode_options", _COMPILE)(mode, dynamic))


def is_inductor_option(name: str) -> bool:
    """Return whether inductor has an option of that name. Relies on `list_options`, which torch's docs name."""
    return name.replace("-", "_") in required("torch._inductor.list_options", _COMPILE)()


_Function = TypeVar("_Function", bound=Callable[..., Any])


# `torch.compiler.disable` that imports the compiler at the first call and not when it decorates. Obsolete when torch's
# own does the same.
disable_dynamo = optional("torch._disable_dynamo", torch.compiler.disable)

# What sets how Dynamo treats a code object. `never_compiled` does without it.
_eval_frame = optional("torch._C._dynamo.eval_frame", None)


def never_compiled(function: _Function) -> _Function:
    """Return `function`, marked so that Dynamo skips it and all that it calls when C++ or torch's own code calls it.

    For hooks, which run very often: `disable_dynamo` would add two Python calls to each. Unlike there, a caller that
    Dynamo traces has this function traced too. Obsolete when torch's own has no wrapper.
    """
    try:
        skip = _eval_frame._FrameAction.SKIP
        _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(skip, skip))
    except AttributeError:  # this torch has no such strategy
        return disable_dynamo(function)
    return function


def compiler_is_imported() -> bool:
    """Return whether Dynamo was imported. Obsolete when `torch.compiler.set_stance` imports no compiler."""
    return "torch._dynamo" in sys.modules
