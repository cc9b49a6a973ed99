"""`joint_step`: convert AOTAutograd's joint graph (forward and backward as one fx graph) to a `StepGraph`.

The compiled engine calls it for each graph that `torch.compile` hands to the backend, and solves the result. The
returned `JointStep` also maps forward ops back to fx nodes, so that a plan can be written as tags on them.

- The forward ends before the first node that depends on an incoming gradient (a tangent).
- Only values computed in the graph have bytes. Inputs (parameters, the batch, outputs of other graphs) are owned
  outside of it. A view is the value that it views.
- Module calls come from the module stacks that Dynamo stores on each node (`ModuleStacks`).
- Seconds (`node_costs`): matrix products, convolutions and attention are measured on an accelerator, each alone, once
  per shape and process. Pointwise ops are fused with their neighbours, so their time is predicted from the bytes they
  read and write.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx

from lowtide import _compat
from lowtide.graph.arrays import inlined, is_own_kernel, recompute_s
from lowtide.graph.segments import with_structures
from lowtide.graph.step_graph import Call, Hardware, Op, Save, StepGraph, Value
from lowtide.replay.op_facts import facts_of
from lowtide.tracing.devices import MEMORY_EFFICIENCY
from lowtide.tracing.op_times import clock_for, predicted_s
from lowtide.tracing.trace_records import RawOp


class ModuleStacks:
    """Builds module calls from the stacks of nodes, in order; one without belongs to the innermost open call."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._open: list[tuple[str, int]] = []  # the stack's key, and the call

    def enter(self, node: Any, op: int) -> int:
        """Return the call that a node, op number `op`, runs in; opens and closes calls as the stack changes."""
        stack = _compat.module_stack(node)
        if stack:
            keys = list(stack)
            shared = 0
            while shared < min(len(keys), len(self._open)) and self._open[shared][0] == keys[shared]:
                shared += 1
            self.close(op, shared)
            for key in keys[shared:]:
                path, kind = stack[key]
                parent = self._open[-1][1] if self._open else -1
                self._open.append((key, len(self.calls)))
                name = kind if isinstance(kind, str) else kind.__name__
                self.calls.append(Call(_compat.clean_path(str(path)), name.rsplit(".", 1)[-1], parent, op, op, (), ()))
        return self._open[-1][1] if self._open else -1

    def close(self, op: int, depth: int = 0) -> None:
        """Close the calls that are open at this depth and deeper: they ended before op `op`."""
        while len(self._open) > depth:
            _, call = self._open.pop()
            self.calls[call] = replace(self.calls[call], end=op)


# These return views, but their schemas do not say so.
_UNSAID_VIEWS = ("aten._unsafe_view.default",)
# These draw the seeds for all random ops of a compiled graph.
_SEEDS = ("prims.inductor_seeds.default", "prims.inductor_seed.default")
_OWN_KERNELS = ("flex_attention",)
# Collectives that make a whole weight of the ranks' shards. Saved, it would be held until the backward.
_GATHERS = ("all_gather_into_tensor", "wait_tensor")


# From a node and its op to its seconds. Sizes in the op are hints of symbolic ones; of a node with the flag "fused",
# values that stay in registers are not in its `moved_bytes`.
NodeSeconds = Callable[[fx.Node, RawOp], float]


@dataclass(frozen=True)
class JointStep:
    """A joint graph as a `StepGraph`, and the fx nodes it was made from."""

    graph: StepGraph
    nodes: tuple[fx.Node, ...]  # of the forward ops
    parts: tuple[tuple[fx.Node, ...], ...]  # nodes that pick single outputs of each forward op
    views: tuple[fx.Node, ...]  # the forward's views, but for those of inputs that it updates
    makers: dict[str, int]  # the op that computed the value of a node, by the node's name


def joint_step(
    joint: fx.Graph,
    hardware: Hardware,
    seconds_of: NodeSeconds,
    is_parameter: Callable[[int], bool] = lambda position: False,
    is_backward: Callable[[fx.Node], bool] | None = None,
) -> JointStep:
    """Convert a joint graph. `is_parameter` says which of the graph's own inputs, by position, are parameters.

    `is_backward` says which nodes belong to the backward; by default those that depend on a tangent.
    """
    return _Reader(joint, hardware, seconds_of, is_parameter, is_backward).step()


