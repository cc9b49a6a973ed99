"""`lowtide.compile`: compile a model so that its training step stays within a memory budget.

A wrapper of `torch.compile` with inductor. `compile` makes a `Session` for the model and compiles each repeated block
(or the whole model) with a backend that passes every graph to that session. Nothing is planned yet: a forward
pre-hook traces the first training forward, for the memory outside of the blocks, and the first step plans.

- `handle_of(model)` returns the handle that `compile`, `apply` or `fit` put on a model, also inside
  `DistributedDataParallel`; `compile` itself returns the model.
- `explain_compiled` returns as text what compiled graphs save, also for `torch.compile(model, backend="lowtide")`.
- `plan_joint_graph` marks the nodes of a joint graph that another compiler traced as saved or recomputed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.nn.parallel import DistributedDataParallel

from lowtide import _compat
from lowtide.compiled.backend import (
    SESSIONS,
    BypassWatch,
    SessionCall,
    check_options,
    shared_backend,
    watch_sessions,
)
from lowtide.compiled.compiled_handle import NOTHING_YET, CompiledHandle, describe
from lowtide.compiled.other_memory import ForwardHook
from lowtide.compiled.planned_graph import tag
from lowtide.compiled.session import Session, tensor_bytes
from lowtide.compiled.variant_choice import VariantChooser
from lowtide.distributed.data_parallel import bucket_bytes
from lowtide.eager.handle import Applied, handle_at
from lowtide.eager.plan_handle import AppliedPlan
from lowtide.errors import LowtideError
from lowtide.plans.step_plan import Plan
from lowtide.solvers.solve import solve
from lowtide.split.split_forward import SplitHead
from lowtide.tracing import step_checks as checks
from lowtide.tracing.devices import present_device, trace_device
from lowtide.tracing.joint_graph import joint_step, node_costs
from lowtide.tracing.model_blocks import find_regions, is_block
from lowtide.tracing.untraced_memory import plain_optimizer
from lowtide.units import parse_bytes

_by_model: weakref.WeakKeyDictionary[nn.Module, CompiledHandle] = weakref.WeakKeyDictionary()


def compile(
    model: nn.Module,
    *,
    budget: int | str,
    optimizer: torch.optim.Optimizer | None = None,
    host: int | str = 0,
    split: bool = False,
    regional: bool | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    options: Mapping[str, Any] | None = None,
    on_over: Literal["raise", "warn"] = "raise",
) -> nn.Module:
    """Compile a model in place with inductor, so that a training step's peak stays within `budget` bytes. Returns it.

    With `regional=True`, the default for models with repeated blocks, each repeated block is compiled as one graph,
    which all equal blocks share: the step is as fast as with the whole model compiled, and compiling takes seconds. The
    rest of the model runs uncompiled. Up to `host` bytes that blocks save may be moved to host memory, copied while
    other blocks run. With `split=True` the output layer and the loss, which run uncompiled, run a few rows at a time
    where the logits would take much of the budget; gradients may then differ in the last bits. `mode`, `dynamic`,
    `fullgraph` and `options` are those of `torch.compile`.

    Planning happens in the first forward. On an accelerator the peak of the next step is measured, which resets torch's
    peak statistics; if it is over the budget, or far below it, other variants are compiled. If nothing fits, a forward
    raises `InfeasibleBudgetError`, and the model runs uncompiled from then on; with `on_over="warn"` it warns once and
    the step runs with the smallest peak found. `lowtide.handle_of(model)` returns the handle. A second call replaces
    what the first one did.
    """
    given, model = model, checks.module(model)
    _refuse_planned(model)
    options = {} if options is None else options
    check_options(options, own=())
    for name, switch in (("regional", regional), ("dynamic", dynamic), ("fullgraph", fullgraph), ("split", split)):
        if not (isinstance(switch, bool) or (switch is None and name in ("regional", "dynamic"))):
            raise TypeError(f"{name} is True or False, not {switch!r:.80}")
    optimizer = plain_optimizer(optimizer, model)
    repeated = _repeated(model)
    blocks = _blocks(model, repeated, regional)
    host_bytes = _host_bytes(host, blocks)
    buckets = bucket_bytes([module for module in given.modules() if isinstance(module, DistributedDataParallel)])
    chooser = VariantChooser(
        optimizer, host_bytes, model_bytes=tensor_bytes(model.parameters(), model.buffers()) + buckets
    )
    session = Session(budget, chooser=chooser, num_blocks=max(1, len(blocks)), on_over=on_over)
    session.bucket_bytes, session.has_blocks = buckets, not blocks and bool(repeated)
    backend = shared_backend(options, mode, dynamic)
    if model in _by_model:
        _by_model.pop(model).remove()
    for other in list(_by_model.values()):
        other.hand_over(blocks or [model])
    names = {module: name for name, module in model.named_modules()}
    head = SplitHead.on(model, blocks, functools.partial(_budget_on, budget)) if split else None
    for module in blocks or [model]:
        enter = functools.partial(SessionCall, session, (names[module], type(module).__name__))
        _compat.compile_module(module, enter, backend=backend, dynamic=dynamic, fullgraph=fullgraph)
    hook = ForwardHook(model, blocks, session) if blocks else BypassWatch(model, session)
    _by_model[model] = CompiledHandle(session, blocks or [model], hook, head)
    session.release, session.model = _by_model[model].remove, weakref.ref(model)
    watch_sessions(session)
    return given


def explain_compiled(model: nn.Module | None = None) -> str:
    """What the compiled graphs of a model save and what that costs, as text; without a model, of all models."""
    handle = None if model is None else _handle_on(model)
    sessions = _sessions_of(model) if handle is None else [handle.session]
    return "\n\n".join(describe(session) for session in sessions) or NOTHING_YET


def handle_of(model: nn.Module) -> Applied | CompiledHandle:
    """The handle that `lowtide.apply`, `lowtide.fit` or `lowtide.compile` put on a model, or on a model inside `model`.

    A model compiled by `torch.compile(backend="lowtide")` has one too, once it has run a training forward.
    `model` may be a wrapper, such as `DistributedDataParallel` or the result of `torch.compile`. Raises `LowtideError`
    if there is no handle, or more than one.

    >>> import torch, lowtide
    >>> from lowtide import handle_of
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    >>> handle = lowtide.apply(model, lowtide.EveryN(2))
    >>> handle_of(torch.nn.ModuleList([model])) is handle
    True
    """
    checks.module(model)
    handles: dict[int, Applied | CompiledHandle] = {}
    paths: list[str] = []
    inside_compiled: set[nn.Module] = set()  # a policy in there is part of what is compiled
    for path, module in model.named_modules():
        found: Applied | CompiledHandle | None = _handle_on(module)
        if found is not None:
            inside_compiled.update(module.modules())
        elif module not in inside_compiled:
            found = handle_at(module)
        if found is not None and id(found) not in handles:
            handles[id(found)] = found
            paths.append(path or "the model itself")
    for each in [] if handles else _backend_handles(model):
        handles[id(each)] = each
        paths.append(f"torch.compile(backend='lowtide'), budget {each.session.budget}")
    if not handles:
        raise LowtideError(
            f"there is no handle on this {type(model).__name__}: call lowtide.fit, lowtide.apply or lowtide.compile on "
            "it first. A model compiled by torch.compile(backend='lowtide') has one after its first training forward"
        )
    if len(handles) > 1:
        raise LowtideError(
            f"there are {len(handles)} handles on this {type(model).__name__}, the first ones found at "
            f"{', '.join(paths)}: call handle_of with the part of the model that is meant, or with what torch.compile "
            "returned"
        )
    (handle,) = handles.values()
    return handle


def plan_joint_graph(
    joint: fx.Graph,
    budget: int | str,
    *,
    is_backward: Callable[[fx.Node], bool] | None = None,
    time_limit_s: float = 10.0,
) -> Plan:
    """Plan a joint graph that another compiler made: mark its forward nodes as saved or recomputed.

    For trainers that trace forward and backward into one fx graph by themselves, such as torchtitan's. The mark is
    `node.meta["recompute"]`, which torch's own partitioner reads. Returns the plan.

    `budget` counts the values that the graph computes, gradients included; its inputs (parameters, the batch) are not
    among them. `is_backward` says which nodes belong to the backward; by default those that depend on an input whose
    name contains "tangents", as in AOTAutograd's graphs. Raises `InfeasibleBudgetError` if no choice meets the budget.
    If the graph meets it as it is, no node is marked.
    """
    values = [_compat.value_of(node) for node in joint.nodes if node.op == "placeholder"]
    device = next((value.device for value in values if isinstance(value, torch.Tensor)), torch.device("cpu"))
    device = trace_device(torch.device("cpu") if device.type == "meta" else device)
    hardware = present_device(device)
    step = joint_step(joint, hardware, node_costs(hardware, device), is_backward=is_backward)
    plan = solve(step.graph, budget, engine="compiled", time_limit_s=time_limit_s)
    if plan.peak_bytes < plan.plain_peak_bytes:
        tag(step, frozenset(plan.kept_ops(step.graph)))
    return plan


def _refuse_planned(model: nn.Module) -> None:
    """Raise if `fit`, or `apply` with a plan, is on the model. Policies of `apply` are regions of the user's own."""
    for name, module in model.named_modules():
        if isinstance(handle_at(module), AppliedPlan):
            raise LowtideError(
                f"lowtide.fit or lowtide.apply has put a plan on {name or 'the model'} already: "
                "lowtide.handle_of(model).remove() takes it off"
            )


