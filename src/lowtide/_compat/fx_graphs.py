"""Nodes and modules of `torch.fx`, as AOTAutograd and the partitioner leave them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from lowtide._compat.dispatch import flop_formula

PARTITIONER_TAG = "recompute"  # where torch's partitioner looks for a `CheckpointPolicy`. Obsolete when documented


def set_tag(node: Any, policy: CheckpointPolicy) -> None:
    """Tell torch's partitioner to save or recompute a node, unless a checkpoint region of the user's already did."""
    node.meta.setdefault(PARTITIONER_TAG, policy)


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


def is_tensor_value(value: Any) -> bool:
    """Whether what a node of a graph gives is a tensor, fake or not."""
    return isinstance(value, Tensor)


def value_of(node: Any) -> Any:
    """What a node of a graph gives, as AOTAutograd notes it: fake tensors, alone or in a tuple; None if unknown.

    Obsolete when `torch.fx` documents `node.meta["val"]`.
    """
    return node.meta.get("val")


def module_stack(node: Any) -> dict[str, tuple[str, Any]] | None:
    """The module calls in which Dynamo met a node, the outermost first: path and class (or its name) by call.

    Obsolete when Dynamo documents `node.meta["nn_module_stack"]`.
    """
    return node.meta.get("nn_module_stack")


_ROOTS = re.compile(r"^L\[['\"](\w+)['\"]\]|^L__(\w+?)___")


def clean_path(path: str) -> str:
    """A module's path as `named_modules` would give it, from the source that Dynamo names it by.

    >>> clean_path("L['self'].layers.0.attn"), clean_path("L['self']._modules['layers'][0]"), clean_path("L['self']")
    ('layers.0.attn', 'layers.0', '')
    """
    path = _ROOTS.sub("", path)
    path = re.sub(r"\._modules\[['\"]([^'\"]+)['\"]\]", r".\1", path)
    path = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", path)
    return path.strip(".")


def hinted_numel(value: Tensor) -> int:
    """Elements of a fake tensor; a symbolic size counts as what it was when the graph was made.

    Obsolete when `torch.export` or `torch.compiler` shows the hints of symbolic sizes.
    """
    return int(hint(value.numel()) or 0)


def node_flops(node: Any) -> int:
    """FLOPs of one node of a graph by torch's own formulas; 0 for what has none."""
    formula = flop_formula(node.target)
    if formula is None:
        return 0
    args, kwargs = node_arguments(node, lambda value: value)
    try:
        # As hinted: a symbolic number that is asked for its value would be a constant of the graph from then on.
        return int(hint(formula(*args, **kwargs, out_val=value_of(node))))
    except (TypeError, ValueError, AttributeError, RuntimeError, AssertionError):  # sizes that a formula does not know
        return 0


def node_arguments(node: Any, change: Callable[[Any], Any]) -> tuple[Any, Any]:
    """The arguments of a node, with each node among them replaced by what `change` makes of its value."""
    from torch.fx.node import map_arg

    def value(each: Any) -> Any:
        return change(value_of(each))

    return map_arg(node.args, value), map_arg(node.kwargs, value)


def hint(size: Any) -> Any:
    """What a symbolic size was when the graph was made; other things as they are. Obsolete like `hinted_numel`."""
    node = getattr(size, "node", None)
    return node.hint if node is not None and isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool) else size


def node_argument(node: Any, name: str) -> Any:
    """The argument of that name in a node's call, its default where it is not given; None where there is none such."""
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.name == name:
            return node.args[index] if index < len(node.args) else node.kwargs.get(name, argument.default_value)
    return None


def written_inputs(joint: Any) -> list[Any]:
    """The inputs of a joint graph that its forward changes: in the graph, or by what runs it, from an output.

    Obsolete when AOTAutograd's descriptions of inputs and outputs are public.
    """
    nodes = list(joint.nodes)
    described = nodes[-1].meta.get("desc") or ()
    changed = [each.mutated_input for each in described if hasattr(each, "mutated_input")]
    inputs = [node for node in nodes if node.op == "placeholder"]
    found = [node for node in inputs if node.meta.get("desc") in changed]
    for node in nodes:
        if node.target is torch.ops.aten.copy_.default and node.args[0] in inputs:
            found.append(node.args[0])
    return found