class _Reader:
    """Reads a joint graph node by node; `step()` returns the result."""

    def __init__(
        self,
        joint: fx.Graph,
        hardware: Hardware,
        seconds_of: NodeSeconds,
        is_parameter: Callable[[int], bool],
        is_backward: Callable[[fx.Node], bool] | None,
    ) -> None:
        self._hardware, self._seconds_of, self._is_parameter = hardware, seconds_of, is_parameter
        self._ops: list[Op] = []
        self._nodes: list[fx.Node] = []
        self._parts: list[tuple[fx.Node, ...]] = []
        self._views: list[fx.Node] = []
        self._values: list[Value] = []
        self._value_of: dict[tuple[fx.Node, int | None], int] = {}
        self._stacks = ModuleStacks()
        nodes = list(joint.nodes)
        self._inputs = [node for node in nodes if node.op == "placeholder"]
        self._output = nodes[-1]
        self._written = set(_compat.written_inputs(joint))
        self._called = [node for node in nodes if node.op == "call_function"]
        # Parameters, what is made of them alone without computing with them, and of that what was gathered from ranks.
        primals = [node for node in self._inputs if "tangents" not in str(node.target)]
        self._weights = {node for position, node in enumerate(primals) if is_parameter(position)}
        self._gathered: set[fx.Node] = set()
        if is_backward is None:
            self._is_backward = _downstream([node for node in self._inputs if "tangents" in str(node.target)])
        else:
            self._is_backward = {node for node in self._called if is_backward(node)}

    def step(self) -> JointStep:
        """Read all nodes and return the step."""
        for node in self._inputs:
            if isinstance(_compat.value_of(node), Tensor):
                self._new_value(node, None, -1, "elsewhere")
        self._written_values = {self._value_of[node, None] for node in self._written}
        num_forward = -1
        for node in self._called:
            if num_forward < 0 and node in self._is_backward:
                num_forward = len(self._ops)
                self._stacks.close(num_forward)
            self._read(node, num_forward < 0)
        num_forward = len(self._ops) if num_forward < 0 else num_forward
        self._stacks.close(num_forward)
        self._set_ends(num_forward)
        self._set_seconds(num_forward)
        saves = self._saves(num_forward)
        calls = self._calls(num_forward)
        graph = StepGraph(
            ops=tuple(self._ops),
            num_forward=num_forward,
            values=tuple(self._values),
            saves=tuple(saves),
            calls=tuple(with_structures(self._ops[:num_forward], calls, self._values, saves)),
            hardware=self._hardware,
            step_s=sum(map(recompute_s, self._ops)),
            versions={"torch": torch.__version__},
        )
        makers = {node.name: self._values[value].born for (node, _), value in self._value_of.items()}
        makers = {name: born for name, born in makers.items() if 0 <= born < num_forward}
        nodes, parts = tuple(self._nodes[:num_forward]), tuple(self._parts[:num_forward])
        return JointStep(graph, nodes, parts, tuple(self._views), makers)

    # Nodes.

    def _read(self, node: fx.Node, is_forward: bool) -> None:
        if node.target is operator.getitem:
            self._share(node, (node.args[0], node.args[1]))
            return
        if not _tensors_of(node):
            return  # sizes, assertions
        flags = self._flags_of(node, is_forward)
        if "view" in flags:
            self._share(node, (_tensors_among_inputs(node)[0], None))
            if is_forward and self._value_of.get((node, None)) not in self._written_values:
                self._views.append(node)
            return
        index = len(self._ops)
        parts = tuple(user for user in node.users if user.target is operator.getitem)
        inputs = tuple(dict.fromkeys(self._values_read(node)))
        outputs = tuple(self._new_value(node, part, index, "activation") for part in _tensors_of(node))
        name, flops = str(node.target), _compat.node_flops(node)
        if not is_own_kernel(name, flops, flags):
            flags = (*flags, "fused")
        call = self._stacks.enter(node, index) if is_forward else -1
        # An op that reads an input which the forward updates (BatchNorm's statistics) must not run again after it.
        mutates = tuple(value for value in inputs if value in self._written_values)
        self._ops.append(Op(name, call, 0.0, flops, inputs, outputs, mutates, flags=flags))
        self._nodes.append(node)
        self._parts.append(parts)

    def _flags_of(self, node: fx.Node, is_forward: bool) -> tuple[str, ...]:
        """Flags of an op; "rerun" for one that a checkpoint of the user's recomputes, and for a gathered weight."""
        flags = _flags(node)
        sources = _tensors_among_inputs(node)
        if not sources:  # a "view" of a number, as in the backward of `x * 1j`, makes a tensor
            flags = tuple(flag for flag in flags if flag != "view")
        if not is_forward:
            return flags
        if sources and all(each in self._weights for each in sources):
            gathers = "collective" in flags and any(name in str(node.target) for name in _GATHERS)
            is_fused = not is_own_kernel(str(node.target), _compat.node_flops(node), flags)
            if gathers or "view" in flags or is_fused:
                self._weights.add(node)
                if gathers or any(each in self._gathered for each in sources):
                    self._gathered.add(node)
                    return flags if "view" in flags else (*(each for each in flags if each != "collective"), "rerun")
        if _compat.is_tagged_recomputed(node) and not {"collective", "view", "mutates"} & set(flags):
            return (*(each for each in flags if each not in ("random", "index")), "rerun")
        return flags

    def _share(self, node: fx.Node, source: tuple[Any, Any]) -> None:
        """Let a node that is a view, or picks one output of an op, have the value of its source."""
        owner, part = source
        for key in ((owner, part), (owner, None)):
            if key in self._value_of:
                self._value_of[node, None] = self._value_of[key]
                return

    def _values_read(self, node: fx.Node) -> Iterator[int]:
        for each in node.all_input_nodes:
            if (each, None) in self._value_of:
                yield self._value_of[each, None]
            else:  # all outputs of an op at once
                yield from (value for (owner, _), value in self._value_of.items() if owner is each)

    def _new_value(self, node: fx.Node, part: int | None, born: int, kind: str) -> int:
        self._value_of[node, part] = len(self._values)
        size, name = _bytes(_tensors_of(node)[part]), str(node.target) if born >= 0 else node.name
        self._values.append(Value(size, kind, name, born, born + 1))
        return len(self._values) - 1

    # Lifetimes and costs.

    def _set_ends(self, num_forward: int) -> None:
        """Set when each value is dropped: after its last use in forward or backward, or never if it is an output."""
        last_use: dict[int, int] = {}
        for index, op in enumerate(self._ops):
            for value in op.inputs:
                if index < num_forward or self._values[value].born >= num_forward:
                    last_use[value] = index
        handed_out = self._handed_out()
        for number, facts in enumerate(self._values):
            end = len(self._ops) if number in handed_out or facts.born < 0 else last_use.get(number, facts.born) + 1
            kind = handed_out.get(number, facts.kind)
            self._values[number] = replace(facts, dropped=max(end, facts.born + 1), kind=kind)

    def _set_seconds(self, num_forward: int) -> None:
        """Set each op's seconds. Values that a fused op reads from or leaves in registers move no bytes."""
        is_inline, _ = inlined(self._ops, self._values, num_forward)
        for index, (op, node) in enumerate(zip(self._ops, self._nodes, strict=True)):
            touched = {*op.inputs, *op.outputs}
            if "fused" in op.flags:
                moved = sum(self._values[value].bytes for value in touched if not is_inline[value])
            else:
                moved = sum(sum(map(_bytes, _tensors_of(each).values())) for each in (*node.all_input_nodes, node))
            dtype = next((value.dtype for value in _tensors_of(node).values()), None)
            alone = RawOp(op.name, -1, (), (), (), op.flags, op.flops, moved, dtype, forward_op=-1)
            self._ops[index] = replace(op, seconds=self._seconds_of(node, alone))

    def _handed_out(self) -> dict[int, str]:
        """Return the graph's outputs, as "gradient" if of a parameter: the backward's are in the order of inputs."""
        results = list(_flat(self._output.args))
        num_inputs = sum("tangents" not in str(node.target) for node in self._inputs)
        first_gradient = len(results) - num_inputs
        kinds: dict[int, str] = {}
        for position, node in enumerate(results):
            value = self._value_of.get((node, None), -1)
            if value >= 0 and self._values[value].born >= 0:
                is_gradient = position >= first_gradient and self._is_parameter(position - first_gradient)
                kinds[value] = "gradient" if is_gradient else kinds.get(value, "activation")
        return kinds

    def _saves(self, num_forward: int) -> list[Save]:
        """Return a save for each forward value that the backward reads."""
        reads: dict[int, list[int]] = {}
        for index, op in enumerate(self._ops[num_forward:], num_forward):
            for value in op.inputs:
                if 0 <= self._values[value].born < num_forward:
                    reads.setdefault(value, []).append(index)
        saves = []
        for value, readers in sorted(reads.items()):
            born = self._values[value].born
            saves.append(Save(value, self._ops[born].call, born + 1, readers[0], readers[-1] + 1))
        return saves

    def _calls(self, num_forward: int) -> list[Call]:
        """Return the calls with their inputs and outputs, which follow from the ops inside and after them."""
        calls = []
        for call in self._stacks.calls:
            inside = self._ops[call.first : call.end]
            made = {value for op in inside for value in op.outputs}
            read = dict.fromkeys(value for op in inside for value in op.inputs if value not in made)
            later = {value for op in self._ops[call.end : num_forward] for value in op.inputs}
            later |= {value for value in made if self._values[value].dropped > num_forward}
            inputs = tuple(value for value in read if self._values[value].born >= 0)
            calls.append(replace(call, inputs=inputs, outputs=tuple(sorted(made & later))))
        return calls


