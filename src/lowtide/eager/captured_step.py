"""`handle.capture`: a training step whose forward and backward run as one CUDA graph.

Most eager steps are limited by the host, and recomputing adds to its work. A CUDA graph takes the host out: the device
runs the recorded kernels one after the other.
`CapturedStep` holds one graph for each form of batch (shapes, dtypes, Python values), checks before every run that the
graph still applies, and runs the step eagerly where it cannot be captured. `eager.cuda_graph` makes the single graphs.

The memory pool of the graphs counts as a whole in the peak, as nothing else can use it. The allocator adds a segment to
a pool for each large tensor that fits into no free block, and blocks of different segments never merge, so a pool has
gaps. If a graph exceeds its budget, the step is captured again in a pool that begins with one segment of all bytes that
the budget leaves: the allocator splits it, and merges free neighbours. See docs/cuda-graphs.md.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from lowtide import _compat
from lowtide.eager.cuda_graph import CapturedGraph, StepGuards, batch_form
from lowtide.errors import CaptureError, InfeasibleBudgetError
from lowtide.plans.step_plan import Plan
from lowtide.replay.arguments import tensors_in
from lowtide.replay.environment import modes_now
from lowtide.tracing import step_checks as checks
from lowtide.tracing.step_checks import one_at_a_time
from lowtide.units import format_apart, format_bytes

if TYPE_CHECKING:
    from lowtide.eager.handle import Applied

logger = logging.getLogger("lowtide")

# Shares of the budget that further plans leave to the gaps of a pool, tried in turn: the pool's size is known only
# after the capture. Its excess does not tell how much is missing: it has the size of the tensor that no gap was large
# enough for, which is the logits in a language model. Each plan takes a solve and some five steps.
_POOL_RESERVES = (0.015, 0.04, 0.1, 0.25)
# Halvings of the interval between the last reserve that was too small and the first one that held, and the share of a
# step that they must be predicted to save.
_MAX_HALVINGS = 2
_WORTH_A_CAPTURE = 0.01
_SEGMENT_UNIT = 2 << 20  # bytes that the allocator rounds large segments up to
# Pools in which a capture failed: torch 2.11 does not release the capture's reference (pytorch #190308), and freeing
# such a pool ends the process.
_NEVER_FREED: list[torch.cuda.MemPool] = []


class CapturedStep:
    """A step as CUDA graphs, one for each form of batch: `loss = step(*batch)`. Made by `handle.capture`.

    Gradients are left in `.grad`: new ones, or with `accumulate=True` added to those there. The tensors in `.grad`
    belong to the graph, and the next step overwrites them. The returned loss is a copy.
    """

    hidden_from_replay = True

    def __init__(
        self,
        handle: Applied,
        loss_fn: Callable[..., Tensor],
        args: tuple[Any, ...],
        *,
        accumulate: bool = False,
        max_graphs: int = 4,
        ignore_host_draws: bool = False,
    ) -> None:
        if max_graphs < 1:
            raise ValueError(f"max_graphs is a number of graphs, 1 or more, not {max_graphs}")
        _refuse_devices(handle.model, args)
        facts = StepGuards(handle.model, loss_fn)
        _refuse_handle(handle, facts.modules)
        self.peak_bytes = 0  # of the whole step: memory outside of the graphs' pool, plus the whole pool
        self.pool_bytes = 0  # held by the graphs, also between steps
        self.plan: Plan | None = None  # of the graph captured last
        self._handle, self._loss_fn = handle, loss_fn
        self._graphs: dict[Any, CapturedGraph] = {}
        self._reserve_bytes = 0  # of the budget, that the plan of the first graph leaves to gaps of the pool
        self._small_bytes: int | None = None  # of the pool's segments for small tensors; known if a graph had gaps
        self._accumulate, self._max_graphs = accumulate, max_graphs
        self._ignore_host_draws = ignore_host_draws
        self._plans = handle.shapes
        self._device = checks.device_of(handle.model, args)
        self._filled: torch.cuda.MemPool | None = None  # the pool, if it begins with one segment
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._facts = facts
        # Forms of batches that run eagerly, and whether gradients are added.
        self._eager: set[tuple[Any, bool]] = set()
        self._has_warned = False
        self._is_released = False
        self._refuse_use(args)
        try:
            self._add(self._key(args), args)
        except BaseException:
            self.release()
            raise

    @property
    def num_graphs(self) -> int:
        """Number of batch forms that have a graph."""
        return len(self._graphs)

    def __call__(self, *args: Any, accumulate: bool | None = None) -> Tensor:
        """Copy the batch in, run the graph and return the detached loss.

        A batch of another form gets a graph of its own. It runs eagerly if there are `max_graphs` already, or if its
        graph does not fit into the budget.
        """
        self._refuse_use(args)
        adds = self._accumulate if accumulate is None else accumulate
        if not self._handle.enabled:
            return self._run_eagerly(args, adds)
        key = self._key(args)
        graph = self._graphs.get(key) or self._new_graph(key, args)
        if graph is None:
            return self._run_eagerly(args, adds)
        if adds and all(leaf.grad is None for leaf in graph.leaves.values()):
            adds = False
        if adds and graph.adding is None and not self._can_add(key):
            return self._run_eagerly(args, adds)
        if adds:
            self._copy_gradients_of_other_graphs(graph)
        return graph.run(args, adds=adds)

    def release(self) -> None:
        """Free the graphs and their memory. Gradients in `.grad` become copies."""
        self._copy_gradients_of_other_graphs(None)
        self._is_released = True
        self._small_bytes = None
        self._renew_pool()

    # Graphs.

    def _key(self, args: tuple[Any, ...]) -> Any:
        settings = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
        return batch_form(args), modes_now(), settings, self._facts.values()

    def _new_graph(self, key: Any, args: tuple[Any, ...]) -> CapturedGraph | None:
        if (key, False) in self._eager:
            return None
        if len(self._graphs) >= self._max_graphs:
            self._run_eagerly_from_now_on(key, False, f"there are {self._max_graphs} graphs already (max_graphs)")
            return None
        try:
            return self._add(key, args)
        except (InfeasibleBudgetError, torch.OutOfMemoryError) as error:
            self._give_back()
            self._run_eagerly_from_now_on(key, False, str(error).splitlines()[0])
            return None

    def _give_back(self) -> None:
        """Free what a further graph has added to the pool, after it did not fit.

        Its segments stay as long as other graphs use the pool. If these exceed the budget, all graphs are freed: those
        that are used again are captured again.
        """
        gc.collect()
        torch.cuda.empty_cache()
        try:
            self._measure()
        except InfeasibleBudgetError:
            self._copy_gradients_of_other_graphs(None)
            self._renew_pool()

    def _run_eagerly_from_now_on(self, key: Any, adds: bool, why: str) -> None:
        self._eager.add((key, adds))
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a step of another form than those captured runs eagerly: %s. It runs beside the %s that graphs keep",
                why,
                format_bytes(self.pool_bytes),
            )

    @one_at_a_time
    def _add(self, key: Any, args: tuple[Any, ...]) -> CapturedGraph:
        handle = self._handle
        if handle.stepper is not None and handle.enabled:
            handle.stepper.plan_for_larger(self._loss_fn, args)
        capture = functools.partial(self._capture_plan, key, args)
        if handle.plans_for_graphs and not self._graphs and handle.watch is not None:
            self._reserve_bytes = least_reserve(capture, handle.watch.budget_bytes)
        elif (over := capture(self._reserve_bytes).over_budget) is not None:
            raise over
        return self._graphs[key]

    def _capture_plan(self, key: Any, args: tuple[Any, ...], reserve_bytes: int) -> CapturedPlan:
        """Capture the plan that leaves this much of the budget free; raises `InfeasibleBudgetError` without one."""
        planned = self._handle.plan_for_graph(self._loss_fn, args, reserve_bytes)
        with self._handle.under_graph_plan(planned) as plan:
            slowdown = 0.0 if plan is None else plan.slowdown
            try:
                self._capture_within_budget(key, args)
            except InfeasibleBudgetError as over:
                self._graphs.pop(key, None)
                gc.collect()
                torch.cuda.empty_cache()
                return CapturedPlan(slowdown, over)
        self.plan = plan
        self._graphs[key].planned = planned
        return CapturedPlan(slowdown)

    def _capture_within_budget(self, key: Any, args: tuple[Any, ...]) -> None:
        """Capture a graph; if its pool has gaps that exceed the budget, again in a pool that begins as one segment."""
        is_first = not self._graphs
        for _ in range(2 if is_first and self._small_bytes is None else 1):
            if is_first:
                self._renew_pool()
            self._graphs[key] = self._captured(args)
            try:
                self._measure()
                return
            except InfeasibleBudgetError as infeasible:
                error = infeasible
                if is_first:
                    # Tensors of less than 1 MiB have segments of their own.
                    small = [each for each in self._segments() if each["segment_type"] == "small"]
                    self._small_bytes = sum(each["total_size"] for each in small)
        raise error

    def _renew_pool(self) -> None:
        """Free all graphs with their pool, and begin another: empty, or one that can be filled before a capture."""
        if self._graphs:
            torch.cuda.synchronize(self._device)  # the last run may still use the memory
        self._graphs.clear()
        self.pool_bytes = 0
        gc.collect()
        self._filled = None
        if self._small_bytes is None:
            self._pool = torch.cuda.graph_pool_handle()
        else:
            with torch.cuda.device(self._device):
                self._filled = torch.cuda.MemPool()
            self._pool = self._filled.id
        torch.cuda.empty_cache()

    def _captured(self, args: tuple[Any, ...]) -> CapturedGraph:
        fill = None if self._filled is None or self._graphs else functools.partial(self._fill, self._replaced_bytes())
        with self._capturing():
            return CapturedGraph(
                self._handle.model, self._loss_fn, args, self._pool, fill, ignore_host_draws=self._ignore_host_draws
            )

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        """Context manager around a capture. Its warm-ups are not checked against the budget."""
        handle, regions = self._handle, self._handle.num_patched
        try:
            with nullcontext() if handle.watch is None else handle.watch.paused():
                yield
        except BaseException:
            if self._filled is not None:
                _NEVER_FREED.append(self._filled)
            raise
        finally:
            if handle.num_patched != regions and not handle.is_removed:
                handle.reapply()  # the warm-up made a plan, whose patches were restored away

    def _fill(self, replaced: int) -> None:
        """Let the pool begin with one segment of the bytes that the budget leaves for large tensors.

        Called on the stream of the capture, which alone may use it. If there is not that much memory, the pool begins
        empty and grows as needed.
        """
        watch = self._handle.watch
        assert self._filled is not None and self._small_bytes is not None and watch is not None
        size = (watch.budget_bytes - self._outside_bytes(replaced) - self._small_bytes) // _SEGMENT_UNIT * _SEGMENT_UNIT
        if size > 0:
            with suppress(torch.OutOfMemoryError), torch.cuda.use_mem_pool(self._filled):
                torch.empty(size, dtype=torch.uint8, device=self._device)

    @one_at_a_time
    def _can_add(self, key: Any) -> bool:
        """Capture the graph that adds to gradients, under the plan of the one that makes them. False if it is over."""
        if (key, True) in self._eager:
            return False
        graph = self._graphs[key]
        self._copy_gradients_of_other_graphs(graph)
        try:
            with self._handle.under_graph_plan(graph.planned), self._capturing():
                graph.prepare_to_add()
            self._measure()
        except (InfeasibleBudgetError, torch.OutOfMemoryError) as error:
            graph.adding = None
            self._give_back()
            self._run_eagerly_from_now_on(key, True, str(error).splitlines()[0])
            return False
        return True

    def _copy_gradients_of_other_graphs(self, graph: CapturedGraph | None) -> None:
        """Copy gradients in `.grad` that lie in other graphs' memory: running `graph` may overwrite it."""
        for other in self._graphs.values():
            for key, gradient in other.gradients.items() if other is not graph else ():
                leaf = other.leaves[key]
                if leaf.grad is gradient and (graph is None or key not in graph.gradients):
                    leaf.grad = gradient.clone()

    def _run_eagerly(self, args: tuple[Any, ...], adds: bool) -> Tensor:
        if not adds:
            for leaf in self._leaves():
                leaf.grad = None
        loss = self._loss_fn(*args)
        loss.backward()
        return loss.detach()

    # Checks.

    def _refuse_use(self, args: tuple[Any, ...]) -> None:
        if self._is_released:
            raise CaptureError("the captured step was released: capture again")
        if self._handle.is_removed:
            raise CaptureError("the plan of this captured step was removed: apply one, and capture again")
        if self._handle.shapes is not self._plans:
            raise CaptureError("the plan was made anew since the step was captured (refit): capture again")
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            raise CaptureError(
                "gradients are switched off here (no_grad, inference_mode), and a step needs them: call it outside"
            )
        moved = self._facts.what_moved()
        if moved is not None:
            raise CaptureError(f"{moved} since the step was captured: capture again")
        if any(tensor.requires_grad for tensor in tensors_in(args)):
            raise CaptureError("a batch tensor requires gradients, which a captured step cannot give: run it eagerly")

    def _measure(self) -> None:
        """Set `peak_bytes`, in which the pool counts as a whole, and `pool_bytes`. Raises if they exceed the budget."""
        torch.cuda.synchronize()
        self.pool_bytes = sum(each["total_size"] for each in self._segments())
        outside = self._outside_bytes(self._replaced_bytes())
        self.peak_bytes = outside + self.pool_bytes
        watch = self._handle.watch
        if watch is not None and self.peak_bytes > watch.budget_bytes:
            allowed, taken = format_apart(watch.budget_bytes, self.peak_bytes)
            raise InfeasibleBudgetError(
                f"captured, the step takes {taken}, more than its budget of {allowed}: "
                f"{format_bytes(self.pool_bytes)} in the memory pool of "
                f"{len(self._graphs)} graph{'s' * (len(self._graphs) > 1)}, which nothing else can use, and "
                f"{format_bytes(outside)} outside of it, also under plans with smaller peaks. Raise the budget, make "
                "the batch smaller, or run the step eagerly.",
                self.peak_bytes,
            )

    def _segments(self) -> list[dict[str, Any]]:
        """The segments of the graphs' memory pool."""
        return [each for each in torch.cuda.memory_snapshot() if tuple(each["segment_pool_id"]) == tuple(self._pool)]

    def _replaced_bytes(self) -> int:
        """Bytes of present gradients that the next step replaces by its own, which are in the pool."""
        owned = {id(gradient) for graph in self._graphs.values() for gradient in graph.gradients.values()}
        present = [leaf.grad for leaf in self._leaves() if leaf.grad is not None and id(leaf.grad) not in owned]
        return sum(gradient.nbytes for gradient in present)

    def _leaves(self) -> list[Tensor]:
        """The tensors that a step may give gradients to."""
        of_graphs = [leaf for graph in self._graphs.values() for leaf in graph.leaves.values()]
        return list({id(leaf): leaf for leaf in (*of_graphs, *self._facts.parameters)}.values())

    def _outside_bytes(self, replaced: int) -> int:
        """Bytes of the step outside of the pool: allocated now, less `replaced`, and what the optimizer will allocate.

        That is state still to come, and its workspace, for which no room in the pool can be used.
        """
        watch = self._handle.watch
        to_come = 0 if watch is None else watch.missing_state_bytes() + watch.optimizer_workspace_bytes
        live = sum(each["allocated_size"] for each in self._segments())
        return torch.cuda.memory_allocated(self._device) - live - replaced + to_come

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise CaptureError("a captured step cannot be copied, as its graph writes to one model: capture the copy's own")

    def __reduce__(self) -> NoReturn:
        raise CaptureError("a captured step cannot be pickled: its graph lives on the device")

    def __str__(self) -> str:
        graphs = f"{self.num_graphs} CUDA graph{'s' * (self.num_graphs != 1)}"
        return f"captured step: {graphs}, {format_bytes(self.pool_bytes)} kept; peak {format_bytes(self.peak_bytes)}"


