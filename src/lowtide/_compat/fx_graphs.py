"""`torch.fx` graphs: metadata that Dynamo and AOTAutograd store on nodes, and the partitioner of joint graphs.

The compiled engine reads a joint graph into a `StepGraph`, writes a plan's decisions back as tags, and lets torch's
partitioner split the graph into forward and backward by them. It also asks the partitioner what torch itself would
save. The keys of `node.meta` are undocumented, and read here only.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from lowtide._compat.dispatch import op_flops
from lowtide._compat.internals import required

_COMPILE = "torch.compile cannot run with lowtide's plans"

# The key of `node.meta` under which torch's partitioner reads a `CheckpointPolicy`. Obsolete when documented.
PARTITIONER_TAG = "recompute"


def set_tag(node: Any, policy: CheckpointPolicy) -> None:
    """Tag a node for torch's partitioner, unless a checkpoint of the user has. Obsolete when the tag is documented."""
    node.meta.setdefault(PARTITIONER_TAG, policy)


def is_tagged_recomputed(node: Any) -> bool:
    """Return whether a node is tagged as recomputed, as by a user's checkpoint. Obsolete when the tag is documented."""
    recomputed = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    return node.meta.get(PARTITIONER_TAG) in recomputed


@contextlib.contextmanager
def restored_tags(graph: Any) -> Iterator[None]:
    """Context manager after which the nodes of a graph have the tags that they had before. Obsolete likewise."""
    before = {node: node.meta.get(PARTITIONER_TAG) for node in graph.nodes}
    try:
        yield
    finally:
        for node, policy in before.items():
            if policy is None:
                node.meta.pop(PARTITIONER_TAG, None)
            else:
                node.meta[PARTITIONER_TAG] = policy


def copied_module(module: Any) -> Any:
    """Copy a graph module, not its tensors. Obsolete when `copy.copy` copies its graph and the output's metadata."""
    from torch.fx import Graph, GraphModule

    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    graph.output_node().meta = dict(module.graph.output_node().meta)
    made = GraphModule(module, graph)
    made.meta = dict(module.meta)
    return made


