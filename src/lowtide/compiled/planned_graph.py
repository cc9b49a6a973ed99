"""One Dynamo graph, compiled in one or more variants that save different tensors for the backward.

Dynamo compiles equal blocks once and calls the result for each of them. Here that result is a `PlannedGraph`. Whenever
it is called it gets from its `Session` which variant to run, so that equal blocks can save more or less depending on
their position in the step. A variant is compiled when it is first needed.

- **Carrying out a choice.** `tag` marks every forward node of AOTAutograd's joint graph as saved or recomputed, and
  torch's own partitioner splits the graph accordingly.
- **Where a step ends.** `StepCalls` records the graphs that a step has called. A step is all calls until a backward
  begins, of one forward or of several. A forward that failed, or whose loss was deleted, does not count.
- **Offload.** A compiled graph hands all its saved tensors to autograd when its forward ends. `BlockOffload` catches
  some of them with saved-tensor hooks and copies them to host memory while the next block runs; in the backward they
  are copied back one block ahead. A block can therefore move what the link carries during one block's forward.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from lowtide import _compat
from lowtide.errors import CapacityError
from lowtide.graph.arrays import recompute_s
from lowtide.graph.step_graph import StepGraph
from lowtide.solvers.shared_budget import Variant, variants_of
from lowtide.store.activation_store import ActivationStore
from lowtide.store.offload import KeptHere, KeptInStore, restore
from lowtide.store.storage_units import is_left_alone
from lowtide.tracing.devices import present_device
from lowtide.tracing.joint_graph import JointStep, joint_step, node_costs

if TYPE_CHECKING:
    from lowtide.compiled.session import Session


def tag(step: JointStep, keeps: Container[int]) -> None:
    """Mark each forward node as saved or recomputed, for torch's partitioner. `keeps` are the saved ops.

    Nodes inside a user's own checkpoint regions keep their marks. Views are not saved: they are made again from their
    base.
    """
    recomputable = step.graph.needs.recomputable
    for index, (node, parts) in enumerate(zip(step.nodes, step.parts, strict=True)):
        is_saved = index in keeps or not recomputable[index]
        for each in (node, *parts):
            _compat.set_tag(each, CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.MUST_RECOMPUTE)
    for view in step.views:
        _compat.set_tag(view, CheckpointPolicy.MUST_RECOMPUTE)


class _BackwardHook:
    """Prehook on the autograd nodes of one call. It is freed with them, so it also shows whether they are alive."""

    def __init__(self, calls: StepCalls) -> None:
        self._calls = calls

    def __call__(self, gradients: Any) -> None:
        self._calls.is_over = True


@dataclass
class _Call:
    number: int
    hook: weakref.ref[_BackwardHook] | None = None

    @property
    def is_alive(self) -> bool:
        return self.hook is not None and self.hook() is not None


class StepCalls:
    """The graph numbers of the calls made so far in this step. `is_over` is set when a backward begins."""

    def __init__(self) -> None:
        self.is_over = False
        self._calls: list[_Call] = []

    @property
    def numbers(self) -> tuple[int, ...]:
        """Graph numbers of the calls whose autograd nodes are alive, in order."""
        if not self.is_over:
            self._calls = [call for call in self._calls if call.is_alive]
        return tuple(call.number for call in self._calls)

    def begin(self, number: int) -> Callable[[Any], None]:
        """Record a call. Call the returned function with the graph's outputs when it has run."""
        call = _Call(number)
        self._calls.append(call)

        def end(outputs: Any) -> None:
            hook = _BackwardHook(self)
            nodes = {each.grad_fn for each in outputs if isinstance(each, Tensor)}
            for node in filter(None, nodes):
                node.register_prehook(hook)
            call.hook = weakref.ref(hook)

        return end

    def take(self) -> tuple[int, ...]:
        """Return the calls of the finished step, and start a new one."""
        numbers = self.numbers
        self._calls, self.is_over = [], False
        return numbers


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


Keeps = tuple[int, ...] | None
_numbers = itertools.count()
_CPU = torch.device("cpu")