class CapturedPlan(NamedTuple):
    """A plan that was captured: its predicted slowdown, and the error if its pool exceeds the budget."""

    slowdown: float
    over_budget: InfeasibleBudgetError | None = None


def least_reserve(capture: Callable[[int], CapturedPlan], budget_bytes: int) -> int:
    """Return the fewest bytes found that a plan must leave free for its pool to hold; the last capture is that plan's.

    `capture(reserve_bytes)` captures the plan for the rest of the budget. The reserve grows until a pool holds. It is
    then halved towards the last one that did not, as long as that is predicted to make the step clearly faster.
    """
    first = last = capture(0)
    if first.over_budget is None:
        return 0
    too_small, reserve = 0, 0
    for share in _POOL_RESERVES:
        reserve = int(share * budget_bytes)
        try:
            last = capture(reserve)
        except InfeasibleBudgetError as infeasible:  # the smallest plan leaves less
            reserve = budget_bytes - infeasible.floor_bytes
            if reserve <= too_small:
                raise last.over_budget from None  # type: ignore[misc]
            last = capture(reserve)
            if last.over_budget is not None:
                raise last.over_budget from None
        if last.over_budget is None:
            break
        too_small = reserve
    else:
        raise last.over_budget  # type: ignore[misc]
    held, captured = last, reserve
    for _ in range(_MAX_HALVINGS):
        if held.slowdown - first.slowdown < _WORTH_A_CAPTURE:
            break
        captured = (too_small + reserve) // 2
        last = capture(captured)
        if last.over_budget is None:
            held, reserve = last, captured
        else:
            too_small = captured
    if captured != reserve and (last := capture(reserve)).over_budget is not None:
        raise last.over_budget
    return reserve


