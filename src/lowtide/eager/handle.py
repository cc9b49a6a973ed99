"""`lowtide.apply`: carries out a policy on a live model, in place and reversibly, and returns a handle.

`Applied` is the handle, and the base class of `AppliedPlan` (`eager.plan_handle`), the handle of a plan. It gives each
layer a `forward` of its own, an instance attribute that is a bound method. Python copies such a method with its module
and pickles it by name, Dynamo traces through it, hooks run outside of it, and no module is wrapped or renamed. (A
wrapper module would rename parameters, and `module.compile`'s slot is skipped under `torch.compile`.) When the layer is
called, the handle runs its original forward inside the regions that the policy decided on (`eager.calls`).

`handle.stats()` reports bytes that layers save, counted in the first forward of each input shape.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowtide import _compat
from lowtide.distributed.ranks import ALONE
from lowtide.eager.calls import (
    NO_DECISIONS,
    CurrentRun,
    Decisions,
    ForwardRun,
    Level,
    PatchedModule,
    RegionRunner,
    levels_of,
    set_inner_paths,
)
from lowtide.eager.captured_step import CapturedStep
from lowtide.errors import LowtideError
from lowtide.plans.step_plan import Plan, Recompute
from lowtide.policies import Policy, check_limit, check_policy
from lowtide.replay.checkpoint import checkpoint, store_hooks
from lowtide.replay.module_state import free_shared_copies
from lowtide.replay.recomputing import Hooks
from lowtide.store.activation_store import ActivationStore, check_store
from lowtide.store.offload import KeptHere
from lowtide.tracing.model_blocks import Selector, find_regions
from lowtide.tracing.step_checks import CacheOff
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.eager.over_budget import BudgetWatch, Stepper
    from lowtide.eager.replanning import ShapePlans
    from lowtide.plans.step_plan import Frontier
    from lowtide.reports.page import Report


@dataclass(frozen=True)
class RegionStats:
    """One layer: whether it is recomputed, bytes saved by its last measured forward, and replays so far."""

    name: str
    recomputed: bool
    saved_bytes: int
    num_replays: int


@dataclass(frozen=True)
class AppliedStats:
    """What an applied policy or plan did so far. Bytes are measured, in layers by the first forward of each shape.

    `stored_bytes` are in stores now. Totals so far: `moved_bytes` moved to host memory or disk, `compressed_bytes`
    compressed to `compressed_to_bytes`, and `waited_s` seconds in which compute waited for copies.
    """

    regions: tuple[RegionStats, ...]
    stored_bytes: int
    moved_bytes: int = 0
    compressed_bytes: int = 0
    compressed_to_bytes: int = 0
    waited_s: float = 0.0
    segments: tuple[tuple[str, ...], ...] = ()  # names of layers that are recomputed together, as in the last forward

    @property
    def num_regions(self) -> int:
        return len(self.regions)

    @property
    def num_recomputed(self) -> int:
        return sum(region.recomputed for region in self.regions)

    @property
    def kept_bytes(self) -> int:
        return sum(region.saved_bytes for region in self.regions if not region.recomputed)

    @property
    def recomputed_bytes(self) -> int:
        return sum(region.saved_bytes for region in self.regions if region.recomputed)

    @property
    def num_replays(self) -> int:
        return sum(region.num_replays for region in self.regions)

    def __str__(self) -> str:
        moved = f", {format_bytes(self.moved_bytes)} moved so far" if self.moved_bytes else ""
        if self.compressed_bytes:
            moved += f", {format_bytes(self.compressed_bytes)} compressed to {format_bytes(self.compressed_to_bytes)}"
        return (
            f"{self.num_regions} regions, {self.num_recomputed} recomputed: {format_bytes(self.kept_bytes)} kept, "
            f"{format_bytes(self.recomputed_bytes)} recomputed, {format_bytes(self.stored_bytes)} stored; "
            f"{self.num_replays} replays{moved}"
        )


@contextlib.contextmanager
def reporting_saved_bytes(module: nn.Module, inputs: Iterable[Any], report: Callable[[int], None]) -> Iterator[None]:
    """Context manager that sums the bytes autograd saves inside it, and passes the sum to `report` at the end.

    Each storage counts once; parameters, buffers and the module's inputs do not count. Saved-tensor hooks that were in
    force before are called from these, as inner hooks would otherwise hide tensors from them.
    """
    tensors = [*module.parameters(), *module.buffers(), *(value for value in inputs if isinstance(value, Tensor))]
    others = {_compat.storage_id(tensor) for tensor in tensors if _compat.is_plain(tensor)}
    # The references keep ids from being reused: storages that a checkpoint drops are freed at once.
    sizes: dict[int, tuple[_compat.StorageReference, int]] = {}
    outer = _compat.current_hooks()

    @_compat.never_compiled
    def pack(tensor: Tensor) -> Any:
        if _compat.is_plain(tensor) and (storage := _compat.storage_id(tensor)) not in others:
            sizes[storage] = (_compat.StorageReference(tensor), tensor.untyped_storage().nbytes())
        return KeptHere(tensor) if outer is None else outer[0](tensor)

    @_compat.never_compiled
    def unpack(packed: Any) -> Tensor:
        return packed.restore() if outer is None else outer[1](packed)

    vars(pack)["passes_on_to"] = outer  # lets other code find the outer hooks
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        report(sum(size for _, size in sizes.values()))
    finally:
        sizes.clear()  # autograd holds `pack`


_MARK = "lowtide_region"  # attribute of a patched forward: its handle
_NOTE = "_lowtide_handle"  # attribute of a model on which no forward is patched
# Keyword arguments that `checkpoint` would read as its own options.
_OPTIONS = frozenset({"preserve_rng_state", "store", *inspect.signature(checkpoint).parameters} - {"args", "kwargs"})


class Applied(RegionRunner):
    """The handle of a policy on a model. `enabled` switches it off and on; `remove()` takes it off for good.

    As a context manager it removes itself at the end of the block. Copies of the model made meanwhile run under the
    policy too, and follow the same switch; a pickled model loads without it.
    """

    hidden_from_replay = True
    model: nn.Module
    # Those of a plan; a policy has none.
    plan: Plan | None = None
    shapes: ShapePlans | None = None
    stepper: Stepper | None = None
    watch: BudgetWatch | None = None  # from `fit`: warns when the budget no longer holds
    ranks = ALONE  # from `fit`: the ranks that have the same plan, and decide together

    def __init__(
        self,
        policy: Policy | None,
        regions: list[PatchedModule],
        decisions: Decisions = NO_DECISIONS,
        store: ActivationStore | None = None,
        max_checkpoints: int | None = None,
    ) -> None:
        self.policy = policy
        self.enabled = True
        self.is_removed = False
        self._regions = regions
        self._store = store
        self._input_hooks = None if store is None else store_hooks(store)
        self._max_checkpoints = max_checkpoints
        self._cache: CacheOff | None = None
        self._thread = CurrentRun(decisions)
        set_inner_paths(regions)
        for region in regions:
            self._patch(region)

    def _patch(self, region: PatchedModule) -> None:
        region.patch, region.replay = _forward_of(self, region), functools.partial(self._replay_alone, region)
        region.module.forward = types.MethodType(region.patch, region.module)

    def _patches_back(self, region: PatchedModule) -> contextlib.AbstractContextManager[None]:
        return self._patched_again(region.inner_paths) if self.is_removed else contextlib.nullcontext()

    @contextlib.contextmanager
    def _patched_again(self, paths: tuple[str, ...]) -> Iterator[None]:
        """Context manager in which these modules are patched, after `remove()`."""
        regions = [region for region in self._regions if region.name in paths]
        before = [vars(region.module).get("forward") for region in regions]
        for region in regions:
            self._patch(region)
        try:
            yield
        finally:
            for region, forward in zip(regions, before, strict=True):
                if forward is None:
                    del region.module.forward
                else:
                    region.module.forward = forward

    def remove(self) -> None:
        """Restore every layer's own forward. Graphs of earlier forwards can still run their backward."""
        for region in self._regions:
            # A host may have wrapped the patched forward since, which then stays: it runs plainly from now on.
            if getattr(vars(region.module).get("forward"), "__func__", None) is region.patch:
                if region.own_forward is None:
                    del region.module.forward
                else:
                    region.module.forward = region.own_forward
            free_shared_copies(region.module)
        self.enabled, self.is_removed = False, True
        model = getattr(self, "model", None)  # not set yet if the constructor was interrupted
        if model is not None and _noted_on(model) is self:
            vars(model).pop(_NOTE)
        if self._cache is not None:
            self._cache.restore()

    def reapply(self) -> None:
        """Patch every layer again; `enabled` is left as it is."""
        for region in self._regions:
            self._patch(region)
        self.note_on_model()

    def note_on_model(self) -> None:
        """Let `lowtide.handle_of` find this handle if no forward is patched, as with a plan that keeps everything."""
        vars(self.model).pop(_NOTE, None)  # of an earlier handle
        if not self._regions:
            vars(self.model)[_NOTE] = HandleNote(self)

    def switch_cache_off(self, model: nn.Module) -> None:
        """Set `use_cache=False` in a Hugging Face config until `remove()`: a cache would keep activations alive."""
        self._cache = CacheOff(model)
        self._cache.say_once(model)

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Context manager in which the model runs without the policy or plan."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def stats(self) -> AppliedStats:
        """Measured so far: regions, bytes kept, recomputed and stored, and replays."""
        rows = (RegionStats(r.name, r.recomputed, r.saved_bytes, r.num_replays) for r in self._regions)
        stores = [store.stats() for store in self._stores()]
        return AppliedStats(
            tuple(rows),
            stored_bytes=sum(store.held_bytes for store in stores),
            segments=self._segments(),
            moved_bytes=sum(store.moved_down_bytes for store in stores),
            compressed_bytes=sum(store.compressed_bytes for store in stores),
            compressed_to_bytes=sum(store.compressed_to_bytes for store in stores),
            waited_s=sum(store.waited_s for store in stores),
        )

    @property
    def num_patched(self) -> int:
        """Number of modules whose forward is replaced."""
        return len(self._regions)

    @property
    def moves_activations(self) -> bool:
        """Whether activations are moved off the device, or compressed."""
        return bool(self._stores())

    def _stores(self) -> list[ActivationStore]:
        return [] if self._store is None else [self._store]

    def _segments(self) -> tuple[tuple[str, ...], ...]:
        """The segments as layers joined them in the last forward; those of the policy before the first one."""
        found: dict[tuple[int, str | None], list[str]] = {}
        for region in self._regions:
            for number, _, _ in self._thread.base.decisions.levels(region.name, 0):
                if number is not None:
                    found.setdefault((number, region.began_with.get(number)), []).append(region.name)
        ran = {number for number, first in found if first is not None}
        members = (names for (number, first), names in found.items() if first is not None or number not in ran)
        return tuple(tuple(names) for names in members if len(names) > 1)

    @property
    def plans_for_graphs(self) -> bool:
        """Whether `plan_for_graph` makes a plan for the graph; otherwise it is captured under the handle's own."""
        return self.watch is not None and self.ranks.is_alone

    def plan_for_graph(self, loss_fn: Callable[..., Tensor], args: tuple[Any, ...], reserve_bytes: int) -> Any:
        """The plan to capture, for `under_graph_plan`; None for the handle's own.

        A handle from `fit` solves again: a graph takes no time of the host, so retained outputs cost less there, and
        nothing can be moved in it. `reserve_bytes` is the part of the budget to leave free, for gaps in the pool.
        Raises `InfeasibleBudgetError` if there is no such plan.
        """
        return None

    @contextlib.contextmanager
    def under_graph_plan(self, planned: Any) -> Iterator[Plan | None]:
        """Context manager in which the model runs under the plan to capture; yields that plan, None for a policy."""
        yield self.plan

    def capture(
        self,
        loss_fn: Callable[..., Tensor],
        *args: Any,
        accumulate: bool = False,
        max_graphs: int = 4,
        ignore_host_draws: bool = False,
    ) -> CapturedStep:
        """Capture forward and backward as one CUDA graph: `loss = step(*args)`, with new gradients in `.grad`.

        Results equal those of the eager step. With `accumulate=True` gradients are added to those in `.grad`. Batches
        of other shapes, dtypes or Python values get graphs of their own, up to `max_graphs`. Raises `CaptureError` with
        what cannot be captured, and `InfeasibleBudgetError` if the graph needs more than the budget of `fit`. A step
        that draws random numbers on the host is refused, unless `ignore_host_draws=True` says that they have no effect.

        On a handle from `fit` the graph has a plan of its own, `step.plan`, as its ops take no time of the host; the
        handle's plan is left as it is.
        """
        return CapturedStep(
            self, loss_fn, args, accumulate=accumulate, max_graphs=max_graphs, ignore_host_draws=ignore_host_draws
        )

    def report(
        self, path: str | os.PathLike[str], *, frontier: Frontier | None = None, time_limit_s: float = 5.0
    ) -> Report:
        """Raises: a policy has no graph to report on. See `Plan.report`."""
        raise LowtideError(
            f"{self.policy} is a policy, and a report is made of a plan: lowtide.fit(...) or lowtide.apply(model, "
            "lowtide.plan(...)) give handles that have one"
        )

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def __str__(self) -> str:
        return f"{self.policy} on {len(self._regions)} regions ({'on' if self.enabled else 'off'})"

    def run(self, region: PatchedModule, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called in place of a layer's forward. `module` is the layer, or its copy in a copied model."""
        forward = region.plain_forward(module)
        if torch.compiler.is_compiling():
            is_on = region.recomputed and self.enabled and torch.is_grad_enabled()
            return self._checkpointed(forward, args, kwargs) if is_on else forward(*args, **kwargs)
        run = self._thread.run
        if not torch.is_grad_enabled() or (run is None and not self.enabled):  # replays follow their forward
            return forward(*args, **kwargs)
        forward = self._measured(region, forward, args)
        if not region.recomputed or _compat.under_functorch():
            return forward(*args, **kwargs)
        run = run or self._thread.base
        levels = run.decisions.levels(region.name, 0)
        most, store = self._max_checkpoints, self._store
        is_full = most is not None and store is not None and len(store) >= most
        if is_full and not self._holds_no_input(run, levels[0], args, kwargs):
            return forward(*args, **kwargs)
        if levels[0].segment is not None and run.is_in_other_checkpoint():
            levels = tuple(level for level in levels if level.segment is None)
        return self._run_levels(run, levels, region, module, 0, forward, args, kwargs)

    def _hooks_for_inputs(
        self, run: ForwardRun, region: PatchedModule, nth: int, args: Any, kwargs: dict[str, Any]
    ) -> Hooks | None:
        # Inside a region, or a checkpoint of the user's, they are saves of that one; its replay has no run of ours.
        return self._input_hooks if _compat.checkpoint_in_force() is None else None

    @staticmethod
    def _checkpointed(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call as torch.compile sees it. Arguments named like options of `checkpoint` are bound to the forward."""
        options = [name for name in kwargs if name in _OPTIONS]  # Dynamo of torch 2.11 has no `&` of dict keys
        if options:
            forward = functools.partial(forward, **{name: kwargs[name] for name in options})
        return checkpoint(forward, *args, **{name: value for name, value in kwargs.items() if name not in options})

    def _measured(self, region: PatchedModule, forward: Callable[..., Any], args: Any) -> Callable[..., Any]:
        """`forward`, or for new input shapes a wrapper that measures what it saves."""
        shapes = [value.shape for value in args if isinstance(value, torch.Tensor)]
        if region.measured_shape == shapes or _compat.under_functorch():
            return forward

        def measured(*args: Any, **kwargs: Any) -> Any:
            with reporting_saved_bytes(region.module, args, report):
                return forward(*args, **kwargs)

        def report(num_bytes: int) -> None:
            region.measured_shape, region.saved_bytes = shapes, num_bytes

        return measured

    @staticmethod
    def _holds_no_input(run: ForwardRun, level: Level, args: Any, kwargs: dict[str, Any]) -> bool:
        """Return whether a call joins a segment that has its input already."""
        number, is_first, _ = level
        return number is not None and not is_first and run.segment(number).is_continued_by(args, kwargs)


def apply(
    model: nn.Module,
    policy: Policy | Plan,
    *,
    regions: Selector | Iterable[Selector] | None = None,
    store: ActivationStore | None = None,
    max_checkpoints: int | None = None,
    costs: Sequence[float] | None = None,
    bytes: Sequence[int] | None = None,
) -> Applied:
    """Carry out a policy or a plan on a live model, in place: same modules, names, classes, hooks and `state_dict`.

    Returns a handle. The options are for policies; a `Plan` from `lowtide.plan` or `lowtide.solve` takes none.

    - `regions`: the layers; by default the model's repeated blocks. Or dotted patterns (`"encoder.layers.*"`, `**` for
      any depth), module classes, predicates `(name, module) -> bool`, or a list of these. No match is a `ValueError`.
    - `store`: an `ActivationStore` for the inputs of recomputed layers.
    - `max_checkpoints`: the most such inputs held at once; further layers keep their activations.
    - `costs`, `bytes`: seconds and bytes per layer, for policies that use them.

    >>> import torch, lowtide
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    >>> handle = lowtide.apply(model, lowtide.EveryN(2))
    >>> model(torch.randn(2, 8)).sum().backward()
    >>> handle.stats().num_replays
    2
    >>> handle.remove()
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"apply() works on an nn.Module, not {type(model).__name__}")
    model = _compat.unwrapped(model)
    if isinstance(policy, Plan):
        if (regions, store, max_checkpoints, costs, bytes) != (None,) * 5:
            raise TypeError("a Plan says which modules are recomputed: give it alone, without options")
        from lowtide.eager.plan_handle import apply_plan  # it builds on this module

        return apply_plan(model, policy)
    check_policy(policy)
    check_store(store)
    check_limit(max_checkpoints)
    refuse_other_checkpointing(model)
    layers = find_regions(model, regions)
    segments, names = policy.regions(len(layers), costs, bytes), list(layers)
    calls = ([(name, 0) for name in names[segment.start : segment.end + 1]] for segment in segments)
    levels = levels_of(Plan(regions=tuple(Recompute(*first, more=tuple(more)) for first, *more in calls)))
    if max_checkpoints is not None and store is None:
        store = ActivationStore()
    chosen = [PatchedModule(name, layer, recomputed=name in levels) for name, layer in layers.items()]
    handle = Applied(policy, chosen, Decisions(levels), store, max_checkpoints)
    handle.model = model
    handle.note_on_model()
    handle.switch_cache_off(model)
    return handle


