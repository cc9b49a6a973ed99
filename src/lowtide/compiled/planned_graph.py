"""One Dynamo graph, compiled in one or more variants that save different tensors for the backward.

Dynamo compiles equal blocks once and calls the result for each of them. Here that result is a `PlannedGraph`. In
every call it asks the `Session` of the calling model which variant to run, so that equal blocks can save more or less
depending on their position in the step. A variant is compiled when it is first needed. Equal blocks of several models
share a graph and its variants.

- **Variants.** They go from what torch's partitioner saves by default to the fewest bytes; some are what torch's
  partitioner saves under an `activation_memory_budget`.
- **Compiling one.** `tag` marks every forward node of AOTAutograd's joint graph as saved or recomputed, and torch's
  own partitioner splits the graph accordingly.
- **Offload.** A compiled graph hands all its saved tensors to autograd when its forward ends. `BlockOffload` catches
  some of them with saved-tensor hooks and copies them to host memory while the next block runs; in the backward they
  are copied back one block ahead. So a block can move as many bytes as the link carries during one block's forward.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import CheckpointPolicy

from lowtide import _compat
from lowtide.distributed.agreement import hash_of
from lowtide.errors import CapacityError
from lowtide.graph.arrays import recompute_s
from lowtide.graph.step_graph import StepGraph
from lowtide.solvers.shared_budget import Variant, variant_of, variants_of
from lowtide.store.activation_store import ActivationStore
from lowtide.store.offload import KeptHere, KeptInStore, restore
from lowtide.store.storage_units import is_left_alone
from lowtide.tracing.devices import present_device
from lowtide.tracing.joint_graph import JointStep, joint_step, node_costs

if TYPE_CHECKING:
    from lowtide.compiled.session import Session


def tag(step: JointStep, keeps: Container[int]) -> None:
    """Mark each forward node as saved or recomputed, for torch's partitioner. `keeps` are the saved ops.

    Nodes inside a user's own checkpoint regions keep their marks. Views of computed values are not saved: they are made
    again from their base. So are views of inputs that a recomputed node reads; others stay torch's choice, as the base
    may be much larger than what is saved in its place. With no op saved, the result is what torch makes of a checkpoint
    of the whole graph.
    """
    needs = step.graph.needs
    for index, (node, parts) in enumerate(zip(step.nodes, step.parts, strict=True)):
        is_saved = (index in keeps and not needs.is_rerun[index]) or not needs.recomputable[index]
        for each in (node, *parts):
            _compat.set_tag(each, CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.MUST_RECOMPUTE)
    for view in reversed(step.views):  # what reads a view comes before it
        if view.name in step.makers or any(map(_compat.is_tagged_recomputed, _readers(view))):
            _compat.set_tag(view, CheckpointPolicy.MUST_RECOMPUTE)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that read a node's result, or one of its several results."""
    for user in node.users:
        if user.target is operator.getitem:
            yield from user.users
        else:
            yield user


def tag_saved(step: JointStep) -> None:
    """Mark the nodes that must not run again as saved, and leave the others to torch's partitioner."""
    recomputable = step.graph.needs.recomputable
    for index, (node, parts) in enumerate(zip(step.nodes, step.parts, strict=True)):
        if not recomputable[index]:
            for each in (node, *parts):
                _compat.set_tag(each, CheckpointPolicy.MUST_SAVE)


def replaying_indices(step: JointStep) -> JointStep:
    """The same step, in which ops that make indices (`topk`, `sort`) may run again."""
    ops = tuple(replace(op, flags=tuple(flag for flag in op.flags if flag != "index")) for op in step.graph.ops)
    return replace(step, graph=replace(step.graph, ops=ops))


def _kept(step: JointStep, names: Iterable[str]) -> tuple[int, ...]:
    """The ops whose outputs are saved if these nodes are, and those that have to be saved as well."""
    needs = step.graph.needs
    return needs.keeps_of(needs.derive(frozenset(step.makers[name] for name in names if name in step.makers)))


class BlockOffload(torch.autograd.graph.saved_tensors_hooks):
    """Saved-tensor hooks around one call of a compiled block: saved tensors of the sizes `moved` go to `store`."""

    def __init__(self, store: ActivationStore, moved: tuple[int, ...]) -> None:
        left = Counter(moved)

        @_compat.disable_dynamo
        def pack(tensor: Tensor) -> Any:
            if not left[tensor.nbytes] or is_left_alone(tensor) or (tensor.is_leaf and tensor.requires_grad):
                return KeptHere(tensor)
            try:
                kept = KeptInStore(tensor, store)
            except CapacityError:  # several forwards have tensors in the store
                return KeptHere(tensor)
            left[tensor.nbytes] -= 1
            return kept

        super().__init__(pack, restore)


