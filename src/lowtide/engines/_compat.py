"""The private torch API that engines need, with what would make it obsolete."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.weak import WeakTensorKeyDictionary

from lowtide._compat import (
    BOOKKEEPING_OPS,
    PLAIN_TYPES,
    StorageReference,
    accelerator,
    bare_kernels,
    clone_all,
    current_hooks,
    disable_dynamo,
    is_plain,
    is_sharded,
    module_tensors,
    never_compiled,
    num_dispatch_modes,
    overwrite_all,
    profiler_is_active,
    set_version,
    storage_id,
    submodules,
    under_functorch,
    version_of,
    versions_of,
    without_modes,
)
from lowtide.replay._compat import parts_of, storages_of, taken_apart

__all__ = [
    "BOOKKEEPING_OPS",
    "PLAIN_TYPES",
    "StorageReference",
    "WeakTensorKeyDictionary",
    "accelerator",
    "bare_kernels",
    "clone_all",
    "disable_dynamo",
    "is_plain",
    "is_sharded",
    "module_tensors",
    "never_compiled",
    "num_dispatch_modes",
    "overwrite_all",
    "profiler_is_active",
    "set_version",
    "storage_id",
    "storages_of",
    "submodules",
    "taken_apart",
    "under_functorch",
    "version_of",
    "versions_of",
    "without_modes",
]


def saves_are_nobodys() -> bool:
    """Whether saved-tensor hooks may be put on, and no one else has. Obsolete with public ways to ask."""
    return current_hooks() is None and torch._C._autograd._saved_tensors_hooks_is_enabled() and not under_functorch()


def are_in_force(hooks: Any) -> bool:
    """Whether these saved-tensor hooks are the ones that see what is saved now. Obsolete like `current_hooks`."""
    current = current_hooks()
    return current is not None and current[0] is hooks.pack_hook


def num_storages(tensor: Tensor) -> int:
    """`len(storages_of(tensor))`, quickly."""
    return 1 if len(parts_of(tensor)) == 1 else len(storages_of(tensor))


def checkpoint_in_force() -> Any | None:
    """What tells the innermost checkpoint that runs or replays here from others; None outside of any.

    Its pack hook, which a hook further in hides, unless that passes everything on. Obsolete with a public way to ask
    for the checkpoint one is in.
    """
    hooks = current_hooks()
    while hooks is not None and "passes_on_to" in getattr(hooks[0], "__dict__", ()):
        hooks = hooks[0].passes_on_to  # type: ignore[attr-defined]
    module = "" if hooks is None else getattr(hooks[0], "__module__", None) or ""
    return hooks[0] if hooks is not None and module.startswith(_CHECKPOINTS) else None


_CHECKPOINTS = ("torch.utils.checkpoint", "lowtide.replay.")


def bare_twin(module: nn.Module, twins: dict[nn.Module, nn.Module], tensors: dict[int, Tensor]) -> nn.Module:
    """A module with the same attributes whose slots for parameters, buffers and modules are its own.

    `tensors` are the tensors that go into the slots, by the id of those in the original. This is how DataParallel makes
    replicas; obsolete with a public way to.
    """
    if module not in twins:
        twins[module] = twin = object.__new__(type(module))
        vars(twin).update(vars(module))
        for slots in ("_parameters", "_buffers"):
            own = {name: tensors.get(id(tensor), tensor) for name, tensor in vars(module)[slots].items()}
            vars(twin)[slots] = own
        children = vars(module)["_modules"].items()
        vars(twin)["_modules"] = {
            name: None if child is None else bare_twin(child, twins, tensors) for name, child in children
        }
    return twins[module]


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


PARTITIONER_TAG = "recompute"  # where torch's partitioner looks for a `CheckpointPolicy`. Obsolete when documented


def set_tag(node: Any, policy: CheckpointPolicy) -> None:
    """Tell torch's partitioner to save or recompute a node, unless a checkpoint region of the user's already did."""
    node.meta.setdefault(PARTITIONER_TAG, policy)


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


def copied_module(module: Any) -> Any:
    """A graph module whose graph is its own and whose tensors are shared."""
    from torch.fx import Graph, GraphModule

    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    copied = next(node for node in reversed(graph.nodes) if node.op == "output")
    copied.meta = dict(next(node for node in reversed(module.graph.nodes) if node.op == "output").meta)
    made = GraphModule(module, graph)
    made.meta = dict(module.meta)
    return made


def saved_names(forward: Any, num_outputs: int) -> list[str]:
    """The nodes that a forward graph hands to its backward, behind its own outputs. Obsolete likewise."""
    results = next(node for node in reversed(forward.graph.nodes) if node.op == "output").args[0]
    return [node.name for node in results[num_outputs:] if hasattr(node, "name")]


def static_inputs(module: Any) -> list[bool]:
    """Which inputs of a graph of Dynamo's are parameters or buffers. Obsolete when Dynamo says so publicly."""
    found = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            facts = node.meta.get("tensor_dict") or {}
            found.append("_dynamo_static_input_type" in facts)
    return found


def fake_inputs(module: Any, inputs: list[Any]) -> list[Any]:
    """Tensors without bytes that stand for the inputs of a graph of Dynamo's: those that Dynamo traced it with.

    Obsolete when Dynamo gives backends such inputs itself.
    """
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    found = [node.meta.get("example_value") for node in nodes]
    return inputs if any(each is None for each in found) else found


def is_replayed() -> bool:
    """Whether what runs now is, or may be, run again by a checkpoint: under saved-tensor hooks, or in a backward.

    Obsolete with a public way to ask for either.
    """
    return current_hooks() is not None or torch._C._current_graph_task_id() != -1


def hooks_of(model: nn.Module) -> list[Any]:
    """The hooks on a model's modules. Obsolete with a public way to list them."""
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return [hook for module in model.modules() for name in names for hook in getattr(module, name).values()]


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


class SynchronizingOps(TorchDispatchMode):
    """Notes the ops that make the host wait for the device: `(op, where())` for each.

    Obsolete when torch's sync debug mode names the op.
    """

    def __init__(self, where: Callable[[], Any]) -> None:
        super().__init__()
        self.found: list[tuple[str, Any]] = []
        self._where = where

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = torch.cuda.get_sync_debug_mode()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that this is a prototype
                torch.cuda.set_sync_debug_mode("error")
            return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            self.found.append((str(func), self._where()))
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return func(*args, **(kwargs or {}))


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether hooks run after its gradient is accumulated, as those of an optimizer in the backward. Obsolete with a
    public way to list them.
    """
    return bool(getattr(tensor, "_post_accumulate_grad_hooks", None))