def _forward_of(applied: Applied, region: PatchedModule) -> Callable[..., Any]:
    """A function to bind as a layer's forward, with the name, signature and docstring of the one it replaces."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return applied.run(region, self, args, kwargs)

    plain = region.own_forward or type(region.module).forward
    functools.update_wrapper(forward, plain)
    forward.__name__ = "forward"  # bound methods are pickled by this name
    if region.own_forward is not None:
        # It may be a plain function: add the `self` that binding removes to its signature.
        with contextlib.suppress(TypeError, ValueError):
            signature = inspect.signature(plain)
            bound = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
            forward.__signature__ = signature.replace(  # type: ignore[attr-defined]
                parameters=[bound, *signature.parameters.values()]
            )
    setattr(forward, _MARK, applied)
    return forward


def _applied_to(module: nn.Module) -> Applied | None:
    method = vars(module).get("forward")
    applied: Applied | None = getattr(getattr(method, "__func__", None), _MARK, None)
    return None if applied is None or applied.is_removed else applied


class HandleNote:
    """An attribute of a model that refers to its handle. A copied model has the same one; a pickled model has None."""

    hidden_from_replay = True

    def __init__(self, handle: Applied) -> None:
        self.handle = handle

    def __deepcopy__(self, memo: Any) -> HandleNote:
        return self

    def __reduce__(self) -> Any:
        return type(None), ()


def _noted_on(model: nn.Module) -> Applied | None:
    return getattr(vars(model).get(_NOTE), "handle", None)


def handle_at(module: nn.Module) -> Applied | None:
    """The handle whose patched forward, or note, this module has."""
    return _applied_to(module) or _noted_on(module)


def plain_forward_of(module: nn.Module) -> Any:
    """The instance attribute `forward` that a module has without our patch; None for most modules."""
    applied = _applied_to(module)
    if applied is None:
        return vars(module).get("forward")
    return next((region.own_forward for region in applied._regions if region.module is module), None)


_OTHER_SWITCHES = {
    "gradient_checkpointing": (
        "model.gradient_checkpointing_disable() first (diffusers: disable_gradient_checkpointing())"
    ),
    "grad_checkpointing": "model.set_grad_checkpointing(False) first",  # timm's name for it
}


def refuse_other_checkpointing(model: nn.Module) -> None:
    """Raise if a policy, or another library's checkpointing, is on the model already."""
    for name, module in model.named_modules():
        if _applied_to(module) is not None:
            raise LowtideError(f"a plan or policy is on {name or 'the model'} already: handle.remove() takes it off")
        if type(module).__name__ == "CheckpointWrapper":
            raise LowtideError(
                f"{name or 'the model'} is wrapped by torch's checkpoint_wrapper already: apply to the unwrapped model"
            )
        for attribute, cure in _OTHER_SWITCHES.items():
            if getattr(module, attribute, False) is True:
                raise LowtideError(f"{name or 'the model'} has gradient checkpointing on already: call {cure}")
        if isinstance(module, nn.DataParallel):
            raise LowtideError(
                "DataParallel copies modules for every step, without their plans: start one process per device "
                "and wrap the model by DistributedDataParallel"
            )


def refuse_compiled(model: nn.Module) -> None:
    """Raise if `lowtide.compile` is on the model: its blocks already save what another budget decided."""
    for name, module in model.named_modules():
        if _compat.is_compiled_module(module):
            raise LowtideError(
                f"lowtide.compile has compiled {name or 'the model'} within a budget of its own already: "
                "lowtide.handle_of(model).remove() takes it off"
            )