# Values of torch's `activation_memory_budget` whose choices are among the variants. More cost planning time.
FRACTIONS = (0.9, 0.75, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
# Torch's partitioner is asked for them in joint graphs of up to this many nodes: a block has some hundreds. In graphs
# of many layers it would take longer than compiling. A limit in seconds would depend on what else runs, and the first
# graph of a process spends seconds on imports.
_MOST_NODES = 800
_numbers = itertools.count()
_CPU = torch.device("cpu")


class PlannedGraph:
    """A graph and its compiled variants. `step` is None for a graph without a backward.

    `variants` go from torch's own choice of saved tensors to the smallest; `default` are the ops of the former.
    `torch_ways` are what torch's partitioner chooses at various values of its `activation_memory_budget`. `replayed`
    recomputes indices too, for budgets that hold nothing else; None if the smallest variant saves none.
    """

    def __init__(
        self,
        session_of: Callable[[], Session],
        module: Any,
        inputs: list[Any],
        compiler: Callable[..., Any],
    ) -> None:
        self.number = next(_numbers)
        self._session_of = session_of
        self.functions = _compat.traced_functions()
        self.step: StepGraph | None = None
        self.variants: tuple[Variant, ...] = ()
        self.torch_ways: dict[float, Variant] = {}
        self.replayed: Variant | None = None
        self.default: tuple[int, ...] = ()
        self._module, self._compiler = _compat.copied_module(module), compiler
        # Fake tensors: this object outlives the step, and must not keep its tensors.
        self._inputs = _compat.FakeInputs(module, inputs)
        self._symbolic = self._inputs.symbolic
        self._is_static = _compat.static_inputs(module)
        self._parameter_positions: list[int] | None = None  # positions among the inputs, known when it is first called
        self._first_tensor = next((index for index, each in enumerate(inputs) if isinstance(each, Tensor)), None)
        tensors = [each if isinstance(each, Tensor) else None for each in inputs]
        self.device = next((each.device for each in tensors if each is not None and each.device.type != "cpu"), _CPU)
        sizes = [0 if each is None else _compat.local_bytes(each) for each in tensors]
        self.static_bytes = sum(itertools.compress(sizes, self._is_static))  # parameters and buffers
        self.batch_bytes = sum(sizes) - self.static_bytes
        self._context = _compat.TracingContext()
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._last: tuple[Variant | None, Callable[..., Any]] = None, lambda: None  # that ran: most calls run the same
        self._plain: Callable[..., Any] | None = None
        with session_of().compiling():
            first = compiler(module, inputs, self._first_partition)
        if self.step is None:
            self._plain = first  # a forward without a backward
        else:
            self._compiled[self._first.key] = first

    def __call__(self, *args: Any) -> Any:
        session = self._session_of()
        session.num_graph_calls += 1
        if self._plain is not None:
            return self._plain(*args)
        # DDP's own compiler calls graphs with fake tensors, to see the strides of outputs.
        if self._first_tensor is not None and _compat.is_fake(args[self._first_tensor]):
            return self._variant(self._first)(*args)
        if self._parameter_positions is None:  # Dynamo's guards keep the classes of inputs
            self._parameter_positions = [index for index, each in enumerate(args) if isinstance(each, nn.Parameter)]
        session.see([args[index] for index in self._parameter_positions])
        variant = None if self._symbolic else session.repeated_variant(self)
        if variant is not None:
            return self._variant(variant)(*args)
        run = session.next_run(self, sum([args[position].nbytes for position in self._symbolic]))
        compiled = self._variant(run.variant)
        with run.context:
            outputs = compiled(*args)
        run.end(outputs)
        return outputs

    @property
    def forward_s(self) -> float:
        """Seconds that one forward is predicted to take."""
        assert self.step is not None
        return sum(map(recompute_s, self.step.ops[: self.step.num_forward]))

    @property
    def step_s(self) -> float:
        """Seconds that forward and backward are predicted to take, with nothing recomputed."""
        return 0.0 if self.step is None else self.step.step_s

    @property
    def handed_out_bytes(self) -> int:
        """Bytes of the forward's outputs."""
        assert self.step is not None
        return self.step.handed_out_bytes

    @cached_property
    def has_collectives(self) -> bool:
        """Whether forward or backward communicates with other ranks."""
        return self.step is not None and any("collective" in op.flags for op in self.step.ops)

    @cached_property
    def identity(self) -> str:
        """A hash that is equal on ranks which compiled the same code for the same shapes, or for symbolic ones."""
        assert self.step is not None
        sizes = [] if self._symbolic else [value.bytes for value in self.step.values]
        return hash_of([[op.name for op in self.step.ops], sizes, self.default])

    # Compiling.

    def _variant(self, variant: Variant) -> Callable[..., Any]:
        """The compiled code of a variant, compiled when it is first needed."""
        last, compiled = self._last  # read once: other threads run other models' variants of this graph
        if variant is not last:
            if variant.key not in self._compiled:
                self._compiled[variant.key] = self._compile(variant)
            compiled = self._compiled[variant.key]
            self._last = variant, compiled
        return compiled

    def is_compiled(self, variant: Variant) -> bool:
        return variant.key in self._compiled

    def _compile(self, variant: Variant) -> Callable[..., Any]:
        def partition(joint: Any, inputs: Any, **facts: Any) -> Any:
            if variant.keeps is None:
                return _compat.torch_partition(joint, inputs, **facts)
            _compat.simplify_joint(joint)
            return self._split(self._read(joint), variant, joint, inputs, facts)

        def compiled() -> Callable[..., Any]:
            return self._compiler(_compat.copied_module(self._module), self._inputs.again(), partition)

        with _compat.compile_lock(), self._context, self._session_of().compiling():
            return _compat.compiled_again(compiled)

    def _split(self, read: JointStep, variant: Variant, joint: Any, inputs: Any, facts: dict[str, Any]) -> Any:
        """Split a simplified joint graph into forward and backward as a variant says."""
        if variant.replays_indices:
            read = replaying_indices(read)
        if variant.fraction is not None:
            tag_saved(read)
        else:
            tag(read, frozenset(variant.keeps or ()))
        return _compat.torch_partition(joint, inputs, fraction=variant.fraction, is_simplified=True, **facts)

    def _first_partition(self, joint: Any, inputs: Any, **facts: Any) -> Any:
        """Read the joint graph and torch's own choice of saved values, then partition as the session chooses."""
        session = self._session_of()
        _compat.simplify_joint(joint)
        with session.watch.planning():
            read = self._read(joint)
            self.step = read.graph

        def plan(partition: _compat.Partition) -> bool:
            with session.watch.planning():
                self._plan(read, joint, session, partition.saved_names)
                if self._first.keeps is None:
                    return True
                is_special = self._first.fraction is not None or self._first.replays_indices
                if is_special or is_tagged or any(read.graph.needs.is_rerun):
                    return False  # torch reads some tags before it comes here
                tag(read, frozenset(self._first.keeps))
                return partition.follow_tags()

        is_tagged = any(_compat.PARTITIONER_TAG in node.meta for node in joint.graph.nodes)
        with _compat.restored_tags(joint.graph):
            began = session.watch.now
            parts = _compat.partition_if_accepted(joint, inputs, plan, **facts)
        if not self.variants:  # nothing to choose: torch was not asked
            self._plan(read, joint, session, lambda fraction: [])
        if parts is not None:
            return parts
        session.watch.plan_since(began)
        return self._split(read, self._first, joint, inputs, facts)

    def _plan(
        self, read: JointStep, joint: Any, session: Session, saved_names: Callable[[float | None], list[str]]
    ) -> None:
        """Set the variants, and the first one that is compiled."""
        self.default = _kept(read, saved_names(None))
        if len(joint.graph.nodes) <= _MOST_NODES:
            with _compat.restored_tags(joint.graph):
                self.torch_ways = self._torch_ways(read, saved_names)
        self.variants = variants_of(read.graph, self.default, list(self.torch_ways.values()))
        self.replayed = self._replayed(read)
        self._first = session.first_variant(self)

    def _torch_ways(self, read: JointStep, saved_names: Callable[[float | None], list[str]]) -> dict[float, Variant]:
        """What torch's own partitioner saves at each fraction; equal choices once, with the largest fraction."""
        found: dict[tuple[int, ...], tuple[float, Variant]] = {}
        needs = read.graph.needs
        default_s = needs.seconds_of(needs.derive(frozenset(self.default)))
        tag_saved(read)
        for fraction in FRACTIONS:
            keeps = _kept(read, saved_names(fraction))
            if keeps != self.default and keeps not in found:
                variant = variant_of(read.graph, keeps, keeps, default_s)
                found[keeps] = fraction, replace(variant, fraction=fraction)
        return dict(found.values())

    def _replayed(self, read: JointStep) -> Variant | None:
        """The variant that saves nothing which can be computed again, indices included.

        An index that is chosen differently when it is computed again must not meet values that were saved after it.
        """
        graph, needs = read.graph, read.graph.needs
        choosers = [index for index, op in enumerate(graph.ops[: graph.num_forward]) if "index" in op.flags]
        if not choosers:
            return None
        relaxed = replaying_indices(read).graph
        derived = relaxed.needs.derive(frozenset())
        after: set[int] = set()
        for index, op in enumerate(graph.ops[: graph.num_forward]):
            if index in choosers or not after.isdisjoint(op.inputs):
                after.update(op.outputs)
        if not after.isdisjoint([*derived.saved, *(save.value for save in graph.saves if needs.is_free[save.value])]):
            return None
        keeps = relaxed.needs.keeps_of(derived)
        default_s = needs.seconds_of(needs.derive(frozenset(self.default)))
        variant = replace(variant_of(relaxed, keeps, keeps, default_s), replays_indices=True)
        return variant if variant.saved_bytes < self.variants[-1].saved_bytes else None

    def _read(self, joint: Any) -> JointStep:
        hardware = present_device(self.device)

        def is_parameter(position: int) -> bool:
            return position < len(self._is_static) and self._is_static[position]

        return joint_step(joint.graph, hardware, node_costs(hardware, self.device), is_parameter)
