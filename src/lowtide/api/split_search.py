"""`SplitSearch`: which modules of a step run in parts for `split=True`, and in how many.

It looks for two kinds of modules: output layers whose logits only the loss reads, and token-wise modules (MLPs) that
need several times the memory of their input. A step that is traced with such modules in parts is a graph like any
other, in which the parts are ops, so the solver plans regions and moves for it.

The search finds the fewest parts with which a plan fits: of the loss alone, and only if these are not enough of the
token-wise modules too. Peaks of the plain step and of one with many parts are simulated under the usual checkpoints;
for numbers of parts in between they are interpolated. The solver then plans the step with the fewest parts, and the
one with more: memory that the loss no longer takes may allow a faster plan elsewhere.

Steps in parts are traced on fake tensors where possible, once each. If the plain step was measured, their ops get its
measured seconds (`with_costs_of`), so that plans can be compared. Where several ranks plan together, the lowest
searches and the others run the traces that it asks for (`by_first`), as a trace of a sharded model communicates.

Cost: a trace with 16 parts of the loss, one with the fewest parts, and a solve of each. Only where these do not reach
the budget, up to three traces more, of the most parts of the loss, and of some and the most parts of token-wise
modules.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from lowtide.api.measure import TracedStep
from lowtide.distributed.agreement import with_common_costs
from lowtide.distributed.ranks import current, is_known_to_all
from lowtide.eager.replanning import Limits
from lowtide.errors import InfeasibleBudgetError, LowtideError
from lowtide.graph.step_graph import Op, Split, StepGraph
from lowtide.plans.step_plan import Plan
from lowtide.replay.arguments import tensors_in
from lowtide.simulator.timeline import simulate
from lowtide.solvers.baselines import reference_plans
from lowtide.solvers.solve import search_for
from lowtide.split.split_forward import SplitForward, splitting, why_not_head
from lowtide.split.token_slices import why_not_row_wise
from lowtide.tracing.trace import FakeTraceError, trace, trace_once
from lowtide.units import format_bytes

Splits = tuple[Split, ...]
T = TypeVar("T")
_OpKey = tuple[object, ...]

# Parts of fewer rows than this are not tried: on an accelerator, matrix products of so few rows take longer per row.
_FEWEST_ROWS, _FEWEST_ROWS_ON_CPU = 128, 16
# The most parts of the loss, and ops of all slices, that are tried: every part adds ops to the graph, some twenty for
# the loss, and the time of tracing and planning grows with them.
_MOST_LOSS_PARTS, _MOST_TOKEN_OPS = 64, 12_000
# Parts of the loss and of token-wise modules in the first trace, from which peaks of fewer parts are interpolated.
_FIRST_PARTS = {"loss": 16, "tokens": 4}
_MOST_SEARCHED_OPS = 3_000  # above, the floor is estimated from the usual checkpoints
# Outputs and insides of modules below this share of the activations at the peak are not worth a split.
_LEAST_SHARE = 0.002
# Where other memory than that of the parts makes the peak, one part takes at most this share of the budget.
_SHARE_OF_BUDGET = 16
_PROBE_S = 2.0  # of searching for a floor
_LEAST_GAIN = 0.99  # parts that lower the floor by less than 1 % are not used


class _TokenInput(NamedTuple):
    """Input of a module that may be token-wise: what the proof of that, and the number of parts, depend on."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_rows(self) -> int:
        return self.shape[:-1].numel()