def _refuse_devices(model: nn.Module, args: tuple[Any, ...]) -> None:
    if not torch.cuda.is_available():
        raise CaptureError("CUDA graphs need a CUDA device, and there is none: handle.step(loss_fn, *batch) needs none")
    device = checks.device_of(model, args)
    if device.type != "cuda":
        raise CaptureError(f"the model is on {device}: a CUDA graph needs it on a CUDA device")
    elsewhere = next((tensor for tensor in tensors_in(args) if tensor.device != device), None)
    if elsewhere is not None:
        raise CaptureError(
            f"a batch tensor of shape {tuple(elsewhere.shape)} is on {elsewhere.device} and the model on {device}: "
            "move the batch to the model's device before the step"
        )
    if not any(True for _ in tensors_in(args)):
        raise CaptureError("the batch has no tensors: give handle.capture the arguments of loss_fn")


def _refuse_handle(handle: Applied, modules: list[nn.Module]) -> None:
    if not handle.enabled:
        raise CaptureError("the plan is switched off or removed: there is nothing to capture under it")
    if handle.moves_activations and not handle.plans_for_graphs:
        raise CaptureError(
            "this plan moves or compresses activations, and copies to the host cannot be captured: plan with "
            "recomputation alone (no host=, lossy= or store=), or run the step eagerly"
        )
    for module in modules:
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise CaptureError("a model under DistributedDataParallel cannot be captured: run the step eagerly")
        if getattr(module, "max_norm", None) is not None:
            raise CaptureError("an embedding with max_norm writes to its weights in the forward: it cannot be captured")
        for slots in _compat.module_tensors(module):
            if any(tensor is not None and _compat.has_gradient_hooks(tensor) for tensor in slots.values()):
                raise CaptureError(
                    "a parameter has a hook that runs after its gradient (an optimizer in the backward): a captured "
                    "graph runs no Python. Step the optimizer after the captured step"
                )
