"""The handle that `lowtide.compile` puts on a model, with the same names as the one that `lowtide.fit` returns.

`lowtide.handle_of(model)` returns it. The handle reads its numbers from the model's `Session`, which plans in the
first step, so most of them are None or empty before that. It holds no reference to the model.

For `handle.plan` and reports, `joined_step` shows the calls of a step as one graph: the forwards in order, then the
backwards from the last call to the first. The output of a call lives until its backward begins, as the input of the
next call. What is outside of the compiled graphs (embedding, head, loss) has no ops there; its memory is part of
`other_bytes`. The joined graph is for display only: `variant_choice` decides without it.
"""

from __future__ import annotations

import itertools
import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from torch import nn

from lowtide import _compat
from lowtide.compiled.backend import SESSIONS, BypassWatch
from lowtide.compiled.call_sequences import CallSequence
from lowtide.compiled.other_memory import ForwardHook
from lowtide.compiled.planned_graph import PlannedGraph
from lowtide.compiled.session import Session
from lowtide.compiled.variant_choice import torch_way
from lowtide.errors import LowtideError
from lowtide.graph.segments import with_structures
from lowtide.graph.step_graph import Call, Op, Save, StepGraph, Value
from lowtide.plans.step_plan import Frontier, Plan, Reference
from lowtide.reports.page import Report
from lowtide.simulator.timeline import Timeline, simulate
from lowtide.solvers.candidate import with_predictions
from lowtide.solvers.shared_budget import Variant
from lowtide.split.split_forward import SplitHead
from lowtide.units import counted, format_bytes, format_seconds


@dataclass(frozen=True)
class CompiledCall:
    """One call of a compiled graph in a step. `num_kept_ops` is None where torch's own partitioner decides."""

    graph: int  # numbered from 0, in the order of their first calls
    saved_bytes: int
    num_kept_ops: int | None
    moved_bytes: int


@dataclass(frozen=True)
class CompiledStats:
    """What the calls of the last step save, and what the compiled engine did so far. Empty before the first step.

    `peak_bytes` and the bytes of `calls` are predicted. `stored_bytes` are in host memory now; so far `moved_bytes`
    were copied there, and compute waited `waited_s` for copies.
    """

    calls: tuple[CompiledCall, ...] = ()
    peak_bytes: int = 0
    stored_bytes: int = 0
    moved_bytes: int = 0
    waited_s: float = 0.0
    compiling_s: float = 0.0
    planning_s: float = 0.0

    @property
    def num_graphs(self) -> int:
        return len({call.graph for call in self.calls})

    @property
    def saved_bytes(self) -> int:
        return sum(call.saved_bytes for call in self.calls)

    def __str__(self) -> str:
        moved = f", {format_bytes(self.moved_bytes)} moved so far" if self.moved_bytes else ""
        return (
            f"{len(self.calls)} calls of {self.num_graphs} compiled graphs: {format_bytes(self.saved_bytes)} saved, "
            f"peak {format_bytes(self.peak_bytes)} predicted; {format_seconds(self.compiling_s)} of compiling, "
            f"{format_seconds(self.planning_s)} of planning{moved}"
        )