def static_inputs(module: Any) -> list[bool]:
    """Say of each input of Dynamo's graph whether it is a parameter or buffer. Relies on `node.meta["tensor_dict"]`."""
    inputs = module.graph.find_nodes(op="placeholder")
    return ["_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {}) for node in inputs]


class FakeInputs:
    """The fake tensors that Dynamo traced one of its graphs with, for compiling it again; `inputs` if one is unknown.

    A float argument is a tensor of one element, whose fake tensor knows its symbolic number. AOTAutograd converts fake
    tensors to a fake mode of its own, which loses the number, so `again()` converts these. Obsolete when Dynamo passes
    fake inputs to backends.
    """

    def __init__(self, module: Any, inputs: list[Any]) -> None:
        fakes = [node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder")]
        self._inputs = inputs if any(fake is None for fake in fakes) else fakes
        self._numbers = [(each, getattr(each, "item_memo", None)) for each in self._inputs]

    @property
    def symbolic(self) -> list[int]:
        """The positions of tensors whose shapes have symbols."""
        tensors = [(at, each) for at, each in enumerate(self._inputs) if isinstance(each, Tensor)]
        return [at for at, each in tensors if any(isinstance(size, torch.SymInt) for size in each.shape)]

    def again(self) -> list[Any]:
        """The inputs for another compile, to be called inside of a `TracingContext`."""
        context = required("torch._guards.TracingContext", "joint graphs cannot be read").try_get()
        return [fake if number is None else _with_number(fake, number, context) for fake, number in self._numbers]


def _with_number(fake: Any, number: Any, context: Any) -> Any:
    converted = fake if context is None or context.fake_mode is None else context.fake_mode.from_tensor(fake)
    converted.item_memo = number
    return converted


def value_of(node: Any) -> Any:
    """Return the fake tensor that a node was traced with, or a tuple of them, or None. Relies on `node.meta["val"]`."""
    return node.meta.get("val")


def module_stack(node: Any) -> dict[str, tuple[str, Any]] | None:
    """Return path and class of each module call around a node, the outermost first. Relies on `nn_module_stack`."""
    return node.meta.get("nn_module_stack")


_ROOTS = re.compile(r"^L\[['\"](\w+)['\"]\]|^L__(\w+?)___")


def clean_path(path: str) -> str:
    """Return a module's path as in `named_modules`, from the source expression by which Dynamo names it.

    Obsolete when Dynamo documents `node.meta["nn_module_stack"]`.

    >>> clean_path("L['self'].layers.0.attn"), clean_path("L['self']._modules['layers'][0]"), clean_path("L['self']")
    ('layers.0.attn', 'layers.0', '')
    """
    path = _ROOTS.sub("", path)
    path = re.sub(r"\._modules\[['\"]([^'\"]+)['\"]\]", r".\1", path)
    path = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", path)
    return path.strip(".")


def node_flops(node: Any) -> int:
    """Return the FLOPs of a node; 0 without an op, or without hints of its sizes. Obsolete like `op_flops`."""
    args, kwargs = node_arguments(node, lambda value: value)
    # Its hint, as int() of a symbolic number would make it a constant of the graph.
    return int(hint(op_flops(node.target, args, kwargs, value_of(node))) or 0)


def node_arguments(node: Any, change: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Return a node's arguments, with `change(value)` for each node among them. Relies on `node.meta["val"]`."""

    def value(each: Any) -> Any:
        return change(value_of(each))

    return torch.fx.node.map_arg(node.args, value), torch.fx.node.map_arg(node.kwargs, value)


def hint(size: Any) -> Any:
    """Return a symbolic size's value at the time of tracing; others unchanged. Obsolete with public hints."""
    node = getattr(size, "node", None)
    return node.hint if node is not None and isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool) else size


def written_inputs(joint: Any) -> list[Any]:
    """List the inputs of a joint graph that its forward changes, by `copy_` in the graph or by AOTAutograd's epilogue.

    Obsolete when AOTAutograd's descriptions of inputs and outputs are public.
    """
    described = joint.output_node().meta.get("desc") or ()
    changed = [each.mutated_input for each in described if hasattr(each, "mutated_input")]
    inputs = joint.find_nodes(op="placeholder")
    copies = joint.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    written = [node for node in inputs if node.meta.get("desc") in changed]
    return written + [node.args[0] for node in copies if node.args[0] in inputs]


def simplify_joint(joint: Any) -> None:
    """Remove dead nodes and repeated ones, as torch's partitioner does first. Obsolete when it tells its choice."""
    joint.graph.eliminate_dead_code()
    if required("torch._functorch.config", _COMPILE).cse:
        joint.graph = required("torch._functorch.compile_utils.fx_graph_cse", _COMPILE)(joint.graph)


def torch_partition(
    joint: Any, inputs: Any, *, fraction: float | None = None, is_simplified: bool = False, **facts: Any
) -> tuple[Any, Any]:
    """Split a joint graph into forward and backward by torch's own partitioner, which follows the tags on its nodes.

    With `fraction`, as under `torch._functorch.config.activation_memory_budget = fraction`. A graph that
    `simplify_joint` was called on is not simplified again. Obsolete likewise.
    """
    partition = required("torch._functorch.partitioners.min_cut_rematerialization_partition", _COMPILE)
    with _partitioner_settings(joint.graph, fraction, is_simplified):
        return cast(tuple[Any, Any], partition(joint, inputs, **facts))


class _Stopped(Exception):
    """Ends a partition whose choice is not used."""


@dataclass
class Partition:
    """A run of torch's partitioner, when it has chosen what to save. Obsolete like `partition_if_accepted`."""

    _graph: Any
    _node_info: Any
    _choose_saved: Callable[..., Any]
    _num_forward_outputs: int
    chosen: list[Any]

    def saved_names(self, fraction: float | None = None) -> list[str]:
        """The nodes that torch saves, or would save under an `activation_memory_budget` of `fraction`."""
        if fraction is None:
            return [node.name for node in self.chosen]
        with _partitioner_settings(self._graph, fraction, is_simplified=True):
            return [node.name for node in self._choose_saved(self._graph, self._node_info, memory_budget=fraction)]

    def follow_tags(self) -> bool:
        """Save what the tags on the nodes say, which takes torch's minimum cut about as long as a choice of its own.

        Walks from the nodes of the backward to those that are tagged as saved, and to inputs. Returns False, and
        changes nothing, if it meets a node that is no tensor, such as a symbolic size.
        """
        given = set(self._node_info.inputs)  # of the forward; one that the backward returns is listed in both
        backward, found, seen = set(self._node_info.required_bw_nodes) - given, set(), set()
        results = self._graph.output_node().args[0]
        left = [each for node in backward if node.op != "output" for each in node.all_input_nodes]
        left += [node for node in results[self._num_forward_outputs :] if isinstance(node, torch.fx.Node)]
        while left:
            node = left.pop()
            if node in seen or node in backward or node.op == "get_attr":
                continue
            seen.add(node)
            value = node.meta.get("val")
            is_saved = node.op == "placeholder" or node.meta.get(PARTITIONER_TAG) is CheckpointPolicy.MUST_SAVE
            if not isinstance(value, torch.Tensor) and (is_saved or not isinstance(value, tuple | list)):
                return False
            if is_saved:
                found.add(node)
            else:
                left += node.all_input_nodes
        self.chosen = [node for node in self._graph.nodes if node in found]
        return True


def partition_if_accepted(
    joint: Any, inputs: Any, is_accepted: Callable[[Partition], bool], **facts: Any
) -> tuple[Any, Any] | None:
    """Split a simplified joint graph as torch decides, if `is_accepted` says so when torch has chosen what to save.

    Otherwise returns None, and forward and backward were not made, which takes most of the time. Replaces
    `torch._functorch.partitioners.choose_saved_values_set` for the call. Obsolete likewise.
    """
    partitioners = required("torch._functorch.partitioners", _COMPILE)
    choose_saved = partitioners.choose_saved_values_set

    def choose(graph: Any, node_info: Any, memory_budget: float = 1) -> Any:
        if graph is not joint.graph:
            return choose_saved(graph, node_info, memory_budget=memory_budget)
        chosen = choose_saved(graph, node_info, memory_budget=memory_budget)
        partition = Partition(graph, node_info, choose_saved, facts["num_fwd_outputs"], chosen)
        if not is_accepted(partition):
            raise _Stopped
        return partition.chosen

    partitioners.choose_saved_values_set = choose
    try:
        return torch_partition(joint, inputs, is_simplified=True, **facts)
    except _Stopped:
        return None
    finally:
        partitioners.choose_saved_values_set = choose_saved


@contextlib.contextmanager
def _partitioner_settings(graph: Any, fraction: float | None, is_simplified: bool) -> Iterator[None]:
    """Settings of torch's partitioner for a joint graph.

    With a fraction, inputs that are no tensors, such as the device meshes of DTensors, count as zero bytes: torch 2.13
    raises for them. Also, the partitioner runs ops for their FLOPs, and the compile would fail if the result has a size
    of its own (`item`, `nonzero`), as no graph returns that size: such sizes are ignored.
    """
    config = required("torch._functorch.config", _COMPILE)
    settings: dict[str, Any] = {"cse": False} if is_simplified else {}
    if fraction is not None:
        settings["activation_memory_budget"] = fraction
        if hasattr(config, "unsafe_treat_script_objects_as_zero_size"):
            settings["unsafe_treat_script_objects_as_zero_size"] = True
    values = (node.meta.get("val") for node in graph.nodes)
    modes = (getattr(value, "fake_mode", None) for value in values if isinstance(value, torch.Tensor))
    sizes = next((mode.shape_env for mode in modes if mode is not None), None)
    with (
        config.patch(settings) if settings else contextlib.nullcontext(),
        getattr(sizes, "ignore_fresh_unbacked_symbols", contextlib.nullcontext)(),
    ):
        yield
