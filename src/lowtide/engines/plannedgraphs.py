"""One graph of Dynamo's, compiled in as many variants as its budget asks for.

Dynamo compiles equal blocks once and calls the result for each of them. What it calls here is a `PlannedGraph`, which
asks its session what to run this time; a variant is compiled when it is first needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
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


class PlannedGraph:
    """A graph that a session runs: `step` is known once it was compiled for training the first time."""

    def __init__(self, session: Session, module: Any, inputs: list[Any], compiler: Callable[..., Any]) -> None:
        self.number = next(_numbers)
        self.session = session
        self.step: StepGraph | None = None
        self.variants: tuple[Variant, ...] = ()
        self.default: tuple[int, ...] = ()
        self.parameter_ids: set[int] = set()
        self._module, self._inputs, self._compiler = _compat.copied_module(module), inputs, compiler
        self._is_static = _compat.static_inputs(module)
        self._context = _compat.TracingContext()
        self._compiled: dict[Keeps, Callable[..., Any]] = {}
        self._plain: Callable[..., Any] | None = None
        first = compiler(module, inputs, self._first_partition)
        if self.step is None:
            self._plain = first  # a forward without a backward
        else:
            self._compiled[self._first_keeps] = first

    def __call__(self, *args: Any) -> Any:
        if self._plain is not None:
            return self._plain(*args)
        self.parameter_ids.update(id(arg) for arg in args if isinstance(arg, nn.Parameter))
        variant, context = self.session.next_run(self)
        if variant.keeps not in self._compiled:
            self._compiled[variant.keeps] = self._compile(variant.keeps)
        with context:
            return self._compiled[variant.keeps](*args)

    @property
    def forward_s(self) -> float:
        """Seconds that one forward is predicted to take."""
        assert self.step is not None
        return sum(map(recompute_s, self.step.ops[: self.step.num_forward]))

    @property
    def num_compiled(self) -> int:
        return len(self._compiled)

    def static_bytes(self) -> int:
        """Bytes of the parameters and buffers among the inputs."""
        sizes = zip(self._inputs, self._is_static, strict=False)
        return sum(each.nbytes for each, is_static in sizes if is_static and isinstance(each, Tensor))

    @property
    def device(self) -> torch.device:
        tensors = [each for each in self._inputs if isinstance(each, Tensor)]
        return next((each.device for each in tensors if each.device.type != "cpu"), torch.device("cpu"))

    # Compiling.

    def _compile(self, keeps: Keeps) -> Callable[..., Any]:
        """Compile once more, with other values saved."""

        def partition(joint: Any, inputs: Any, **facts: Any) -> Any:
            if keeps is not None:
                tag(self._read(joint), frozenset(keeps))
            return _compat.torch_partition(joint, inputs, **facts)

        self.session.is_compiling()
        with self._context:
            return self._compiler(_compat.copied_module(self._module), self._inputs, partition)

    def _first_partition(self, joint: Any, inputs: Any, **facts: Any) -> Any:
        """See what there is to decide, and what torch would do; then let the session decide."""
        forward, backward = _compat.torch_partition(_compat.copied_module(joint), inputs, **facts)
        read = self._read(joint)
        names = _compat.saved_names(forward, facts["num_fwd_outputs"])
        needs = read.graph.needs
        saved = frozenset(read.makers[name] for name in names if name in read.makers)
        self.default = needs.keeps_of(needs.derive(saved))
        self.step = read.graph
        self.variants = variants_of(read.graph, self.default)
        self.session.is_compiling()
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
