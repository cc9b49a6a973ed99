"""Plans for inputs of different shapes: which plan a forward uses, and new plans for inputs larger than any before.

A plan holds for the input shapes that it was made for, and for smaller ones. `ShapePlans`, part of each `AppliedPlan`,
selects the plan for the model's input shapes in every forward. Larger inputs are planned for when they first appear,
with the dimensions that grew rounded up, so that each range of shapes is planned for once. `matching_modules` checks
that a plan was made for this model.

`Planner` makes the new plans, here and after a step ran out of memory (`eager.over_budget`), from traces on fake
tensors, which allocate nothing on the device. Inside a forward only the model's inputs are known, not the batch, so
`loss_fn` cannot be traced. Instead, a copy of the model with module objects of its own is traced with a loss that sums
its outputs; the memory of the real loss is taken from the first trace, in proportion to the size of the inputs.

Where several ranks share a plan, a forward cannot plan again: inputs may have grown on one rank only, and the others
would not take part. Larger inputs then run under the plan with the smallest peak, which all ranks have; `handle.step`,
which all ranks call, plans for them together.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import InitVar, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowtide import _compat
from lowtide._compat.fake_tensors import largest_shapes
from lowtide.distributed.agreement import plan_of_first
from lowtide.distributed.ranks import ALONE, Ranks
from lowtide.eager.calls import Decisions
from lowtide.eager.handle import plain_forward_of
from lowtide.errors import InfeasibleBudgetError, LowtideError, PlanError
from lowtide.graph.step_graph import Split, StepGraph
from lowtide.plans.step_plan import Plan, PlannedModule
from lowtide.replay.arguments import map_tensors, tensors_in
from lowtide.solvers.compression import lossy_codecs
from lowtide.solvers.solve import ShortlistedPlan, search_for, shortlist, solve
from lowtide.split.split_forward import splitting
from lowtide.tracing.trace import output_sum_loss, trace
from lowtide.units import check_seconds, format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from lowtide.eager.plan_handle import AppliedPlan


def matching_modules(model: nn.Module, plan: Plan) -> dict[str, nn.Module]:
    """The model's modules by path. Raises `PlanError` with what differs if the plan was made for another model."""
    modules = dict(model.named_modules(remove_duplicate=False))
    recomputed = [path for region in plan.regions for path in region.paths]
    named = [*(each.path for each in plan.moves), *plan.choosers, *(each.path for each in plan.splits)]
    paths = dict.fromkeys([*recomputed, *named, *(each.path for each in plan.forwards)])
    missing = [path for path in paths if path not in modules]
    if missing:
        raise PlanError(
            f"the plan recomputes, moves or keeps values of {missing[0]!r}, and this model has no such module: it is "
            f"for another. {len(missing)} of its {len(paths)} modules are missing, such as {', '.join(missing[:3])}"
        )
    for planned in plan.modules:
        if planned.path in modules:
            difference = _difference(planned, modules[planned.path])
            if difference is not None:
                raise PlanError(
                    f"the plan was made for another model: {planned.path or 'the model'} {difference}. "
                    "Plan for this one: lowtide.plan(model, ...)"
                )
    if plan.graph is not None:
        plan.calls(plan.graph)  # raises where a region cannot be recomputed
    return modules


def with_parameters(plan: Plan, model: nn.Module) -> Plan:
    """The plan with parameter counts of its modules, by which `matching_modules` detects a model of another size."""
    modules = dict(model.named_modules(remove_duplicate=False))
    modules_now = tuple(
        replace(planned, num_parameters=count, num_elements=elements)
        for planned in plan.modules
        for count, elements in [_parameters(modules[planned.path])]
    )
    return replace(plan, modules=modules_now)


def _difference(planned: PlannedModule, module: nn.Module) -> str | None:
    # FSDP2 and parametrizations replace a module's class by a subclass of it.
    if planned.kind not in {kind.__name__ for kind in type(module).__mro__}:
        return f"was a {planned.kind} and is a {type(module).__name__} here"
    count, elements = _parameters(module)
    if not count or not planned.num_parameters or (count, elements) == (planned.num_parameters, planned.num_elements):
        return None
    return (
        f"had {planned.num_parameters} parameters of {planned.num_elements:,} elements and has {count} of {elements:,}"
    )