def _downstream(sources: list[fx.Node]) -> set[fx.Node]:
    reached, pending = set(sources), list(sources)
    while pending:
        for user in pending.pop().users:
            if user not in reached:
                reached.add(user)
                pending.append(user)
    return reached


def _flags(node: fx.Node) -> tuple[str, ...]:
    name = str(node.target)
    if name in _UNSAID_VIEWS:
        return ("view",)
    if name in _SEEDS:
        return ("random",)
    if not _compat.is_op_overload(node.target):
        return ("custom",) if any(kernel in name for kernel in _OWN_KERNELS) else ("opaque",)
    return facts_of(node.target).flags_of_call(node.args, node.kwargs)


def _tensors_of(node: fx.Node) -> dict[int | None, Tensor]:
    """Return the fake tensors that a node returns, by their position in a tuple; None for a single one."""
    value = _compat.value_of(node)
    items: Any = enumerate(value) if isinstance(value, tuple | list) else [(None, value)]
    return {part: item for part, item in items if isinstance(item, Tensor)}


def _tensors_among_inputs(node: fx.Node) -> list[fx.Node]:
    return [each for each in node.all_input_nodes if isinstance(_compat.value_of(each), Tensor)]


def _bytes(value: Tensor) -> int:
    return int(_compat.hint(value.numel()) or 0) * value.element_size()


