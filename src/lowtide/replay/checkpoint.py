"""`lowtide.checkpoint`: the replay engine (`region`) with the interface of `torch.utils.checkpoint.checkpoint`.

It checks the options, handles torch.func transforms and `no_grad`, and calls `region.run`. Under `torch.compile` and
for `use_reentrant=True` it calls torch's own function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import noop_context_fn

from lowtide import _compat
from lowtide.replay.arguments import Arguments
from lowtide.replay.environment import Environment, capture
from lowtide.replay.function_state import FunctionState, module_of
from lowtide.replay.object_state import variables_of
from lowtide.replay.recomputing import Hooks, Options, one_deeper
from lowtide.replay.region import run
from lowtide.store.activation_store import ActivationStore
from lowtide.store.offload import SavedInStore

_DETERMINISM_CHECKS = ("default", "values", "none")

# Objects that can hold a region's inputs between its forward and its replay.
InputsKeeper = ActivationStore | saved_tensors_hooks
ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = False,
    context_fn: ContextFn = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    **kwargs: Any,
) -> Any:
    """Run `function(*args, **kwargs)`; recompute its intermediates in the backward instead of keeping them.

    A drop-in superset of `torch.utils.checkpoint.checkpoint`: same names, same meaning, gradients equal to the last
    bit on deterministic kernels. Beyond it: tensors in any nesting of containers and keywords count as inputs; buffers
    written by the forward are written once; random states of every device in use and of generators passed in are
    replayed; an input, parameter or saved value changed in place before the backward raises `CheckpointError` instead
    of giving wrong gradients; `torch.func` transforms work (run plainly, with nothing dropped).

    - `use_reentrant`: False, also when None; True is torch's reentrant checkpoint as it is.
    - `context_fn`: as in torch. A selective policy that saves none of the ops that ran is a `ValueError`.
    - `determinism_check`: `"default"` compares shapes, dtypes and devices of what is recomputed, `"values"` also
      checksums of its bits, `"none"` nothing.
    - `preserve_rng_state=True`, among the keywords as in torch: replay random numbers.
    - `store`, among the keywords too: an `ActivationStore` that holds the region's inputs until the replay, or
      `torch.autograd.graph.saved_tensors_hooks` that pack and unpack each of them.

    Under `no_grad` the function is simply called, and so is one with a module whose parameters this call makes
    (`nn.LazyLinear`). Under `torch.compile` torch's own checkpoint is called.

    >>> import torch, lowtide
    >>> x = torch.ones(3, requires_grad=True)
    >>> y = lowtide.checkpoint(lambda x, scale: (x * scale["by"]).exp(), x, scale={"by": 2.0})
    >>> y.sum().backward()
    """
    store = kwargs.pop("store", None)
    if torch.compiler.is_compiling():
        # Dynamo recognises torch's function by identity, and supports a `context_fn` only if it was made while tracing.
        if context_fn is not noop_context_fn:
            kwargs["context_fn"] = functools.partial(context_fn)
        function = functools.partial(_with_state, [], function)
        return _compat.torch_checkpoint(
            function, *args, use_reentrant=bool(use_reentrant), debug=debug, early_stop=early_stop, **kwargs
        )
    if not callable(function):
        raise TypeError(
            f"checkpoint() needs something to call as its first argument, not {type(function).__name__}: "
            "write checkpoint(block, x), not checkpoint(block(x))"
        )
    if determinism_check not in _DETERMINISM_CHECKS:
        raise ValueError(
            f"determinism_check should be one of {list(_DETERMINISM_CHECKS)}, but got {determinism_check!r}"
        )
    if store is not None and not isinstance(store, InputsKeeper):
        raise TypeError(
            f"store= is an ActivationStore for the region's inputs, not {type(store).__name__}. To pass the function "
            "an argument of that name, wrap it: checkpoint(functools.partial(function, store=...), ...)"
        )
    if use_reentrant and store is not None:
        raise ValueError("store= needs use_reentrant=False")
    if use_reentrant:
        return _compat.torch_checkpoint(
            function, *args, use_reentrant=True, context_fn=context_fn, debug=debug, **kwargs
        )
    preserve_rng_state = kwargs.pop("preserve_rng_state", True)
    if not torch.is_grad_enabled() or _compat.under_functorch():
        return function(*args, **kwargs)
    if _compat.checkpoint_setting("debug_enabled", debug):
        if context_fn is not noop_context_fn:
            raise ValueError("debug=True is incompatible with non-default context_fn")
        return _compat.torch_checkpoint(
            functools.partial(_with_state, [], function),
            *args,
            use_reentrant=False,
            determinism_check="none" if determinism_check == "none" else "default",
            debug=True,
            early_stop=early_stop,
            preserve_rng_state=preserve_rng_state,
            **kwargs,
        )
    contexts = None if context_fn is noop_context_fn else _compat.without_gathers(context_fn())
    output = run(
        function,
        args,
        kwargs,
        module=module_of(function),
        options=Options(
            preserve_rng_state=preserve_rng_state,
            determinism_check=determinism_check,
            early_stop=_compat.checkpoint_setting("early_stop", early_stop),
        ),
        input_hooks=None if store is None else store_hooks(store),
        contexts=contexts,
    )
    if contexts is not None and all(type(each) in _compat.PLAIN_TYPES for each in Arguments.take(args, kwargs)[1]):
        _check_policy_is_used(contexts[0])  # with tensor subclasses, other ops run than the policy sees
    return output


@_compat.never_compiled
def _with_state(
    captured: list[tuple[FunctionState, Environment | None]], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call `function` for torch's own checkpoint; replays restore the state and generators that the first call read.

    Under tracing it only calls the function. It has an effect where a graph breaks at a region that changes attributes
    or draws from a generator of its own.
    """
    if torch.compiler.is_compiling():
        return function(*args, **kwargs)
    if not captured:
        state = FunctionState(function)
        generators = [*state.generators(), *(Arguments.take(args, kwargs)[0].generators or ())]
        environment = capture((), generators) if generators else None  # torch's checkpoint sees to the default ones
        output = function(*args, **kwargs)
        captured.append((state.forward_done(runs_all=True), environment))
        return output
    ((state, environment),) = captured
    with ExitStack() as undo, one_deeper():
        undo.callback(state.restore())
        if environment is not None:
            undo.callback(environment.restore())
        return function(*args, **kwargs)