def _parameters(module: nn.Module) -> tuple[int, int]:
    """Number of parameters and of their elements; (0, 0) if they are sharded, as only a part is here."""
    parameters = list(module.parameters())
    if any(_compat.is_sharded(parameter) for parameter in parameters):
        return 0, 0
    return len(parameters), sum(parameter.numel() for parameter in parameters)


logger = logging.getLogger("lowtide")

Shapes = tuple[tuple[int, ...], ...]

_MOST_PLANS = 16  # each takes a trace and a solve; beyond, the largest plan is used for larger inputs
_MOST_REMEMBERED = 4096  # shapes whose plan is looked up without a search


@dataclass(frozen=True)
class PlannedInputs:
    """A plan with the shapes that it covers."""

    plan: Plan
    decisions: Decisions
    inputs: tuple[Shapes, ...] = ()  # of the model; empty if they are unknown, as for a plan from a file
    arguments: tuple[Shapes, ...] = ()  # of `loss_fn`
    graph: StepGraph | None = None  # the traced step


@dataclass(frozen=True)
class Replan:
    """Inputs `seen` that were larger than any plan covered. `is_new` is False if the old plan stayed in use."""

    seen: Shapes
    planned_for: Shapes
    is_new: bool
    seconds: float


class ShapePlans:
    """The plans of a handle, and the selection of one by input shapes."""

    def __init__(self, handle: AppliedPlan, first: PlannedInputs) -> None:
        self.planner: Planner | None = None  # None: larger inputs are not planned for
        self.replans: list[Replan] = []
        self._handle = handle
        self._planned = [first]
        self._chosen: dict[Shapes, PlannedInputs] = {}
        self._lock = threading.RLock()
        self._has_warned = False

    @property
    def all(self) -> list[PlannedInputs]:
        return list(self._planned)

    def become(self, planned: list[PlannedInputs]) -> None:
        """Replace all plans. Forwards that have begun keep theirs."""
        with self._lock:
            self._planned = planned
            self._chosen.clear()

    def decisions_for(self, args: Any, kwargs: dict[str, Any]) -> Decisions:
        """The decisions for a forward of the model with these inputs. Does not raise."""
        if not self._planned[0].inputs:
            return self._handle.decisions  # the shapes of the plan are unknown
        seen = shapes_of((args, kwargs))
        planned = self._chosen.get(seen)
        if planned is None:
            with self._lock:
                planned = self._choose(seen, args, kwargs)
        self._handle.plan = planned.plan
        return planned.decisions

    def for_arguments(self, seen: Shapes) -> PlannedInputs | None:
        """The smallest plan that covers these shapes of `loss_fn`'s arguments."""
        return _smallest([p for p in self._planned if any(covers(shapes, seen) for shapes in p.arguments)])

    def largest(self) -> PlannedInputs:
        return max(self._planned, key=_elements)

    def add(self, planned: PlannedInputs, seen: Shapes, before: Shapes, target: Shapes, seconds: float) -> None:
        """Add a plan for shapes up to `target`, and log that the shapes `seen` exceeded those covered `before`."""
        with self._lock:
            smallest = self.planner.smallest if self.planner is not None else None
            others = [each for each in self._planned if smallest is None or each.plan is not smallest]
            self._planned = [*others, planned]
            self._chosen.clear()
        plan, budget_bytes = planned.plan, self.planner.budget_bytes if self.planner is not None else 0
        self.replans.append(Replan(seen, target, True, seconds))
        _warn(
            seen,
            before,
            "planned again, for up to %s, in %s; peak %s predicted, %s %s; %.1f %% slower predicted",
            describe_shapes(target),
            format_seconds(seconds),
            format_bytes(plan.peak_bytes),
            "within" if plan.peak_bytes <= budget_bytes else "the least there is, and more than",
            format_bytes(budget_bytes),
            100 * plan.slowdown,
        )

    def _choose(self, seen: Shapes, args: Any, kwargs: dict[str, Any]) -> PlannedInputs:
        planned = _smallest([p for p in self._planned if any(covers(shapes, seen) for shapes in p.inputs)])
        if planned is None:
            if self.planner is None:
                self._warn_once(seen)
                planned = self.largest()
            elif is_traced((args, kwargs)):
                return self.largest()  # do not plan inside a trace, a transform or a capture
            else:
                planned = self._plan_again(self.planner, seen, args, kwargs)
        if len(self._chosen) >= _MOST_REMEMBERED:
            self._chosen.clear()
        self._chosen[seen] = planned
        return planned

    def _plan_again(self, planner: Planner, seen: Shapes, args: Any, kwargs: dict[str, Any]) -> PlannedInputs:
        largest, start = self.largest(), time.perf_counter()
        if not planner.ranks.is_alone:
            return self._use_smallest(planner, largest, seen)
        if len(self._planned) >= _MOST_PLANS:
            return self._stay(largest, seen, f"there are {_MOST_PLANS} plans already", start)
        target = rounded_up(seen, largest.inputs[-1])
        try:
            plan, graph, target = planner.for_inputs(target, seen, args, kwargs)
            planned = PlannedInputs(plan, self._handle.take_in(plan), (target,), (), graph)
        except Exception as error:  # the user's forward must run whatever happened here
            return self._stay(largest, seen, f"{type(error).__name__}: {str(error).splitlines()[0][:200]}", start)
        self.add(planned, seen, largest.inputs[-1], target, time.perf_counter() - start)
        return planned

    def _use_smallest(self, planner: Planner, largest: PlannedInputs, seen: Shapes) -> PlannedInputs:
        """The plan with the smallest peak, for inputs that a forward of one rank cannot plan for."""
        planned = next((each for each in self._planned if each.plan is planner.smallest), None)
        if planned is None:
            planned = largest
            if planner.smallest is not None:
                planned = PlannedInputs(planner.smallest, self._handle.take_in(planner.smallest), (seen,), (), None)
            _warn(
                seen,
                largest.inputs[-1],
                "they run under the plan with the smallest peak. handle.step(loss_fn, batch) on every rank, or "
                "more_batches= of lowtide.fit, plans for them",
            )
            self._planned.append(planned)
        return planned

    def _stay(self, largest: PlannedInputs, seen: Shapes, why: str, start: float) -> PlannedInputs:
        left = "they could not be planned for (%s). The plan stays in force, and its peak may not hold"
        _warn(seen, largest.inputs[-1], left, why)
        self.replans.append(Replan(seen, seen, False, time.perf_counter() - start))
        same = replace(largest, inputs=(seen,), arguments=())
        self._planned.append(same)
        return same

    def _warn_once(self, seen: Shapes) -> None:
        if not self._has_warned:
            self._has_warned = True
            first = self._planned[0]
            then = "its peak of %s may not hold. lowtide.fit plans again for larger inputs"
            _warn(seen, first.inputs[-1], then, format_bytes(first.plan.peak_bytes))


