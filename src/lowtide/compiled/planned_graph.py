"""A compiled plan as tags on a joint graph, which torch's own partitioner carries out.

Which compiled graphs a step has called so far, and when it is over.

A step is all calls until a backward begins, be they of one forward or of several that share a backward. A call counts
while something can still run its backward: a forward that failed, or whose loss was thrown away, leaves nothing behind.

What a compiled block saves, moved to host memory while the next blocks run.

A compiled graph hands everything it saves to autograd at once, when its forward ends; saved-tensor hooks see it there,
and the copies run beside the blocks that follow. In the backward the store brings back what the block before needs
while a block runs. So each block may give away what the link carries during the next block's forward, and no more.

One graph of Dynamo's, compiled in as many variants as its budget asks for.

Dynamo compiles equal blocks once and calls the result for each of them. What it calls here is a `PlannedGraph`, which
asks its session what to run this time; a variant is compiled when it is first needed.
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
    """Mark each forward node as saved or recomputed. A user's own checkpoint regions keep their marks.

    Views are never saved: those of a value that is, are made again from it.
    """
    recomputable = step.graph.needs.recomputable
    for index, (node, parts) in enumerate(zip(step.nodes, step.parts, strict=True)):
        is_saved = index in keeps or not recomputable[index]
        for each in (node, *parts):
            _compat.set_tag(each, CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.MUST_RECOMPUTE)
    for view in step.views:
        _compat.set_tag(view, CheckpointPolicy.MUST_RECOMPUTE)


class _Awaited:
    """Hangs on the autograd nodes of one call: called when the backward reaches them, gone when they are."""

    def __init__(self, calls: StepCalls) -> None:
        self._calls = calls

    def __call__(self, gradients: Any) -> None:
        self._calls.is_over = True


@dataclass
class _Call:
    number: int
    awaited: weakref.ref[_Awaited] | None = None

    @property
    def is_alive(self) -> bool:
        return self.awaited is not None and self.awaited() is not None


class StepCalls:
    """The calls of the step under way, by the numbers of their graphs."""

    def __init__(self) -> None:
        self.is_over = False
        self._calls: list[_Call] = []

    @property
    def numbers(self) -> tuple[int, ...]:
        """Calls whose backward is still to come."""
        if not self.is_over:
            self._calls = [call for call in self._calls if call.is_alive]
        return tuple(call.number for call in self._calls)

    def begin(self, number: int) -> Callable[[Any], None]:
        """A graph is about to run; what comes back is to be called with what it gave."""
        call = _Call(number)
        self._calls.append(call)

        def end(outputs: Any) -> None:
            awaited = _Awaited(self)
            nodes = {each.grad_fn for each in outputs if isinstance(each, Tensor)}
            for node in filter(None, nodes):
                node.register_prehook(awaited)
            call.awaited = weakref.ref(awaited)

        return end

    def take(self) -> tuple[int, ...]:
        """The calls of a step that is over, and a new one begins."""
        found = self.numbers
        self._calls, self.is_over = [], False
        return found


class BlockOffload(torch.autograd.graph.saved_tensors_hooks):
    """Hooks around one call of a compiled block: of what it saves, tensors of the sizes `moved` go to `store`."""

    def __init__(self, store: ActivationStore, moved: tuple[int, ...]) -> None:
        left = Counter(moved)

        @_compat.disable_dynamo
        def pack(tensor: Tensor) -> Any:
            if not left[tensor.nbytes] or is_left_alone(tensor) or (tensor.is_leaf and tensor.requires_grad):
                return KeptHere(tensor)
            try:
                kept = KeptInStore(tensor, store)
            except CapacityError:  # several forwards wait for their backward
                return KeptHere(tensor)
            left[tensor.nbytes] -= 1
            return kept

        super().__init__(pack, restore)


Keeps = tuple[int, ...] | None
_numbers = itertools.count()
_CPU = torch.device("cpu")


class PlannedGraph:
    """A graph that a session runs: `step` is known once it was compiled for training the first time."""

    def __init__(self, session: Session, module: Any, inputs: list[Any], compiler: Callable[..., Any]) -> None:
        self.number = next(_numbers)
        self.session = session
        self.step: StepGraph | None = None
        self.variants: tuple[Variant, ...] = ()
        self.default: tuple[int, ...] = ()
        self._module, self._compiler = _compat.copied_module(module), compiler
        # Stand-ins: the real ones are a step's own, and this graph outlives it.
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
        """Whether one of these was ever among its inputs."""
        known = ((self._seen.get(id(each)), each) for each in parameters)
        return any(found is not None and found() is each for found, each in known)

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
        """Bytes of what the forward gives to whoever called it."""
        assert self.step is not None
        return self.step.handed_out_bytes

    @property
    def num_compiled(self) -> int:
        return len(self._compiled)

    # Compiling.

    def _compile(self, keeps: Keeps) -> Callable[..., Any]:
        """Compile once more, with other values saved."""

        def partition(joint: Any, inputs: Any, **facts: Any) -> Any:
            if keeps is not None:
                tag(self._read(joint), frozenset(keeps))
            return _compat.torch_partition(joint, inputs, **facts)

        self.session.is_compiling()
        with self._context, self.session.watch.compiling():
            return self._compiler(_compat.copied_module(self._module), self._inputs, partition)

    def _first_partition(self, joint: Any, inputs: Any, **facts: Any) -> Any:
        """See what there is to decide, and what torch would do; then let the session decide."""
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