def _handle_on(module: nn.Module) -> CompiledHandle | None:
    """The handle that `compile` put on this module; None if there is none, or if it was removed."""
    handle = _by_model.get(_compat.unwrapped(module))
    return None if handle is None or handle.is_removed else handle


def _backend_handles(model: nn.Module) -> list[CompiledHandle]:
    """The handles of what `torch.compile(backend="lowtide")` compiled with parameters of this model."""
    sessions = [session for session in _sessions_of(model) if session.options is not None]
    given = [options for options in map(_compat.backend_options, model.modules()) if options is not None]
    if given:  # of several compiles of one model this one. Dynamo gives compiles with equal options the same code
        sessions = [session for session in sessions if session.options in given]
    for session in sessions:
        if session.handle is None:
            session.handle = CompiledHandle(session, [], None)
    return [session.handle for session in sessions if not session.handle.is_removed]


def _sessions_of(model: nn.Module | None) -> list[Session]:
    """The sessions whose graphs ran with parameters of this model, in order; without a model all of them."""
    parameters = None if model is None else list(model.parameters())
    return [session for session in list(SESSIONS) if parameters is None or session.has_run_with(parameters)]


def _blocks(model: nn.Module, repeated: list[nn.Module], regional: bool | None) -> list[nn.Module]:
    """Those of the repeated modules that are compiled one by one; none for a model that is compiled as one graph."""
    if regional is False:
        return []
    if regional and not repeated:
        raise ValueError(
            f"regional=True compiles repeated blocks, and {type(model).__name__} has none. Leave it out, or compile "
            "the whole model with regional=False"
        )
    return repeated if regional or len(repeated) > 1 else []  # a single block is compiled with the rest of the model


def _repeated(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model, which are alike, or one that may be called several times."""
    try:
        return [module for module in find_regions(model, None).values() if is_block(module)]
    except ValueError:
        return []


def _host_bytes(host: int | str, blocks: list[nn.Module]) -> int:
    host_bytes = parse_bytes(host)
    if host_bytes and not torch.cuda.is_available():
        raise LowtideError(
            f"host={host!r} was given, and there is no accelerator here to move values from: leave it out"
        )
    if host_bytes and not blocks:
        raise LowtideError(
            "host= needs blocks that are compiled one by one (regional=True): a whole graph hands its saved tensors to "
            "autograd when its forward ends, too late to move them before the peak"
        )
    return host_bytes


def _budget_on(budget: int | str, device: torch.device) -> int:
    return parse_bytes(budget, total_bytes=present_device(trace_device(device)).memory_bytes or None)
