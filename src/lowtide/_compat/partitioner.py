"""torch's partitioner of joint graphs: its choices of saved values, and the split into forward and backward.

The compiled engine lets it carry out plans, and asks it what torch itself would save. Each docstring ends with the
change of torch that would make it obsolete.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.utils.checkpoint import CheckpointPolicy

from lowtide._compat.fx_graphs import PARTITIONER_TAG
from lowtide._compat.internals import required

_COMPILE = "torch.compile cannot run with lowtide's plans"


def simplify_joint(joint: Any) -> None:
    """Do what torch's partitioner does with a joint graph first: remove dead nodes, and of equal ones all but one.

    Obsolete when the partitioner tells its choice before it splits the graph.
    """
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
    with _partitioner_settings(fraction, is_simplified):
        return cast(tuple[Any, Any], partition(joint, inputs, **facts))


class _Stopped(Exception):
    """Ends a partition whose choice is not used."""


class Partition:
    """A run of torch's partitioner, at the point where it chooses what to save. Made by `watched_partition`."""

    def __init__(
        self,
        graph: Any,
        node_info: Any,
        choose_saved: Callable[..., Any],
        memory_budget: float,
        num_forward_outputs: int,
    ) -> None:
        self._graph, self._node_info, self._choose_saved = graph, node_info, choose_saved
        self._num_forward_outputs = num_forward_outputs
        self.chosen = choose_saved(graph, node_info, memory_budget=memory_budget)

    def saved_names(self, fraction: float | None = None) -> list[str]:
        """The nodes that torch saves, or would save under an `activation_memory_budget` of `fraction`."""
        if fraction is None:
            return [node.name for node in self.chosen]
        with _partitioner_settings(fraction, is_simplified=True):
            return [node.name for node in self._choose_saved(self._graph, self._node_info, memory_budget=fraction)]

    def follow_tags(self) -> bool:
        """Save what the tags on the nodes say, which takes torch's minimum cut about as long as a choice of its own.

        Walks from the nodes of the backward to those that are tagged as saved, and to inputs. Returns False, and
        changes nothing, if it meets a node that is no tensor, such as a symbolic size.
        """
        given = set(self._node_info.inputs)  # of the forward; one that the backward returns is listed in both
        backward, found, seen = set(self._node_info.required_bw_nodes) - given, set(), set()
        results = next(node for node in reversed(self._graph.nodes) if node.op == "output").args[0]
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


def watched_partition(
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
        partition = Partition(graph, node_info, choose_saved, memory_budget, facts["num_fwd_outputs"])
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


def _partitioner_settings(fraction: float | None, is_simplified: bool) -> contextlib.AbstractContextManager[Any]:
    """Settings of torch's partitioner.

    With a fraction, inputs that are no tensors, such as the device meshes of DTensors, count as zero bytes: torch 2.13
    raises for them.
    """
    config = required("torch._functorch.config", _COMPILE)
    settings: dict[str, Any] = {"cse": False} if is_simplified else {}
    if fraction is not None:
        settings["activation_memory_budget"] = fraction
        if hasattr(config, "unsafe_treat_script_objects_as_zero_size"):
            settings["unsafe_treat_script_objects_as_zero_size"] = True
    return cast(
        contextlib.AbstractContextManager[Any], config.patch(settings) if settings else contextlib.nullcontext()
    )