class CompiledHandle:
    """A budget on a compiled model. `enabled` switches it off and on; `remove()` takes the compiled code off the model.

    With `enabled = False` the model stays compiled and saves what torch's own partitioner chooses, whatever the budget.
    Switch between steps: after a backward, before the next forward.
    """

    def __init__(
        self,
        session: Session,
        modules: list[nn.Module],
        hook: ForwardHook | BypassWatch | None,
        head: SplitHead | None = None,
    ) -> None:
        self.session, self.split_head = session, head
        self.is_removed = False
        self._compiled = [weakref.ref(module) for module in modules]
        self._hook = hook

    @property
    def enabled(self) -> bool:
        return self.session.enabled and not self.is_removed

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        if self.is_removed and enabled:
            raise LowtideError("this handle was removed: call lowtide.compile(model, ...) again")
        self.session.enable(enabled)
        if self.split_head is not None:
            self.split_head.enabled = enabled

    def remove(self) -> None:
        """Let the model run uncompiled again. Graphs whose forward has run still run their backward.

        What `torch.compile(backend="lowtide")` returned stays compiled and saves what torch's own partitioner chooses.
        """
        if self.is_removed:
            return
        self.session.enable(False)
        for module in filter(None, (reference() for reference in self._compiled)):
            _compat.uncompile(module)
        if self._hook is not None:
            self._hook.remove()
        if self.split_head is not None:
            self.split_head.remove()
        SESSIONS.pop(self.session, None)
        self.is_removed = True

    def hand_over(self, modules: list[nn.Module]) -> None:
        """Warn if some of these are compiled for this handle: from now on they are compiled for another model.

        They run for that model's budget, also when this model calls them.
        """
        kept = [reference for reference in self._compiled if reference() not in modules]
        num_taken, self._compiled = len(self._compiled) - len(kept), kept
        if num_taken and not self.is_removed:
            self.session.warn_unplanned(
                f"{counted(num_taken, 'module')} of a model that was compiled within {self.session.budget} "
                "became part of a model that was compiled later, and now follow the budget of that one only. Compile "
                "one model that contains both, or give each of them blocks of its own",
            )

    @property
    def plan(self) -> Plan | None:
        """The plan of the last step, with its graph; several compiled graphs are joined. None before the first step."""
        sequence = self.session.current
        return None if sequence is None else plan_of(self.session, sequence)

    @property
    def measured_slowdown(self) -> float | None:
        """Time over that of the same compile without a budget, as a share: measured on an accelerator, else None.

        The step is timed as a whole; the time without a budget is that of calls which run torch's own choice. None
        until each graph has run both.
        """
        session, sequence, step_s = self.session, self.session.current, self.measured_step_s
        if sequence is None or step_s is None:
            return None
        plain_s = step_s
        for graph, variant in zip(session.instances_of(sequence), sequence.choice.variants, strict=True):
            own_s, fastest_s = (session.chooser.seconds_of(graph, each) for each in (variant, graph.variants[0]))
            if own_s is None or fastest_s is None:
                return None
            plain_s -= own_s - fastest_s
        return step_s / plain_s - 1 if plain_s > 0 else None

    @property
    def measured_step_s(self) -> float | None:
        """Measured seconds of forward and backward under the present choice; None on the CPU, and before there are."""
        sequence = self.session.current
        return None if sequence is None else sequence.seconds_of(sequence.choice)

    @property
    def measured_peak_bytes(self) -> int | None:
        """The peak of the last measured step that ran the present choice; None before there is one."""
        sequence = self.session.current
        return sequence.peaks[-1] if sequence is not None and sequence.peaks else None

    def stats(self) -> CompiledStats:
        """The calls of a step and what they save (predicted), bytes moved and seconds spent (measured)."""
        sequence, watch = self.session.current, self.session.watch
        calls: list[CompiledCall] = []
        if sequence is not None:
            for index, (variant, moved) in zip(sequence.graph_indices, sequence.choice.runs, strict=True):
                num_kept = None if variant.keeps is None else len(variant.keeps)
                calls.append(CompiledCall(index, variant.saved_bytes, num_kept, sum(moved)))
        store = None if self.session.store is None else self.session.store.stats()
        return CompiledStats(
            tuple(calls),
            peak_bytes=0 if sequence is None else sequence.choice.peak_bytes,
            stored_bytes=0 if store is None else store.held_bytes,
            moved_bytes=0 if store is None else store.moved_down_bytes,
            waited_s=0.0 if store is None else store.waited_s,
            compiling_s=watch.compiling_s,
            planning_s=watch.planning_s,
        )

    def report(
        self, path: str | os.PathLike[str], *, frontier: Frontier | None = None, time_limit_s: float = 5.0
    ) -> Report:
        """Write a report, with the measured peak where there is one. A `LowtideError` before the first step.

        The formats are those of `Plan.report`. The page shows memory over the step, the trade-off with torch's
        `activation_memory_budget` and checkpoints beside the plan, and layers; `.md` of a step of several compiled
        graphs is what this handle prints and a table of calls.
        """
        plan, sequence = self.plan, self.session.current
        if plan is None or sequence is None:
            raise LowtideError(f"no report: {describe(self.session)}")
        if Path(path).suffix.lower() == ".md" and len(sequence.numbers) > 1:
            return self._write_calls(Path(path))
        return plan.report(
            path,
            measured_peak_bytes=self.measured_peak_bytes,
            measured_step_s=self.measured_step_s,
            frontier=frontier,
            references=references(self.session, sequence, plan),
            time_limit_s=time_limit_s,
        )

    def _write_calls(self, path: Path) -> Report:
        start, text = time.monotonic(), str(self)
        lines = ["# Compiled step", "", "```text", text, "```", "", "| call | graph | saved | kept ops | moved |"]
        lines += ["|---|---|---|---|---|"]
        for number, call in enumerate(self.stats().calls):
            kept = "torch's choice" if call.num_kept_ops is None else call.num_kept_ops
            saved, moved = format_bytes(call.saved_bytes), format_bytes(call.moved_bytes)
            lines.append(f"| {number} | {call.graph} | {saved} | {kept} | {moved} |")
        path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
        return Report(path, path.stat().st_size, time.monotonic() - start, text.splitlines()[0])

    def __str__(self) -> str:
        """What `explain_compiled` prints for the model."""
        return "removed: the model runs uncompiled" if self.is_removed else describe(self.session)