def store_hooks(store: InputsKeeper) -> Hooks:
    """Return pack and unpack hooks that keep a region's inputs in a store."""
    hooks = SavedInStore(store, min_bytes=0) if isinstance(store, ActivationStore) else store
    return hooks.pack_hook, hooks.unpack_hook


def _check_policy_is_used(forward_context: AbstractContextManager[Any]) -> None:
    """Raise if a policy that names ops to save met none of them (`aten.mm` where `aten.mm.default` ran, say)."""
    seen = _compat.selective_ops(forward_context)
    if seen is None:
        return
    policy, ran, saved_any = seen
    if not saved_any and _names_only_others(policy, ran):
        raise ValueError(
            "the selective checkpoint policy saves none of the ops that ran in this region"
            f"{': ' if ran else ''}{', '.join(ran)}. Name overloads of ops that run here "
            "(torch.ops.aten.mm.default, not torch.ops.aten.mm), or leave context_fn out to recompute everything."
        )


def _names_only_others(policy: Callable[..., Any], ran: list[str]) -> bool:
    """Return whether a policy names ops, and none that ran.

    A policy that names no op (recompute everything, or decide by size) is used as it is, and so is one that names an
    op which ran.
    """
    code = getattr(policy, "__code__", None)
    if code is None:
        return False
    values = (value for _, _, value in variables_of(policy))
    mentioned = [op for value in values for op in (value if isinstance(value, _COLLECTIONS) else [value])]
    ops = {str(op) for op in mentioned if _compat.is_op(op)}
    if not ops and "ops" not in code.co_names:
        return False
    in_code = set(code.co_names)
    return not any(op in ops or in_code.issuperset(op.split(".")[1:]) for op in ran)


_COLLECTIONS = (list, tuple, set, frozenset, dict)