def _warn(seen: Shapes, planned: Shapes, what: str, *values: object) -> None:
    """Log that inputs are larger than planned for, and what follows."""
    shapes = describe_shapes(seen), describe_shapes(planned)
    logger.warning(f"inputs of %s are larger than the plan is for (%s): {what}", *shapes, *values)


def shapes_of(tree: Any) -> Shapes:
    """The shapes of the tensors in nested arguments, in order. Numbers, which cannot grow, are left out.

    >>> shapes_of({"input_ids": torch.zeros(8, 128), "num_items_in_batch": torch.tensor(1024)})
    ((8, 128),)
    """
    return tuple(_shape_of(tensor) for tensor in tensors_in(tree) if tensor.ndim)


def _shape_of(tensor: Tensor) -> tuple[int, ...]:
    """The shape of a tensor; of a nested one its number of samples, and the shape of all their rows together."""
    return (tensor.size(0), *tensor.values().shape) if tensor.is_nested else tuple(tensor.shape)


def num_elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)


def covers(planned: Shapes, seen: Shapes) -> bool:
    """Whether `seen` has the same tensors as `planned`, none of them larger in any dimension.

    >>> covers(((8, 128),), ((4, 128),)), covers(((8, 128),), ((4, 256),))
    (True, False)
    """
    return len(planned) == len(seen) and all(
        len(a) == len(b) and all(have >= size for have, size in zip(a, b, strict=True))
        for a, b in zip(planned, seen, strict=True)
    )