class PlannedGraph:
    """A graph and its compiled variants. `step` is None for a graph without a backward.

    `variants` go from torch's own choice of saved tensors to the smallest; `default` are the ops of the former.
    """

    def __init__(self, session: Session, module: Any, inputs: list[Any], compiler: Callable[..., Any]) -> None:
        self.number = next(_numbers)
        self.session = session
        self.step: StepGraph | None = None
        self.variants: tuple[Variant, ...] = ()
        self.default: tuple[int, ...] = ()
        self._module, self._compiler = _compat.copied_module(module), compiler
        # Fake tensors: this object outlives the step, and must not keep its tensors.
        self._inputs = _compat.fake_inputs(module, inputs)
        self._is_static = _compat.static_inputs(module)
        tensors = [each if isinstance(each, Tensor) else None for each in inputs]
        self.device = next((each.device for each in tensors if each is not None and each.device.type != "cpu"), _CPU)
        sizes = [0 if each is None else each.nbytes for each in tensors]
        self.static_bytes = sum(itertools.compress(sizes, self._is_static))  # parameters and buffers
        self.batch_bytes = sum(sizes) - self.static_bytes
        self._seen: dict[int, weakref.ref[nn.Parameter]] = {}
        self._context = _compat.TracingContext()
        self._compiled: dict[Keeps, Callable[..., Any]] = {}
        self._plain: Callable[..., Any] | None = None
        with session.watch.compiling():
            first = compiler(module, inputs, self._first_partition)
        if self.step is None:
            self._plain = first  # a forward without a backward
        else:
            self._compiled[self._first_keeps] = first

    def __call__(self, *args: Any) -> Any:
        if self._plain is not None:
            return self._plain(*args)
        for arg in args:
            if isinstance(arg, nn.Parameter) and id(arg) not in self._seen:
                self._seen[id(arg)] = weakref.ref(arg)
        run = self.session.next_run(self)
        keeps = run.variant.keeps
        if keeps not in self._compiled:
            self._compiled[keeps] = self._compile(keeps)
        with run.context:
            outputs = self._compiled[keeps](*args)
        run.end(outputs)
        return outputs

    def has_run_with(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether one of these parameters was ever an input."""
        known = ((self._seen.get(id(each)), each) for each in parameters)
        return any(reference is not None and reference() is each for reference, each in known)

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

    @property
    def num_compiled(self) -> int:
        return len(self._compiled)

    # Compiling.

    def _compile(self, keeps: Keeps) -> Callable[..., Any]:
        """Compile another variant, which saves the outputs of the ops `keeps`; None: torch's own choice."""

        def partition(joint: Any, inputs: Any, **facts: Any) -> Any:
            if keeps is not None:
                tag(self._read(joint), frozenset(keeps))
            return _compat.torch_partition(joint, inputs, **facts)

        self.session.is_compiling()
        with self._context, self.session.watch.compiling():
            return self._compiler(_compat.copied_module(self._module), self._inputs, partition)

    def _first_partition(self, joint: Any, inputs: Any, **facts: Any) -> Any:
        """Read the joint graph and torch's own choice of saved values, then partition as the session chooses."""
        forward, backward = _compat.torch_partition(_compat.copied_module(joint), inputs, **facts)
        self.session.is_compiling()
        with self.session.watch.planning():
            read = self._read(joint)
            names = _compat.saved_names(forward, facts["num_fwd_outputs"])
            needs = read.graph.needs
            saved = frozenset(read.makers[name] for name in names if name in read.makers)
            self.default = needs.keeps_of(needs.derive(saved))
            self.step = read.graph
            self.variants = variants_of(read.graph, self.default)
            self._first_keeps = self.session.first_variant(self).keeps
            if self._first_keeps is None:
                return forward, backward
            tag(read, frozenset(self._first_keeps))
        return _compat.torch_partition(joint, inputs, **facts)

    def _read(self, joint: Any) -> JointStep:
        hardware = present_device(self.device)

        def is_parameter(position: int) -> bool:
            return position < len(self._is_static) and self._is_static[position]

        return joint_step(joint.graph, hardware, node_costs(hardware, self.device), is_parameter)