def _flat(item: Any) -> Iterator[Any]:
    if isinstance(item, tuple | list):
        for each in item:
            yield from _flat(each)
    else:
        yield item


_ROUNDS = 5
_measured: dict[tuple[str, ...], float | None] = {}


def node_costs(hardware: Hardware, device: torch.device) -> NodeSeconds:
    """Return a function that gives a node's seconds on a device: measured if possible, else predicted."""

    def seconds(node: fx.Node, op: RawOp) -> float:
        if "fused" in op.flags:
            return op.moved_bytes / (hardware.memory_bytes_per_s * MEMORY_EFFICIENCY)
        if device.type != "cpu" and not {"random", "opaque", "collective"} & set(op.flags):
            measured_s = _measured_s(node, device)
            if measured_s is not None:
                return measured_s
        return predicted_s(op, hardware)

    return seconds


def _measured_s(node: fx.Node, device: torch.device) -> float | None:
    """Return a node's measured seconds, or None if it cannot run alone (out of memory, no kernel)."""
    parts = (node.target, device, *_compat.node_arguments(node, _described))
    key = tuple(map(str, parts))
    if key not in _measured:
        try:
            with _compat.without_fake_mode(), torch.random.fork_rng([device], device_type=device.type), torch.no_grad():
                _measured[key] = _run(node, device)
        except (RuntimeError, TypeError, ValueError):  # RuntimeError: also out of memory, or no kernel
            _measured[key] = None
    return _measured[key]


def _run(node: fx.Node, device: torch.device) -> float:
    args, kwargs = _compat.node_arguments(node, lambda value: _filled(value, device))
    target: Any = node.target
    clock = clock_for(device)
    target(*args, **kwargs)
    marks = []
    for _ in range(_ROUNDS):
        before = clock.mark()
        target(*args, **kwargs)
        marks.append((before, clock.mark()))
    return median(clock.seconds(marks))


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(map(_compat.hint, value.shape)), tuple(map(_compat.hint, value.stride()))
    return _compat.hint(value)


def _filled(value: Any, device: torch.device) -> Any:
    """Return a tensor of a node's shape: normally distributed, or zeros for integers, which are valid indices."""
    if not isinstance(value, Tensor):
        return _compat.hint(value)
    if value.device.type == "cpu":
        device = value.device
    shape, strides = list(map(_compat.hint, value.shape)), list(map(_compat.hint, value.stride()))
    made = torch.empty_strided(shape, strides, dtype=value.dtype, device=device)
    return made.normal_() if value.is_floating_point() else made.zero_()