class SplitSearch:
    """The splits of one step. `limits` are those of the solver, `device` is that of `lowtide.trace`."""

    def __init__(self, step: TracedStep, limits: Limits, device: torch.device | str | None = None) -> None:
        self._step, self._plain, self._device = step, step.graph, device
        self.limits = limits
        self._ranks, self._is_asking = current(), False
        self._by_path = dict(step.model.named_modules(remove_duplicate=False))
        self.correction_bytes = 0  # by how much measured peaks were above those of the simulation
        self._peaks: dict[Splits, int] = {}
        self._graphs: dict[Splits, StepGraph] = {(): step.graph}
        self._corrected: dict[Splits, StepGraph] = {}

    def by_first(self, make: Callable[[], T], about: str) -> T:
        """The result of `make`, which runs on the lowest rank; the others run the traces that it asks for.

        If it raises, it raises on all ranks.
        """
        ranks, made, error = self._ranks, None, None
        if ranks.is_alone:
            return make()
        if ranks.is_first:
            self._is_asking = True
            try:
                made = make()
            except Exception as raised:
                if is_known_to_all(raised):
                    raise
                error = raised
            finally:
                self._is_asking = False
        while (asked := ranks.first(None, "step in parts to trace")) is not None:  # not on the lowest rank
            self._record(asked)
        with ranks.together(about):
            if error is not None:
                raise error
        return ranks.first(made, about)  # type: ignore[return-value]

    def solve(self, budget: int | str, *, names_floor: bool = True) -> Plan:
        """The fastest plan predicted within `budget`, with or without splits.

        Raises `InfeasibleBudgetError` if there is none, with the smallest budget that splits could meet if
        `names_floor`: finding it takes traces.
        """
        allowed = self._step.budget_bytes(budget)
        found: list[Plan] = []
        error: InfeasibleBudgetError | None = None
        try:
            found.append(self.limits.solve(self.corrected(), allowed))
        except InfeasibleBudgetError as raised:
            error = raised
        if self.limits.split and not (found and found[0].is_plain):
            found += self.plans(allowed)
        if found:
            return min(found, key=lambda plan: plan.extra_s)
        assert error is not None
        raise self.with_floor(error) if names_floor else error

    def with_floor(self, error: InfeasibleBudgetError) -> InfeasibleBudgetError:
        """The error for a budget that the plain step cannot meet, with what the split one could."""
        try:
            floor = self.floor_bytes
        except (LowtideError, RuntimeError) as raised:  # the split step cannot be traced: the plain one is reported
            if is_known_to_all(raised):
                raise
            return error
        if not floor or floor >= error.floor_bytes:
            return error
        head, *rest = str(error).splitlines()
        text = "\n".join([f"{head}; {format_bytes(floor)} with split=True", *rest])
        return InfeasibleBudgetError(text, floor if self.limits.split else error.floor_bytes)

    def plans(self, budget_bytes: int) -> list[Plan]:
        """Plans with splits that fit, the fastest predicted first."""
        found: list[Plan] = []
        for splits in self._chosen(budget_bytes - self.correction_bytes):
            with suppress(InfeasibleBudgetError):
                found.append(self.predicted(self.limits.solve(self.corrected(splits), budget_bytes)))
        return sorted(found, key=lambda plan: (plan.extra_s, plan.peak_bytes))

    def predicted(self, plan: Plan) -> Plan:
        """A plan of a split graph, with seconds and peak compared with the plain step, not the split one."""
        assert plan.graph is not None
        split_s = plan.graph.step_s - self._plain.step_s
        return replace(
            plan,
            step_s=self._plain.step_s,
            extra_s=max(0.0, plan.extra_s + split_s),
            lower_bound_s=max(0.0, min(plan.lower_bound_s + split_s, plan.extra_s + split_s)),
            plain_peak_bytes=simulate(self._plain).peak_bytes,
        )

    @cached_property
    def floor_bytes(self) -> int:
        """The smallest predicted peak of a plan with splits; 0 if nothing can be split.

        If the user has not asked for splits this is a hint in an error, and a few parts are enough for it: tracing
        hundreds of parts takes longer than everything else.
        """
        finest: Splits = ()
        for kind, first in _FIRST_PARTS.items():
            for most in self._numbers[kind][-1:]:
                finest = (*finest, *self._parts(kind, most if self.limits.split else min(most, first)))
        if not finest:
            return 0
        graph = self.graph(finest)
        if len(graph.ops) > _MOST_SEARCHED_OPS:
            return self._least_peak(finest)
        return search_for(graph, "eager", self.limits.host, _PROBE_S, self.limits.lossy).floor.peak_bytes

    def graph(self, splits: Splits) -> StepGraph:
        """The trace of the step with these splits, with measured costs if the plain step was measured."""
        if splits not in self._graphs:
            self._add(splits, self._record(splits)[0])
        return self._graphs[splits]

    def corrected(self, splits: Splits = ()) -> StepGraph:
        """`graph(splits)` with the memory that its simulation did not predict."""
        if splits not in self._corrected:
            graph = self.graph(splits)
            other_bytes = graph.other_bytes + self.correction_bytes
            self._corrected[splits] = replace(graph, other_bytes=other_bytes) if self.correction_bytes else graph
        return self._corrected[splits]

    def correct(self, num_bytes: int) -> None:
        """Set by how much measured peaks were above those of the simulation."""
        self.correction_bytes = num_bytes
        self._corrected.clear()

    def _record(self, splits: Splits) -> tuple[StepGraph, list[SplitForward], dict[str, _TokenInput]]:
        """The step with these splits, their runners, and the inputs of modules. All ranks trace it together."""
        if self._is_asking:
            self._ranks.first(splits, "step in parts to trace")
        with self._ranks.together("trace of a step in parts"), _noted_inputs(self._by_path) as seen:
            with splitting(self._step.model, splits, is_quiet=True) as runners:
                graph = self._traced()
        graph = with_common_costs(self._ranks, graph)
        if not self._ranks.is_first:
            self._add(splits, graph)
        return graph, runners, seen

    def _add(self, splits: Splits, graph: StepGraph) -> None:
        if splits in self._graphs:
            return
        if self._plain.is_measured and not graph.is_measured:
            graph = with_costs_of(graph, self._plain)
        self._graphs[splits] = replace(graph, splits=splits)

    def _traced(self) -> StepGraph:
        step = self._step
        given, options = (step.model, step.loss_fn, *step.args), {"optimizer": step.optimizer, "device": self._device}
        graph = None
        with suppress(FakeTraceError):
            graph = trace_once(*given, **options)
        if self._ranks.all(graph is not None, "trace of a step in parts on fake tensors") and graph is not None:
            return graph
        return trace(*given, **options)

    def _chosen(self, budget_bytes: int) -> list[Splits]:
        """The splits to solve for: the fewest parts that fit and finer ones, or those of the smallest peaks."""
        base: Splits = ()
        chosen: list[Splits] = []
        for kind, first in _FIRST_PARTS.items():
            numbers, parts = self._numbers[kind], functools.partial(self._parts, kind)
            if not numbers:
                continue
            whole, most = self._least_peak(base), min(first, numbers[-1])
            least = self._least_peak((*base, *parts(most)))
            if least - (whole - least) / most <= budget_bytes < least:  # smaller parts may fit
                most = numbers[-1]
                least = self._least_peak((*base, *parts(most)))
            if least > _LEAST_GAIN * whole:
                continue
            tried = [number for number in numbers if number <= most]
            number = self._fewest(base, (*base, *parts(most)), tried, budget_bytes)
            if number is not None:  # the trace of the finer parts exists
                return list(dict.fromkeys([*chosen, (*base, *parts(number)), (*base, *parts(most))]))
            small = [number for number in numbers if _SHARE_OF_BUDGET * (whole - least) <= number * budget_bytes]
            base = (*base, *parts(min(small, default=numbers[-1])))
            chosen.append(base)
        return chosen

    def _fewest(self, base: Splits, finest: Splits, numbers: Sequence[int], limit_bytes: int) -> int | None:
        """The fewest parts with a peak within `limit_bytes`, interpolated between one part and the most; None if none.

        Peaks fall with the size of a part until something else makes the peak, so a straight line lies above them.
        """
        whole, least = self._least_peak(base), self._least_peak(finest)
        for number in numbers:
            share = (1 / number - 1 / numbers[-1]) / (1 - 1 / numbers[-1])
            if least + share * (whole - least) <= limit_bytes:
                return number
        return None

    def _least_peak(self, splits: Splits) -> int:
        """The smallest simulated peak of the usual checkpoints: an upper bound of the floor, for little work."""
        if splits not in self._peaks:
            graph = self.graph(splits)
            plans = reference_plans(graph).values()
            peaks = [simulate(graph).peak_bytes, *(simulate(graph, plan).peak_bytes for plan in plans)]
            self._peaks[splits] = min(peaks)
        return self._peaks[splits]

    # What can be split.

    @cached_property
    def _numbers(self) -> dict[str, list[int]]:
        """Numbers of parts to try, powers of two, of the loss and of token-wise modules."""
        graph, rows = self._plain, self._rows
        calls = [graph.calls[call] for path in rows["tokens"] for call in graph.calls_by_path[path]]
        num_ops = 4 * sum(call.end - call.first for call in calls)  # forward, its replay and backward
        most = {"loss": _MOST_LOSS_PARTS, "tokens": _MOST_TOKEN_OPS // max(1, num_ops)}
        return {kind: self._powers(max(rows[kind].values(), default=0), most[kind]) for kind in rows}

    def _powers(self, num_rows: int, most: int) -> list[int]:
        most = min(most, num_rows // self._fewest_rows)
        return [1 << power for power in range(1, 20) if 1 << power <= most]

    @property
    def _fewest_rows(self) -> int:
        return _FEWEST_ROWS_ON_CPU if self._plain.hardware.name == "cpu" else _FEWEST_ROWS

    def _parts(self, kind: str, number: int) -> Splits:
        return tuple(Split(path, number, kind) for path in self._rows[kind])

    @cached_property
    def _rows(self) -> dict[str, dict[str, int]]:
        """The rows of output layers ("loss") and token-wise modules ("tokens") that can be split. Takes one trace."""
        rows = self._plausible_heads()
        number = max(self._powers(max(rows.values(), default=0), _FIRST_PARTS["loss"]), default=2)
        heads = tuple(Split(path, number) for path in rows)
        graph, runners, seen = self._record(heads)
        losses = {each.split.path: each.num_rows for each in runners if each.num_calls and not each.num_whole}
        if len(losses) == len(heads):
            self._add(heads, graph)
        return {"loss": losses, "tokens": self._token_wise(seen)}

    def _plausible_heads(self) -> dict[str, int]:
        """Linear layers outside of repeated blocks whose output matters at the peak, and about how many rows it has."""
        graph = self._plain
        found: dict[str, int] = {}
        counts = Counter(call.structure for call in graph.calls if call.structure >= 0)
        for path, calls in graph.calls_by_path.items():
            module = self._by_path.get(path)
            if not isinstance(module, nn.Linear) or why_not_head(module, self._step.model):
                continue
            if self._is_in_repeated(calls[0], counts):
                continue
            size = sum(graph.values[value].bytes for value in graph.calls[calls[0]].outputs)
            if size >= self._least_bytes:
                found[path] = size // (module.out_features * module.weight.element_size())
        return found

    def _is_in_repeated(self, call: int, counts: Counter[int]) -> bool:
        graph = self._plain
        return any(counts[graph.calls[each].structure] > 1 for each in graph.ancestors(call) if each != call)

    @cached_property
    def _least_bytes(self) -> int:
        plain = simulate(self._plain)
        return max(1, int(_LEAST_SHARE * (plain.peak_bytes - sum(self._plain.static_bytes.values()))))

    def _token_wise(self, seen: dict[str, _TokenInput]) -> dict[str, int]:
        """The outermost modules that treat every token alike and need more memory inside than for their output."""
        graph = self._plain
        found: dict[str, int] = {}
        proven: dict[object, bool] = {}
        for path, calls in graph.calls_by_path.items():
            module, facts = self._by_path.get(path), seen.get(path)
            if module is None or facts is None or any(path.startswith(f"{other}.") for other in found):
                continue
            call = graph.calls[calls[0]]
            if next(module.children(), None) is None or 2 * (call.end - call.first) > graph.num_forward:
                continue  # a single layer, which makes little beside its output; or more than half of the forward
            made = [value for op in graph.ops[call.first : call.end] for value in op.outputs]
            inside = sum(graph.values[value].bytes for value in made if value not in call.outputs)
            least = max(2 * sum(graph.values[value].bytes for value in call.outputs), self._least_bytes)
            if inside < least or facts.num_rows < 2:
                continue
            key = (type(module), call.structure if call.structure >= 0 else path, facts)
            if key not in proven:
                given = facts.shape, facts.dtype, self._fewest_rows
                proven[key] = not why_not_row_wise(module, module.forward, *given)
            if proven[key]:
                found[path] = facts.num_rows
        return found


@contextmanager
def _noted_inputs(modules: dict[str, nn.Module]) -> Iterator[dict[str, _TokenInput]]:
    """A context that records the input of each module that is called with one floating-point tensor alone."""
    seen: dict[str, _TokenInput] = {}
    others: set[str] = set()

    def noter(path: str) -> Any:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            tokens = args[0] if len(args) == 1 and not kwargs else None
            if isinstance(tokens, Tensor) and tokens.dim() >= 2 and tokens.is_floating_point():
                seen[path] = _TokenInput(tokens.shape, tokens.dtype)
            elif any(True for _ in tensors_in((args, kwargs))):
                others.add(path)

        return note

    hooks = [module.register_forward_pre_hook(noter(path), with_kwargs=True) for path, module in modules.items()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
        for path in others:
            seen.pop(path, None)


def with_costs_of(predicted: StepGraph, measured: StepGraph) -> StepGraph:
    """`predicted` with seconds, workspaces, hardware and other memory taken from `measured`, a graph of the same model.

    A split step has nearly all ops of the plain step, and measuring it would take as long again for each number of
    parts that is tried. Ops that both graphs have, by their call, name and sizes, get the measured seconds. Each other
    op gets the seconds per FLOP, or per byte, of measured ops with its name. An op with a new name gets the seconds per
    FLOP of all measured ops, or without FLOPs its predicted seconds, scaled by measured over predicted seconds of all
    common ops.

    This misses kernels that are slower per row for few rows. `fit` runs such plans for real before it keeps one.
    """
    known = dict(zip(_op_keys(measured), measured.ops, strict=True))
    matches = [known.get(key) for key in _op_keys(predicted)]
    pairs = [(op, match) for op, match in zip(predicted.ops, matches, strict=True) if match is not None]
    predicted_s = sum(op.seconds for op, _ in pairs)
    scale = sum(match.seconds for _, match in pairs) / predicted_s if predicted_s else 1.0
    rates = _MeasuredRates(measured)
    ops = tuple(
        rates.applied(op, _moved_bytes(predicted, op), scale)
        if match is None
        else replace(op, seconds=match.seconds, host_s=match.host_s, workspace_bytes=match.workspace_bytes)
        for op, match in zip(predicted.ops, matches, strict=True)
    )
    graph = replace(predicted, ops=ops, hardware=measured.hardware, other_bytes=measured.other_bytes)
    simulated_s = measured.lines.step_s
    factor = measured.step_s / simulated_s if simulated_s else 1.0
    return replace(graph, step_s=factor * graph.lines.step_s, is_measured=False)


class _MeasuredRates:
    """Seconds of measured ops by their name: for each FLOP or byte on the device, and for each op on the host."""

    def __init__(self, graph: StepGraph) -> None:
        self._flops, self._bytes, self._seconds = Counter[str](), Counter[str](), dict[str, float]()
        self._numbers, self._host_s = Counter[str](), dict[str, float]()
        for op in graph.ops:
            self._flops[op.name] += op.flops
            self._bytes[op.name] += _moved_bytes(graph, op)
            self._seconds[op.name] = self._seconds.get(op.name, 0.0) + op.seconds
            self._host_s[op.name] = self._host_s.get(op.name, 0.0) + op.host_s
            self._numbers[op.name] += 1
        with_flops = [op for op in graph.ops if op.flops]
        num_flops = sum(op.flops for op in with_flops)
        self._s_per_flop = sum(op.seconds for op in with_flops) / num_flops if num_flops else 0.0
        self._mean_host_s = sum(self._host_s.values()) / max(1, len(graph.ops))

    def applied(self, op: Op, moved_bytes: int, scale: float) -> Op:
        """An op that was not measured, with seconds like those that were; `scale` is for new names."""
        name = op.name
        host_s = self._host_s[name] / self._numbers[name] if self._numbers[name] else self._mean_host_s
        if op.flops and self._flops[name]:
            seconds = op.flops * self._seconds[name] / self._flops[name]
        elif op.flops and self._s_per_flop:
            seconds = op.flops * self._s_per_flop
        elif not op.flops and self._bytes[name]:
            seconds = moved_bytes * self._seconds[name] / self._bytes[name]
        else:
            seconds = op.seconds * scale
        return replace(op, seconds=seconds, host_s=host_s)


def _moved_bytes(graph: StepGraph, op: Op) -> int:
    return sum(graph.values[value].bytes for value in (*op.inputs, *op.outputs, *op.mutates))


def _op_keys(graph: StepGraph) -> Iterable[_OpKey]:
    """For each op what identifies it in another graph: its call, or that of its forward op, its name and sizes."""
    seen = Counter[_OpKey]()
    for index, op in enumerate(graph.ops):
        own = op.call if index < graph.num_forward or op.forward_op < 0 else graph.ops[op.forward_op].call
        call = (graph.calls[own].path, graph.nths[own]) if own >= 0 else ("", -1)
        sizes = tuple(graph.values[value].bytes for value in op.outputs)
        key: _OpKey = (index < graph.num_forward, *call, op.name, op.flops, sizes, _moved_bytes(graph, op))
        yield (*key, seen[key])
        seen[key] += 1
