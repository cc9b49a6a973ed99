"""Canaries for `_compat/fx_graphs.py`: the metadata on nodes, and the partitioner that follows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from joints import compile_without_kernels
from lowtide._compat import fx_graphs


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return self.linear(x).exp()


class Seen:
    """Dynamo's graph of one block with its inputs, its joint graph, and the forward that torch's partitioner made."""

    def __init__(self) -> None:
        self.graph: Any = None
        self.inputs: list[Any] = []
        self.fakes: list[Any] = []
        self.joint: Any = None
        self.facts: dict[str, Any] = {}
        self.forward: Any = None
        self.saved: list[list[str]] = []
        self.stopped: Any = ()

    def partition(self, joint: Any, inputs: Any, **facts: Any) -> tuple[Any, Any]:
        self.joint, self.facts = fx_graphs.copied_module(joint), facts
        fx_graphs.simplify_joint(joint)

        def is_accepted(partition: fx_graphs.Partition) -> bool:
            self.saved.append(partition.saved_names(None) if not self.saved else partition.saved_names(0.01))
            return len(self.saved) > 1

        self.stopped = fx_graphs.partition_if_accepted(joint, inputs, is_accepted, **facts)
        parts = fx_graphs.partition_if_accepted(joint, inputs, is_accepted, **facts)
        assert parts is not None
        self.forward, backward = parts
        return self.forward, backward

    def backend(self, graph: Any, inputs: list[Any]) -> Any:
        self.graph, self.inputs, self.fakes = graph, inputs, fx_graphs.FakeInputs(graph, inputs).again()
        return compile_without_kernels(graph, inputs, self.partition)


@pytest.fixture(scope="module")
def seen() -> Seen:
    import warnings

    result = Seen()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compile(Block(), backend=result.backend)(torch.ones(4, 2)).sum().backward()
    return result


def node_of(graph: Any, name: str) -> Any:
    return next(node for node in graph.nodes if name in str(node.target))


def test_inputs_of_dynamos_graph(seen: Seen) -> None:
    static = fx_graphs.static_inputs(seen.graph)
    assert sorted(static) == [False, True, True, True], "meta['tensor_dict'] no longer marks parameters and buffers"
    assert seen.fakes is not seen.inputs, "meta['example_value'] is gone from Dynamo's placeholders"


def test_values_and_modules_of_nodes(seen: Seen) -> None:
    node = node_of(seen.joint.graph, "addmm")
    assert isinstance(fx_graphs.value_of(node), Tensor), "meta['val'] is gone from nodes of joint graphs"
    assert fx_graphs.hint(fx_graphs.value_of(node).numel()) == 12
    assert fx_graphs.node_flops(node) == 2 * 4 * 2 * 3, "FLOPs of addmm are counted otherwise"
    (bias, *products), _ = fx_graphs.node_arguments(node, lambda value: tuple(value.shape))
    assert (bias, *products) == ((3,), (4, 2), (2, 3)), "torch.fx.node.map_arg replaces nodes otherwise"
    stack = fx_graphs.module_stack(node)
    assert stack, "meta['nn_module_stack'] is gone: ops of compiled graphs belong to no module"
    paths = [fx_graphs.clean_path(path) for path, _ in stack.values()]
    assert paths[-1] == "linear", f"Dynamo names modules otherwise: {list(stack.values())}"


def test_written_inputs(seen: Seen) -> None:
    assert len(fx_graphs.written_inputs(seen.joint.graph)) == 1, "meta['desc'] no longer tells of mutated inputs"


def test_saved_values_and_tags(seen: Seen) -> None:
    def shapes(names: list[str]) -> set[tuple[int, ...]]:
        return {tuple(fx_graphs.value_of(node).shape) for node in seen.joint.graph.nodes if node.name in names}

    own, least = seen.saved
    assert shapes(own) == {(4, 2), (4, 3)}, "the partitioner chooses elsewhere"  # the input, and exp's output
    assert (4, 3) not in shapes(least), "the fraction has no effect"
    assert seen.stopped is None, "a choice that was not accepted was carried out"
    results = next(node for node in reversed(seen.forward.graph.nodes) if node.op == "output").args[0]
    assert {node.name for node in results[seen.facts["num_fwd_outputs"] :]} == set(own), "what is chosen is not saved"
    node = node_of(seen.joint.graph, "addmm")
    with fx_graphs.restored_tags(seen.joint.graph):
        fx_graphs.set_tag(node, CheckpointPolicy.MUST_SAVE)
        fx_graphs.set_tag(node, CheckpointPolicy.MUST_RECOMPUTE)
        assert node.meta[fx_graphs.PARTITIONER_TAG] is CheckpointPolicy.MUST_SAVE
        assert not fx_graphs.is_tagged_recomputed(node)
    assert fx_graphs.PARTITIONER_TAG not in node.meta


def test_hints_of_plain_numbers() -> None:
    assert fx_graphs.hint(3) == 3
