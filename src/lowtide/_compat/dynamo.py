"""The private torch API that engines need, with what would make it obsolete."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch._C._dynamo import eval_frame as dynamo_frames


def compile_with_inductor(
    module: Any, inputs: Any, partition: Callable[..., Any], options: dict[str, Any]
) -> Callable[..., Any]:
    """A graph of Dynamo's, compiled by inductor, its joint graph split by `partition`.

    Whole steps are not cached by AOTAutograd, whose key knows nothing of plans; the kernels' own cache goes by the
    graphs that came out of the partitioner, so that a changed plan is never served another's.
    Obsolete when `torch.compile` takes a partitioner.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx

    patches = {**options, "custom_partitioner_fn": _as_partitioner(partition)}
    with functorch_config.patch(enable_autograd_cache=False):
        return cast(Callable[..., Any], compile_fx(module, inputs, config_patches=patches))


def compile_without_kernels(
    module: Any, inputs: Any, partition: Callable[..., Any], options: dict[str, Any]
) -> Callable[..., Any]:
    """The same with every op run as it is: for looking at graphs, and for tests. Obsolete likewise."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    def run(graph: Any, _: Any) -> Any:
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=partition)(module, inputs)


def torch_partition(joint: Any, inputs: Any, **facts: Any) -> tuple[Any, Any]:
    """torch's own split of a joint graph in two, which goes by the tags on its nodes. Obsolete likewise."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(joint, inputs, **facts)


def _as_partitioner(partition: Callable[..., Any]) -> Any:
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):  # type: ignore[misc]
        def __call__(self, gm: Any, joint_inputs: Any, **facts: Any) -> Any:
            return partition(gm, joint_inputs, **facts)

        def uuid(self) -> Any:
            return "lowtide"  # what it does shows in the graphs, which are part of the key

        def __reduce__(self) -> Any:  # inductor pickles its options for the key
            return str, ("lowtide",)

    return Partitioner()


def compile_module(module: nn.Module, **options: Any) -> None:
    """`module.compile()`, also for classes whose forward is torch's own (nn.Sequential, nn.TransformerEncoderLayer).

    Dynamo does not begin a graph in torch's own code, and `Module.compile` would silently do nothing. Obsolete when it
    adds a frame of its own, as `torch.compile(module)` does.
    """
    if not type(module).forward.__module__.startswith("torch.nn."):
        module.compile(**options)
        return
    call = module._call_impl

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    module._compiled_call_impl = torch.compile(run, **options)


def uncompile(module: nn.Module) -> None:
    """Take back `module.compile()`. Obsolete when modules can do so themselves."""
    module._compiled_call_impl = None


class TracingContext:
    """What Dynamo knows while it compiles a graph, for compiling the same graph again later. Obsolete likewise."""

    def __init__(self) -> None:
        from torch._guards import TracingContext as Context

        self._context = Context.try_get()

    def __enter__(self) -> None:
        from torch._guards import TracingContext as Context
        from torch._guards import tracing

        self._entered = None
        if self._context is not None and Context.try_get() is None:
            self._entered = tracing(self._context)
            self._entered.__enter__()

    def __exit__(self, *exception: Any) -> None:
        if self._entered is not None:
            self._entered.__exit__(*exception)


def mode_options(mode: str | None, dynamic: bool | None) -> dict[str, Any]:
    """Inductor's options for one of `torch.compile`'s modes. Public as `torch._inductor.list_mode_options`."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode, dynamic)) if mode not in (None, "default") else {}


def is_inductor_option(name: str) -> bool:
    """Whether inductor knows an option of that name. Public as `torch._inductor.list_options`."""
    from torch._inductor import list_options

    return name.replace("-", "_") in list_options()


_Function = TypeVar("_Function", bound=Callable[..., Any])


# `torch.compiler.disable` without importing the compiler, which takes longer than all of lowtide, until the first call.
# Obsolete when torch's own is as lazy.
disable_dynamo = torch._disable_dynamo


def never_compiled(function: _Function) -> _Function:
    """`function` itself, which Dynamo leaves alone with all that it calls, where C++ or torch's own code calls it.

    For what runs very often: the two calls that `disable_dynamo` puts before each make a difference. A caller that
    Dynamo traces has it traced too, unlike there. Obsolete when torch's own has no wrapper.
    """
    try:
        skip = dynamo_frames._FrameAction.SKIP
        dynamo_frames.set_code_exec_strategy(function.__code__, dynamo_frames._FrameExecStrategy(skip, skip))
    except AttributeError:  # a torch that has another way
        return disable_dynamo(function)  # type: ignore[return-value]
    return function


def compiler_is_imported() -> bool:
    """Whether anything can have been compiled. Obsolete when `torch.compiler.set_stance` imports no compiler."""
    return "torch._dynamo" in sys.modules