NOTHING_YET = "nothing compiled for training yet: run a step first"


def describe(session: Session) -> str:
    """The budget, the peak, the slowdown and the variant of every call, as text."""
    sequence = session.current
    if sequence is None:
        return session.unplanned or NOTHING_YET
    choice, instances = sequence.choice, session.instances_of(sequence)
    step_s = max(sum(graph.step_s for graph in instances), 1e-12)
    peaks = sequence.peaks
    lines = [
        f"{counted(len(instances), 'call')} of {counted(len(set(instances)), 'compiled graph')} within "
        f"{format_bytes(session.budget_bytes)}",
        f"  peak    {format_bytes(choice.peak_bytes)} predicted"
        + (f", {format_bytes(peaks[-1])} measured" if peaks else ""),
        f"  slower  {100 * choice.extra_s / step_s:.1f} % predicted, at least "
        f"{100 * choice.lower_bound_s / step_s:.1f} % with any choice",
        f"  took    {session.watch}",
    ]
    if choice.moves_any:
        lines.append(f"  moved   {format_bytes(sum(map(sum, choice.moved)))} to the host and back")
    for (index, variant), run in itertools.groupby(zip(sequence.graph_indices, choice.variants, strict=True)):
        what = "as torch decides" if variant.keeps is None else f"{counted(len(variant.keeps), 'op')} kept"
        what += ", indices recomputed" if variant.replays_indices else ""
        lines.append(f"  {len(list(run))} x graph {index}: {format_bytes(variant.saved_bytes)} saved each, {what}")
    if session.unplanned is not None:
        lines.append(f"  beside  {session.unplanned}")
    return "\n".join(lines)


# The plan of a step.

_NOTE = "only the compiled blocks are shown op by op; the memory of everything else is in 'other'"


def plan_of(session: Session, sequence: CallSequence) -> Plan:
    """The plan of a sequence, with its graph; several calls are joined.

    Memory outside of several calls is set so that the plan has the peak of the choice.
    """
    instances, choice = session.instances_of(sequence), sequence.choice
    steps = [graph.step for graph in instances if graph.step is not None]
    if len(steps) == 1:
        (step,), other_bytes = steps, session.chooser.start_bytes(instances)
    else:
        step = joined_step(steps, _modules_of(session, sequence))
        other_bytes = max(0, choice.peak_bytes - _simulated(step, instances, choice.variants).peak_bytes)
    step = replace(step, other_bytes=other_bytes)
    return with_predictions(_simulated(step, instances, choice.variants), session.budget_bytes, choice.lower_bound_s)


def references(session: Session, sequence: CallSequence, plan: Plan) -> tuple[Reference, ...]:
    """What torch's partitioner does at each fraction, simulated on the graph of `plan_of(session, sequence)`."""
    assert plan.graph is not None
    instances = session.instances_of(sequence)
    found = []
    for fraction in sorted({each for graph in instances for each in graph.torch_ways}, reverse=True):
        timeline = _simulated(plan.graph, instances, [torch_way(graph, fraction) for graph in instances])
        found.append(Reference(f"activation_memory_budget {fraction:g}", timeline.peak_bytes, timeline.extra_s))
    return tuple(found)


def _modules_of(session: Session, sequence: CallSequence) -> list[tuple[str, str]]:
    """Path and class of the module that each call runs; a part of the model between graph breaks has neither."""
    called = enumerate(sequence.graph_indices)
    modules = [(session.called_modules.get(position, ("", "")), index) for position, index in called]
    return [module if module[0] else (f"graph {index}", "Graph") for module, index in modules]


