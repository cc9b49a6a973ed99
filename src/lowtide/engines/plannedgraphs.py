"""One graph of Dynamo's, compiled in as many variants as its budget asks for.

Dynamo compiles equal blocks once and calls the result for each of them. What it calls here is a `PlannedGraph`, which
asks its session what to run this time; a variant is compiled when it is first needed.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowtide.engines import _compat
from lowtide.engines.tagging import tag
from lowtide.graph import StepGraph
from lowtide.graph.needs import recompute_s
from lowtide.solvers.sharing import Variant, variants_of
from lowtide.tracing.devices import present_device
from lowtide.tracing.joint import JointStep, joint_step
from lowtide.tracing.nodecosts import node_costs

if TYPE_CHECKING:
    from lowtide.engines.sessions import Session

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