def rounded_up(seen: Shapes, planned: Shapes) -> Shapes:
    """`seen`, with each dimension that has outgrown `planned` rounded up to a power of two or one and a half of one.

    >>> rounded_up(((8, 200),), ((16, 128),))
    ((8, 256),)
    """
    if [len(shape) for shape in seen] != [len(shape) for shape in planned]:
        return seen
    return tuple(
        tuple(_bucket(size) if size > have else size for size, have in zip(shape, known, strict=True))
        for shape, known in zip(seen, planned, strict=True)
    )


def _bucket(size: int) -> int:
    power = 1 << (size - 1).bit_length()
    return power * 3 // 4 if size <= power * 3 // 4 else power


def describe_shapes(shapes: Shapes) -> str:
    """The first three shapes as text.

    >>> describe_shapes(((8, 128), (8,)))
    '8 x 128, 8'
    """
    texts = [" x ".join(map(str, shape)) for shape in shapes[:3]]
    return ", ".join([*texts, "..."] if len(shapes) > 3 else texts) or "unknown shapes"


@contextmanager
def recorded_input_shapes(model: nn.Module) -> Iterator[list[Shapes]]:
    """Context manager that lists the input shapes of the model's calls inside it, each once."""
    seen: list[Shapes] = []

    def look(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        shapes = shapes_of((args, kwargs))
        if shapes not in seen:
            seen.append(shapes)

    hook = model.register_forward_pre_hook(look, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()
        seen.sort(key=num_elements)


def is_traced(inputs: Any) -> bool:
    """Whether these inputs belong to a trace, a torch.func transform or a CUDA graph capture, not to a real step."""
    if _compat.under_functorch() or _compat.num_dispatch_modes() > 0:
        return True
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return True
    return any(
        (type(tensor) not in _compat.PLAIN_TYPES and not tensor.is_nested) or tensor.is_meta
        for tensor in tensors_in(inputs)
    )


def _elements(planned: PlannedInputs) -> int:
    return max(map(num_elements, planned.inputs), default=0)


def _smallest(planned: list[PlannedInputs]) -> PlannedInputs | None:
    return min(planned, key=_elements, default=None)


def tensor_spec(tensor: Tensor) -> Tensor:
    """What to keep of a tensor for `tensor_from_spec`: shape and dtype; integer and nested ones as host copies."""
    if tensor.is_nested:
        return tensor.detach().cpu().clone()
    if tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta:
        return torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
    return tensor.detach().to("cpu", copy=True)


def tensor_from_spec(kept: Tensor, device: torch.device) -> Tensor:
    """A tensor like the one that `tensor_spec` was given. Does not change random states."""
    if not kept.is_meta:
        return kept.to(device, copy=True)
    if device.type == "meta":
        return kept
    generator = torch.Generator(device).manual_seed(0)
    made = torch.randn(kept.shape, dtype=kept.dtype, device=device, generator=generator)
    return made.requires_grad_(kept.requires_grad)


@dataclass(frozen=True)
class Limits:
    """What plans may use beside the device, and for how long one is searched for."""

    host: int | str = 0
    lossy: Any = None
    time_limit_s: float = 10.0
    split: bool = False

    def __post_init__(self) -> None:
        # What cannot be read is an error now, before anything is traced.
        parse_bytes(self.host)
        lossy_codecs(self.lossy)
        check_seconds(self.time_limit_s, "time_limit_s")
        if not isinstance(self.split, bool):
            raise TypeError(f"split is True or False, not {self.split!r:.80}: how many parts there are is planned")

    def solve(self, graph: StepGraph, budget: int | str) -> Plan:
        return solve(graph, budget, host=self.host, lossy=self.lossy, time_limit_s=self.time_limit_s)

    def candidates(
        self, graph: StepGraph, budget_bytes: int
    ) -> tuple[list[ShortlistedPlan], InfeasibleBudgetError | None]:
        """See `lowtide.solvers.solve`."""
        return shortlist(graph, budget_bytes, host=self.host, lossy=self.lossy, time_limit_s=self.time_limit_s)

    def solve_or_tightest(self, graph: StepGraph, budget_bytes: int) -> Plan:
        """The plan for a budget, or for the smallest one that can be met."""
        search = search_for(graph, "eager", self.host, self.time_limit_s, self.lossy)
        try:
            return search.plan(budget_bytes)
        except InfeasibleBudgetError as error:
            return search.plan(error.floor_bytes)


@dataclass
class Planner:
    """Makes further plans for a model that has one."""

    model: nn.Module
    base: InitVar[StepGraph]  # of the first plan
    base_inputs: InitVar[Shapes]  # the model's, in that graph
    budget_bytes: int
    limits: Limits
    correction_bytes: int  # added to all predictions: the measured minus the predicted peak of the first plan
    optimizer: torch.optim.Optimizer | None
    splits: tuple[Split, ...] = ()  # of the first plan, and of all others
    ranks: Ranks = ALONE
    smallest: Plan | None = None  # the plan with the smallest peak, where several ranks share a plan

    def __post_init__(self, base: StepGraph, base_inputs: Shapes) -> None:
        self._outside_bytes, self._base_elements = _bytes_outside(base), max(1, num_elements(base_inputs))
        self._num_forwards = max(1, sum(not forward.path for forward in base.forwards))  # of the model, in a step

    def for_inputs(
        self, target: Shapes, seen: Shapes, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Plan, StepGraph, Shapes]:
        """A plan, its graph and the shapes it covers, for `target` shapes of inputs, or `seen` ones if those fail."""
        inputs = map_tensors(lambda t: t.detach().requires_grad_(t.requires_grad), (args, kwargs))
        graph, target = _first_that_works(target, seen, inputs, lambda inputs: self._trace_copy(*inputs))
        loss_bytes = self._outside_bytes * num_elements(target) // self._base_elements
        graph = replace(graph, other_bytes=graph.other_bytes + self.correction_bytes + loss_bytes)
        return *self._plan(graph, target), target

    def for_arguments(
        self, target: Shapes, seen: Shapes, loss_fn: Callable[..., Tensor], args: tuple[Any, ...]
    ) -> tuple[Plan, StepGraph, Shapes, list[Shapes]]:
        """A plan for `loss_fn(*args)` with tensors of `target` shapes, or of the shapes `seen` if those fail.

        Call it with the handle disabled. Returns the plan, its graph, the argument shapes that it covers, and the
        model's input shapes in that step.
        """

        def traced(args: Any) -> tuple[StepGraph, list[Shapes]]:
            with recorded_input_shapes(self.model) as inputs:
                return self._traced(self.model, loss_fn, *args), inputs

        (graph, inputs), target = _first_that_works(target, seen, args, traced, self.ranks)
        graph = replace(graph, other_bytes=graph.other_bytes + self.correction_bytes)
        return *self._plan(graph, inputs[-1] if inputs else ()), target, inputs

    def solve(self, graph: StepGraph, budget_bytes: int) -> Plan:
        """The plan for a budget, the same on all ranks. Raises `InfeasibleBudgetError`."""
        return plan_of_first(self.ranks, graph, lambda: self.limits.solve(graph, budget_bytes))

    def solve_or_tightest(self, graph: StepGraph, budget_bytes: int) -> Plan:
        """The plan for a budget, or for the smallest one that can be met; the same on all ranks."""
        return plan_of_first(self.ranks, graph, lambda: self.limits.solve_or_tightest(graph, budget_bytes))

    def _plan(self, graph: StepGraph, inputs: Shapes) -> tuple[Plan, StepGraph]:
        plan = self.solve_or_tightest(graph, self.budget_bytes)
        return replace(with_parameters(plan, self.model), input_shapes=inputs), graph

    def _trace_copy(self, args: Any, kwargs: dict[str, Any]) -> StepGraph:
        model = copy_without_plans(self.model)

        def loss_fn(args: Any, kwargs: dict[str, Any]) -> Tensor:
            kind = next(model.parameters()).device.type
            dtype, is_on = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
            with torch.autocast(kind, dtype, is_on, cache_enabled=False):  # the cache is that of the forward around
                losses = [output_sum_loss(model(*args, **kwargs)) for _ in range(self._num_forwards)]
                return sum(losses[1:], losses[0])

        return self._traced(model, loss_fn, args, kwargs)

    def _traced(self, model: nn.Module, loss_fn: Callable[..., Tensor], *args: Any) -> StepGraph:
        # Largest shapes: of outputs whose size depends on values, such as `x[mask]`.
        with splitting(model, self.splits), largest_shapes():
            graph = trace(model, loss_fn, *args, optimizer=self.optimizer, mode="fake")
        return replace(graph, splits=self.splits)


def copy_without_plans(model: nn.Module) -> nn.Module:
    """A copy of the model with new module objects, without plans, for a trace; its tensors share the model's memory."""
    tensors: dict[int, Tensor] = {}
    for module in _compat.submodules(model):
        for slots in _compat.module_tensors(module):
            for tensor in slots.values():
                if tensor is not None and type(tensor) in _compat.PLAIN_TYPES:
                    tensors[id(tensor)] = _alias(tensor)
    copies: dict[nn.Module, nn.Module] = {}
    copied = _compat.module_replica(model, copies, tensors)
    for module, other in copies.items():
        vars(other).pop("forward", None)
        forward = plain_forward_of(module)
        if forward is not None:  # a host's, such as autocast around the forward of the class
            vars(other)["forward"] = _compat.rebound(forward, copies)
            if vars(other)["forward"] is forward:
                raise LowtideError(f"the forward set on {type(module).__name__} does not show which module it calls")
    return copied


def _alias(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return tensor.data  # not detach(), which shares the version counter that a trace resets
    alias = nn.Parameter(tensor.data, requires_grad=tensor.requires_grad)
    if tensor.grad is not None:
        alias.grad = tensor.grad.data  # so that the trace accumulates into it
    return alias


def _first_that_works(
    target: Shapes, seen: Shapes, args: Any, traced: Callable[[Any], Any], ranks: Ranks = ALONE
) -> tuple[Any, Shapes]:
    """`traced` of arguments with `target` shapes, or with the shapes `seen` if that raises on any rank; and which."""
    if target != seen:
        result = None
        with suppress(Exception):  # such as a position table that is too short
            result = traced(_enlarged(args, target))
        if ranks.all(result is not None, "trace of a larger batch"):
            return result, target
    return traced(_enlarged(args, seen)), seen


def _enlarged(args: Any, shapes: Shapes) -> Any:
    """`args` with tensors of these shapes; those of another shape are on the meta device."""
    following = iter(shapes)

    def enlarged(tensor: Tensor) -> Tensor:
        if not tensor.ndim:
            return tensor  # not in the shapes
        shape = next(following)
        if shape == tuple(tensor.shape):
            return tensor
        return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)

    return map_tensors(enlarged, args)


def _bytes_outside(graph: StepGraph) -> int:
    """The most bytes of activations that are alive at once and were made by the loss, outside of the model."""

    def is_outside(op: int) -> bool:
        if op >= graph.num_forward:
            op = graph.ops[op].forward_op
            if op < 0:
                return False
        call = graph.ops[op].call
        while call >= 0 and graph.calls[call].parent >= 0:
            call = graph.calls[call].parent
        return call < 0 or graph.calls[call].path != ""

    ends = [value.dropped for value in graph.values]
    for save in graph.saves:
        ends[save.value] = max(ends[save.value], save.released)
    changes: Counter[int] = Counter()
    for value, end in zip(graph.values, ends, strict=True):
        if value.kind == "activation" and value.born >= 0 and is_outside(value.born):
            changes[value.born] += value.bytes
            changes[max(end, value.born + 1)] -= value.bytes
    return max(itertools.accumulate(changes[position] for position in sorted(changes)), default=0)