def _simulated(step: StepGraph, instances: list[PlannedGraph], variants: list[Variant]) -> Timeline:
    """A step, joined from the calls `instances`, that saves what these variants save."""
    saved: list[int] = []
    first = 0  # op of the call in the joined step
    for graph, variant in zip(instances, variants, strict=True):
        saved += [first + op for op in (graph.default if variant.keeps is None else variant.keeps)]
        first += 0 if graph.step is None else graph.step.num_forward
    return simulate(step, Plan(engine="compiled", keeps=tuple(saved), budget_bytes=1))


def joined_step(steps: Sequence[StepGraph], modules: Sequence[tuple[str, str]]) -> StepGraph:
    """The calls `steps` as one step. `modules` are their paths and classes."""
    forwards = [step.num_forward for step in steps]
    backwards = [len(step.ops) - step.num_forward for step in steps]
    first_forward = [0, *accumulate(forwards)]
    num_forward = first_forward[-1]
    first_backward = [num_forward + sum(backwards[index + 1 :]) for index in range(len(steps))]
    end = num_forward + sum(backwards)
    ops: list[Op] = [Op("", -1, 0.0, 0, (), ())] * end
    values: list[Value] = []
    saves: list[Save] = []
    calls: list[Call] = []
    for index, (step, (path, kind)) in enumerate(zip(steps, modules, strict=True)):
        joined = _Joined(step, first_forward[index], first_backward[index], len(values), len(calls) + 1)
        outputs = (n for n, value in enumerate(step.values) if 0 <= value.born < step.num_forward < value.dropped)
        first = first_forward[index]
        made = tuple(number + len(values) for number in outputs)
        calls.append(Call(path, kind, -1, first, first + step.num_forward, (), made))
        for number, op in enumerate(step.ops):
            ops[joined.op(number)] = joined.as_op(op)
        # Its gradient goes to the call before, whose backward runs next.
        gradient_until = first_backward[index - 1] + 1 if index else end
        values += [joined.value(value, gradient_until, end) for value in step.values]
        saves += map(joined.save, step.saves)
        calls += [joined.call(call, path) for call in step.calls]
    return StepGraph(
        ops=tuple(ops),
        num_forward=num_forward,
        values=tuple(values),
        saves=tuple(saves),
        calls=tuple(with_structures(ops[:num_forward], calls, values, saves)),
        hardware=steps[0].hardware,
        step_s=sum(step.step_s for step in steps),
        notes=(_NOTE,),
        versions=steps[0].versions,
    )


@dataclass(frozen=True)
class _Joined:
    """Maps the numbers of ops, values and calls in one call's graph to those of the joined step, by offsets."""

    step: StepGraph
    forward: int
    backward: int
    first_value: int
    first_call: int

    def op(self, number: int) -> int:
        """The joined number of an op, or of a position: the one before the first op of the backward counts to it."""
        is_forward = number < self.step.num_forward
        return number + (self.forward if is_forward else self.backward - self.step.num_forward)

    def _values(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(number + self.first_value for number in numbers)

    def _call_of(self, number: int) -> int:
        return number + self.first_call if number >= 0 else self.first_call - 1  # the call of the whole graph

    def as_op(self, op: Op) -> Op:
        return replace(
            op,
            call=self._call_of(op.call),
            inputs=self._values(op.inputs),
            outputs=self._values(op.outputs),
            mutates=self._values(op.mutates),
            forward_op=self.op(op.forward_op) if op.forward_op >= 0 else -1,
        )

    def value(self, value: Value, gradient_until: int, end: int) -> Value:
        step = self.step
        if value.born < 0 or value.kind == "gradient":
            dropped = end
        elif value.dropped < len(step.ops):
            # A position is the end of an op: the last one of the forward lies before the other calls' ops.
            dropped = self.op(value.dropped - 1) + 1
        else:
            dropped = self.backward if value.born < step.num_forward else gradient_until
        born = self.op(value.born) if value.born >= 0 else -1
        return replace(value, born=born, dropped=max(dropped, born + 1))

    def save(self, save: Save) -> Save:
        used = self.op(save.used - 1) + 1 if save.used >= 0 else -1
        return replace(
            save,
            value=save.value + self.first_value,
            call=self._call_of(save.call),
            made=self.op(save.made - 1) + 1,
            read=self.op(save.read) if save.read >= 0 else -1,
            released=self.op(save.released - 1) + 1,
            used=used,
        )

    def call(self, call: Call, path: str) -> Call:
        return replace(
            call,
            path=f"{path}.{call.path}".strip("."),
            parent=self._call_of(call.parent),
            first=self.forward + call.first,
            end=self.forward + call.end,
            inputs=self._values(call.inputs),
            outputs=self._values(call.outputs),
        )
